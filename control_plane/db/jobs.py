"""Jobs: their specification, state and generations.

Invariant: only the server that has a job's lease writes the job's state. Users' requests are separate columns (for
example `stop_requested_at`). The job loop, the server's background task that manages jobs, responds to these columns.

The module has more than 500 lines. It is not divided, because all its statements concern the rows of jobs and
generations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
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
"""Maximum number of generations that `launches` returns. The function omits older generations."""
TRANSITIONS_LIMIT = 400
"""Maximum number of stored transitions per job.

Above this limit, the job's row keeps the first transition and the newest ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """One input channel of a job."""

    name: str
    uri: str = ""
    """Location of the input, as `s3://bucket/key`. Empty if the channel is a directory on the nodes."""
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """The initial state of a job: a checkpoint of another job."""

    run_id: str
    """The run that made the checkpoint."""
    job_name: str
    generation: int
    step: int
    world_size: int
    """Number of ranks that made the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJobSpec(JobSettings):
    """A job's specification.

    The API checks it against the fleet and the source before it stores the job.
    """

    source_sha256: str
    source_bucket: str
    source_key: str
    source_bytes: int
    entry_point: str
    module: str = ""
    """Name under which ranks run `entry_point` as `python -m` does. Empty: they run it as a script."""
    hyperparameters: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint_uri: str
    """Prefix of the job's checkpoints, as `s3://bucket/prefix/`. The objects' keys also contain generation and step."""
    checkpoint_max_count: int | None = None
    """Number of newest checkpoints that the job keeps. None means all."""
    checkpoint_keep_every_steps: int | None = None
    """The job keeps the first checkpoint at or after each multiple of this number of steps, in spite of other limits.

    None: the rule does not apply.
    """
    checkpoint_max_age_seconds: int | None = None
    checkpoint_trash_hours: int = DEFAULT_TRASH_HOURS
    """Hours for which deleted checkpoints stay in the trash. 0: they are deleted at once."""
    output_uri: str
    kept_files: list[str] = field(default_factory=list)
    """Patterns of files in the source directory that become outputs."""
    log_uri: str
    preemptible: bool = False
    """Whether a job of higher priority may pause this job."""
    fleet_names: list[str] = field(default_factory=list)
    """Fleets in which the job may start, in order of preference. Empty means only the fleet that the request named."""
    initial: InitialState | None = None
    """The checkpoint from which the job starts. None means that the job starts from the script's own initial state."""
    inputs: tuple[JobInput, ...] = ()
    requirements: str = ""
    """Path of a requirements file in the source archive. Empty if the job needs no packages."""
    role_arn: str = ""
    secrets: dict[str, str] = field(default_factory=dict)
    """Locations of secrets in AWS, by environment variable. The database never contains the values of secrets."""


@dataclass(frozen=True, slots=True)
class JobTransition:
    """One entry of a job's history: the state that the job entered, the time and the reason."""

    state: str
    reason: str
    at: datetime
    is_paused: bool = False
    """Whether a user had paused the job when it entered the state."""
    stepped_at: datetime | None = None
    """For the state running: when a rank finished the generation's first new step. None before this step."""


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
    """Columns that only the job loop, the server's background task for jobs, may change."""

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
    """Recent failures, as JSON objects. `core.breakers` compares them to decide whether the job retries."""
    accounting: Mapping[str, int]
    """Microseconds of the job's time up to `accounted_until`, by accounting bucket (`core.observed.spans.Bucket`)."""
    accounted_until: datetime | None
    node_microseconds: int
    """Working time of the job's nodes up to `accounted_until`, summed over nodes."""
    cost_usd: float | None
    """Cost of the node time at the fleet's price. None if the fleet has no price."""
    memo: Mapping[str, Any]
    """Values that the job loop keeps from one decision to the next (`core.observed.jobs.Memo`), as JSON values."""


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
    """When the control plane deletes a job in the trash for good. None outside of the trash."""
    project_quota: int | None = None
    """Nodes per fleet that the project's jobs may use together.

    None if the project has no limit. Only records from `unfinished` contain the value.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(JobColumns):
    """Columns of a new job, as the user's request determines them."""

    request_digest: str | None = None
    request_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGeneration:
    """A generation (one launch of all ranks) and its plan."""

    number: int
    revision: int
    parent: int
    base_step: int
    plan: GenerationPlan
    created_at: datetime
    started_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """A generation without its plan: its parent (the earlier generation from which it took its base), and its times."""

    number: int
    parent: int
    base_step: int
    world_size: int
    planned_at: datetime
    started_at: datetime | None


