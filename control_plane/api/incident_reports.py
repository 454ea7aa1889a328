"""Collects what DescribeIncident, ListSimilarIncidents and ExportIncident report about an incident. Changes nothing.

`accounts.incidents`, `core.similar_incidents` and `accounts.postmortem` decide what the reports state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy.orm import Session

from control_plane.accounts import answers
from control_plane.accounts.duties import Subject
from control_plane.accounts.incidents import Account, IncidentOutcome, JobCourse, outcome_of, script_error
from control_plane.accounts.postmortem import PostMortem, SimilarIncident, Stack, TimelineEntry, WrittenNote
from control_plane.api import views
from control_plane.api.deps import Services
from control_plane.cloud.errors import CloudError
from control_plane.core import accounting, capacity, duties, hangs, similar_incidents
from control_plane.core.duties import NOTHING, DutyKind, HeldNode, PersonDuty
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Cause
from control_plane.core.similar_incidents import Candidate
from control_plane.core.states import JobState, NodeState
from control_plane.db import checkpoints, events, fleets, incidents, jobs, nodes, notes
from control_plane.db.events import EventFilter, EventRecord
from control_plane.db.incidents import IncidentFilter, JobOfIncident, SavedIncident
from control_plane.db.jobs import SavedJob
from control_plane.db.nodes import SavedNode
from control_plane.loop import disposition
from control_plane.loop.log_reader import LogEvent, LogFilter, LogReader, facts_of
from control_plane.loop.memos import capacity_wait_of, reason_of
from control_plane.loop.records import as_core, prefix_of, shown_record
from everstep.protocol.ids import FIRST_STEP, Step

COMPARED_INCIDENTS = 200
"""Number of incidents of the same cause and project, newest first, that `similar` compares."""
_AROUND = timedelta(seconds=30)
"""Time before the failure and after the incident's end from which a post-mortem lists events."""
_EVENTS = 100
_LINES = 60
_AFTER_SECONDS = 2.0
"""Tolerance between nodes' clocks for lines before the failure."""
_SIMILAR = 5


def cost_usd(session: Session, record: SavedIncident, now: datetime) -> float | None:
    """Return the stored cost of a closed incident, or that of an open one until now. None without a price."""
    if record.closed_at is not None:
        return record.cost_usd
    job = jobs.get_run(session, record.run_id)
    stored = shown_record(job)
    if stored.incident is None or stored.incident.id != record.id:
        return record.cost_usd
    idle = accounting.idle_so_far(stored.incident, stored, now.timestamp())
    return accounting.cost_usd(idle, fleets.get(session, job.fleet_name).price_usd_per_hour)


def summaries(session: Session, found: Sequence[SavedIncident]) -> list[views.Summary]:
    """Return what failed in each of several incidents, and how it ended."""
    courses = incidents.jobs_of(session, {each.run_id for each in found})
    return [_summary(each, courses[each.run_id]) for each in found]


def _summary(record: SavedIncident, job: JobOfIncident) -> views.Summary:
    cause, outcome = Cause(record.cause), _outcome(record, job)
    error = script_error(cause, outcome, reason_of(job))
    return views.Summary(answers.headline(cause, record.evidence, record.faulted_instance_ids, error), outcome)


def detail(services: Services, session: Session, record: SavedIncident) -> views.IncidentDetail:
    """Return the fields of DescribeIncident that lists omit."""
    now = services.now()
    about = account(session, record, now)
    duty, subject = _duty(services, session, about, record)
    return views.IncidentDetail(
        account=about,
        duty=duty,
        subject=subject,
        notes=notes.about(session, record.run_id, record.id),
        stacks_event_id=_stacks_event_id(session, record),
        now=now.timestamp(),
    )


_OF_JOB: Final = {IncidentOutcome.JOB_FAILED: DutyKind.JOB_FAILED, IncidentOutcome.JOB_PAUSED: DutyKind.PAUSED}
"""The job's duty that belongs to an outcome of its incident."""


def _duty(services: Services, session: Session, about: Account, record: SavedIncident) -> tuple[PersonDuty, Subject]:
    """Return a person's duty about an incident: the duty of its job, or of the nodes that it took out of use."""
    job, agents = jobs.get_run(session, record.run_id), services.peers.agents().connected
    (of_job,) = disposition.of_jobs(session, [job], agents, services.now().timestamp()).values()
    is_part = about.outcome is IncidentOutcome.OPEN or _OF_JOB.get(about.outcome) is of_job.duty.kind
    return duties.of_incident(of_job.duty if is_part else NOTHING, about.held), of_job.subject


