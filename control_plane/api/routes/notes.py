"""Notes of people about incidents and jobs.

DescribeIncident returns the notes of an incident, and ListTrainingJobNotes those of a job.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from sqlalchemy.orm import Session

from control_plane.api.alike import shaped
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import IncidentIdPath, ServicesDep, TrainingJobNamePath
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import notes as notes_schemas
from control_plane.db import events, incidents, jobs, notes
from control_plane.db.jobs import SavedJob
from control_plane.db.notes import NewNote, NoteRecord

router = Router(prefix="/v1")

_QUOTED_CHARACTERS = 200
"""Maximum number of characters that an event quotes from a note."""


@router.post("/incidents/{IncidentId}/notes", operation_id="CreateIncidentNote", status_code=201, tags=["Incidents"])
def create_incident_note(
    incident_id: IncidentIdPath, request: notes_schemas.CreateIncidentNoteRequest, caller: User, services: ServicesDep
) -> notes_schemas.Note:
    """Add a note to an incident.

    The caller's token is the author. Raises ConflictException if the incident has 100 notes.
    """
    now = services.now()
    with services.database.write() as session:
        record = incidents.get(session, incident_id)
        caller.require_sight("incident", incident_id, record.project)
        job = jobs.get_run(session, record.run_id)
        return shaped(_create(session, job, incident_id, request, caller, now), notes_schemas.Note)


@router.post(
    "/training-jobs/{TrainingJobName}/notes",
    operation_id="CreateTrainingJobNote",
    status_code=201,
    tags=["TrainingJobs"],
)
def create_training_job_note(
    training_job_name: TrainingJobNamePath,
    request: notes_schemas.CreateTrainingJobNoteRequest,
    caller: User,
    services: ServicesDep,
) -> notes_schemas.Note:
    """Add a note to a training job, ended or not.

    The caller's token is the author. Raises ConflictException if the job has 100 notes.
    """
    now = services.now()
    with services.database.write() as session:
        job = find_job(session, training_job_name, caller)
        return shaped(_create(session, job, None, request, caller, now), notes_schemas.Note)


@router.get("/training-jobs/{TrainingJobName}/notes", operation_id="ListTrainingJobNotes", tags=["TrainingJobs"])
def list_training_job_notes(
    training_job_name: TrainingJobNamePath, caller: Reader, services: ServicesDep
) -> notes_schemas.ListTrainingJobNotesResponse:
    """List the notes of a training job, without the notes of its incidents."""
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        found = notes.about(session, job.run_id, None)
    return notes_schemas.ListTrainingJobNotesResponse(notes=[shaped(record, notes_schemas.Note) for record in found])


def _create(
    session: Session,
    job: SavedJob,
    incident_id: str | None,
    request: notes_schemas.CreateNoteRequest,
    caller: Caller,
    now: datetime,
) -> NoteRecord:
    """Store a note and its event. A repeated request stores neither."""
    token = request.client_request_token
    about = f"{job.run_id}\n{incident_id or ''}\n{caller.token.id}\n{token}"
    new = NewNote(
        run_id=job.run_id,
        incident_id=incident_id,
        author=caller.name,
        text=request.text,
        request_token=None if token is None else hashlib.sha256(about.encode()).hexdigest(),
    )
    record, is_new = notes.create(session, new, now)
    if is_new:
        noun, kind = (job.name, "TrainingJob") if incident_id is None else (f"the incident {incident_id}", "Incident")
        quoted = " ".join(request.text.split())
        if len(quoted) > _QUOTED_CHARACTERS:
            quoted = f"{quoted[:_QUOTED_CHARACTERS]}…"
        message = f"{caller.name} added a note to {noun}: {quoted}"
        events.append_for_job(session, job, f"{kind}NoteCreated", message, now)
    return record
