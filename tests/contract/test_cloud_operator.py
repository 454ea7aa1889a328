"""`CloudOperator`: the same tests run against the fake and against boto3 on the local cloud."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from control_plane.cloud.aws import AwsOperator
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.contract import SUSPENDED_PROCESSES, TERMINATION_HOOK, Ensured, changes, drift, ensure
from control_plane.cloud.errors import CloudError, ContractViolation, GroupNotOurs, InvalidRequest, NotFound
from control_plane.cloud.operator import CloudOperator, Ec2State, GroupState, InstanceStatus
from everstep.protocol.ids import NodeId
from infra.local_cloud.fault_kinds import FailStatus
from infra.local_cloud.faults import Conditions
from tests.fakes.cloud import FakeOperator
from tests.unit.local_cloud.served import QUICK, ServedAws, eventually, served_aws

ABSENT = NodeId("i-0123456789abcdef0")


@dataclass
class World:
    """A `CloudOperator`, and functions that change its cloud without the operator, as AWS and people do."""

    operator: CloudOperator
    make_group: Callable[..., str]
    end_instance: Callable[[NodeId], None]
    limit_capacity: Callable[[str, int | None], None]
    add_policy: Callable[[str], None]
    release_policy: Callable[[str], None]
    advance: Callable[[], None]
    fail_check: Callable[[NodeId, str], None]

    def until(self, name: str, check: Callable[[GroupState], bool]) -> GroupState:
        """Advance time until `check` accepts the state of the group, and return that state."""

        def look() -> GroupState | None:
            self.advance()
            group = self.operator.describe_group(name)
            return group if check(group) else None

        group: GroupState = eventually(look)
        return group

    def in_service(self, name: str, count: int) -> list[NodeId]:
        group = self.until(
            name, lambda group: [member.lifecycle_state for member in group.members] == ["InService"] * count
        )
        return [member.instance_id for member in group.members]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture(params=["fake", "aws"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "fake":
        yield _fake_world()
        return
    served: ServedAws = request.getfixturevalue("served")
    yield _aws_world(served)
    served.clear()
    served.set_conditions(QUICK)
    auto_scaling = served.client("autoscaling")
    for group in auto_scaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        auto_scaling.delete_auto_scaling_group(AutoScalingGroupName=group["AutoScalingGroupName"], ForceDelete=True)


def _fake_world() -> World:
    fake = FakeOperator(boot_delay=timedelta(seconds=2))
    count = iter(range(100))

    def make_group(
        *, desired: int = 0, min_size: int = 0, max_size: int = 20, tag: str | None = "everstep:fleet", zones: int = 1
    ) -> str:
        name = f"group-{next(count)}"
        tags = {tag: "f"} if tag else {}
        fake.create_group(
            name,
            desired=desired,
            min_size=min_size,
            max_size=max_size,
            tags=tags,
            availability_zones=("us-east-1a", "us-east-1b")[:zones],
        )
        return name

    def limit(_: str, limit: int | None) -> None:
        fake.capacity = limit

    def policies(*names: str) -> Callable[[str], None]:
        return lambda name: fake.change_group(name, lambda group: replace(group, scaling_policies=names))

    advance = lambda: fake.advance(timedelta(seconds=1))  # noqa: E731

    def fail_check(id: NodeId, check: str) -> None:
        fake.failed_checks[id] = (*fake.failed_checks.get(id, ()), check)

    return World(fake, make_group, fake.end_instance, limit, policies("cpu"), policies(), advance, fail_check)


def _aws_world(aws: ServedAws) -> World:
    connection = aws.connection()
    names = ["us-east-1a", "us-east-1b"]

    def make_group(*, zones: int = 1, **more: Any) -> str:
        return aws.make_group(AvailabilityZones=names[:zones], **more)

    def limit(name: str, limit: int | None) -> None:
        capacity = {} if limit is None else {f"c7i.{name}": limit}
        aws.set_conditions(Conditions(boot_delay_seconds=0.05, launch_retry_seconds=0.1, capacity=capacity))

    def add_policy(name: str) -> None:
        aws.client("autoscaling").put_scaling_policy(
            AutoScalingGroupName=name, PolicyName="cpu", AdjustmentType="ChangeInCapacity", ScalingAdjustment=1
        )

    return World(
        # This clock advances by a minute at each reading. The operator keeps hooks and policies for only five seconds,
        # so it reads them at every call.
        AwsOperator(connection, monotonic=iter(range(0, 10**9, 60)).__next__),
        make_group,
        lambda id: aws.client("ec2").terminate_instances(InstanceIds=[id]),
        limit,
        add_policy,
        lambda name: aws.client("autoscaling").delete_policy(AutoScalingGroupName=name, PolicyName="cpu"),
        lambda: None,
        lambda id, check: aws.inject(FailStatus(target=id, check=check)),
    )


def test_a_group_is_described_whole(world: World) -> None:
    name = world.make_group(desired=2, max_size=7)
    ids = world.in_service(name, 2)
    group = world.operator.describe_group(name)
    assert (group.name, group.desired_count, group.min_size, group.max_size) == (name, 2, 0, 7)
    assert group.availability_zones == ("us-east-1a",)
    assert group.launch_template is not None
    assert group.instance_type
    assert group.tags == {"everstep:fleet": "f"}
    assert group.status == ""
    assert [member.instance_id for member in group.members] == ids
    for member in group.members:
        assert (member.health_status, member.is_protected, member.is_leaving) == ("Healthy", False, False)
        assert (member.availability_zone, member.instance_type) == ("us-east-1a", group.instance_type)


def test_instances_are_described_and_unknown_ones_are_absent(world: World) -> None:
    name = world.make_group(desired=1)
    (id,) = world.in_service(name, 1)
    found = world.operator.describe_instances([id, ABSENT])
    assert set(found) == {id, ABSENT}
    assert found[ABSENT].state is Ec2State.ABSENT
    assert not found[ABSENT].state.has_ended
    state = found[id]
    assert state.state is Ec2State.RUNNING
    assert not state.state.has_ended
    assert state.private_ip
    assert state.availability_zone == "us-east-1a"
    assert state.launched_at is not None
    assert state.launched_at.tzinfo is not None
    assert world.operator.describe_instances([]) == {}
    times = world.operator.image_times([state.image_id, "ami-0123456789abcdef0"])
    assert times.keys() == {state.image_id}
    assert times[state.image_id].tzinfo is not None
    assert world.operator.image_times([]) == {}


def test_capacity_goes_up_by_number_and_down_by_name(world: World) -> None:
    name = world.make_group()
    ensure(world.operator, world.operator.describe_group(name))
    world.operator.set_desired(name, 3)
    ids = world.in_service(name, 3)
    assert all(member.is_protected for member in world.operator.describe_group(name).members)
    world.operator.terminate_member(ids[1], decrement=True)
    group = world.until(name, lambda group: any(member.awaits_termination for member in group.members))
    assert group.desired_count == 2
    world.operator.terminate_member(ids[1], decrement=True)
    assert world.operator.describe_group(name).desired_count == 2, "a repeated request decrements once"
    world.operator.complete_termination(name, TERMINATION_HOOK.name, ids[1])
    assert sorted(world.in_service(name, 2)) == sorted([ids[0], ids[2]])
    world.operator.complete_termination(name, TERMINATION_HOOK.name, ids[1])


def test_a_member_that_ec2_ended_stays_until_it_is_removed_and_that_brings_its_replacement(world: World) -> None:
    name = world.make_group(desired=2)
    ensure(world.operator, world.operator.describe_group(name))
    lost, kept = world.in_service(name, 2)
    world.end_instance(lost)
    group = world.until(name, lambda group: any(member.health_status == "Unhealthy" for member in group.members))
    assert {member.instance_id for member in group.members} == {lost, kept}
    ended = world.operator.describe_instances([lost])[lost]
    assert ended.state.has_ended
    assert "User initiated" in ended.state_reason
    world.operator.terminate_member(lost, decrement=False)
    # AWS's terminating hook may hold even an instance that has already ended, so release it.
    world.operator.complete_termination(name, TERMINATION_HOOK.name, lost)
    group = world.until(
        name,
        lambda group: (
            lost not in {m.instance_id for m in group.members}
            and [m.lifecycle_state for m in group.members] == ["InService"] * 2
        ),
    )
    assert group.desired_count == 2
    assert kept in {member.instance_id for member in group.members}
    with pytest.raises(NotFound):
        world.operator.terminate_member(lost, decrement=False)


def test_failed_launches_are_told_until_one_succeeds(world: World) -> None:
    name = world.make_group(desired=1)
    world.in_service(name, 1)
    assert world.operator.recent_launch_failures(name) == ()
    world.limit_capacity(name, 1)
    world.operator.set_desired(name, 2)
    failures = eventually(lambda: world.operator.recent_launch_failures(name))
    assert "We currently do not have sufficient" in failures[0].message
    assert failures[0].at.tzinfo is not None
    assert failures[0].at <= datetime.now(UTC) + timedelta(minutes=1)
    world.limit_capacity(name, None)
    world.in_service(name, 2)
    assert world.operator.recent_launch_failures(name) == ()


def test_a_launch_returns_instances_and_failures_at_once_and_a_token_launches_once(world: World) -> None:
    name = world.make_group(desired=1)
    world.in_service(name, 1)
    world.limit_capacity(name, 2)
    launched = world.operator.launch_instances(name, 2, zone="us-east-1a", token="first")
    (failure,) = launched.failures
    assert (failure.code, failure.is_shortage) == ("InsufficientInstanceCapacity", True)
    assert str(launched) == f"{launched.instance_ids[0]}, InsufficientInstanceCapacity"
    assert world.operator.describe_group(name).desired_count == 3
    assert world.operator.recent_launch_failures(name)
    assert world.operator.launch_instances(name, 2, zone="us-east-1a", token="first").instance_ids == (
        launched.instance_ids
    )
    assert set(launched.instance_ids) <= {member.instance_id for member in world.operator.describe_group(name).members}
    with pytest.raises(InvalidRequest) as mismatch:
        world.operator.launch_instances(name, 1, zone="us-east-1a", token="first")
    assert mismatch.value.code == "IdempotentParameterMismatch"
    world.limit_capacity(name, None)
    world.in_service(name, 3)
    assert world.operator.recent_launch_failures(name) == ()


def test_a_launch_above_the_maximum_size_or_in_another_zone_is_refused(world: World) -> None:
    name = world.make_group(desired=0, max_size=1)
    for count, zone, token in ((2, "us-east-1a", "a"), (1, "us-east-1b", "b")):
        with pytest.raises(InvalidRequest) as refusal:
            world.operator.launch_instances(name, count, zone=zone, token=token)
        assert refusal.value.code == "ValidationError"
    assert world.operator.describe_group(name).members == ()


def test_a_suspension_is_told_with_its_reason_and_resumed(world: World) -> None:
    name = world.make_group(desired=0)
    world.operator.suspend_processes(name, ["Launch"])
    group = world.operator.describe_group(name)
    assert "Launch" in group.suspended_processes
    assert not group.is_suspended_by_aws("Launch"), "a user's"
    world.operator.resume_processes(name, ["Launch"])
    world.operator.resume_processes(name, [])
    assert "Launch" not in world.operator.describe_group(name).suspended_processes


def test_a_held_termination_lasts_as_long_as_it_is_held(world: World) -> None:
    name = world.make_group(desired=1)
    (id,) = world.in_service(name, 1)
    ensure(world.operator, world.operator.describe_group(name))
    world.operator.terminate_member(id, decrement=True)
    world.until(name, lambda group: group.members[0].awaits_termination)
    world.operator.hold_termination(name, TERMINATION_HOOK.name, id)
    assert world.operator.describe_group(name).members[0].awaits_termination
    world.operator.complete_termination(name, TERMINATION_HOOK.name, id)
    world.until(name, lambda group: not group.members)
    world.operator.hold_termination(name, TERMINATION_HOOK.name, id)


def test_the_console_of_an_instance_is_text_and_that_of_an_unknown_one_is_refused(world: World) -> None:
    (id,) = world.in_service(world.make_group(desired=1), 1)
    assert world.operator.console_output(id).decode()
    with pytest.raises(NotFound):
        world.operator.console_output(ABSENT)


def test_an_instance_that_is_well_or_unknown_has_no_status_to_tell(world: World) -> None:
    name = world.make_group(desired=1)
    (id,) = world.in_service(name, 1)
    assert world.operator.statuses([id, ABSENT]) == {}


def test_a_status_check_that_fails_is_told_by_its_name(world: World) -> None:
    name = world.make_group(desired=1)
    # Give the group the settings that Everstep requires. A group without them would terminate the instance immediately.
    ensure(world.operator, world.operator.describe_group(name))
    (id,) = world.in_service(name, 1)
    world.fail_check(id, "system")
    assert world.operator.statuses([id, ABSENT]) == {id: InstanceStatus(failed_checks=("system",))}
    world.fail_check(id, "instance")
    assert world.operator.statuses([id])[id].failed_checks == ("system", "instance")


def test_a_group_without_the_tag_is_not_touched(world: World) -> None:
    name = world.make_group(tag="owner")
    operator = world.operator
    for call in (
        lambda: operator.describe_group(name),
        lambda: operator.set_desired(name, 1),
        lambda: operator.complete_termination(name, "h", ABSENT),
        lambda: operator.protect_new_instances(name),
        lambda: operator.suspend_processes(name, ["Launch"]),
        lambda: operator.resume_processes(name, ["Launch"]),
        lambda: operator.hold_termination(name, "h", ABSENT),
        lambda: operator.put_termination_hook(name, TERMINATION_HOOK),
        lambda: ensure(operator, operator.describe_group(name)),
    ):
        with pytest.raises(GroupNotOurs, match="everstep:fleet"):
            call()


def test_a_member_of_a_group_without_the_tag_is_not_ended(world: World, served: ServedAws) -> None:
    name = world.make_group(desired=1, tag="owner")
    if isinstance(world.operator, FakeOperator):
        id = next(iter(world.operator._groups[name].members))
    else:
        (id,) = served.in_service(name, 1)
    with pytest.raises(GroupNotOurs):
        world.operator.terminate_member(NodeId(id), decrement=True)


def test_what_does_not_exist_or_is_out_of_bounds_is_refused(world: World) -> None:
    with pytest.raises(NotFound, match="none"):
        world.operator.describe_group("none")
    with pytest.raises(NotFound):
        world.operator.terminate_member(ABSENT, decrement=True)
    name = world.make_group(max_size=3)
    with pytest.raises(InvalidRequest) as error:
        world.operator.set_desired(name, 4)
    assert error.value.code == "ValidationError"
    with pytest.raises(InvalidRequest):
        world.operator.protect_members(name, [ABSENT])


def test_nobody_is_ended_with_capacity_that_the_group_must_have(world: World) -> None:
    name = world.make_group(desired=1, min_size=1)
    (id,) = world.in_service(name, 1)
    with pytest.raises(InvalidRequest, match=r"desiredSize equals minSize \(1\)") as error:
        world.operator.terminate_member(id, decrement=True)
    assert error.value.code == "ValidationError"
    assert world.in_service(name, 1) == [id]


def test_ensure_makes_a_group_fit_and_then_changes_nothing(world: World) -> None:
    name = world.make_group(desired=1)
    world.in_service(name, 1)
    before = world.operator.describe_group(name)
    assert len(drift(before)) == 4
    ensured = ensure(world.operator, world.operator.describe_group(name))
    assert ensured.made == changes(before)
    after = ensured.group
    assert drift(after) == ()
    assert after.suspended_processes >= SUSPENDED_PROCESSES
    assert "Launch" not in after.suspended_processes
    assert after.new_instances_protected
    assert [hook.heartbeat_timeout for hook in after.hooks] == [timedelta(seconds=60)]
    assert all(member.is_protected for member in after.members)
    assert ensure(world.operator, world.operator.describe_group(name)) == Ensured(group=after, made=())
    assert drift(world.operator.describe_group(name)) == ()


def test_ensure_shortens_a_hook_and_leaves_other_suspensions(world: World) -> None:
    name = world.make_group()
    world.operator.suspend_processes(name, ["AddToLoadBalancer"])
    world.operator.put_termination_hook(
        name, replace(TERMINATION_HOOK, name="theirs", heartbeat_timeout=timedelta(hours=1))
    )
    after = ensure(world.operator, world.operator.describe_group(name)).group
    assert [(hook.name, hook.heartbeat_timeout) for hook in after.hooks] == [("theirs", timedelta(seconds=60))]
    assert "AddToLoadBalancer" in after.suspended_processes


def test_ensure_refuses_what_a_person_must_decide_and_changes_nothing(world: World) -> None:
    name = world.make_group(zones=2)
    with pytest.raises(ContractViolation, match="2 Availability Zones"):
        ensure(world.operator, world.operator.describe_group(name))
    assert world.operator.describe_group(name).suspended_processes == frozenset()
    name = world.make_group()
    world.add_policy(name)
    with pytest.raises(ContractViolation, match="cpu"):
        ensure(world.operator, world.operator.describe_group(name))
    assert not world.operator.describe_group(name).new_instances_protected
    world.release_policy(name)
    assert drift(ensure(world.operator, world.operator.describe_group(name)).group) == ()


def test_many_threads_may_ask_at_once(world: World) -> None:
    from concurrent.futures import ThreadPoolExecutor

    name = world.make_group()
    ensure(world.operator, world.operator.describe_group(name))

    def work(number: int) -> None:
        with suppress(NotFound):  # another thread may already have terminated the member
            if number % 3 == 0:
                world.operator.set_desired(name, 5)
            elif number % 3 == 1:
                world.operator.describe_group(name)
            else:
                members = world.operator.describe_group(name).members
                if members:
                    world.operator.terminate_member(members[0].instance_id, decrement=False)
                    world.operator.complete_termination(name, TERMINATION_HOOK.name, members[0].instance_id)

    if isinstance(world.operator, AwsOperator):
        world.operator._monotonic = lambda: 0.0  # use a constant clock, because threads cannot share the iterator
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(24)))

    def settle() -> bool:
        for member in world.operator.describe_group(name).members:
            world.operator.complete_termination(name, TERMINATION_HOOK.name, member.instance_id)
        world.advance()
        return [member.lifecycle_state for member in world.operator.describe_group(name).members] == ["InService"] * 5

    eventually(settle)


def test_a_cloud_that_does_not_answer_is_a_retryable_error() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # the port is bound but does not listen, so it accepts no connection
        operator = AwsOperator(
            Connection(
                CloudSettings(mode=CloudMode.LOCAL, endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}"),
                max_attempts=1,
            )
        )
        with pytest.raises(CloudError) as error:
            operator.describe_group("g")
        assert error.value.retryable


def test_a_member_is_rebooted_by_name_and_stays_a_member(world: World) -> None:
    name = world.make_group(desired=2)
    ids = world.in_service(name, 2)
    world.operator.reboot_member(name, ids[0])
    assert world.in_service(name, 2) == ids, "the same instances"
    assert world.operator.describe_instances([ids[0]])[ids[0]].state in (Ec2State.PENDING, Ec2State.RUNNING)
    with pytest.raises(NotFound):
        world.operator.reboot_member(name, ABSENT)
    world.operator.terminate_member(ids[1], decrement=True)
    with pytest.raises(NotFound):
        world.operator.reboot_member(name, ids[1])


def test_the_tags_of_a_nodes_work_are_set_replaced_and_removed(world: World) -> None:
    name = world.make_group(desired=2)
    ids = world.in_service(name, 2)

    def tags() -> list[Mapping[str, str]]:
        return [state.work_tags for state in world.operator.describe_instances(ids).values()]

    assert tags() == [{}, {}]
    for job in ("gpt", "bert"):
        wanted = {"everstep:job": job, "everstep:project": "team"}
        world.operator.set_work_tags(ids, wanted)
        assert tags() == [wanted, wanted]
    for _ in range(2):
        world.operator.set_work_tags(ids[:1], {})
        assert tags() == [{}, wanted]
    with pytest.raises(NotFound):
        world.operator.set_work_tags([ABSENT], wanted)


def test_an_instance_of_a_group_without_the_tag_is_neither_rebooted_nor_struck(world: World) -> None:
    name = world.make_group(tag=None)
    with pytest.raises(GroupNotOurs):
        world.operator.reboot_member(name, ABSENT)
    with pytest.raises(GroupNotOurs):
        world.operator.strike_member(name, ABSENT)


def test_a_member_is_struck_by_name_and_its_group_is_not_told(world: World) -> None:
    name = world.make_group(desired=2)
    struck, other = world.in_service(name, 2)
    world.operator.strike_member(name, struck)
    states = world.operator.describe_instances([struck, other])
    assert (states[struck].state.has_ended, states[other].state.has_ended) == (True, False)
    with pytest.raises(NotFound):
        world.operator.strike_member(name, ABSENT)


def test_ec2_refuses_a_filter_that_it_does_not_document(served: ServedAws, undocumented_calls: list[str]) -> None:
    with pytest.raises(ClientError, match=r"InvalidParameterValue.*'instance-id' is invalid"):
        served.client("ec2").describe_instance_status(Filters=[{"Name": "instance-id", "Values": ["i-1"]}])
    assert undocumented_calls == ["DescribeInstanceStatus: The filter 'instance-id' is invalid"]
    undocumented_calls.clear()
    assert served.take_wrong_calls() == ["DescribeInstanceStatus: The filter 'instance-id' is invalid"]
    assert (
        served.client("ec2").describe_instances(Filters=[{"Name": "instance-id", "Values": ["i-1"]}])["Reservations"]
        == []
    )
