"""The agent's server for its ranks' connections, on a unix socket that only the ranks' user can open.

With a message, the server sends the descriptors of the files that the message names. Invariant: each rank of the
current generation has at most one connection, its newest. A rank that sends too much or stops reading never blocks the
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from everstep.protocol.codec import LENGTH, Message, decode, frame, frame_length
from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import Rank
from everstep.protocol.pace import Pace
from everstep.protocol.rank_messages import MAX_LOGGED_BYTES, MAX_RANK_MESSAGE_BYTES, RankHello, RankToAgent, files_of
from worker.node.rank_user import RankUser, create_traversable_dir, share
from worker.node.unix_socket import listen_private
from worker.shm.held_files import HeldFiles
from worker.tasks import end

log = logging.getLogger(__name__)
MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""Maximum bytes queued for a rank that does not read. Beyond it, messages to the rank are dropped."""
MAX_UNPROVEN = 64
"""Maximum number of connections without a `RankHello`. A further connection closes the oldest of them."""
HELLO_SECONDS = 10.0
"""Seconds in which a process that has connected must send `RankHello`."""
# A rank that has lost its connection tries four times per second.
CONNECTION_SECONDS = 0.01
"""Seconds that each new connection pays (`Pace`), so that at most 100 open per second."""
# A rank sends 1.4 messages per step (measured), so it may make 2,900 steps per second.
MESSAGE_SECONDS = 1 / 4096
"""Seconds that a rank pays (`Pace`) for each message."""
BYTES_PER_SECOND = 2 * MAX_LOGGED_BYTES
"""Bytes for which a rank pays one second. A rank that logs sends at most half as many per second."""
BURST_SECONDS = 8.0
"""Seconds that a rank, or all new connections together, can pay without a wait after a pause."""
ACCEPT_RETRY_SECONDS = 1.0
"""Pause after a connection that the agent could not accept, for example for lack of file descriptors."""


class RankEvents(Protocol):
    """Receiver of the ranks' messages, implemented by `worker.member.rank_connections.RankConnections`."""

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        """Handle the first message of a rank. Return False to refuse the connection."""

    def message(self, rank: Rank, message: Message) -> None:
        """Handle a message of a rank. The method must not block."""

    def lost(self, rank: Rank, line: RankLine) -> None:
        """Handle the end of a rank's connection to this agent."""


class RankLine:
    """Connection of one rank, over which the agent sends messages."""

    def __init__(self, writer: asyncio.StreamWriter, files: HeldFiles) -> None:
        self._writer = writer
        self._files = files
        self._loop = asyncio.get_running_loop()
        # asyncio's transports send no descriptors, so this object writes to the socket itself.
        self._socket = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._unsent = bytearray()
        self._waiting: deque[tuple[bytes, tuple[str, ...]]] = deque()
        self._waiting_bytes = 0

    def send(self, message: Message) -> None:
        """Queue a message for the rank. The message is dropped if the rank has stopped reading."""
        if self._socket.fileno() == -1 or self._waiting_bytes > MAX_UNREAD_BYTES:
            return
        data = frame(message)
        self._waiting.append((data, files_of(message)))
        self._waiting_bytes += len(data)
        if len(self._waiting) == 1 and not self._unsent:
            self._flush()

    def close(self) -> None:
        """Close this agent's connection to the rank."""
        if self._socket.fileno() != -1:
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._writer.close()

    def _flush(self) -> None:
        try:
            while self._unsent or self._waiting:
                if self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
                else:
                    self._begin(*self._waiting[0])
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self.close()
        else:
            self._loop.remove_writer(self._socket)

    def _begin(self, data: bytes, names: Sequence[str]) -> None:
        sent = socket.send_fds(self._socket, [data], [self._files.descriptor(name) for name in names])
        self._unsent += data[sent:]
        self._waiting.popleft()
        self._waiting_bytes -= len(data)


