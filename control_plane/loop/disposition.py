"""The status, the protection and the duty of jobs and fleets, from the database and the agents' newest reports.

Invariant: only this module derives the API's status of a job from its stored state, with `core.states`. The number of
queries does not depend on the number of jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy.orm import Session

from control_plane.accounts.duties import Subject
from control_plane.core import duties, incidents, states
from control_plane.core.duties import Checkpoints, FleetFacts, HeldNode, JobFacts, PersonDuty, Protection, Recovery
from control_plane.core.observed.causes import LacksInstances, Reason
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import (
    INCIDENT_PHASES,
    FleetStatus,
    JobState,
    ProtectionState,
    SecondaryStatus,
    TrainingJobStatus,
)
from control_plane.db import automation, checkpoints, fleets, implications, jobs, nodes, protection
from control_plane.db import incidents as db_incidents
from control_plane.db.fleets import FleetRecord
from control_plane.db.incidents import SavedIncident
from control_plane.db.jobs import SavedJob
from control_plane.db.nodes import SavedNode
from control_plane.db.protection import ShardTotals
from control_plane.loop.agents import AgentView
from control_plane.loop.memos import final_checkpoint_of, lapse_of
from control_plane.loop.records import generation_node_count, shown_record
from everstep.protocol.ids import FIRST_STEP, NodeId, Step

T = TypeVar("T")
_MICRO = 1_000_000
_LEAST_SECONDS, _LEAST_STEPS = 30.0, 10
"""A job's mean rate is meaningful from this training time and this number of steps on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposition:
    """The duty of a job or a fleet, with the names that its sentences and the service's lists contain."""

    duty: PersonDuty
    subject: Subject
    fleet_name: str
    project: str
    job_name: str = ""
    """Empty for a fleet."""
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDisposition(Disposition):
    """The facts that a list of jobs states about one job, in addition to its row."""

    node_ids: tuple[str, ...]
    healthy_count: int
    protection_state: ProtectionState | None
    """None while no agent holds a snapshot of the job."""
    survives_node_loss: bool | None


def everything(
    session: Session, agents: Mapping[NodeId, AgentView], now: float, *, also: Collection[str] = ()
) -> dict[str, Disposition]:
    """Return the disposition of each fleet, unfinished job and recently failed job, which can need a person.

    The key is `fleet/` and the name, or `job/` and the run id. `also` contains run ids of further ended jobs.
    """
    failed_after = datetime.fromtimestamp(now - duties.FAILED_SECONDS, UTC)
    shown = (*jobs.unfinished(session), *jobs.ended(session, failed_after=failed_after, also=also))
    of_fleet, of_job = of_fleets(session, fleets.every(session)), of_jobs(session, shown, agents, now)
    found: dict[str, Disposition] = {f"fleet/{name}": each for name, each in of_fleet.items()}
    return found | {f"job/{run_id}": each for run_id, each in of_job.items()}


def of_fleets(session: Session, shown: Sequence[FleetRecord]) -> dict[str, Disposition]:
    """Return the disposition of several fleets, by name."""
    held = _grouped((node.fleet_name, _held_node(node)) for node in nodes.held(session))
    pauses = _pauses(session)
    found = {}
    for fleet in shown:
        facts = _fleet_facts(fleet, pauses, held.get(fleet.name, ()))
        duty, subject = duties.of_fleet(facts), Subject(fleet=facts)
        found[fleet.name] = Disposition(duty=duty, subject=subject, fleet_name=fleet.name, project=fleet.project)
    return found


