"""S3, IAM or KMS is out of reach during a restore. The job waits, and loses neither its nodes nor a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.core.job.store_wait import LONGEST_PAUSE_SECONDS, STAND_ASIDE_SECONDS
from control_plane.core.states import JobState, NodeState
from control_plane.db import jobs
from control_plane.loop.memos import store_wait_of
from everstep.protocol.agent_messages import FaultCode, MemberPhase, Obstacle
from tests.sim.world import World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=4, spares=2)
    yield made
    made.close()


async def lose_memory(world: World, *, obstacle: Obstacle | None = None, is_patient: bool = False) -> None:
    """Train to step 15 with a checkpoint of step 10. Then end a rank, while only S3 has shards, and S3 is away."""
    await world.running()
    await world.train(10)
    await world.upload(10)
    await world.train(5)
    for agent in world.agents.values():
        agent.load_fault = FaultCode.SOURCE_UNAVAILABLE
        agent.load_obstacle = obstacle
        agent.is_patient = is_patient
        agent.fails_load = True
        agent.slots = {}
    world.kill_rank(world.team()[0])


def heal(world: World) -> None:
    for agent in world.agents.values():
        agent.fails_load = False


async def test_agents_that_repeat_the_load_keep_the_generation_and_continue_at_once(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world, obstacle=Obstacle.NO_ANSWER, is_patient=True)
    begun, team = world.now, {agent.node_id for agent in world.team()}
    await world.until(lambda: store_wait_of(world.job()) is not None)
    generation = world.job().generation
    first = store_wait_of(world.job())
    while (world.now - begun).total_seconds() < 600:
        await world.tick(5.0)
        assert (world.job().state, world.job().generation) == (JobState.LOADING, generation)
    assert store_wait_of(world.job()) == first, "the wait has one beginning, and no attempt is stored"
    assert first is not None
    assert "a store does not answer since" in world.job().reason
    assert "its nodes try again all the time; keeps its nodes until" in world.job().reason
    heal(world)
    healed = world.now
    await world.running()
    assert (world.now - healed).total_seconds() <= 3
    assert (world.plan().generation, world.plan().base_step) == (generation, 10)
    assert {agent.node_id for agent in world.team()} == team
    assert store_wait_of(world.job()) is None
    assert [each["exit_class"] for each in world.job().failures] == ["killed"], "no load counts against the job"


@pytest.mark.parametrize("request_of", ["patience", "pause", "stop"])
async def test_a_generation_that_waits_for_a_store_ends_with_the_patience_or_on_request(
    world: World, request_of: str
) -> None:
    world.submit("gpt", store_patience_seconds=60)
    await lose_memory(world, obstacle=Obstacle.DENIED, is_patient=True)
    await world.until(lambda: store_wait_of(world.job()) is not None)
    with world.database.write() as session:
        if request_of == "pause":
            jobs.request_pause(session, world.job().run_id, world.now)
        elif request_of == "stop":
            jobs.request_stop(session, world.job().run_id, world.now)
    if request_of == "stop":
        await world.until(lambda: world.job().state == JobState.STOPPED)
        return
    await world.until(lambda: world.job().state == JobState.QUEUED)
    await world.until(lambda: all(node.state == NodeState.SPARE for node in world.nodes().values()))
    wait = store_wait_of(world.job())
    assert (wait is None) is (request_of == "pause")
    assert [each["exit_class"] for each in world.job().failures] == ["killed"]


async def test_a_wait_for_a_store_survives_the_loss_of_a_node(world: World) -> None:
    world.submit("gpt")
    await lose_memory(world, obstacle=Obstacle.THROTTLED, is_patient=True)
    await world.until(lambda: store_wait_of(world.job()) is not None)
    first, generation = store_wait_of(world.job()), world.job().generation
    assert first is not None
    world.terminate(world.team()[1])
    await world.until(lambda: world.job().generation > generation and world.job().state == JobState.LOADING)
    for agent in world.agents.values():
        agent.load_fault, agent.load_obstacle, agent.is_patient = "archive_unavailable", Obstacle.THROTTLED, True
    await world.until(lambda: (wait := store_wait_of(world.job())) is not None and wait.is_probed)
    wait = store_wait_of(world.job())
    assert wait is not None
    assert wait.since == first.since
    heal(world)
    await world.running()
    assert world.plan().base_step == 10


async def test_steps_that_only_memory_has_outlast_the_patience(world: World) -> None:
    world.submit("gpt", store_patience_seconds=30)
    await world.running()
    await world.train(15)
    for agent in world.agents.values():
        agent.load_fault, agent.load_obstacle, agent.fails_load = "archive_unavailable", Obstacle.DENIED, True
        agent.is_patient = True
    world.kill_rank(world.team()[0])
    await world.until(lambda: store_wait_of(world.job()) is not None)
    generation = world.job().generation
    for _ in range(60):
        await world.tick(5.0)
        assert (world.job().state, world.job().generation) == (JobState.LOADING, generation)
    assert "only their memory has the newest step" in world.job().reason
    heal(world)
    await world.running()
    assert world.plan().base_step >= 14


async def test_ranks_that_time_out_while_a_node_waits_for_a_store_do_not_count(world: World) -> None:
    """The ranks of three nodes have started, and wait in the rendezvous for those of the fourth node."""
    world.submit("gpt", max_attempts=2)
    await lose_memory(world, obstacle=Obstacle.NO_ANSWER, is_patient=True)
    await world.until(lambda: store_wait_of(world.job()) is not None)
    for _ in range(3):
        generation = world.job().generation
        waiting = world.team()[1]
        waiting.boundary = dict.fromkeys(world.plan().node(waiting.node_id).ranks, world.plan().base_step)
        world.kill_rank(waiting)
        await world.until(lambda generation=generation: world.job().generation > generation)
        await world.until(lambda: world.job().state == JobState.LOADING)
        await world.tick(1.0)
        await world.tick(1.0)
    assert world.job().state == JobState.LOADING
    assert len(world.job().failures) == 1
    heal(world)
    await world.running()


async def test_an_outage_of_ten_minutes_costs_older_agents_only_time(world: World) -> None:
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
