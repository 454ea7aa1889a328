"""Misplaced shards during a whole relaunch: a second loss costs no step, and no node waits forever for memory.

A misplaced shard is a shard on a node that the new plan no longer places there. The memory of each
node has exactly the planned size. The placement, the choice of the start step and the rules for these shards are real.

Owners had sealed step 10 when a node was lost. In the first case, step 9 is committed and each holder may have sealed
step 10 or not. In the second case, all have sealed step 10 and owners have captured step 11 over step 9. Transfers,
announcements and commits then occur in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core import placement, recovery
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, PlanNode, RankPlan, SlotRecord
from tests.unit.worker.rank_plans import rank_plan
from worker.core.misplaced_shards import MisplacedShards, misplaced_ranks
from worker.core.rounds import NONE
from worker.core.slots import Content

ORIGIN, COMMITTED, NEWEST = Generation(1), Step(9), Step(10)
Reserves = Literal["never", "before", "after"]
"""When a holder creates all slots of a shard: never, before the base arrives, or after it has arrived.

The owner's agent asks its holders to create these slots after its rank has requested slots. It sends the base without
waiting for the rank, so the base may arrive earlier or later.
"""
RESTART, PIN, EVENTS = 64, 72, 80
"""Bounds of event numbers.

Numbers below RESTART send a replica or an announcement. Numbers from RESTART on restart a node's agent. Numbers from
PIN on begin to read a misplaced shard. EVENTS is the number of all events.
"""
LAST_TRY_RATIO = 0.9
"""Fraction of the holder deadline after which an owner sends a refused shard for the last time."""


@dataclass
class Node:
    """A simulated node. Its memory has exactly the size that the shards of the plan need."""

    node_id: NodeId
    slot_count: int
    """Number of slots of each shard."""
    room: int
    """Number of slots that fit into the node's memory."""
    steps: dict[Rank, set[Step]] = field(default_factory=dict)
    misplaced_shards: MisplacedShards = field(default_factory=MisplacedShards)
    slots: dict[Rank, int] = field(default_factory=dict)
    """Number of slots of each shard that the plan places on this node.

    A shard that the earlier plan also placed here keeps all its slots.
    """
    refused_at: dict[Rank, float] = field(default_factory=dict)
    """Time at which the node first refused a slot, by the rank that still waits for the slot."""
    pinned: set[tuple[Rank, Step]] = field(default_factory=set)
    """Rank and step of each slot of a misplaced shard that an upload or another node is reading.

    The node must not drop such a slot.
    """

    @property
    def used(self) -> int:
        return sum(self.slots.get(rank, len(self.steps.get(rank, ()))) for rank in self.slots.keys() | self.steps)

    def inventory(self) -> tuple[SlotRecord, ...]:
        return tuple(
            SlotRecord(
                owner_rank=rank,
                origin_generation=ORIGIN,
                step=step,
                payload_bytes=1,
                digest=b"d" * 16,
                layout_hash=b"l" * 16,
            )
            for rank, steps in sorted(self.steps.items())
            for step in sorted(steps)
        )

    @property
    def contents(self) -> dict[Rank, list[Content | None]]:
        found: dict[Rank, list[Content | None]] = {}
        for rank in self.slots.keys() | self.steps:
            steps = self.steps.get(rank, ())
            empty = self.slots.get(rank, 0) - len(steps)
            found[rank] = [*(Content(ORIGIN, step) for step in steps), *[None] * empty]
        return found

    @property
    def leaving(self) -> list[tuple[Rank, Step]]:
        """Rank and step of each stray that may be dropped, in the order of steps."""
        return [
            (rank, step)
            for step in (COMMITTED, NEWEST)
            for rank in sorted(self.steps)
            if step in self.steps[rank]
            and (rank, step) not in self.pinned
            and self.misplaced_shards.makes_way(rank, Content(ORIGIN, step))
        ]

    @property
    def free(self) -> int:
        """Number of further slots that fit into the memory once the node has dropped all that it may drop."""
        return self.room - self.used + len(self.leaving)

    def add_slot(self, rank: Rank, now: float) -> bool:
        """Create a slot of a shard. Return False if no memory is free, or if the memory is left to other shards."""
        waited_seconds = now - self.refused_at.get(rank, now)
        ahead = self.misplaced_shards.slots_ahead(rank, self.contents, waited_seconds=waited_seconds)
        if self.free < 1 + ahead:
            self.refused_at.setdefault(rank, now)
            return False
        if self.used == self.room:
            stray, step = self.leaving[0]
            self.steps[stray].discard(step)
            if not self.steps[stray]:
                del self.steps[stray]
        self.slots[rank] = self.slots.get(rank, 0) + 1
        self.refused_at.pop(rank, None)
        return True

    def reserve(self, rank: Rank, now: float) -> None:
        """Create as many slots of a shard as possible."""
        while self.slots.get(rank, 0) < self.slot_count and self.add_slot(rank, now):
            continue

    def receive(self, rank: Rank, base: Step, now: float) -> bool:
        """Store the start step of a shard that the plan places here. Return False if the node refuses a slot for it."""
        if len(self.steps.get(rank, ())) == self.slots.get(rank, 0) and not self.add_slot(rank, now):
            return False
        self.steps.setdefault(rank, set()).add(base)
        return True

    def drop_misplaced_shards(self) -> None:
        for rank in [rank for rank in self.steps if self.misplaced_shards.is_over(rank)]:
            if not any(owner == rank for owner, _ in self.pinned):
                del self.steps[rank]


