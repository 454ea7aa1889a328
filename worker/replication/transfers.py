"""One shard from a slot of one node into a slot of another: announced, asked for chunk by chunk, verified, sealed.

    sender                                   receiver
    BeginShard(digests of all chunks)  ───▶  which of them lie here already: from a broken transfer, or unchanged in another slot
                                       ◀───  ShardWanted(the others)
    chunks, over all streams           ───▶  each verified as it comes; damaged ones are wanted again
                                       ◀───  ShardSealed | ShardRefused

Invariant: a slot is sealed only when every chunk of the payload was seen to hash to what the owner announced.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Awaitable, Callable, Collection

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import BeginShard, ShardRefused, ShardSealed, ShardWanted
from everstep.protocol.slot import DIGEST_BYTES, SlotHeader, SlotState, chunk_bytes, chunk_count, chunk_range, digest, shard_digest
from worker.core.slots import Content
from worker.core.transfers import are_within, chunk_digest, found_elsewhere, ranges
from worker.errors import NoRoom, PeerError
from worker.replication.pacing import Pacer
from worker.replication.streams import IncomingShard, Receiver, Streams, send_chunks
from worker.replication.transport import Session
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread
from worker.tasks import finish

log = logging.getLogger(__name__)
MAX_REPEATS = 3
"""How often damaged chunks are asked for again before the shard is refused: a wire that damages so much is not one."""
CLOSE_SECONDS = 1.0
"""How long chunks under way to a transfer that is over may take to come before the streams are cut."""


class ShardRejected(PeerError):
    """The shard was not sealed here: no slot is free, it was cancelled, or it does not hash to its digest."""


def announcement(slot: SlotHeader, chunk_digests: bytes, *, transfer: int, committed: Step) -> BeginShard:
    """Return how a sealed slot is announced.

    Args:
        slot: its header.
        chunk_digests: of its payload.
        transfer: higher than any before on the session.
        committed: C as this node knows it.

    Returns:
        The message.
    """
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
        digest=slot.payload_digest,
        chunk_digests=chunk_digests,
        committed=committed,
    )


async def send_shard(
    session: Session,
    streams: Streams,
    answers: Callable[[], Awaitable[ShardWanted | ShardSealed | ShardRefused]],
    file: SlotFile,
    begin: BeginShard,
    *,
    pacer: Pacer | None = None,
    progress: Callable[[int], None],
    paused: Callable[[int], None] = lambda _: None,
    sent: Callable[[int, float], None] | None = None,
) -> ShardSealed | ShardRefused:
    """Send a sealed slot. The caller holds it: it is a registered reader of the slot, or has pinned it.

    Args:
        session: whose other side runs `receive_shard`.
        streams: of the session.
        answers: returns the receiver's next answer to this transfer.
        file: the slot's.
        begin: its announcement.
        pacer: see `send_chunks`.
        progress: told whenever the receiver has answered (0) or the kernel has taken something for it (bytes).
        paused: see `send_chunks`.
        sent: told bytes and seconds of each burst of chunks.

    Returns:
        The receiver's last word. A caller whose work was cancelled (the slot was granted anew) says so with `CancelShard`.

    Raises:
        PeerLost: the line is gone.
        MalformedMessage: the receiver asks for what there is not.
    """
    loop = asyncio.get_running_loop()
    await session.send(begin)
    while True:
        answer = await answers()
        progress(0)
        if not isinstance(answer, ShardWanted):
            return answer
        if not are_within(answer.chunks, chunk_count(begin.payload_bytes)):
            raise MalformedMessage(f"chunks {answer.chunks} wanted of {chunk_count(begin.payload_bytes)}")
        await streams.attached.wait()
        begun = loop.time()
        await send_chunks(
            streams, file, begin.transfer, answer.chunks, payload_bytes=begin.payload_bytes, pacer=pacer, progress=progress, paused=paused
        )
        if sent is not None:
            sent(sum(count for _, count in answer.chunks) * chunk_bytes(begin.payload_bytes), loop.time() - begun)


async def receive_shard(
    session: Session,
    streams: Streams,
    receiver: Receiver,
    begin: BeginShard,
    store: SlotStore,
    *,
    keep: Collection[Content],
    slot_count: int,
    silence_seconds: float | None,
) -> bytes:
    """Take one shard into a slot and seal it.

    Args:
        session: whose other side runs `send_shard`; `begin` has been read from it.
        streams: of the session; their threads run `receiver.receive`.
        receiver: of the streams.
        begin: the announced shard.
        store: this node's slots.
        keep: contents of this shard that must survive.
        slot_count: slots that this shard may have here.
        silence_seconds: how long nothing may come before the line counts as broken; None: the sender paces itself, the kernel finds dead lines.

    Returns:
        The digest of the sealed payload.

    Raises:
        ShardRejected: it is not sealed; the session can go on.
        PeerLost: the line broke in the middle; what came is kept for the next session, and is no snapshot.
        MalformedMessage: the announcement contradicts itself; the line must be closed.
    """
    _check(begin)
    rank, content = begin.owner_rank, Content(begin.origin_generation, begin.step)
    index = store.resumable(rank, content, begin.chunk_digests)
    if index is None:
        try:
            index = await store.grant(
                rank, content, keep=keep, capacity_bytes=begin.capacity_bytes, layout_hash=begin.layout_hash, slot_count=slot_count
            )
        except NoRoom as error:
            raise ShardRejected(str(error)) from error
    if index is None:
        raise ShardRejected("no slot is free")
    slot = store.shards[rank][index]
    slot.chunk_digests = begin.chunk_digests
    missing = set(range(chunk_count(begin.payload_bytes))) - slot.arrived
    missing -= await _copy_unchanged(store, slot, begin, missing)
    incoming = IncomingShard(
        slot.file, transfer=begin.transfer, payload_bytes=begin.payload_bytes, chunk_digests=begin.chunk_digests, missing=missing
    )
    receiver.current = incoming
    try:
        await _ask(session, incoming, silence_seconds)
    except ShardRejected:
        slot.file.empty()
        raise
    finally:
        receiver.current = None
        await finish(_close(incoming, streams, slot))
    sealed = store.seal_verified(rank, index, _header(store, begin), begin.chunk_digests, expected=begin.digest)
    assert sealed is not None, "the announcement was checked"
    return sealed


def _check(begin: BeginShard) -> None:
    sizes = 0 < begin.payload_bytes <= begin.capacity_bytes and begin.index_offset >= 0 and begin.index_bytes >= 0
    if not sizes or begin.index_offset + begin.index_bytes > begin.payload_bytes:
        raise MalformedMessage(f"a shard of {begin.payload_bytes} bytes in {begin.capacity_bytes}")
    if len(begin.chunk_digests) != DIGEST_BYTES * chunk_count(begin.payload_bytes):
        raise MalformedMessage(f"{len(begin.chunk_digests)} bytes of digests for {begin.payload_bytes} bytes")
    if shard_digest(begin.chunk_digests, begin.payload_bytes) != begin.digest:
        raise MalformedMessage("the digest of a shard is not that of its chunks")


async def _ask(session: Session, incoming: IncomingShard, silence_seconds: float | None) -> None:
    """Ask for what is missing until it is there."""
    for _ in range(1 + MAX_REPEATS):
        if not incoming.missing:
            return
        await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(incoming.missing)))
        await incoming.settled(silence_seconds)
        if incoming.damaged:
            log.warning("%d chunks of transfer %d came damaged", len(incoming.damaged), incoming.transfer)
        incoming.damaged.clear()
    if incoming.missing:
        raise ShardRejected("chunks of the payload do not hash to their digests")


async def _close(incoming: IncomingShard, streams: Streams, slot: Slot) -> None:
    """Wait for chunks that are under way, and note what has come; a stream that has fallen silent in the middle of one is cut."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await incoming.close()
    except TimeoutError:
        await streams.close()
        await incoming.close()
    slot.arrived = frozenset(range(chunk_count(incoming.payload_bytes))) - incoming.missing


