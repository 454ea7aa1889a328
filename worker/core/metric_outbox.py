"""Queue of the values that rank 0 logs. The agent sends them repeatedly until the control plane confirms them.

Invariant: the queue has at most `MAX_WAITING` logged steps and `MAX_WAITING_BYTES` bytes, and at most one message of
runs that have left this node. Every logged step has a number that is used only once. A dropped step or value leaves a
gap in the numbers, which the receiver counts.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from msgspec import structs

from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import RunId

MAX_WAITING = 20_000
"""Maximum number of logged steps in the queue. Beyond this limit, the oldest steps are dropped."""
MAX_SENT = 1_000
MAX_VALUES = 256
"""Maximum number of values of one logged step. A job has at most 256 metrics (`control_plane.db.metrics`)."""
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Maximum memory of the queue, in bytes. `MAX_WAITING` steps of 20 values with short names fit."""
MAX_SENT_BYTES = 1024 * 1024
"""Maximum memory of one message, in bytes. Its first step may exceed the limit."""
POINT_BYTES = 256
VALUE_BYTES = 64
"""Memory of a value besides its name: a float, and an entry of a dictionary."""
AGAIN_SECONDS = 5.0


MAX_NUMBER = 1 << 52
"""Highest number to which a rank may advance the outbox by dropped values. No honest rank reaches it."""

_Step: TypeAlias = tuple[int, RunId, MetricPoint]


class MetricOutbox:
    """Values of rank 0 that the control plane has not confirmed yet. An agent has one outbox for its whole lifetime."""

    def __init__(self) -> None:
        self._waiting: deque[_Step] = deque()
        self._waiting_bytes = 0
        self._next_number = 0
        self.dropped_count = 0
        """Number of dropped steps, plus the number of values dropped from other steps."""
        self._sent_at: float | None = None

    def add(self, run: RunId, points: Sequence[MetricPoint], dropped_count: int = 0) -> None:
        """Queue values in the order of logging, after `dropped_count` steps that the rank itself has lost."""
        dropped_count += sum(max(0, len(point.values) - MAX_VALUES) for point in points)
        self._next_number = min(self._next_number + dropped_count, MAX_NUMBER)
        self.dropped_count += dropped_count
        for point in points:
            short = _first_values(point)
            self._waiting.append((self._next_number, run, short))
            self._waiting_bytes += _memory_bytes(short)
            self._next_number += 1
        while len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self._remove_oldest()
            self.dropped_count += 1

    def _remove_oldest(self) -> None:
        _, _, point = self._waiting.popleft()
        self._waiting_bytes -= _memory_bytes(point)

    def leave_earlier(self, run: RunId | None) -> None:
        """Drop values of runs before `run` except the newest message. `run` is None if this node works for no run."""
        earlier = list(itertools.takewhile(lambda each: each[1] != run, self._waiting))
        for _ in range(len(earlier) - len(_one_message(reversed(earlier)))):
            self._remove_oldest()
            self.dropped_count += 1
            self._sent_at = None

    def __len__(self) -> int:
        return len(self._waiting)

    def connected(self) -> None:
        """Record a new connection: the next message begins with the oldest unconfirmed value."""
        self._sent_at = None

    def due(self, now: float) -> MetricBatch | None:
        """Return the message to send at `now`: the oldest logged steps of one run with consecutive numbers.

        None if the queue is empty, or for `AGAIN_SECONDS` after a message that is not confirmed yet.
        """
        if not self._waiting or (self._sent_at is not None and now - self._sent_at < AGAIN_SECONDS):
            return None
        self._sent_at = now
        sent = _one_message(self._waiting)
        first, run, _ = sent[0]
        return MetricBatch(run=run, first_number=first, points=tuple(point for _, _, point in sent))

    def confirm(self, next_number: int) -> None:
        """Remove confirmed values. `next_number` is the first number that is not stored."""
        while self._waiting and self._waiting[0][0] < next_number:
            self._remove_oldest()
            self._sent_at = None


def _one_message(steps: Iterable[_Step]) -> list[_Step]:
    """Return the first steps that fit one message: of one run, with consecutive numbers in either direction."""
    found: list[_Step] = []
    found_bytes = 0
    for each in steps:
        found_bytes += _memory_bytes(each[2])
        if found and (
            len(found) == MAX_SENT
            or found_bytes > MAX_SENT_BYTES
            or each[1] != found[0][1]
            or abs(each[0] - found[-1][0]) != 1
        ):
            break
        found.append(each)
    return found


def _first_values(point: MetricPoint) -> MetricPoint:
    if len(point.values) <= MAX_VALUES:
        return point
    return structs.replace(point, values=dict(itertools.islice(point.values.items(), MAX_VALUES)))


def _memory_bytes(point: MetricPoint) -> int:
    return POINT_BYTES + sum(map(sys.getsizeof, point.values)) + VALUE_BYTES * len(point.values)
