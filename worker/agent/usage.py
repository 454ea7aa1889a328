"""Reads the load of this node's devices and the use of its memory, for charts, reports and stack samples."""

from __future__ import annotations

from dataclasses import replace

from everstep.protocol.agent_messages import NodeFault, NodeMemory, RankMemory
from everstep.protocol.ids import Generation, Rank
from everstep.protocol.plan import PlanNode
from worker.agent.promise import CurrentPromise
from worker.core.own_metrics import NodeUsage
from worker.node.health.watch import HealthWatch
from worker.ranks.supervisor import Supervisor


class Usage:
    """Returns the load of the node's devices, as the health watch measured it, and the memory use of its ranks."""

    def __init__(self, health: HealthWatch | None, supervisor: Supervisor, promise: CurrentPromise) -> None:
        self._health = health
        self._supervisor = supervisor
        self._promise = promise

    def now(self) -> NodeUsage:
        """Return the load of this node's devices and the memory of its largest rank, for charts."""
        largest = max((rank.resident_bytes for rank in self._rank_memory()), default=None)
        return replace(self._devices(), rank_memory_bytes=largest)

    def memory(self) -> NodeMemory | None:
        """Return the memory of the node and of its ranks; None if the node's memory cannot be read."""
        usage = self._devices()
        if usage.memory_total_bytes is None or usage.memory_available_bytes is None:
            return None
        return NodeMemory(
            total_bytes=usage.memory_total_bytes,
            available_bytes=usage.memory_available_bytes,
            limit_bytes=usage.memory_limit_bytes,
            ranks=self._rank_memory(),
        )

    def gpu_percent(self, here: PlanNode, rank: Rank) -> float | None:
        """Return the load in percent of a rank's GPU, whose index is the rank's LOCAL_RANK."""
        return self._health.gpu_percent(here.ranks.index(rank)) if self._health is not None else None

    def faults(self) -> tuple[NodeFault, ...]:
        """Return the current faults of the node's devices."""
        return self._health.faults() if self._health is not None else ()

    def _devices(self) -> NodeUsage:
        return self._health.usage() if self._health is not None else NodeUsage()

    def _rank_memory(self) -> tuple[RankMemory, ...]:
        if (promise := self._promise.value) is None:
            return ()
        found = self._supervisor.rank_memory(promise.membership.run, Generation(promise.generation))
        return tuple(
            RankMemory(rank=rank, resident_bytes=each.resident_bytes, peak_bytes=each.peak_bytes)
            for rank, each in sorted(found.items())
        )
