"""The decision about a fleet: desired capacity, and which node works for which job.

    desired capacity    max(MinNodeCount, nodes of all admitted jobs) + spares + held nodes + nodes that AWS
                            will reclaim, within the group's own limits
    up                  LaunchInstances, or SetDesired where AWS refuses it (`core.capacity`)
    down                first lower the capacity to the existing instances; then terminate idle nodes by id, one by one
    ended               remove each instance that AWS reports as ended, and lower the capacity; the next pass launches
                            its replacement. Without LaunchInstances, the group launches it by itself
    moves               assign a job another node for each node that it must give up (`core.moves`)

Invariant: a node works for at most one job. A job starts with all its nodes or not at all. Recovering jobs precede
queued jobs. While the group's settings differ from the registered ones, or most of the fleet is silent, the fleet
terminates only instances that AWS is ending. While automation is paused, the fleet does nothing. A node whose agent has
connected is terminated only as surplus, at a person's request, because AWS ends it, after faults that its own agent
reported, or after a failed reboot. An hourly limit of replacements keeps wrong verdicts from emptying the fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest

from control_plane.core import burn_in, capacity, notices, pair_tests, remedies, requests, rolls
from control_plane.core.actions import (
    CompleteTermination,
    EventDraft,
    FleetAction,
    FleetDecision,
    HoldTermination,
    LaunchInstances,
    ProtectMembers,
    RebootMember,
    ResumeLaunch,
    RetryLaunch,
    Send,
    SendKeepEvidence,
    SetDesired,
    TerminateMember,
)
from control_plane.core.evidence import is_fleet_blind, is_silent
from control_plane.core.moves import is_in_service, is_ready
from control_plane.core.observed import causes
from control_plane.core.observed.facts import Announced, Fact, InstanceEnded, NodeRequest, SlowNode
from control_plane.core.observed.fleets import (
    FleetHistory,
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupObserved,
    Hold,
    HoldRelease,
    NodeRecord,
)
from control_plane.core.observed.nodes import Implication, InstanceCondition, NodeObserved, Remedy
from control_plane.core.observed.reasons import RollEnded
from control_plane.core.observed.specs import Policy
from control_plane.core.queue import in_order, schedule
from control_plane.core.spares import spare_count
from control_plane.core.states import (
    HOLDING_JOBS,
    LAUNCHED_JOBS,
    NODE_TRANSITIONS,
    FleetStatus,
    JobState,
    NodeEvent,
    NodeState,
    advance,
)
from control_plane.core.timeouts import HOLD_SECONDS, JOIN_SECONDS, REBOOT_SECONDS
from everstep.protocol.agent_messages import (
    BurnInResult,
    FaultCode,
    HaltRanks,
    KeepSources,
    MemberPhase,
    NodeFault,
    NoticeKind,
    Release,
)
from everstep.protocol.ids import NodeId, RunId
from everstep.protocol.plan import SourceArchive

NODE_COUNTS_AS_MEMBER = frozenset(NodeState) - {NodeState.GONE}
MOST_SOURCES = 16
MOST_SOURCE_BYTES = 1024**3
"""Limit of the source archives that a spare downloads in advance."""
RATE_WINDOW_SECONDS = 3600.0
MOST_DOUBLINGS = 10


def decide(now: float, spec: FleetSpec, observed: FleetObserved, policy: Policy) -> FleetDecision:
    """Return the changes of a fleet's node table, and the actions on its Auto Scaling group and agents.

    Raises InvalidTransition if the node table permits no transition for an observed event.
    """
    if policy.pause:
        return FleetDecision(
            desired_count=observed.group.desired_count,
            vacancies=observed.vacancies,
            is_frozen=True,
            # Keep a person's confirmation that the silent nodes are lost (`is_blindness_lifted`) during this pause of
            # all automatic actions. A decision with `is_blind` False would delete the confirmation.
            is_blind=spec.is_blindness_lifted,
            reasons=(causes.AutomationPaused(text=policy.pause),),
        )
    # Count a member that AWS's answer repeats once. Otherwise the fleet ends a healthy node as surplus.
    members = {member.node_id: member for member in observed.group.members}
    observed = replace(observed, group=replace(observed.group, members=tuple(members.values())))
    table = _Table(now, spec, observed)
    table.follow_aws()
    in_use = [table.node(row.node_id) for row in table.in_state(NodeState.SPARE, NodeState.ASSIGNED)]
    has_no_sight = is_fleet_blind(in_use, policy.timeouts)
    is_blind = has_no_sight and not spec.is_blindness_lifted
    is_frozen = bool(observed.group.drift) or is_blind
    table.apply_operator_requests()
    table.follow_jobs(policy)
    table.follow_roll(policy, is_frozen=is_frozen)
    table.follow_requests()
    table.follow_burn_ins()
    table.follow_faults(policy, is_blind=is_blind)
    table.take_back()
    table.assign(policy)
    if not is_frozen:
        table.give_up_joining()
        table.retire_announced()
    table.replace_within_limit(is_frozen=is_frozen)
    desired = observed.group.min_size if spec.is_deleting else _desired(spec, observed, table)
    disposition = observed.group.desired_count if is_frozen else _without_hope(observed.group, desired)
    lowerable = table.lowerable_count()
    actions: list[FleetAction] = [
        *_ended_members(spec, observed, table, desired, lowerable),
        *_evidence(table),
        *_held_back(spec, observed.group, table, policy, is_blind=is_blind),
        *_releases(observed, table, policy),
        *_sources(table, policy),
        *_burn_ins(table),
    ]
    if observed.group.unprotected:
        # CreateFleet sets the group to protect new instances, but not an instance that was starting at that time.
        actions.insert(0, ProtectMembers(group=spec.group, node_ids=observed.group.unprotected))
    if observed.group.desired_count < desired:
        actions.append(table.grow(desired))
    elif disposition < observed.group.desired_count - sum(
        isinstance(action, TerminateMember) and action.decrement for action in actions
    ):
        actions.append(SetDesired(group=spec.group, desired_count=disposition))
    else:
        actions += _tries(now, spec, observed.group)
    if not is_frozen:
        actions += _reboots(spec, table)
        ending = [action for action in actions if isinstance(action, TerminateMember)]
        room = disposition - desired - sum(action.decrement for action in ending)
        lowerable -= sum(action.decrement for action in ending)
        drained = _drained(spec, observed.group, table, max(room, lowerable))
        room -= sum(action.decrement for action in drained)
        left = sum(member.counts for member in observed.group.members) - len(ending) - len(drained)
        actions += drained
        actions += _surplus(table, desired, max(room, left - desired), room)
    return FleetDecision(
        records=table.changed(),
        actions=tuple(actions),
        desired_count=desired,
        vacancies=table.vacancies,
        is_frozen=is_frozen,
        is_blind=has_no_sight,
        reasons=_reasons(spec, observed, table, desired, is_blind=is_blind),
        implications=tuple(table.implications),
        events=tuple(table.events),
        forgotten=tuple(row.node_id for row in table.changed() if row.state is NodeState.GONE),
        roll_progress=table.roll_progress,
        is_empty=spec.is_deleting
        and not observed.group.members
        and all(row.state is NodeState.GONE for row in table.rows.values()),
    )


class _Table:
    def __init__(self, now: float, spec: FleetSpec, observed: FleetObserved) -> None:
        self.now = now
        self.spec = spec
        self.seen = observed
        self.before = {row.node_id: row for row in observed.records}
        self.rows = dict(self.before)
        self.events: list[EventDraft] = []
        self.implications: list[Implication] = []
        self.jobs: Mapping[RunId, FleetJob] = {job.run: job for job in observed.jobs}
        self.vacancies = observed.vacancies
        self.roll_progress = observed.roll_progress

    def counts(self) -> Mapping[RunId, int]:
        """Return how many nodes each job may hold. Held nodes count against the group's MaxSize."""
        capacity = self.seen.group.max_size - len(self.in_state(NodeState.HELD))
        return schedule(self.seen.jobs, capacity, self.now).counts

    def lowerable_count(self) -> int:
        """Return how many removals may lower the desired capacity because a later pass launches the replacements."""
        group = self.seen.group
        return group.desired_count - group.min_size if capacity.may_launch(self.now, group, self.seen.launch) else 0

    def grow(self, desired: int) -> FleetAction:
        launch = self.seen.launch
        action = capacity.growth(self.now, self.spec.group, self.seen.group, desired, launch)
        if isinstance(action, LaunchInstances) and (launch is None or action.key != launch.key):
            self.vacancies = (*self.vacancies, (self.now, action.count))
        return action

    def node(self, node_id: NodeId) -> NodeObserved:
        return self.seen.nodes.get(node_id) or NodeObserved(node_id=node_id)

    def changed(self) -> tuple[NodeRecord, ...]:
        return tuple(row for node_id, row in sorted(self.rows.items()) if self.before.get(node_id) != row)

    def move(
        self,
        row: NodeRecord,
        event: NodeEvent,
        reason: causes.Reason,
        *,
        run: RunId | None = None,
        hold: Hold | None = None,
    ) -> None:
        state = advance(NODE_TRANSITIONS, f"node {row.node_id}", row.state, event, (str(row.reason),))
        # Keep a user's pending request for the node (such as to hold it) only if the new state is SPARE or ASSIGNED.
        is_kept = state in (NodeState.SPARE, NodeState.ASSIGNED)
        is_back = state is NodeState.SPARE and row.state is not NodeState.ASSIGNED
        self.rows[row.node_id] = replace(
            row,
            state=state,
            run=run,
            reason=reason,
            since=self.now,
            hold=hold,
            release=row.release if state in (NodeState.DRAINING, NodeState.GONE) else None,
            evidence_at=None,
            request=row.request if is_kept else None,
            burn_in=burn_in.renewed(row.burn_in, self.now) if is_back else row.burn_in,
        )
        message = f"{row.state} → {state}"
        self.events.append(
            EventDraft(type="NodeStateChanged", message=message, reason=reason, node_id=row.node_id, run=run or row.run)
        )

    def in_state(self, *states: NodeState) -> list[NodeRecord]:
        return sorted(
            (row for row in self.rows.values() if row.state in states), key=lambda row: (row.created_at, row.node_id)
        )

    def follow_aws(self) -> None:
        staying = self.seen.group.staying
        # AWS still lists an ended instance for some time.
        joined = [id for id in staying if id not in self.rows and self.node(id).instance is not InstanceCondition.ENDED]
        missing = max(0, self.seen.group.desired_count - len(staying))
        missing += capacity.unknown_count(self.now, self.seen.group, self.seen.launch)
        self.vacancies, filled = capacity.vacancies(self.vacancies, missing=missing, joined=len(joined), now=self.now)
        for node_id, wanted_at in zip_longest(joined, filled):
            self.rows[node_id] = NodeRecord(
                node_id=node_id,
                state=NodeState.JOINING,
                run=None,
                reason=causes.Happened(what=causes.NodeFact.STARTING),
                created_at=self.now,
                wanted_at=wanted_at,
            )
        for row in self.in_state(*NODE_COUNTS_AS_MEMBER):
            node = self.node(row.node_id)
            if node.instance is InstanceCondition.ENDED:
                ended = node.ended or InstanceEnded(node_id=row.node_id, state="ended")
                self.move(row, NodeEvent.ENDED, ended)
            elif row.state is NodeState.JOINING and node.is_connected:
                self.move(row, NodeEvent.CONNECTED, causes.Happened(what=causes.NodeFact.CONNECTED))

    def apply_operator_requests(self) -> None:
        for row in self.in_state(NodeState.HELD):
            if row.release is HoldRelease.RETURN:
                self.move(row, NodeEvent.RELEASED, causes.Happened(what=causes.NodeFact.RELEASED))
            elif row.release is HoldRelease.TERMINATE and not self.lacks_evidence(row):
                released = causes.ReleasedToEnd(held=row.reason, is_replaced=_has_successor(row))
                self.move(row, NodeEvent.EXCLUDED, released)

    def follow_roll(self, policy: Policy, *, is_frozen: bool) -> None:
        """Store the requests of the fleet's roll for single nodes, or withdraw them if a person has stopped it."""
        roll = self.seen.roll
        if roll is None:
            return
        if self.spec.is_deleting:
            roll = replace(roll, is_stopped=True)
        obstacles: Iterable[causes.Obstacle | None] = (
            rolls.obstacle_of(job, [self.node(row.node_id) for row in self._nodes_of(job)])
            for job in self.jobs.values()
        )
        step = rolls.decide(
            self.now,
            roll,
            self.roll_progress,
            self.rows,
            unavailable_count=self._unavailable_count(policy),
            obstacle=causes.FleetFrozen()
            if is_frozen
            else next((each for each in obstacles if each is not None), None),
            refusal=lambda row: requests.refusal(rolls.request_of(roll, row.node_id).request, self._standing(row)),
        )
        for node_id in step.begun:
            self.rows[node_id] = replace(self.rows[node_id], request=rolls.request_of(roll, node_id))
        for node_id in step.cancelled:
            self.rows[node_id] = replace(self.rows[node_id], request=None)
        if step.has_ended:
            self.events.append(EventDraft(type="FleetRollEnded", message=RollEnded(), reason=step.progress.reason))
        self.roll_progress = step.progress

    def _unavailable_count(self, policy: Policy) -> int:
        available = [
            row
            for row in self.in_state(NodeState.SPARE, NodeState.ASSIGNED)
            if row.request is None and is_in_service(self.node(row.node_id), self.now, policy.timeouts)
        ]
        return max(0, min(self.seen.group.max_size, _needed(self.spec, self.seen, self)) - len(available))

    def _standing(self, row: NodeRecord) -> requests.RequestContext:
        job = self.jobs.get(row.run) if row.run is not None else None
        return requests.RequestContext(
            node_id=row.node_id,
            state=row.state,
            hold=row.hold,
            request=None if row.request is None else row.request.request,
            fleet_status=FleetStatus.ACTIVE,
            fleet_reasons=(),
            spare_count=sum(each.request is None for each in self.in_state(NodeState.SPARE)),
            node_count=len(self.in_state(*NODE_COUNTS_AS_MEMBER)),
            max_node_count=self.seen.group.max_size,
            job_name=job.job if job is not None else "",
            taken_over_by="a person" if job is not None and job.is_taken_over else "",
        )

    def follow_requests(self) -> None:
        """Execute people's requests for nodes that work for no job. A spare first deletes its state of a run."""
        for row in self.in_state(NodeState.SPARE):
            if row.request is None or (
                self.node(row.node_id).is_connected and self.node(row.node_id).member is not None
            ):
                continue
            match row.request.request:
                case NodeRequest.DRAIN | NodeRequest.HOLD:
                    self.move(row, NodeEvent.HELD, row.request, hold=Hold.PERSON)
                case NodeRequest.REBOOT:
                    self.move(row, NodeEvent.REBOOTED, row.request)
                case NodeRequest.REPLACE:
                    self.move(row, NodeEvent.EXCLUDED, row.request)
        for row in self.in_state(NodeState.HELD, NodeState.JOINING):
            if row.request is None:
                continue
            if row.request.request is NodeRequest.REPLACE:
                self.move(row, NodeEvent.EXCLUDED, row.request)
            elif row.state is NodeState.HELD:
                self.rows[row.node_id] = replace(row, hold=Hold.PERSON, reason=row.request, request=None)

    def lacks_evidence(self, row: NodeRecord) -> bool:
        """Return whether a failed node with a connected agent must still upload its logs for an inspection."""
        return row.hold is Hold.INSPECTION and row.evidence_at is None and self.node(row.node_id).is_connected

    def follow_jobs(self, policy: Policy) -> None:
        """Remove nodes from jobs that no longer need them.

        Return unreachable nodes to service once they report again.
        """
        for row in self.in_state(NodeState.ASSIGNED):
            job = self.jobs.get(row.run) if row.run is not None else None
            if job is None:
                self.move(row, NodeEvent.RELEASED, causes.Happened(what=causes.NodeFact.JOB_ENDED))
                continue
            if job.state is JobState.QUEUED:
                self.move(row, NodeEvent.RELEASED, causes.JobQueued(job=job.job))
                continue
            excluded = () if job.is_taken_over else job.exclusions
            exclusion = next((exclusion for exclusion in excluded if exclusion.node_id == row.node_id), None)
            if exclusion is not None:
                why = causes.GivenUp(job=job.job, remedy=exclusion.is_to, because=exclusion.evidence)
                self.take_out(row, exclusion.is_to, why)
        for row in self.in_state(NodeState.HELD):
            if row.hold is Hold.UNREACHABLE and is_ready(self.node(row.node_id), self.now, policy.timeouts):
                self.move(row, NodeEvent.RELEASED, causes.Happened(what=causes.NodeFact.REPORTS_AGAIN))

    def follow_burn_ins(self) -> None:
        for row in self.in_state(NodeState.SPARE):
            node = self.node(row.node_id)
            if node.is_connected and node.has_reported:
                others = self._other_results(row, node.burn_in)
                before = pair_tests.follow(row.burn_in, node, since=row.since, now=self.now)
                after = burn_in.follow(before, node, others, since=row.since, now=self.now)
                self.rows[row.node_id] = replace(row, burn_in=after)
        self.pair_rates = pair_tests.rates_of(tuple(self.rows.values()), self.now)

    def _other_results(self, row: NodeRecord, *newest: BurnInResult | None) -> list[BurnInResult]:
        """Return the results with which those of a node are compared. Empty if the node is as fast as the best one."""
        own = [row.burn_in.result if row.burn_in is not None else None, *newest]
        if not any(each is not None and burn_in.may_be_slow(each, self._best_rates) for each in own):
            return []
        return [result for node_id, result in self._results() if node_id != row.node_id]

    def _may_hold_slow_nodes(self) -> bool:
        slow = [row for row in self.in_state(NodeState.HELD) if isinstance(row.reason, SlowNode)]
        return len(slow) < max(1, int(len(self.rows) * burn_in.MOST_SLOW_SHARE))

    def _results(self) -> Iterator[tuple[NodeId, BurnInResult]]:
        for each in self.rows.values():
            if each.burn_in is not None and each.burn_in.result is not None:
                yield each.node_id, each.burn_in.result

    @cached_property
    def _best_rates(self) -> Mapping[str, int]:
        return burn_in.best_rates(result for _, result in self._results())

    def follow_faults(self, policy: Policy, *, is_blind: bool) -> None:
        """Remove spares that are faulty, slow, silent or lemons from service, and return repaired nodes to service."""
        for row in self.in_state(NodeState.SPARE):
            node = self.node(row.node_id)
            if is_silent(node, policy.timeouts):
                if node.silent_seconds > policy.timeouts.exclude_seconds and not is_blind:
                    self.take_out(row, Remedy.HOLD, causes.Silent(seconds=policy.timeouts.exclude_seconds))
                elif node.failed_status_check and not is_blind:
                    self.take_out(row, Remedy.HOLD, causes.Silent(text=node.failed_status_check))
            elif (found := remedies.worst(_all_faults(row, node), node.history, self.now)) is not None:
                self.take_out(row, found.remedy, found.fault)
                self._implicate(row, found.what, found.fault, found.remedy)
            elif self._may_hold_slow_nodes() and (
                (slow := burn_in.slowness(row.burn_in, self._other_results(row))) is not None
                or (slow := pair_tests.slowness(row.node_id, self.pair_rates)) is not None
            ):
                self.take_out(row, Remedy.RETIRE, slow)
                self._implicate(row, FaultCode.NODE_SLOW, slow, Remedy.RETIRE)
            elif (why := remedies.lemon(row.node_id, node.history, self.now)) is not None:
                self.take_out(row, remedies.of_lemon(node.history, self.now), why)
        for row in self.in_state(NodeState.REBOOTING):
            node = self.node(row.node_id)
            rebooted_at = self.seen.rebooted.get(row.node_id)
            is_new = rebooted_at is not None and row.connected_at is not None and row.connected_at > rebooted_at
            is_back = node.is_connected and node.has_reported and is_new
            found = remedies.worst(node.faults, node.history, self.now) if is_back else None
            if found is not None:
                self.take_out(row, Remedy.REPLACE, causes.StillFaulty(fault=found.fault))
            elif is_back:
                self.move(row, NodeEvent.CONNECTED, causes.Happened(what=causes.NodeFact.REPAIRED))
            elif self._waited_seconds(row, row.since if rebooted_at is None else rebooted_at) > REBOOT_SECONDS:
                is_accepted = rebooted_at is not None
                why_lost = causes.NotRebooted(is_accepted=is_accepted, seconds=REBOOT_SECONDS, because=row.reason)
                self.take_out(row, Remedy.REPLACE, why_lost)

    def _waited_seconds(self, row: NodeRecord, since: float) -> float:
        """Return how long the fleet has waited for a report that this control plane could have received."""
        node = self.node(row.node_id)
        if node.is_connected:
            return self.now - max(since, row.connected_at or since)
        return min(self.now - since, node.silent_seconds)

    def take_out(self, row: NodeRecord, remedy: Remedy, reason: causes.Reason) -> None:
        match remedy:
            case Remedy.RELEASE:
                self.move(row, NodeEvent.RELEASED, reason)
            case Remedy.HOLD:
                self.move(row, NodeEvent.HELD, reason, hold=Hold.UNREACHABLE)
            case Remedy.RETIRE:
                self.move(row, NodeEvent.HELD, reason, hold=Hold.DISTRUSTED)
            case Remedy.REBOOT:
                self.move(row, NodeEvent.REBOOTED, reason)
            case Remedy.TERMINATE:
                self.move(row, NodeEvent.EXCLUDED, reason)
            case _ if not self.spec.holds_failed_instances:
                self.move(row, NodeEvent.EXCLUDED, reason)
            case _:
                self._inspect(row, reason)

    def _inspect(self, row: NodeRecord, reason: causes.Reason) -> None:
        """Hold a failed node for inspection, or terminate it if the group's MaxSize leaves no room."""
        most = self.seen.group.max_size
        needed, held = _needed(self.spec, self.seen, self), len(self.in_state(NodeState.HELD))
        if needed + held + 1 <= most:
            self.move(row, NodeEvent.HELD, causes.KeptForInspection(because=reason), hold=Hold.INSPECTION)
        else:
            no_room = causes.NotKept(because=reason, max_size=most, needed_count=needed, held_count=held)
            self.move(row, NodeEvent.EXCLUDED, no_room)

    def _implicate(self, row: NodeRecord, what: str, evidence: Fact, remedy: Remedy) -> None:
        self.implications.append(
            Implication(
                node_id=row.node_id,
                incident_id=f"fleet-{self.spec.name}-{int(self.now)}",
                at=self.now,
                what=what,
                evidence=evidence,
                is_own_word=remedy is not Remedy.RETIRE,
                remedy=remedy,
            )
        )

    def replace_within_limit(self, *, is_frozen: bool) -> None:
        """Mark the nodes whose replacements the fleet now requests. The others wait for the hourly limit."""
        room = self.spec.max_replacements_per_hour - sum(
            self.now - at <= RATE_WINDOW_SECONDS for at in self.seen.replaced
        )
        for row in self.waiting():
            if (row.state is NodeState.HELD or not is_frozen) and (room > 0 or self.spec.is_deleting):
                self.rows[row.node_id] = replace(row, replaced_at=self.now)
                room -= 1

    def waiting(self) -> list[NodeRecord]:
        """Return the nodes out of service without a requested replacement, if the hourly limit applies to them."""
        out = self.in_state(NodeState.DRAINING, NodeState.HELD)
        return [
            row
            for row in out
            if not _has_successor(row)
            and not isinstance(row.reason, causes.Surplus)
            and not _is_announced(row)
            and not rolls.is_rolled(row)
        ]

    def assign(self, policy: Policy) -> None:
        """Assign spares: to recovering jobs, to smaller jobs, for moves, to complete new jobs, and last for growth."""
        idle = [
            row
            for row in self.in_state(NodeState.SPARE)
            if is_ready(self.node(row.node_id), self.now, policy.timeouts)
            and burn_in.is_fit(row.burn_in, self.node(row.node_id), self.now)
        ]
        holding = in_order(job for job in self.jobs.values() if job.state in HOLDING_JOBS and not job.is_taken_over)
        launched = [job for job in holding if job.state in LAUNCHED_JOBS]
        counts = self.counts()
        claims = {job.run: min(counts[job.run], job.claim_count(self.now)) for job in holding}
        for job in launched:
            self._give(job, idle, job.needed_count(self.now) - len(self._nodes_of(job)))
        for job in launched:
            self._give(job, idle, claims[job.run] - len(self._nodes_of(job)))
        for job in launched:
            self._give(job, idle, claims[job.run] + len(self._leaving(job)) - len(self._nodes_of(job)))
        for job in (job for job in holding if job.state is JobState.ALLOCATING):
            if job.needed_count(self.now) - len(self._nodes_of(job)) > len(self._welcome(job, idle)):
                return
            self._give(job, idle, claims[job.run] - len(self._nodes_of(job)))
        spares = spare_count(self.spec, self.seen.history, sum(counts.values()))
        for job in launched:
            wanted = counts[job.run] + len(self._leaving(job)) - len(self._nodes_of(job))
            self._give(job, idle, min(wanted, len(idle) - spares))

    def _give(self, job: FleetJob, idle: list[NodeRecord], count: int) -> None:
        team = Counter(self.node(row.node_id).domain for row in self._nodes_of(job))
        for _ in range(min(count, len(self._welcome(job, idle)))):
            row = min(self._welcome(job, idle), key=lambda row: self._rank(row, job, team))
            idle.remove(row)
            team[self.node(row.node_id).domain] += job.state is not JobState.ALLOCATING
            self.move(row, NodeEvent.ASSIGNED, causes.WorksFor(job=job.job), run=job.run)

    def _welcome(self, job: FleetJob, idle: list[NodeRecord]) -> list[NodeRecord]:
        # Nodes that the job gave up never return to it.
        excluded = {exclusion.node_id for exclusion in job.exclusions}
        return [row for row in idle if row.node_id not in excluded]

    def _rank(self, row: NodeRecord, job: FleetJob, team: Mapping[str | None, int]) -> tuple[bool, bool, bool, int]:
        node = self.node(row.node_id)
        # A recovering job prefers the failure domains where it has the fewest nodes, so that copies of a shard are
        # apart. A warm node has finished the imports of a rank, which take seconds. Nodes with a notice are the last
        # choice.
        crowd = team.get(node.domain, 0) if node.domain is not None else 0
        return bool(node.notices), row.node_id in job.avoided, not node.is_warm, crowd

    def _nodes_of(self, job: FleetJob) -> list[NodeRecord]:
        return [row for row in self.in_state(NodeState.ASSIGNED) if row.run == job.run]

    def _leaving(self, job: FleetJob) -> list[NodeRecord]:
        """Return the nodes that a job must give up: nodes that AWS will reclaim, and its own choices in training."""
        if job.state not in LAUNCHED_JOBS or job.state is JobState.STOPPING or job.is_taken_over:
            return []
        moving = {move.node_id for move in job.moves if not move.is_returned} if job.state is JobState.RUNNING else ()
        return [
            row
            for row in self._nodes_of(job)
            if row.node_id in moving or notices.urgent(self.node(row.node_id), self.now) is not None
        ]

    def leaving(self) -> tuple[int, int]:
        """Return how many nodes all jobs must give up: nodes that AWS will reclaim, and other nodes."""
        # The first number excludes nodes that their Auto Scaling group already terminates.
        gone = {member.node_id for member in self.seen.group.members if member.is_leaving}
        rows = [row for job in self.jobs.values() for row in self._leaving(job)]
        taken = {row.node_id for row in rows if notices.urgent(self.node(row.node_id), self.now) is not None}
        return len(taken - gone), len(rows) - len(taken)

    def take_back(self) -> None:
        """Make assigned nodes spares again that their jobs no longer need and whose agents hold no state yet."""
        counts = self.counts()
        for job in (job for job in self.jobs.values() if job.state is JobState.RUNNING and not job.is_taken_over):
            extra = len(self._nodes_of(job)) - counts[job.run] - len(self._leaving(job))
            free = [
                row
                for row in self._nodes_of(job)
                if self.node(row.node_id).member is None and self.node(row.node_id).has_reported
            ]
            for row in free[: max(0, extra)]:
                self.move(row, NodeEvent.RELEASED, causes.Happened(what=causes.NodeFact.UNNEEDED))

    def failed_join_count(self) -> int:
        leaving = [row for row in self.in_state(NodeState.DRAINING) if not isinstance(row.reason, causes.Surplus)]
        return self.seen.failed_join_count + sum(row.connected_at is None for row in leaving)

    def join_seconds(self) -> float:
        return JOIN_SECONDS * 2.0 ** min(self.failed_join_count(), MOST_DOUBLINGS)

    def give_up_joining(self) -> None:
        # The limit doubles for each such instance in a row: if all fail, for example by their user data, only a person
        # can help.
        patience = self.join_seconds()
        settled = {
            member.node_id
            for member in self.seen.group.members
            if not member.is_leaving and not member.lifecycle_state.startswith("Pending")
        }
        for row in self.in_state(NodeState.JOINING):
            node = self.node(row.node_id)
            is_there = node.instance is InstanceCondition.PRESENT and row.node_id in settled
            if is_there and self._waited_seconds(row, row.created_at) > patience:
                self.move(row, NodeEvent.EXCLUDED, causes.NotJoined(seconds=patience))
                return

    def retire_announced(self) -> None:
        members = set(self.seen.group.staying)
        idle = [
            row
            for row in self.in_state(NodeState.SPARE)
            if row.node_id in members and self.node(row.node_id).member is None
        ]
        is_settled = not self.in_state(NodeState.JOINING, NodeState.REBOOTING, NodeState.DRAINING)
        is_whole = len(members) >= self.seen.group.desired_count and is_settled
        for row in idle:
            node = self.node(row.node_id)
            notice = notices.urgent(node, self.now)
            if notice is None and is_whole:
                notice = next(iter(node.notices), None)
                is_whole = notice is None
            # An ending capacity block provides no replacement, so its nodes stay.
            if notice is not None and notice.kind is not NoticeKind.CAPACITY_BLOCK_END:
                self.move(row, NodeEvent.EXCLUDED, notices.announced(row.node_id, notice))