def account(session: Session, record: SavedIncident, now: datetime) -> Account:
    """Return all stored facts about an incident, its job and its nodes, for the texts of `accounts.incidents`."""
    job = jobs.get_run(session, record.run_id)
    fleet = fleets.find(session, job.fleet_name)  # `fleet` is None if a user deleted the fleet after the job's end.
    checkpoint = checkpoints.newest_complete(session, record.run_id)
    lost = nodes.among(session, record.instance_ids)
    course = incidents.jobs_of(session, [record.run_id])[record.run_id]
    outcome = _outcome(record, course)
    ended_it = outcome in (IncidentOutcome.JOB_FAILED, IncidentOutcome.JOB_STOPPED)
    reached = job.max_boundary if ended_it else record.reached_step
    wait = capacity_wait_of(job) if record.closed_at is None else None
    return Account(
        **as_core(record, Account, "cause", "cost_usd", "reached_step"),
        incident_id=record.id,
        fleet_name=job.fleet_name,
        cause=Cause(record.cause),
        outcome=outcome,
        job_reason=reason_of(job),
        taken_over_by=job.taken_over_by if job.taken_over_at is not None else "",
        reached_step=None if reached is None else Step(reached),
        repeated_steps=record.lost_steps,
        kept_step=None if checkpoint is None else Step(checkpoint.step),
        first_step=FIRST_STEP if job.spec.initial is None else Step(job.spec.initial.step),
        held=tuple(
            HeldNode(node_id=node.id, hold=Hold(node.hold), reason=node.reason)
            for node in lost
            if node.state == NodeState.HELD and node.hold is not None
        ),
        cost_usd=cost_usd(session, record, now),
        wait=wait,
        is_long_wait=wait is not None and capacity.is_long(wait, now.timestamp()),
        instance_type="" if fleet is None else fleet.instance_type,
        availability_zone="" if fleet is None else fleet.availability_zone,
        price_usd_per_hour=None if fleet is None else fleet.price_usd_per_hour,
        idle_count=_idle_count(session, job.fleet_name) if outcome is IncidentOutcome.JOB_FAILED else 0,
        node_count=job.spec.node_count,
        least_node_count=job.spec.min_node_count or job.spec.node_count,
        terminated_ids=tuple(node.id for node in lost if _was_terminated(node)),
    )


def _idle_count(session: Session, fleet_name: str) -> int:
    return sum(node.state == NodeState.SPARE for node in nodes.of_fleet(session, fleet_name))


def _was_terminated(node: SavedNode) -> bool:
    """Return whether Everstep, and neither AWS nor a person, has terminated a node."""
    # The fleet's loop sets `replaced_at` when it gives a node up. `release` is a person's decision.
    is_over = node.state in (NodeState.DRAINING, NodeState.GONE)
    return is_over and node.replaced_at is not None and not node.release


def similar(session: Session, record: SavedIncident, limit: int) -> tuple[views.Similar, ...]:
    """Return at most `limit` of the newest `COMPARED_INCIDENTS` incidents, the most similar first."""
    which = IncidentFilter(project=record.project, cause=record.cause)
    others = incidents.page(session, which, after=None, limit=COMPARED_INCIDENTS, is_ascending=False)
    by_id = {each.id: each for each in (*others, record)}
    courses = incidents.jobs_of(session, {each.run_id for each in by_id.values()})
    instances = {id for each in by_id.values() for id in _instances(each)}
    types = {node.id: node.instance_type for node in nodes.among(session, instances)}
    of_fleet = {fleet.name: fleet.instance_type for fleet in fleets.every(session)}
    candidates = {each.id: _candidate(each, courses[each.run_id], types, of_fleet) for each in by_id.values()}
    found = similar_incidents.ranked(candidates[record.id], candidates.values(), limit=limit)
    return tuple(
        views.Similar(
            record=by_id[candidate.incident_id],
            fleet_name=candidate.fleet_name,
            outcome=_outcome(by_id[candidate.incident_id], courses[by_id[candidate.incident_id].run_id]),
            likeness=likeness,
        )
        for candidate, likeness in found
    )


