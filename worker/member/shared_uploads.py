"""Shares the upload of a shard between the owner's node and the holders of the shard's replicas (helpers).

    owner's agent    begins the upload ──UploadPart──▶ holder's agent ──▶ S3
                     completes it      ◀─PartStored──

Invariant: the owner completes an upload only with parts whose size, CRC and SHA-256 match its own slot. A holder pins
its replica from the first request of a session to the session's end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from time import monotonic

from msgspec.structs import replace

from everstep.bulk import PartDigest, StoredPart
from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.peer_messages import PartStored, ShardRefused, UploadPart
from everstep.protocol.plan import GenerationPlan, ObjectReference
from everstep.protocol.rounds import Announcement
from everstep.protocol.safetensors import SharedGroups
from everstep.protocol.slot import SlotHeader
from worker.core.shared_parts import MAX_WINDOW, SharedParts
from worker.core.slots import Content, is_superseded
from worker.errors import PeerError, StorageError
from worker.member.part_sharing import PartSharing
from worker.replication.transport import Session
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.checkpoints import PIECE_BYTES
from worker.storage.object_store import ObjectStore, OnStored
from worker.storage.shard_object import ShardObject
from worker.tasks import end

log = logging.getLogger(__name__)
MAX_HELPED_PARTS = 4
"""Maximum number of parts that one node sends for others. Each occupies a thread of the agent's only pool."""


class HelpedUpload(PartSharing):
    """One upload of a shard to S3, in which helpers send some of the parts. Implements `ShareOf` and `Share`."""

    def __init__(
        self,
        header: SlotHeader,
        peers: Sequence[NodeId],
        dial: Callable[[NodeId], Awaitable[Session]],
        *,
        on_stored: OnStored,
    ) -> None:
        """Create the object. `on_stored` receives the bytes of each part that one of `peers` has stored."""
        super().__init__(SharedParts.begin(0), peers, "upload")
        self._header = header
        self._dial = dial
        self._on_stored = on_stored
        self._parts: dict[int, StoredPart] = {}
        self._verified: set[int] = set()
        self._first: UploadPart | None = None
        """The request for part 1; requests for other parts differ only in the number. None before `begin`."""
        self._where: tuple[ObjectReference, int, SharedGroups] | None = None

    def of(
        self, where: ObjectReference, object_bytes: int, shared: SharedGroups, check: Callable[[], None]
    ) -> HelpedUpload:
        """Set which S3 upload the owner divides among itself and the holders, and return this object."""
        self._where, self._check = (where, object_bytes, shared), check
        return self

    def begin(self, upload_id: str, part_bytes: int, part_count: int) -> None:
        """Announce the upload to the helpers, so that they can send parts to S3."""
        assert self._where is not None, "the upload has a name"
        where, object_bytes, shared = self._where
        with self._changed:
            self._state = SharedParts.begin(part_count, self.peers, monotonic())
            self._first = UploadPart(
                owner_rank=self._header.owner_rank,
                origin_generation=self._header.origin_generation,
                step=self._header.step,
                digest=self._header.payload_digest,
                object=where,
                object_bytes=object_bytes,
                shared=shared,
                upload_id=upload_id,
                part_bytes=part_bytes,
                number=1,
            )
        self._loop.call_soon_threadsafe(self._ask_all)

    def sent(self, number: int) -> None:
        """Record that this node has sent a part of the upload to S3, or failed to send it."""
        self._end_own(number)

    def next_missing(self, expected: Mapping[int, PartDigest], has_failed: Callable[[], bool]) -> int | None:
        """Wait until a helper fails to send a part of the upload, and return the part."""

        def review(now: float, slowest_seconds: float) -> None:
            self._verify(expected)
            self._state = self._state.exclude_late(now, slowest_seconds)

        return self._next_missing(review, has_failed)

    def stored(self) -> Sequence[StoredPart]:
        """Return the parts of the multipart upload that helpers have stored in S3."""
        with self._changed:
            return [self._parts[number] for number in sorted(self._state.finished)]

    def _verify(self, expected: Mapping[int, PartDigest]) -> None:
        for number in self._state.finished.keys() - self._verified:
            part = self._parts[number]
            if (part.size, part.crc, part.sha256) == expected[number]:
                self._verified.add(number)
                continue
            log.warning("%s stored other bytes as part %d than this node holds", self._state.finished[number], number)
            self._state = self._state.reject(number)

    async def _run(self, peer: NodeId) -> None:
        try:
            session = await self._dial(peer)
            try:
                await self._ask(session, peer)
            finally:
                session.close()
        except (PeerError, ProtocolError) as error:
            log.info("%s no longer helps with the upload of rank %d: %s", peer, self._header.owner_rank, error)
        finally:
            with self._changed:
                self._state = self._state.exclude(peer)
                self._changed.notify_all()

    async def _ask(self, session: Session, peer: NodeId) -> None:
        for number in self._owed(peer):
            await session.send(self._request(number))
        while True:
            while (more := self._assign(peer)) is not None:
                await session.send(self._request(more))
            if not self._owed(peer):
                return
            message = await session.receive()
            if isinstance(message, ShardRefused):
                log.info("%s does not help with rank %d: %s", peer, self._header.owner_rank, message.reason)
                return
            if not isinstance(message, PartStored):
                raise MalformedMessage(f"{type(message).__name__} where a part should be stored")
            self._store(peer, message)

    def _assign(self, peer: NodeId) -> int | None:
        with self._changed:
            self._state, number = self._state.assign(peer, monotonic())
        return number

    def _owed(self, peer: NodeId) -> list[int]:
        with self._changed:
            return self._state.owed(peer)

    def _request(self, number: int) -> UploadPart:
        with self._changed:
            first = self._first
        assert first is not None, "helpers are asked after the beginning of the upload"
        return replace(first, number=number)

    def _store(self, peer: NodeId, stored: PartStored) -> None:
        with self._changed:
            state = self._state.finish(peer, stored.number)
            if state is self._state:
                return
            self._state = state
            self._parts[stored.number] = StoredPart(stored.number, stored.etag, stored.size, stored.crc, stored.sha256)
            self._changed.notify_all()
        self._on_stored(stored.size)


