"""Converts database records into the response models of the API. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

from control_plane.accounts import answers, duties, held_nodes, reasons, rehearsals, responses
from control_plane.accounts import incidents as accounts
from control_plane.accounts import jobs as job_accounts
from control_plane.accounts.duties import Action, Subject
from control_plane.accounts.facts import drill_outcome, sentence
from control_plane.accounts.incidents import Account, IncidentOutcome
from control_plane.accounts.occurrences import capital
from control_plane.api.alike import alike, shaped
from control_plane.api.schemas import checkpoints as checkpoints_schemas
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import drills as drills_schemas
from control_plane.api.schemas import duties as duties_schemas
from control_plane.api.schemas import fleets as fleets_schemas
from control_plane.api.schemas import health as health_schemas
from control_plane.api.schemas import incidents as incidents_schemas
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.api.schemas import nodes as nodes_schemas
from control_plane.api.schemas import notes as notes_schemas
from control_plane.api.schemas import plans as plans_schemas
from control_plane.api.schemas import results as results_schemas
from control_plane.api.schemas import tokens as tokens_schemas
from control_plane.api.schemas.common import Shape
from control_plane.api.spec_fields import configured
from control_plane.core import (
    accounting,
    domain_loss,
    encryption,
    parity,
    placement,
    rolls,
    states,
)
from control_plane.core.checkpoints import CheckpointStatus, Verification
from control_plane.core.duties import PersonDuty
from control_plane.core.encryption import ReplicaEncryption
from control_plane.core.incidents import absent_seconds
from control_plane.core.observed.facts import (
    Fact,
    Faulty,
    InstanceEnded,
    NodeFaulty,
    RankEnded,
    Requested,
    nodes_of,
    ranks_of,
)
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.jobs import CapacityWait
from control_plane.core.observed.nodes import BurnIn
from control_plane.core.observed.reasons import Lapsed
from control_plane.core.observed.spans import JobSpan
from control_plane.core.observed.specs import DEFAULT_STORE_PATIENCE_SECONDS
from control_plane.core.observed.steps import HolderState
from control_plane.core.queue import QueueSchedule
from control_plane.core.similar_incidents import Likeness
from control_plane.core.states import (
    FleetStatus,
    JobState,
    NodeState,
    ProtectionState,
)
from control_plane.db import checkpoints
from control_plane.db import rolls as db_rolls
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.descriptions import JobDescription
from control_plane.db.disk_watch import FullDisk
from control_plane.db.drills import DrillRecord
from control_plane.db.fleets import FleetRecord
from control_plane.db.implications import ImplicationRecord
from control_plane.db.incidents import IncidentTotals, SavedIncident
from control_plane.db.jobs import JobInput, JobTotals, SavedJob
from control_plane.db.nodes import SavedNode
from control_plane.db.notes import NoteRecord
from control_plane.db.protection import ShardRecord
from control_plane.errors import TooManyCases
from control_plane.loop import memos, records
from control_plane.loop.agents import AgentView
from control_plane.loop.disposition import (
    Disposition,
    JobDisposition,
    has_older_checkpoint,
    is_paused,
    secondary_status_of,
    status_of,
    world_size,
)
from control_plane.loop.memos import (
    checkpoint_pace_of,
    checkpoint_upload_of,
    final_checkpoint_of,
    lapse_of,
    suspicion_of,
    unstored_outputs_of,
)
from control_plane.loop.records import generation_node_count
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import FIRST_STEP, NodeId, RunId, Step

ODDS_UP_TO_LOST = 3
MICRO = 1_000_000
MIB = 1 << 20
FULL_DISK_HINT = "Free space there or enlarge the disk. Training continues meanwhile; you need not restart anything."
_CHECKPOINT_STATUS = {
    checkpoints.TRASHED: CheckpointStatus.TRASHED,
    checkpoints.DELETING: CheckpointStatus.DELETING,
    checkpoints.DELETED: CheckpointStatus.DELETED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Totals over all jobs of a fleet, ended ones included."""

    jobs: JobTotals
    incidents: IncidentTotals


def reason_of(job: SavedJob, now: datetime) -> str:
    """Return the reason of a job's state, with the time without progress of a suspected hang."""
    return job_accounts.reason_now(memos.reason_of(job), suspicion_of(job), now.timestamp())


def job_summary(
    job: SavedJob, now: datetime, listed: JobDisposition | None = None, incident_counts: tuple[int, int] = (0, 0)
) -> jobs_schemas.TrainingJobSummary:
    """Return a job's entry in a list.

    `listed` comes from `disposition.of_jobs`; None omits the fields that only lists contain. `incident_counts` are the
    numbers of all and of open incidents.
    """
    of_lists: dict[str, Any] = {}
    if listed is not None:
        of_lists = {
            "protection_state": listed.protection_state,
            "survives_node_loss": listed.survives_node_loss,
            "assigned_node_count": len(listed.node_ids),
            "healthy_node_count": listed.healthy_count,
            "incident_count": incident_counts[0],
            "open_incident_count": incident_counts[1],
            "duty": duty(listed),
        }
    return jobs_schemas.TrainingJobSummary(
        **of_lists,
        **_of_job(job, jobs_schemas.TrainingJobSummary, now),
        node_count=job.spec.node_count,
        ettr_ratio=accounting.ettr_ratio(job.accounting) if job.started_at is not None else None,
    )


