"""Rounds over a real line: reports up, announcements down, newest only; a broken line is taken up again; nobody speaks for another's ranks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import Standing, Vote
from everstep.protocol.rounds import Announcement, RankRound, RoundReport
from tests.integration.worker.replication.pair import GENERATION, HOLDER_ADDRESS, OWNER_ADDRESS, credentials
from worker.core.rounds import NONE, Coordinator
from worker.errors import PeerLost
from worker.replication.coordinator import RoundMember, RoundServer
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.tasks import end

pytestmark = pytest.mark.integration
COORDINATOR, MEMBER = NodeId("i-0"), NodeId("i-1")


class Round:
    """A coordinator with rank 0 and a member with rank 1 on another address."""

    def __init__(self, core: Coordinator, *, final_round_seconds: float = 30.0) -> None:
        self.server = RoundServer(
            GENERATION,
            core,
            ranks_of={COORDINATOR: frozenset({Rank(0)}), MEMBER: frozenset({Rank(1)})},
            final_round_seconds=final_round_seconds,
            now=lambda: 1234.5,
        )
        self.listener = PeerListener(COORDINATOR)
        self.listener.start(HOLDER_ADDRESS)
        self.listener.admit(credentials(COORDINATOR), self.server.serve)
        self.state = RankRound(rank=Rank(1), boundary=Step(0), committed=NONE, proposed=NONE, vote=Vote.NONE)
        self.heard: list[Announcement] = []
        self.news = asyncio.Event()
        self.sessions: list[TcpSession] = []
        self.member = RoundMember(GENERATION, MEMBER, lambda: (self.state,), self._hear)
        self.running = asyncio.create_task(self.member.run(self.dial))

    def _hear(self, announcement: Announcement) -> None:
        self.heard.append(announcement)
        self.news.set()

    async def dial(self) -> TcpSession:
        session = await dial(
            credentials(MEMBER),
            peer=COORDINATOR,
            address=HOLDER_ADDRESS,
            port=self.listener.port,
            kind="round",
            owner_rank=Rank(-1),
            source_address=OWNER_ADDRESS,
        )
        self.sessions.append(session)
        return session

    def say(self, **fields: object) -> None:
        """Change the member's state."""
        self.state = msgspec.structs.replace(self.state, **fields)
        self.member.changed.notify()

    def say_first(self, **fields: object) -> None:
        """Report for the coordinator's own rank."""
        first = RankRound(rank=Rank(0), boundary=Step(0), committed=NONE, proposed=NONE, vote=Vote.NONE)
        self.server.report(COORDINATOR, (msgspec.structs.replace(first, **fields),))

    async def until_heard(self, **fields: object) -> None:
        async with asyncio.timeout(10):
            while not self.heard or any(getattr(self.heard[-1], name) != value for name, value in fields.items()):
                self.news.clear()
                await self.news.wait()

    async def until_reported(self, **fields: object) -> None:
        async with asyncio.timeout(10):
            while True:
                seen = self.server.changed.version
                known = {each.rank: each for each in self.server.core.ranks}.get(Rank(1))
                if known is not None and all(getattr(known, name) == value for name, value in fields.items()):
                    return
                await self.server.changed.wait(seen, 0.01)

    async def close(self) -> None:
        await end(self.running)
        await self.listener.close()
        self.server.close()


@pytest.fixture
async def begun() -> AsyncIterator[Round]:
    made = Round(Coordinator.begin(world_size=2, base=Step(0), every_steps=0))
    yield made
    await made.close()


async def test_a_step_is_proposed_acknowledged_and_committed(begun: Round) -> None:
    await begun.until_heard(committed=NONE, proposed=1)
    begun.say_first(boundary=Step(1), proposed=Step(1), vote=Vote.ACKED)
    begun.say(boundary=Step(1), proposed=Step(1), vote=Vote.ACKED)
    await begun.until_heard(committed=1, proposed=2)
    assert begun.server.committed_at_seconds == 1234.5


async def test_boundaries_alone_are_reported_too(begun: Round) -> None:
    await begun.until_reported(boundary=0)
    for boundary in range(1, 6):
        begun.say(boundary=Step(boundary))
    await begun.until_reported(boundary=5)


async def test_a_broken_line_is_dialled_again_and_the_newest_state_is_said_anew(begun: Round) -> None:
    await begun.until_heard(proposed=1)
    begun.sessions[0]._line.shutdown(socket.SHUT_RDWR)
    begun.say(boundary=Step(4))
    await begun.until_reported(boundary=4)
    assert len(begun.sessions) == 2
    begun.say_first(boundary=Step(1), proposed=Step(1), vote=Vote.ABANDON, is_late=True)
    await begun.until_heard(proposed=6)


async def test_a_recovering_coordinator_says_nothing_before_everybody_has_reported() -> None:
    made = Round(Coordinator.recover(world_size=2, base=Step(0), every_steps=0))
    try:
        made.say(boundary=Step(9), committed=Step(7), proposed=Step(8), vote=Vote.ACKED)
        await made.until_reported(committed=7)
        assert made.heard == []
        made.say_first(boundary=Step(9), committed=Step(7), proposed=Step(8), vote=Vote.ACKED)
        await made.until_heard(committed=8, proposed=10)
        assert made.heard[0].committed == 8
    finally:
        await made.close()


@pytest.mark.parametrize(
    "report",
    [
        RoundReport(
            generation=GENERATION,
            node_id=MEMBER,
            sequence=1,
            ranks=(RankRound(rank=Rank(0), boundary=Step(1), committed=NONE, proposed=Step(1), vote=Vote.ACKED),),
        ),
        RoundReport(generation=Generation(2), node_id=MEMBER, sequence=1, ranks=()),
        Announcement(generation=GENERATION, sequence=1, committed=NONE, proposed=NONE),
    ],
    ids=["another node's rank", "another generation", "another kind"],
)
async def test_what_a_member_may_not_say_costs_it_its_line(begun: Round, report: RoundReport) -> None:
    session = await begun.dial()
    await session.send(report)

    async def listen() -> None:
        while True:
            await session.receive()

    with pytest.raises(PeerLost):
        await asyncio.wait_for(listen(), 10)
    assert begun.listener.refused_count == 1
    assert all(each.rank == 1 for each in begun.server.core.ranks)
    session.close()
    await begun.until_heard(proposed=1)


async def test_a_report_that_comes_late_is_dropped(begun: Round) -> None:
    await begun.until_reported(boundary=0)
    session = await begun.dial()

    def report(sequence: int, boundary: int) -> RoundReport:
        state = RankRound(rank=Rank(1), boundary=Step(boundary), committed=NONE, proposed=NONE, vote=Vote.NONE)
        return RoundReport(generation=GENERATION, node_id=MEMBER, sequence=sequence, ranks=(state,))

    await session.send(report(5, 50))
    await session.send(report(4, 40))
    await session.send(report(6, 60))
    await begun.until_reported(boundary=60)
    session.close()


async def test_the_final_round_is_bounded() -> None:
    made = Round(Coordinator.begin(world_size=2, base=Step(0), every_steps=0), final_round_seconds=0.05)
    try:
        made.say(boundary=Step(5), standing=Standing.CLOSING)
        made.say_first(boundary=Step(5), standing=Standing.CLOSING)
        await made.until_heard(finished=True)
        assert made.server.core.committed == NONE
    finally:
        await made.close()
