"""Transfers one shard from a slot of one node into a slot of another node.

    sender                                   receiver
    BeginShard                         ───▶  grants a slot, or continues the slot of an interrupted transfer
    ShardDigests(the final chunks)     ───▶  keeps the matching chunks of an interrupted transfer, copies unchanged
                                             chunks from its other slots
                                       ◀───  ShardWanted(the missing chunks)
    chunks, over all streams           ───▶  verifies each on arrival, requests damaged chunks again
    … until the sender's slot is sealed …
    EndShard(digest of the payload)    ───▶
                                       ◀───  ShardSealed | ShardRefused

A chunk is final when the rank no longer writes it. Invariant: a slot is sealed only after the owner's slot is sealed,
and only if every chunk matched the digest that the owner announced.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import BeginShard, EndShard, ShardDigests, ShardRefused, ShardSealed, ShardWanted
from everstep.protocol.slot import (
    DIGEST_BYTES,
    SlotHeader,
    SlotState,
    chunk_bytes,
    chunk_count,
    chunk_range,
    digest,
    shard_digest,
)
from worker.core.slots import Content
from worker.core.transfers import are_within, chunk_digest, found_elsewhere, ranges
from worker.errors import NoRoom, PeerError, PeerLost
from worker.replication.pacing import Pacer
from worker.replication.streams import ChunkQueue, IncomingParts, IncomingShard, Receiver, Streams, send_chunks
from worker.replication.transport import Session
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread
from worker.tasks import finish, first_of

log = logging.getLogger(__name__)
MAX_REPEATS = 3
"""Maximum number of repeated requests for damaged chunks. Then the shard is rejected."""
CLOSE_SECONDS = 1.0
"""Seconds after the end of a transfer in which partly received chunks may become complete."""


Arrived = Callable[[SlotFile, SlotHeader, int], None]
"""Receives (slot file, header that will seal it, verified prefix in bytes), after digests and index are verified."""


class ShardRejected(PeerError):
    """Raised if a received shard cannot be sealed on this node."""


class ShardDamaged(ShardRejected):
    """Raised if chunks do not match their digests even after repeated transfers."""


def announcement(slot: SlotHeader, *, transfer: int, committed: Step) -> BeginShard:
    """Return the message that announces a slot's shard. `transfer` exceeds all earlier ones of the session."""
    return BeginShard(
        transfer=transfer,
        owner_rank=slot.owner_rank,
        origin_generation=slot.origin_generation,
        step=slot.step,
        payload_bytes=slot.payload_bytes,
        capacity_bytes=slot.capacity_bytes,
        index_offset=slot.index_offset,
        index_bytes=slot.index_bytes,
        layout_hash=slot.layout_hash,
        committed=committed,
    )


