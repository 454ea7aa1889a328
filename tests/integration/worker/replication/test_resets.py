"""Streams between the real sender and receiver that are reset at every byte position of every chunk."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable

import pytest

from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import payload_digest
from tests.integration.worker.replication.pair import HOLDER, Pair
from tests.small_chunks import use_small_chunks
from worker.replication.tcp import TcpSession
from worker.replication.transport import Session
from worker.tasks import end

pytestmark = pytest.mark.integration
CHUNK, PAYLOAD, COUNT = 1000, 4500, 5
"""Bytes of a chunk and of the payload, and number of chunks, the last of which is shorter."""
DATA = b"".join(number.to_bytes(4, "big") for number in range(PAYLOAD // 4))
"""A payload whose chunks all differ."""
POSITIONS: dict[str, Callable[[int], int]] = {
    "before the header": lambda _size: 0,
    "in the header": lambda _size: CHUNK_HEADER.size // 2,
    "behind the first byte": lambda _size: CHUNK_HEADER.size + 1,
    "before the last byte": lambda size: CHUNK_HEADER.size + size - 1,
}
RARELY_SECONDS = 36_000.0
"""A holder deadline that is longer than any test."""


class Wire:
    """A dialler that resets its first stream, in both directions, at one position. Later streams are not reset.

    Args:
        pair: nodes between which the dialler carries streams.
        chunk: index of the chunk in which the stream is reset.
        position: bytes of that chunk that pass before the reset, including its header.
    """

    def __init__(self, pair: Pair, chunk: int, position: int) -> None:
        self._pair = pair
        self._chunk = chunk
        self._limit = chunk * (CHUNK_HEADER.size + CHUNK) + position
        self.passed: list[bytearray] = []
        """Bytes delivered to the holder, one entry per stream."""
        self.errors: list[Callable[[], str]] = []
        """Functions that return the holder's error for each stream that was reset."""
        self._tasks: list[asyncio.Task[None]] = []

    async def session(self) -> TcpSession:
        """Implement `Dialler.session`."""
        return await self._pair.session()

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        onward = await self._pair.stream(session, number)
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        for line in (near, onward):
            line.setblocking(False)
        self.passed.append(bytearray())
        self._tasks.append(
            asyncio.create_task(
                self._carry(near, onward, self.passed[-1], None if len(self.passed) > 1 else self._limit)
            )
        )
        return sender

    async def _carry(self, near: socket.socket, onward: socket.socket, passed: bytearray, limit: int | None) -> None:
        loop = asyncio.get_running_loop()
        with near, onward:
            while data := await loop.sock_recv(near, 1 << 16):
                room = len(data) if limit is None else limit - len(passed)
                await loop.sock_sendall(onward, data[:room])
                passed += data[:room]
                if len(data) > room:
                    await self._arrived()
                    for line in (onward, near):
                        # With this option, closing the socket sends RST instead of FIN.
                        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        line.close()
                    return

    async def _arrived(self) -> None:
        """Wait until the holder has verified all earlier chunks and read the delivered part of the chunk that the reset
        cuts.
        """
        (owner,) = self._pair.receiver.open_sessions
        assert owner.receiver is not None
        incoming, (line,) = owner.receiver.current, owner.streams.lines
        assert incoming is not None
        await self._pair.until(lambda: incoming.landed_count == self._chunk and not unread_bytes(line))
        self.errors.append(lambda: str(owner.error))

    async def close(self) -> None:
        """Cancel the tasks that forward streams."""
        await end(*self._tasks)


def unread_bytes(line: socket.socket) -> int:
    """Return how many received bytes of a connection are still unread."""
    (count,) = struct.unpack("i", fcntl.ioctl(line, termios.FIONREAD, bytes(4)))
    return int(count)


def chunks_of(passed: bytearray) -> list[int]:
    """Return the indexes of the chunks that a stream carried, and assert that all of them are whole."""
    found, at = [], 0
    while at < len(passed):
        _, index, size = CHUNK_HEADER.unpack_from(passed, at)
        found.append(index)
        at += CHUNK_HEADER.size + size
    assert at == len(passed)
    return found


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("chunk", range(COUNT))
async def test_a_stream_that_is_reset_anywhere_goes_on_behind_the_chunks_that_were_verified(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, chunk: int, position: str
) -> None:
    use_small_chunks(monkeypatch, CHUNK)
    pair = make(payload_bytes=PAYLOAD)
    pair.listen()
    wire = Wire(pair, chunk, POSITIONS[position](min(CHUNK, PAYLOAD - chunk * CHUNK)))
    pair.send(deadline_seconds=RARELY_SECONDS, dialler=wire)
    pair.apply_announcement(-1, 1)
    capture = await pair.begin_capture(1)
    capture.write(PAYLOAD, DATA)
    await capture.seal()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    (error,) = wire.errors
    assert "Connection reset by peer" in error()
    assert len(wire.passed) == 2
    assert chunks_of(wire.passed[1]) == list(range(chunk, COUNT))
    assert pair.held() == {Step(1): DATA}
    (held,) = pair.holder_store.inventory()
    assert held.digest == payload_digest(DATA)
    assert pair.shard.core.view == {HOLDER}
    assert (pair.receiver.rejected_count, pair.listener.refused_count) == (0, 0)
    await pair.stop_sending()
    await wire.close()
