"""Runs the real loops on a queue of jobs, which wait, overtake others by priority, are preempted, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane.core.job.ending import PAUSE_PATIENCE_TIMES
from control_plane.core.queue import STAND_ASIDE_SECONDS
from control_plane.core.states import JobState, NodeState
from control_plane.core.timeouts import GANG_PATIENCE_SECONDS
from control_plane.db import jobs, quotas
from everstep.protocol.agent_messages import ExitClass
from tests.sim.world import World, evidence_of


@pytest.fixture
def small(tmp_path: Path):
    """Yield a simulated cluster whose fleet cannot grow beyond six nodes."""
    world = World(tmp_path, nodes=6, spares=0, max_size=6)
    yield world
    world.close()


async def stands(world: World, name: str = "low") -> None:
    """Run the loops until the control plane has requested the stop of a pausing job. Then end the job's ranks."""
    await world.until(lambda: world.job(name).state == JobState.PAUSING and world.is_stopped)
    world.finish(name)
    await world.tick()


async def after(world: World, seconds: float) -> None:
    """Advance the time by `seconds`, with one decision of the loops per minute."""
    for _ in range(int(seconds // 60) + 1):
        await world.tick(60.0)


async def watched(world: World, seconds: float) -> None:
    """Advance the time by `seconds`, with one decision of the loops every five seconds."""
    for _ in range(int(seconds // 5) + 1):
        await world.tick(5.0)


async def low_and_high(world: World) -> None:
    """Train a preemptible job to step 7, then submit a job of higher priority. The fleet has no room for both."""
    world.submit("low", nodes=4, preemptible=True)
    await world.running("low")
    await world.train(7, "low")
    world.submit("high", nodes=4, priority=5)


@pytest.mark.covers("CreateTrainingJob.Priority", "CreateTrainingJob.Preemptible")
async def test_a_job_gives_way_to_a_higher_priority_and_resumes_by_itself(small: World) -> None:
    await low_and_high(small)
    await stands(small)
    assert small.job("low").state == JobState.PAUSING, "memory is let go only once the step is a checkpoint"
    assert small.job("high").reason == "place 1 of 1 in the queue: needs 4 nodes; jobs use 4 of at most 6 nodes"
    await small.upload(7, "low")
    small.is_stopped = False
    await small.until(lambda: small.job("high").state == JobState.RUNNING)
    low = small.job("low")
    assert (low.state, low.reason) == (
        JobState.QUEUED,
        "place 1 of 1 in the queue: needs 4 nodes; jobs use 4 of at most 6 nodes",
    )
    assert "paused after step 7, resumes by itself from the checkpoint of step 7" in [
        transition.reason for transition in low.transitions
    ]
    assert all(node.run_id != low.run_id for node in small.nodes().values())
    assert not small.incidents("low")
    small.finish("high")
    await small.until(lambda: small.job("low").state == JobState.RUNNING)
    assert (small.plan("low").base_step, small.plan("low").parent, small.job("low").generation) == (7, 1, 2)
    assert {source.kind for rank in small.plan("low").ranks for source in rank.sources} == {"s3"}
    await small.train(2, "low")
    small.finish("low")
    await small.until(lambda: small.job("low").state == JobState.COMPLETED)
    assert small.job("low").accounting["paused"] > 0
    assert not small.incidents("low")


@pytest.mark.parametrize(("changes", "priority"), [({"preemptible": False}, 5), ({"preemptible": True}, 0)])
@pytest.mark.covers("CreateTrainingJob.Priority", "CreateTrainingJob.Preemptible")
async def test_a_job_that_need_not_give_way_does_not(small: World, changes: dict[str, object], priority: int) -> None:
    small.submit("low", nodes=4, **changes)
    await small.running("low")
    await small.train(7, "low")
    small.submit("high", nodes=4, priority=priority)
    for _ in range(20):
        await small.tick()
    assert (small.job("low").state, small.job("high").state) == (JobState.RUNNING, JobState.QUEUED)


async def test_a_job_is_not_paused_before_it_has_committed_a_step(small: World) -> None:
    small.submit("low", nodes=4, preemptible=True)
    await small.running("low")
    small.submit("high", nodes=4, priority=5)
    for _ in range(5):
        await small.tick()
    assert small.job("low").state == JobState.RUNNING
    await small.train(3, "low")
    await small.until(lambda: small.job("low").state == JobState.PAUSING)


async def test_a_failure_while_a_job_pauses_is_a_failure_like_any_other(small: World) -> None:
    await low_and_high(small)
    await small.until(lambda: small.job("low").state == JobState.PAUSING)
    small.terminate(small.team("low")[1])
    await small.until(lambda: small.job("low").state == JobState.RUNNING and small.job("low").generation == 2)
    assert small.plan("low").base_step == 7
    (incident,) = small.incidents("low")
    assert incident.cause == "instance_terminated"
    small.is_stopped = False
    await small.train(3, "low")
    await stands(small)
    await small.upload(10, "low")
    await small.until(lambda: small.job("low").state == JobState.QUEUED)


async def test_a_pause_that_cannot_be_checkpointed_is_given_up_and_costs_nothing(small: World) -> None:
    await low_and_high(small)
    await stands(small)
    await watched(small, PAUSE_PATIENCE_TIMES * small.timeouts.blind_wait_seconds)
    await small.until(lambda: small.job("low").generation == 2 and small.job("low").state == JobState.RUNNING)
    assert small.plan("low").base_step == 7
    (incident,) = small.incidents("low")
    assert (incident.cause, incident.lost_steps) == ("pause_failed", 0)
    assert "did not become a checkpoint" in evidence_of(incident)[0]
    await small.train(3, "low")
    for _ in range(20):
        await small.tick()
    assert small.job("low").state == JobState.RUNNING, "it is left alone for a while"


async def test_a_job_that_ends_by_itself_while_it_is_asked_to_pause_has_ended(small: World) -> None:
    await low_and_high(small)
    await small.until(lambda: small.job("low").state == JobState.PAUSING)
    small.is_stopped = False
    for agent in small.agents.values():
        agent.is_told_to_stop = False  # the script ended before the stop request arrived
    small.finish("low")
    await small.until(lambda: small.job("low").state == JobState.COMPLETED)


async def test_a_paused_job_can_be_stopped(small: World) -> None:
    await low_and_high(small)
    await stands(small)
    await small.upload(7, "low")
    await small.until(lambda: small.job("low").state == JobState.QUEUED)
    with small.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "low").run_id, small.now)
    await small.until(lambda: small.job("low").state == JobState.STOPPED)
    assert small.job("low").reason == "stopped while it was paused: a user asked it to stop"


async def test_the_control_plane_may_die_anywhere_in_a_pause(small: World) -> None:
    await low_and_high(small)
    await small.until(lambda: small.job("low").state == JobState.PAUSING)
    small.start_server()
    await stands(small)
    small.start_server()
    for _ in range(30):
        await small.tick()
    await small.upload(7, "low")
    small.is_stopped = False
    small.start_server()
    await small.until(lambda: small.job("high").state == JobState.RUNNING)
    small.finish("high")
    await small.until(lambda: small.job("low").state == JobState.RUNNING)
    assert small.plan("low").base_step == 7
    job = small.job("low")
    assert job.accounted_until is not None
    assert not small.incidents("low")


async def test_a_gang_that_does_not_come_together_gives_its_nodes_back_and_tries_again(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=0, spares=0, max_size=6)
    try:
        world.operator.capacity = 3
        world.submit("big", nodes=6)
        await world.until(lambda: len(world.agents) == 3)
        world.submit("small", nodes=2)
        for _ in range(10):
            await world.tick()
        assert (world.job("big").state, world.job("small").state) == (JobState.ALLOCATING, JobState.QUEUED)
        await after(world, GANG_PATIENCE_SECONDS)
        await world.until(lambda: world.job("small").state == JobState.RUNNING)
        assert "stands aside until" in world.job("big").reason
        await world.until(lambda: NodeState.GONE in {node.state for node in world.nodes().values()})
        kept = [node for node in world.nodes().values() if node.state != NodeState.GONE]
        assert {node.run_id for node in kept} == {world.job("small").run_id}, (
            "the third node is surplus, released by its id"
        )
        for agent in world.team("small"):
            agent.exit_all(ExitClass.SUCCESS, 0)
        world.operator.capacity = 6
        await after(world, STAND_ASIDE_SECONDS)
        await world.until(lambda: world.job("big").state == JobState.RUNNING)
    finally:
        world.close()


async def test_a_project_at_its_quota_waits_and_holds_nobody_up(small: World) -> None:
    with small.database.write() as session:
        quotas.put(session, quotas.QuotaRecord(project="speech", max_node_count=3, max_job_count=None))
    small.submit("first", nodes=2, project="speech")
    await small.running("first")
    small.submit("second", nodes=2, project="speech", priority=9)
    small.submit("low", nodes=2, project="vision", preemptible=True)
    small.submit("other", nodes=2, project="vision")
    await small.running("other")
    for _ in range(10):
        await small.tick()
    assert (small.job("low").state, small.job("second").state) == (JobState.RUNNING, JobState.QUEUED)
    assert (
        small.job("second").reason
        == "waits for its project's quota: speech has a quota of 3 nodes of this fleet and holds 2, "
        "the job needs 2 nodes"
    )
    with small.database.write() as session:
        quotas.put(session, quotas.QuotaRecord(project="speech", max_node_count=4, max_job_count=None))
    await small.tick()
    assert small.job("second").reason.startswith("place 1 of 1 in the queue"), (
        "now it is the head, and others make way for it"
    )
    with small.database.write() as session:
        quotas.put(session, quotas.QuotaRecord(project="speech", max_node_count=1, max_job_count=None))
    for _ in range(10):
        await small.tick()
    assert small.job("first").state == JobState.RUNNING, "a quota stops nothing that runs"


async def test_a_sweep_reads_each_job_of_a_fleet_so_many_times_however_many_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    count = 12
    for number in range(count):
        world.submit(f"waits{number}", nodes=20)
    await world.tick()
    read, record_of_row = [], jobs.record_of_row

    def counted(row: Any, **others: Any) -> jobs.SavedJob:
        read.append(row)
        return record_of_row(row, **others)

    monkeypatch.setattr(jobs, "record_of_row", counted)
    await world.runner.job_loop.sweep()
    await world.runner.job_loop.idle()
    assert 0 < len(read) <= 4 * (count + 1)
