"""Measures a round with 2 to 1,024 agents, in a flat tree of connections and in Everstep's tree.

Real `RoundMember`s and a `RoundServer`, one rank each, run on one core, connected by `TcpSession`s over socket pairs.
Every rank votes at once. The busiest agent's CPU time per level, summed over levels, estimates a round in a cluster
without network latency.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec

from benchmarks.errors import BenchmarkFailed
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.peer_messages import Open
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import Announcement, RankRound
from worker.core.rounds import NONE, Coordinator
from worker.core.tree import ARITY, RoundTree
from worker.replication.coordinator import RoundServer
from worker.replication.round_member import RoundMember
from worker.replication.tcp import TcpSession
from worker.tasks import end

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WARM_UP_ROUNDS, ROUNDS = 5, 20
MOST_SECONDS = 120.0
FLAT = 1 << 20
"""More than any number of agents."""
_agent: contextvars.ContextVar[int] = contextvars.ContextVar("agent")


@dataclass(frozen=True, slots=True)
class RoundFigure:
    """Rounds with one number of agents in one tree."""

    agents: int
    arity: int
    depth: int
    round_ms: float
    """Mean from one commit to the next, with all agents on one core."""
    path_ms: float
    """Estimate for a cluster: mean CPU time of the busiest agent per level, summed."""
    root_ms: float
    """Mean CPU time of the coordinator's agent."""
    root_messages: float
    """Messages that the coordinator's agent receives per round."""

    @property
    def is_flat(self) -> bool:
        """Whether every agent connects directly to the coordinator."""
        return self.arity == FLAT


class Timed(Coroutine[Any, Any, Any]):
    """A coroutine that adds its CPU time to its agent's."""

    def __init__(self, inner: Coroutine[Any, Any, Any], spent: defaultdict[int, float]) -> None:
        self._inner, self._spent, self._owner = inner, spent, _agent.get(-1)

    def send(self, value: object) -> object:
        """Run the coroutine until it waits, and count its CPU time."""
        began = time.thread_time()
        try:
            return self._inner.send(value)
        finally:
            self._spent[self._owner] += time.thread_time() - began

    def throw(self, *error: Any) -> object:
        """Raise an error in the coroutine, and run the coroutine until it waits."""
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


class CountedSession(TcpSession):
    """A session that counts its messages by receiving node."""

    reports: ClassVar[Counter[NodeId]] = Counter()

    async def send(self, *messages: Message) -> None:
        self.reports[self.peer] += len(messages)
        await super().send(*messages)


