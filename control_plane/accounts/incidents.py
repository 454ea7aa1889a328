"""The account of an incident for people: what failed, how it ended, what it cost, and what a person can do now.

Invariant: pure. A sentence states only stored facts. An unknown fact is omitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from control_plane.accounts import jobs
from control_plane.accounts.facts import fault_name, hardware_fault
from control_plane.accounts.held_nodes import hourly
from control_plane.accounts.occurrences import listed, occurrence
from control_plane.core.duties import HeldNode
from control_plane.core.incidents import absent_seconds, phase_moments
from control_plane.core.observed.facts import RankEnded
from control_plane.core.observed.incidents import GivesUp, IncidentCourse, Repeated, Response
from control_plane.core.observed.jobs import CapacityWait
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import GaveUp, JobReason
from control_plane.core.states import JobState
from everstep.protocol.ids import FIRST_STEP, Step

_SAME_PASS_SECONDS = 1.0
"""Two stored times that differ by at most this count as times of the same decision of the job loop."""


class IncidentOutcome(StrEnum):
    """The end of an incident.

    - OPEN: training has not caught up, that is, has not reached the newest step before the failure again.
    - RECOVERED: training has caught up.
    - JOB_PAUSED: the job returned to the queue before training had caught up.
    - JOB_COMPLETED, JOB_FAILED, JOB_STOPPED: the job ended before training had caught up.
    """

    OPEN = "Open"
    RECOVERED = "Recovered"
    JOB_PAUSED = "JobPaused"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"
    JOB_STOPPED = "JobStopped"


_BY_END = {
    JobState.COMPLETED: IncidentOutcome.JOB_COMPLETED,
    JobState.FAILED: IncidentOutcome.JOB_FAILED,
    JobState.STOPPED: IncidentOutcome.JOB_STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCourse:
    """The facts of a job's history from which `outcome_of` derives how the job's incidents ended."""

    state: JobState
    ended_at: float | None
    queued_at: tuple[float, ...]
    """Times at which the job entered the queue, in Unix seconds."""


def outcome_of(closed_at: float | None, job: JobCourse) -> IncidentOutcome:
    """Return how an incident ended. `closed_at` is in Unix seconds, or None for an open incident."""
    if closed_at is None:
        return IncidentOutcome.OPEN
    if job.ended_at is not None and abs(job.ended_at - closed_at) <= _SAME_PASS_SECONDS:
        return _BY_END[job.state]
    if any(abs(at - closed_at) <= _SAME_PASS_SECONDS for at in job.queued_at):
        return IncidentOutcome.JOB_PAUSED
    return IncidentOutcome.RECOVERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(IncidentCourse):
    """The stored facts about an incident, its job and its nodes. Times are Unix seconds."""

    incident_id: str
    job_name: str
    project: str
    fleet_name: str
    outcome: IncidentOutcome
    job_reason: JobReason
    taken_over_by: str = ""
    """Empty while Everstep controls the job."""
    reached_step: Step | None = None
    """Newest step before the failure. For a job that ended during the incident: the newest step of any generation."""
    repeated_steps: int | None = None
    """None until the control plane has chosen the step to restore."""
    kept_step: Step | None = None
    """Step of the job's newest complete checkpoint in S3, or None."""
    first_step: Step = FIRST_STEP
    """Step of the job's InitialCheckpoint, or 0."""
    held: tuple[HeldNode, ...] = ()
    cost_usd: float | None = None
    wait: CapacityWait | None = None
    """None for a closed incident and while launches succeed."""
    is_long_wait: bool = False
    instance_type: str = ""
    availability_zone: str = ""
    price_usd_per_hour: float | None = None
    idle_count: int = 0
    """Number of idle nodes of the fleet. 0 unless the job failed with this incident."""
    node_count: int = 0
    least_node_count: int = 0
    terminated_ids: tuple[str, ...] = ()
    generation_before: int = 0

    @property
    def failed_rank(self) -> int | None:
        """The first rank whose end is part of the evidence, or None."""
        return next((each.rank for each in self.evidence if isinstance(each, RankEnded)), None)

    @property
    def attempted(self) -> Response:
        """Everstep's response before it gave the job up, if it did."""
        return self.decision.after if isinstance(self.decision, GivesUp) else self.decision

    @property
    def repeated(self) -> Repeated | None:
        """The repeated failures for which Everstep gave the job up, or None."""
        return self.job_reason.because if isinstance(self.job_reason, GaveUp) else None

    @property
    def script_error(self) -> str | None:
        """The exception (class and message) with which the script ended the job, or None."""
        return script_error(self.cause, self.outcome, self.job_reason)

    @property
    def error_place(self) -> str | None:
        """The file and the line of the job's code in which the script's exception arose: `train.py:48`, or None."""
        return None if self.repeated is None or self.script_error is None else self.repeated.failure.error_place

    @property
    def has_ended_the_job(self) -> bool:
        """Whether the job failed or stopped before training had again reached the newest step before the failure."""
        return self.outcome in (IncidentOutcome.JOB_FAILED, IncidentOutcome.JOB_STOPPED)

    @property
    def lost_steps(self) -> int | None:
        """If the job ended, all steps after the newest checkpoint. Otherwise the repeated steps. None if unknown."""
        if not self.has_ended_the_job:
            return self.repeated_steps
        return None if self.reached_step is None else max(0, self.reached_step - (self.kept_step or self.first_step))

    def interruption_seconds(self, now: float) -> float:
        """Return the time from the failure until the end of the incident, or until `now`, in seconds."""
        moments = phase_moments(self, now)
        return moments[-1] - moments[0]


