"""UpdateTrainingJob and its history: each update of a job creates a revision of its configuration."""

from __future__ import annotations

from sqlalchemy.orm import Session

from control_plane.api import page_tokens
from control_plane.api.alike import shaped
from control_plane.api.allowance import allowance_of
from control_plane.api.auth import Reader, User
from control_plane.api.deps import MaxResults, NextToken, ServicesDep, TrainingJobNamePath, page_of
from control_plane.api.revisions import RevisionContext, revised
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import revisions as revisions_schemas
from control_plane.core import elastic
from control_plane.db import events, fleets, nodes, protection, quotas, revisions
from control_plane.db.errors import Conflict
from control_plane.db.jobs import SavedJob
from control_plane.db.revisions import Change
from control_plane.db.tokens import Role

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["TrainingJobs"])


@router.post("", operation_id="UpdateTrainingJob")
def update_training_job(
    training_job_name: TrainingJobNamePath,
    request: revisions_schemas.UpdateTrainingJobRequest,
    caller: User,
    services: ServicesDep,
) -> revisions_schemas.UpdateTrainingJobResponse:
    """Change a training job that has not ended.

    Omitted fields keep their value, and an update without a change creates no revision. Protection and CheckpointConfig
    are part of a generation's plan, so changes to them apply from the next generation on. The response says when each
    change applies. Raises ConflictException if the job has ended.
    """
    now = services.now()
    with services.change() as session:
        job = find_job(session, training_job_name, caller)
        if job.ended_at is not None:
            raise Conflict(f"the training job {job.name!r} has ended: {job.reason}")
        new = revised(request, job, _around(session, job))
        if new.priority > job.priority and caller.role is not Role.ADMIN:
            allowance_of(job.project, quotas.find(session, job.project)).require_priority(new.priority)
        if new.changes:
            job = revisions.revise(
                session, job, spec=new.spec, priority=new.priority, tags=new.tags, changes=new.changes, now=now
            )
            message = f"{job.name} has revision {job.revision}: {'; '.join(_words(change) for change in new.changes)}."
            events.append_for_job(session, job, "TrainingJobUpdated", message, now)
    changes = [_shown(change) for change in new.changes]
    return shaped(job, revisions_schemas.UpdateTrainingJobResponse, changes=changes)


@router.get("/revisions", operation_id="ListTrainingJobRevisions")
def list_training_job_revisions(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> revisions_schemas.ListTrainingJobRevisionsResponse:
    """List the revisions of a training job, oldest first."""
    after = 0 if next_token is None else page_tokens.position(next_token, page_tokens.whole)[0]
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        page = revisions.page(session, job, after=after, limit=max_results + 1)
    shown, more = page_of(page, max_results, lambda each: (each.number,))
    return revisions_schemas.ListTrainingJobRevisionsResponse(
        revisions=[
            shaped(each, revisions_schemas.TrainingJobRevision, changes=[_shown(change) for change in each.changes])
            for each in shown
        ],
        next_token=more,
    )


def _around(session: Session, job: SavedJob) -> RevisionContext:
    shards = [shard.payload_bytes for shard in protection.of_run(session, job.run_id)]
    memory = [node.memory_bytes for node in nodes.of_fleet(session, job.fleet_name) if node.memory_bytes]
    fleet, quota = fleets.find(session, job.fleet_name), quotas.find(session, job.project)
    limits = elastic.NodeLimits(
        group=fleet.auto_scaling_group_name if fleet is not None else "",
        fleet=job.fleet_name,
        max_size=fleet.max_node_count if fleet is not None else 0,
        project=job.project,
        quota=quota.max_node_count if quota is not None else None,
    )
    return RevisionContext(
        limits=limits,
        largest_shard_bytes=max(shards, default=0),
        node_memory_bytes=min(memory, default=None),
        has_price=fleet is not None and fleet.price_usd_per_hour is not None,
    )


def _shown(change: Change) -> revisions_schemas.FieldChange:
    applies = "NextGeneration" if change.needs_generation else "Now"
    return shaped(change, revisions_schemas.FieldChange, applies=applies)


def _words(change: Change) -> str:
    later = ", from the next generation on" if change.needs_generation else ""
    return f"{change.field} {change.before or 'none'} → {change.after or 'none'}{later}"
