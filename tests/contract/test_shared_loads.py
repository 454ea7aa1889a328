"""Every byte is read once from moto and from SeaweedFS, although several nodes and ranks load shards together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_object_store import environment
from tests.moto_server import moto_server
from tests.seaweedfs import SeaweedFs
from tests.small_chunks import use_small_chunks
from tests.unit.worker.member.loading_nodes import Nodes
from tests.unit.worker.member.sharing_nodes import Cluster
from tests.unit.worker.storage.slots import Tensors
from worker.member.shared_loads import HelpedLoad
from worker.storage.s3 import S3ObjectStore, s3_store
from worker.storage.shard_parts import PART_CHUNKS

NODE_COUNT, MAX_NODE_COUNT = 3, 4
SHARD_BYTES = 40 * 1024 * 1024
SMALL_CHUNK_BYTES = 64 * 1024
OWN_BYTES, SHARED_BYTES = 12 * 1024 * 1024, 24 * 1024 * 1024


class Count:
    """Counts the bytes that S3 sends to one node."""

    def __init__(self, begun: threading.Event) -> None:
        self.bytes = 0
        self.begun = begun

    def __call__(self, parsed: dict[str, Any], **_: object) -> None:
        self.bytes += parsed["ContentLength"]
        self.begun.set()


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def settings(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """Yield the environment variables with which agents reach the S3 server of the test, moto or SeaweedFS."""
    if request.param == "seaweedfs":
        with SeaweedFs() as server:
            yield server.environment
    else:
        with moto_server() as url:
            yield environment(url)


@pytest.fixture
def stores(settings: Mapping[str, str]) -> Iterator[list[S3ObjectStore]]:
    made = [s3_store(settings) for _ in range(MAX_NODE_COUNT)]
    client = made[0].client
    client.create_bucket(Bucket="bucket")
    yield made
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=entry["Key"])
    client.delete_bucket(Bucket="bucket")
    for store in made:
        store.client.close()


async def test_s3_serves_every_byte_of_a_shard_once(
    stores: list[S3ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = stores[:NODE_COUNT]
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


def counted(stores: Sequence[S3ObjectStore]) -> list[Count]:
    """Return a counter per store, which counts the bytes that S3 sends to the store's node from now on."""
    counts = [Count(threading.Event()) for _ in stores]
    for store, count in zip(stores, counts, strict=True):
        store.client.meta.events.register("after-call.s3.GetObject", count)
    return counts


def tensors(own: Sequence[int], shared_bytes: int) -> list[Tensors]:
    """Return each rank's tensors: its own one, with the rank's size in `own`, and two that are equal on all ranks."""
    size = shared_bytes // 2
    shared = [(f"shared{each}", "uint8", (size,), os.urandom(size)) for each in range(2)]
    return [[("own", "uint8", (size,), os.urandom(size)), *shared] for size in own]


async def test_s3_serves_a_shared_object_once_to_the_ranks_of_a_node(
    stores: list[S3ObjectStore], tmp_path: Path
) -> None:
    """Two ranks of one node load tensors that are equal on both, as with DDP. S3 sends each byte of these tensors once.

    The other two nodes load no shard themselves. They read parts of both shards from S3 and send them to this node.
    """
    nodes = Cluster(tmp_path, stores[:NODE_COUNT], tensors([OWN_BYTES] * 2, SHARED_BYTES), ranks_per_node=2)
    await nodes.upload()
    counts = counted(stores)
    await nodes.load()
    await nodes.close()
    assert sum(count.bytes for count in counts) == sum(each.object_bytes for each in nodes.uploaded) + SHARED_BYTES
    assert len({each.key for shard in nodes.uploaded for each in shard.replicated}) == 2


@pytest.mark.parametrize("node_count", [2, 3, 4])
@pytest.mark.parametrize("frozen", [(), ("shared0", "shared1")], ids=["ddp", "frozen"])
async def test_s3_serves_a_shared_object_once_to_all_nodes(
    stores: list[S3ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    frozen: tuple[str, ...],
    node_count: int,
) -> None:
    """All nodes of a job load at the same time. S3 sends each byte of the tensors that are equal on all ranks once.

    These tensors are at different positions in the shards of the ranks.
    """
    use_small_chunks(monkeypatch, SMALL_CHUNK_BYTES)
    for store in stores:
        store.range_bytes = PART_CHUNKS * SMALL_CHUNK_BYTES
    own = [1024, 24 * SMALL_CHUNK_BYTES, 0, 7 * SMALL_CHUNK_BYTES][:node_count]
    shared_bytes = 50 * SMALL_CHUNK_BYTES
    nodes = Cluster(tmp_path, stores[:node_count], tensors(own, shared_bytes), frozen=frozen, least_bytes=1024)
    await nodes.upload()
    counts = counted(stores)
    await nodes.load()
    await nodes.close()
    assert all(
        len(each.frozen or each.replicated) == 2 and bool(each.frozen) == bool(frozen) for each in nodes.uploaded
    )
    assert sum(count.bytes for count in counts) == sum(each.object_bytes for each in nodes.uploaded) + shared_bytes
    most = max(count.bytes - each.object_bytes for count, each in zip(counts, nodes.uploaded, strict=False))
    assert most < shared_bytes, "no node reads all shared bytes, although nodes also read own bytes of other nodes"