class UploadHelper:
    """Sends parts of other nodes' shards to S3, read from the replicas on this node."""

    def __init__(
        self, plan: GenerationPlan, store: SlotStore, objects: ObjectStore, *, held_ranks: Collection[Rank]
    ) -> None:
        """Create the helper. `held_ranks` are the shards of other nodes that the plan places on this node."""
        prefix = plan.checkpoint.prefix
        self._place = prefix.bucket, f"{prefix.key}run={plan.run}/gen={plan.generation}/"
        self._store = store
        self._objects = objects
        self._held = frozenset(held_ranks)
        self._serving: dict[asyncio.Task[None], Step] = {}
        """By task of an open session: the step whose slot the session pins."""
        self._threads = asyncio.Semaphore(MAX_HELPED_PARTS)

    def apply_announcement(self, announcement: Announcement) -> None:
        """Stop helping with the uploads that owners cancel for the final step."""
        for task, step in self._serving.items():
            if is_superseded(
                step,
                committed=announcement.committed,
                proposed=announcement.proposed,
                persist=announcement.persist_step,
            ):
                task.cancel()

    async def serve(self, session: Session) -> None:
        """Upload the requested parts of a shard to S3 until the owner disconnects. Raises MalformedMessage."""
        task = asyncio.current_task()
        assert task is not None
        first: UploadPart | None = None
        slot: Slot | None = None
        sending = set[asyncio.Task[None]]()
        try:
            while True:
                wanted = await session.receive()
                if not isinstance(wanted, UploadPart) or len(sending) >= MAX_WINDOW:
                    raise MalformedMessage(
                        f"{type(wanted).__name__} where one of {MAX_WINDOW} parts should be asked for"
                    )
                first = first or wanted
                if replace(wanted, number=first.number) != first:
                    raise MalformedMessage(f"part {wanted.number} is of another upload than the session's first part")
                if slot is None and (slot := self._find(wanted)) is not None:
                    slot.pins += 1
                    self._serving[task] = wanted.step
                if slot is None:
                    await session.send(ShardRefused(transfer=wanted.number, reason="not held here"))
                    continue
                part = asyncio.create_task(self._serve_part(session, slot, wanted))
                sending.add(part)
                part.add_done_callback(sending.discard)
        finally:
            self._serving.pop(task, None)
            session.close()  # Do not wait for unfinished parts, because their owner now sends them itself.
            try:
                await end(*sending)
            finally:  # Unpin the slot even if this task is cancelled while it waits for the parts.
                if slot is not None:
                    slot.pins -= 1

    def _find(self, wanted: UploadPart) -> Slot | None:
        bucket, folder = self._place
        name = f"/rank={wanted.owner_rank}.safetensors"
        if wanted.owner_rank not in self._held or wanted.object.bucket != bucket:
            return None
        if not (wanted.object.key.startswith(folder) and wanted.object.key.endswith(name)):
            return None
        slot = self._store.sealed(wanted.owner_rank, Content(wanted.origin_generation, wanted.step))
        return slot if slot is not None and slot.file.header.payload_digest == wanted.digest else None

    async def _serve_part(self, session: Session, slot: Slot, wanted: UploadPart) -> None:
        """Send one requested part to S3, and answer the request. An unexpected error ends the session."""
        try:
            async with self._threads:
                answer = await self._send(slot, wanted)
            await session.send(answer)
        except PeerError:
            session.close()
        except Exception:
            log.exception("part %d of the upload of rank %d failed", wanted.number, wanted.owner_rank)
            session.close()

    async def _send(self, slot: Slot, wanted: UploadPart) -> PartStored | ShardRefused:
        digests = await self._store.digests(slot)
        header = slot.file.header
        if digests is None or header.payload_digest != wanted.digest:
            return ShardRefused(transfer=wanted.number, reason="the replica is damaged")

        def work(cancelled: threading.Event) -> StoredPart | None:
            content = ShardObject(slot.file, digests.known, piece_bytes=PIECE_BYTES, shared=wanted.shared)
            begin = (wanted.number - 1) * wanted.part_bytes
            stop = min(wanted.object_bytes, begin + wanted.part_bytes)
            if content.bytes != wanted.object_bytes or not 0 <= begin < stop:
                return None
            return self._objects.put_part(
                wanted.object,
                wanted.upload_id,
                wanted.number,
                content.pieces(begin, stop),
                is_cancelled=cancelled.is_set,
            )

        try:
            stored = await in_thread(work)
        except StorageError as error:
            return ShardRefused(transfer=wanted.number, reason=cut(str(error)))
        if stored is None:
            return ShardRefused(transfer=wanted.number, reason="the replica makes another object")
        return PartStored(
            number=stored.number, etag=stored.etag, size=stored.size, crc=stored.crc, sha256=stored.sha256
        )
