"""Receives parts of other ranks' shards and adds them to this node's parity shares (docs/adr/0035-parity-in-memory.md).

    member (a rank's node)                   holder
    BeginShard, ShardDigests, EndShard ───▶  begins the contribution, and chooses the chunks of its share
                                       ◀───  ShardWanted(the chunks that the share lacks)
    chunks, over all streams           ───▶  verifies each in a buffer, then combines it with the slot
                                       ◀───  PreparingShard …, while other members contribute
                                       ◀───  ShardSealed, once the share contains every contribution | ShardRefused

Invariant: a member receives `ShardSealed` only for a shard that a sealed share of this node names by digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.parity import MAX_SHARD_BYTES, Contribution, share_owner
from everstep.protocol.peer_messages import BeginShard, EndShard, PreparingShard, ShardDigests
from worker.core.slots import Content
from worker.errors import NoRoom
from worker.replication.streams import IncomingParts, Receiver, Streams
from worker.replication.transfers import ShardRejected, announced_digests, receive_parts
from worker.replication.transport import Session
from worker.shm.shares import Accumulation, Shares
from worker.tasks import first_of

PREPARING_SECONDS = 0.1
"""Seconds between two progress messages to a member that has sent its whole contribution."""


class Contributions:
    """Combines parts of other ranks' shards with the shares that this node holds in one generation."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._connected: set[Rank] = set()
        self._refused: set[Rank] = set()
        """Ranks that are not awaited, because their shard is too large or this node lacks memory for the share."""
        self._progress: dict[Rank, int] = {}

    def expects(self, rank: Rank) -> bool:
        """Return whether a parity share of this node contains a part of the shard of `rank`."""
        return rank in self.shares.memberships

    def slot_owner(self, rank: Rank) -> Rank:
        """Return the number (`share_owner`) of this node's share that contains a part of the shard of `rank`."""
        return share_owner(self.shares.memberships[rank].holder)

    def siblings(self, rank: Rank) -> frozenset[Rank]:
        """Return the other ranks that contribute to the same share as `rank`."""
        member = self.shares.memberships[rank]
        return member.stripe.others(rank) - {member.holder}

    def inventory(self, rank: Rank) -> tuple[tuple[Generation, Step, bytes], ...]:
        """Return the shards of `rank` whose parts are in this node's sealed shares, for a `HolderInventory` message."""
        return tuple((content.origin, content.step, digest) for content, digest in self.shares.inventory(rank))

    def connect(self, rank: Rank) -> None:
        """Record that the node of `rank` has opened a session to contribute."""
        self._connected.add(rank)

    def disconnect(self, rank: Rank) -> None:
        """Record that the node of `rank` no longer has a session."""
        self._connected.discard(rank)
        self._refused.discard(rank)

    def progress(self, rank: Rank) -> None:
        """Record that `rank` has sent data for the share, or that it delays its data on purpose. Thread-safe."""
        self._progress[rank] = self._progress.get(rank, 0) + 1

    async def take(
        self,
        session: Session,
        streams: Streams,
        receiver: Receiver,
        begin: BeginShard,
        next_message: Callable[[], Awaitable[ShardDigests | EndShard]],
        *,
        on_emptied: Callable[[Collection[Rank]], None],
    ) -> bytes:
        """Receive a part of another rank's shard, combine it, wait until the share is sealed, and return the shard's
        digest.

        `begin`, not checked yet, was the last message of the session, on which the owner's node runs `send_shard`.
        `next_message` returns the next one. If this node empties the share, `on_emptied` must end the sessions of the
        given ranks, so that their agents discard earlier acknowledgements.

        Raises:
            ShardRejected: the share was abandoned, the shard is too large, or no slot is free; the session can
                continue.
            NoRoom: this node lacks memory for the share; the session can continue.
            PeerLost: the connection broke.
            MalformedMessage: the owner's messages contradict each other; the connection must be closed.
        """
        rank = begin.owner_rank
        chunk_digests, digest = await announced_digests(begin, next_message, silence_seconds=None)
        if max(begin.payload_bytes, begin.capacity_bytes) > MAX_SHARD_BYTES:
            self._refused.add(rank)
            raise ShardRejected(
                f"parity protects shards of at most {MAX_SHARD_BYTES:,} bytes, this shard has {begin.capacity_bytes:,}"
            )
        content = Content(begin.origin_generation, begin.step)
        contribution = Contribution(
            rank=rank,
            payload_bytes=begin.payload_bytes,
            digest=digest,
            layout_hash=begin.layout_hash,
            index_offset=begin.index_offset,
            index_bytes=begin.index_bytes,
        )
        if self.shares.has(content, contribution):
            self._refused.discard(rank)
            return digest
        try:
            accumulation = await self.shares.begin(
                content,
                contribution,
                shard_bytes=begin.capacity_bytes,
                committed=begin.committed,
                on_emptied=lambda: on_emptied(self.siblings(rank)),
            )
        except NoRoom:
            self._refused.add(rank)
            raise
        if accumulation is None:
            raise ShardRejected(
                f"each slot of the share holds a step that is newer than step {begin.step} or that must be kept"
            )
        self._refused.discard(rank)

        def combine(index: int, data: memoryview) -> bool:
            self.progress(rank)
            return accumulation.take(rank, index, data)

        incoming = IncomingParts(combine, transfer=begin.transfer, payload_bytes=begin.payload_bytes)
        incoming.name(chunk_digests, ())
        wanted = accumulation.missing(contribution)

        async def receive() -> None:
            await receive_parts(session, streams, receiver, incoming, wanted, silence_seconds=None)
            self.shares.finish(accumulation, contribution)
            await self._say_preparing(session, accumulation)

        async def wait() -> None:
            await accumulation.decided()

        await first_of(receive(), wait())
        if not accumulation.is_sealed:
            raise ShardRejected(f"the share of step {begin.step} was abandoned before it was sealed")
        return digest

    async def _say_preparing(self, session: Session, accumulation: Accumulation) -> None:
        """Send progress messages to a member whose contribution is complete, until the share is sealed or given up."""
        before = dict(self._progress)
        while not accumulation.is_over:
            await asyncio.sleep(PREPARING_SECONDS)
            progressed = {rank for rank, count in self._progress.items() if count != before.get(rank)}
            # Without messages, the member drops this node at the holder deadline.
            if accumulation.share.is_progressing(self._connected - self._refused, progressed):
                before = dict(self._progress)
                await session.send(PreparingShard())