class Fleet:
    """The simulated agents of one generation, with their sessions in a tree."""

    def __init__(self, count: int, arity: int) -> None:
        self.ids = [NodeId(f"i-{number}") for number in range(count)]
        self.tree = RoundTree.of(
            self.ids[0], {node: [Rank(number)] for number, node in enumerate(self.ids)}, arity=arity
        )
        self.states = [
            RankRound(rank=Rank(n), boundary=Step(0), committed=NONE, proposed=NONE, vote=Vote.NONE)
            for n in range(count)
        ]
        core = Coordinator(world_size=count, base=Step(0), every_steps=0).begin()
        self.server = RoundServer(Generation(1), core, final_round_seconds=60.0, now=time.time)
        self.members = [
            RoundMember(
                Generation(1),
                node,
                tree=self.tree,
                state=partial(self._state, number),
                apply_announcement=partial(self._hear, number),
                deadline_seconds=30.0,
            )
            for number, node in enumerate(self.ids)
        ]
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start each `RoundMember`, and the `RoundServer`."""
        for number, member in enumerate(self.members):
            _agent.set(number)
            run = (
                member.run(partial(self._dial, number), patience_seconds=60.0, is_restarted=False)
                if number
                else member.run_local(self.server)
            )
            self.tasks.append(asyncio.create_task(run))

    async def _dial(self, number: int, peer: NodeId) -> TcpSession:
        above = self.ids.index(peer)
        lines = socket.socketpair()
        for line in lines:
            line.setblocking(False)
        opened = Open(
            run=RunId("r"),
            generation=Generation(1),
            kind="round",
            node_id=self.ids[number],
            owner_rank=Rank(-1),
            nonce=b"",
        )
        theirs, ours = TcpSession(lines[1], opened, self.ids[number]), CountedSession(lines[0], opened, peer)
        for session in (theirs, ours):
            # A session calls `read_ahead` at the end of its handshake. These sessions have no handshake.
            session.read_ahead()
        _agent.set(above)
        self.tasks.append(asyncio.create_task(self._serve(above, theirs)))
        _agent.set(number)
        return ours

    async def _serve(self, number: int, session: TcpSession) -> None:
        try:
            await self.members[number].serve(session)
        finally:
            session.close()

    def _state(self, number: int) -> tuple[RankRound, ...]:
        return (self.states[number],)

    def _hear(self, number: int, heard: Announcement) -> None:
        vote = Vote.ACKED if heard.proposed != NONE else Vote.NONE
        boundary = max(heard.proposed, self.states[number].boundary)
        state = self.states[number]
        self.states[number] = msgspec.structs.replace(
            state, boundary=boundary, committed=heard.committed, proposed=heard.proposed, vote=vote
        )
        self.members[number].changed.notify()

    async def committed(self, step: int) -> None:
        """Wait for a commit, normally seconds. Raises BenchmarkFailed after minutes."""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                while self.server.core.committed < step:
                    await self.server.changed.wait(self.server.changed.version)
        except TimeoutError as error:
            raise BenchmarkFailed(
                f"{len(self.ids)} agents: step {step} is not committed in {MOST_SECONDS:.0f} s"
            ) from error

    def level(self, number: int) -> int:
        """Return the connections between an agent and the coordinator."""
        return len(self.tree.ancestors(self.ids[number]))


async def measure(count: int, arity: int) -> RoundFigure:
    """Return means over `ROUNDS` rounds of `count` agents. `arity` is the largest number of children."""
    spent: defaultdict[int, float] = defaultdict(float)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(
        lambda loop, coroutine, **options: asyncio.Task(Timed(coroutine, spent), loop=loop, **options)
    )  # type: ignore[arg-type]
    fleet = Fleet(count, arity)
    fleet.begin()
    await fleet.committed(WARM_UP_ROUNDS)
    # Exclude the existing objects from garbage collection, because a real agent does not have the objects of all
    # agents.
    gc.freeze()
    gc.disable()
    spent.clear()
    CountedSession.reports.clear()
    first, began = fleet.server.core.committed, time.perf_counter()
    await fleet.committed(first + ROUNDS)
    took, rounds = time.perf_counter() - began, fleet.server.core.committed - first
    gc.enable()
    gc.unfreeze()
    loop.set_task_factory(None)
    await end(*fleet.tasks)
    fleet.server.close()
    busiest: defaultdict[int, float] = defaultdict(float)
    for number in range(count):
        busiest[fleet.level(number)] = max(busiest[fleet.level(number)], spent[number])
    each, reports = 1000 / rounds, CountedSession.reports[fleet.ids[0]]
    return RoundFigure(
        count, arity, max(busiest), took * each, sum(busiest.values()) * each, spent[0] * each, reports / rounds
    )


def measure_all(counts: Sequence[int], say: Callable[[str], None]) -> list[RoundFigure]:
    """Measure rounds with each number of agents, in both trees. The process must do nothing else."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found = []
    for count in counts:
        for arity in (FLAT, ARITY) if count - 1 > ARITY else (FLAT,):
            figure = asyncio.run(measure(count, arity))
            shape = "flat" if figure.is_flat else f"over a tree of {figure.depth} levels"
            say(
                f"{count} agents {shape}: {figure.round_ms:.2f} ms on one core, "
                f"{figure.path_ms:.2f} ms with a machine per agent"
            )
            found.append(figure)
    return found
