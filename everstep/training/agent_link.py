"""Connects a rank to its node's agent by a unix socket and a shared page (`everstep.protocol.rank_messages`).

Invariant: no call blocks training. A message that the socket does not accept waits in memory until the next call. After
a lost connection, the rank tries to reconnect after each step, and captures no step meanwhile. This module only
transports messages, and the session interprets them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.protocol.codec import LENGTH, Message, decode, frame, frame_length
from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.options import OptionsKept
from everstep.protocol.rank_messages import (
    MAX_LOGGED_BYTES,
    RANK_WORD_BYTES,
    Abandoned,
    AgentHalf,
    AgentToRank,
    Arriving,
    Boundary,
    Captured,
    Capturing,
    FetchedShard,
    FetchShard,
    IdleSpans,
    Logged,
    RankFault,
    RankHalf,
    RankHello,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    Welcome,
    files_of,
    read_agent_half,
    with_files,
    write_rank_half,
)
from everstep.protocol.rehearsals import Rehearsed
from everstep.training.errors import AgentUnreachable, StaleGeneration

RECONNECT_SECONDS = 0.25
MAX_OUTBOX_BYTES = 2 * MAX_LOGGED_BYTES
"""Maximum bytes that wait for the socket. With more, the rank assumes that the agent hangs, and reconnects."""
MAX_FILES = 16
MAX_REASON_CHARACTERS = 4096
"""A longer error text would exceed the agent's message limit, and the agent would close the connection."""

Sent = SlotsRequest | Captured | Abandoned | Boundary | IdleSpans | Logged | OptionsKept | RankFault | Rehearsed


class AgentLink(Protocol):
    """The connection between a session and its agent."""

    @property
    def generation(self) -> Generation:
        """The generation of this rank."""
        ...

    @property
    def has_agent(self) -> bool:
        """False for `NullLink`."""
        ...

    @property
    def slots(self) -> SlotsGranted | SlotsRefused | None:
        """The agent's answer to the newest request for slots; None before it, and after a lost connection."""

    @property
    def word(self) -> AgentHalf | None:
        """The agent's half of the page in this generation at the last read, also while disconnected, or None."""

    def welcome(self) -> Arriving | Welcome:
        """Wait until the agent has named the snapshot to restore. Return its newest message about it."""
        ...

    def watch(self, is_enough: Callable[[AgentHalf | None], bool]) -> None:
        """Read the agent's half of the page after each message of the agent, until `is_enough` returns True for it."""

    def fetch(self, owner_rank: Rank) -> FetchedShard:
        """Request an earlier rank's shard, and wait until the agent has loaded it or reports a problem. Valid only
        after a `Welcome` with `relayout`. Raises AgentUnreachable if the connection was lost for too long.
        """
        ...

    def poll(self) -> AgentHalf | None:
        """Read the agent's half of the page, if connected and readable, then process received messages."""

    def publish(self, half: RankHalf) -> None:
        """Write the rank's half of the page."""

    def send(self, message: Sent) -> None:
        """Send a message as soon as the socket accepts it. Reconnects repeat requests. Safe from any thread."""

    def hint(self, message: Boundary | Capturing) -> None:
        """Send a message whose loss is harmless, once. Safe from any thread."""

    def hold(self, message: Boundary | IdleSpans) -> None:
        """Queue a message until `send` or `let_go`, so that the agent wakes up only once. Safe from any thread. Without
        a connection, or while the socket accepts no bytes, a `Boundary` is dropped.
        """

    def let_go(self) -> None:
        """Send the messages that `hold` has queued. Safe from any thread."""

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None:
        """Close the connection, after sending the messages that the socket accepts immediately."""


