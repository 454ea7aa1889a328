"""What to do about a job, given what is seen of it: the `decide` of the job loop.

    QUEUED ─▶ ALLOCATING ─▶ PREPARING ─▶ LOADING ─▶ STARTING ─▶ RUNNING ─▶ COMPLETED
       ▲                       ▲  a fault in any of the last four: │  STOPPING ─▶ STOPPED
       │                       └── a new generation, one incident ─┘  anything that no new generation can help ─▶ FAILED
       └── PAUSING: its nodes go to a job of higher priority, or it waits for a person ──┘

Invariant: pure, and level-triggered: the same input gives the same decision, a world that is as it should be gives no action, and every action
follows from what is stored. A generation is numbered in one pass and prepared in the next; a plan is stored in one pass and sent in the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce

from control_plane.core import accounting, breakers, capacity, checkpoints, drills, faults, hangs, incidents, launch, moves, queue, recovery, remedies
from control_plane.core.actions import (
    Decision,
    EventDraft,
    JobAction,
    SendHalt,
    SendLoad,
    SendPrepare,
    SendStart,
    SendStop,
    SendTakeCheckpoint,
    SendTakeStacks,
)
from control_plane.core.breakers import Course
from control_plane.core.evidence import (
    Standing,
    Verdict,
    blamed,
    current_reports,
    first_passed_at,
    is_silent,
    judge,
    nodes_out_of_view,
    passed_at,
    progress_without,
    track_impairments,
    track_silences,
)
from control_plane.core.incidents import Fault, incident_id
from control_plane.core.observed import (
    NO_STEP,
    Cause,
    Departure,
    Exclusion,
    FailureRecord,
    Implication,
    IncidentRecord,
    InstanceCondition,
    JobObserved,
    JobRecord,
    JobSpec,
    NodeObserved,
    Policy,
    RefusedSource,
    Remedy,
    Trial,
)
from control_plane.core.states import (
    ENDED_JOBS,
    JOB_TRANSITIONS,
    LAUNCHED_JOBS,
    IncidentEvent,
    IncidentState,
    JobEvent,
    JobState,
    advance,
)
from control_plane.core.timeouts import GANG_PATIENCE_SECONDS
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MemberReport, RankExit
from everstep.protocol.ids import FIRST_STEP, FleetName, Generation, NodeId, Step
from everstep.protocol.plan import GenerationPlan

PROGRESS_SECONDS = 1.0
"""How often progress alone is stored."""
GAP_LEASES = 4
"""Passes that are this many leases apart: no control plane looked after the job meanwhile."""
WATCH_SECONDS = 1.0
LAUNCH_SECONDS = 0.5
"""How soon a pass comes again if nobody wakes it: a running job, and one on its way there."""
_NODE_LOSSES = (Cause.NODE_UNREACHABLE, Cause.NODE_FAULT, Cause.INSTANCE_TERMINATED)
PAUSE_PATIENCE_TIMES = 5
"""Ranks that have ended may take this many times `blind_wait` to become a checkpoint: a large state takes minutes, its nodes stand still."""


def decide(now: float, spec: JobSpec, observed: JobObserved, policy: Policy) -> Decision:
    """Return what is to be done about a job, and the record to store.

    Called by the job loop, one job per pass, woken by reports and at least every `requeue_after_seconds`.

    Args:
        now: Unix seconds.
        spec: what the user asked for.
        observed: what is stored and what was seen.
        policy: the timeouts.

    Returns:
        The decision; its record equals the observed one when nothing is to be stored.

    Raises:
        InvalidTransition: the stored state and the observation contradict each other.
    """
    if observed.record.state in ENDED_JOBS:
        return Decision(record=observed.record)
    charged = accounting.charge(
        observed.record,
        now,
        gap_seconds=_gap_seconds(policy),
        node_count=len(observed.assigned),
        is_stalled=observed.record.suspicion is not None,
    )
    view = _look(now, spec, observed, policy, charged)
    match view.record.state:
        case _ if view.record.taken_over_by:
            decision = _observe_only(view)
        case JobState.QUEUED | JobState.ALLOCATING:
            decision = _wait_for_nodes(view)
        case JobState.PREPARING:
            decision = _prepare(view)
        case JobState.LOADING | JobState.STARTING:
            decision = _launch(view)
        case _:
            decision = _watch(view)
    decision = replace(decision, record=_with_incidents_booked(observed.record, charged, decision))
    told = tuple(
        replace(incident, idle_node_microseconds=accounting.idle_node_microseconds(incident, decision.record)) for incident in decision.incidents
    )
    return replace(_settled(observed.record, decision, now), incidents=told)


def _with_incidents_booked(before: JobRecord, charged: JobRecord, decision: Decision) -> JobRecord:
    """Return the decision's record with its ledger in line with the incidents that the pass found, opened, changed or closed."""
    record, found = decision.record, before.incident
    after = {incident.id: incident for incident in (*decision.incidents, *((record.incident,) if record.incident is not None else ()))}
    if found is None and not after:
        return record
    is_opened = any(found is None or known != found.id for known in after)
    if is_opened or charged.state in (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING):
        seemed = accounting.bucket(replace(charged, incident=None, boundary=max(charged.boundary, record.boundary)))
    else:
        seemed = accounting.Bucket.TRAIN  # a node tells only now how long ago its ranks failed
    stalled_since = None if before.suspicion is None else before.suspicion.began_at
    return accounting.follow(record, found, after.values(), seemed=seemed, stalled_since=stalled_since)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """One pass: the input, and what follows from it at once."""

    now: float
    spec: JobSpec
    seen: JobObserved
    policy: Policy
    record: JobRecord
    nodes: Mapping[NodeId, NodeObserved]
    reports: Mapping[NodeId, MemberReport]
    """Of the members of the newest plan, of its generation."""
    verdicts: Mapping[NodeId, Verdict]
    """On the members of the newest plan and on all nodes assigned."""
    implications: tuple[Implication, ...] = ()
    """What this pass adds to the histories of nodes."""
    events: tuple[EventDraft, ...] = ()
    """What this pass has to tell besides a change of state."""

    @property
    def plan(self) -> GenerationPlan:
        """The newest plan; only where the state says that there is one."""
        assert self.seen.plan is not None  # states from LOADING on are entered with a plan, in one transaction
        return self.seen.plan

    @property
    def wants_pause(self) -> str:
        """Why the job is to let go of its nodes and go on later, or nothing."""
        if self.seen.gives_way_to:
            return f"for {self.seen.gives_way_to}"
        before, incident = self.record.no_pause_before, self.record.incident
        is_too_soon = before is not None and self.now < before
        if self.record.pause_requested_at is None or is_too_soon or (incident is not None and incident.state is not IncidentState.REWORKING):
            return ""
        return "as a user asked"

    @property
    def wants_stop(self) -> str:
        """Why the job is to stop, or nothing."""
        if self.record.stop_reason:
            return self.record.stop_reason
        return "a user asked it to stop" if self.record.stop_requested_at is not None else ""


def _look(now: float, spec: JobSpec, seen: JobObserved, policy: Policy, record: JobRecord) -> _View:
    planned = [node.node_id for node in seen.plan.nodes] if seen.plan is not None and record.state in LAUNCHED_JOBS else []
    team = tuple(dict.fromkeys([*planned, *seen.assigned]))
    open_id = record.incident.id if record.incident is not None else ""
    nodes = {node_id: _before(seen.nodes.get(node_id, NodeObserved(node_id=node_id)), open_id) for node_id in team}
    reports = current_reports(nodes, spec.run, record.generation)
    progress = {node_id: progress_without(reports, node_id) for node_id in team}
    silences = track_silences(record.silences, tuple(nodes.values()), progress, now, policy.timeouts)
    since = {silence.node_id: silence for silence in silences}
    heard = {node_id: report for node_id, report in reports.items() if not is_silent(nodes[node_id], policy.timeouts)}  # old words prove nothing
    out_of_view = nodes_out_of_view(heard)
    first_to_leave = blamed(heard, [node for node in nodes.values() if not is_silent(node, policy.timeouts)])
    impairments = track_impairments(record.impairments, tuple(nodes.values()), out_of_view, progress, now, policy.timeouts)
    is_over = _is_over(reports, spec.world_size)  # no step is to be expected any more: that none is made speaks against nobody
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
            is_training=record.state in (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING),
            is_launching=record.state in (JobState.PREPARING, JobState.LOADING, JobState.STARTING) and node_id in planned,
            is_blamed=node_id == first_to_leave,
        )
        for node_id, node in nodes.items()
    }
    for node_id in team:
        if node_id not in seen.assigned:
            verdicts[node_id] = faults.gone(verdicts[node_id], f"{node_id} is no longer part of the fleet")
    taken = {exclusion.node_id for exclusion in record.exclusions}.difference(seen.assigned)
    record = replace(
        record,
        moves=tuple(replace(move, has_left=move.has_left or move.node_id in taken) for move in record.moves),
        silences=silences,
        impairments=impairments if not seen.is_fleet_blind else (),
        stop_reason=record.stop_reason or _limit(record, spec, now, seen.price_usd_per_hour),
        exclusions=tuple(exclusion for exclusion in record.exclusions if exclusion.node_id not in taken),
    )
    return _View(now=now, spec=spec, seen=seen, policy=policy, record=record, nodes=nodes, reports=reports, verdicts=verdicts)


def _gap_seconds(policy: Policy) -> float:
    """Return how far apart passes are at most while a control plane works on the job."""
    return GAP_LEASES * policy.timeouts.lease_seconds


def _before(node: NodeObserved, incident_id: str) -> NodeObserved:
    """Return a node with its history before an incident: what is being done about it now has not failed yet."""
    if all(line.incident_id != incident_id for line in node.history):
        return node
    return replace(node, history=tuple(line for line in node.history if line.incident_id != incident_id))