def _all_faults(row: NodeRecord, node: NodeObserved) -> tuple[NodeFault, ...]:
    failed = burn_in.failure(row.burn_in)
    return node.faults if failed is None else (*node.faults, failed)


def _has_successor(row: NodeRecord) -> bool:
    if isinstance(row.reason, causes.ReleasedToEnd) and row.reason.is_replaced:
        return True
    return row.replaced_at is not None and row.replaced_at >= row.since


def _is_announced(row: NodeRecord) -> bool:
    """Return whether AWS announced the end of a node. Its termination does not count against the hourly limit."""
    return any(
        isinstance(reason, Announced) or (isinstance(reason, causes.GivenUp) and reason.remedy is Remedy.TERMINATE)
        for reason in causes.origins(row.reason)
    )


def _needed(spec: FleetSpec, seen: FleetObserved, table: _Table) -> int:
    wanted = sum(table.counts().values())
    spares = spare_count(spec, seen.history, wanted)
    # A reclaimed node adds one, because its replacement is requested while it still works. For other departures a spare
    # takes over, or the fleet requests more nodes within the hourly limit.
    taken, moving = table.leaving()
    room = max(0, spec.max_replacements_per_hour - len(seen.replaced))
    return max(spec.min_node_count, wanted) + max(spares, min(moving, spares + room)) + taken


