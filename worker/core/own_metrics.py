"""What Everstep measures of a job's iterations, as values beside those that its script logs. Pure.

    Boundary, Captured ──▶ OwnMetrics ──at most every PERIOD_SECONDS──▶ one set of values
                                            rank 0's node: a MetricPoint, numbered and kept      every node: its newest, in its report

The control plane puts what all nodes measured beside each point of rank 0's node. Of a node its first rank speaks:
collectives make iterations common to all. Invariant: however fast steps are and however many ranks there are, there is
at most one set in `PERIOD_SECONDS`, of as many values as `OwnMetrics.due` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.protocol.rank_messages import OWN_METRICS

PERIOD_SECONDS = 5.0
"""A chart has about a thousand points, a job as a rule more iterations."""


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """What a node's devices have done so far, as far as somebody reads them."""

    gpu_percent: float | None = None
    """How busy its GPUs are, their mean."""
    gpu_least_percent: float | None = None
    """How busy the idlest of them is: of eight, one that idles hardly shows in the mean."""
    network_bytes: int | None = None
    """That its network cards have sent and received; only ever grows."""
    memory_total_bytes: int | None = None
    """What agent and ranks can have at most."""
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """The limit of their cgroup; None: the machine is the limit."""
    rank_memory_bytes: int | None = None
    """Resident memory of the largest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetrics:
    """What came since the last point."""

    began_at: float | None = None
    """Monotonic seconds of the last point; None before the first iteration."""
    iteration_count: int = 0
    step_seconds: float = 0.0
    blocked_seconds: float = 0.0
    replica_count: int = 0
    replicate_seconds: float = 0.0
    replica_bytes: int = 0
    """Sent in all, when the last point was made."""
    usage: NodeUsage = NodeUsage()
    """Then."""

    def iteration(self, seconds: float, blocked_seconds: float) -> OwnMetrics:
        """Take one iteration into account.

        Args:
            seconds: from boundary to boundary.
            blocked_seconds: for how long of it saving held the rank.

        Returns:
            The sums with it.
        """
        return replace(
            self,
            iteration_count=self.iteration_count + 1,
            step_seconds=self.step_seconds + seconds,
            blocked_seconds=self.blocked_seconds + blocked_seconds,
        )

    def replicated(self, seconds: float) -> OwnMetrics:
        """Take a snapshot into account that every holder in view has verified so long after its boundary."""
        return replace(self, replica_count=self.replica_count + 1, replicate_seconds=self.replicate_seconds + seconds)

    def due(self, now: float, replica_bytes: int, usage: NodeUsage) -> tuple[dict[str, float], OwnMetrics]:
        """Return the values of a point, or none while it is too early for one, and what is counted from then on.

        Args:
            now: monotonic seconds: when the newest boundary was passed.
            replica_bytes: sent to holders by this node so far.
            usage: of the node.

        Returns:
            Means of what came since the last point, by name; rates from the second point on.
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
        if passed > 0:
            values["replica_bytes_per_second"] = (replica_bytes - self.replica_bytes) / passed
            before = self.usage.network_bytes
            if before is not None and usage.network_bytes is not None and usage.network_bytes >= before:
                values["network_bytes_per_second"] = (usage.network_bytes - before) / passed
        return {OWN_METRICS + name: value for name, value in values.items()}, OwnMetrics(
            began_at=now, replica_bytes=replica_bytes, usage=usage
        )
