"""The pacing trial: decides by measurement whether a job trains faster with paced or with unpaced snapshots.

    steps 0-3 paced ─▶ 4-7 unpaced ─▶ 8-11 unpaced ─▶ 12-15 paced ─▶ … ─▶ verdict

docs/adr/0032-pacing-has-to-pay.md has iteration times of both modes. Invariant: the mode of a trial step depends on its
step number alone, because one node that sends at a bad moment slows the iteration of every node. All nodes follow the
verdict of the coordinator's node (`Announcement.pacing`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from everstep.protocol.ids import Step
from everstep.protocol.slot import digest
from worker.core.averages import median_error

# The sending of a snapshot may continue in the next iteration, which should have the same mode.
RUN_STEPS = 4
# Late snapshots are rare and cost whole steps. Eight paced iterations may by chance contain none.
LEAST, LEAST_TO_PACE, ENOUGH = 8, 16, 32
"""Numbers of iterations per mode: to decide for unpaced, to decide for paced, and to end the trial in any case."""
# If more steps in a row are not captured, the cause is probably a lost holder.
MOST_LOST = 4
"""Maximum number of lost steps that the trial attributes to one snapshot."""
BEYOND_DOUBT = 2.0
WORTH_RATIO = 0.01
"""Fraction of the time per captured step that pacing must save. A smaller gain may be noise."""


@dataclass(frozen=True, slots=True)
class PacingTries:
    """The newest iterations whose snapshots were sent in one mode."""

    seconds: tuple[float, ...] = ()
    """Duration of each iteration, from the end of one optimizer step to the end of the next."""
    lost: tuple[int, ...] = ()
    """Steps per iteration that were not captured, because the iteration's snapshot was still being sent."""

    def take(self, seconds: float, lost_count: int) -> PacingTries:
        """Return the measurements with one more iteration, at most the newest `ENOUGH`."""
        return PacingTries((*self.seconds, seconds)[-ENOUGH:], (*self.lost, min(lost_count, MOST_LOST))[-ENOUGH:])

    @property
    def kept_seconds(self) -> float:
        """Training seconds per captured step: the median iteration time, multiplied by the mean of 1 + `lost`."""
        return statistics.median(self.seconds) * (1 + statistics.fmean(self.lost))

    @property
    def error(self) -> float:
        """Standard error of `kept_seconds`."""
        mean, count = statistics.fmean(self.lost), len(self.lost)
        lost_error = math.sqrt(sum((each - mean) ** 2 for each in self.lost)) / count
        return math.hypot(median_error(self.seconds) * (1 + mean), statistics.median(self.seconds) * lost_error)


@dataclass(frozen=True, slots=True)
class PacingTrial:
    """The measurements of both modes on one node, and the decision which one is faster."""

    paced: PacingTries = PacingTries()
    at_once: PacingTries = PacingTries()
    verdict: bool | None = None
    """True if pacing saves training time, False if not, None while the trial runs."""

    def iteration(self, seconds: float, *, is_paced: bool, lost_count: int = 0) -> PacingTrial:
        """Add an iteration and the number of following steps lost to its snapshot. A finished trial does not change."""
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
    """Return whether the trial sends the snapshot of `step` only in idle network time."""
    # In each pair of groups, a pseudo-random one is paced, so that the pattern does not coincide with work that a
    # script does every n steps.
    pair, place = divmod(step // RUN_STEPS, 2)
    return bool(place ^ digest(pair.to_bytes(8, "little"))[0] & 1)
