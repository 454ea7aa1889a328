"""Runs the real loops on a job with parity. Tests its plans, its protection and the histories of its nodes.

The scripts `tests/golden/incidents/parity_*.txt` show its incidents.
"""

from __future__ import annotations

from control_plane.api import views
from control_plane.core.states import JobState
from control_plane.db import implications, protection
from control_plane.loop import disposition
from everstep.protocol.parity import is_share, share_owner
from tests.sim.world import World


def described(world: World) -> tuple[str, str, list[float]]:
    """Return the protection's state, its reason and the probabilities that memory survives 1, 2 or 3 lost nodes."""
    job = world.job()
    with world.database.read() as session:
        shards = protection.of_run(session, job.run_id)
        listed = protection.totals(session, {job.run_id: job.generation})
    answer = views.protection(job, shards, None, {})
    odds = [odds.probability for odds in answer.recovery_odds]
    assert disposition.listed_protection(job, listed.get(job.run_id)) is answer.protection_state
    assert disposition.survives_node_loss(job, listed.get(job.run_id)) == (odds[:1] == [1.0])
    return answer.protection_state.value, answer.reason, odds


async def test_a_lost_node_of_a_group_is_rebuilt_and_its_stripes_stay(world: World) -> None:
    world.submit(nodes=5, copies=1, parity_group_size=2, ranks_per_node=2)
    await world.running()
    before = world.plan()
    nodes = [node.node_id for node in before.nodes]
    assert {rank.stripe for rank in before.ranks} == {(0, 2), (1, 3), (4, 6, 8), (5, 7, 9)}
    assert before.ranks[7].holders == (nodes[3], nodes[2], nodes[4])
    assert before.ranks[7].copy_nodes == (nodes[3],)
    await world.train(10)
    lost = world.team()[3]
    world.terminate(lost)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    plan = world.plan()
    assert plan.base_step == 10
    assert [rank.stripe for rank in plan.ranks] == [rank.stripe for rank in before.ranks]
    for rank in (6, 7):
        (source,) = plan.ranks[rank].sources
        assert source.rebuild is not None
        assert source.rebuild.lost.rank == rank
        assert [survivor.node_id for survivor in source.rebuild.survivors] == [nodes[2], nodes[4]]
    for place, node in enumerate(plan.nodes):
        shares = {each.owner_rank for each in node.keep if is_share(each.owner_rank) and each.step == 10}
        assert shares == (set() if place == 3 else {share_owner(rank) for rank in node.ranks})
    await world.train(1)
    (incident,) = world.incidents()
    assert (incident.restore_source, incident.lost_steps) == ("parity", 0)
    assert incident.rank_sources == (("local", 6), ("parity", 2), ("local", 2))


async def test_protection_is_degraded_until_every_member_is_in_every_view(world: World) -> None:
    world.submit(nodes=5, copies=1, parity_group_size=2)
    await world.running()
    await world.train(10)
    await world.train(1)
    assert described(world) == ("Protected", "", [1.0, 0.6, 0.0])
    world.cut.add(world.team()[1].node_id)  # cut the node off from its peers only, not from the control plane
    for _ in range(5):
        await world.train(1)
    state, reason, odds = described(world)
    assert (state, odds[0]) == ("Degraded", 0.6)
    assert reason.startswith("1 parity group cannot rebuild a lost shard; rank 0 has")
    world.cut.clear()
    for _ in range(5):
        await world.train(1)
    assert described(world) == ("Protected", "", [1.0, 0.6, 0.0])


async def test_members_that_only_wait_for_an_unreachable_one_get_no_entry_in_their_history(world: World) -> None:
    world.submit(nodes=4, copies=1, parity_group_size=4)
    await world.running()
    await world.train(10)
    team = world.team()
    world.cut.add(team[2].node_id)
    for _ in range(130):
        await world.train(1)
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.upload(world.job().boundary)
    await world.until(lambda: world.job().generation == 2)
    with world.database.read() as session:
        histories = [len(implications.of_node(session, agent.node_id)) for agent in team]
    assert histories == [1, 0, 1, 0], "the coordinator and the unreachable node could not reach each other"
