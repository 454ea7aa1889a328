"""Corrects answers of moto that differ from AWS's and that Terraform compares with its files.

Each function below names one difference. Without them, a second plan after an apply would contain changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from moto.core.config import default_user_config
from moto.ec2.models import EC2Backend
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.rds.models import DBParameterGroup
from moto.s3.models import FakeDeleteMarker
from moto.sqs.models import Queue


def repair() -> None:
    """Replace the methods of moto until this process ends. The caller must call this function once."""
    _describe_rules_between_groups()
    _keep_tags_of_templates_apart()
    _write_policies_compactly()
    _name_the_source_of_database_parameters()
    _delete_markers_with_their_bucket()
    # moto has the policies that AWS manages only on request. It reads them at the first call of IAM.
    default_user_config["iam"] = {"load_aws_managed_policies": True}


def _describe_rules_between_groups() -> None:
    """Return the description of a rule whose source is another security group. moto returns it for addresses only."""

    def description(rule: SecurityGroupRule) -> str | None:
        found: str | None = rule.ip_range.get("Description") or rule.source_group.get("Description")
        return found

    SecurityGroupRule.description = property(description)


def _keep_tags_of_templates_apart() -> None:
    """Leave the tags of a launch template itself out of the data of its first version."""
    create = EC2Backend.create_launch_template

    def create_launch_template(
        self: EC2Backend, name: str, description: str, data: dict[str, Any], tag_spec: dict[str, Any]
    ) -> Any:
        tags = [each for each in data.pop("TagSpecifications", []) if each["ResourceType"] != "launch-template"]
        return create(self, name, description, {**data, **({"TagSpecifications": tags} if tags else {})}, tag_spec)

    EC2Backend.create_launch_template = create_launch_template


def _write_policies_compactly() -> None:
    """Write the redrive policy of a queue without spaces, as SQS does."""
    attributes = Queue.attributes.fget

    def compact(queue: Queue) -> dict[str, Any]:
        found: dict[str, Any] = attributes(queue)
        if found.get("RedrivePolicy"):
            found["RedrivePolicy"] = json.dumps(json.loads(found["RedrivePolicy"]), separators=(",", ":"))
        return found

    Queue.attributes = property(compact)


def _name_the_source_of_database_parameters() -> None:
    """Return the source `user` with each changed parameter of a database. Terraform ignores other sources."""
    update = DBParameterGroup.update_parameters

    def update_parameters(self: DBParameterGroup, new_parameters: Iterable[dict[str, Any]]) -> None:
        update(self, [{**parameter, "Source": "user"} for parameter in new_parameters])

    DBParameterGroup.update_parameters = update_parameters


def _delete_markers_with_their_bucket() -> None:
    """Let a caller delete the last version of an object that also has a delete marker. Otherwise moto fails."""
    FakeDeleteMarker.dispose = lambda _: None