def create(session: Session, job: NewJob, now: datetime) -> SavedJob:
    """Store a new job.

    The caller has validated the columns in `job`. Raises AlreadyExists if the project has a job with this name, ended
    or not, or if the same request token has already created a job.
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

    Args:
        session: from `Database.read` or `Database.write`.
        request_token: digest of the project and the caller's ClientRequestToken.
        request_digest: digest of the whole request.

    Returns:
        The stored job.

    Raises:
        Conflict: an earlier request with the same token but other content created a job.
    """
    row = session.scalar(select(JobRow).where(JobRow.request_token == request_token))
    if row is None:
        return None
    if row.request_digest != request_digest:
        raise Conflict(f"the ClientRequestToken was used for another request: it made the training job {row.name!r}")
    return record_of_row(row)


RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
"""The form of run ids. The API rejects job names of this form, so no text can be both a name and a run id."""
_JOB: Final = JobRow.__table__.c
_IS_IN_PROJECT: Final = _JOB.project == bindparam("project")
_BY_NAME: Final = (_JOB.name == bindparam("text"),)
_BY_RUN: Final = (_JOB.run_id == bindparam("text"),)


class ByNameOrRun:
    """Finds one job by its name or its run id.

    An instance contains the variants of one SQL statement. Instances are constants, because most requests about a job
    execute such a statement and its construction takes time.
    """

    def __init__(self, build: Callable[[Collection[ColumnElement[bool]]], Select[*tuple[Any, ...]]]) -> None:
        """Build the four variants of a SELECT of jobs: by name or by run id, with or without a project.

        `build` returns the SELECT for given conditions. Its rows must contain the columns of the table of jobs.
        """
        self._by_name = build(_BY_NAME)
        self._by_name_in_project = build((*_BY_NAME, _IS_IN_PROJECT))
        self._by_run = build(_BY_RUN)
        self._by_run_in_project = build((*_BY_RUN, _IS_IN_PROJECT))

    def rows(self, session: Session, text: str, project: str | None) -> Sequence[Row[*tuple[Any, ...]]]:
        """Return the rows of all jobs with this name or run id, in the order of their projects.

        `project` is the only project to search. None means all projects.
        """
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
    """Return the job with this name or run id.

    Args:
        session: from `Database.read` or `Database.write`.
        text: name or run id of the job.
        project: the only project to search. None means all projects.

    Returns:
        The job.

    Raises:
        NotFound: the job does not exist in the project.
        AmbiguousName: jobs of several projects have this name.
    """
    return record_of_row(_ONE.row(session, text, project))


def named(session: Session, text: str, project: str | None) -> tuple[SavedJob, ...]:
    """Return all jobs with this name or run id. The tuple has several jobs only if `project` is None."""
    return tuple(record_of_row(row) for row in _ONE.rows(session, text, project))


@dataclass(frozen=True, slots=True)
class Owner:
    """Name and project of the job that a run belongs to."""

    job_name: str
    project: str


def owners(session: Session, run_ids: Collection[str]) -> Mapping[str, Owner]:
    """Return name and project of the jobs of several runs, in one query. Unknown runs are missing in the result."""
    if not run_ids:
        return {}
    query = select(JobRow.run_id, JobRow.name, JobRow.project).where(JobRow.run_id.in_(run_ids))
    return {run_id: Owner(name, project) for run_id, name, project in session.execute(query)}


_COLUMNS: Final = columns_for(JobRow, SavedJob, leave_out=("project_quota",))
_OF_RUN: Final = select(*_COLUMNS).where(_JOB.run_id == bindparam("of_run"))


def get_run(session: Session, run_id: str) -> SavedJob:
    """Return the job of this run.

    Raises NotFound if the job does not exist.
    """
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
    """Return the unfinished jobs of one fleet, or of all fleets, by priority (highest first), then by age."""
    query = _UNFINISHED if fleet_name is None else _UNFINISHED_OF_FLEET
    found = session.execute(query, {"of_fleet": fleet_name})
    return tuple(record_of_row(row, project_quota=row.project_quota) for row in found)


def ended(session: Session, *, failed_after: datetime, also: Collection[str] = ()) -> tuple[SavedJob, ...]:
    """Return the jobs that failed after a time, and those ended jobs whose run ids are in `also`, oldest end first."""
    has_failed = and_(JobRow.state == JobState.FAILED.value, JobRow.ended_at > failed_after)
    is_named = and_(JobRow.run_id.in_(also), JobRow.ended_at.is_not(None))
    query = select(JobRow).where(or_(has_failed, is_named)).order_by(JobRow.ended_at)
    return tuple(record_of_row(row) for row in session.scalars(query))