def _limit(record: JobRecord, spec: JobSpec, now: float, price_usd_per_hour: float | None) -> str:
    """Return which stopping condition the job has reached, or nothing. Time without nodes is no runtime, and once it has run it is not pending."""
    paused = (record.microseconds.get(accounting.Bucket.PAUSED, 0) - record.paused_microseconds_before_start) / 1_000_000
    if spec.max_runtime_seconds is not None and record.started_at is not None and now - record.started_at - paused > spec.max_runtime_seconds:
        return f"MaxRuntimeInSeconds ({spec.max_runtime_seconds:g}) is over"
    is_pending = record.state in (JobState.QUEUED, JobState.ALLOCATING) and record.started_at is None
    if spec.max_pending_seconds is not None and is_pending and now - record.created_at - paused > spec.max_pending_seconds:
        return f"MaxPendingTimeInSeconds ({spec.max_pending_seconds:g}) is over"
    cost = accounting.cost_usd(record.node_microseconds, price_usd_per_hour)
    if spec.max_cost_usd is not None and cost is not None and cost >= spec.max_cost_usd:
        return f"MaxCostUsd ({spec.max_cost_usd:g}) is spent"
    return ""


# -- taken over by a person -------------------------------------------------------------------------------------------


def _observe_only(view: _View) -> Decision:
    """Observe and record, and decide nothing but what fencing demands: ranks of a generation that was ended are halted, whoever looks after the job.

    Progress is noted, manifests are put, time is charged, and what would be acted upon is said. A stop that a user asked for waits as all else does.
    """
    actions: tuple[JobAction, ...] = ()
    if view.record.state in (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING):
        view = _with_progress(view)
        actions = checkpoints.due(view.plan, view.reports, view.seen.lineage, view.seen.checkpoints, view.seen.dropped_checkpoints)
    ended = [
        SendHalt(node_id=node_id, job=view.spec.job, run=view.spec.run, generation=node.member.generation, reason="its generation has ended")
        for node_id, node in view.nodes.items()
        if node.is_connected
        and node.member is not None
        and node.member.run == view.spec.run
        and node.member.generation < view.record.issued_generation
        and node.member.phase is MemberPhase.RUNNING
    ]
    told = [
        f"{verdict.node_id} is {verdict.standing}" for verdict in view.verdicts.values() if verdict.standing in (Standing.IMPAIRED, Standing.GONE)
    ]
    told += [fault.evidence for fault in faults.of_ranks(view.reports)]
    seen = f"; what it sees: {'; '.join(told)}" if told else ""
    words = f"taken over by {view.record.taken_over_by}: Everstep observes and decides nothing{seen}"
    return _stay(view, words, (*actions, *ended))


# -- before the first launch ------------------------------------------------------------------------------------------


def _wait_for_nodes(view: _View) -> Decision:
    record, spec = view.record, view.spec
    if view.wants_stop:
        words = "stopped before it started" if record.started_at is None else "stopped while it was paused"
        return _ended(view, JobEvent.HALTED, f"{words}: {view.wants_stop}")
    if record.pause_requested_at is not None:
        if record.state is JobState.QUEUED:
            return _stay(view, _paused_words(view))
        return _moved(view, JobEvent.SENT_BACK, _paused_words(view))
    if record.state is JobState.QUEUED:
        if not view.seen.is_admitted:
            return _stay(view, _queue_words(view))
        if view.seen.assigned:  # a gang is given whole, by the fleet: what is left of the last one goes back first
            return _stay(view, "its turn has come; its former nodes go back to the fleet first")
        return _moved(view, JobEvent.ADMITTED, _waits_for(view, spec.node_count))
    if view.seen.gives_way_to:
        return _moved(view, JobEvent.SENT_BACK, f"gives way to {view.seen.gives_way_to} before it started")
    missing = spec.node_count - len(view.seen.assigned)
    if missing > 0:
        waits_since = max(record.state_since, view.seen.newest_node_at or 0.0)
        has_none_come = view.now - waits_since > GANG_PATIENCE_SECONDS
        is_refused = view.seen.launch_failed_at is not None and view.seen.launch_failed_at > record.state_since
        if (has_none_come or is_refused) and (fleet := _next_fleet(view)) is not None:
            return _goes_to(view, fleet, missing)
        if has_none_come:
            return _sent_aside(view, missing)
        return _stay(view, _waits_for(view, missing))
    issued = Generation(max(record.issued_generation, launch.highest_seen(view.seen, spec.run)) + 1)
    ready = replace_record(view, issued_generation=issued, asked=(), gang_attempts=0)
    return _moved(ready, JobEvent.GANG_ASSIGNED, "asks its nodes for their promise")


def _sent_aside(view: _View, missing: int) -> Decision:
    """Give a gang's nodes back that does not come together: others can use them, or they are surplus."""
    attempts = view.record.gang_attempts + 1
    not_before = view.now + queue.stand_aside_seconds(attempts)
    aside = replace_record(view, gang_attempts=attempts, not_before=not_before)
    words = f"{_waits_for(view, missing)}; none came for {GANG_PATIENCE_SECONDS:g} s: gives its nodes back"
    return _moved(aside, JobEvent.SENT_BACK, words)


def _next_fleet(view: _View) -> FleetName | None:
    """Return which other fleet is asked next for the whole gang: in the user's order, in a ring; none once the job has run or holds a node."""
    ring = view.spec.fleets
    if view.record.issued_generation or view.seen.assigned or view.spec.fleet not in ring:
        return None
    here = ring.index(view.spec.fleet)
    return next((fleet for fleet in (*ring[here + 1 :], *ring[:here]) if fleet in view.seen.open_fleets), None)


def _goes_to(view: _View, fleet: FleetName, missing: int) -> Decision:
    """Wait in another fleet; after a whole round, longer each time, so that fleets without capacity are not asked in a circle."""
    ring = view.spec.fleets
    record, pause = view.record, ""
    if ring.index(fleet) < ring.index(view.spec.fleet):
        rounds = record.gang_attempts + 1
        record = replace(record, gang_attempts=rounds, not_before=view.now + capacity.pause_seconds(rounds))
        pause = f", after {capacity.pause_seconds(rounds):g} s: every fleet that the job names was asked"
    words = f"{_waits_for(view, missing)}; goes to the fleet {fleet}{pause}"
    return replace(_moved(replace(view, record=record), JobEvent.SENT_BACK, words), fleet=fleet)


def _paused_words(view: _View) -> str:
    if view.record.started_at is None:
        return "paused by a user before it started; ResumeTrainingJob puts it back into the queue"
    return f"paused by a user; ResumeTrainingJob lets it go on: {_durable(view)}"


def _queue_words(view: _View) -> str:
    not_before = view.record.not_before
    if not_before is not None and view.now < not_before:
        return f"stands aside until {datetime.fromtimestamp(not_before, UTC):%H:%M:%S} UTC: its nodes did not come"
    return view.seen.queue_words


# -- promise and plan -------------------------------------------------------------------------------------------------


def _prepare(view: _View) -> Decision:
    if (stopped := _stopped_without_ranks(view)) is not None:
        return stopped
    seen_generation = launch.highest_seen(view.seen, view.spec.run)
    if seen_generation > view.record.issued_generation:
        reason = f"an agent speaks of generation {seen_generation}: a higher one is issued"
        return _moved(replace_record(view, issued_generation=Generation(seen_generation + 1), asked=()), JobEvent.FAULTED, reason)
    view = _with_last_words(view)
    view = replace_record(view, committed=launch.committed_of(view.spec, view.seen, view.record))  # Load clears the pages that show it
    view = _with_faulty(view)
    view = _without_lost(view)
    view = _with_asked(view)
    view = _without_unreachable(view)
    view = _without_moved(view)
    view, gives_up = _with_ruling(view)
    record, spec = view.record, view.spec
    roll = launch.call_roll(spec, view.seen, record, view.policy)
    asks: list[JobAction] = [
        SendPrepare(node_id=node_id, job=view.spec.job, run=view.spec.run, generation=record.issued_generation, parent=launch.parent_of(view.seen))
        for node_id in roll.late
        if view.nodes[node_id].is_connected
    ]
    if gives_up:
        return _ended(view, JobEvent.GAVE_UP, gives_up)
    if roll.is_complete:
        return _planned(view, roll)
    if (paused := _paused_without_nodes(view, roll)) is not None:
        return paused
    waits = []
    if roll.vacancy_count:
        waits.append(_waits_for(view, roll.vacancy_count))
    if roll.late:
        waits.append(f"waits for the promise of {', '.join(roll.late)}")
    if roll.unreachable:
        waits.append(f"waits for {', '.join(roll.unreachable)}, which may still hold what was committed")
    aim = f"stops ({view.wants_stop}) once it trains, so that no step is lost: " if view.wants_stop else ""
    return _stay(view, aim + "; ".join(waits), tuple(asks), requeue=LAUNCH_SECONDS)


def _stopped_without_ranks(view: _View) -> Decision | None:
    """End a job that is to stop and trains nowhere, once that costs no committed step or has been waited for.

    Memory goes with its nodes. If it trains once more, it stops at an agreed step, and that step is made a checkpoint.
    """
    record = view.record
    if not view.wants_stop:
        return None
    left, lost = _left_in_s3(view, launch.call_roll(view.spec, view.seen, record, view.policy))
    asked_at = record.state_since if record.stop_requested_at is None else record.stop_requested_at
    if lost and _watched_seconds(view, asked_at) <= view.policy.timeouts.blind_wait_seconds:
        return None
    source = f"the newest checkpoint is step {left}" if left > 0 else "there is no checkpoint"
    cost = f"; {lost} committed steps were in the memory of its nodes alone: {source}" if lost else ""
    return _ended(view, JobEvent.HALTED, f"stopped: {view.wants_stop}; no rank was running{cost}")


def _left_in_s3(view: _View, roll: launch.Roll) -> tuple[Step, Step]:
    """Return the step that a job could go on from without any node's memory, and how many committed steps that would cost."""
    left = _base(view, view.record, replace(roll, promised={}))
    return left, max(Step(_to_be_saved(view, roll) - left), FIRST_STEP)


