"""A list of jobs and the description of a job show the same protection at every moment of a launch."""

from __future__ import annotations

from math import inf

import pytest

from control_plane.api import views
from control_plane.api.schemas.checkpoints import DescribeProtectionResponse
from control_plane.core.states import JobState
from control_plane.db import events, protection
from control_plane.loop import disposition
from control_plane.loop.protection_watch import WRITE_SECONDS
from everstep.protocol.agent_messages import ShardProtection
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.limits import MAX_HOLDERS
from everstep.protocol.rank_messages import UnkeptCause
from tests.sim.world import World


def described(world: World) -> DescribeProtectionResponse:
    """Return the protection of the job's description.

    Fail if a list of jobs would show another protection.
    """
    job = world.job()
    with world.database.read() as session:
        shards = protection.of_run(session, job.run_id)
        totals = protection.totals(session, {job.run_id: job.generation}).get(job.run_id)
    answer = views.protection(job, shards, None, {})
    assert disposition.listed_protection(job, totals) is answer.protection_state
    single = [odds.probability for odds in answer.recovery_odds if odds.lost_nodes == 1]
    assert disposition.survives_node_loss(job, totals) == (single == [1.0])
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


@pytest.mark.security
@pytest.mark.parametrize("rank", [-1, 0, 1, 7], ids=["none", "own", "of another node", "beyond the job"])
async def test_an_agent_cannot_invent_holders_or_speak_for_other_nodes(world: World, rank: int) -> None:
    world.submit()
    await world.running()
    await world.train(1)
    liar, *_ = world.team()
    invented = tuple(NodeId(f"i-{number}") for number in range(MAX_HOLDERS))
    liar.claims = (
        ShardProtection(rank=Rank(rank), holders=invented, in_view=invented, committed=Step(9), payload_bytes=1),
    )
    for _ in range(3):
        await world.train(1)
    with world.database.read() as session:
        shards = protection.of_run(session, world.job().run_id)
    assert {holder.node_id for shard in shards for holder in shard.holders} <= {each.node_id for each in world.team()}
    assert {shard.rank for shard in shards} <= {0, 1, 2, 3}
    assert 9 not in {shard.committed_step for shard in shards}


@pytest.mark.parametrize(("copies", "survives"), [(1, False), (2, True)])
async def test_one_copy_survives_no_loss(world: World, copies: int, survives: bool) -> None:
    world.submit(copies=copies)
    await world.running()
    for _ in range(4):
        await world.train(1)
    answer = described(world)
    assert answer.protection_state.value == "Protected"
    assert (answer.recovery_odds[0].probability == 1.0) is survives


def said(world: World, kind: str) -> list[str]:
    with world.database.read() as session:
        return [event.message for event in events.page(session, events.EventFilter(), limit=1000) if event.type == kind]


async def ran_unprotected(world: World, cause: UnkeptCause | None, seconds: int) -> None:
    """Train `seconds` steps of a second each, of which the nodes keep none after step 5."""
    world.submit()
    await world.running()
    for _ in range(5):
        await world.train(1)
    for agent in world.team():
        agent.last_kept = 5
    world.team()[1].unkept = cause
    await step_each_second(world, seconds)


async def step_each_second(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.complete_steps(1)
        await world.tick(1.0)


@pytest.mark.parametrize("cause", [each for each in UnkeptCause if each.lasts])
async def test_a_cause_that_lasts_is_an_event_at_once(world: World, cause: UnkeptCause) -> None:
    await ran_unprotected(world, cause, 3)
    answer = described(world)
    assert answer.protection_state.value == "Unprotected"
    assert answer.lapse is not None
    rank = Rank(1)
    assert (answer.lapse.cause, answer.lapse.kept_step, answer.lapse.rank, answer.lapse.node_id) == (
        cause,
        5,
        rank,
        world.team()[1].node_id,
    )
    (message,) = said(world, "ProtectionLost")
    assert message.startswith("no step after step 5 is kept, and training is at step ")
    for agent in world.team():
        agent.last_kept, agent.unkept = inf, None
    await world.train(2)
    await world.tick(WRITE_SECONDS)
    answer = described(world)
    assert (answer.protection_state.value, answer.lapse) == ("Protected", None)
    assert len(said(world, "ProtectionRestored")) == len(said(world, "ProtectionLost")) == 1


@pytest.mark.long(keep=3)
@pytest.mark.parametrize("cause", [None, *(each for each in UnkeptCause if not each.lasts)])
async def test_training_without_commits_is_an_event_whatever_the_cause(world: World, cause: UnkeptCause | None) -> None:
    limit = int(world.timeouts.exclude_seconds)
    await ran_unprotected(world, cause, limit - 2)
    assert described(world).lapse is None
    await step_each_second(world, 5)
    lapse = described(world).lapse
    assert lapse is not None
    assert (lapse.cause, lapse.kept_step) == (cause or UnkeptCause.UNCONFIRMED, 5)
    assert len(said(world, "ProtectionLost")) == 1
    assert not world.incidents(), "training goes on"
