"""The rounds of a generation as every node takes part in them, and passes them on for the nodes below it in the tree of agents.

    the node above ◀── own state and what came from below ── RoundMember ◀── RoundReport ── nodes below
                   ── Announcement ──▶ heard here first, then ──▶

Both sides of a line say something at least every third of `holder_deadline`, and know when the other has fallen silent:
evidence about a node that does not depend on whether it is owed anything.

Invariant: whom a node reports to changes nothing about what it reports: every report is its node's newest whole state,
numbered by that node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import Generation, NodeId
from everstep.protocol.rounds import Announcement, NodeReport, RankRound, RoundReport
from worker.core.rounds import NONE
from worker.core.tree import NO_TERM, Reports, RoundTree, messages
from worker.errors import PeerError
from worker.replication.coordinator import RoundServer, new_life
from worker.replication.transport import Session
from worker.tasks import Signal, first_of

log = logging.getLogger(__name__)
COMPANY_SECONDS = 0.02
"""A change that does not press waits this long for company (docs/design.md#the-tree-of-agents)."""
PROGRESS_SECONDS = 0.25
"""So long, where nothing at the coordinator waits for it (the vote on the step that is proposed brings it along, mostly sooner): but never so long
that a line seems silent, so at most `PROGRESS_RATIO` of the deadline."""
PROGRESS_RATIO = 1 / 12
RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5)

Send = Callable[[Sequence[NodeReport]], Awaitable[None]]