def of_jobs(
    session: Session, shown: Sequence[SavedJob], agents: Mapping[NodeId, AgentView], now: float
) -> dict[str, JobDisposition]:
    """Return the disposition of several jobs, in any state, by run id. `now` is Unix seconds."""
    runs = [job.run_id for job in shown if job.ended_at is None]
    with_memory = {job.run_id: job.generation for job in shown if holds_memory(job)}
    totals = protection.totals(session, with_memory) if with_memory else {}
    members = nodes.by_run(session, runs) if runs else {}
    # The duty of another job does not depend on its checkpoints.
    with_checkpoint = [job.run_id for job in shown if job.state in (JobState.RUNNING, JobState.FAILED)]
    kept = checkpoints.newest_of(session, with_checkpoint)
    failed = [job.run_id for job in shown if job.state == JobState.FAILED]
    held = _held_by_run(session, (*runs, *failed))
    pauses = _pauses(session)
    facts_of = {fleet.name: _fleet_facts(fleet, pauses) for fleet in fleets.every(session)}
    recovering = [job.run_id for job in shown if job.ended_at is None and job.memo.get("incident") is not None]
    closed = db_incidents.closed_of(session, recovering) if recovering else ()
    earlier = _grouped((each.run_id, each) for each in closed)
    found = {}
    for job in shown:
        node_ids, is_held, record = members.get(job.run_id, ()), job.run_id in with_memory, shown_record(job)
        # A user may have deleted the fleet of a job that has ended.
        fleet = facts_of.get(job.fleet_name) or FleetFacts(
            name=job.fleet_name, auto_scaling_group_name="", status=FleetStatus.ACTIVE
        )
        healthy = healthy_count(node_ids, agents)
        shards = totals.get(job.run_id)
        changed_at = None if shards is None or shards.changed_at is None else shards.changed_at.timestamp()
        state = listed_protection(job, shards) if is_held else None
        survives = survives_node_loss(job, shards) if is_held else None
        launched, lapse = generation_node_count(job), lapse_of(job)
        facts = JobFacts(
            fleet=fleet,
            record=record,
            status=status_of(job),
            secondary=secondary_status_of(job),
            taken_over_at=None if job.taken_over_at is None else job.taken_over_at.timestamp(),
            moved_at=_moved_at(record),
            is_heard=any(node_id in agents for node_id in node_ids),
            steps_per_second=_rate(record),
            recovery=_recovery(record, earlier.get(job.run_id, ()), now),
            node_count=job.spec.node_count,
            least_node_count=job.spec.least_node_count,
            launched_count=launched,
            protection=None
            if state is None
            else Protection(
                state=state,
                survives_node_loss=bool(survives),
                is_whole=healthy >= max(launched, len(node_ids)),
                changed_at=changed_at if lapse is None else lapse.since,
            ),
            checkpoints=_checkpoints(job, kept.get(job.run_id)),
            held=held.get(job.run_id, ()),
        )
        found[job.run_id] = JobDisposition(
            duty=duties.of_job(facts, now),
            subject=Subject(
                fleet=fleet,
                job=job.name,
                person=job.taken_over_by if job.taken_over_at is not None else "",
                wait=None if record.ended_at is not None else record.capacity_wait,
                is_waiting=record.state in (JobState.QUEUED, JobState.ALLOCATING),
                reason=record.reason,
                rehearsal=record.rehearsal.result,
            ),
            fleet_name=job.fleet_name,
            project=job.project,
            job_name=job.name,
            run_id=job.run_id,
            node_ids=node_ids,
            healthy_count=healthy,
            protection_state=state,
            survives_node_loss=survives,
        )
    return found


def _pauses(session: Session) -> dict[str, float | None]:
    """Return since when all automatic actions are paused, and since when a restored database deletes nothing."""
    pause, restores = automation.find(session), automation.pending_restores(session)
    return {
        "paused_at": None if pause is None else pause.paused_at.timestamp(),
        "restored_at": restores[0].restored_at.timestamp() if restores else None,
    }


def _fleet_facts(fleet: FleetRecord, pauses: Mapping[str, float | None], held: tuple[HeldNode, ...] = ()) -> FleetFacts:
    return FleetFacts(
        name=fleet.name,
        auto_scaling_group_name=fleet.auto_scaling_group_name,
        status=FleetStatus.DELETING if fleet.delete_requested_at is not None else FleetStatus(fleet.state),
        drift=fleet.drift,
        is_launch_suspended=any(_is_suspended_by_person(each) for each in fleet.reasons),
        held=held,
        **pauses,
    )


def _is_suspended_by_person(reason: Reason) -> bool:
    return (
        isinstance(reason, LacksInstances)
        and reason.because.suspension is not None
        and not reason.because.is_suspension_administrative
    )


def _held_node(node: SavedNode) -> HeldNode:
    assert node.hold is not None
    return HeldNode(node_id=node.id, hold=Hold(node.hold), reason=node.reason)


def _held_by_run(session: Session, runs: Sequence[str]) -> dict[str, tuple[HeldNode, ...]]:
    held = {node.id: _held_node(node) for node in nodes.held(session)} if runs else {}
    pairs = implications.runs_of(session, held) if held else ()
    return _grouped((run_id, held[node_id]) for run_id, node_id in pairs if run_id in runs)


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, tuple[T, ...]]:
    found: defaultdict[str, list[T]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: tuple(values) for key, values in found.items()}


def _moved_at(record: JobRecord) -> float | None:
    """Return when training last moved. Time without a control plane counts, because nobody observed it."""
    absence = None if record.unwatched is None else record.unwatched[1]
    committed = record.committed_at if record.committed > record.base_step else None
    moments = [at for at in (record.boundary_at, record.stepped_at, committed, absence) if at is not None]
    return max(moments, default=None)


