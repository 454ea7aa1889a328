"""The values of a ledger's counters at each full hour, from which reports compute the figures of a time range.

A ledger is a set of counters of time: the time of a job (`accounting`), or the time of a fleet's idle nodes
(`idle_nodes`). Updates of a ledger do not fall on full hours, so its values at an hour are interpolated between two
updates.

Invariant: the counters of an interpolated ledger add up to the interpolated sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOUR: Final = 3_600_000_000
"""Microseconds per hour."""
MOST_HOURS: Final = 24 * 31
"""Limit of the full hours that `full_hours` returns, in case no control plane ran for a long time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The counters of a ledger (time of a job, or idle time of a fleet's nodes) at one point in time."""

    at: int
    """Unix time in microseconds up to which the counters include all time."""
    spent: Mapping[str, int]
    """Microseconds by category of time (a job's bucket, or a node's state). A missing category means 0."""
    node_microseconds: int = 0
    """Working time of a job's nodes, summed over nodes. 0 in the ledger of a fleet."""


def interpolated(before: Ledger, after: Ledger, moment: int) -> Ledger:
    """Return the time counters of a job or fleet (its ledger) at a moment between two known states.

    The result assumes that the counters grew evenly between the two states.

    Args:
        before: a state of the ledger whose counters include all time until the moment, or until an earlier time.
        after: a later state of the same ledger, until the moment or a later time.
        moment: Unix time in microseconds.

    Returns:
        The ledger at the moment. Each counter is rounded by less than one microsecond.
    """
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
    """Return the time counters of a ledger at each full hour after the update `before`, up to the update `after`.

    The job loop and the fleet loop call this function after each update of a ledger, and store the result. Most results
    are empty, because no full hour lies between the updates.

    Args:
        before: the ledger before the update, as the database contains it.
        after: the same ledger after the update. Its `at` is not before that of `before`.

    Returns:
        At most the newest `MOST_HOURS` hours, oldest first. Each `at` is a multiple of `HOUR`.
    """
    last = after.at // HOUR
    first = max(before.at // HOUR + 1, last - MOST_HOURS + 1)
    return tuple(interpolated(before, after, hour * HOUR) for hour in range(first, last + 1))