def script_error(cause: Cause, outcome: IncidentOutcome, job_reason: JobReason) -> str | None:
    """Return the exception (class and message) of the script that ended the job, or None."""
    if outcome is not IncidentOutcome.JOB_FAILED or cause is not Cause.RANK_EXIT:
        return None
    return job_reason.because.failure.error if isinstance(job_reason, GaveUp) else None


class MilestoneKind(StrEnum):
    """A moment of every recovery: the failure, its detection, all nodes ready, training again, and the end."""

    FAILED = "Failed"
    DETECTED = "Detected"
    REPLACED = "Replaced"
    RESTORED = "Restored"
    CLOSED = "Closed"


@dataclass(frozen=True, slots=True)
class IncidentMoment:
    """A moment of an incident. `at` is in Unix seconds."""

    kind: MilestoneKind
    at: float
    words: str


def milestones(account: Account) -> tuple[IncidentMoment, ...]:
    """Return the moments of an incident that have occurred, oldest first, in the words of its card."""
    step = account.from_step
    found = (
        (MilestoneKind.FAILED, account.failed_at, "The failure occurred."),
        (MilestoneKind.DETECTED, account.opened_at, "Everstep detected the failure."),
        (MilestoneKind.REPLACED, account.replaced_at, f"{_replacement(account)}."),
        (
            MilestoneKind.RESTORED,
            account.restored_at,
            f"Training resumed{'' if step is None else f' from step {step:,}'}.",
        ),
        (MilestoneKind.CLOSED, account.closed_at, CLOSED[account.outcome]),
    )
    return tuple(IncidentMoment(kind, at, words) for kind, at, words in found if at is not None)


def _replacement(account: Account) -> str:
    lost, new = listed(account.instance_ids), listed(account.replacement_instance_ids)
    if not new:
        return "All nodes were ready"
    were = "was" if len(account.replacement_instance_ids) == 1 else "were"
    return f"{new} {were} ready{f' in place of {lost}' if lost else ''}"


CLOSED: Final[Mapping[IncidentOutcome, str]] = {
    IncidentOutcome.OPEN: "The incident is open.",
    IncidentOutcome.RECOVERED: "Training had caught up.",
    IncidentOutcome.JOB_PAUSED: "The job was paused.",
    IncidentOutcome.JOB_COMPLETED: "The job completed.",
    IncidentOutcome.JOB_FAILED: "The job failed.",
    IncidentOutcome.JOB_STOPPED: "The job was stopped.",
}


def verdict(account: Account, now: float) -> str:
    """Return what failed, and the state of the job now: two short sentences."""
    return f"{_failure(account)} {_ending(account, now)}"


def _may_shrink(account: Account) -> bool:
    return account.wait is not None and 0 < account.node_count - account.wait.missing_count < account.least_node_count