class DropsAtFirstRequest(MisplacedShards):
    """A planted bug: a node drops a misplaced shard as soon as a new shard needs the misplaced shard's memory."""

    __slots__ = ()

    def makes_way(self, rank: Rank, content: Content | None) -> bool:
        return rank not in self.placed


class DropsAtFirstAnnouncement(MisplacedShards):
    """A planted bug: the coordinator's first announcement drops all misplaced shards, even if no new holder has their
    shards yet.
    """

    __slots__ = ()

    def is_over(self, rank: Rank) -> bool:
        return rank not in self.placed


class FillsSlotsInAnyOrder(MisplacedShards):
    """A planted bug: a node gives its last free slot to the first shard that arrives."""

    __slots__ = ()

    def slots_ahead(
        self, rank: Rank, shards: Mapping[Rank, Collection[Content | None]], *, waited_seconds: float
    ) -> int:
        return 0


class WaitsForever(MisplacedShards):
    """A planted bug: a shard leaves the last free slots to a lower rank without a limit of time."""

    __slots__ = ()

    def slots_ahead(
        self, rank: Rank, shards: Mapping[Rank, Collection[Content | None]], *, waited_seconds: float
    ) -> int:
        return MisplacedShards.slots_ahead(self, rank, shards, waited_seconds=0.0)


