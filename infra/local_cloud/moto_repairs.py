"""Corrects answers of moto where AWS's differ. Otherwise, `terraform plan` would show changes after an apply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final

from moto.core.config import default_user_config
from moto.core.responses import ActionResult
from moto.ec2.models import EC2Backend
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.utils import convert_tag_spec
from moto.iam.responses import IamResponse
from moto.rds.models import DBParameterGroup
from moto.s3.models import FakeDeleteMarker, FakeKey
from moto.servicequotas.models import ServiceQuotasBackend
from moto.sqs.models import Queue

VCPU_QUOTA: Final = 3840.0
"""Value of each quota of EC2: enough for twenty p5.48xlarge instances. The value is invented."""
VCPU_QUOTAS: Final = {
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    "L-1945791B": "Running On-Demand Inf instances",
    "L-2C3B7624": "Running On-Demand Trn instances",
    "L-417A185B": "Running On-Demand P instances",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
}
"""EC2's quotas of running instances by code. Source: Amazon EC2 User Guide."""


def repair() -> None:
    """Replace methods of moto until this process ends. Must be called once."""
    _describe_rules_between_groups()
    _keep_tags_of_templates_apart()
    _tag_volumes_and_network_interfaces()
    _write_policies_compactly()
    _name_the_source_of_database_parameters()
    _delete_markers_with_their_bucket()
    _hide_digests_of_objects_that_kms_encrypts()
    _permit_all_simulated_actions()
    _add_quotas_of_ec2()
    # Make moto load the IAM policies that AWS manages. moto reads this setting at the first call of IAM.
    default_user_config["iam"] = {"load_aws_managed_policies": True}


def _describe_rules_between_groups() -> None:
    """Make moto return the description of a rule whose source is another security group."""

    def description(rule: SecurityGroupRule) -> str | None:
        found: str | None = rule.ip_range.get("Description") or rule.source_group.get("Description")
        return found

    SecurityGroupRule.description = property(description)


def _keep_tags_of_templates_apart() -> None:
    """Store a launch template's tags in the template, not in its first version."""
    create = EC2Backend.create_launch_template

    def create_launch_template(
        self: EC2Backend, name: str, description: str, data: dict[str, Any], tag_spec: dict[str, Any]
    ) -> Any:
        tags = [each for each in data.pop("TagSpecifications", []) if each["ResourceType"] != "launch-template"]
        return create(self, name, description, {**data, **({"TagSpecifications": tags} if tags else {})}, tag_spec)

    EC2Backend.create_launch_template = create_launch_template


def _tag_volumes_and_network_interfaces() -> None:
    """Tag volumes and network interfaces of a new instance as its launch template says."""
    run = EC2Backend.run_instances

    def run_instances(self: EC2Backend, *args: Any, **kwargs: Any) -> Any:
        reservation = run(self, *args, **kwargs)
        if kwargs.get("launch_template"):
            data = self._get_template_from_args(kwargs["launch_template"]).data
            tags = convert_tag_spec(data.get("TagSpecifications", []))
            for instance in reservation.instances:
                for card in instance.nics.values():
                    card.add_tags(tags.get("network-interface", {}))
                for _, device in instance.get_block_device_mapping:
                    self.get_volume(device.volume_id).add_tags(tags.get("volume", {}))
        return reservation

    EC2Backend.run_instances = run_instances


def _write_policies_compactly() -> None:
    # SQS writes the redrive policy without spaces.
    attributes = Queue.attributes.fget

    def compact(queue: Queue) -> dict[str, Any]:
        found: dict[str, Any] = attributes(queue)
        if found.get("RedrivePolicy"):
            found["RedrivePolicy"] = json.dumps(json.loads(found["RedrivePolicy"]), separators=(",", ":"))
        return found

    Queue.attributes = property(compact)


def _name_the_source_of_database_parameters() -> None:
    # Terraform ignores changed database parameters whose source is not `user`.
    update = DBParameterGroup.update_parameters

    def update_parameters(self: DBParameterGroup, new_parameters: Iterable[dict[str, Any]]) -> None:
        update(self, [{**parameter, "Source": "user"} for parameter in new_parameters])

    DBParameterGroup.update_parameters = update_parameters


def _delete_markers_with_their_bucket() -> None:
    # moto calls `dispose` when it deletes a key with its versions, but its delete markers lack this method.
    FakeDeleteMarker.dispose = lambda _: None


def _hide_digests_of_objects_that_kms_encrypts() -> None:
    # The ETag of an object that KMS encrypts is no MD5. Source: Amazon S3 API Reference, Object, ETag.
    digest = FakeKey.etag.fget

    def etag(key: FakeKey) -> str:
        found: str = digest(key)
        is_digest = "-" not in found and str(key.encryption).startswith("aws:kms")
        return f'"{hashlib.md5(found.encode(), usedforsecurity=False).hexdigest()}"' if is_digest else found

    FakeKey.etag = property(etag)


def _permit_all_simulated_actions() -> None:
    # moto lacks SimulatePrincipalPolicy. The keys of the local cloud permit all actions.
    def simulate_principal_policy(self: IamResponse) -> ActionResult:
        results = [
            {"EvalActionName": action, "EvalResourceName": "*", "EvalDecision": "allowed"}
            for action in self._get_param("ActionNames", [])
        ]
        return ActionResult({"EvaluationResults": results, "IsTruncated": False})

    IamResponse.simulate_principal_policy = simulate_principal_policy


def _add_quotas_of_ec2() -> None:
    # moto has quotas of VPCs only.
    get = ServiceQuotasBackend.get_service_quota

    def get_service_quota(self: ServiceQuotasBackend, service_code: str, quota_code: str) -> dict[str, Any]:
        if service_code == "ec2" and quota_code in VCPU_QUOTAS:
            name = VCPU_QUOTAS[quota_code]
            return {"ServiceCode": "ec2", "QuotaCode": quota_code, "QuotaName": name, "Value": VCPU_QUOTA}
        found: dict[str, Any] = get(self, service_code, quota_code)
        return found

    ServiceQuotasBackend.get_service_quota = get_service_quota