def _base(view: _View, record: JobRecord, roll: launch.Roll) -> Step:
    """Return the newest step that every rank can get from what members have promised, and from S3."""
    return recovery.choose(launch.survey(view.spec, view.seen, record, roll)).base_step


def _to_be_saved(view: _View, roll: launch.Roll) -> Step:
    """Return the committed step that must not be lost; once all members have promised, the newest that they still have."""
    floor = launch.floor_of(view.spec, view.seen, view.record)
    return floor if roll.late or roll.unreachable else min(floor, _base(view, view.record, roll))


def _paused_without_nodes(view: _View, roll: launch.Roll) -> Decision | None:
    """Let go of the nodes of a job that a person has paused and that waits for another one, once that costs no committed step or has been waited for.

    Memory goes with its nodes, and no rank is there to agree on a stop. With the node that is missing the job would train, and pause without a loss.
    """
    record = view.record
    if record.pause_requested_at is None or not roll.vacancy_count or roll.late or record.exclusions:
        return None
    left, lost = _left_in_s3(view, roll)
    if lost and view.now - max(record.pause_requested_at, record.state_since) <= view.policy.timeouts.blind_wait_seconds:
        return None
    source = f"from the checkpoint of step {left}" if left > 0 else "from its beginning: there is no checkpoint"
    cost = f"; {lost} committed steps were in the memory of its nodes alone and are made again" if lost else ""
    words = f"paused while it waited for a node, ResumeTrainingJob lets it go on {source}{cost}"
    incident = record.incident
    if incident is not None:
        incident = replace(incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now), decision=words)
    free = replace_record(
        view, asked=(), silences=(), impairments=(), moves=(), no_pause_before=None, incident=incident, committed=min(record.committed, left)
    )
    return _moved(free, JobEvent.PAUSED, words)


def _with_last_words(view: _View) -> _View:
    """Let reports of the ended generation that come late tell of it: an earlier exit, a higher boundary.

    A control plane that was away while a node was lost knows of the loss before it has heard when: the other ranks failed for want of that node.
    And a rank may pass a boundary between its last report and its end: a node that promises tells how far its ranks had come.
    """
    before = view.record.incident
    if before is None or before.state is not IncidentState.REPLACING:
        return view
    members = [node.member for node in view.nodes.values() if node.member is not None and node.member.run == view.spec.run]
    ended = [member.ended.boundary for member in members if member.ended is not None and member.ended.generation >= before.generation_before]
    before = replace(before, reached_step=max(before.reached_step, *ended, NO_STEP))
    view = replace_record(view, incident=before)
    if view.record.generation != before.generation_before:
        return view
    earlier = tuple(fault for fault in faults.of_ranks(view.reports) if before.cause is Cause.RANK_EXIT and fault.at < before.failed_at)
    view, before, earlier = _with_struck_rank(view, before, earlier)
    incident = replace(incidents.with_faults(before, earlier), reached_step=max(before.reached_step, faults.reached(view.reports)))
    if before.cause in (*_NODE_LOSSES, Cause.GROUP_LOST):
        incident = replace(incident, failed_at=min(before.failed_at, faults.failing_since(view.reports, before.failed_at)))
    incident = incidents.with_absence(incident, view.record.unwatched)
    unnoticed = accounting.microseconds(before.failed_at) - accounting.microseconds(incident.failed_at)
    incident = replace(incident, node_microseconds_before=before.node_microseconds_before - unnoticed * view.spec.node_count)
    return replace_record(view, incident=incident)


def _with_struck_rank(view: _View, incident: IncidentRecord, told: tuple[Fault, ...]) -> tuple[_View, IncidentRecord, tuple[Fault, ...]]:
    """Return all three with what is known once the rank that a drill has struck is heard of: the exits of others that came first were its doing."""
    drill = view.seen.drill
    if drill is None or incident.cause is not Cause.RANK_EXIT or not drills.has_struck_rank_ended(drill, view.reports):
        return view, incident, told
    struck = faults.of_ranks({drill.node_id: view.reports[drill.node_id]}, only=drill.rank)
    found, _ = drills.attributed(drill, incident.generation_before, tuple(dict.fromkeys((*told, *struck))), reports=view.reports)
    recast = drills.recast(drill, incident, found)
    if recast.cause is not Cause.DRILL:
        return view, incident, told
    return replace_record(view, failures=breakers.forgiven(view.record.failures, incident.generation_before)), recast, found


def _with_asked(view: _View) -> _View:
    """Note since when each member owes this promise: its deadlines run from there, a newcomer's too.

    Who has promised owes nothing. One whose word is lost, with its agent or with this control plane, has all of its time to give it again.
    """
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    before = dict(view.record.asked)
    return replace_record(view, asked=tuple((node_id, before.get(node_id, view.now)) for node_id in (*roll.late, *roll.unreachable)))


def _with_faulty(view: _View) -> _View:
    """Note which members report a fault of their own while nobody trains: they are left as far as that costs no committed step.

    One that had to stay for that in this very recovery, and did not bring training back, counts as lost.
    """
    record, verdicts = view.record, dict(view.verdicts)
    tried = record.incident.kept_instance_ids if record.incident is not None else ()
    known = {move.node_id for move in record.moves if not move.has_left}
    left = []
    for each in view.verdicts.values():
        if each.standing is not Standing.IMPAIRED or each.node_id not in view.seen.assigned:
            continue
        if each.node_id in tried:
            verdicts[each.node_id] = replace(each, standing=Standing.GONE, is_final=True)
        elif each.node_id not in known:
            left.append(moves.impaired(each))
    return replace_record(replace(view, verdicts=verdicts), moves=(*record.moves, *left))


def _without_lost(view: _View) -> _View:
    """Exclude the nodes that are gone for certain, and let the incident tell it: what looked like a failing rank may turn out to be a lost node."""
    record = view.record
    known = {exclusion.node_id for exclusion in record.exclusions}
    given_back = {trial.node_id for trial in record.trials} - set(view.seen.assigned)  # the job left them, they are not lost
    asked = {move.node_id for move in moves.asked(record.moves) if not (move.has_left and move.node_id in view.seen.assigned)}
    stopped = {node_id for node_id in asked if view.nodes[node_id].instance is not InstanceCondition.ENDED}
    spared = given_back | stopped  # whom a stop was agreed upon for works: it is left only if that costs nothing
    gone = [view.verdicts[node_id] for node_id in view.nodes if view.verdicts[node_id].is_final and node_id not in spared]
    fresh = tuple(verdict for verdict in gone if verdict.node_id not in known)
    record = replace(record, exclusions=_exclusions(view, record, fresh))
    lost = tuple(fault for verdict in gone for fault in _loss(view, verdict))
    return _with_losses(replace(view, record=record), lost)


def _exclusions(view: _View, record: JobRecord, fresh: tuple[Verdict, ...]) -> tuple[Exclusion, ...]:
    """Return the exclusions with new ones; a node that the fleet has taken away already needs none."""
    added = [
        Exclusion(node_id=verdict.node_id, evidence=verdict.evidence, may_terminate=verdict.may_terminate, remedy=verdict.remedy)
        for verdict in fresh
        if verdict.node_id in view.seen.assigned
    ]
    return (*record.exclusions, *added)


def _loss(view: _View, verdict: Verdict) -> tuple[Fault, ...]:
    """Return the fault of losing a node of the newest plan; a newcomer that is lost before it took part is none."""
    if view.seen.plan is None or all(node.node_id != verdict.node_id for node in view.seen.plan.nodes):
        return ()
    at = faults.lost_at(verdict, view.nodes, view.now)
    line = faults.implied(verdict, view.now)
    return (Fault(cause=verdict.cause, evidence=verdict.evidence, at=at, node_id=verdict.node_id, implicates=line),)


def _with_losses(view: _View, lost: tuple[Fault, ...]) -> _View:
    incident, plan = view.record.incident, view.seen.plan
    fresh = tuple(fault for fault in lost if incident is not None and fault.node_id not in incident.instance_ids)
    if incident is None or plan is None or not fresh:
        return view
    fresh, _ = drills.attributed(view.seen.drill, plan.generation, fresh)
    told = incidents.with_faults(drills.recast(view.seen.drill, incident, fresh), fresh)
    is_lost = any(fault.cause not in (Cause.NOTICE, Cause.REQUESTED) for fault in fresh)
    is_planned = {*told.evidence} <= {move.evidence for move in moves.asked(view.record.moves)}
    if not is_planned:  # else the decision is told already, and who was left on purpose has left its last step elsewhere
        told = _with_group_loss(told, plan)
        told = replace(told, decision=_decided(told.cause, told.instance_ids))
    failures = breakers.forgiven(view.record.failures, plan.generation) if is_lost else view.record.failures
    return _implicating(replace_record(view, incident=told, failures=failures), fresh, told)


def _with_group_loss(incident: IncidentRecord, plan: GenerationPlan) -> IncidentRecord:
    """Return the incident with the shards whose every holder was left, if there are any; what only a drill took is told as the drill's."""
    lost = faults.group_loss(plan, incident.instance_ids, incident.failed_at)
    return incidents.with_faults(incident, tuple(replace(fault, cause=Cause.DRILL) if incident.cause is Cause.DRILL else fault for fault in lost))


