"""Simulates nodes whose shards share objects in S3. All nodes load in one process, with the code of agents."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import structs

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.unit.worker.member.lines import LineDialler
from tests.unit.worker.member.loading_nodes import CONTENT, source_of
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, Tensors, header_of, payload_of
from worker.core.object_readers import ObjectReaders, patience_seconds
from worker.core.shared_parts import load_helpers, reading_nodes
from worker.core.upload_division import LEAST_BYTES, Division, Item, divide
from worker.errors import PeerLost
from worker.member.shared_loads import HelpedLoad, LoadHelper
from worker.member.shared_objects import SharedReads
from worker.replication.streams import Streams
from worker.replication.transport import Dialler, Session
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.checkpoints import upload_shard
from worker.storage.downloads import download_shard
from worker.storage.node_loads import NodeLoads
from worker.storage.object_store import ObjectStore
from worker.storage.shared_tensors import SharedTensors

StoreT = TypeVar("StoreT", bound=ObjectStore)


class Cluster(Generic[StoreT]):
    """Nodes of one generation, each with the same number of ranks. S3 holds the shards of the first ranks."""

    def __init__(
        self,
        folder: Path,
        stores: Sequence[StoreT],
        shards: Sequence[Tensors],
        *,
        frozen: Collection[str] = (),
        ranks_per_node: int = 1,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """Create the nodes.

        Args:
            folder: folder for slots, on any file system.
            stores: each node's view of the object store.
            shards: the tensors of each rank whose shard S3 holds.
            frozen: names of the tensors that are declared frozen.
            ranks_per_node: number of ranks of each node.
            least_bytes: minimum size of shared tensors that are stored separately.
        """
        self.folder = folder
        self.stores = stores
        self.uploaded: list[UploadedShard] = []
        self.patience: Callable[[float], float] = patience_seconds
        self.dead: set[int] = set()
        """The nodes to which no session can be opened."""
        self.silent: set[int] = set()
        """The nodes that accept sessions and never answer."""
        self.is_asked = [asyncio.Event() for _ in stores]
        """One event per node, set when another node has opened a session to it."""
        self.on_stream: Callable[[socket.socket], socket.socket] = lambda line: line
        """Receives the socket of each new stream, and returns the socket that the dialling node reads."""
        self._plan = rank_plan(addresses=("127.0.0.1",) * len(stores), ranks_per_node=ranks_per_node)
        self._payloads = [payload_of(tensors, frozen=frozen) for tensors in shards]
        self._least_bytes = least_bytes
        self._offers: dict[Rank, Sequence[Item]] = {}
        self._has_offers = asyncio.Event()
        self._loads: list[NodeLoads] = []
        self._is_loaded: list[asyncio.Event] = []
        self._slots = [self._store(f"node{index}") for index in range(len(stores))]
        self._helpers: list[LoadHelper] = []
        self._diallers: dict[tuple[int, int], LineDialler] = {}

    async def upload(self) -> None:
        """Store all shards in S3, and make the plan that names them."""
        ranks = [Rank(rank) for rank in range(len(self._payloads))]
        self.uploaded = [*await asyncio.gather(*map(self._upload, ranks))]
        sources = {each.rank: (source_of(each),) for each in self.uploaded}
        self._plan = structs.replace(
            self._plan,
            ranks=tuple(structs.replace(rank, sources=sources.get(rank.rank, ())) for rank in self._plan.ranks),
        )
        self._begin()

    async def restart(self) -> None:
        """Begin another generation that loads the same shards. All sessions end, and all slots become empty."""
        await self.cut()
        self._diallers.clear()
        for slots in [slots for store in self._slots for slots in store.shards.values()]:
            for slot in slots:
                slot.file.empty()
        self._begin()

    def _begin(self) -> None:
        self._loads = [NodeLoads() for _ in self.stores]
        self._is_loaded = [asyncio.Event() for _ in self.stores]
        self._helpers = [
            LoadHelper(self._plan, store, is_loaded=is_loaded, ranks=node.ranks, loads=loads)
            for store, is_loaded, node, loads in zip(
                self.stores, self._is_loaded, self._plan.nodes, self._loads, strict=True
            )
        ]
        for node, is_loaded in zip(self._plan.nodes, self._is_loaded, strict=True):
            if node.node_id not in reading_nodes(self._plan):
                is_loaded.set()

    async def _upload(self, rank: Rank) -> UploadedShard:
        payload, offset, size = self._payloads[rank]
        store = self._store(f"upload{rank}")
        index = await store.grant(
            rank, CONTENT, keep=(), capacity_bytes=len(payload), layout_hash=bytes(range(16)), slot_count=1
        )
        assert index is not None
        file = store.shards[rank][index].file
        with file.payload(0, len(payload)) as view:
            view[:] = payload
        header = header_of(payload, offset, size, rank=rank, origin=1)
        await store.seal(rank, index, replace(header, state=SlotState.WRITING))

        async def agree(items: Sequence[Item]) -> Division:
            self._offers[rank] = items
            if len(self._offers) == len(self._payloads):
                self._has_offers.set()
            await self._has_offers.wait()
            return divide(self._offers, least_bytes=self._least_bytes)[rank]

        shared = SharedTensors(group_bytes=1 << 20, least_bytes=self._least_bytes)
        digests = payload_chunk_digests(payload)
        uploaded = await upload_shard(
            self.stores[rank % len(self.stores)], file, digests, self._plan, rank=rank, shared=shared, agree=agree
        )
        store.close()
        return uploaded

    async def load(self, nodes: Iterable[int] | None = None) -> None:
        """Load all shards of some nodes, by default of all nodes, at the same time, and check them."""
        indices = [*(range(len(self.stores)) if nodes is None else nodes)]
        await asyncio.gather(*map(self.load_node, indices))

    async def load_node(self, index: int) -> None:
        """Load all shards of one node, and check them."""
        await self.attempt(index)
        for rank in self._ranks(index):
            assert self.found(rank) == self._payloads[rank][0]

    async def attempt(self, index: int) -> None:
        """Load all shards of one node, without a check."""
        await asyncio.gather(*(self._load(index, rank) for rank in self._ranks(index)))
        self._is_loaded[index].set()

    def _ranks(self, index: int) -> list[Rank]:
        return [rank for rank in self._plan.nodes[index].ranks if rank < len(self._payloads)]

    def found(self, rank: Rank) -> bytes | None:
        """Return the shard that the rank's node has loaded, or None."""
        index = next(index for index, node in enumerate(self._plan.nodes) if rank in node.ranks)
        slot = self._slots[index].sealed(rank, CONTENT)
        if slot is None:
            return None
        with slot.file.payload() as view:
            return bytes(view)

    async def _load(self, index: int, rank: Rank) -> None:
        here, dialler = self._plan.nodes[index].node_id, partial(self._dialler, index)
        readers = ObjectReaders(here, reading_nodes(self._plan))
        await download_shard(
            self.stores[index],
            source_of(self.uploaded[rank]),
            self._slots[index],
            rank=rank,
            content=CONTENT,
            keep=(),
            slot_count=1,
            share=partial(HelpedLoad, rank, load_helpers(self._plan, rank, here), dialler),
            loads=self._loads[index],
            share_objects=partial(
                SharedReads, readers, dialler, self.stores[index], patience=lambda seconds: self.patience(seconds)
            )
            if readers.peers
            else None,
        )

    def _dialler(self, here: int, peer: NodeId) -> Dialler:
        there = int(peer.removeprefix("i-"))
        if there in self.dead:
            return _Dead()
        if (here, there) not in self._diallers:
            serve = partial(self._serve, there)
            self._diallers[here, there] = LineDialler(
                NodeId(f"i-{here}"), peer, "load", serve, on_stream=lambda line: self.on_stream(line)
            )
        return self._diallers[here, there]

    async def _serve(self, there: int, session: Session, streams: Streams) -> None:
        self.is_asked[there].set()
        if there in self.silent:
            await asyncio.Event().wait()
        await self._helpers[there].serve(session, streams)

    async def cut(self) -> None:
        """End all sessions."""
        serving = [task for each in self._diallers.values() for task in each.serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def close(self) -> None:
        """End all sessions, and remove all slots."""
        await self.cut()
        for store in self._slots:
            store.close()

    def _store(self, name: str) -> SlotStore:
        store = SlotStore(HeldFiles(), memory_bytes=1 << 30)
        store.open_run(JOB, RUN)
        return store


class _Dead:
    """A dialler to a node that is dead. Implements `Dialler`."""

    async def session(self) -> Session:
        raise PeerLost("no answer")

    async def stream(self, session: Session, number: int) -> object:
        raise PeerLost("no answer")
