"""Tests which slots a node keeps when the number of ranks changes, and which shares it keeps with parity.

In a relayout, rank 2 exists only in the earlier generation.
"""

from __future__ import annotations

from msgspec import structs

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import share_owner
from everstep.protocol.plan import GenerationPlan, Relayout, ShardSource, SlotReference
from tests.unit.worker.rank_plans import rank_plan
from worker.core.misplaced_shards import MisplacedShards, misplaced_ranks
from worker.core.slots import Content
from worker.member.retained_steps import RetainedSteps

BASE, OLDER = Content(Generation(1), Step(8)), Content(Generation(1), Step(7))
FIRST, SECOND = NodeId("i-0"), NodeId("i-1")


def reference(rank: int, content: Content = BASE) -> SlotReference:
    return SlotReference(owner_rank=Rank(rank), origin_generation=content.origin, step=content.step, digest=b"")


def relayout_plan() -> GenerationPlan:
    """Return a plan of two nodes that starts from a step of three ranks. Both nodes keep the shard of rank 2."""
    plan = rank_plan(addresses=("127.0.0.1", "127.0.0.1"), generation=2)
    source = ShardSource(
        kind="peer", origin_generation=BASE.origin, step=BASE.step, digest=b"", payload_bytes=1, node_id=FIRST
    )
    keep = {FIRST: (reference(0), reference(2)), SECOND: (reference(1, OLDER), reference(2))}
    return structs.replace(
        plan,
        base_step=BASE.step,
        nodes=tuple(structs.replace(node, keep=keep[node.node_id]) for node in plan.nodes),
        relayout=Relayout(world_size=3, shards=((source,),) * 3),
    )


def test_a_node_keeps_fetched_shards_while_its_ranks_load_and_planned_shards_until_the_first_commit() -> None:
    plan = relayout_plan()
    contents = RetainedSteps(plan, plan.node(SECOND))
    assert [contents.base(Rank(rank)) for rank in range(3)] == [None, None, None]
    assert [contents.keep(Rank(rank)) for rank in range(3)] == [{BASE}, {BASE, OLDER}, {BASE}]
    contents.is_loading_earlier = False
    assert [contents.keep(Rank(rank)) for rank in range(3)] == [set(), {OLDER}, {BASE}]
    contents.committed = Step(10)
    assert [contents.keep(Rank(rank)) for rank in range(3)] == [{Content(Generation(2), Step(10))}] * 3


def test_a_full_node_drops_an_earlier_shard_only_if_another_node_keeps_it() -> None:
    plan = relayout_plan()
    loading = [MisplacedShards.of(plan, node) for node in (FIRST, SECOND)]
    assert not any(misplaced_shards.makes_way(Rank(2), BASE) for misplaced_shards in loading), (
        "its ranks may still read the slot"
    )
    first, second = (misplaced_shards.loaded() for misplaced_shards in loading)
    assert not first.makes_way(Rank(2), BASE)
    assert second.makes_way(Rank(2), BASE), "the first node keeps this shard"
    assert second.makes_way(Rank(0), BASE), "the shard was fetched for a rank that has loaded"
    assert not first.is_over(Rank(2))
    assert first.announced(Step(10), ()).is_over(Rank(2))


def test_strays_of_ranks_that_the_new_layout_lacks_do_not_break_a_plan_without_a_relayout() -> None:
    plan = relayout_plan()
    ranks = tuple(
        structs.replace(
            rank,
            sources=(
                ShardSource(
                    kind="peer",
                    origin_generation=Generation(2),
                    step=Step(10),
                    digest=b"",
                    payload_bytes=1,
                    node_id=FIRST,
                ),
            ),
        )
        for rank in plan.ranks
    )
    later = structs.replace(plan, base_step=Step(10), ranks=ranks, relayout=None)
    assert misplaced_ranks(later) == frozenset()
    misplaced_shards = MisplacedShards.of(later, FIRST).loaded()
    assert not misplaced_shards.is_over(Rank(2))
    assert misplaced_shards.announced(Step(11), ()).is_over(Rank(2))
    assert RetainedSteps(later, later.node(FIRST)).keep(Rank(2)) == {BASE}


def parity_plan() -> GenerationPlan:
    """Return a plan of two nodes in one group with parity, which starts from a step in memory."""
    plan = rank_plan(addresses=("127.0.0.1", "127.0.0.1"), generation=2)
    source = ShardSource(
        kind="local", origin_generation=BASE.origin, step=BASE.step, digest=b"", payload_bytes=1, node_id=FIRST
    )
    return structs.replace(
        plan,
        base_step=BASE.step,
        nodes=tuple(structs.replace(node, keep=(reference(share_owner(Rank(0)), OLDER),)) for node in plan.nodes),
        ranks=tuple(
            structs.replace(rank, holders=(node, other), stripe=(Rank(0), Rank(1)), sources=(source,))
            for rank, node, other in zip(plan.ranks, (FIRST, SECOND), (SECOND, FIRST), strict=True)
        ),
    )


def test_a_node_keeps_the_share_of_the_base_and_the_shares_that_the_plan_names_until_the_first_commit() -> None:
    plan = parity_plan()
    contents = RetainedSteps(plan, plan.node(FIRST))
    assert contents.keep(share_owner(Rank(0))) == {BASE, OLDER}
    contents.committed = BASE.step
    assert contents.keep(share_owner(Rank(0))) == {BASE}
    contents.committed = Step(10)
    assert contents.keep(share_owner(Rank(0))) == {Content(Generation(2), Step(10))}


def test_with_parity_a_node_places_its_own_shard_and_share_and_no_shard_of_another_member() -> None:
    assert MisplacedShards.of(parity_plan(), FIRST).placed == {0, share_owner(Rank(0))}
    plan = parity_plan()
    kept = structs.replace(
        plan, nodes=tuple(structs.replace(node, keep=(reference(0), reference(1))) for node in plan.nodes)
    )
    assert misplaced_ranks(kept) == {0, 1}
