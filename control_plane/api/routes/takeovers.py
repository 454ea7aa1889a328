"""Operations by which a person decides about a job: TakeOverTrainingJob, HandBackTrainingJob and AcceptLoss."""

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
from control_plane.loop import memos

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
    with services.change() as session:
        before = find_job(session, training_job_name, caller)
        if JobState(before.state) not in LAUNCHED_JOBS:
            raise InUse(f"The training job {before.name!r} is {before.state} and cannot be taken over.")
        if jobs.take_over(session, before.run_id, caller.name, now):
            message = f"{caller.name} took {before.name} over" + (f": {request.reason}" if request.reason else ".")
            events.append_for_job(session, before, "TrainingJobTakenOver", message, now)
        return views.job_summary(jobs.get_run(session, before.run_id), now)


@router.post("/{TrainingJobName}/hand-back", operation_id="HandBackTrainingJob", status_code=202)
def hand_back_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """End a person's takeover of a job, so that Everstep controls the job again. Repeated calls change nothing."""
    now = services.now()
    with services.change() as session:
        before = find_job(session, training_job_name, caller)
        if jobs.hand_back(session, before.run_id):
            message = f"{caller.name} handed {before.name} back to Everstep; {before.taken_over_by} had taken it over."
            events.append_for_job(session, before, "TrainingJobHandedBack", message, now)
        return views.job_summary(jobs.get_run(session, before.run_id), now)


@router.post("/{TrainingJobName}/accept-loss", operation_id="AcceptLoss", status_code=202)
def accept_loss(
    training_job_name: TrainingJobNamePath,
    request: jobs_schemas.AcceptLossRequest,
    caller: User,
    services: ServicesDep,
) -> jobs_schemas.TrainingJobSummary:
    """Let a job that waits for a decision (RepeatChoice) continue from FromStep, and repeat the training since then.

    The consent is valid for this recovery and for FromStep or a later step. Repeated calls change nothing. Raises
    ConflictException if the job waits for no decision, or can now restore another step than FromStep.
    """
    now = services.now()
    with services.change() as session:
        job = find_job(session, training_job_name, caller)
        choice = memos.repeat_choice_of(job)
        if choice is None and (job.accepted_step != request.from_step or job.ended_at is not None):
            raise InUse(f"The training job {job.name!r} waits for no decision about lost training.")
        if choice is not None and choice.base_step != request.from_step:
            raise InUse(
                f"The training job {job.name!r} can now restore step {choice.base_step}, not step "
                f"{request.from_step}. Read its RepeatChoice again."
            )
        if choice is not None and (job.accepted_step, job.accepted_after) != (request.from_step, choice.after):
            jobs.accept_loss(session, job.run_id, step=request.from_step, after=choice.after, now=now)
            message = f"{caller.name} lets {job.name} continue from step {request.from_step}."
            events.append_for_job(session, job, "LossAccepted", message, now)
        return views.job_summary(jobs.get_run(session, job.run_id), now)
