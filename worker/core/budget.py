"""Decides how often a step is proposed, so that snapshots slow training at most by `Protection.MaxSlowdown`.

When the coordinator proposes a step, all ranks capture their state after this step. An iteration is the training work
from one finished optimizer step to the next. Iterations in which a part of a snapshot is captured or sent are *loaded*;
all others are *quiet*.

The cost of a snapshot is the extra time of its loaded iterations, compared with quiet iterations. The cost is at least
the time for which the snapshot blocked the rank. The budget chooses the interval between two snapshots so that the cost
per interval is within the limit.

`docs/benchmarks.md` compares a job without a limit (*Slowdown of a real model*) with the same job under the default
limit (*Slowdown under a budget*).

Invariant: the interval grows only when the cost exceeds the limit by `BEYOND_DOUBT` standard errors. The new interval
then probably keeps the cost within the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from worker.core.averages import trimmed_error, trimmed_mean

KEPT_QUIET, KEPT = 192, 48
"""Maximum numbers of stored measurements: of quiet iterations (without any part of a snapshot), and of snapshots.

Only few snapshots are stored, so that a change of their cost soon affects the decisions, even if snapshots are far
apart.
"""
ENOUGH, LEAST = 32, 8
"""Minimum numbers of measurements for a decision about the interval between two snapshots.

`LEAST` is the minimum number of snapshots. `ENOUGH` is the minimum number of iterations in which a part of a snapshot
was captured or sent, if every step is proposed. If every n-th step is proposed, `ENOUGH` / n such iterations suffice.
"""
ENOUGH_QUIET = 16
"""Minimum number of quiet iterations (without any part of a snapshot) for a comparison with the other iterations.

With fewer quiet iterations, the estimated cost is the time for which the snapshots blocked the rank.
"""
GROWTH = 2
"""Maximum factor by which one decision lengthens the interval. The next decision uses new measurements."""
BEYOND_DOUBT = 2.0
"""Number of standard errors by which the measured cost must exceed the limit before the interval grows."""
LIKELY = 1.0
"""Number of standard errors that are added to the measured cost when a new interval is computed."""
REST_EVERY = 48
"""Number of iterations in a row with a part of a snapshot, after which one proposal is delayed.

The delay creates a quiet iteration (without a snapshot) for the comparison. A job that otherwise commits every step
then commits 98 % of its steps.
"""
MAX_INTERVAL = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """The iterations in which one snapshot was captured or sent. The cost of the snapshot follows from them."""

    iterations: int
    """Number of iterations so far in which a part of this snapshot was captured or sent."""
    seconds: float
    """Total duration of the iterations counted in `iterations`, in seconds."""
    blocked_seconds: float
    """Seconds of these iterations in which the rank waited for the snapshot."""

    def and_also(self, seconds: float, blocked_seconds: float) -> Load:
        """Return the cost of this snapshot with one more iteration added, which took `seconds`.

        The snapshot blocked the rank for `blocked_seconds` of this time.
        """
        return Load(self.iterations + 1, self.seconds + seconds, self.blocked_seconds + blocked_seconds)


@dataclass(frozen=True, slots=True)
class Budget:
    """Measurements of the cost of snapshots, and the interval between two snapshots that results from them.

    The coordinator's node holds one object per generation.
    """

    max_slowdown: float
    """Allowed cost of snapshots, as a fraction of the mean iteration."""
    interval: int = 1
    """Iterations from one proposed step to the next, as `max_slowdown` requires."""
    quiet: tuple[float, ...] = ()
    """Seconds of each of the newest iterations in which no part of a snapshot was captured or sent."""
    snapshots: tuple[Load, ...] = ()
    """Costs of the newest snapshots. A snapshot is added when the capture of the next snapshot begins."""
    newest: Load | None = None
    """Cost so far of the newest snapshot, which may still be in transfer."""
    iterations_per_snapshot: float = 1.0
    """Smoothed mean of the number of iterations in which parts of one snapshot are captured or sent."""
    since_rest: int = 0
    """Number of iterations since the last iteration without any part of a snapshot.

    From `REST_EVERY` on, the next proposal is delayed (see `distance`).
    """

    def iteration(self, seconds: float, *, blocked_seconds: float, is_loaded: bool, has_begun: bool) -> Budget:
        """Add the measurements of one training iteration.

        Args:
            seconds: duration of the iteration, from the end of one optimizer step to the end of the next.
            blocked_seconds: part of `seconds` in which the rank waited for the snapshot.
            is_loaded: True if a part of a snapshot was captured or sent in the iteration.
            has_begun: True if the capture of a snapshot began in the iteration.

        Returns:
            The budget. Its interval between snapshots is new if the measurements require a longer one or allow a
            shorter one.
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
        """Iterations from the last proposed step to the next: the interval, plus an occasional delay.

        After `REST_EVERY` iterations without a quiet one, the coordinator delays a proposal to get an iteration without
        a snapshot. If the last snapshot is still being sent in that iteration, the coordinator delays the next proposal
        too.
        """
        return self.interval + (self.since_rest >= REST_EVERY) * round(self.iterations_per_snapshot)

    @property
    def slowdown(self) -> float | None:
        """Cost of snapshots at the current interval, as a fraction of the mean iteration.

        None while there are too few measurements.
        """
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
        """Return the shortest interval between snapshots, in iterations, that keeps the slowdown within `max_slowdown`.

        Each snapshot costs `cost` seconds of training time.
        """
        usual = trimmed_mean(self.quiet or [load.seconds / load.iterations for load in self.snapshots])
        return max(1, min(MAX_INTERVAL, math.ceil(cost / (self.max_slowdown * usual) - 1e-9)))

    def _cost(self, errors: float) -> float:
        """Return the cost per snapshot in seconds: the measured cost plus `errors` standard errors.

        The result is at least the time for which snapshots blocked the rank. This time has no error, because it is
        measured directly.
        """
        # About every thousandth snapshot is audited: it is copied completely at the boundary and compared afterwards.
        # It blocks the rank longer than other snapshots, and the trimmed mean ignores it.
        held = trimmed_mean([load.blocked_seconds for load in self.snapshots])
        if len(self.quiet) < ENOUGH_QUIET:
            return held
        usual = trimmed_mean(self.quiet)
        longer = [load.seconds - load.iterations * usual for load in self.snapshots]
        error = math.hypot(trimmed_error(longer), self.iterations_per_snapshot * trimmed_error(self.quiet))
        return max(held, trimmed_mean(longer) + errors * error)