class NullLink:
    """Link of a script without an agent. Its methods do nothing or return empty results."""

    generation = Generation(0)
    has_agent = False
    slots = None
    word = None

    def welcome(self) -> Welcome:
        return Welcome(generation=self.generation, word_path="", base_step=Step(0), base_slot_path=None)

    def watch(self, is_enough: Callable[[AgentHalf | None], bool]) -> None: ...

    def fetch(self, owner_rank: Rank) -> FetchedShard:
        return FetchedShard(owner_rank=owner_rank, path="", problem="this rank has no agent")

    def poll(self) -> AgentHalf | None:
        return None

    def publish(self, half: RankHalf) -> None: ...

    def send(self, message: Sent) -> None: ...

    def hint(self, message: Boundary | Capturing) -> None: ...

    def hold(self, message: Boundary | IdleSpans) -> None: ...

    def let_go(self) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class UnixAgentLink:
    """Connection of a rank to its node's agent. `hello` is sent on every new connection. For `welcome_seconds`, the
    rank tries to connect at its start. Once connected, it waits for the snapshot without a limit.
    """

    has_agent = True

    def __init__(
        self,
        path: Path,
        hello: RankHello,
        welcome_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        open_socket: Callable[[], socket.socket] = lambda: socket.socket(socket.AF_UNIX),
    ) -> None:
        self._path = path
        self._hello = hello
        self._welcome_seconds = welcome_seconds
        self._clock = clock
        self._open_socket = open_socket
        # The lock is needed, because the training thread, the copier and the metrics thread all send messages.
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._is_new = True
        self._inbox = bytearray()
        self._files: list[int] = []
        self._outbox = bytearray()
        self._held = b""
        self._received_count = 0
        self._welcome: Arriving | Welcome | None = None
        """The agent's newest message about the snapshot to restore; the last one is a `Welcome`."""
        self._wanted: FetchShard | None = None
        self._fetched: FetchedShard | None = None
        self._page: memoryview | None = None
        self._word: AgentHalf | None = None
        self._half: RankHalf | None = None
        self._slots: SlotsGranted | SlotsRefused | None = None
        self._request: SlotsRequest | None = None
        self._profile: IdleSpans | None = None
        self._outcome: Captured | Abandoned | None = None
        self._rehearsed: Rehearsed | None = None
        self._options: OptionsKept | None = None
        self._next_attempt = clock()
        self._is_closed = False
        _forget_in_children(self)

    @property
    def generation(self) -> Generation:
        return self._hello.generation

    @property
    def slots(self) -> SlotsGranted | SlotsRefused | None:
        return self._slots

    @property
    def word(self) -> AgentHalf | None:
        return self._read() or self._word

    def welcome(self) -> Arriving | Welcome:
        if self._welcome is None:
            self.watch(lambda _: self._welcome is not None)
        assert self._welcome is not None
        return self._welcome

    def watch(self, is_enough: Callable[[AgentHalf | None], bool]) -> None:
        """Poll until `is_enough` accepts the agent's half of the page, before the first step. Raises AgentUnreachable
        if the rank was not connected for `welcome_seconds`, and StaleGeneration if the agent runs a different
        generation.
        """
        deadline = self._clock() + self._welcome_seconds
        while True:
            received_count = self._received_count
            if is_enough(self.poll()):
                return
            if self._received_count != received_count:
                # `poll` read the page before it received this message, so read the page again. `wait` would wait for
                # another message.
                continue
            if self._socket is not None:
                deadline = self._clock() + self._welcome_seconds
            elif self._clock() >= deadline:
                raise AgentUnreachable(f"no agent listens at {self._path} for {self._welcome_seconds:g} s")
            self.wait(RECONNECT_SECONDS)

    def fetch(self, owner_rank: Rank) -> FetchedShard:
        with self._lock:
            self._wanted, self._fetched = FetchShard(generation=self.generation, owner_rank=owner_rank), None
            if self._socket is not None and not self._is_new:
                # Send the request for the shard now. Without a connection to the agent, `_repeat` sends it after the
                # next connect.
                self._outbox += frame(self._wanted)
                self._flush()
        self.watch(lambda _: self._fetched is not None)
        assert self._fetched is not None
        return self._fetched

    def poll(self) -> AgentHalf | None:
        with self._lock:
            if self._socket is None:
                self._connect()
            # Read the page before the messages. The agent sends a message with a slot's new file before it grants the
            # slot in the page, so the message has arrived by now. In the other order, the rank could use the old file.
            half = self._read() if self._socket is not None else None
            self._receive()
            self._flush()
            return half if self._socket is not None else None

    def publish(self, half: RankHalf) -> None:
        with self._lock:
            self._half = half
            if self._page is not None:
                write_rank_half(self._page, half)

    def send(self, message: Sent) -> None:
        message = _sendable(message)
        with self._lock:
            if isinstance(message, SlotsRequest):
                self._request, self._slots = message, None
            elif isinstance(message, (Captured, Abandoned)):
                self._outcome = message
            elif isinstance(message, Rehearsed):
                self._rehearsed = message
            elif isinstance(message, OptionsKept):
                self._options = message
            if self._socket is not None:
                self._outbox += self._held + frame(message)
                self._held = b""
                self._flush()

    def hint(self, message: Boundary | Capturing) -> None:
        with self._lock:
            if self._socket is not None and not self._outbox:
                self._outbox += frame(message)
                self._flush()

    def hold(self, message: Boundary | IdleSpans) -> None:
        with self._lock:
            if isinstance(message, IdleSpans):
                self._profile = message
            if self._socket is not None and not (self._outbox and isinstance(message, Boundary)):
                self._held += frame(message)

    def let_go(self) -> None:
        with self._lock:
            if self._socket is not None and self._held:
                self._outbox += self._held
                self._held = b""
                self._flush()

    def wait(self, seconds: float) -> None:
        with self._lock:
            if self._socket is None:
                self._connect()
            line = self._socket
        # Use poll(), because select() accepts no descriptor above 1023, and a process of a large job may have more.
        poller = select.poll()
        if line is None:
            # Without a connection, there is nothing to poll, so this call only pauses.
            poller.poll(min(seconds, RECONNECT_SECONDS) * 1000)
        else:
            with contextlib.suppress(OSError, ValueError):
                # Another thread may have closed the connection, which makes `register` fail.
                poller.register(line, select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN)
                poller.poll(seconds * 1000)
        with self._lock:
            self._receive()
            self._flush()

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._disconnect()
            self._close_files()
            self._is_closed = True
            if self._page is not None:
                self._page.release()
                self._page = None

    def forget(self) -> None:
        """Close the socket in a forked child, which would otherwise keep the connection open."""
        if self._socket is not None:
            os.close(self._socket.detach())
            self._socket = None

    def _read(self) -> AgentHalf | None:
        half = read_agent_half(self._page) if self._page is not None else None
        if half is None or half.generation != self._hello.generation:
            return None
        self._word = half
        return half

    def _connect(self) -> None:
        if self._is_closed or self._clock() < self._next_attempt:
            return
        self._next_attempt = self._clock() + RECONNECT_SECONDS
        line = self._open_socket()
        line.setblocking(False)
        try:
            line.connect(str(self._path))
        except OSError:
            line.close()
            return
        self._socket, self._is_new = line, True
        self._inbox.clear()
        self._close_files()
        self._outbox = bytearray(frame(self._hello))
        self._flush()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._slots = None
        self._outbox.clear()
        self._held = b""

    def _flush(self) -> None:
        while self._socket is not None and self._outbox:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                if len(self._outbox) > MAX_OUTBOX_BYTES:
                    self._disconnect()
                return
            except OSError:
                self._disconnect()
                return
            del self._outbox[:sent]

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, 65536, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, files = b"", []
            self._files += files
            if not data:
                self._disconnect()
                return
            self._inbox += data
            try:
                for message in self._messages():
                    self._take(message)
            except (ProtocolError, OSError):
                # Close the connection after a message with an invalid format. A later call opens a new connection.
                self._disconnect()
                return

    def _messages(self) -> list[AgentToRank]:
        found: list[AgentToRank] = []
        while len(self._inbox) >= LENGTH.size:
            end = LENGTH.size + frame_length(bytes(self._inbox[: LENGTH.size]))
            if len(self._inbox) < end:
                break
            message: AgentToRank = decode(bytes(self._inbox[LENGTH.size : end]), AgentToRank)  # type: ignore[arg-type]
            del self._inbox[:end]
            count = len(files_of(message))
            if count > len(self._files):
                raise MalformedMessage(f"{count - len(self._files)} files of a {type(message).__name__} are missing")
            files, self._files = self._files[:count], self._files[count:]
            found.append(with_files(message, [_OpenFile(file) for file in files]))
        return found

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, message: AgentToRank) -> None:
        self._received_count += 1
        if isinstance(message, (Arriving, Welcome)):
            if message.generation != self._hello.generation:
                # The agent already runs a newer generation and will end this rank. Continue to train until then.
                if isinstance(self._welcome, Welcome):
                    self._disconnect()
                    return
                raise StaleGeneration(
                    f"the agent runs generation {message.generation}, this rank belongs to {self._hello.generation}"
                )
            self._welcome = message
            self._page = _map_page(Path(message.word_path))
            if self._is_new:
                self._is_new = False
                self._repeat()
        elif isinstance(message, FetchedShard):
            if self._wanted is not None and self._wanted.owner_rank == message.owner_rank:
                self._wanted, self._fetched = None, message
        elif isinstance(message, (SlotsGranted, SlotsRefused)) and self._answers(message):
            self._slots = message

    def _answers(self, message: SlotsGranted | SlotsRefused) -> bool:
        request = self._request
        if request is None or message.layout_hash != request.layout_hash:
            return False
        return isinstance(message, SlotsRefused) or message.capacity_bytes >= request.capacity_bytes

    def _repeat(self) -> None:
        """Write the page and send the messages again that the agent may have lost in a restart."""
        assert self._page is not None
        if self._half is not None:
            write_rank_half(self._page, self._half)
        again: list[Message] = [
            message
            for message in (self._wanted, self._request, self._profile, self._rehearsed, self._options)
            if message is not None
        ]
        half = read_agent_half(self._page)
        if self._outcome is not None and half is not None and half.proposed == self._outcome.step != half.vote_step:
            again.append(self._outcome)
        for message in again:
            self._outbox += frame(message)


