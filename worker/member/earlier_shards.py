"""Serves the shards of an earlier launch to the ranks of this node, after a relayout.

    rank ── FetchShard ──▶ RankConnections ──▶ EarlierShards ──▶ BaseLoading.load_earlier: own slot, peer, home, parity,
    S3
         ◀─ FetchedShard ──

Invariant: a rank receives a slot's path only after the whole shard was verified against the plan's digest. The slot
keeps its content until all ranks of this node have loaded (`RetainedSteps.is_loading_earlier`).
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
from worker.member.retained_steps import RetainedSteps
from worker.shm.store import SlotStore

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class EarlierShards:
    """Loads the shards of a launch with another number of ranks, and sends their slots to ranks on request."""

    plan: GenerationPlan
    here: PlanNode
    loading: BaseLoading
    store: SlotStore
    contents: RetainedSteps

    def __post_init__(self) -> None:
        self._relayout = self.plan.relayout
        self._base_step = self.plan.base_step
        self._answers: dict[Rank, FetchedShard] = {}
        self._fetching: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def layout(self) -> EarlierLayout | None:
        """The layout of the state before the number of ranks changed; None if it is unchanged."""
        if self._relayout is None:
            return None
        here = tuple(
            Rank(rank)
            for rank, sources in enumerate(self._relayout.shards)
            if any(source.node_id == self.here.node_id for source in sources)
        )
        return EarlierLayout(world_size=self._relayout.world_size, here=here)

    async def fetch(self, rank: Rank, faults: ReportedFaults) -> FetchedShard | None:
        """Return the answer to a rank's request for an earlier shard; None after a fault, which ends the generation."""
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
        if rank not in self._answers:
            file = await self.loading.load_earlier(rank)
            self._answers[rank] = FetchedShard(owner_rank=rank, path=file.name, problem="")

    async def supply(self, rank: Rank) -> None:
        """Load an earlier shard for another node, if this node is its home and still keeps earlier shards."""
        if self._relayout is None or not 0 <= rank < self._relayout.world_size:
            return
        # A rebuild on another node never causes a rebuild here. The other node rebuilds the shard or reads S3
        # itself.
        if home_of(self.plan, rank) != self.here.node_id or not self.contents.is_loading_earlier:
            return
        async with self._fetching[rank]:
            try:
                await self._load(rank)
            except LoadFailed as error:
                log.warning("the shard of earlier rank %d cannot be loaded for another node: %s", rank, error)
