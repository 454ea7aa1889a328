"""Sends one owned shard to one of its holders, for as long as the generation lasts.

It asks the pure `Shard` what this holder wants next and sends that; what the holder has sealed comes back as acknowledgements. Invariant: the
holder's silence is measured from the moment that it is owed something, so an idle line is never a silent one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId
from everstep.protocol.peer_messages import CancelShard, HolderInventory, ShardRefused, ShardSealed
from worker.core.rounds import NONE
from worker.core.slots import Content
from worker.errors import PeerError
from worker.owned_shard import OwnedShard
from worker.replication.shard_stream import send_shard
from worker.replication.transport import Session
from worker.shm.store import SlotStore
from worker.tasks import Signal, end, first_of

log = logging.getLogger(__name__)
RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits before dialling again; the last one repeats."""
REFUSED_SECONDS = 0.2


class ReplicaSender:
    """One shard, one holder. One owner: the node's `Member`, which cancels `run`."""

    def __init__(
        self, shard: OwnedShard, peer: NodeId, dial: Callable[[], Awaitable[Session]], store: SlotStore, *, holder_deadline_seconds: float
    ) -> None:
        self._shard = shard
        self._store = store
        self._peer = peer
        self._dial = dial
        self._deadline = holder_deadline_seconds
        self._owed_since: float | None = None

    async def run(self) -> None:
        """Keep the holder supplied until cancelled; a broken line is dialled again, without end and without hurry."""
        watching = asyncio.create_task(self._watch(), name=f"watch {self._peer} for rank {self._shard.rank}")
        failures = 0
        try:
            while True:
                try:
                    session = await self._dial()
                    failures = 0
                    try:
                        await self._serve(session)
                    finally:
                        session.close()
                except (PeerError, ProtocolError) as error:
                    log.debug("replica session of rank %d to %s: %s", self._shard.rank, self._peer, error)
                await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
        finally:
            await end(watching)

    async def _serve(self, session: Session) -> None:
        first = await session.receive()
        if not isinstance(first, HolderInventory) or first.owner_rank != self._shard.rank:
            raise MalformedMessage("a holder that does not begin with its inventory")
        self._shard.inventory(self._peer, first.sealed)
        self._progress()
        refused = Signal()
        await first_of(self._listen(session, refused), self._feed(session, refused))

    async def _listen(self, session: Session, refused: Signal) -> None:
        while True:
            message = await session.receive()
            match message:
                case ShardSealed():
                    self._progress()
                    self._shard.acknowledge(self._peer, Content(message.origin_generation, message.step))
                case ShardRefused():
                    log.info("%s refuses step %d of rank %d: %s", self._peer, message.step, self._shard.rank, message.reason)
                    refused.notify()
                case _:
                    raise MalformedMessage(f"{type(message).__name__} from a holder")

    async def _feed(self, session: Session, refused: Signal) -> None:
        """Send what is wanted; what was sent is not sent again on this session unless the holder refused it."""
        sent: set[Content] = set()
        heeded = refused.version
        while True:
            shard = self._shard
            seen = shard.changed.version
            if refused.version != heeded:  # also one that came while another shard was being sent
                await asyncio.sleep(REFUSED_SECONDS)
                heeded = refused.version
                sent.clear()
            sent &= {shard.content(shard.core.foundation), shard.content(shard.core.proposed)}
            step = shard.core.wanted(self._peer)
            content = shard.content(step)
            slot = shard.slot(step) if step != NONE and content not in sent else None
            if slot is None:
                await first_of(shard.changed.wait(seen), refused.wait(heeded))
                continue
            work = send_shard(session, slot, committed=shard.core.committed, progress=self._progress)
            if await self._store.reading(slot, work):
                sent.add(content)
            else:
                await session.send(CancelShard(owner_rank=shard.rank, step=step))

    def _progress(self) -> None:
        self._owed_since = None

    async def _watch(self) -> None:
        """Drop the holder from the view when it has been owed something for the holder deadline without any progress."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._deadline / 10)
            if self._shard.core.wanted(self._peer) == NONE:
                self._owed_since = None
            elif self._owed_since is None:
                self._owed_since = loop.time()
            elif loop.time() - self._owed_since > self._deadline and self._peer in self._shard.core.view:
                log.warning("rank %d: holder %s has not answered for %.1f s and leaves the view", self._shard.rank, self._peer, self._deadline)
                self._shard.apply(self._shard.core.drop(self._peer))
