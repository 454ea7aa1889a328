"""The newest lines of a node, as its peers keep them: rows of a log chunk with consecutive numbers, bounded in bytes.

Pure.

Invariant: a tail has no holes. Lines that do not follow on replace all that is there; the bound takes the oldest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

TAIL_BYTES: Final = 256 * 1024
"""Of a rank's newest lines, encoded, that its peers keep."""
MESSAGE_BYTES: Final = 256 * 1024
"""Of lines in one message to a peer, and one line more."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Consecutive lines."""

    first: int = 0
    """Number of the first."""
    rows: tuple[bytes, ...] = ()
    """Encoded, each with its line feed."""
    size: int = 0
    """Bytes of them."""

    @classmethod
    def of(cls, first: int, rows: Sequence[bytes]) -> Tail:
        """Return the tail of some lines."""
        return cls(first, tuple(rows), sum(map(len, rows)))

    @property
    def end(self) -> int:
        """Return the number of the line after the last."""
        return self.first + len(self.rows)

    def extended(self, first: int, rows: Sequence[bytes], *, limit_bytes: int) -> Tail:
        """Return the tail with more lines.

        Args:
            first: number of the first of them. Those that the tail has are skipped.
            rows: encoded, each with its line feed.
            limit_bytes: the newest lines that fit are kept. The oldest are dropped once the tail has twice as much.

        Returns:
            The tail, this very one where nothing is new.
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
        """Return the lines from a number on."""
        skipped = min(max(0, number - self.first), len(self.rows))
        return Tail.of(self.first + skipped, self.rows[skipped:]) if skipped else self

    def newest(self, limit_bytes: int) -> Tail:
        """Return the newest lines that fit; the last one always does."""
        size, count = 0, 0
        for row in reversed(self.rows):
            size += len(row)
            if count and size > limit_bytes:
                break
            count += 1
        return self.since(self.end - count)

    def batches(self) -> Iterator[Tail]:
        """Yield the lines in order, in parts that fit a message."""
        begin = size = 0
        for index, row in enumerate(self.rows):
            size += len(row)
            if size >= MESSAGE_BYTES:
                yield Tail.of(self.first + begin, self.rows[begin : index + 1])
                begin, size = index + 1, 0
        if begin < len(self.rows):
            yield Tail.of(self.first + begin, self.rows[begin:])
