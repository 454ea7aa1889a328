"""Implements the guard, which delays an optimizer step until the copy of the last snapshot has ended.

*Deferred* tensors are copied in the background, because only optimizer steps should change them. For every snapshot,
the rank checks their versions and addresses at the first pause after the copy (`everstep.training.pauses`), at the
latest in `reach`, and abandons the snapshot if one changed. Some snapshots are audited: they are copied at the
boundary, and `reach` compares the bytes. After a change outside an optimizer step, snapshots copy the tensor at the
boundary.

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
    """Returns the tensors whose version or address changed since the step ended. Torch does not count all changes."""
    copies: Sequence[torch.Tensor] | None
    """Copies in the slot, for the comparison of an audited snapshot; None without an audit."""
    ticket: CopyTicket
    settle: Callable[[Sequence[str], BaseException | None], None]
    """Called once, with the tensors that changed during the copy, and the error that ended the check, if any."""
    blocked_seconds: float
    """Time for which the start of the snapshot has blocked the training thread."""


class Guard:
    """Makes the training thread wait until the copy of a snapshot has ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._flight: Flight | None = None
        self._flight_count = 0
        self.blocked_seconds: deque[float] = deque(maxlen=KEPT_MEASUREMENTS)
        """Sum of each recent snapshot's waits, after the step and before the next change of the state."""
        self.total_blocked_seconds = 0.0
        """Sum over all snapshots and uploads of this process."""
        self.unstable: set[str] = set()
        """Tensors that changed outside an optimizer step, so that snapshots copy them at the boundary."""

    def add_wait(self, seconds: float) -> None:
        """Count a wait of the training thread for an upload as blocked time."""
        self.total_blocked_seconds += seconds

    def is_next_audited(self) -> bool:
        """Return whether the next snapshot is audited."""
        return self._flight_count < AUDITED_AT_START or (self._flight_count + 1) % AUDITED_EVERY == 0

    def arm(self, flight: Flight) -> None:
        """Register a snapshot whose copy has started, for the next `reach`."""
        assert self._flight is None, "a snapshot is already in progress"
        self._flight = flight
        self._flight_count += 1

    def reach(self) -> None:
        """Wait for the running copy, and check it. The training thread calls this before it changes the state."""
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