async def _copy_unchanged(store: SlotStore, slot: Slot, begin: BeginShard, missing: Collection[int]) -> set[int]:
    """Take from the shard's other slots what did not change; verified like what comes over the wire."""
    others = [
        other for other in store.shards[begin.owner_rank] if other is not slot and other.file.header.state is SlotState.SEALED and other.chunk_digests
    ]
    found = list(found_elsewhere(begin.chunk_digests, missing, [other.chunk_digests for other in others]))
    if not found:
        return set()

    def work(cancelled: threading.Event) -> set[int]:
        copied = set()
        for index, number in found:
            if cancelled.is_set():
                break
            start, stop = chunk_range(index, begin.payload_bytes)
            with others[number].file.payload(start, stop) as source, slot.file.payload(start, stop) as target:
                if source.nbytes == target.nbytes:
                    _copy(target, source)
                    if digest(target) == chunk_digest(begin.chunk_digests, index):
                        copied.add(index)
        return copied

    for _, number in found:
        others[number].pins += 1
    try:
        return await in_thread(work)
    finally:
        for _, number in found:
            others[number].pins -= 1


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter, as assigning a slice would."""
    size = source.nbytes
    to, out_of = (ctypes.c_char * size).from_buffer(target), (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(to, out_of, size)
    del to, out_of


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
