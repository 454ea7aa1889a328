"""What to do about a fleet: the `decide` of the fleet loop, the only writer of desired capacity and of who works for whom.

    desired capacity = max(floor, nodes of all admitted jobs) + spares + held nodes + nodes that AWS will take, within
    the group's own limits
    up      SetDesired
    down    what has not come yet: SetDesired to what is there; then end named idle nodes, one by one, capacity with them
    ended   a member that AWS reports ended is removed by name: that is what brings its replacement
    leaving a job with a node to be left is given another beside it, so that its ranks can move (`core.moves`)

Who leaves a job or stops being a spare goes where its remedy says: back among the spares, held, rebooted, or ended.
What Everstep itself takes out of a fleet within an hour is limited: a verdict that is wrong everywhere must not empty
the fleet.

Invariant: a node works for one job at most, a gang starts whole or not at all, recovering jobs come before queued ones,
and nothing is ended while the group is not as the contract says or most of the fleet is silent, except what AWS says is
ending anyway. Nothing that has ever joined is ended for a verdict that `may_terminate` does not stand in, unless a
person says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from control_plane.core import capacity, notices, remedies
from control_plane.core.actions import (
    CompleteTermination,
    EventDraft,
    FleetAction,
    FleetDecision,
    HoldTermination,
    RebootMember,
    ResumeLaunch,
    RetryLaunch,
    SendHalt,
    SendKeepEvidence,
    SendKeepSources,
    SendRelease,
    SetDesired,
    TerminateMember,
)
from control_plane.core.evidence import is_fleet_blind, is_silent
from control_plane.core.moves import is_ready
from control_plane.core.observed.fleets import (
    FleetHistory,
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupObserved,
    Hold,
    NodeRecord,
    NodeRequest,
)
from control_plane.core.observed.jobs import Exclusion, Policy
from control_plane.core.observed.nodes import Implication, InstanceCondition, NodeObserved, Remedy
from control_plane.core.queue import in_order, schedule
from control_plane.core.spares import spare_count
from control_plane.core.states import (
    HOLDING_JOBS,
    LAUNCHED_JOBS,
    NODE_TRANSITIONS,
    JobState,
    NodeEvent,
    NodeState,
    advance,
)
from control_plane.core.timeouts import HOLD_SECONDS, JOIN_SECONDS, REBOOT_SECONDS
from everstep.protocol.agent_messages import MemberPhase, NoticeKind
from everstep.protocol.ids import NodeId, RunId
from everstep.protocol.plan import SourceArchive

NODE_COUNTS_AS_MEMBER = frozenset(NodeState) - {NodeState.GONE}
MOST_SOURCES = 16
MOST_SOURCE_BYTES = 1024**3
"""What a spare holds ready; jobs beyond that have their source fetched when they get the node, as any node that is new to a job."""
RATE_WINDOW_SECONDS = 3600.0
NOT_REPLACED = "not replaced"
"""In a fleet's reason while its limit holds."""
NOT_JOINED = "its agent has not dialled in"
"""In a fleet's reason while its newest instances do not join, and in that of one which is ended for it."""
WHERE_TO_LOOK = (
    "look at the user data and its log on the instance, the way to this server (security group), and the join token"
)
MOST_DOUBLINGS = 10


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
    table.follow_requests()
    table.follow_faults(policy, is_blind=is_blind)
    table.take_back()
    table.assign(policy)
    if not is_frozen:
        table.give_up_joining()
        table.retire_announced()
    table.replace_within_limit(is_frozen=is_frozen)
    desired = observed.group.min_size if spec.is_deleting else _desired(spec, observed, table)
    standing = observed.group.desired_count if is_frozen else _without_hope(observed.group, desired)
    actions = [
        *_ended_members(spec, observed, table, desired),
        *_evidence(table),
        *_held_back(spec, observed.group, table, policy, is_blind=is_blind),
        *_releases(observed, table, policy),
        *_sources(table, policy),
    ]
    if observed.group.desired_count < desired:
        actions.append(SetDesired(group=spec.group, desired_count=desired))
    elif standing < observed.group.desired_count - sum(
        isinstance(action, TerminateMember) and action.decrement for action in actions
    ):
        actions.append(SetDesired(group=spec.group, desired_count=standing))
    else:
        actions += _tries(now, spec, observed.group)
    if not is_frozen:
        actions += _reboots(spec, table)
        ending = [action for action in actions if isinstance(action, TerminateMember)]
        room = standing - desired - sum(action.decrement for action in ending)
        drained = _drained(spec, observed.group, table, room)
        room -= sum(action.decrement for action in drained)
        left = _counted(observed.group) - len(ending) - len(drained)
        actions += drained
        actions += _surplus(table, desired, max(room, left - desired), room)
    return FleetDecision(
        records=table.changed(),
        actions=tuple(actions),
        desired_count=desired,
        vacancies=table.vacancies,
        is_frozen=is_frozen,
        is_blind=has_no_sight,
        reason=_reason(spec, observed, table, desired, is_blind=is_blind),
        implications=tuple(table.implications),
        events=tuple(table.events),
        forgotten=tuple(row.node_id for row in table.changed() if row.state is NodeState.GONE),
        is_empty=spec.is_deleting
        and not observed.group.members
        and all(row.state is NodeState.GONE for row in table.rows.values()),
    )


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
        self.vacancies = observed.vacancies

    def node(self, node_id: NodeId) -> NodeObserved:
        return self.seen.nodes.get(node_id, NodeObserved(node_id=node_id))

    def changed(self) -> tuple[NodeRecord, ...]:
        return tuple(row for node_id, row in sorted(self.rows.items()) if self.before.get(node_id) != row)

    def move(
        self, row: NodeRecord, event: NodeEvent, reason: str, *, run: RunId | None = None, hold: Hold | None = None
    ) -> None:
        state = advance(NODE_TRANSITIONS, f"node {row.node_id}", row.state, event, (row.reason,))
        is_kept = state in (NodeState.SPARE, NodeState.ASSIGNED)  # what a person asked for is still to be done
        request, words = (row.request, row.request_words) if is_kept else (None, "")
        self.rows[row.node_id] = replace(
            row,
            state=state,
            run=run,
            reason=reason,
            since=self.now,
            hold=hold,
            release="",
            evidence_at=None,
            request=request,
            request_words=words,
        )
        message = f"{row.state} → {state}: {reason}"
        self.events.append(
            EventDraft(type="NodeStateChanged", message=message, node_id=row.node_id, run=run or row.run)
        )

    def in_state(self, *states: NodeState) -> list[NodeRecord]:
        return sorted(
            (row for row in self.rows.values() if row.state in states), key=lambda row: (row.created_at, row.node_id)
        )

    def follow_aws(self) -> None:
        """Take in new members, connections, and what AWS has ended.

        Who is listed for a while after its end is no new member.
        """
        staying = self.seen.group.staying
        joined = [id for id in staying if id not in self.rows and self.node(id).instance is not InstanceCondition.ENDED]
        missing = max(0, self.seen.group.desired_count - len(staying))
        self.vacancies, filled = capacity.vacancies(self.vacancies, missing=missing, joined=len(joined), now=self.now)
        for node_id, wanted_at in zip_longest(joined, filled):
            self.rows[node_id] = NodeRecord(
                node_id=node_id,
                state=NodeState.JOINING,
                run=None,
                reason="its instance is starting",
                created_at=self.now,
                wanted_at=wanted_at,
            )
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

    def follow_requests(self) -> None:
        """Do what people want of nodes that work for nobody; one that still has something of a run gives it back first."""
        for row in self.in_state(NodeState.SPARE):
            if row.request is None or (
                self.node(row.node_id).is_connected and self.node(row.node_id).member is not None
            ):
                continue
            match row.request:
                case NodeRequest.DRAIN | NodeRequest.HOLD:
                    self.move(row, NodeEvent.HELD, row.request_words, hold=Hold.PERSON)
                case NodeRequest.REBOOT:
                    self.move(row, NodeEvent.REBOOTED, row.request_words)
                case NodeRequest.REPLACE:
                    self.move(row, NodeEvent.EXCLUDED, row.request_words)
        for row in self.in_state(NodeState.HELD, NodeState.JOINING):
            if row.request is NodeRequest.REPLACE:
                self.move(row, NodeEvent.EXCLUDED, row.request_words)
            elif row.state is NodeState.JOINING:
                continue
            elif row.request is not None:
                self.rows[row.node_id] = replace(
                    row, hold=Hold.PERSON, reason=row.request_words, request=None, request_words=""
                )

    def _lacks_evidence(self, row: NodeRecord) -> bool:
        """Say whether an instance that is kept for inspection still has something to tell, and somebody there to tell it."""
        return row.hold is Hold.INSPECTION and row.evidence_at is None and self.node(row.node_id).is_connected

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
            excluded = () if job.is_taken_over else job.exclusions
            exclusion = next((exclusion for exclusion in excluded if exclusion.node_id == row.node_id), None)
            if exclusion is not None:
                self.take_out(row, exclusion.is_to, _excluded(job, exclusion))
        for row in self.in_state(NodeState.HELD):
            if row.hold is Hold.UNREACHABLE and is_ready(self.node(row.node_id), self.now, policy.timeouts):
                self.move(row, NodeEvent.RELEASED, "its agent is heard again and works for nobody")

    def follow_faults(self, policy: Policy, *, is_blind: bool) -> None:
        """Take out spares that are no use: faulty, silent for T_max, or implicated too often; take back or give up those that were rebooted."""
        for row in self.in_state(NodeState.SPARE):
            node = self.node(row.node_id)
            if is_silent(node, policy.timeouts):
                if node.silent_seconds > policy.timeouts.exclude_seconds and not is_blind:
                    self.take_out(
                        row,
                        Remedy.HOLD,
                        f"unreachable: its agent has been silent for more than {policy.timeouts.exclude_seconds:g} s",
                    )
                elif node.complaint and not is_blind:
                    self.take_out(row, Remedy.HOLD, f"unreachable: its agent is silent and {node.complaint}")
            elif (found := remedies.worst(node.faults, node.history, self.now)) is not None:
                self.take_out(row, found.remedy, f"its agent reports {found.words}")
                self._implicate(row, found)
            elif (why := remedies.lemon(node.history, self.now)) is not None:
                self.take_out(row, remedies.of_lemon(node.history, self.now), f"not used again: {why}")
        for row in self.in_state(NodeState.REBOOTING):
            node = self.node(row.node_id)
            rebooted_at = self.seen.rebooted.get(row.node_id)
            is_new = rebooted_at is not None and row.connected_at is not None and row.connected_at > rebooted_at
            is_back = node.is_connected and node.has_reported and is_new
            found = remedies.worst(node.faults, node.history, self.now) if is_back else None
            if found is not None:
                self.take_out(row, Remedy.REPLACE, f"rebooted, and its agent still reports {found.words}")
            elif is_back:
                self.move(row, NodeEvent.CONNECTED, "rebooted, and its agent is connected again without the fault")
            elif self._unheard(row, row.since if rebooted_at is None else rebooted_at) > REBOOT_SECONDS:
                what = (
                    "EC2 did not take its reboot within {:g} s"
                    if rebooted_at is None
                    else "did not come back within {:g} s of its reboot"
                )
                self.take_out(row, Remedy.REPLACE, f"{what.format(REBOOT_SECONDS)}: {row.reason}")

    def _unheard(self, row: NodeRecord, since: float) -> float:
        """Return for how many seconds a node has not done what it was to do: only the time counts in which this server could have heard of it."""
        node = self.node(row.node_id)
        if node.is_connected:
            return self.now - max(since, row.connected_at or since)
        return min(self.now - since, node.silent_seconds)

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
            case Remedy.LET_GO:
                self.move(row, NodeEvent.EXCLUDED, reason)
            case _ if not self.spec.holds_failed_instances:
                self.move(row, NodeEvent.EXCLUDED, reason)
            case _ if (refusal := self._no_room_to_hold()) is not None:
                self.move(row, NodeEvent.EXCLUDED, f"{reason}; {refusal}")
            case _:
                self.move(row, NodeEvent.HELD, f"kept for inspection: {reason}", hold=Hold.INSPECTION)

    def _no_room_to_hold(self) -> str | None:
        """Return why one more instance cannot be kept for inspection, with the figures, or None: held ones take places of the group."""
        needed, held = _needed(self.spec, self.seen, self), len(self.in_state(NodeState.HELD))
        if needed + held + 1 <= self.seen.group.max_size:
            return None
        return (
            f"not kept for inspection: the group has {self.seen.group.max_size} places, jobs and spares need "
            f"{needed}, {held} are held already"
        )

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
        room = self.spec.max_replacements_per_hour - sum(
            self.now - at <= RATE_WINDOW_SECONDS for at in self.seen.replaced
        )
        for row in self.waiting():
            if (row.state is NodeState.HELD or not is_frozen) and (room > 0 or self.spec.is_deleting):
                self.rows[row.node_id] = replace(row, replaced_at=self.now)
                room -= 1

    def waiting(self) -> list[NodeRecord]:
        """Return whom nobody was asked for in place of yet."""
        out = self.in_state(NodeState.DRAINING, NodeState.HELD)
        return [
            row
            for row in out
            if not _has_successor(row) and not row.reason.startswith(_SURPLUS) and not _is_announced(row)
        ]

    def assign(self, policy: Policy) -> None:
        """Give idle nodes to jobs: to recovering ones as many as they lack, then one for each node that a job has to leave, then whole gangs.

        Warm nodes first: ranks on one that has just booted import for seconds. None is waited for, a cold node is there
        sooner than a warm one. Of those, a recovering job gets the ones whose failure domain it has the fewest nodes
        in: copies of a shard lie apart then. Nodes that AWS would rather have back come last, those that it takes back
        are given to nobody.
        """
        idle = [
            row for row in self.in_state(NodeState.SPARE) if is_ready(self.node(row.node_id), self.now, policy.timeouts)
        ]
        holding = in_order(job for job in self.jobs.values() if job.state in HOLDING_JOBS and not job.is_taken_over)
        launched = [job for job in holding if job.state in LAUNCHED_JOBS]
        for job in launched:
            self._give(job, idle, job.node_count - len(self._nodes_of(job)))
        for job in launched:
            self._give(job, idle, job.node_count + len(self._leaving(job)) - len(self._nodes_of(job)))
        for job in (job for job in holding if job.state is JobState.ALLOCATING):
            lacks = job.node_count - len(self._nodes_of(job))
            if lacks > len(self._welcome(job, idle)):
                break
            self._give(job, idle, lacks)

    def _give(self, job: FleetJob, idle: list[NodeRecord], count: int) -> None:
        """Give a job so many nodes, taken from `idle`, or as many as there are."""
        team = Counter(self.node(row.node_id).domain for row in self._nodes_of(job))
        for _ in range(min(count, len(self._welcome(job, idle)))):
            row = min(self._welcome(job, idle), key=lambda row: self._rank(row, job, team))
            idle.remove(row)
            team[self.node(row.node_id).domain] += job.state is not JobState.ALLOCATING
            self.move(row, NodeEvent.ASSIGNED, f"works for {job.job}", run=job.run)

    def _welcome(self, job: FleetJob, idle: list[NodeRecord]) -> list[NodeRecord]:
        """Return the nodes that a job could use: it does not take back what it has excluded before it has seen that to be gone."""
        excluded = {exclusion.node_id for exclusion in job.exclusions}
        return [row for row in idle if row.node_id not in excluded]

    def _rank(self, row: NodeRecord, job: FleetJob, team: Mapping[str | None, int]) -> tuple[bool, bool, bool, int]:
        """Return how early a spare is given to a job with nodes in these failure domains; an unknown domain is one of its own."""
        node = self.node(row.node_id)
        crowd = team.get(node.domain, 0) if node.domain is not None else 0
        return bool(node.notices), row.node_id in job.avoided, not node.is_warm, crowd

    def _nodes_of(self, job: FleetJob) -> list[NodeRecord]:
        return [row for row in self.in_state(NodeState.ASSIGNED) if row.run == job.run]

    def _leaving(self, job: FleetJob) -> list[NodeRecord]:
        """Return the nodes that a job is to leave: what AWS takes from whatever it is launched for, and while it trains what it says itself."""
        if job.state not in LAUNCHED_JOBS or job.state is JobState.STOPPING or job.is_taken_over:
            return []
        moving = {move.node_id for move in job.moves} if job.state is JobState.RUNNING else set[NodeId]()
        return [
            row
            for row in self._nodes_of(job)
            if row.node_id in moving or notices.urgent(self.node(row.node_id), self.now) is not None
        ]

    def leaving(self) -> tuple[int, int]:
        """Return how many nodes live jobs are to leave: those that AWS takes while their group still counts them, and all others."""
        gone = {member.node_id for member in self.seen.group.members if member.is_leaving}
        rows = [row for job in self.jobs.values() for row in self._leaving(job)]
        taken = {row.node_id for row in rows if notices.urgent(self.node(row.node_id), self.now) is not None}
        return len(taken - gone), len(rows) - len(taken)

    def take_back(self) -> None:
        """Take back what a running job was given for a node that it need not leave any more; only where no promise has been asked of it."""
        for job in (job for job in self.jobs.values() if job.state is JobState.RUNNING and not job.is_taken_over):
            extra = len(self._nodes_of(job)) - job.node_count - len(self._leaving(job))
            free = [
                row
                for row in self._nodes_of(job)
                if self.node(row.node_id).member is None and self.node(row.node_id).has_reported
            ]
            for row in free[: max(0, extra)]:
                self.move(row, NodeEvent.RELEASED, "no node has to be left any more")

    def failed_join_count(self) -> int:
        """Return how many instances in a row did not join, those that are being ended for that among them."""
        leaving = [row for row in self.in_state(NodeState.DRAINING) if not row.reason.startswith(_SURPLUS)]
        return self.seen.failed_join_count + sum(row.connected_at is None for row in leaving)

    def join_seconds(self) -> float:
        """Return how long the next instance that does not join is waited for."""
        return JOIN_SECONDS * 2.0 ** min(self.failed_join_count(), MOST_DOUBLINGS)

    def give_up_joining(self) -> None:
        """End an instance whose agent does not dial in, so that another one comes: one, and the next one only after twice as long.

        What is wrong with one instance its successor mends. What is wrong with all of them, their user data, say, a
        person mends: new ones would come and go for ever. Only the time counts in which this server could have heard
        the agent.
        """
        patience = self.join_seconds()
        settled = {
            member.node_id
            for member in self.seen.group.members
            if not member.is_leaving and not member.lifecycle_state.startswith("Pending")
        }
        for row in self.in_state(NodeState.JOINING):
            node = self.node(row.node_id)
            is_there = node.instance is InstanceCondition.PRESENT and row.node_id in settled
            if is_there and self._unheard(row, row.created_at) > patience:
                self.move(row, NodeEvent.EXCLUDED, f"{NOT_JOINED} within {patience:g} s: {WHERE_TO_LOOK}")
                return

    def retire_announced(self) -> None:
        """End idle nodes that AWS will end anyway, so that others come sooner: at once what goes soon, one by one what goes late or only may go.

        Not at the end of a capacity block: nothing else is to be had in it.
        """
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
            if notice is not None and notice.kind is not NoticeKind.CAPACITY_BLOCK_END:
                self.move(row, NodeEvent.EXCLUDED, notices.in_words(row.node_id, notice))


