"""The local AWS rejects calls of the product that real AWS would refuse."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.model import ServiceModel
from moto.core.utils import get_service_model

from infra.local_cloud.documented import filter_names, is_documented, violations

EC2: ServiceModel = get_service_model("ec2")
AUTO_SCALING: ServiceModel = get_service_model("autoscaling")


def wrong(service: ServiceModel, operation: str, **parameters: Any) -> list[str]:
    return [each.words for each in violations(service.operation_model(operation), parameters)]


def filters(*names: str) -> dict[str, Any]:
    return {"Filters": [{"Name": name, "Values": ["x"]} for name in names]}


def test_a_filter_that_another_operation_has_is_no_filter_of_this_one() -> None:
    assert wrong(EC2, "DescribeInstanceStatus", **filters("instance-id")) == ["The filter 'instance-id' is invalid"]
    assert wrong(EC2, "DescribeInstances", **filters("instance-id", "tag:everstep:fleet", "tag-key")) == []
    assert wrong(EC2, "DescribeInstances", **filters("Instance-Id", "tags:x"))
    assert wrong(EC2, "DescribeSubnets", **filters("availabilityZone", "availability-zone")) == []
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", **filters("tag:everstep:fleet")) == []
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", **filters("name"))


def test_a_value_outside_its_enumeration_is_found_at_any_depth() -> None:
    (said,) = wrong(EC2, "RunInstances", InstanceType="c7i.2xlarge", InstanceMarketOptions={"MarketType": "cheap"})
    assert said.startswith("InstanceMarketOptions.MarketType 'cheap' is none of spot, ")
    assert wrong(EC2, "RunInstances", InstanceMarketOptions={"MarketType": "spot"}) == []
    assert wrong(EC2, "DescribeInstanceAttribute", Attribute="userdata")


@pytest.mark.parametrize(
    "operation",
    [
        name
        for name in EC2.operation_names
        if name in ("DescribeInstances", "DescribeInstanceStatus", "DescribeSubnets", "DescribeVpcs")
    ],
)
def test_documentation_is_really_read(operation: str) -> None:
    names = filter_names(EC2.operation_model(operation))
    assert len(names) > 8
    assert not any("<" in name or " " in name for name in names)
    assert not is_documented("", names)


def ids(count: int) -> list[str]:
    return [f"i-{number:017x}" for number in range(count)]


@pytest.mark.parametrize(
    ("service", "operation", "name", "limit"),
    [
        (EC2, "DescribeInstanceStatus", "InstanceIds", 100),
        (EC2, "DescribeInstanceTopology", "InstanceIds", 100),
        (EC2, "TerminateInstances", "InstanceIds", 1000),
        (AUTO_SCALING, "SetInstanceProtection", "InstanceIds", 50),
        (AUTO_SCALING, "DescribeAutoScalingInstances", "InstanceIds", 50),
        (AUTO_SCALING, "DescribeAutoScalingGroups", "AutoScalingGroupNames", 50),
        (AUTO_SCALING, "DetachInstances", "InstanceIds", 20),
    ],
)
def test_a_list_above_its_documented_length_is_found(
    service: ServiceModel, operation: str, name: str, limit: int
) -> None:
    assert wrong(service, operation, **{name: ids(limit)}) == []
    assert wrong(service, operation, **{name: ids(limit + 1)}) == [
        f"{name} has {limit + 1} items; the limit is {limit}"
    ]


def test_filters_have_at_most_200_values() -> None:
    def filtered(*counts: int) -> list[str]:
        given = [{"Name": "instance-id", "Values": ids(count)} for count in counts]
        return wrong(EC2, "DescribeInstances", Filters=given)

    assert filtered(150, 50) == []
    assert filtered(150, 51) == ["The filters have 201 values; the limit is 200"]


def test_pages_are_limited_and_exclude_ids() -> None:
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", AutoScalingGroupNames=ids(100), MaxRecords=100) == []
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", MaxRecords=101) == ["MaxRecords is 101; the limit is 100"]
    for operation in ("DescribeInstances", "DescribeInstanceStatus", "DescribeInstanceTopology"):
        assert wrong(EC2, operation, InstanceIds=ids(1), MaxResults=50) == [
            "MaxResults cannot be combined with InstanceIds"
        ]
        assert wrong(EC2, operation, MaxResults=50) == []