def _without_unreachable(view: _View) -> _View:
    """Go on without members that have not promised, once that costs no committed step, or once `blind_wait` is over.

    One that is heard may just be back, and has `T_max` more: it is there, with what nobody else holds.
    """
    record, timeouts = view.record, view.policy.timeouts
    roll = launch.call_roll(view.spec, view.seen, record, view.policy)
    waited = {node_id: _watched_seconds(view, at) for node_id, at in record.asked}
    if all(seconds <= timeouts.prepare_deadline_seconds for seconds in waited.values()):
        return view
    left, floor = _base(view, record, roll), launch.floor_of(view.spec, view.seen, record)
    late_seconds, silent_seconds = timeouts.exclude_seconds, timeouts.prepare_deadline_seconds
    silent_words, cost = f"did not promise within {silent_seconds:g} s and is silent", ""
    if left < floor:
        late_seconds, silent_seconds = timeouts.blind_wait_seconds + timeouts.exclude_seconds, timeouts.blind_wait_seconds
        silent_words, cost = f"was unreachable for {silent_seconds:g} s", f"; without it step {left} is left of the committed step {floor}"
    dropped = [(node_id, f"{node_id} did not promise within {late_seconds:g} s{cost}") for node_id in roll.late if waited[node_id] > late_seconds]
    if len(dropped) == len(roll.late) and not view.seen.is_fleet_blind:
        dropped += [(node_id, f"{node_id} {silent_words}{cost}") for node_id in roll.unreachable if waited[node_id] > silent_seconds]
    if not dropped or (left < floor and len(dropped) < len(roll.late) + len(roll.unreachable)):
        return view
    verdicts = tuple(
        Verdict(node_id=node_id, standing=Standing.GONE, evidence=words, since=view.verdicts[node_id].since) for node_id, words in dropped
    )
    excluded = replace_record(view, exclusions=_exclusions(view, record, verdicts))
    return _with_losses(excluded, tuple(fault for verdict in verdicts for fault in _loss(view, verdict)))


def _watched_seconds(view: _View, since: float) -> float:
    """Return how long ago something was, but for the time before which no control plane looked after the job."""
    return view.now - max(since, view.record.unwatched[1] if view.record.unwatched is not None else since)


def _without_moved(view: _View) -> _View:
    """Leave the members that are to be left, as far as that costs no committed step; one that holds what nobody else has stays for now."""
    record = view.record
    known = {exclusion.node_id for exclusion in record.exclusions}
    here = [move for move in record.moves if move.node_id in view.seen.assigned and move.node_id not in known]
    left = [move for move in here if not (move.is_kept or move.has_left)]
    lent = [node_id for node_id in moves.lent(view.seen.plan, view.seen.assigned) if node_id not in known] if view.seen.plan is not None else []
    announced = [move for move in left if move.is_announced and move.asked_at is not None]  # it was left at its last moment, or with a successor
    goes = [*announced, *(move for move in left if move.is_faulty and move.asked_at is None)]  # ranks have ended, and would again
    due = [*goes, *(move for move in left if move not in goes)][: max(len(goes), len(lent) + view.seen.spare_count)]  # who works and has none stays
    if not due:
        return view
    leaving = {move.node_id for move in due}
    roll = launch.call_roll(view.spec, view.seen, record, view.policy)
    if any(node_id not in leaving for node_id in (*roll.late, *roll.unreachable)):
        return view  # what the others still have is not known yet
    floor = _to_be_saved(view, roll)
    without, verdicts, kept, events = record, [], set(), []
    for move in due:  # one by one: of two that hold the same, one is enough
        verdict = moves.verdict(move)
        fewer = replace(without, exclusions=_exclusions(view, without, (verdict,)))
        base = _base(view, fewer, launch.call_roll(view.spec, view.seen, fewer, view.policy))
        if base >= floor:
            without = fewer
            verdicts.append(verdict)
        else:
            kept.add(move.node_id)
            event = f"{move.node_id} stays: without it step {base} is left of the committed step {floor}"
            events.append(EventDraft(type="NodeKept", message=event))
    if kept:
        if roll.late or roll.unreachable:
            return view
        later = view.now + view.policy.timeouts.blind_wait_seconds
        stays = tuple(replace(move, is_kept=move.is_kept or move.node_id in kept) for move in record.moves)
        without = replace(without, moves=stays, moves_after=later)
    spared = replace(view, record=without, events=(*view.events, *events))
    return _with_losses(spared, tuple(fault for verdict in verdicts for fault in _loss(view, verdict)))


def _with_ruling(view: _View) -> tuple[_View, str]:
    """Ask the breakers once all members have promised; change what they say, or return why the job is given up.

    They are asked about a generation that failed, not about one that was ended for something else.
    """
    record, spec = view.record, view.spec
    roll = launch.call_roll(spec, view.seen, record, view.policy)
    if roll.late or roll.unreachable or not record.failures or record.failures[-1].generation != record.generation:
        return view, ""
    last = record.failures[-1]
    refused = _refused_state(view, last)
    older = _base(view, replace(record, refused=(*record.refused, *refused)), roll)
    without, floor = _base_without(view, last.node_id), _to_be_saved(view, roll)
    has_spare = view.seen.spare_count > 0 and (without >= floor or without > FIRST_STEP)
    ruling = breakers.rule(record.failures, record.trials, spec, has_spare=has_spare, older_base=older, is_sole_holder=without < floor)
    match ruling.course:
        case Course.AGAIN:
            return view, ""
        case Course.GIVE_UP:
            return view, ruling.why
        case Course.OTHER_NODE:
            assert last.node_id is not None  # what the ruling stands on
            words = f"{last.node_id} is left once, to tell a bad node from a bad script: {ruling.why}".partition("\n")[0]
            exclusion = Exclusion(node_id=last.node_id, evidence=words, may_terminate=False, remedy=Remedy.RELEASE)
            trial = Trial(kind="node", failure=last, node_id=last.node_id)
            view = replace_record(view, exclusions=(*record.exclusions, exclusion), trials=(*record.trials, trial))
        case Course.OLDER_STATE:
            words = f"step {last.base_step} is left out once, to tell a bad state from a bad script: {ruling.why}".partition("\n")[0]
            trial = Trial(kind="state", failure=last)
            view = replace_record(view, refused=tuple(dict.fromkeys([*record.refused, *refused])), trials=(*record.trials, trial))
    if (incident := view.record.incident) is not None:
        view = replace_record(view, incident=replace(incident, decision=words))
    return replace(view, events=(*view.events, EventDraft(type="OneThingChanged", message=words))), ""


def _base_without(view: _View, node_id: NodeId | None) -> Step:
    """Return the newest step that every rank can get without a member."""
    others = replace(view, seen=replace(view.seen, assigned=tuple(each for each in view.seen.assigned if each != node_id)))
    return _base(others, view.record, launch.call_roll(view.spec, others.seen, view.record, view.policy))


def _refused_state(view: _View, failure: FailureRecord) -> tuple[RefusedSource, ...]:
    """Return all sources of the state that a failed generation began with."""
    plan = view.seen.plan
    if plan is None or plan.base_step != failure.base_step:
        return ()
    return tuple(
        RefusedSource(rank=rank.rank, origin_generation=origin, step=plan.base_step, is_object=is_object)
        for rank in plan.ranks
        for origin in sorted({source.origin_generation for source in rank.sources})
        for is_object in (False, True)
    )


def _implicating(view: _View, found: tuple[Fault, ...], incident: IncidentRecord) -> _View:
    """Add what faults say of nodes to these nodes' histories; a node that has become a lemon by it is left in the same recovery."""
    lines = [replace(fault.implicates, incident_id=incident.id) for fault in found if fault.implicates is not None]
    view = replace(view, implications=(*view.implications, *lines))
    left = {move.node_id for move in view.record.moves if not move.has_left} | {exclusion.node_id for exclusion in view.record.exclusions}
    for line in lines:
        node = view.nodes.get(line.node_id)
        history = [*(node.history if node is not None else ()), line]
        why = remedies.lemon(history, view.now)
        if why is not None and line.node_id not in left:
            remedy = remedies.of_lemon(history, view.now)
            words = f"{line.node_id} is not used again: {why}"
            move = Departure(
                node_id=line.node_id, evidence=words, cause=Cause.NODE_FAULT, remedy=remedy, may_terminate=remedy is Remedy.REPLACE, is_history=True
            )
            left.add(line.node_id)
            view = replace_record(view, moves=(*view.record.moves, move))
    return view


def _planned(view: _View, roll: launch.Roll) -> Decision:
    plan, restore = launch.make_plan(view.spec, view.seen, view.record, roll, view.policy)
    incident = view.record.incident
    source = restore.farthest
    reason = f"restores step {plan.base_step} from {source}" if source is not None else "starts from the script's own initial state"
    if incident is not None:
        before = [node.node_id for node in view.seen.plan.nodes] if view.seen.plan is not None else []
        launched = [node.node_id for node in plan.nodes]
        # Of two failures in one incident the first replacement may itself be lost again: it is then one of the lost.
        named = dict.fromkeys([*incident.replacement_instance_ids, *(node_id for node_id in launched if node_id not in before)])
        incident = incidents.moved(incident, IncidentEvent.NODES_THERE, view.now)
        if incident.cause in _NODE_LOSSES and view.record.committed > FIRST_STEP and not view.record.refused:
            incident = incidents.with_faults(incident, faults.memory_loss(restore.forgotten, incident.failed_at))
        incident = replace(
            incident,
            generation_after=plan.generation,
            from_step=plan.base_step,
            restore_source=recovery.farther(incident.restore_source, source) if source is not None else None,
            replacement_instance_ids=tuple(node_id for node_id in named if node_id in launched),
            kept_instance_ids=(*incident.kept_instance_ids, *(move.node_id for move in view.record.moves if move.is_faulty and move.is_kept)),
            reason=f"{reason}: the newest step that every rank can get",
        )
    moved = replace_record(
        view,
        incident=incident,
        generation=plan.generation,
        base_step=plan.base_step,
        committed=min(view.record.committed, plan.base_step),
        boundary=plan.base_step,
        boundary_at=None,
        stepped_at=None,
        moves=(),
        impairments=(),
    )
    return replace(_moved(moved, JobEvent.PLANNED, reason), plan=plan)


# -- load and start ---------------------------------------------------------------------------------------------------


