"""Tests when a new slot may take the memory of a slot whose shard the new plan places on other nodes.

`tests/properties/worker/test_misplaced_shards.py` tests whole relaunches.
"""

from __future__ import annotations

import msgspec

from everstep.protocol.ids import FIRST_STEP, Generation, Rank, Step
from everstep.protocol.parity import share_owner
from everstep.protocol.plan import RankPlan, Relayout, SlotReference
from tests.unit.worker.rank_plans import rank_plan
from worker.core.misplaced_shards import MisplacedShards, misplaced_ranks
from worker.core.rounds import NONE
from worker.core.slots import Content

STRAY, SIBLING, PLACED = Rank(5), Rank(4), Rank(0)
OLDER, BASE = Content(Generation(1), Step(9)), Content(Generation(1), Step(10))


def loaded(*, is_doubled: bool = False) -> MisplacedShards:
    """Return the misplaced shards of a node that has steps 9 and 10 of a moved shard, after every node has loaded the plan.

    With `is_doubled`, the shard's owner also has step 9. In this case, the owner has the only copy of step 10 of its
    other rank, `SIBLING`.
    """
    doubled = {(STRAY, OLDER): frozenset({SIBLING})} if is_doubled else {}
    return MisplacedShards(
        placed=frozenset({PLACED}), base=Step(10), needed=frozenset({Step(9)}), doubled=doubled
    ).loaded()


def test_an_older_step_that_is_needed_makes_way_once_the_base_is_committed() -> None:
    assert not loaded().makes_way(STRAY, OLDER)
    assert loaded().announced(Step(10), []).makes_way(STRAY, OLDER)


def test_a_step_that_the_owner_keeps_too_makes_way_once_all_bases_of_that_owner_are_elsewhere() -> None:
    assert not loaded(is_doubled=True).makes_way(STRAY, OLDER)
    assert loaded(is_doubled=True).announced(Step(-1), [SIBLING]).makes_way(STRAY, OLDER)


def test_the_base_makes_way_once_its_holders_have_it_or_a_later_step_is_committed() -> None:
    assert not loaded().announced(Step(10), []).makes_way(STRAY, BASE)
    assert loaded().announced(Step(-1), [STRAY]).makes_way(STRAY, BASE)
    assert loaded().announced(Step(11), []).makes_way(STRAY, BASE)


def test_nothing_makes_way_before_every_node_has_loaded_and_no_placed_shard_ever() -> None:
    assert not MisplacedShards(placed=frozenset({PLACED}), base=Step(10)).makes_way(STRAY, OLDER)
    assert not loaded().announced(Step(11), [PLACED]).makes_way(PLACED, BASE)


def test_a_late_announcement_takes_nothing_back() -> None:
    announced = loaded().announced(Step(11), [STRAY]).announced(Step(10), [])
    assert (announced.committed, announced.held) == (Step(11), {STRAY})


class TestLastSlots:
    """Tests how many free slots a node with misplaced shards and little memory leaves to other shards."""

    LOW, MIDDLE, HIGH = Rank(1), Rank(2), Rank(3)

    def ahead(
        self,
        rank: Rank,
        *,
        shards: dict[Rank, list[Content | None]] | None = None,
        waited_seconds: float = 0.0,
        committed: Step = NONE,
    ) -> int:
        misplaced_shards = MisplacedShards(
            placed=frozenset({PLACED, self.LOW, self.MIDDLE, self.HIGH}),
            base=BASE.step,
            expected=frozenset({self.LOW, self.MIDDLE, self.HIGH}),
            patience_seconds=2.0,
        )
        slots: dict[Rank, list[Content | None]] = {PLACED: [BASE, None], STRAY: [OLDER, BASE], **(shards or {})}
        return misplaced_shards.announced(committed, []).slots_ahead(rank, slots, waited_seconds=waited_seconds)

    def test_a_first_slot_leaves_one_slot_to_each_lower_rank_without_a_slot(self) -> None:
        assert [self.ahead(rank) for rank in (self.LOW, self.MIDDLE, self.HIGH)] == [0, 1, 2]
        assert self.ahead(self.HIGH, shards={self.LOW: [BASE]}) == 1, "rank 1 has the base"
        assert self.ahead(self.HIGH, shards={self.LOW: [None]}) == 1, "rank 1 has a slot for the base"
        assert self.ahead(self.HIGH, shards={self.LOW: [Content(Generation(2), Step(11))]}) == 1
        assert self.ahead(self.HIGH, shards={self.LOW: [OLDER]}) == 2, "the plan keeps the only slot of rank 1"
        assert self.ahead(self.HIGH, shards={self.LOW: []}) == 2

    def test_a_further_slot_leaves_one_slot_to_each_rank_without_a_slot(self) -> None:
        assert self.ahead(self.LOW, shards={self.LOW: [None]}) == 2
        assert self.ahead(self.LOW, shards={self.LOW: [BASE], self.HIGH: [BASE]}) == 1

    def test_no_slot_is_left_to_others_after_the_patience_or_the_first_commit(self) -> None:
        assert self.ahead(self.HIGH, waited_seconds=1.9) == 2
        assert self.ahead(self.HIGH, waited_seconds=2.0) == 0
        assert self.ahead(self.HIGH, committed=BASE.step) == 0

    def test_the_ranks_of_the_node_leave_nothing_and_a_node_without_strays_has_room_for_all(self) -> None:
        assert self.ahead(PLACED) == 0
        assert self.ahead(STRAY) == 0
        without_strays = MisplacedShards(
            placed=frozenset({PLACED, self.LOW, self.HIGH}),
            base=BASE.step,
            expected=frozenset({self.LOW, self.HIGH}),
            patience_seconds=2.0,
        )
        assert without_strays.slots_ahead(self.HIGH, {PLACED: [BASE, None]}, waited_seconds=0.0) == 0


