"""Reads metrics at a coarse resolution, with a cache of the joined points of each row.

Of the hundreds of rows of a long run, only the newest change between polls, and decoding and joining take most of the
time. The key contains the packed bytes, so a changed row has another key. Invariant: the points equal those of
`metrics.read` and `resampled`, except for rounding errors of means.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy.orm import Session

from control_plane.core.metrics import Point, folded, span_of
from control_plane.db.metrics import chunk_query, unpack

MAX_POINTS: Final = 100_000
"""Limit of cached points: about 35 MB, measured with tracemalloc.

The cache drops the least recently used rows first.
"""
BREAKDOWN_WEIGHT: Final = 2
"""Memory of a point with values of 64 nodes, as a multiple of one without: 1.5 by tracemalloc."""
_STEP: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class _Chunk:
    packed: bytes
    width: int
    nodes: tuple[str, ...]
    breakdowns: bytes | None
    """Encoded values by node or rank. None if the caller does not read them."""

    @property
    def count(self) -> int:
        return len(self.packed) // (24 if self.width == 1 and not self.nodes else 72)

    @property
    def first_step(self) -> int:
        return int(_STEP.unpack_from(self.packed)[0])

    @property
    def last_step(self) -> int:
        """Last step of the last point."""
        columns = 1 if self.width == 1 and not self.nodes else 2
        return int(_STEP.unpack_from(self.packed, _STEP.size * (columns * self.count - 1))[0])


class MetricSamples:
    """Reads metrics of whole runs at a coarse resolution. Threads may share an instance."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._held: OrderedDict[tuple[_Chunk, int], tuple[Point, ...]] = OrderedDict()
        self._held_points = 0
        self._lock = threading.Lock()

    def read(
        self, session: Session, run_id: str, *, name: str | None, limit: int, has_breakdowns: bool = False
    ) -> Mapping[str, tuple[Point, ...]]:
        """Return a run's metrics by name, each summarized to at most `limit` points over all its steps.

        `name` None means all metrics. With `has_breakdowns`, the result omits points without values by node or rank.
        """
        found: defaultdict[str, list[_Chunk]] = defaultdict(list)
        for each, width, packed, nodes, breakdowns in session.execute(
            chunk_query(run_id, name, has_breakdowns=has_breakdowns)
        ):
            found[each].append(_Chunk(packed, width, tuple(nodes), breakdowns))
        return {each: self._sampled(chunks, limit) for each, chunks in sorted(found.items())}

    def _sampled(self, chunks: list[_Chunk], limit: int) -> tuple[Point, ...]:
        chunks.sort(key=lambda chunk: chunk.first_step)
        is_complete = sum(chunk.count for chunk in chunks) <= limit
        width = 1 if is_complete else span_of(chunks[0].first_step, chunks[-1].last_step, limit)
        points = tuple(point for chunk in chunks for point in self._joined(chunk, width))
        if is_complete:
            return points
        while len(joined := folded(points, width)) > limit:
            width *= 2
        return joined

    def _joined(self, chunk: _Chunk, width: int) -> tuple[Point, ...]:
        key = chunk, width
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        points = unpack(chunk.packed, chunk.width, chunk.nodes, chunk.breakdowns)
        if chunk.breakdowns is not None:
            points = tuple(point for point in points if point.breakdown is not None)
        if width > chunk.width:
            points = folded(points, width)
        with self._lock:
            if key not in self._held:
                self._held[key] = points
                self._held_points += _weight(chunk, points)
            while self._held_points > self._max_points and len(self._held) > 1:
                (released, _), their_points = self._held.popitem(last=False)
                self._held_points -= _weight(released, their_points)
        return points


def _weight(chunk: _Chunk, points: tuple[Point, ...]) -> int:
    """Return how many points without breakdowns take as much memory as these."""
    return len(points) * (1 if chunk.breakdowns is None else BREAKDOWN_WEIGHT)