def _launch(view: _View) -> Decision:
    record, plan = view.record, view.plan
    is_loading = record.state is JobState.LOADING
    if view.wants_stop and is_loading and plan.base_step <= max(_durable_step(view), FIRST_STEP):  # else it stops once it trains
        return _ended(view, JobEvent.HALTED, f"stopped: {view.wants_stop}; no rank was running")
    if (fault := faults.permanent(view.reports)) is not None:
        return _ended(view, JobEvent.GAVE_UP, fault.message)
    found = (
        *faults.of_nodes(plan, view.verdicts, view.nodes, view.now),
        *faults.of_agents(plan, view.spec.run, view.nodes, view.now),
        *faults.of_loads(view.reports, view.now),
        *faults.of_ranks(view.reports),
        *faults.of_silence(plan, view.nodes, view.now, view.policy.timeouts),
    )
    if found:
        found = (*found, *_told_besides(view, found))
        failure = faults.failure_of_loads(plan, view.reports, record.max_boundary, view.now)
        failure = failure or faults.failure_of_ranks(plan, view.reports, record.max_boundary)
        return _new_generation(view, found, failure)
    if is_loading:
        return _load(view)
    waiting = [node.node_id for node in plan.nodes if not _is_in(view, node.node_id, MemberPhase.RUNNING, MemberPhase.EXITED)]
    if waiting:
        starts = tuple(
            SendStart(node_id=node_id, job=view.spec.job, run=view.spec.run, generation=plan.generation)
            for node_id in waiting
            if _is_in(view, node_id, MemberPhase.LOADED)
        )
        return _stay(view, f"starts its ranks; {', '.join(waiting)} to come", starts, requeue=LAUNCH_SECONDS)
    running = replace_record(view, impairments=())  # steps are due from now on
    return _moved(running, JobEvent.STARTED, f"trains from step {plan.base_step}")


def _load(view: _View) -> Decision:
    plan = view.plan
    waiting = [node.node_id for node in plan.nodes if not _is_in(view, node.node_id, MemberPhase.LOADED)]
    if waiting:
        loads = tuple(SendLoad(node_id=node_id, plan=plan) for node_id in waiting if _is_in(view, node_id, MemberPhase.PROMISED))
        return _stay(view, f"loads step {plan.base_step}; {', '.join(waiting)} to come", loads, requeue=LAUNCH_SECONDS)
    record = view.record
    if record.started_at is None:
        paused = record.microseconds.get(accounting.Bucket.PAUSED, 0)
        record = replace(record, started_at=accounting.accounted_until(record), paused_microseconds_before_start=paused)
    incident = record.incident
    if incident is not None:
        used = [source for node in plan.nodes for source in view.reports[node.node_id].restored_from]
        farthest = reduce(recovery.farther, used, incident.restore_source)
        incident = replace(incident, restore_source=farthest, rank_sources=incidents.runs_of(used))
    loaded = replace(view, record=replace(record, incident=incident))
    return _moved(loaded, JobEvent.LOADED, "every node has verified its shards: ranks are started")


def _is_in(view: _View, node_id: NodeId, *phases: MemberPhase) -> bool:
    return node_id in view.reports and view.reports[node_id].phase in phases and view.nodes[node_id].is_connected


# -- training ---------------------------------------------------------------------------------------------------------


def _watch(view: _View) -> Decision:
    view = _with_progress(view)
    record, plan = view.record, view.plan
    puts: tuple[JobAction, ...] = checkpoints.due(plan, view.reports, view.seen.lineage, view.seen.checkpoints, view.seen.dropped_checkpoints)
    if (fault := faults.permanent(view.reports)) is not None:
        return _ended(view, JobEvent.GAVE_UP, fault.message)
    is_moving = record.state is JobState.RUNNING and bool(moves.asked(record.moves))
    if not (is_moving and _was_agreed(view)) and all(_has_finished(view, node.node_id) for node in plan.nodes):
        return replace_actions(_finish(view, is_durable=not puts), puts)
    silences = {silence.node_id: silence for silence in record.silences if not view.seen.is_fleet_blind}
    others = progress_without(view.reports, plan.coordinator)
    found = (
        *faults.of_nodes(plan, view.verdicts, view.nodes, view.now),
        *faults.of_ranks(view.reports),
        *faults.of_agents(plan, view.spec.run, view.nodes, view.now),
        *faults.of_coordinator(plan, silences.get(plan.coordinator), others.committed, view.now, view.policy.timeouts),
        *faults.of_cut_off_members(plan, view.reports, view.now, view.policy.timeouts),
    )
    if record.state is JobState.STOPPING:
        return replace_actions(_stop(view, found, is_durable=not puts), puts)
    if found:
        found = (*found, *_told_besides(view, found))
        return replace_actions(_new_generation(view, found, faults.failure_of_ranks(plan, view.reports, record.max_boundary)), puts)
    if view.wants_stop:
        return replace_actions(_moved(replace_record(view, suspicion=None, moves=()), JobEvent.STOP_ASKED, f"stops: {view.wants_stop}"), puts)
    watched = _watch_clocks(view)
    if watched.faults:
        failure = hangs.failure(plan, view.reports, record.max_boundary, view.now, stuck=watched.stuck)
        ended = replace_actions(_new_generation(view, watched.faults, failure), puts)
        return replace(ended, events=(*watched.events, *ended.events))
    view = replace_record(view, suspicion=watched.suspicion)
    if record.state is JobState.PAUSING:
        return replace_actions(_pause(view, is_durable=not puts), puts)
    puts = (*puts, *_wanted_checkpoint(view))
    view = _with_moves(view)
    if (left := _leave(view)) is not None:
        return replace_actions(left, puts)
    if view.wants_pause:
        pausing = replace_record(view, moves=())
        return replace_actions(_moved(pausing, JobEvent.PAUSE_ASKED, f"pauses {view.wants_pause}"), puts)
    looks: tuple[JobAction, ...] = tuple(
        SendTakeStacks(node_id=node_id, job=view.spec.job, run=view.spec.run, generation=plan.generation, number=watched.suspicion.number)
        for node_id in watched.ask
        if watched.suspicion is not None
    )
    if watched.words:
        waiting = _stay(view, f"{hangs.TRAINS}{watched.words}", (*puts, *looks), requeue=LAUNCH_SECONDS if watched.ask else WATCH_SECONDS)
        return replace(waiting, events=(*watched.events, *waiting.events))
    if view.record.moves:
        waiting = _stay(view, f"trains; {moves.in_words(view.record.moves)}", puts, requeue=WATCH_SECONDS)
        return replace(waiting, events=(*watched.events, *waiting.events))
    unclear = [verdict.evidence for verdict in view.verdicts.values() if verdict.standing is Standing.UNCLEAR]
    doing = f"trains from step {plan.base_step}" if accounting.is_stepping(view.record) else _awaits_first_step(view)
    reason = f"{doing.partition(' from ')[0]}; {'; '.join(_without_figures(view, unclear))}" if unclear else doing
    trains = _stay(view, reason, puts, requeue=WATCH_SECONDS)
    return replace(trains, events=(*watched.events, *trains.events))


def _awaits_first_step(view: _View) -> str:
    """Return what a launch that has made no new step waits for, and on which nodes."""
    return launch.starting(view.plan, view.reports) or f"waits for the first step after step {view.plan.base_step}"


def _wanted_checkpoint(view: _View) -> tuple[JobAction, ...]:
    """Ask for the checkpoint that a person wants, again and again until there is one on this path."""
    wanted, plan = view.record.checkpoint_wanted, view.plan
    if wanted < 0 or not _is_in(view, plan.coordinator, MemberPhase.RUNNING):
        return ()
    newest = checkpoints.newest_restorable(view.seen.checkpoints, view.seen.lineage, plan.generation)
    if newest is not None and newest.step >= wanted:
        return ()
    return (SendTakeCheckpoint(node_id=plan.coordinator, job=view.spec.job, run=view.spec.run, generation=plan.generation, step=wanted),)


def _watch_clocks(view: _View) -> hangs.Watched:
    is_heard = all(
        node.node_id in view.reports and view.nodes[node.node_id].is_connected and not is_silent(view.nodes[node.node_id], view.policy.timeouts)
        for node in view.plan.nodes
    )
    return hangs.watch(view.now, view.reports, view.record.pace, view.record.suspicion, view.policy.timeouts, is_heard=is_heard)


