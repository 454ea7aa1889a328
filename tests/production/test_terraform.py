"""Terraform's root `production` against the local cloud, and a job on the servers and nodes that it created."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from everstep import sdk
from infra.local_cloud.environment import aws_variables
from tests.deployer import POLICIES, check_uses, enforced
from tests.e2e.jobs import SCRIPTS
from tests.postgresql import PostgreSql
from tests.terraform import (
    IMAGE,
    SOURCES,
    Terraform,
    check_group,
    check_policies,
    needs_provider,
    needs_terraform,
    scripts,
    terraform_of,
)
from tests.unit.local_cloud.served import ServedAws, eventually, served_aws

PORT = 8443
ZONES = ["us-east-1a", "us-east-1b"]
FLEET, SERVERS, BUCKET = "everstep-main", "everstep-servers", "everstep-123456789012-us-east-1"
IDLE = "#!/bin/sh\nexec sleep 10000\n"
SECONDS = 600.0
BOUNDARY = "arn:aws:iam::123456789012:policy/boundary"

ACCOUNT = "us-east-1:123456789012"
BUS = f"arn:aws:events:{ACCOUNT}:event-bus/jobs"
SECRET = f"arn:aws:secretsmanager:{ACCOUNT}:secret:data-abcdef"
FEATURES: Any = {
    "event_bus_arns": [BUS],
    "job_secret_arns": [SECRET],
    "server_options": ["--keep events=365"],
}
"""Terraform variables that enable all optional features."""

pytestmark = [pytest.mark.production, needs_terraform, needs_provider]


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[ServedAws]:
    with served_aws(tmp_path) as served:
        yield served


@pytest.fixture
def database() -> Iterator[str]:
    """Yield the URL of a PostgreSQL database, which takes the place of RDS, because the local cloud runs no RDS."""
    server = PostgreSql()
    try:
        with server.database(is_migrated=False) as url:
            yield url
    finally:
        server.close()


@pytest.fixture
def production(aws: ServedAws, tmp_path: Path) -> Iterator[Terraform]:
    """Apply the root module with the documented rights, and yield it. Its fleet and its two servers do nothing yet."""
    policy = POLICIES["production"]
    certificate = aws.client("acm").request_certificate(DomainName="everstep.example.com")["CertificateArn"]
    with enforced(aws, policy) as (url, made):
        terraform = terraform_of("production", url, aws.keys, tmp_path)
        terraform.run("validate")
        try:
            apply(terraform, certificate)
            yield terraform
        finally:
            terraform.destroy()
        check_uses(policy, made)


def apply(terraform: Terraform, certificate: str) -> None:
    terraform.apply(
        region="us-east-1",
        zones=ZONES,
        has_nat=True,
        domain_name="everstep.example.com",
        certificate_arn=certificate,
        client_cidrs=["10.0.0.0/8"],
        image_id=IMAGE,
        alarm_emails=["operators@example.com"],
        is_protected=False,
        server_user_data=IDLE,
        node_user_data=IDLE,
        fleets={"main": {"zone": ZONES[0], "instance_type": "c7i.large", "image_id": IMAGE, "max_nodes": 4}},
    )


@pytest.mark.timeout(1800)
def test_an_installation_is_applied_runs_a_job_is_updated_and_destroyed(
    production: Terraform, aws: ServedAws, database: str, tmp_path: Path
) -> None:
    production.require_no_changes()
    resources = production.resources()
    check_policies(resources, has_kms=True)
    check_group(aws, FLEET)
    check_database(resources["module.database.aws_db_instance.this"])
    idle = aws.in_service(SERVERS, 2)

    planned = production.planned(server_user_data=None, node_user_data=None, **FEATURES)
    for script in scripts(planned).values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "systemctl start --no-block everstep-" in script
    check_features(planned)
    check_password(aws, resources["module.database.aws_db_instance.this"], tmp_path / "password")

    production.apply(server_user_data=server_script(resources, aws, database, tmp_path), permissions_boundary=BOUNDARY)
    production.require_no_changes()
    eventually(lambda: not set(idle) & set(aws.members(SERVERS)), timeout_seconds=SECONDS)
    urls = [
        f"http://{aws.instance(server)['PrivateIpAddress']}:{PORT}" for server in sorted(aws.in_service(SERVERS, 2))
    ]
    for url in urls:
        eventually(partial(is_ready, url), timeout_seconds=SECONDS)

    secret = aws.client("secretsmanager").get_secret_value(SecretId="everstep/admin-token")["SecretString"]
    with closing(sdk.client(urls[0], secret)) as client:
        token = client.create_join_token(FleetName=FLEET)["JoinToken"]
        production.apply(node_user_data=node_script(urls, token))
        client.create_fleet(FleetName=FLEET, AutoScalingGroupName=FLEET, MinNodeCount=2)
        run_job(client)
        prefix = "projects/default/jobs/first/run="
        stored = aws.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
        assert any("/output/gen=1/rank=1/" in each["Key"] for each in stored)
        client.delete_fleet(FleetName=FLEET)
        eventually(lambda: aws.members(FLEET) == [], timeout_seconds=SECONDS)


def check_features(planned: Any) -> None:
    """Check that the servers use the features of `FEATURES`, may use them, and reach their services."""
    script = scripts(planned)["module.servers.aws_launch_template.this"]
    (options,) = (line for line in script.splitlines() if line.startswith("SERVER_OPTIONS="))
    exports = ["--export-events", BUS]
    assert options.partition("=")[2].split()[-4:] == [*exports, "--keep", "events=365"]

    resources = dict[str, str]()
    for role in ("server", "node"):
        policy = json.loads(planned[f'module.identity.aws_iam_role_policy.this["{role}"]']["policy"])
        resources |= {f"{role} {each['Sid']}": each["Resource"] for each in policy["Statement"]}
    assert resources["server EventsToBuses"] == BUS
    assert resources["node SecretsOfJobs"] == SECRET
    endpoints = {values["service_name"] for address, values in planned.items() if "endpoint.interface" in address}
    assert "com.amazonaws.us-east-1.events" in endpoints


def check_database(values: Any) -> None:
    """Check the settings that keep the database available and inaccessible to others."""
    assert values["multi_az"]
    assert values["storage_encrypted"]
    assert not values["publicly_accessible"]
    assert values["backup_retention_period"] == 14
    assert values["manage_master_user_password"]
    assert values.get("password") is None


def check_password(aws: ServedAws, values: Any, file: Path) -> None:
    """Check that the program of the servers writes RDS's password as libpq reads it, for its owner only."""
    (secret,) = values["master_user_secret"]
    program = SOURCES / "production" / "database_password.py"
    subprocess.run(
        [sys.executable, "-P", program, "us-east-1", secret["secret_arn"], file],
        env={**os.environ, **aws_variables(aws.url, aws.keys)},
        check=True,
    )
    stored = aws.client("secretsmanager").get_secret_value(SecretId=secret["secret_arn"])["SecretString"]
    password = json.loads(stored)["password"].replace("\\", "\\\\").replace(":", "\\:")
    assert file.read_text() == f"*:*:*:*:{password}\n"
    assert file.stat().st_mode & 0o777 == 0o600


