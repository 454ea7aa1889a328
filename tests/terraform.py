"""Runs the real Terraform with the real AWS provider, in a copy of its files, against a local AWS."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.contract import changes, checks
from everstep.doctor import checks as doctor
from tests.unit.local_cloud.served import ServedAws

SOURCES = Path(__file__).resolve().parents[1] / "infra" / "terraform"
SERVICES = (
    *("autoscaling", "cloudwatch", "ec2", "elbv2", "events", "iam", "kms", "rds", "s3", "secretsmanager", "sns"),
    *("sqs", "ssm", "sts"),
)
MIRRORS = [Path(each) for each in [os.environ.get("EVERSTEP_TERRAFORM_PLUGINS", "")] if each] or sorted(
    Path("/").glob("*/tf-plugins")
)
"""Folders with a copy of the provider, for machines that do not reach the registry."""
IMAGE = "ami-12c6146b"

ROLES = {
    "server": (doctor.SERVER_ACTIONS, doctor.SERVER_OPTIONS),
    "node": (doctor.NODE_ACTIONS, doctor.NODE_OPTIONS),
}
"""The actions that a role always needs, and the actions of optional features, by role.

`tests/tidy/test_aws_actions.py` compares both with the calls of the code.
"""

needs_terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
needs_provider = pytest.mark.skipif(
    not MIRRORS, reason="no mirror of the provider: set EVERSTEP_TERRAFORM_PLUGINS to a folder for -plugin-dir"
)


@dataclass(frozen=True)
class Terraform:
    """Terraform in a copy of one root module, with the local cloud as its AWS."""

    folder: Path

    def run(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
        done = subprocess.run(
            ["terraform", *arguments],
            cwd=self.folder,
            env={**environment, "CHECKPOINT_DISABLE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"terraform {arguments[0]}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def apply(self, **variables: Any) -> None:
        """Apply the configuration. The given variables replace earlier values."""
        file = self.folder / "terraform.tfvars.json"
        given = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**given, **variables}))
        self.run("apply", "-no-color", "-input=false", "-auto-approve", "-parallelism=30")

    def require_no_changes(self) -> None:
        """Fail if a new plan contains changes."""
        assert "No changes." in self.run("plan", "-no-color", "-input=false", "-parallelism=30")

    def planned(self, **variables: Any) -> dict[str, Mapping[str, Any]]:
        """Return the planned values of all resources with these variables, by address. Applies nothing.

        Values that AWS determines later are absent.
        """
        given = self.folder / "planned.tfvars.json"
        given.write_text(json.dumps(variables))
        self.run("plan", "-no-color", "-input=false", "-parallelism=30", f"-var-file={given}", "-out=planned")
        changes = json.loads(self.run("show", "-json", "planned"))["resource_changes"]
        return {each["address"]: each["change"]["after"] for each in changes if each["change"]["after"] is not None}

    def outputs(self, **variables: Any) -> dict[str, Any]:
        """Return the planned outputs with these variables. Applies nothing."""
        self.planned(**variables)
        values = json.loads(self.run("show", "-json", "planned"))["planned_values"]["outputs"]
        return {name: each["value"] for name, each in values.items()}

    def refusal(self, **variables: Any) -> str:
        """Return the message with which Terraform refuses to plan with these variables."""
        given = self.folder / "refused.tfvars.json"
        given.write_text(json.dumps(variables))
        with pytest.raises(AssertionError) as raised:
            self.run("plan", "-no-color", "-input=false", f"-var-file={given}")
        return " ".join(str(raised.value).replace("│", " ").split())

    def destroy(self) -> None:
        """Destroy all resources."""
        self.run("destroy", "-no-color", "-input=false", "-auto-approve", "-parallelism=30", "-refresh=false")
        assert self.run("state", "list") == ""

    def resources(self) -> dict[str, Mapping[str, Any]]:
        """Return the values of all resources in the state, by address.

        Terraform documents `show -json` for this purpose. Reading the file saves a start of the provider.
        """
        state = json.loads((self.folder / "terraform.tfstate").read_text())
        found = {}
        for each in state["resources"]:
            if each["mode"] == "managed":
                module = f"{each['module']}." if "module" in each else ""
                for instance in each["instances"]:
                    key = f"[{json.dumps(instance['index_key'])}]" if "index_key" in instance else ""
                    found[f"{module}{each['type']}.{each['name']}{key}"] = instance["attributes"]
        return found


def terraform_of(root: str, aws_url: str, keys: Any, folder: Path, *, root_file: str = "") -> Terraform:
    """Copy the files to a new folder, direct a root module to a local AWS, and initialise it.

    With `root_file`, the root module is new and consists of this text.
    """
    copy = folder / "terraform"
    shutil.copytree(SOURCES, copy)
    terraform = Terraform(copy / root)
    if root_file:
        terraform.folder.mkdir()
        (terraform.folder / "main.tf").write_text(root_file)
    endpoints = "\n".join(f'    {service} = "{aws_url}"' for service in SERVICES)
    (terraform.folder / "local_override.tf").write_text(f"""
