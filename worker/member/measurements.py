"""Measures the training iterations of this node, for charts (`worker.core.own_metrics`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.agent_messages import MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.rank_messages import Boundary
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import NodeUsage, OwnMetrics
from worker.core.rounds import NONE
from worker.shards.owned_shard import OwnedShard


@dataclass(eq=False, repr=False)
class Measurements:
    """Measures the iterations of one generation on this node. `outbox` receives them on rank 0's node."""

    run: RunId
    generation: Generation
    outbox: MetricOutbox
    _: KW_ONLY
    now: Callable[[], float]
    usage: Callable[[], NodeUsage]
    sent_bytes: Callable[[], int]

    def __post_init__(self) -> None:
        self.newest: dict[str, float] = {}
        self._own_metrics = OwnMetrics()
        self._passed: tuple[Step, float] = (NONE, 0.0)
        """The newest proposed step that the first rank passed, with its monotonic time; (NONE, 0.0) once replicated."""

    def record(self, shard: OwnedShard, message: Boundary, seconds: float | None) -> None:
        """Record an iteration of `seconds`; None if the duration is unknown."""
        (step, acked_at), (passed, passed_at) = shard.acked, self._passed
        if step == passed != NONE:
            self._own_metrics = self._own_metrics.replicated(acked_at - passed_at)
            self._passed = NONE, 0.0
        if message.boundary == shard.core.proposed and message.at_seconds:
            self._passed = message.boundary, message.at_seconds
        if seconds is None:
            return
        self._own_metrics = self._own_metrics.iteration(seconds, message.blocked_seconds)
        values, self._own_metrics = self._own_metrics.due(message.at_seconds, self.sent_bytes(), self.usage())
        if not values:
            return
        self.newest = values
        # Only the node of rank 0 queues every point for the control plane. The agents of all nodes also send the newest
        # values in their periodic reports.
        if shard.rank == 0:
            point = MetricPoint(generation=self.generation, step=message.boundary, values=values, at_seconds=self.now())
            self.outbox.add(self.run, [point])