def _desired(spec: FleetSpec, seen: FleetObserved, table: _Table) -> int:
    # A held node and its replacement both belong to the group.
    held = sum(_has_successor(row) for row in table.in_state(NodeState.HELD))
    return max(seen.group.min_size, min(seen.group.max_size, _needed(spec, seen, table) + held))


def first_desired(spec: FleetSpec, *, min_size: int, max_size: int) -> int:
    """Return the first desired capacity of a fleet without jobs and history, within the group's sizes."""
    return max(min_size, min(max_size, spec.min_node_count + spare_count(spec, FleetHistory(), 0)))


def _without_hope(group: GroupObserved, desired: int) -> int:
    """Return the group's desired capacity without pending launches that the fleet no longer needs."""
    # Below the number of existing instances, Auto Scaling would choose instances and end them.
    return max(group.min_size, min(group.desired_count, max(desired, len(group.staying))))


def _ended_members(
    spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int, lowerable: int
) -> list[FleetAction]:
    """Return the actions that remove ended members from the group. `lowerable` removals lower the desired capacity."""
    actions: list[FleetAction] = []
    extra = max(seen.group.desired_count - desired, lowerable)
    for member in seen.group.members:
        if member.is_leaving or table.node(member.node_id).instance is not InstanceCondition.ENDED:
            continue
        decrement = extra > 0 and seen.group.desired_count > seen.group.min_size
        extra -= decrement
        ended = table.node(member.node_id).ended
        reason = ended or InstanceEnded(node_id=member.node_id, state="ended")
        actions.append(TerminateMember(group=spec.group, node_id=member.node_id, decrement=decrement, reason=reason))
    return actions


