"""Decides what a person has to do for a job and for a fleet, and how urgent it is.

Invariant: pure. No other module decides whether a person must act. `accounts.duties` has the sentences and commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median_low

from control_plane.core.capacity import is_long
from control_plane.core.observed.causes import Reason
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.jobs import CapacityWait, JobRecord
from control_plane.core.observed.steps import RepeatedWork
from control_plane.core.states import (
    FleetStatus,
    IncidentPhase,
    JobState,
    ProtectionState,
    SecondaryStatus,
    TrainingJobStatus,
)
from everstep.protocol.ids import FIRST_STEP, Step

FAILED_SECONDS = 86_400.0
"""A failed job needs a person for this long after its end."""
STALLED_SECONDS = 60.0
STALLED_STEPS = 10
"""A running job is stalled after `STALLED_SECONDS` without a step, or after ten usual steps if these take longer."""
FIRST_STEP_SECONDS = 600.0
"""Limit for the first step of a launch, which includes imports, compilation and the first batches."""
FIRST_STEPS = 3
"""Up to this step, an unprotected job needs nobody, because the first commit takes a few steps."""
LATE_FACTOR = 3.0
"""A phase of a recovery is late after this many times its usual length."""
LATE_SECONDS = 300.0
"""A phase is late after this time if the job had no earlier incident of the same cause."""
LEAST_LATE_SECONDS = 30.0
"""No phase is late before this time, however short its usual length is."""
DEGRADED_SECONDS = 600.0
"""Everstep makes missing copies by itself. After this time without all copies, a person should find out why."""
UNSAVED_SECONDS = 3_600.0
UNSAVED_STEPS = 10_000
"""A job without a new checkpoint for `UNSAVED_SECONDS`, or for this many steps, needs a person."""
OVERDUE_FACTOR = 2.0
"""A checkpoint is overdue after this many times its own interval, however long the interval is."""


class Urgency(StrEnum):
    """The time by which a person must act.

    - NOW: the job makes no progress, or loses its protection, until a person acts.
    - LATER: something waits for a person. It is not urgent.
    - OPTIONAL: nothing waits for a person, but a person can do something useful.
    - NONE: there is nothing to do.
    """

    NOW = "Now"
    LATER = "Later"
    OPTIONAL = "Optional"
    NONE = "None"

    @property
    def needs_a_person(self) -> bool:
        """Whether the job or fleet counts as one that needs attention."""
        return self in (Urgency.NOW, Urgency.LATER)


class DutyKind(StrEnum):
    """The reason why a person has something to do.

    - NOTHING: there is nothing to do.
    - JOB_FAILED: the job failed, and does not start again by itself.
    - TAKEN_OVER: a person controls the job, so Everstep recovers nothing.
    - AUTOMATION_PAUSED: an administrator paused all automatic actions, so Everstep recovers nothing.
    - DELETIONS_PAUSED: the database was restored from a backup, so Everstep deletes nothing from S3.
    - CONSENT_TO_REPEAT: the job waits for consent, because it would repeat much work.
    - STORE_UNREACHABLE: the job waits, because S3 does not answer or refuses its reads.
    - FLEET_FROZEN: the fleet ends no instance, and so replaces none.
    - LAUNCHES_SUSPENDED: a person suspended the launches of the Auto Scaling group.
    - RECOVERY_LATE: a phase of the recovery takes much longer than usual.
    - STALLED: the ranks run, but make no steps.
    - FIRST_STEP_LATE: the ranks run, and have not made the first step of their launch.
    - PROTECTION_LOST: a running job keeps no step in memory.
    - CAPACITY_WAIT: AWS launches no instance for the job.
    - NO_CHECKPOINT: the job trains without a new checkpoint in S3.
    - RESUME_DIFFERS: a rehearsal has shown that a restart would not repeat the job's steps.
    - RESUME_UNPROVEN: a rehearsal has shown that a restart loses values that the script changes during training.
    - HELD_NODES: nodes that the job lost, or nodes of the fleet, wait for a person's decision.
    - DEGRADED: some shards have too few copies.
    - UNCONFIRMED: a node is silent or reports a fault, so the copies on it are uncertain.
    - FEWER_NODES: the job trains on fewer nodes than it asks for.
    - WITHOUT_COPIES: by its settings, the job loses steps with the loss of one node.
    - PAUSED: a person paused the job.
    """

    NOTHING = "Nothing"
    JOB_FAILED = "JobFailed"
    TAKEN_OVER = "TakenOver"
    AUTOMATION_PAUSED = "AutomationPaused"
    DELETIONS_PAUSED = "DeletionsPaused"
    CONSENT_TO_REPEAT = "ConsentToRepeat"
    STORE_UNREACHABLE = "StoreUnreachable"
    FLEET_FROZEN = "FleetFrozen"
    LAUNCHES_SUSPENDED = "LaunchesSuspended"
    RECOVERY_LATE = "RecoveryLate"
    STALLED = "Stalled"
    FIRST_STEP_LATE = "FirstStepLate"
    PROTECTION_LOST = "ProtectionLost"
    CAPACITY_WAIT = "CapacityWait"
    NO_CHECKPOINT = "NoCheckpoint"
    RESUME_DIFFERS = "ResumeDiffers"
    RESUME_UNPROVEN = "ResumeUnproven"
    HELD_NODES = "HeldNodes"
    DEGRADED = "Degraded"
    UNCONFIRMED = "Unconfirmed"
    FEWER_NODES = "FewerNodes"
    WITHOUT_COPIES = "WithoutCopies"
    PAUSED = "Paused"


class ActionKind(StrEnum):
    """An action of a person. `accounts.duties` has the sentence and the command of each kind."""

    READ_LOGS = "ReadLogs"
    SUBMIT_AGAIN = "SubmitAgain"
    HAND_BACK = "HandBack"
    RESUME_AUTOMATION = "ResumeAutomation"
    ACCEPT_RESTORE = "AcceptRestore"
    RESUME = "Resume"
    PAUSE = "Pause"
    STOP = "Stop"
    SHRINK = "Shrink"
    REPEAT_WORK = "RepeatWork"
    CHECK_STORE = "CheckStore"
    CORRECT_GROUP = "CorrectGroup"
    DESCRIBE_FLEET = "DescribeFleet"
    RESUME_LAUNCHES = "ResumeLaunches"
    LIST_EVENTS = "ListEvents"
    SHOW_PROTECTION = "ShowProtection"
    CREATE_CHECKPOINT = "CreateCheckpoint"
    SET_CHECKPOINTS = "SetCheckpoints"
    DECIDE_NODE = "DecideNode"
    CORRECT_SCRIPT = "CorrectScript"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNode:
    """A node that the fleet keeps out of use until a person decides."""

    node_id: str
    hold: Hold
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonAction:
    """One thing that a person can do, with its arguments."""

    kind: ActionKind
    urgency: Urgency
    node: HeldNode | None = None
    step: Step | None = None
    node_count: int | None = None
    repeat: RepeatedWork | None = None
    setting: str = ""
    is_recommended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonDuty:
    """The next actions of a person for one job or fleet, and the values that its sentences state."""

    kind: DutyKind
    urgency: Urgency
    actions: tuple[PersonAction, ...] = ()
    """Most urgent first."""
    since: float | None = None
    """Unix seconds. None if unknown."""
    next_attempt_at: float | None = None
    limit_seconds: float | None = None
    usual_seconds: float | None = None
    is_recovering: bool = False


NOTHING = PersonDuty(kind=DutyKind.NOTHING, urgency=Urgency.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The stored facts about a fleet from which its duty follows."""

    name: str
    auto_scaling_group_name: str
    status: FleetStatus
    drift: tuple[str, ...] = ()
    is_launch_suspended: bool = False
    """Whether a person suspended the launches. Everstep ends suspensions by AWS."""
    held: tuple[HeldNode, ...] = ()
    paused_at: float | None = None
    """Unix seconds of an administrator's pause of all automatic actions, or None."""
    restored_at: float | None = None
    """Unix time of a restore of the database whose differences no person has accepted, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The open incident of a job: its current phase, and the lengths of this phase in earlier incidents."""

    phase: IncidentPhase
    elapsed_seconds: float
    earlier_seconds: Sequence[float] = ()
    """Lengths of the phase in earlier incidents of the job with the same cause."""

    @property
    def usual_seconds(self) -> float | None:
        """The median of the earlier lengths, or None."""
        return median_low(self.earlier_seconds) if self.earlier_seconds else None

    @property
    def late_after_seconds(self) -> float:
        """The length from which the phase is late."""
        usual = self.usual_seconds
        return LATE_SECONDS if usual is None else max(LEAST_LATE_SECONDS, LATE_FACTOR * usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The degree to which the memory of the nodes protects a running job."""

    state: ProtectionState
    survives_node_loss: bool = True
    is_whole: bool = True
    """Whether all nodes of the launch are connected and report no fault."""
    changed_at: float | None = None
    """Unix seconds of the newest change of a holder, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a job in S3, and its schedule."""

    newest_step: Step | None = None
    newest_at: float | None = None
    """Unix seconds."""
    every_steps: int = 0
    interval_seconds: float | None = None
    is_scheduled: bool = True
    """Whether the job's settings make checkpoints due while it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The stored facts about a job from which its duty follows. Times are Unix seconds."""

    fleet: FleetFacts
    record: JobRecord
    status: TrainingJobStatus
    secondary: SecondaryStatus
    taken_over_at: float | None = None
    moved_at: float | None = None
    """Time of the newest step or commit of this launch, or the end of the last time without a control plane."""
    is_heard: bool = True
    steps_per_second: float | None = None
    """Rate over the whole job. None until it is meaningful."""
    recovery: Recovery | None = None
    node_count: int = 0
    least_node_count: int = 0
    launched_count: int = 0
    protection: Protection | None = None
    """None while the job has no nodes."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    held: tuple[HeldNode, ...] = ()


def of_job(facts: JobFacts, now: float) -> PersonDuty:
    """Return the most urgent duty for a job, followed by optional and less urgent actions of its other duties."""
    is_past = facts.record.ended_at is not None and not _failed_recently(facts, facts.record.ended_at, now)
    held = () if is_past else _of_nodes(facts.held)
    return _most_urgent((*_of_job(facts, now), *held))


def of_fleet(facts: FleetFacts) -> PersonDuty:
    """Return what a person has to do for a fleet."""
    return _most_urgent((*_of_fleet(facts), *_of_pauses(facts), *_of_nodes(facts.held)))


def of_incident(job: PersonDuty, held: Sequence[HeldNode]) -> PersonDuty:
    """Return the most urgent duty for an incident: of its job (or `NOTHING`), or of the nodes held because of it."""
    return _most_urgent((*(() if job is NOTHING else (job,)), *_of_nodes(held)))


def _most_urgent(found: Sequence[PersonDuty]) -> PersonDuty:
    if not found:
        return NOTHING
    first = min(found, key=lambda each: _RANK[each.urgency])
    others = (action for each in found if each is not first for action in each.actions)
    further = (action for action in others if action.urgency is not Urgency.NOW)
    actions = dict.fromkeys((*first.actions, *further))
    return replace(first, actions=tuple(sorted(actions, key=lambda each: _RANK[each.urgency])))


_RANK: Mapping[Urgency, int] = {urgency: number for number, urgency in enumerate(Urgency)}


def _of_job(facts: JobFacts, now: float) -> Iterator[PersonDuty]:
    if facts.record.ended_at is not None:
        if facts.status is TrainingJobStatus.FAILED:
            yield _of_failure(facts, facts.record.ended_at, now)
        return
    if facts.taken_over_at is not None:
        yield _unattended(facts, DutyKind.TAKEN_OVER, ActionKind.HAND_BACK, facts.taken_over_at)
        return
    if facts.fleet.paused_at is not None and facts.secondary is not SecondaryStatus.PAUSED:
        yield _unattended(facts, DutyKind.AUTOMATION_PAUSED, ActionKind.RESUME_AUTOMATION, facts.fleet.paused_at)
    if facts.secondary is SecondaryStatus.PAUSED:
        yield _duty(DutyKind.PAUSED, Urgency.OPTIONAL, ActionKind.RESUME, since=facts.record.state_since)
        return
    if facts.status is TrainingJobStatus.STOPPING:
        return
    if (work := facts.record.repeat) is not None:
        action = PersonAction(kind=ActionKind.REPEAT_WORK, urgency=Urgency.NOW, repeat=work)
        yield PersonDuty(kind=DutyKind.CONSENT_TO_REPEAT, urgency=Urgency.NOW, actions=(action,), since=work.since)
    if (wait := facts.record.store_wait) is not None:
        yield _duty(DutyKind.STORE_UNREACHABLE, Urgency.NOW, ActionKind.CHECK_STORE, since=wait.since)
    yield from (replace(each, is_recovering=facts.recovery is not None) for each in _of_fleet(facts.fleet))
    if facts.record.capacity_wait is not None and facts.secondary is not SecondaryStatus.TRAINING:
        yield _of_shortage(facts, facts.record.capacity_wait, now)
    elif facts.recovery is not None:
        yield from _of_recovery(facts.recovery)
    if facts.record.state is JobState.RUNNING and facts.secondary is not SecondaryStatus.PAUSING:
        yield from _of_progress(facts, now)
    if facts.secondary is SecondaryStatus.TRAINING:
        yield from _of_training(facts, now)
    result = facts.record.rehearsal.result
    if result is not None and (result.is_difference or result.is_unproven):
        # Most values that a restart loses are only printed.
        kind, urgency = (
            (DutyKind.RESUME_UNPROVEN, Urgency.OPTIONAL)
            if result.is_unproven
            else (DutyKind.RESUME_DIFFERS, Urgency.LATER)
        )
        yield _duty(kind, urgency, ActionKind.CORRECT_SCRIPT, since=result.at)


def _of_failure(facts: JobFacts, ended_at: float, now: float) -> PersonDuty:
    urgency = Urgency.NOW if _failed_recently(facts, ended_at, now) else Urgency.OPTIONAL
    again = PersonAction(kind=ActionKind.SUBMIT_AGAIN, urgency=urgency, step=facts.checkpoints.newest_step)
    return PersonDuty(kind=DutyKind.JOB_FAILED, urgency=urgency, actions=(again,), since=ended_at)


def _failed_recently(facts: JobFacts, ended_at: float, now: float) -> bool:
    return facts.status is TrainingJobStatus.FAILED and now - ended_at < FAILED_SECONDS


def _unattended(facts: JobFacts, kind: DutyKind, action: ActionKind, since: float) -> PersonDuty:
    """Return the duty for a job that Everstep only observes. It is urgent once the job needs more than that."""
    trains = facts.record.state is JobState.RUNNING and facts.secondary is not SecondaryStatus.PAUSING
    is_undone = facts.record.left_alone or facts.status is TrainingJobStatus.STOPPING or not trains
    return _duty(kind, Urgency.NOW if is_undone else Urgency.OPTIONAL, action, since=since)


def _of_fleet(fleet: FleetFacts) -> Iterator[PersonDuty]:
    if fleet.status is FleetStatus.FROZEN:
        drift = tuple(
            PersonAction(kind=ActionKind.CORRECT_GROUP, urgency=Urgency.NOW, setting=each) for each in fleet.drift
        )
        see = PersonAction(kind=ActionKind.DESCRIBE_FLEET, urgency=Urgency.NOW)
        yield PersonDuty(kind=DutyKind.FLEET_FROZEN, urgency=Urgency.NOW, actions=drift or (see,))
    elif fleet.is_launch_suspended and fleet.status is FleetStatus.ACTIVE:
        yield _duty(DutyKind.LAUNCHES_SUSPENDED, Urgency.NOW, ActionKind.RESUME_LAUNCHES)


def _of_pauses(fleet: FleetFacts) -> Iterator[PersonDuty]:
    if fleet.paused_at is not None:
        yield _duty(DutyKind.AUTOMATION_PAUSED, Urgency.LATER, ActionKind.RESUME_AUTOMATION, since=fleet.paused_at)
    if fleet.restored_at is not None:
        yield _duty(DutyKind.DELETIONS_PAUSED, Urgency.LATER, ActionKind.ACCEPT_RESTORE, since=fleet.restored_at)


def _of_nodes(held: Sequence[HeldNode]) -> Iterator[PersonDuty]:
    actions = tuple(PersonAction(kind=ActionKind.DECIDE_NODE, urgency=Urgency.LATER, node=each) for each in held)
    if actions:
        yield PersonDuty(kind=DutyKind.HELD_NODES, urgency=Urgency.LATER, actions=actions)


def _of_shortage(facts: JobFacts, wait: CapacityWait, now: float) -> PersonDuty:
    is_decision = is_long(wait, now) and facts.recovery is not None
    urgency = Urgency.LATER if is_decision else Urgency.OPTIONAL
    left = facts.node_count - wait.missing_count
    shrink = PersonAction(kind=ActionKind.SHRINK, urgency=urgency, node_count=left, is_recommended=is_decision)
    pause = PersonAction(kind=ActionKind.PAUSE, urgency=urgency)
    return PersonDuty(
        kind=DutyKind.CAPACITY_WAIT,
        urgency=urgency,
        actions=(shrink, pause) if 0 < left < facts.least_node_count else (pause,),
        next_attempt_at=wait.next_attempt_at,
        is_recovering=facts.recovery is not None,
    )


def _of_recovery(recovery: Recovery) -> Iterator[PersonDuty]:
    limit = recovery.late_after_seconds
    if recovery.elapsed_seconds > limit:
        first = ActionKind.DESCRIBE_FLEET if recovery.phase is IncidentPhase.REPLACE else ActionKind.READ_LOGS
        late = _duty(DutyKind.RECOVERY_LATE, Urgency.NOW, first, ActionKind.LIST_EVENTS)
        yield replace(late, limit_seconds=limit, usual_seconds=recovery.usual_seconds, is_recovering=True)


def _of_progress(facts: JobFacts, now: float) -> Iterator[PersonDuty]:
    rehearsal = facts.record.rehearsal
    begun = facts.record.state_since
    moved = max(facts.moved_at or begun, begun, rehearsal.ended_at or begun)
    if not facts.is_heard or (rehearsal.is_under_way and facts.record.suspicion is None):
        return
    if facts.record.boundary <= facts.record.base_step:
        if now - moved > FIRST_STEP_SECONDS:
            yield _duty(DutyKind.FIRST_STEP_LATE, Urgency.NOW, ActionKind.READ_LOGS, since=moved)
    elif now - moved > max(
        STALLED_SECONDS, STALLED_STEPS / facts.steps_per_second if facts.steps_per_second else STALLED_SECONDS
    ):
        stop = PersonAction(kind=ActionKind.STOP, urgency=Urgency.OPTIONAL)
        stalled = _duty(DutyKind.STALLED, Urgency.NOW, ActionKind.READ_LOGS, since=moved)
        yield replace(stalled, actions=(*stalled.actions, stop))


def _of_training(facts: JobFacts, now: float) -> Iterator[PersonDuty]:
    see, found = ActionKind.SHOW_PROTECTION, facts.protection
    if found is not None and found.state is ProtectionState.UNPROTECTED:
        # A launch that continues at a later step has kept none of its own steps yet.
        if facts.record.boundary - max(0, facts.record.base_step) > FIRST_STEPS:
            yield _duty(DutyKind.PROTECTION_LOST, Urgency.NOW, see, since=found.changed_at)
    elif found is not None and found.state is ProtectionState.DEGRADED:
        since = max(facts.record.state_since, found.changed_at or facts.record.state_since)
        lasts = now - since > DEGRADED_SECONDS
        yield _duty(DutyKind.DEGRADED, Urgency.LATER if lasts else Urgency.OPTIONAL, see, since=since)
    elif found is not None and not found.is_whole:
        yield _duty(DutyKind.UNCONFIRMED, Urgency.OPTIONAL, see)
    elif found is not None and not found.survives_node_loss:
        yield _duty(DutyKind.WITHOUT_COPIES, Urgency.OPTIONAL, see)
    if 0 < facts.launched_count < facts.node_count:
        yield _duty(DutyKind.FEWER_NODES, Urgency.OPTIONAL, ActionKind.DESCRIBE_FLEET)
    if _is_checkpoint_missing(facts, now):
        make = ActionKind.CREATE_CHECKPOINT if facts.checkpoints.is_scheduled else ActionKind.SET_CHECKPOINTS
        saved_at = facts.checkpoints.newest_at or facts.record.started_at
        yield _duty(DutyKind.NO_CHECKPOINT, Urgency.LATER, make, since=saved_at)


def _is_checkpoint_missing(facts: JobFacts, now: float) -> bool:
    kept = facts.checkpoints
    since = kept.newest_at or facts.record.started_at
    if since is None:
        return False
    steps = facts.record.max_boundary - (kept.newest_step or FIRST_STEP)
    if steps < OVERDUE_FACTOR * kept.every_steps or steps <= 0:
        return False
    if kept.interval_seconds is not None and now - since < OVERDUE_FACTOR * kept.interval_seconds:
        return False
    return steps >= UNSAVED_STEPS or now - since >= UNSAVED_SECONDS


def _duty(kind: DutyKind, urgency: Urgency, *actions: ActionKind, since: float | None = None) -> PersonDuty:
    return PersonDuty(
        kind=kind,
        urgency=urgency,
        actions=tuple(PersonAction(kind=each, urgency=urgency) for each in actions),
        since=since,
    )
