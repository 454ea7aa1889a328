"""Serves the shards of an earlier launch to the ranks of this node, after the number of ranks has changed.

    rank ── FetchShard ──▶ RankLines ──▶ EarlierShards ──▶ BaseLoading.load_earlier: own slot, peer, home, parity, S3
         ◀─ FetchedShard ──

The earlier launch divided the state among more or fewer ranks; its shards are the *earlier shards*. Each rank of the
new generation reads the parts that it needs from them. The *home* of an earlier shard is the node that gets it by
parity or from S3 if no node has it in memory (`home_of`).

Invariant: a rank receives a slot's path only after the whole shard was verified against the plan's digest. The slot
keeps its content until all ranks of this node have loaded (`KeptContents.is_loading_earlier`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass

from everstep.protocol.ids import Rank
from everstep.protocol.plan import GenerationPlan, PlanNode
from everstep.protocol.rank_messages import EarlierLayout, FetchedShard
from worker.core.shared_parts import home_of
from worker.errors import LoadFailed
from worker.member.base_loading import BaseLoading
from worker.member.faults import ReportedFaults
from worker.member.kept_contents import KeptContents
from worker.shm.store import SlotStore

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class EarlierShards:
    """Loads the shards of an earlier launch with another number of ranks, and sends their slots to ranks on request.

    A generation uses the object only after a relayout (a change of the number of ranks). The `Member` object owns it.

    Args:
        plan: plan of the generation. Only a plan with a changed number of ranks (`relayout`) has earlier shards.
        here: the plan's entry for this node.
        loading: its `load_earlier` loads one earlier shard into a slot of this node.
        store: this node's slots.
        contents: records which earlier shards ranks still load, so that their slots are not overwritten.
    """

    plan: GenerationPlan
    here: PlanNode
    loading: BaseLoading
    store: SlotStore
    contents: KeptContents

    def __post_init__(self) -> None:
        self._relayout = self.plan.relayout
        self._base_step = self.plan.base_step
        self._answers: dict[Rank, FetchedShard] = {}
        self._fetching: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def layout(self) -> EarlierLayout | None:
        """The layout of the state before the number of ranks changed, in the form that ranks receive.

        None if the number of ranks is unchanged.
        """
        if self._relayout is None:
            return None
        here = tuple(
            Rank(rank)
            for rank, sources in enumerate(self._relayout.shards)
            if any(source.node_id == self.here.node_id for source in sources)
        )
        return EarlierLayout(world_size=self._relayout.world_size, here=here)

    async def fetch(self, rank: Rank, faults: ReportedFaults) -> FetchedShard | None:
        """Return the answer to a rank's request. Ranks that request the same shard share one load.

        Args:
            rank: the rank that owned the shard in the earlier launch, before the number of ranks changed.
            faults: receives the fault if no source delivers the shard.

        Returns:
            The answer. None if no source delivers the shard. The rank then waits until the fault ends the generation.
        """
        if self._relayout is None or not 0 <= rank < self._relayout.world_size:
            problem = f"the base of step {self._base_step} has no shard of an earlier rank {rank}"
            return FetchedShard(owner_rank=rank, path="", problem=problem)
        async with self._fetching[rank]:
            try:
                await self._load(rank)
            except LoadFailed as error:
                log.warning("the shard of earlier rank %d cannot be loaded: %s", rank, error)
                faults.report(error.code, str(error), subject=f"earlier rank {rank}", shard=rank)
                return None
            return self._answers[rank]

    async def _load(self, rank: Rank) -> None:
        """Load an earlier rank's shard unless it is already loaded. The caller holds the shard's lock (`_fetching`)."""
        if rank not in self._answers:
            file = await self.loading.load_earlier(rank)
            self._answers[rank] = FetchedShard(owner_rank=rank, path=file.name, problem="")

    async def supply(self, rank: Rank) -> None:
        """Load a shard of the earlier launch for another node, if `home_of` returns this node for the shard.

        The method loads nothing if this node is not the home or cannot load the shard. A rebuild on another node
        therefore never causes a rebuild here (see `home_of`). The method also loads nothing if all of this node's own
        ranks have loaded, because the node then keeps no more earlier shards. The other node then rebuilds the shard or
        reads S3 itself.
        """
        if self._relayout is None or not 0 <= rank < self._relayout.world_size:
            return
        if home_of(self.plan, rank) != self.here.node_id or not self.contents.is_loading_earlier:
            return
        async with self._fetching[rank]:
            try:
                await self._load(rank)
            except LoadFailed as error:
                log.warning("the shard of earlier rank %d cannot be loaded for another node: %s", rank, error)