def server_script(resources: Any, aws: ServedAws, database: str, directory: Path) -> str:
    """Return user data that starts a server with the settings of the installation, but with the test's database."""
    queue = resources["module.events.aws_sqs_queue.this"]["url"]
    return f"""#!/bin/sh
exec everstep server --migrate --mode local --aws-endpoint-url {aws.url} --aws-keys-file {directory / "keys.json"} \\
  --state-dir "$EVERSTEP_STATE_DIR/server" --bucket {BUCKET} --host "$EVERSTEP_ADDRESS" --port {PORT} \\
  --events-queue-url {queue} --secrets-prefix everstep/ --server-id {"0" * 32} --database-url '{database}'
"""


def node_script(urls: list[str], token: str) -> str:
    """Return user data that starts an agent.

    The local cloud has no load balancer, so agents receive the address of each server.
    """
    return f"""#!/bin/sh
export EVERSTEP_JOIN_TOKEN={token} EVERSTEP_RANK_USER=$(id -u) EVERSTEP_NODE_MEMORY_BYTES={256 * 1024**2}
exec everstep agent {" ".join(f"--control-plane-url {url}" for url in urls)}
"""


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/ready", timeout=10, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def run_job(client: Any) -> None:
    """Train on two nodes to the end."""
    client.create_training_job(
        TrainingJobName="first",
        Source=client.upload_source(Directory=SCRIPTS),
        EntryPoint="train.py",
        FleetName=FLEET,
        NodeCount=2,
        HyperParameters={"adapter": "ddp", "steps": "6"},
    )

    def ended() -> Any:
        job = client.describe_training_job(TrainingJobName="first")
        return job["TrainingJobStatus"] in ("Completed", "Failed", "Stopped") and job

    job = eventually(ended, timeout_seconds=SECONDS)
    assert job["TrainingJobStatus"] == "Completed", json.dumps(job, default=str)
