"""Names the contents of shards that this node must not overwrite during a generation.

A content is the state of one shard at one step. Before the generation's first commit, the plan names these contents.
After the first commit, only the committed content of each shard remains protected.
"""

from __future__ import annotations

from everstep.protocol.ids import Rank, Step
from everstep.protocol.parity import holder_of
from everstep.protocol.plan import GenerationPlan, PlanNode
from worker.core.rounds import NONE
from worker.core.slots import Content, kept


class KeptContents:
    """The steps of each shard that this node must not overwrite in its slots.

    The generation's `Member` object updates `committed`.
    """

    def __init__(self, plan: GenerationPlan, here: PlanNode) -> None:
        """Create the object at the start of a generation, before its first commit.

        Args:
            plan: plan of the running generation; never changes.
            here: the plan's entry for this node. It names the slots (shard, generation and step) that this node keeps
                until the first commit.
        """
        self.committed: Step = NONE
        """The newest committed step in an announcement or on a rank's shared-memory page, or `NONE`."""
        self.is_loading_earlier = plan.relayout is not None
        """True while ranks of this node still load shards of the previous number of ranks (after a relayout)."""
        self._plan = plan
        self._named: dict[Rank, set[Content]] = {}
        for named in here.keep:
            self._named.setdefault(named.owner_rank, set()).add(Content(named.origin_generation, named.step))

    def base(self, rank: Rank) -> Content | None:
        """Return the content (step and generation of its capture) from which a rank is restored.

        Return None for a rank that this generation lacks, and if the generation starts without a base or after a
        relayout (a change of the number of ranks). If `rank` is the owner number of a parity share (`share_owner`), the
        result is the base of the rank to which the share belongs.
        """
        rank = holder_of(rank)
        sources = self._plan.ranks[rank].sources if rank < self._plan.world_size else ()
        return Content(sources[0].origin_generation, sources[0].step) if sources else None

    def earlier(self, rank: Rank) -> Content | None:
        """Return the step and generation of an earlier launch's shard that this generation restores.

        `rank` is the rank that owned the shard in that launch. Return None if the number of ranks is unchanged, or if
        that launch had no such rank.
        """
        relayout = self._plan.relayout
        if relayout is None or rank >= relayout.world_size:
            return None
        return Content(relayout.shards[rank][0].origin_generation, self._plan.base_step)

    def keep(self, rank: Rank, committed: Step = NONE) -> frozenset[Content]:
        """Return the contents (step and generation) of a shard that this node must not overwrite.

        Args:
            rank: the owner of the shard or share.
            committed: a committed step that another node has reported; `NONE` if no node has.

        Returns:
            The newest committed step. Before the first commit, the step to restore and the steps that the plan names.
        """
        step, base = max(self.committed, committed), self.base(rank)
        if self.is_loading_earlier:
            base = self.earlier(rank)
        content = None
        if step != NONE:
            content = base if base is not None and base.step == step else Content(self._plan.generation, step)
        return kept(content, self._named.get(rank, set()), base)
