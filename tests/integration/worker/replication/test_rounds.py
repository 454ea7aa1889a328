"""Nodes agree on steps over real connections, in a flat and in a deeper tree. Reports travel up, announcements down.

Each node uses only the newest message. A node that loses its connection connects again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import RankStanding, StopState, Vote
from everstep.protocol.rounds import Announcement, NodeReport, Pacing, RankRound, RoundReport
from tests.integration.worker.replication.pair import GENERATION, credentials
from worker.core.rounds import NONE, Coordinator
from worker.core.tree import RoundTree
from worker.errors import PeerLost
from worker.node.network_cards import NetworkCard
from worker.replication.coordinator import RoundServer
from worker.replication.round_member import REPORT_DELAYS, ReportDelays, RoundMember
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.tasks import Signal, end

pytestmark = pytest.mark.integration


class Node:
    """The part of a node that agrees on steps, with one rank.

    If `votes` is true, the rank votes for every proposal at once.
    """

    def __init__(self, network: Network, number: int) -> None:
        self.network = network
        self.number = number
        self.id = NodeId(f"i-{number}")
        self.address = f"127.0.0.{number + 2}"
        self.listener = PeerListener(self.id)
        self.listener.start(self.address)
        self.state = RankRound(rank=Rank(number), boundary=Step(0), committed=NONE, proposed=NONE, vote=Vote.NONE)
        self.votes = True
        self.heard: list[Announcement] = []
        self.sessions: list[TcpSession] = []
        self.start(is_restarted=False)

    def start(self, *, is_restarted: bool = True) -> None:
        """Start the node, or restart it as after the death of its agent. The rank keeps its state."""
        self.member = RoundMember(
            GENERATION,
            self.id,
            tree=self.network.tree,
            state=lambda: (self.state,),
            apply_announcement=self._hear,
            deadline_seconds=self.network.deadline_seconds,
            delays=self.network.delays,
        )
        if self.number == 0:
            run = self.member.run_local(self.network.server)
        else:
            run = self.member.run(self.dial, patience_seconds=self.network.patience_seconds, is_restarted=is_restarted)
        self.running = asyncio.create_task(run)
        self.admit()

    def admit(self) -> None:
        self.listener.admit(credentials(self.id), lambda session: self.member.serve(session))

    async def stop(self) -> None:
        await self.listener.revoke()
        await end(self.running)

    async def dial(self, peer: NodeId) -> TcpSession:
        other = next(node for node in self.network.nodes if node.id == peer)
        session = await dial(
            credentials(self.id),
            peer=peer,
            address=other.address,
            port=other.listener.port,
            kind="round",
            owner_rank=Rank(-1),
            source=NetworkCard(self.address),
        )
        self.sessions.append(session)
        return session

    def _hear(self, announcement: Announcement) -> None:
        self.heard.append(announcement)
        self.network.news.notify()
        if announcement.committed >= self.state.committed and announcement.proposed != self.state.proposed:
            vote = Vote.ACKED if self.votes and announcement.proposed != NONE else Vote.NONE
            self.say(committed=announcement.committed, proposed=announcement.proposed, vote=vote)

    def say(self, **fields: object) -> None:
        """Change the state of this node's rank."""
        self.state = msgspec.structs.replace(self.state, **fields)
        self.member.changed.notify()

    async def until_heard(self, **fields: object) -> None:
        await self.network.until(
            lambda: bool(self.heard) and all(getattr(self.heard[-1], name) == value for name, value in fields.items())
        )

    async def until_reported(self, **fields: object) -> None:
        """Wait until the coordinator has received a report with these values of the node's rank."""

        def is_known() -> bool:
            known = {each.rank: each for each in self.network.server.core.ranks}.get(Rank(self.number))
            return known is not None and all(getattr(known, name) == value for name, value in fields.items())

        await self.network.until(is_known)


