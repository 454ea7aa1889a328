"""Who is connected: the newest word of every agent, and what is still to be said to it.

    websocket route (api)                       job and fleet loop
      accept(hello, fleet) → connection           views()            what every agent said last, and when
      connection.report(report)       ──▶         send(node, …)      queued for the route's writer
      connection.next_message()       ◀──         wait_for_change()  wakes the loops
      connection.close()

Everything here is level-triggered: a report replaces the one before it, and a message that is still queued is not
queued twice. So nothing is lost when a connection breaks: the loop says again what a report does not yet show.

Invariant: at most one connection per node counts, the newest. All methods run on the server's event loop; none blocks.
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
from control_plane.steady_clock import steady_seconds
from everstep.protocol.agent_messages import AgentReport, CommandEnded, ControlToAgent, Hello, Load, LogLines, Release
from everstep.protocol.ids import FleetName, Generation, NodeId, RunId

QUEUE_LIMIT = 64
"""Messages waiting for one agent. An agent that does not read loses the oldest; the loop repeats what still matters."""
MAX_DEPARTED = 1000
"""Ended nodes whose last word and whose count of refusals are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What is known of one agent since this server started."""

    node_id: NodeId
    fleet: FleetName
    hello: Hello
    report: AgentReport | None
    """The newest; None until the first after a connection."""
    is_connected: bool
    heard_at: float
    """Monotonic seconds of the last message, or of the connection."""
    heard_at_seconds: float
    """The same as Unix time."""


class AgentConnection:
    """One websocket of one agent, for as long as it lives.

    Made by `AgentRegistry.accept`; the websocket route owns it.
    """

    def __init__(self, registry: AgentRegistry, node_id: NodeId) -> None:
        self.node_id = node_id
        self._registry = registry
        self._queue: OrderedDict[object, ControlToAgent] = OrderedDict()
        self._filled = asyncio.Event()
        self.is_open = True

    def report(self, report: AgentReport) -> None:
        """Take the agent's newest state. Late ones (lower sequence) and those on a superseded connection are dropped.

        Args:
            report: as decoded from the websocket.
        """
        if self.is_open and report.node_id == self.node_id:
            self._registry._reported(self, report)

    def lines(self, lines: LogLines) -> None:
        """Take what the node's ranks have printed.

        Args:
            lines: as decoded from the websocket.
        """
        if self.is_open:
            self._registry.lines.deliver(self.node_id, lines)

    def command_ended(self, ended: CommandEnded) -> None:
        """Take what came of a command that a person runs beside a rank.

        Args:
            ended: as decoded from the websocket.
        """
        if self.is_open:
            self._registry.commands.ended(self.node_id, ended)

    async def next_message(self) -> ControlToAgent | None:
        """Wait for what is to be sent next.

        Returns:
            The message, or None when this connection is over (closed, or superseded by a newer one): close the
            websocket.
        """
        while self.is_open and not self._queue:
            self._filled.clear()
            await self._filled.wait()
        if not self.is_open:
            return None
        return self._queue.popitem(last=False)[1]

    def close(self) -> None:
        """Say that the websocket is gone. Idempotent."""
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
    """All agents that dialled in since this server started.

    Args:
        monotonic: seconds of a clock that never jumps; ages are measured on it.
        unix: seconds since the epoch, of the clock that the loops read; for what is shown and for phases of incidents.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, unix: Callable[[], float] = steady_seconds
    ) -> None:
        self._monotonic = monotonic
        self._unix = unix
        self._views: dict[NodeId, AgentView] = {}
        self._departed: deque[NodeId] = deque()
        self._connections: dict[NodeId, AgentConnection] = {}
        self._refused: Counter[NodeId] = Counter()
        self.lines = LogFeed()
        """What ranks print, on its way to whoever follows it."""
        self.commands = CommandDesk(self.send, monotonic)
        """What people run beside ranks."""
        self.logged = MetricInbox()
        """What scripts log, on its way to the database."""
        self._changed = asyncio.Event()
        self._change_count = 1
        self._watched: frozenset[RunId] = frozenset()
        self._elsewhere: frozenset[FleetName] = frozenset()
        self._lost: deque[NodeId] = deque(maxlen=1024)

    def accept(self, hello: Hello, fleet: FleetName) -> AgentConnection:
        """Begin a connection. One that the node had before ends: its `next_message` returns None.

        Called by the websocket route once the agent's token is checked.

        Args:
            hello: the agent's first message.
            fleet: the fleet that the token binds the node to.

        Returns:
            The connection: feed it reports, send what it yields, close it at the end.
        """
        before = self._connections.get(hello.node_id)
        if before is not None:
            before._end()
        connection = AgentConnection(self, hello.node_id)
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
        """Leave the agents of these fleets, and of no others, to another replica: connections that they have here end."""
        self._elsewhere = fleets
        for node_id, connection in list(self._connections.items()):
            if self._views[node_id].fleet in fleets:
                connection.close()

    def is_elsewhere(self, fleet: FleetName) -> bool:
        """Say whether another replica serves this fleet."""
        return fleet in self._elsewhere

    def views(self) -> Mapping[NodeId, AgentView]:
        """Return what every agent said last, lost ones included. A snapshot: it does not change under its reader."""
        return dict(self._views)

    def view(self, node_id: NodeId) -> AgentView | None:
        """Return what one agent said last."""
        return self._views.get(node_id)

    def connected(self) -> Mapping[NodeId, AgentView]:
        """Return the views of the agents that are connected now."""
        return {node_id: view for node_id, view in self._views.items() if view.is_connected}

    def measured(self, run: RunId, generation: Generation) -> Mapping[NodeId, Mapping[str, float]]:
        """Return what each node that is connected and works for this generation of a run measured last, by the name of its metric."""
        members = (
            (node_id, view.report.member) for node_id, view in self.connected().items() if view.report is not None
        )
        return {
            node_id: member.measured
            for node_id, member in members
            if member and (member.run, member.generation) == (run, generation)
        }

    def send(self, node_id: NodeId, message: ControlToAgent) -> bool:
        """Queue a message unless the same one is queued already.

        Args:
            node_id: the agent's node.
            message: an idempotent command.

        Returns:
            False when the agent is not connected: nothing was queued, the loop comes again.
        """
        connection = self._connections.get(node_id)
        if connection is None or not connection.is_open:
            return False
        connection._put(message)
        return True

    def forget(self, node_id: NodeId) -> None:
        """Drop a node that will not come back.

        A connection it still has ends; its last word stays for the incident that it may belong to.
        """
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
            self._refused.pop(longest_gone, None)

    def refuse(self, node_id: NodeId) -> None:
        """Count a message of this node's agent that was not taken.

        Args:
            node_id: as its token or its admission prove it: what anybody could claim would grow without limit.
        """
        self._refused[node_id] += 1

    def refused_count(self, node_id: NodeId) -> int:
        """Return how many of its agent's messages were not taken since this server started."""
        return self._refused[node_id]

    def hint(self) -> None:
        """Wake the loops: something outside of the agents changed (a request, a notice).

        Must run on the server's event loop.
        """
        self._wake()

    async def wait_for_change(self, seen: int, timeout_seconds: float) -> int:
        """Return at the first change that the caller has not seen, or after the timeout. Any number of loops may wait.

        Args:
            seen: what the last call returned; 0 the first time.
            timeout_seconds: at most this long.

        Returns:
            What to pass next time.
        """
        if self._change_count == seen:
            await pause(timeout_seconds, until=self._changed)
        return self._change_count

    def watch_closely(self, runs: frozenset[RunId]) -> None:
        """Wake the loops at every report of these runs, steps included: they are on their way back to training.

        Of others, news alone wakes them.
        """
        self._watched = runs

    def take_lost(self) -> Iterator[NodeId]:
        """Yield the nodes whose connection broke since the last call: EC2 is asked about them at once."""
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
    """What of a report cannot wait for the next look: anything but how far training is."""
    member = report.member
    if member is None:
        return report.notices
    exits = tuple((rank.rank, rank.exit) for rank in member.ranks)
    views = tuple((shard.rank, shard.in_view, shard.reason) for shard in member.protection)
    ended = member.round is not None and (member.round.stopped or member.round.finished)
    looks = tuple((look.rank, look.number) for look in member.stacks)
    words = member.silent_peers, member.faults, member.uploads, looks, report.notices, report.faults
    return member.run, member.generation, member.phase, exits, views, ended, words


def _identity(message: ControlToAgent) -> object:
    """What makes a queued message the same as another: a Load is its generation, the rest is its whole content."""
    if isinstance(message, Load):
        return Load, message.plan.run, message.plan.generation
    if isinstance(message, Release):
        return Release, message.run
    return message