provider "aws" {{
  access_key                  = "{keys.access_key_id}"
  secret_key                  = "{keys.secret_access_key}"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  s3_use_path_style           = true

  endpoints {{
{endpoints}
  }}
}}
""")
    # The local cloud serves plain HTTP, which the bucket's policy refuses.
    (copy / "modules" / "storage" / "local_override.tf").write_text(
        'resource "aws_s3_bucket_policy" "this" {\n  count = 0\n}\n'
    )
    terraform.run("init", "-no-color", "-input=false", *(f"-plugin-dir={mirror}" for mirror in MIRRORS))
    return terraform


def scripts(planned: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the user data of each launch template in a plan, by address."""
    return {
        address: base64.b64decode(values["user_data"]).decode()
        for address, values in planned.items()
        if address.rpartition(".")[0].endswith("aws_launch_template")
    }


def check_policies(resources: Mapping[str, Mapping[str, Any]], *, has_kms: bool = False) -> None:
    """Check that the applied policies permit the AWS calls that servers and agents make, and no others."""
    kms = {"kms:Decrypt", "kms:GenerateDataKey"} if has_kms else set[str]()
    for role, (needed, options) in ROLES.items():
        policy = json.loads(resources[f'module.identity.aws_iam_role_policy.this["{role}"]']["policy"])
        allowed = {action for statement in policy["Statement"] for action in _actions(statement)}
        assert {*needed, *kms} <= allowed <= {*needed, *options, *kms}, role


def check_tags(resources: Mapping[str, Mapping[str, Any]], tags: Mapping[str, str]) -> None:
    """Check that all planned or applied resources have these tags, and that they give them to what AWS launches.

    Objects of S3 are an exception, because an object can have ten tags only.
    """
    for address, values in resources.items():
        kind = address.rpartition(".")[0].rpartition(".")[2]
        found = {address: values["tags_all"]} if "tags" in values and kind != "aws_s3_object" else {}
        if kind == "aws_launch_template":
            launched = {each["resource_type"]: each["tags"] for each in values["tag_specifications"]}
            found |= {f"{address} {name}": launched[name] for name in ("instance", "network-interface", "volume")}
        if kind == "aws_autoscaling_group":
            found[address] = {each["key"]: each["value"] for each in values["tag"] if each["propagate_at_launch"]}
        if kind == "aws_instance":
            found[f"{address} volume"] = values["root_block_device"][0]["tags_all"]
        for name, carried in found.items():
            assert tags.items() <= carried.items(), name


def check_group(aws: ServedAws, name: str) -> None:
    """Check that an Auto Scaling group already has all settings that Everstep requires."""
    group = AwsOperator(aws.connection()).describe_group(name)
    assert [check.words for check in checks(group) if not check.is_met] == []
    assert [change.setting for change in changes(group)] == []


def _actions(statement: Mapping[str, Any]) -> list[str]:
    given = statement["Action"]
    return [given] if isinstance(given, str) else given
