"""An agent in a thread, for tests. Its socket, pages and slots are real files, but it agrees with no other node.

The agent proposes a step and waits until every rank has captured it or one rank has abandoned it. Then it seals and
commits the step, and proposes the next. `hold` stops further proposals, and `finish` answers ranks that wait in
`close`.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from everstep.protocol.codec import LENGTH, decode, frame, frame_length
from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_UNABLE,
    ECHO_YES,
    NONE,
    RANK_WORD_BYTES,
    Abandoned,
    AgentHalf,
    Arriving,
    Captured,
    EarlierLayout,
    FetchedShard,
    FetchShard,
    Logged,
    PageChanged,
    RankFault,
    RankHalf,
    RankHello,
    RankStanding,
    RankToAgent,
    SlotsGranted,
    SlotsRequest,
    StopState,
    Vote,
    Welcome,
    files_of,
    read_rank_half,
    write_agent_half,
)
from everstep.protocol.rehearsals import Rehearsed
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header, payload_digest, unpack_header

JOB = "job"
RUN = "ab" * 16
REHEARSED_STEPS = 3
PIECE_BYTES = 256
"""Minimum size of the pieces in which the agent writes the state to restore, while its rank waits."""
PIECES = 50
"""Maximum number of pieces. The agent sends a message per piece, and a rank that does not read must not block it."""


class Line:
    """The fake agent's state of the connection to one rank."""

    def __init__(self, directory: Path, rank: int, generation: int) -> None:
        self.rank = rank
        self.page_path = directory / f"page-{rank}-{generation}"
        self.slot_paths = [directory / f"slot-{rank}-{generation}-{number}" for number in (0, 1)]
        if not self.page_path.exists():
            self.page_path.write_bytes(bytes(RANK_WORD_BYTES))
        with self.page_path.open("r+b") as file:
            self.page = memoryview(mmap.mmap(file.fileno(), RANK_WORD_BYTES))
        self.half = AgentHalf(generation)
        self.connection: socket.socket | None = None
        self.request: SlotsRequest | None = None
        self.captured: Captured | None = None

    def say(self, message: object) -> None:
        if (connection := self.connection) is None:
            return
        data = frame(message)  # type: ignore[arg-type]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(name, "r+b")) for name in files_of(message)]  # type: ignore[arg-type]
            try:
                sent = socket.send_fds(connection, [data], [file.fileno() for file in files])
                connection.sendall(data[sent:])
            except OSError:
                self.connection = None

    def write(self, **changes: object) -> None:
        self.half = replace(self.half, **changes)  # type: ignore[arg-type]
        write_agent_half(self.page, self.half)


POLL_SECONDS = 0.05