class Network:
    """Several nodes that agree on steps, each on its own loopback address. The first node is the coordinator."""

    def __init__(
        self,
        count: int,
        core: Coordinator | None = None,
        *,
        arity: int = 16,
        final_round_seconds: float = 30.0,
        patience_seconds: float = 30.0,
        deadline_seconds: float = 30.0,
        delays: ReportDelays = REPORT_DELAYS,
    ) -> None:
        self.count = count
        self.delays = delays
        self.deadline_seconds = deadline_seconds
        self.patience_seconds = patience_seconds
        self.news = Signal()
        self.tree = RoundTree.of(NodeId("i-0"), {NodeId(f"i-{i}"): [Rank(i)] for i in range(count)}, arity=arity)
        self._final_round_seconds = final_round_seconds
        self.coordinate(core or Coordinator(world_size=count, base=Step(0), every_steps=0).begin())
        self.nodes: list[Node] = []
        self.nodes += [Node(self, number) for number in range(count)]

    def coordinate(self, core: Coordinator) -> None:
        self.server = RoundServer(GENERATION, core, final_round_seconds=self._final_round_seconds, now=lambda: 1234.5)

    async def restart_coordinator(self) -> None:
        """Restart the coordinator's agent. Only the page of its rank survives."""
        await self.nodes[0].stop()
        self.server.close()
        self.coordinate(Coordinator(world_size=self.count, base=Step(0), every_steps=0).recover())
        self.nodes[0].start()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                await self.news.wait(self.news.version, 0.01)

    async def until_committed(self, step: int) -> None:
        await self.until(lambda: self.server.core.committed >= step)

    async def close(self) -> None:
        for node in self.nodes:
            await node.stop()
            await node.listener.close()
        self.server.close()


def note_reports(network: Network, node: Node) -> list[RankRound]:
    """Record the reports of a node's rank that the coordinator receives from now on, repeated ones included."""
    told: list[RankRound] = []
    take = network.server.take

    def noting(reports: Sequence[NodeReport]) -> None:
        told.extend(rank for report in reports if report.node_id == node.id for rank in report.ranks)
        take(reports)

    network.server.take = noting  # type: ignore[method-assign]
    return told


async def silent_voters(delays: ReportDelays) -> AsyncIterator[Network]:
    made = Network(2, delays=delays)
    for node in made.nodes:
        node.votes = False
    yield made
    await made.close()


@pytest.fixture
async def pair() -> AsyncIterator[Network]:
    """Yield two nodes: the coordinator and another node. Their ranks vote only when the test calls `say`."""
    async for made in silent_voters(REPORT_DELAYS):
        yield made


@pytest.fixture
async def patient() -> AsyncIterator[Network]:
    """Yield two nodes like `pair`, with other delays of their reports to the coordinator.

    A node sends a report with other news, such as a vote, at once. Finished steps alone cause no report: the node
    reports them together with its next other news.
    """
    async for made in silent_voters(ReportDelays(other_seconds=0.0, progress_seconds=1e9, progress_ratio=1e9)):
        yield made


@pytest.fixture
async def tree() -> AsyncIterator[Network]:
    """Yield nine nodes whose messages travel over this tree. Node 0 is the coordinator.

    0 ─┬─ 1 ─┬─ 3 ── 7, 8
       │     └─ 4
       └─ 2 ─── 5, 6
    """
    made = Network(9, arity=2)
    yield made
    await made.close()


async def test_a_step_is_proposed_acknowledged_and_committed(pair: Network) -> None:
    first, second = pair.nodes
    await second.until_heard(committed=NONE, proposed=1)
    first.say(boundary=Step(1), proposed=Step(1), vote=Vote.ACKED)
    second.say(boundary=Step(1), proposed=Step(1), vote=Vote.ACKED)
    await second.until_heard(committed=1, proposed=2)
    assert pair.server.committed_at_seconds == 1234.5


async def test_boundaries_alone_are_reported_too(pair: Network) -> None:
    await pair.nodes[1].until_reported(boundary=0)
    for boundary in range(1, 6):
        pair.nodes[1].say(boundary=Step(boundary))
    await pair.nodes[1].until_reported(boundary=5)


async def test_a_step_that_was_made_comes_with_the_vote_that_the_coordinator_waits_for(
    patient: Network,
) -> None:
    first, second = patient.nodes
    await second.until_heard(proposed=1)
    await first.until_reported(boundary=0)
    told = note_reports(patient, second)
    second.say(boundary=Step(3))
    patient.server.request_stop()
    # A node that did not wait for its rank's vote would report the finished step before this round trip ends.
    await second.until_heard(stop_state=StopState.ANNOUNCED)
    second.say(boundary=Step(4), vote=Vote.ABANDON)
    await second.until_reported(boundary=4)
    assert [(state.boundary, state.vote) for state in told if state.boundary > 0] == [(4, Vote.ABANDON)]


