"""The values of a ledger's counters at each full hour, from which reports compute the figures of a time range.

Invariant: the counters of an interpolated ledger add up to the interpolated sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOUR: Final = 3_600_000_000
MOST_HOURS: Final = 24 * 31
"""Limit of `full_hours`, in case no control plane ran for a long time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The counters of time of a job (`accounting`) or of a fleet's idle nodes (`idle_nodes`) at one moment."""

    at: int
    """Unix time in microseconds up to which the counters include all time."""
    spent: Mapping[str, int]
    """Microseconds by a job's bucket, or a node's state. A missing category means 0."""
    node_microseconds: int = 0
    """Working time, summed over nodes. 0 in the ledger of a fleet."""


def interpolated(before: Ledger, after: Ledger, moment: int) -> Ledger:
    """Return the ledger at `moment` (Unix microseconds), as if its counters grew evenly between the two states."""
    passed, whole = moment - before.at, after.at - before.at
    if passed <= 0 or whole <= 0:
        return before
    changes = {
        name: after.spent.get(name, 0) - before.spent.get(name, 0)
        for name in sorted(before.spent.keys() | after.spent.keys())
    }
    shares = {name: change * passed // whole for name, change in changes.items()}
    missing = sum(changes.values()) * passed // whole - sum(shares.values())
    for name in sorted(changes, key=lambda name: changes[name] * passed % whole, reverse=True)[:missing]:
        shares[name] += 1
    nodes = (after.node_microseconds - before.node_microseconds) * passed // whole
    return Ledger(
        at=moment,
        spent={name: before.spent.get(name, 0) + share for name, share in shares.items()},
        node_microseconds=before.node_microseconds + nodes,
    )


def full_hours(before: Ledger, after: Ledger) -> tuple[Ledger, ...]:
    """Return the ledger at each full hour after `before`, up to `after`: at most `MOST_HOURS`, oldest first."""
    last = after.at // HOUR
    first = max(before.at // HOUR + 1, last - MOST_HOURS + 1)
    return tuple(interpolated(before, after, hour * HOUR) for hour in range(first, last + 1))