def _excluded(job: FleetJob, exclusion: Exclusion) -> str:
    verb = {Remedy.RELEASE: "left", Remedy.HOLD: "unreachable"}.get(exclusion.is_to, "excluded")
    return f"{verb} by {job.job}: {exclusion.evidence}"


def _has_successor(row: NodeRecord) -> bool:
    """Say whether another node was asked for in place of one that is out, since it is."""
    return row.replaced_at is not None and row.replaced_at >= row.since


def _is_announced(row: NodeRecord) -> bool:
    """Say whether a node is ended because AWS takes it anyway: that is no verdict of Everstep's, and no limit holds it up."""
    return notices.ANNOUNCED in row.reason


def _needed(spec: FleetSpec, seen: FleetObserved, table: _Table) -> int:
    """Return how many nodes the jobs and the spares take.

    A node that AWS takes counts no more: another one is asked for beside it. Any other node to be left borrows a spare
    for the time; where there are fewer, more are asked for, as far as the limit of replacements allows: each of them is
    one.
    """
    runs = schedule(seen.jobs, seen.group.max_size - len(table.in_state(NodeState.HELD)), table.now).admitted
    wanted = sum(job.node_count for job in seen.jobs if job.run in runs)
    spares = spare_count(spec, seen.history, wanted)
    taken, moving = table.leaving()
    room = max(0, spec.max_replacements_per_hour - len(seen.replaced))
    return max(spec.min_node_count, wanted) + max(spares, min(moving, spares + room)) + taken