def _tries(now: float, spec: FleetSpec, group: GroupObserved) -> list[FleetAction]:
    """Return the retries of failed launches, and resume launches that AWS, not a user, suspended."""
    is_missing = len(group.staying) < group.desired_count
    if not is_missing or spec.is_deleting or now < (capacity.retry_at(group) or now):
        return []
    if group.launch_suspension is not None:
        return (
            [ResumeLaunch(group=spec.group, reason=group.launch_suspension)]
            if group.is_suspension_administrative
            else []
        )
    if group.failed_at is None:
        return []
    return [RetryLaunch(group=spec.group, desired_count=group.desired_count, failed_at=group.failed_at)]


def _held_back(
    spec: FleetSpec, group: GroupObserved, table: _Table, policy: Policy, *, is_blind: bool
) -> list[FleetAction]:
    actions: list[FleetAction] = []
    asked_at = {
        move.node_id: move.asked_at for job in table.jobs.values() for move in job.moves if move.asked_at is not None
    }
    for member in group.members:
        if not member.awaits_termination:
            continue
        node_id, node = member.node_id, table.node(member.node_id)
        is_used = node_id in table.rows and table.rows[node_id].state is NodeState.ASSIGNED
        is_dead = (
            not is_blind
            and not node.is_connected
            and node.silent_seconds > policy.timeouts.coordinator_deadline_seconds
        )
        for hook in group.termination_hooks:
            # No job uses the instance, or its agent is silent too long, so AWS may end it.
            if not is_used or is_dead:
                actions.append(CompleteTermination(group=spec.group, hook=hook, node_id=node_id))
            # The job leaves the instance at an agreed stop.
            elif node_id in asked_at and table.now - asked_at[node_id] < HOLD_SECONDS:
                actions.append(
                    HoldTermination(group=spec.group, hook=hook, node_id=node_id, seconds=group.hook_seconds)
                )
    return actions


