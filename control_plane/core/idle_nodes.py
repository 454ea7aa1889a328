"""The ledger of a fleet's idle nodes: the time in which instances worked for no job but cost money.

Invariant: a counter never decreases, and no period counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from control_plane.core import accounting
from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.core.states import NodeState

CHARGE_SECONDS: Final = 60.0
"""Longest time between two updates, unless a node changes its state or a new hour begins."""
_NOT_IDLE: Final = frozenset({NodeState.ASSIGNED, NodeState.GONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleNodes:
    """The idle time of a fleet's nodes, as the fleet's row stores it."""

    until: float | None = None
    """Unix seconds up to which idle time is counted, or None."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of nodes by `NodeState`, from `until` on."""
    microseconds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Idle time by `NodeState`, summed over nodes."""


def charge(idle: IdleNodes, states: Iterable[NodeState], now: float) -> IdleNodes:
    """Return a fleet's idle times until `now`, or `idle` unchanged if no update is due.

    The next call charges its time by the current `states`.
    """
    counts = {state.value: count for state, count in sorted(Counter(states).items()) if state not in _NOT_IDLE}
    if idle.until is None:
        return IdleNodes(until=now, counts=counts, microseconds=idle.microseconds)
    since, until = accounting.microseconds(idle.until), accounting.microseconds(now)
    is_due = until - since >= accounting.microseconds(CHARGE_SECONDS) or until // HOUR > since // HOUR
    if counts == idle.counts and not is_due:
        return idle
    # If the clock went back, the ledger adds no time.
    passed = max(0, until - since)
    names = sorted(idle.microseconds.keys() | idle.counts.keys())
    charged = {name: idle.microseconds.get(name, 0) + passed * idle.counts.get(name, 0) for name in names}
    return IdleNodes(until=max(now, idle.until), counts=counts, microseconds=charged)


def ledger(idle: IdleNodes) -> Ledger | None:
    """Convert the stored idle time to the form that `ledger_hours.full_hours` accepts. None if none is stored."""
    return None if idle.until is None else Ledger(at=accounting.microseconds(idle.until), spent=idle.microseconds)
