"""Sends the parts of a shard, or of a shared S3 object, to another node that requests them.

    other node ── ShardWanted ──▶ PartSupply: waits for the part, copies it into a buffer ── chunks on streams ──▶

Invariant: all `PartSupply` objects of a generation together keep at most `MAX_HELPED_PARTS` parts in memory. After
`run`, no thread reads or sends a part.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.limits import cut
from everstep.protocol.peer_messages import ShardRefused, ShardWanted
from everstep.protocol.slot import chunk_bytes, chunk_count, chunk_range
from worker.core.shared_parts import MAX_WINDOW
from worker.core.transfers import are_within, ranges
from worker.errors import PeerError, StorageError
from worker.replication.streams import ChunkQueue, Streams, send_chunks
from worker.replication.transport import Session
from worker.storage.shard_parts import Parts
from worker.tasks import end, first_of

log = logging.getLogger(__name__)
MAX_HELPED_PARTS = 4
"""Maximum number of parts in memory for other nodes. Each also occupies a thread of the agent's only pool."""
# A sound node waits for at most `MAX_WINDOW` parts, but can receive a part before this node has recorded it as sent.
MAX_REQUESTED_PARTS = 16 * MAX_WINDOW
"""Maximum number of requested parts that are not recorded as sent; only a faulty node exceeds it."""


@dataclass(eq=False, repr=False)
class PartSupply:
    """The parts of one payload that another node has requested.

    `read` fills memory of exactly one part. `room` limits the parts in memory of all objects of the generation.
    `is_ready` waits until `read` can read a part without waiting for other nodes.
    """

    parts: Parts
    read: Callable[[int, memoryview], Awaitable[None]]
    room: asyncio.Semaphore
    _: KW_ONLY
    transfer: int
    is_ready: Callable[[int], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._buffers = _Buffers(self.parts.payload_bytes)
        self._queue = _PartQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sent: dict[int, asyncio.Event] = {}
        loop = asyncio.get_running_loop()
        self._queue.on_sent = lambda chunk: loop.call_soon_threadsafe(self._note_sent, chunk)

    async def run(self, session: Session, streams: Streams) -> Message:
        """Send each requested part, until the other node sends another message, and return this message.

        Raises MalformedMessage for an invalid, repeated or excessive request, and PeerLost.
        """
        others: list[Message] = []

        async def receive() -> None:
            others.append(await self._receive(session))
            if not streams.attached.is_set():
                raise MalformedMessage(f"{type(others[0]).__name__} received before the session has a stream")
            await asyncio.gather(*self._tasks.values())
            self._queue.complete()
            await asyncio.Event().wait()  # `first_of` cancels this wait once `send` has sent all chunks.

        async def send() -> None:
            await streams.attached.wait()
            await send_chunks(
                streams,
                self._buffers,
                self.transfer,
                self._queue,
                payload_bytes=self.parts.payload_bytes,
                pacer=None,
                progress=lambda _: None,
            )

        try:
            await first_of(receive(), send())
        finally:
            await end(*self._tasks.values())
        return others[0]

    async def _receive(self, session: Session) -> Message:
        while isinstance(wanted := await session.receive(), ShardWanted):
            is_valid = wanted.transfer == self.transfer and len(wanted.chunks) == 1
            if not is_valid or not are_within(wanted.chunks, chunk_count(self.parts.payload_bytes)):
                raise MalformedMessage(f"chunks {wanted.chunks} requested, which do not form a part of the payload")
            ((first, count),) = wanted.chunks
            number = self.parts.part_of(first)
            if range(first, first + count) != self.parts.chunks(number) or number in self._tasks:
                raise MalformedMessage(f"chunks {wanted.chunks} requested twice, or without forming a part")
            if len(self._tasks) >= MAX_REQUESTED_PARTS:
                raise MalformedMessage(f"more than {MAX_REQUESTED_PARTS} parts requested at a time")
            self._tasks[number] = asyncio.create_task(self._serve(session, number))
        return wanted

    async def _serve(self, session: Session, number: int) -> None:
        chunks = self.parts.chunks(number)
        try:
            if self.is_ready is not None:
                await self.is_ready(number)
            async with self.room:
                begin, stop = self.parts.bounds(number)
                data = bytearray(stop - begin)
                with memoryview(data) as target:
                    await self.read(number, target)
                for chunk in chunks:
                    self._sent[chunk] = asyncio.Event()
                    first, last = chunk_range(chunk, self.parts.payload_bytes)
                    self._buffers.chunks[chunk] = memoryview(data)[first - begin : last - begin]
                self._queue.add(ranges(chunks))
                for chunk in chunks:
                    await self._sent[chunk].wait()
        except StorageError as error:
            with suppress(PeerError):
                await session.send(ShardRefused(transfer=self.transfer, reason=cut(str(error))))
            session.close()
        except Exception:
            log.exception("part %d of another node's shard could not be read or sent", number)
            session.close()
        finally:
            for chunk in chunks:
                self._sent.pop(chunk, None)
                self._buffers.chunks.pop(chunk, None)
            del self._tasks[number]

    def _note_sent(self, chunk: int) -> None:
        if chunk in self._sent:
            self._sent[chunk].set()


class _Buffers:
    """The chunks of a payload that this node has read and not sent yet. Implements `Payload`."""

    def __init__(self, payload_bytes: int) -> None:
        self.chunks: dict[int, memoryview] = {}
        self._chunk_bytes = chunk_bytes(payload_bytes)

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        assert end is not None, "chunks are sent one at a time"
        chunk, offset = divmod(start, self._chunk_bytes)
        return self.chunks[chunk][offset : offset + end - start]


class _PartQueue(ChunkQueue):
    """A queue that calls `on_sent` for each chunk that the kernel has accepted completely."""

    def __init__(self) -> None:
        super().__init__()
        self.on_sent: Callable[[int], object] = lambda _: None
        self._sending: dict[int, int] = {}
        """The chunk that each thread sends, by thread id. Each thread changes only its own entry."""

    def next(self) -> int | None:
        found = super().next()
        if found is not None:
            self._sending[threading.get_ident()] = found
        return found

    def finish(self) -> None:
        super().finish()
        self.on_sent(self._sending.pop(threading.get_ident()))
