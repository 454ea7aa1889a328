"""Decides when a node drops misplaced shards: shards in its slots that the new plan places on other nodes.

A node without spare memory drops one slot of a misplaced shard at a time, and only if the job stays protected without
it:

    content of the misplaced shard    dropped if a new slot lacks room            dropped in any case
    ---------------------   -----------------------------------------   ------------------------------------------------
    the base                all planned holders have sealed the base    the base is committed and all planned holders
    older than the base     condition 1, 2 or 3                         have it; or a later step is committed, which
                                                                        makes the older contents of all nodes useless

1. The base is committed.
2. The job would not return to this step, whichever one node were lost.
3. The node of the shard's owner keeps the same content, and other nodes have the base of every shard of that node.

After a relayout, misplaced shards of the base protect the job until the first commit. A node without room may then drop
a misplaced shard in two cases: an earlier node of the plan keeps the same content, or the node fetched the shard only
for ranks that have loaded.

Invariant: until the base is committed, one further node may be lost, and all shards can still be restored to a common
step, if the plan had such a step. After a drop by condition 3:

- If the owner's node is lost, all shards return to the base: other nodes have the base of the lost shards.
- If another node is lost whose base no other node has, all shards return to the older step. No node has dropped the
  older contents of its shards, because condition 3 did not hold for them. The owner in condition 3 has its own.

Full nodes that wait for each other make progress, because all fill their last slots in rank order (`slots_ahead`). If
no content may be dropped, owners drop the full nodes from view at the holder deadline, and the base is committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.parity import share_owner
from everstep.protocol.plan import GenerationPlan
from worker.core.rounds import NONE
from worker.core.slots import Content

# The rest of the deadline is for the next attempt of the shard's owner, before it drops the node from its view.
PATIENCE_RATIO = 2 / 3
"""Fraction of the holder deadline for which a node leaves its last free slots to other shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MisplacedShards:
    """Facts from which a node decides when to drop its misplaced shards, new for every generation."""

    placed: frozenset[Rank] = frozenset()
    base: Step = NONE
    doubled: Mapping[tuple[Rank, Content], frozenset[Rank]] = field(default_factory=lambda: MappingProxyType({}))
    """For condition 3, by (rank, content of its shard that its node keeps): that node's ranks with no base
    elsewhere."""
    needed: frozenset[Step] = frozenset()
    """Steps before the base to which the job would return if one more node were lost."""
    is_loaded: bool = False
    """True once every node has verified the base.

    Until then, another node may have to fetch it from a misplaced shard here.
    """
    committed: Step = NONE
    sole: frozenset[tuple[Rank, Content]] | None = None
    """Contents that no earlier node of the plan keeps; None without a relayout."""
    expected: frozenset[Rank] = frozenset()
    """Shards of other nodes, and shares, whose base this node receives. Empty after a relayout or without a base."""
    patience_seconds: float = 0.0
    """Seconds, from the first refusal of a shard, for which this node leaves its last free slots to other shards."""
    held: frozenset[Rank] = frozenset()

    @classmethod
    def of(cls, plan: GenerationPlan, node_id: NodeId) -> MisplacedShards:
        """Return the facts for node `node_id` when the generation of `plan` begins."""
        placed = frozenset(rank.rank for rank in plan.ranks if node_id in rank.copy_nodes) | frozenset(
            share_owner(rank.rank) for rank in plan.ranks if rank.stripe and node_id == rank.holders[0]
        )
        if plan.relayout is not None:
            return cls(placed=placed, base=plan.base_step, sole=_sole(plan, node_id))
        alone = _alone(plan)
        doubled = {
            (reference.owner_rank, Content(reference.origin_generation, reference.step)): alone.intersection(node.ranks)
            for node in plan.nodes
            for reference in node.keep
            if reference.owner_rank in node.ranks
        }
        return cls(
            placed=placed,
            base=plan.base_step or NONE,
            doubled=MappingProxyType(doubled),
            needed=_needed(plan),
            expected=placed.difference(plan.node(node_id).ranks) if plan.base_step else frozenset(),
            patience_seconds=PATIENCE_RATIO * plan.timeouts.holder_deadline_seconds,
        )

    def loaded(self) -> MisplacedShards:
        """Record that every node has loaded and verified the base."""
        return replace(self, is_loaded=True)

    def announced(self, committed: Step, held: Iterable[Rank]) -> MisplacedShards:
        """Apply an announcement: the committed step, and ranks whose shards are complete on all planned holders."""
        return replace(self, committed=max(self.committed, committed), held=self.held | frozenset(held))

    def makes_way(self, rank: Rank, content: Content | None) -> bool:
        """Return whether a misplaced shard's slot may be dropped for a new slot.

        `content` is None for an empty slot.
        """
        if rank in self.placed or not self.is_loaded:
            return False
        if content is None or self.is_over(rank):
            return True
        if self.sole is not None:
            return (rank, content) not in self.sole
        if content.step == self.base:
            return rank in self.held
        is_needed = content.step in self.needed and self.committed == NONE
        alone = self.doubled.get((rank, content))
        return not is_needed or (alone is not None and alone <= self.held)

    def slots_ahead(
        self, rank: Rank, shards: Mapping[Rank, Collection[Content | None]], *, waited_seconds: float
    ) -> int:
        """Return how many slots this node must leave free before it adds one for `rank` (docs/design.md#placement,
        R44a).

        `shards` has the content of each slot with memory, by owner; None for an unsealed slot. `waited_seconds` count
        from the first refusal for `rank`.
        """
        has_misplaced = not shards.keys() <= self.placed
        if rank not in self.expected or not has_misplaced or self.committed != NONE:
            return 0
        if waited_seconds >= self.patience_seconds:
            return 0
        lacking = {
            each
            for each in self.expected
            if all(content is not None and content.step < self.base for content in shards.get(each, ()))
        }
        # A shard without the base leaves one slot for each lower rank that also lacks it; any other shard for
        # all that lack it.
        return sum(each < rank or rank not in lacking for each in lacking)

    def is_over(self, rank: Rank) -> bool:
        """Return whether no node needs this node's misplaced shard of `rank` any more, so that it may be dropped at
        once.
        """
        if rank in self.placed or self.committed == NONE:
            return False
        return rank in self.held or self.committed > self.base