async def send_shard(
    session: Session,
    streams: Streams,
    answers: Callable[[], Awaitable[ShardWanted | ShardSealed | ShardRefused]],
    file: SlotFile,
    digests: ChunkDigests,
    begin: BeginShard,
    queue: ChunkQueue,
    *,
    pacer: Pacer | None = None,
    progress: Callable[[int], None],
    paused: Callable[[int], None] = lambda _: None,
    before_end: Callable[[], Awaitable[Sequence[Message]]] | None = None,
) -> ShardSealed | ShardRefused:
    """Send a slot that is sealed, or that its rank is still writing. Returns the receiver's final answer.

    The caller must protect the slot's content with `SlotStore.reading` or a pin. After a cancelled call, it must send
    `CancelShard`.

    Args:
        session: session to a node that runs `receive_shard`.
        answers: waits for the receiver's next answer to this transfer, and returns it.
        digests: digests of the slot's chunks; they grow until the slot is sealed.
        begin: announcement of the shard, the first message to the receiver.
        queue: a new queue, which distributes the chunks to the streams and counts bytes and time.
        progress: called with 0 after each answer of the receiver, and as in `send_chunks`.
        paused: as in `send_chunks`, and while the rank still writes the next chunks.
        before_end: returns messages to send before the end of the shard, once the slot is sealed.

    Raises PeerLost, and MalformedMessage if the receiver requested chunks that were not announced.
    """
    outcome: list[ShardSealed | ShardRefused] = []
    is_wanted = asyncio.Event()
    named_count = 0
    is_ended = False

    async def news() -> list[Message]:
        """Return the digests of newly finished chunks, and `EndShard` once the slot is sealed."""
        nonlocal named_count, is_ended
        found: list[Message] = []
        if digests.known_count > named_count:
            first, named_count = named_count, digests.known_count
            found.append(
                ShardDigests(transfer=begin.transfer, first=first, chunk_digests=digests.known[DIGEST_BYTES * first :])
            )
        if digests.is_sealed and not is_ended:
            is_ended = True
            if before_end is not None:
                found += await before_end()
            found.append(EndShard(transfer=begin.transfer, digest=digests.payload_digest))
        return found

    async def name() -> None:
        while not is_ended:
            seen = digests.changed.version
            if found := await news():
                await session.send(*found)
            else:
                await _wait(digests, seen, paused)
        await asyncio.Event().wait()  # The receiver's final answer cancels this task.

    async def receive() -> None:
        while isinstance(answer := await answers(), ShardWanted):
            progress(0)
            if not are_within(answer.chunks, named_count):
                raise MalformedMessage(
                    f"the receiver requested chunks {answer.chunks}, but only {named_count} were announced"
                )
            if answer.chunks:
                queue.add(answer.chunks)
                is_wanted.set()
        outcome.append(answer)

    async def supply() -> None:
        await is_wanted.wait()
        await streams.attached.wait()
        await send_chunks(
            streams,
            file,
            begin.transfer,
            queue,
            payload_bytes=begin.payload_bytes,
            pacer=pacer,
            progress=progress,
            paused=paused,
        )

    await session.send(begin, *await news())
    await first_of(receive(), supply(), *(() if is_ended else (name(),)))
    return outcome[0]


async def _wait(digests: ChunkDigests, seen: int, paused: Callable[[int], None]) -> None:
    """Wait until the rank has finished further chunks. Meanwhile, the receiver must not count as silent."""
    paused(1)
    try:
        await digests.changed.wait(seen)
    finally:
        paused(-1)


async def receive_shard(
    session: Session,
    streams: Streams,
    receiver: Receiver,
    begin: BeginShard,
    next_message: Callable[[], Awaitable[ShardDigests | EndShard]],
    store: SlotStore,
    *,
    keep: Collection[Content],
    slot_count: int,
    silence_seconds: float | None,
    arrived: Arrived | None = None,
) -> bytes:
    """Receive one shard into a slot, seal it, and return the digest of its payload.

    Args:
        session: session to a node that runs `send_shard`; `begin` was its last message.
        receiver: receiver of the streams, whose threads run `receiver.receive`.
        begin: the sender's announcement of the shard, not checked yet.
        next_message: returns the sender's next message about this transfer.
        keep: contents of this shard that must not be overwritten.
        slot_count: maximum slots of this shard on this node.
        silence_seconds: maximum time without data; None if the sender paces itself and the kernel detects its death.
        arrived: called on the loop as chunks are verified. If given, the payload's index is requested first.

    Raises:
        ShardRejected: the shard was not sealed; the session can continue.
        NoRoom: the node lacks memory for the slot, or `keep` protects every slot; the session can continue.
        PeerLost: the connection broke. The received chunks stay in an unsealed slot for the next session.
        MalformedMessage: the sender's messages contradict each other; the connection must be closed.
    """
    _check(begin)
    index = await store.grant(
        begin.owner_rank,
        Content(begin.origin_generation, begin.step),
        keep=keep,
        capacity_bytes=begin.capacity_bytes,
        layout_hash=begin.layout_hash,
        slot_count=slot_count,
    )
    if index is None:
        raise NoRoom(needed_bytes=begin.capacity_bytes, available_bytes=0)
    slot = store.shards[begin.owner_rank][index]
    incoming = receiver.current = IncomingShard(slot.file, transfer=begin.transfer, payload_bytes=begin.payload_bytes)
    try:
        await _take(
            session, incoming, begin, next_message, store, slot, silence_seconds, is_followed=arrived is not None
        )
        if arrived is not None:
            incoming.follow(range(*_index_chunks(begin)), partial(arrived, slot.file, _header(store, begin)))
        await _mend(session, incoming, silence_seconds)
    except ShardRejected:
        slot.file.empty()
        raise
    finally:
        receiver.current = None
        await _close(incoming, streams, slot)
    return store.seal_verified(slot, _header(store, begin), incoming.chunk_digests)


