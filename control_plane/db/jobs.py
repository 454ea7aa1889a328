"""Jobs: their specification, state and generations.

Invariant: only the holder of a job's lease writes its state. Users' requests are separate columns, such as
`stop_requested_at`, to which the job loop responds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.core.checkpoints import DEFAULT_TRASH_HOURS
from control_plane.core.membership import Launch
from control_plane.core.observed.specs import JobSettings, RehearsalMode
from control_plane.core.states import JobState
from control_plane.db import leases
from control_plane.db.errors import AlreadyExists, AmbiguousName, Conflict, NotFound, StaleLease
from control_plane.db.leases import Lease
from control_plane.db.models import CheckpointRow, GenerationRow, IncidentRow, JobRow, NodeRow, QuotaRow
from control_plane.db.session import changed_rows, columns_for, columns_of, values_of
from everstep.protocol.codec import decode, encode, resolve
from everstep.protocol.plan import CHECK_VARIABLE, GenerationPlan

LAUNCHES_LIMIT = 400
"""Maximum number of generations that `launches` returns."""
TRANSITIONS_LIMIT = 400
"""Maximum per job: the first transition and the newest ones."""
LATE: Final = timedelta(minutes=10)
"""Time after a generation's end in which its nodes may still report. Agents send their last values within seconds."""
LATE_OUTPUTS: Final = timedelta(days=1)
"""Like `LATE`, for outputs that S3 did not store: agents try their upload for as long as S3 is out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """One input channel of a job."""

    name: str
    uri: str = ""
    """`s3://bucket/key`. Empty if the channel is a directory on the nodes."""
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """A checkpoint of another job, from which a job starts."""

    run_id: str
    """Run that made the checkpoint."""
    job_name: str
    generation: int
    step: int
    world_size: int
    """Ranks that made the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJobSpec(JobSettings):
    """A job's specification, which the API has checked against the fleet and the source."""

    source_sha256: str
    source_bucket: str
    source_key: str
    source_bytes: int
    entry_point: str
    module: str = ""
    """Ranks run `entry_point` under this name as `python -m` does. Empty: as a script."""
    hyperparameters: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint_uri: str
    """Prefix `s3://bucket/prefix/`. Keys of objects also contain generation and step."""
    checkpoint_max_count: int | None = None
    """Newest checkpoints that the job keeps. None means all."""
    checkpoint_keep_every_steps: int | None = None
    """The job keeps the first checkpoint at or after each multiple, in spite of other limits. None: no such rule."""
    checkpoint_max_age_seconds: int | None = None
    checkpoint_trash_hours: int = DEFAULT_TRASH_HOURS
    """Hours of deleted checkpoints in the trash. 0: no trash."""
    output_uri: str
    kept_files: list[str] = field(default_factory=list)
    """Patterns of files in the source directory that become outputs."""
    log_uri: str
    preemptible: bool = False
    """Whether a job of higher priority may pause this job."""
    fleet_names: list[str] = field(default_factory=list)
    """Fleets in which the job may start, preferred ones first. Empty: only the fleet that the request named."""
    initial: InitialState | None = None
    """None: the script's own initial state."""
    inputs: tuple[JobInput, ...] = ()
    requirements: str = ""
    """Path of a requirements file in the source archive. Empty if the job needs no packages."""
    role_arn: str = ""
    secrets: dict[str, str] = field(default_factory=dict)
    """Locations in AWS, never values, by environment variable."""