def _desired(spec: FleetSpec, seen: FleetObserved, table: _Table) -> int:
    """Return the capacity to ask for: a held node takes a place beside the one that was asked for instead of it."""
    held = sum(_has_successor(row) for row in table.in_state(NodeState.HELD))
    return max(seen.group.min_size, min(seen.group.max_size, _needed(spec, seen, table) + held))


def first_desired(spec: FleetSpec, *, min_size: int, max_size: int) -> int:
    """Return the capacity that a fleet asks for at first: before it has a job, and before it has seen anything.

    Called by CreateFleet, to tell it before the fleet is there.

    Args:
        spec: what the user wants of it.
        min_size: of its group.
        max_size: of its group.

    Returns:
        What `decide` asks for in the fleet's first pass.
    """
    return max(min_size, min(max_size, spec.min_node_count + spare_count(spec, FleetHistory(), 0)))


def _without_hope(group: GroupObserved, desired: int) -> int:
    """Return the capacity that is left when no more instances are waited for than are needed.

    Ending a surplus node while the group still waits for others would bring one of those, to be ended in turn. Every
    instance is protected from scale-in: a capacity that is lowered to what is there ends none, also if one comes in
    that very moment. It is surplus then, like any other.
    """
    return max(group.min_size, min(group.desired_count, max(desired, len(group.staying))))


