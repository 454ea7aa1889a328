"""Corruptions of shards that several nodes load from S3 together. Each node reads parts, and sends them to others."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.ids import Rank
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.plan import ObjectReference
from tests.corruption.outcomes import CHUNK_BYTES, Counts, Outcome, flipped, truncated, without_part
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.member.sharing_nodes import Cluster
from tests.unit.worker.storage.slots import Tensors
from worker.errors import StorageError
from worker.member.shared_loads import HelpedLoad
from worker.storage.object_store import Span

RANKS = (Rank(0), Rank(1))
NODES = 3
"""Number of nodes. The last one loads no shard of its own, so it helps from the start."""
WAIT_SECONDS = 0.02
"""How long a node waits for parts of another node that no longer sends any."""


class View(MemoryObjectStore):
    """The objects in S3 as one node reads them."""

    def __init__(self, objects: dict[str, dict[str, bytes]], helping: threading.Event) -> None:
        super().__init__()
        self.objects = objects
        self._helping = helping
        self.planted: dict[str, bytes] = {}
        """Content that this node reads instead of the stored content, by key."""
        self.reads = 0
        """Number of reads that return the planted content."""

    def get_bytes(self, reference: ObjectReference) -> bytes:
        if reference.key in self.planted and self.reads > 0:
            self.reads -= 1
            return self.planted[reference.key]
        return super().get_bytes(reference)

    def read_range(
        self, reference: ObjectReference, begin: int, target: memoryview, spans: Sequence[Span], **named: Any
    ) -> None:
        if not threading.current_thread().name.startswith("s3-get"):
            self._helping.set()
        super().read_range(reference, begin, target, spans, **named)


class SharedLoads:
    """Nodes that load two shards with common tensors from S3.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._stored: dict[str, bytes] = {}
        self._sound: dict[str, bytes] = {}
        """The content of each object, by key."""
        self._older: dict[str, bytes] = {}
        """The content of the older version of each object, by the key of the newer version."""
        self._expected: dict[Rank, bytes] = {}
        self._folder = folder
        self._objects: dict[str, dict[str, bytes]] = {"bucket": self._stored}
        self._helping = threading.Event()
        """Set when a node reads a part for another node."""
        self._views = [View(self._objects, self._helping) for _ in range(NODES)]
        self._cluster = self._made("new")
        self._patch = pytest.MonkeyPatch()

    def _made(self, name: str) -> Cluster[View]:
        common = self._draw.randbytes(9 * CHUNK_BYTES)
        shards: list[Tensors] = [
            [
                ("own", "uint8", (size,), self._draw.randbytes(size)),
                ("common", "uint8", (len(common),), common),
            ]
            for size in (5 * CHUNK_BYTES, 6 * CHUNK_BYTES - 200)
        ]
        return Cluster(self._folder / name, self._views, shards, least_bytes=1)

    async def prepare(self) -> None:
        """Store an older and a new version of both shards, and check that the nodes load them."""
        self._patch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)
        claim, helping = HelpedLoad.claim, self._helping

        def patient(load: HelpedLoad, number: int) -> bool:
            """Claim a part after another node has begun to help. The objects in memory are read too fast otherwise."""
            if number > 1:
                helping.wait(WAIT_SECONDS)
            return claim(load, number)

        self._patch.setattr(HelpedLoad, "claim", patient)
        older = self._made("old")
        await older.upload()
        await older.close()
        older_objects = dict(self._stored)
        self._stored.clear()
        await self._cluster.upload()
        names = {_name(key): data for key, data in older_objects.items()}
        self._older = {key: names[_name(key)] for key in self._stored}
        self._sound = dict(self._stored)
        self._cluster.patience = lambda _: WAIT_SECONDS
        await self._cluster.load()
        for rank in RANKS:
            found = self._cluster.found(rank)
            assert found is not None
            self._expected[rank] = found

    async def close(self) -> None:
        """End all sessions, and remove all slots."""
        await self._cluster.close()
        self._patch.undo()

    async def load(self, kind: str, counts: Counts) -> None:
        """Plant a corruption, and load both shards on their nodes at the same time.

        The corruption is in the objects, in the bytes that one node reads, or in the bytes between two nodes. Only
        corrupted objects may be refused, because nodes read wrong bytes again from S3.
        """
        draw, cluster = self._draw, self._cluster
        await cluster.restart()
        self._helping.clear()
        changed, view, place = self._changed(kind), draw.choice(self._views), draw.randrange(3)
        if place == 0:
            self._stored |= changed
            description = f"objects {sorted(changed)}"
        elif place == 1 or kind in ("swapped shards", "stale generation"):
            view.planted, view.reads = changed, draw.choice((1, 2, 10**6))
            description = f"node {self._views.index(view)} reads {view.reads} times {sorted(changed)}"
        else:
            cluster.on_stream = lambda line: _Corrupted(line, kind, draw)
            description = "between nodes"
        results = await asyncio.gather(*map(cluster.attempt, RANKS), return_exceptions=True)
        self._stored |= self._sound
        view.planted, view.reads = {}, 0
        cluster.on_stream = lambda line: line
        unexpected = [each for each in results if isinstance(each, Exception) and not isinstance(each, StorageError)]
        if unexpected:
            raise unexpected[0]
        outcome = Outcome.REFUSED if any(results) else Outcome.HARMLESS
        for rank, result in zip(RANKS, results, strict=True):
            found = cluster.found(rank)
            if found != (None if result else self._expected[rank]):
                outcome = Outcome.LOADED
                description += f"; rank {rank} {'is sealed after' if result else 'differs from S3 without'} an error"
        counts.add("shared load", kind, outcome, description)

    def _changed(self, kind: str) -> dict[str, bytes]:
        """Return the objects that a corruption changes, with their new content, by key."""
        draw = self._draw
        key = draw.choice(sorted(self._sound))
        data = self._sound[key]
        match kind:
            case "bit flip":
                return {key: flipped(data, draw)}
            case "truncation":
                return {key: truncated(data, draw)}
            case "dropped part":
                return {key: without_part(data, draw)}
            case "swapped shards":
                other = draw.choice([each for each in sorted(self._sound) if each != key])
                return {key: self._sound[other], other: data}
            case "stale generation":
                return {each: self._older[each] for each in self._sound if each == key or draw.random() < 0.5}
        raise AssertionError(kind)