def _told_besides(view: _View, found: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return the faults that members report of themselves while something else ends the generation: they may well be why.

    Who reports one may still have to stay: it is among the lost, and its history is told of it, when it is really left.
    """
    known = {fault.node_id for fault in found}
    return tuple(
        Fault(cause=verdict.cause, evidence=verdict.evidence, at=view.now, seen_on=(node_id,))
        for node_id, verdict in view.verdicts.items()
        if verdict.standing is Standing.IMPAIRED and verdict.may_terminate and node_id not in known and node_id in view.reports
    )


# -- leaving a node while training goes well --------------------------------------------------------------------------


def _with_moves(view: _View) -> _View:
    """Note which members are to be left. A node that was lent and is no use itself goes at once: no rank is there."""
    record = view.record
    found = moves.wanted(record.moves, view.seen.assigned, view.verdicts, view.nodes, now=view.now, not_before=record.moves_after)
    lent = moves.lent(view.plan, view.seen.assigned)
    useless = tuple(moves.verdict(move) for move in found if move.node_id in lent and not _is_excluded(record, move.node_id))
    return replace_record(view, moves=tuple(move for move in found if move.node_id not in lent), exclusions=_exclusions(view, record, useless))


def _is_excluded(record: JobRecord, node_id: NodeId) -> bool:
    return any(exclusion.node_id == node_id for exclusion in record.exclusions)


def _leave(view: _View) -> Decision | None:
    """Leave members that are to be left: a stop that all ranks agree upon, a checkpoint if it is worth the time, the next generation without them.

    The stop is stored in one pass and asked for in the next: ranks that stop without a stored reason would look like a job that is done.

    Args:
        view: of a running job.

    Returns:
        None while the job may train on.
    """
    record, plan, timeouts = view.record, view.plan, view.policy.timeouts
    leaving = moves.asked(record.moves)
    if not leaving:
        ready = moves.successors(plan, view.seen.assigned, view.nodes, view.now, timeouts)
        leaving = moves.due(record.moves, len(ready), record.upload_seconds, view.now, timeouts)
        return _asked_to_leave(view, leaving, ready) if leaving else None
    names, why = ", ".join(move.node_id for move in leaving), "; ".join(move.evidence for move in leaving)
    if not _was_agreed(view):
        if moves.is_stuck(leaving, _moved_at(view), view.now, timeouts, hangs.promised_seconds(view.reports)):
            unasked = tuple(replace(move, asked_at=None) for move in record.moves)  # nothing advances: there is nothing to spare any more
            return _new_generation(replace_record(view, moves=unasked), tuple(moves.fault(move, view.now, view.now) for move in leaving), None)
        return _stay(view, f"agrees on a stop, to leave {names}: {why}", _ask_to_stop(view), requeue=LAUNCH_SECONDS)
    stopped_at = min(max((each.at_seconds for each in _exits(view.reports)), default=view.now), view.now)
    found = tuple(moves.fault(move, stopped_at, view.now) for move in leaving)
    reached = max(record.boundary, faults.reached(view.reports))
    closed: tuple[IncidentRecord, ...] = ()
    if record.incident is None or record.incident.state is not IncidentState.REPLACING:
        view, closed = _with_incident(view, found, reached)
    incident = view.record.incident
    assert incident is not None  # opened above
    is_awaited, words = _awaits_copy(view, leaving, incident.opened_at)
    decision = f"stop at an agreed step and move the ranks of {names} to other nodes; {words}"
    view = replace_record(view, incident=replace(incident, reached_step=reached, decision=decision))
    if is_awaited:
        stayed = _stay(view, f"stands at step {reached}: {words}", requeue=LAUNCH_SECONDS)
        return replace(stayed, incidents=(*closed, *stayed.incidents))
    moved = _new_generation(_with_partners(view, leaving), found, None, decision=decision)
    return replace(moved, incidents=(*closed, *moved.incidents))


def _asked_to_leave(view: _View, leaving: tuple[Departure, ...], ready: list[NodeId]) -> Decision:
    names, why = ", ".join(move.node_id for move in leaving), "; ".join(move.evidence for move in leaving)
    left = {move.node_id for move in leaving}
    known = tuple(replace(move, asked_at=view.now) if move.node_id in left else move for move in view.record.moves)
    takers = f", to go on with {', '.join(ready[: len(leaving)])}" if ready else ""
    draft = EventDraft(type="NodesToBeLeft", message=f"leaves {names} at an agreed stop{takers}: {why}", node_id=leaving[0].node_id)
    stayed = _stay(replace_record(view, moves=known), f"agrees on a stop, to leave {names}: {why}", requeue=0.0)
    return replace(stayed, events=(*stayed.events, draft))


def _was_agreed(view: _View) -> bool:
    """Say whether the agreed stop has been reached: every rank has ended well, or its last commit is decided and nothing more will be trained.

    A script that came to its end by itself was not stopped, whatever was asked meanwhile.
    """
    status = next((report.round for report in view.reports.values() if report.round is not None), None)
    if status is not None and status.finished:
        return status.stopped
    return _have_all_ended(view.reports, view.plan.world_size)


def _is_over(reports: Mapping[NodeId, MemberReport], world_size: int) -> bool:
    """Say whether nothing more will be trained, agreed upon or not: scripts may still write their results."""
    return any(report.round is not None and report.round.finished for report in reports.values()) or _have_all_ended(reports, world_size)


def _have_all_ended(reports: Mapping[NodeId, MemberReport], world_size: int) -> bool:
    """Say whether every rank has ended well, whatever of it is still on its way to S3."""
    exits = _exits(reports)
    return len(exits) == world_size and all(each.exit_class is ExitClass.SUCCESS for each in exits)


def _exits(reports: Mapping[NodeId, MemberReport]) -> list[RankExit]:
    return [rank.exit for report in reports.values() for rank in report.ranks if rank.exit is not None]


def _awaits_copy(view: _View, leaving: tuple[Departure, ...], stopped_at: float) -> tuple[bool, str]:
    """Say whether the stopped generation's last commit is still to become a checkpoint before the nodes are left, and why."""
    record, timeouts = view.record, view.policy.timeouts
    newest = _durable_step(view)
    if record.committed <= 0:
        return False, "there was no step to keep"
    if newest >= record.committed:
        return False, f"step {newest} is in S3"
    return moves.checkpoint_wait(
        moves.ends_at(leaving, view.nodes, view.now),
        is_announced=any(move.is_announced for move in leaving),
        stopped_at=stopped_at,
        upload_seconds=record.upload_seconds,
        is_replaceable=len(moves.successors(view.plan, view.seen.assigned, view.nodes, view.now, timeouts)) >= len(leaving),
        is_held=moves.is_held_elsewhere(view.plan, view.reports, [move.node_id for move in leaving]),
        now=view.now,
        timeouts=timeouts,
    )


def _with_partners(view: _View, leaving: tuple[Departure, ...]) -> _View:
    """Remember who stays and was out of view as well as who is left for that."""
    lost = tuple(move for move in leaving if move.cause is Cause.NODE_UNREACHABLE)
    if not lost:
        return view
    staying = nodes_out_of_view(view.reports) - {move.node_id for move in leaving}
    known_as = incident_id(view.spec.run, view.plan.generation)
    lines = tuple(moves.partner(node_id, lost, known_as, view.now) for node_id in sorted(staying))
    return replace(view, implications=(*view.implications, *lines))


def _with_progress(view: _View) -> _View:
    """Take in how far training is, and what that means for an open incident."""
    record, plan = view.record, view.plan
    boundary = max(record.boundary, faults.reached(view.reports))
    coordinator = view.reports.get(plan.coordinator)
    status = coordinator.round if coordinator is not None else None
    committed, proposed, committed_at = launch.committed_of(view.spec, view.seen, record), record.proposed, record.committed_at
    if status is not None and status.committed >= committed:
        proposed, committed_at = status.proposed, status.committed_at_seconds or committed_at
    is_dated = boundary == record.boundary and record.boundary_at is not None
    boundary_at = record.boundary_at if is_dated else passed_at(view.reports, boundary)
    incident = record.incident
    if incident is not None and incident.state is IncidentState.RESTORING and _trains_again(view):
        first = Step(plan.base_step + 1)
        after = first, first_passed_at(view.reports, plan.base_step)
        at = incidents.moment_of(first, (plan.base_step, None), after, earliest=incident.replaced_at or incident.opened_at, now=view.now)
        incident = incidents.moved(incident, IncidentEvent.TRAINING_AGAIN, at)
    if incident is not None and incident.state is IncidentState.REWORKING and boundary >= incident.reached_step:
        before, after = (record.boundary, record.boundary_at), (boundary, boundary_at)
        at = incidents.moment_of(incident.reached_step, before, after, earliest=incident.restored_at or incident.opened_at, now=view.now)
        incident = incidents.moved(incident, IncidentEvent.CAUGHT_UP, at)
    stepped_at = record.stepped_at
    if stepped_at is None and boundary > plan.base_step:
        told_at = first_passed_at(view.reports, plan.base_step)
        stepped_at = view.now if told_at is None else max(min(told_at, view.now), record.created_at)
        if record.incident is None and not accounting.is_stepping(record):
            view = replace(view, record=accounting.recharge_first_step(record, stepped_at))
    is_safe = status is not None and status.committed > plan.base_step
    passed = _passed_by_all(view)
    told = breakers.passed(record.trials, plan.generation, passed)
    view = _told_by_trials(view, told)
    return replace_record(
        view,
        trials=tuple(trial for trial in record.trials if trial not in told),
        failures=breakers.still_ahead(record.failures, plan.generation, passed),
        boundary=boundary,
        boundary_at=boundary_at,
        stepped_at=stepped_at,
        max_boundary=max(record.max_boundary, boundary),
        target=max((report.target for report in view.reports.values() if report.target > 0), default=record.target),
        committed=committed,
        proposed=proposed,
        committed_at=committed_at,
        incident=incident,
        refused=() if is_safe else record.refused,
        doubted=() if is_safe else record.doubted,
        pace=hangs.learned(record.pace, plan.world_size, view.reports),
        upload_seconds=checkpoints.upload_seconds(view.reports) or record.upload_seconds,
    )


def _told_by_trials(view: _View, told: tuple[Trial, ...]) -> _View:
    """A failure that stayed behind with its node speaks against the node, unless it was one of lack of memory: no hardware is at fault then."""
    lines = tuple(
        Implication(
            node_id=trial.node_id,
            incident_id=incident_id(view.spec.run, trial.failure.generation),
            at=view.now,
            what=Cause.HANG.value if trial.failure.is_hang else Cause.RANK_EXIT.value,
            evidence=f"ranks failed alike on {trial.node_id} after step {trial.failure.step}, and pass that step without it",
            remedy=Remedy.RELEASE,
        )
        for trial in told
        if trial.node_id is not None and trial.failure.exit_class is not ExitClass.OUT_OF_MEMORY
    )
    return replace(view, implications=(*view.implications, *lines))


def _trains_again(view: _View) -> bool:
    """Say whether every rank stands at the base or beyond, and one has finished a step of its own."""
    base = view.plan.base_step
    return _passed_by_all(view) >= base and any(rank.boundary > base for report in view.reports.values() for rank in report.ranks)


def _passed_by_all(view: _View) -> Step:
    """Return the newest boundary that no rank is short of; `NO_STEP` while one is not heard of."""
    boundaries = [rank.boundary for report in view.reports.values() for rank in report.ranks]
    return min(boundaries) if len(boundaries) == view.plan.world_size else NO_STEP


def _has_finished(view: _View, node_id: NodeId) -> bool:
    report = view.reports.get(node_id)
    return (
        report is not None
        and report.phase is MemberPhase.EXITED
        and len(report.ranks) == view.spec.ranks_per_node
        and all(rank.exit is not None and rank.exit.exit_class is ExitClass.SUCCESS for rank in report.ranks)
    )


def _finish(view: _View, *, is_durable: bool) -> Decision:
    """Every rank ended well. After an agreed stop, give the last snapshot the time to become a checkpoint."""
    record = view.record
    status = next((report.round for report in view.reports.values() if report.round is not None), None)
    was_stopped = record.state is not JobState.RUNNING and not (status is not None and status.finished and not status.stopped)
    if not was_stopped:
        if _awaits_manifest(view, is_durable=is_durable):
            return _stay(view, f"every rank ended with success after step {record.boundary}; its last checkpoint follows", requeue=LAUNCH_SECONDS)
        return _ended(view, JobEvent.FINISHED, _success(record))
    if record.state is JobState.PAUSING:
        return _paused(view, is_durable=is_durable)
    if _awaits_checkpoint(view, is_durable=is_durable):
        return _stay(view, f"stopped at step {record.boundary}; waits for its last checkpoint", requeue=LAUNCH_SECONDS)
    return _ended(view, JobEvent.HALTED, f"stopped at step {record.boundary}: {view.wants_stop}; {_durable(view)}")


def _success(record: JobRecord) -> str:
    """Return the reason of a job whose ranks all ended with code 0, with a warning if they did not do what they announced."""
    if record.max_boundary <= 0:
        return (
            "every rank ended with success, and none reported a step. Warning: nothing was kept. "
            "Call everstep.training.init() and session.boundary() in the script, or session.batches()"
        )
    reason = f"every rank ended with success after step {record.boundary}"
    if record.boundary < record.target:
        return f"{reason}. Warning: the target is step {record.target}; look at the end of the log for why the script ended early"
    return reason


def _awaits_checkpoint(view: _View, *, is_durable: bool) -> bool:
    """Say whether the newest commit may still become a checkpoint: every node is there, and its ranks have not ended long ago."""
    if _awaits_manifest(view, is_durable=is_durable):
        return True
    lacks = view.record.committed > 0 and _durable_step(view) < view.record.committed
    if len(_exits(view.reports)) < view.plan.world_size or not lacks:
        return False
    return _watched_seconds(view, _ended_at(view)) < view.policy.timeouts.final_round_seconds


def _awaits_manifest(view: _View, *, is_durable: bool) -> bool:
    """Say whether shards that are complete in S3 are still to become a checkpoint: a manifest that could not be put is tried again."""
    return not is_durable and _watched_seconds(view, _ended_at(view)) < _upload_patience(view)


def _ended_at(view: _View) -> float:
    """Return when the ranks of a job that is to end last moved, Unix seconds, or one of them ended; not before the present state began."""
    exits = (each.at_seconds for each in _exits(view.reports))
    return min(max(view.record.state_since, _progress_at(view), *exits), view.now)


def _upload_patience(view: _View) -> float:
    """Return how long ranks that have ended may take to become a checkpoint, seconds."""
    expected = moves.UPLOAD_MARGIN * (view.record.upload_seconds or 0.0)
    return max(PAUSE_PATIENCE_TIMES * view.policy.timeouts.blind_wait_seconds, expected)


def _durable_step(view: _View) -> Step:
    """Return the newest step in S3 that the job could go on from, or -1. Newer ones may be left of a generation that it went back behind."""
    newest = checkpoints.newest_restorable(view.seen.checkpoints, view.seen.lineage, view.plan.generation)
    return NO_STEP if newest is None else newest.step


def _durable(view: _View) -> str:
    newest = _durable_step(view)
    return f"the newest checkpoint is step {newest}" if newest > 0 else "there is no checkpoint"


def _stop(view: _View, found: tuple[Fault, ...], *, is_durable: bool) -> Decision:
    """Ask for the agreed stop; if that can no longer be had, end the ranks that are left. The coordinator is told, too: it has C uploaded."""
    record, plan = view.record, view.plan
    is_over = _is_over(view.reports, plan.world_size)
    if not found and _have_all_ended(view.reports, plan.world_size):
        return _stay(view, f"stopped at step {record.boundary}; waits for its last checkpoint", requeue=LAUNCH_SECONDS)
    patience = _upload_patience(view) if is_over else _stop_patience(view)
    waited = _watched_seconds(view, _ended_at(view)) if is_over else view.now - max(record.state_since, _moved_at(view))
    if not found and waited <= patience:
        if is_over:
            return _stay(view, f"stopped at step {record.boundary}; waits for its ranks to end", requeue=LAUNCH_SECONDS)
        return _stay(view, f"stops: {view.wants_stop}", _ask_to_stop(view), requeue=LAUNCH_SECONDS)
    stood = "its ranks did not end" if is_over else "no step"
    why = found[0].evidence if found else f"{stood} within {patience:g} s"
    how = f"at step {record.boundary}" if is_over else "without agreement"
    running = [node.node_id for node in plan.nodes if _is_in(view, node.node_id, MemberPhase.RUNNING)]
    told = [*running, plan.coordinator] if _is_in(view, plan.coordinator, MemberPhase.EXITED) else running
    halts = tuple(
        SendHalt(node_id=node_id, job=view.spec.job, run=view.spec.run, generation=plan.generation, reason="the job stops") for node_id in told
    )
    if running:
        return _stay(view, f"stops {how}: {why}", halts, requeue=LAUNCH_SECONDS)
    if _awaits_checkpoint(view, is_durable=is_durable):
        return _stay(view, f"stopped {how}: {why}; waits for its last checkpoint", halts, requeue=LAUNCH_SECONDS)
    if is_over:
        words = f"stopped at step {record.boundary}: {view.wants_stop}; but {why}"
    elif accounting.is_stepping(record):
        words = f"stopped ({view.wants_stop}), but not at one step: {why}"
    else:
        words = f"stopped before a new step: {view.wants_stop}"
    return _ended(view, JobEvent.HALTED, f"{words}; {_durable(view)}")


def _stop_patience(view: _View) -> float:
    """Return how long ranks that make no step are waited for before they are killed, seconds.

    Ranks agree on a stop at their boundaries. Ranks that hang reach none, so that the agreement has no chance; what is committed is uploaded.
    A launch without a new step loses nothing when its ranks are killed. It has no learned limit that could tell a hang from a slow start.
    """
    timeouts = view.policy.timeouts
    loses_nothing = not accounting.is_stepping(view.record)
    is_hang = loses_nothing or hangs.stands_still(view.reports, view.record.pace, timeouts)
    return timeouts.coordinator_deadline_seconds if is_hang else timeouts.blind_wait_seconds


def _pause(view: _View, *, is_durable: bool) -> Decision:
    """Ask for the agreed stop, again and again. Whatever goes wrong with it is a fault like any other: training goes on, and the pause waits.

    Ranks that stand still on purpose are waited for: they agree at the end of their step.
    """
    record = view.record
    if _was_agreed(view):
        return _paused(view, is_durable=is_durable)
    patience = view.policy.timeouts.blind_wait_seconds + hangs.promised_seconds(view.reports)
    if view.now - max(record.state_since, _moved_at(view)) > patience:
        words = f"the ranks did not agree on a stop, and made no step, for {patience:g} s"
        return _resumed(view, Fault(cause=Cause.PAUSE_FAILED, evidence=words, at=view.now))
    return _stay(view, record.reason, _ask_to_stop(view), requeue=LAUNCH_SECONDS)


def _moved_at(view: _View) -> float:
    """Return when training was last seen to move, Unix seconds: now where nobody can see or could have seen whether it does."""
    if view.seen.is_fleet_blind or not all(view.nodes[node.node_id].has_reported for node in view.plan.nodes):
        return view.now
    progress_at, unwatched = _progress_at(view), view.record.unwatched
    return progress_at if unwatched is None else max(progress_at, unwatched[1])


def _progress_at(view: _View) -> float:
    """Return when training last moved as far as this control plane has heard, Unix seconds: now, if this pass has heard of it."""
    record, before = view.record, view.seen.record
    has_moved = (record.boundary, record.committed, record.proposed) != (before.boundary, before.committed, before.proposed)
    return view.now if has_moved else record.progress_at


def _ask_to_stop(view: _View) -> tuple[SendStop, ...]:
    """Return what asks for the agreed stop: the coordinator is asked, while its ranks run."""
    plan = view.plan
    if not _is_in(view, plan.coordinator, MemberPhase.RUNNING):
        return ()
    return (SendStop(node_id=plan.coordinator, job=view.spec.job, run=view.spec.run, generation=plan.generation),)


def _paused(view: _View, *, is_durable: bool) -> Decision:
    """All ranks stand at one step. Its nodes are let go once that step is a checkpoint: memory goes with them.

    What else they leave is waited for, too, but not beyond the patience that the checkpoint has.
    """
    record = view.record
    durable, patience = _durable_step(view), _upload_patience(view)
    is_late = _watched_seconds(view, _ended_at(view)) > patience
    if is_durable and durable >= record.committed and (is_late or all(_has_finished(view, node.node_id) for node in view.plan.nodes)):
        incident = record.incident
        if incident is not None and incident.state is not IncidentState.CLOSED:  # what it was still to make up for, it does when it is resumed
            incident = incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now)
        free = replace_record(view, asked=(), exclusions=(), silences=(), no_pause_before=None, incident=incident)
        resumes = "resumes by itself" if record.pause_requested_at is None else "ResumeTrainingJob lets it go on"
        source = f"from the checkpoint of step {durable}" if durable > 0 else "from its beginning: no step was committed"
        return _moved(free, JobEvent.PAUSED, f"paused after step {record.boundary}, {resumes} {source}")
    if is_late:
        words = f"step {record.committed} did not become a checkpoint within {patience:g} s: it is not paused"
        return _resumed(view, Fault(cause=Cause.PAUSE_FAILED, evidence=words, at=view.now))
    return _stay(view, f"stopped at step {record.boundary} to pause; waits for its checkpoint", requeue=LAUNCH_SECONDS)