def _of_job(job: SavedJob, shape: type[Shape], now: datetime) -> dict[str, Any]:
    """Return the fields that an entry in a list and a description share."""
    final, is_over = final_checkpoint_of(job), job.state in states.ENDED_JOBS
    return {
        **alike(job, shape),
        "boundary": _boundary(job),
        "training_job_status": status_of(job),
        "secondary_status": secondary_status_of(job),
        "reason": reason_of(job, now),
        "generation_node_count": generation_node_count(job),
        "target_step": job.target_step if job.target_step > 0 else None,
        "final_checkpoint_step": None if final is None else max(final, 0),
        "estimated_remaining_seconds": None
        if is_over
        else accounting.remaining_seconds(job.accounting, job.max_boundary, job.target_step),
    }


def _boundary(job: SavedJob) -> int:
    """Return the number of steps that the ranks have finished."""
    # A commit can be newer than the ranks' newest report.
    return max(job.boundary, job.committed_step)


def _unstored_outputs(job: SavedJob) -> dict[str, Any]:
    unstored = unstored_outputs_of(job)
    if unstored is None:
        return {"unstored_output_count": 0, "unstored_outputs": []}
    return {
        "unstored_output_count": unstored.count,
        "unstored_outputs": [
            results_schemas.UnstoredOutput(
                path=f"gen={each.generation or unstored.generation}/rank={each.rank}/{each.path}", cause=each.cause
            )
            for each in unstored.outputs
        ],
    }


def queued_behind(turns: QueueSchedule, run: RunId, only_project: str | None) -> list[str]:
    """Return the names of those jobs ahead of a queued job that belong to `only_project` (None: all), in order.

    `turns` contains the job's run.
    """
    return [other.job for other in turns.ahead_of(run) if only_project in (None, other.project)]


def health(disks: Sequence[FullDisk], version: str) -> health_schemas.HealthResponse:
    """Return the health of the service. `disks` contains the full disks."""
    conditions = [
        tokens_schemas.ServiceCondition(
            type="disk_full",
            message=_full_disk(disk),
            hint=FULL_DISK_HINT,
            directory=disk.place if disk.place.startswith("/") else None,
            free_bytes=disk.free_bytes,
            duration_seconds=disk.seconds,
        )
        for disk in disks
    ]
    return health_schemas.HealthResponse(
        status="degraded" if conditions else "ok", version=version, conditions=conditions
    )


def job_conditions(
    job: SavedJob, node_ids: Sequence[str], agents: Mapping[NodeId, AgentView], disks: Sequence[FullDisk]
) -> list[jobs_schemas.Condition]:
    """Return the problems of the service, of the job, then of its nodes in order. Empty for an ended job.

    `disks` contains the full disks.
    """
    if job.state in states.ENDED_JOBS:
        return []
    found = [
        jobs_schemas.Condition(type="disk_full", message=f"{_full_disk(disk)} {FULL_DISK_HINT}", node_id=None)
        for disk in disks
    ]
    result = memos.rehearsal_of(job).result
    if result is not None and (result.is_difference or result.is_unproven):
        kind = "ResumeUnproven" if result.is_unproven else "ResumeDiffers"
        message = f"{capital(rehearsals.difference(result))}. {rehearsals.advice(result)}".strip()
        found.append(jobs_schemas.Condition(type=kind, message=message, node_id=None))
    for node_id in node_ids:
        agent = agents.get(NodeId(node_id))
        member = agent.report.member if agent is not None and agent.report is not None else None
        found += _conditions(agent, with_member=member is not None and member.run == job.run_id)
    return found


def _conditions(agent: AgentView | None, *, with_member: bool) -> list[jobs_schemas.Condition]:
    if agent is None or not agent.is_connected or agent.report is None:
        return []
    member = agent.report.member
    faults = (*agent.report.faults, *(member.faults if member is not None and with_member else ()))
    return [
        jobs_schemas.Condition(type=fault.code, message=fault.message, node_id=agent.node_id)
        for fault in dict.fromkeys(faults)
    ]


def _full_disk(disk: FullDisk) -> str:
    free = "" if disk.free_bytes is None else f", {disk.free_bytes / MIB:,.1f} MiB are free"
    return f"The disk of the control plane is full: {disk.place} cannot store data{free} ({disk.words})."