def _rate(record: JobRecord) -> float | None:
    seconds = record.microseconds.get(Bucket.TRAIN, 0) / _MICRO
    is_known = seconds >= _LEAST_SECONDS and record.max_boundary >= _LEAST_STEPS
    return record.max_boundary / seconds if is_known else None


def _recovery(record: JobRecord, earlier: Sequence[SavedIncident], now: float) -> Recovery | None:
    incident = record.incident
    if incident is None or incident.closed_at is not None or record.ended_at is not None:
        return None
    phase = INCIDENT_PHASES[incident.state]
    key = f"{phase}_seconds"
    lengths = (getattr(each, key) for each in earlier if each.cause == incident.cause.value)
    return Recovery(
        phase=phase,
        elapsed_seconds=incidents.phase_seconds(incident, now)[key],
        earlier_seconds=tuple(seconds for seconds in lengths if seconds),
    )


def _checkpoints(job: SavedJob, newest: tuple[int, datetime] | None) -> Checkpoints:
    spec = job.spec
    initial = None if spec.initial is None else Step(spec.initial.step)
    is_scheduled = bool(spec.checkpoint_every_steps or spec.checkpoint_interval_seconds or spec.checkpoint_max_overhead)
    return Checkpoints(
        newest_step=initial if newest is None else Step(newest[0]),
        newest_at=None if newest is None else newest[1].timestamp(),
        every_steps=spec.checkpoint_every_steps,
        interval_seconds=spec.checkpoint_interval_seconds,
        is_scheduled=is_scheduled,
    )


def status_of(job: SavedJob) -> TrainingJobStatus:
    """Return the API field `TrainingJobStatus`, in SageMaker's terms."""
    return states.training_job_status(JobState(job.state), is_stop_requested=job.stop_requested_at is not None)


def secondary_status_of(job: SavedJob) -> SecondaryStatus:
    """Return the API field `SecondaryStatus`, in SageMaker's terms."""
    return states.secondary_status(
        JobState(job.state),
        has_started=job.started_at is not None,
        has_stepped=job.max_boundary > FIRST_STEP,
        is_stepping=job.boundary > job.base_step,
        is_stop_requested=job.stop_requested_at is not None,
        is_pause_requested=job.pause_requested_at is not None,
        has_older_checkpoint=has_older_checkpoint(job),
    )


def has_older_checkpoint(job: SavedJob) -> bool:
    """Return whether the final checkpoint of a job lies before its last step."""
    final = final_checkpoint_of(job)
    return final is not None and final < job.boundary


def healthy_count(node_ids: Collection[str], agents: Mapping[NodeId, AgentView]) -> int:
    """Return how many of the given nodes have a connected agent that reports no fault."""
    views = (agents.get(NodeId(node_id)) for node_id in node_ids)
    return sum(view is not None and (view.report is None or not view.report.faults) for view in views)


def holds_memory(job: SavedJob) -> bool:
    """Return whether agents hold a job's snapshots: the job was launched, and is neither ended nor paused."""
    return job.generation > 0 and job.state not in states.ENDED_JOBS and not is_paused(job)


def listed_protection(job: SavedJob, totals: ShardTotals | None) -> ProtectionState:
    """Return the protection state of a job with memory, from the totals of its shards; None for no shards."""
    if job.committed_step < 0 or totals is None or lapse_of(job) is not None:
        return ProtectionState.UNPROTECTED
    size = job.spec.parity_group_size
    has_holders = (
        totals.fewest_in_view >= job.spec.copies
        if size is None
        else totals.fewest_in_view >= size and totals.most_out_of_view == 0
    )
    is_whole = (
        totals.shard_count >= world_size(job) and totals.least_committed >= 0 and has_holders and not totals.has_reason
    )
    return ProtectionState.PROTECTED if is_whole else ProtectionState.DEGRADED


def survives_node_loss(job: SavedJob, totals: ShardTotals | None) -> bool:
    """Return whether memory keeps every shard after the loss of any node. False until all have committed."""
    if totals is None or totals.shard_count < world_size(job) or totals.least_committed < 0:
        return False
    size = job.spec.parity_group_size
    return totals.fewest_in_view >= 2 if size is None else totals.most_out_of_view == 0


def world_size(job: SavedJob) -> int:
    """Return the number of ranks of the newest generation, which can differ in an elastic job."""
    return generation_node_count(job) * job.spec.ranks_per_node


def is_paused(job: SavedJob) -> bool:
    """Return whether a job that has started before is queued again or waits again for its nodes."""
    return job.started_at is not None and job.state in (JobState.QUEUED, JobState.ALLOCATING)
