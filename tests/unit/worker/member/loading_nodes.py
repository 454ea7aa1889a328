"""Simulates nodes that load one shard from S3 together. All run in one process, with the code of agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, RankPlan, ShardSource
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.unit.worker.member.lines import LineDialler
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, Tensors, header_of, payload_of
from worker.core.slots import Content
from worker.member.shared_loads import HelpedLoad, LoadHelper
from worker.replication.streams import Streams
from worker.replication.transport import Session
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.checkpoints import upload_shard
from worker.storage.downloads import download_shard
from worker.storage.object_store import ObjectStore

RANK = Rank(0)
CONTENT = Content(Generation(1), Step(7))
OWNER = NodeId("i-0")
StoreT = TypeVar("StoreT", bound=ObjectStore)


class Nodes(Generic[StoreT]):
    """Nodes of one generation. Node 0 needs the shard of rank 0, which only S3 holds."""

    def __init__(self, folder: Path, stores: Sequence[StoreT], tensors: Tensors) -> None:
        """Create the nodes.

        Args:
            folder: folder for slots, on any file system.
            stores: each node's view of the object store.
            tensors: content of the shard.
        """
        count = len(stores)
        self.folder = folder
        self.stores = stores
        self.plan: GenerationPlan = rank_plan(addresses=("127.0.0.1",) * count)
        self.payload, self.offset, self.size = payload_of(tensors, slack=64)
        self.is_loaded = [asyncio.Event() for _ in range(count)]
        for event in self.is_loaded[1:]:
            event.set()
        self.helpers: list[LoadHelper] = []
        self.diallers: dict[NodeId, LineDialler] = {}
        self.asked: list[NodeId] = []
        self.ends: list[BaseException | None] = []
        """For each session of a helper that has ended: its error, or None."""

    async def store(self) -> None:
        """Store the shard in S3, and make the plan that names it."""
        store = await self._sealed()
        slot = store.sealed(RANK, CONTENT)
        assert slot is not None
        uploaded = await upload_shard(
            self.stores[0], slot.file, payload_chunk_digests(self.payload), self.plan, rank=RANK
        )
        store.close()
        self.source = source_of(uploaded)
        ranks = (RankPlan(rank=RANK, holders=(OWNER,), sources=(self.source,)), *self.plan.ranks[1:])
        self.plan = replaced(self.plan, ranks=ranks)
        self.helpers = [
            LoadHelper(self.plan, store, is_loaded=event)
            for store, event in zip(self.stores, self.is_loaded, strict=True)
        ]

    async def _sealed(self) -> SlotStore:
        store = self.node("stored")
        index = await store.grant(
            RANK, CONTENT, keep=(), capacity_bytes=len(self.payload), layout_hash=bytes(range(16)), slot_count=1
        )
        assert index is not None
        with store.shards[RANK][index].file.payload(0, len(self.payload)) as view:
            view[:] = self.payload
        header = header_of(self.payload, self.offset, self.size, origin=1)
        await store.seal(RANK, index, replace(header, state=SlotState.WRITING))
        return store

    def node(self, name: str) -> SlotStore:
        store = SlotStore(HeldFiles(), memory_bytes=4 * len(self.payload))
        store.open_run(JOB, RUN)
        return store

    def dialler(self, peer: NodeId) -> LineDialler:
        self.asked.append(peer)
        index = int(peer.removeprefix("i-"))
        return self.diallers.setdefault(
            peer, LineDialler(OWNER, peer, "load", lambda session, streams: self.serve(index, session, streams))
        )

    async def serve(self, index: int, session: Session, streams: Streams) -> None:
        await self.helpers[index].serve(session, streams)

    async def load(self) -> None:
        """Load the shard on node 0 with the help of all other nodes, and check it."""
        peers = [node.node_id for node in self.plan.nodes[1:]]
        store = self.node("owner")
        try:
            await download_shard(
                self.stores[0],
                self.source,
                store,
                rank=RANK,
                content=CONTENT,
                keep=(),
                slot_count=1,
                share=partial(HelpedLoad, RANK, peers, self.dialler),
            )
            slot = store.sealed(RANK, CONTENT)
            assert slot is not None
            with slot.file.payload() as view:
                assert bytes(view) == self.payload
            assert slot.file.header.payload_digest == self.source.digest
        finally:
            store.close()
            serving = [task for dialler in self.diallers.values() for task in dialler.serving]
            self.ends = await asyncio.gather(*serving, return_exceptions=True)


def source_of(uploaded: UploadedShard) -> ShardSource:
    """Return the source of an uploaded shard, as a plan names it."""
    return ShardSource(
        kind="s3",
        origin_generation=uploaded.origin_generation,
        step=uploaded.step,
        digest=uploaded.payload_digest,
        payload_bytes=uploaded.payload_bytes,
        object=uploaded.object,
    )


def replaced(plan: GenerationPlan, **changes: Any) -> GenerationPlan:
    """Return the plan with some fields replaced."""
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return GenerationPlan(**fields | changes)
