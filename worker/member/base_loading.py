"""Loads the base of a generation: one verified shard per local rank.

    own slot, else a peer, else shares, else S3 ─▶ BaseLoading ─▶ slot ─▶ the rank copies what is verified

Invariant: a rank never restores a base that does not match the plan's digest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

from msgspec import structs

from everstep.protocol.agent_messages import FaultCode, Obstacle, state_count
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode, RankPlan, ShardSource, SourceKind
from everstep.protocol.slot import SlotHeader
from worker.core.object_readers import ObjectReaders
from worker.core.rounds import NONE
from worker.core.shared_parts import home_of, load_helpers, reading_nodes
from worker.core.slots import Content
from worker.errors import BucketMissing, CorruptCheckpoint, LoadFailed, NoRoom, ObjectMissing, PeerError, StorageError
from worker.member.peer_sessions import PeerSessions
from worker.member.retained_steps import RetainedSteps
from worker.member.shared_loads import HelpedLoad
from worker.member.shared_objects import SharedReads
from worker.node.priority import before_other_sessions
from worker.replication.fetching import fetch_shard
from worker.replication.rebuilding import rebuild_shard
from worker.replication.streams import OWN_STREAMS
from worker.replication.transfers import ShardRejected
from worker.replication.transport import Dialler
from worker.shards.owned_shard import OwnedShard
from worker.shm.slot_file import SlotFile
from worker.shm.store import VERIFY_THREADS, SlotStore
from worker.storage.downloads import download_shard
from worker.storage.node_loads import NodeLoads
from worker.storage.object_store import ObjectStore
from worker.tasks import together

log = logging.getLogger(__name__)
REGAIN_SECONDS = 1.0
"""Seconds between two attempts to fetch the base of a shard that this node has lost."""


@dataclass(eq=False, repr=False)
class BaseLoading:
    """Loads the base of one generation into slots of this node.

    `arrived` is called as a rank's shard arrives, with the rank, the slot, its header and the number of verified bytes.
    """

    plan: GenerationPlan
    here: PlanNode
    shards: Mapping[Rank, OwnedShard]
    _: KW_ONLY
    store: SlotStore
    objects: ObjectStore
    sessions: PeerSessions
    contents: RetainedSteps
    slot_count: int
    arrived: Callable[[Rank, SlotFile, SlotHeader, int], None]

    def __post_init__(self) -> None:
        self._restored_from: dict[Rank, SourceKind] = {}
        self.loads = NodeLoads()
        self.is_loaded = asyncio.Event()
        """Set once this node has loaded its own shards, so that it can help other nodes."""

    async def load(self) -> None:
        """Load the base for all local ranks that lack it. Raises LoadFailed, with a message for the user."""
        failed: dict[Rank, LoadFailed] = {}

        async def load(rank: Rank) -> None:
            try:
                await self._load_rank(self.plan.ranks[rank])
            except LoadFailed as error:
                # All ranks need an older step if no source has this shard. After any other error, the
                # other ranks finish their loads for a second attempt.
                if error.code == FaultCode.SOURCE_MISMATCH:
                    raise
                failed[rank] = error

        # The ranks wait for this load. The kernel may divide the CPU equally among sessions (autogroups), and each rank
        # has its own session. Therefore raise the priority of the agent's session.
        with before_other_sessions():
            await together(*(load(rank) for rank in self.here.ranks if rank not in self._restored_from))
        if failed:
            # Repeated attempts help against a store that is out of reach, and against no other cause.
            raise min(failed.values(), key=lambda error: error.obstacle is not None)
        self.is_loaded.set()

    @property
    def restored_from(self) -> tuple[SourceKind, ...]:
        """Kind of source of each local rank's base, in the order of ranks. A rank without a base is omitted."""
        return tuple(self._restored_from[rank] for rank in self.here.ranks if rank in self._restored_from)

    async def _load_rank(self, rank: RankPlan, sources: Sequence[ShardSource] | None = None) -> None:
        shard = self.shards[rank.rank]
        sources = rank.sources if sources is None else sources
        if not sources:
            return
        kind = await self._load_first(rank.rank, sources, before_attempt=shard.begin_load, is_followed=True)
        slot = shard.slot(self.plan.base_step)
        assert slot is not None, "a loaded slot is sealed"
        self.arrived(rank.rank, slot.file, slot.file.header, slot.file.header.payload_bytes)
        self._restored_from[rank.rank] = kind
        # The control plane compares it with the digest that the former owner reported (`repeated_steps.wrong_bases`).
        if await self.store.digests(slot) is not None and (state := await self.store.state_digest(slot)) is not None:
            shard.note_state(self.plan.base_step, state, most=state_count(self.plan.world_size))

    async def load_earlier(self, rank: Rank) -> SlotFile:
        """Load a shard of a rank of the launch that captured the base, before the relayout. Raises LoadFailed."""
        assert self.plan.relayout is not None, "earlier shards exist only after a relayout"
        sources = [
            structs.replace(source, kind="local") if source.node_id == self.here.node_id else source
            for source in self.plan.relayout.shards[rank]
        ]
        sources.sort(key=lambda source: source.kind != "local")
        if not await self._load_from_home(rank, sources):
            await self._load_first(rank, sources)
        content = self.contents.earlier(rank)
        slot = self.store.sealed(rank, content) if content is not None else None
        assert slot is not None, "a loaded slot is sealed"
        return slot.file

    async def _load_from_home(self, rank: Rank, sources: Sequence[ShardSource]) -> bool:
        home = home_of(self.plan, rank)
        if home is None or home == self.here.node_id:
            return False
        source = structs.replace(sources[0], kind="peer", node_id=home, object=None, rebuild=None)
        try:
            await self._load_peer(rank, source, is_followed=False)
        except (PeerError, NoRoom, ProtocolError, TimeoutError) as error:
            log.info("this node gets the shard of earlier rank %d itself, because %s did not: %s", rank, home, error)
            return False
        return True

    async def _load_first(
        self,
        rank: Rank,
        sources: Sequence[ShardSource],
        *,
        before_attempt: Callable[[], None] = lambda: None,
        is_followed: bool = False,
    ) -> SourceKind:
        """Load a shard from the first of `sources` that delivers it, and return its kind. Raises LoadFailed."""
        refusals, is_mismatch, has_room = [], True, True
        obstacle: Obstacle | None = None
        place: ObjectReference | None = None
        for source in sources:
            begun = time.monotonic()
            before_attempt()
            try:
                match source.kind:
                    case "local":
                        await self._load_local(rank, source)
                    # With `is_followed`, a rank of this generation copies its shard while it
                    # arrives.
                    case "peer":
                        await self._load_peer(rank, source, is_followed=is_followed)
                    case "parity":
                        await self._load_parity(rank, source)
                    case "s3":
                        await self._load_s3(rank, source, is_shared=is_followed)
            except (PeerError, StorageError, NoRoom, ProtocolError, TimeoutError) as error:
                refusals.append(f"{source.kind}{f' {source.node_id}' if source.node_id else ''}: {error}")
                is_mismatch = is_mismatch and _is_mismatch(error)
                has_room = has_room and not isinstance(error, NoRoom)
                if source.kind == "s3":
                    is_late = isinstance(error, TimeoutError)
                    obstacle = Obstacle.NO_ANSWER if is_late else getattr(error, "obstacle", None)
                    place = source.object
                log.warning("rank %d: step %d was not loaded from %s", rank, source.step, refusals[-1])
                continue
            log.info(
                "rank %d: step %d restored from %s in %.3f s", rank, source.step, source.kind, time.monotonic() - begun
            )
            return source.kind
        code = (
            FaultCode.SOURCE_MISMATCH
            if is_mismatch
            else FaultCode.SOURCE_UNAVAILABLE
            if has_room
            else FaultCode.MEMORY_FULL
        )
        raise LoadFailed(
            code,
            f"step {self.plan.base_step} of rank {rank}: " + "; ".join(refusals),
            is_permanent=False,
            obstacle=obstacle,
            place=place,
        )

    async def regain(self, shard: OwnedShard) -> None:
        """Fetch the base of a shard that this node has lost, until it is here or the job has a committed step."""
        rank = self.plan.ranks[shard.rank]
        asked = {source.node_id for source in rank.sources if source.kind == "peer"}
        held = [
            # Also try the holders that the plan does not name as sources. This node may have sent them the base before
            # it lost its own copy.
            structs.replace(rank.sources[0], kind="peer", node_id=peer, object=None)
            for peer in rank.copy_nodes[1:]
            if peer not in asked
        ]
        sources = [*held, *(source for source in rank.sources if source.kind != "local")]
        # The agent cannot vote for the commit of the base until this node has the shard's base again.
        while sources and shard.core.committed == NONE:
            if shard.page.rank().copying == NONE:
                self.store.settle_copiers(shard.rank)
            try:
                await self._load_rank(rank, sources)
            except LoadFailed as error:
                log.warning("rank %d: the base that this node lost cannot be fetched yet: %s", shard.rank, error)
                await asyncio.sleep(REGAIN_SECONDS)
            else:
                shard.seal(self.plan.base_step)
                return

    async def _load_local(self, rank: Rank, source: ShardSource) -> None:
        slot = self.store.sealed(rank, Content(source.origin_generation, source.step))
        if slot is None or slot.file.header.payload_digest != source.digest:
            raise ShardRejected("no slot of this node holds the step")
        if not await self.store.verify(slot, threads=self._share(VERIFY_THREADS), is_pressing=True):
            raise ShardRejected("the slot no longer matches its digest")

    async def _load_peer(self, rank: Rank, source: ShardSource, *, is_followed: bool) -> None:
        timeouts = self.plan.timeouts
        await fetch_shard(
            self.sessions.dialler(source.node_id or NodeId(""), "fetch", NO_RANK),
            rank,
            source,
            self.store,
            keep=self.contents.keep(rank) - {Content(source.origin_generation, source.step)},
            slot_count=self.slot_count,
            answer_seconds=timeouts.coordinator_deadline_seconds,
            silence_seconds=timeouts.holder_deadline_seconds,
            arrived=partial(self.arrived, rank) if is_followed else None,
            stream_limit=self._share(OWN_STREAMS),
        )

    async def _load_parity(self, rank: Rank, source: ShardSource) -> None:
        if source.rebuild is None or source.rebuild.lost.rank != rank:
            raise ShardRejected("the plan names another shard to rebuild")
        timeouts = self.plan.timeouts
        await rebuild_shard(
            lambda node_id: self.sessions.dialler(node_id, "fetch", NO_RANK),
            source,
            self.store,
            keep=self.contents.keep(rank) - {Content(source.origin_generation, source.step)},
            slot_count=self.slot_count,
            answer_seconds=timeouts.coordinator_deadline_seconds,
            silence_seconds=timeouts.holder_deadline_seconds,
            stream_limit=max(1, self._share(OWN_STREAMS) // (2 * len(source.rebuild.survivors))),
        )

    def _share(self, count: int) -> int:
        return max(1, count // len(self.here.ranks))

    async def _load_s3(self, rank: Rank, source: ShardSource, *, is_shared: bool) -> None:
        content = Content(source.origin_generation, source.step)
        keep = self.contents.keep(rank) - {content}
        share = share_objects = None
        if is_shared:

            def dialler(peer: NodeId) -> Dialler:
                return self.sessions.dialler(peer, "load", NO_RANK)

            share = partial(HelpedLoad, rank, load_helpers(self.plan, rank, self.here.node_id), dialler)
            readers = ObjectReaders(self.here.node_id, reading_nodes(self.plan))
            if readers.peers:
                share_objects = partial(SharedReads, readers, dialler, self.objects)
        await download_shard(
            self.objects,
            source,
            self.store,
            rank=rank,
            content=content,
            keep=keep,
            slot_count=self.slot_count,
            share=share,
            loads=self.loads,
            share_objects=share_objects,
        )


def _is_mismatch(error: Exception) -> bool:
    return isinstance(error, (ShardRejected, CorruptCheckpoint, ObjectMissing)) and not isinstance(error, BucketMissing)
