"""Decides whether pacing pays, by comparing paced iterations with unpaced ones.

Pacing delays the chunks of a snapshot until the network is idle. Without pacing, a snapshot is sent at once.

    steps 0-3 paced ─▶ 4-7 at once ─▶ 8-11 at once ─▶ 12-15 paced ─▶ … ─▶ verdict

Pacing avoids contention with the collectives of training. Its cost is extra wake-ups and processor time. Where agents
share cores with ranks that wait for the network, pacing even sends while the ranks compute, and pauses while they wait.
A delayed snapshot may also be unfinished when the next step is due, and that step is then not kept. So the trial
measures both modes and compares the time per kept step.

Invariant: the mode of a trial step depends on its step number alone. One node that sends at a bad moment slows the
iteration of every node. So all nodes try the same mode at the same time, and all follow the verdict of the
coordinator's node (`Announcement.pacing`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from everstep.protocol.ids import Step
from everstep.protocol.slot import digest
from worker.core.averages import median_error

RUN_STEPS = 4
"""Consecutive steps in the same mode, so that delayed work of one iteration counts for its own mode."""
LEAST, LEAST_TO_PACE, ENOUGH = 8, 16, 32
"""Iterations per mode: the minimum for the verdict "send at once", for the verdict "pace", and the end of the trial.

Late snapshots are rare events that cost whole steps. Eight paced iterations may contain none by chance, so the verdict
"pace" requires more iterations.
"""
MOST_LOST = 4
"""Maximum number of lost steps attributed to one snapshot. More lost steps mean a lost holder."""
BEYOND_DOUBT = 2.0
"""Standard errors of confidence required to end the trial before `ENOUGH` iterations."""
WORTH_RATIO = 0.01
"""Share of the time per kept step that pacing must save.

Smaller gains are noise, and sending at once is simpler.
"""


@dataclass(frozen=True, slots=True)
class Tries:
    """The newest iterations whose snapshots were sent in one mode."""

    seconds: tuple[float, ...] = ()
    """Duration of each iteration, from boundary to boundary."""
    lost: tuple[int, ...] = ()
    """Per iteration: number of following steps that were not kept because its snapshot was still being sent."""

    def take(self, seconds: float, lost_count: int) -> Tries:
        """Return the tries with one more iteration; only the newest `ENOUGH` are kept."""
        return Tries((*self.seconds, seconds)[-ENOUGH:], (*self.lost, min(lost_count, MOST_LOST))[-ENOUGH:])

    @property
    def kept_seconds(self) -> float:
        """Seconds per kept step: the median iteration, times one plus the mean number of lost steps."""
        return statistics.median(self.seconds) * (1 + statistics.fmean(self.lost))

    @property
    def error(self) -> float:
        """Standard error of `kept_seconds`."""
        mean, count = statistics.fmean(self.lost), len(self.lost)
        lost_error = math.sqrt(sum((each - mean) ** 2 for each in self.lost)) / count
        return math.hypot(median_error(self.seconds) * (1 + mean), statistics.median(self.seconds) * lost_error)


@dataclass(frozen=True, slots=True)
class PacingTrial:
    """Measurements and verdict of the trial of one training.

    Each node has its own trial. The verdict of the coordinator's node counts.
    """

    paced: Tries = Tries()
    at_once: Tries = Tries()
    verdict: bool | None = None
    """True if pacing pays, False if it does not, None while the trial runs."""

    def iteration(self, seconds: float, *, is_paced: bool, lost_count: int = 0) -> PacingTrial:
        """Add an iteration that captured a snapshot and in which all data was sent in one mode.

        Args:
            seconds: duration from boundary to boundary.
            is_paced: True if the snapshot was paced, False if it was sent at once.
            lost_count: following steps that were not kept because this snapshot was still being sent.

        Returns:
            The trial, with a verdict as soon as the measurements allow one. A finished trial is returned unchanged.
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
    """Return whether the trial paces the snapshot of `step`.

    The order of the two modes within each pair of runs is pseudo-random. So the pattern does not coincide with work
    that a script does every n steps.
    """
    pair, place = divmod(step // RUN_STEPS, 2)
    return bool(place ^ digest(pair.to_bytes(8, "little"))[0] & 1)
