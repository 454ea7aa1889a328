"""Runs the real loops on jobs that a user updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.core.states import JobState
from control_plane.db import jobs, revisions
from control_plane.db.revisions import Change
from tests.sim.world import World, evidence_of


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=4, spares=0, max_size=4)
    yield made
    made.close()


def revise(world: World, *, priority: int = 0, **changes: object) -> None:
    with world.database.write() as session:
        job = jobs.get(session, "gpt")
        spec = replace(job.spec, **changes)  # type: ignore[arg-type]
        change = Change(field="any", before=None, after=None, needs_generation=False)
        revisions.revise(session, job, spec=spec, priority=priority, tags={}, changes=(change,), now=world.now)


@pytest.mark.covers(
    "UpdateTrainingJob.Protection.Copies",
    "UpdateTrainingJob.Protection.MaxSlowdown",
    "UpdateTrainingJob.CheckpointConfig.EverySteps",
)
async def test_a_plan_never_changes_and_the_next_one_follows_the_newest_revision(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(3)
    revise(world, copies=3, checkpoint_every_steps=5, max_slowdown=0.5)
    for _ in range(5):
        await world.tick()
    assert (world.job().generation, world.plan().checkpoint.every_steps, len(world.plan().ranks[0].holders)) == (
        1,
        0,
        2,
    )
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert (world.plan().checkpoint.every_steps, world.plan().max_slowdown) == (5, 0.5)
    assert {len(rank.holders) for rank in world.plan().ranks} == {3}
    assert world.plan().base_step in (2, 3)
    with world.database.read() as session:
        assert [jobs.generation(session, world.job().run_id, number).revision for number in (1, 2)] == [1, 2]


@pytest.mark.covers("UpdateTrainingJob.StoppingCondition.MaxRuntimeInSeconds")
async def test_limits_hold_at_once(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(3)
    revise(world, max_runtime_seconds=1)
    await world.until(lambda: world.job().state == JobState.STOPPING)
    assert "MaxRuntimeInSeconds (1) is over" in world.job().reason


@pytest.mark.covers("CreateTrainingJob.StoppingCondition.MaxCostUsd")
async def test_a_budget_stops_the_job_when_it_is_spent(world: World) -> None:
    world.wish(price_usd_per_hour=3600.0)  # one dollar per node and second
    world.submit(max_cost_usd=100.0)
    await world.running()
    await world.train(3)
    for _ in range(100):
        if world.job().state != JobState.RUNNING:
            break
        await world.train(1)
    assert world.job().state == JobState.STOPPING
    assert "MaxCostUsd (100) is spent" in world.job().reason
    assert 100.0 <= (world.job().cost_usd or 0) < 110.0


async def test_without_a_price_nothing_is_spent(world: World) -> None:
    world.submit(max_cost_usd=0.01)
    await world.running()
    for _ in range(20):
        await world.train(1)
    assert world.job().state == JobState.RUNNING


async def test_a_lower_maximum_returns_nodes_at_an_agreed_stop_and_a_higher_minimum_holds_at_once(
    world: World,
) -> None:
    world.submit(nodes=2, max_node_count=4, patience_seconds=0)
    await world.running()
    for _ in range(60):
        if len(world.plan().nodes) == 4:
            break
        await world.train(1)
        if world.is_stopped:
            world.finish()
            await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4
    await world.train(3)
    generation, world.is_stopped = world.job().generation, False
    revise(world, max_node_count=3)
    for _ in range(60):
        await world.train(1)
        if world.is_stopped:
            break
    world.finish()
    await world.until(lambda: world.job().generation > generation and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 3
    assert "MaxNodeCount is 3" in " ".join(evidence_of(world.incidents()[-1]))
    assert world.plan().base_step == world.incidents()[-1].reached_step
    for _ in range(20):
        await world.train(1)
    assert len(world.plan().nodes) == 3, "it does not grow again"


async def trains_on_four(world: World, **changes: object) -> None:
    """Train a job of two nodes that has grown to four."""
    world.submit(nodes=2, max_node_count=4, patience_seconds=0, **changes)  # type: ignore[arg-type]
    await world.running()
    for _ in range(60):
        if len(world.plan().nodes) == 4:
            break
        await world.train(1)
        if world.is_stopped:
            world.finish()
            await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == 4
    await world.train(5)
    world.is_stopped = False


async def returns(world: World) -> None:
    """Train until the control plane requests an agreed stop. Then end the ranks, and wait for the next generation."""
    generation = world.job().generation
    for _ in range(60):
        await world.train(1)
        if world.is_stopped:
            break
    world.finish()
    await world.until(lambda: world.job().generation > generation and world.job().state == JobState.RUNNING, limit=1000)


async def test_a_maximum_that_is_lowered_during_a_recovery_loses_no_step(world: World) -> None:
    """A user lowers the job's maximum during a recovery. The recovery still uses the surplus nodes.

    These nodes hold the only copies of two shards.
    """
    await trains_on_four(world)
    generation = world.job().generation
    world.kill_rank(world.team()[0])
    revise(world, max_node_count=2)
    await world.until(lambda: world.job().generation > generation and world.job().state == JobState.RUNNING)
    assert (len(world.plan().nodes), world.plan().base_step) == (4, world.incidents()[-1].reached_step)
    await returns(world)
    assert len(world.plan().nodes) == 2
    assert world.plan().base_step == world.incidents()[-1].reached_step
    await world.until(lambda: sum(node.run_id == world.job().run_id for node in world.nodes().values()) == 2)


async def test_a_job_keeps_the_only_copies_and_tries_to_return_their_nodes_later(world: World) -> None:
    await trains_on_four(world, copies=1)
    revise(world, max_node_count=2)
    await returns(world)
    assert len(world.plan().nodes) == 4, "its last step is not in S3"
    assert world.plan().base_step == world.incidents()[-1].reached_step
    assert "stays: without it, only step 0 can be restored" in " ".join(world.events())
    kept_at = world.now
    world.is_stopped = False
    while not world.is_stopped:
        await world.train(1)
        assert (world.now - kept_at).total_seconds() < 300
    assert (world.now - kept_at).total_seconds() > 60, "each stop costs time, so the next one waits"


async def test_a_maximum_that_is_lowered_during_the_stop_for_growth_does_not_end_the_job(world: World) -> None:
    """The control plane must store its stop request. Otherwise it would treat the ended ranks as a completed job."""
    world.submit(nodes=2, max_node_count=4, patience_seconds=0)
    await world.running()
    if len(world.plan().nodes) == 4:
        revise(world, max_node_count=2)
        await returns(world)
        revise(world, max_node_count=4)
    world.is_stopped = False
    while not world.is_stopped:
        await world.train(1)
    count, generation = len(world.plan().nodes), world.job().generation
    revise(world, max_node_count=count)
    await world.train(1)
    world.finish()
    await world.until(lambda: world.job().state != JobState.RUNNING)
    assert world.job().state == JobState.PREPARING
    await world.until(lambda: world.job().generation > generation and world.job().state == JobState.RUNNING)
    assert len(world.plan().nodes) == count