def starting_from(session: Session, run_id: str) -> tuple[SavedJob, ...]:
    """Return the unfinished jobs of all projects whose initial state is a checkpoint of the given run, oldest first."""
    query = select(JobRow).where(JobRow.spec["initial"]["run_id"].as_string() == run_id, JobRow.ended_at.is_(None))
    return tuple(record_of_row(row) for row in session.scalars(query.order_by(JobRow.created_at, JobRow.run_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A run that has been launched at least once, with its newest generation."""

    run_id: str
    generation: int
    launched_at: datetime
    """When the control plane planned the newest generation."""
    ended_at: datetime | None
    """When the job ended. None for an unfinished job."""


def launched(session: Session) -> tuple[LaunchedRun, ...]:
    """Return all runs that have a generation, by run id. Runs of ended jobs are included."""
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
    """Total time, node time and cost of all jobs of a fleet, including ended jobs."""

    spent: Mapping[str, int]
    """Total time of the jobs in microseconds, by accounting bucket (`core.observed.spans.Bucket`)."""
    node_microseconds: int
    cost_usd: float | None
    """Sum of the jobs' costs. None if no job has a cost."""


def totals(session: Session, fleet_name: str, buckets: Collection[str]) -> JobTotals:
    """Add up the time and cost of all jobs of a fleet.

    All sums are zero if the fleet never had a job. `buckets` names the kinds of time, such as `train`, to add up.
    `session` comes from `Database.read` or `Database.write`.
    """
    names = tuple(buckets)
    spent = [func.coalesce(func.sum(JobRow.accounting[name].as_integer()), 0) for name in names]
    query = select(*spent, func.coalesce(func.sum(JobRow.node_microseconds), 0), func.sum(JobRow.cost_usd)).where(
        JobRow.fleet_name == fleet_name
    )
    *sums, node_microseconds, cost_usd = session.execute(query).one()
    by_bucket = {name: int(total) for name, total in zip(names, sums, strict=True) if total}
    return JobTotals(spent=by_bucket, node_microseconds=int(node_microseconds), cost_usd=cost_usd)


def request_stop(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request to stop a job. Idempotent.

    `session` comes from `Database.write`, and `now` is in UTC. Raises NotFound if the job does not exist, and Conflict
    if it has ended.
    """
    job = _unended(session, run_id)
    return job if job.stop_requested_at is not None else _with_request(session, job, now, stop_requested_at=now)


def request_pause(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request to pause a job until a user resumes it. Idempotent.

    `session` comes from `Database.write`, and `now` is in UTC. Raises NotFound if the job does not exist. Raises
    Conflict if the job has ended, or a user has requested its stop.
    """
    job = _unended(session, run_id)
    if job.stop_requested_at is not None:
        raise Conflict(f"the training job {job.name!r} stops at a user's request and cannot be paused")
    return job if job.pause_requested_at is not None else _with_request(session, job, now, pause_requested_at=now)


def withdraw_pause(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record that a user resumes a job, by removing the pause request. A job without a pause request stays unchanged.

    `session` comes from `Database.write`, and `now` is in UTC. Raises NotFound if the job does not exist, and Conflict
    if it has ended.
    """
    job = _unended(session, run_id)
    return job if job.pause_requested_at is None else _with_request(session, job, now, pause_requested_at=None)


def request_rehearsal(session: Session, run_id: str, now: datetime) -> SavedJob:
    """Record a user's request for a rehearsal.

    `session` comes from `Database.write`, and `now` is in UTC. Raises NotFound if the job does not exist. Raises
    Conflict if the job has ended or stops, if its settings turn rehearsals off, or if the job is a determinism check.
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
    """Record a user's request for a checkpoint (CreateCheckpoint) of `step` or of a later step."""
    session.execute(
        update(JobRow).where(JobRow.run_id == run_id).values(checkpoint_wanted_step=step, checkpoint_wanted_at=now)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """Number of rows per table (besides the job's own row) that the deletion of a job also deletes."""

    generations: int
    checkpoints: int
    incidents: int


def rows_of(session: Session, run_id: str) -> JobRows:
    """Count the rows in other tables that the deletion of a job would also delete."""

    def count(table: type[GenerationRow | CheckpointRow | IncidentRow]) -> int:
        return session.scalar(select(func.count()).select_from(table).where(table.run_id == run_id)) or 0

    return JobRows(generations=count(GenerationRow), checkpoints=count(CheckpointRow), incidents=count(IncidentRow))


def require_ended(session: Session, job: SavedJob) -> None:
    """Check that a job has ended and that no node works for it.

    Raises Conflict if the job has not ended, or if a node has not yet deleted the job's state from its memory.
    `session` comes from `Database.read` or `Database.write`.
    """
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
    """Move a job to the trash until a time, or take it out of the trash."""
    session.execute(update(JobRow).where(JobRow.run_id == run_id).values(purge_at=at))


def remove(session: Session, run_id: str) -> None:
    """Delete an ended job with its generations, checkpoints and incidents.

    Events and fault histories of nodes remain.

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
    """Record that a user takes control of a job from Everstep (TakeOverTrainingJob).

    Return False, and change nothing, if a user already controls the job or if the job has ended.
    """
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_(None), JobRow.taken_over_at.is_(None))
    return bool(changed_rows(session.execute(query.values(taken_over_at=now, taken_over_by=who))))


def hand_back(session: Session, run_id: str) -> bool:
    """End a person's takeover of a job. Return False, and change nothing, if Everstep already controls the job."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.taken_over_at.is_not(None))
    return bool(changed_rows(session.execute(query.values(taken_over_at=None, taken_over_by=""))))


def accept_loss(session: Session, run_id: str, *, step: int, after: int, now: datetime) -> None:
    """Record a person's consent that the job continues from a step, after the end of generation `after`."""
    query = update(JobRow).where(JobRow.run_id == run_id, JobRow.ended_at.is_(None))
    session.execute(query.values(accepted_step=step, accepted_after=after, modified_at=now))


def change(session: Session, lease: Lease, **changes: object) -> None:
    """Change columns of a job other than its state.

    Raises StaleLease, and writes nothing, if another control-plane server has taken the lease over.
    """
    leases.guard(session, lease)
    if changes:
        session.execute(update(JobRow).where(JobRow.run_id == lease.key).values(**changes))


def transition(
    session: Session, lease: Lease, *, before: str, after: str, now: datetime, reason: str, **changes: object
) -> None:
    """Change a job's state and append the transition to its history.

    Args:
        session: from `Database.write`.
        lease: lease of the job to update.
        before: state of the job when the decision was made.
        after: state to enter. `core.states` has checked that the transition is allowed.
        now: the time in UTC.
        reason: the reason for the new state.
        **changes: values of further columns, by the column's name.

    Raises:
        StaleLease: another control-plane server has taken the lease over, or the state is not `before`. Nothing was
            written.
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
    """Record when the newest generation of a job finished its first new step.

    Args:
        session: from `Database.write`.
        lease: lease of the job whose history changes.
        stepped_at: when a rank finished the step, in UTC, by the clock of the rank's node.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
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
    """Store a generation and its plan as the job's newest generation.

    Stored plans never change.

    Args:
        session: from `Database.write`.
        lease: lease of the job that the generation belongs to.
        plan: complete plan, which contains the generation's number.
        now: the time in UTC.
        revision: revision of the specification from which the plan was made.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
        AlreadyExists: the generation already has a plan.
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
    """Return the newest `LAUNCHES_LIMIT` generations of a run with their nodes, oldest first.

    The function reads the node ids from a separate column, because decoding the plans would take longer.
    """
    query = (
        select(GenerationRow.created_at, GenerationRow.node_ids)
        .where(GenerationRow.run_id == run_id)
        .order_by(GenerationRow.number.desc())
        .limit(LAUNCHES_LIMIT)
    )
    return tuple(Launch(at, node_ids) for at, node_ids in reversed(session.execute(query).all()))


def mark_generation_started(session: Session, lease: Lease, number: int, now: datetime) -> None:
    """Record that the control plane ordered the start of a generation's ranks.

    A repeated call changes nothing.

    `number` is the number of a generation with a stored plan. Raises StaleLease, and writes nothing, if another
    control-plane server has taken the lease of the job over.
    """
    leases.guard(session, lease)
    session.execute(
        update(GenerationRow)
        .where(GenerationRow.run_id == lease.key, GenerationRow.number == number, GenerationRow.started_at.is_(None))
        .values(started_at=now)
    )


def generation(session: Session, run_id: str, number: int) -> SavedGeneration:
    """Return one generation with its plan.

    Numbers start with 1. Raises NotFound if the generation does not exist, or if retention has removed its plan.
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
    """Return all generations of a run that ever had a plan, oldest first. The result omits the plans."""
    return tuple(LineageEntry(**row) for row in session.execute(_LINEAGE, {"of_run": run_id}).mappings())


def planned_nodes(session: Session, run_id: str, generation: int) -> frozenset[str]:
    """Return the nodes in a generation's plan. Empty if the generation does not exist."""
    found = session.scalar(
        select(GenerationRow.node_ids).where(GenerationRow.run_id == run_id, GenerationRow.number == generation)
    )
    return frozenset(found or ())


def was_planned(session: Session, run_id: str, node_id: str) -> bool:
    """Return whether a node was in the plan of any generation of a run."""
    plans = session.scalars(select(GenerationRow.node_ids).where(GenerationRow.run_id == run_id))
    return any(node_id in (nodes or ()) for nodes in plans)


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