async def receive_parts(
    session: Session,
    streams: Streams,
    receiver: Receiver,
    incoming: IncomingParts,
    wanted: Collection[int],
    *,
    silence_seconds: float | None,
) -> None:
    """Receive the chunks `wanted` of an announced shard, and combine each on arrival (see `receive_shard`).

    `incoming` has the digests from `announced_digests`. Raises PeerLost, and ShardDamaged for a chunk that does not
    match its digest after all repeats.
    """
    incoming.missing.update(wanted)
    receiver.current = incoming
    try:
        if wanted:
            await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(wanted)))
        await _mend(session, incoming, silence_seconds)
    finally:
        receiver.current = None
        if not incoming.shut():
            await finish(_under_way(incoming, streams))


async def announced_digests(
    begin: BeginShard,
    next_message: Callable[[], Awaitable[ShardDigests | EndShard]],
    *,
    silence_seconds: float | None,
) -> tuple[bytes, bytes]:
    """Receive the digests of all chunks of a sealed shard. Returns them, and the digest of the shard.

    Raises MalformedMessage for contradicting messages, and PeerLost after `silence_seconds` (None: no limit).
    """
    _check(begin)
    digests = b""
    while not isinstance(message := await _next(next_message, silence_seconds), EndShard):
        _check_digests(begin, message, len(digests) // DIGEST_BYTES)
        digests += message.chunk_digests
    _check_end(begin, message, digests)
    return digests, message.digest


def _check(begin: BeginShard) -> None:
    sizes = 0 < begin.payload_bytes <= begin.capacity_bytes and begin.index_offset >= 0 and begin.index_bytes >= 0
    if not sizes or begin.index_offset + begin.index_bytes > begin.payload_bytes:
        raise MalformedMessage(
            f"a shard of {begin.payload_bytes} bytes does not fit into a slot of {begin.capacity_bytes} bytes"
        )


async def _take(
    session: Session,
    incoming: IncomingShard,
    begin: BeginShard,
    next_message: Callable[[], Awaitable[ShardDigests | EndShard]],
    store: SlotStore,
    slot: Slot,
    silence_seconds: float | None,
    *,
    is_followed: bool,
) -> None:
    while True:
        message = await _next(next_message, silence_seconds)
        known = len(incoming.chunk_digests) // DIGEST_BYTES
        if isinstance(message, EndShard):
            _check_end(begin, message, incoming.chunk_digests)
            return
        named = _check_digests(begin, message, known)
        digests = incoming.chunk_digests + message.chunk_digests
        missing = set()
        for index in range(known, known + named):
            if slot.arrived.get(index) != chunk_digest(digests, index):
                slot.arrived.pop(index, None)  # An earlier, interrupted transfer left wrong bytes.
                missing.add(index)
        missing -= await _copy_unchanged(store, slot, begin, digests, missing)
        incoming.name(message.chunk_digests, missing)
        first = missing & set(range(*_index_chunks(begin))) if is_followed else set()
        if first:
            await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(first)))
        await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(missing - first)))


async def _next(
    next_message: Callable[[], Awaitable[ShardDigests | EndShard]], silence_seconds: float | None
) -> ShardDigests | EndShard:
    try:
        async with asyncio.timeout(silence_seconds):
            return await next_message()
    except TimeoutError as error:
        raise PeerLost(f"the sender sent no message for {silence_seconds:g} s") from error