def _counted(group: GroupObserved) -> int:
    """Return how many members Auto Scaling counts when it looks whether some are missing: none that leaves or that a person has put aside."""
    return sum(
        not member.is_leaving and not member.lifecycle_state.startswith(("Standby", "EnteringStandby"))
        for member in group.members
    )


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


def _tries(now: float, spec: FleetSpec, group: GroupObserved) -> list[FleetAction]:
    """Ask again for instances that do not come, and lift what AWS has suspended for that; what a user has suspended stays so."""
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
    """Let instances go that a terminating hook holds, once no job uses them or their agent is dead; hold them while a last step is being saved."""
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
            if not is_used or is_dead:
                actions.append(CompleteTermination(group=spec.group, hook=hook, node_id=node_id))
            elif node_id in asked_at and table.now - asked_at[node_id] < HOLD_SECONDS:
                actions.append(
                    HoldTermination(group=spec.group, hook=hook, node_id=node_id, seconds=group.hook_seconds)
                )
    return actions


def _releases(seen: FleetObserved, table: _Table, policy: Policy) -> list[FleetAction]:
    """Let agents end and then forget runs that their nodes no longer work for; ranks are halted first so that their output is kept."""
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


def _sources(table: _Table, policy: Policy) -> list[SendKeepSources]:
    """Have spares hold the source archives of the fleet's jobs, those that may need one soonest first; said again until their reports show it.

    They are fetched and verified, and not unpacked: what lies unpacked cannot be verified again, and nobody else's code
    is to run or to be changed.
    """
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
        SendKeepSources(node_id=node_id, sources=tuple(held.values()))
        for node_id, node in spares
        if node.is_connected
        and node.has_reported
        and node.member is None
        and not is_silent(node, policy.timeouts)
        and node.sources != held.keys()
    ]


