"""S3, IAM or KMS is out of reach during a restore. The job waits, and loses neither its nodes nor a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.core.job.store_wait import LONGEST_PAUSE_SECONDS, STAND_ASIDE_SECONDS
from control_plane.core.states import JobState, NodeState
from control_plane.db import jobs
from control_plane.loop.records import store_wait_of
from everstep.protocol.agent_messages import FaultCode, MemberPhase, Obstacle
from tests.unit.control_plane.loop.world import World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=4, spares=2)
    yield made
    made.close()


async def lose_memory(world: World, *, obstacle: Obstacle | None = None) -> None:
    """Train to step 15 with a checkpoint of step 10. Then end a rank, while only S3 has shards, and S3 is away."""
    await world.running()
    await world.train(10)
    await world.upload(10)
    await world.train(5)
    for agent in world.agents.values():
        agent.load_fault = FaultCode.SOURCE_UNAVAILABLE
        agent.load_obstacle = obstacle
        agent.fails_load = True
        agent.slots = {}
    world.kill_rank(world.team()[0])


def heal(world: World) -> None:
    for agent in world.agents.values():
        agent.fails_load = False


async def test_an_outage_of_ten_minutes_in_a_recovery_costs_only_time(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world)
    begun, team = world.now, {agent.node_id for agent in world.team()}
    while (world.now - begun).total_seconds() < 600:
        await world.tick(5.0)
        assert world.job().state in (JobState.PREPARING, JobState.LOADING, JobState.RUNNING)
    wait = store_wait_of(world.job())
    assert wait is not None
    assert wait.obstacle is Obstacle.NO_ANSWER
    assert wait.since - begun.timestamp() < 30
    assert wait.attempt_count > 30
    heal(world)
    healed = world.now
    await world.running()
    assert (world.now - healed).total_seconds() < LONGEST_PAUSE_SECONDS + 5
    assert world.plan().base_step == 10
    assert {agent.node_id for agent in world.team()} == team
    assert store_wait_of(world.job()) is None
    assert [each["exit_class"] for each in world.job().failures] == ["killed"], "no load counts against the job"
    assert not any(each.is_wrong for each in world.checkpoints())


async def test_without_patience_left_the_job_queues_again_and_restores_the_same_step(world: World) -> None:
    world.submit("gpt", store_patience_seconds=60)
    await lose_memory(world)
    await world.until(lambda: world.job().state == JobState.QUEUED)
    begun = world.now
    assert any("gives its nodes back, because a store does not answer since" in each for each in world.events())
    for agent in world.agents.values():
        agent.load_fault, agent.fails_load = FaultCode.SOURCE_MISMATCH, False
    while world.job().state != JobState.RUNNING:
        await world.tick(5.0)
        assert world.job().state != JobState.FAILED
        assert (world.now - begun).total_seconds() < STAND_ASIDE_SECONDS + 60
    assert world.plan().base_step == 10


async def test_steps_that_only_memory_has_are_never_given_back(world: World) -> None:
    """The archive of the script is out of reach, but the nodes still hold step 14."""
    world.submit("gpt", store_patience_seconds=30)
    await world.running()
    await world.train(15)
    for agent in world.agents.values():
        agent.load_fault, agent.load_obstacle, agent.fails_load = "archive_unavailable", Obstacle.DENIED, True
    world.kill_rank(world.team()[0])
    for _ in range(60):
        await world.tick(5.0)
        assert world.job().state in (JobState.RUNNING, JobState.PREPARING, JobState.LOADING)
    await world.until(lambda: "only their memory has the newest step" in world.job().reason)
    heal(world)
    await world.running()
    assert world.plan().base_step >= 14


async def test_a_pause_during_the_wait_releases_the_nodes(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world, obstacle=Obstacle.DENIED)
    await world.until(lambda: store_wait_of(world.job()) is not None)
    wait = store_wait_of(world.job())
    assert wait is not None
    assert wait.obstacle is Obstacle.DENIED
    with world.database.write() as session:
        jobs.request_pause(session, world.job().run_id, world.now)
    await world.until(lambda: world.job().state == JobState.QUEUED)
    await world.until(lambda: all(node.state == NodeState.SPARE for node in world.nodes().values()))
    assert store_wait_of(world.job()) is None


async def test_other_failed_loads_still_count_against_the_job(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world)
    for agent in world.agents.values():
        agent.load_fault = "requirements_failed"
    await world.until(lambda: world.job().state == JobState.FAILED)


async def test_a_mismatch_beside_an_outage_is_no_wait(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world)
    world.team()[1].load_fault = FaultCode.SOURCE_MISMATCH
    await world.until(lambda: world.team()[1].phase is MemberPhase.LOAD_FAILED)
    await world.until(lambda: world.job().generation > 2 or world.job().state == JobState.FAILED)
    assert store_wait_of(world.job()) is None