def _check_digests(begin: BeginShard, message: ShardDigests, known: int) -> int:
    """Check a message with digests after the first `known` ones, and return the number of its digests."""
    count = chunk_count(begin.payload_bytes)
    named, rest = divmod(len(message.chunk_digests), DIGEST_BYTES)
    if message.first != known or rest or not 0 < named <= count - known:
        raise MalformedMessage(
            f"{len(message.chunk_digests)} bytes of digests from chunk {message.first}, after {known} of {count}"
        )
    return named


def _check_end(begin: BeginShard, message: EndShard, digests: bytes) -> None:
    count, known = chunk_count(begin.payload_bytes), len(digests) // DIGEST_BYTES
    if known != count or shard_digest(digests, begin.payload_bytes) != message.digest:
        raise MalformedMessage(
            f"the digest of a shard does not match its {count} chunks, of which {known} were announced"
        )


async def _mend(session: Session, incoming: IncomingShard, silence_seconds: float | None) -> None:
    for repeat in range(1 + MAX_REPEATS):
        await incoming.settled(silence_seconds)
        if not incoming.missing:
            return
        log.warning("%d chunks of transfer %d arrived damaged", len(incoming.damaged), incoming.transfer)
        if repeat < MAX_REPEATS:
            await session.send(ShardWanted(transfer=incoming.transfer, chunks=incoming.again()))
    raise ShardDamaged("chunks of the shard do not match their digests")


async def _close(incoming: IncomingShard, streams: Streams, slot: Slot) -> None:
    try:
        if not incoming.shut():
            await finish(_under_way(incoming, streams))
    finally:
        for index in range(len(incoming.chunk_digests) // DIGEST_BYTES):
            if index not in incoming.missing:
                slot.arrived[index] = chunk_digest(incoming.chunk_digests, index)


async def _under_way(incoming: IncomingShard, streams: Streams) -> None:
    """Wait until all partly received chunks are complete. After `CLOSE_SECONDS` in vain, close all streams."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await incoming.close()
    except TimeoutError:
        await streams.close()
        await incoming.close()


async def _copy_unchanged(
    store: SlotStore, slot: Slot, begin: BeginShard, chunk_digests: bytes, missing: Collection[int]
) -> set[int]:
    """Copy and verify missing chunks that another slot of the shard contains, and return their indices."""
    others = [
        (other, other.digests.known)
        for other in store.shards[begin.owner_rank]
        if other is not slot and other.file.header.state is SlotState.SEALED and other.digests is not None
    ]
    found = list(found_elsewhere(chunk_digests, missing, [known for _, known in others]))
    if not found:
        return set()

    def work(cancelled: threading.Event) -> set[int]:
        copied = set()
        for index, number in found:
            if cancelled.is_set():
                break
            start, stop = chunk_range(index, begin.payload_bytes)
            with others[number][0].file.payload(start, stop) as source, slot.file.payload(start, stop) as target:
                if source.nbytes == target.nbytes:
                    _copy(target, source)
                    if digest(target) == chunk_digest(chunk_digests, index):
                        copied.add(index)
        return copied

    for _, number in found:
        others[number][0].pins += 1
    try:
        return await in_thread(work)
    finally:
        for _, number in found:
            others[number][0].pins -= 1


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy a chunk's bytes without the interpreter lock, which a slice assignment would hold."""
    size = source.nbytes
    to, out_of = (ctypes.c_char * size).from_buffer(target), (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(to, out_of, size)
    del to, out_of


def _index_chunks(begin: BeginShard) -> tuple[int, int]:
    """Return (first, end) of the range of chunks that contain the payload's index."""
    size = chunk_bytes(begin.payload_bytes)
    return begin.index_offset // size, -(-(begin.index_offset + begin.index_bytes) // size)


def _header(store: SlotStore, begin: BeginShard) -> SlotHeader:
    assert store.run is not None
    return SlotHeader(
        job=store.job,
        run=store.run,
        owner_rank=begin.owner_rank,
        origin_generation=begin.origin_generation,
        step=begin.step,
        state=SlotState.WRITING,
        capacity_bytes=begin.capacity_bytes,
        payload_bytes=begin.payload_bytes,
        index_offset=begin.index_offset,
        index_bytes=begin.index_bytes,
        layout_hash=begin.layout_hash,
    )
