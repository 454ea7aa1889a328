"""What to do about a fleet: the `decide` of the fleet loop, the only writer of desired capacity and of who works for whom.

    desired capacity = max(floor, nodes of all admitted jobs) + spares + held nodes, within the group's own limits
    up      SetDesired
    down    end named idle nodes, one by one, capacity with them
    ended   a member that AWS reports ended is removed by name: that is what brings its replacement

Who leaves a job or stops being a spare goes where its remedy says: back among the spares, held, rebooted, or ended. What Everstep itself takes out of
a fleet within an hour is limited: a verdict that is wrong everywhere must not empty the fleet.

Invariant: a node works for one job at most, a gang starts whole or not at all, recovering jobs come before queued ones, and nothing is ended while
the group is not as the contract says or most of the fleet is silent, except what AWS says is ending anyway. Nothing is ended for a verdict that
`may_terminate` does not stand in, unless a person says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from control_plane.core import remedies
from control_plane.core.actions import (
    CompleteTermination,
    EventDraft,
    FleetAction,
    FleetDecision,
    RebootMember,
    SendHalt,
    SendKeepEvidence,
    SendRelease,
    SetDesired,
    TerminateMember,
)
from control_plane.core.evidence import is_fleet_blind, is_silent
from control_plane.core.observed import (
    Exclusion,
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupObserved,
    Hold,
    Implication,
    InstanceCondition,
    NodeObserved,
    NodeRecord,
    Policy,
    Remedy,
)
from control_plane.core.spares import spare_count
from control_plane.core.states import HOLDING_JOBS, LAUNCHED_JOBS, NODE_TRANSITIONS, JobState, NodeEvent, NodeState, advance
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import NodeId, RunId
from everstep.protocol.plan import Timeouts

NODE_COUNTS_AS_MEMBER = frozenset(NodeState) - {NodeState.GONE}
REBOOT_SECONDS = 900.0
"""An instance whose agent has not dialled in again by then does not come back. Bare-metal and large GPU instances take up to a quarter of an hour."""
RATE_WINDOW_SECONDS = 3600.0
NOT_REPLACED = "not replaced"
"""In a fleet's reason while its limit holds."""


def decide(now: float, spec: FleetSpec, observed: FleetObserved, policy: Policy) -> FleetDecision:
    """Return what is to be done about a fleet.

    Called by the fleet loop, once per pass.

    Args:
        now: Unix seconds.
        spec: what the user wants of the fleet.
        observed: its group, its node table, its agents and its jobs.
        policy: the timeouts.

    Returns:
        Rows of the node table to write and actions to take; both empty when all is as it should be.

    Raises:
        InvalidTransition: the node table and the observation contradict each other.
    """
    table = _Table(now, spec, observed)
    table.follow_aws()
    in_use = [table.node(row.node_id) for row in table.in_state(NodeState.SPARE, NodeState.ASSIGNED)]
    has_no_sight = is_fleet_blind(in_use, policy.timeouts)
    is_blind = has_no_sight and not spec.is_blindness_lifted
    is_frozen = bool(observed.group.drift) or is_blind
    table.follow_people()
    table.follow_jobs(policy)
    table.follow_faults(policy, is_blind=is_blind)
    table.assign(policy)
    table.replace_within_limit(is_frozen=is_frozen)
    desired = 0 if spec.is_deleting else _desired(spec, observed, table.rows.values())
    actions = [
        *_ended_members(spec, observed, table, desired),
        *_evidence(table),
        *_held_back(spec, observed.group, table),
        *_releases(observed, table, policy),
    ]
    if observed.group.desired_count < desired:
        actions.append(SetDesired(group=spec.group, desired_count=desired))
    if not is_frozen:
        actions += _reboots(spec, table)
        drained = _drained(spec, observed.group, table, desired)
        actions += drained
        actions += _surplus(spec, observed, table, desired, gone_count=sum(action.decrement for action in drained))
    return FleetDecision(
        records=table.changed(),
        actions=tuple(actions),
        desired_count=desired,
        is_frozen=is_frozen,
        is_blind=has_no_sight,
        reason=_reason(spec, observed, table, desired, is_blind=is_blind),
        implications=tuple(table.implications),
        events=tuple(table.events),
        forgotten=tuple(row.node_id for row in table.changed() if row.state is NodeState.GONE),
        is_empty=spec.is_deleting and not observed.group.members and all(row.state is NodeState.GONE for row in table.rows.values()),
    )


