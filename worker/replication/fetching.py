"""Fetches a shard of a generation's base from the memory of another node, called the holder here.

Invariant: a sealed slot contains exactly the content and the digest that the plan names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Rank
from everstep.protocol.peer_messages import (
    BeginShard,
    EndShard,
    FetchShard,
    PreparingShard,
    ShardDigests,
    ShardRefused,
    ShardSealed,
)
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
NextMessage = Callable[[], Awaitable[ShardDigests | EndShard]]
FETCH_RETRY_SECONDS = 0.1
# Without the reports, the holder would count as silent while a slow link transfers one chunk.
LOOKS_PER_SILENCE = 4
"""Number of progress reports of a receiving thread within `silence_seconds`."""


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
    """Fetch a shard into a slot of this node and seal it.

    Args:
        dialler: opens connections to the holder. A failed attempt is repeated: the holder may lack this plan yet.
        source: origin generation, step and digest from the plan.
        keep: contents of this shard that the fetch must not overwrite.
        slot_count: maximum slots of this shard on this node.
        answer_seconds: maximum time for repeated attempts to connect.
        silence_seconds: time without any data after which the connection counts as broken.
        arrived: receives progress, see `receive_shard`.

    Raises:
        ShardRejected: the holder lacks the shard, or the received data does not match the digest.
        NoRoom: this node lacks memory for the slot, or `keep` protects every slot.
        PeerError: the connection broke.
        MalformedMessage: the holder violated the protocol.
        TimeoutError: the holder did not answer in time.
    """

    async def receive(
        session: Session, streams: Streams, receiver: Receiver, begin: BeginShard, next_message: NextMessage
    ) -> bytes:
        return await receive_shard(
            session,
            streams,
            receiver,
            begin,
            next_message,
            store,
            keep=keep,
            slot_count=slot_count,
            silence_seconds=silence_seconds,
            arrived=arrived,
        )

    wanted = FetchShard(
        owner_rank=rank, origin_generation=source.origin_generation, step=source.step, digest=source.digest
    )
    await fetch(
        dialler,
        wanted,
        receive,
        answer_seconds=answer_seconds,
        silence_seconds=silence_seconds,
        stream_limit=stream_limit,
    )


async def fetch(
    dialler: Dialler,
    wanted: FetchShard,
    receive: Callable[[Session, Streams, Receiver, BeginShard, NextMessage], Awaitable[bytes]],
    *,
    answer_seconds: float,
    silence_seconds: float,
    stream_limit: int = OWN_STREAMS,
) -> None:
    """Request a shard or share of another node; `receive` receives it, or a part of it, and returns its digest.

    Other arguments and errors are those of `fetch_shard`. Raises ShardRejected and MalformedMessage itself.
    """
    rank = wanted.owner_rank
    async with asyncio.timeout(answer_seconds):
        session = await _dial(dialler, rank)
    streams, receiver = Streams(receive_seconds=silence_seconds / LOOKS_PER_SILENCE), Receiver()
    try:
        await session.send(wanted)
        begin: Message = PreparingShard()
        while isinstance(begin, PreparingShard):  # The holder still prepares the shard. Wait for its next message.
            async with asyncio.timeout(answer_seconds):
                begin = await session.receive()
        if isinstance(begin, ShardRefused):
            raise ShardRejected(begin.reason)
        named = (rank, wanted.origin_generation, wanted.step)
        if not isinstance(begin, BeginShard) or (begin.owner_rank, begin.origin_generation, begin.step) != named:
            raise MalformedMessage("the holder announced another shard than the requested one")
        for number in range(fetch_streams(begin.payload_bytes, stream_limit)):
            try:
                streams.add(await dialler.stream(session, number))
            except PeerError as error:
                if not streams.lines:
                    raise
                log.warning(
                    "rank %d is fetched over only %d stream%s: %s", rank, number, "s" if number > 1 else "", error
                )
                break

        async def next_message() -> ShardDigests | EndShard:
            message = await session.receive()
            if not isinstance(message, ShardDigests | EndShard) or message.transfer != begin.transfer:
                raise MalformedMessage(
                    f"{type(message).__name__} received, expected the next digests or the end of the shard"
                )
            if isinstance(message, EndShard) and message.digest != wanted.digest:
                raise MalformedMessage("the holder announced another shard than the requested one")
            return message

        async def take() -> None:
            digest = await receive(session, streams, receiver, begin, next_message)
            await session.send(ShardSealed(transfer=begin.transfer, digest=digest))

        async def deliver(line: socket.socket) -> None:
            await streams.run(line, receiver.receive)
            # The chunks that were requested over this stream will not arrive.
            raise PeerLost("the holder closed a stream")

        await first_of(take(), *(deliver(line) for line in streams.lines))
    finally:
        session.close()
        await finish(streams.close())


async def _dial(dialler: Dialler, rank: Rank) -> Session:
    while True:
        try:
            return await dialler.session()
        except PeerError as error:
            log.debug("fetch of rank %d: %s", rank, error)
            await asyncio.sleep(FETCH_RETRY_SECONDS)
