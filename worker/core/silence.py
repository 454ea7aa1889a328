"""Measures for how long a holder is silent, without the time in which the owner could not receive messages.

    data is due and requested                ──▶ silent  ── progress, or nothing due or requested ──▶ not silent
    attempts fail, each after some progress  ──▶ failing ── an attempt succeeds, or nothing is due ──▶ not failing

At the holder deadline, the owner drops a silent or failing holder from the view. After a first drop for silence, the
holder returns as soon as it answers. After any other drop, it must stay out for a time that doubles with each drop.

Invariant: time in which the owner did not run or was busy never counts as a holder's silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LATE_RATIO = 2.0
"""A check is late if more than this number of periods has passed since the last check."""


@dataclass(frozen=True, slots=True)
class HolderSilence:
    """Measures how long one holder has been silent or failing, in seconds of any monotonic clock."""

    period_seconds: float
    checked_at: float = -math.inf
    owed_since: float | None = None
    """Start of the silence, or None. Time in which the owner was busy or did not run shifts it forward."""
    failing_since: float | None = None
    """Start of a series of failed attempts, each with some progress, or None. Shifted like `owed_since`."""
    has_progressed: bool = False
    has_failed: bool = False
    """True after one attempt failed with some progress. A second one begins a series."""
    returns_at: float = -math.inf
    """Earliest time at which a dropped holder may return to the view; -inf after a success."""
    apart_seconds: float = 0.0
    """Seconds for which the holder had to stay out after the last drop. The next drop at least doubles them."""

    def checked(self, now: float, *, is_owed: bool, is_asked: bool, is_occupied: bool) -> HolderSilence:
        """Return the state after the owner's next periodic check at `now`.

        `is_owed` is True if the holder lacks data that can be sent. `is_asked` is False while the owner delays this
        data, `is_occupied` True while it must finish other work first, such as a digest of its own slot.
        """
        elapsed = now - self.checked_at
        # After a late check, the owner itself did not run, and messages from this time are still unread.
        left_out = elapsed if is_occupied or elapsed > LATE_RATIO * self.period_seconds else 0.0
        owed = now if self.owed_since is None else self.owed_since + left_out
        failing = None if self.failing_since is None else min(now, self.failing_since + left_out)
        checked = replace(
            self, checked_at=now, owed_since=owed if is_owed and is_asked else None, failing_since=failing
        )
        return checked if is_owed else checked.succeeded()

    def progressed(self) -> HolderSilence:
        """Record that the holder has answered, or accepted data."""
        return (
            self
            if self.owed_since is None and self.has_progressed
            else replace(self, owed_since=None, has_progressed=True)
        )

    def failed(self, now: float) -> HolderSilence:
        """Record a failed attempt to send. The second one after some progress begins a series of failures."""
        # The time of an attempt without any progress already counts as silence.
        if self.failing_since is not None or not self.has_progressed:
            return self
        return replace(self, failing_since=now if self.has_failed else None, has_progressed=False, has_failed=True)

    def answered(self) -> HolderSilence:
        """Record that a holder outside the view answers again. Its failures before this answer no longer count."""
        return replace(self, failing_since=None, has_failed=False, owed_since=None)

    def succeeded(self) -> HolderSilence:
        """Record that the holder has sealed the sent step, or that it lacks no step."""
        return replace(self, failing_since=None, has_failed=False, returns_at=-math.inf, apart_seconds=0.0)

    def given_up(self) -> HolderSilence:
        """Record that the owner dropped the holder. A call while `may_return` is False changes nothing."""
        if not self.may_return:
            return self
        in_vain = self.failing_since is not None or self.returns_at > -math.inf
        apart = max(self.seconds, 2 * self.apart_seconds) if in_vain else 0.0
        return replace(self, returns_at=self.checked_at + apart, apart_seconds=apart)

    @property
    def may_return(self) -> bool:
        """True if, at the last check, the holder had been dropped for `apart_seconds`."""
        return self.checked_at >= self.returns_at

    @property
    def seconds(self) -> float:
        """Seconds for which the holder had been silent or failing at the last check."""
        return max(
            (self.checked_at - each for each in (self.owed_since, self.failing_since) if each is not None), default=0.0
        )
