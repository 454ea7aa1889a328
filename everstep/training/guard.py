"""The guard: no optimizer step before the copy of the state it would change is done, and no snapshot of a tensor that changed meanwhile.

What the session takes for granted, "only an optimizer step changes these tensors", is a guess about the user's code.
The session checks it on every snapshot by version and address, at the first moment behind the copy at which the
training thread is inside no operation (`everstep.training.pauses`), here at the latest. Audited snapshots are copied
whole at the boundary, and compared byte by byte before the next step. A tensor that fails is reported once, and copied
at the boundary from then on.

Invariant: at most one snapshot is in flight, and `reach` returns only when nobody reads the deferred tensors any more.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everstep.training.copier import CopyTicket
from everstep.training.sources import Sources

AUDITED_AT_START = 3
AUDITED_EVERY = 1000
KEPT_MEASUREMENTS = 10_000

logger = logging.getLogger("everstep.training")


@dataclass(slots=True)
class Flight:
    """One snapshot between its boundary and the guard."""

    sources: Sources
    """What must not change before the copy has stopped."""
    moved: Callable[[], Sequence[str]]
    """Returns the names of those that torch knows to have changed since the boundary; asked when the copy has stopped."""
    copies: Sequence[torch.Tensor] | None
    """Audited: their places in the slot, to be compared byte by byte."""
    ticket: CopyTicket
    settle: Callable[[Sequence[str], BaseException | None], None]
    """Called once at the guard with the names of the tensors that changed too early, and with what broke the comparison off, if anything did."""
    blocked_seconds: float
    """At the boundary."""


class Guard:
    """Stands between a snapshot in flight and the next change of what it copies.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._flight: Flight | None = None
        self._flight_count = 0
        self.blocked_seconds: deque[float] = deque(maxlen=KEPT_MEASUREMENTS)
        """Of each snapshot: how long it held the training thread, its part at the boundary included."""
        self.total_blocked_seconds = 0.0
        """Of all snapshots together."""
        self.unstable: set[str] = set()
        """Names of tensors that were seen to change outside an optimizer step."""

    def is_next_audited(self) -> bool:
        """Say whether the snapshot to come is compared byte by byte."""
        return self._flight_count < AUDITED_AT_START or (self._flight_count + 1) % AUDITED_EVERY == 0

    def arm(self, flight: Flight) -> None:
        """Begin to guard a snapshot."""
        assert self._flight is None, "a snapshot is in flight already"
        self._flight = flight
        self._flight_count += 1

    def reach(self) -> None:
        """Wait for the copy in flight and check it.

        Called by the training thread, at the latest before the state changes; free when idle.
        """
        flight = self._flight
        if flight is None:
            return
        begun = self._clock()
        flight.ticket.wait()
        if self._flight is not flight:
            return  # a signal handler has been here meanwhile
        self._flight = (
            None  # not before: what breaks the wait off, a script may catch and go on, to a step that must wait, too
        )
        try:
            changed = list(flight.moved())
            if flight.copies is not None:
                flight.ticket.join()
                if flight.ticket.hides_sources:
                    flight.settle((), RuntimeError("it cannot be compared while the script captures a graph"))
                    return
                changed += [name for name in flight.sources.differing(flight.copies) if name not in changed]
        except BaseException as error:
            flight.settle((), error)  # or the agent would wait for this snapshot for ever
            if isinstance(error, Exception):
                return  # memory that the comparison needs, say: it costs the snapshot, and no step of training
            raise
        flight.settle(changed, None)
        blocked = flight.blocked_seconds + self._clock() - begun
        self.blocked_seconds.append(blocked)
        self.total_blocked_seconds += blocked
        self._report(changed)

    def _report(self, changed: Sequence[str]) -> None:
        new = [name for name in changed if name not in self.unstable]
        if new:
            self.unstable.update(new)
            shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            message = (
                f"{shown} changed outside an optimizer step; from now on copied at the boundary, which holds "
                "training a little longer"
            )
            logger.warning(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