def _reboots(spec: FleetSpec, table: _Table) -> list[FleetAction]:
    """Ask for reboots; said again until EC2 is known to have taken them, and made once by their key.

    An agent that dials in anew proves nothing before that: this server may have just been started.
    """
    return [
        RebootMember(group=spec.group, node_id=row.node_id, since=row.since, reason=row.reason)
        for row in table.in_state(NodeState.REBOOTING)
        if row.node_id not in table.seen.rebooted
    ]


def _evidence(table: _Table) -> list[FleetAction]:
    """Ask agents of nodes kept for inspection for what a person will want to read."""
    rows = [row for row in table.in_state(NodeState.HELD) if row.hold is Hold.INSPECTION and row.evidence_at is None]
    return [SendKeepEvidence(node_id=row.node_id) for row in rows]


def _drained(spec: FleetSpec, group: GroupObserved, table: _Table, extra: int) -> list[TerminateMember]:
    """End excluded nodes, as far as they may be replaced; each brings its replacement, unless that was asked for when its end was announced."""
    staying = set(group.staying)
    due = [
        row
        for row in table.in_state(NodeState.DRAINING)
        if row.node_id in staying and not row.reason.startswith(_SURPLUS)
    ]
    ended = [row for row in due if _has_successor(row) or _is_announced(row)]
    return [
        TerminateMember(group=spec.group, node_id=row.node_id, decrement=place < extra, reason=row.reason)
        for place, row in enumerate(ended)
    ]