def _name(key: str) -> str:
    """Return the part of a key that is equal for the same object of the older and the newer version."""
    return "common" if "/replicated/" in key else key.rsplit("/", 1)[-1]


class _Corrupted(socket.socket):
    """The receiving end of a stream between two nodes. Bytes of its chunks change or are lost, or it ends early.

    Args:
        line: the socket of the stream. This object replaces it.
        kind: the kind of the corruption.
        draw: source of all random choices.
    """

    def __init__(self, line: socket.socket, kind: str, draw: random.Random) -> None:
        super().__init__(fileno=line.detach())
        self._kind = kind
        self._left = draw.randrange(4 * CHUNK_BYTES)
        """Bytes of chunks before the corruption."""
        self._bit = draw.randrange(8)
        self._lost = draw.randrange(1, CHUNK_BYTES)
        """Number of bytes that a dropped part loses. Zeros replace them."""
        self._is_planted = False

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive bytes as the stream delivers them. Called in the thread of the stream."""
        count = super().recv_into(buffer, nbytes, flags)
        if self._is_planted or count <= CHUNK_HEADER.size:  # `Wire` plants corruptions of the headers of chunks.
            return count
        if count <= self._left:
            self._left -= count
            return count
        self._is_planted = True
        begin, stop = self._left, min(count, self._left + self._lost)
        match self._kind:
            case "bit flip":
                buffer[begin] ^= 1 << self._bit
            case "dropped part":
                buffer[begin:stop] = bytes(stop - begin)
            case "truncation":
                self.shutdown(socket.SHUT_RDWR)
                return begin
        return count
