"""Computes each rank's equal share of the rest of an epoch. Pure.

The ranks take blocks of neighbouring samples in turn. A *window* is one block for each rank:

    position   begin                                                     samples
    order        │ block │ block │ block │ block │ block │ block │ blo│
    ranks        │   0       1       2   │   0       1       2   │   0       1       2   │
                 └──────── window ───────┴──────── window ───────┴─── the last window ───┘

If the last window is incomplete, it is dropped, or it is completed with the first samples of the epoch.

Invariant: all ranks receive equally many blocks, whatever the position at which they begin. Ranks that read in step are
therefore always at one common position, at which any number of ranks can continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def window_count(left: int, window: int, *, drop_last: bool) -> int:
    """Return the number of windows in `left` units that no rank has received; `left` may be negative."""
    left = max(0, left)
    return left // window if drop_last else -(-left // window)


@dataclass(frozen=True, slots=True)
class EpochShares:
    """The rule by which ranks share the samples of an epoch."""

    samples: int
    replicas: int
    block: int
    drop_last: bool
    """Whether ranks drop an incomplete window instead of completing it."""

    def of(self, rank: int, begin: int) -> Iterator[int]:
        """Yield the samples of one rank from a position on, as indices into the epoch's order."""
        first = begin + (rank - begin // self.block) % self.replicas * self.block
        window = self.replicas * self.block
        count = window_count(self.samples - begin, window, drop_last=self.drop_last)
        for start in range(first, first + count * window, window):
            yield from (position % self.samples for position in range(start, start + self.block))
