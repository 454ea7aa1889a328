"""What to do about a fleet: the `decide` of the fleet loop, the only writer of desired capacity and of who works for whom.

    desired capacity = max(floor, nodes of all admitted jobs) + spares + held nodes, within the group's own limits
    up      SetDesired
    down    what has not come yet: SetDesired to what is there; then end named idle nodes, one by one, capacity with them
    ended   a member that AWS reports ended is removed by name: that is what brings its replacement

Invariant: a node works for one job at most, a gang starts whole or not at all, recovering jobs come before queued ones, and nothing is ended while
the group is not as the contract says or most of the fleet is silent, except what AWS says is ending anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from control_plane.core.actions import (
    CompleteTermination,
    EventDraft,
    FleetAction,
    FleetDecision,
    SendHalt,
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
    InstanceCondition,
    NodeObserved,
    NodeRecord,
    Policy,
)
from control_plane.core.queue import in_order, schedule
from control_plane.core.spares import spare_count
from control_plane.core.states import HOLDING_JOBS, NODE_TRANSITIONS, JobState, NodeEvent, NodeState, advance
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import NodeId, RunId

NODE_COUNTS_AS_MEMBER = frozenset({NodeState.JOINING, NodeState.SPARE, NodeState.ASSIGNED, NodeState.HELD, NodeState.DRAINING})


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
    table = _Table(now, observed)
    table.follow_aws()
    table.follow_jobs(policy)
    table.assign(policy)
    is_blind = is_fleet_blind([table.node(row.node_id) for row in table.in_state(NodeState.SPARE, NodeState.ASSIGNED)], policy.timeouts)
    is_frozen = bool(observed.group.drift) or is_blind
    desired = 0 if spec.is_deleting else _desired(spec, observed, table.rows.values(), now)
    actions = [
        *_ended_members(spec, observed, table, desired),
        *_held_back(spec, observed.group, table),
        *_releases(observed, table, policy),
    ]
    if observed.group.desired_count < desired:
        actions.append(SetDesired(group=spec.group, desired_count=desired))
    elif _without_hope(observed.group, desired) < observed.group.desired_count and not is_frozen:
        actions.append(SetDesired(group=spec.group, desired_count=_without_hope(observed.group, desired)))
    if not is_frozen:
        actions += _drained(spec, observed.group, table)
        actions += _surplus(spec, observed, table, desired)
    return FleetDecision(
        records=table.changed(),
        actions=tuple(actions),
        desired_count=desired,
        is_frozen=is_frozen,
        reason=_reason(spec, observed, desired, is_blind=is_blind),
        events=tuple(table.events),
        forgotten=tuple(row.node_id for row in table.changed() if row.state is NodeState.GONE),
        is_empty=spec.is_deleting and not observed.group.members and all(row.state is NodeState.GONE for row in table.rows.values()),
    )


class _Table:
    """The node table during one pass."""

    def __init__(self, now: float, observed: FleetObserved) -> None:
        self.now = now
        self.seen = observed
        self.before = {row.node_id: row for row in observed.records}
        self.rows = dict(self.before)
        self.events: list[EventDraft] = []
        self.jobs: Mapping[RunId, FleetJob] = {job.run: job for job in observed.jobs}

    def node(self, node_id: NodeId) -> NodeObserved:
        return self.seen.nodes.get(node_id, NodeObserved(node_id=node_id))

    def changed(self) -> tuple[NodeRecord, ...]:
        return tuple(row for node_id, row in sorted(self.rows.items()) if self.before.get(node_id) != row)

    def move(self, row: NodeRecord, event: NodeEvent, reason: str, *, run: RunId | None = None) -> None:
        state = advance(NODE_TRANSITIONS, f"node {row.node_id}", row.state, event, (row.reason,))
        self.rows[row.node_id] = replace(row, state=state, run=run, reason=reason)
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

    def follow_jobs(self, policy: Policy) -> None:
        """Take nodes back from jobs that ended, were paused or excluded them; take held ones back once they answer again."""
        for row in self.in_state(NodeState.ASSIGNED):
            job = self.jobs.get(row.run) if row.run is not None else None
            if job is None:
                self.move(row, NodeEvent.RELEASED, "its job has ended")
                continue
            if job.state is JobState.QUEUED:
                self.move(row, NodeEvent.RELEASED, f"{job.job} is back in the queue")
                continue
            exclusion = next((exclusion for exclusion in job.exclusions if exclusion.node_id == row.node_id), None)
            if exclusion is not None:
                self.move(row, NodeEvent.EXCLUDED if exclusion.may_terminate else NodeEvent.HELD, _excluded(job, exclusion))
        for row in self.in_state(NodeState.HELD):
            if row.reason.startswith(_UNREACHABLE) and self._is_idle(row.node_id, policy):
                self.move(row, NodeEvent.RELEASED, "its agent is heard again and works for nobody")

    def assign(self, policy: Policy) -> None:
        """Give idle nodes to jobs: to recovering ones as many as they lack, to waiting ones whole gangs only.

        Warm nodes first: ranks on one that has just booted import for seconds. None is waited for, a cold node is there sooner than a warm one.
        Of equally warm ones, a recovering job gets those whose failure domain it has the fewest nodes in: copies of a shard lie apart then.
        """
        idle = [row for row in self.in_state(NodeState.SPARE) if self._is_idle(row.node_id, policy)]
        for job in in_order(job for job in self.jobs.values() if job.state in HOLDING_JOBS):
            lacks = job.node_count - sum(row.run == job.run for row in self.in_state(NodeState.ASSIGNED))
            if lacks <= 0:
                continue
            if job.state is JobState.ALLOCATING and lacks > len(idle):
                break
            team = Counter(self.node(row.node_id).domain for row in self.in_state(NodeState.ASSIGNED) if row.run == job.run)
            for _ in range(min(lacks, len(idle))):
                row = min(idle, key=lambda row: self._rank(row, team))
                idle.remove(row)
                team[self.node(row.node_id).domain] += job.state is not JobState.ALLOCATING
                self.move(row, NodeEvent.ASSIGNED, f"works for {job.job}", run=job.run)

    def _rank(self, row: NodeRecord, team: Mapping[str | None, int]) -> tuple[bool, int]:
        """Return how early a spare is given to a job with nodes in these failure domains; an unknown domain is one of its own."""
        node = self.node(row.node_id)
        return not node.is_warm, team.get(node.domain, 0) if node.domain is not None else 0

    def _is_idle(self, node_id: NodeId, policy: Policy) -> bool:
        node = self.node(node_id)
        is_there = node.is_connected and node.has_reported and not is_silent(node, policy.timeouts)
        return is_there and node.member is None and node.instance is InstanceCondition.PRESENT


_UNREACHABLE = "unreachable"


def _excluded(job: FleetJob, exclusion: Exclusion) -> str:
    kind = "excluded" if exclusion.may_terminate else _UNREACHABLE
    return f"{kind} by {job.job}: {exclusion.evidence}"


def _desired(spec: FleetSpec, seen: FleetObserved, rows: Iterable[NodeRecord], now: float) -> int:
    held = sum(row.state is NodeState.HELD for row in rows)
    runs = schedule(seen.jobs, seen.group.max_size - held, now).admitted
    wanted = sum(job.node_count for job in seen.jobs if job.run in runs)
    target = max(spec.min_node_count, wanted) + spare_count(spec, seen.history, wanted) + held
    return max(seen.group.min_size, min(seen.group.max_size, target))


def _without_hope(group: GroupObserved, desired: int) -> int:
    """Return the capacity that is left when no more instances are waited for than are needed.

    Ending a surplus node while the group still waits for others would bring one of those, to be ended in turn. Every instance is protected from
    scale-in: a capacity that is lowered to what is there ends none, also if one comes in that very moment.
    """
    there = sum(not member.is_leaving for member in group.members)
    return max(group.min_size, min(group.desired_count, max(desired, there)))


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


def _drained(spec: FleetSpec, group: GroupObserved, table: _Table) -> list[FleetAction]:
    """End excluded nodes; each brings its replacement."""
    leaving = {member.node_id for member in group.members if member.is_leaving}
    members = {member.node_id for member in group.members}
    return [
        TerminateMember(group=spec.group, node_id=row.node_id, decrement=False, reason=row.reason)
        for row in table.in_state(NodeState.DRAINING)
        if row.node_id in members and row.node_id not in leaving and not row.reason.startswith(_SURPLUS)
    ]


_SURPLUS = "surplus"


def _surplus(spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int) -> list[FleetAction]:
    """End idle nodes beyond what the fleet needs, the newest first, by name."""
    members = {member.node_id for member in seen.group.members if not member.is_leaving}
    pending = [row for row in table.in_state(NodeState.DRAINING) if row.reason.startswith(_SURPLUS) and row.node_id in members]
    extra = _without_hope(seen.group, desired) - desired - len(pending)
    idle = [row for row in table.in_state(NodeState.SPARE) if row.node_id in members]
    if spec.is_deleting:
        idle = [*idle, *(row for row in table.in_state(NodeState.JOINING, NodeState.HELD) if row.node_id in members)]
    for row in sorted(idle, key=lambda row: (row.created_at, row.node_id), reverse=True)[: max(0, extra)]:
        table.move(row, NodeEvent.EXCLUDED, f"{_SURPLUS}: the fleet needs {desired} nodes")
        pending.append(table.rows[row.node_id])
    return [TerminateMember(group=spec.group, node_id=row.node_id, decrement=True, reason=row.reason) for row in pending]


def _reason(spec: FleetSpec, seen: FleetObserved, desired: int, *, is_blind: bool) -> str:
    parts: list[str] = []
    if seen.group.drift:
        parts.append(f"frozen: {' '.join(seen.group.drift)}")
    if is_blind:
        parts.append("frozen: most of the fleet is silent while EC2 says that it runs")
    there = sum(not member.is_leaving for member in seen.group.members)
    if there < desired and seen.group.launch_failures:
        parts.append(f"waits for {desired - there} instances: {seen.group.launch_failures[0]}")
    policy = "" if spec.spare_probability is None else f", so many that a spare is free with a probability of {spec.spare_probability:g}"
    return "; ".join(parts) or f"keeps {desired} nodes{policy}"