class RoundMember:
    """A node's place in the tree. One owner: the node's `Member`."""

    def __init__(
        self,
        generation: Generation,
        node_id: NodeId,
        *,
        tree: RoundTree,
        state: Callable[[], tuple[RankRound, ...]],
        hear: Callable[[Announcement], None],
        deadline_seconds: float,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin.

        Args:
            generation: whose rounds these are.
            node_id: this node.
            tree: who is above and below it.
            state: returns the newest state of this node's ranks.
            hear: takes an announcement; called on the loop, must not block.
            deadline_seconds: after this long without a word a neighbour in the tree is silent.
            on_silence: a neighbour has fallen silent, or speaks again.
        """
        self.changed = Signal()
        """Of what is to be reported: whoever changes the state of this node's ranks notifies it."""
        self.silent_since: float | None = None
        """When this node last had a line to anybody above it, on the loop's clock; None while it has one.

        A node above that is cut off itself has nobody left to dial but the coordinator, and says so: who lacks a line
        lacks the coordinator.
        """
        self._generation = generation
        self._node_id = node_id
        self._tree = tree
        self._ancestors = tree.ancestors(node_id)
        self._members = tree.below(node_id)
        self._state = state
        self._hear = hear
        self._sequence = new_life()
        self._known = Reports()
        self._deadline = deadline_seconds
        self._on_silence = on_silence
        self._heard_at: dict[NodeId, float] = {}
        """When each neighbour last said something in this agent's life, on the loop's clock."""
        self._silent: frozenset[NodeId] = frozenset()
        self._announced = Announcement(
            generation=generation, term=NO_TERM, sequence=0, committed=NONE, proposed=NONE, is_silent=True
        )
        self._heard = Signal()

    async def run_local(self, server: RoundServer) -> None:
        """Take part on the coordinator's own node, without a line."""

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
        """Neighbours in the tree that have spoken in this generation, and have not for longer than the deadline."""
        return self._silent

    async def run(
        self, dial: Callable[[NodeId], Awaitable[Session]], *, patience_seconds: float, is_restarted: bool
    ) -> None:
        """Take part until cancelled; a broken line is dialled again.

        Args:
            dial: opens a round session to a node.
            patience_seconds: how long the parent may be out of reach before the nodes above it are tried, too.
            is_restarted: this node has taken part before and does not know how much it has heard. Another node may lag
                behind that, and would lead it back to a step that it has voted on: the first word must be the
                coordinator's own.
        """
        await first_of(self._take_part(dial, patience_seconds, is_restarted=is_restarted), self._watch())

    async def _take_part(
        self, dial: Callable[[NodeId], Awaitable[Session]], patience_seconds: float, *, is_restarted: bool
    ) -> None:
        now = asyncio.get_running_loop().time
        self.silent_since = (
            now() if self.silent_since is None else self.silent_since
        )  # who begins again has not been heard meanwhile
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
                log.info("line to %s: %s", above, error)
            if self.silent_since is None:  # the line had come about
                self.silent_since, failures = now(), 0
            await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1

    async def serve(self, session: Session) -> None:
        """Speak with one node below until the line ends.

        Args:
            session: opened by that node.

        Raises:
            MalformedMessage: the other side speaks for a node that is not below it, or for ranks that a node does not
                have.
            PeerLost: the line is gone.
        """
        await first_of(self._collect(session), self._announce(session))

    async def _watch(self) -> None:
        """Notice neighbours that fall silent, and those that speak again."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._deadline / 10)
            silent = frozenset(peer for peer, at in self._heard_at.items() if now() - at > self._deadline)
            if silent != self._silent:
                self._silent = silent
                self._on_silence()

    def _heard_from(self, peer: NodeId) -> None:
        self._heard_at[peer] = asyncio.get_running_loop().time()

    # -- down

    async def _listen(self, session: Session) -> None:
        while True:
            message = await session.receive()
            if not isinstance(message, Announcement) or message.generation != self._generation:
                raise MalformedMessage(f"{type(message).__name__} of another kind or generation from {session.peer}")
            self.silent_since = None
            self._heard_from(session.peer)
            self._listened(message)

    def _listened(self, message: Announcement) -> None:
        newest = max((self._known.term, 0), (self._announced.term, self._announced.sequence + 1))
        if (message.term, message.sequence) < newest:
            return  # overtaken on another way, or of a coordinator that has restarted since
        self._begin_term(message.term)
        self._announced = message
        if not message.is_silent:
            self._hear(message)
        self._heard.notify()

    def _begin_term(self, term: int) -> None:
        known = self._known.begin_term(term)
        if known is not self._known:
            self._known = known
            self.changed.notify()

    async def _announce(self, session: Session) -> None:
        """Say the newest at once, even that nothing is known yet, whenever there is something newer, and now and then to be heard."""
        while True:
            seen = self._heard.version
            await session.send(self._announced)
            await self._heard.wait(seen, self._deadline / 3)

    # -- up

    async def _collect(self, session: Session) -> None:
        members = self._tree.below(session.peer)
        while True:
            message = await session.receive()
            if not isinstance(message, RoundReport) or message.generation != self._generation:
                raise MalformedMessage(f"{type(message).__name__} of another kind or generation from {session.peer}")
            self._heard_from(session.peer)
            for each in message.nodes:
                if (
                    each.node_id not in members
                    or not {rank.rank for rank in each.ranks} <= self._tree.ranks[each.node_id]
                ):
                    raise MalformedMessage(f"{session.peer} reports ranks of {each.node_id} that it does not speak for")
            self._known = self._known.take(*message.nodes)
            self.changed.notify()

    def _newest(self) -> Reports:
        """Return what is known with this node's own state as it is now."""
        ranks, own = self._state(), self._known.newest.get(self._node_id)
        if self._known.term != NO_TERM and (own is None or own.ranks != ranks):
            self._sequence += 1
            self._known = self._known.take(
                NodeReport(node_id=self._node_id, term=self._known.term, sequence=self._sequence, ranks=ranks)
            )
        return self._known

    def _sender(self, session: Session) -> Send:
        async def send(reports: Sequence[NodeReport]) -> None:
            for nodes in messages(reports) if reports else [()]:
                await session.send(RoundReport(generation=self._generation, nodes=nodes))

        return send

    async def _report(self, send: Send) -> None:
        """Send what is new whenever something is, what does not press may wait a little; and nothing at all now and then, to be heard."""
        now = asyncio.get_running_loop().time
        told, told_at = Reports(), now()
        new_since: float | None = None
        """When the oldest that is not told was noticed."""
        while True:
            seen, newest = self.changed.version, self._newest()
            due = told_at + self._deadline / 3  # whatever else changes meanwhile
            if news := newest.since(told):
                new_since = now() if new_since is None else new_since
                due = min(due, new_since + self._patience(newest, told))
            else:
                new_since = None
            if (left := due - now()) > 0:
                await self.changed.wait(seen, left)
                continue
            await send(news)
            told, told_at, new_since = newest, now(), None

    def _patience(self, newest: Reports, told: Reports) -> float:
        """Return how long what is new waits for something that presses, seconds: no time where it does itself."""
        if newest.is_pressing(told, self._members):
            return 0.0
        return min(PROGRESS_SECONDS, PROGRESS_RATIO * self._deadline) if newest.is_progress(told) else COMPANY_SECONDS
