"""How long a holder has been silent, of the time in which its owner could hear it. Pure.

    owed something, asked for it             ──▶ silent  ── progress, or nothing is owed or asked ──▶ not silent
    attempts fail, each after some progress  ──▶ failing ── one succeeded, or nothing is owed     ──▶ not failing

One such attempt alone is a line that broke: what the holder has got so far stays there, and the next attempt goes on
from it. One that achieved nothing at all is silence.

A holder that was given up may return when it answers. One that has failed at everything although it answered, or has
returned in vain, may do so only after as long again, twice as long each time: whatever breaks each transfer, commits
wait for it less and less.

It is looked at every period. A look that comes late says that the owner itself stood still: what came meanwhile has not
been read yet.

Invariant: time in which the owner stood still, or was occupied with itself, is no part of any holder's silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LATE_RATIO = 2.0
"""Of a period: a look that comes so long after the last one comes late."""


@dataclass(frozen=True, slots=True)
class Silence:
    """What an owner knows of one holder's silence. Seconds of any monotonic clock."""

    period_seconds: float
    """Between two looks."""
    looked_at: float = -math.inf
    owed_since: float | None = None
    """Since when it has been owed something without any progress; later by what is not counted."""
    failing_since: float | None = None
    """Since when a row of attempts has failed, each after whatever it sent; later by what is not counted."""
    has_progressed: bool = False
    """Since the last attempt that failed."""
    has_failed: bool = False
    """An attempt that had progressed: with the next one a row begins."""
    returns_at: float = -math.inf
    """When it was given up, since it has succeeded last: from when on it may return."""
    apart_seconds: float = 0.0
    """From the last time that it was given up until then."""

    def looked(self, now: float, *, is_owed: bool, is_asked: bool, is_occupied: bool) -> Silence:
        """Look again.

        Args:
            now: seconds.
            is_owed: the holder lacks something that it could be sent.
            is_asked: nothing on the owner's side keeps it waiting for what it is owed.
            is_occupied: the owner does something for itself first.

        Returns:
            With the time since the last look counted, or left out.
        """
        elapsed = now - self.looked_at
        left_out = elapsed if is_occupied or elapsed > LATE_RATIO * self.period_seconds else 0.0
        owed = now if self.owed_since is None else self.owed_since + left_out
        failing = None if self.failing_since is None else min(now, self.failing_since + left_out)
        looked = replace(self, looked_at=now, owed_since=owed if is_owed and is_asked else None, failing_since=failing)
        return looked if is_owed else looked.succeeded()

    def progressed(self) -> Silence:
        """It has answered, or taken something."""
        return (
            self
            if self.owed_since is None and self.has_progressed
            else replace(self, owed_since=None, has_progressed=True)
        )

    def failed(self, now: float) -> Silence:
        """An attempt came to nothing: what a row of such attempts seems to achieve is no progress."""
        if self.failing_since is not None or not self.has_progressed:
            return self
        return replace(self, failing_since=now if self.has_failed else None, has_progressed=False, has_failed=True)

    def answered(self) -> Silence:
        """It is reached again after it was given up: what it has failed at before says nothing of now."""
        return replace(self, failing_since=None, has_failed=False, owed_since=None)

    def succeeded(self) -> Silence:
        """It has sealed what it was sent, or has all of it."""
        return replace(self, failing_since=None, has_failed=False, returns_at=-math.inf, apart_seconds=0.0)

    def given_up(self) -> Silence:
        """Commits go on without it.

        Before it might have returned that changes nothing: it was back by what it had already.
        """
        if not self.may_return:
            return self
        in_vain = self.failing_since is not None or self.returns_at > -math.inf
        apart = max(self.seconds, 2 * self.apart_seconds) if in_vain else 0.0
        return replace(self, returns_at=self.looked_at + apart, apart_seconds=apart)

    @property
    def may_return(self) -> bool:
        """Whether a vote may wait for it once more, at the last look."""
        return self.looked_at >= self.returns_at

    @property
    def seconds(self) -> float:
        """How long it had been silent, or failing, at the last look."""
        return max(
            (self.looked_at - each for each in (self.owed_since, self.failing_since) if each is not None), default=0.0
        )
