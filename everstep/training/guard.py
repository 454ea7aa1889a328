"""Implements the guard, which delays an optimizer step until the copy of the last snapshot has ended.

Before its next change of the state, the training thread calls `Guard.reach`, which waits for the copy. *Deferred*
tensors are tensors that the copier copies in the background after the boundary. The session assumes that only optimizer
steps change them. For every snapshot, the rank checks this assumption by the tensors' versions and addresses. The rank
abandons the snapshot if a tensor changed during the copy. The check runs at the first pause of the training thread
after the copy (`everstep.training.pauses`), at the latest in `reach`.

Some snapshots are audited: they are copied completely at the boundary, and `reach` compares the copy with the live
tensors byte by byte. If a tensor changed outside an optimizer step, the guard warns once. From then on, snapshots copy
this tensor at the boundary.

Invariant: at most one snapshot is being copied at a time. When `reach` has returned, no copy reads the deferred
tensors.
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
    """A snapshot that is being copied, or whose copy the guard has not checked yet."""

    sources: Sources
    """Tensors that must not change before the copy has ended."""
    moved: Callable[[], Sequence[str]]
    """Function that returns the names of tensors whose version or address changed since the step ended.

    The guard calls it after the copy. The function misses changes that torch does not count.
    """
    copies: Sequence[torch.Tensor] | None
    """Copies of the tensors in the slot, for the comparison of an audited snapshot; None without an audit."""
    ticket: CopyTicket
    settle: Callable[[Sequence[str], BaseException | None], None]
    """Function that the guard calls once, with the names of tensors that changed during the copy.

    The second argument is the error that ended the check; None if there was no error.
    """
    blocked_seconds: float
    """Seconds for which the start of the snapshot has already blocked the training thread."""


class Guard:
    """Makes the training thread wait until the copy of a snapshot has ended.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._flight: Flight | None = None
        self._flight_count = 0
        self.blocked_seconds: deque[float] = deque(maxlen=KEPT_MEASUREMENTS)
        """Seconds for which each recent snapshot blocked training.

        A value is the sum of two times: right after the step, and before the next change of the state.
        """
        self.total_blocked_seconds = 0.0
        """Seconds for which all snapshots and uploads of this process together blocked training."""
        self.unstable: set[str] = set()
        """Names of tensors that changed outside an optimizer step in this process.

        Snapshots copy them at the boundary.
        """

    def add_wait(self, seconds: float) -> None:
        """Count a wait of the training thread for an upload as time for which saving blocked training."""
        self.total_blocked_seconds += seconds

    def is_next_audited(self) -> bool:
        """Return whether the next snapshot is audited, that is, compared byte by byte."""
        return self._flight_count < AUDITED_AT_START or (self._flight_count + 1) % AUDITED_EVERY == 0

    def arm(self, flight: Flight) -> None:
        """Register a snapshot whose copy has started. The next call of `reach` waits for this copy."""
        assert self._flight is None, "a snapshot is already in progress"
        self._flight = flight
        self._flight_count += 1

    def reach(self) -> None:
        """Wait until the running copy has ended, and check it.

        The training thread calls this before it changes the state. Without a running copy, the call returns at once.
        """
        flight = self._flight
        if flight is None:
            return
        begun = self._clock()
        flight.ticket.wait()
        if self._flight is not flight:
            return  # During this wait, a signal handler called `reach`, which has already checked the copy.
        self._flight = (
            # Forget the snapshot only after the wait. If an exception interrupts the wait and the script catches it,
            # the next step must wait again.
            None
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
            # Report the outcome even after a KeyboardInterrupt. Otherwise the agent would wait for this snapshot
            # forever.
            flight.settle((), error)
            if isinstance(error, Exception):
                return  # A failed check, for example for lack of memory, costs only this snapshot.
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
                f"{shown} changed outside an optimizer step. Snapshots now copy it at the boundary, which blocks "
                "training slightly longer"
            )
            logger.warning(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