_SURPLUS = "surplus"


def _surplus(table: _Table, desired: int, extra: int, room: int) -> list[FleetAction]:
    """End idle nodes beyond what the fleet needs, those that may go anyway and then the newest first, by name.

    Capacity goes with as many of them as it has too much (`room`). The group may have more members than it desires:
    launches that were on their way when capacity was lowered have come in, or a person lowered it. Nothing comes in the
    place of those.
    """
    spec = table.spec
    members = set(table.seen.group.staying)
    pending = [
        row for row in table.in_state(NodeState.DRAINING) if row.reason.startswith(_SURPLUS) and row.node_id in members
    ]
    extra -= len(pending)
    idle = [row for row in table.in_state(NodeState.SPARE) if row.node_id in members]
    if spec.is_deleting:
        idle = [*idle, *(row for row in table.in_state(NodeState.JOINING, NodeState.HELD) if row.node_id in members)]
    for row in sorted(
        idle, key=lambda row: (bool(table.node(row.node_id).notices), row.created_at, row.node_id), reverse=True
    )[: max(0, extra)]:
        table.move(row, NodeEvent.EXCLUDED, f"{_SURPLUS}: the fleet needs {desired} nodes")
        pending.append(table.rows[row.node_id])
    pending.sort(key=lambda row: (row.created_at, row.node_id), reverse=True)  # said again, it is the same
    return [
        TerminateMember(group=spec.group, node_id=row.node_id, decrement=place < room, reason=row.reason)
        for place, row in enumerate(pending)
    ]


