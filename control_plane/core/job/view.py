"""The input of one decision about a job, and values derived from it. All functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from msgspec import structs

from control_plane.core import accounting, checkpoints, claims, faults
from control_plane.core.actions import EventDraft, Send
from control_plane.core.evidence import (
    NodeVerdict,
    first_to_leave,
    is_silent,
    judge,
    nodes_out_of_view,
    progress_without,
    track_impairments,
    track_silences,
)
from control_plane.core.observed.jobs import CapacityWait, JobObserved, JobRecord
from control_plane.core.observed.nodes import Implication, NodeObserved
from control_plane.core.observed.reasons import JobFact, JobNote, StopReason
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import JobSpec, Policy
from control_plane.core.states import LAUNCHED_JOBS, RUNNING_JOBS, IncidentState, JobState
from everstep.protocol.agent_messages import ExitClass, HaltRanks, MemberPhase, MemberReport, RankExit
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, RunId, Step
from everstep.protocol.plan import GenerationPlan

GAP_LEASES = 4
"""A longer time between two decisions, as a multiple of `lease_seconds`, means that no control plane was active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The observations of one decision about a job, with a verdict on each node."""

    now: float
    spec: JobSpec
    seen: JobObserved
    policy: Policy
    record: JobRecord
    nodes: Mapping[NodeId, NodeObserved]
    reports: Mapping[NodeId, MemberReport]
    """Agents' reports about the newest generation."""
    verdicts: Mapping[NodeId, NodeVerdict]
    """One verdict per node of the newest plan and per assigned node."""
    implications: tuple[Implication, ...] = ()
    events: tuple[EventDraft, ...] = ()

    @property
    def plan(self) -> GenerationPlan:
        """The newest plan. Valid only in states that a job enters with a plan (LOADING and later)."""
        assert self.seen.plan is not None  # One transaction stores the plan and the state LOADING.
        return self.seen.plan

    @property
    def wants_pause(self) -> JobNote | None:
        """Reason for the job to release its nodes and continue later, or None."""
        if self.seen.gives_way_to:
            return JobNote(what=JobFact.PAUSES_FOR_JOB, name=self.seen.gives_way_to)
        before, incident = self.record.no_pause_before, self.record.incident
        is_too_soon = before is not None and self.now < before
        if (
            self.record.pause_requested_at is None
            or is_too_soon
            or (incident is not None and incident.state is not IncidentState.REWORKING)
        ):
            return None
        return JobNote(what=JobFact.PAUSES_FOR_USER)

    @property
    def wants_stop(self) -> StopReason | None:
        """Reason for the job to stop, or None."""
        is_requested = self.record.stop_requested_at is not None
        return self.record.stop_reason or (JobNote(what=JobFact.USER_ASKS_TO_STOP) if is_requested else None)


def view_of(now: float, spec: JobSpec, seen: JobObserved, policy: Policy, record: JobRecord) -> JobView:
    """Return the input of a decision about a job, with a verdict on each node."""
    planned = (
        [node.node_id for node in seen.plan.nodes] if seen.plan is not None and record.state in LAUNCHED_JOBS else []
    )
    team = tuple(dict.fromkeys([*planned, *seen.assigned]))
    open_id = record.incident.id if record.incident is not None else ""
    nodes = {
        node_id: _history_before(seen.nodes.get(node_id, NodeObserved(node_id=node_id)), open_id) for node_id in team
    }
    reports = current_reports(nodes, spec.run, record.generation, seen.plan)
    progress = {node_id: progress_without(reports, node_id) for node_id in team}
    silences = track_silences(record.silences, tuple(nodes.values()), progress, now, policy.timeouts)
    since = {silence.node_id: silence for silence in silences}
    # The last report of a silent agent does not show which peers the agent can reach now.
    fresh_reports = {
        node_id: report for node_id, report in reports.items() if not is_silent(nodes[node_id], policy.timeouts)
    }
    out_of_view = nodes_out_of_view(fresh_reports)
    leaving = first_to_leave(fresh_reports, [node for node in nodes.values() if not is_silent(node, policy.timeouts)])
    impairments = track_impairments(
        record.impairments,
        tuple(nodes.values()),
        out_of_view.union(() if leaving is None else (leaving,)),
        progress,
        now,
        policy.timeouts,
    )
    if record.rehearsal.is_under_way:
        impairments = tuple(replace(each, stepped_at=now) for each in impairments)  # No step is expected now.
    # Ignore nodes' problems after the end of training. A node with a problem counts as lost unless steps advance, and
    # no step advances any more.
    is_over = is_training_over(reports, spec.world_size if seen.plan is None else seen.plan.world_size)
    impaired = {each.node_id: each for each in (impairments if not seen.is_fleet_blind and not is_over else ())}
    verdicts = {
        node_id: judge(
            node,
            silence=since.get(node_id),
            stepped_at=progress[node_id].stepped_at,
            out_of_view=node_id in out_of_view,
            is_blind=seen.is_fleet_blind,
            now=now,
            timeouts=policy.timeouts,
            impairment=impaired.get(node_id),
            is_training=record.state in RUNNING_JOBS,
            is_launching=record.state in (JobState.PREPARING, JobState.LOADING, JobState.STARTING)
            and node_id in planned,
            is_first_to_leave=node_id == leaving,
        )
        for node_id, node in nodes.items()
    }
    for node_id in team:
        if node_id not in seen.assigned:
            verdicts[node_id] = faults.gone(verdicts[node_id])
    taken = {exclusion.node_id for exclusion in record.exclusions}.difference(seen.assigned)
    record = replace(
        record,
        moves=tuple(replace(move, has_left=move.has_left or move.node_id in taken) for move in record.moves),
        silences=silences,
        impairments=impairments if not seen.is_fleet_blind else (),
        stop_reason=record.stop_reason or _reached_limit(record, spec, now, seen.price_usd_per_hour),
        capacity_wait=None,  # `with_capacity_wait` sets the field again if the job still waits for nodes.
        repeat=None,  # `prepare` sets the field again if the job still waits for a person's choice.
        exclusions=tuple(exclusion for exclusion in record.exclusions if exclusion.node_id not in taken),
    )
    return JobView(
        now=now, spec=spec, seen=seen, policy=policy, record=record, nodes=nodes, reports=reports, verdicts=verdicts
    )