def job(
    found: JobDescription,
    *,
    now: datetime,
    turns: QueueSchedule,
    disposition: JobDisposition,
    conditions: Sequence[jobs_schemas.Condition] = (),
    wait: common_schemas.CapacityWait | None = None,
    only_project: str | None = None,
) -> jobs_schemas.TrainingJob:
    """Return the description of a job.

    `turns` is the fleet's schedule, `disposition` a result of `disposition.of_jobs`, and `only_project` hides other
    projects' jobs (None: none).
    """
    job, plan, incidents = found.job, found.plan, found.incidents
    stored = memos.store_wait_of(job)
    spec = job.spec
    return jobs_schemas.TrainingJob(
        **alike(spec, jobs_schemas.TrainingJob),
        **_of_job(job, jobs_schemas.TrainingJob, now),
        alternative_fleet_names=[name for name in spec.fleet_names if name != job.fleet_name],
        secondary_status_transitions=status_transitions(job),
        **_unstored_outputs(job),
        repeat_choice=_repeat_choice(job),
        capacity_wait=wait,
        store_wait=None if stored is None else shaped(stored, common_schemas.StoreWait),
        failure_reason=job.reason if job.state == JobState.FAILED else None,
        conditions=list(conditions),
        source=jobs_schemas.SourceConfig(source_id=spec.source_sha256),
        hyper_parameters=spec.hyperparameters,
        protection=configured(jobs_schemas.ProtectionConfig, spec),
        checkpoint_config=configured(
            jobs_schemas.CheckpointConfig,
            spec,
            s3_uri=spec.checkpoint_uri,
            max_uploads_in_flight=spec.checkpoint_max_uploads if spec.checkpoint_max_uploads > 1 else None,
            store_patience_seconds=None
            if spec.store_patience_seconds == DEFAULT_STORE_PATIENCE_SECONDS
            else spec.store_patience_seconds,
        ),
        checkpoint_activity=_checkpoint_activity(job),
        initial_checkpoint=None if spec.initial is None else shaped(spec.initial, jobs_schemas.InitialCheckpoint),
        input_data_config=[_channel(each) for each in spec.inputs],
        output_data_config=jobs_schemas.OutputDataConfig(s3_output_path=spec.output_uri, keep=spec.kept_files or None),
        stopping_condition=configured(jobs_schemas.StoppingCondition, spec),
        retry_strategy=configured(jobs_schemas.RetryStrategy, spec),
        elastic_config=configured(
            jobs_schemas.ElasticConfig, spec, min_node_count=spec.least_node_count, max_node_count=spec.most_node_count
        ),
        rehearsal=configured(jobs_schemas.RehearsalConfig, spec),
        **_rehearsal(job),
        queue_position=turns.place_of(RunId(job.run_id)),
        queued_behind=queued_behind(turns, RunId(job.run_id), only_project),
        observed_revision=found.observed_revision,
        healthy_node_count=disposition.healthy_count,
        duty=duty(disposition),
        assigned_node_count=len(found.node_ids),
        node_ids=[] if plan is None or is_paused(job) else [node.node_id for node in plan.nodes],
        coordinator_node_id=None if plan is None or is_paused(job) else plan.coordinator,
        incident_count=incidents.count,
        open_incident_count=incidents.count - incidents.closed_count,
        open_drill_id=found.open_drill_id,
        accounting_seconds={name: spent / MICRO for name, spent in job.accounting.items()},
        reliability=_reliability(job.accounting, incidents, is_started=job.started_at is not None),
        node_seconds=job.node_microseconds / MICRO,
    )


def _rehearsal(job: SavedJob) -> dict[str, Any]:
    told = memos.rehearsal_of(job)
    asked_at = None if job.rehearsal_requested_at is None else job.rehearsal_requested_at.timestamp()
    is_pending = told.is_open or asked_at not in (None, told.served_at)
    result = told.result
    found = None
    if result is not None:
        first = result.difference
        lines = [shaped(each, jobs_schemas.RehearsalLine) for each in first.lines] if first is not None else []
        difference = None if first is None else shaped(first, jobs_schemas.RehearsalDifference, lines=lines)
        found = shaped(
            result,
            jobs_schemas.RehearsalResult,
            difference=difference,
            message=rehearsals.finding(result),
            advice=rehearsals.advice(result),
        )
    return {"rehearsal_result": found, "is_rehearsal_pending": is_pending and job.ended_at is None}


