"""A shard on a session: sent from a slot, received into a slot. The sender, the receiver and a restore all use these two.

Invariant: a slot is sealed only when every byte of the payload has arrived exactly once and hashes to the owner's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import BeginShard, CancelShard, EndShard
from everstep.protocol.slot import SlotHeader, SlotState
from worker.core.slots import Content
from worker.errors import NoRoom, PeerError
from worker.replication.transport import Chunk, Session
from worker.shm.store import Slot, SlotStore

CHUNK_BYTES = 4 * 1024 * 1024


class ShardRejected(PeerError):
    """The shard was not sealed here: no slot is free, it was cancelled, or it does not hash to its digest."""


async def send_shard(session: Session, slot: Slot, *, committed: Step, progress: Callable[[], None]) -> bool:
    """Send a sealed slot as one shard, in chunks.

    Args:
        session: whose other side runs `receive_shard`.
        slot: sealed; the caller has registered itself as a reader or holds a pin.
        committed: C as this node knows it.
        progress: called after each chunk that the peer's socket has taken.

    Returns:
        True. A caller whose work was cancelled (the slot was granted anew) says so with `CancelShard`: the stream stands between two frames.

    Raises:
        PeerLost: the line is gone.
    """
    header = slot.file.header
    await session.send(
        BeginShard(
            owner_rank=header.owner_rank,
            origin_generation=header.origin_generation,
            step=header.step,
            payload_bytes=header.payload_bytes,
            capacity_bytes=header.capacity_bytes,
            index_offset=header.index_offset,
            index_bytes=header.index_bytes,
            layout_hash=header.layout_hash,
            committed=committed,
        )
    )
    for start in range(0, header.payload_bytes, CHUNK_BYTES):
        with slot.file.payload(start, min(header.payload_bytes, start + CHUNK_BYTES)) as piece:
            await session.send_chunk(start, piece)
        progress()
    await session.send(
        EndShard(owner_rank=header.owner_rank, origin_generation=header.origin_generation, step=header.step, digest=header.payload_digest)
    )
    return True


async def receive_shard(
    session: Session, begin: BeginShard, store: SlotStore, *, keep: Collection[Content], slot_count: int, expected: bytes | None = None
) -> bytes:
    """Take one shard into a slot and seal it.

    Args:
        session: whose other side runs `send_shard`; `begin` has been read from it.
        begin: the announced shard.
        store: this node's slots.
        keep: contents of this shard that must survive.
        slot_count: slots that this shard may have here.
        expected: the digest that a plan names; the owner's own word otherwise.

    Returns:
        The digest of the sealed payload.

    Raises:
        ShardRejected: it is not sealed; the stream stands behind the shard and can go on.
        PeerLost: the line broke in the middle; what came is void.
        ProtocolError: the other side broke the protocol; the line must be closed.
    """
    if not (begin.payload_bytes <= begin.capacity_bytes and begin.index_offset + begin.index_bytes <= begin.payload_bytes):
        raise MalformedMessage(f"a shard of {begin.payload_bytes} bytes in {begin.capacity_bytes}")
    rank, content = begin.owner_rank, Content(begin.origin_generation, begin.step)
    reason = "no slot is free"
    try:
        index = await store.grant(rank, content, keep=keep, capacity_bytes=begin.capacity_bytes, layout_hash=begin.layout_hash, slot_count=slot_count)
    except NoRoom as error:
        index, reason = None, str(error)
    slot = None if index is None else store.shards[rank][index].file
    try:
        end = await _receive_payload(session, begin, slot.payload(0, begin.payload_bytes) if slot is not None else None)
    except BaseException:
        if slot is not None:
            slot.empty()
        raise
    if index is None or slot is None:
        raise ShardRejected(reason)
    if end is None:
        slot.empty()
        raise ShardRejected("cancelled by the sender")
    header = SlotHeader(
        job=store.job,
        run=slot.header.run,
        owner_rank=rank,
        origin_generation=begin.origin_generation,
        step=begin.step,
        state=SlotState.WRITING,
        capacity_bytes=begin.capacity_bytes,
        payload_bytes=begin.payload_bytes,
        index_offset=begin.index_offset,
        index_bytes=begin.index_bytes,
        layout_hash=begin.layout_hash,
    )
    wanted = end.digest if expected is None else expected
    digest = await store.seal(rank, index, header, expected=wanted)
    if digest is None:
        raise ShardRejected(f"the payload does not hash to {wanted.hex()}")
    return digest


async def _receive_payload(session: Session, begin: BeginShard, payload: memoryview | None) -> EndShard | None:
    """Take the chunks of one shard, in order; without a slot they are read and dropped. None: the sender cancelled."""
    position = 0
    try:
        while True:
            item = await session.receive()
            match item:
                case Chunk(offset, size):
                    if offset != position or offset + size > begin.payload_bytes or size == 0:
                        raise MalformedMessage(f"a chunk {offset}+{size} at {position} of {begin.payload_bytes}")
                    if payload is None:
                        await session.receive_into(memoryview(bytearray(size)))
                    else:
                        with payload[offset : offset + size] as piece:
                            await session.receive_into(piece)
                    position += size
                case EndShard() if (item.owner_rank, item.origin_generation, item.step) == (begin.owner_rank, begin.origin_generation, begin.step):
                    if position != begin.payload_bytes:
                        raise MalformedMessage(f"a shard that ends after {position} of {begin.payload_bytes} bytes")
                    return item
                case CancelShard():
                    return None
                case _:
                    raise MalformedMessage(f"{type(item).__name__} in the middle of a shard")
    finally:
        if payload is not None:
            payload.release()
