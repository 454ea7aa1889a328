"""The rounds of a generation over the tree of agents: one agent coordinates, all (itself too) are members.

    RoundMember ──RoundReport──▶ RoundServer ──▶ core.rounds.Coordinator ──Announcement──▶ RoundMember

The tree is flat here: every member dials the coordinator. A deeper one changes who a member dials and merges reports on the way up; both
messages already carry any number of ranks. Invariant: a member's report is its newest whole state, so only the newest waits to be sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import Generation, NodeId, Rank
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import Announcement, RankRound, RoundReport
from worker.core.rounds import NONE, Coordinator
from worker.errors import PeerError
from worker.replication.transport import Session
from worker.tasks import Signal, first_of

log = logging.getLogger(__name__)
BOUNDARY_REPORT_SECONDS = 0.02
"""A report in which nothing but boundaries changed waits this long for company (design §3)."""
RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5)


class RoundServer:
    """The coordinator's shell: reports in, announcements out. One owner: the `Member` on the coordinator's node."""

    def __init__(
        self,
        generation: Generation,
        core: Coordinator,
        *,
        ranks_of: dict[NodeId, frozenset[Rank]],
        final_round_seconds: float,
        now: Callable[[], float],
    ) -> None:
        """Begin.

        Args:
            generation: whose rounds these are.
            core: fresh, or recovering after this agent's restart.
            ranks_of: which ranks each member may speak for.
            final_round_seconds: how long ranks that stand still wait for their last commit.
            now: Unix time, for what is shown to people.
        """
        self.core = core
        self.committed_at_seconds = 0.0
        self.changed = Signal()
        self._generation = generation
        self._ranks_of = ranks_of
        self._final_round_seconds = final_round_seconds
        self._now = now
        self._final_timer: asyncio.TimerHandle | None = None
        self._refused: list[str] = []
        """Why the last step was abandoned; logged when it changes."""

    def announcement(self) -> Announcement:
        """Return the coordinator's state as members hear it."""
        core = self.core
        return Announcement(
            generation=self._generation,
            sequence=self.changed.version,
            committed=core.committed,
            proposed=core.proposed,
            persist_step=core.persist,
            stop_step=core.stop,
            stop_state=core.stop_state,
            finished=core.is_finished,
        )

    def report(self, node_id: NodeId, rounds: tuple[RankRound, ...]) -> None:
        """Take a member's state; it replaces what the same ranks reported before.

        Args:
            node_id: who reports: this node, or the peer that a session was proven for.
            rounds: the newest state of its ranks.

        Raises:
            MalformedMessage: it speaks for a rank that is not on its node.
        """
        if not {each.rank for each in rounds} <= self._ranks_of.get(node_id, frozenset()):
            raise MalformedMessage(f"{node_id} reports ranks that it does not have")
        refused = sorted({each.reason for each in rounds if each.vote is Vote.ABANDON and each.proposed == self.core.proposed})
        if refused and refused != self._refused:
            self._refused = refused
            log.info("step %d is abandoned: %s", self.core.proposed, "; ".join(refused))
        self._apply(self.core.report(*rounds))

    def request_stop(self) -> None:
        """Ask all ranks to stop at one step."""
        self._apply(self.core.request_stop())

    def close(self) -> None:
        """End the timer of the final round."""
        if self._final_timer is not None:
            self._final_timer.cancel()

    def _apply(self, core: Coordinator) -> None:
        before, self.core = self.core, core
        if core.committed != before.committed:
            self.committed_at_seconds = self._now()
        if core.final != NONE and self._final_timer is None:
            loop = asyncio.get_running_loop()
            self._final_timer = loop.call_later(self._final_round_seconds, lambda: self._apply(self.core.end_final_round()))
        if _spoken(core) != _spoken(before):
            self.changed.notify()

    async def serve(self, session: Session) -> None:
        """Speak with one member until the line ends."""
        await first_of(self._listen(session), self._speak(session))

    async def _listen(self, session: Session) -> None:
        newest = -1
        while True:
            message = await session.receive()
            if not isinstance(message, RoundReport) or message.generation != self._generation:
                raise MalformedMessage(f"{type(message).__name__} of another kind or generation from a member")
            if message.sequence > newest:
                newest = message.sequence
                self.report(session.peer, message.ranks)

    async def _speak(self, session: Session) -> None:
        while True:
            seen = self.changed.version
            if not self.core.is_recovering:  # nothing is announced before every member has said what it knows
                await session.send(self.announcement())
            await self.changed.wait(seen)