def _failure(account: Account) -> str:
    where = account.faulted_instance_ids or account.instance_ids
    if (error := account.script_error) is not None:
        rank = "" if account.failed_rank is None else f" on rank {account.failed_rank}"
        return f"The training script failed{rank}: {error.rstrip('.')}."
    fault = hardware_fault(account.evidence)
    words = occurrence(account.cause, where)
    if account.cause is Cause.NODE_FAULT and fault is not None and where:
        words = f"{listed(where)} reported {fault_name(fault.fault)}"
    absent = absent_seconds(account.evidence)
    down = "" if absent is None else f" while the control plane was down for {duration(absent)}"
    return f"{words}{down}."


def _ending(account: Account, now: float) -> str:
    match account.outcome:
        case IncidentOutcome.OPEN if account.taken_over_by:
            return f"Nobody recovers the job, because {account.taken_over_by} controls it."
        case IncidentOutcome.OPEN:
            return f"{_waiting(account)}."
        case IncidentOutcome.RECOVERED if absent_seconds(account.evidence) is not None:
            return f"The control plane is up again, and Everstep recovered the job{_loss(account)}."
        case IncidentOutcome.RECOVERED:
            fewer = ", on fewer nodes" if account.cause is Cause.SHRUNK else ""
            took = duration(account.interruption_seconds(now))
            return f"Everstep recovered the job in {took}{fewer}{_loss(account)}."
        case ended:
            return f"{CLOSED[ended].rstrip('.')}{_loss(account) if account.has_ended_the_job else ''}."


def _waiting(account: Account) -> str:
    if account.wait is not None:
        return f"The job waits for {missing(account)}"
    waits = jobs.waiting(account.job_reason)
    return "Everstep is recovering the job" if waits is None else f"The job {waits}"


def _loss(account: Account) -> str:
    if account.lost_steps is None:
        return ""
    if not account.has_ended_the_job or account.lost_steps == 0:
        return "; no step was lost"
    return f"; {_counted(account.lost_steps)} {'is' if account.lost_steps == 1 else 'are'} lost"


def continuing_cost(account: Account, now: float) -> str:
    """Return what the incident costs from now on, as a sentence, or an empty text if it costs nothing more."""
    price = account.price_usd_per_hour
    if account.outcome is IncidentOutcome.JOB_FAILED:
        if account.idle_count == 0:
            return ""
        is_one = account.idle_count == 1
        nodes = f"{account.idle_count} idle {'node' if is_one else 'nodes'}"
        if price is None:
            return f"{nodes} still {'costs' if is_one else 'cost'} money."
        return f"{nodes} {'costs' if is_one else 'cost'} {hourly(price * account.idle_count)}."
    if price is None:
        return ""
    if account.wait is not None:
        idle = max(0, account.node_count - account.wait.missing_count)
        if idle == 0:
            return ""
        at = account.wait.next_attempt_at
        is_dated = at > now and not (account.is_long_wait and _may_shrink(account))
        total = f", ${price * idle * (at - now) / 3600:,.2f} until the next attempt" if is_dated else ""
        return f"Waiting costs {hourly(price * idle)}{total}."
    if not account.held:
        return ""
    count = len(account.held)
    nodes = "The unused node costs" if count == 1 else f"The {count} unused nodes cost"
    return f"{nodes} {hourly(price * count)}."


def _counted(steps: int) -> str:
    return "no step" if steps == 0 else "1 step" if steps == 1 else f"{steps:,} steps"


def missing(account: Account) -> str:
    """Return the nodes for which a job waits: `1 p5.48xlarge in us-east-2a`. Empty if the job waits for none."""
    if account.wait is None:
        return ""
    count = account.wait.missing_count
    what = account.instance_type or ("node" if count == 1 else "nodes")
    return f"{count} {what}" + (f" in {account.availability_zone}" if account.availability_zone else "")


def moment_words(at: float) -> str:
    """Return the time of day of a moment in Unix seconds: `01:10:09 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """Return a length of time as text for people: `0.4 s`, `12 s`, `4 min 05 s`, `2 h 05 min`, `3 d 4 h`.

    The dashboard formats durations in the same way (`duration` in web/src/model/format.ts).
    """
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = _rounded(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = _rounded(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = _rounded(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def _rounded(value: float) -> int:
    """Return the nearest whole number. A half is rounded up, as in the dashboard's JavaScript."""
    return math.floor(value + 0.5)