class FakeAgent:
    """Serves all ranks of one generation. On exit, the context manager ends the threads and closes the files."""

    def __init__(
        self,
        directory: Path,
        world_size: int,
        generation: int = 1,
        *,
        base_step: int = 0,
        base_slots: dict[int, Path] | None = None,
        earlier: dict[int, Path] | None = None,
        first: int = 1,
        lead: int = 2,
        commit_target: int = 1,
        arrives: bool = False,
        on_message: Callable[[FakeAgent, int, object], None] | None = None,
        polls: bool = False,
    ) -> None:
        self.path = directory / f"agent-{generation}.sock"
        self.generation = generation
        self.base_step = base_step
        self.base_slots = base_slots or {}
        self.earlier = earlier
        """Slots of the step to restore, by the rank that captured them.

        Set if another number of ranks captured that step. A missing entry is a lost slot.
        """
        self.lines = [Line(directory, rank, generation) for rank in range(world_size)]
        self.committed = NONE
        self.proposed = NONE
        self.newest = max(base_step, first - 1)
        self.lead = lead
        self.commit_target = commit_target
        self.commits: list[int] = []
        self.sealed: dict[tuple[int, int], Path] = {}
        """File of each sealed slot, by rank and step."""
        self.messages: list[tuple[int, object]] = []
        self.changed = threading.Condition(threading.RLock())
        self.reached = threading.Event()
        """Set when `commit_target` steps are committed."""
        self.is_held = False
        self._polls = polls
        """True if the agent also reads the ranks' pages at intervals. A rank may lose a message.

        `on_message` then receives None as the message.
        """
        self._has_stopped = threading.Event()
        self._arrives = arrives
        """True if the agent sends the step to restore only after its rank has connected.

        The agent then writes the state twice. The first attempt stops in the middle and contains wrong bytes.
        """
        self._on_message = on_message
        self._server: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        for line in self.lines:
            line.write()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a rank finds this agent."""
        return {
            "EVERSTEP_AGENT_SOCKET": str(self.path),
            "EVERSTEP_JOB_NAME": JOB,
            "EVERSTEP_RUN_ID": RUN,
            "EVERSTEP_GENERATION": str(self.generation),
        }

    def __enter__(self) -> FakeAgent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for line in self.lines:
            line.page.release()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen(16)
        self._has_stopped.clear()
        self._spawn(self._accept, self._server)
        if self._polls:
            self._spawn(self._poll)

    def stop(self) -> None:
        """Close the socket and all connections, as if the agent had died."""
        self._has_stopped.set()
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._server = None
        for line in self.lines:
            if line.connection is not None:
                connection, line.connection = line.connection, None
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        self._threads.clear()
        self.path.unlink(missing_ok=True)

    def of_kind(self, kind: type) -> list[tuple[int, object]]:
        with self.changed:
            return [(rank, message) for rank, message in self.messages if isinstance(message, kind)]

    def wait_for(self, condition: Callable[[], object], timeout: float = 30) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), f"not in {timeout} s; heard {self.messages[-10:]}"

    def announce_stop(self, step: int, state: StopState) -> None:
        with self.changed:
            for line in self.lines:
                line.write(stop=step, stop_state=state)
                line.say(PageChanged())

    def rehearse(self) -> list[Rehearsed]:
        """Let all ranks rehearse at an agreed step, and return their reports in order of rank."""
        earlier = len(self.of_kind(Rehearsed))
        step = self.announce_rehearsal()
        if {half.rehearsal_echo for half in self.rank_halves()} == {ECHO_YES}:
            self.confirm_rehearsal(step)
        self.wait_for(lambda: len(dict(self.of_kind(Rehearsed)[earlier:])) == len(self.lines), 120)
        newest = dict(self.of_kind(Rehearsed)[earlier:])
        self.say_rehearsal(step, StopState.NONE)
        return [newest[line.rank] for line in self.lines]  # type: ignore[misc]

    def announce_rehearsal(self) -> int:
        """Announce later and later steps until no rank has passed the first of its steps."""
        lead = REHEARSED_STEPS + self.lead
        self.wait_for(lambda: all(line.connection is not None for line in self.lines))
        while True:
            step = max((half.boundary for half in self.rank_halves()), default=0) + lead
            self.say_rehearsal(step, StopState.ANNOUNCED)
            self.wait_for(lambda step=step: all(half.rehearsal_step == step for half in self.rank_halves()))
            if ECHO_NO not in {half.rehearsal_echo for half in self.rank_halves()}:
                return step
            self.say_rehearsal(step, StopState.NONE)
            lead *= 2

    def confirm_rehearsal(self, step: int) -> None:
        """Confirm the rehearsal when all ranks wait at its step, unless a rank cannot rehearse after all."""
        self.wait_for(
            lambda: (
                ECHO_UNABLE in {half.rehearsal_echo for half in self.rank_halves()}
                or all(half.boundary == step for half in self.rank_halves())
            )
        )
        is_agreed = {half.rehearsal_echo for half in self.rank_halves()} == {ECHO_YES}
        self.say_rehearsal(step, StopState.CONFIRMED if is_agreed else StopState.NONE)

    def say_rehearsal(self, step: int, state: StopState) -> None:
        with self.changed:
            for line in self.lines:
                line.write(rehearsal=step, rehearsal_state=state, rehearsal_steps=REHEARSED_STEPS)
                line.say(PageChanged())

    def rank_halves(self) -> list[RankHalf]:
        return [half for line in self.lines if (half := read_rank_half(line.page)) is not None]

    def halves(self) -> list[object]:
        return [read_rank_half(line.page) for line in self.lines]

    # -- threads and private methods

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _poll(self) -> None:
        while not self._has_stopped.wait(POLL_SECONDS):
            with self.changed:
                for line in self.lines:
                    if line.request is not None and self._on_message is not None:
                        self._on_message(self, line.rank, None)
                self._propose()
                self.changed.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        line: Line | None = None
        with connection:
            while (message := self._read(connection)) is not None:
                with self.changed:
                    if isinstance(message, RankHello):
                        line = self.lines[message.rank]
                        line.connection = connection
                        self.send_welcome(line, message)
                    assert line is not None
                    self.messages.append((line.rank, message))
                    if self._on_message is not None:
                        self._on_message(self, line.rank, message)
                    self.take(line, message)
                    self.changed.notify_all()
            if line is not None and line.connection is connection:
                line.connection = None

    @staticmethod
    def _read(connection: socket.socket) -> object | None:
        def exactly(count: int) -> bytes | None:
            data = b""
            while len(data) < count:
                try:
                    piece = connection.recv(count - len(data))
                except OSError:
                    return None
                if not piece:
                    return None
                data += piece
            return data

        prefix = exactly(LENGTH.size)
        body = exactly(frame_length(prefix)) if prefix is not None else None
        return decode(body, RankToAgent) if body is not None else None  # type: ignore[arg-type]

    def send_welcome(self, line: Line, hello: RankHello) -> None:
        assert (hello.job, hello.run, hello.generation) == (JOB, RUN, self.generation)
        base = self.base_slots.get(line.rank)
        if base is not None and self._arrives:
            self._spawn(self._bring, line, base)
        else:
            self._say_welcome(line, base)

    def _bring(self, line: Line, base: Path) -> None:
        """Write the state to restore in pieces: first half of it with wrong bytes, then all of it with the
        right bytes.
        """
        data = base.read_bytes()
        header = unpack_header(data[:HEADER_BYTES])
        path = line.page_path.with_name(f"{line.page_path.name}.base")
        path.write_bytes(bytes(len(data)))
        begin, end = HEADER_BYTES, HEADER_BYTES + header.index_offset
        piece = max(PIECE_BYTES, -(-(end - begin) // PIECES))
        with path.open("r+b", buffering=0) as file:
            for load, content, stop in ((1, bytes(reversed(data)), (begin + end) // 2), (2, data, end)):
                line.write(load=load, verified=0)
                file.seek(begin)
                file.write(bytes(end - begin) + data[end:])
                line.say(
                    Arriving(
                        generation=self.generation,
                        word_path=str(line.page_path),
                        base_step=self.base_step,  # type: ignore[arg-type]
                        base_slot_path=str(path),
                        load=load,
                        index_offset=header.index_offset,
                        index_bytes=header.index_bytes,
                    )
                )
                for offset in range(begin, stop, piece):
                    file.seek(offset)
                    file.write(content[offset : min(stop, offset + piece)])
                    line.write(verified=min(stop, offset + piece) - begin)
                    line.say(PageChanged())
            file.seek(0)
            file.write(data[:HEADER_BYTES])
        self._say_welcome(line, path)

    def _say_welcome(self, line: Line, base: Path | None) -> None:
        layout = None
        if self.earlier is not None:
            layout = EarlierLayout(world_size=max(self.earlier) + 1, here=())
        line.say(
            Welcome(
                generation=self.generation,
                word_path=str(line.page_path),
                base_step=self.base_step,  # type: ignore[arg-type]
                base_slot_path=str(base) if base else None,
                relayout=layout,
            )
        )

    def take(self, line: Line, message: object) -> None:
        if isinstance(message, FetchShard):
            assert self.earlier is not None
            path = self.earlier.get(message.owner_rank)
            problem = "" if path else "its node is lost"
            line.say(FetchedShard(owner_rank=message.owner_rank, path=str(path or ""), problem=problem))
        elif isinstance(message, SlotsRequest):
            line.request = message
            for path in line.slot_paths:
                self._make_slot(line, path, message)
            paths = tuple(str(path) for path in line.slot_paths)
            line.say(SlotsGranted(layout_hash=message.layout_hash, capacity_bytes=message.capacity_bytes, paths=paths))
            if self.proposed != NONE:
                self._drop()
        elif isinstance(message, Captured) and message.step == self.proposed:
            line.captured = message
            if all(each.captured is not None for each in self.lines):
                self.commit()
        elif isinstance(message, Abandoned) and message.step == self.proposed:
            self._drop()
        self._propose()
        self._finish()

    def _make_slot(self, line: Line, path: Path, request: SlotsRequest) -> None:
        """Create a slot file under a path, without changing an older file that processes still map."""
        path.unlink(missing_ok=True)
        header = self._header(line, request.capacity_bytes, SlotState.EMPTY)
        with path.open("wb") as file:
            file.write(pack_header(header))
            file.truncate(HEADER_BYTES + request.capacity_bytes)

    def _header(self, line: Line, capacity: int, state: SlotState, **fields: object) -> SlotHeader:
        return SlotHeader(
            job=JOB,  # type: ignore[arg-type]
            run=RUN,  # type: ignore[arg-type]
            owner_rank=line.rank,  # type: ignore[arg-type]
            origin_generation=self.generation,  # type: ignore[arg-type]
            state=state,
            capacity_bytes=capacity,
            **{"step": 0, **fields},  # type: ignore[arg-type]
        )

    def _propose(self) -> None:
        """Propose the next step to all ranks, unless a step is still proposed or a rank has no slots yet."""
        boundaries = [half.boundary for half in (read_rank_half(line.page) for line in self.lines) if half is not None]
        is_idle = self.proposed == NONE and not self.is_held and len(self.commits) < self.commit_target
        if not is_idle or any(line.request is None for line in self.lines):
            return
        self.newest = self.proposed = max(self.newest + 1, max(boundaries) + self.lead)
        slot = len(self.commits) % 2
        for line in self.lines:
            line.captured = None
            line.write(proposed=self.proposed, slot=slot, committed=self.committed, vote_step=NONE, vote=Vote.NONE)
            line.say(PageChanged())

    def _drop(self) -> None:
        self.proposed = NONE
        # The rank that abandoned the step received the proposal too late. Propose steps earlier from now on.
        self.lead += 2
        for line in self.lines:
            line.write(proposed=NONE, slot=NONE)

    def commit(self) -> None:
        for line in self.lines:
            assert line.captured is not None
            self.sealed[line.rank, self.proposed] = self._seal(line, line.captured)
        self.committed, self.proposed = self.proposed, NONE
        self.commits.append(self.committed)
        for line in self.lines:
            line.write(committed=self.committed, proposed=NONE, slot=NONE)
            line.say(PageChanged())
        if len(self.commits) >= self.commit_target:
            self.reached.set()

    def _seal(self, line: Line, captured: Captured) -> Path:
        path = line.slot_paths[captured.slot]
        data = path.read_bytes()
        payload = data[HEADER_BYTES : HEADER_BYTES + captured.payload_bytes]
        header = self._header(
            line,
            unpack_header(data[:HEADER_BYTES]).capacity_bytes,
            SlotState.SEALED,
            step=captured.step,
            payload_bytes=captured.payload_bytes,
            index_offset=captured.index_offset,
            index_bytes=captured.index_bytes,
            payload_digest=payload_digest(payload),
            layout_hash=captured.layout_hash,
        )
        with path.open("r+b") as file:
            file.write(pack_header(header))
        return path

    def _finish(self) -> None:
        """Release the ranks once all of them wait in `close`."""
        halves = [read_rank_half(line.page) for line in self.lines]
        if (
            all(half is not None and half.standing in (RankStanding.CLOSING, RankStanding.CLOSED) for half in halves)
            and not self.is_held
            and self.proposed == NONE
        ):
            for line in self.lines:
                line.write(proposed=-2, slot=NONE)
                line.say(PageChanged())

    def logged(self) -> list[Logged]:
        return [message for _, message in self.of_kind(Logged)]  # type: ignore[misc]

    def faults(self) -> list[RankFault]:
        return [message for _, message in self.of_kind(RankFault)]  # type: ignore[misc]
