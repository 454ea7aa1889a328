"""Tests the settings that Everstep requires of an Auto Scaling group.

One sentence describes each setting of a group that differs from the required one.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from control_plane.cloud.contract import SUSPENDED_PROCESSES, TERMINATION_HOOK, changes, checks, drift
from control_plane.cloud.operator import (
    FLEET_TAG,
    GroupState,
    InstanceShape,
    LaunchTemplateRef,
    MemberState,
    MixedInstances,
)
from everstep.protocol.ids import NodeId

MEMBER = MemberState(
    instance_id=NodeId("i-1"),
    lifecycle_state="InService",
    health_status="Healthy",
    is_protected=True,
    availability_zone="us-east-1a",
)
FITS = GroupState(
    name="g",
    desired_count=1,
    min_size=0,
    max_size=9,
    availability_zones=("us-east-1a",),
    members=(MEMBER,),
    suspended_processes=SUSPENDED_PROCESSES,
    new_instances_protected=True,
    hooks=(TERMINATION_HOOK,),
    scaling_policies=(),
    tags={FLEET_TAG: "f"},
    launch_template=LaunchTemplateRef(template_id="lt-1", name="g", version="1"),
    instance_type="p5.48xlarge",
)

P5 = InstanceShape(accelerator_count=8, efa_count=32, memory_mib=2_097_152)
G6 = InstanceShape(accelerator_count=4, efa_count=1, memory_mib=393_216)


def mixed(**shapes: InstanceShape) -> MixedInstances:
    """Return a policy with these instance types, in this order."""
    return MixedInstances(instance_types=tuple(shapes), shapes=shapes)


ALIKE = mixed(**{"g6.12xlarge": replace(G6, memory_mib=196_608), "g6.24xlarge": replace(G6, efa_count=2)})
"""The second type has more memory and more EFA interfaces than the first."""
LAUNCHING_TRANSITION = "autoscaling:EC2_INSTANCE_LAUNCHING"
LONG_HOOK = replace(TERMINATION_HOOK, name="slow", heartbeat_timeout=timedelta(seconds=61))


def test_a_group_that_fits_has_no_drift() -> None:
    assert drift(FITS) == ()
    assert drift(replace(FITS, suspended_processes=SUSPENDED_PROCESSES | {"AddToLoadBalancer"})) == ()
    assert drift(replace(FITS, suspended_processes=SUSPENDED_PROCESSES | {"Launch"})) == ()
    assert drift(replace(FITS, mixed=MixedInstances(instance_types=("p5.48xlarge",)))) == ()
    assert drift(replace(FITS, mixed=MixedInstances(instance_types=()))) == ()
    assert drift(replace(FITS, mixed=ALIKE)) == ()
    assert drift(replace(FITS, hooks=(TERMINATION_HOOK, replace(LONG_HOOK, transition=LAUNCHING_TRANSITION)))) == ()


def test_a_sentence_names_some_of_many_members() -> None:
    """A sentence names only some of many members, because the API refuses a reason of more than 4,096 characters."""
    many = tuple(replace(MEMBER, instance_id=NodeId(f"i-{n:017x}"), is_protected=False) for n in range(1000))
    (change,) = changes(replace(FITS, members=many))
    assert change.why.endswith(f", i-{19:017x} and 980 more.")
    assert len(change.why) < 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"availability_zones": ("us-east-1a", "us-east-1b")}, "spans 2 Availability Zones (us-east-1a, us-east-1b)"),
        ({"availability_zones": ()}, "spans 0 Availability Zones"),
        ({"scaling_policies": ("cpu",)}, "scaling policies (cpu)"),
        ({"launch_template": None}, "no single launch template"),
        ({"instance_type": ""}, "names no instance type"),
        ({"mixed": mixed(**{"p5.48xlarge": P5, "p5en.48xlarge": P5})}, "(p5.48xlarge, p5en.48xlarge)"),
        ({"mixed": mixed(**{"p5.48xlarge": P5, "p5en.48xlarge": P5})}, "belong to the families p5, p5en."),
        (
            {"mixed": mixed(**{"g6.24xlarge": G6, "g6.48xlarge": replace(G6, accelerator_count=8)})},
            "g6.48xlarge has 8 accelerators, and g6.24xlarge has 4.",
        ),
        (
            {"mixed": mixed(**{"g6.24xlarge": G6, "g6.12xlarge": replace(G6, efa_count=0)})},
            "g6.12xlarge has 0 EFA interfaces, fewer than g6.24xlarge with 1.",
        ),
        (
            {"mixed": mixed(**{"g6.24xlarge": G6, "g6.12xlarge": replace(G6, memory_mib=196_608)})},
            "g6.12xlarge has 196608 MiB of memory, less than g6.24xlarge with 393216 MiB.",
        ),
        *[
            ({"mixed": MixedInstances(instance_types=("p5.48xlarge",), features=(feature,))}, f"uses {feature},")
            for feature in ("InstanceRequirements", "WeightedCapacity", "LaunchTemplateSpecification", "ImageId")
        ],
        ({"has_capacity_rebalance": True}, "g --no-capacity-rebalance."),
        ({"has_warm_pool": True}, "delete-warm-pool --auto-scaling-group-name g."),
        ({"suspended_processes": SUSPENDED_PROCESSES | {"Terminate"}}, "suspends Terminate: "),
        ({"suspended_processes": SUSPENDED_PROCESSES | {"HealthCheck"}}, "--scaling-processes HealthCheck."),
        (
            {"suspended_processes": SUSPENDED_PROCESSES | {"Terminate", "HealthCheck"}},
            "--scaling-processes Terminate HealthCheck.",
        ),
        ({"status": "Delete in progress"}, "'Delete in progress'"),
        ({"new_instances_protected": False}, "not protected from scale-in"),
        ({"members": (replace(MEMBER, is_protected=False),)}, "without protection from scale-in: i-1"),
        ({"hooks": ()}, "no terminating lifecycle hook"),
        ({"hooks": (replace(TERMINATION_HOOK, transition=LAUNCHING_TRANSITION),)}, "no terminating lifecycle hook"),
        ({"hooks": (LONG_HOOK,)}, "slow of g waits up to 61 s; the contract allows 60 s"),
        *[
            ({"suspended_processes": SUSPENDED_PROCESSES - {process}}, f"does not suspend {process}:")
            for process in sorted(SUSPENDED_PROCESSES)
        ],
    ],
)
def test_each_difference_is_one_sentence_that_names_the_group(change: dict[str, object], words: str) -> None:
    (sentence,) = drift(replace(FITS, **change))  # type: ignore[arg-type]
    assert words in sentence
    assert "g" in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    "state",
    [
        *("Pending", "Pending:Wait", "Pending:Proceed", "EnteringStandby", "Standby"),
        *("Terminating", "Terminating:Wait", "Terminated", "Detaching"),
    ],
)
def test_only_a_member_in_service_lacks_protection(state: str) -> None:
    """Only a member in service must have protection, because AWS refuses SetInstanceProtection in other states."""
    assert drift(replace(FITS, members=(replace(MEMBER, is_protected=False, lifecycle_state=state),))) == ()


@pytest.mark.parametrize(
    ("change", "setting", "before", "after"),
    [
        ({"new_instances_protected": False}, "NewInstancesProtectedFromScaleIn", "false", "true"),
        ({"members": (replace(MEMBER, is_protected=False),)}, "Instances.ProtectedFromScaleIn", "false", "true"),
        (
            {"suspended_processes": frozenset({"AddToLoadBalancer", "AZRebalance"})},
            "SuspendedProcesses",
            "AZRebalance, AddToLoadBalancer",
            "AZRebalance, AddToLoadBalancer, AlarmNotification, InstanceRefresh, ReplaceUnhealthy, ScheduledActions",
        ),
        (
            {"hooks": ()},
            "LifecycleHooks.everstep-termination",
            None,
            "autoscaling:EC2_INSTANCE_TERMINATING, 60 s, then CONTINUE",
        ),
        ({"hooks": (LONG_HOOK,)}, "LifecycleHooks.slow.HeartbeatTimeout", "61 s", "60 s"),
    ],
)
def test_a_change_says_what_was_and_what_is_to_be_and_the_sentence_of_the_drift(change, setting, before, after) -> None:
    group = replace(FITS, **change)
    (found,) = changes(group)
    assert (found.setting, found.before, found.after) == (setting, before, after)
    assert drift(group) == (found.why,)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"status": "Delete in progress"}, "Status"),
        ({"availability_zones": ("a", "b")}, "AvailabilityZones"),
        ({"scaling_policies": ("cpu",)}, "ScalingPolicies"),
        ({"launch_template": None}, "LaunchTemplate"),
        ({"instance_type": ""}, "LaunchTemplate"),
        ({"mixed": mixed(**{"a.large": G6, "b.large": G6})}, "MixedInstancesPolicy"),
        ({"has_capacity_rebalance": True}, "CapacityRebalance"),
        ({"has_warm_pool": True}, "WarmPoolConfiguration"),
        ({"suspended_processes": SUSPENDED_PROCESSES | {"Terminate"}}, "SuspendedProcesses"),
    ],
)
def test_what_only_its_owner_may_change_is_checked_and_no_change(change, setting) -> None:
    group = replace(FITS, **change)
    assert [check.setting for check in checks(group) if not check.is_met] == [setting]
    assert changes(group) == ()
    assert all(check.is_met and "g" in check.words and check.words.endswith(".") for check in checks(FITS))


def test_everything_at_once_is_told_in_a_fixed_order() -> None:
    worst = replace(
        FITS,
        availability_zones=(),
        scaling_policies=("a",),
        new_instances_protected=False,
        suspended_processes=frozenset(),
        hooks=(),
    )
    assert len(drift(worst)) == 5
    assert drift(worst) == drift(worst)