def _spoken(core: Coordinator) -> tuple[object, ...]:
    return core.committed, core.proposed, core.persist, core.stop, core.stop_state, core.is_finished, core.is_recovering


class RoundMember:
    """A node's end of the line to the coordinator. One owner: the node's `Member`."""

    def __init__(
        self, generation: Generation, node_id: NodeId, state: Callable[[], tuple[RankRound, ...]], hear: Callable[[Announcement], None]
    ) -> None:
        """Begin.

        Args:
            generation: whose rounds these are.
            node_id: this node.
            state: returns the newest state of this node's ranks.
            hear: takes an announcement; called on the loop, must not block.
        """
        self.changed = Signal()
        self._generation = generation
        self._node_id = node_id
        self._state = state
        self._hear = hear
        self._sequence = 0
        self.silent_since: float | None = None
        """When the line to the coordinator was last seen alive, on the loop's clock; None while it is."""

    async def run_local(self, server: RoundServer) -> None:
        """Take part on the coordinator's own node, without a line."""
        await first_of(self._report(lambda report: _report_local(server, report)), self._hear_local(server))

    async def _hear_local(self, server: RoundServer) -> None:
        while True:
            seen = server.changed.version
            if not server.core.is_recovering:
                self._hear(server.announcement())
            await server.changed.wait(seen)

    async def run(self, dial: Callable[[], Awaitable[Session]]) -> None:
        """Take part until cancelled; a broken line is dialled again."""
        failures = 0
        now = asyncio.get_running_loop().time
        self.silent_since = now()
        while True:
            try:
                session = await dial()
                try:
                    failures, self.silent_since = 0, None
                    await first_of(self._report(session.send), self._listen(session))
                finally:
                    self.silent_since = now()
                    session.close()
            except (PeerError, ProtocolError) as error:
                log.info("line to the coordinator: %s", error)
            await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1

    async def _listen(self, session: Session) -> None:
        newest = -1
        while True:
            message = await session.receive()
            if not isinstance(message, Announcement) or message.generation != self._generation:
                raise MalformedMessage(f"{type(message).__name__} of another kind or generation from the coordinator")
            if message.sequence > newest:
                newest = message.sequence
                self._hear(message)

    async def _report(self, send: Callable[[RoundReport], Awaitable[None]]) -> None:
        """Send the newest state whenever it has changed; what only boundaries changed may wait a little."""
        last: tuple[RankRound, ...] | None = None
        while True:
            seen = self.changed.version
            state = self._state()
            if last is not None and state != last and _without_boundaries(state) == _without_boundaries(last):
                await self._company(last)
                seen, state = self.changed.version, self._state()
            if state != last:
                self._sequence += 1
                await send(RoundReport(generation=self._generation, node_id=self._node_id, sequence=self._sequence, ranks=state))
                last = state
            await self.changed.wait(seen)

    async def _company(self, last: tuple[RankRound, ...]) -> None:
        """Wait until something more than boundaries changes, at most `BOUNDARY_REPORT_SECONDS`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + BOUNDARY_REPORT_SECONDS
        while (left := until - loop.time()) > 0 and _without_boundaries(self._state()) == _without_boundaries(last):
            await self.changed.wait(self.changed.version, left)


async def _report_local(server: RoundServer, report: RoundReport) -> None:
    server.report(report.node_id, report.ranks)


def _without_boundaries(rounds: tuple[RankRound, ...]) -> tuple[object, ...]:
    return tuple(
        (
            r.rank,
            r.committed,
            r.proposed,
            r.vote,
            r.standing,
            r.echo_step,
            r.echo,
            r.confirmed_stop,
            r.pinned_step,
            r.out_of_view,
            r.reason,
            r.is_late,
        )
        for r in rounds
    )
