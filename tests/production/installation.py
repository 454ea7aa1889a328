"""Creates the AWS resources of a cluster with Terraform's root `production`.

The cluster's two servers, PostgreSQL and HAProxy run as processes of this machine, so that faults can kill and freeze
them. Terraform's group of servers therefore stays empty, and its database and load balancer receive no requests.
"""

from __future__ import annotations

from pathlib import Path

from everstep.host.local_keys import LocalKeys
from infra.local_cloud.environment import REGION, local_client
from infra.local_cloud.up import AVAILABILITY_ZONE, FLEET, IMAGE, INSTANCE_TYPE, MAX_NODES
from tests.terraform import Terraform, terraform_of

IDLE = "#!/bin/sh\nexec sleep 10000\n"
NO_SERVERS = 'module "servers" {\n  server_count = 0\n}\n'


class TerraformInstallation:
    """Implements `infra.local_cloud.up.Installation`.

    Args:
        folder: existing folder for the copy of the Terraform files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._terraform: Terraform | None = None

    def create(self, aws_url: str, keys: LocalKeys) -> str:
        """Apply the root module with a fleet whose nodes do nothing yet (see `Installation.create`)."""
        certificates = local_client("acm", aws_url, keys)
        certificate = certificates.request_certificate(DomainName="everstep.example.com")["CertificateArn"]
        self._terraform = terraform = terraform_of("production", aws_url, keys, self._folder)
        (terraform.folder / "servers_override.tf").write_text(NO_SERVERS)
        terraform.apply(
            region=REGION,
            zones=[AVAILABILITY_ZONE, f"{REGION}b"],
            domain_name="everstep.example.com",
            certificate_arn=certificate,
            client_cidrs=["10.0.0.0/8"],
            image_id=IMAGE,
            is_protected=False,
            server_user_data=IDLE,
            node_user_data=IDLE,
            fleets={
                FLEET: {
                    "zone": AVAILABILITY_ZONE,
                    "instance_type": INSTANCE_TYPE,
                    "image_id": IMAGE,
                    "max_nodes": MAX_NODES,
                }
            },
        )
        queue: str = terraform.resources()["module.events.aws_sqs_queue.this"]["url"]
        return queue

    def set_node_script(self, user_data: str) -> None:
        """Apply the root module again with this user data (see `Installation.set_node_script`)."""
        assert self._terraform is not None, "create comes first"
        self._terraform.apply(node_user_data=user_data)