def _releases(seen: FleetObserved, table: _Table, policy: Policy) -> list[FleetAction]:
    actions: list[FleetAction] = []
    for node_id, node in sorted(seen.nodes.items()):
        row = table.rows.get(node_id)
        if (
            node.member is None
            or not node.is_connected
            or is_silent(node, policy.timeouts)
            or row is None
            or row.run == node.member.run
        ):
            continue
        # Running ranks are killed with their output kept. Only then is the state deleted.
        if node.member.phase is MemberPhase.RUNNING:
            actions.append(
                Send(
                    node_id,
                    HaltRanks(
                        job=node.member.job,
                        run=node.member.run,
                        generation=node.member.generation,
                        reason="the node no longer works for this job",
                    ),
                )
            )
        else:
            release = Release(run=node.member.run, unstored_count=len(node.member.unstored))
            actions.append(Send(node_id, release))
    return actions


def _sources(table: _Table, policy: Policy) -> list[Send]:
    """Return orders to spares to download source archives in advance, for the jobs that need nodes soonest."""
    held: dict[str, SourceArchive] = {}
    for job in in_order(job for job in table.jobs.values() if not job.is_paused or job.state in LAUNCHED_JOBS):
        is_room = (
            len(held) < MOST_SOURCES
            and job.source is not None
            and sum(each.bytes for each in held.values()) + job.source.bytes <= MOST_SOURCE_BYTES
        )
        if job.source is not None and is_room:
            held.setdefault(job.source.sha256, job.source)
    spares = [(row.node_id, table.node(row.node_id)) for row in table.in_state(NodeState.SPARE)]
    return [
        Send(node_id, KeepSources(sources=tuple(held.values())))
        for node_id, node in spares
        if node.is_connected
        and node.has_reported
        and node.member is None
        and not is_silent(node, policy.timeouts)
        and node.sources != held.keys()
    ]