@dataclass(frozen=True, slots=True)
class JobTransition:
    """The state that the job entered, the time and the reason."""

    state: str
    reason: str
    at: datetime
    is_paused: bool = False
    """Whether a user had paused the job at that time."""
    stepped_at: datetime | None = None
    """For the state running: when a rank finished the first new step. None before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobColumns:
    """Columns that a new job and a stored job have."""

    run_id: str
    name: str
    fleet_name: str
    project: str
    priority: int
    tags: Mapping[str, str]
    spec: SavedJobSpec
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress(JobColumns):
    """Columns that only the job loop may change."""

    started_at: datetime | None
    ended_at: datetime | None
    generation: int
    issued_generation: int
    base_step: int
    committed_step: int
    proposed_step: int
    boundary: int
    max_boundary: int
    target_step: int
    committed_at: datetime | None
    failures: tuple[Mapping[str, Any], ...]
    """Recent failures as JSON, from which `core.breakers` decides on a retry."""
    accounting: Mapping[str, int]
    """Microseconds up to `accounted_until`, by `core.observed.spans.Bucket`."""
    accounted_until: datetime | None
    node_microseconds: int
    """Up to `accounted_until`, summed over nodes."""
    cost_usd: float | None
    """Cost at the fleet's price. None without a price."""
    memo: Mapping[str, Any]
    """`core.observed.jobs.Memo` as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob(JobProgress):
    """A row of the table of jobs."""

    revision: int
    transitions: tuple[JobTransition, ...]
    stop_requested_at: datetime | None
    pause_requested_at: datetime | None
    checkpoint_wanted_step: int
    checkpoint_wanted_at: datetime | None
    rehearsal_requested_at: datetime | None
    taken_over_at: datetime | None
    taken_over_by: str
    accepted_step: int
    accepted_after: int
    created_at: datetime
    modified_at: datetime
    purge_at: datetime | None
    """Time at which a job in the trash is deleted for good. None outside of the trash."""
    project_quota: int | None = None
    """Nodes per fleet for all jobs of the project. None: no limit, or the record is not from `unfinished`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(JobColumns):
    """Columns of a new job, as the user's request determines them."""

    request_digest: str | None = None
    request_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGeneration:
    """A generation and its plan."""

    number: int
    revision: int
    parent: int
    base_step: int
    plan: GenerationPlan
    created_at: datetime
    started_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """A generation without its plan, with its parent and times."""

    number: int
    parent: int
    base_step: int
    world_size: int
    planned_at: datetime
    started_at: datetime | None


def create(session: Session, job: NewJob, now: datetime) -> SavedJob:
    """Store a new job, whose columns the caller has validated.

    Raises AlreadyExists if the project has a job with this name, ended or not, or if the request token has already
    created a job.
    """
    row = JobRow(
        **values_of(job, leave_out=("spec",)),
        spec=msgspec.to_builtins(job.spec),
        transitions=[_transition(job.state, job.reason, now)],
        created_at=now,
        modified_at=now,
    )
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        raise AlreadyExists("training job", job.name) from error
    return record_of_row(row)


def made_by(session: Session, request_token: str, request_digest: str) -> SavedJob | None:
    """Return the job that an earlier, equal request created, or None.

    `request_token` is the digest of project and ClientRequestToken. Raises Conflict if an earlier request with the
    token had other content.
    """
    row = session.scalar(select(JobRow).where(JobRow.request_token == request_token))
    if row is None:
        return None
    if row.request_digest != request_digest:
        raise Conflict(f"the ClientRequestToken was used for another request: it made the training job {row.name!r}")
    return record_of_row(row)


RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
"""The API rejects job names of this form, so no text can be both a name and a run id."""
_JOB: Final = JobRow.__table__.c
_IS_IN_PROJECT: Final = _JOB.project == bindparam("project")
_BY_NAME: Final = (_JOB.name == bindparam("text"),)
_BY_RUN: Final = (_JOB.run_id == bindparam("text"),)