def test_a_node_expects_the_shards_and_shares_that_other_nodes_send_to_it() -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * 3, generation=2)
    names = [node.node_id for node in plan.nodes]
    copies = tuple(
        RankPlan(rank=Rank(rank), holders=(names[rank], names[(rank + 1) % 3])) for rank in range(plan.world_size)
    )
    with_copies = msgspec.structs.replace(plan, base_step=BASE.step, ranks=copies)
    assert MisplacedShards.of(with_copies, names[1]).expected == {0}
    stripe = tuple(rank.rank for rank in plan.ranks)
    parity = tuple(RankPlan(rank=rank, holders=(names[rank], *names), stripe=stripe) for rank in stripe)
    with_parity = msgspec.structs.replace(plan, base_step=BASE.step, ranks=parity)
    assert MisplacedShards.of(with_parity, names[1]).expected == {share_owner(Rank(1))}
    from_nothing = msgspec.structs.replace(with_copies, base_step=FIRST_STEP)
    relayout = msgspec.structs.replace(with_copies, relayout=Relayout(world_size=2, shards=((), ())))
    assert not any(MisplacedShards.of(each, names[1]).expected for each in (from_nothing, relayout))


def test_after_a_relayout_the_first_node_that_keeps_a_content_must_keep_it() -> None:
    def kept(rank: Rank, content: Content) -> SlotReference:
        return SlotReference(owner_rank=rank, origin_generation=content.origin, step=content.step, digest=bytes(16))

    plan = rank_plan(addresses=("127.0.0.1",) * 2, generation=2)
    keeps = ((kept(STRAY, BASE),), (kept(STRAY, BASE), kept(SIBLING, BASE)))
    nodes = tuple(msgspec.structs.replace(node, keep=keep) for node, keep in zip(plan.nodes, keeps, strict=True))
    relayout = Relayout(world_size=6, shards=((),) * 6)
    changed = msgspec.structs.replace(plan, base_step=BASE.step, nodes=nodes, relayout=relayout)
    first, second = (MisplacedShards.of(changed, node.node_id) for node in nodes)
    assert first.sole == {(STRAY, BASE)}
    assert second.sole == {(SIBLING, BASE)}
    assert [second.loaded().makes_way(rank, BASE) for rank in (STRAY, SIBLING)] == [True, False]


def test_a_stray_is_a_shard_of_the_plan_on_a_node_that_is_none_of_its_holders() -> None:
    def kept(rank: int) -> SlotReference:
        return SlotReference(owner_rank=Rank(rank), origin_generation=BASE.origin, step=BASE.step, digest=bytes(16))

    plan = rank_plan(addresses=("127.0.0.1",) * 3, generation=2)
    for keeps, expected in (((0, 1), {0}), ((1,), set()), ((3,), set())):
        second = msgspec.structs.replace(plan.nodes[1], keep=tuple(map(kept, keeps)))
        assert misplaced_ranks(msgspec.structs.replace(plan, nodes=(plan.nodes[0], second, plan.nodes[2]))) == expected


def test_a_shard_stops_waiting_for_its_turn_before_its_owner_drops_the_node() -> None:
    plan = msgspec.structs.replace(rank_plan(generation=2), base_step=BASE.step)
    deadline_seconds = plan.timeouts.holder_deadline_seconds
    assert (
        deadline_seconds / 2 < MisplacedShards.of(plan, plan.nodes[0].node_id).patience_seconds < 0.9 * deadline_seconds
    )
