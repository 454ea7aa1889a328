"""Decides when a node drops strays: shards in its slots that the new plan places on other nodes.

Strays protect their shards until the new holders have replicas. A node without spare memory has no room for its strays
and the new replicas at the same time. It then drops one slot of a stray at a time, and only if the job stays protected
without this slot. The *content* of a slot is the shard at one step of one generation.

    content of the stray    dropped if a new slot lacks room            dropped in any case
    ---------------------   -----------------------------------------   ------------------------------------------------
    the base                all planned holders have sealed the base    the base is committed and all planned holders
    older than the base     condition 1, 2 or 3                         have it; or a later step is committed, which
                                                                        makes the older contents of all nodes useless

1. The base is committed.
2. The job would not return to this step, whichever one node were lost.
3. The node of the shard's owner keeps the same content. Other nodes also have the base of every shard of that node.

A generation first commits the base again, except after a relayout.

A relayout is a change of the number of ranks. After a relayout, strays of the base protect the job until the first
commit. A node without room may then drop a stray if an earlier node in the plan's order keeps the same content. It may
also drop a stray that it fetched only for its own ranks, once they have loaded.

Nodes that wait for each other's memory still make progress:

- The first node drops the older content of a stray by condition 3. The condition can hold at once: an owner that
  belonged to the earlier generation keeps its own older content. A replacement node keeps none.
- The first node uses the memory for a shard that the plan places on it, and receives the base of this shard. When all
  planned holders of this shard have its base, a second node may drop its own stray of this shard. The second node then
  has memory for another shard, and so on.
- All nodes fill their last free slots in the same order: lowest rank first (`Strays.slots_ahead`). Otherwise, two nodes
  could fill these slots with different shards, and no shard would be complete on all its holders.
- If shards differ in size, or after several losses, possibly no content may be dropped. The full nodes then receive
  no shard. At the holder deadline, the owners drop the full nodes from their view. The base is committed without these
  nodes, and the older contents may then be dropped.

Invariant: until the base is committed, one further node may be lost. All shards can then still be restored to a common
step, if the plan had such a step.

The invariant holds, for example, after a node has dropped an older content by condition 3. There are two cases:

- The node of the shard's owner is lost. All shards are then restored to the base: other nodes have the base of the lost
  shards, and all other owners have their own.
- Another node is lost, and no other node has the base of its shards. All shards are then restored to the older step. No
  node has dropped the older contents of the lost shards, because condition 3 did not hold for them. The owner in
  condition 3 still has its own older content.
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

PATIENCE_RATIO = 2 / 3
"""Fraction of the holder deadline for which a node refuses a shard its last free slots, to leave them to other shards.

