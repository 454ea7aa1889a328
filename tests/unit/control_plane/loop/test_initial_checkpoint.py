"""Runs the real loops on jobs that start from another job's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.core.states import JobState
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import checkpoints, jobs
from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.ids import Rank
from tests.sim.world import World


@pytest.fixture
async def world(tmp_path: Path):
    """Yield a simulated cluster whose job `first` has two nodes, has stored step 4 and still runs."""
    made = World(tmp_path, nodes=4, spares=0, max_size=4)
    made.submit("first", nodes=2)
    await made.running("first")
    await made.train(5, "first")
    await made.upload(4, "first")
    yield made
    made.close()


def verify(world: World, verdict: CheckpointVerdict) -> None:
    (record,) = world.checkpoints("first")
    with world.database.write() as session:
        checkpoints.store_verdict(session, world.job("first").run_id, record, verdict=verdict, now=world.now)


def initial(world: World) -> jobs.InitialState:
    (record,) = world.checkpoints("first")
    return jobs.InitialState(
        run_id=world.job("first").run_id, job_name="first", generation=record.generation, step=4, world_size=2
    )


async def test_a_job_starts_from_the_checkpoint_of_another_job(world: World) -> None:
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    plan = world.plan()
    assert (plan.base_step, plan.checkpoint.stored_step) == (4, 4)
    assert plan.relayout is not None, "another job may divide its state in another way"
    for rank, sources in enumerate(plan.relayout.shards):
        (source,) = sources
        assert (source.kind, source.origin_generation) == ("s3", 0)
        assert source.object is not None
        assert source.object.key.endswith(f"/gen=1/step=4/u/rank={rank}.safetensors")


async def test_the_initial_state_stays_the_base_until_a_step_is_committed(world: World) -> None:
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 4
    assert world.plan().relayout is not None
    await world.train(3)
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 3 and world.job().state == JobState.RUNNING)
    assert (world.plan().base_step, world.plan().relayout) == (7, None)


async def test_the_first_manifest_of_such_a_job_names_its_own_generations_only(world: World) -> None:
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    await world.train(3)
    await world.upload(6)
    (record,) = world.checkpoints()
    manifest = record.contents()
    assert manifest is not None
    assert manifest.parent_chain == ((1, 4),)


async def test_a_job_with_another_number_of_ranks_starts_with_a_relayout(world: World) -> None:
    world.submit(nodes=1, copies=1, initial=initial(world))
    await world.running()
    plan = world.plan()
    assert plan.base_step == 4
    assert plan.relayout is not None
    assert [[source.kind for source in sources] for sources in plan.relayout.shards] == [["s3"], ["s3"]]
    await world.train(2)
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert (world.plan().base_step, world.plan().relayout) == (6, None)


async def test_a_job_whose_initial_checkpoint_was_deleted_fails_with_its_name(world: World) -> None:
    started = initial(world)
    (record,) = world.checkpoints("first")
    with world.database.write() as session:
        checkpoints.set_state(session, started.run_id, record, checkpoints.DELETING)
    world.submit(nodes=2, initial=started)
    await world.until(lambda: world.job().state == JobState.FAILED)
    assert f"step 4 of the job first (run {started.run_id}): it was deleted" in world.job().reason


async def test_a_job_whose_initial_checkpoint_is_damaged_fails_and_never_starts_from_step_0(world: World) -> None:
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    for agent in world.team():
        agent.faults = (
            NodeFault(code=FaultCode.SOURCE_MISMATCH, message="rank 1: other bytes", is_permanent=False, shard=Rank(1)),
        )
    await world.until(lambda: world.checkpoints("first")[0].is_wrong)
    verify(world, CheckpointVerdict.of(Damage(kind=DamageKind.CONTENT, detail="other bytes")))
    await world.until(lambda: world.job().state == JobState.FAILED)
    assert "missing or damaged" in world.job().reason
    assert world.plan().base_step == 4


async def test_a_job_does_not_end_before_its_initial_checkpoint_is_verified(world: World) -> None:
    """All nodes read garbled answers. The verifier then finds the checkpoint intact."""
    world.submit(nodes=2, initial=initial(world))
    await world.running()
    for agent in world.team():
        agent.faults = (
            NodeFault(code=FaultCode.SOURCE_MISMATCH, message="rank 1: other bytes", is_permanent=False, shard=Rank(1)),
        )
    await world.until(lambda: world.checkpoints("first")[0].is_wrong)
    for agent in world.agents.values():
        agent.faults = ()
    for _ in range(20):
        await world.tick()
        assert world.job().state != JobState.FAILED, world.job().reason
    verify(world, CheckpointVerdict.of())
    await world.until(lambda: world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 4
