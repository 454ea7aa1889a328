"""The registry of agents: their websocket connections, their newest reports, and the messages queued for them.

A new report of an agent replaces its previous report. A broken connection causes no loss, because the loops repeat a
message until a report shows its effect.

Invariant: only the newest connection of each node is open. All methods run on the event loop without blocking.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from control_plane.loop.command_desk import CommandDesk
from control_plane.loop.log_feed import LogFeed
from control_plane.loop.metric_inbox import MetricInbox
from control_plane.loop.repeating import pause
from control_plane.loop.snapshot_desk import SnapshotDesk
from control_plane.steady_clock import steady_seconds
from everstep.protocol.agent_messages import (
    AgentReport,
    CommandEnded,
    ControlToAgent,
    Hello,
    Load,
    LogLines,
    MemberReport,
    Release,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.codec import is_supported
from everstep.protocol.ids import FleetName, Generation, NodeId, RunId
from everstep.protocol.pace import Pace

QUEUE_LIMIT = 64
"""Limit of queued messages per agent. The registry drops the oldest; the loops repeat it if they still need it."""
MAX_DEPARTED = 1000


BURST_SECONDS = 16.0
"""Seconds of work that a node's messages may cause at once after a long pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The state of one agent, according to the messages that this server has received since it started."""

    node_id: NodeId
    fleet: FleetName
    hello: Hello
    report: AgentReport | None
    is_connected: bool
    heard_at: float
    """Monotonic seconds of the agent's last message, initially of the connection."""
    heard_at_seconds: float
    """Unix seconds of the same moment, for display."""


class AgentConnection:
    """One open websocket of one agent. The websocket route owns and closes it."""

    def __init__(self, registry: AgentRegistry, node_id: NodeId, protocol_minor: int) -> None:
        self.node_id = node_id
        self.protocol_minor = protocol_minor
        self._registry = registry
        self._queue: OrderedDict[object, ControlToAgent] = OrderedDict()
        self._filled = asyncio.Event()
        self.is_open = True

    def report(self, report: AgentReport) -> None:
        """Accept an agent's report, unless the node has a newer connection. An old report counts as a sign of life."""
        if self.is_open and report.node_id == self.node_id:
            self._registry._reported(self, report)

    def lines(self, lines: LogLines) -> None:
        """Pass new log lines of the node's ranks to the open log readers."""
        if self.is_open:
            self._registry.lines.deliver(self.node_id, lines)

    def command_ended(self, ended: CommandEnded) -> None:
        """Pass the result of a user's command to the waiting request."""
        if self.is_open:
            self._registry.commands.ended(self.node_id, ended)

    def snapshot_answered(self, answer: SnapshotHeld | SnapshotBytes) -> None:
        """Pass the agent's answer about a snapshot to the waiting request."""
        if self.is_open:
            self._registry.snapshots.answered(self.node_id, answer)

    async def next_message(self) -> ControlToAgent | None:
        """Wait for the next message to send. None means that the route must close the websocket."""
        while self.is_open and not self._queue:
            self._filled.clear()
            await self._filled.wait()
        if not self.is_open:
            return None
        return self._queue.popitem(last=False)[1]

    def close(self) -> None:
        """Mark the websocket as closed. Idempotent."""
        if self.is_open:
            self._end()
            self._registry._closed(self)

    def _end(self) -> None:
        self.is_open = False
        self._queue.clear()
        self._filled.set()

    def _put(self, message: ControlToAgent) -> None:
        self._queue.setdefault(_identity(message), message)
        while len(self._queue) > QUEUE_LIMIT:
            self._queue.popitem(last=False)
        self._filled.set()


