"""Handles a job in state LOADING or STARTING: every node loads and verifies its shards, then starts its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

from control_plane.core import accounting, faults, incidents, recovery, repeated_steps
from control_plane.core.actions import Decision, Send, SendLoad
from control_plane.core.incidents import Fault
from control_plane.core.job.losses import reported_besides
from control_plane.core.job.outcome import LAUNCH_SECONDS, change_state, end_job, stay
from control_plane.core.job.resizing import trains
from control_plane.core.job.restart import start_new_generation
from control_plane.core.job.store_wait import end_hold, hold, hold_reason
from control_plane.core.job.view import JobView, durable_step, is_in_phase, with_record
from control_plane.core.observed.facts import ShardDiffers
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.steps import RefusedSource
from control_plane.core.states import JobEvent, JobState
from everstep.protocol.agent_messages import MemberPhase, Start
from everstep.protocol.ids import FIRST_STEP, NodeId, Rank

STARTED = (MemberPhase.RUNNING, MemberPhase.EXITED)


def load_and_start(view: JobView) -> Decision:
    """Order the members to load their shards. When all have loaded, order them to start their ranks."""
    record, plan = view.record, view.plan
    is_loading = record.state is JobState.LOADING
    if is_loading and any(report.phase in STARTED for report in view.reports.values()):
        # The control plane orders the start of ranks only after it has stored the state STARTING. Agents report this
        # start although the stored state is earlier, so the database was restored from a backup
        # (docs/design/database-restore.md).
        return _move_to_starting(view, JobFact.STARTED_EARLIER)
    # If a stop is requested before any rank runs, end the job now only if this loses no step: S3 has the base, or the
    # base is step 0. If only nodes' memory holds the base, let the job train first. It then stops at an agreed step and
    # stores this step in S3.
    if view.wants_stop and is_loading and plan.base_step <= max(durable_step(view), FIRST_STEP):
        return end_job(view, JobEvent.HALTED, JobNote(what=JobFact.STOPPED_WITHOUT_RANKS, stop=view.wants_stop))
    if (fault := faults.permanent(view.reports, has_trained=record.max_boundary > FIRST_STEP)) is not None:
        return end_job(view, JobEvent.GAVE_UP, fault.message)
    found = (
        *faults.of_nodes(plan, view.verdicts, view.nodes, view.now),
        *faults.of_agents(plan, view.spec.run, view.nodes, view.now),
        *faults.of_loads(plan, view.reports, view.now),
        *faults.of_ranks(view.reports),
        *faults.of_silence(plan, view.nodes, view.now, view.policy.timeouts),
    )
    if found:
        found = (*found, *reported_besides(view, found))
        failure = faults.failure_of_loads(plan, view.reports, record.max_boundary, view.now)
        failure = failure or faults.failure_of_ranks(plan, view.reports, record.max_boundary)
        return start_new_generation(view, found, failure)
    if is_loading:
        view = hold(view)
        if given_up := end_hold(view):
            return start_new_generation(*given_up, None)
        return _load(view)
    waiting = [node.node_id for node in plan.nodes if not is_in_phase(view, node.node_id, *STARTED)]
    if waiting:
        starts = tuple(
            Send(node_id, Start(job=view.spec.job, run=view.spec.run, generation=plan.generation))
            for node_id in waiting
            if is_in_phase(view, node_id, MemberPhase.LOADED)
        )
        reason = JobNote(what=JobFact.STARTS_RANKS, node_ids=tuple(waiting))
        return stay(view, reason, starts, requeue=LAUNCH_SECONDS)
    # Drop the members' problems (impairments) recorded so far. The job excludes a member with a problem if training
    # completes no step for `exclude_seconds`. This time must not include the launch.
    running = with_record(view, impairments=())
    return change_state(running, JobEvent.STARTED, trains(view))


def _load(view: JobView) -> Decision:
    plan = view.plan
    waiting = [node.node_id for node in plan.nodes if not is_in_phase(view, node.node_id, MemberPhase.LOADED)]
    if waiting:
        loads = tuple(
            SendLoad(node_id=node_id, plan=plan)
            for node_id in waiting
            if is_in_phase(view, node_id, MemberPhase.PROMISED)
        )
        reason = JobNote(what=JobFact.LOADS, step=plan.base_step, node_ids=tuple(waiting))
        return stay(view, hold_reason(view) or reason, loads, requeue=LAUNCH_SECONDS)
    if wrong := repeated_steps.wrong_bases(view.record.states, plan, view.reports):
        return _without_wrong_bases(view, wrong)
    return _move_to_starting(view, JobFact.LOADED)


def _without_wrong_bases(view: JobView, wrong: Mapping[Rank, NodeId]) -> Decision:
    """Start a new generation that does not use copies whose state differs from what their owners sealed."""
    sources = {rank: view.plan.ranks[rank].sources[0] for rank in wrong}
    refused = tuple(
        RefusedSource(
            rank=rank,
            origin_generation=source.origin_generation,
            step=source.step,
            is_object=source.kind == "s3",
            digest=source.digest,
        )
        for rank, source in sources.items()
    )
    found = tuple(
        Fault(
            cause=Cause.LOAD_FAILED,
            evidence=ShardDiffers(node_id=wrong[rank], rank=rank, step=source.step, source=source.node_id or ""),
            at=view.now,
            seen_on=(wrong[rank],),
        )
        for rank, source in sources.items()
    )
    return start_new_generation(with_record(view, refused=(*view.record.refused, *refused)), found, None)


def _move_to_starting(view: JobView, why: JobFact) -> Decision:
    record = view.record
    if record.started_at is None:
        paused = record.microseconds.get(Bucket.PAUSED, 0)
        record = replace(record, started_at=accounting.accounted_until(record), paused_microseconds_before_start=paused)
    incident = record.incident
    if incident is not None:
        used = [source for report in view.reports.values() for source in report.restored_from]
        farthest = reduce(recovery.farther, used, incident.restore_source)
        incident = replace(incident, restore_source=farthest, rank_sources=incidents.runs_of(used))
    loaded = replace(view, record=replace(record, incident=incident, store_wait=None))
    return change_state(loaded, JobEvent.LOADED, JobNote(what=why))
