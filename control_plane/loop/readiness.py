"""Tracks whether this server's loops work, so that a load balancer sends requests only to servers that do.

A finished sweep proves that the database answers, so GetReadiness reads nothing from it. Invariant: all methods run on
the server's event loop without blocking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

SHOWN_FLEETS = 3


@dataclass(slots=True)
class _Loop:
    swept_at: float | None = None
    """Monotonic seconds of the end of the last sweep. None before the first."""
    failure: str = ""
    """Error of the last sweep. Empty if the sweep succeeded."""


class Readiness:
    """The state of this server's loops. A server without loops is always ready."""

    def __init__(self) -> None:
        self._loops: dict[str, _Loop] = {}
        self._unsettled: tuple[str, ...] = ()
        self._patience_seconds = math.inf
        self._monotonic: Callable[[], float] = time.monotonic

    def expect(self, loops: Collection[str], patience_seconds: float, monotonic: Callable[[], float]) -> None:
        """Require sweeps of these loops. A loop is stuck after `patience_seconds` without a finished sweep."""
        self._loops = {name: _Loop() for name in loops}
        self._patience_seconds = patience_seconds
        self._monotonic = monotonic

    def swept(self, loop: str) -> None:
        """Record that a sweep of this loop succeeded."""
        self._loops[loop] = _Loop(self._monotonic())

    def failed(self, loop: str, error: Exception) -> None:
        """Record that a sweep of this loop failed, for example for lack of a database."""
        self._loops[loop].failure = type(error).__name__

    def settle(self, unsettled: Collection[str]) -> None:
        """Record the fleets whose lease no server holds, so that no server manages them."""
        self._unsettled = tuple(unsettled)

    def problems(self) -> tuple[str, ...]:
        """Return why this server should not receive requests, in sentences without a period. Empty if it is ready."""
        now, found = self._monotonic(), list[str]()
        for name, loop in self._loops.items():
            if loop.failure:
                found.append(f"the last sweep of the {name} loop failed with {loop.failure}")
            elif loop.swept_at is None:
                found.append(f"the {name} loop has not finished its first sweep")
            elif now - loop.swept_at > self._patience_seconds:
                found.append(f"the {name} loop has not finished a sweep for {now - loop.swept_at:.0f} s")
        if self._unsettled:
            names = ", ".join(self._unsettled[:SHOWN_FLEETS])
            more = len(self._unsettled) - SHOWN_FLEETS
            found.append(f"no server holds the lease of the fleets {names}{f' and {more} more' if more > 0 else ''}")
        return tuple(found)