class ByNameOrRun:
    """Finds one job by its name or its run id.

    Instances are constants, because building their statements takes time.
    """

    def __init__(self, build: Callable[[Collection[ColumnElement[bool]]], Select[*tuple[Any, ...]]]) -> None:
        """Build the four variants of a SELECT: by name or run id, with or without a project.

        `build` returns the SELECT for conditions. Its rows must contain the columns of the table of jobs.
        """
        self._by_name = build(_BY_NAME)
        self._by_name_in_project = build((*_BY_NAME, _IS_IN_PROJECT))
        self._by_run = build(_BY_RUN)
        self._by_run_in_project = build((*_BY_RUN, _IS_IN_PROJECT))

    def rows(self, session: Session, text: str, project: str | None) -> Sequence[Row[*tuple[Any, ...]]]:
        """Return the rows of all jobs with this name or run id, in the order of their projects (None: all projects)."""
        if project is None:
            statement = self._by_run if RUN_ID.fullmatch(text) else self._by_name
            return sorted(session.execute(statement, {"text": text}), key=lambda row: str(row.project))
        statement = self._by_run_in_project if RUN_ID.fullmatch(text) else self._by_name_in_project
        return session.execute(statement, {"text": text, "project": project}).all()

    def row(self, session: Session, text: str, project: str | None) -> Row[*tuple[Any, ...]]:
        """Return the row of the only job with this name or run id.

        Raises NotFound without such a job, and AmbiguousName if jobs of several projects have this name.
        """
        found = self.rows(session, text, project)
        if not found:
            raise NotFound("training job", text)
        if len(found) > 1:
            raise AmbiguousName(text, {row.project: row.run_id for row in found})
        return found[0]


_ONE: Final = ByNameOrRun(lambda conditions: select(*_JOB).where(*conditions))


def get(session: Session, text: str, project: str | None = None) -> SavedJob:
    """Return the job with this name or run id, in one project or in all (None).

    Raises:
        NotFound: the job does not exist in the project.
        AmbiguousName: jobs of several projects have this name.
    """
    return record_of_row(_ONE.row(session, text, project))


def named(session: Session, text: str, project: str | None) -> tuple[SavedJob, ...]:
    """Return all jobs with this name or run id; several only if `project` is None."""
    return tuple(record_of_row(row) for row in _ONE.rows(session, text, project))


@dataclass(frozen=True, slots=True)
class Owner:
    """Name and project of the job that a run belongs to."""

    job_name: str
    project: str


def owners(session: Session, run_ids: Collection[str]) -> Mapping[str, Owner]:
    """Return name and project by run. Unknown runs are missing."""
    if not run_ids:
        return {}
    query = select(JobRow.run_id, JobRow.name, JobRow.project).where(JobRow.run_id.in_(run_ids))
    return {run_id: Owner(name, project) for run_id, name, project in session.execute(query)}


_COLUMNS: Final = columns_for(JobRow, SavedJob, leave_out=("project_quota",))
_OF_RUN: Final = select(*_COLUMNS).where(_JOB.run_id == bindparam("of_run"))


def get_run(session: Session, run_id: str) -> SavedJob:
    """Return the job of this run, or raise NotFound."""
    row = session.execute(_OF_RUN, {"of_run": run_id}).one_or_none()
    if row is None:
        raise NotFound("run", run_id)
    return record_of_row(row)


_UNFINISHED: Final = (
    select(*_COLUMNS, QuotaRow.__table__.c.max_node_count.label("project_quota"))
    .select_from(JobRow.__table__.outerjoin(QuotaRow.__table__, QuotaRow.__table__.c.project == _JOB.project))
    .where(_JOB.ended_at.is_(None))
    .order_by(_JOB.priority.desc(), _JOB.created_at, _JOB.run_id)
)
_UNFINISHED_OF_FLEET: Final = _UNFINISHED.where(_JOB.fleet_name == bindparam("of_fleet"))


def unfinished(session: Session, fleet_name: str | None = None) -> tuple[SavedJob, ...]:
    """Return the unfinished jobs of one fleet or all, by priority (highest first), then by age."""
    query = _UNFINISHED if fleet_name is None else _UNFINISHED_OF_FLEET
    found = session.execute(query, {"of_fleet": fleet_name})
    return tuple(record_of_row(row, project_quota=row.project_quota) for row in found)


def ended(session: Session, *, failed_after: datetime, also: Collection[str] = ()) -> tuple[SavedJob, ...]:
    """Return jobs that failed after a time, and ended jobs whose run ids are in `also`, oldest end first."""
    has_failed = and_(JobRow.state == JobState.FAILED.value, JobRow.ended_at > failed_after)
    is_named = and_(JobRow.run_id.in_(also), JobRow.ended_at.is_not(None))
    query = select(JobRow).where(or_(has_failed, is_named)).order_by(JobRow.ended_at)
    return tuple(record_of_row(row) for row in session.scalars(query))


