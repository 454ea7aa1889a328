"""Token buckets behave as AWS documents them."""

from __future__ import annotations

import pytest

from infra.local_cloud.rates import AUTO_SCALING, EC2_CHANGING, EC2_READING, EC2_UNPAGINATED, Buckets, Rate, family_of


def test_a_bucket_is_full_at_first_and_refills_up_to_its_size() -> None:
    buckets, rate = Buckets(), Rate(3, 2)
    assert [buckets.take("a", rate, 100.0) for _ in range(4)] == [True, True, True, False]
    assert [buckets.take("a", rate, 100.5) for _ in range(2)] == [True, False]
    assert [buckets.take("a", rate, 1000.0) for _ in range(4)] == [True, True, True, False]
    assert buckets.take("b", rate, 1000.0), "another family has a bucket of its own"


def test_a_refused_call_costs_nothing() -> None:
    buckets, rate = Buckets(), Rate(1, 1)
    assert buckets.take("a", rate, 0.0)
    assert not any(buckets.take("a", rate, now / 10) for now in range(10))
    assert buckets.take("a", rate, 1.0)


def test_a_bucket_smaller_than_one_call_accepts_a_call_now_and_then() -> None:
    buckets, rate = Buckets(), Rate(0.5, 0.1)
    assert [buckets.take("a", rate, now) for now in (0.0, 5.0, 10.5)] == [True, False, True]


@pytest.mark.parametrize(
    ("action", "parameters", "rate"),
    [
        ("DescribeSubnets", [], EC2_READING),
        ("DescribeInstances", ["Filters"], EC2_READING),
        ("DescribeInstances", ["MaxResults"], EC2_READING),
        ("DescribeInstances", ["InstanceIds"], EC2_UNPAGINATED),
        ("DescribeInstanceStatus", ["InstanceIds", "IncludeAllInstances"], EC2_UNPAGINATED),
        ("RebootInstances", ["InstanceIds"], EC2_CHANGING),
        ("TerminateInstances", ["InstanceIds"], Rate(100, 5)),
        ("DescribeInstanceTopology", ["InstanceIds"], Rate(1, 1)),
    ],
)
def test_a_call_of_ec2_uses_the_bucket_that_aws_documents(action: str, parameters: list[str], rate: Rate) -> None:
    family = family_of("ec2", action, parameters)
    assert family is not None
    assert family[1] == rate


def test_all_calls_of_auto_scaling_share_one_bucket_and_other_services_have_none() -> None:
    assert family_of("autoscaling", "DescribePolicies", []) == family_of("autoscaling", "SetDesiredCapacity", [])
    assert family_of("autoscaling", "DescribePolicies", []) == ("autoscaling", AUTO_SCALING)
    assert family_of("s3", "", []) is None
