"""Terraform creates a group that Everstep accepts, and roles that permit the AWS calls of servers and agents.

The test of `quickstart` runs the real Terraform with the real AWS provider against the local cloud.
`tests/production/test_terraform.py` does so with `production`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from control_plane.app import KEEP_ALIVE_SECONDS
from tests.deployer import POLICIES, WITHOUT_RESOURCES, check_uses, enforced
from tests.policies import actions_of
from tests.terraform import (
    IMAGE,
    SOURCES,
    Terraform,
    check_group,
    check_policies,
    check_tags,
    needs_provider,
    needs_terraform,
    terraform_of,
)
from tests.unit.local_cloud.served import ServedAws, served_aws

TAGS = {"cost center": "research/1", **{f"team/{number}": "vision" for number in range(10)}}
"""Tags with a space and a slash in their keys. An object of S3 cannot have so many tags."""

pytestmark = pytest.mark.integration


@needs_terraform
def test_the_files_have_terraforms_format() -> None:
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-recursive", "-diff"], cwd=SOURCES, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_all_modules_and_roots_accept_the_same_versions_of_the_provider() -> None:
    files = [path.parent / "versions.tf" for path in SOURCES.rglob("main.tf")]
    ranges = [re.findall(r'source  = "hashicorp/aws"\n +version = "(.+)"', path.read_text()) for path in files]
    assert ranges == [[">= 5.100, < 7.0"]] * len(files)


def test_each_skipped_check_of_checkov_has_a_reason() -> None:
    lines = (SOURCES / ".checkov.yaml").read_text().splitlines()
    skipped = [line for line in lines if line.lstrip().startswith("- CKV")]
    assert skipped
    assert [line for line in skipped if not re.search(r"- CKV2?_AWS_\d+ # .{20,}\.$", line)] == []


def test_the_load_balancer_closes_idle_connections_before_the_servers() -> None:
    balancer = (SOURCES / "modules" / "servers" / "main.tf").read_text()
    (seconds,) = re.findall(r"idle_timeout\s+= (\d+)", balancer)
    assert int(seconds) < KEEP_ALIVE_SECONDS


def rules(text: str) -> dict[str, dict[str, str]]:
    """Return the arguments of each security group rule in a file of Terraform, by kind and name."""
    found = re.findall(
        r'^resource "aws_vpc_security_group_(ingress|egress)_rule" "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL
    )
    return {f"{kind} {name}": dict(re.findall(r"^  (\w+) += (.+)$", body, re.MULTILINE)) for kind, name, body in found}


@pytest.mark.security
def test_each_security_group_rule_opens_one_port_to_one_group() -> None:
    """Except between nodes, because EFA needs a rule for all traffic, and to HTTPS anywhere.

    Rules of three more kinds have address ranges: clients of the load balancer, the NAT gateway of a public one, and the
    endpoints that a whole VPC shares.
    """
    every: dict[str, dict[str, str]] = {}
    for path in sorted(SOURCES.rglob("*.tf")):
        text = path.read_text()
        assert not re.search(r'^  (?:ingress|egress|dynamic "(?:ingress|egress)") \{', text, re.MULTILINE), path
        assert not re.search(r'"aws_security_group_rule"', text), path
        every |= {f"{path.parent.name}: {name}": rule for name, rule in rules(text).items()}
    everything = {name for name, rule in every.items() if rule["ip_protocol"] != '"tcp"'}
    assert everything == {"network: ingress nodes_from_nodes", "network: egress nodes_to_nodes"}
    for name, rule in every.items():
        if name in everything:
            assert rule["referenced_security_group_id"] == rule["security_group_id"], name
            continue
        assert rule["from_port"] == rule["to_port"], name
        if "cidr_ipv4" in rule:
            assert rule["from_port"] == "443", name
    assert {name for name, rule in every.items() if "cidr_ipv4" in rule} == {
        "network: egress nodes_to_all",
        "network: egress servers_to_all",
        "network: ingress endpoints",
        "servers: ingress clients",
        "servers: ingress nat",
    }


@needs_terraform
def test_the_documented_backend_stores_and_locks_the_state(tmp_path: Path) -> None:
    (block,) = re.findall(r"```hcl\n(.*?)```", (SOURCES / "README.md").read_text(), re.DOTALL)
    (tmp_path / "backend.tf").write_text(block)
    (tmp_path / "main.tf").write_text('output "name" {\n  value = "everstep"\n}\n')
    terraform = Terraform(tmp_path)
    with served_aws(tmp_path / "aws") as aws:
        s3 = aws.client("s3")
        bucket, key = "example-terraform-state", "everstep/production.tfstate"
        s3.create_bucket(Bucket=bucket)
        given = {
            "access_key": aws.keys.access_key_id,
            "secret_key": aws.keys.secret_access_key,
            "endpoints": f'{{s3="{aws.url}"}}',
            "use_path_style": "true",
            "skip_credentials_validation": "true",
            "skip_requesting_account_id": "true",
        }
        terraform.run("init", "-input=false", *(f"-backend-config={name}={value}" for name, value in given.items()))
        terraform.apply()
        assert [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]] == [key]
        s3.put_object(Bucket=bucket, Key=f"{key}.tflock", Body=b"{}")
        with pytest.raises(AssertionError, match="Error acquiring the state lock"):
            terraform.apply()


def check_tags_of_instance(aws: ServedAws, instance_id: str, tags: Mapping[str, str]) -> None:
    """Check that an instance, its volumes and its network interfaces have these tags."""
    instance = aws.instance(instance_id)
    volumes = [each["Ebs"]["VolumeId"] for each in instance["BlockDeviceMappings"]]
    cards = [each["NetworkInterfaceId"] for each in instance["NetworkInterfaces"]]
    assert volumes
    assert cards
    for name in (instance_id, *volumes, *cards):
        found = aws.client("ec2").describe_tags(Filters=[{"Name": "resource-id", "Values": [name]}])["Tags"]
        assert tags.items() <= {each["Key"]: each["Value"] for each in found}.items(), name


@pytest.mark.parametrize("name", POLICIES)
def test_an_action_without_resources_is_allowed_for_all_resources(name: str) -> None:
    narrowed = {
        action
        for statement in POLICIES[name]["Statement"]
        for action in actions_of(statement)
        if statement["Resource"] != ["*"]
    }
    assert narrowed.isdisjoint(WITHOUT_RESOURCES)


@pytest.mark.long
@needs_terraform
@needs_provider
@pytest.mark.timeout(900)
def test_an_installation_is_created_planned_without_changes_and_destroyed(tmp_path: Path) -> None:
    """The callers have the rights of the documented policy, and no others."""
    policy = POLICIES["quickstart"]
    with served_aws(tmp_path) as aws, enforced(aws, policy) as (url, made):
        quickstart = terraform_of("quickstart", url, aws.keys, tmp_path)
        wheel = quickstart.folder / "everstep-0.1.0-py3-none-any.whl"
        wheel.write_bytes(b"a wheel")
        try:
            quickstart.apply(
                region="us-east-1", wheel=str(wheel), image_id=IMAGE, node_user_data="#!/bin/sh\n", tags=TAGS
            )
            quickstart.require_no_changes()
            check_policies(quickstart.resources())
            check_tags(quickstart.resources(), {**TAGS, "everstep:installation": "everstep"})
            check_group(aws, "everstep-main")
            aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName="everstep-main", DesiredCapacity=1)
            (node,) = aws.in_service("everstep-main", 1)
            check_tags_of_instance(aws, node, TAGS)
            quickstart.run("validate")
            quickstart.apply(server_type="t3.large", permissions_boundary="arn:aws:iam::123456789012:policy/boundary")
        finally:
            quickstart.destroy()
        check_uses(policy, made)
        assert not aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        assert not aws.client("s3").list_buckets()["Buckets"]