class ReplayLink(UnixAgentLink):
    """Connection of a rank that rehearses. Until the replay ends, it neither reads nor sends anything. The replay
    begins from the snapshot `kept`. With `is_child`, this process never talks to the agent.
    """

    def __init__(
        self, path: Path, hello: RankHello, welcome_seconds: float, kept: Welcome, *, is_child: bool = False
    ) -> None:
        super().__init__(path, hello, welcome_seconds)
        self._kept = kept
        self._is_child = is_child
        self._has_ended = threading.Event()

    def end_replay(self) -> Welcome:
        """Connect to the agent, and return its message about the generation's base. Raises as `welcome`."""
        self._has_ended.set()
        welcome = super().welcome()
        assert isinstance(welcome, Welcome)  # no load is under way while the generation trains
        return welcome

    def welcome(self) -> Arriving | Welcome:
        return super().welcome() if self._has_ended.is_set() else self._kept

    def poll(self) -> AgentHalf | None:
        return super().poll() if self._has_ended.is_set() else None

    def send(self, message: Sent) -> None:
        if isinstance(message, RankFault) and not self._is_child:
            self.end_replay()  # the agent must know the error that ends this rank
        if self._has_ended.is_set() or isinstance(message, SlotsRequest):
            super().send(message)

    def hold(self, message: Boundary | IdleSpans) -> None:
        if self._has_ended.is_set():
            super().hold(message)

    def wait(self, seconds: float) -> None:
        if self._has_ended.is_set():
            super().wait(seconds)
        else:
            self._has_ended.wait(seconds)


def _sendable(message: Sent) -> Sent:
    """Cut and clean a reason, which is often the text of a script's exception."""
    match message:
        case Abandoned(reason=reason):
            return msgspec.structs.replace(message, reason=cut(reason, MAX_REASON_CHARACTERS))
        case RankFault(message=reason):
            return msgspec.structs.replace(message, message=cut(reason, MAX_REASON_CHARACTERS))
        case _:
            return message


class _OpenFile(str):
    """A path under which this process can open a received file, which stays open as long as the path."""

    _descriptor: int

    def __new__(cls, descriptor: int) -> _OpenFile:
        path = super().__new__(cls, f"/proc/self/fd/{descriptor}")
        path._descriptor = descriptor
        return path

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


def _map_page(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), RANK_WORD_BYTES))


def _forget_in_children(link: UnixAgentLink) -> None:
    reference = weakref.ref(link)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive.forget()

    os.register_at_fork(after_in_child=forget)
