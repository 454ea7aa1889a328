"""Decides how often a step is proposed, so that snapshots slow training at most by `Protection.MaxSlowdown`.

An iteration is the work from one finished optimizer step to the next. It is *loaded* if a part of a snapshot is
captured or sent in it, otherwise *quiet*. A snapshot costs the extra time of its loaded iterations, at least the time
for which it blocked the rank.

Invariant: the interval grows only when the cost exceeds the limit by `BEYOND_DOUBT` standard errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from worker.core.averages import trimmed_error, trimmed_mean

# Few snapshots are stored, so that a change of their cost soon affects the decisions.
KEPT_QUIET, KEPT = 192, 48
"""Maximum numbers of stored quiet iterations and of stored snapshots."""
ENOUGH, LEAST = 32, 8
"""Minimum numbers of loaded iterations (divided by the interval) and of snapshots for a decision."""
ENOUGH_QUIET = 16
"""With fewer quiet iterations, the estimated cost is the time for which snapshots blocked the rank."""
GROWTH = 2
BEYOND_DOUBT = 2.0
"""Number of standard errors by which the measured cost must exceed the limit before the interval grows."""
LIKELY = 1.0
"""Number of standard errors that are added to the measured cost when a new interval is computed."""
# A job that otherwise commits every step then commits 98 % of its steps.
REST_EVERY = 48
"""Number of consecutive loaded iterations after which one proposal is delayed, to get a quiet iteration."""
MAX_INTERVAL = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """The loaded iterations of one snapshot."""

    iterations: int
    seconds: float
    blocked_seconds: float

    def and_also(self, seconds: float, blocked_seconds: float) -> Load:
        """Return the load with one more iteration, of which the snapshot blocked the rank for `blocked_seconds`."""
        return Load(self.iterations + 1, self.seconds + seconds, self.blocked_seconds + blocked_seconds)


@dataclass(frozen=True, slots=True)
class Budget:
    """Measurements of the cost of snapshots in one generation, and the interval that results from them."""

    max_slowdown: float
    """Allowed cost of snapshots, as a fraction of the mean iteration."""
    interval: int = 1
    quiet: tuple[float, ...] = ()
    snapshots: tuple[Load, ...] = ()
    newest: Load | None = None
    """Cost so far of the newest snapshot, which joins `snapshots` when the next one begins."""
    iterations_per_snapshot: float = 1.0
    """Smoothed mean of the number of loaded iterations per snapshot."""
    since_rest: int = 0

    def iteration(self, seconds: float, *, blocked_seconds: float, is_loaded: bool, has_begun: bool) -> Budget:
        """Add one iteration, from the end of one optimizer step to the end of the next, and adapt the interval.

        `is_loaded` is True if a part of a snapshot was captured or sent in it, `has_begun` if a capture began.
        """
        if not is_loaded:
            return replace(self, quiet=(*self.quiet, seconds)[-KEPT_QUIET:], since_rest=0)._settled()
        loaded = replace(self, since_rest=self.since_rest + 1)
        # Before this object's first capture, transfers belong to an older snapshot, which the budget does not measure.
        if not has_begun:
            return (
                loaded
                if self.newest is None
                else replace(loaded, newest=self.newest.and_also(seconds, blocked_seconds))
            )
        begun = replace(loaded, newest=Load(1, seconds, blocked_seconds))
        return begun if self.newest is None else begun._over(self.newest)._settled()

    def _over(self, load: Load) -> Budget:
        lasted = self.iterations_per_snapshot + (load.iterations - self.iterations_per_snapshot) / 8
        return replace(self, snapshots=(*self.snapshots, load)[-KEPT:], iterations_per_snapshot=lasted)

    @property
    def distance(self) -> int:
        """Iterations from the last proposed step to the next: the interval, plus an occasional delay (`REST_EVERY`)."""
        return self.interval + (self.since_rest >= REST_EVERY) * round(self.iterations_per_snapshot)

    @property
    def slowdown(self) -> float | None:
        """Cost of snapshots, as a fraction of the mean iteration; None while there are too few measurements."""
        if len(self.quiet) < ENOUGH_QUIET or len(self.snapshots) < LEAST:
            return None
        return self._cost(0.0) / max(self.interval, self.iterations_per_snapshot) / trimmed_mean(self.quiet)

    def _settled(self) -> Budget:
        loaded_count = sum(load.iterations for load in self.snapshots)
        if len(self.snapshots) < LEAST or loaded_count < ENOUGH // self.interval:
            return self
        likely = self._needed(self._cost(LIKELY))
        if likely < self.interval:
            least = self.interval // GROWTH
            return (
                replace(self, interval=likely)
                if likely > least
                else replace(self, interval=max(1, least), snapshots=())
            )
        if self._needed(self._cost(-BEYOND_DOUBT)) > max(self.interval, self.iterations_per_snapshot):
            # One decision increases the distance between snapshots at most by the factor `GROWTH`.
            most = GROWTH * max(self.interval, round(self.iterations_per_snapshot))
            return replace(self, interval=min(likely, most), snapshots=())
        return self

    def _needed(self, cost: float) -> int:
        usual = trimmed_mean(self.quiet or [load.seconds / load.iterations for load in self.snapshots])
        return max(1, min(MAX_INTERVAL, math.ceil(cost / (self.max_slowdown * usual) - 1e-9)))

    def _cost(self, errors: float) -> float:
        """Return the cost per snapshot in seconds, at least the blocked time, plus `errors` standard errors."""
        # About every thousandth snapshot is audited: it is copied completely at the boundary and compared afterwards.
        # It blocks the rank longer than other snapshots, and the trimmed mean ignores it.
        held = trimmed_mean([load.blocked_seconds for load in self.snapshots])
        if len(self.quiet) < ENOUGH_QUIET:
            return held
        usual = trimmed_mean(self.quiet)
        longer = [load.seconds - load.iterations * usual for load in self.snapshots]
        error = math.hypot(trimmed_error(longer), self.iterations_per_snapshot * trimmed_error(self.quiet))
        return max(held, trimmed_mean(longer) + errors * error)
