"""Runs the real loops on jobs that a person pauses and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.core.job.ending import PAUSE_PATIENCE_TIMES
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.queue import PAUSE_AGAIN_SECONDS
from control_plane.core.states import JobState
from control_plane.db import jobs
from control_plane.db.errors import Conflict
from control_plane.loop import records
from everstep.protocol.agent_messages import FaultCode, MemberPhase, NodeFault
from tests.sim.world import World
from tests.unit.control_plane.loop.test_queue import after, stands, watched


@pytest.fixture
def small(tmp_path: Path):
    """Yield a simulated cluster whose fleet cannot grow beyond six nodes."""
    world = World(tmp_path, nodes=6, spares=0, max_size=6)
    yield world
    world.close()


def pause(world: World, name: str = "gpt") -> jobs.SavedJob:
    with world.database.write() as session:
        return jobs.request_pause(session, jobs.get(session, name).run_id, world.now)


def resume(world: World, name: str = "gpt") -> jobs.SavedJob:
    with world.database.write() as session:
        return jobs.withdraw_pause(session, jobs.get(session, name).run_id, world.now)


async def trains(world: World, steps: int = 7, **changes: object) -> None:
    world.submit(**changes)  # type: ignore[arg-type]
    await world.running()
    await world.train(steps)


async def paused(world: World, step: int = 7) -> None:
    """Pause the job, upload `step`, and run the loops until the job is queued."""
    pause(world)
    await stands(world, "gpt")
    await world.upload(step)
    await world.until(lambda: world.job().state == JobState.QUEUED)
    world.is_stopped = False


async def test_a_paused_job_gives_its_nodes_back_and_goes_on_only_when_it_is_resumed(small: World) -> None:
    await trains(small)
    pause(small)
    await stands(small, "gpt")
    assert small.job().state == JobState.PAUSING, "memory is let go only once the step is a checkpoint"
    await small.upload(7)
    await small.until(lambda: small.job().state == JobState.QUEUED)
    small.is_stopped = False
    assert small.job().reason == "paused by a user; ResumeTrainingJob resumes it: the newest checkpoint is step 7"
    assert (
        small.job().transitions[-1].reason
        == "paused after step 7, ResumeTrainingJob resumes it from the checkpoint of step 7"
    )
    small.submit("other", nodes=4)
    await small.running("other")
    small.finish("other")
    await small.until(lambda: small.job("other").state == JobState.COMPLETED)
    await after(small, 600.0)
    assert small.job().state == JobState.QUEUED, "free nodes do not wake it"
    resume(small)
    await small.running()
    assert (small.plan().base_step, small.job().generation) == (7, 2)
    assert {source.kind for rank in small.plan().ranks for source in rank.sources} == {"s3"}
    await small.train(2)
    small.finish()
    await small.until(lambda: small.job().state == JobState.COMPLETED)
    assert small.job().accounting["paused"] > 600e6
    assert not small.incidents()


async def test_a_checkpoint_of_a_step_that_was_given_up_lets_no_node_go(small: World) -> None:
    """A pause releases nodes only when the newest committed step is in S3.

    A checkpoint of a step that a recovery has discarded does not count.

    In the test, step 10 is in S3. Then a recovery resumes from step 9, and the ranks train step 10 again.
    """
    small.submit("gpt")
    await small.running("gpt")
    await small.train(10)
    await small.upload(10)
    bad = small.team()[1:3]
    small.kill_rank(small.team()[0])
    for agent in bad:
        agent.fails_load, agent.load_fault = True, FaultCode.SOURCE_MISMATCH
    await small.until(
        lambda: small.job().generation == 2 and all(agent.phase is MemberPhase.LOAD_FAILED for agent in bad)
    )
    for agent in bad:
        agent.fails_load = False
    await small.until(lambda: small.job().generation == 3 and small.job().state == JobState.RUNNING)
    assert small.plan().base_step == 9
    await small.train(1)
    pause(small)
    await stands(small, "gpt")
    committed = records.job_record(small.job()).committed
    assert committed == 10
    for _ in range(20):
        await small.tick()
    assert small.job().state == JobState.PAUSING
    await small.upload(committed)
    await small.until(lambda: small.job().state == JobState.QUEUED)


async def test_a_paused_job_of_high_priority_holds_nobody_up_and_nobody_gives_way_to_it(small: World) -> None:
    small.submit(priority=9)
    pause(small)
    small.submit("low", nodes=4, preemptible=True)
    await small.running("low")
    await small.train(3, "low")
    for _ in range(10):
        await small.tick()
    assert (small.job("low").state, small.job().state) == (JobState.RUNNING, JobState.QUEUED)
    assert small.job().reason.startswith("paused by a user before it started")
    resume(small)
    await small.until(lambda: small.job("low").state == JobState.PAUSING)


async def test_a_job_that_was_preempted_stays_paused_when_a_person_pauses_it(small: World) -> None:
    small.submit("low", nodes=4, preemptible=True)
    await small.running("low")
    await small.train(7, "low")
    small.submit("high", nodes=4, priority=5)
    await stands(small)
    await small.upload(7, "low")
    small.is_stopped = False
    await small.running("high")
    pause(small, "low")
    small.finish("high")
    await small.until(lambda: small.job("high").state == JobState.COMPLETED)
    for _ in range(20):
        await small.tick()
    assert small.job("low").state == JobState.QUEUED
    resume(small, "low")
    await small.running("low")
    assert small.plan("low").base_step == 7


async def test_a_gang_that_is_still_coming_together_is_given_back(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=0, spares=0, max_size=6)
    try:
        world.operator.capacity = 2
        world.submit(nodes=4)
        await world.until(lambda: world.job().state == JobState.ALLOCATING)
        pause(world)
        await world.until(lambda: world.job().state == JobState.QUEUED)
        assert all(node.run_id is None for node in world.nodes().values())
    finally:
        world.close()


async def test_a_job_that_is_launched_pauses_once_it_trains(small: World) -> None:
    small.submit()
    await small.until(lambda: small.job().state == JobState.PREPARING)
    pause(small)
    await small.until(lambda: small.job().state == JobState.PAUSING)


async def test_a_job_that_has_committed_no_step_is_paused_without_a_checkpoint(small: World) -> None:
    small.submit()
    await small.running()
    pause(small)
    await stands(small, "gpt")
    await small.until(lambda: small.job().state == JobState.QUEUED)
    assert small.job().reason == "paused by a user; ResumeTrainingJob resumes it: there is no checkpoint"


async def test_a_resume_while_it_pauses_leads_back_into_the_queue_and_out_again(small: World) -> None:
    await trains(small)
    pause(small)
    await small.until(lambda: small.job().state == JobState.PAUSING)
    resume(small)
    await stands(small, "gpt")
    await small.upload(7)
    small.is_stopped = False
    await small.until(lambda: small.job().generation == 2 and small.job().state == JobState.RUNNING)
    assert small.plan().base_step == 7


async def test_a_pause_waits_until_ranks_train_again_and_leaves_no_incident_open(small: World) -> None:
    await trains(small, 3, copies=1)
    await small.upload(3)
    await small.train(4)
    small.terminate(small.team()[0])  # only S3 still has this node's shard, of step 3
    await small.until(lambda: bool(small.incidents()))
    pause(small)
    await small.running()
    await small.tick()
    assert small.job().state == JobState.RUNNING, "ranks that have not stepped yet are not stopped"
    await small.train(1)
    await paused(small, 4)
    (incident,) = small.incidents()
    assert (incident.phase, incident.from_step) == ("closed", 3)
    await after(small, 60.0)
    spent = small.job().accounting
    assert spent["paused"] >= 60e6
    assert spent.get("rework", 0) < 10e6


async def test_a_pause_that_did_not_work_out_is_tried_again_later(small: World) -> None:
    await trains(small)
    pause(small)
    await stands(small, "gpt")
    await watched(small, PAUSE_PATIENCE_TIMES * small.timeouts.blind_wait_seconds)
    small.is_stopped = False
    await small.until(lambda: small.job().generation == 2 and small.job().state == JobState.RUNNING)
    await small.train(3)
    for _ in range(10):
        await small.tick()
    assert small.job().state == JobState.RUNNING, "it is left alone for a while"
    for _ in range(int(PAUSE_AGAIN_SECONDS // 20) + 2):
        await small.train(1)
        await small.tick(20.0)
        if small.job().state == JobState.PAUSING:
            break
    assert small.job().state == JobState.PAUSING


async def test_a_pause_waits_for_an_upload_of_minutes_and_for_what_else_its_ranks_leave(small: World) -> None:
    await trains(small)
    for agent in small.team():
        agent.leaves_much = True
    small.team()[1].node_faults = (
        NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),
    )
    small.operator.capacity = 5  # AWS launches no replacement at this capacity
    pause(small)
    await stands(small, "gpt")
    await watched(small, 300.0)
    assert small.job().reason == "stopped at step 7 to pause; waits for its checkpoint"
    small.start_server()
    for agent in small.agents.values():
        agent.is_deaf = True
    for _ in range(22):  # the new server decides about the fleet before any agent connects
        await small.tick()
    for agent in small.agents.values():
        agent.is_deaf = False
    await small.upload(7)
    assert small.job().state == JobState.PAUSING, "its output and its lines are still on their way"
    for agent in small.team():
        agent.phase = MemberPhase.EXITED
    await small.until(lambda: small.job().state == JobState.QUEUED)
    assert not small.incidents()


async def test_a_pause_has_its_time_from_when_its_ranks_agreed(small: World) -> None:
    """The time limit of a pause begins when the ranks agree to stop, not with the request.

    In the test, the ranks are in an evaluation at the time of the request. The evaluation takes longer than the limit.
    """
    await trains(small)
    for agent in small.team():
        agent.phase_of, agent.limit_of = dict.fromkeys(agent.boundary, "wait"), dict.fromkeys(agent.boundary, 1800.0)
    await small.tick()
    pause(small)
    await small.until(lambda: small.is_stopped)
    await watched(small, PAUSE_PATIENCE_TIMES * small.timeouts.blind_wait_seconds + 100)
    for agent in small.team():
        agent.phase_of, agent.limit_of, agent.has_decided = {}, {}, True
    await small.train(1)
    await small.tick()
    assert (small.job().state, small.job().reason) == (
        JobState.PAUSING,
        "stopped at step 8 to pause; waits for its checkpoint",
    )
    await watched(small, 60.0)
    small.finish()
    await small.upload(8)
    await small.until(lambda: small.job().state == JobState.QUEUED)
    assert not small.incidents()


async def test_a_job_pauses_in_peace_although_one_of_its_nodes_is_impaired(small: World) -> None:
    small.operator.capacity = 4
    for agent in [spare for spare in small.agents.values() if spare.run is None]:
        small.terminate(agent)
    await trains(small)
    small.team()[1].node_faults = (
        NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),
    )
    await small.train(1)
    pause(small)
    await small.until(lambda: small.job().state == JobState.PAUSING)
    await small.train(1)
    await stands(small, "gpt")
    await small.upload(9)
    await small.until(lambda: small.job().state == JobState.QUEUED)
    assert (
        small.job().transitions[-1].reason
        == "paused after step 9, ResumeTrainingJob resumes it from the checkpoint of step 9"
    )
    assert not small.incidents()


async def test_time_under_a_persons_pause_is_no_pending_time(small: World) -> None:
    small.submit(max_pending_seconds=300)
    pause(small)
    await after(small, 3600.0)
    assert small.job().state == JobState.QUEUED
    resume(small)
    await small.running()


async def test_a_pause_before_the_first_start_makes_no_run_longer(small: World) -> None:
    small.submit(max_runtime_seconds=1200)
    pause(small)
    await after(small, 3600.0)
    resume(small)
    await small.running()
    assert not records.job_record(small.job()).stop_reason
    for _ in range(13):
        if small.job().state == JobState.RUNNING:
            await small.train(1)  # the control plane would suspect a hang if the ranks did not advance
        await after(small, 100.0)
    assert records.job_record(small.job()).stop_reason == JobNote(what=JobFact.MAX_RUNTIME_OVER, limit=1200.0)


async def test_the_control_plane_may_die_anywhere_in_a_persons_pause(small: World) -> None:
    await trains(small)
    pause(small)
    small.start_server()
    await stands(small, "gpt")
    small.start_server()
    for _ in range(30):
        await small.tick()
    await small.upload(7)
    small.start_server()
    await small.until(lambda: small.job().state == JobState.QUEUED)
    small.is_stopped = False
    small.start_server()
    for _ in range(30):
        await small.tick()
    assert small.job().state == JobState.QUEUED
    resume(small)
    small.start_server()
    await small.running()
    assert small.plan().base_step == 7


async def test_asking_again_changes_nothing_and_an_ended_job_is_neither_paused_nor_resumed(small: World) -> None:
    small.submit()
    first = pause(small)
    await small.tick()
    assert pause(small).pause_requested_at == first.pause_requested_at
    resume(small)
    assert resume(small).pause_requested_at is None
    with small.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, small.now)
    with pytest.raises(Conflict, match="cannot be paused"):
        pause(small)
    await small.until(lambda: small.job().state == JobState.STOPPED)
    for ask in (pause, resume):
        with pytest.raises(Conflict, match="has ended"):
            ask(small)