def admitted(jobs: Iterable[FleetJob], max_size: int) -> frozenset[RunId]:
    """Return the runs that may hold nodes: those that do, then the queue in order as far as the group can grow.

    The queue is strictly in order (priority, then age): a job that does not fit holds back those behind it, or large jobs would starve.

    Args:
        jobs: of one fleet, those that have not ended.
        max_size: of its group.

    Returns:
        The runs that capacity is asked for.
    """
    jobs = tuple(jobs)
    runs = {job.run for job in jobs if job.state in HOLDING_JOBS}
    room = max_size - sum(job.node_count for job in jobs if job.run in runs)
    for job in in_order(job for job in jobs if job.state is JobState.QUEUED):
        if job.node_count > room:
            break
        room -= job.node_count
        runs.add(job.run)
    return frozenset(runs)


def in_order(jobs: Iterable[FleetJob]) -> list[FleetJob]:
    """Return jobs as they are served: recovering ones, then by priority, then by age."""
    return sorted(jobs, key=lambda job: (job.state not in LAUNCHED_JOBS, -job.priority, job.created_at, job.run))


def is_idle(node: NodeObserved, timeouts: Timeouts) -> bool:
    """Say whether a node is there and works for nobody: it could be given to a job at once."""
    is_there = node.is_connected and node.has_reported and not is_silent(node, timeouts)
    return is_there and node.member is None and node.instance is InstanceCondition.PRESENT


