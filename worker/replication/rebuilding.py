"""Rebuilds a lost shard from the shards and parity shares of the other ranks in its stripe (the survivors).

    from each survivor: its share, and those chunks of its own shard that the other survivors' shares contain
    ──▶ XOR, chunk by chunk ──▶ a slot of this node ──▶ sealed only if it matches the lost owner's digest

Invariant: every fetched chunk is verified and combined exactly once. A failed rebuild leaves an empty slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.parity import MAX_SHARD_BYTES, Rebuild, Survivor, share_owner
from everstep.protocol.peer_messages import BeginShard, FetchShard
from everstep.protocol.plan import ShardSource
from worker.core.parity import Missing, Stripe
from worker.core.slots import Content
from worker.errors import NoRoom, PeerError, PeerLost
from worker.replication.fetching import NextMessage, fetch
from worker.replication.streams import IncomingParts, Receiver, Streams
from worker.replication.transfers import ShardRejected, announced_digests, receive_parts
from worker.replication.transport import Dialler, Session
from worker.shm import combining
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore
from worker.tasks import together


async def rebuild_shard(
    dialler: Callable[[NodeId], Dialler],
    source: ShardSource,
    store: SlotStore,
    *,
    keep: Collection[Content],
    slot_count: int,
    answer_seconds: float,
    silence_seconds: float,
    stream_limit: int,
) -> None:
    """Rebuild a lost shard in a slot of this node and seal it.

    `dialler` returns the dialler of fetch sessions to a survivor's node. Other arguments are those of `fetch_shard`.

    Raises:
        ShardRejected: a survivor lacks its shard or share, or the result does not match the lost owner's digest. The
            error names each survivor that can be the cause.
        NoRoom: this node lacks memory for the slot, `keep` protects every slot, or the slot is too small.
        PeerLost: a survivor's connection broke, or the survivor violated the protocol or did not answer in time.
        MalformedMessage: the plan's source names no survivors, or contradicts itself.
    """
    rebuild, content = _checked(source), Content(source.origin_generation, source.step)
    lost = rebuild.lost
    index = await store.grant(
        lost.rank,
        content,
        keep=keep,
        capacity_bytes=lost.payload_bytes,
        layout_hash=lost.layout_hash,
        slot_count=slot_count,
    )
    if index is None:
        raise NoRoom(needed_bytes=lost.payload_bytes, available_bytes=0)
    slot = store.shards[lost.rank][index]
    try:
        target = Rebuilding(slot.file, rebuild)
    except NoRoom:
        slot.file.empty()
        raise

    async def fetch_part(survivor: Survivor, owner: Rank, digest: bytes) -> None:
        wanted = FetchShard(owner_rank=owner, origin_generation=content.origin, step=content.step, digest=digest)
        name = "shard" if owner == survivor.rank else "share"
        try:
            await fetch(
                dialler(survivor.node_id),
                wanted,
                partial(_receive, target, survivor, owner, silence_seconds),
                answer_seconds=answer_seconds,
                silence_seconds=silence_seconds,
                stream_limit=stream_limit,
            )
        except ShardRejected as error:
            raise ShardRejected(f"the {name} of rank {survivor.rank} on {survivor.node_id}: {error}") from error
        except (PeerError, ProtocolError, TimeoutError) as error:
            words = str(error) or "no answer in time"
            raise PeerLost(f"the {name} of rank {survivor.rank} on {survivor.node_id}: {words}") from error

    try:
        await together(
            *(
                fetch_part(survivor, owner, digest)
                for survivor in rebuild.survivors
                for owner, digest in (
                    (share_owner(survivor.rank), survivor.share_digest),
                    (survivor.rank, survivor.shard_digest),
                )
            )
        )
    except BaseException:
        slot.file.empty()
        raise
    header = replace(
        slot.file.header,
        payload_bytes=lost.payload_bytes,
        index_offset=lost.index_offset,
        index_bytes=lost.index_bytes,
    )
    if await store.seal(lost.rank, index, header, expected=lost.digest) is None:
        names = ", ".join(f"rank {each.rank} on {each.node_id}" for each in rebuild.survivors)
        raise ShardRejected(f"the shard that was rebuilt from {names} does not match the digest of its owner")


def _checked(source: ShardSource) -> Rebuild:
    rebuild = source.rebuild
    if rebuild is None or len(rebuild.stripe) < 2:
        raise MalformedMessage("a source of kind parity names no survivors")
    lost = rebuild.lost
    if (lost.payload_bytes, lost.digest) != (source.payload_bytes, source.digest):
        raise MalformedMessage(f"a source of kind parity names another shard of rank {lost.rank} than its rebuild")
    is_index_inside = 0 <= lost.index_offset <= lost.payload_bytes - lost.index_bytes <= lost.payload_bytes
    if not 0 < lost.payload_bytes <= MAX_SHARD_BYTES or not is_index_inside:
        raise MalformedMessage(
            f"the lost shard of rank {lost.rank} has {lost.payload_bytes} bytes, with an index of {lost.index_bytes} "
            f"bytes at {lost.index_offset}"
        )
    return rebuild


async def _receive(
    target: Rebuilding,
    survivor: Survivor,
    owner: Rank,
    silence_seconds: float,
    session: Session,
    streams: Streams,
    receiver: Receiver,
    begin: BeginShard,
    next_message: NextMessage,
) -> bytes:
    chunk_digests, digest = await announced_digests(begin, next_message, silence_seconds=silence_seconds)
    wanted = target.wanted(survivor.rank, owner, begin.payload_bytes)
    incoming = IncomingParts(
        partial(target.take, survivor.rank, owner), transfer=begin.transfer, payload_bytes=begin.payload_bytes
    )
    incoming.name(chunk_digests, ())
    await receive_parts(session, streams, receiver, incoming, wanted, silence_seconds=silence_seconds)
    return digest


class Rebuilding:
    """Rebuilds a shard in a slot: combines chunks of the other ranks' shards and shares by XOR."""

    def __init__(self, file: SlotFile, rebuild: Rebuild) -> None:
        """Create the object for a granted slot. Raises NoRoom if it is smaller than the lost shard."""
        if file.header.capacity_bytes < rebuild.lost.payload_bytes:
            raise NoRoom(needed_bytes=rebuild.lost.payload_bytes, available_bytes=file.header.capacity_bytes)
        self._file = file
        self._missing = Missing(Stripe(rebuild.stripe), rebuild.lost)
        self._begun: set[int] = set()
        """Chunks of the lost shard into which a chunk was already written. All others have undefined bytes."""
        self._lock = threading.Lock()

    def wanted(self, rank: Rank, owner: Rank, payload_bytes: int) -> frozenset[int]:
        """Return the chunks that `rank` must send: of its shard if `owner` equals `rank`, otherwise of its share."""
        return self._missing.wanted(rank, payload_bytes, is_share=owner != rank)

    def take(self, rank: Rank, owner: Rank, chunk: int, data: memoryview) -> bool:
        """Combine a verified chunk of a survivor, each once, with a chunk of the lost shard. Thread-safe."""
        lost = self._missing.chunk_of(rank, chunk, is_share=owner != rank)
        begin, end = self._missing.range_of(lost)
        with self._lock, self._file.payload(begin, end) as target, data[: end - begin] as part:
            (combining.combine if lost in self._begun else combining.replace)(target, part)
            self._begun.add(lost)
        return True
