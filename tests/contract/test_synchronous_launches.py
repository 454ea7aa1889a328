"""The local cloud's LaunchInstances, and newer settings of groups, behave as AWS documents.

Sources: https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-instances-synchronously.html and
https://docs.aws.amazon.com/autoscaling/ec2/userguide/launching-instances-synchronous-provisioning.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.local_cloud.faults import Conditions
from tests.unit.local_cloud.served import QUICK, ServedAws, eventually, served_aws

RETRIED = "retry-with-group-configuration"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(served: ServedAws) -> Iterator[ServedAws]:
    yield served
    served.set_conditions(QUICK)
    served.take_wrong_calls()


def launch(aws: ServedAws, group: str, count: int = 1, token: str = "token", **more: Any) -> dict[str, Any]:
    answer = aws.client("autoscaling").launch_instances(
        AutoScalingGroupName=group, RequestedCapacity=count, ClientToken=token, **more
    )
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}


def ids_of(answer: dict[str, Any]) -> list[str]:
    return [id for each in answer["Instances"] for id in each["InstanceIds"]]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as error:
        call()
    return str(error.value.response["Error"]["Code"])


def test_a_launch_returns_pending_members_and_raises_the_desired_capacity(aws: ServedAws) -> None:
    aws.set_conditions(Conditions(boot_delay_seconds=600))
    group = aws.make_group(desired=0)
    answer = launch(aws, group, 2, AvailabilityZones=["us-east-1a"])
    (collection,) = answer["Instances"]
    assert (collection["AvailabilityZone"], collection["AvailabilityZoneId"]) == ("us-east-1a", "use1-az1")
    assert (answer["ClientToken"], answer["Errors"]) == ("token", [])
    assert aws.members(group, "Pending") == ids_of(answer)
    assert aws.group(group)["DesiredCapacity"] == 2


def test_a_token_launches_once_and_only_with_the_same_parameters(aws: ServedAws) -> None:
    group = aws.make_group(desired=0)
    answer = launch(aws, group)
    assert launch(aws, group) == answer
    assert refused(lambda: launch(aws, group, 2)) == "IdempotentParameterMismatch"
    assert refused(lambda: launch(aws, group, RetryStrategy=RETRIED)) == "IdempotentParameterMismatch"
    assert aws.in_service(group, 1) == ids_of(answer)
    assert launch(aws, aws.make_group(desired=0))["Instances"] != answer["Instances"], "a token belongs to a group"


@pytest.mark.parametrize(("strategy", "desired"), [("none", 1), (RETRIED, 3)])
def test_a_lack_of_capacity_is_an_error_beside_the_launched_instances(
    aws: ServedAws, strategy: str, desired: int
) -> None:
    group = aws.make_group(desired=0)
    aws.set_conditions(Conditions(boot_delay_seconds=0.05, launch_retry_seconds=600, capacity={f"c7i.{group}": 1}))
    answer = launch(aws, group, 3, RetryStrategy=strategy)
    assert len(ids_of(answer)) == 1
    assert [(each["ErrorCode"], each["InstanceType"]) for each in answer["Errors"]] == [
        ("InsufficientInstanceCapacity", f"c7i.{group}")
    ]
    assert aws.group(group)["DesiredCapacity"] == desired
    assert launch(aws, group, 3, RetryStrategy=strategy) == answer, "a repeated call returns the stored answer"


def test_after_a_failure_the_group_retries_by_itself_only_if_the_call_asked_for_it(aws: ServedAws) -> None:
    groups = {strategy: aws.make_group(desired=0) for strategy in ("none", RETRIED)}
    aws.set_conditions(Conditions(boot_delay_seconds=0.05, capacity={f"c7i.{group}": 0 for group in groups.values()}))
    for strategy, group in groups.items():
        assert ids_of(launch(aws, group, RetryStrategy=strategy)) == []
    aws.set_conditions(QUICK)
    aws.in_service(groups[RETRIED], 1)
    assert aws.members(groups["none"]) == []


def test_parameters_that_do_not_fit_the_group_are_refused(aws: ServedAws) -> None:
    group = aws.make_group(desired=1, max_size=2)
    two_zones = aws.make_group(desired=0, AvailabilityZones=["us-east-1a", "us-east-1b"])
    calls = [
        lambda: launch(aws, group, 2, token="a"),  # above MaxSize
        lambda: launch(aws, group, token="b", AvailabilityZones=["us-east-1b"]),
        lambda: launch(aws, group, token="c", AvailabilityZoneIds=["use1-az2"]),
        lambda: launch(aws, group, token="d", SubnetIds=["subnet-0123456789abcdef0"]),
        lambda: launch(aws, group, token="e", AvailabilityZones=["us-east-1a"], AvailabilityZoneIds=["use1-az1"]),
        lambda: launch(aws, group, token="f g"),
        lambda: launch(aws, group, token="h" * 65),
        lambda: launch(aws, two_zones, 101, token="i", AvailabilityZones=["us-east-1a"]),
        lambda: launch(aws, two_zones, token="j"),
        lambda: launch(aws, "none"),
    ]
    assert [refused(call) for call in calls] == ["ValidationError"] * len(calls)
    (id,) = ids_of(launch(aws, two_zones, token="k", AvailabilityZones=["us-east-1b"]))
    assert aws.instance(id)["Placement"]["AvailabilityZone"] == "us-east-1b"


def test_groups_that_the_call_does_not_support_are_refused(aws: ServedAws) -> None:
    auto_scaling = aws.client("autoscaling")
    group = aws.make_group(desired=0)
    policy = {
        "LaunchTemplate": {"LaunchTemplateSpecification": {"LaunchTemplateName": group, "Version": "$Latest"}},
        "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 50},
    }
    for name, percentage in (("half-spot", 50), ("all-spot", 0)):
        policy["InstancesDistribution"] = {"OnDemandPercentageAboveBaseCapacity": percentage}
        auto_scaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            MixedInstancesPolicy=policy,
            MinSize=0,
            MaxSize=2,
            AvailabilityZones=["us-east-1a"],
        )
    auto_scaling.create_launch_configuration(
        LaunchConfigurationName="old", ImageId="ami-12c6146b", InstanceType="t3.nano"
    )
    auto_scaling.create_auto_scaling_group(
        AutoScalingGroupName="old",
        LaunchConfigurationName="old",
        MinSize=0,
        MaxSize=2,
        AvailabilityZones=["us-east-1a"],
    )
    assert refused(lambda: launch(aws, "half-spot")) == "ValidationError"
    assert refused(lambda: launch(aws, "old")) == "ValidationError"
    assert [each["MarketType"] for each in launch(aws, "all-spot")["Instances"]] == ["Spot"]
    auto_scaling.put_warm_pool(AutoScalingGroupName=group)
    assert refused(lambda: launch(aws, group)) == "UnsupportedOperation"


def test_a_group_with_suspended_launches_and_a_throttled_call_launch_nothing(aws: ServedAws) -> None:
    group = aws.make_group(desired=0)
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["Launch"])
    assert refused(lambda: launch(aws, group)) == "ValidationError"
    aws.client("autoscaling").resume_processes(AutoScalingGroupName=group)
    aws.set_conditions(Conditions(throttle={"autoscaling": 1.0}))
    assert refused(lambda: launch(aws, group)) == "Throttling"
    aws.set_conditions(QUICK)
    assert aws.members(group) == []
    assert ids_of(launch(aws, group)) == aws.in_service(group, 1), "a refused call does not use its token up"


def test_deletion_protection_refuses_the_deletions_of_its_level(aws: ServedAws) -> None:
    """Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/resource-deletion-protection.html."""
    auto_scaling = aws.client("autoscaling")
    name = {"AutoScalingGroupName": aws.make_group(desired=0, DeletionProtection="prevent-force-deletion")}
    assert aws.group(name["AutoScalingGroupName"])["DeletionProtection"] == "prevent-force-deletion"
    assert refused(lambda: auto_scaling.delete_auto_scaling_group(**name, ForceDelete=True)) == "ValidationError"
    auto_scaling.update_auto_scaling_group(**name, DeletionProtection="prevent-all-deletion")
    assert refused(lambda: auto_scaling.delete_auto_scaling_group(**name)) == "ValidationError"
    auto_scaling.update_auto_scaling_group(**name, DeletionProtection="none")
    auto_scaling.delete_auto_scaling_group(**name)


def test_an_abandoned_termination_retains_the_instance_until_a_second_request(aws: ServedAws) -> None:
    """Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/instance-lifecycle-policy.html."""
    auto_scaling = aws.client("autoscaling")
    policy = {"RetentionTriggers": {"TerminateHookAbandon": "retain"}}
    group = aws.make_group(desired=1, InstanceLifecyclePolicy=policy)
    hook = {"AutoScalingGroupName": group, "LifecycleHookName": "h"}
    auto_scaling.put_lifecycle_hook(**hook, LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING")
    (id,) = aws.in_service(group, 1)
    auto_scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=False)
    eventually(lambda: aws.members(group, "Terminating:Wait"))
    auto_scaling.complete_lifecycle_action(**hook, InstanceId=id, LifecycleActionResult="ABANDON")
    eventually(lambda: aws.members(group, "Terminating:Retained") == [id] and aws.members(group, "InService"))
    assert aws.instance(id)["State"]["Name"] == "running"
    auto_scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=False)
    eventually(lambda: id not in aws.members(group))
    assert aws.group(group)["DesiredCapacity"] == 1


def test_only_its_operator_may_change_a_group(aws: ServedAws) -> None:
    """Source: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CreateAutoScalingGroup.html."""
    auto_scaling = aws.client("autoscaling")
    name = aws.make_group(desired=1, Operator={"Principal": "eks.amazonaws.com"})
    (id,) = aws.in_service(name, 1)
    group = {"AutoScalingGroupName": name}
    assert aws.group(name)["Operator"] == {"Principal": "eks.amazonaws.com"}
    tag = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": "k", "Value": "v"}
    calls = [
        lambda: auto_scaling.set_desired_capacity(**group, DesiredCapacity=2),
        lambda: auto_scaling.update_auto_scaling_group(**group, DeletionProtection="none"),
        lambda: auto_scaling.delete_auto_scaling_group(**group, ForceDelete=True),
        lambda: auto_scaling.create_or_update_tags(Tags=[{**tag, "PropagateAtLaunch": True}]),
        lambda: auto_scaling.terminate_instance_in_auto_scaling_group(
            InstanceId=id, ShouldDecrementDesiredCapacity=True
        ),
        lambda: launch(aws, name),
    ]
    assert [refused(call) for call in calls] == ["AccessDenied"] * len(calls)
