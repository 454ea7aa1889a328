"""The control plane and the boot gate learn from EC2 what an instance type has, also for types newer than the code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.cloud.aws import AwsOperator
from everstep.doctor.node_checks import InstanceTypeFacts
from everstep.doctor.node_facts import described_type
from infra.local_cloud.environment import aws_variables
from tests.unit.local_cloud.served import ServedAws, served_aws

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.mark.parametrize(
    ("name", "gpus", "network_cards", "efa_interfaces"),
    [
        ("c7i.large", 0, 1, 0),
        ("g7e.48xlarge", 8, 4, 4),
        ("p4d.24xlarge", 8, 4, 4),
        ("p5.4xlarge", 1, 1, 1),
        ("p5.48xlarge", 8, 32, 32),
        ("p6-b300.48xlarge", 8, 17, 16),
        ("trn2.48xlarge", 0, 16, 16),
    ],
)
def test_a_node_learns_the_hardware_of_its_type(
    aws: ServedAws,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    gpus: int,
    network_cards: int,
    efa_interfaces: int,
) -> None:
    for variable, value in aws_variables(aws.url, aws.keys).items():
        monkeypatch.setenv(variable, value)
    assert described_type(name, "us-east-1") == InstanceTypeFacts(
        name=name, gpus=gpus, network_cards=network_cards, efa_interfaces=efa_interfaces
    )


def test_a_node_without_valid_credentials_or_with_an_unknown_type_learns_nothing(
    aws: ServedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in aws_variables(aws.url, aws.keys).items():
        monkeypatch.setenv(variable, value)
    assert described_type("p9.48xlarge", "us-east-1") is None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert described_type("p5.48xlarge", "us-east-1") is None


@pytest.mark.parametrize(
    ("name", "encrypts"),
    [("p5.48xlarge", True), ("p6-b300.48xlarge", True), ("g7e.12xlarge", True), ("m5.large", False), ("p9.2", False)],
)
def test_a_group_knows_whether_ec2_encrypts_between_instances_of_its_type(
    aws: ServedAws, name: str, encrypts: bool
) -> None:
    group = aws.make_group(instance_type=name)
    assert AwsOperator(aws.connection()).describe_group(group).encrypting_types == ({name} if encrypts else set())
