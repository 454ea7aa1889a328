"""Finds how many of a metric's first points are unchanged since an earlier API response, so that they need not be sent.

    digests     one per block of `BLOCK_POINTS` points, each covers all points up to the end of its block,
                then one that covers all points

Invariant: points before `unchanged_count` are equal in both responses, except for rounding errors of means.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from control_plane.core.metrics import Point

BLOCK_POINTS: Final = 4
_DIGEST_BYTES: Final = 8
_ROUNDED_BYTES: Final = 2
"""Bytes of a mean's mantissa that digests ignore, because downsampling changes means by rounding errors."""
_NUMBERS: Final = struct.Struct("<3q4d")
_MEAN: Final = struct.Struct("<d")


def digests(points: Sequence[Point]) -> bytes:
    """Return the digests of a metric's points, sorted by step, joined to one byte string."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    found = bytearray()
    for start in range(0, len(points), BLOCK_POINTS):
        block = points[start : start + BLOCK_POINTS]
        digest.update(b"".join(map(_packed, block)))
        if len(block) == BLOCK_POINTS:
            found += digest.digest()
    return bytes(found) + digest.digest()


def unchanged_count(before: bytes, now: bytes) -> int:
    """Return how many points at the start are equal in two differing responses, rounded down to whole blocks."""
    # A digest covers all points before it, so the last digests of different points differ.
    starts = range(0, min(len(before), len(now)), _DIGEST_BYTES)
    equal = takewhile(lambda start: before[start : start + _DIGEST_BYTES] == now[start : start + _DIGEST_BYTES], starts)
    return sum(1 for _ in equal) * BLOCK_POINTS


def _packed(point: Point) -> bytes:
    numbers = _NUMBERS.pack(
        point.step, point.last_step, point.count, point.at, point.minimum, point.maximum, point.last
    )
    nodes = f"{point.least_on} {point.most_on};".encode()
    return numbers + _MEAN.pack(point.mean)[_ROUNDED_BYTES:] + nodes