def _checkpoint_activity(job: SavedJob) -> jobs_schemas.CheckpointActivity:
    spec, pace, upload = job.spec, checkpoint_pace_of(job), checkpoint_upload_of(job)
    is_over = job.ended_at is not None
    return jobs_schemas.CheckpointActivity(
        policy=job_accounts.policy_words(
            every_steps=spec.checkpoint_every_steps,
            interval_seconds=spec.checkpoint_interval_seconds,
            max_overhead=spec.checkpoint_max_overhead,
            max_bytes_per_second=spec.checkpoint_max_bytes_per_second,
            on_notice=spec.checkpoint_on_notice,
        ),
        next_step=pace.due_step if pace.due_step >= 0 and not is_over else None,
        next_time=records.at(pace.due_at_seconds) if pace.due_at_seconds and not is_over else None,
        interval_seconds=pace.interval_seconds or None,
        last_upload_seconds=pace.upload_seconds or None,
        last_upload_cost_seconds=pace.cost_seconds if pace.upload_seconds else None,
        upload=None
        if upload is None
        else shaped(
            upload,
            jobs_schemas.CheckpointUpload,
            slowest_rank=upload.slowest.rank,
            slowest_object=upload.slowest.object_name or None,
            slowest_stored_bytes=upload.slowest.stored_bytes,
            slowest_total_bytes=upload.slowest.object_bytes,
        ),
    )


def _channel(given: JobInput) -> jobs_schemas.Channel:
    source = (
        jobs_schemas.DataSource(s3_data_source=jobs_schemas.S3DataSource(s3_uri=given.uri))
        if given.uri
        else jobs_schemas.DataSource(
            file_system_data_source=jobs_schemas.FileSystemDataSource(directory_path=given.directory)
        )
    )
    return jobs_schemas.Channel(channel_name=given.name, data_source=source)


def protection(
    job: SavedJob, shards: Sequence[ShardRecord], checkpoint: SavedCheckpoint | None, domains: Mapping[str, str]
) -> checkpoints_schemas.DescribeProtectionResponse:
    """Return the response of DescribeProtection.

    Ranks without a report are missing in `shards`, nodes without a known failure domain in `domains`. `checkpoint` is
    the newest complete one.
    """
    # Agents release the slots of an ended or paused job, so its reported shards are no longer in memory.
    is_over = job.state in states.ENDED_JOBS or is_paused(job)
    current = [shard for shard in shards if shard.generation == job.generation and not is_over]
    state, reason = _protection_state(job, current)
    losses = _fatal_losses(job, current)
    known_domains = {NodeId(node_id): domain for node_id, domain in domains.items()}
    return shaped(
        job,
        checkpoints_schemas.DescribeProtectionResponse,
        boundary=_boundary(job),
        copies=job.spec.copies,
        parity_group_size=job.spec.parity_group_size,
        protection_state=state,
        reason=reason,
        lapse=lapse_view(job),
        recovery_odds=[
            plans_schemas.RecoveryOdds(lost_nodes=count, probability=odds) for count, odds in _odds(losses, {})
        ],
        domain_odds=[
            plans_schemas.DomainOdds(lost_domains=count, probability=odds)
            for count, odds in _odds(losses, known_domains)
        ]
        if known_domains
        else [],
        fatal_domains=list(domain_loss.fatal_domains(losses, known_domains)),
        shards=[
            shaped(shard, checkpoints_schemas.ShardProtection, holders=_holders(job, shard, domains))
            for shard in current
        ],
        last_checkpoint=None if checkpoint is None else shaped(checkpoint, checkpoints_schemas.LastCheckpoint),
    )


def lapse_view(job: SavedJob) -> checkpoints_schemas.ProtectionLapse | None:
    """Return the time in which training goes on while nodes keep no further step, or None."""
    if (lapse := lapse_of(job)) is None:
        return None
    return shaped(lapse, checkpoints_schemas.ProtectionLapse, unkept_steps=max(0, job.boundary - lapse.kept))


def _holders(job: SavedJob, shard: ShardRecord, domains: Mapping[str, str]) -> list[checkpoints_schemas.Holder]:
    known = {each.node_id: each for each in shard.verified}
    shown = []
    for holder in shard.holders:
        verified = known.get(holder.node_id)
        shown.append(
            checkpoints_schemas.Holder(
                node_id=holder.node_id,
                in_view=holder.is_in_view,
                verified_step=None if verified is None else verified.step,
                verified_time=None if verified is None else verified.at,
                lag_steps=None if verified is None else max(0, job.boundary - verified.step),
                failure_domain=domains.get(holder.node_id),
            )
        )
    return shown


def _fatal_losses(job: SavedJob, shards: Sequence[ShardRecord]) -> tuple[tuple[NodeId, ...], ...]:
    """Return the smallest sets of nodes whose simultaneous loss makes a shard unrecoverable from memory."""
    # Only holders in view count. Empty until all shards are reported and committed.
    if len(shards) < world_size(job) or any(shard.committed_step < 0 for shard in shards):
        return ()
    if job.spec.parity_group_size is not None:
        groups = {tuple(sorted(NodeId(holder.node_id) for holder in shard.holders)) for shard in shards}
        return parity.fatal_losses(sorted(groups), {NodeId(shard.owner_node_id) for shard in shards if _misses(shard)})
    holders: dict[NodeId, tuple[NodeId, ...]] = {}
    for shard in shards:
        owner, in_view = (
            NodeId(shard.owner_node_id),
            tuple(NodeId(each.node_id) for each in shard.holders if each.is_in_view),
        )
        holders[owner] = min(holders.get(owner, in_view), in_view, key=len)
    return placement.Placement((), holders).fatal_losses


