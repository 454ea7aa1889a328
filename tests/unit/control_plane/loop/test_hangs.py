"""Runs the real loops on ranks that hang.

The tests cover the requests for stacks, the stored evidence, and the accounting of the lost time.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane.api import views
from control_plane.core import hangs
from control_plane.core.states import JobState
from control_plane.db import events, jobs
from everstep.protocol.agent_messages import TakeStacks
from tests.sim.world import World


async def test_a_hang_is_found_across_a_restart_and_its_time_adds_up(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.until(lambda: "made no progress" in world.job().reason)
    world.start_server()
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    await world.train(1)
    assert {message.number for _, message in world.said if isinstance(message, TakeStacks)} == {1, 2}
    with world.database.read() as session:
        found = events.page(session, events.EventFilter(job_name="gpt"), limit=1000)
    told = [event for event in found if event.type in ("RanksStandStill", "RanksHang")]
    assert [event.type for event in told] == ["RanksStandStill", "RanksHang"], "each once"
    assert told[0].detail["stacks"][0]["ranks"] == [0, 1, 2, 3]
    job = world.job()
    assert job.accounted_until is not None
    assert sum(job.accounting.values()) == (job.accounted_until - job.created_at) // timedelta(microseconds=1)
    (incident,) = world.incidents()
    with world.database.read() as session:
        within = {"project": "", "job_name": "gpt", "since": incident.opened_at, "until": incident.closed_at}
        assert events.newest_of(session, hangs.PROVEN, **within) == told[1].id  # type: ignore[arg-type]
        assert events.newest_of(session, hangs.PROVEN, **{**within, "job_name": "other"}) is None  # type: ignore[arg-type]
    assert {rank for group in told[1].detail["stacks"] for rank in group["ranks"]} == {0, 1, 2, 3}
    assert job.accounting.get("stall", 0) == 0, "ranks that do not move again were never just slow"
    assert incident.detect_seconds == pytest.approx(timedelta(microseconds=job.accounting["detect"]).total_seconds())
    assert incident.detect_seconds > 60.0


async def test_a_suspected_hang_is_shown_with_its_age_and_costs_no_write_for_it(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    stopped_at = world.now
    await world.until(lambda: "made no progress" in world.job().reason)
    await world.tick()
    stored = world.job()
    await world.until(lambda: world.now - stopped_at >= timedelta(seconds=45))
    assert world.job().reason == stored.reason
    assert world.job().memo == stored.memo
    for reason in (views.reason_of(world.job(), world.now), views.job_summary(world.job(), world.now).reason):
        assert reason.startswith("no progress for 45 s (limit 90 s): all 4 ranks made no progress in train")


async def test_ranks_that_stand_still_do_not_keep_a_job_from_being_stopped(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.until(lambda: "made no progress" in world.job().reason)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.until(lambda: world.job().state == JobState.STOPPED)


async def test_a_stop_during_a_hang_waits_15_s_for_an_agreement(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.until(lambda: "made no progress" in world.job().reason)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    asked = world.now
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert world.now - asked <= timedelta(seconds=50), (
        "15 s for an agreement, then the ranks are killed; 30 s for the last checkpoint"
    )
    assert world.job().committed_step == 9


async def test_a_stop_during_a_hang_ends_within_30_s_with_its_newest_committed_step_in_s3(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.until(lambda: "made no progress" in world.job().reason)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    asked = world.now
    await world.until(lambda: all(agent.exits for agent in world.team()))
    assert world.is_stopped, (
        "the coordinator was asked to stop, so that it uploads the newest commit when the ranks are ended"
    )
    assert world.job().state == JobState.STOPPING, "it waits for the upload"
    await world.upload(9)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert world.now - asked <= timedelta(seconds=30)
    assert [(each.step, each.state) for each in world.checkpoints()] == [(9, "complete")]
    assert "the newest checkpoint is step 9" in world.job().reason


@pytest.mark.parametrize("phase", ["start", "first_step"])
async def test_a_stop_while_the_first_launch_hangs_ends_within_30_s(world: World, phase: str) -> None:
    world.submit()
    await world.running()
    for agent in world.team():
        agent.phase_of, agent.longest = dict.fromkeys(agent.boundary, phase), {}
    for _ in range(40):
        await world.tick()
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    asked = world.now
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert world.now - asked <= timedelta(seconds=30)
    assert world.job().reason == "stopped before a new step: a user asked it to stop; there is no checkpoint"


async def test_a_stop_during_slow_steps_waits_for_the_agreement(world: World) -> None:
    """All steps are slow but within every time limit.

    A stop request waits until the ranks agree on a step, and the control plane suspects no hang.
    """
    world.submit()
    await world.running()
    for agent in world.team():
        agent.longest = {"train": 40.0, "first_step": 40.0}
    await world.train(10)
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    for _ in range(80):
        await world.tick()
    assert not any(agent.exits for agent in world.team())
    world.finish()
    await world.until(lambda: world.job().state == JobState.STOPPED)