def _resumed(view: _View, why: Fault) -> Decision:
    """Go on training from memory where a pause did not work out, and leave the job alone for a while."""
    return _new_generation(replace_record(view, no_pause_before=view.now + queue.PAUSE_AGAIN_SECONDS), (why,), None)


# -- a new generation -------------------------------------------------------------------------------------------------


def _new_generation(view: _View, found: tuple[Fault, ...], failure: FailureRecord | None, *, decision: str = "") -> Decision:
    """End the generation: number the next one, open an incident or add to the open one, and halt what still runs.

    Args:
        view: of a launched job.
        found: why; not empty.
        failure: for the breakers, if the job failed by itself.
        decision: for the incident, where it was told before.

    Returns:
        PREPARING.
    """
    plan = view.plan
    found, failure = drills.attributed(view.seen.drill, plan.generation, found, failure, reports=view.reports)
    issued = Generation(max(view.record.issued_generation, launch.highest_seen(view.seen, view.spec.run)) + 1)
    has_stopped = view.record.state is JobState.RUNNING and _was_agreed(view)
    leaving = tuple(moves.verdict(move) for move in moves.asked(view.record.moves) if move.is_announced and has_stopped)
    gone = tuple(verdict for verdict in view.verdicts.values() if verdict.is_final)
    done = {verdict.node_id for verdict in gone}
    reached = max(view.record.boundary, faults.reached(view.reports))
    view = _with_moves(view)
    view, closed = _with_incident(view, found, reached, decision=decision)
    exclusions = _exclusions(view, view.record, (*gone, *(verdict for verdict in leaving if verdict.node_id not in done)))
    incident = view.record.incident
    assert incident is not None  # opened above
    view = _implicating(replace_record(view, exclusions=exclusions), found, incident)
    record = view.record
    failed = faults.failed_sources(plan, view.reports, view.nodes, record.doubted)
    is_own_making = all(fault.cause in (Cause.RANK_EXIT, Cause.HANG, Cause.LOAD_FAILED, Cause.NOTICE, Cause.REQUESTED) for fault in found)
    is_passing = bool(failed.doubted) and not failed.refused and all(fault.cause is Cause.LOAD_FAILED for fault in found)
    record = replace(
        record,
        issued_generation=issued,
        asked=(),
        suspicion=None,
        boundary=reached,
        max_boundary=max(record.max_boundary, reached),
        failures=breakers.remembered(record.failures, failure if is_own_making and not is_passing else None, view.spec),
        refused=tuple(dict.fromkeys([*record.refused, *failed.refused])),
        doubted=tuple(dict.fromkeys([*record.doubted, *failed.doubted])),
    )
    halts = tuple(
        SendHalt(node_id=node.node_id, job=view.spec.job, run=view.spec.run, generation=plan.generation, reason=found[0].evidence)
        for node in plan.nodes
        if _is_in(view, node.node_id, MemberPhase.RUNNING)
    )
    event = EventDraft(
        type="GenerationEnded", message=f"generation {plan.generation} ended: {'; '.join(incident.evidence)}", node_id=found[0].node_id
    )
    moved = _moved(replace(view, record=record), JobEvent.FAULTED, f"{found[0].evidence}; {incident.decision}")
    return replace(moved, actions=halts, incidents=(*closed, *moved.incidents), events=(event, *moved.events))


