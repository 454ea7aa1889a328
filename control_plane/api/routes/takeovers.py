"""TakeOverTrainingJob and HandBackTrainingJob. While a person controls a job, Everstep only observes the job."""

from __future__ import annotations

from control_plane.api import views
from control_plane.api.auth import User
from control_plane.api.deps import ServicesDep, TrainingJobNamePath
from control_plane.api.errors import InUse
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.core.states import LAUNCHED_JOBS, JobState
from control_plane.db import events, jobs

router = Router(prefix="/v1/training-jobs", tags=["TrainingJobs"])


@router.post("/{TrainingJobName}/take-over", operation_id="TakeOverTrainingJob", status_code=202)
def take_over_training_job(
    training_job_name: TrainingJobNamePath,
    request: jobs_schemas.TakeOverTrainingJobRequest,
    caller: User,
    services: ServicesDep,
) -> jobs_schemas.TrainingJobSummary:
    """Take control of a job: until HandBackTrainingJob, Everstep observes it but makes no decision.

    Everstep continues to halt ranks of ended generations. Requests for the job, including a stop, wait until the
    hand-back. If the job is already taken over, the call changes nothing. Raises ConflictException if the job has not
    started or has ended.
    """
    now = services.now()
    with services.database.write() as session:
        before = find_job(session, training_job_name, caller)
        if JobState(before.state) not in LAUNCHED_JOBS:
            raise InUse(f"The training job {before.name!r} is {before.state} and cannot be taken over.")
        if jobs.take_over(session, before.run_id, caller.name, now):
            message = f"{caller.name} took {before.name} over" + (f": {request.reason}" if request.reason else ".")
            kind = "TrainingJobTakenOver"
            events.append_for_job(session, before, kind, message, now)
        job = jobs.get_run(session, before.run_id)
    services.wake()
    return views.job_summary(job, now)


@router.post("/{TrainingJobName}/hand-back", operation_id="HandBackTrainingJob", status_code=202)
def hand_back_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """End a person's takeover of a job, so that Everstep controls the job again. Repeated calls change nothing."""
    now = services.now()
    with services.database.write() as session:
        before = find_job(session, training_job_name, caller)
        if jobs.hand_back(session, before.run_id):
            message = f"{caller.name} handed {before.name} back to Everstep; {before.taken_over_by} had taken it over."
            kind = "TrainingJobHandedBack"
            events.append_for_job(session, before, kind, message, now)
        job = jobs.get_run(session, before.run_id)
    services.wake()
    return views.job_summary(job, now)