class _Table:
    """The node table during one pass."""

    def __init__(self, now: float, spec: FleetSpec, observed: FleetObserved) -> None:
        self.now = now
        self.spec = spec
        self.seen = observed
        self.before = {row.node_id: row for row in observed.records}
        self.rows = dict(self.before)
        self.events: list[EventDraft] = []
        self.implications: list[Implication] = []
        self.jobs: Mapping[RunId, FleetJob] = {job.run: job for job in observed.jobs}

    def node(self, node_id: NodeId) -> NodeObserved:
        return self.seen.nodes.get(node_id, NodeObserved(node_id=node_id))

    def changed(self) -> tuple[NodeRecord, ...]:
        return tuple(row for node_id, row in sorted(self.rows.items()) if self.before.get(node_id) != row)

    def move(self, row: NodeRecord, event: NodeEvent, reason: str, *, run: RunId | None = None, hold: Hold | None = None) -> None:
        state = advance(NODE_TRANSITIONS, f"node {row.node_id}", row.state, event, (row.reason,))
        self.rows[row.node_id] = replace(row, state=state, run=run, reason=reason, since=self.now, hold=hold, release="", evidence_at=None)
        self.events.append(EventDraft(type="NodeStateChanged", message=f"{row.state} → {state}: {reason}", node_id=row.node_id))

    def in_state(self, *states: NodeState) -> list[NodeRecord]:
        return sorted((row for row in self.rows.values() if row.state in states), key=lambda row: (row.created_at, row.node_id))

    def follow_aws(self) -> None:
        """Take in new members, connections, and what AWS has ended."""
        for member in self.seen.group.members:
            if member.node_id not in self.rows and not member.is_leaving:
                row = NodeRecord(node_id=member.node_id, state=NodeState.JOINING, run=None, reason="its instance is starting", created_at=self.now)
                self.rows[member.node_id] = row
        for row in self.in_state(*NODE_COUNTS_AS_MEMBER):
            node = self.node(row.node_id)
            if node.instance is InstanceCondition.ENDED:
                self.move(row, NodeEvent.ENDED, f"EC2: {node.instance_words or 'ended'}")
            elif row.state is NodeState.JOINING and node.is_connected:
                self.move(row, NodeEvent.CONNECTED, "its agent is connected")

    def follow_people(self) -> None:
        """Do what people want of held nodes: let them work again, or end them."""
        for row in self.in_state(NodeState.HELD):
            if row.release == "return":
                self.move(row, NodeEvent.RELEASED, "a person released it")
            elif row.release == "terminate" and not self._lacks_evidence(row):
                self.move(row, NodeEvent.EXCLUDED, f"a person released it, to be ended; it was held: {row.reason}")
                if _has_successor(row):  # it counts as replaced already
                    self.rows[row.node_id] = replace(self.rows[row.node_id], replaced_at=self.now)

    def _lacks_evidence(self, row: NodeRecord) -> bool:
        """Say whether an instance that is kept for inspection still has something to tell, and somebody there to tell it."""
        return row.hold is Hold.INSPECTION and row.evidence_at is None and self.node(row.node_id).is_connected

    def follow_jobs(self, policy: Policy) -> None:
        """Take nodes back from jobs that ended or excluded them; take held ones back once they answer again."""
        for row in self.in_state(NodeState.ASSIGNED):
            job = self.jobs.get(row.run) if row.run is not None else None
            if job is None:
                self.move(row, NodeEvent.RELEASED, "its job has ended")
                continue
            exclusion = next((exclusion for exclusion in job.exclusions if exclusion.node_id == row.node_id), None)
            if exclusion is not None:
                self.take_out(row, exclusion.is_to, _excluded(job, exclusion))
        for row in self.in_state(NodeState.HELD):
            if row.hold is Hold.UNREACHABLE and self._is_idle(row.node_id, policy):
                self.move(row, NodeEvent.RELEASED, "its agent is heard again and works for nobody")

    def follow_faults(self, policy: Policy, *, is_blind: bool) -> None:
        """Take out spares that are no use: faulty, silent for T_max, or implicated too often; take back or give up those that were rebooted."""
        for row in self.in_state(NodeState.SPARE):
            node = self.node(row.node_id)
            if is_silent(node, policy.timeouts):
                if node.silent_seconds > policy.timeouts.exclude_seconds and not is_blind:
                    self.take_out(row, Remedy.HOLD, f"unreachable: its agent has been silent for more than {policy.timeouts.exclude_seconds:g} s")
            elif (found := remedies.worst(node.faults, node.history, self.now)) is not None:
                self.take_out(row, found.remedy, f"its agent reports {found.words}")
                self._implicate(row, found)
            elif (why := remedies.lemon(node.history, self.now)) is not None:
                self.take_out(row, remedies.of_lemon(node.history, self.now), f"not used again: {why}")
        for row in self.in_state(NodeState.REBOOTING):
            node = self.node(row.node_id)
            is_back = node.is_connected and node.has_reported and row.connected_at is not None and row.connected_at > row.since
            found = remedies.worst(node.faults, node.history, self.now) if is_back else None
            if found is not None:
                self.take_out(row, Remedy.REPLACE, f"rebooted, and its agent still reports {found.words}")
            elif is_back:
                self.move(row, NodeEvent.CONNECTED, "rebooted, and its agent is connected again without the fault")
            elif self.now - row.since > REBOOT_SECONDS:
                self.take_out(row, Remedy.REPLACE, f"did not come back within {REBOOT_SECONDS:g} s of its reboot: {row.reason}")

    def take_out(self, row: NodeRecord, remedy: Remedy, reason: str) -> None:
        """Let a node go where its remedy says."""
        match remedy:
            case Remedy.RELEASE:
                self.move(row, NodeEvent.RELEASED, reason)
            case Remedy.HOLD:
                self.move(row, NodeEvent.HELD, reason, hold=Hold.UNREACHABLE)
            case Remedy.RETIRE:
                self.move(row, NodeEvent.HELD, reason, hold=Hold.DISTRUSTED)
            case Remedy.REBOOT:
                self.move(row, NodeEvent.REBOOTED, reason)
            case _ if not self.spec.holds_failed_instances:
                self.move(row, NodeEvent.EXCLUDED, reason)
            case _ if (refusal := self._no_room_to_hold()) is not None:
                self.move(row, NodeEvent.EXCLUDED, f"{reason}; {refusal}")
            case _:
                self.move(row, NodeEvent.HELD, f"kept for inspection: {reason}", hold=Hold.INSPECTION)

    def _no_room_to_hold(self) -> str | None:
        """Return why one more instance cannot be kept for inspection, with the figures, or None: held ones take places of the group."""
        needed, held = _needed(self.spec, self.seen), len(self.in_state(NodeState.HELD))
        if needed + held + 1 <= self.seen.group.max_size:
            return None
        return f"not kept for inspection: the group has {self.seen.group.max_size} places, jobs and spares need {needed}, {held} are held already"

    def _implicate(self, row: NodeRecord, found: remedies.Finding) -> None:
        self.implications.append(
            Implication(
                node_id=row.node_id,
                incident_id=f"fleet-{self.spec.name}-{int(self.now)}",
                at=self.now,
                what=found.what,
                evidence=found.words,
                is_own_word=True,
                remedy=found.remedy,
            )
        )

    def replace_within_limit(self, *, is_frozen: bool) -> None:
        """Note whom another node is asked for in place of, as many within an hour as the fleet allows; the others wait as they are."""
        room = self.spec.max_replacements_per_hour - sum(self.now - at <= RATE_WINDOW_SECONDS for at in self.seen.replaced)
        for row in self.waiting():
            if (row.state is NodeState.HELD or not is_frozen) and (room > 0 or self.spec.is_deleting):
                self.rows[row.node_id] = replace(row, replaced_at=self.now)
                room -= 1

    def waiting(self) -> list[NodeRecord]:
        """Return whom nobody was asked for in place of yet."""
        out = self.in_state(NodeState.DRAINING, NodeState.HELD)
        return [row for row in out if not _has_successor(row) and not row.reason.startswith(_SURPLUS)]

    def assign(self, policy: Policy) -> None:
        """Give idle nodes to jobs: to recovering ones as many as they lack, to waiting ones whole gangs only.

        Warm nodes first: ranks on one that has just booted import for seconds. None is waited for, a cold node is there sooner than a warm one.
        """
        idle = [row for row in self.in_state(NodeState.SPARE) if self._is_idle(row.node_id, policy)]
        idle.sort(key=lambda row: not self.node(row.node_id).is_warm)
        for job in in_order(job for job in self.jobs.values() if job.state in HOLDING_JOBS):
            has = [row.node_id for row in self.in_state(NodeState.ASSIGNED) if row.run == job.run]
            lacks = job.node_count + sum(node_id in has for node_id in job.moving) - len(has)
            if lacks <= 0:
                continue
            if job.state is JobState.ALLOCATING and lacks > len(idle):
                break
            idle.sort(key=lambda row, job=job: row.node_id in job.avoided)  # type: ignore[misc]  # stable: warm ones stay first
            given, idle = idle[:lacks], idle[lacks:]
            for row in given:
                self.move(row, NodeEvent.ASSIGNED, f"works for {job.job}", run=job.run)

    def _is_idle(self, node_id: NodeId, policy: Policy) -> bool:
        return is_idle(self.node(node_id), policy.timeouts)


