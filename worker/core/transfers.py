"""Selects which chunks of a shard to transfer, and over how many streams.

Streams are TCP connections that transfer chunks of one shard in parallel. Invariant: a receiver never requests a chunk
if another of its slots of the same shard contains a chunk with the same index and digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.slot import DIGEST_BYTES

Ranges = tuple[tuple[int, int], ...]
"""Ranges of consecutive chunks as (first, count), in ascending order. At least one chunk separates two ranges."""
WORTHWHILE = 1.2
"""Factor by which doubling the streams must raise the rate. Otherwise the additional streams are not worthwhile."""

TRIES = 3
"""Number of transfers with the same number of streams, before their rate is compared with another number of streams.

The fastest of these transfers counts, because training may have slowed the others.
"""
STREAM_BYTES = 64 * 1024 * 1024
"""Bytes per stream of a fetch: a node fetches a larger shard over several streams.

One flow on AWS transfers these bytes in 0.1 s. Opening another stream takes a hundredth of this time.
"""


def chunk_digest(chunk_digests: bytes, index: int) -> bytes:
    """Return the digest of one chunk from a shard's concatenated chunk digests."""
    return chunk_digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def found_elsewhere(chunk_digests: bytes, wanted: Iterable[int], others: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the wanted chunks that another slot of the shard contains at the same index, unchanged.

    Args:
        chunk_digests: concatenated chunk digests of the shard that the sender announced.
        wanted: indices of the missing chunks.
        others: chunk digests of the shard's other sealed slots.

    Yields:
        (chunk index, index into `others`).
    """
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
    """Return whether all ranges of `wanted` are valid for a payload of `count` chunks.

    Valid ranges are ascending, disjoint and not empty.
    """
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
    """Finds by measurement the number of parallel TCP streams with the highest rate.

    A single TCP flow is slower than many networks (AWS: 5 Gbit/s outside a cluster placement group, 10 Gbit/s within).
    The number of streams doubles as long as this raises the rate by `WORTHWHILE`, then stays at the best value.
    """

    limit: int
    count: int = 1
    rate: float = 0.0
    """Highest measured rate of a transfer over `count` TCP streams, in bytes per second."""
    tries: int = 0
    """Number of transfers that were measured with `count` streams."""
    best_count: int = 1
    """Highest number of streams that raised the rate by `WORTHWHILE`."""
    best_rate: float = 0.0
    """Highest measured rate of a transfer over `best_count` streams, in bytes per second."""
    is_settled: bool = False

    def measured(self, bytes_per_second: float) -> StreamCount:
        """Record the rate of a finished transfer, to find the best number of parallel streams.

        Args:
            bytes_per_second: rate of the transfer over all its streams. The transfer was large enough to measure.

        Returns:
            The state with the number of streams for the next transfer.
        """
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