def gap_seconds(policy: Policy) -> float:
    """Return the longest time between two decisions of a working control plane about the same job."""
    return GAP_LEASES * policy.timeouts.lease_seconds


def _history_before(node: NodeObserved, incident_id: str) -> NodeObserved:
    if all(line.incident_id != incident_id for line in node.history):
        return node
    return replace(node, history=tuple(line for line in node.history if line.incident_id != incident_id))


def _reached_limit(record: JobRecord, spec: JobSpec, now: float, price_usd_per_hour: float | None) -> JobNote | None:
    """Return which stopping condition the job has reached, or None. Paused time does not count."""
    paused = (record.microseconds.get(Bucket.PAUSED, 0) - record.paused_microseconds_before_start) / 1_000_000
    if (
        spec.max_runtime_seconds is not None
        and record.started_at is not None
        and now - record.started_at - paused > spec.max_runtime_seconds
    ):
        return JobNote(what=JobFact.MAX_RUNTIME_OVER, limit=spec.max_runtime_seconds)
    # The limit for pending time applies only until the job first runs.
    is_pending = record.state in (JobState.QUEUED, JobState.ALLOCATING) and record.started_at is None
    if (
        spec.max_pending_seconds is not None
        and is_pending
        and now - record.created_at - paused > spec.max_pending_seconds
    ):
        return JobNote(what=JobFact.MAX_PENDING_TIME_OVER, limit=spec.max_pending_seconds)
    cost = accounting.cost_usd(record.node_microseconds, price_usd_per_hour)
    if spec.max_cost_usd is not None and cost is not None and cost >= spec.max_cost_usd:
        return JobNote(what=JobFact.MAX_COST_SPENT, limit=spec.max_cost_usd)
    return None


def with_record(view: JobView, **changes: object) -> JobView:
    """Return a copy of a `JobView`, with some fields of its job record replaced."""
    return replace(view, record=replace(view.record, **changes))  # type: ignore[arg-type]


def agents_before(
    view: JobView, node_ids: Iterable[NodeId], minor: int
) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    """Return the nodes whose agents have an earlier minor version of the protocol, and those of an unknown version."""
    minors = {node_id: view.nodes[node_id].protocol_minor for node_id in node_ids}
    earlier = tuple(node_id for node_id, its in minors.items() if its is not None and its < minor)
    return earlier, tuple(node_id for node_id, its in minors.items() if its is None)


def is_in_phase(view: JobView, node_id: NodeId, *phases: MemberPhase) -> bool:
    """Return whether a member's agent is connected and reports one of the phases in `phases`."""
    return node_id in view.reports and view.reports[node_id].phase in phases and view.nodes[node_id].is_connected


def halt(view: JobView, node_id: NodeId, generation: Generation, reason: str) -> Send:
    """Return the message that orders a node's agent to kill the node's ranks of a generation."""
    return Send(node_id, HaltRanks(job=view.spec.job, run=view.spec.run, generation=generation, reason=reason))


def has_agreed_stop(view: JobView) -> bool:
    """Return whether all ranks have stopped at one step because of a request, not by the script's own end."""
    status = next((report.round for report in view.reports.values() if report.round is not None), None)
    if status is not None and status.finished:
        return status.stopped
    return have_all_succeeded(view.reports, view.plan.world_size)


def current_reports(
    nodes: Mapping[NodeId, NodeObserved], run: RunId, generation: Generation, plan: GenerationPlan | None = None
) -> dict[NodeId, MemberReport]:
    """Return the members' reports about `generation`, without claims that its plan leaves to other nodes."""
    is_planned = plan is not None and plan.generation == generation
    ranks = {node.node_id: frozenset(node.ranks) for node in plan.nodes} if plan is not None and is_planned else {}
    coordinator = plan.coordinator if plan is not None else None
    return {
        node_id: _about(node.member, ranks.get(node_id, frozenset()), is_coordinator=node_id == coordinator)
        if is_planned
        else node.member
        for node_id, node in nodes.items()
        if node.member is not None and node.member.run == run and node.member.generation == generation
    }


