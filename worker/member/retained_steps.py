"""Names the contents of shards that this node must not overwrite during a generation."""

from __future__ import annotations

from everstep.protocol.ids import Rank, Step
from everstep.protocol.parity import holder_of
from everstep.protocol.plan import GenerationPlan, PlanNode
from worker.core.rounds import NONE
from worker.core.slots import Content, kept


class RetainedSteps:
    """The contents to keep: those that the plan names, and after the first commit only the committed one."""

    def __init__(self, plan: GenerationPlan, here: PlanNode) -> None:
        """Create the object before the first commit. `here` names the contents that this node keeps until then."""
        self.committed: Step = NONE
        """The newest committed step in an announcement or on a rank's page, or `NONE`."""
        self.is_loading_earlier = plan.relayout is not None
        """True while ranks of this node still load shards of the previous number of ranks (after a relayout)."""
        self._plan = plan
        self._named: dict[Rank, set[Content]] = {}
        for named in here.keep:
            self._named.setdefault(named.owner_rank, set()).add(Content(named.origin_generation, named.step))

    def base(self, rank: Rank) -> Content | None:
        """Return the base of a rank, or of a share's rank; None without a base, and after a relayout."""
        rank = holder_of(rank)
        sources = self._plan.ranks[rank].sources if rank < self._plan.world_size else ()
        return Content(sources[0].origin_generation, sources[0].step) if sources else None

    def earlier(self, rank: Rank) -> Content | None:
        """Return the content of an earlier rank's shard; None without a relayout, or without such a rank."""
        relayout = self._plan.relayout
        if relayout is None or rank >= relayout.world_size:
            return None
        return Content(relayout.shards[rank][0].origin_generation, self._plan.base_step)

    def keep(self, rank: Rank, committed: Step = NONE) -> frozenset[Content]:
        """Return the contents of a shard or share to keep. `committed` is another node's newest commit, or `NONE`."""
        step, base = max(self.committed, committed), self.base(rank)
        if self.is_loading_earlier:
            base = self.earlier(rank)
        content = None
        if step != NONE:
            content = base if base is not None and base.step == step else Content(self._plan.generation, step)
        return kept(content, self._named.get(rank, set()), base)
