"""Every byte of a shard is read once from a real S3 server, although several nodes load the shard together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from tests.contract.test_object_store import environment
from tests.unit.worker.member.loading_nodes import Nodes
from worker.member.shared_loads import LoadHelpers
from worker.storage.s3 import S3ObjectStore, s3_store

NODE_COUNT = 3
SHARD_BYTES = 40 * 1024 * 1024


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
    claim = LoadHelpers.claim

    def patient(helpers: LoadHelpers, number: int) -> bool:
        if number == 2:
            assert has_help.wait(30.0)
        return claim(helpers, number)

    monkeypatch.setattr(LoadHelpers, "claim", patient)
    await nodes.load()
    assert nodes.source.object is not None
    head = stores[0].head(nodes.source.object)
    assert head is not None
    assert sum(count.bytes for count in counts) == head.bytes
    assert counts[0].bytes
    assert any(count.bytes for count in counts[1:])
