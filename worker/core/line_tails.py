"""Numbered log lines of a node, which other nodes keep in memory in case the node is lost. No I/O.

A *tail* is the newest part of the log lines that a node's ranks have printed, up to a limit in bytes.

Invariant: the line numbers of a tail have no gaps. New lines that do not follow the last line replace the whole tail.
When the tail exceeds its size limit, the oldest lines are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

TAIL_BYTES: Final = 256 * 1024
"""Maximum size, per rank, of the newest log lines that other nodes store for a node, in encoded bytes."""
MESSAGE_BYTES: Final = 256 * 1024
"""Size in bytes at which a message with log lines for another node is complete. Its last line may exceed this size."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The newest log lines of a node's ranks, with consecutive numbers."""

    first: int = 0
    """Number of the first log line in `rows`."""
    rows: tuple[bytes, ...] = ()
    """Encoded log lines with consecutive numbers, each with its line feed."""
    size: int = 0
    """Total bytes of `rows`."""

    @classmethod
    def of(cls, first: int, rows: Sequence[bytes]) -> Tail:
        """Return the tail with the log lines `rows`. `first` is the number of the first line."""
        return cls(first, tuple(rows), sum(map(len, rows)))

    @property
    def end(self) -> int:
        """Number of the last log line in the tail plus 1."""
        return self.first + len(self.rows)

    def extended(self, first: int, rows: Sequence[bytes], *, limit_bytes: int) -> Tail:
        """Return this part of a node's log lines with newer lines appended.

        Args:
            first: number of the first new line. Lines that the tail already has are skipped.
            rows: encoded lines, each with its line feed.
            limit_bytes: size of the newest lines that always remain. Older lines are dropped when the tail exceeds
                twice this size.

        Returns:
            The new tail, or this object itself if no line is new.
        """
        if first + len(rows) <= self.end:
            return self
        if first > self.end or first < self.first:
            longer = Tail.of(first, rows)
        else:
            added = rows[self.end - first :]
            longer = Tail(self.first, (*self.rows, *added), self.size + sum(map(len, added)))
        return longer.newest(limit_bytes) if longer.size > 2 * limit_bytes else longer

    def since(self, number: int) -> Tail:
        """Return this tail without the log lines before line `number`."""
        skipped = min(max(0, number - self.first), len(self.rows))
        return Tail.of(self.first + skipped, self.rows[skipped:]) if skipped else self

    def newest(self, limit_bytes: int) -> Tail:
        """Return the newest lines of the tail within `limit_bytes`, but at least the last line."""
        size, count = 0, 0
        for row in reversed(self.rows):
            size += len(row)
            if count and size > limit_bytes:
                break
            count += 1
        return self.since(self.end - count)

    def batches(self) -> Iterator[Tail]:
        """Yield the log lines in order, in batches of about `MESSAGE_BYTES` for one message each."""
        begin = size = 0
        for index, row in enumerate(self.rows):
            size += len(row)
            if size >= MESSAGE_BYTES:
                yield Tail.of(self.first + begin, self.rows[begin : index + 1])
                begin, size = index + 1, 0
        if begin < len(self.rows):
            yield Tail.of(self.first + begin, self.rows[begin:])
