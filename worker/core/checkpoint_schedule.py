"""Decides when the next checkpoint is due by time: at a fixed interval, or at an interval computed from uploads.

    interval = max(U, c · (1 + p) / p, B / W)

    U   duration of the newest upload, in seconds; with a shorter interval, two uploads would overlap
    c   training time that the upload cost, in seconds: U · (1 - pace during uploads / pace without uploads)
    p   overhead bound, as a fraction of the training time without checkpoints
    B   bytes that one node uploads per checkpoint
    W   bandwidth budget in bytes per second and node; without a budget the last term is absent

All times are seconds of the caller's monotonic clock. Invariant: the modelled overhead c / (interval - c) never exceeds
p. Source of the bound: CheckFreq (Mohan, Phanishayee and Chidambaram, FAST 2021).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.protocol.ids import Step
from worker.core.rounds import NONE

# An upload may be shorter than a step. Averaging about five uploads makes the pace precise enough.
KEPT_SHARE = 0.8
"""Factor by which each further upload reduces the weight of the earlier measurements of the pace."""


def automatic_interval(
    upload_seconds: float, cost_seconds: float, node_bytes: int, *, max_overhead: float, max_bytes_per_second: float
) -> float:
    """Return the shortest permitted interval in seconds. `max_bytes_per_second` is per node; 0 means no budget."""
    budgeted = node_bytes / max_bytes_per_second if max_bytes_per_second else 0.0
    return max(upload_seconds, cost_seconds * (1 + max_overhead) / max_overhead, budgeted)


@dataclass(frozen=True, slots=True)
class Pace:
    """The measured speed of training."""

    steps: float = 0.0
    seconds: float = 0.0

    def and_also(self, steps: int, seconds: float) -> Pace:
        """Return the pace with `steps` more steps, which took `seconds`."""
        return Pace(self.steps + steps, self.seconds + seconds)

    def aged(self) -> Pace:
        """Return the pace with its weight multiplied by `KEPT_SHARE`."""
        return Pace(KEPT_SHARE * self.steps, KEPT_SHARE * self.seconds)

    @property
    def steps_per_second(self) -> float:
        """Training steps per second; 0 if no step was observed yet."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """The checkpoint schedule of one generation, with the measurements from which intervals are computed."""

    interval_seconds: float = 0.0
    """0 for no fixed interval."""
    max_overhead: float = 0.0
    """Overhead bound p of the automatic interval, for example 0.01 for 1 %; 0 for no automatic interval."""
    max_bytes_per_second: float = 0.0
    """Bandwidth budget per node for the automatic interval; 0 for no budget."""
    begun_at: float = 0.0
    """Time at which the newest checkpoint began; the beginning of the job before the first checkpoint."""
    marked: Step = NONE
    """Step of the newest checkpoint that this generation has begun to upload; `NONE` before the first."""
    is_uploading: bool = False
    is_measured: bool = True
    upload_seconds: float | None = None
    """Duration of the newest complete upload; None before the first."""
    node_bytes: int = 0
    """Bytes that one node uploads for each checkpoint; 0 if unknown."""
    boundary: Step = NONE
    """The highest step that any rank had finished at the last call of `observe`; `NONE` before the first step."""
    seen_at: float = 0.0
    undisturbed: Pace = field(default_factory=Pace)
    """Training while no node uploaded a shard."""
    disturbed: Pace = field(default_factory=Pace)
    """Training while some node uploaded a shard."""

    def observe(
        self, now: float, *, boundary: Step, persist: Step, is_uploading: bool, stored: Step, node_bytes: int
    ) -> CheckpointSchedule:
        """Return the schedule, updated with the coordinator's newest state.

        Args:
            now: monotonic time in seconds.
            boundary: the highest step of this generation that a rank has finished; `NONE` before the first step.
            persist: the newest step that is marked for upload; `NONE` without a marked step.
            is_uploading: True if any node is uploading a shard.
            stored: the newest step of which every rank's shard is uploaded; `NONE` without such a step.
            node_bytes: bytes of the committed shards of one node; 0 if unknown.
        """
        seen = self._trained(now, boundary)
        if persist > seen.marked:
            seen = replace(
                seen,
                marked=persist,
                begun_at=now,
                is_measured=False,
                disturbed=seen.disturbed.aged(),
                undisturbed=seen.undisturbed.aged(),
            )
        elif not seen.is_measured and stored >= seen.marked:
            seen = replace(seen, upload_seconds=now - seen.begun_at, is_measured=True)
        return replace(seen, is_uploading=is_uploading, node_bytes=node_bytes or seen.node_bytes)

    def is_due(self, now: float) -> bool:
        """Return whether the coordinator marks the next commit for upload."""
        due_at = self.due_at
        return due_at is not None and due_at <= now and not (self.max_overhead and self.is_uploading)

    @property
    def due_at(self) -> float | None:
        """Time at which the next checkpoint is due, possibly in the past; None without an interval."""
        interval = self.present_interval
        return None if interval is None else self.begun_at + interval

    @property
    def present_interval(self) -> float | None:
        """The current interval in seconds; None without a fixed or automatic interval."""
        if self.max_overhead and self.upload_seconds is None:
            # Nothing is measured before the first upload, so a checkpoint is due at once.
            return 0.0
        if self.max_overhead:
            return automatic_interval(
                self.upload_seconds or 0.0,
                self.cost_seconds,
                self.node_bytes,
                max_overhead=self.max_overhead,
                max_bytes_per_second=self.max_bytes_per_second,
            )
        return self.interval_seconds or None

    @property
    def cost_seconds(self) -> float:
        """Training time in seconds that the newest upload cost."""
        usual, slowed = self.undisturbed.steps_per_second, self.disturbed.steps_per_second
        # Until both paces are measured, assume that training stops during an upload.
        share = 1.0 if usual <= 0 or self.disturbed.seconds <= 0 else min(1.0, max(0.0, 1 - slowed / usual))
        return share * (self.upload_seconds or 0.0)

    def _trained(self, now: float, boundary: Step) -> CheckpointSchedule:
        if self.boundary == NONE or boundary == NONE:
            return replace(self, boundary=boundary, seen_at=now)
        steps, seconds = boundary - self.boundary, now - self.seen_at
        if self.is_uploading:
            return replace(self, boundary=boundary, seen_at=now, disturbed=self.disturbed.and_also(steps, seconds))
        return replace(self, boundary=boundary, seen_at=now, undisturbed=self.undisturbed.and_also(steps, seconds))
