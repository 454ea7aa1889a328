"""Measures the load of one shard from S3 by several nodes together. Each node has a bandwidth cap.

    reader 0 (owner)   HelpedLoad ◀─ proxy 0 ◀─
    reader 1 …         LoadHelper  ◀─ proxy 1 ◀─   SeaweedFS

Chunks between readers pass no proxy, so only bytes from S3 count against a cap.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.durable.transfer import MIB
from benchmarks.durable.writers import CAP_MIB_PER_SECOND, OBJECT_MIB, capped
from tests.unit.worker.member.loading_nodes import Nodes
from worker.storage.s3 import s3_store

READERS = (1, 2, 4)
"""Nodes that share the load, with the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoadTime:
    """Seconds of one shared load."""

    readers: int
    seconds: float


def shared_load(url: str, environment: Mapping[str, str], folder: Path, readers: int) -> SharedLoadTime:
    """Load and compare one shard with a number of readers, and return the duration.

    The server has the bucket `BUCKET` of `benchmarks.durable.writers`. `folder` is in shared memory.
    """
    return SharedLoadTime(readers=readers, seconds=asyncio.run(_load(url, environment, folder, readers)))


async def _load(url: str, environment: Mapping[str, str], folder: Path, readers: int) -> float:
    size = OBJECT_MIB * MIB
    with ExitStack() as stack:
        urls = [stack.enter_context(capped(url, CAP_MIB_PER_SECOND * MIB, is_download=True)) for _ in range(readers)]
        stores = [s3_store({**environment, "AWS_ENDPOINT_URL": each}) for each in urls]
        nodes = Nodes(folder, stores, [("weight", "uint8", (size,), os.urandom(size))])
        await nodes.store()
        begun = time.perf_counter()
        await nodes.load()
        seconds = time.perf_counter() - begun
        place = nodes.source.object
        assert place is not None
        stores[0].client.delete_object(Bucket=place.bucket, Key=place.key)
        for store in stores:
            store.client.close()
        return seconds
