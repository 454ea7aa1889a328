"""Builds the decision about a job: the job keeps its state, changes to another state, or ends."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import accounting, incidents, rehearsal
from control_plane.core.actions import Decision, EventDraft, JobAction
from control_plane.core.job.view import JobView, with_record
from control_plane.core.observed.incidents import GivesUp, IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.reasons import JobReason, StateChanged
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import (
    JOB_TRANSITIONS,
    RUNNING_JOBS,
    IncidentEvent,
    IncidentState,
    JobEvent,
    advance,
)

PROGRESS_SECONDS = 1.0
"""Seconds between two writes of a job's record while only its progress figures change."""
WATCH_SECONDS = 1.0
"""Seconds until the next decision about a running job if no report wakes the job loop earlier."""
LAUNCH_SECONDS = 0.5
"""Seconds until the next decision about a job that starts a generation, gives up a node or stops."""
_LEDGER = ("accounted_until", "microseconds", "node_microseconds")
_PROGRESS = ("boundary", "boundary_at", "max_boundary", "committed", "proposed", "committed_at", "commit_seconds")
_FIGURES = (*_LEDGER, *_PROGRESS, "pace", "awaited")


def stay(
    view: JobView, reason: JobReason, actions: tuple[JobAction, ...] = (), *, requeue: float = WATCH_SECONDS
) -> Decision:
    """Return a decision that keeps the job's state and stores a new reason."""
    return Decision(
        record=replace(view.record, reason=reason),
        actions=actions,
        incidents=_changed_incident(view, view.record),
        implications=view.implications,
        events=view.events,
        requeue_after_seconds=requeue,
    )


def change_state(view: JobView, event: JobEvent, reason: JobReason) -> Decision:
    """Return a decision that changes the job's state by `JOB_TRANSITIONS` and records an event with the reason."""
    before = view.record
    state = advance(JOB_TRANSITIONS, f"job {view.spec.job}", before.state, event, ())
    record = replace(before, state=state, reason=reason, state_since=view.now)
    draft = EventDraft(type="JobStateChanged", message=StateChanged(before=before.state, after=state, because=reason))
    return Decision(
        record=record,
        incidents=_changed_incident(view, record),
        implications=view.implications,
        events=(*view.events, draft),
        requeue_after_seconds=0.0,
    )


def end_job(view: JobView, event: JobEvent, reason: JobReason) -> Decision:
    """Return a decision that ends the job, and closes its open incident and its open rehearsal."""
    incident = view.record.incident
    if incident is not None and incident.state is not IncidentState.CLOSED:
        incident = incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now)
        if event is JobEvent.GAVE_UP:
            incident = replace(incident, decision=GivesUp(after=incident.decision))
    view = with_record(view, ended_at=accounting.accounted_until(view.record), incident=incident)
    record, events = rehearsal.closed(view.spec, view.record, view.now)
    return change_state(replace(view, record=record, events=(*view.events, *events)), event, reason)


def with_actions(decision: Decision, more: tuple[JobAction, ...]) -> Decision:
    """Return the decision, with the actions `more` after its own actions."""
    return replace(decision, actions=(*decision.actions, *more))


def settle(before: JobRecord, decision: Decision, now: float) -> Decision:
    """Return the decision with the record to store, without a closed incident and settled spans.

    If only progress figures changed, this is the stored record `before` until `PROGRESS_SECONDS` have passed.
    """
    record = decision.record
    if record.incident is not None and record.incident.state is IncidentState.CLOSED:
        ended_at = max(record.incident.closed_at or 0.0, record.incident.failed_at)
        record = replace(record, incident=None, last_incident_ended_at=ended_at)
    names = [*_FIGURES, "uploading"] if record.uploading is not None and before.uploading is not None else _FIGURES
    figures = {name: getattr(before, name) for name in names}
    if replace(record, **figures) == before:
        is_due = now - before.progress_at >= PROGRESS_SECONDS
        is_charged = before.accounted_until is not None and now - before.accounted_until < 5 * PROGRESS_SECONDS
        if not (is_due and _has_moved(before, record)) and is_charged:
            return replace(decision, record=before)
    if _has_moved(before, record):
        record = replace(record, progress_at=now)
    record, settled = accounting.settle(record)
    return replace(decision, record=record, settled_spans=settled)


def _has_moved(before: JobRecord, record: JobRecord) -> bool:
    return (record.boundary, record.committed, record.proposed, record.uploading) != (
        before.boundary,
        before.committed,
        before.proposed,
        before.uploading,
    )


def book_incidents(charged: JobRecord, decision: Decision) -> JobRecord:
    """Return the record of a decision, with time in the ledger of `charged` moved to changed incidents' phases."""
    record = decision.record
    after = {
        incident.id: incident
        for incident in (*decision.incidents, *((record.incident,) if record.incident is not None else ()))
    }
    resumed = Bucket.TRAIN
    if charged.state in RUNNING_JOBS:
        resumed = accounting.bucket(replace(charged, incident=None, boundary=max(charged.boundary, record.boundary)))
    return accounting.follow(record, sorted(after.values(), key=lambda each: each.opened_at), resumed=resumed)


def _changed_incident(view: JobView, record: JobRecord) -> tuple[IncidentRecord, ...]:
    return (record.incident,) if record.incident is not None and record.incident != view.seen.record.incident else ()