class Relaunch:
    """A job that has lost some nodes. Each node has `ranks_per_node` ranks, whose shards have the same holders."""

    def __init__(
        self,
        labels: Sequence[int],
        copies: int,
        lost: Sequence[int],
        spares: Sequence[int],
        sealed: Iterable[bool],
        *,
        is_later: bool,
        ranks_per_node: int = 1,
        slot_count: int = 2,
        reserves: Reserves = "never",
        rules: type[MisplacedShards] = MisplacedShards,
    ) -> None:
        self.ranks_per_node, self.rules, self.slot_count, self.reserves = ranks_per_node, rules, slot_count, reserves
        self.now = 0.0
        names = [NodeId(f"n{i}") for i in range(len(labels))]
        domains = {node: f"d{label}" for node, label in zip(names, labels, strict=True)}
        before = placement.plan(names, copies, domains)
        has_newest = iter(sealed)
        room = slot_count * copies * ranks_per_node
        self.nodes = {node: Node(node, slot_count, room) for node in names}
        for rank, owner in self.ranks_of(names):
            for holder in before.holders[owner]:
                is_newer = holder == owner or is_later or next(has_newest, True)
                self.nodes[holder].steps[rank] = {COMMITTED, NEWEST} if is_newer else {COMMITTED}
                if holder == owner and is_later:  # step 10 is committed, and the owner has captured step 11 over step 9
                    self.nodes[holder].steps[rank] = {NEWEST}
        members = list(names)
        for place, label in zip(lost, spares, strict=True):
            del self.nodes[names[place]]
            members[place] = NodeId(f"s{place}")
            domains[members[place]] = f"d{label}"
            self.nodes[members[place]] = Node(members[place], slot_count, room)
        self.members = members
        index = {node: i for i, node in enumerate(names)}
        groups = placement.groups_of([[index[holder] for holder in before.holders[node]] for node in names])
        self.plan = self.planned(placement.plan(members, copies, domains, groups))
        self.base = self.plan.base_step
        self.committed = NONE
        self.out_of_view: set[tuple[Rank, NodeId]] = set()
        self.cut: set[tuple[Rank, NodeId]] = set()
        """Shards that cannot reach a holder before the holder deadline."""

    def ranks_of(self, nodes: Sequence[NodeId]) -> list[tuple[Rank, NodeId]]:
        """Return every rank and the node that owns it."""
        return [(Rank(rank), nodes[rank // self.ranks_per_node]) for rank in range(len(nodes) * self.ranks_per_node)]

    def planned(self, found: placement.Placement) -> GenerationPlan:
        restore = recovery.choose(
            recovery.Survey(
                owners=[owner for _, owner in self.ranks_of(self.members)],
                inventories={node_id: node.inventory() for node_id, node in self.nodes.items()},
                path={ORIGIN: recovery.UNBOUNDED},
                worlds={ORIGIN: len(self.members) * self.ranks_per_node},
                committed=COMMITTED,
                slot_count=self.slot_count,
            )
        )
        addresses = tuple("127.0.0.1" for _ in self.members)
        return msgspec.structs.replace(
            rank_plan(addresses=addresses, generation=2),
            base_step=restore.base_step,
            nodes=tuple(
                PlanNode(
                    node_id=node_id,
                    address="127.0.0.1",
                    peer_port=1,
                    ranks=tuple(rank for rank, owner in self.ranks_of(self.members) if owner == node_id),
                    keep=restore.keep.get(node_id, ()),
                )
                for node_id in self.members
            ),
            ranks=tuple(
                RankPlan(rank=rank, holders=found.holders[owner], sources=restore.sources[rank])
                for rank, owner in self.ranks_of(self.members)
            ),
        )

    def load(self) -> None:
        """Load the plan: each node keeps the slots that the plan lists, and each owner gets the step from which
        training starts.
        """
        for member in self.plan.nodes:
            node = self.nodes[member.node_id]
            before, node.steps = frozenset(node.steps), {}
            for named in member.keep:
                node.steps.setdefault(named.owner_rank, set()).add(named.step)
            if self.base:
                for rank in member.ranks:
                    node.steps.setdefault(rank, set()).add(self.base)
            node.misplaced_shards = self.rules.of(self.plan, member.node_id).loaded()
            node.slots = dict.fromkeys((before & node.misplaced_shards.placed) | set(member.ranks), self.slot_count)

    # -- events of the relaunch

    def has_base(self, rank: Rank, holder: NodeId) -> bool:
        return self.base in self.nodes[holder].steps.get(rank, ())

    @property
    def missing(self) -> list[tuple[Rank, NodeId]]:
        return [
            (each.rank, holder)
            for each in self.plan.ranks
            for holder in each.holders
            if not self.has_base(each.rank, holder)
        ]

    @property
    def held(self) -> frozenset[Rank]:
        return misplaced_ranks(self.plan) - {rank for rank, _ in self.missing}

    def send(self, number: int) -> bool:
        """Send one missing copy of a shard to its holder. Return False if the copy does not arrive."""
        rank, holder = self.missing[number % len(self.missing)]
        if (rank, holder) in self.cut:
            return False
        node = self.nodes[holder]
        if self.reserves == "before":
            node.reserve(rank, self.now)
        has_arrived = node.receive(rank, self.base, self.now)
        if self.reserves == "after":
            node.reserve(rank, self.now)
        return has_arrived

    def announce(self, node: Node) -> None:
        node.misplaced_shards = node.misplaced_shards.announced(self.committed, self.held)
        node.drop_misplaced_shards()

    def restart(self, node: Node) -> None:
        """Restart the agent of a node, which keeps its slots and forgets all announcements."""
        node.misplaced_shards = self.rules.of(self.plan, node.node_id).loaded()
        node.refused_at.clear()
        node.pinned.clear()

    @staticmethod
    def pin(node: Node) -> None:
        """Begin to read the first of the misplaced shards that the node may drop."""
        node.pinned.update(node.leaving[:1])

    def pass_deadline(self) -> None:
        """Drop all holders that lack the base from the view. From now on, each shard reaches all its holders."""
        self.out_of_view.update(self.missing)
        self.cut.clear()

    def commit(self) -> None:
        if not set(self.missing) - self.out_of_view:
            self.committed = self.base

    # -- invariants after every event

    def best_without(self, lost: NodeId) -> Step:
        """Return the newest step that the nodes other than `lost` have completely.

        `NONE` means that they have neither the committed step nor a newer one.
        """
        others = [node for node in self.nodes.values() if node.node_id != lost]
        ranks = [each.rank for each in self.plan.ranks]
        whole = (
            step
            for step in (COMMITTED, NEWEST)
            if all(any(step in node.steps.get(rank, ()) for node in others) for rank in ranks)
        )
        return max(whole, default=NONE)


@st.composite
def relaunches(draw: st.DrawFn, *, losses: int) -> Relaunch:
    count = draw(st.integers(4, 8))
    copies = draw(st.integers(2, 3))
    label = st.integers(0, draw(st.integers(1, 3)))
    labels = draw(st.lists(label, min_size=count, max_size=count))
    lost = draw(st.lists(st.integers(0, count - 1), min_size=losses, max_size=losses, unique=True))
    names = [NodeId(f"n{i}") for i in range(count)]
    holders = placement.plan(
        names, copies, {node: f"d{each}" for node, each in zip(names, labels, strict=True)}
    ).holders
    partners = [[labels[names.index(holder)] for holder in holders[names[place]][1:]] for place in lost]
    # A new node usually changes its group if it is in the failure domain of another holder of the lost node's shard.
    spares = [draw(st.sampled_from(each)) for each in partners]
    ranks_per_node = draw(st.integers(1, 2))
    replica_count = count * (copies - 1) * ranks_per_node
    sealed = draw(st.lists(st.booleans(), min_size=replica_count, max_size=replica_count))
    return Relaunch(
        labels,
        copies,
        lost,
        spares,
        sealed,
        is_later=draw(st.booleans()),
        ranks_per_node=ranks_per_node,
        slot_count=draw(st.integers(2, 3)),
        reserves=draw(st.sampled_from(("never", "before", "after"))),
    )


def run(relaunch: Relaunch, numbers: Sequence[int], *, may_time_out: bool, cut: Sequence[int] = ()) -> None:
    """Deliver replicas and announcements in the order that `numbers` determine, then deliver the remaining ones.

    Check the invariants after each delivery. With `may_time_out`, shards may have to wait for the holder deadline, but
    shortly before the deadline no node refuses a shard for which it has memory. Each number in `cut` names a shard that
    cannot reach one of its holders before the deadline.
    """
    relaunch.load()
    relaunch.cut.update(relaunch.missing[number % len(relaunch.missing)] for number in cut if relaunch.missing)
    best = {node_id: relaunch.best_without(node_id) for node_id in relaunch.nodes}
    nodes = list(relaunch.nodes.values())

    def check() -> None:
        assert all(node.used <= node.room for node in nodes)
        if not relaunch.out_of_view:
            worse = [node_id for node_id in best if relaunch.best_without(node_id) < best[node_id]]
            assert not worse, f"the loss of one of {worse} costs a step that it did not cost before"

    for number in numbers:
        if number >= PIN:
            relaunch.pin(nodes[number % len(nodes)])
        elif number >= RESTART:
            relaunch.restart(nodes[number % len(nodes)])
        elif number % 2 and relaunch.missing:
            relaunch.send(number // 2)
        else:
            relaunch.announce(nodes[number // 2 % len(nodes)])
        relaunch.commit()
        check()
    for node in nodes:
        node.pinned.clear()
    while relaunch.missing or relaunch.committed == NONE:
        heard = [node.misplaced_shards for node in nodes]
        sent_count = sum(relaunch.send(number) for number in range(len(relaunch.missing)) if relaunch.missing)
        relaunch.commit()
        for node in nodes:
            relaunch.announce(node)
        check()
        if not sent_count and heard == [node.misplaced_shards for node in nodes] and relaunch.committed == NONE:
            assert may_time_out, f"nobody has room: {relaunch.missing}"
            if not relaunch.now:
                relaunch.now = LAST_TRY_RATIO * relaunch.plan.timeouts.holder_deadline_seconds
                continue
            refused = {holder for _, holder in set(relaunch.missing) - relaunch.cut}
            idle = [node.node_id for node in nodes if node.node_id in refused and node.free]
            assert not idle, f"nodes {idle} refuse shards although they have memory"
            relaunch.pass_deadline()
            relaunch.commit()
    for node in nodes:
        relaunch.announce(node)
        assert set(node.steps) <= node.misplaced_shards.placed, "a misplaced shard is left"
    assert all(relaunch.best_without(node_id) == relaunch.base for node_id in relaunch.nodes)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_two_pairs_exchange_a_node_without_waiting_for_the_deadline(
    sealed: bool, is_later: bool, ranks_per_node: int
) -> None:
    relaunch = Relaunch([0, 1, 0, 2], 2, [0], [1], [sealed] * 8, is_later=is_later, ranks_per_node=ranks_per_node)
    assert misplaced_ranks(relaunch.plan)
    run(relaunch, [], may_time_out=False)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("rules", [DropsAtFirstRequest, DropsAtFirstAnnouncement])
def test_strays_that_are_dropped_before_the_new_holder_has_sealed_are_found(
    rules: type[MisplacedShards], ranks_per_node: int
) -> None:
    sealed = [True] * 3 * ranks_per_node + [False] * ranks_per_node

    def relaunch(rules: type[MisplacedShards]) -> Relaunch:
        return Relaunch([0, 1, 0, 2], 2, [0], [1], sealed, is_later=False, ranks_per_node=ranks_per_node, rules=rules)

    orders = [
        [2 * number for number in range(2 * ranks_per_node)],
        *([2 * one, 2 * other + 1] for one in range(8) for other in range(8)),
    ]

    def run_all(rules: type[MisplacedShards]) -> None:
        for numbers in [*orders, [10, 29], [40, 2]]:
            run(relaunch(rules), numbers, may_time_out=False)

    run_all(MisplacedShards)
    with pytest.raises(AssertionError, match="costs a step"):
        run_all(rules)


def test_a_stray_without_the_base_stays_although_its_owner_keeps_it_too() -> None:
    """A node needs memory, and keeps a misplaced shard with an older step, although the misplaced shard's owner has this step too.

    Node n6 has two misplaced shards: step 9 of n3's shard, and steps 9 and 10 of n5's shard. Only n3 and n6 hold any step of n3's
    shard. If n3 is lost too, step 9 on n6 is the only copy that remains.
    """
    lacks_newest = {2, 5, 6}
    sealed = [replica not in lacks_newest for replica in range(14)]
    relaunch = Relaunch([1, 0, 1, 1, 0, 0, 0], 3, [2, 4], [0, 1], sealed, is_later=False)
    step_9_alone, both_steps = relaunch.nodes[NodeId("n6")].steps[Rank(3)], relaunch.nodes[NodeId("n6")].steps[Rank(5)]
    assert (step_9_alone, both_steps) == ({COMMITTED}, {COMMITTED, NEWEST})
    run(relaunch, [3, 11], may_time_out=True)


def test_a_stray_stays_if_its_owner_alone_has_the_base_of_another_rank() -> None:
    """A node keeps an older step of a misplaced shard while the misplaced shard's owner alone has the base of another rank.

    Node n3 owns ranks 6 and 7, and n1 has misplaced shards of both. The base is step 10. Only n3 has step 10 of rank 7. If n3 is
    lost, all ranks resume from step 9, so n1 must keep step 9 of both ranks.
    """
    lacks_newest = 7
    sealed = [replica != lacks_newest for replica in range(8)]
    relaunch = Relaunch([0, 0, 1, 0], 2, [0], [1], sealed, is_later=False, ranks_per_node=2)
    misplaced_shards = relaunch.nodes[NodeId("n1")].steps
    assert (misplaced_shards[Rank(6)], misplaced_shards[Rank(7)]) == ({COMMITTED, NEWEST}, {COMMITTED})
    run(relaunch, [], may_time_out=False)


@pytest.mark.parametrize("reserves", ["never", "before", "after"])
def test_two_nodes_fill_their_last_slots_with_the_same_shards(reserves: Reserves) -> None:
    """Nodes n4 and n5 fill their last slots with the same shard, so that no node waits for the holder deadline.

    The nodes could otherwise wait for each other in a circle:

    - n4 and n5 must receive ranks 0 and 1 from s0, the node that replaces n0. Each of them has one free slot. They get
      further memory when they may drop their misplaced shards of ranks 4 and 5, which n1 must receive first.
    - n1 has no free slot. It gets memory when it may drop its stray of rank 0 or of rank 1. It may drop this stray when
      both n4 and n5 have the base of the same rank.

    If n4 receives rank 1 and n5 receives rank 0, no rank is complete on both, and all three nodes wait until the holder
    deadline. If both receive rank 0, n1 can receive rank 4, and then n4 and n5 can receive rank 1.
    """

    def relaunch(rules: type[MisplacedShards]) -> Relaunch:
        sealed = [replica in {1, 3, 10, 11} for replica in range(24)]
        return Relaunch(
            [1, 1, 1, 0, 1, 1],
            3,
            [0],
            [0],
            sealed,
            is_later=False,
            ranks_per_node=2,
            reserves=reserves,
            rules=rules,
        )

    run(relaunch(MisplacedShards), [], may_time_out=False)
    waiting = relaunch(FillsSlotsInAnyOrder)
    run(waiting, [], may_time_out=True)
    assert waiting.out_of_view >= {(Rank(0), "n5"), (Rank(1), "n4"), (Rank(4), "n1"), (Rank(5), "n1")}


def test_a_node_gives_its_last_slot_to_a_higher_rank_if_the_lowest_rank_does_not_arrive() -> None:
    """Nodes n4 and n5 keep their last slot free for rank 0, but only for a part of the holder deadline.

    The connections from s0, the owner of ranks 0 and 1, are slow, and rank 0 does not arrive. The nodes then give the
    slot to rank 1.
    """

    def relaunch(rules: type[MisplacedShards]) -> Relaunch:
        sealed = [replica in {1, 3, 10, 11} for replica in range(24)]
        return Relaunch([1, 1, 1, 0, 1, 1], 3, [0], [0], sealed, is_later=False, ranks_per_node=2, rules=rules)

    made = relaunch(MisplacedShards)
    made.load()
    cut = [number for number, (rank, _) in enumerate(made.missing) if rank == 0]
    run(relaunch(MisplacedShards), [], may_time_out=True, cut=cut)
    with pytest.raises(AssertionError, match="refuse shards although they have memory"):
        run(relaunch(WaitsForever), [], may_time_out=True, cut=cut)


@settings(max_examples=400)
@given(relaunches(losses=1), st.lists(st.integers(0, EVENTS - 1), max_size=30))
def test_after_one_loss_no_step_is_at_risk_and_no_shard_waits_for_the_deadline(
    relaunch: Relaunch, numbers: list[int]
) -> None:
    assert relaunch.base >= COMMITTED
    run(relaunch, numbers, may_time_out=False)


@settings(max_examples=100)
@given(
    relaunches(losses=1), st.lists(st.integers(0, EVENTS - 1), max_size=30), st.lists(st.integers(0, 63), min_size=1)
)
def test_a_shard_that_does_not_arrive_keeps_no_memory_from_others_until_the_deadline(
    relaunch: Relaunch, numbers: list[int], cut: list[int]
) -> None:
    run(relaunch, numbers, may_time_out=True, cut=cut)


@settings(max_examples=150)
@given(relaunches(losses=2), st.lists(st.integers(0, EVENTS - 1), max_size=30))
def test_after_two_losses_everybody_gets_on_at_the_deadline_at_the_latest(
    relaunch: Relaunch, numbers: list[int]
) -> None:
    if relaunch.base:
        run(relaunch, numbers, may_time_out=True)
