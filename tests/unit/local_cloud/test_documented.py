"""The local AWS rejects calls of the product that real AWS would refuse."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.model import ServiceModel
from moto.core.utils import get_service_model

from infra.local_cloud.documented import filter_names, is_documented
from tests.documented import undocumented

EC2: ServiceModel = get_service_model("ec2")
AUTO_SCALING: ServiceModel = get_service_model("autoscaling")


def wrong(service: ServiceModel, operation: str, **parameters: Any) -> list[str]:
    return undocumented(service.operation_model(operation), parameters)


def filters(*names: str) -> dict[str, Any]:
    return {"Filters": [{"Name": name, "Values": ["x"]} for name in names]}


def test_a_filter_that_another_operation_has_is_no_filter_of_this_one() -> None:
    assert wrong(EC2, "DescribeInstanceStatus", **filters("instance-id")) == [
        "DescribeInstanceStatus has no filter 'instance-id'"
    ]
    assert wrong(EC2, "DescribeInstances", **filters("instance-id", "tag:everstep:fleet", "tag-key")) == []
    assert wrong(EC2, "DescribeInstances", **filters("Instance-Id", "tags:x"))
    assert wrong(EC2, "DescribeSubnets", **filters("availabilityZone", "availability-zone")) == []
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", **filters("tag:everstep:fleet")) == []
    assert wrong(AUTO_SCALING, "DescribeAutoScalingGroups", **filters("name"))


def test_a_value_outside_its_enumeration_is_found_at_any_depth() -> None:
    (said,) = wrong(EC2, "RunInstances", InstanceType="c7i.2xlarge", InstanceMarketOptions={"MarketType": "cheap"})
    assert said.startswith("RunInstances: InstanceMarketOptions.MarketType 'cheap' is none of spot, ")
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