def _burn_ins(table: _Table) -> list[Send]:
    paired = pair_tests.due(tuple(table.rows.values()), table.node, table.pair_rates, table.now)
    table.rows |= {row.node_id: row for row in paired}
    rows = table.in_state(NodeState.SPARE)
    orders = {
        row.node_id: burn_in.order(row.burn_in, table.node(row.node_id), since=row.since, now=table.now) for row in rows
    }
    return [Send(node_id, order) for node_id, order in orders.items() if order is not None]


def _reboots(spec: FleetSpec, table: _Table) -> list[FleetAction]:
    """Return the actions that reboot nodes, repeated until EC2 has accepted each."""
    # A new connection of the agent proves no reboot: a restart of the control plane also causes new connections.
    return [
        RebootMember(group=spec.group, node_id=row.node_id, since=row.since, reason=row.reason)
        for row in table.in_state(NodeState.REBOOTING)
        if row.node_id not in table.seen.rebooted
    ]


def _evidence(table: _Table) -> list[FleetAction]:
    rows = [row for row in table.in_state(NodeState.HELD) if table.lacks_evidence(row)]
    return [SendKeepEvidence(node_id=row.node_id) for row in rows]


def _drained(spec: FleetSpec, group: GroupObserved, table: _Table, extra: int) -> list[TerminateMember]:
    """Return the terminations of DRAINING nodes that are not surplus. The first `extra` lower the desired capacity."""
    staying = set(group.staying)
    due = [
        row
        for row in table.in_state(NodeState.DRAINING)
        if row.node_id in staying and not isinstance(row.reason, causes.Surplus)
    ]
    ended = [row for row in due if _has_successor(row) or _is_announced(row) or rolls.is_rolled(row)]
    return [
        TerminateMember(group=spec.group, node_id=row.node_id, decrement=place < extra, reason=row.reason)
        for place, row in enumerate(ended)
    ]


