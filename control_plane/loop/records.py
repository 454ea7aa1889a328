"""Converts database rows to the records that decisions (`control_plane.core`) use, and back. Pure.

Invariant: a core record that the control plane stores and reads again equals the original. The two functions for each
kind of record stay side by side, so that a new field is added to both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from control_plane.accounts import jobs as accounts
from control_plane.core import accounting, elastic
from control_plane.core import incidents as core_incidents
from control_plane.core.idle_nodes import IdleNodes
from control_plane.core.ledger_hours import Ledger
from control_plane.core.observed.drills import DrillKind, DrillObserved, DrillState
from control_plane.core.observed.facts import Requested
from control_plane.core.observed.fleets import FleetJob, FleetSpec, Hold, HoldRelease, LaunchRecord, NodeRecord
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord
from control_plane.core.observed.jobs import JobRecord, Memo
from control_plane.core.observed.nodes import Implication, Notice, Remedy
from control_plane.core.observed.specs import JobSettings, JobSpec
from control_plane.core.observed.steps import (
    NO_GENERATION,
    CheckpointRecord,
    GenerationRecord,
    initial_generation,
)
from control_plane.core.states import INCIDENT_PHASES, JobState, NodeState
from control_plane.db import checkpoints, drills, fleets, implications, incidents, intents, jobs, nodes, notices
from everstep.protocol.agent_messages import AgentReport, NoticeKind
from everstep.protocol.codec import resolve
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, RunId, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import InputChannel, ObjectReference, ScriptPlan, SourceArchive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SETTINGS: Final = tuple(field.name for field in fields(JobSettings))
_TIME: Final = re.compile("(^|_)(at|until)$")
log = logging.getLogger(__name__)

_MEMO: Final = tuple(field.name for field in fields(Memo))


def as_core(stored: DataclassInstance, kind: type[DataclassInstance], *others: str) -> dict[str, Any]:
    """Return the fields of a row that `kind` also has, without `others`. Times become Unix seconds."""
    values = {name: getattr(stored, name) for name in _shared(type(stored), kind) if name not in others}
    return {name: value.timestamp() if isinstance(value, datetime) else value for name, value in values.items()}


def _as_stored(record: DataclassInstance, kind: type[DataclassInstance], *others: str) -> dict[str, Any]:
    """Return the fields of a record that the row type `kind` also has, without `others`. Times become datetimes."""
    values = {name: getattr(record, name) for name in _shared(type(record), kind) if name not in others}
    return {name: _moment(value) if _TIME.search(name) else value for name, value in values.items()}


@cache
def _shared(kind: type[DataclassInstance], other: type[DataclassInstance]) -> tuple[str, ...]:
    names = {field.name for field in fields(other)}
    return tuple(field.name for field in fields(kind) if field.name in names)


def at(seconds: float) -> datetime:
    """Convert Unix seconds to a datetime in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def job_spec(job: jobs.SavedJob) -> JobSpec:
    """Convert the specification in a job's row to the form that decisions use."""
    spec = job.spec
    return JobSpec(
        **{name: getattr(spec, name) for name in _SETTINGS},
        job=JobName(job.name),
        run=RunId(job.run_id),
        fleet=FleetName(job.fleet_name),
        script=ScriptPlan(
            source=_source(spec),
            entry_point=spec.entry_point,
            module=spec.module,
            hyperparameters=dict(spec.hyperparameters),
            arguments=tuple(spec.arguments),
            environment=dict(spec.environment),
            output=prefix_of(spec.output_uri),
            kept_files=tuple(spec.kept_files),
            logs=prefix_of(spec.log_uri),
            inputs=tuple(_channel(given) for given in spec.inputs),
            role_arn=spec.role_arn,
            requirements=spec.requirements,
            project=job.project,
            secrets=dict(spec.secrets),
        ),
        checkpoint_prefix=prefix_of(spec.checkpoint_uri),
        priority=job.priority,
        initial_checkpoint=_in_words(spec.initial) if spec.initial is not None else "",
        fleets=tuple(FleetName(name) for name in spec.fleet_names),
    )


def _channel(given: jobs.JobInput) -> InputChannel:
    if not given.uri:
        return InputChannel(name=given.name, directory=given.directory)
    bucket, _, key = given.uri.removeprefix("s3://").partition("/")
    return InputChannel(name=given.name, prefix=ObjectReference(bucket=bucket, key=key))