def _excluded(job: FleetJob, exclusion: Exclusion) -> str:
    verb = {Remedy.RELEASE: "left", Remedy.HOLD: "unreachable"}.get(exclusion.is_to, "excluded")
    return f"{verb} by {job.job}: {exclusion.evidence}"


def _has_successor(row: NodeRecord) -> bool:
    """Say whether another node was asked for in place of one that is out, since it is."""
    return row.replaced_at is not None and row.replaced_at >= row.since


def _needed(spec: FleetSpec, seen: FleetObserved) -> int:
    """Return how many nodes the jobs and the spares take.

    A move borrows a spare; where there are fewer, more are asked for, as far as the limit of replacements allows: each of them is one.
    """
    runs = admitted(seen.jobs, seen.group.max_size)
    wanted = sum(job.node_count for job in seen.jobs if job.run in runs)
    moving = sum(len(job.moving) for job in seen.jobs if job.run in runs)
    room = max(0, spec.max_replacements_per_hour - len(seen.replaced))
    return max(spec.min_node_count, wanted) + max(spare_count(spec), min(moving, spare_count(spec) + room))


def _desired(spec: FleetSpec, seen: FleetObserved, rows: Iterable[NodeRecord]) -> int:
    """Return the capacity to ask for: a held node takes a place beside the one that was asked for instead of it."""
    held = sum(row.state is NodeState.HELD and _has_successor(row) for row in rows)
    return max(seen.group.min_size, min(seen.group.max_size, _needed(spec, seen) + held))


def _ended_members(spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int) -> list[FleetAction]:
    """Remove members that AWS reports ended; each brings a replacement as far as the fleet still needs one."""
    actions: list[FleetAction] = []
    extra = seen.group.desired_count - desired
    for member in seen.group.members:
        if member.is_leaving or table.node(member.node_id).instance is not InstanceCondition.ENDED:
            continue
        decrement = extra > 0 and seen.group.desired_count > seen.group.min_size
        extra -= decrement
        reason = f"EC2: {table.node(member.node_id).instance_words or 'ended'}"
        actions.append(TerminateMember(group=spec.group, node_id=member.node_id, decrement=decrement, reason=reason))
    return actions


def _held_back(spec: FleetSpec, group: GroupObserved, table: _Table) -> list[FleetAction]:
    """Let instances go that a terminating hook holds, once no job uses them."""
    return [
        CompleteTermination(group=spec.group, hook=hook, node_id=member.node_id)
        for member in group.members
        if member.awaits_termination and (member.node_id not in table.rows or table.rows[member.node_id].state is not NodeState.ASSIGNED)
        for hook in group.termination_hooks
    ]