def post_mortem(services: Services, session: Session, record: SavedIncident, log: LastLines) -> PostMortem:
    """Return the content of a post-mortem for `accounts.postmortem.markdown`. `log` comes from `last_lines`."""
    now = services.now()
    about = account(session, record, now)
    duty, subject = _duty(services, session, about, record)
    since, until = record.failed_at - _AROUND, None if record.closed_at is None else record.closed_at + _AROUND
    which = EventFilter(job_name=record.job_name, project=record.project, after=since, before=until)
    around = events.page(session, which, limit=_EVENTS)
    number = _stacks_event_id(session, record)
    return PostMortem(
        account=about,
        duty=duty,
        subject=subject,
        owner=record.owner,
        acknowledged_by=record.acknowledged_by,
        events=tuple(TimelineEntry(each.at.timestamp(), each.message) for each in around),
        lines=log.lines,
        lines_missing=log.missing,
        stacks=() if number is None else tuple(_stacks(each for each in around if each.id == number)),
        notes=tuple(
            WrittenNote(each.at.timestamp(), each.author, each.text)
            for each in notes.about(session, record.run_id, record.id)
        ),
        similar=tuple(
            SimilarIncident(each.record.id, each.record.job_name, each.record.opened_at.timestamp(), each.outcome)
            for each in similar(session, record, _SIMILAR)
        ),
        written_at=now.timestamp(),
    )


@dataclass(frozen=True, slots=True)
class LastLines:
    """The last log lines of the failed generation before its failure, oldest first."""

    lines: tuple[str, ...]
    missing: str = ""
    """Reason why `lines` is empty, else the empty string."""


def last_lines(services: Services, record: SavedIncident) -> LastLines:
    """Read the last lines that the ranks printed before an incident. Blocks on the database and on S3."""
    with services.database.read() as session:
        job: SavedJob = jobs.get_run(session, record.run_id)
        facts = facts_of(session, job)
    place = prefix_of(job.spec.log_uri)
    reader = LogReader(services.objects, place, *facts, services.now, services.caller_threads.is_closed)
    end_ms = int((record.failed_at.timestamp() + _AFTER_SECONDS) * 1000)
    wanted = LogFilter(generation=record.generation_before, end_ms=end_ms)
    try:
        page = reader.backward(reader.tail(wanted), wanted, _LINES)
    except CloudError as error:
        return LastLines((), f"S3 did not return the log: {error.message}")
    if not page.events:
        return LastLines((), "The job's log has no lines before the failure.")
    return LastLines(tuple(_line(event) for event in page.events))


def _stacks_event_id(session: Session, record: SavedIncident) -> int | None:
    # One transaction stores an incident of hung ranks and the event with their stacks, so both are always visible
    # together.
    return events.newest_of(
        session,
        hangs.PROVEN,
        project=record.project,
        job_name=record.job_name,
        since=record.opened_at,
        until=record.closed_at,
    )


def _outcome(record: SavedIncident, job: JobOfIncident) -> IncidentOutcome:
    course = JobCourse(
        state=JobState(job.state),
        ended_at=_unix(job.ended_at),
        queued_at=tuple(at.timestamp() for at in job.queued_at),
    )
    return outcome_of(_unix(record.closed_at), course)


def _candidate(
    record: SavedIncident, job: JobOfIncident, types: Mapping[str, str], of_fleet: Mapping[str, str]
) -> Candidate:
    instances = _instances(record)
    fallback = of_fleet.get(job.fleet_name, "")
    return Candidate(
        incident_id=record.id,
        opened_at=record.opened_at.timestamp(),
        instance_ids=frozenset(instances),
        instance_types=frozenset(types.get(id) or fallback for id in instances) - {""},
        fleet_name=job.fleet_name,
    )


def _instances(record: SavedIncident) -> Collection[str]:
    return {*record.faulted_instance_ids, *record.instance_ids}


def _stacks(found: Iterable[EventRecord]) -> Iterable[Stack]:
    for event in found:
        stored: list[Mapping[str, Any]] = event.detail.get("stacks", [])
        for each in stored:
            yield Stack(tuple(each["ranks"]), each["text"])


def _line(event: LogEvent) -> str:
    who = event.node_id if event.rank is None else f"rank {event.rank}"
    return f"{datetime.fromtimestamp(event.at_ms / 1000, UTC):%H:%M:%S} {who}  {event.text}"


def _unix(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