_OF_RANKS: Final = ("ranks", "protection", "uploads", "running_uploads", "stacks", "logged")
"""The lists of a report whose entries each name a rank of the node."""


def _about(report: MemberReport, ranks: frozenset[Rank], *, is_coordinator: bool) -> MemberReport:
    changes: dict[str, object] = {} if is_coordinator or report.round is None else {"round": None}
    for name in _OF_RANKS:
        entries = getattr(report, name)
        if not all(each.rank in ranks for each in entries):
            changes[name] = tuple(each for each in entries if each.rank in ranks)
    return structs.replace(report, **changes) if changes else report


def is_training_over(reports: Mapping[NodeId, MemberReport], world_size: int) -> bool:
    """Return whether all ranks have finished the last step. Their processes may still write results."""
    return any(report.round is not None and report.round.finished for report in reports.values()) or have_all_succeeded(
        reports, world_size
    )


def have_all_succeeded(reports: Mapping[NodeId, MemberReport], world_size: int) -> bool:
    """Return whether every rank exited with success. Uploads of the ranks' shards may still run."""
    exits = rank_exits(reports)
    return len(exits) == world_size and all(each.exit_class is ExitClass.SUCCESS for each in exits)


def rank_exits(reports: Mapping[NodeId, MemberReport]) -> list[RankExit]:
    """Return the exit of each ended rank, as the members' agents report it."""
    return [rank.exit for report in reports.values() for rank in report.ranks if rank.exit is not None]


def reached(view: JobView) -> Step:
    """Return the newest step that a rank of the newest generation has finished, as far as one node may claim it."""
    named = claims.of_reports(view.reports)
    return max(view.record.boundary, claims.reached(view.seen, view.record, named, view.now))


def highest(view: JobView, boundary: Step) -> Step:
    """Return the highest step that a rank has finished, which is never lowered, so it needs a second node's claim."""
    is_witnessed = claims.are_witnessed(view.seen, claims.of_reports(view.reports))
    return max(view.record.max_boundary, boundary) if is_witnessed else view.record.max_boundary


def passed_by_all(view: JobView) -> Step:
    """Return the newest step that every rank has finished, or `NO_STEP` if the reports do not contain every rank."""
    boundaries = [rank.boundary for report in view.reports.values() for rank in report.ranks]
    return min(boundaries) if len(boundaries) == view.plan.world_size else NO_STEP


def has_finished(view: JobView, node_id: NodeId) -> bool:
    """Return whether a member reports that all of its ranks exited with success."""
    report = view.reports.get(node_id)
    return (
        report is not None
        and report.phase is MemberPhase.EXITED
        and len(report.ranks) == view.spec.ranks_per_node
        and all(rank.exit is not None and rank.exit.exit_class is ExitClass.SUCCESS for rank in report.ranks)
    )


def durable_step(view: JobView) -> Step:
    """Return the newest step in S3 that belongs to the job's history and is undamaged, or `NO_STEP`."""
    newest = checkpoints.newest_restorable(view.seen.checkpoints, view.seen.lineage, view.plan.generation)
    return NO_STEP if newest is None else newest.step


def lacks_checkpoint(view: JobView) -> bool:
    """Return whether the job has committed a step that is newer than every checkpoint that it can restore."""
    return view.record.committed > max(durable_step(view), FIRST_STEP)


def watched_seconds(view: JobView, since: float) -> float:
    """Return the seconds since `since`, or since the end of the last period without a control plane."""
    return view.now - max(since, view.record.unwatched[1] if view.record.unwatched is not None else since)


def last_movement_at(view: JobView) -> float:
    """Return the Unix time of the last observed progress, or the current time while progress cannot be observed."""
    if view.seen.is_fleet_blind or not all(view.nodes[node.node_id].has_reported for node in view.plan.nodes):
        return view.now
    progress_at, unwatched = last_progress_at(view), view.record.unwatched
    return progress_at if unwatched is None else max(progress_at, unwatched[1])


def last_progress_at(view: JobView) -> float:
    """Return the Unix time at which the job's progress last changed, possibly in this pass."""
    record, before = view.record, view.seen.record
    has_moved = (record.boundary, record.committed, record.proposed) != (
        before.boundary,
        before.committed,
        before.proposed,
    )
    return view.now if has_moved else record.progress_at


def with_capacity_wait(view: JobView, missing: int) -> JobView:
    """Return `view` with a `CapacityWait` for `missing` nodes in the job's record, if the fleet's launches fail."""
    launches = view.seen.failed_launches
    if launches is None or missing <= 0:
        return view
    return with_record(view, capacity_wait=CapacityWait(missing_count=missing, **asdict(launches)))