def misplaced_ranks(plan: GenerationPlan) -> frozenset[Rank]:
    """Return the ranks with a misplaced shard, and all others of their nodes; none after a relayout
    (`Coordinator.misplaced_ranks`).
    """
    if plan.relayout is not None:
        return frozenset()
    found = {
        reference.owner_rank
        for node in plan.nodes
        for reference in node.keep
        if reference.owner_rank < plan.world_size and node.node_id not in plan.ranks[reference.owner_rank].copy_nodes
    }
    return frozenset(rank for node in plan.nodes if found.intersection(node.ranks) for rank in node.ranks)


def _alone(plan: GenerationPlan) -> frozenset[Rank]:
    """Return the ranks whose shard of the base exists only on the rank's own node."""
    # The first holder of a shard is the owner's node, which has loaded the base.
    owners = {rank.rank: rank.holders[0] for rank in plan.ranks}
    elsewhere = {
        reference.owner_rank
        for node in plan.nodes
        for reference in node.keep
        if reference.step == plan.base_step and node.node_id != owners.get(reference.owner_rank)
    }
    return frozenset(owners.keys() - elsewhere)


def _needed(plan: GenerationPlan) -> frozenset[Step]:
    """Return the older steps to which the job might have to return while the generation loads."""
    keepers = defaultdict[Step, dict[Rank, set[NodeId]]](dict)
    for node in plan.nodes:
        for reference in node.keep:
            if reference.step != plan.base_step:
                keepers[reference.step].setdefault(reference.owner_rank, set()).add(node.node_id)
    # One node may hold the only copy of a shard at the base. If it fails, the job returns to an older step.
    alone = {plan.ranks[rank].holders[0] for rank in _alone(plan)}
    return frozenset(
        step
        for step, by_rank in keepers.items()
        if any(
            all(by_rank.get(rank, set()) - {node_id} for rank in {*by_rank, *(each.rank for each in plan.ranks)})
            for node_id in alone
        )
    )


def _sole(plan: GenerationPlan, node_id: NodeId) -> frozenset[tuple[Rank, Content]]:
    """Return the contents that no node before this one in the plan keeps."""
    kept_before: set[tuple[Rank, Content]] = set()
    for node in plan.nodes:
        kept = {(each.owner_rank, Content(each.origin_generation, each.step)) for each in node.keep}
        if node.node_id == node_id:
            return frozenset(kept - kept_before)
        kept_before |= kept
    return frozenset()