def prefix_of(uri: str) -> ObjectReference:
    """Convert a URI such as `s3://bucket/prefix/` to a reference whose key ends with a slash."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return ObjectReference(bucket=bucket, key=key if key.endswith("/") or not key else f"{key}/")


def run_folder(checkpoint_uri: str, run_id: str) -> ObjectReference:
    """Return the key prefix of all checkpoints of a run. It ends with a slash."""
    return folder_of_run(prefix_of(checkpoint_uri), run_id)


def folder_of_run(prefix: ObjectReference, run_id: str) -> ObjectReference:
    """Return the key prefix of all checkpoints of a run below the prefix of its job's checkpoints."""
    return ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}run={run_id}/")


def generation_node_count(job: jobs.SavedJob) -> int:
    """Return the number of nodes of a job's newest generation, or NodeCount before its first generation."""
    return int(job.memo.get("member_count") or job.spec.node_count)


def job_record(job: jobs.SavedJob) -> JobRecord:
    """Convert a row of the job table to the record that decisions use."""
    return _record_with(job, msgspec.convert(_memo_of(job), Memo))


def shown_record(job: jobs.SavedJob) -> JobRecord:
    """Convert a row of the job table for other decisions and for people. Unreadable values have their defaults."""
    memo = _memo_of(job)
    try:
        return job_record(job)
    except msgspec.ValidationError as error:
        log.error("job %s of project %s: its record cannot be read: %s", job.name, job.project, error)
    # Otherwise one such row would end the pass of its whole fleet and all lists of jobs.
    for name in [name for name in memo if name != "state_since" and not _is_readable(memo, name)]:
        del memo[name]
    return _record_with(job, msgspec.convert(memo, Memo))


def _memo_of(job: jobs.SavedJob) -> dict[str, Any]:
    return {"state_since": job.created_at.timestamp(), "reason": job.reason, **job.memo}


def _is_readable(memo: dict[str, Any], name: str) -> bool:
    try:
        msgspec.convert({"state_since": 0.0, name: memo[name]}, Memo)
    except msgspec.ValidationError:
        return False
    return True


def _record_with(job: jobs.SavedJob, memo: Memo) -> JobRecord:
    return JobRecord(
        **as_core(job, JobRecord, "state", "failures", "reason"),
        **{name: getattr(memo, name) for name in _MEMO},
        state=JobState(job.state),
        checkpoint_wanted=Step(job.checkpoint_wanted_step),
        committed=Step(job.committed_step),
        proposed=Step(job.proposed_step),
        target=Step(job.target_step),
        failures=tuple(msgspec.convert(dict(failure), FailureRecord) for failure in job.failures),
        microseconds=dict(job.accounting),
    )


def job_ledger(record: JobRecord) -> Ledger:
    """Return a job's time by category, in the form that `core.ledger_hours.full_hours` accepts."""
    return Ledger(
        at=accounting.microseconds(accounting.accounted_until(record)),
        spent=record.microseconds,
        node_microseconds=record.node_microseconds,
    )


def idle_nodes(fleet: fleets.FleetRecord) -> IdleNodes:
    """Return the stored idle time of a fleet's nodes from the fleet's row."""
    return IdleNodes(
        until=None if fleet.idle_until is None else fleet.idle_until.timestamp(),
        counts=fleet.idle_counts,
        microseconds=fleet.idle_microseconds,
    )


def idle_update(idle: IdleNodes) -> dict[str, object]:
    """Return the columns of a fleet's row that contain the idle time of its nodes."""
    return {
        "idle_microseconds": dict(idle.microseconds),
        "idle_counts": dict(idle.counts),
        "idle_until": _moment(idle.until),
    }


def job_update(record: JobRecord, price_usd_per_hour: float | None) -> dict[str, Any]:
    """Return the columns of a job's row that a decision may change, except its state, which `jobs.transition` writes.

    Raises ValidationError for a record that `job_record` could not read.
    """
    memo = msgspec.to_builtins({name: getattr(record, name) for name in _MEMO})
    msgspec.convert(memo, Memo)
    return {
        **_as_stored(record, jobs.JobProgress, "state", "failures", "reason"),
        "reason": accounts.reason(record.reason),
        "committed_step": record.committed,
        "proposed_step": record.proposed,
        "target_step": record.target,
        "failures": tuple(msgspec.to_builtins(failure) for failure in record.failures),
        "accounting": dict(record.microseconds),
        "cost_usd": accounting.cost_usd(record.node_microseconds, price_usd_per_hour),
        "memo": memo,
    }


def _in_words(initial: jobs.InitialState) -> str:
    return f"the checkpoint of step {initial.step} of the job {initial.job_name} (run {initial.run_id})"


