"""How often a step is proposed, so that saving costs training no more than the job allows (`Protection.MaxSlowdown`).

What a snapshot costs is the difference between iterations with snapshot traffic or a copy under way and iterations without, times the iterations
that one lasts; never less than what the rank says it was held. Between two snapshots there are as many iterations as it takes to pay for one.

Invariant: the interval grows only where the cost is too high beyond doubt, and then to where it is most likely low enough.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from worker.core.medians import median_error

KEPT = 192
"""Iterations of either kind that are remembered."""
ENOUGH, LEAST = 32, 8
"""Loaded iterations without which nothing is concluded: the first while every step is proposed, fewer the rarer they are."""
ENOUGH_QUIET = 16
"""Quiet iterations to compare them with; before that, what the rank was held is all that counts."""
GROWTH = 2
"""The interval grows by this factor at once, at most; then what it costs is measured anew."""
BEYOND_DOUBT = 2.0
"""Standard errors below the measured cost at which it must still be too high before steps are proposed less often."""
LIKELY = 1.0
"""Standard errors above the measured cost that an interval must pay for."""
REST_EVERY = 48
"""Where every iteration is loaded, one proposal in so many is put off, so that there is something to compare with: 0.98 commits per step."""
MAX_INTERVAL = 1000


@dataclass(frozen=True, slots=True)
class Budget:
    """What is known of the cost, and what follows from it. One per generation, on the coordinator's node."""

    max_slowdown: float
    """Of the mean iteration, as a part of it."""
    interval: int = 1
    """Iterations from one proposed step to the next."""
    quiet: tuple[float, ...] = ()
    """Seconds of the newest iterations in which nothing was saved."""
    loaded: tuple[float, ...] = ()
    """Seconds of the newest iterations in which something was."""
    blocked: tuple[float, ...] = ()
    """How long saving held the rank in these."""
    iterations_per_snapshot: float = 1.0
    """For how many iterations one snapshot loads the node, smoothed."""
    since_rest: int = 0
    """Loaded iterations since the last quiet one."""
    run_length: int = 0
    """Loaded iterations since the last snapshot began."""

    def iteration(self, seconds: float, *, blocked_seconds: float, is_loaded: bool, has_begun: bool) -> Budget:
        """Take one iteration into account.

        Args:
            seconds: from boundary to boundary.
            blocked_seconds: for how long of it saving held the rank.
            is_loaded: something was captured or sent in it.
            has_begun: a snapshot was captured in it.

        Returns:
            The budget, with a new interval where it must or may be another.
        """
        if not is_loaded:
            return replace(self, quiet=(*self.quiet, seconds)[-KEPT:], since_rest=0)._settled()
        lasted = self.iterations_per_snapshot
        if has_begun and self.run_length:
            lasted += (self.run_length - lasted) / 8
        return replace(
            self,
            loaded=(*self.loaded, seconds)[-KEPT:],
            blocked=(*self.blocked, blocked_seconds)[-KEPT:],
            iterations_per_snapshot=lasted,
            run_length=1 if has_begun else self.run_length + 1,
            since_rest=self.since_rest + 1,
        )._settled()

    @property
    def distance(self) -> int:
        """Iterations to leave between the last proposed step and the next: the interval, and now and then a rest to compare with.

        A rest that was too short for once, because a snapshot lasted longer than most, is followed by another.
        """
        return self.interval + (self.since_rest >= REST_EVERY) * max(1, round(self.iterations_per_snapshot))

    @property
    def slowdown(self) -> float | None:
        """What saving costs now, as a part of the mean iteration; None before anything is known."""
        if len(self.quiet) < ENOUGH_QUIET or len(self.loaded) < LEAST:
            return None
        return self._cost(0.0) / self.interval / statistics.median(self.quiet)

    def _settled(self) -> Budget:
        if len(self.loaded) < max(LEAST, ENOUGH // self.interval):
            return self
        likely = self._needed(self._cost(LIKELY))
        if likely < self.interval:
            return replace(self, interval=likely)
        if self._needed(self._cost(-BEYOND_DOUBT)) > self.interval:
            return replace(self, interval=min(likely, GROWTH * self.interval), loaded=(), blocked=())
        return self

    def _needed(self, cost: float) -> int:
        """Return the shortest interval that pays for a snapshot of this cost."""
        usual = statistics.median(self.quiet or self.loaded)
        return max(1, min(MAX_INTERVAL, math.ceil(cost / (self.max_slowdown * usual) - 1e-9)))

    def _cost(self, errors: float) -> float:
        """Return seconds per snapshot, so many standard errors above what was measured; what the rank was held is certain."""
        extra = statistics.median(self.blocked)  # an audit, now and then, is no usual cost
        if len(self.quiet) >= ENOUGH_QUIET:
            difference = statistics.median(self.loaded) - statistics.median(self.quiet)
            extra = max(extra, difference + errors * math.hypot(median_error(self.loaded), median_error(self.quiet)))
        return extra * self.iterations_per_snapshot
