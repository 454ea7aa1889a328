"""What travels of a shard, and over how many streams.

Invariant: a chunk that the receiver has already, in whatever slot of the same shard, is not asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.slot import DIGEST_BYTES

Ranges = tuple[tuple[int, int], ...]
"""(first, count) of chunks, ascending, apart from each other."""
WORTHWHILE = 1.2
"""More streams stay when they carry at least so many times what fewer did; below it they only cost."""

TRIES = 3
"""Transfers that are made with a number of streams before it is judged, by the best of them: the others may have met with training."""
STREAM_BYTES = 64 * 1024 * 1024
"""What a flow of AWS carries in 0.1 s, a hundred times what another one costs to open."""


def chunk_digest(chunk_digests: bytes, index: int) -> bytes:
    """Return the digest of one chunk."""
    return chunk_digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def found_elsewhere(chunk_digests: bytes, wanted: Iterable[int], others: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield which wanted chunks lie in another slot of the shard at the same place: what did not change since.

    Args:
        chunk_digests: of the announced shard.
        wanted: chunks that are missing.
        others: chunk digests of the slots that are sealed.

    Yields:
        (chunk, index into `others`).
    """
    for index in wanted:
        digest = chunk_digest(chunk_digests, index)
        for number, other in enumerate(others):
            if chunk_digest(other, index) == digest:
                yield index, number
                break


def ranges(chunks: Collection[int]) -> Ranges:
    """Return chunks as ranges."""
    found: list[tuple[int, int]] = []
    for index in sorted(chunks):
        if found and index == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return tuple(found)


def are_within(wanted: Ranges, count: int) -> bool:
    """Say whether these are ranges of a payload of `count` chunks: ascending, apart, none empty."""
    position = 0
    for first, length in wanted:
        if first < position or length < 1 or first + length > count:
            return False
        position = first + length
    return True


def fetch_streams(payload_bytes: int, limit: int) -> int:
    """Return over how many streams a shard is fetched that nobody has measured the way for: its bytes are worth a stream each `STREAM_BYTES`."""
    return min(limit, 1 + payload_bytes // STREAM_BYTES)


@dataclass(frozen=True, slots=True)
class StreamCount:
    """How many streams a session has, found by measuring: one flow of TCP is slower than the network on many (AWS: 5 Gbit/s outside a cluster
    placement group, 10 within), and what a host's cards and cores can carry together is not known beforehand.

    It doubles while doubling is worthwhile, and stays at what was best.
    """

    limit: int
    count: int = 1
    rate: float = 0.0
    """Bytes per second, the most with `count` streams so far."""
    tries: int = 0
    """Transfers that were made with them."""
    best_count: int = 1
    """The most streams that were worth it so far."""
    best_rate: float = 0.0
    """Bytes per second with these."""
    is_settled: bool = False

    def measured(self, bytes_per_second: float) -> StreamCount:
        """Take what the present count carried in one transfer large enough to tell.

        Args:
            bytes_per_second: over all streams.

        Returns:
            With the count to go on with.
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
