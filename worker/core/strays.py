"""Decides when a node drops replicas of shards that the plan places elsewhere now.

A stray is a shard in this node's slots that the node neither owns nor holds under the running plan. Until the new
holders have their replicas, the strays are what protects such a shard. On a node whose memory is sized exactly, strays
and new replicas do not fit together: the node then drops one content of one stray at a time, and only if the shard
stays protected without it.

    content of the stray    dropped where a new slot lacks room               dropped in any case
    ---------------------   ------------------------------------------------   ------------------------------------------
    the base                all planned holders have sealed the base           the base is committed, and all planned
    older than the base     the plan shows that no loss of one node makes      holders have it; or a later step is
                            anybody go back to it; or the shard's owner        committed, after which no other node
                            keeps it, too, and other nodes have the base       keeps what the stray belongs to
                            of all shards of that owner; or the base is
                            committed

Nodes that wait for each other get on. Where a job might go back to the older step, the owner of a shard keeps that
step, unless the owner is a replacement. So the node with a stray of a survivor has room for one slot at once, and
receives the base of the shard that the plan placed there. The seal of that base releases the stray of that shard on the
next node, and so on. After several losses no content may be left to drop. The owners then take the node out of their
view at the holder deadline, the base is committed without that node, and the older contents are free.

Invariant: until the base is committed, the loss of any one further node leaves a step that all shards can be restored
to, if the plan had one. The loss of an owner leaves the base: all its shards' on other nodes, and all others' on their
owners. The loss of another node leaves the older step. An owner may have several ranks: if the base of one of its
shards is nowhere else, its loss makes all shards go back to the older step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan
from worker.core.rounds import NONE
from worker.core.slots import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Strays:
    """What one node knows about its strays. `place` of the slot store takes a new value for every generation."""

    placed: frozenset[Rank] = frozenset()
    """Shards that the plan places on this node, owned or held; all others are strays."""
    base: Step = NONE
    doubled: Mapping[tuple[Rank, Content], frozenset[Rank]] = field(default_factory=lambda: MappingProxyType({}))
    """Contents that the plan has the shard's owner keep, each with the ranks of that owner whose base no other node keeps yet."""
    needed: frozenset[Step] = frozenset()
    """Older steps that some loss of one node makes the newest whole one (`_needed`)."""
    is_loaded: bool = False
    """Every node has verified the base of its ranks. Before that a stray may be the source that a node fetches from."""
    committed: Step = NONE
    """C of the generation, as far as this node has heard; set by `heard`."""
    held: frozenset[Rank] = frozenset()
    """Strayed shards whose planned holders all have the base or a later step; set by `heard`."""

    @classmethod
    def of(cls, plan: GenerationPlan, node_id: NodeId) -> Strays:
        """Return what a node knows at the beginning of a generation."""
        placed = frozenset(rank.rank for rank in plan.ranks if node_id in rank.holders)
        alone = _alone(plan)
        doubled = {
            (reference.owner_rank, Content(reference.origin_generation, reference.step)): alone.intersection(node.ranks)
            for node in plan.nodes
            for reference in node.keep
            if reference.owner_rank in node.ranks
        }
        return cls(placed=placed, base=plan.base_step or NONE, doubled=MappingProxyType(doubled), needed=_needed(plan))

    def loaded(self) -> Strays:
        """Every node reported LOADED: ranks start."""
        return replace(self, is_loaded=True)

    def heard(self, committed: Step, held: Iterable[Rank]) -> Strays:
        """Take the newest announcement; what an earlier one said stays true."""
        return replace(self, committed=max(self.committed, committed), held=self.held | frozenset(held))

    def makes_way(self, rank: Rank, content: Content | None) -> bool:
        """Say whether a slot of a stray may be dropped because a new slot lacks room.

        Args:
            rank: the shard's owner.
            content: of the slot; None if it is empty.

        Returns:
            Whether the shard stays as protected as the invariant asks for.
        """
        if rank in self.placed or not self.is_loaded:
            return False
        if content is None or self.is_over(rank):
            return True
        if content.step == self.base:
            return rank in self.held
        is_needed = content.step in self.needed and self.committed == NONE
        alone = self.doubled.get((rank, content))
        return not is_needed or (alone is not None and alone <= self.held)

    def is_over(self, rank: Rank) -> bool:
        """Say whether a stray is of no use any more."""
        if rank in self.placed or self.committed == NONE:
            return False
        return rank in self.held or self.committed > self.base


def strayed(plan: GenerationPlan) -> frozenset[Rank]:
    """Return the ranks whose protection is announced: those with a stray, and all other ranks of the same owners."""
    found = {
        reference.owner_rank
        for node in plan.nodes
        for reference in node.keep
        if node.node_id not in plan.ranks[reference.owner_rank].holders
    }
    return frozenset(rank for node in plan.nodes if found.intersection(node.ranks) for rank in node.ranks)


def _alone(plan: GenerationPlan) -> frozenset[Rank]:
    """Return the ranks whose base no node but the owner keeps."""
    owners = {rank.rank: rank.holders[0] for rank in plan.ranks}  # every owner has loaded the base
    elsewhere = {
        reference.owner_rank
        for node in plan.nodes
        for reference in node.keep
        if reference.step == plan.base_step and node.node_id != owners[reference.owner_rank]
    }
    return frozenset(owners.keys() - elsewhere)


def _needed(plan: GenerationPlan) -> frozenset[Step]:
    """Return the steps before the base that are whole without some node, where the base is not: the node has a shard of the base alone."""
    keepers = defaultdict[Step, dict[Rank, set[NodeId]]](dict)
    for node in plan.nodes:
        for reference in node.keep:
            if reference.step != plan.base_step:
                keepers[reference.step].setdefault(reference.owner_rank, set()).add(node.node_id)
    alone = {plan.ranks[rank].holders[0] for rank in _alone(plan)}
    return frozenset(
        step
        for step, by_rank in keepers.items()
        if any(all(by_rank.get(rank.rank, set()) - {node_id} for rank in plan.ranks) for node_id in alone)
    )
