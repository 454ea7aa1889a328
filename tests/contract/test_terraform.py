"""Terraform creates an installation whose group Everstep accepts, and roles that may do what the code does.

The tests run the real Terraform with the real AWS provider against the local cloud.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.contract import changes, checks
from everstep import doctor
from tests.unit.local_cloud.served import ServedAws, served_aws

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "infra" / "terraform"
SERVICES = ("autoscaling", "ec2", "events", "iam", "s3", "secretsmanager", "sqs", "ssm", "sts")
MIRRORS = [Path(each) for each in [os.environ.get("EVERSTEP_TERRAFORM_PLUGINS", "")] if each] or sorted(
    Path("/").glob("*/tf-plugins")
)
"""Folders with a copy of the provider, for machines that do not reach the registry."""
IMAGE = "ami-12c6146b"

ROLES = {
    "server": (doctor.SERVER_ACTIONS, doctor.SERVER_OPTIONS),
    "node": (doctor.NODE_ACTIONS, doctor.NODE_OPTIONS),
}
"""By role: the actions that it always needs, and those of optional features. `tests/tidy/test_aws_actions.py` compares
both with the calls of the code.
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

    def init(self) -> None:
        self.run("init", "-no-color", "-input=false", *(f"-plugin-dir={mirror}" for mirror in MIRRORS))

    def resources(self) -> dict[str, Mapping[str, Any]]:
        """Return the values of all resources in the state, by address."""

        def walk(module: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
            for each in module.get("resources", ()):
                yield each["address"], each["values"]
            for child in module.get("child_modules", ()):
                yield from walk(child)

        return dict(walk(json.loads(self.run("show", "-json"))["values"]["root_module"]))


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.fixture(scope="module")
def quickstart(aws: ServedAws, tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    copy = tmp_path_factory.mktemp("terraform") / "terraform"
    shutil.copytree(SOURCES, copy)
    folder = copy / "quickstart"
    endpoints = "\n".join(f'    {service} = "{aws.url}"' for service in SERVICES)
    (folder / "local_override.tf").write_text(f"""
provider "aws" {{
  access_key                  = "{aws.keys.access_key_id}"
  secret_key                  = "{aws.keys.secret_access_key}"
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
    wheel = folder / "everstep-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    (folder / "terraform.tfvars.json").write_text(
        json.dumps({"region": "us-east-1", "wheel": str(wheel), "image_id": IMAGE, "node_user_data": "#!/bin/sh\n"})
    )
    terraform = Terraform(folder)
    terraform.init()
    return terraform


@needs_terraform
def test_the_files_have_terraforms_format() -> None:
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-recursive", "-diff"], cwd=SOURCES, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@needs_terraform
@needs_provider
@pytest.mark.timeout(900)
def test_an_installation_is_created_planned_without_changes_and_destroyed(
    quickstart: Terraform, aws: ServedAws
) -> None:
    quickstart.run("validate", "-no-color")
    quickstart.run("apply", "-no-color", "-input=false", "-auto-approve")
    try:
        assert "No changes." in quickstart.run("plan", "-no-color", "-input=false", "-detailed-exitcode")
        check_policies(quickstart.resources())
        group = AwsOperator(aws.connection()).describe_group("everstep-main")
        assert [check.words for check in checks(group) if not check.is_met] == []
        assert [change.setting for change in changes(group)] == []
    finally:
        quickstart.run("destroy", "-no-color", "-input=false", "-auto-approve")
    assert quickstart.run("state", "list") == ""
    assert not aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert not aws.client("s3").list_buckets()["Buckets"]


def check_policies(resources: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the applied policies allow the calls of the code, and no others."""
    for role, (needed, options) in ROLES.items():
        policy = json.loads(resources[f'module.identity.aws_iam_role_policy.this["{role}"]']["policy"])
        allowed = {action for statement in policy["Statement"] for action in actions(statement)}
        assert set(needed) <= allowed <= {*needed, *options}, role


def actions(statement: Mapping[str, Any]) -> list[str]:
    given = statement["Action"]
    return [given] if isinstance(given, str) else given