def starting_from(session: Session, run_id: str) -> tuple[SavedJob, ...]:
    """Return the unfinished jobs of all projects that start from a checkpoint of the run, oldest first."""
    query = select(JobRow).where(JobRow.spec["initial"]["run_id"].as_string() == run_id, JobRow.ended_at.is_(None))
    return tuple(record_of_row(row) for row in session.scalars(query.order_by(JobRow.created_at, JobRow.run_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A run with at least one generation, the newest of which it contains."""

    run_id: str
    generation: int
    launched_at: datetime
    """Time at which the newest generation was planned."""
    ended_at: datetime | None


def launched(session: Session) -> tuple[LaunchedRun, ...]:
    """Return all runs that have a generation, by run id, also those of ended jobs."""
    query = (
        select(JobRow.run_id, JobRow.generation, GenerationRow.created_at, JobRow.ended_at)
        .join(GenerationRow, (GenerationRow.run_id == JobRow.run_id) & (GenerationRow.number == JobRow.generation))
        .order_by(JobRow.run_id)
    )
    return tuple(
        LaunchedRun(run_id=run_id, generation=generation, launched_at=launched_at, ended_at=ended_at)
        for run_id, generation, launched_at, ended_at in session.execute(query)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """Sums over all jobs of a fleet, including ended jobs."""

    spent: Mapping[str, int]
    """Microseconds by `core.observed.spans.Bucket`."""
    node_microseconds: int
    cost_usd: float | None
    """None if no job has a cost."""


def totals(session: Session, fleet_name: str, buckets: Collection[str]) -> JobTotals:
    """Add up the time and cost of all jobs of a fleet. `buckets` names the kinds of time to add up."""
    names = tuple(buckets)
    spent = [func.coalesce(func.sum(JobRow.accounting[name].as_integer()), 0) for name in names]
    query = select(*spent, func.coalesce(func.sum(JobRow.node_microseconds), 0), func.sum(JobRow.cost_usd)).where(
        JobRow.fleet_name == fleet_name
    )
    *sums, node_microseconds, cost_usd = session.execute(query).one()
    by_bucket = {name: int(total) for name, total in zip(names, sums, strict=True) if total}
    return JobTotals(spent=by_bucket, node_microseconds=int(node_microseconds), cost_usd=cost_usd)


def request_stop(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request to stop a job. Idempotent. Raises NotFound, and Conflict if the job has ended."""
    job = _unended(session, run_id)
    return job if job.stop_requested_at is not None else _with_request(session, job, now, stop_requested_at=now)


def request_pause(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request to pause a job. Idempotent.

    Raises NotFound, and Conflict if the job has ended or a user has requested its stop.
    """
    job = _unended(session, run_id)
    if job.stop_requested_at is not None:
        raise Conflict(f"the training job {job.name!r} stops at a user's request and cannot be paused")
    return job if job.pause_requested_at is not None else _with_request(session, job, now, pause_requested_at=now)


def withdraw_pause(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Remove the pause request of a job, if it has one. Raises NotFound, and Conflict if the job has ended."""
    job = _unended(session, run_id)
    return job if job.pause_requested_at is None else _with_request(session, job, now, pause_requested_at=None)


def request_rehearsal(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request for a rehearsal.

    Raises NotFound. Raises Conflict if the job has ended or stops, turns rehearsals off, or is a determinism check.
    """
    job = _unended(session, run_id)
    if job.stop_requested_at is not None:
        raise Conflict(f"the training job {job.name!r} stops at a user's request and cannot rehearse")
    if job.spec.rehearsal_mode is RehearsalMode.OFF:
        raise Conflict(f"the training job {job.name!r} cannot rehearse, because its Rehearsal.Mode is Off")
    if CHECK_VARIABLE in job.spec.environment:
        raise Conflict(f"the training job {job.name!r} is a determinism check, which does not rehearse")
    return _with_request(session, job, now, rehearsal_requested_at=now)


def _unended(session: Session, run_id: str) -> SavedJob:
    job = get_run(session, run_id)
    if job.ended_at is not None:
        raise Conflict(f"the training job {job.name!r} has ended: {job.reason}")
    return job


def _with_request(session: Session, job: SavedJob, now: datetime, **columns: datetime | None) -> SavedJob:
    session.execute(update(JobRow).where(JobRow.run_id == job.run_id).values(modified_at=now, **columns))
    return get_run(session, job.run_id)


def want_checkpoint(session: Session, run_id: str, step: int, now: datetime) -> None:
    """Record a user's request for a checkpoint (CreateCheckpoint) of `step` or a later step."""
    session.execute(
        update(JobRow).where(JobRow.run_id == run_id).values(checkpoint_wanted_step=step, checkpoint_wanted_at=now)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """Rows per table, besides the job's own, that the deletion of a job deletes."""

    generations: int
    checkpoints: int
    incidents: int


def rows_of(session: Session, run_id: str) -> JobRows:
    """Count the rows in other tables that the deletion of a job deletes."""

    def count(table: type[GenerationRow | CheckpointRow | IncidentRow]) -> int:
        return session.scalar(select(func.count()).select_from(table).where(table.run_id == run_id)) or 0

    return JobRows(generations=count(GenerationRow), checkpoints=count(CheckpointRow), incidents=count(IncidentRow))


def require_ended(session: Session, job: SavedJob) -> None:
    """Raise Conflict if a job has not ended, or if a node still has the job's state in its memory."""
    if job.ended_at is None:
        raise Conflict(
            f"the training job {job.name!r} has not ended; stop it first (StopTrainingJob) and wait until it is Stopped"
        )
    busy = session.scalars(
        select(NodeRow.id).where(NodeRow.run_id == job.run_id, NodeRow.ended_at.is_(None)).order_by(NodeRow.id)
    ).all()
    if busy:
        raise Conflict(
            f"the training job {job.name!r} has ended, but nodes still delete its state: {', '.join(busy)}; "
            "try again in a moment"
        )


def set_purge_at(session: Session, run_id: str, at: datetime | None) -> None:
    """Move a job to the trash until a time, or take it out of the trash (None)."""
    session.execute(update(JobRow).where(JobRow.run_id == run_id).values(purge_at=at))


def remove(session: Session, run_id: str) -> None:
    """Delete an ended job with its generations, checkpoints and incidents, but not its events and fault histories.

    Raises NotFound if no ended job has this run.
    """
    if not changed_rows(session.execute(delete(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_not(None)))):
        raise NotFound("ended training job", run_id)


def issued_generations(session: Session) -> dict[str, tuple[str, int]]:
    """Return each unfinished run's checkpoint prefix and highest issued generation number, if it has one."""
    columns = (JobRow.run_id, JobRow.spec["checkpoint_uri"].as_string(), JobRow.issued_generation)
    query = select(*columns).where(JobRow.ended_at.is_(None), JobRow.issued_generation > 0)
    return {run_id: (uri, number) for run_id, uri, number in session.execute(query)}


def set_memo(session: Session, run_id: str, memo: Mapping[str, Any]) -> None:
    """Replace the memo of an ended job. The job loop writes those of unfinished jobs."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_not(None))
    session.execute(query.values(memo=dict(memo)))


def take_over(session: Session, run_id: str, who: str, now: datetime) -> bool:
    """Record TakeOverTrainingJob. Return False if a user already controls the job or the job has ended."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_(None), JobRow.taken_over_at.is_(None))
    return bool(changed_rows(session.execute(query.values(taken_over_at=now, taken_over_by=who))))


def hand_back(session: Session, run_id: str) -> bool:
    """End a person's takeover of a job. Return False if Everstep already controls the job."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.taken_over_at.is_not(None))
    return bool(changed_rows(session.execute(query.values(taken_over_at=None, taken_over_by=""))))


def accept_loss(session: Session, run_id: str, *, step: int, after: int, now: datetime) -> None:
    """Record a person's consent that the job continues from `step` after the end of generation `after`."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_(None))
    session.execute(query.values(accepted_step=step, accepted_after=after, modified_at=now))


def change(session: Session, lease: Lease, **changes: object) -> None:
    """Change columns of a job, except its state. Raises StaleLease."""
    leases.guard(session, lease)
    if changes:
        session.execute(update(JobRow).where(JobRow.run_id == lease.key).values(**changes))


def transition(
    session: Session, lease: Lease, *, before: str, after: str, now: datetime, reason: str, **changes: object
) -> None:
    """Change a job's state, which `core.states` has allowed, and append the transition to its history.

    Raises StaleLease if another server has taken the lease over, or the state is not `before`.
    """
    leases.guard(session, lease)
    found = session.execute(
        select(JobRow.transitions, JobRow.pause_requested_at).where(JobRow.run_id == lease.key, JobRow.state == before)
    ).one_or_none()
    if found is None:
        raise StaleLease(f"the job of run {lease.key} is no longer in state {before}")
    story, paused_at = found
    longer = [*story, _transition(after, reason, now, is_paused=paused_at is not None)]
    if len(longer) > TRANSITIONS_LIMIT:
        longer = [longer[0], *longer[1 - TRANSITIONS_LIMIT :]]
    session.execute(
        update(JobRow)
        .where(JobRow.run_id == lease.key)
        .values(state=after, reason=reason, transitions=longer, modified_at=now, **changes)
    )


def note_first_step(session: Session, lease: Lease, stepped_at: datetime) -> None:
    """Record when the newest generation finished its first new step, by the clock of a rank's node.

    Raises StaleLease.
    """
    leases.guard(session, lease)
    story = [
        msgspec.convert(entry, JobTransition)
        for entry in session.scalars(select(JobRow.transitions).where(JobRow.run_id == lease.key)).one()
    ]
    number = max((index for index, entry in enumerate(story) if entry.state == "running"), default=None)
    if number is not None:
        story[number] = replace(story[number], stepped_at=stepped_at)
        session.execute(update(JobRow).where(JobRow.run_id == lease.key).values(transitions=msgspec.to_builtins(story)))


def add_generation(session: Session, lease: Lease, plan: GenerationPlan, now: datetime, *, revision: int = 1) -> None:
    """Store a generation and its plan, which never changes, as the job's newest. Raises StaleLease.

    `revision` is the specification's, from which the plan was made. Raises AlreadyExists if the generation already has
    a plan.
    """
    leases.guard(session, lease)
    number = int(plan.generation)
    if session.get(GenerationRow, (lease.key, number)) is not None:
        raise AlreadyExists("generation", f"{plan.job}/{number}")
    session.add(
        GenerationRow(
            run_id=lease.key,
            number=number,
            revision=revision,
            parent=int(plan.parent),
            base_step=int(plan.base_step),
            world_size=plan.world_size,
            plan=encode(plan),
            node_ids=tuple(node.node_id for node in plan.nodes),
            created_at=now,
        )
    )
    session.flush()
    session.execute(
        update(JobRow).where(JobRow.run_id == lease.key).values(generation=number, base_step=int(plan.base_step))
    )


def launches(session: Session, run_id: str) -> tuple[Launch, ...]:
    """Return the newest `LAUNCHES_LIMIT` generations of a run with their nodes, oldest first."""
    # The node ids come from a separate column, because decoding the plans would take longer.
    query = (
        select(GenerationRow.created_at, GenerationRow.node_ids)
        .where(GenerationRow.run_id == run_id)
        .order_by(GenerationRow.number.desc())
        .limit(LAUNCHES_LIMIT)
    )
    return tuple(Launch(at, node_ids) for at, node_ids in reversed(session.execute(query).all()))


def mark_generation_started(session: Session, lease: Lease, number: int, now: datetime) -> None:
    """Record that the control plane ordered the start of a generation's ranks. Idempotent. Raises StaleLease."""
    leases.guard(session, lease)
    session.execute(
        update(GenerationRow)
        .where(GenerationRow.run_id == lease.key, GenerationRow.number == number, GenerationRow.started_at.is_(None))
        .values(started_at=now)
    )


def generation(session: Session, run_id: str, number: int) -> SavedGeneration:
    """Return one generation with its plan.

    Raises NotFound if it does not exist, or if retention has removed its plan.
    """
    row = session.get(GenerationRow, (run_id, number))
    if row is None or not row.plan:
        raise NotFound("plan of the generation", f"{run_id}/{number}")
    stored = columns_of(row, SavedGeneration, leave_out=("plan",))
    return SavedGeneration(**stored, plan=decode(row.plan, GenerationPlan))


_GENERATION: Final = GenerationRow.__table__.c
_LINEAGE: Final = (
    select(
        _GENERATION.number,
        _GENERATION.parent,
        _GENERATION.base_step,
        _GENERATION.world_size,
        _GENERATION.created_at.label("planned_at"),
        _GENERATION.started_at,
    )
    .where(_GENERATION.run_id == bindparam("of_run"))
    .order_by(_GENERATION.number)
)


def lineage(session: Session, run_id: str) -> tuple[LineageEntry, ...]:
    """Return all generations of a run that ever had a plan, without the plans, oldest first."""
    return tuple(LineageEntry(**row) for row in session.execute(_LINEAGE, {"of_run": run_id}).mappings())


def reporters(
    session: Session, run_id: str, generation: int, now: datetime, *, late: timedelta = LATE
) -> Mapping[str, int]:
    """Return the nodes that may report about a generation now, each with its place in the plan.

    Until the generation has been over for `late`, these are all nodes of its plan. Later, only those nodes may report
    that still work for the run. The node in place 0 has rank 0.
    """
    planned = session.scalar(
        select(GenerationRow.node_ids).where(GenerationRow.run_id == run_id, GenerationRow.number == generation)
    )
    following = (GenerationRow.run_id == run_id, GenerationRow.number > generation)
    over_since = session.scalar(
        select(GenerationRow.created_at).where(*following).order_by(GenerationRow.number).limit(1)
    ) or session.scalar(select(JobRow.ended_at).where(JobRow.run_id == run_id))
    places = {node_id: place for place, node_id in enumerate(planned or ())}
    if over_since is None or now - over_since <= late:
        return places
    working = workers(session, run_id)
    return {node_id: place for node_id, place in places.items() if node_id in working}


def workers(session: Session, run_id: str) -> frozenset[str]:
    """Return the nodes that work for a run now."""
    return frozenset(session.scalars(select(NodeRow.id).where(NodeRow.run_id == run_id)))


def planned(session: Session, run_id: str) -> tuple[SavedGeneration, ...]:
    """Return the generations of a run whose plans are still stored, oldest first."""
    query = select(GenerationRow.number).where(GenerationRow.run_id == run_id, GenerationRow.plan != b"")
    return tuple(
        generation(session, run_id, number) for number in session.scalars(query.order_by(GenerationRow.number))
    )


def record_of_row(row: JobRow | Row[*tuple[Any, ...]], project_quota: int | None = None) -> SavedJob:
    """Convert a row of the table of jobs to a record."""
    return SavedJob(
        **columns_of(row, SavedJob, leave_out=("spec", "transitions", "failures", "project_quota")),
        spec=msgspec.convert(row.spec, SavedJobSpec),
        transitions=tuple(msgspec.convert(entry, JobTransition) for entry in row.transitions),
        failures=tuple(row.failures),
        project_quota=project_quota,
    )


def _transition(state: str, reason: str, at: datetime, *, is_paused: bool = False) -> dict[str, Any]:
    entry: dict[str, Any] = msgspec.to_builtins(JobTransition(str(state), reason, at, is_paused))
    return entry


resolve(SavedJobSpec)
resolve(JobTransition)