After this time, the node no longer refuses the shard for this reason. The rest of the deadline is for the next attempt
of the shard's owner. At the deadline, the owner would drop the node from its view.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strays:
    """Facts from which a node decides when to drop its strays.

    The node's `Member` passes a new object to `SlotStore.place` at the start of every generation.
    """

    placed: frozenset[Rank] = frozenset()
    """Ranks whose shards or shares this node owns or holds under the plan. The slots of all other ranks are strays."""
    base: Step = NONE
    doubled: Mapping[tuple[Rank, Content], frozenset[Rank]] = field(default_factory=lambda: MappingProxyType({}))
    """Contents that nodes keep of their own shards under the plan, for condition 3 of the module.

    The key is (the owner's rank, content): the owner's node keeps this content of its shard. The value contains the
    ranks of the owner's node whose base is on no other node when the generation begins. This node may drop its copy of
    the content once all planned holders have the base of these ranks (`makes_way`). The loss of the owner's node then
    costs no shard at the base, so the job would not need the older content.
    """
    needed: frozenset[Step] = frozenset()
    """Steps before the base to which the job would return if one more node were lost (`_needed`)."""
    is_loaded: bool = False
    """True once every node has loaded and verified the base.

    Until then, another node may have to fetch the base from a stray on this node.
    """
    committed: Step = NONE
    """The newest committed step of the generation that the coordinator has announced to this node.

    `announced` sets it.
    """
    sole: frozenset[tuple[Rank, Content]] | None = None
    """Contents that this node must keep, because no earlier node in the plan's order keeps them.

    None unless the number of ranks has changed (a relayout).
    """
    expected: frozenset[Rank] = frozenset()
    """Shards of other nodes, and shares, whose base this node receives. Empty after a relayout or without a base."""
    patience_seconds: float = 0.0
    """Seconds for which this node leaves its last free slots to other shards before it grants one to a given shard.

    The time begins when this node first refuses the shard a slot. See `slots_ahead`.
    """
    held: frozenset[Rank] = frozenset()
    """Ranks with a stray whose shards all planned holders have sealed at the base or a later step.

    `announced` sets it.
    """

    @classmethod
    def of(cls, plan: GenerationPlan, node_id: NodeId) -> Strays:
        """Return the facts from which node `node_id` decides on its strays when the generation of `plan` begins."""
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

    def loaded(self) -> Strays:
        """Record that every node has loaded and verified the base (the step to restore). The ranks begin to train."""
        return replace(self, is_loaded=True)

    def announced(self, committed: Step, held: Iterable[Rank]) -> Strays:
        """Store the committed step that the coordinator has announced, and add the announced ranks to the field `held`.

        The argument `held` names ranks whose shards are complete on all planned holders, so their strays are no longer
        needed.
        """
        return replace(self, committed=max(self.committed, committed), held=self.held | frozenset(held))

    def makes_way(self, rank: Rank, content: Content | None) -> bool:
        """Return whether this node may drop one slot of a stray because a new slot lacks room.

        Args:
            rank: the rank that owns the shard.
            content: the content of the slot; None if the slot is empty.

        Returns:
            True if the job stays protected against the loss of one more node without this slot.
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
        """Return how many slots this node must leave free for other shards (docs/design.md#placement, R44a).

        The node asks this before it creates a slot for the shard of `rank`. If the shard has no slot for the base yet,
        the node leaves one slot for each lower rank that also lacks one. If the shard has one, the node leaves one slot
        for every rank that lacks one. All slots count as equally large.

        Args:
            rank: the owner of the shard or share that needs another slot.
            shards: the slots on this node that have memory, by owner: the content of a sealed slot, None for any other
                slot.
            waited_seconds: seconds since this node first refused a slot for `rank`; 0 if it has refused none.

        Returns:
            The number of slots. 0 for this node's own ranks, on a node without strays, after the first commit, and
            after `patience_seconds`.
        """
        has_strays = not shards.keys() <= self.placed
        if rank not in self.expected or not has_strays or self.committed != NONE:
            return 0
        if waited_seconds >= self.patience_seconds:
            return 0
        lacking = {
            each
            for each in self.expected
            if all(content is not None and content.step < self.base for content in shards.get(each, ()))
        }
        return sum(each < rank or rank not in lacking for each in lacking)

    def is_over(self, rank: Rank) -> bool:
        """Return whether no node needs this node's stray of `rank` any more.

        This node may then drop the stray at once. It drops other strays only to make room for a new slot (`makes_way`).
        """
        if rank in self.placed or self.committed == NONE:
            return False
        return rank in self.held or self.committed > self.base


def strayed(plan: GenerationPlan) -> frozenset[Rank]:
    """Return the ranks whose shards' copies the coordinator watches, so that nodes can drop strays.

    These are the ranks whose shard is a stray on some node, and all other ranks of the nodes that run these ranks. The
    coordinator announces each of them once all planned holders have its shard.
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
    """Return the ranks whose shard of the restored step (the base) exists only on the rank's own node."""
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
    """Return the older steps to which the job might have to return while the generation loads.

    Until the generation has loaded, one node may hold the only copy of a shard at the base, the step that the
    generation starts from. If this node fails, the job returns to an older step whose shards are complete on the other
    nodes.
    """
    keepers = defaultdict[Step, dict[Rank, set[NodeId]]](dict)
    for node in plan.nodes:
        for reference in node.keep:
            if reference.step != plan.base_step:
                keepers[reference.step].setdefault(reference.owner_rank, set()).add(node.node_id)
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
    """Return the shards that this node must keep, because no node before it in the plan keeps the same content."""
    kept_before: set[tuple[Rank, Content]] = set()
    for node in plan.nodes:
        kept = {(each.owner_rank, Content(each.origin_generation, each.step)) for each in node.keep}
        if node.node_id == node_id:
            return frozenset(kept - kept_before)
        kept_before |= kept
    return frozenset()
