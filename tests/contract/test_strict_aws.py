"""The local cloud refuses what AWS refuses.

Where AWS's documentation leaves a behaviour open, the local cloud behaves in the way that is worse for Everstep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.contract import drift, ensure
from control_plane.cloud.errors import ContractViolation
from control_plane.cloud.operator import InstanceShape
from infra.local_cloud.aws_answers import AwsAnswers
from infra.local_cloud.environment import REGION
from infra.local_cloud.fault_kinds import RateLimits, Rebalance, StaleView, ZoneDisruption
from infra.local_cloud.faults import Conditions
from infra.local_cloud.up import ClusterOptions
from tests.unit.local_cloud.served import QUICK, ServedAws, eventually, served_aws

ABSENT = ["i-0123456789abcdef0", "i-0123456789abcdef1"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    """Yield a local cloud whose AWS behaves better for Everstep than the defaults of `AwsAnswers` assume."""
    answers = AwsAnswers(
        pending_member_shows_protection=True,
        pending_member_is_protectable=True,
        ended_member_stays=False,
        hook_holds_ended_member=False,
        unknown_ids_named="all",
        topology_layers=1,
    )
    with served_aws(tmp_path_factory.mktemp("kind"), answers=answers) as aws:
        yield aws


def emptied(aws: ServedAws) -> None:
    aws.clear()
    aws.set_conditions(QUICK)
    for group in aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]:
        aws.client("autoscaling").delete_auto_scaling_group(
            AutoScalingGroupName=group["AutoScalingGroupName"], ForceDelete=True
        )


@pytest.fixture
def aws(served: ServedAws) -> Iterator[ServedAws]:
    yield served
    emptied(served)


@pytest.fixture
def kind_aws(kind: ServedAws) -> Iterator[ServedAws]:
    yield kind
    emptied(kind)


def quick(**more: Any) -> Conditions:
    return Conditions(boot_delay_seconds=0.05, launch_retry_seconds=0.1, **more)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(ClientError) as error:
        call()
    details = error.value.response["Error"]
    return details["Code"], details["Message"]


def protect(aws: ServedAws, group: str, id: str) -> None:
    aws.client("autoscaling").set_instance_protection(
        AutoScalingGroupName=group, InstanceIds=[id], ProtectedFromScaleIn=True
    )


def is_protected(aws: ServedAws, group: str, id: str) -> bool:
    (member,) = (member for member in aws.group(group)["Instances"] if member["InstanceId"] == id)
    return bool(member["ProtectedFromScaleIn"])


@contextmanager
def client_without_retries(aws: ServedAws, service: str) -> Iterator[Any]:
    client = boto3.client(
        service,
        endpoint_url=aws.url,
        region_name=REGION,
        aws_access_key_id=aws.keys.access_key_id,
        aws_secret_access_key=aws.keys.secret_access_key,
        config=Config(retries={"total_max_attempts": 1}),
    )
    yield client
    client.close()


# Protection from scale-in


def test_a_pending_member_is_neither_protected_nor_protectable(aws: ServedAws) -> None:
    group = aws.make_group(NewInstancesProtectedFromScaleIn=True)
    aws.set_conditions(Conditions(boot_delay_seconds=0.3))
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    (id,) = eventually(lambda: aws.members(group, "Pending"))
    assert not is_protected(aws, group, id)
    assert refusal(lambda: protect(aws, group, id)) == (
        "ValidationError",
        f"The instance {id} is not in InService or EnteringStandby or Standby.",
    )
    aws.in_service(group, 1)
    assert is_protected(aws, group, id)


def test_protection_is_refused_while_a_member_terminates_and_accepted_in_standby(aws: ServedAws) -> None:
    group = aws.make_group(desired=2)
    first, second = aws.in_service(group, 2)
    scaling = aws.client("autoscaling")
    scaling.enter_standby(AutoScalingGroupName=group, InstanceIds=[first], ShouldDecrementDesiredCapacity=True)
    protect(aws, group, first)
    assert is_protected(aws, group, first)
    scaling.put_lifecycle_hook(
        AutoScalingGroupName=group,
        LifecycleHookName="notice",
        LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
        HeartbeatTimeout=600,
    )
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=second, ShouldDecrementDesiredCapacity=True)
    assert "is not in InService" in refusal(lambda: protect(aws, group, second))[1]


def test_protection_of_new_members_is_the_groups_setting_at_their_launch(aws: ServedAws) -> None:
    group = aws.make_group()
    aws.set_conditions(Conditions(boot_delay_seconds=0.3))
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    eventually(lambda: aws.members(group, "Pending"))
    aws.client("autoscaling").update_auto_scaling_group(
        AutoScalingGroupName=group, NewInstancesProtectedFromScaleIn=True
    )
    (id,) = aws.in_service(group, 1)
    assert not is_protected(aws, group, id)


# Answers of EC2's Describe operations about new and changed instances


def described(aws: ServedAws, id: str) -> list[str]:
    """Return the states of an instance in the answers of three Describe operations; empty where it is missing."""
    ec2 = aws.client("ec2")
    filtered = ec2.describe_instances(Filters=[{"Name": "instance-id", "Values": [id]}])["Reservations"]
    found = [each["State"]["Name"] for reservation in filtered for each in reservation["Instances"]] or [""]
    for call in (
        lambda: aws.instance(id)["State"]["Name"],
        lambda: ec2.describe_instance_status(InstanceIds=[id], IncludeAllInstances=True)["InstanceStatuses"][0][
            "InstanceState"
        ]["Name"],
    ):
        try:
            found.append(call())
        except ClientError as error:
            found.append("" if error.response["Error"]["Code"] == "InvalidInstanceID.NotFound" else str(error))
    return found


def test_a_new_instance_is_missing_and_a_changed_one_is_stale_for_some_time(aws: ServedAws) -> None:
    old_group, new_group = aws.make_group(desired=1), aws.make_group()
    (old,) = aws.in_service(old_group, 1)
    aws.set_conditions(quick(visibility_seconds=600))
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=new_group, DesiredCapacity=1)
    (new,) = aws.in_service(new_group, 1)
    assert described(aws, new) == ["", "", ""]
    aws.client("ec2").terminate_instances(InstanceIds=[old, new])
    eventually(lambda: not {old, new} & set(aws.pids()))
    assert described(aws, old) == ["running"] * 3
    assert described(aws, new) == ["", "", ""]
    assert "StateReason" not in aws.instance(old) or not aws.instance(old)["StateReason"].get("Code")


def test_a_change_is_visible_after_its_delay(aws: ServedAws) -> None:
    aws.set_conditions(quick(visibility_seconds=0.2))
    (id,) = aws.in_service(aws.make_group(desired=1), 1)
    eventually(lambda: described(aws, id) == ["running"] * 3)
    aws.client("ec2").terminate_instances(InstanceIds=[id])
    eventually(lambda: described(aws, id) == ["terminated"] * 3)


def test_an_answer_may_omit_an_instance_that_exists(aws: ServedAws) -> None:
    ids = aws.in_service(aws.make_group(desired=2), 2)
    aws.set_conditions(quick(describe_omit_share=1.0))
    assert described(aws, ids[0]) == ["", "", ""]
    aws.set_conditions(QUICK)
    assert described(aws, ids[0]) == ["running"] * 3


def test_in_a_disrupted_zone_descriptions_fail_and_changes_do_not(aws: ServedAws) -> None:
    first = aws.in_service(aws.make_group(desired=1), 1)[0]
    second = aws.in_service(aws.make_group(desired=1, AvailabilityZones=["us-east-1b"]), 1)[0]
    aws.set_conditions(quick(disrupted_zones=("us-east-1b",)))
    with client_without_retries(aws, "ec2") as ec2:
        for call in (
            ec2.describe_instances,
            lambda: ec2.describe_instances(Filters=[{"Name": "instance-id", "Values": [first]}]),
            lambda: ec2.describe_instances(InstanceIds=[first, second]),
            lambda: ec2.describe_instance_status(InstanceIds=[second]),
        ):
            assert refusal(call)[0] == "Unavailable"
        assert ec2.describe_instances(InstanceIds=[first])["Reservations"]
        ec2.reboot_instances(InstanceIds=[second])


def test_faults_disturb_descriptions_until_they_are_cleared(aws: ServedAws) -> None:
    group = aws.make_group(desired=1)
    (id,) = aws.in_service(group, 1)
    aws.inject(StaleView(delay=0, omit=1.0))
    assert described(aws, id) == ["", "", ""]
    aws.clear("stale-view")
    assert aws.inject(ZoneDisruption()).facts == {"zones": ["us-east-1a"]}
    with client_without_retries(aws, "ec2") as ec2:
        assert refusal(lambda: ec2.describe_instances(InstanceIds=[id]))[0] == "Unavailable"
        aws.clear("zone-disruption")
        aws.inject(RateLimits(share=0.01))
        ec2.describe_subnets()
        assert refusal(ec2.describe_subnets)[0] == "RequestLimitExceeded"
        aws.clear("rate-limits")
        ec2.describe_subnets()
    assert described(aws, id) == ["running"] * 3


# Undocumented calls


def test_undocumented_calls_are_refused_in_each_services_words_and_recorded(
    aws: ServedAws, undocumented_calls: list[str]
) -> None:
    ec2, scaling = aws.client("ec2"), aws.client("autoscaling")
    many = [f"i-{number:017x}" for number in range(201)]
    group = aws.make_group()
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("InvalidParameterValue", "The filter 'instance-id' is invalid"): lambda: ec2.describe_instance_status(
            Filters=[{"Name": "instance-id", "Values": many[:1]}]
        ),
        ("FilterLimitExceeded", "The filters have 201 values; the limit is 200"): lambda: ec2.describe_instances(
            Filters=[{"Name": "instance-id", "Values": many}]
        ),
        ("InvalidParameterValue", "InstanceIds has 101 items; the limit is 100"): lambda: ec2.describe_instance_status(
            InstanceIds=many[:101]
        ),
        ("ValidationError", "The filter 'name' is invalid"): lambda: scaling.describe_auto_scaling_groups(
            Filters=[{"Name": "name", "Values": ["x"]}]
        ),
        ("ValidationError", "InstanceIds has 51 items; the limit is 50"): lambda: scaling.set_instance_protection(
            AutoScalingGroupName=group, InstanceIds=many[:51], ProtectedFromScaleIn=True
        ),
    }
    assert [refusal(call) for call in calls.values()] == list(calls)
    recorded = aws.take_wrong_calls()
    assert [words.partition(": ")[2] for words in recorded] == [words for _, words in calls]
    assert recorded == undocumented_calls
    undocumented_calls.clear()
    assert aws.take_wrong_calls() == []


def test_an_error_names_one_unknown_id(aws: ServedAws, kind_aws: ServedAws) -> None:
    for served, named in ((aws, ABSENT[:1]), (kind_aws, ABSENT)):
        ec2 = served.client("ec2")
        for call in (
            lambda ec2=ec2: ec2.describe_instances(InstanceIds=ABSENT),
            lambda ec2=ec2: ec2.describe_instance_status(InstanceIds=ABSENT),
        ):
            code, message = refusal(call)
            assert code == "InvalidInstanceID.NotFound"
            assert [id for id in ABSENT if id in message] == named


# Rate limits


def test_operations_of_a_family_share_a_bucket(aws: ServedAws) -> None:
    with client_without_retries(aws, "ec2") as ec2, client_without_retries(aws, "autoscaling") as scaling:
        # At a hundredth of AWS's rates, the limit permits one call of each family of operations. The next call of the
        # same family is permitted five seconds later or more.
        aws.set_conditions(quick(api_rate_share=0.01))
        ec2.describe_subnets()
        assert refusal(ec2.describe_vpcs)[0] == "RequestLimitExceeded"
        ec2.describe_instance_topology()
        assert refusal(ec2.describe_instance_topology)[0] == "RequestLimitExceeded"
        scaling.describe_auto_scaling_groups()
        assert refusal(scaling.describe_policies)[0] == "Throttling"
        aws.set_conditions(QUICK)
        ec2.describe_vpcs()
        scaling.describe_policies()


# Groups with several instance types, warm pools and Capacity Rebalancing


def mixed_group(aws: ServedAws, types: list[str]) -> str:
    plain = aws.make_group()
    name = f"mixed-{plain}"
    aws.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        MixedInstancesPolicy={
            "LaunchTemplate": {
                "LaunchTemplateSpecification": {"LaunchTemplateName": plain, "Version": "$Latest"},
                "Overrides": [{"InstanceType": each} for each in types],
            },
            "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 50},
        },
        MinSize=0,
        MaxSize=5,
        DesiredCapacity=0,
        AvailabilityZones=["us-east-1a"],
        Tags=[{"Key": "everstep:fleet", "Value": "f", "PropagateAtLaunch": True}],
    )
    return name


def test_a_mixed_group_launches_the_next_type_when_the_first_has_no_capacity(aws: ServedAws) -> None:
    name = mixed_group(aws, ["p5.48xlarge", "p5e.48xlarge"])
    aws.set_conditions(quick(capacity={"p5.48xlarge": 1, "p5e.48xlarge": 1}))
    aws.client("autoscaling").set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=3)
    aws.in_service(name, 2)
    assert sorted(member["InstanceType"] for member in aws.group(name)["Instances"]) == ["p5.48xlarge", "p5e.48xlarge"]
    activities = aws.client("autoscaling").describe_scaling_activities(AutoScalingGroupName=name)["Activities"]
    assert "do not have sufficient p5e.48xlarge capacity" in activities[0]["StatusMessage"]


def test_a_mixed_group_shows_its_template_inside_its_policy_and_an_update_keeps_the_policy(aws: ServedAws) -> None:
    name = mixed_group(aws, ["p5.48xlarge", "p5e.48xlarge"])
    aws.client("autoscaling").update_auto_scaling_group(
        AutoScalingGroupName=name, NewInstancesProtectedFromScaleIn=True
    )
    group = aws.group(name)
    assert "LaunchTemplate" not in group
    policy = group["MixedInstancesPolicy"]
    assert [each["InstanceType"] for each in policy["LaunchTemplate"]["Overrides"]] == ["p5.48xlarge", "p5e.48xlarge"]
    assert policy["InstancesDistribution"]["OnDemandPercentageAboveBaseCapacity"] == 50
    seen = AwsOperator(aws.connection()).describe_group(name)
    assert seen.mixed is not None
    assert seen.mixed.instance_types == ("p5.48xlarge", "p5e.48xlarge")
    assert seen.new_instances_protected


def test_a_group_fits_whose_types_have_one_family_and_like_hardware(aws: ServedAws) -> None:
    operator = AwsOperator(aws.connection())
    group = operator.describe_group(mixed_group(aws, ["g5.2xlarge", "g5.4xlarge", "g5.8xlarge"]))
    assert group.instance_type == "g5.2xlarge", "jobs are sized for the type that the group prefers"
    assert group.mixed is not None
    assert group.mixed.shapes["g5.2xlarge"] == InstanceShape(
        accelerator_count=1, efa_count=0, memory_mib=32_768, encrypts_in_transit=True
    )
    ensured = ensure(operator, group)
    assert drift(ensured.group) == ()

    other = operator.describe_group(mixed_group(aws, ["g5.2xlarge", "g5.48xlarge"]))
    with pytest.raises(ContractViolation, match=r"g5\.48xlarge has 8 accelerators, and g5\.2xlarge has 1"):
        ensure(operator, other)


def test_a_warm_pool_and_capacity_rebalancing_are_part_of_a_groups_description(aws: ServedAws) -> None:
    name = aws.make_group()
    scaling, operator = aws.client("autoscaling"), AwsOperator(aws.connection())
    before = operator.describe_group(name)
    assert (before.has_warm_pool, before.has_capacity_rebalance) == (False, False)
    scaling.put_warm_pool(AutoScalingGroupName=name, MinSize=2)
    scaling.update_auto_scaling_group(AutoScalingGroupName=name, CapacityRebalance=True)
    after = operator.describe_group(name)
    assert (after.has_warm_pool, after.has_capacity_rebalance) == (True, True)
    assert scaling.describe_warm_pool(AutoScalingGroupName=name)["WarmPoolConfiguration"]["MinSize"] == 2
    scaling.delete_warm_pool(AutoScalingGroupName=name)
    scaling.update_auto_scaling_group(AutoScalingGroupName=name, CapacityRebalance=False)
    assert operator.describe_group(name) == before


@pytest.mark.parametrize("has_rebalance", [True, False])
def test_capacity_rebalancing_replaces_even_a_protected_member(aws: ServedAws, has_rebalance: bool) -> None:
    name = aws.make_group(desired=1, CapacityRebalance=has_rebalance, NewInstancesProtectedFromScaleIn=True)
    (id,) = aws.in_service(name, 1)
    aws.inject(Rebalance(target=id))
    aws.in_service(aws.make_group(desired=1), 1)
    if has_rebalance:
        eventually(lambda: id not in aws.members(name))
    assert (aws.in_service(name, 1) == [id]) is not has_rebalance


# A local cloud with other answers of AWS than the defaults (`AwsAnswers`)


def ended_member(aws: ServedAws) -> tuple[str, str]:
    """Make a group with Everstep's settings, and terminate its member in EC2. Return the group and the member."""
    group = aws.make_group(desired=1)
    scaling = aws.client("autoscaling")
    scaling.suspend_processes(AutoScalingGroupName=group, ScalingProcesses=["ReplaceUnhealthy"])
    scaling.put_lifecycle_hook(
        AutoScalingGroupName=group,
        LifecycleHookName="notice",
        LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
        HeartbeatTimeout=600,
        DefaultResult="CONTINUE",
    )
    (id,) = aws.in_service(group, 1)
    aws.client("ec2").terminate_instances(InstanceIds=[id])
    return group, id


