"""Fetches one shard from a node that holds it: what a replaced node does at Load.

Invariant: what is sealed is exactly the content that the plan names, with the digest that it names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Rank
from everstep.protocol.peer_messages import BeginShard, EndShard, FetchShard, ShardDigests, ShardRefused, ShardSealed
from everstep.protocol.plan import ShardSource
from worker.core.slots import Content
from worker.core.transfers import fetch_streams
from worker.errors import PeerError, PeerLost
from worker.replication.streams import OWN_STREAMS, Receiver, Streams
from worker.replication.transfers import Arrived, ShardRejected, receive_shard
from worker.replication.transport import Dialler, Session
from worker.shm.store import SlotStore
from worker.tasks import finish, first_of

log = logging.getLogger(__name__)
RETRY_SECONDS = 0.1
LOOKS_PER_SILENCE = 4
"""How often it is looked at what has come of chunks that are long in coming."""


async def fetch_shard(
    dialler: Dialler,
    rank: Rank,
    source: ShardSource,
    store: SlotStore,
    *,
    keep: Collection[Content],
    slot_count: int,
    answer_seconds: float,
    silence_seconds: float,
    arrived: Arrived | None = None,
    stream_limit: int = OWN_STREAMS,
) -> None:
    """Bring the shard into a slot of this node, sealed.

    Args:
        dialler: to the holder, which may not have heard of this generation yet: it is asked again.
        rank: the shard's owner.
        source: origin, step and digest, as the plan names them.
        store: this node's slots.
        keep: contents of this shard that must survive.
        slot_count: slots that this shard may have here.
        answer_seconds: how long the holder may refuse or not answer at all.
        silence_seconds: how long nothing may come before the line counts as broken.
        arrived: as in `receive_shard`.
        stream_limit: so many streams at most.

    Raises:
        ShardRejected: the holder does not have it, or it does not hash to the digest.
        NoRoom: this node's memory for slots does not suffice, or every slot must be kept.
        PeerError: the line broke.
        MalformedMessage: the holder broke the protocol.
        TimeoutError: nobody answered in time.
    """
    async with asyncio.timeout(answer_seconds):
        session = await _dial(dialler, rank)
    streams, receiver = Streams(receive_seconds=silence_seconds / LOOKS_PER_SILENCE), Receiver()
    try:
        await session.send(
            FetchShard(
                owner_rank=rank, origin_generation=source.origin_generation, step=source.step, digest=source.digest
            )
        )
        async with asyncio.timeout(answer_seconds):
            begin = await session.receive()
        if isinstance(begin, ShardRefused):
            raise ShardRejected(begin.reason)
        named = (rank, source.origin_generation, source.step)
        if not isinstance(begin, BeginShard) or (begin.owner_rank, begin.origin_generation, begin.step) != named:
            raise MalformedMessage("another shard than the one asked for")
        for number in range(fetch_streams(begin.payload_bytes, stream_limit)):
            try:
                streams.add(await dialler.stream(session, number))
            except PeerError as error:
                if not streams.lines:
                    raise
                log.warning(
                    "rank %d is fetched over %d stream%s, not more: %s", rank, number, "s" if number > 1 else "", error
                )
                break

        async def told() -> ShardDigests | EndShard:
            message = await session.receive()
            if not isinstance(message, ShardDigests | EndShard) or message.transfer != begin.transfer:
                raise MalformedMessage(f"{type(message).__name__} where a shard should go on")
            if isinstance(message, EndShard) and message.digest != source.digest:
                raise MalformedMessage("another shard than the one asked for")
            return message

        async def receive() -> None:
            digest = await receive_shard(
                session,
                streams,
                receiver,
                begin,
                told,
                store,
                keep=keep,
                slot_count=slot_count,
                silence_seconds=silence_seconds,
                arrived=arrived,
            )
            await session.send(ShardSealed(transfer=begin.transfer, digest=digest))

        async def deliver(line: socket.socket) -> None:
            await streams.run(line, receiver.receive)
            raise PeerLost("the holder has closed a stream")  # what was to come over it never will

        await first_of(receive(), *(deliver(line) for line in streams.lines))
    finally:
        session.close()
        await finish(streams.close())


async def _dial(dialler: Dialler, rank: Rank) -> Session:
    while True:
        try:
            return await dialler.session()
        except PeerError as error:
            log.debug("fetch of rank %d: %s", rank, error)
            await asyncio.sleep(RETRY_SECONDS)