def _misses(shard: ShardRecord) -> bool:
    """Return whether a node of a parity group lacks the share from which this shard could be rebuilt."""
    # A node that has replaced a lost one receives its share only with the first commit of its generation.
    return shard.committed_step < 0 or not all(holder.is_in_view for holder in shard.holders)


def _odds(losses: domain_loss.Losses, domains: Mapping[NodeId, str]) -> list[tuple[int, float]]:
    """Return the probabilities that every shard survives a loss of 1, 2, 3 failure domains.

    Unknown ones are separate.
    """
    odds: list[tuple[int, float]] = []
    for count in range(1, min(ODDS_UP_TO_LOST, domain_loss.domain_count(losses, domains)) + 1):
        try:
            odds.append((count, domain_loss.recovery_probability(losses, domains, count)))
        except TooManyCases:  # The computation for a higher number of lost domains would take even longer.
            break
    return odds


def time_span(span: JobSpan, end: int, job: SavedJob) -> jobs_schemas.TimeSpan:
    """Return a period of a job that ends at `end` (microseconds)."""
    is_newest = job.ended_at is None and records.at(end / MICRO) == job.accounted_until
    return jobs_schemas.TimeSpan(
        bucket=span.bucket,
        start_time=records.at(span.start / MICRO),
        end_time=None if is_newest else records.at(end / MICRO),
        missing_node_count=span.missing,
    )


def checkpoint(record: SavedCheckpoint) -> checkpoints_schemas.Checkpoint:
    """Convert the record of a checkpoint into its response model."""
    return shaped(
        record,
        checkpoints_schemas.Checkpoint,
        status=_CHECKPOINT_STATUS.get(
            record.state, CheckpointStatus.UPLOADING if record.completed_at is None else CheckpointStatus.COMPLETE
        ),
        s3_uri=f"s3://{record.bucket}/{record.manifest_key}",
        is_pinned=record.pinned_at is not None,
        verification=_verification(record),
        verification_message=_verification_message(record),
        verification_waiting_since=record.blocked.since if record.blocked else None,
    )


def _verification(record: SavedCheckpoint) -> Verification:
    if record.verify_requested_at is not None:
        return Verification.WAITING if record.blocked else Verification.VERIFYING
    if record.verdict is None:
        return Verification.NOT_VERIFIED
    return Verification.DAMAGED if record.is_wrong else Verification.INTACT


_OBSTACLES: Final[Mapping[Obstacle, str]] = {
    Obstacle.DENIED: "S3 denies the server access",
    Obstacle.NO_CREDENTIALS: "the server has no AWS credentials",
    Obstacle.THROTTLED: "S3 throttles the server",
    Obstacle.NO_ANSWER: "S3 does not answer",
    Obstacle.GARBLED: "S3's answers contradict each other or are incomplete",
    Obstacle.NO_BUCKET: "the bucket does not exist, or contains no object of this run",
    Obstacle.REFUSED: "S3 rejects the request",
}