def _reason(spec: FleetSpec, seen: FleetObserved, table: _Table, desired: int, *, is_blind: bool) -> str:
    parts: list[str] = []
    if seen.group.drift:
        parts.append(f"frozen: {' '.join(seen.group.drift)}")
    if spec.is_deleting and desired:
        parts.append(f"cannot be deleted while its Auto Scaling group has MinSize {desired}: set it to 0")
    if is_blind:
        parts.append("frozen: most of the fleet is silent while EC2 says that it runs")
    recent = sorted(at for at in seen.replaced if table.now - at <= RATE_WINDOW_SECONDS)
    if table.waiting() and len(recent) >= spec.max_replacements_per_hour:
        names = ", ".join(row.node_id for row in table.waiting())
        until = (
            "none is allowed"
            if not recent
            else f"the next one when {RATE_WINDOW_SECONDS / 60:g} minutes of the first are over"
        )
        parts.append(
            f"{names} {NOT_REPLACED}: {len(recent)} replacements in the last hour of "
            f"{spec.max_replacements_per_hour} allowed, {until}"
        )
    if count := table.failed_join_count():
        parts.append(
            f"{NOT_JOINED}, of {count} instances in a row: {WHERE_TO_LOOK}; the next one is replaced after "
            f"{table.join_seconds():g} s"
        )
    there = len(seen.group.staying)
    if there < desired and (words := capacity.waiting_words(seen.group)):
        parts.append(f"waits for {desired - there} instances: {words}")
    policy = (
        ""
        if spec.spare_probability is None
        else f", so many that a spare is free with a probability of {spec.spare_probability:g}"
    )
    return "; ".join(parts) or f"keeps {desired} nodes{policy}"
