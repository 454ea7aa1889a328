"""Values of a metric's points by node or by rank, for charts with one line per node or rank. No I/O.

    encoded, little-endian    version uint8, key count uint16, bytes of all keys uint32, CRC-32 of the points uint32
                              keys as UTF-8, joined by newlines
                              values float32[point count, key count]; NaN: the point has no value for the key

Invariant: a breakdown has at most `MAX_SERIES` keys, so a chunk of n points has at most n × 256 bytes of values.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.protocol.agent_messages import MAX_SERIES

MIN_SERIES = 2
"""A single node or rank needs no breakdown: its value equals that of the point."""
_VERSION = 1
_HEAD = struct.Struct("<BHII")
_VALUE_BYTES = 4
_MAX_VALUE = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The values of one point by node or by rank."""

    keys: tuple[str, ...]
    packed: bytes
    """float32[len(keys)], little-endian. NaN: the point has no value for the key."""

    @property
    def values(self) -> dict[str, float]:
        """The finite values by key, in the order of the keys."""
        row = struct.unpack(f"<{len(self.keys)}f", self.packed)
        return {key: value for key, value in zip(self.keys, row, strict=True) if math.isfinite(value)}


def broken_down(values: Mapping[str, float]) -> Breakdown | None:
    """Return the breakdown of the values that fit a float32. None unless it has `MIN_SERIES` to `MAX_SERIES` values."""
    stored = {key: value for key, value in values.items() if abs(value) <= _MAX_VALUE}
    return _packed(stored) if MIN_SERIES <= len(stored) <= MAX_SERIES else None


def averaged(breakdowns: Iterable[tuple[Breakdown | None, int]]) -> Breakdown | None:
    """Return the weighted mean of each node or rank, or None if no point (oldest first) has a breakdown."""
    rows = [(each.values, weight) for each, weight in breakdowns if each is not None]
    keys = newest_keys(row for row, _ in rows)
    means: dict[str, float] = {}
    for key in keys:
        found = [(row[key], weight) for row, weight in rows if key in row]
        total = sum(weight for _, weight in found)
        means[key] = math.fsum(value * (weight / total) for value, weight in found)
    return _packed(means) if means else None


def encoded(breakdowns: Sequence[Breakdown | None], points: bytes) -> bytes | None:
    """Encode one breakdown per point of a stored series, oldest first, with the CRC-32 of the packed `points`."""
    rows = [each.values if each is not None else {} for each in breakdowns]
    keys = sorted(newest_keys(rows))
    if not keys:
        return None
    text = "\n".join(keys).encode()
    values = (row.get(key, math.nan) for row in rows for key in keys)
    return (
        _HEAD.pack(_VERSION, len(keys), len(text), zlib.crc32(points))
        + text
        + struct.pack(f"<{len(rows) * len(keys)}f", *values)
    )


def decoded(data: bytes | None, points: bytes, count: int) -> tuple[Breakdown | None, ...]:
    """Decode the breakdowns of `count` packed points. Bytes of an unknown version count as None."""
    nothing: tuple[None, ...] = (None,) * count
    if data is None or len(data) < _HEAD.size:
        return nothing
    version, key_count, text_bytes, checksum = _HEAD.unpack_from(data)
    row_bytes, start = key_count * _VALUE_BYTES, _HEAD.size + text_bytes
    # A server of a version without breakdowns changes the points alone, so the breakdowns may belong to other points.
    if version != _VERSION or checksum != zlib.crc32(points) or len(data) != start + count * row_bytes:
        return nothing
    keys = tuple(data[_HEAD.size : start].decode(errors="replace").split("\n"))
    if len(keys) != key_count:
        return nothing
    missing = struct.pack("<f", math.nan) * key_count
    rows = (data[start + index * row_bytes : start + (index + 1) * row_bytes] for index in range(count))
    return tuple(Breakdown(keys, row) if row != missing else None for row in rows)


def newest_keys(rows: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the keys of the rows (oldest first), or `MAX_SERIES` keys of the newest rows if there are more."""
    newest_first = dict.fromkeys(key for row in reversed(list(rows)) for key in row)
    return tuple(newest_first)[:MAX_SERIES]


def _packed(values: Mapping[str, float]) -> Breakdown:
    keys = tuple(sorted(values))
    return Breakdown(keys, struct.pack(f"<{len(keys)}f", *(values[key] for key in keys)))
