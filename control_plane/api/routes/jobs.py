"""Training jobs: create, list, describe, stop, pause and resume; their protection, nodes and checkpoints.

The module has more than 500 lines. It is not divided, because each route is short. Most of the functions after the
routes check and store the request of one route, CreateTrainingJob.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.api import page_tokens, plans, views
from control_plane.api.admission import admit
from control_plane.api.alike import shaped
from control_plane.api.allowance import allowance_of
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import (
    MaxResults,
    NextToken,
    Services,
    ServicesDep,
    TrainingJobNamePath,
    page_of,
)
from control_plane.api.errors import invalid
from control_plane.api.router import Router
from control_plane.api.schemas import checkpoints as checkpoints_schemas
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.api.schemas import plans as plans_schemas
from control_plane.cloud.errors import CloudError
from control_plane.core import accounting, membership
from control_plane.core.observed.fleets import FleetJob
from control_plane.core.queue import schedule
from control_plane.core.states import JobState
from control_plane.db import (
    checkpoints,
    descriptions,
    events,
    fleets,
    incidents,
    jobs,
    ledger_hours,
    nodes,
    protection,
    quotas,
    sources,
)
from control_plane.db.errors import AlreadyExists, Conflict, NotFound
from control_plane.db.fleets import FleetRecord
from control_plane.db.jobs import InitialState, NewJob, SavedJob, SavedJobSpec
from control_plane.db.quotas import QuotaRecord
from control_plane.db.tokens import Role
from control_plane.loop import disposition
from control_plane.loop.fleet_rows import schedule_of
from control_plane.loop.memos import capacity_wait_of
from control_plane.loop.records import shown_record

router = Router(prefix="/v1/training-jobs", tags=["TrainingJobs"])


@router.post("", operation_id="CreateTrainingJob", status_code=201)
def create_training_job(
    request: jobs_schemas.CreateTrainingJobRequest, caller: User, services: ServicesDep
) -> jobs_schemas.CreateTrainingJobResponse:
    """Create a training job, which starts once enough nodes are free.

    The job recovers from failures of ranks and nodes. With DryRun, the call creates nothing and returns a forecast for
    the job (Plan). Raises ValidationException if the name has the form of a RunId, 32 hexadecimal digits. Raises
    ConflictException if the project has a job with this name.
    """
    project = caller.choose_project(request.project)
    if jobs.RUN_ID.fullmatch(request.training_job_name):
        raise invalid("TrainingJobName", "has the form of a RunId, 32 hexadecimal digits; choose another name")
    token, digest = (None, None) if request.dry_run else _known_by(request, project)
    with services.database.read() as session:
        made = _made(session, token, digest)
        if made is not None:
            return _created(made)
        _require_free(session, request.training_job_name, project)
        fleet = _fleet(session, request.fleet_name)
        others = [_fleet(session, name, field="AlternativeFleetNames") for name in request.alternative_fleet_names]
        source = _source(session, request, caller)
        initial = _initial(session, request.initial_checkpoint, caller)
        quota = quotas.find(session, project)
        _require_room(session, quota)
    run_id = uuid.uuid4().hex
    spec = admit(
        request,
        run_id=run_id,
        project=project,
        fleet=fleet,
        max_node_count=_max_node_count(services, fleet),
        source=source,
        bucket=services.bucket,
        default_max_slowdown=services.default_max_slowdown,
        quota=quota,
        allowance=None if caller.role is Role.ADMIN else allowance_of(project, quota),
        alternatives=[(other, _max_node_count(services, other)) for other in others],
        initial=initial,
    )
    if request.dry_run:
        newcomer = plans.waiting(request, run_id, services.now().timestamp(), project=project, quota=quota)
        return jobs_schemas.CreateTrainingJobResponse(
            training_job_name=request.training_job_name, plan=_plan(services, newcomer, spec, fleet, caller)
        )
    new = NewJob(
        run_id=run_id,
        name=request.training_job_name,
        fleet_name=fleet.name,
        project=project,
        priority=request.priority,
        tags=request.tags,
        spec=spec,
        state=JobState.QUEUED,
        reason=f"Waiting in the queue of the fleet {fleet.name}.",
        request_digest=digest,
        request_token=token,
    )
    try:
        job = _store(services, new)
    except AlreadyExists:
        with services.database.read() as session:  # A concurrent identical request has already created the job.
            made = _made(session, token, digest)
        if made is None:
            raise
        return _created(made)
    return _created(job)


@router.get("/{TrainingJobName}", operation_id="DescribeTrainingJob")
def describe_training_job(
    training_job_name: TrainingJobNamePath, caller: Reader, services: ServicesDep
) -> jobs_schemas.TrainingJob:
    """Describe one training job: its configuration, its state, and the reason for the state."""
    agents = services.peers.agents().connected
    with services.database.read() as session:
        found = descriptions.find(session, training_job_name, caller.project_filter)
        job = found.job
        turns, stored_wait = schedule((), 0, 0.0), capacity_wait_of(job)
        is_waiting = job.state == JobState.QUEUED or stored_wait is not None
        fleet = fleets.find(session, job.fleet_name) if is_waiting else None
        if job.state == JobState.QUEUED:
            turns = schedule_of(
                fleet,
                jobs.unfinished(session, job.fleet_name),
                nodes.of_fleet(session, job.fleet_name),
                services.now().timestamp(),
            )
        standings = disposition.of_jobs(session, [job], agents, services.now().timestamp())
    return views.job(
        found,
        now=services.now(),
        turns=turns,
        disposition=standings[job.run_id],
        conditions=views.job_conditions(job, found.node_ids, agents, services.database.disk.full()),
        wait=views.capacity_wait(
            stored_wait,
            instance_type="" if fleet is None else fleet.instance_type,
            availability_zone="" if fleet is None else fleet.availability_zone,
        ),
        only_project=caller.project_filter,
    )


@router.post("/{TrainingJobName}/stop", operation_id="StopTrainingJob")
def stop_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """Stop a training job: all ranks stop at the same step, and Everstep stores their state at this step.

    Repeated calls change nothing.
    """
    return _ask(services, training_job_name, caller, jobs.request_stop, "StopRequested", "requested to stop")


@router.post("/{TrainingJobName}/pause", operation_id="PauseTrainingJob", status_code=202)
def pause_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """Pause a training job: all ranks stop at one agreed step, which is stored in S3.

    The job gives its nodes back to the fleet until ResumeTrainingJob. A job that is being launched pauses once it
    trains. Repeated calls change nothing.
    """
    return _ask(services, training_job_name, caller, jobs.request_pause, "PauseRequested", "requested to pause")


@router.post("/{TrainingJobName}/resume", operation_id="ResumeTrainingJob", status_code=202)
def resume_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """Resume a paused training job: it waits in the queue, then continues bit-identically from its checkpoint.

    The call does not change a job that is not paused.
    """
    return _ask(services, training_job_name, caller, jobs.withdraw_pause, "ResumeRequested", "resumed")


@router.post("/{TrainingJobName}/rehearse", operation_id="RehearseTrainingJob", status_code=202)
def rehearse_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """Rehearse a training job's resume at any cost, as soon as the job trains.

    DescribeTrainingJob returns the result. While a rehearsal is pending, further calls request no further one. Raises
    ConflictException if the job's Rehearsal.Mode is Off, and for a determinism check.
    """
    return _ask(
        services, training_job_name, caller, jobs.request_rehearsal, "RehearsalRequested", "requested a rehearsal of"
    )


@router.get("/{TrainingJobName}/protection", operation_id="DescribeProtection")
def describe_protection(
    training_job_name: TrainingJobNamePath, caller: Reader, services: ServicesDep
) -> checkpoints_schemas.DescribeProtectionResponse:
    """Describe which nodes hold which shards of a job at this moment."""
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        shards = protection.of_run(session, job.run_id)
        checkpoint = checkpoints.newest_complete(session, job.run_id)
        domains = nodes.failure_domains(session, {holder.node_id for shard in shards for holder in shard.holders})
    return views.protection(job, shards, checkpoint, domains)


@router.get("/{TrainingJobName}/nodes", operation_id="ListTrainingJobNodes")
def list_training_job_nodes(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> jobs_schemas.ListTrainingJobNodesResponse:
    """List the nodes that worked for a job, with the periods of their work. Covers the newest 400 launches."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.number, page_tokens.text)
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        launches = jobs.launches(session, job.run_id)
    given_back = [transition.at for transition in job.transitions if transition.state == JobState.QUEUED]
    spans = membership.spans(launches, given_back, job.ended_at)
    found = [span for span in spans if after is None or (span.start.timestamp(), span.node_id) > after]
    shown, more = page_of(found, max_results, lambda span: (span.start.timestamp(), span.node_id))
    return jobs_schemas.ListTrainingJobNodesResponse(
        nodes=[shaped(span, jobs_schemas.TrainingJobNode) for span in shown], next_token=more
    )