def test_a_hook_holds_a_member_whose_instance_has_ended(aws: ServedAws) -> None:
    group, id = ended_member(aws)
    scaling = aws.client("autoscaling")
    eventually(lambda: aws.group(group)["Instances"][0]["HealthStatus"] == "Unhealthy")
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=id, ShouldDecrementDesiredCapacity=True)
    assert eventually(lambda: aws.members(group, "Terminating:Wait")) == [id]
    scaling.complete_lifecycle_action(
        AutoScalingGroupName=group, LifecycleHookName="notice", InstanceId=id, LifecycleActionResult="CONTINUE"
    )
    eventually(lambda: not aws.members(group))


def test_other_answers_change_the_local_cloud(kind_aws: ServedAws) -> None:
    aws = kind_aws
    group, id = ended_member(aws)
    eventually(lambda: id not in aws.members(group))
    aws.in_service(group, 1)
    aws.set_conditions(Conditions(boot_delay_seconds=0.5))
    group = aws.make_group(desired=1, NewInstancesProtectedFromScaleIn=True)
    (id,) = eventually(lambda: aws.members(group, "Pending"))
    assert is_protected(aws, group, id)
    protect(aws, group, id)
    aws.in_service(group, 1)
    (found,) = aws.client("ec2").describe_instance_topology(InstanceIds=[id])["Instances"]
    assert len(found["NetworkNodes"]) == 1


def test_both_pages_name_the_delay_of_a_stale_view_and_that_there_is_none_without_it() -> None:
    assert Conditions().visibility_seconds == ClusterOptions().conditions.visibility_seconds == 0.0
    seconds = f"{AwsAnswers().visibility_seconds:g}"
    docs = Path(__file__).parents[2] / "docs"
    (condition,) = re.findall(r"^\| `visibility_seconds` \| (.+?) \|", (docs / "local-cloud.md").read_text(), re.M)
    assert condition.startswith(f"0; under `stale-view` [{seconds}](")
    (question,) = re.findall(r"\| `visibility_seconds` \| (.+?) \|", (docs / "aws.md").read_text())
    assert question == f"{seconds} s, under `stale-view`"
