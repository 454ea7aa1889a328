"""Tests facts that the control plane rarely reads from AWS.

The facts are scheduled events, instances that a lifecycle hook holds, the network topology, and the reasons of failed
launches.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from control_plane.accounts.reasons import sentence
from control_plane.api.prometheus import ServerFacts, exposition
from control_plane.cloud.contract import ensure
from control_plane.cloud.errors import CloudUnavailable, Throttled
from control_plane.cloud.operator import Ec2State, GroupState, InstanceState
from control_plane.core.absence import UNJOINED_SECONDS
from control_plane.db import fleets, notices
from control_plane.db.notices import NoticeRecord
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.cloud_watch import CLOSE_SECONDS, CloudWatch
from control_plane.loop.memos import capacity_wait_of
from control_plane.loop.runner import Runner
from everstep.protocol.ids import FleetName, NodeId
from tests.fakes.cloud import EPOCH, IMAGE
from tests.sim.world import FLEET, GROUP, START, World

FACTS = ServerFacts(
    version="1",
    jobs=(),
    shards={},
    recoveries=(),
    fleets=(),
    nodes=(),
    connected=frozenset(),
    refused_count=0,
)


def stored(world: World) -> tuple[NoticeRecord, ...]:
    with world.database.read() as session:
        return notices.of_fleet(session, FLEET)


async def test_a_scheduled_event_is_a_notice_until_it_is_taken_back(world: World) -> None:
    world.submit()
    await world.running()
    agent = world.team()[0]
    world.schedule(agent, 86_400.0)
    await world.tick()
    assert stored(world) == (), "asked for once a minute"
    world.runner.cloud.poll_details()
    await world.tick()
    (notice,) = stored(world)
    assert (notice.node_id, notice.kind, notice.event_id) == (
        agent.node_id,
        "maintenance",
        f"instance-event-{agent.number}",
    )
    assert notice.message.startswith("instance-retirement, from 2026-03-02 00:00 UTC: The instance is running")
    world.schedule(agent, 50_000.0)
    await world.tick(CLOSE_SECONDS)
    assert stored(world)[0].ends_at == world.now + timedelta(seconds=50_000 - CLOSE_SECONDS), "it was moved"
    world.operator.events.clear()
    await world.tick(CLOSE_SECONDS)
    assert stored(world) == ()


async def test_status_checks_of_a_silent_node_are_asked_every_few_seconds_and_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[NodeId]] = []
    statuses = world.operator.statuses
    monkeypatch.setattr(world.operator, "statuses", lambda ids: (asked.append(sorted(ids)), statuses(ids))[1])
    world.submit(nodes=3)
    await world.running()
    cloud, (agent, *_) = world.runner.cloud, world.team()
    world.operator.failed_checks[agent.node_id] = ("system",)
    await world.tick(CLOSE_SECONDS)
    assert asked[-1] == sorted(world.agents)
    asked.clear()
    for _ in range(20):
        await world.train(1)
    assert asked == [], "all are heard"
    agent.is_deaf = True
    agent.disconnect()
    for _ in range(40):
        await world.train(1)
    assert 3 <= len(asked) <= 4
    assert {tuple(ids) for ids in asked} == {(agent.node_id,)}
    assert cloud.failed_status_check(FLEET, agent.node_id) == "EC2 reports its system status check as impaired"
    assert world.job().generation == 1, "its ranks live: steps advance"
    world.operator.failed_checks.clear()
    for _ in range(12):
        await world.train(1)
    assert cloud.failed_status_check(FLEET, agent.node_id) == ""
    world.operator.failed_checks[agent.node_id] = ("system", "instance")
    for _ in range(12):
        await world.train(1)
    assert (
        cloud.failed_status_check(FLEET, agent.node_id)
        == "EC2 reports its system and instance status checks as impaired"
    )
    monkeypatch.setattr(world.operator, "statuses", lambda ids: (_ for _ in ()).throw(CloudUnavailable("no answer")))
    for _ in range(70):
        await world.train(1)
    assert cloud.failed_status_check(FLEET, agent.node_id) == "", "what EC2 said half a minute ago is no evidence"


async def test_network_nodes_become_failure_domains_once_and_unknown_stays_unknown(world: World) -> None:
    known = [f"i-{number:017x}" for number in (1, 2, 3, 4)]
    world.operator.topology = {node: ("top", "middle", f"rack-{number % 2}") for number, node in enumerate(known)}  # type: ignore[misc]
    world.submit()
    await world.running()
    assert [node.failure_domain for node in world.nodes().values()] == ["rack-0", "rack-1", "rack-0", "rack-1", None]
    racks = {node_id: node.failure_domain for node_id, node in world.nodes().items()}
    for rank in world.plan().ranks:
        assert len({racks[holder] for holder in rank.holders}) == 2, (
            "a shard and its replica hang on different network nodes"
        )
    world.operator.topology.clear()
    world.start_server()
    await world.tick()
    assert next(iter(world.nodes().values())).failure_domain == "rack-0", "stored, for the servers to come"


async def test_the_age_of_an_image_is_read_once_and_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    image_times = world.operator.image_times
    monkeypatch.setattr(world.operator, "image_times", lambda ids: (asked.append(list(ids)), image_times(ids))[1])
    world.submit()
    await world.running()
    await world.tick(CLOSE_SECONDS)
    assert asked == [[IMAGE]]
    assert {(node.image_id, node.image_created_at) for node in world.nodes().values()} == {(IMAGE, EPOCH)}
    world.operator.images.clear()
    world.start_server()
    await world.tick()
    assert {node.image_created_at for node in world.nodes().values()} == {EPOCH}, "stored, for the servers to come"


async def test_an_image_without_an_age_is_asked_for_again(world: World) -> None:
    world.operator.images.clear()
    world.submit()
    await world.running()
    assert {(node.image_id, node.image_created_at) for node in world.nodes().values()} == {(IMAGE, None)}
    world.operator.images[IMAGE] = EPOCH
    await world.tick(CLOSE_SECONDS)
    assert {node.image_created_at for node in world.nodes().values()} == {EPOCH}


async def test_questions_that_fail_are_told_once_and_hold_up_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def fail(*_: object) -> None:
        raise CloudUnavailable("no answer")

    monkeypatch.setattr(world.operator, "statuses", fail)
    monkeypatch.setattr(world.operator, "network_nodes", fail)
    monkeypatch.setattr(world.operator, "image_times", fail)
    world.submit()
    await world.running()
    await world.tick(CLOSE_SECONDS)
    for words in ("is unknown", "network nodes of its instances are unknown", "creation times of its images are"):
        assert sum(words in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("failing", "facts"), [("network_nodes", (None, IMAGE, EPOCH)), ("image_times", ("rack-0", IMAGE, None))]
)
async def test_a_failed_request_hides_no_other_fact(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str, facts: tuple[object, ...]
) -> None:
    def fail(*_: object) -> None:
        raise CloudUnavailable("no answer")

    node_id = NodeId(f"i-{1:017x}")
    world.operator.topology = {node_id: ("top", "rack-0")}
    monkeypatch.setattr(world.operator, failing, fail)
    world.submit()
    await world.running()
    node = world.nodes()[node_id]
    assert (node.failure_domain, node.image_id, node.image_created_at) == facts


async def test_an_instance_that_ec2_does_not_show_yet_has_not_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = world.operator.describe_instances

    def without_new_ones(ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        known = describe(ids)
        young = [node_id for node_id, instance in known.items() if instance.state is Ec2State.PENDING]
        return {**known, **{node_id: InstanceState(instance_id=node_id, state=Ec2State.ABSENT) for node_id in young}}

    monkeypatch.setattr(world.operator, "describe_instances", without_new_ones)
    world.operator.boot_delay = timedelta(seconds=10)
    world.submit()
    await world.running()
    assert "gone" not in {node.state for node in world.nodes().values()}
    assert [call for call in world.operator.calls if call[0] == "terminate_member"] == []


class Omitting:
    """Makes EC2's answers omit instances, although the instances run."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: set[NodeId] = set()
        self._describe = world.operator.describe_instances
        self._world = world
        monkeypatch.setattr(world.operator, "describe_instances", self.describe)

    def describe(self, ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        absent = {node_id: InstanceState(instance_id=node_id, state=Ec2State.ABSENT) for node_id in self.nodes}
        found = self._describe(ids)
        # The world itself asks for one instance at a time, to find which agents run.
        return found if len(ids) == 1 else {**found, **{id: absent[id] for id in ids if id in absent}}


async def test_answers_that_omit_the_instance_of_a_connected_agent_are_no_evidence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    omitting = Omitting(world, monkeypatch)
    world.submit()
    await world.running()
    omitting.nodes = {world.team()[1].node_id, world.spare().node_id}
    for _ in range(60):
        await world.train(1)
    assert (world.job().generation, world.incidents()) == (1, ())
    assert "gone" not in {node.state for node in world.nodes().values()}
    assert [call for call in world.operator.calls if call[0] == "terminate_member"] == []


async def test_an_instance_that_two_answers_omit_has_ended_once_its_agent_is_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    omitting = Omitting(world, monkeypatch)
    world.submit()
    await world.running()
    lost = world.team()[1]
    omitting.nodes = {lost.node_id}
    lost.is_deaf = True
    lost.disconnect()
    silent_from = world.now
    await world.until(lambda: world.nodes()[lost.node_id].state == "gone")
    assert (world.now - silent_from).total_seconds() > world.timeouts.lease_seconds
    assert sentence(world.nodes()[lost.node_id].reason) == "EC2: not listed in two answers in a row"


async def test_an_instance_has_not_ended_while_ec2_does_not_list_it_and_its_agent_cannot_join(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers omit a member in service that replaces a lost node. Its agent starts after EC2 lists the instance."""
    world.submit()
    await world.running()
    describe, before, hidden = world.operator.describe_instances, {*world.nodes()}, True

    def omitting(ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        return {
            node_id: InstanceState(instance_id=node_id, state=Ec2State.ABSENT)
            if hidden and node_id not in before
            else instance
            for node_id, instance in describe(ids).items()
        }

    monkeypatch.setattr(world.operator, "describe_instances", omitting)
    lost = world.team()[1]
    world.terminate(lost)
    await world.until(lambda: bool(world.nodes().keys() - before))
    (fresh,) = world.nodes().keys() - before
    world.never_return.add(fresh)
    for _ in range(60):
        await world.tick(UNJOINED_SECONDS / 100)
    assert world.nodes()[fresh].state == "joining"
    assert fresh not in {call[1] for call in world.operator.calls if call[0] == "terminate_member"}
    hidden = False
    world.never_return.discard(fresh)
    await world.until(lambda: world.nodes()[fresh].state == "spare")


@pytest.mark.long
async def test_an_instance_that_ec2_never_lists_has_ended_after_a_long_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    describe, before = world.operator.describe_instances, {*world.nodes()}

    def omitting(ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        return {
            node_id: InstanceState(instance_id=node_id, state=Ec2State.ABSENT) if node_id not in before else instance
            for node_id, instance in describe(ids).items()
        }

    monkeypatch.setattr(world.operator, "describe_instances", omitting)
    world.terminate(world.team()[1])
    await world.until(lambda: bool(world.nodes().keys() - before))
    (fresh,) = world.nodes().keys() - before
    world.never_return.add(fresh)
    begun = world.now
    await world.until(lambda: world.nodes()[fresh].state == "gone", limit=1000)
    assert (world.now - begun).total_seconds() > UNJOINED_SECONDS


async def test_one_answer_that_omits_an_instance_is_no_evidence_even_with_a_silent_agent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    omitting = Omitting(world, monkeypatch)
    world.submit()
    await world.running()
    silent = world.team()[1]
    silent.is_deaf = True
    silent.disconnect()
    for _ in range(20):  # Every second answer omits the instance.
        omitting.nodes ^= {silent.node_id}
        await world.train(1)
    assert world.nodes()[silent.node_id].state == "assigned"


async def test_members_that_started_before_the_fleet_was_created_are_protected_when_they_enter_service(
    world: World,
) -> None:
    """The control plane protects members from scale-in as soon as they enter service.

    AWS refuses to protect a member that is Pending, and such a member enters service without protection.
    """
    world.operator.change_group(GROUP, lambda group: replace(group, new_instances_protected=False))
    world.submit()
    await world.until(lambda: len(world.operator.describe_group(GROUP).members) == 5)
    assert {member.lifecycle_state for member in world.operator.describe_group(GROUP).members} == {"Pending"}
    ensure(world.operator, world.operator.describe_group(GROUP))
    assert ("protect_members", GROUP) not in {call[:2] for call in world.operator.calls}
    await world.running()
    assert all(member.is_protected for member in world.operator.describe_group(GROUP).members)
    assert [call for call in world.operator.calls if call[0] == "protect_members"] == [
        ("protect_members", GROUP, tuple(sorted(world.nodes())))
    ]
    await world.tick()
    with world.database.read() as session:
        assert fleets.get(session, FLEET).drift == ()


async def test_a_hook_s_time_runs_from_its_first_sight_also_for_a_server_that_comes_later(tmp_path: Path) -> None:
    world = World(tmp_path, spares=0)
    world.operator.capacity = 4
    world.submit()
    await world.running()
    world.operator.shrink(world.team()[1].node_id)
    await world.tick()
    (first,) = stored(world)
    assert first.ends_at == world.now + timedelta(seconds=60)
    await world.tick(5)
    world.start_server()
    await world.tick()
    assert stored(world) == (first,)
    world.close()


async def test_an_end_that_a_hook_is_about_to_hold_is_a_notice_already(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member in the state Terminating counts as announced for termination.

    This is so even if no hook holds the member in Terminating:Wait yet.

    If a load balancer drains the member, the state Terminating lasts for minutes.
    """
    describe = world.operator.describe_group
    world.submit()
    await world.running()
    await world.train(10)
    leaving = world.team()[1].node_id
    held_from = world.now + timedelta(seconds=3)

    def draining(name: str) -> GroupState:
        group = describe(name)
        state = "Terminating" if world.now < held_from else "Terminating:Wait"
        return replace(
            group,
            members=tuple(replace(each, lifecycle_state=state) if each.is_leaving else each for each in group.members),
        )

    monkeypatch.setattr(world.operator, "describe_group", draining)
    world.operator.shrink(leaving)
    await world.tick()
    assert [(notice.node_id, notice.kind) for notice in stored(world)] == [(leaving, "terminating")]
    assert world.nodes()[leaving].state == "assigned"
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.until(lambda: world.job().generation == 2)
    (incident,) = world.incidents()
    assert (incident.cause, incident.lost_steps) == ("notice", 0)
    await world.until(lambda: leaving not in world.agents)


async def test_a_hook_is_held_while_the_last_step_has_only_nodes_that_go(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(10)
    leaving = world.team()[1]
    world.operator.shrink(leaving.node_id)
    await world.until(lambda: world.is_stopped)
    world.finish()
    for _ in range(200):  # 200 ticks are longer than the time for which the hook holds the instance
        await world.tick()
    assert leaving.node_id in world.agents
    assert "only the departing nodes hold its last step" in world.job().reason
    holds = [call for call in world.operator.calls if call[0] == "hold_termination"]
    assert 3 <= len(holds) <= 8, "a few in a hook's timeout, not one in every pass"
    await world.upload(10)
    await world.until(lambda: world.job().generation == 2)
    assert world.plan().base_step == 10
    await world.until(lambda: leaving.node_id not in world.agents)
    (incident,) = world.incidents()
    assert (incident.cause, incident.lost_steps) == ("notice", 0)
    assert world.failures() == (1, 0, 1)


async def test_launches_that_aws_suspended_after_failures_are_resumed_and_the_job_goes_on(world: World) -> None:
    world.operator.launch_retry = timedelta(hours=1)
    world.operator.capacity = 2
    world.submit()
    await world.tick(1)
    await world.tick(1)
    words = world.job().reason
    assert "waits for 4 nodes: We currently do not have sufficient p5.48xlarge capacity" in words
    assert "Everstep retries at 00:00:31 UTC" in words
    wait = capacity_wait_of(world.job())
    assert wait is not None
    assert (wait.missing_count, wait.message, wait.failed_count) == (4, words.partition(": ")[2].partition(";")[0], 1)
    world.operator.change_group(GROUP, world.suspended("Amazon EC2 Auto Scaling suspended this process"))
    world.operator.capacity = None
    await world.tick(1)
    assert "AWS suspended it after failures; Everstep resumes it and retries at" in world.job().reason
    assert ("resume_processes", GROUP) not in world.operator.calls
    await world.until(lambda: ("resume_processes", GROUP) in world.operator.calls)
    await world.running()
    assert capacity_wait_of(world.job()) is None


async def test_a_group_that_tries_every_second_moves_no_moment_at_which_it_is_asked_again(world: World) -> None:
    world.operator.launch_retry = timedelta(seconds=1)
    world.operator.capacity = 2
    world.submit()
    seen = []
    for _ in range(60):
        await world.tick(1)
        record = world.job()
        if (wait := capacity_wait_of(record)) is not None:
            seen.append((record.reason.rpartition(" at ")[2], wait.next_attempt_at, wait.failed_count))
    assert len(world.operator.recent_launch_failures(GROUP)) > 50
    first = START.timestamp()
    assert list(dict.fromkeys(seen)) == [("00:00:31 UTC", first + 31, 1), ("00:01:31 UTC", first + 91, 2)]


async def test_a_spare_takes_over_also_while_aws_does_not_say_why_another_one_does_not_come(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.operator.launch_retry = timedelta(hours=1)
    await world.until(lambda: len(world.agents) == 5)
    world.submit()
    await world.running()
    world.operator.capacity = 4
    monkeypatch.setattr(
        world.operator, "recent_launch_failures", lambda _: (_ for _ in ()).throw(Throttled("Rate exceeded"))
    )
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    await world.until(lambda: "why its launches fail is unknown" in caplog.text)
    assert sum("why its launches fail is unknown: Rate exceeded" in record.message for record in caplog.records) == 1


async def test_the_wait_for_capacity_is_part_of_a_replacement_s_time(world: World) -> None:
    await world.until(lambda: len(world.agents) == 5 and all(node.state == "spare" for node in world.nodes().values()))
    before = world.history()
    world.operator.capacity = 4
    world.terminate(world.spare())
    await world.until(lambda: len(world.agents) == 4)
    lost_at = world.now
    for _ in range(4):
        await world.tick()
    for _ in range(10):
        await world.tick(60)
    world.start_server()  # The new server reads the time of the member's loss from the database.
    world.operator.capacity = None
    await world.until(
        lambda: len(world.agents) == 5 and all(node.state in ("spare", "gone") for node in world.nodes().values()),
        limit=4000,
    )
    after = world.history()
    assert after.replacement_count == before.replacement_count + 1
    taken = after.replacement_seconds - before.replacement_seconds
    assert taken == pytest.approx((world.now - lost_at).total_seconds(), abs=2.0)
    assert taken > 600


async def test_what_a_user_suspended_stays_so_and_is_named(world: World) -> None:
    world.operator.change_group(GROUP, world.suspended("User suspended at 2026-03-01T00:00:00Z"))
    world.submit()
    for _ in range(20):
        await world.tick(100)
    assert ("resume_processes", GROUP) not in world.operator.calls
    assert "Launch process is suspended (User suspended at 2026-03-01T00:00:00Z)" in world.job().reason
    world.operator.resume_processes(GROUP, ["Launch"])
    await world.running()


async def test_a_database_that_is_away_for_a_moment_ends_no_look_at_aws(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, stop, asked = world.runner.cloud, asyncio.Event(), asyncio.Event()
    answers = iter([OperationalError("SELECT", {}, Exception("the connection is gone"))])

    def fleets_once_lost(_session: Session) -> list[object]:
        for error in answers:
            cloud.poll_now()
            raise error
        asked.set()
        return []

    monkeypatch.setattr(fleets, "every", fleets_once_lost)
    running = asyncio.create_task(cloud.run(stop))
    await asked.wait()
    stop.set()
    cloud.poll_now()
    await running


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield an executor with real threads. The calls to AWS run in these threads, outside of the event loop."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


async def test_a_fleet_whose_calls_hang_holds_up_no_other(
    world: World, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS does not answer the call for one fleet. The answers for the other fleets arrive without delay.

    If the control plane sent its calls one after another, all fleets would wait for the slowest call.
    """
    other = FleetName("other")
    world.add_fleet(other, "other-group", "us-east-1b", nodes=2, spares=0, max_size=4)
    answered, asked = threading.Event(), Counter[str]()

    def complete_one_late(group: GroupState) -> GroupState:
        asked[group.name] += 1
        if group.name == GROUP:
            assert answered.wait(30)
        return group

    monkeypatch.setattr(world.operator, "complete_group", complete_one_late)
    asyncio.get_running_loop().set_default_executor(threads)
    cloud = world.runner.cloud
    await cloud.poll(patience_seconds=0)
    while cloud.group(other) is None:
        await cloud.poll(patience_seconds=0.01)
    before = asked["other-group"]
    while asked["other-group"] < before + 2:
        await cloud.poll(patience_seconds=0.01)
    assert asked[GROUP] == 1
    assert cloud.group(FLEET) is None
    answered.set()
    await cloud.poll()
    assert cloud.group(FLEET) is not None


async def test_a_look_at_aws_ends_with_the_server(
    world: World, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, hangs, stop, loop = threading.Event(), asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def hang(_: str) -> GroupState:
        loop.call_soon_threadsafe(hangs.set)
        assert answered.wait(30)
        raise CloudUnavailable("too late")

    monkeypatch.setattr(world.operator, "describe_group", hang)
    loop.set_default_executor(threads)
    cloud = world.runner.cloud
    running = asyncio.create_task(cloud.run(stop))
    await hangs.wait()
    stop.set()
    cloud.poll_now()
    await running
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("ask AWS")]
    answered.set()


async def test_what_goes_wrong_with_one_fleet_is_told_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    describe, errors = (
        world.operator.describe_group,
        iter([OperationalError("SELECT", {}, Exception("the connection is gone"))]),
    )

    def lost_once(name: str) -> GroupState:
        for error in errors:
            raise error
        return describe(name)

    monkeypatch.setattr(world.operator, "describe_group", lost_once)
    cloud = world.runner.cloud
    await cloud.poll()
    assert cloud.group(FLEET) is None
    assert "the next poll retries" in caplog.text
    await cloud.poll()
    assert cloud.group(FLEET) is not None


async def test_one_call_lists_the_groups_of_all_fleets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_fleet(FleetName("other"), "other-group", "us-east-1b", nodes=0)
    list_groups, asked = world.operator.list_groups, list[list[str]]()
    monkeypatch.setattr(
        world.operator, "list_groups", lambda names: (asked.append(sorted(names)), list_groups(names))[1]
    )
    await world.runner.cloud.poll()
    assert asked == [[GROUP, "other-group"]]
    assert all(world.runner.cloud.group(name) is not None for name in (FLEET, FleetName("other")))


async def test_a_group_that_does_not_exist_is_told_and_holds_up_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.add_fleet(FleetName("other"), "other-group", "us-east-1b", nodes=0)
    world.operator.delete_group(GROUP)
    await world.runner.cloud.poll()
    assert f"fleet {FLEET}: the cloud does not answer: Auto Scaling group '{GROUP}' does not exist" in caplog.text
    assert world.runner.cloud.group(FleetName("other")) is not None


async def test_only_the_server_that_manages_a_fleet_polls_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.tick()
    other = Runner(replace(world.context, owner="other", registry=AgentRegistry(monotonic=world.monotonic)))
    for _ in range(20):  # The other server soon sees that the first one renews the lease.
        await world.tick()
        await other.cloud.poll()
        await other.fleet_loop.sweep()
    assert other.fleet_leases.sees_another(FLEET)
    list_groups, asked = world.operator.list_groups, list[list[str]]()
    monkeypatch.setattr(
        world.operator, "list_groups", lambda names: (asked.append(sorted(names)), list_groups(names))[1]
    )
    await other.cloud.poll()
    assert asked == []
    assert other.cloud.group(FLEET) is None, "an answer from before the other server managed the fleet is dropped"
    await world.runner.cloud.poll()
    assert asked == [[GROUP]]
    for _ in range(40):  # The first server stops, and the other one takes the fleet over.
        world.now += timedelta(seconds=1)
        await other.cloud.poll()
        await other.fleet_loop.sweep()
    assert other.fleet_leases.holds(FLEET)
    assert other.cloud.group(FLEET) is not None


async def test_a_throttled_poll_backs_off_with_full_jitter_and_no_hurry_shortens_the_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_groups, asked_at, is_throttled = world.operator.list_groups, list[float](), [True]

    def throttling(names: Collection[str]) -> Mapping[str, GroupState]:
        asked_at.append(world.monotonic())
        if is_throttled[0]:
            raise Throttled("Rate exceeded")
        return list_groups(names)

    monkeypatch.setattr(world.operator, "list_groups", throttling)
    cloud = CloudWatch(world.context, jitter=lambda: 0.75)
    for _ in range(200):
        cloud.poll_now()
        await cloud.poll()
        world.now += timedelta(seconds=0.5)
    assert [after - before for before, after in pairwise(asked_at)] == [1.5, 3.0, 6.0, 12.0, 24.0, 45.0]
    is_throttled[0] = False
    world.now += timedelta(seconds=60)
    await cloud.poll()
    await cloud.poll()
    assert asked_at[-1] == asked_at[-2] == world.monotonic(), "the first answer ends the pauses"


async def test_the_age_of_the_view_is_that_of_the_oldest_answer(world: World) -> None:
    world.add_fleet(FleetName("other"), "other-group", "us-east-1b", nodes=0)
    assert world.runner.cloud.view_age_seconds() == 0.0
    await world.runner.cloud.poll()
    world.now += timedelta(seconds=5)
    world.operator.delete_group(GROUP)
    await world.runner.cloud.poll()  # AWS answers about the other fleet only.
    world.now += timedelta(seconds=2)
    assert world.runner.cloud.view_age_seconds() == 7.0
    text = exposition(FACTS, world.context.loop_metrics).decode()
    assert "everstep_aws_view_age_seconds 7.0" in text