@router.get("/{TrainingJobName}/time-spans", operation_id="ListTimeSpans")
def list_time_spans(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> jobs_schemas.ListTimeSpansResponse:
    """List what a job did in each second of its life: the periods whose sums are AccountingSeconds.

    A late report can still change the newest periods.
    """
    after = -1 if next_token is None else page_tokens.position(next_token, page_tokens.whole)[0]
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        found = ledger_hours.spans_of(session, job.run_id, after=after, limit=max_results + 1)
    found += [each for each in accounting.open_spans(shown_record(job)) if each[0].start > after]
    shown, more = page_of(found, max_results, lambda each: (each[0].start,))
    return jobs_schemas.ListTimeSpansResponse(
        time_spans=[views.time_span(span, end, job) for span, end in shown], next_token=more
    )


@router.get("/{TrainingJobName}/checkpoints", operation_id="ListCheckpoints")
def list_checkpoints(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    min_step: Annotated[int, Query(alias="MinStep", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)] = 0,
    is_trash: Annotated[bool, Query(alias="Trashed")] = False,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> checkpoints_schemas.ListCheckpointsResponse:
    """List a job's checkpoints in S3, newest step first. With Trashed, list those in the trash instead.

    With MinStep, the list contains only that step and later ones. CreateCheckpoint returns a suitable MinStep.
    """
    before = None if next_token is None else page_tokens.position(next_token, page_tokens.whole, page_tokens.whole)
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        page = checkpoints.page(
            session, job.run_id, is_trash=is_trash, min_step=min_step, before=before, limit=max_results + 1
        )
        trash_bytes = checkpoints.trash_bytes(session, job.run_id)
    shown, more = page_of(page, max_results, lambda record: (record.step, record.generation))
    return checkpoints_schemas.ListCheckpointsResponse(
        checkpoints=[views.checkpoint(record) for record in shown],
        training_job_status=disposition.status_of(job),
        trash_bytes=trash_bytes,
        next_token=more,
    )


def find_job(session: Session, text: str, caller: Caller) -> SavedJob:
    """Return a job that the caller may see.

    Args:
        session: from `Database.read` or `Database.write`.
        text: the TrainingJobName of the request: a name, or a run id.
        caller: the caller. A caller without a project sees the jobs of all projects.

    Returns:
        The job.

    Raises:
        NotFound: the job does not exist or belongs to another project.
        AmbiguousName: the caller has no project, and jobs of several projects have this name.
    """
    return jobs.get(session, text, caller.project_filter)


def require_no_dependent(session: Session, job: SavedJob, checkpoint: tuple[int, int] | None = None) -> None:
    """Check that no unfinished job starts from a checkpoint of a job.

    Args:
        session: from `Database.read` or `Database.write`.
        job: the job whose checkpoint a request deletes.
        checkpoint: generation and step of the checkpoint. None: any checkpoint of the job.

    Raises:
        Conflict: an unfinished job starts from the checkpoint. The message contains the unfinished job's name only if
            both jobs have the same project.
    """
    for other in jobs.starting_from(session, job.run_id):
        initial = other.spec.initial
        assert initial is not None
        if checkpoint is None or checkpoint == (initial.generation, initial.step):
            which = repr(other.name) if other.project == job.project else "a job of another project"
            raise Conflict(
                f"the checkpoint of step {initial.step} of {job.name!r} is the initial state of {which}; wait until "
                "that job has ended, or stop it (StopTrainingJob)"
            )


@dataclass(frozen=True, slots=True)
class JobCondition:
    """Job name and project to which a list of events or drills is restricted. None means no restriction."""

    job_name: str | None
    project: str | None


def job_condition(session: Session, text: str | None, caller: Caller) -> JobCondition:
    """Return the job name and project that a list of events or drills uses to filter by TrainingJobName.

    These lists filter by job name and project, so the function replaces a run id by the name and project of its job. A
    name without a job is valid. If the caller has no project, a name selects the jobs of all projects.

    Args:
        session: from `Database.read` or `Database.write`.
        text: a name, a run id, or None for all jobs.
        caller: the caller, whose project restricts the list.

    Returns:
        The job name and the project, each None if it does not restrict the list.
    """
    if text is not None and jobs.RUN_ID.fullmatch(text):
        for job in jobs.named(session, text, caller.project_filter):
            return JobCondition(job.name, job.project)
    return JobCondition(text, caller.project_filter)


def _ask(
    services: Services,
    name: str,
    caller: Caller,
    change: Callable[[Session, str, datetime], SavedJob],
    event: str,
    words: str,
) -> jobs_schemas.TrainingJobSummary:
    """Store a person's request for a job, and an event unless the job already had the request."""
    now = services.now()
    with services.change() as session:
        before = find_job(session, name, caller)
        job = change(session, before.run_id, now)
        if job != before:
            events.append_for_job(session, job, event, f"A user {words} {job.name}.", now)
    return views.job_summary(job, now)


def _plan(
    services: Services, job: FleetJob, spec: SavedJobSpec, fleet: FleetRecord, caller: Caller
) -> plans_schemas.TrainingJobPlan:
    now = services.now().timestamp()
    with services.database.read() as session:
        history = views.History(
            jobs=jobs.totals(session, fleet.name, ()), incidents=incidents.totals(session, fleet_name=fleet.name)
        )
        members = nodes.of_fleet(session, fleet.name)
        turns = schedule_of(fleet, jobs.unfinished(session, fleet.name), members, now, newcomer=job)
    connected = frozenset(services.peers.agents().connected)
    now_there = plans.FleetNow(record=fleet, nodes=members, connected=connected, history=history)
    return plans.plan(spec, job, turns, now_there, only_project=caller.project_filter)


def _known_by(request: jobs_schemas.CreateTrainingJobRequest, project: str) -> tuple[str | None, str | None]:
    """Return a digest of the request's ClientRequestToken and a digest of the whole request.

    Both are None without a ClientRequestToken. The first digest also covers the project, so projects can use the same
    token independently. `jobs.made_by` uses the digests to recognize a repeated request.
    """
    if request.client_request_token is None:
        return None, None
    return _digest(project, request.client_request_token), _digest(
        project, json.dumps(request.model_dump(mode="json"), sort_keys=True)
    )


def _digest(project: str, text: str) -> str:
    return hashlib.sha256(f"{project}\n{text}".encode()).hexdigest()


def _made(session: Session, token: str | None, digest: str | None) -> SavedJob | None:
    return None if token is None or digest is None else jobs.made_by(session, token, digest)


def _store(services: Services, new: NewJob) -> SavedJob:
    now = services.now()
    with services.change() as session:
        # Repeat the checks within the write transaction. Since the first checks, another request may have taken the
        # name or the quota, or deleted the checkpoint.
        _fleet(session, new.fleet_name)
        _require_room(session, quotas.find(session, new.project))
        _require_initial(session, new.spec.initial)
        job = jobs.create(session, new, now)
        message = (
            f"{job.name} was created: {new.spec.node_count} nodes × {new.spec.ranks_per_node} ranks, "
            f"{_protection_words(new.spec)}."
        )
        events.append_for_job(session, job, "TrainingJobCreated", message, now)
    return job


def _protection_words(spec: SavedJobSpec) -> str:
    return f"{spec.copies} copies" if spec.parity_group_size is None else f"parity of {spec.parity_group_size} nodes"


def _created(job: SavedJob) -> jobs_schemas.CreateTrainingJobResponse:
    return jobs_schemas.CreateTrainingJobResponse(
        training_job_name=job.name, run_id=job.run_id, training_job_status=disposition.status_of(job)
    )


def _require_room(session: Session, quota: QuotaRecord | None) -> None:
    if quota is None or quota.max_job_count is None:
        return
    live = quotas.live_job_count(session, quota.project)
    if live >= quota.max_job_count:
        raise Conflict(
            f"the project {quota.project!r} has {live} unfinished training jobs; its quota is {quota.max_job_count}"
        )


def _require_free(session: Session, name: str, project: str) -> None:
    for job in jobs.named(session, name, project):
        if job.purge_at is not None:
            raise Conflict(
                f"the training job {name!r} is in the trash until {job.purge_at:%Y-%m-%d %H:%M} UTC; choose another "
                "name, take it out (UndeleteTrainingJob), or delete it for good (DeleteTrainingJob with SkipTrash)"
            )
        raise AlreadyExists("training job", name)


def _fleet(session: Session, name: str | None, *, field: str = "FleetName") -> FleetRecord:
    if name is not None:
        try:
            fleet = fleets.get(session, name)
        except NotFound as error:
            known = ", ".join(fleet.name for fleet in fleets.every(session)) or "none"
            raise invalid(field, f"there is no fleet named {name!r}; registered: {known}") from error
    else:
        every = fleets.every(session)
        if len(every) != 1:
            known = ", ".join(fleet.name for fleet in every) or "none"
            raise invalid("FleetName", f"is required unless exactly one fleet exists; registered: {known}")
        fleet = every[0]
    if fleet.delete_requested_at is not None:
        raise invalid(field, f"the fleet {fleet.name!r} is being deleted")
    return fleet


def _source(session: Session, request: jobs_schemas.CreateTrainingJobRequest, caller: Caller) -> sources.SourceRecord:
    try:
        return sources.get(session, request.source.source_id, caller.project_filter)
    except NotFound as error:
        raise invalid(
            "Source.SourceId", f"the source {request.source.source_id} was not uploaded (PutSource)"
        ) from error


def _max_node_count(services: Services, fleet: FleetRecord) -> int:
    """Return MaxSize of the fleet's Auto Scaling group from AWS, or the last stored value if AWS does not answer."""
    try:
        return services.operator.describe_group(fleet.auto_scaling_group_name).max_size
    except CloudError as error:
        if not error.retryable:
            raise
        return fleet.max_node_count


def _initial(session: Session, asked: jobs_schemas.InitialCheckpoint | None, caller: Caller) -> InitialState | None:
    if asked is None:
        return None
    field = "InitialCheckpoint"
    if (asked.training_job_name is None) == (asked.run_id is None):
        raise invalid(field, "needs one of TrainingJobName and RunId")
    name = asked.training_job_name or asked.run_id or ""
    try:
        job = find_job(session, name, caller)
    except NotFound as error:
        raise invalid(
            field, f"there is no training job {name!r}; ListTrainingJobs names those that you may see"
        ) from error
    usable = [
        each
        for each in checkpoints.of_run(session, job.run_id)
        if each.state == checkpoints.COMPLETE and each.step == (asked.step or each.step)
    ]
    if not usable:
        which = "complete checkpoint" if asked.step is None else f"complete checkpoint of step {asked.step}"
        raise invalid(field, f"the training job {job.name} has no {which}; ListCheckpoints shows what it has")
    found = usable[0]
    if found.is_wrong:
        raise invalid(field, f"the checkpoint of step {found.step} is damaged: {found.verdict}. Choose another Step")
    manifest = found.contents()
    assert manifest is not None, "a complete checkpoint has a manifest"
    return InitialState(
        run_id=job.run_id,
        job_name=job.name,
        generation=found.generation,
        step=found.step,
        world_size=len(manifest.shards),
    )


def _require_initial(session: Session, initial: InitialState | None) -> None:
    """Check that the checkpoint from which a new job starts still exists."""
    if initial is None:
        return
    try:
        found = checkpoints.find(session, initial.run_id, step=initial.step, generation=initial.generation)
    except NotFound:
        found = None
    if found is None or found.state != checkpoints.COMPLETE:
        raise invalid("InitialCheckpoint", f"the checkpoint of step {initial.step} of {initial.job_name} was deleted")
