"""How often a step is proposed, so that saving costs training no more than the job allows (`Protection.MaxSlowdown`).

What a snapshot costs is what the iterations from its boundary on took longer, all together, than as many without one,
for as long as it was being captured or sent; never less than what the rank says it was held meanwhile. Between two
snapshots there are as many iterations as it takes to pay for one.

Invariant: the interval grows only where the cost is too high beyond doubt, and then to where it is most likely low
enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from worker.core.averages import trimmed_error, trimmed_mean

KEPT_QUIET, KEPT = 192, 48
"""Quiet iterations, and snapshots, that are remembered: fewer of these, for they may be far apart, and it is to be seen soon when they cost less."""
ENOUGH, LEAST = 32, 8
"""Loaded iterations without which nothing is concluded while every step is proposed, fewer the rarer they are; and snapshots, in any case."""
ENOUGH_QUIET = 16
"""Quiet iterations to compare them with; before that, what the rank was held is all that counts."""
GROWTH = 2
"""The interval grows or shrinks by this factor at once, at most; then what it costs is measured anew."""
BEYOND_DOUBT = 2.0
"""Standard errors below the measured cost at which it must still be too high before steps are proposed less often."""
LIKELY = 1.0
"""Standard errors above the measured cost that an interval must pay for."""
REST_EVERY = 48
"""Where every iteration is loaded, one proposal in so many is put off, so that there is something to compare with: 0.98 commits per step."""
MAX_INTERVAL = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """What one snapshot has meant for training so far."""

    iterations: int
    """In which something of it was captured or sent."""
    seconds: float
    """That these took, together."""
    blocked_seconds: float
    """For how long of that saving held the rank."""

    def and_also(self, seconds: float, blocked_seconds: float) -> Load:
        """Return this with one more iteration."""
        return Load(self.iterations + 1, self.seconds + seconds, self.blocked_seconds + blocked_seconds)


@dataclass(frozen=True, slots=True)
class Budget:
    """What is known of the cost, and what follows from it. One per generation, on the coordinator's node."""

    max_slowdown: float
    """Of the mean iteration, as a part of it."""
    interval: int = 1
    """Iterations from one proposed step to the next."""
    quiet: tuple[float, ...] = ()
    """Seconds of the newest iterations in which nothing was saved."""
    snapshots: tuple[Load, ...] = ()
    """The newest that were over when the next one began."""
    newest: Load | None = None
    """The snapshot behind these: it may be on its way still."""
    iterations_per_snapshot: float = 1.0
    """For how many iterations one snapshot loads the node, smoothed."""
    since_rest: int = 0
    """Loaded iterations since the last quiet one."""

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
            return replace(self, quiet=(*self.quiet, seconds)[-KEPT_QUIET:], since_rest=0)._settled()
        loaded = replace(self, since_rest=self.since_rest + 1)
        if not has_begun:  # what is sent before a first snapshot is none
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
        """Iterations to leave between the last proposed step and the next: the interval, and now and then a rest to compare with.

        A rest that was too short for once, because a snapshot lasted longer than most, is followed by another.
        """
        return self.interval + (self.since_rest >= REST_EVERY) * max(1, round(self.iterations_per_snapshot))

    @property
    def slowdown(self) -> float | None:
        """What saving costs now, as a part of the mean iteration; None before anything is known."""
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
            most = GROWTH * max(self.interval, round(self.iterations_per_snapshot))  # they are that far apart now
            return replace(self, interval=min(likely, most), snapshots=())
        return self

    def _needed(self, cost: float) -> int:
        """Return the shortest interval that pays for a snapshot of this cost."""
        usual = trimmed_mean(self.quiet or [load.seconds / load.iterations for load in self.snapshots])
        return max(1, min(MAX_INTERVAL, math.ceil(cost / (self.max_slowdown * usual) - 1e-9)))

    def _cost(self, errors: float) -> float:
        """Return seconds per snapshot, so many standard errors above what was measured; what the rank was held is certain."""
        held = trimmed_mean(
            [load.blocked_seconds for load in self.snapshots]
        )  # an audit, now and then, is no usual cost
        if len(self.quiet) < ENOUGH_QUIET:
            return held
        usual = trimmed_mean(self.quiet)
        longer = [load.seconds - load.iterations * usual for load in self.snapshots]
        error = math.hypot(trimmed_error(longer), self.iterations_per_snapshot * trimmed_error(self.quiet))
        return max(held, trimmed_mean(longer) + errors * error)
