"""The pacing trial: decides by measurement whether a job trains faster with paced or with unpaced snapshots.

Pacing delays the chunks of a snapshot until training does not use the network. An unpaced snapshot is sent immediately.

    steps 0-3 paced ─▶ 4-7 unpaced ─▶ 8-11 unpaced ─▶ 12-15 paced ─▶ … ─▶ verdict

Pacing avoids contention with the collective operations of training. It costs extra wake-ups and processor time. If
agents and ranks share cores, a paced agent sends while the ranks compute. A delayed snapshot may also be unfinished
when the next step is due, so that the next step is not captured. The trial therefore measures both modes and compares
the training time per captured step. Its *verdict* says which mode to use.
docs/adr/0032-pacing-has-to-pay.md has iteration times of both modes.

Invariant: the mode of a trial step depends on its step number alone. All nodes try the same mode at the same time,
because one node that sends at a bad moment slows the iteration of every node. All nodes follow the verdict of the
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
"""Number of consecutive steps in the same mode, paced or unpaced.

The sending of a snapshot may continue in the next iteration, which should have the same mode.
"""
LEAST, LEAST_TO_PACE, ENOUGH = 8, 16, 32
"""Numbers of measured iterations per mode that decide when the trial ends.

- `LEAST`: minimum for the decision to send snapshots immediately (unpaced).
- `LEAST_TO_PACE`: minimum for the decision to send them in idle network time (paced).
- `ENOUGH`: number at which the trial always ends with a decision.

Late snapshots are rare and cost whole steps. Eight paced iterations may by chance contain no late snapshot, so a
decision for pacing requires more iterations.
"""
MOST_LOST = 4
"""Maximum number of lost steps that the pacing trial attributes to one snapshot.

If more steps in a row are not captured, the cause is probably a lost holder and not this snapshot.
"""
BEYOND_DOUBT = 2.0
"""Number of standard errors by which the two modes must differ so that a trial ends before `ENOUGH` iterations."""
WORTH_RATIO = 0.01
"""Fraction of the time per captured step that pacing must save. A smaller gain may be noise."""


@dataclass(frozen=True, slots=True)
class PacingTries:
    """Measurements of one mode, paced or unpaced: the newest iterations whose snapshots were sent in this mode."""

    seconds: tuple[float, ...] = ()
    """Duration of each iteration, from the end of one optimizer step to the end of the next."""
    lost: tuple[int, ...] = ()
    """Number of lost steps per iteration.

    A step is lost if it was not captured, because the iteration's snapshot was still being sent.
    """

    def take(self, seconds: float, lost_count: int) -> PacingTries:
        """Return the measurements with one more iteration added. The result keeps the newest `ENOUGH` iterations."""
        return PacingTries((*self.seconds, seconds)[-ENOUGH:], (*self.lost, min(lost_count, MOST_LOST))[-ENOUGH:])

    @property
    def kept_seconds(self) -> float:
        """Training seconds per captured step.

        If a snapshot prevents the capture of the next n steps (`lost`), one captured step takes 1 + n iterations. The
        value is the median iteration time, multiplied by the mean of 1 + n.
        """
        return statistics.median(self.seconds) * (1 + statistics.fmean(self.lost))

    @property
    def error(self) -> float:
        """Standard error of the estimate `kept_seconds` (training seconds per captured step)."""
        mean, count = statistics.fmean(self.lost), len(self.lost)
        lost_error = math.sqrt(sum((each - mean) ** 2 for each in self.lost)) / count
        return math.hypot(median_error(self.seconds) * (1 + mean), statistics.median(self.seconds) * lost_error)


@dataclass(frozen=True, slots=True)
class PacingTrial:
    """One trial: the measurements of paced and of unpaced sending, and the decision (`verdict`) which one is faster.

    Each node has its own trial. All nodes follow the decision of the coordinator's node.
    """

    paced: PacingTries = PacingTries()
    at_once: PacingTries = PacingTries()
    verdict: bool | None = None
    """True if sending in idle network time (pacing) saves training time, False if not, None while the trial runs."""

    def iteration(self, seconds: float, *, is_paced: bool, lost_count: int = 0) -> PacingTrial:
        """Add an iteration that captured a snapshot and sent all its data in one mode: paced or immediately.

        Args:
            seconds: duration of the iteration, from the end of one optimizer step to the end of the next.
            is_paced: True if the chunks waited for idle network time (paced), False if they were sent immediately.
            lost_count: following steps that were not captured because this snapshot was still being sent.

        Returns:
            The trial, with a decision (`verdict`) as soon as the measurements allow one. A finished trial is returned
            unchanged.
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
    """Return whether the trial sends the snapshot of `step` only in idle network time (paced).

    In each pair of groups of `RUN_STEPS` steps, one group is paced. A pseudo-random choice selects the group, so that
    the pattern does not coincide with work that a script does every n steps.
    """
    pair, place = divmod(step // RUN_STEPS, 2)
    return bool(place ^ digest(pair.to_bytes(8, "little"))[0] & 1)
