"""Runs the real loops through simultaneous failures and rare failures.

The scripts in `tests/golden/incidents` cover failures in which the exact order of all events matters.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from control_plane.accounts.reasons import sentences
from control_plane.api import views
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.operator import Ec2State
from control_plane.core.observed.facts import InstanceEnded, NodeRequest, Requested
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.states import JobState, NodeState
from control_plane.core.timeouts import JOIN_SECONDS, grace_seconds
from control_plane.db import events, fleets, implications, jobs, nodes
from control_plane.db.session import Database
from control_plane.loop import memos, records
from everstep.protocol.agent_messages import (
    ExitClass,
    FaultCode,
    HaltRanks,
    Hello,
    Load,
    MemberPhase,
    NodeFault,
    OutputCause,
    OutputFailure,
    Prepare,
    Release,
    Start,
)
from everstep.protocol.ids import FleetName, Generation, NodeId, Rank, Step
from everstep.protocol.plan import CHECK_VARIABLE, GenerationPlan
from tests.postgresql import BOTH_ENGINES, PostgreSql
from tests.sim.world import FLEET, GROUP, Agent, World, evidence_of


def hello_of(agent: Agent) -> Hello:
    return Hello(node_id=agent.node_id, agent_id="again", address="127.0.0.1", peer_port=1, memory_bytes=1, version="1")


def is_running(world: World, generation: int, name: str = "gpt") -> bool:
    return world.job(name).state == JobState.RUNNING and world.job(name).generation == generation


async def test_a_partner_lost_during_recovery_makes_it_a_lost_group(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.upload(10)
    await world.train(5)
    first, partner = world.team()[0], world.team()[1]
    world.terminate(first)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    world.terminate(partner)
    await world.until(lambda: is_running(world, 2))
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.from_step) == ("group_lost", "s3", 10)


async def test_a_job_that_begins_again_after_its_first_plan_names_no_source(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    first, partner = world.team()[0], world.team()[1]
    world.terminate(first)
    await world.until(lambda: world.job().state == JobState.LOADING)
    assert world.incidents()[0].restore_source == "peer"
    world.terminate(partner)
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().generation > 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 0
    (incident,) = world.incidents()
    assert (incident.restore_source, incident.from_step) == (None, 0)


async def test_without_any_copy_left_the_job_begins_again(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    for agent in world.team()[:2]:
        world.terminate(agent)
    await world.until(lambda: is_running(world, 2))
    assert world.plan().base_step == 0
    assert all(not rank.sources for rank in world.plan().ranks)
    (incident,) = world.incidents()
    assert incident.restore_source is None
    assert incident.lost_steps == 10


@pytest.mark.parametrize("fault", [FaultCode.MEMORY_FULL, "archive_unavailable"])
async def test_a_load_that_fails_for_another_reason_than_its_shards_is_repeated_at_its_step(
    world: World, fault: str
) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    bad = world.team()[2]
    world.kill_rank(world.team()[0])
    bad.fails_load, bad.load_fault = True, fault
    await world.until(lambda: world.job().generation == 2 and bad.phase is MemberPhase.LOAD_FAILED)
    assert world.plan().base_step == 10
    bad.fails_load = False
    await world.until(lambda: is_running(world, 3))
    assert world.plan().base_step == 10
    (incident,) = world.incidents()
    assert "failed to load" in " ".join(evidence_of(incident))
    assert incident.from_step == 10


async def test_a_node_that_cannot_reach_a_step_twice_is_replaced_and_no_step_is_lost(world: World) -> None:
    world.submit(max_attempts=2)
    await world.running()
    await world.train(10)
    bad = world.team()[2]
    world.kill_rank(world.team()[0])
    bad.fails_load, bad.load_fault = True, FaultCode.SOURCE_UNAVAILABLE
    await world.until(lambda: world.job().generation == 2 and bad.phase is MemberPhase.LOAD_FAILED)
    await world.until(lambda: world.job().generation == 3 and bad.phase is MemberPhase.LOAD_FAILED)
    assert world.plan().base_step == 10
    await world.until(lambda: is_running(world, 4))
    assert world.plan().base_step == 10
    assert bad not in world.team()
    # Only the failure of the killed rank is in the job's record. The failed loads are not.
    assert [failure["base_step"] for failure in world.job().failures] == [0]
    await world.train(2)
    record = records.job_record(world.job())
    assert (record.refused, record.failed_reads, record.failures) == ((), (), ())


async def test_one_node_that_reads_wrong_content_everywhere_is_replaced_and_marks_no_checkpoint(world: World) -> None:
    """A node with a bad disk or network card misreads each copy in memory and each checkpoint. Another node reads."""
    world.submit()
    await world.running()
    for step in (10, 20, 30):
        await world.train(10)
        await world.upload(step)
    await world.train(5)
    bad = world.team()[2]
    bad.fails_load = True
    world.kill_rank(world.team()[0])
    await world.until(lambda: is_running(world, 3))
    assert world.plan().base_step == 35
    assert bad not in world.team()
    assert not any(record.verdict for record in world.checkpoints())
    node = world.nodes()[bad.node_id]
    assert (node.state, node.hold) == (NodeState.HELD, "distrusted")
    (incident,) = world.incidents()
    assert (incident.instance_ids, incident.lost_steps) == ((bad.node_id,), 0)


async def test_a_step_that_two_nodes_cannot_read_is_skipped(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    world.kill_rank(world.team()[0])
    for agent in world.team()[1:3]:
        agent.fails_load = True
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.PREPARING)
    for agent in world.agents.values():
        agent.fails_load = False
    await world.until(lambda: is_running(world, 3))
    assert world.plan().base_step == 9
    assert len(world.team()) == 4


async def test_a_step_that_only_its_holder_fails_to_read_twice_is_skipped_and_the_holder_stays(world: World) -> None:
    """With one copy, no other node can read the step. The job keeps the node, because it also holds the step before."""
    world.submit(copies=1)
    await world.running()
    await world.train(10)
    bad = world.team()[2]
    bad.fails_load = True
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 3 and bad.phase is MemberPhase.LOAD_FAILED)
    assert world.plan().base_step == 10
    bad.fails_load = False
    await world.until(lambda: is_running(world, 4))
    assert world.plan().base_step == 9
    assert bad in world.team()


async def test_a_rank_that_ends_while_a_source_is_out_of_reach_counts_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit(max_attempts=3)
    await world.running()
    await world.train(10)
    other, bad = world.team()[0], world.team()[2]
    world.kill_rank(other)
    bad.fails_load, bad.load_fault = True, FaultCode.SOURCE_UNAVAILABLE
    fetch = Agent.fetch

    def fetch_while_another_ends(agent: Agent, plan: GenerationPlan) -> bool:
        if agent is bad:  # The ranks of the other nodes have already started and import their modules.
            other.boundary = dict.fromkeys(plan.node(other.node_id).ranks, plan.base_step)
            world.kill_rank(other)
        return fetch(agent, plan)

    monkeypatch.setattr(Agent, "fetch", fetch_while_another_ends)
    await world.until(lambda: world.job().generation == 2 and bad.phase is MemberPhase.LOAD_FAILED)
    bad.fails_load = False
    monkeypatch.undo()
    await world.until(lambda: is_running(world, 3))
    assert world.plan().base_step == 10, "that copy is asked once more"
    assert [failure["base_step"] for failure in world.job().failures] == [0, 10]


async def test_a_job_does_not_begin_anew_to_tell_a_bad_node_from_a_bad_script(world: World) -> None:
    world.submit(copies=1, max_attempts=2)
    await world.running()
    await world.train(10)
    for generation in (1, 2):
        await world.until(lambda at=generation: is_running(world, at))  # type: ignore[misc]
        world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state != JobState.RUNNING)
    await world.until(lambda: world.job().state in (JobState.FAILED, JobState.RUNNING))
    assert (world.job().state, world.job().generation) == (JobState.FAILED, 2)
    assert "the same failure occurred 2 times after step 10" in world.job().reason


async def test_loads_that_always_fail_end_the_job(world: World) -> None:
    world.submit(max_attempts=2)
    await world.until(lambda: bool(world.agents))
    await world.until(lambda: world.job().state == JobState.PREPARING)
    for agent in world.agents.values():
        agent.fails_load = True
    await world.until(lambda: world.job().state == JobState.FAILED)
    assert "failed to load its shards" in world.job().reason


async def test_a_node_that_is_given_up_failed_when_the_last_step_was_made_not_at_its_own_last_word(
    world: World,
) -> None:
    world.submit()
    await world.running()
    stamps: dict[int, float] = {}
    for agent in world.team():
        agent.stamp = lambda step: stamps.setdefault(step, world.now.timestamp())
    await world.train(10)
    lost = world.team()[1]
    lost.is_deaf = True
    lost.disconnect()
    last_word = world.now
    await world.train(1)
    await world.train(1)
    world.cut.add(lost.node_id)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    (incident,) = world.incidents()
    assert incident.failed_at.timestamp() == stamps[12] > last_word.timestamp()


async def test_an_unreachable_node_is_replaced_when_that_costs_no_step_and_never_terminated(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    lost = world.team()[1]
    world.silence(lost)
    await world.until(lambda: is_running(world, 2))
    assert lost.node_id not in [agent.node_id for agent in world.team()]
    assert world.plan().base_step == 10
    assert world.nodes()[lost.node_id].state == NodeState.HELD
    assert not [call for call in world.operator.calls if call[0] == "terminate_member"]
    await world.until(lambda: len(world.agents) == 6)
    lost.is_deaf = False
    await world.until(lambda: world.nodes()[lost.node_id].state == NodeState.SPARE and lost.run is None)


async def test_a_job_that_loses_a_node_in_each_launch_fails_and_its_nodes_come_back(world: World) -> None:
    world.submit()
    lost: list[Agent] = []
    for generation in (1, 2):
        await world.until(lambda generation=generation: is_running(world, generation))
        lost.append(world.team()[1])
        world.silence(lost[-1])
    await world.until(lambda: world.job().state == JobState.FAILED)
    nodes = ", ".join(agent.node_id for agent in lost)
    assert world.job().reason == (
        f"2 launches lost a node before a new step ({nodes}), and neither AWS nor an agent named a cause. "
        "The job itself is probably the cause"
    )
    assert not [call for call in world.operator.calls if call[0] == "terminate_member"]
    for agent in lost:
        agent.is_deaf = False
    await world.until(lambda: all(world.nodes()[agent.node_id].state == NodeState.SPARE for agent in lost))
    with world.database.read() as session:
        assert [implications.of_node(session, agent.node_id) for agent in lost] == [(), ()]


@pytest.mark.parametrize("seconds", [80.0, 119.0])
async def test_unreachable_nodes_that_are_heard_again_while_they_are_waited_for_have_time_to_promise(
    world: World, seconds: float
) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.upload(10)
    await world.train(5)
    pair = world.team()[:2]
    for agent in pair:
        world.silence(agent)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    for _ in range(int(seconds * 2)):
        await world.tick()
    world.cut.clear()
    for agent in pair:
        agent.is_deaf = False
        # For six ticks, the agent answers no message, as if it were still reading many slots.
        agent.handle = lambda message: None  # type: ignore[method-assign]
    for _ in range(6):
        await world.tick()
    for agent in pair:
        del agent.handle  # type: ignore[method-assign]
    await world.until(lambda: is_running(world, 2))
    assert world.plan().base_step == 15
    assert not any("did not prepare" in words and "without it" in words for words in evidence_of(world.incidents()[0]))


async def test_an_agent_that_starts_anew_long_after_it_promised_has_time_to_promise_again(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    world.operator.capacity = 3
    for agent in (world.spare(), world.team()[1]):
        world.terminate(agent)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    for _ in range(50):
        await world.tick(5.0)
    restarted = world.team()[0]
    restarted.number += 100
    restarted.disconnect()
    restarted.handle = lambda message: None  # type: ignore[method-assign]
    # simulate an agent that is still reading its slots and therefore reports no job
    restarted.member = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        await world.tick()
    del restarted.handle, restarted.member  # type: ignore[method-assign]
    world.operator.capacity = None
    await world.until(lambda: is_running(world, 2))
    assert world.plan().base_step == 10
    assert not [message for message in world.events() if "did not prepare" in message]


async def test_a_lost_coordinator_gets_another_one(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    coordinator = world.agents[world.plan().coordinator]
    coordinator.is_deaf = True
    coordinator.disconnect()
    for agent in world.team():
        frozen = agent.member()
        assert frozen is not None
    for _ in range(100):
        for agent in world.team():  # the ranks finish step 11, which is not committed without the coordinator
            for rank in agent.boundary:
                agent.boundary[rank] = 11
        await world.tick()
        if world.job().state != JobState.RUNNING:
            break
    assert world.job().state == JobState.PREPARING
    coordinator.is_deaf = False
    await world.until(lambda: is_running(world, 2))
    assert world.plan().coordinator != coordinator.node_id
    assert world.incidents()[0].cause == "agent_lost"


async def test_an_agent_that_forgot_its_job_makes_a_new_generation(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(4)
    agent = world.team()[3]
    agent.run, agent.slots, agent.plan = None, {}, None
    agent.report()
    await world.until(lambda: is_running(world, 2))
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.from_step) == ("agent_lost", "peer", 4)


async def test_a_stop_waits_for_an_upload_of_minutes_and_for_its_manifest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    for agent in world.team():
        agent.leaves_much = True
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    world.finish()
    for _ in range(60):
        await world.tick(5.0)
    assert world.job().reason == "stopped at step 7; waits until its last checkpoint, outputs and logs are stored"
    for agent in world.team():
        agent.phase = MemberPhase.EXITED
    left = fail_once(monkeypatch, world)
    await world.upload(7)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert not left
    assert "checkpoint is step 7" in world.job().reason
    assert not [message for _, message in world.said if isinstance(message, HaltRanks)]


@pytest.mark.parametrize("is_told", [True, False])
async def test_ranks_that_agreed_to_stop_are_not_killed_while_their_script_writes_its_results(
    world: World, *, is_told: bool
) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    for agent in world.team():
        # The script may end by itself at the moment of the stop request.
        agent.has_decided, agent.is_told_to_stop = (
            True,
            is_told,
        )
    world.team()[1].node_faults = (
        NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),
    )
    for _ in range(40):
        await world.tick(5.0)
    assert world.job().reason == "stopped at step 7; waits for its ranks to end"
    assert not [message for _, message in world.said if isinstance(message, HaltRanks)]
    world.finish()
    await world.upload(7)
    await world.until(lambda: world.job().state in (JobState.STOPPED, JobState.COMPLETED))
    told = (
        "stopped at step 7: a user asked it to stop; the newest checkpoint is step 7"
        if is_told
        else "every rank ended with success after step 7"
    )
    assert world.job().reason == told


@pytest.mark.parametrize(
    ("steps", "target", "reason"),
    [
        (None, 0, "every rank ended with success, and none reported a step. Warning: nothing was kept. "),
        (0, 9, "every rank ended with success, and none reported a step. Warning: nothing was kept. "),
        (7, 9, "every rank ended with success after step 7. Warning: the target is step 9; "),
        (9, 9, "every rank ended with success after step 9"),
        (7, 0, "every rank ended with success after step 7"),
    ],
)
async def test_a_job_that_ends_well_before_its_target_or_without_steps_warns(
    world: World, steps: int | None, target: int, reason: str
) -> None:
    world.submit()
    await world.running()
    for agent in world.team():
        agent.target = target
        if steps is None:  # this script never calls `init`
            agent.boundary = dict.fromkeys(agent.boundary, Step(-1))
    if steps:
        await world.train(steps)
    world.finish()
    if steps:
        await world.upload(steps)
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    said = world.job().reason
    assert said.startswith(reason)
    assert ("Warning" in said) == ("Warning" in reason)


async def test_a_determinism_check_completes_without_steps_and_names_its_result(world: World) -> None:
    world.submit(environment={CHECK_VARIABLE: "8"})
    await world.running()
    for agent in world.team():
        agent.boundary = dict.fromkeys(agent.boundary, Step(-1))
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    assert world.job().reason.startswith("every rank of the determinism check ended with success. ")
    assert "determinism.json" in world.job().reason


async def test_ranks_that_agreed_to_stop_and_do_not_end_are_halted_and_the_job_says_so(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    for agent in world.team():
        agent.has_decided = True
    await world.upload(7)
    for _ in range(125):
        await world.tick(5.0)
    assert [message for _, message in world.said if isinstance(message, HaltRanks)]
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert world.job().reason.startswith("stopped at step 7: a user asked it to stop; but rank 0 on ")


async def test_a_job_that_is_done_has_its_last_checkpoint_completed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    world.finish()
    left = fail_once(monkeypatch, world)
    await world.upload(7)
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    assert not left
    assert [checkpoint.step for checkpoint in world.checkpoints()] == [7]


def fail_once(monkeypatch: pytest.MonkeyPatch, world: World) -> list[bool]:
    """Make the object store refuse the next upload of a manifest, once.

    The returned list becomes empty when the store has refused the upload.
    """
    put, left = world.objects.put_if_unchanged, [True]

    def fail(*args: object, **kwargs: object) -> object:
        if left.pop() if left else False:
            raise CloudUnavailable("S3 is away for a second")
        return put(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(world.objects, "put_if_unchanged", fail)
    return left


@pytest.mark.parametrize("is_restarted", [True, False])
@pytest.mark.parametrize("state", [JobState.STOPPING, JobState.PAUSING, JobState.RUNNING])
async def test_an_agreed_stop_is_not_given_up_for_time_in_which_nobody_was_heard(
    world: World, state: JobState, *, is_restarted: bool
) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        if state is JobState.STOPPING:
            jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
        elif state is JobState.PAUSING:
            jobs.request_pause(session, jobs.get(session, "gpt").run_id, world.now)
        else:  # in this case, a fault makes the job release the node
            world.team()[1].node_faults = (
                NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),
            )
    await world.until(
        lambda: (
            world.job().state == state
            and (state is not JobState.RUNNING or world.job().reason.startswith("agrees on a stop"))
        )
    )
    for agent in world.agents.values():
        agent.is_deaf = True
        agent.disconnect()
    if is_restarted:
        world.start_server()
        world.now += timedelta(seconds=130)
    for _ in range(26):
        for _ in range(2 if is_restarted else 10):
            await world.tick()
        for agent in world.team():
            agent.boundary = {rank: step + 1 for rank, step in agent.boundary.items()}
    for agent in world.agents.values():
        agent.is_deaf = False
    await world.tick()
    await world.tick()
    assert (world.job().state, world.job().generation) == (state, 1)
    assert not world.incidents()
    assert all(agent.phase is MemberPhase.RUNNING for agent in world.team())


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PREPARING, JobState.LOADING])
async def test_a_job_that_is_stopped_in_a_recovery_trains_once_more_to_stop_at_its_last_step(
    world: World, state: JobState
) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    late = world.team()[2]
    late.handle = lambda message: None  # type: ignore[method-assign]
    world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state in (state, JobState.PREPARING))
    if state is JobState.LOADING:
        del late.handle  # type: ignore[method-assign]
        late.fetch = lambda plan: False  # type: ignore[method-assign]
        await world.until(lambda: world.job().state == state)
        del late.fetch  # type: ignore[method-assign]
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.tick()
    if state is JobState.PREPARING:
        assert world.job().reason.startswith(
            "stops (a user asked it to stop) once it trains, so that no step is lost: waits for"
        )
    late.__dict__.pop("handle", None)
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.upload(7)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert "checkpoint is step 7" in world.job().reason


@pytest.mark.parametrize("state", [JobState.PREPARING, JobState.LOADING])
@pytest.mark.parametrize("steps", [0, 7])
async def test_a_job_that_has_nothing_in_memory_alone_is_stopped_in_a_launch_at_once(
    world: World, state: JobState, steps: int
) -> None:
    world.submit()
    if steps:
        await world.running()
        await world.train(steps)
        await world.upload(steps)
        world.kill_rank(world.team()[1])
    await world.until(lambda: bool(world.agents))
    for agent in world.agents.values():
        if state is JobState.PREPARING:
            agent.handle = lambda message: None  # type: ignore[method-assign]
        agent.fetch = lambda plan: False  # type: ignore[method-assign]
    await world.until(lambda: world.job().state == state)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.tick()
    assert (world.job().state, world.job().reason) == (
        JobState.STOPPED,
        "stopped: a user asked it to stop; no rank was running",
    )


async def test_a_faulty_node_does_not_stay_for_a_step_that_it_cannot_save(world: World) -> None:
    """A job that has lost one node releases another, faulty one, and resumes from S3.

    The job keeps only one copy of each shard. The newest shard of the lost node is lost too, so the job cannot resume
    from the newest step, and the faulty node's shard of this step is useless.
    """
    world.submit(copies=1)
    await world.running()
    await world.train(5)
    await world.upload(5)
    await world.train(5)
    lost, faulty = world.team()[:2]
    faulty.node_faults = (NodeFault(code=FaultCode.GPU_LOST, message="a GPU is gone", is_permanent=False),)
    world.terminate(lost)
    await world.until(lambda: is_running(world, 2))
    assert faulty not in world.team()
    assert world.plan().base_step == 5
    assert not [words for words in world.events() if " stays: " in words]


async def test_of_two_faulty_nodes_the_one_that_holds_nothing_alone_is_left(world: World) -> None:
    world.operator.capacity = 4
    world.submit()
    await world.running()
    await world.train(10)
    _, dispensable, holder, lost = world.team()
    dispensable.node_faults = (NodeFault(code=FaultCode.GPU_LOST, message="a GPU is gone", is_permanent=False),)
    holder.node_faults = (NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),)
    world.terminate(lost)
    await world.until(lambda: is_running(world, 2))
    assert (dispensable in world.team(), holder in world.team()) == (False, True)
    assert world.plan().base_step == 10
    assert [words for words in world.events() if " stays: " in words] == [
        f"{holder.node_id} stays: without it, only step 0 can be restored, not the committed step 9"
    ]
    world.kill_rank(holder)
    await world.until(lambda: is_running(world, 3))
    assert holder not in world.team(), "the launch with it has failed"


async def test_what_was_rebooted_in_a_recovery_is_taken_back_by_it(world: World) -> None:
    """A job releases two faulty nodes, and the fleet reboots them. No other nodes are available, so the job gets both
    back.

    After the first fault, the control plane asks the ranks to agree on a common step after which all of them stop. The
    second node becomes faulty before the ranks have agreed.
    """
    world.submit()
    await world.running()
    asked, faulty = world.team()[:2]
    asked.node_faults = (NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),)
    await world.until(lambda: "agrees on a stop" in world.job().reason)
    faulty.node_faults = asked.node_faults
    world.operator.capacity = 5
    await world.until(lambda: is_running(world, 2))
    rebooted = [call[2] for call in world.operator.calls if call[0] == "reboot_member"]
    assert sorted(map(str, rebooted)) == sorted([asked.node_id, faulty.node_id])


async def test_a_node_is_asked_what_it_holds_at_its_first_fault_whoever_had_to_stay_before(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    holder, lost = world.team()[2:]
    with world.database.write() as session:
        assert nodes.ask(
            session, holder.node_id, Requested(request=NodeRequest.DRAIN, node_id=holder.node_id, by="ann")
        )
    world.terminate(lost)
    await world.until(lambda: (world.job().generation, world.job().state) == (2, JobState.STARTING))
    assert [words for words in world.events() if " stays: " in words]
    holder.node_faults = (NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),)
    world.kill_rank(world.team()[1])
    await world.until(lambda: is_running(world, 3))
    assert holder in world.team()
    assert world.plan().base_step == 10


async def test_steps_are_due_from_a_faulty_node_from_when_its_ranks_run(world: World) -> None:
    world.operator.capacity = 4
    world.submit()
    await world.until(lambda: len(world.agents) == 4)
    slow, faulty = list(world.agents.values())[2:]
    slow.handle = lambda message: None if isinstance(message, Load) else Agent.handle(slow, message)  # type: ignore[method-assign]
    await world.until(lambda: world.job().state == JobState.LOADING)
    faulty.node_faults = (NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),)
    for _ in range(14):
        await world.tick(5.0)
    assert world.job().state == JobState.LOADING
    del slow.handle  # type: ignore[method-assign]
    await world.running()
    for _ in range(11):
        await world.tick(5.0)
    assert is_running(world, 1)
    assert not world.incidents()
    for _ in range(4):
        await world.tick(5.0)
    assert not is_running(world, 1)
    assert [incident.instance_ids for incident in world.incidents()] == [(faulty.node_id,)]


async def test_a_stop_in_a_recovery_does_not_wait_for_steps_that_are_gone(world: World) -> None:
    world.operator.capacity = 4
    world.submit(copies=1)
    await world.running()
    await world.train(5)
    await world.upload(5)
    await world.train(5)
    world.terminate(world.team()[0])
    await world.until(lambda: "waits for 1 node" in world.job().reason and world.job().state == JobState.PREPARING)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.tick()
    assert (world.job().state, world.job().reason) == (
        JobState.STOPPED,
        "stopped: a user asked it to stop; no rank was running",
    )


async def test_a_job_that_completes_waits_until_its_last_step_is_in_s3(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    world.finish()
    await world.until(lambda: "waits for its last checkpoint" in world.job().reason)
    assert world.job().state == JobState.RUNNING
    await world.upload(7)
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    assert world.job().reason == "every rank ended with success after step 7"
    summary = views.job_summary(world.job(), world.now)
    assert (summary.secondary_status, summary.final_checkpoint_step) == ("Completed", 7)


async def test_a_job_whose_last_step_is_not_stored_completes_with_a_warning(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    assert world.job().reason == (
        "every rank ended with success after step 7. Warning: step 7 did not become a checkpoint; there is no "
        "checkpoint"
    )


async def test_an_end_whose_last_steps_nodes_did_not_keep_says_both_steps(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    await world.upload(6)
    for agent in world.team():
        agent.last_kept = 6
    await world.train(3)
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    job = world.job()
    assert job.reason == (
        "every rank ended with success after step 10. Warning: no later step than 6 was kept; the newest checkpoint is "
        "step 6"
    )
    summary, transitions = views.job_summary(job, world.now), views.status_transitions(job)
    assert (summary.training_job_status, summary.secondary_status) == ("Completed", "CompletedWithOlderCheckpoint")
    assert transitions[-1].status == "CompletedWithOlderCheckpoint"
    assert (summary.boundary, summary.final_checkpoint_step) == (10, 6)


async def test_outputs_that_are_not_in_s3_stay_on_the_job_with_their_names(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    for number, agent in enumerate(world.team()):
        output = OutputFailure(
            rank=Rank(number), path="latest", cause=OutputCause.OUTSIDE, omitted_count=20 if number else 0
        )
        agent.faults = (NodeFault(code="output_missing", message="x", is_permanent=False, output=output),)
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    stored = memos.unstored_outputs_of(world.job())
    assert stored is not None
    assert [(each.rank, each.path, each.cause) for each in stored.outputs] == [
        (number, "latest", OutputCause.OUTSIDE) for number in range(4)
    ]
    assert (stored.generation, stored.count) == (1, 64)
    with world.database.read() as session:
        found = events.page(session, events.EventFilter(), limit=1000)
    messages = [event.message for event in found if event.type == "OutputsNotStored"]
    names = ", ".join(f"gen=1/rank={number}/latest (Outside)" for number in range(4))
    assert messages[-1] == f"outputs are not in S3: {names} and 60 more"
    assert len(messages) == 1


async def test_outputs_of_a_failed_job_that_are_refused_after_its_end_are_named_on_the_job(world: World) -> None:
    """The nodes upload the outputs of the last generation after the job has failed."""
    world.submit(max_attempts=1)
    await world.running()
    await world.train(3)
    agent = world.team()[0]
    agent.unstored_at_release = ("model.bin", "log")
    world.kill_rank(agent, exit_class=ExitClass.ERROR, code=1, lines="NameError: x")
    await world.until(lambda: world.job().state == JobState.FAILED)
    run = agent.run
    await world.until(lambda: agent.run != run)
    stored = memos.unstored_outputs_of(world.job())
    assert stored is not None
    assert [(each.path, each.generation) for each in stored.outputs] == [("model.bin", 2), ("log", 2)]
    assert views.job_summary(world.job(), world.now).training_job_status == "Failed"
    with world.database.read() as session:
        found = events.page(session, events.EventFilter(), limit=1000)
    messages = [event.message for event in found if event.type == "OutputsNotStored"]
    assert messages == ["outputs are not in S3: gen=2/rank=0/model.bin (Refused), gen=2/rank=0/log (Refused)"]


@pytest.mark.security
async def test_a_node_that_never_worked_for_a_job_adds_no_outputs_to_it(world: World) -> None:
    world.submit(max_attempts=1)
    await world.running()
    world.kill_rank(world.team()[0], exit_class=ExitClass.ERROR, code=1, lines="NameError: x")
    team = {each.node_id: (each.job, each.run) for each in world.team()}
    stranger = next(each for each in world.agents.values() if each.node_id not in team)
    await world.until(lambda: world.job().state == JobState.FAILED)
    (stranger.job, stranger.run), stranger.phase = next(iter(team.values())), MemberPhase.EXITED
    output = OutputFailure(rank=Rank(0), path="forged", cause=OutputCause.OUTSIDE)
    stranger.faults = (NodeFault(code="output_missing", message="x", is_permanent=False, output=output),)
    await world.until(lambda: stranger.run is None)
    assert memos.unstored_outputs_of(world.job()) is None


async def test_outputs_of_an_ended_generation_stay_on_the_job_with_their_generation(world: World) -> None:
    """A generation fails, and its outputs cannot be stored. The agents report them during later generations."""
    world.submit()
    await world.running()
    await world.train(7)
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    await world.running()
    agent = world.team()[1]
    output = OutputFailure(rank=Rank(1), path="latest", cause=OutputCause.OUTSIDE, generation=Generation(1))
    agent.faults = (NodeFault(code="output_missing", message="x", is_permanent=False, output=output),)
    await world.tick()
    later = OutputFailure(rank=Rank(1), path="latest", cause=OutputCause.OUTSIDE, generation=Generation(2))
    agent.faults = (NodeFault(code="output_missing", message="x", is_permanent=False, output=later),)
    await world.tick()
    stored = memos.unstored_outputs_of(world.job())
    assert stored is not None
    assert [(each.generation, each.path) for each in stored.outputs] == [(1, "latest"), (2, "latest")]
    assert stored.count == 2


async def test_a_stop_without_a_checkpoint_ends_all_the_same(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert "no checkpoint" in world.job().reason


async def test_a_rank_that_fails_while_stopping_ends_the_job_stopped(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert "rank 1" in world.job().reason
    assert "no checkpoint" in world.job().reason
    await world.until(lambda: all(agent.run is None for agent in world.agents.values()))


async def test_a_stop_without_agreement_waits_for_what_was_committed(world: World) -> None:
    """A rank is killed during an agreed stop. The stop then waits until the newest committed step is in S3.

    The control plane orders the agents to kill the remaining ranks. The coordinator requests the upload of the newest
    committed step.
    """
    world.submit()
    await world.running()
    await world.train(7)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    plan = world.team()[0].plan
    assert plan is not None
    coordinator = next(agent for agent in world.team() if agent.node_id == plan.coordinator)
    world.kill_rank(coordinator)
    await world.until(lambda: "waits for its last checkpoint" in world.job().reason)
    assert world.job().state == JobState.STOPPING
    # The ranks on the coordinator's node have ended, but the coordinator must still receive HaltRanks.
    assert coordinator.node_id in {node for node, message in world.said if isinstance(message, HaltRanks)}
    await world.upload(7)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert "checkpoint is step 7" in world.job().reason


async def test_a_queued_job_is_stopped_at_once(world: World) -> None:
    world.submit("gpt", nodes=30)
    await world.tick()
    assert world.job().state == JobState.QUEUED
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.tick()
    assert world.job().state == JobState.STOPPED


async def test_a_permanent_fault_fails_the_job_with_its_words(world: World) -> None:
    world.submit()
    await world.running()
    agent = world.team()[0]
    agent.faults = (NodeFault(code="protection_does_not_fit", message="needs 8 GiB, has 4 GiB", is_permanent=True),)
    await world.until(lambda: world.job().state == JobState.FAILED)
    assert world.job().reason == "needs 8 GiB, has 4 GiB"
    await world.until(lambda: all(agent.run is None for agent in world.agents.values()))
    assert [message for _, message in world.said if isinstance(message, HaltRanks)]


async def test_one_node_alone_does_not_end_a_job_that_has_trained(world: World) -> None:
    """One node reports a permanent fault again and again. A spare takes its place, and the job continues."""
    world.submit()
    await world.running()
    await world.train(5)
    bad = world.team()[1]
    for _ in range(4):  # The first failure is that of another base step.
        await world.running()
        generation = world.job().generation
        bad.faults = (NodeFault(code="protection_does_not_fit", message="needs 8 GiB, has 4 GiB", is_permanent=True),)
        await world.until(lambda generation=generation: world.job().generation > generation)
    await world.running()
    assert bad.node_id not in {agent.node_id for agent in world.team()}
    assert world.plan().base_step >= 4


async def test_an_agent_that_answers_contradicts_the_reported_end_of_its_instance(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    await world.train(3)
    generation, doomed = world.job().generation, world.team()[1]
    ended, truth = InstanceEnded(node_id=doomed.node_id, state="terminated"), world.runner.cloud.condition
    monkeypatch.setattr(
        world.runner.cloud,
        "condition",
        lambda fleet, node_id: (InstanceCondition.ENDED, ended) if node_id == doomed.node_id else truth(fleet, node_id),
    )
    for _ in range(20):
        await world.tick(5.0)
        await world.train(1)
    assert (world.job().generation, world.job().state) == (generation, JobState.RUNNING)
    assert world.nodes()[doomed.node_id].state == NodeState.ASSIGNED
    doomed.is_deaf = True
    doomed.disconnect()
    await world.until(lambda: world.nodes()[doomed.node_id].state == NodeState.GONE)


async def test_jobs_start_whole_and_in_order(world: World) -> None:
    world.submit("first", nodes=3)
    world.submit("second", nodes=3)
    world.submit("third", nodes=1, copies=1)
    await world.running("first")
    await world.running("second")
    await world.running("third")
    teams = [{agent.node_id for agent in world.team(name)} for name in ("first", "second", "third")]
    assert not set.intersection(teams[0], teams[1])
    assert not set.intersection(teams[1], teams[2])
    names = ("first", "second", "third")
    started = [world.job(name).started_at for name in names]
    assert started == sorted(started)  # type: ignore[type-var]


async def test_a_recovering_job_takes_the_spare_before_a_waiting_one(world: World) -> None:
    world.operator.capacity = 5
    world.submit("old", nodes=4)
    await world.running("old")
    world.submit("new", nodes=1, copies=1)
    world.operator.capacity = 5
    await world.until(lambda: world.job("new").state == JobState.RUNNING)
    world.terminate(world.team("old")[0])
    await world.until(lambda: is_running(world, 2, "old"))
    assert world.job("new").state == JobState.RUNNING


async def test_fleets_grow_for_jobs_and_shrink_afterwards(world: World) -> None:
    world.submit(nodes=8)
    await world.running()
    assert len(world.agents) == 9
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    await world.until(lambda: len(world.agents) == 5)
    assert all(call[2] for call in world.operator.calls if call[0] == "terminate_member")


async def test_an_instance_stopped_from_outside_counts_as_lost(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(3)
    lost = world.team()[2]
    world.operator.end_instance(lost.node_id, Ec2State.STOPPED)
    await world.until(lambda: is_running(world, 2))
    assert world.incidents()[0].cause == "instance_terminated"


async def test_a_restart_in_the_middle_of_a_recovery_goes_on_where_it_was(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    world.terminate(world.team()[1])
    for state in (JobState.PREPARING, JobState.LOADING, JobState.STARTING):
        await world.until(lambda state=state: world.job().state in (state, JobState.RUNNING))
        world.start_server()
    await world.until(lambda: is_running(world, 2))
    assert len(world.incidents()) == 1
    prepared = {message.generation for _, message in world.said if isinstance(message, Prepare)}
    assert prepared == {1, 2}


@pytest.mark.parametrize("engine", BOTH_ENGINES)
async def test_a_second_replica_waits_for_the_lease_and_then_takes_over(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    world.start_server()
    world.terminate(world.team()[0])
    await world.tick()
    # The new server makes no decision until it has seen no renewal of the old lease for the lease's whole duration.
    assert (world.job().state, world.job().generation) == (
        JobState.RUNNING,
        1,
    )
    await world.until(lambda: is_running(world, 2))


@pytest.mark.parametrize("engine", BOTH_ENGINES)
async def test_of_two_replicas_one_serves_a_fleet_its_agents_and_its_jobs(world: World) -> None:
    world.submit()
    await world.running()
    serves, registry = world.runner, world.registry
    world.start_server()
    stands_by, other = world.runner, world.registry
    for _ in range(2 * int(grace_seconds(world.timeouts))):
        world.now += timedelta(seconds=0.5)
        for runner in (serves, stands_by):
            await runner.cloud.poll()
            await runner.fleet_loop.sweep()
            await runner.job_loop.sweep()
            await runner.job_loop.idle()
    assert other.is_elsewhere(FLEET)
    assert not registry.is_elsewhere(FLEET)
    other.accept(hello_of(world.team()[0]), FLEET)
    await stands_by.fleet_loop.sweep()
    assert not other.connected()  # the standby server disconnects agents, because only the active server serves them
    world.runner, world.registry = serves, registry


async def test_a_call_to_auto_scaling_that_hangs_holds_up_no_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit(nodes=2)
    world.submit("other", nodes=2)
    await world.running()
    await world.running("other")
    answers, waiting = threading.Event(), threading.Event()
    terminate = world.operator.terminate_member

    def hang(node_id: NodeId, *, decrement: bool) -> None:
        waiting.set()
        assert answers.wait(30)
        terminate(node_id, decrement=decrement)

    monkeypatch.setattr(world.operator, "terminate_member", hang)
    with ThreadPoolExecutor(4) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        world.hangs = True
        lost = world.team()[1]
        world.terminate(lost)
        for _ in range(2 * int(grace_seconds(world.timeouts))):
            await world.train(1, "other")
        assert await asyncio.to_thread(waiting.wait, 10)
        world.kill_rank(world.team("other")[0])
        await world.until(lambda: is_running(world, 2, "other"), limit=40)
        assert is_running(world, 2), "the lost node's job has gone on with the spare"
        answers.set()
        world.hangs = False
        await world.until(
            lambda: lost.node_id not in {member.instance_id for member in world.operator.describe_group(GROUP).members}
        )


async def test_a_replica_that_alone_cannot_reach_the_database_leaves_its_agents_to_the_one_that_takes_over(
    world: World,
) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    alone, lines = world.runner, {agent.node_id: agent.connection for agent in world.agents.values()}
    with closing(world.database) as lost:
        world.database = Database(str(lost.url))
        world.start_server()
        for agent in world.agents.values():
            agent.connection = lines[agent.node_id]  # agents stay connected, because a connection needs no database

        def is_away(_: object) -> None:
            raise OperationalError("BEGIN", {}, Exception("no route to the database"))

        async def try_alone() -> None:
            with pytest.raises(OperationalError):
                await alone.fleet_loop.sweep()

        listen(lost.engine, "begin", is_away)
        world.before_pass = try_alone
        await world.until(lambda: len(world.registry.connected()) == 5, limit=40)
    world.kill_rank(world.team()[1])
    await world.until(lambda: is_running(world, 2))
    assert [incident.cause for incident in world.incidents()] == ["rank_exit"]


async def test_a_replica_that_loses_the_database_in_the_middle_of_a_long_sweep_does_not_walk_all_its_fleets_first(
    world: World,
) -> None:
    for number in range(8):
        world.add_fleet(FleetName(f"before-main-{number}"), f"group-{number}", "us-east-1a", nodes=0)
    world.submit()
    await world.running()
    lost_at, left, transactions = world.monotonic(), [], itertools.count()
    with world.database.read() as session:
        names = [fleet.name for fleet in fleets.every(session)]

    def is_away(_: object) -> None:
        """Advance the time by five seconds, then raise the error of an unreachable database.

        The first transaction succeeds, because the sweep must read the names of the fleets.
        """
        if next(transactions) == 0:
            return
        if not world.registry.connected():
            left.append(world.monotonic() - lost_at)
        world.now += timedelta(seconds=5)
        raise OperationalError("BEGIN", {}, Exception("no route to the database"))

    world.now += timedelta(seconds=4)
    listen(world.database.engine, "begin", is_away)
    await world.runner.fleet_loop.sweep()
    remove(world.database.engine, "begin", is_away)
    assert names[-1] == FLEET
    assert left
    assert left[0] < 20


@pytest.mark.parametrize("engine", BOTH_ENGINES)
async def test_a_replica_that_takes_over_counts_no_silence_from_before(world: World) -> None:
    world.submit()
    await world.running()
    serves = world.runner
    world.start_server()
    for _ in range(100):
        world.now += timedelta(seconds=0.5)
        for runner in (serves, world.runner):
            await runner.cloud.poll()
            await runner.fleet_loop.sweep()
    await world.until(lambda: len(world.registry.connected()) == 5)
    for _ in range(40):
        await world.train(1)
    assert is_running(world, 1)
    assert not world.incidents()


@pytest.mark.parametrize("engine", ["postgresql"])
async def test_a_database_that_is_lost_again_and_again_in_a_recovery_loses_no_decision(
    world: World, postgresql: PostgreSql
) -> None:
    """Every third commit fails with a cut connection during a recovery. The recovery loses no decision.

    The failing commits include those of decisions about the job, and those of work that such decisions have started.
    """
    world.submit()
    await world.running()
    await world.train(10)
    commits, cuts = itertools.count(1), []

    def cut(_: object) -> None:
        # The simulated agents run in the main thread, and their commits must not fail.
        if threading.current_thread() is not threading.main_thread() and next(commits) % 3 == 0:
            cuts.append(postgresql.cut(str(world.database.url)))

    listen(world.database.engine, "commit", cut)
    world.terminate(world.team()[1])
    await world.until(lambda: is_running(world, 2))
    await world.train(3)
    assert len(cuts) > 3
    assert all(cuts)
    assert len(world.incidents()) == 1
    assert {message.generation for _, message in world.said if isinstance(message, Prepare)} == {1, 2}


async def test_keys_of_a_generation_are_the_same_for_everybody_and_no_other(world: World) -> None:
    world.submit()
    await world.running()
    first = {key for agent in world.team() for key in agent.keys}
    assert len(first) == 1
    world.kill_rank(world.team()[0])
    await world.until(lambda: is_running(world, 2))
    assert len({key for agent in world.team() for key in agent.keys}) == 2


async def test_every_load_follows_its_stored_plan_and_every_start_all_loads(world: World) -> None:
    world.submit()
    await world.running()
    kinds = [type(message).__name__ for _, message in world.said if isinstance(message, Prepare | Load | Start)]
    assert kinds == ["Prepare"] * 4 + ["Load"] * 4 + ["Start"] * 4
    assert not [message for _, message in world.said if isinstance(message, Release)]


async def test_a_node_with_ranks_that_do_not_end_is_left_and_returns_after_their_end(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(4)
    stuck: Agent = world.team()[0]
    world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state == JobState.PREPARING)
    stuck.node_faults = (NodeFault(code="ranks_not_gone", message="pid 7 is in D state", is_permanent=False),)
    # The agent reports no member until the processes have ended.
    with patch.object(stuck, "handle", lambda message: None), patch.object(stuck, "member", lambda: None):
        await world.until(lambda: is_running(world, 2))
        assert stuck.node_id not in [agent.node_id for agent in world.team()]
        for _ in range(30):
            await world.tick(10.0)
        assert world.nodes()[stuck.node_id].state == NodeState.HELD
    stuck.node_faults = ()
    await world.until(lambda: world.nodes()[stuck.node_id].state == NodeState.SPARE)
    assert stuck.node_id in world.agents


async def test_ranks_that_fail_because_a_node_died_are_not_the_breakers_business(world: World) -> None:
    world.submit(max_attempts=1)
    await world.running()
    await world.train(10)
    lost = world.team()[1]
    # The node is dead, but the control plane does not know it yet.
    lost.handle = lambda message: None  # type: ignore[method-assign]
    for agent in world.team():
        if agent is not lost:
            world.kill_rank(agent, exit_class=ExitClass.ERROR, code=1, lines="connection closed by peer")
    await world.tick()
    assert world.job().state == JobState.PREPARING
    assert world.incidents()[0].cause == "rank_exit"
    await world.tick()
    world.terminate(lost)
    await world.until(lambda: is_running(world, 2))
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.instance_ids) == (
        "instance_terminated",
        "peer",
        (lost.node_id,),
    )
    assert not world.job().failures


@pytest.mark.parametrize("is_in_s3", [True, False])
async def test_a_nodes_own_fault_during_a_launch_is_not_the_breakers_business(world: World, *, is_in_s3: bool) -> None:
    world.submit(max_attempts=1)
    await world.running()
    await world.train(10)
    if is_in_s3:
        await world.upload(10)
    world.terminate(world.team()[0])
    await world.until(lambda: (world.job().generation, world.job().state) == (2, JobState.STARTING))
    faulty = world.team()[1]
    faulty.node_faults = (NodeFault(code=FaultCode.GPU_LOST, message="a GPU is gone", is_permanent=False),)
    world.kill_rank(faulty)
    await world.until(lambda: is_running(world, 3))
    # Only the faulty node has the newest shard of its rank. The job therefore keeps the node, unless S3 has the shard
    # too.
    assert (faulty in world.team()) is not is_in_s3
    assert not world.job().failures
    (incident,) = world.incidents()
    assert f"the agent of {faulty.node_id} reports the loss of a GPU: a GPU is gone" in evidence_of(incident)


async def test_a_node_that_is_lost_later_forgives_a_script_nothing(world: World) -> None:
    world.submit(max_attempts=2)
    await world.running()
    await world.train(10)
    world.kill_rank(world.team()[1], exit_class=ExitClass.ERROR, code=1, lines="ValueError")
    await world.until(lambda: (world.job().generation, world.job().state) == (2, JobState.STARTING))
    lost = world.team()[2]
    # The node is dead, but the control plane does not know it yet.
    lost.handle = lambda message: None  # type: ignore[method-assign]
    for agent in world.team():
        if agent is not lost:
            world.kill_rank(agent, exit_class=ExitClass.ERROR, code=1, lines="connection closed by peer")
    await world.until(lambda: world.job().state == JobState.PREPARING)
    assert [failure["generation"] for failure in world.job().failures] == [1, 2]
    world.terminate(lost)
    await world.until(lambda: is_running(world, 3))
    assert [failure["generation"] for failure in world.job().failures] == [1]


async def test_a_failure_during_rework_is_an_incident_of_its_own(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.upload(10)
    await world.train(20)
    for agent in world.team()[:2]:
        world.terminate(agent)
    await world.until(lambda: is_running(world, 2))
    await world.train(5)
    await world.tick()
    world.kill_rank(world.team()[0])
    await world.until(lambda: is_running(world, 3))
    await world.train(3)
    await world.tick()
    first, second = world.incidents()
    assert (first.cause, first.phase) == ("group_lost", "closed")
    assert (second.cause, second.from_step, second.lost_steps) == ("rank_exit", 15, 0)
    assert first.closed_at <= second.opened_at
    assert first.rework_seconds > 0


async def test_no_row_is_written_while_nothing_happens(world: World) -> None:
    await world.until(lambda: len(world.agents) == 5)
    for _ in range(4):
        await world.tick()
    before = len(world.events())
    calls = list(world.operator.calls)
    for _ in range(20):
        await world.tick()
    assert len(world.events()) == before
    assert world.operator.calls == calls


async def test_drift_freezes_what_ends_nodes_and_nothing_else(world: World) -> None:
    world.submit(nodes=6)
    await world.running()
    world.operator.change_group("group", lambda state: replace(state, new_instances_protected=False))
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    for _ in range(10):
        await world.tick()
    assert len(world.agents) == 7
    world.operator.change_group("group", lambda state: replace(state, new_instances_protected=True))
    await world.until(lambda: len(world.agents) == 5)


async def test_a_deleted_fleet_ends_its_nodes_and_is_forgotten(world: World) -> None:
    await world.until(lambda: len(world.agents) == 5)
    with world.database.write() as session:
        fleets.request_delete(session, "main", world.now)

    def is_gone() -> bool:
        with world.database.read() as session:
            return not fleets.every(session)

    await world.until(is_gone)
    assert not world.agents


async def test_what_is_old_is_let_go_while_a_job_trains_and_recovers(world: World) -> None:
    """After rows that are a year old are deleted, a job still recovers from a loss.

    The job trains while the rows are deleted, and then loses a node.
    """
    world.submit()
    await world.running()
    await world.train(5)
    for _ in range(12):
        world.kill_rank(world.team()[0])
        generation = world.job().generation + 1
        await world.until(lambda number=generation: is_running(world, number))
        await world.train(2)
    world.terminate(world.team()[1])
    await world.until(lambda: is_running(world, 14))
    world.now += timedelta(days=365)
    before = len(world.events())
    assert not world.runner.prune()
    assert len(world.events()) == 0 < before
    assert len(world.nodes()) == 5, "the one that ended is forgotten"
    await world.tick()
    await world.train(1)
    world.kill_rank(world.team()[0])
    await world.until(lambda: is_running(world, 15))
    assert world.plan().base_step == 30
    assert len(world.incidents()) == 14


async def test_an_instance_that_never_joins_is_replaced_so_that_the_job_can_start(tmp_path: Path) -> None:
    world = World(tmp_path, spares=0, max_size=4)
    try:
        world.submit()
        await world.until(lambda: len(world.operator.describe_group(GROUP).members) == 4)
        dead = world.operator.describe_group(GROUP).members[0].instance_id
        world.never_return.add(dead)
        await world.until(lambda: dead in world.nodes())
        for _ in range(int(JOIN_SECONDS // 10)):
            await world.tick(10.0)
        await world.until(lambda: world.nodes()[dead].state == NodeState.GONE)
        # the job returns to the queue for some time, because it did not get all of its nodes
        for _ in range(int(JOIN_SECONDS // 10)):
            await world.tick(10.0)
        assert any(
            "joining → draining: its agent has not connected within 900 s" in message for message in world.events()
        )
        await world.running()
        with world.database.read() as session:
            assert sentences(fleets.get(session, FLEET).reasons) == "keeps 4 nodes"
    finally:
        world.close()
