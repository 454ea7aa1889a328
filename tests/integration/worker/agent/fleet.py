"""Real agents in one event loop. Their slots on tmpfs, their TCP connections and their agreement on steps are real. The
control plane, the ranks and the shims (which start ranks) are fakes that tests control.

A scripted rank makes one step at a time. Its state at step k is a function of (rank, k), so that tests can check
every byte that an agent holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import io
import mmap
import socket
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from control_plane.certificates import FleetAuthorities
from control_plane.core import recovery
from control_plane.core.observed.steps import GenerationRecord
from everstep.protocol.agent_messages import (
    AgentReport,
    AgentToControl,
    AgentWelcome,
    ControlToAgent,
    ExitClass,
    Hello,
    Load,
    LogLines,
    MemberPhase,
    MemberReport,
    Prepare,
    RankExit,
    Release,
    SnapshotBytes,
    SnapshotHeld,
    Start,
    UploadedShard,
)
from everstep.protocol.codec import LENGTH, Message, decode, encode, frame
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.parity import is_share
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    Relayout,
    ScriptPlan,
    ShardSource,
    SlotReference,
    SourceArchive,
    Timeouts,
)
from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_YES,
    NONE,
    RANK_WORD_BYTES,
    Abandoned,
    AgentHalf,
    AgentToRank,
    Arriving,
    Boundary,
    Captured,
    Capturing,
    EarlierLayout,
    FetchedShard,
    FetchShard,
    PageChanged,
    Phase,
    RankFault,
    RankHalf,
    RankHello,
    RankStanding,
    SlotsGranted,
    SlotsRequest,
    StopState,
    UnkeptCause,
    Welcome,
    read_agent_half,
    write_rank_half,
)
from everstep.protocol.rehearsals import Rehearsed
from everstep.protocol.slot import HEADER_BYTES, SlotIndex, digest, pack_index, unpack_header
from tests.fakes.identities import FLEET, SECRET
from tests.fakes.storage import MemoryAws, MemoryObjectStore
from tests.newer_release import of_newer_release
from worker.agent.agent import Agent
from worker.agent.settings import AgentSettings
from worker.errors import RanksNotGone
from worker.node.health.memory import ProcessMemory
from worker.node.health.watch import HealthWatch
from worker.node.unix_socket import listen_private
from worker.ranks.environment import Packages, Supplied
from worker.ranks.shim.messages import RankRecord
from worker.shm.held_files import FILES_SOCKET, HeldFiles
from worker.tasks import Signal

JOB, RUN = JobName("job"), RunId("ab" * 16)
BUCKET = "bucket"
LAYOUT = digest(b"layout")
STATE_BYTES = 96 * 1024
CAPACITY_BYTES = 128 * 1024
MEMORY_BYTES = 1 << 24
KEY_BYTES = 32
PATIENCE_SECONDS = 40.0
TIMEOUTS = Timeouts(
    detection_seconds=3.0,
    lease_seconds=3.0,
    holder_deadline_seconds=3.0,
    prepare_deadline_seconds=6.0,
    gone_seconds=15.0,
    coordinator_deadline_seconds=15.0,
    final_round_seconds=30.0,
    welcome_seconds=30.0,
    exclude_seconds=60.0,
    blind_wait_seconds=120.0,
    stall_seconds=30.0,
    hang_seconds=90.0,
    new_phase_seconds=600.0,
)


def state(rank: int, step: int) -> bytes:
    """Return the content of a rank's state after a step."""
    seed = hashlib.sha256(f"{rank} {step}".encode()).digest()
    return seed * (STATE_BYTES // len(seed))


def payload(rank: int, step: int) -> tuple[bytes, int]:
    """Return the payload of a rank's slot after a step, and the offset of the payload's index."""
    data = state(rank, step)
    return data + pack_index(SlotIndex(tensors=(), values=b"")), len(data)


async def until(what: str, arrived: Callable[[], object]) -> None:
    """Wait until a condition is true. Other tasks of the event loop make it true."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not arrived():  # noqa: ASYNC110   # no common signal covers the conditions of all tasks
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {PATIENCE_SECONDS} s for {what}") from None


class ControlPlane:
    """A fake control plane. It records the agents' reports and sends the messages that the test passes to it."""

    def __init__(self) -> None:
        self.reports: dict[NodeId, AgentReport] = {}
        self.heard = Signal()
        """Notified after every report."""
        self.hellos: list[Hello] = []
        self.lines: list[LogLines] = []
        self.answers: asyncio.Queue[SnapshotHeld | SnapshotBytes] = asyncio.Queue()
        """Answers to requests for snapshots, in order of arrival."""
        self.tokens: list[str] = []
        self.url = ""
        self.is_newer_release = False
        """True: `send` adds fields to every message, as a later release of the control plane would."""
        self.issues_certificates = True
        self._lines: dict[NodeId, ServerConnection] = {}

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ControlPlane]:
        async with serve(self._speak, "127.0.0.1", 0, compression=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            yield self

    async def send(self, node_id: NodeId, message: Message) -> None:
        data = encode(message)
        await self._lines[node_id].send(of_newer_release(data, ControlToAgent) if self.is_newer_release else data)

    def is_connected(self, node_id: NodeId) -> bool:
        return node_id in self._lines

    def member(self, node_id: NodeId) -> MemberReport | None:
        report = self.reports.get(node_id)
        return report.member if report is not None else None

    async def _speak(self, line: ServerConnection) -> None:
        assert line.request is not None
        self.tokens.append(line.request.headers["Authorization"])
        hello = decode(await line.recv(decode=False), Hello)
        self.hellos.append(hello)
        await line.send(
            encode(AgentWelcome(session_token=f"session-{hello.node_id}", fleet="fleet", timeouts=TIMEOUTS))
        )
        if self.issues_certificates and hello.public_key is not None:
            authorities = FleetAuthorities(SECRET)
            await line.send(
                encode(authorities.issue(FLEET, hello.node_id, hello.public_key, datetime.datetime.now(datetime.UTC)))
            )
        self._lines[hello.node_id] = line
        try:
            with contextlib.suppress(ConnectionClosed):
                async for data in line:
                    report = decode(data, AgentToControl)  # type: ignore[arg-type]
                    if isinstance(report, LogLines):
                        self.lines.append(report)
                        continue
                    if isinstance(report, SnapshotHeld | SnapshotBytes):
                        self.answers.put_nowait(report)
                        continue
                    assert isinstance(report, AgentReport)
                    self.reports[hello.node_id] = report
                    self.heard.notify()
        finally:
            if self._lines.get(hello.node_id) is line:
                del self._lines[hello.node_id]
                self.reports.pop(hello.node_id, None)


@dataclass
class ScriptedRank:
    """A fake rank that makes a step when the test calls `step`."""

    plan: GenerationPlan
    rank: Rank
    socket: Path
    files: HeldFiles
    """The files of the node. A real rank receives their descriptors."""
    boundary: int = -1
    first_passed: int = 0
    """Monotonic microseconds at which the rank passed its first step, as its page shows."""
    base: int = 0
    settled: int = NONE
    arriving: Arriving | None = None
    restored: bytes | None = None
    capacity_bytes: int = CAPACITY_BYTES
    """Capacity of the slots that the rank requests."""
    captures: bool = True
    """False: the rank captures no step, even if a slot is granted, like a rank whose capture never ends."""
    stops_at: int | None = None
    """Number of bytes after which the rank's copier pauses. None: the copier does not pause."""
    half_captured: Capturing | None = None
    """The message that the rank sent when it paused its capture."""
    slots: SlotsGranted | None = None
    refusals: list[str] = field(default_factory=list)
    connection_count: int = 0
    standing: RankStanding = RankStanding.MOVING
    rehearsal: tuple[int, int] = (NONE, 0)
    """The announced rehearsal that the rank has answered, and its answer."""
    wants: Collection[Rank] | None = None
    """Earlier ranks whose shards this rank fetches, if the number of ranks has changed. None: all earlier ranks."""
    earlier: dict[Rank, bytes] = field(default_factory=dict)
    """Payloads of the earlier shards that the rank has fetched."""
    problems: list[str] = field(default_factory=list)
    """Reasons that the agent gave for shards that it could not fetch."""
    welcome: Welcome | None = None
    _page: mmap.mmap | None = None
    _writer: asyncio.StreamWriter | None = None

    async def live(self) -> None:
        """Connect to the agent, and reconnect after each lost connection, until cancelled."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve()
            self._writer = None
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            writer.write(
                frame(RankHello(job=JOB, run=self.plan.run, generation=self.plan.generation, rank=self.rank, pid=1))
            )
            while isinstance(welcome := await self._read(reader), Arriving | PageChanged):
                if isinstance(welcome, Arriving):
                    self.arriving = welcome  # the rank restores its state later, when the agent has all of it
            assert isinstance(welcome, Welcome)
            self.connection_count += 1
            self.welcome = welcome
            self._writer = writer
            if welcome.relayout is not None and self.boundary < 0:
                await self._fetch_earlier(reader, welcome.relayout)
            self._open(welcome)
            self._publish()
            self._send(
                SlotsRequest(generation=self.plan.generation, layout_hash=LAYOUT, capacity_bytes=self.capacity_bytes)
            )
            while True:
                message = await self._read(reader)
                if isinstance(message, SlotsGranted):
                    self.slots = message
        finally:
            writer.close()

    async def _fetch_earlier(self, reader: asyncio.StreamReader, layout: EarlierLayout) -> None:
        """Request the earlier shards one after another, and copy their payloads."""
        for rank in range(layout.world_size) if self.wants is None else self.wants:
            self._send(FetchShard(generation=self.plan.generation, owner_rank=Rank(rank)))
            while not isinstance(message := await self._read(reader), FetchedShard) or message.owner_rank != rank:
                pass
            if message.problem:
                self.problems.append(message.problem)
            else:
                page = self.path_of(message.path).read_bytes()
                size = unpack_header(page[:HEADER_BYTES]).payload_bytes
                self.earlier[Rank(rank)] = page[HEADER_BYTES : HEADER_BYTES + size]

    def path_of(self, name: str) -> Path:
        return Path(f"/proc/self/fd/{self.files.descriptor(name)}")

    def _open(self, welcome: Welcome) -> None:
        self._page = mmap.mmap(self.files.descriptor(welcome.word_path), RANK_WORD_BYTES)
        if self.boundary >= 0:
            return
        self.base = welcome.base_step
        if welcome.base_slot_path is not None:
            page = self.path_of(welcome.base_slot_path).read_bytes()
            self.restored = page[HEADER_BYTES : HEADER_BYTES + unpack_header(page[:HEADER_BYTES]).payload_bytes]
        self.boundary = welcome.base_step

    @property
    def is_connected(self) -> bool:
        return self._writer is not None and self.slots is not None

    @property
    def word(self) -> AgentHalf:
        assert self._page is not None
        half = read_agent_half(memoryview(self._page))
        assert half is not None
        return half

    def step(self) -> None:
        """Finish one optimizer step, and react to the agent's half of the shared page as a session does."""
        self.boundary += 1
        self._publish()
        self.look()

    def rehearse(self) -> None:
        """Close the connection to the agent, as a rank that replaces its process does. The rank then connects again."""
        assert self._writer is not None
        self._writer.close()
        self.slots = None

    def report(self, rehearsed: Rehearsed) -> None:
        """Report the result of a rehearsal."""
        self._send(rehearsed)

    def close(self) -> None:
        """Wait after the last step, as a session in `close()` does.

        The test calls `look` to make the rank read the agent's half of the shared page.
        """
        self.standing = RankStanding.CLOSING
        self._publish()

    def look(self) -> None:
        """Read the agent's half of the shared page. Capture the proposed step, or abandon it if it is late."""
        half = self.word
        if half.rehearsal_state is StopState.ANNOUNCED and half.rehearsal != self.rehearsal[0]:
            is_early = self.boundary <= half.rehearsal - half.rehearsal_steps
            self.rehearsal = half.rehearsal, ECHO_YES if is_early else ECHO_NO
            self._publish()
        if half.proposed <= self.base or half.proposed == self.settled or half.proposed > self.boundary:
            return
        if half.proposed < self.boundary:
            if half.vote_step != half.proposed:
                self._settle(
                    Abandoned(
                        generation=self.plan.generation, step=half.proposed, reason="late", cause=UnkeptCause.LATE
                    )
                )
        elif half.slot != NONE and self.slots is not None and self.captures:
            if self.stops_at is None:
                self._settle(Captured(**self._capture(half.proposed, half.slot)))  # type: ignore[arg-type]
            else:
                self.settled = half.proposed
                self.half_captured = Capturing(
                    **self._capture(half.proposed, half.slot, self.stops_at), final_bytes=self.stops_at
                )  # type: ignore[arg-type]
                self._send(self.half_captured)

    def go_on(self) -> None:
        """Complete a paused capture."""
        assert self.half_captured is not None
        self._settle(Captured(**self._capture(self.half_captured.step, self.half_captured.slot)))  # type: ignore[arg-type]
        self.half_captured = None

    def fail(self, code: str) -> None:
        """Report an error of the session, as a session does before it raises the error."""
        self._send(RankFault(generation=self.plan.generation, code=code, message="no"))

    def give_up(self) -> None:
        """Abandon a paused capture, as a rank does when its state changes during the copy."""
        assert self.half_captured is not None
        self._settle(
            Abandoned(
                generation=self.plan.generation,
                step=self.half_captured.step,
                reason="w changed outside an optimizer step",
            )
        )
        self.half_captured = None

    def _capture(self, step: int, slot: int, end: int | None = None) -> dict[str, object]:
        """Write a slot up to `end`. Return the fields of the message that describes the capture."""
        assert self.slots is not None
        data, index_offset = payload(self.rank, step)
        with self.path_of(self.slots.paths[slot]).open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(data[:end])
        return {
            "generation": self.plan.generation,
            "step": Step(step),
            "slot": slot,
            "layout_hash": LAYOUT,
            "payload_bytes": len(data),
            "index_offset": index_offset,
            "index_bytes": len(data) - index_offset,
        }

    def _settle(self, message: Captured | Abandoned) -> None:
        self.settled = message.step
        self._send(message)

    def _publish(self) -> None:
        assert self._page is not None
        half = RankHalf(
            self.plan.generation,
            boundary=self.boundary,
            phase=Phase.TRAIN,
            standing=self.standing,
            first_passed=self.first_passed,
            rehearsal_step=self.rehearsal[0],
            rehearsal_echo=self.rehearsal[1],
        )
        write_rank_half(memoryview(self._page), half)
        self._send(Boundary(generation=self.plan.generation, boundary=Step(self.boundary)))

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> Message:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return decode(await reader.readexactly(length), AgentToRank)  # type: ignore[arg-type, no-any-return]


@dataclass
class Ended:
    """How a rank ended, as the supervisor records it."""

    run: RunId
    generation: Generation
    rank: Rank
    exit_class: ExitClass

    def describe(self, boundary: Step) -> RankExit:
        code = 0 if self.exit_class is ExitClass.SUCCESS else -9
        return RankExit(exit_class=self.exit_class, code=code, at_seconds=1.0, boundary=boundary)


class Shim:
    """A fake of the node's supervisor and shim, which outlives the agent. It starts fake ranks and holds the memory."""

    def __init__(self, folder: Path) -> None:
        self.files = HeldFiles()
        self.on_shim: Callable[[], None] = lambda: None
        self._folder = folder
        self._server: socket.socket | None = None
        self.ranks: dict[Rank, ScriptedRank] = {}
        self.packages = Packages()
        self.capacity_bytes = CAPACITY_BYTES
        """Capacity of the slots that the ranks of this node request."""
        self.supplied: dict[str, str] = {}
        """Environment variables that the agent added for the rank that it started last."""
        self.ended: list[Ended] = []
        self.forgotten: list[RunId] = []
        self._tasks: dict[Rank, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.is_warm = True
        self.gone_seconds = 0.0
        self.changed = Signal()
        """Notified when `is_warm` changes."""
        self.proof = asyncio.Event()
        """Set while the node can prove that no rank of an older generation is alive. Tests clear it."""
        self.proof.set()
        self.remaining = 0
        """Number of further calls of `prove_gone` that fail, because processes of older ranks do not end."""
        self.records: tuple[RankRecord, ...] = ()
        """Real processes that represent ranks, in tests that need processes."""

    async def start(self) -> None:
        if self._server is None:
            self._server = listen_private(self._folder / FILES_SOCKET, socket.SOCK_SEQPACKET)
            self._server.setblocking(True)
            threading.Thread(target=self._serve_files, args=(self._server,), daemon=True).start()
        self.on_shim()

    def _serve_files(self, server: socket.socket) -> None:
        """Serve one agent after another, outside the event loop, which the agent's calls block."""
        with contextlib.suppress(OSError), server:
            while True:
                connection, _ = server.accept()
                with connection:
                    while self.files.answer(connection):
                        pass

    def switch_off(self) -> None:
        """End the thread that serves the files."""
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None: ...

    async def prove_gone(self, run: RunId | None) -> None:
        assert not self._tasks
        await self.proof.wait()
        if self.remaining:
            self.remaining -= 1
            raise RanksNotGone("pid 7 still exists")

    async def stop_all(self) -> None:
        for rank in list(self._tasks):
            await self.end(rank, ExitClass.HALTED)

    async def start_rank(
        self, plan: GenerationPlan, here: PlanNode, rank: Rank, entry: Path, *, agent_socket: Path, supplied: Supplied
    ) -> None:
        assert entry.is_file()
        if rank in self.ranks and self.ranks[rank].plan.generation == plan.generation:
            return  # the rank is already started or requested
        self.ranks[rank] = ScriptedRank(plan, rank, agent_socket, self.files, capacity_bytes=self.capacity_bytes)
        self.supplied, self.packages = dict(supplied.environment), supplied.packages
        self._tasks[rank] = asyncio.create_task(self.ranks[rank].live())

    async def next_exit(self, run: RunId, generation: Generation, seen: Collection[Rank]) -> Ended:
        while True:
            for ended in self.ended:
                if (ended.run, ended.generation) == (run, generation) and ended.rank not in seen:
                    return ended
            self._changed.clear()
            await self._changed.wait()

    def halt_now(self, run: RunId, generation: Generation) -> None:
        for rank in list(self._tasks):
            self._tasks[rank].cancel()

    def rank_memory(self, run: RunId, generation: Generation) -> dict[Rank, ProcessMemory]:
        lives = (rank for rank in self._tasks if self.ranks[rank].plan.generation == generation)
        return {rank: ProcessMemory(1000 + rank, 2000 + rank) for rank in lives}

    def forget(self, run: RunId) -> None:
        self.forgotten.append(run)

    def fail_rank(self, plan: GenerationPlan, rank: Rank, reason: str) -> None:
        self.ended.append(Ended(plan.run, plan.generation, rank, ExitClass.ERROR))
        self._changed.set()

    async def forget_started(self) -> None:
        """Reset the shim, as if the agent had died before it requested the start of any rank."""
        await self.stop_all()
        self.ended.clear()
        self.ranks.clear()
        self.supplied = {}

    async def end(self, rank: Rank, exit_class: ExitClass = ExitClass.KILLED) -> None:
        """End a rank and report its exit."""
        task = self._tasks.pop(rank)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.ended.append(Ended(RUN, self.ranks[rank].plan.generation, rank, exit_class))
        self._changed.set()


class Node:
    """One machine with an agent. The machine's folders and fake shim outlive the agent."""

    def __init__(
        self, node_id: NodeId, state_dir: Path, sockets: Path, objects: MemoryObjectStore, control: ControlPlane
    ) -> None:
        self.id = node_id
        self._control = control
        self.shim = Shim(sockets)
        self.sockets = sockets
        self.state_dir = state_dir
        self._objects = objects
        self.aws = MemoryAws(objects)
        self.settings = AgentSettings(
            node_id=node_id,
            address="127.0.0.1",
            state=state_dir,
            sockets=sockets,
            memory_bytes=MEMORY_BYTES,
            control_plane_urls=(control.url,),
            join_token="join",
        )
        self._task: asyncio.Task[None] | None = None

    def start(self, *, health: HealthWatch | None = None) -> None:
        """Start a new agent on the folders of the node."""
        self.agent = Agent(
            self.settings,
            self._objects,
            self.aws,
            self.shim,  # type: ignore[arg-type]
            now=lambda: 1000.0,
            health=health,
        )
        self._task = asyncio.create_task(self.agent.run())

    async def stop(self) -> None:
        """Stop the agent. The ranks continue, and the slots stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await until("its line to end", lambda: not self._control.is_connected(self.id))

    def files(self, pattern: str = "*.slot-*") -> dict[str, Path]:
        """Return the node's slots and pages whose names match, by name without the run, each with a path to open it."""
        held = self.shim.files
        names = {name: name.partition("/")[2] for name in held.names()}
        return {
            short: Path(f"/proc/self/fd/{held.descriptor(name)}")
            for name, short in names.items()
            if fnmatch(short, pattern)
        }

    async def gone(self) -> None:
        """Lose the machine: stop its agent and its ranks. Its folders and its memory remain."""
        await self.stop()
        await self.shim.stop_all()

    def forget(self) -> None:
        """Lose the memory of a machine that is gone, and the promise on its disk."""
        self.shim.files = HeldFiles()
        (self.state_dir / "promise").unlink()


class Fleet:
    """Nodes with their ranks, and their control plane."""

    def __init__(
        self, control: ControlPlane, nodes: list[Node], objects: MemoryObjectStore, source: SourceArchive
    ) -> None:
        self.control = control
        self.nodes = nodes
        self.objects = objects
        self.source = source
        self.generation = 0
        self.plan: GenerationPlan | None = None
        self.per_node = 1
        """Number of ranks per node. A test may set it before the first launch only."""
        self.holder_distance = 1
        """Distance from a rank's node to the node that holds a copy of the rank's shard, in nodes.

        A test may change it between two launches.
        """
        self.max_uploads = 1
        """Maximum number of checkpoints that agents upload at the same time.

        A test may change it before the first launch.
        """
        self.has_parity = False
        """True: all nodes form one group with parity in memory, instead of copies. Set before the first launch only."""
        self.encrypts_peers = False
        """True: plans require TLS between nodes. A test may change it between two launches."""
        self.timeouts: Timeouts | None = None
        """The timeouts in plans; None: `TIMEOUTS`. A test may change them before a launch."""
        self.lineage: list[GenerationRecord] = []
        """Records of the generations that have a plan. `make_parity_plan` chooses the next start step from them."""

    @property
    def ranks(self) -> list[ScriptedRank]:
        return [node.shim.ranks[rank] for index, node in enumerate(self.nodes) for rank in self.ranks_of(index)]

    def ranks_of(self, index: int) -> tuple[Rank, ...]:
        """Return the ranks that run on the node with this index."""
        return tuple(Rank(index * self.per_node + local) for local in range(self.per_node))

    def members(self, phase: MemberPhase) -> bool:
        """Return whether all nodes report the given phase of the newest generation."""
        found = [self.control.member(node.id) for node in self.nodes]
        return all(
            member is not None and (member.generation, member.phase) == (self.generation, phase) for member in found
        )

    async def connected(self) -> None:
        await until(
            "agents to connect",
            lambda: all(self.control.is_connected(node.id) and node.id in self.control.reports for node in self.nodes),
        )

    async def prepare(self) -> None:
        """Begin a new generation, and wait until all nodes have promised to stop older ones."""
        await self.connected()
        self.generation += 1
        for node in self.nodes:
            await self.send(
                node,
                Prepare(
                    job=JOB, run=RUN, generation=Generation(self.generation), parent=Generation(self.generation - 1)
                ),
            )
        await until("promises", lambda: self.members(MemberPhase.PROMISED))

    async def load(self, plan: GenerationPlan | None = None) -> None:
        """Send a plan to all nodes, and wait until they have loaded it.

        By default, make the plan from the inventories that the nodes reported with their promises.
        """
        plan = plan or (self.make_parity_plan() if self.has_parity else self.make_plan())
        for node in self.nodes:
            await self.send(node, Load(plan=plan, key=bytes([self.generation]) * KEY_BYTES))
        await until("loads", lambda: self.members(MemberPhase.LOADED))

    async def begin(self) -> None:
        """Send the message `Start` to all nodes, without waiting until their ranks have started."""
        for node in self.nodes:
            await self.send(node, Start(job=JOB, run=RUN, generation=Generation(self.generation)))

    async def start(self) -> None:
        await self.begin()
        await until(
            "ranks", lambda: self.members(MemberPhase.RUNNING) and all(rank.is_connected for rank in self.ranks)
        )

    async def launch(self) -> None:
        await self.prepare()
        await self.load()
        await self.start()

    async def send(self, node: Node, message: Message) -> None:
        await self.control.send(node.id, message)

    async def release(self) -> None:
        for node in self.nodes:
            await self.send(node, Release(run=RUN))
        await until(
            "idle agents",
            lambda: all(
                node.id in self.control.reports and self.control.member(node.id) is None for node in self.nodes
            ),
        )

    async def train(self, committed: int) -> None:
        """Make steps with all ranks until a step is committed on every page."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.is_committed(committed):
                if self.is_expected():
                    for rank in self.ranks:
                        rank.step()
                else:
                    for rank in self.ranks:
                        rank.look()
                await asyncio.sleep(0.005)

    def is_expected(self) -> bool:
        """Return whether each rank has a granted slot for a step that it has not finished yet."""
        return all(rank.word.slot != NONE and rank.word.proposed > rank.boundary for rank in self.ranks)

    def is_committed(self, step: int) -> bool:
        return all(rank.word.committed >= step for rank in self.ranks)

    def make_plan(self) -> GenerationPlan:
        """Return a plan that places each shard on its owner's node and on one holder.

        The plan starts from the newest step whose shards all exist.
        """
        count = len(self.nodes) * self.per_node
        found: dict[int, dict[Step, list[ShardSource]]] = {rank: {} for rank in range(count)}
        for index, node in enumerate(self.nodes):
            member = self.control.member(node.id)
            assert member is not None
            for slot in member.inventory:
                if is_share(slot.owner_rank):
                    continue
                source = ShardSource(
                    kind="local" if slot.owner_rank in self.ranks_of(index) else "peer",
                    origin_generation=slot.origin_generation,
                    step=slot.step,
                    digest=slot.digest,
                    payload_bytes=slot.payload_bytes,
                    node_id=node.id,
                )
                found[slot.owner_rank].setdefault(slot.step, []).append(source)
        base = max(set.intersection(*(set(steps) for steps in found.values())), default=Step(0))
        sources = [tuple(sorted(found[rank].get(base, ()), key=lambda source: source.kind)) for rank in range(count)]
        keep = {
            node.id: tuple(
                SlotReference(
                    owner_rank=Rank(rank),
                    origin_generation=source.origin_generation,
                    step=source.step,
                    digest=source.digest,
                )
                for rank in range(count)
                for step, places in found[rank].items()
                for source in places
                if step <= base and source.node_id == node.id
            )
            for node in self.nodes
        }
        return self._plan(base, sources if base else [()] * count, keep)

    def make_chosen_plan(self, worlds: Mapping[Generation, int]) -> GenerationPlan:
        """Return the plan that the control plane's decision code chooses. If the number of ranks has changed, it is a
        relayout.

        Args:
            worlds: number of ranks of each earlier generation. Each one continues from the one before.
        """
        chosen = recovery.choose(self._survey(dict.fromkeys(worlds, recovery.UNBOUNDED), worlds))
        return self._plan(chosen.base_step, chosen.sources, chosen.keep, chosen.relayout)

    def _survey(self, path: recovery.Path, worlds: Mapping[Generation, int]) -> recovery.Survey:
        members = {node.id: self.control.member(node.id) for node in self.nodes}
        return recovery.Survey(
            owners=[node.id for index, node in enumerate(self.nodes) for _ in self.ranks_of(index)],
            inventories={node_id: member.inventory for node_id, member in members.items() if member is not None},
            path=path,
            worlds=worlds,
        )

    def _plan(
        self,
        base: Step,
        sources: Sequence[tuple[ShardSource, ...]],
        keep: Mapping[NodeId, tuple[SlotReference, ...]],
        relayout: Relayout | None = None,
    ) -> GenerationPlan:
        self.plan = GenerationPlan(
            job=JOB,
            run=RUN,
            generation=Generation(self.generation),
            parent=Generation(self.generation - 1),
            base_step=base,
            nodes=tuple(
                PlanNode(
                    node_id=node.id,
                    address="127.0.0.1",
                    peer_port=node.agent.listener.port,
                    ranks=self.ranks_of(index),
                    keep=keep[node.id],
                )
                for index, node in enumerate(self.nodes)
            ),
            ranks=tuple(
                RankPlan(
                    rank=rank,
                    holders=self._holders(index),
                    sources=sources[rank],
                    stripe=self._stripe(rank) if self.has_parity else (),
                )
                for index, node in enumerate(self.nodes)
                for rank in self.ranks_of(index)
            ),
            coordinator=self.nodes[0].id,
            master_address="127.0.0.1",
            master_port=1,
            script=ScriptPlan(
                source=self.source,
                entry_point="train.py",
                hyperparameters={},
                environment={},
                output=ObjectReference(bucket=BUCKET, key="output/"),
                logs=ObjectReference(bucket=BUCKET, key="logs/"),
            ),
            checkpoint=CheckpointPlan(
                every_steps=0,
                prefix=ObjectReference(bucket=BUCKET, key="checkpoints/"),
                third_slot=self.max_uploads > 1,
                max_uploads=self.max_uploads,
            ),
            timeouts=self.timeouts or TIMEOUTS,
            relayout=relayout,
            encrypts_peers=self.encrypts_peers,
        )
        self.lineage = [each for each in self.lineage if each.generation < self.generation]
        self.lineage.append(
            GenerationRecord(
                generation=self.plan.generation,
                parent=self.plan.parent,
                base_step=base,
                world_size=self.plan.world_size,
                was_started=True,
            )
        )
        return self.plan

    def _holders(self, index: int) -> tuple[NodeId, ...]:
        if self.has_parity:
            return (self.nodes[index].id, *(node.id for node in self.nodes if node is not self.nodes[index]))
        return self.nodes[index].id, self.nodes[(index + self.holder_distance) % len(self.nodes)].id

    def _stripe(self, rank: Rank) -> tuple[Rank, ...]:
        """Return the ranks of all nodes with the LOCAL_RANK of `rank`."""
        return tuple(Rank(place * self.per_node + rank % self.per_node) for place in range(len(self.nodes)))

    def make_parity_plan(self) -> GenerationPlan:
        """Return the plan that the control plane's decision code chooses, for the same number of ranks."""
        path = recovery.path_of(self.lineage, recovery.newest_started(self.lineage))
        chosen = recovery.choose(self._survey(path, recovery.worlds_of(self.lineage)))
        return self._plan(chosen.base_step, chosen.sources, chosen.keep)

    def make_s3_plan(self, stored: Mapping[Rank, UploadedShard]) -> GenerationPlan:
        """Return a plan that restores all ranks from the shards of one checkpoint."""
        sources = [
            (
                ShardSource(
                    kind="s3",
                    origin_generation=shard.origin_generation,
                    step=shard.step,
                    digest=shard.payload_digest,
                    payload_bytes=shard.payload_bytes,
                    object=shard.object,
                ),
            )
            for _, shard in sorted(stored.items())
        ]
        return self._plan(stored[Rank(0)].step, sources, {node.id: () for node in self.nodes})


def source_archive(objects: MemoryObjectStore) -> SourceArchive:
    """Store an archive with a one-line script, and return its description for a plan."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("train.py")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"pass\n"))
    data = buffer.getvalue()
    place = ObjectReference(bucket=BUCKET, key="source.tar.gz")
    objects.put_bytes(place, data)
    return SourceArchive(object=place, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
