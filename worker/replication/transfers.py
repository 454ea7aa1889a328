"""One shard from a slot of one node into a slot of another: announced, named and asked for range by range, verified, sealed.

    sender                                   receiver
    BeginShard                         ───▶  makes a slot ready, or takes up the one that a broken transfer has left
    ShardDigests(the chunks there are) ───▶  which of them lie here already: from a broken transfer, or unchanged in another slot
                                       ◀───  ShardWanted(the others)
    chunks, over all streams           ───▶  each verified as it comes; damaged ones are wanted again
    … until its own slot is sealed …
    EndShard(digest of the whole)      ───▶
                                       ◀───  ShardSealed | ShardRefused

A slot that is sealed already is named whole and ended at once; one that its rank still writes is named as its chunks
become final.

Invariant: a slot is sealed only when its owner's is, and every chunk of the payload was seen to hash to what the owner
named.
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
from worker.replication.streams import ChunkQueue, IncomingShard, Receiver, Streams, send_chunks
from worker.replication.transport import Session
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread
from worker.tasks import finish, first_of

log = logging.getLogger(__name__)
MAX_REPEATS = 3
"""How often damaged chunks are asked for again before the shard is refused: a wire that damages so much is not one."""
CLOSE_SECONDS = 1.0
"""How long chunks under way to a transfer that is over may take to come before the streams are cut."""


Arrived = Callable[[SlotFile, SlotHeader, int], None]
"""Told where a shard comes into being, its header as it will be sealed, and how many first bytes of its payload are there, its index too, and are
known to be those of the owner's digest."""


class ShardRejected(PeerError):
    """The shard was not sealed here: it was cancelled, or it does not hash to its digest."""


class ShardDamaged(ShardRejected):
    """Chunks do not hash to their digests, however often they are sent."""