class AgentRegistry:
    """All agents that have connected since this server started. `unix` is the time for display and incidents."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, unix: Callable[[], float] = steady_seconds
    ) -> None:
        self._monotonic = monotonic
        self._unix = unix
        self._views: dict[NodeId, AgentView] = {}
        self._paces: dict[NodeId, Pace] = {}
        self._departed: deque[NodeId] = deque()
        self._connections: dict[NodeId, AgentConnection] = {}
        self._refused: Counter[NodeId] = Counter()
        self.lines = LogFeed()
        self.commands = CommandDesk(self.send, monotonic)
        self.snapshots = SnapshotDesk(self.send)
        self.logged = MetricInbox()
        self._changed = asyncio.Event()
        self._change_count = 1
        self._watched: frozenset[RunId] = frozenset()
        self._elsewhere: frozenset[FleetName] = frozenset()
        self._lost: deque[NodeId] = deque(maxlen=1024)

    def pace_of(self, node_id: NodeId) -> Pace:
        """Return the pace of a node's messages, which continues across the node's connections."""
        return self._paces.setdefault(node_id, Pace(BURST_SECONDS, self._monotonic))

    def accept(self, hello: Hello, fleet: FleetName) -> AgentConnection:
        """Register a new connection, and end an older connection of the node.

        The caller has verified the agent's token, which is valid for `fleet`, and closes the connection.
        """
        before = self._connections.get(hello.node_id)
        if before is not None:
            before._end()
        connection = AgentConnection(self, hello.node_id, hello.protocol_minor)
        self._connections[hello.node_id] = connection
        known = self._views.get(hello.node_id)
        same_agent = known is not None and known.hello.agent_id == hello.agent_id
        self._views[hello.node_id] = AgentView(
            node_id=hello.node_id,
            fleet=fleet,
            hello=hello,
            report=known.report if known is not None and same_agent else None,
            is_connected=True,
            heard_at=self._monotonic(),
            heard_at_seconds=self._unix(),
        )
        self._wake()
        return connection

    def leave(self, fleets: frozenset[FleetName]) -> None:
        """Disconnect the agents of `fleets`: all fleets of other servers, in place of the previous set."""
        self._elsewhere = fleets
        for node_id, connection in list(self._connections.items()):
            if self._views[node_id].fleet in fleets:
                connection.close()

    def is_elsewhere(self, fleet: FleetName) -> bool:
        """Return whether another server manages this fleet, according to the last call of `leave`."""
        return fleet in self._elsewhere

    @property
    def elsewhere(self) -> frozenset[FleetName]:
        """The fleets that other control-plane servers manage, as the fleet loop last reported with `leave`."""
        return self._elsewhere

    def refusals(self) -> Mapping[NodeId, int]:
        """Return the number of messages that this server has rejected, by node."""
        return dict(self._refused)

    def views(self) -> Mapping[NodeId, AgentView]:
        """Return the current state of all agents by node, whether connected or disconnected."""
        return dict(self._views)

    def view(self, node_id: NodeId) -> AgentView | None:
        """Return one agent's state, or None if the agent has not connected since the server's start."""
        return self._views.get(node_id)

    def connected(self) -> Mapping[NodeId, AgentView]:
        """Return the state of all agents that are connected now."""
        return {node_id: view for node_id, view in self._views.items() if view.is_connected}

    def member_reports(self, run: RunId, generation: Generation) -> Mapping[NodeId, MemberReport]:
        """Return the newest report of each connected node that claims to belong to a generation, by node."""
        members = (
            (node_id, view.report.member) for node_id, view in self.connected().items() if view.report is not None
        )
        return {
            node_id: member
            for node_id, member in members
            if member and (member.run, member.generation) == (run, generation)
        }

    def send(self, node_id: NodeId, message: ControlToAgent) -> bool:
        """Queue an idempotent message once. Return False if the agent cannot receive it: not connected, or too old."""
        connection = self._connections.get(node_id)
        if connection is None or not connection.is_open or not is_supported(message, connection.protocol_minor):
            return False
        connection._put(message)
        return True

    def forget(self, node_id: NodeId) -> None:
        """Close the connection of an ended node. Its last report remains, because an incident may refer to it."""
        connection = self._connections.pop(node_id, None)
        if connection is not None:
            connection._end()
        view = self._views.get(node_id)
        if view is None or node_id in self._departed:
            return
        self._views[node_id] = replace(view, is_connected=False)
        self._departed.append(node_id)
        if len(self._departed) > MAX_DEPARTED:
            longest_gone = self._departed.popleft()
            self._views.pop(longest_gone, None)
            self._paces.pop(longest_gone, None)
            self._refused.pop(longest_gone, None)

    def refuse(self, node_id: NodeId) -> None:
        """Count a rejected message of a node whose agent has proved its identity."""
        # With unproven ids, the number of counters could grow without limit.
        self._refused[node_id] += 1

    def hint(self) -> None:
        """Wake the job loop and the fleet loop after a change that no agent reported. Must run on the event loop."""
        self._wake()

    async def wait_for_change(self, seen: int, timeout_seconds: float) -> int:
        """Wait for the next change or the timeout.

        Return immediately if a change has occurred since the caller's previous call. `seen` is the result of that call,
        and 0 for the first call. Several loops may wait at the same time.
        """
        if self._change_count == seen:
            await pause(timeout_seconds, until=self._changed)
        return self._change_count

    def watch_closely(self, runs: frozenset[RunId]) -> None:
        """Set the runs about which every report wakes the loops, even if only the training progress changed."""
        self._watched = runs

    def take_lost(self) -> Iterator[NodeId]:
        """Yield the nodes whose connection broke since the last call."""
        while self._lost:
            yield self._lost.popleft()

    def _reported(self, connection: AgentConnection, report: AgentReport) -> None:
        view = self._views[connection.node_id]
        is_late = view.report is not None and report.sequence <= view.report.sequence
        self._views[connection.node_id] = replace(
            view,
            report=view.report if is_late else report,
            heard_at=self._monotonic(),
            heard_at_seconds=self._unix(),
        )
        if is_late:
            return
        if report.metrics is not None:
            self.logged.take(report.node_id, view.hello.agent_id, report.metrics)
        is_watched = report.member is not None and report.member.run in self._watched
        if is_watched or view.report is None or _news(report) != _news(view.report):
            self._wake()

    def _wake(self) -> None:
        self._change_count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _closed(self, connection: AgentConnection) -> None:
        if self._connections.get(connection.node_id) is connection:
            del self._connections[connection.node_id]
            self._views[connection.node_id] = replace(self._views[connection.node_id], is_connected=False)
            self._lost.append(connection.node_id)
            self._wake()


def _news(report: AgentReport) -> object:
    member = report.member
    if member is None:
        return report.notices, report.burn_in
    exits = tuple((rank.rank, rank.exit) for rank in member.ranks)
    views = tuple((shard.rank, shard.in_view, shard.reason) for shard in member.protection)
    ended = member.round is not None and (member.round.stopped or member.round.finished)
    looks = tuple((look.rank, look.number) for look in member.stacks)
    words = member.silent_peers, member.faults, member.uploads, looks, report.notices, report.faults
    return member.run, member.generation, member.phase, exits, views, ended, words


def _identity(message: ControlToAgent) -> object:
    if isinstance(message, Load):
        return Load, message.plan.run, message.plan.generation
    if isinstance(message, Release):
        return Release, message.run
    return message
