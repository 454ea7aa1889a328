"""Logged values on their way to the control plane: numbered, bounded, sent again until they are known to be kept. Pure.

Invariant: a number is never given twice, and what is dropped leaves a gap in the numbers, which the receiver counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import RunId

MAX_WAITING = 20_000
"""Steps that wait; beyond it the oldest are dropped."""
MAX_SENT = 1_000
"""Steps of one message."""
MAX_SENT_VALUES = 10_000
"""Values of one message, unless a single step has more."""
AGAIN_SECONDS = 5.0
"""Later than this it is sent again: the control plane stores once a second."""


class MetricOutbox:
    """What rank 0 of this node's job has logged and nobody has confirmed yet.

    One per agent, through generations and jobs.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, RunId, MetricPoint]] = deque()
        self._next_number = 0
        self.dropped_count = 0
        """Steps that were lost on this node."""
        self._sent_at: float | None = None

    def add(self, run: RunId, points: Sequence[MetricPoint], dropped_count: int = 0) -> None:
        """Take what a rank has logged.

        Args:
            run: the rank's.
            points: in the order in which they were logged.
            dropped_count: how many were lost before them.
        """
        self._next_number += dropped_count
        self.dropped_count += dropped_count
        for point in points:
            self._waiting.append((self._next_number, run, point))
            self._next_number += 1
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.dropped_count += 1

    def __len__(self) -> int:
        """Return how many steps wait."""
        return len(self._waiting)

    def connected(self) -> None:
        """A connection begins: nothing is on its way."""
        self._sent_at = None

    def due(self, now: float) -> MetricBatch | None:
        """Return what is to be sent now; None while nothing waits, or the last message may still be confirmed.

        Args:
            now: monotonic seconds.

        Returns:
            Values of one run without a gap, the oldest first.
        """
        if not self._waiting or (self._sent_at is not None and now - self._sent_at < AGAIN_SECONDS):
            return None
        self._sent_at = now
        first, run, _ = self._waiting[0]
        points: list[MetricPoint] = []
        value_count = 0
        for number, of_run, point in self._waiting:
            value_count += len(point.values)
            is_full = len(points) == MAX_SENT or (points and value_count > MAX_SENT_VALUES)
            if is_full or of_run != run or number != first + len(points):
                break
            points.append(point)
        return MetricBatch(run=run, first_number=first, points=tuple(points))

    def confirm(self, next_number: int) -> None:
        """What was numbered before this is kept.

        Args:
            next_number: as the control plane says it.
        """
        while self._waiting and self._waiting[0][0] < next_number:
            self._waiting.popleft()
            self._sent_at = None