def _releases(seen: FleetObserved, table: _Table, policy: Policy) -> list[FleetAction]:
    """Let agents end and then forget runs that their nodes no longer work for; ranks are halted first so that their output is kept."""
    actions: list[FleetAction] = []
    for node_id, node in sorted(seen.nodes.items()):
        row = table.rows.get(node_id)
        if node.member is None or not node.is_connected or is_silent(node, policy.timeouts) or row is None or row.run == node.member.run:
            continue
        if node.member.phase is MemberPhase.RUNNING:
            actions.append(
                SendHalt(
                    node_id=node_id,
                    job=node.member.job,
                    run=node.member.run,
                    generation=node.member.generation,
                    reason="the node works for this job no longer",
                )
            )
        else:
            actions.append(SendRelease(node_id=node_id, run=node.member.run))
    return actions


def _reboots(spec: FleetSpec, table: _Table) -> list[FleetAction]:
    """Ask for reboots; said again until the agent's line breaks, and made once by its key."""
    return [
        RebootMember(group=spec.group, node_id=row.node_id, since=row.since, reason=row.reason)
        for row in table.in_state(NodeState.REBOOTING)
        if table.node(row.node_id).is_connected and (row.connected_at is None or row.connected_at <= row.since)
    ]


def _evidence(table: _Table) -> list[FleetAction]:
    """Ask agents of nodes kept for inspection for what a person will want to read."""
    rows = [row for row in table.in_state(NodeState.HELD) if row.hold is Hold.INSPECTION and row.evidence_at is None]
    return [SendKeepEvidence(node_id=row.node_id) for row in rows]


def _drained(spec: FleetSpec, group: GroupObserved, table: _Table, desired: int) -> list[TerminateMember]:
    """End excluded nodes, as far as they may be replaced; each brings its replacement where the fleet still needs one."""
    leaving = {member.node_id for member in group.members if member.is_leaving}
    members = {member.node_id for member in group.members}
    due = [row for row in table.in_state(NodeState.DRAINING) if row.node_id in members - leaving and not row.reason.startswith(_SURPLUS)]
    ended = [row for row in due if _has_successor(row)]
    extra = max(0, group.desired_count - desired)
    return [TerminateMember(group=spec.group, node_id=row.node_id, decrement=place < extra, reason=row.reason) for place, row in enumerate(ended)]


_SURPLUS = "surplus"


def _surplus(spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int, *, gone_count: int) -> list[FleetAction]:
    """End idle nodes beyond what the fleet needs, the newest first, by name; capacity that goes with excluded ones is none of it."""
    members = {member.node_id for member in seen.group.members if not member.is_leaving}
    pending = [row for row in table.in_state(NodeState.DRAINING) if row.reason.startswith(_SURPLUS) and row.node_id in members]
    extra = seen.group.desired_count - gone_count - desired - len(pending)
    idle = [row for row in table.in_state(NodeState.SPARE) if row.node_id in members]
    if spec.is_deleting:
        idle = [*idle, *(row for row in table.in_state(NodeState.JOINING, NodeState.HELD) if row.node_id in members)]
    for row in sorted(idle, key=lambda row: (row.created_at, row.node_id), reverse=True)[: max(0, extra)]:
        table.move(row, NodeEvent.EXCLUDED, f"{_SURPLUS}: the fleet needs {desired} nodes")
        pending.append(table.rows[row.node_id])
    return [TerminateMember(group=spec.group, node_id=row.node_id, decrement=True, reason=row.reason) for row in pending]


def _reason(spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int, *, is_blind: bool) -> str:
    parts: list[str] = []
    if seen.group.drift:
        parts.append(f"frozen: {' '.join(seen.group.drift)}")
    if is_blind:
        parts.append("frozen: most of the fleet is silent while EC2 says that it runs")
    recent = sorted(at for at in seen.replaced if table.now - at <= RATE_WINDOW_SECONDS)
    if table.waiting() and len(recent) >= spec.max_replacements_per_hour:
        names = ", ".join(row.node_id for row in table.waiting())
        until = "none is allowed" if not recent else f"the next one when {RATE_WINDOW_SECONDS / 60:g} minutes of the first are over"
        parts.append(f"{names} {NOT_REPLACED}: {len(recent)} replacements in the last hour of {spec.max_replacements_per_hour} allowed, {until}")
    there = sum(not member.is_leaving for member in seen.group.members)
    if there < desired and seen.group.launch_failures:
        parts.append(f"waits for {desired - there} instances: {seen.group.launch_failures[0]}")
    return "; ".join(parts) or f"keeps {desired} nodes"