def _surplus(table: _Table, desired: int, extra: int, room: int) -> list[FleetAction]:
    """Return the terminations of `extra` surplus nodes. The first `room` lower the desired capacity."""
    spec = table.spec
    members = set(table.seen.group.staying)
    pending = [
        row
        for row in table.in_state(NodeState.DRAINING)
        if isinstance(row.reason, causes.Surplus) and row.node_id in members
    ]
    extra -= len(pending)
    idle = [row for row in table.in_state(NodeState.SPARE) if row.node_id in members]
    if spec.is_deleting:
        idle = [*idle, *(row for row in table.in_state(NodeState.JOINING, NodeState.HELD) if row.node_id in members)]
    for row in sorted(
        idle, key=lambda row: (bool(table.node(row.node_id).notices), row.created_at, row.node_id), reverse=True
    )[: max(0, extra)]:
        table.move(row, NodeEvent.EXCLUDED, causes.Surplus(desired_count=desired))
        pending.append(table.rows[row.node_id])
    # Sort the nodes, so that repeated decisions terminate the same nodes.
    pending.sort(key=lambda row: (row.created_at, row.node_id), reverse=True)
    # Auto Scaling does not replace members beyond its desired capacity, so only the first `room` lower it.
    return [
        TerminateMember(group=spec.group, node_id=row.node_id, decrement=place < room, reason=row.reason)
        for place, row in enumerate(pending)
    ]


def _reasons(
    spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int, *, is_blind: bool
) -> tuple[causes.Reason, ...]:
    reasons: list[causes.Reason] = []
    if seen.group.drift:
        reasons.append(causes.Drifted(drift=seen.group.drift))
    if spec.is_deleting and desired:
        reasons.append(causes.CannotBeDeleted(min_size=desired))
    if is_blind:
        reasons.append(causes.Blind())
    recent, limit = sum(table.now - at <= RATE_WINDOW_SECONDS for at in seen.replaced), spec.max_replacements_per_hour
    if (waiting := table.waiting()) and recent >= limit:
        names = tuple(row.node_id for row in waiting)
        reasons.append(causes.ReplacementLimit(node_ids=names, recent_count=recent, limit=limit))
    if count := table.failed_join_count():
        reasons.append(causes.JoinsFail(count=count, patience_seconds=table.join_seconds()))
    missing = desired - len(seen.group.staying)
    if missing > 0 and (failure := capacity.failure(seen.group)) is not None:
        reasons.append(causes.LacksInstances(missing_count=missing, because=failure))
    return tuple(reasons) or (causes.Keeps(desired_count=desired, spare_probability=spec.spare_probability),)
