"""Every byte is read once from a real S3 server, although several nodes and ranks load shards together."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.plan import RankPlan
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.contract.test_object_store import environment
from tests.unit.worker.member.lines import LineDialler
from tests.unit.worker.member.loading_nodes import CONTENT, OWNER, Nodes, replaced, source_of
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.upload_division import Division, Item, divide
from worker.member.shared_loads import HelpedLoad, LoadHelper
from worker.shm.store import SlotStore
from worker.storage.checkpoints import upload_shard
from worker.storage.downloads import download_shard
from worker.storage.node_loads import NodeLoads
from worker.storage.s3 import S3ObjectStore, s3_store
from worker.storage.shared_tensors import SharedTensors

NODE_COUNT = 3
SHARD_BYTES = 40 * 1024 * 1024
OWN_BYTES, SHARED_BYTES = 12 * 1024 * 1024, 24 * 1024 * 1024


class Count:
    """Counts the bytes of S3's answers to one node."""

    def __init__(self, begun: threading.Event) -> None:
        self.bytes = 0
        self.begun = begun

    def __call__(self, parsed: dict[str, Any], **_: object) -> None:
        self.bytes += parsed["ContentLength"]
        self.begun.set()


@pytest.fixture
def stores() -> Iterator[list[S3ObjectStore]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made = [s3_store(environment(f"http://{host}:{port}")) for _ in range(NODE_COUNT)]
    made[0].client.create_bucket(Bucket="bucket")
    yield made
    for store in made:
        store.client.close()
    server.stop()


async def test_s3_serves_every_byte_of_a_shard_once(
    stores: list[S3ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, stores, [("weight", "uint8", (SHARD_BYTES,), os.urandom(SHARD_BYTES))])
    await nodes.store()
    has_help = threading.Event()
    counts = [Count(threading.Event()), *(Count(has_help) for _ in stores[1:])]
    for store, count in zip(stores, counts, strict=True):
        store.client.meta.events.register("after-call.s3.GetObject", count)
    claim = HelpedLoad.claim

    def patient(helpers: HelpedLoad, number: int) -> bool:
        if number == 2:
            assert has_help.wait(30.0)
        return claim(helpers, number)

    monkeypatch.setattr(HelpedLoad, "claim", patient)
    await nodes.load()
    assert nodes.source.object is not None
    head = stores[0].head(nodes.source.object)
    assert head is not None
    assert sum(count.bytes for count in counts) == head.bytes
    assert counts[0].bytes
    assert any(count.bytes for count in counts[1:])


async def test_s3_serves_a_shared_object_once_to_the_ranks_of_a_node(
    stores: list[S3ObjectStore], tmp_path: Path
) -> None:
    """Two ranks of one node load equal tensors, as with DDP. Other nodes help with both loads."""
    pair = Pair(tmp_path, stores)
    await pair.upload()
    counts = [Count(threading.Event()) for _ in stores]
    for store, count in zip(stores, counts, strict=True):
        store.client.meta.events.register("after-call.s3.GetObject", count)
    await pair.load()
    assert sum(count.bytes for count in counts) == pair.own_bytes + SHARED_BYTES
    assert len({each.key for shard in pair.uploaded for each in shard.replicated}) == 2


class Pair:
    """Two ranks of node 0, whose shards only S3 holds. Nodes 1 and 2 help."""

    def __init__(self, folder: Path, stores: list[S3ObjectStore]) -> None:
        self.folder = folder
        self.stores = stores
        self.uploaded: list[UploadedShard] = []
        self.own_bytes = 0
        self._plan = rank_plan(addresses=("127.0.0.1",) * len(stores))
        shared = [(f"shared{each}", "uint8", (SHARED_BYTES // 2,), os.urandom(SHARED_BYTES // 2)) for each in range(2)]
        self._payloads = [payload_of([("own", "uint8", (OWN_BYTES,), os.urandom(OWN_BYTES)), *shared]) for _ in "01"]
        self._offers: dict[Rank, Sequence[Item]] = {}
        self._has_offers = asyncio.Event()

    async def upload(self) -> None:
        self.uploaded = [*await asyncio.gather(*(self._upload(Rank(rank)) for rank in range(2)))]
        self.own_bytes = sum(each.object_bytes for each in self.uploaded)

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
            if len(self._offers) == 2:
                self._has_offers.set()
            await self._has_offers.wait()
            return divide(self._offers)[rank]

        digests = payload_chunk_digests(payload)
        uploaded = await upload_shard(
            self.stores[0], file, digests, self._plan, rank=rank, shared=SharedTensors(), agree=agree
        )
        store.close()
        return uploaded

    async def load(self) -> None:
        """Load both shards on node 0 at the same time, and check them."""
        sources = [source_of(each) for each in self.uploaded]
        ranks = tuple(RankPlan(rank=Rank(rank), holders=(OWNER,), sources=(sources[rank],)) for rank in range(2))
        plan = replaced(self._plan, ranks=ranks)
        is_loaded = asyncio.Event()
        is_loaded.set()
        helpers = [LoadHelper(plan, store, is_loaded=is_loaded) for store in self.stores]
        peers = [node.node_id for node in plan.nodes[1:]]
        diallers: dict[NodeId, LineDialler] = {}

        def dialler(peer: NodeId) -> LineDialler:
            helper = helpers[int(peer.removeprefix("i-"))]
            return diallers.setdefault(peer, LineDialler(OWNER, peer, "load", helper.serve))

        store, loads = self._store("loaded"), NodeLoads()
        await asyncio.gather(
            *(
                download_shard(
                    self.stores[0],
                    sources[rank],
                    store,
                    rank=Rank(rank),
                    content=CONTENT,
                    keep=(),
                    slot_count=1,
                    share=partial(HelpedLoad, Rank(rank), peers, dialler),
                    loads=loads,
                )
                for rank in range(2)
            )
        )
        for rank in range(2):
            slot = store.sealed(Rank(rank), CONTENT)
            assert slot is not None
            with slot.file.payload() as view:
                assert bytes(view) == self._payloads[rank][0]
        store.close()
        serving = [task for each in diallers.values() for task in each.serving]
        await asyncio.gather(*serving, return_exceptions=True)

    def _store(self, name: str) -> SlotStore:
        store = SlotStore(self.folder / name, memory_bytes=4 * (OWN_BYTES + SHARED_BYTES))
        store.open_run(JOB, RUN)
        return store