async def test_a_broken_line_is_dialled_again_and_the_newest_state_is_said_anew(pair: Network) -> None:
    first, second = pair.nodes
    await second.until_heard(proposed=1)
    second.sessions[0].line.shutdown(socket.SHUT_RDWR)
    second.say(boundary=Step(4))
    await second.until_reported(boundary=4)
    assert len(second.sessions) == 2
    first.say(boundary=Step(1), proposed=Step(1), vote=Vote.ABANDON, is_late=True)
    await second.until_heard(proposed=6)


async def test_a_recovering_coordinator_says_nothing_before_everybody_has_reported() -> None:
    made = Network(2, Coordinator(world_size=2, base=Step(0), every_steps=0).recover())
    try:
        first, second = made.nodes
        await first.stop()  # stop the coordinator, which has not yet received a report of its own rank
        second.say(boundary=Step(9), committed=Step(7), proposed=Step(8), vote=Vote.ACKED)
        first.say(boundary=Step(9), committed=Step(7), proposed=Step(8), vote=Vote.ACKED)
        made.server.take([own_report(made, second)])
        assert made.server.core.is_recovering
        assert second.heard == []
        first.start()
        await second.until_heard(committed=8, proposed=10)
        assert second.heard[0].committed == 8
    finally:
        await made.close()


async def test_how_replicas_leave_reaches_every_node_as_it_changes() -> None:
    made = Network(3, Coordinator(world_size=3, base=Step(0), every_steps=0).begin())
    try:
        for pacing in (Pacing.TRIED, Pacing.IN_IDLE_SPANS, Pacing.AT_ONCE):
            made.server.keep_pacing(pacing)
            for node in made.nodes:
                await node.until_heard(pacing=pacing)
    finally:
        await made.close()


def own_report(network: Network, node: Node, *, sequence: int = 1, term: int | None = None) -> NodeReport:
    return NodeReport(
        node_id=node.id, term=network.server.term if term is None else term, sequence=sequence, ranks=(node.state,)
    )


def forged(node: str, rank: int) -> NodeReport:
    state = RankRound(rank=Rank(rank), boundary=Step(77), committed=NONE, proposed=Step(1), vote=Vote.ACKED)
    return NodeReport(node_id=NodeId(node), term=1 << 53, sequence=1 << 53, ranks=(state,))


@pytest.mark.parametrize(
    "report",
    [
        RoundReport(generation=GENERATION, nodes=(forged("i-0", 0),)),
        RoundReport(generation=GENERATION, nodes=(forged("i-1", 0),)),
        RoundReport(generation=Generation(2), nodes=()),
        Announcement(generation=GENERATION, term=1, sequence=1, committed=NONE, proposed=NONE),
    ],
    ids=["for another node", "another node's rank", "another generation", "another kind"],
)
async def test_what_a_member_may_not_say_costs_it_its_line(pair: Network, report: RoundReport) -> None:
    session = await pair.nodes[1].dial(NodeId("i-0"))
    await session.send(report)

    async def listen() -> None:
        while True:
            await session.receive()

    with pytest.raises(PeerLost):
        await asyncio.wait_for(listen(), 10)
    assert pair.nodes[0].listener.refused_count == 1
    session.close()
    await pair.nodes[1].until_reported(boundary=0)
    assert all(each.boundary == 0 for each in pair.server.core.ranks)


async def test_the_final_round_is_bounded() -> None:
    made = Network(2, final_round_seconds=0.05)
    try:
        for node in made.nodes:
            node.votes = False
            node.say(boundary=Step(5), standing=RankStanding.CLOSING, vote=Vote.NONE)
        await made.nodes[1].until_heard(finished=True)
        assert made.server.core.final == 5
    finally:
        await made.close()


# -- a tree of four levels


async def test_steps_are_committed_over_the_tree_and_everybody_hears(tree: Network) -> None:
    await tree.until_committed(20)
    await tree.until(lambda: all(node.heard and node.heard[-1].committed >= 20 for node in tree.nodes))
    dialled = {node.id: {session.peer for session in node.sessions} for node in tree.nodes}
    assert dialled["i-8"] == {"i-3"}
    assert dialled["i-2"] == {"i-0"}


