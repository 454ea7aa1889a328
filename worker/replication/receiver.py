"""Serves the sessions that other agents open to this node: their shards arrive here, or are fetched from here.

Invariant: one replica session per generation and owner; a new one joins the old before it begins, so that two streams never write one shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Rank, Step
from everstep.protocol.peer_messages import BeginShard, CancelShard, FetchShard, HolderInventory, ShardRefused, ShardSealed
from worker.core.slots import Content
from worker.replication.shard_stream import ShardRejected, receive_shard, send_shard
from worker.replication.transport import Session
from worker.shm.store import SlotStore
from worker.tasks import end

log = logging.getLogger(__name__)


class ReplicaReceiver:
    """The holder's side of all replica and fetch sessions of one generation. One owner: the node's `Member`."""

    def __init__(self, store: SlotStore, *, held_ranks: Collection[Rank], keep: Callable[[Rank, Step], Collection[Content]], slot_count: int) -> None:
        """Serve out of `store`.

        Args:
            store: this node's slots.
            held_ranks: shards of other nodes that the plan places here; all others are refused.
            keep: what must survive of a shard, given C as its owner knows it.
            slot_count: slots per shard.
        """
        self._store = store
        self._held = frozenset(held_ranks)
        self._keep = keep
        self._slot_count = slot_count
        self._sessions: dict[Rank, asyncio.Task[None]] = {}
        self.rejected_count = 0

    async def replica(self, session: Session) -> None:
        """Take shards of one owner until the line ends. An earlier session of the same owner is ended first.

        Args:
            session: opened for replicas of its `owner_rank`.

        Raises:
            MalformedMessage: the shard is not held here, or something else came where a shard should begin.
            PeerLost: the line has ended.
        """
        rank = session.opened.owner_rank
        if rank not in self._held:
            raise MalformedMessage(f"rank {rank} is not held here")
        task = asyncio.current_task()
        assert task is not None
        earlier = self._sessions.get(rank)
        self._sessions[rank] = task
        if earlier is not None:
            await end(earlier)
        try:
            await self._take(session, rank)
        finally:
            if self._sessions.get(rank) is task:
                del self._sessions[rank]

    async def _take(self, session: Session, rank: Rank) -> None:
        sealed = [record for record in self._store.inventory() if record.owner_rank == rank]
        await session.send(
            HolderInventory(owner_rank=rank, sealed=tuple((record.origin_generation, record.step, record.digest) for record in sealed))
        )
        while True:
            begin = await session.receive()
            if isinstance(begin, CancelShard):
                continue
            if not isinstance(begin, BeginShard) or begin.owner_rank != rank:
                raise MalformedMessage(f"{type(begin).__name__} where a shard of rank {rank} should begin")
            origin, step = begin.origin_generation, begin.step
            try:
                keep = self._keep(rank, begin.committed)
                digest = await receive_shard(session, begin, self._store, keep=keep, slot_count=self._slot_count)
            except ShardRejected as error:
                self.rejected_count += 1
                await session.send(ShardRefused(owner_rank=rank, origin_generation=origin, step=step, reason=str(error)))
                continue
            await session.send(ShardSealed(owner_rank=rank, origin_generation=origin, step=step, digest=digest))

    async def fetch(self, session: Session) -> None:
        """Give shards that a replaced node needs, until the line ends.

        Args:
            session: opened for fetching, by a member of the same generation.

        Raises:
            MalformedMessage: something else than a request came.
            PeerLost: the line has ended.
        """
        while True:
            wanted = await session.receive()
            if not isinstance(wanted, FetchShard):
                raise MalformedMessage(f"{type(wanted).__name__} on a fetch session")
            rank, origin, step = wanted.owner_rank, wanted.origin_generation, wanted.step
            slot = self._store.sealed(rank, Content(origin, step))
            if slot is None or slot.file.header.payload_digest != wanted.digest:
                await session.send(ShardRefused(owner_rank=rank, origin_generation=origin, step=step, reason="not held here"))
                continue
            slot.pins += 1
            try:
                await send_shard(session, slot, committed=Step(-1), progress=lambda: None)
            finally:
                slot.pins -= 1
