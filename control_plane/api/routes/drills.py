"""Drills: inject a fault into a running job if its fleet allows drills, and list the outcomes."""

from __future__ import annotations

from functools import partial

from control_plane.api import page_tokens, views
from control_plane.api.auth import Admin, Reader
from control_plane.api.deps import MaxResults, NextToken, ServicesDep, TrainingJobNameFilter, page_of
from control_plane.api.errors import Forbidden, InUse, invalid
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job, job_condition
from control_plane.api.schemas import drills as drills_schemas
from control_plane.core.observed.drills import DrillKind, DrillState
from control_plane.core.states import JobState
from control_plane.db import drills, events, fleets, jobs
from control_plane.db.drills import NewDrill
from everstep.protocol.plan import GenerationPlan

_wrong = partial(invalid, sentence="{field}: {message}.")
router = Router(prefix="/v1/drills", tags=["Drills"])


@router.post("", operation_id="StartDrill", status_code=202)
def start_drill(
    request: drills_schemas.StartDrillRequest, caller: Admin, services: ServicesDep
) -> drills_schemas.Drill:
    """Inject one fault into a training job.

    Raises AccessDeniedException if the job's fleet does not set AllowDrills. Raises ConflictException if the job is not
    training, or if a person controls it (TakeOverTrainingJob).
    """
    now = services.now()
    with services.change() as session:
        job = find_job(session, request.training_job_name, caller)
        if not fleets.get(session, job.fleet_name).allow_drills:
            hint = f"everstep fleets update {job.fleet_name} --allow-drills"
            raise Forbidden(f"The fleet {job.fleet_name!r} does not allow drills.", hint=hint)
        if job.state != JobState.RUNNING or job.taken_over_at is not None:
            words = "taken over" if job.taken_over_at is not None else job.state
            raise InUse(f"The training job {job.name!r} is {words}; a drill needs a job that trains.")
        node_id, rank = _target(request, jobs.generation(session, job.run_id, job.generation).plan)
        new = NewDrill(
            run_id=job.run_id,
            job_name=job.name,
            fleet_name=job.fleet_name,
            project=job.project,
            kind=request.drill_type,
            node_id=node_id,
            rank=rank,
            requested_by=caller.name,
            requested_at=now,
            state=DrillState.REQUESTED.value,
        )
        record = drills.create(session, new)
        message = f"{caller.name} requested a drill of {job.name}: {record.kind} on {node_id}" + (
            f", rank {rank}" if rank is not None else ""
        )
        events.append_for_job(session, job, "DrillRequested", message, now, node_id=node_id)
    return views.drill(record)


@router.get("", operation_id="ListDrills")
def list_drills(
    caller: Reader,
    services: ServicesDep,
    training_job_name: TrainingJobNameFilter = None,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
) -> drills_schemas.ListDrillsResponse:
    """List the drills of all jobs or of one job, in the order of their requests."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.moment, page_tokens.text)
    with services.database.read() as session:
        which = job_condition(session, training_job_name, caller)
        page = drills.page(session, job_name=which.job_name, project=which.project, after=after, limit=max_results + 1)
    shown, more = page_of(page, max_results, lambda record: (record.requested_at.isoformat(), record.id))
    return drills_schemas.ListDrillsResponse(drills=[views.drill(record) for record in shown], next_token=more)


def _target(request: drills_schemas.StartDrillRequest, plan: GenerationPlan) -> tuple[str, int | None]:
    """Return the node that a drill affects and, for kill-rank, the rank to kill."""
    node = (
        plan.nodes[-1]
        if request.node_id is None
        else next((node for node in plan.nodes if node.node_id == request.node_id), None)
    )
    if node is None:
        raise _wrong("NodeId", f"is not a node of {plan.job}: {', '.join(node.node_id for node in plan.nodes)}")
    if request.drill_type != DrillKind.KILL_RANK.value:
        if request.rank is not None:
            raise _wrong("Rank", "is allowed only for kill-rank")
        return node.node_id, None
    if request.rank is not None and request.rank not in node.ranks:
        raise _wrong("Rank", f"is not on {node.node_id}, which runs {', '.join(str(rank) for rank in node.ranks)}")
    return node.node_id, node.ranks[0] if request.rank is None else request.rank
