"""Everstep's own measurements of a job's iterations, published next to the values that the script logs.

    Boundary, Captured ──▶ OwnMetrics ──at most every PERIOD_SECONDS──▶ one set of values
                                            rank 0's node: a MetricPoint, numbered and stored
                                            every node: the newest set, in its report

Each node measures only its first rank, because collective operations make all iterations equally long. Invariant: a
node produces at most one set per `PERIOD_SECONDS`, with values of the fixed list in `OwnMetrics.due` only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.protocol.rank_messages import OWN_METRICS

PERIOD_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Load of a node's devices. A value is None if the node cannot measure it."""

    gpu_percent: float | None = None
    gpu_least_percent: float | None = None
    """Utilization of the least busy GPU. The mean of eight GPUs would hide one idle GPU."""
    network_bytes: int | None = None
    memory_total_bytes: int | None = None
    """Maximum memory that the agent and its ranks can use."""
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Limit of the cgroup of the agent and its ranks; None if the machine's memory is the limit."""
    rank_memory_bytes: int | None = None
    """Resident memory of the rank that uses the most memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetrics:
    """Sums of a node's measurements since its last set of values. Each method returns the new sums."""

    began_at: float | None = None
    """Monotonic time of the last set; None before the first."""
    iteration_count: int = 0
    step_seconds: float = 0.0
    blocked_seconds: float = 0.0
    replica_count: int = 0
    replicate_seconds: float = 0.0
    replica_bytes: int = 0
    """Total bytes that the node had sent to holders at the last set."""
    usage: NodeUsage = NodeUsage()

    def iteration(self, seconds: float, blocked_seconds: float) -> OwnMetrics:
        """Add one iteration, of which the snapshot blocked the rank for `blocked_seconds`."""
        return replace(
            self,
            iteration_count=self.iteration_count + 1,
            step_seconds=self.step_seconds + seconds,
            blocked_seconds=self.blocked_seconds + blocked_seconds,
        )

    def replicated(self, seconds: float) -> OwnMetrics:
        """Add a replication of `seconds`, from the end of the step until every holder in view had verified it."""
        return replace(self, replica_count=self.replica_count + 1, replicate_seconds=self.replicate_seconds + seconds)

    def due(self, now: float, replica_bytes: int, usage: NodeUsage) -> tuple[dict[str, float], OwnMetrics]:
        """Return the values to publish at `now`, and the sums with which the next set begins.

        The values are means since the last set; rates are included from the second set on. If the last set is less than
        `PERIOD_SECONDS` old, the values are empty and the sums stay. `replica_bytes` is the total that this node has
        sent.
        """
        if self.began_at is not None and now - self.began_at < PERIOD_SECONDS:
            return {}, self
        passed = 0.0 if self.began_at is None else now - self.began_at
        values: dict[str, float] = {}
        if self.iteration_count:
            values["step_seconds"] = self.step_seconds / self.iteration_count
            values["snapshot_blocked_seconds"] = self.blocked_seconds / self.iteration_count
        if self.replica_count:
            values["replicate_seconds"] = self.replicate_seconds / self.replica_count
        if usage.gpu_percent is not None:
            values["gpu_percent"] = usage.gpu_percent
        if usage.gpu_least_percent is not None:
            values["gpu_least_percent"] = usage.gpu_least_percent
        if usage.memory_total_bytes is not None and usage.memory_available_bytes is not None:
            values["memory_used_bytes"] = usage.memory_total_bytes - usage.memory_available_bytes
        if usage.rank_memory_bytes is not None:
            values["rank_memory_bytes"] = usage.rank_memory_bytes
        if passed:
            values["replica_bytes_per_second"] = (replica_bytes - self.replica_bytes) / passed
            before = self.usage.network_bytes
            if before is not None and usage.network_bytes is not None and usage.network_bytes >= before:
                values["network_bytes_per_second"] = (usage.network_bytes - before) / passed
        return {OWN_METRICS + name: value for name, value in values.items()}, OwnMetrics(
            began_at=now, replica_bytes=replica_bytes, usage=usage
        )