def _with_incident(view: _View, found: tuple[Fault, ...], reached: Step, *, decision: str = "") -> tuple[_View, tuple[IncidentRecord, ...]]:
    """Return the view with the incident that the faults belong to, and the one before it if they end that; it tells what nodes had worked before."""
    before, record = view.record.incident, view.record
    closed, incident = _incident_of(view, found, reached)
    if before is None or before.id != incident.id:
        unnoticed = accounting.microseconds(incident.opened_at) - accounting.microseconds(incident.failed_at)
        incident = replace(incident, node_microseconds_before=record.node_microseconds - unnoticed * record.node_count)
    return replace(view, record=replace(record, incident=replace(incident, decision=decision or incident.decision))), closed


def _incident_of(view: _View, found: tuple[Fault, ...], reached: Step) -> tuple[tuple[IncidentRecord, ...], IncidentRecord]:
    """Return the incident that the faults belong to, and the one before it if they end that.

    A failure before training has begun again is part of the same recovery. One that comes later is an incident of its own; the open one ends
    with it, its rework cut short.
    """
    before = view.record.incident
    if before is not None and before.state not in (IncidentState.REWORKING, IncidentState.CLOSED):
        again = incidents.moved(before, IncidentEvent.FAILED_AGAIN, view.now)
        again = incidents.with_faults(again, tuple(replace(fault, at=max(fault.at, before.failed_at)) for fault in found))
        if view.seen.plan is not None and again.cause not in (
            Cause.NOTICE,
            Cause.REQUESTED,
        ):  # who is left on purpose has left its last step elsewhere
            again = _with_group_loss(again, view.seen.plan)
        return (), replace(again, decision=_decided(again.cause, again.instance_ids))
    opened = incidents.opened(
        view.spec.run,
        view.plan.generation,
        found,
        decision="",
        reason="the plan follows when every node has promised",
        reached=reached,
        now=view.now,
    )
    opened = incidents.with_absence(replace(opened, decision=_decided(opened.cause, opened.instance_ids)), view.record.unwatched)
    if before is None:
        return (), opened
    if before.state is IncidentState.CLOSED:  # in this very pass: it had caught up before the next failure was seen
        return (before,), opened
    return (incidents.moved(before, IncidentEvent.JOB_ENDED, max(opened.failed_at, before.restored_at or 0.0)),), opened


def _decided(cause: Cause, lost: tuple[NodeId, ...]) -> str:
    if not lost:
        return "restart all ranks on the same nodes"
    if cause in (Cause.NOTICE, Cause.REQUESTED):
        return f"stop at an agreed step and move the ranks of {', '.join(lost)} to other nodes"
    return f"replace {', '.join(lost)} and restart all ranks"


# -- leaving a state --------------------------------------------------------------------------------------------------


def replace_record(view: _View, **changes: object) -> _View:
    """Return the view with a changed record."""
    return replace(view, record=replace(view.record, **changes))  # type: ignore[arg-type]


def replace_actions(decision: Decision, more: tuple[JobAction, ...]) -> Decision:
    """Return the decision with more actions, after its own."""
    return replace(decision, actions=(*decision.actions, *more))


def _stay(view: _View, reason: str, actions: tuple[JobAction, ...] = (), *, requeue: float = WATCH_SECONDS) -> Decision:
    return Decision(
        record=replace(view.record, reason=reason),
        actions=actions,
        incidents=_changed_incident(view, view.record),
        implications=view.implications,
        events=view.events,
        requeue_after_seconds=requeue,
    )


def _moved(view: _View, event: JobEvent, reason: str) -> Decision:
    before = view.record
    state = advance(JOB_TRANSITIONS, f"job {view.spec.job}", before.state, event, (before.reason,))
    record = replace(before, state=state, reason=reason, state_since=view.now)
    draft = EventDraft(type="JobStateChanged", message=f"{before.state} → {state}: {reason}")
    return Decision(
        record=record,
        incidents=_changed_incident(view, record),
        implications=view.implications,
        events=(*view.events, draft),
        requeue_after_seconds=0.0,
    )


def _ended(view: _View, event: JobEvent, reason: str) -> Decision:
    incident = view.record.incident
    if incident is not None and incident.state is not IncidentState.CLOSED:
        incident = incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now)
        if event is JobEvent.GAVE_UP:
            incident = replace(incident, decision=f"{incident.decision}; then give the job up")
    return _moved(replace_record(view, ended_at=accounting.accounted_until(view.record), incident=incident), event, reason)


def _changed_incident(view: _View, record: JobRecord) -> tuple[IncidentRecord, ...]:
    """Return the incident if this pass changed it."""
    return (record.incident,) if record.incident is not None and record.incident != view.seen.record.incident else ()


def _settled(before: JobRecord, decision: Decision, now: float) -> Decision:
    """Keep the stored record while only figures have moved and that not for long; let a closed incident go."""
    record = decision.record
    if record.incident is not None and record.incident.state is IncidentState.CLOSED:
        record = replace(record, incident=None)
    figures = {
        "accounted_until": before.accounted_until,
        "microseconds": before.microseconds,
        "node_microseconds": before.node_microseconds,
        "boundary": before.boundary,
        "boundary_at": before.boundary_at,
        "max_boundary": before.max_boundary,
        "committed": before.committed,
        "proposed": before.proposed,
        "committed_at": before.committed_at,
        "pace": before.pace,
    }
    if replace(record, **figures) == before:  # type: ignore[arg-type]
        is_due = now - before.progress_at >= PROGRESS_SECONDS
        moved = (record.boundary, record.committed, record.proposed) != (before.boundary, before.committed, before.proposed)
        is_charged = before.accounted_until is not None and now - before.accounted_until < 5 * PROGRESS_SECONDS
        if not (is_due and moved) and is_charged:
            return replace(decision, record=before)
    if (record.boundary, record.committed, record.proposed) != (before.boundary, before.committed, before.proposed):
        record = replace(record, progress_at=now)
    return replace(decision, record=record)


def _waits_for(view: _View, missing: int) -> str:
    words = f"waits for {missing} node{'s' if missing != 1 else ''}"
    return f"{words}: {view.seen.waiting_words}" if view.seen.waiting_words else words


def _without_figures(view: _View, unclear: list[str]) -> list[str]:
    """Name silent nodes without a running clock: a reason is stored, and told, when it changes."""
    silent = [node.node_id for node in view.nodes.values() if is_silent(node, view.policy.timeouts)]
    return [f"{', '.join(sorted(silent))} silent"] if silent else unclear