def _verification_message(record: SavedCheckpoint) -> str | None:
    if record.blocked is None:
        return str(record.verdict or "") or None
    why = f"{_OBSTACLES[record.blocked.obstacle]}: {record.blocked.detail}"
    return f"the verification waits and tries again, because {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Similar:
    """An incident that resembles a given one."""

    record: SavedIncident
    fleet_name: str
    outcome: IncidentOutcome
    likeness: tuple[Likeness, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentDetail:
    """Fields of DescribeIncident that lists omit."""

    account: Account
    duty: PersonDuty
    subject: Subject
    notes: Sequence[NoteRecord]
    stacks_event_id: int | None
    """Event with the ranks' stacks, or None."""
    now: float
    """Unix seconds of the request."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The failure and the outcome in one line each."""

    headline: str
    outcome: IncidentOutcome


def incident(
    record: SavedIncident, cost_usd: float | None, summary: Summary, detail: IncidentDetail | None = None
) -> incidents_schemas.Incident:
    """Convert an incident, with its cost until now. `detail` is None in a list."""
    described: dict[str, Any] = {}
    if detail is not None:
        described = {
            "verdict": accounts.verdict(detail.account, detail.now),
            "why": answers.why(detail.account),
            "done": list(answers.done(detail.account)),
            "wait": capacity_wait(
                detail.account.wait,
                instance_type=detail.account.instance_type,
                availability_zone=detail.account.availability_zone,
            ),
            "continuing_cost": accounts.continuing_cost(detail.account, detail.now) or None,
            "duty_sentence": duties.sentence(detail.duty),
            "actions": [_action(duties.action(each, detail.subject)) for each in detail.duty.actions],
            "milestones": [shaped(each, incidents_schemas.Milestone) for each in accounts.milestones(detail.account)],
            "notes": [shaped(each, notes_schemas.Note) for each in detail.notes],
        }
    return shaped(
        record,
        incidents_schemas.Incident,
        evidence=[sentence(fact) for fact in record.evidence],
        evidence_facts=[_evidence_fact(fact) for fact in record.evidence],
        decision=responses.response(record.decision),
        reason=job_accounts.restore_reason(record.from_step, record.restore_source),
        node_count_before=record.node_count_before or None,
        node_count_after=record.node_count_after or None,
        instance_id=next(iter(record.instance_ids), None),
        replacement_instance_id=next(iter(record.replacement_instance_ids), None),
        control_plane_absent_seconds=absent_seconds(record.evidence),
        cost_usd=cost_usd,
        headline=summary.headline,
        outcome=summary.outcome,
        rank_sources=_rank_sources(record),
        stacks_event_id=None if detail is None else detail.stacks_event_id,
        **described,
    )


def _evidence_fact(fact: Fact) -> incidents_schemas.EvidenceFact:
    fault = fact.fault if isinstance(fact, NodeFaulty) else fact
    return incidents_schemas.EvidenceFact(
        kind=str(type(fact).__struct_config__.tag),
        node_ids=list(nodes_of(fact)),
        ranks=list(ranks_of(fact)),
        code=fault.code if isinstance(fault, Faulty | InstanceEnded) else None,
        xid=fault.xid if isinstance(fault, Faulty) else None,
        exit_code=fact.code if isinstance(fact, RankEnded) else None,
    )


def _repeat_choice(job: SavedJob) -> jobs_schemas.RepeatChoice | None:
    choice = memos.repeat_choice_of(job)
    if choice is None:
        return None
    return shaped(
        choice,
        jobs_schemas.RepeatChoice,
        ended_node_ids=[each.node_id for each in choice.holders if each.state is HolderState.ENDED],
        silent_node_ids=[each.node_id for each in choice.holders if each.state is HolderState.SILENT],
        unknown_steps=choice.unknown_steps,
        is_total_loss=choice.is_total,
        is_store_listed=choice.listing is not None and choice.listing.obstacle is None,
    )


def duty(disposition: Disposition) -> duties_schemas.Duty:
    """Return the duty of a job or fleet, in the words that all pages, commands and notifications show."""
    found, subject = disposition.duty, disposition.subject
    return shaped(
        found,
        duties_schemas.Duty,
        sentence=duties.sentence(found),
        explanation=duties.explanation(found, subject) or None,
        actions=[_action(duties.action(each, subject)) for each in found.actions],
    )


def _action(action: Action) -> duties_schemas.DutyAction:
    return shaped(action, duties_schemas.DutyAction)


def capacity_wait(
    wait: CapacityWait | None, *, instance_type: str, availability_zone: str
) -> common_schemas.CapacityWait | None:
    """Return a job's wait for instances, or None."""
    if wait is None:
        return None
    return shaped(wait, common_schemas.CapacityWait, instance_type=instance_type, availability_zone=availability_zone)


def similar_incident(found: Similar) -> incidents_schemas.SimilarIncident:
    """Convert a similar incident into its response model."""
    return shaped(
        found.record,
        incidents_schemas.SimilarIncident,
        decision=responses.response(found.record.decision),
        fleet_name=found.fleet_name,
        outcome=found.outcome,
        likeness=found.likeness,
    )


def _rank_sources(record: SavedIncident) -> list[incidents_schemas.RankSource]:
    firsts = accumulate((count for _, count in record.rank_sources), initial=0)
    return [
        incidents_schemas.RankSource(
            source=source,  # type: ignore[arg-type]  # the database stores only these values
            first_rank=first,
            last_rank=first + count - 1,
        )
        for first, (source, count) in zip(firsts, record.rank_sources, strict=False)
    ]


def drill(record: DrillRecord) -> drills_schemas.Drill:
    """Convert the record of a drill into its response model."""
    return shaped(record, drills_schemas.Drill, outcome=drill_outcome(record.outcome, record.incident_id) or None)


def fleet(
    record: FleetRecord,
    nodes: Sequence[SavedNode],
    agents: Sequence[AgentView],
    history: History,
    disposition: Disposition,
) -> fleets_schemas.Fleet:
    """Convert a fleet. `nodes` excludes ended nodes. `agents` includes the agents of other fleets.

    `disposition` comes from `disposition.of_fleets`.
    """
    connected = {view.node_id for view in agents if view.is_connected}
    return shaped(
        record,
        fleets_schemas.Fleet,
        reason=reasons.sentences(record.reasons),
        encrypts_replicas=encryption.is_needed(
            ReplicaEncryption(record.replica_encryption),
            {node.instance_type for node in nodes} or {record.instance_type},
            record.encrypting_types,
        ),
        duty=duty(disposition),
        fleet_status=FleetStatus.DELETING if record.delete_requested_at is not None else FleetStatus(record.state),
        spare_policy=None
        if record.spare_probability is None
        else fleets_schemas.SparePolicy(probability=record.spare_probability),
        node_count=len(nodes),
        connected_node_count=sum(node.id in connected for node in nodes),
        oldest_image_time=min((node.image_created_at for node in nodes if node.image_created_at), default=None),
        accounting_seconds={name: spent / MICRO for name, spent in history.jobs.spent.items()},
        reliability=_reliability(history.jobs.spent, history.incidents, is_started=history.jobs.node_microseconds > 0),
        incident_count=history.incidents.count,
        lost_node_count=history.incidents.lost_node_count,
        node_seconds=history.jobs.node_microseconds / MICRO,
        cost_usd=history.jobs.cost_usd,
        roll=_roll(record),
    )


def _roll(record: FleetRecord) -> fleets_schemas.FleetRoll | None:
    newest = db_rolls.newest(record)
    if newest is None:
        return None
    roll, progress = newest
    return shaped(
        roll,
        fleets_schemas.FleetRoll,
        roll_status=rolls.status(roll, progress),
        status_reason=reasons.sentence(progress.reason),
        node_count=len(roll.node_ids),
        finished_node_count=len(progress.finished),
        current_node_ids=progress.current,
        end_time=progress.ended_at,
    )


def node(
    record: SavedNode,
    agent: AgentView | None,
    *,
    refused_message_count: int,
    job_name: str | None,
    price_usd_per_hour: float | None,
    with_reasons: bool,
    history: Sequence[ImplicationRecord] = (),
) -> nodes_schemas.Node:
    """Convert a node.

    `agent` is None if it has connected to no running server. `price_usd_per_hour` is None without a price.
    `with_reasons` shows reasons, which may name jobs.
    """
    request = record.request if isinstance(record.request, Requested) else None
    return shaped(
        record,
        nodes_schemas.Node,
        reason=reasons.sentence(record.reason) if with_reasons else "",
        hold_advice=_hold_advice(record, price_usd_per_hour),
        request=request.request if request is not None else None,
        request_reason=reasons.sentence(request) if request is not None and with_reasons else None,
        connected=agent is not None and agent.is_connected,
        warm=agent is not None and agent.is_connected and agent.report is not None and agent.report.is_warm,
        training_job_name=job_name,
        memory=_memory(agent, with_ranks=job_name is not None),
        conditions=_conditions(agent, with_member=job_name is not None),
        burn_in=_burn_in(record.burn_in),
        incidents=[shaped(line, nodes_schemas.NodeIncident, evidence=sentence(line.evidence)) for line in history],
        refused_message_count=refused_message_count,
        refused_session_count=agent.report.refused_count if agent is not None and agent.report is not None else 0,
        exposure=(agent.report.exposure or None) if agent is not None and agent.report is not None else None,
    )


def _hold_advice(record: SavedNode, price_usd_per_hour: float | None) -> nodes_schemas.HoldAdvice | None:
    if record.hold is None or record.state != NodeState.HELD:
        return None
    found = held_nodes.advice(record.id, Hold(record.hold), record.reason, price_usd_per_hour)
    return shaped(found, nodes_schemas.HoldAdvice)


def _burn_in(stored: BurnIn | None) -> nodes_schemas.NodeBurnIn | None:
    if stored is None or stored.result is None:
        return None
    pairs = [pair.test for pair in stored.pairs if pair.test is not None]
    tests = [shaped(test, nodes_schemas.NodeTest) for test in (*stored.result.tests, *pairs)]
    return shaped(stored.result, nodes_schemas.NodeBurnIn, time=stored.ended_at, tests=tests)


def _memory(agent: AgentView | None, *, with_ranks: bool) -> nodes_schemas.NodeMemory | None:
    memory = agent.report.memory if agent is not None and agent.is_connected and agent.report is not None else None
    if memory is None:
        return None
    return shaped(
        memory,
        nodes_schemas.NodeMemory,
        used_bytes=memory.total_bytes - memory.available_bytes,
        ranks=[shaped(each, fleets_schemas.RankMemory) for each in memory.ranks if with_ranks],
    )


def status_transitions(job: SavedJob) -> list[jobs_schemas.SecondaryStatusTransition]:
    """Return the periods of a job in each detailed status, oldest first."""
    ends = [transition.at for transition in job.transitions[1:]] + [job.ended_at]
    shown = []
    has_started = has_stepped = False
    # Old versions of the server did not record when a generation finished its first step (`stepped_at`).
    is_undated = job.max_boundary > FIRST_STEP and all(transition.stepped_at is None for transition in job.transitions)
    for transition, end in zip(job.transitions, ends, strict=True):
        state, stepped_at = JobState(transition.state), transition.stepped_at
        moments = [(transition.at, is_undated)]
        # `stepped_at` is a time of the ranks' clock, so it may precede the control plane's transition to running.
        if stepped_at is not None:
            moments = (
                [(transition.at, False), (stepped_at, True)] if stepped_at > transition.at else [(transition.at, True)]
            )
        for (start, is_stepping), (until, _) in zip(moments, [*moments[1:], (end, True)], strict=True):
            status = states.secondary_status(
                state,
                has_started=has_started,
                has_stepped=has_stepped,
                is_stepping=is_stepping,
                is_pause_requested=transition.is_paused,
                has_older_checkpoint=has_older_checkpoint(job),
            )
            shown.append(
                jobs_schemas.SecondaryStatusTransition(
                    status=status, state=state, start_time=start, end_time=until, status_message=transition.reason
                )
            )
        has_started = has_started or state is JobState.STARTING
        has_stepped = has_stepped or stepped_at is not None or (is_undated and state is JobState.RUNNING)
    return shown


def _reliability(spent: Mapping[str, int], incidents: IncidentTotals, *, is_started: bool) -> jobs_schemas.Reliability:
    return jobs_schemas.Reliability(
        ettr_ratio=accounting.ettr_ratio(spent) if is_started else None,
        ettr_with_queue_ratio=accounting.ettr_ratio(spent, is_queue_counted=True) if is_started else None,
        mttf_seconds=accounting.mean_seconds_to_failure(spent, incidents.failure_count),
        mttr_seconds=incidents.mean_recovery_seconds,
        lost_steps=incidents.lost_steps,
        incident_cost_usd=incidents.cost_usd,
    )


def _protection_state(job: SavedJob, shards: Sequence[ShardRecord]) -> tuple[ProtectionState, str]:
    """Return the protection state and, unless it is `Protected`, the reason."""
    if job.state in states.ENDED_JOBS:
        return ProtectionState.UNPROTECTED, "The job has ended; its memory was released."
    if is_paused(job):
        return ProtectionState.UNPROTECTED, f"The job has no nodes; its state is in S3. {job.reason}"
    if (lapse := lapse_of(job)) is not None:
        words = job_accounts.lapsed(Lapsed(lapse=lapse, boundary=Step(job.boundary)))
        return ProtectionState.UNPROTECTED, f"{words[0].upper()}{words[1:]}."
    refused = next((shard for shard in shards if shard.reason), None)
    if job.committed_step < 0:
        return (
            ProtectionState.UNPROTECTED,
            f"The job has not committed a step yet: {_refusal(refused) if refused else job.reason}",
        )
    if not shards:
        words = (
            f"Step {job.committed_step} was committed, but no rank of generation {job.generation} has "
            "reported its holders"
        )
        return ProtectionState.UNPROTECTED, f"{words}: {job.reason}"
    missing = world_size(job) - len(shards)
    if missing:
        return (
            ProtectionState.DEGRADED,
            f"{missing} of {world_size(job)} ranks have not reported their shard in this generation.",
        )
    if job.spec.parity_group_size is not None and (words := _incomplete_groups(shards)):
        return ProtectionState.DEGRADED, words
    thin = [shard for shard in shards if sum(holder.is_in_view for holder in shard.holders) < job.spec.copies]
    if thin:
        first = thin[0]
        in_view = sum(holder.is_in_view for holder in first.holders)
        detail = f": {first.reason}" if first.reason else ""
        return (
            ProtectionState.DEGRADED,
            f"{len(thin)} shards have fewer than {job.spec.copies} copies in view; rank {first.rank} has "
            f"{in_view}{detail}.",
        )
    if refused:
        return ProtectionState.DEGRADED, _refusal(refused)
    early = next((shard for shard in shards if shard.committed_step < 0), None)
    if early:
        return ProtectionState.DEGRADED, f"Rank {early.rank} has not committed a step in this generation."
    return ProtectionState.PROTECTED, ""


def _incomplete_groups(shards: Sequence[ShardRecord]) -> str:
    """Return a sentence about the parity groups that survive no node loss, or empty."""
    incomplete = [shard for shard in shards if _misses(shard)]
    if not incomplete:
        return ""
    first = incomplete[0]
    out = ", ".join(holder.node_id for holder in first.holders if not holder.is_in_view)
    cause = f"has {out} out of view" if out else "has not committed a step in this generation"
    groups = {tuple(sorted(holder.node_id for holder in shard.holders)) for shard in incomplete}
    count = f"{len(groups)} parity group{'s' if len(groups) != 1 else ''}"
    detail = f": {first.reason}" if first.reason else ""
    return f"{count} cannot rebuild a lost shard; rank {first.rank} {cause}{detail}."


def _refusal(shard: ShardRecord) -> str:
    return f"Rank {shard.rank}: {shard.reason}"
