"""A list of jobs and the description of a job show the same protection at every moment of a launch."""

from __future__ import annotations

import pytest

from control_plane.api import views
from control_plane.api.schemas.checkpoints import DescribeProtectionResponse
from control_plane.core.states import JobState
from control_plane.db import protection
from control_plane.loop.protection_watch import WRITE_SECONDS
from tests.unit.control_plane.loop.world import World


def described(world: World) -> DescribeProtectionResponse:
    """Return the protection of the job's description.

    Fail if a list of jobs would show another protection.
    """
    job = world.job()
    with world.database.read() as session:
        shards = protection.of_run(session, job.run_id)
        totals = protection.totals(session, {job.run_id: job.generation}).get(job.run_id)
    answer = views.protection(job, shards, None, {})
    assert views.listed_protection(job, totals) is answer.protection_state
    single = [odds.probability for odds in answer.recovery_odds if odds.lost_nodes == 1]
    assert views.survives_node_loss(job, totals) == (single == [1.0])
    return answer


async def test_a_launch_protects_only_after_its_first_commit(world: World) -> None:
    world.submit()
    await world.running()
    for _ in range(4):
        await world.train(1)
    assert described(world).protection_state.value == "Protected"
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    for agent in world.team():
        # simulate agents that have not yet reported a commit of the new generation
        agent.boundary = dict.fromkeys(agent.boundary, 0)
    await world.tick(2 * WRITE_SECONDS)
    await world.tick()
    early = described(world)
    assert (early.protection_state.value, early.recovery_odds) == ("Degraded", [])
    assert early.reason == "Rank 0 has not committed a step in this generation."


@pytest.mark.parametrize(("copies", "survives"), [(1, False), (2, True)])
async def test_one_copy_survives_no_loss(world: World, copies: int, survives: bool) -> None:
    world.submit(copies=copies)
    await world.running()
    for _ in range(4):
        await world.train(1)
    answer = described(world)
    assert answer.protection_state.value == "Protected"
    assert (answer.recovery_odds[0].probability == 1.0) is survives