class RankServer:
    """Server for the ranks of this node, owned by the agent."""

    def __init__(
        self,
        path: Path,
        files: HeldFiles,
        user: RankUser | None = None,
        hello_seconds: float = HELLO_SECONDS,
        pace: Callable[[], Pace] = lambda: Pace(BURST_SECONDS),
    ) -> None:
        """Create the server. Only the agent's own user and `user` may connect. `pace` limits each rank's messages."""
        self.path = path
        self._files = files
        self.user = user
        """Users that may connect besides the agent's own: during a job, only the job's user."""
        self.events: RankEvents | None = None
        self.refused_count = 0
        self._hello_seconds = hello_seconds
        self._new_pace = pace
        self._accepting: asyncio.Task[None] | None = None
        self._lines: dict[asyncio.Task[None], socket.socket] = {}
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._ranks: dict[Rank, asyncio.Task[None]] = {}
        self._paces: dict[Rank, Pace] = {}
        """The pace of each rank's messages, over all its connections of one generation."""

    def admit(self, events: RankEvents, user: RankUser | None) -> None:
        """Accept connections from the ranks of one generation, as `user` (None for the agent's own user only)."""
        self.user, self.events = user, events
        self._paces.clear()

    def refuse(self) -> None:
        """Refuse new connections until the next call of `admit`."""
        self.events = None

    async def start(self) -> None:
        """Listen on the socket. A socket file of an earlier agent is replaced."""
        create_traversable_dir(self.path.parent, self.user)
        listener = listen_private(self.path)
        share(self.path, self.user)
        self._accepting = asyncio.create_task(self._accept(listener), name="connections of ranks")
        self._accepting.add_done_callback(lambda _: listener.close())

    async def close(self) -> None:
        """Stop listening and close all connections. Ranks continue to train and connect to the next agent process."""
        await end(self._accepting)
        await end(*self._lines)
        self.path.unlink(missing_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        pace = self._new_pace()
        while True:
            await pace.pay(CONNECTION_SECONDS)
            try:
                line, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.error("no rank can connect for %g s: %s", ACCEPT_RETRY_SECONDS, error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._connected(line), name="connection of a rank")
            self._lines[task] = line
            self._unproven[task] = None
            task.add_done_callback(self._ended)
            # An accept that succeeds at once does not let other tasks run, so no process could prove itself.
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lines.pop(task).close()  # A task that was cancelled before its start has not closed the socket.
        self._unproven.pop(task, None)

    async def _connected(self, line: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=line)
        try:
            await self._serve(reader, writer)
        except (ProtocolError, OSError, asyncio.IncompleteReadError) as error:
            # A process that has not sent its hello in time raises TimeoutError, which is an OSError.
            if isinstance(error, ProtocolError | TimeoutError):
                self.refused_count += 1
                log.warning("the connection of a rank is closed: %s", error or "no hello in time")
        except asyncio.CancelledError:
            log.debug("the connection of a rank ends because the agent ends or has a newer connection")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = _peer_uid(writer)
        if uid != os.getuid() and not (self.user is not None and self.user.covers(uid)):
            raise MalformedMessage("the connecting process belongs to another user")
        async with asyncio.timeout(self._hello_seconds):
            hello, _ = await _read(reader)
        events = self.events
        if not isinstance(hello, RankHello):
            raise MalformedMessage(f"the rank's first message is {type(hello).__name__}, not RankHello")
        line = RankLine(writer, self._files)
        task = asyncio.current_task()
        assert task is not None
        try:
            if events is None or not events.hello(hello, line):
                raise MalformedMessage(
                    f"rank {hello.rank} of run {hello.run} generation {hello.generation} is not of this node's "
                    "generation"
                )
            self._unproven.pop(task, None)
            if (earlier := self._ranks.get(hello.rank)) is not None:
                earlier.cancel()
            self._ranks[hello.rank] = task
            if (pace := self._paces.get(hello.rank)) is None:
                pace = self._paces[hello.rank] = self._new_pace()
            try:
                while True:
                    message, size_bytes = await _read(reader)
                    events.message(hello.rank, message)
                    await pace.pay(MESSAGE_SECONDS + size_bytes / BYTES_PER_SECOND)
                    # `_read` does not let other tasks run while its buffer has messages.
                    await asyncio.sleep(0)
            finally:
                if self._ranks.get(hello.rank) is task:
                    del self._ranks[hello.rank]
                events.lost(hello.rank, line)
        finally:
            line.close()


async def _read(reader: asyncio.StreamReader) -> tuple[Message, int]:
    length = frame_length(await reader.readexactly(LENGTH.size), MAX_RANK_MESSAGE_BYTES)
    message: Message = decode(await reader.readexactly(length), RankToAgent)  # type: ignore[arg-type]
    return message, length


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    line: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
