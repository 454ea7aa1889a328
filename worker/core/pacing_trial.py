"""Whether pacing pays: iterations whose snapshot waited for idle spans against iterations whose snapshot went at once.

    steps 0-3 paced ─▶ 4-7 at once ─▶ 8-11 at once ─▶ 12-15 paced ─▶ … ─▶ verdict

Pacing keeps chunks out of the way of collectives, and costs wake-ups and time in which the processor is needed
elsewhere: where agents share the cores of ranks that wait for the network, it sends while they compute and rests while
they wait. What waits may also be on its way still when the next step is due, which is not kept then. So both are tried,
by the time that a kept step takes.

Invariant: which steps are tried how follows from their numbers alone. One node whose chunks are in the way makes
everybody's iteration longer: all nodes of a job try the same at the same time, and go by what the coordinator's node
finds (`Announcement.pacing`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from everstep.protocol.ids import Step
from everstep.protocol.slot import digest
from worker.core.averages import median_error

RUN_STEPS = 4
"""One after the other in the same way: what an iteration leaves to the next one counts where it belongs."""
LEAST, LEAST_TO_PACE, ENOUGH = 8, 16, 32
"""Iterations of either kind before all are sent at once, or wait, from then on, and after which the trial ends whatever they say.

Of eight that wait none may be late by luck, which costs steps as long as they wait.
"""
MOST_LOST = 4
"""Steps that one snapshot is told to have cost: what costs more is a holder that is gone, which says nothing of pacing."""
BEYOND_DOUBT = 2.0
"""Standard errors by which pacing has to gain anything, or to gain less than it is worth, for the trial to end before."""
WORTH_RATIO = 0.01
"""Of an iteration, that pacing has to gain: less is noise, and going at once is simpler."""


@dataclass(frozen=True, slots=True)
class Tries:
    """The newest iterations whose snapshot went one way."""

    seconds: tuple[float, ...] = ()
    """From boundary to boundary."""
    lost: tuple[int, ...] = ()
    """Of each, how many steps behind it were not kept, for the snapshot was still on its way."""

    def take(self, seconds: float, lost_count: int) -> Tries:
        """Return these and one more."""
        return Tries((*self.seconds, seconds)[-ENOUGH:], (*self.lost, min(lost_count, MOST_LOST))[-ENOUGH:])

    @property
    def kept_seconds(self) -> float:
        """What a kept step takes: an iteration, and another for each step that is lost to it."""
        return statistics.median(self.seconds) * (1 + statistics.fmean(self.lost))

    @property
    def error(self) -> float:
        """Standard error of that, seconds."""
        mean, count = statistics.fmean(self.lost), len(self.lost)
        lost_error = math.sqrt(sum((each - mean) ** 2 for each in self.lost)) / count
        return math.hypot(median_error(self.seconds) * (1 + mean), statistics.median(self.seconds) * lost_error)


@dataclass(frozen=True, slots=True)
class PacingTrial:
    """What has been tried in a training. Each node has its own; the coordinator's counts."""

    paced: Tries = Tries()
    at_once: Tries = Tries()
    verdict: bool | None = None
    """Pacing pays; None: not known yet."""

    def iteration(self, seconds: float, *, is_paced: bool, lost_count: int = 0) -> PacingTrial:
        """Take an iteration into account in which a snapshot was captured, and all that was sent went one way.

        Args:
            seconds: from boundary to boundary.
            is_paced: which way.
            lost_count: steps behind it that were not kept, for the snapshot was still on its way.

        Returns:
            The trial, with a verdict where there is one now; one that is over stays as it is.
        """
        if self.verdict is not None:
            return self
        if is_paced:
            return replace(self, paced=self.paced.take(seconds, lost_count))._judged()
        return replace(self, at_once=self.at_once.take(seconds, lost_count))._judged()

    def _judged(self) -> PacingTrial:
        fewest = min(len(self.paced.seconds), len(self.at_once.seconds))
        if fewest < LEAST:
            return self
        usual = self.at_once.kept_seconds
        gained, worth = usual - self.paced.kept_seconds, WORTH_RATIO * usual
        doubt = BEYOND_DOUBT * math.hypot(self.paced.error, self.at_once.error)
        is_clear = gained + doubt < worth or (gained > doubt and fewest >= LEAST_TO_PACE)
        return replace(self, verdict=gained > worth) if fewest == ENOUGH or is_clear else self


def is_tried_paced(step: Step) -> bool:
    """Say whether the snapshot of a step waits for idle spans while that is tried, without a pattern that steps at a regular distance meet."""
    pair, place = divmod(step // RUN_STEPS, 2)
    return bool(place ^ digest(pair.to_bytes(8, "little"))[0] & 1)
