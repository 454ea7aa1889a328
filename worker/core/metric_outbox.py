"""Queue of the values that rank 0 logs. The agent sends them repeatedly until the control plane confirms them. No I/O.

A logged step is one `MetricPoint`: the values of one optimizer step, logged by rank 0 or measured by its agent.

Invariant: the queue has at most `MAX_WAITING` logged steps. Every logged step has a number that is used only once. A
dropped step leaves a gap in the numbers, which the receiver counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import RunId

MAX_WAITING = 20_000
"""Maximum number of logged steps in the queue. Beyond this limit, the oldest steps are dropped."""
MAX_SENT = 1_000
"""Maximum number of logged steps per message to the control plane."""
MAX_SENT_VALUES = 10_000
"""Maximum number of values per message. A step with more values is sent in a message of its own."""
AGAIN_SECONDS = 5.0
"""Seconds without a confirmation after which a message is sent again.

The control plane usually confirms within about a second.
"""


MAX_NUMBER = 1 << 52
"""Highest number to which a rank may advance the outbox by dropped values. No honest rank reaches it."""


class MetricOutbox:
    """Values of rank 0 that the control plane has not confirmed yet.

    An agent has one outbox for its whole lifetime, across generations and jobs.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, RunId, MetricPoint]] = deque()
        self._next_number = 0
        self.dropped_count = 0
        """Number of logged steps that this node has dropped."""
        self._sent_at: float | None = None

    def add(self, run: RunId, points: Sequence[MetricPoint], dropped_count: int = 0) -> None:
        """Queue values that a rank has logged.

        Args:
            run: the rank's run.
            points: values in the order in which they were logged.
            dropped_count: number of logged steps that the rank lost before `points`, for example because its queue was
                full.
        """
        self._next_number = min(self._next_number + dropped_count, MAX_NUMBER)
        self.dropped_count += dropped_count
        for point in points:
            self._waiting.append((self._next_number, run, point))
            self._next_number += 1
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.dropped_count += 1

    def __len__(self) -> int:
        """Return the number of logged steps that the control plane has not confirmed yet."""
        return len(self._waiting)

    def connected(self) -> None:
        """Record a new connection to the control plane.

        The next message begins with the oldest unconfirmed value, because a confirmation may be lost with the old
        connection.
        """
        self._sent_at = None

    def due(self, now: float) -> MetricBatch | None:
        """Return the message with logged values that the agent sends to the control plane now.

        Args:
            now: monotonic seconds.

        Returns:
            The oldest logged steps in the queue that are of one run and have consecutive numbers. None if the queue is
            empty, or for `AGAIN_SECONDS` after a message that is not confirmed yet.
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
        """Remove the logged values that the control plane has confirmed as stored.

        Args:
            next_number: the first number that is not stored.
        """
        while self._waiting and self._waiting[0][0] < next_number:
            self._waiting.popleft()
            self._sent_at = None
