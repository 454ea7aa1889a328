"""Takes part in the votes on commits (rounds) of a generation, and relays messages of nodes below it in the tree.

    parent node ◀── own state and reports from below ── RoundMember ◀── RoundReport ── child nodes
                ── Announcement ──▶ applied on this node, then ──▶

The parent and the children of a node are its *neighbours*. Each sends a message at least every third of
`holder_deadline`, so silence is detected without data to send. Invariant: every report is the newest complete state of
a node, numbered by that node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import Generation, NodeId
from everstep.protocol.rounds import Announcement, NodeReport, RankRound, RoundReport
from worker.core.rounds import NONE
from worker.core.tree import NO_TERM, RoundTree, TreeReports, messages
from worker.errors import PeerError
from worker.replication.coordinator import RoundServer, new_life
from worker.replication.transport import Session
from worker.tasks import Signal, first_of

log = logging.getLogger(__name__)
PARENT_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5)

Send = Callable[[Sequence[NodeReport]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDelays:
    """Maximum waits of reports that are not urgent (docs/design.md#the-tree-of-agents)."""

    other_seconds: float = 0.02
    """For a report with other news than finished steps, for example a vote."""
    progress_seconds: float = 0.25
    """For a report that only names finished steps. The next vote usually ends this wait earlier."""
    progress_ratio: float = 1 / 12
    """Limit of `progress_seconds`, as a fraction of the time after which a neighbour counts as silent."""


REPORT_DELAYS = ReportDelays()


@dataclass(eq=False, repr=False)
class RoundMember:
    """Reports this node's state to its parent in the tree of agents, and relays messages of its parent and children.

    `apply_announcement` applies an announcement on the event loop and must not block. A neighbour is silent after
    `deadline_seconds` without a message. `on_silence` is called when a silence begins or ends.
    """

    generation: Generation
    node_id: NodeId
    _: KW_ONLY
    tree: RoundTree
    state: Callable[[], tuple[RankRound, ...]]
    apply_announcement: Callable[[Announcement], None]
    deadline_seconds: float
    on_silence: Callable[[], None] = lambda: None
    delays: ReportDelays = REPORT_DELAYS

    def __post_init__(self) -> None:
        self.changed = Signal()
        """Code that changes the state of this node's ranks must notify this event."""
        self.silent_since: float | None = None
        """Loop time at which the last connection to a node above was lost; None while connected."""
        self._ancestors = self.tree.ancestors(self.node_id)
        self._members = self.tree.below(self.node_id)
        self._sequence = new_life()
        self._known = TreeReports()
        self.heard_at: dict[NodeId, float] = {}
        """Loop time of the last message of each neighbour to this agent process."""
        self._silent: frozenset[NodeId] = frozenset()
        self._announced = Announcement(
            generation=self.generation, term=NO_TERM, sequence=0, committed=NONE, proposed=NONE, is_silent=True
        )
        self._announcement_changed = Signal()

    async def run_local(self, server: RoundServer) -> None:
        """Exchange reports and announcements with the coordinator on this node itself."""

        async def report(reports: Sequence[NodeReport]) -> None:
            server.take(reports)

        async def listen() -> None:
            while True:
                seen = server.changed.version
                self._listened(server.announcement())
                await server.changed.wait(seen)

        await first_of(self._report(report), listen(), self._watch())

    @property
    def silent(self) -> frozenset[NodeId]:
        """Neighbours that were silent for `deadline_seconds` after a message to this agent process."""
        return self._silent

    async def run(
        self, dial: Callable[[NodeId], Awaitable[Session]], *, patience_seconds: float, is_restarted: bool
    ) -> None:
        """Exchange reports and announcements with the parent node until cancelled, over a new connection after each
        break.

        After `patience_seconds` without the parent, the node also tries nodes above it. With `is_restarted`, the first
        announcement must come from the coordinator itself, because the parent may have an older one.
        """
        await first_of(self._take_part(dial, patience_seconds, is_restarted=is_restarted), self._watch())

    async def _take_part(
        self, dial: Callable[[NodeId], Awaitable[Session]], patience_seconds: float, *, is_restarted: bool
    ) -> None:
        now = asyncio.get_running_loop().time
        # A node that never had a connection counts its time without a connection from now on.
        self.silent_since = now() if self.silent_since is None else self.silent_since
        failures = 0
        while True:
            if is_restarted and self._announced.term == NO_TERM:
                above = self._ancestors[-1]
            else:
                is_patient = now() - self.silent_since < patience_seconds
                above = self._ancestors[0 if is_patient else failures % len(self._ancestors)]
            try:
                session = await dial(above)
                try:
                    await first_of(self._report(self._sender(session)), self._listen(session))
                finally:
                    session.close()
            except (PeerError, ProtocolError) as error:
                log.info("no connection to %s for the rounds: %s", above, error)
            if self.silent_since is None:
                self.silent_since, failures = now(), 0
            await asyncio.sleep(PARENT_PAUSES_SECONDS[min(failures, len(PARENT_PAUSES_SECONDS) - 1)])
            failures += 1

    async def serve(self, session: Session) -> None:
        """Serve the session of a child node until it disconnects.

        Raises MalformedMessage if the child reports for a node not below it, or ranks of another node.
        """
        await first_of(self._collect(session), self._announce(session))

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self.deadline_seconds / 10)
            silent = frozenset(peer for peer, at in self.heard_at.items() if now() - at > self.deadline_seconds)
            if silent != self._silent:
                self._silent = silent
                self.on_silence()

    def _record_message(self, peer: NodeId) -> None:
        self.heard_at[peer] = asyncio.get_running_loop().time()

    async def _listen(self, session: Session) -> None:
        while True:
            message = await session.receive()
            if not isinstance(message, Announcement) or message.generation != self.generation:
                raise MalformedMessage(
                    f"{session.peer} sent {type(message).__name__}, not an announcement of this generation"
                )
            self.silent_since = None
            self._record_message(session.peer)
            self._listened(message)

    def _listened(self, message: Announcement) -> None:
        newest = max((self._known.term, 0), (self._announced.term, self._announced.sequence + 1))
        if (message.term, message.sequence) < newest:
            return  # Ignore an announcement that is not newer than the last one, or of an older term.
        self._begin_term(message.term)
        self._announced = message
        if not message.is_silent:
            self.apply_announcement(message)
        self._announcement_changed.notify()

    def _begin_term(self, term: int) -> None:
        known = self._known.begin_term(term)
        if known is not self._known:
            self._known = known
            self.changed.notify()

    async def _announce(self, session: Session) -> None:
        while True:
            seen = self._announcement_changed.version
            await session.send(self._announced)
            await self._announcement_changed.wait(seen, self.deadline_seconds / 3)

    async def _collect(self, session: Session) -> None:
        members = self.tree.below(session.peer)
        while True:
            message = await session.receive()
            if not isinstance(message, RoundReport) or message.generation != self.generation:
                raise MalformedMessage(f"{session.peer} sent {type(message).__name__}, not a report of this generation")
            self._record_message(session.peer)
            for each in message.nodes:
                if (
                    each.node_id not in members
                    or not {rank.rank for rank in each.ranks} <= self.tree.ranks[each.node_id]
                ):
                    raise MalformedMessage(f"{session.peer} may not report these ranks of {each.node_id}")
            self._known = self._known.take(*message.nodes)
            self.changed.notify()

    def newest_reports(self) -> TreeReports:
        """Return the newest report of this node and of each node below it."""
        ranks, own = self.state(), self._known.newest.get(self.node_id)
        if self._known.term != NO_TERM and (own is None or own.ranks != ranks):
            self._sequence += 1
            self._known = self._known.take(
                NodeReport(node_id=self.node_id, term=self._known.term, sequence=self._sequence, ranks=ranks)
            )
        return self._known

    def _sender(self, session: Session) -> Send:
        async def send(reports: Sequence[NodeReport]) -> None:
            for nodes in messages(reports) if reports else [()]:
                await session.send(RoundReport(generation=self.generation, nodes=nodes))

        return send

    async def _report(self, send: Send) -> None:
        """Send new reports to the parent node, or an empty message after a third of the silence deadline."""
        now = asyncio.get_running_loop().time
        reported, reported_at = TreeReports(), now()
        new_since: float | None = None
        while True:
            seen, newest = self.changed.version, self.newest_reports()
            due = reported_at + self.deadline_seconds / 3
            if news := newest.since(reported):
                new_since = now() if new_since is None else new_since
                due = min(due, new_since + self._patience(newest, reported))
            else:
                new_since = None
            if (left := due - now()) > 0:
                await self.changed.wait(seen, left)
                continue
            await send(news)
            reported, reported_at, new_since = newest, now(), None

    def _patience(self, newest: TreeReports, reported: TreeReports) -> float:
        """Return the seconds for which the node may delay unsent reports; 0 for an urgent report."""
        if newest.is_pressing(reported, self._members):
            return 0.0
        if not newest.is_progress(reported):
            return self.delays.other_seconds
        return min(self.delays.progress_seconds, self.delays.progress_ratio * self.deadline_seconds)