def announcement(slot: SlotHeader, *, transfer: int, committed: Step) -> BeginShard:
    """Return how a slot is announced.

    Args:
        slot: its header, or what that will be.
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
    """Send a slot that is sealed, or that will be.

    The caller holds it: it is a registered reader of the slot, or has pinned it.

    Args:
        session: whose other side runs `receive_shard`.
        streams: of the session.
        answers: returns the receiver's next answer to this transfer.
        file: the slot's.
        digests: of its chunks; they grow, unless it is sealed.
        begin: its announcement.
        queue: a new one; says afterwards what was sent, and how fast.
        pacer: see `send_chunks`.
        progress: told whenever the receiver has answered (0) or the kernel has taken something for it (bytes).
        paused: told +1 whenever the receiver is kept waiting, by the pacer or because nothing new is final yet, and -1
            when it no longer is.
        before_end: returns what the receiver gets ahead of the shard's end, once the slot is sealed. None: nothing.

    Returns:
        The receiver's last word. A caller whose work was cancelled (the slot was granted anew, or its capture given up)
        says so with `CancelShard`.

    Raises:
        PeerLost: the line is gone.
        MalformedMessage: the receiver asks for what there is not.
    """
    outcome: list[ShardSealed | ShardRefused] = []
    is_wanted = asyncio.Event()
    named_count = 0
    is_ended = False

    async def news() -> list[Message]:
        """What has come to be known since it was asked last."""
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
        await asyncio.Event().wait()  # until the receiver has the last word

    async def hear() -> None:
        while isinstance(answer := await answers(), ShardWanted):
            progress(0)
            if not are_within(answer.chunks, named_count):
                raise MalformedMessage(f"chunks {answer.chunks} wanted of {named_count}")
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
    await first_of(hear(), supply(), *(() if is_ended else (name(),)))
    return outcome[0]


async def _wait(digests: ChunkDigests, seen: int, paused: Callable[[int], None]) -> None:
    """Wait for the shard's owner: meanwhile nothing is asked of the receiver."""
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
    told: Callable[[], Awaitable[ShardDigests | EndShard]],
    store: SlotStore,
    *,
    keep: Collection[Content],
    slot_count: int,
    silence_seconds: float | None,
    arrived: Arrived | None = None,
) -> bytes:
    """Take one shard into a slot and seal it.

    Args:
        session: whose other side runs `send_shard`; `begin` has been read from it.
        streams: of the session; their threads run `receiver.receive`.
        receiver: of the streams.
        begin: the announced shard.
        told: returns what the sender says next of this transfer.
        store: this node's slots.
        keep: contents of this shard that must survive.
        slot_count: slots that this shard may have here.
        silence_seconds: how long nothing may come before the line counts as broken; None: the sender paces itself, the
            kernel finds dead lines.
        arrived: told on the loop as chunks come and are verified; the index is asked for first then, and nothing is
            told before all digests are known to make the payload's. None: nobody follows.

    Returns:
        The digest of the sealed payload.

    Raises:
        ShardRejected: it is not sealed; the session can go on.
        NoRoom: memory for slots does not suffice, or every slot must be kept; the session can go on.
        PeerLost: the line broke in the middle; what came is kept for the next session, and is no snapshot.
        MalformedMessage: what the sender says contradicts itself; the line must be closed.
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
        await _take(session, incoming, begin, told, store, slot, silence_seconds, is_followed=arrived is not None)
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


def _check(begin: BeginShard) -> None:
    sizes = 0 < begin.payload_bytes <= begin.capacity_bytes and begin.index_offset >= 0 and begin.index_bytes >= 0
    if not sizes or begin.index_offset + begin.index_bytes > begin.payload_bytes:
        raise MalformedMessage(f"a shard of {begin.payload_bytes} bytes in {begin.capacity_bytes}")


async def _take(
    session: Session,
    incoming: IncomingShard,
    begin: BeginShard,
    told: Callable[[], Awaitable[ShardDigests | EndShard]],
    store: SlotStore,
    slot: Slot,
    silence_seconds: float | None,
    *,
    is_followed: bool,
) -> None:
    """Ask for what is missing of each range that is named, until the shard is complete."""
    count = chunk_count(begin.payload_bytes)
    while True:
        try:
            async with asyncio.timeout(silence_seconds):
                message = await told()
        except TimeoutError as error:
            raise PeerLost(f"nothing has been said for {silence_seconds:g} s") from error
        known = len(incoming.chunk_digests) // DIGEST_BYTES
        if isinstance(message, EndShard):
            if known != count or shard_digest(incoming.chunk_digests, begin.payload_bytes) != message.digest:
                raise MalformedMessage(
                    f"the digest of a shard is not that of its {count} chunks, of which {known} were named"
                )
            return
        named, rest = divmod(len(message.chunk_digests), DIGEST_BYTES)
        if message.first != known or rest or not 0 < named <= count - known:
            raise MalformedMessage(
                f"{len(message.chunk_digests)} bytes of digests from chunk {message.first} on, after {known} of {count}"
            )
        digests = incoming.chunk_digests + message.chunk_digests
        missing = set()
        for index in range(known, known + named):
            if slot.arrived.get(index) != chunk_digest(digests, index):
                slot.arrived.pop(index, None)  # it will be overwritten
                missing.add(index)
        missing -= await _copy_unchanged(store, slot, begin, digests, missing)
        incoming.name(message.chunk_digests, missing)
        first = missing & set(range(*_index_chunks(begin))) if is_followed else set()
        if first:
            await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(first)))
        await session.send(ShardWanted(transfer=incoming.transfer, chunks=ranges(missing - first)))


async def _mend(session: Session, incoming: IncomingShard, silence_seconds: float | None) -> None:
    """Wait for what was asked for, and ask again for what comes damaged."""
    for repeat in range(1 + MAX_REPEATS):
        await incoming.settled(silence_seconds)
        if not incoming.missing:
            return
        log.warning("%d chunks of transfer %d came damaged", len(incoming.damaged), incoming.transfer)
        if repeat < MAX_REPEATS:
            await session.send(ShardWanted(transfer=incoming.transfer, chunks=incoming.again()))
    raise ShardDamaged("chunks of the payload do not hash to their digests")


async def _close(incoming: IncomingShard, streams: Streams, slot: Slot) -> None:
    """Take nothing more, wait for chunks that are under way, and note what has come."""
    try:
        if not incoming.shut():
            await finish(_under_way(incoming, streams))
    finally:
        for index in range(len(incoming.chunk_digests) // DIGEST_BYTES):
            if index not in incoming.missing:
                slot.arrived[index] = chunk_digest(incoming.chunk_digests, index)


async def _under_way(incoming: IncomingShard, streams: Streams) -> None:
    """Wait for chunks that are under way; a stream that has fallen silent in the middle of one is cut."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await incoming.close()
    except TimeoutError:
        await streams.close()
        await incoming.close()


async def _copy_unchanged(
    store: SlotStore, slot: Slot, begin: BeginShard, chunk_digests: bytes, missing: Collection[int]
) -> set[int]:
    """Take from the shard's other slots what did not change; verified like what comes over the wire."""
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
    """Copy without holding the interpreter, as assigning a slice would."""
    size = source.nbytes
    to, out_of = (ctypes.c_char * size).from_buffer(target), (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(to, out_of, size)
    del to, out_of


def _index_chunks(begin: BeginShard) -> tuple[int, int]:
    """Return the chunks that the index lies in, as a range's ends."""
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