def lineage_of(job: jobs.SavedJob, entries: Iterable[jobs.LineageEntry]) -> tuple[GenerationRecord, ...]:
    """Return the records of a job's generations with a plan, oldest first.

    If the job starts from another job's checkpoint, the record of generation 0 stands for it and comes first.
    """
    initial = job.spec.initial
    first = () if initial is None else (initial_generation(initial.world_size),)
    return (*first, *(generation_record(entry) for entry in entries))


def initial_checkpoint(stored: checkpoints.SavedCheckpoint) -> CheckpointRecord | None:
    """Convert another job's checkpoint to a record of generation 0, or None unless its state is complete."""
    found = checkpoint_record(stored)
    if found is None:
        return None
    shards = tuple(msgspec.structs.replace(shard, origin_generation=NO_GENERATION) for shard in found.shards)
    return replace(found, generation=NO_GENERATION, shards=shards)


def generation_record(entry: jobs.LineageEntry) -> GenerationRecord:
    """Convert an entry of a job's lineage to the record that decisions use."""
    return GenerationRecord(
        generation=Generation(entry.number),
        parent=Generation(entry.parent),
        base_step=Step(entry.base_step),
        world_size=entry.world_size,
        was_started=entry.started_at is not None,
    )


def checkpoint_record(
    stored: checkpoints.SavedCheckpoint, shards: tuple[ManifestShard, ...] | None = None
) -> CheckpointRecord | None:
    """Convert a checkpoint's row to the record that decisions use, or None unless its state is complete.

    `shards` are those of its manifest, if the caller knows them.
    """
    if shards is None:
        manifest = stored.contents()
        shards = None if manifest is None else manifest.shards
    if shards is None or stored.state != checkpoints.COMPLETE:
        return None
    return CheckpointRecord(
        **as_core(stored, CheckpointRecord, "completed_at"),
        shards=shards,
        completed_at=stored.completed_at.timestamp() if stored.completed_at is not None else 0.0,
        is_wrong=stored.is_wrong,
    )


def new_incident(incident: IncidentRecord, job: jobs.SavedJob, now: float) -> incidents.NewIncident:
    """Return the row of an incident that is stored for the first time."""
    return incidents.NewIncident(
        **_as_stored(incident, incidents.NewIncident, "cause"),
        job_name=job.name,
        project=job.project,
        phase=INCIDENT_PHASES[incident.state].value,
        cause=incident.cause.value,
        detect_seconds=core_incidents.phase_seconds(incident, now)["detect_seconds"],
        detail={},
    )


def incident_update(incident: IncidentRecord, now: float, price_usd_per_hour: float | None) -> dict[str, object]:
    """Return the columns of an incident's row that can change. A phase that has not ended has no duration (None)."""
    seconds = core_incidents.phase_seconds(incident, now)
    is_closed = incident.closed_at is not None
    return {
        **_as_stored(incident, incidents.SavedIncident, "id", "cause", "rank_sources"),
        "phase": INCIDENT_PHASES[incident.state].value,
        "cause": incident.cause.value,
        "lost_steps": core_incidents.lost_steps(incident),
        "detect_seconds": seconds["detect_seconds"],
        "replace_seconds": seconds["replace_seconds"] if incident.replaced_at is not None or is_closed else None,
        "restore_seconds": seconds["restore_seconds"] if incident.restored_at is not None or is_closed else None,
        "rework_seconds": seconds["rework_seconds"] if is_closed else None,
        "cost_usd": accounting.cost_usd(incident.idle_node_microseconds, price_usd_per_hour),
        "rank_sources": tuple((source, count) for source, count in incident.rank_sources),
    }


def fleet_spec(fleet: fleets.FleetRecord) -> FleetSpec:
    """Convert the user's configuration in a fleet's row to the specification that decisions use."""
    return FleetSpec(
        **as_core(fleet, FleetSpec, "name"),
        name=FleetName(fleet.name),
        group=fleet.auto_scaling_group_name,
        is_deleting=fleet.delete_requested_at is not None,
        is_blindness_lifted=fleet.blindness_lifted_at is not None,
        holds_failed_instances=fleet.hold_failed_instances,
    )


def _source(spec: jobs.SavedJobSpec) -> SourceArchive:
    return SourceArchive(
        object=ObjectReference(bucket=spec.source_bucket, key=spec.source_key),
        sha256=spec.source_sha256,
        bytes=spec.source_bytes,
    )