async def test_one_rank_that_does_not_vote_keeps_the_step_back(tree: Network) -> None:
    tree.nodes[8].votes = False
    await tree.until(lambda: tree.nodes[8].state.vote is Vote.NONE and tree.nodes[8].state.proposed != NONE)
    stuck = tree.nodes[8].state.proposed
    await tree.until(
        lambda: sum(each.proposed == stuck and each.vote is Vote.ACKED for each in tree.server.core.ranks) == 8
    )
    assert tree.server.core.committed < stuck
    tree.nodes[8].votes = True
    tree.nodes[8].say(vote=Vote.ACKED)
    await tree.until_committed(stuck + 5)


async def test_an_interior_agent_that_restarts_is_found_again_and_nothing_is_lost(tree: Network) -> None:
    interior, below = tree.nodes[1], tree.nodes[7]
    await tree.until_committed(3)
    for _ in range(3):
        await interior.stop()
        below.say(boundary=Step(below.state.boundary + 1))
        before = tree.server.core.committed
        interior.start()
        await tree.until_committed(before + 5)
        await below.until_reported(boundary=below.state.boundary)


async def test_a_node_above_that_does_not_come_back_is_passed_over() -> None:
    made = Network(9, arity=2, patience_seconds=0.0)
    try:
        await made.until_committed(3)
        gone, below = made.nodes[3], made.nodes[8]
        assert {session.peer for session in below.sessions} == {gone.id}
        await gone.stop()
        below.say(boundary=Step(1000))
        await below.until_reported(boundary=1000)
        assert below.sessions[-1].peer in {"i-1", "i-0"}
        assert below.member.silent_since is None
        gone.start()
        await made.until_committed(made.server.core.committed + 5)
    finally:
        await made.close()


async def test_who_has_a_line_does_not_complain_who_is_next_to_the_coordinator_does(tree: Network) -> None:
    await tree.until_committed(3)
    await tree.nodes[0].listener.revoke()
    await tree.until(lambda: all(tree.nodes[each].member.silent_since is not None for each in (1, 2)))
    assert all(tree.nodes[each].member.silent_since is None for each in range(3, 9))
    tree.nodes[0].admit()
    await tree.until_committed(tree.server.core.committed + 5)
    assert all(node.member.silent_since is None for node in tree.nodes)


async def test_a_restarted_coordinator_waits_for_an_answer_of_every_node_not_for_what_those_between_remember(
    tree: Network,
) -> None:
    await tree.until_committed(3)
    leaf = tree.nodes[8]
    await leaf.stop()
    await tree.until(lambda: leaf.number in {each.rank for each in tree.server.core.ranks})
    await tree.restart_coordinator()
    await tree.until(lambda: len(tree.server.core.ranks) == 8)
    assert tree.server.core.is_recovering
    committed = max(node.state.committed for node in tree.nodes)
    leaf.start()
    await tree.until_committed(committed + 5)
    for node in tree.nodes:
        heard = [each.committed for each in node.heard]
        assert heard == sorted(heard), "C never falls"


async def test_a_restarted_agent_hears_the_coordinator_first(tree: Network) -> None:
    await tree.until_committed(3)
    leaf = tree.nodes[8]
    await leaf.stop()
    before = len(leaf.sessions)
    leaf.start()
    await tree.until_committed(tree.server.core.committed + 3)
    assert leaf.sessions[before].peer == "i-0"


class Scripted:
    """A connection on which given announcements arrive, followed by silence."""

    peer = NodeId("i-0")

    def __init__(self, *announcements: Announcement) -> None:
        self._left = list(announcements)
        self.is_over = asyncio.Event()

    async def send(self, message: object) -> None:
        """Discard a report."""

    async def receive(self) -> Announcement:
        if self._left:
            return self._left.pop(0)
        self.is_over.set()
        return await asyncio.Future()

    def close(self) -> None:
        """Do nothing."""


async def test_what_was_overtaken_or_is_of_an_earlier_term_is_not_heeded() -> None:
    def said(term: int, sequence: int, *, is_silent: bool = False) -> Announcement:
        step = Step(10 * term + sequence)
        return Announcement(
            generation=GENERATION, term=term, sequence=sequence, committed=NONE, proposed=step, is_silent=is_silent
        )

    line = Scripted(
        said(0, 0),
        said(2, 5),
        said(2, 4),
        said(2, 5),
        said(1, 9),
        said(2, 6),
        said(3, 0, is_silent=True),
        said(2, 7),
        said(3, 1),
    )
    heard: list[Step] = []

    async def dial(peer: NodeId) -> TcpSession:
        return line  # type: ignore[return-value]  # implements the methods that a member uses

    tree = RoundTree.of(NodeId("i-0"), {NodeId("i-0"): [Rank(0)], NodeId("i-1"): [Rank(1)]})
    member = RoundMember(
        GENERATION,
        NodeId("i-1"),
        tree=tree,
        state=lambda: (),
        apply_announcement=lambda announcement: heard.append(announcement.proposed),
        deadline_seconds=30.0,
    )
    running = asyncio.create_task(member.run(dial, patience_seconds=30.0, is_restarted=False))
    try:
        await asyncio.wait_for(line.is_over.wait(), 10)
    finally:
        await end(running)
    assert heard == [25, 26, 31]


