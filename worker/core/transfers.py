"""Selects which chunks of a shard to transfer, and over how many streams (TCP connections in parallel).

Invariant: a receiver never requests a chunk that another of its slots of the same shard contains at the same index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.slot import DIGEST_BYTES

Ranges = tuple[tuple[int, int], ...]
"""Ranges of consecutive chunks as (first, count), in ascending order. At least one chunk separates two ranges."""
WORTHWHILE = 1.2

# The fastest transfer counts, because training may have slowed the others.
TRIES = 3
"""Number of transfers with the same number of streams before their rate is compared."""
# One flow on AWS transfers these bytes in 0.1 s. Opening another stream takes a hundredth of this time.
STREAM_BYTES = 64 * 1024 * 1024


def chunk_digest(chunk_digests: bytes, index: int) -> bytes:
    """Return the digest of one chunk from a shard's concatenated chunk digests."""
    return chunk_digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def found_elsewhere(chunk_digests: bytes, wanted: Iterable[int], others: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield (chunk index, index into `others`) of wanted chunks that other sealed slots contain unchanged."""
    for index in wanted:
        digest = chunk_digest(chunk_digests, index)
        for number, other in enumerate(others):
            if chunk_digest(other, index) == digest:
                yield index, number
                break


def ranges(chunks: Collection[int]) -> Ranges:
    """Combine consecutive chunk indices into ranges of the form (first, count)."""
    found: list[tuple[int, int]] = []
    for index in sorted(chunks):
        if found and index == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return tuple(found)


def are_within(wanted: Ranges, count: int) -> bool:
    """Return whether all ranges are ascending, disjoint, not empty and within a payload of `count` chunks."""
    position = 0
    for first, length in wanted:
        if first < position or length < 1 or first + length > count:
            return False
        position = first + length
    return True


def fetch_streams(payload_bytes: int, limit: int) -> int:
    """Return the number of streams with which a node fetches a shard: one per `STREAM_BYTES`, at most `limit`."""
    return min(limit, 1 + payload_bytes // STREAM_BYTES)


@dataclass(frozen=True, slots=True)
class StreamCount:
    """Finds by measurement the number of parallel streams with the highest rate."""

    limit: int
    # A single TCP flow is slower than many networks (AWS: 5 Gbit/s outside a cluster placement group, 10 within).
    count: int = 1
    rate: float = 0.0
    tries: int = 0
    best_count: int = 1
    best_rate: float = 0.0
    is_settled: bool = False

    def measured(self, bytes_per_second: float) -> StreamCount:
        """Record the rate of a finished transfer over all its streams. The transfer was large enough to measure."""
        if self.is_settled:
            return self
        tried = replace(self, rate=max(self.rate, bytes_per_second), tries=self.tries + 1)
        if tried.tries < TRIES:
            return tried
        if tried.rate < WORTHWHILE * self.best_rate:
            return replace(tried, count=self.best_count, is_settled=True)
        more = min(2 * self.count, self.limit)
        return StreamCount(
            self.limit, count=more, best_count=self.count, best_rate=tried.rate, is_settled=more == self.count
        )