def fleet_job(job: jobs.SavedJob) -> FleetJob:
    """Convert an unfinished job to the record that decisions about its fleet use."""
    record = shown_record(job)
    return FleetJob(
        **as_core(record, FleetJob, "node_count", "member_count"),
        job=JobName(job.name),
        run=RunId(job.run_id),
        node_count=job.spec.node_count,
        least_node_count=job.spec.least_node_count,
        most_node_count=job.spec.most_node_count,
        member_count=record.reduced_count or record.member_count,
        smaller_from=elastic.smaller_from(job.spec, record),
        priority=job.priority,
        source=_source(job.spec),
        project=job.project,
        quota=job.project_quota,
        is_paused=record.pause_requested_at is not None,
        is_preemptible=job.spec.preemptible,
        is_settled=elastic.is_settled(record),
        is_taken_over=bool(record.taken_over_by),
        avoided=tuple(trial.node_id for trial in record.trials if trial.node_id is not None),
    )


def launch_record(intent: intents.IntentRecord) -> LaunchRecord:
    """Convert a stored call of LaunchInstances to the record that decisions about its fleet use."""
    return LaunchRecord(
        key=intent.key,
        count=intent.detail["count"],
        desired_count=intent.detail["desired_count"],
        since=(intent.finished_at or intent.created_at).timestamp(),
        is_open=intent.state is intents.IntentState.OPEN,
        is_refused=intent.state is intents.IntentState.FAILED,
    )


def node_record(node: nodes.SavedNode) -> NodeRecord:
    """Convert a row of the node table to the record that decisions use."""
    return NodeRecord(
        **as_core(node, NodeRecord, "state", "since", "hold", "release", "request"),
        node_id=NodeId(node.id),
        state=NodeState(node.state),
        run=RunId(node.run_id) if node.run_id is not None else None,
        since=(node.since or node.created_at).timestamp(),
        hold=Hold(node.hold) if node.hold is not None else None,
        release=HoldRelease(node.release) if node.release else None,
        request=node.request if isinstance(node.request, Requested) else None,
    )


def node_update(node: NodeRecord, before: str | None, *, had_request: bool = False) -> dict[str, object]:
    """Return the columns of a node's row that a decision about the node's fleet may change.

    `before` is None for a new node. Without `had_request`, a request that the row contains now is newer, and stays.
    """
    columns: dict[str, object] = {
        "state": node.state.value,
        "run_id": node.run,
        "reason": node.reason,
        "hold": node.hold.value if node.hold is not None else None,
        "wanted_at": _moment(node.wanted_at),
        "since": _moment(node.since),
        "replaced_at": _moment(node.replaced_at),
        "burn_in": node.burn_in,
    }
    if had_request and node.request is None:
        columns["request"] = None
    # The API writes `release`, and the executor writes `evidence_at`. `release` stays while the node drains or is gone:
    # it shows that a person ended the node.
    if node.state.value != before:
        columns["release"], columns["evidence_at"] = node.release or "", None
    return columns


def drill(stored: drills.DrillRecord) -> DrillObserved:
    """Convert a row of the drill table to the record that decisions use."""
    return DrillObserved(
        **as_core(stored, DrillObserved, "kind", "state"),
        kind=DrillKind(stored.kind),
        state=DrillState(stored.state),
    )


def drill_update(drill: DrillObserved) -> dict[str, object]:
    """Return the columns of a drill's row that a decision about the job may change."""
    return {**_as_stored(drill, drills.DrillRecord, "id", "kind", "state"), "state": drill.state.value}


def implication(line: implications.ImplicationRecord) -> Implication:
    """Convert a row of a node's fault history to the record that decisions use."""
    return Implication(**as_core(line, Implication, "remedy"), remedy=Remedy(line.remedy))


def new_implication(line: Implication, fleet_name: str) -> implications.ImplicationRecord:
    """Convert a node's involvement in an incident to a row of the table of fault histories."""
    return implications.ImplicationRecord(
        **_as_stored(line, implications.ImplicationRecord, "remedy"),
        fleet_name=fleet_name,
        remedy=line.remedy.value,
    )


def notices_of(stored: Iterable[notices.NoticeRecord]) -> dict[NodeId, tuple[Notice, ...]]:
    """Return the stored notices by node, as the records that decisions use."""
    found: dict[NodeId, tuple[Notice, ...]] = {}
    for notice in stored:
        core_notice = Notice(kind=NoticeKind(notice.kind), message=notice.message, ends_at=_seconds(notice.ends_at))
        found[NodeId(notice.node_id)] = (*found.get(NodeId(notice.node_id), ()), core_notice)
    return found


def own_notices(report: AgentReport | None) -> tuple[Notice, ...]:
    """Return AWS's notices in the agent's last report, which the agent reads from the instance metadata."""
    if report is None:
        return ()
    return tuple(
        Notice(kind=notice.kind, message=notice.message, ends_at=notice.ends_at_seconds) for notice in report.notices
    )


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else at(seconds)


resolve(Memo)
resolve(FailureRecord)