async def test_a_part_that_begins_again_has_not_been_heard_meanwhile() -> None:
    """A bug repeatedly ends the task in which a node takes part in rounds, and the node restarts the task.

    A restart must not reset the time since which the node's parent has been silent.
    """

    async def dial(peer: NodeId) -> TcpSession:
        raise LookupError("a bug")

    tree = RoundTree.of(NodeId("i-0"), {NodeId("i-0"): [Rank(0)], NodeId("i-1"): [Rank(1)]})
    member = RoundMember(
        GENERATION, NodeId("i-1"), tree=tree, state=lambda: (), apply_announcement=lambda _: None, deadline_seconds=30.0
    )
    since = set()
    for _ in range(2):
        with pytest.raises(LookupError):
            await member.run(dial, patience_seconds=30.0, is_restarted=False)
        since.add(member.silent_since)
    assert len(since) == 1
    assert since != {None}


async def test_reports_that_were_overtaken_or_answer_an_earlier_coordinator_say_nothing(pair: Network) -> None:
    second = pair.nodes[1]
    await second.until_reported(boundary=0)
    known = {each.rank: each for each in pair.server.core.ranks}
    second.state = msgspec.structs.replace(second.state, boundary=Step(60))
    stale: Sequence[NodeReport] = (
        own_report(pair, second, sequence=1),
        own_report(pair, second, sequence=1 << 62, term=pair.server.term - 1),
        own_report(pair, second, sequence=1 << 62, term=pair.server.term + 1),
    )
    pair.server.take(stale)
    assert {each.rank: each for each in pair.server.core.ranks} == known
    pair.server.take([own_report(pair, second, sequence=1 << 62)])
    await second.until_reported(boundary=60)


async def test_neighbours_that_have_nothing_to_say_are_not_silent_and_one_that_is_frozen_is_known_on_both_sides() -> (
    None
):
    made = Network(2, deadline_seconds=0.3)
    first, second = made.nodes
    try:
        await second.until_reported(boundary=0)
        first_word = dict(first.member.heard_at), dict(second.member.heard_at)
        # The nodes exchange messages regularly, even if no state changes.
        await made.until(lambda: first.member.heard_at[second.id] > first_word[0][second.id] + 0.6)
        await made.until(lambda: second.member.heard_at[first.id] > first_word[1][first.id] + 0.6)
        assert (first.member.silent, second.member.silent) == (frozenset(), frozenset())
        await second.stop()
        # open a silent connection, like a frozen agent's: the kernel answers, the process does not
        line = await second.dial(first.id)
        await line.send(RoundReport(generation=GENERATION, nodes=()))
        await made.until(lambda: first.member.silent == {second.id})
        await line.send(RoundReport(generation=GENERATION, nodes=()))
        await made.until(lambda: first.member.silent == frozenset())
        line.close()
        second.start()
        await made.until(lambda: first.id in second.member.heard_at)
        await first.stop()
        await made.until(lambda: second.member.silent == {first.id})
    finally:
        await made.close()


async def test_a_node_with_nothing_to_say_is_heard_however_often_it_looks() -> None:
    """A node wakes up often without a new report. It must still send its regular message in time.

    Otherwise, its parent would treat the node as silent.
    """
    deadline = 1.0
    made = Network(2, deadline_seconds=deadline)
    first, second = made.nodes
    first.votes = second.votes = False

    async def look_often() -> None:
        while True:
            second.member.changed.notify()
            await asyncio.sleep(deadline / 30)

    looking = asyncio.create_task(look_often())
    try:
        await second.until_reported(boundary=0)
        heard_at = first.member.heard_at[second.id]
        await made.until(lambda: first.member.heard_at[second.id] > heard_at + deadline)
        assert first.member.silent == frozenset()
    finally:
        await end(looking)
        await made.close()
