"""The newest log lines of a node, which other nodes keep in memory in case the node is lost.

Invariant: the line numbers of a tail have no gaps. New lines that do not follow the last line replace the whole tail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

TAIL_BYTES: Final = 256 * 1024
"""Maximum size of a tail per rank, in encoded bytes."""
MESSAGE_BYTES: Final = 256 * 1024
"""Size in bytes at which a message with log lines is complete. Its last line may exceed this size."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The newest log lines of a node's ranks, with consecutive numbers."""

    first: int = 0
    rows: tuple[bytes, ...] = ()
    """Encoded lines, each with its line feed."""
    size: int = 0

    @classmethod
    def of(cls, first: int, rows: Sequence[bytes]) -> Tail:
        """Return the tail with the lines `rows`, of which the first has number `first`."""
        return cls(first, tuple(rows), sum(map(len, rows)))

    @property
    def end(self) -> int:
        """Number of the last line plus 1."""
        return self.first + len(self.rows)

    def extended(self, first: int, rows: Sequence[bytes], *, limit_bytes: int) -> Tail:
        """Return this tail with newer lines appended, or this object itself if no line is new.

        `first` is the number of the first line; known lines are skipped. The newest `limit_bytes` always remain; the
        tail is cut when it exceeds twice this size.
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
        """Return this tail without the lines before line `number`."""
        skipped = min(max(0, number - self.first), len(self.rows))
        return Tail.of(self.first + skipped, self.rows[skipped:]) if skipped else self

    def newest(self, limit_bytes: int) -> Tail:
        """Return the newest lines within `limit_bytes`, but at least the last line."""
        size, count = 0, 0
        for row in reversed(self.rows):
            size += len(row)
            if count and size > limit_bytes:
                break
            count += 1
        return self.since(self.end - count)

    def batches(self) -> Iterator[Tail]:
        """Yield the lines in order, in batches of about `MESSAGE_BYTES` for one message each."""
        begin = size = 0
        for index, row in enumerate(self.rows):
            size += len(row)
            if size >= MESSAGE_BYTES:
                yield Tail.of(self.first + begin, self.rows[begin : index + 1])
                begin, size = index + 1, 0
        if begin < len(self.rows):
            yield Tail.of(self.first + begin, self.rows[begin:])
