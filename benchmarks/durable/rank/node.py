"""Runs one node of a job without a control plane: `python -m benchmarks.durable.rank.node ID FOLDER MIB`.

    harness ──plan──▶ Member: slots, replicas, rounds, loads, uploads ──▶ other nodes, S3
                        ▲ unix socket
                      rank with a session

A line on stdin is a command, answered by a line of JSON. The harness (`benchmarks.durable.members`) replaces the
control plane.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.data_plane.rank.node import ADDRESS, JOB, RUN, SOCKET, Ear
from everstep.protocol.codec import decode
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.plan import GenerationPlan
from tests.fakes.storage import MemoryObjectStore
from worker.core.metric_outbox import MetricOutbox
from worker.member.member import LocalNode, Member
from worker.node.full_disks import FullDisks
from worker.node.priority import AGENT_NICENESS, lead_own_session, work_at
from worker.provisioning.source import SourceArchives
from worker.ranks.server import RankServer
from worker.replication.tcp import PeerListener
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.object_store import ObjectStore
from worker.storage.s3 import s3_store

SETTLE_SECONDS = 0.5
"""Seconds from a rank's first message until its load. It waits by then, also if six ranks connect at once on two cores.
"""
BUCKET = "bench"
STORED = "stored"
"""File with a line per finished upload: step and monotonic time of its end."""
KEY_BYTES = 32


class BenchNode:
    """A node in the generations that the harness starts.

    Each async method is a command of the harness. It returns the answer, `{}` if there is nothing to report.
    """

    def __init__(self, node_id: NodeId, folder: Path, memory_bytes: int) -> None:
        self._objects: ObjectStore = s3_store() if "AWS_ENDPOINT_URL" in os.environ else MemoryObjectStore(BUCKET)
        self._store = SlotStore(HeldFiles(), memory_bytes=memory_bytes)
        self._store.open_run(JOB, RUN)
        self._ranks = RankServer(folder / SOCKET, self._store.files)
        self._listener = PeerListener(node_id)
        self._listener.start(ADDRESS)
        self._node = LocalNode(
            node_id=node_id,
            address=ADDRESS,
            state=folder,
            store=self._store,
            listener=self._listener,
            objects=self._objects,
            now=time.time,
            outbox=MetricOutbox(),
            archives=SourceArchives(folder / "archives", self._objects),
            full_disks=FullDisks(folder),
        )
        self._member: Member | None = None
        self._ear: Ear | None = None
        self._folder = folder
        self._stored = 0

    async def start(self) -> dict[str, Any]:
        """Listen for ranks. Return the listener's port."""
        await self._ranks.start()
        return {"port": self._listener.port}

    async def open(self, plan: str, source: str) -> dict[str, Any]:
        """Open a generation for its rank. Plan and source archive are in base64."""
        decoded = decode(base64.b64decode(plan), GenerationPlan)
        self._objects.put_bytes(decoded.script.source.object, base64.b64decode(source))
        key = bytes([decoded.generation % 256]) * KEY_BYTES
        self._member = Member(self._node, decoded, key, on_change=self._note_uploads)
        await self._member.open()
        self._ear = Ear(self._member.lines)
        self._ranks.events = self._ear
        return {}

    def _note_uploads(self) -> None:
        assert self._member is not None
        for shard in self._member.uploads.uploaded:
            if shard.step > self._stored:
                self._stored = shard.step
                with (self._folder / STORED).open("a") as file:
                    file.write(f"{shard.step} {time.monotonic()}\n")

    async def connected(self) -> dict[str, Any]:
        """Wait until the rank has connected and waits for its state."""
        assert self._ear is not None
        await self._ear.came.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        return {}

    async def load(self) -> dict[str, Any]:
        """Load this node's shard into a slot, from the sources in the plan."""
        assert self._member is not None
        await self._member.base.load()
        return {}

    async def begin(self) -> dict[str, Any]:
        """Join the rounds from now on, and send the waiting rank its state."""
        assert self._member is not None
        self._member.begin_rounds(is_restarted=False)
        return {}

    async def inventory(self) -> list[Any]:
        """Return the sealed slots of this node."""
        found: list[Any] = msgspec.to_builtins(self._store.inventory())
        return found

    async def drop(self, rank: int) -> dict[str, Any]:
        """Empty a shard's slots, as if this node had never held it."""
        for slot in self._store.shards.get(Rank(rank), []):
            slot.digests = None
            slot.file.empty()
        return {}

    async def close(self) -> dict[str, Any]:
        """End the generation."""
        assert self._member is not None
        await self._member.close()
        return {}


async def serve(node_id: str, folder: Path, memory_bytes: int) -> None:
    """Execute the commands on stdin until it is closed."""
    node = BenchNode(NodeId(node_id), folder, memory_bytes)
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = json.loads(line)
        print(json.dumps(await getattr(node, command)(*arguments)), flush=True)


def main(node_id: str, folder: Path, mebibytes: int) -> None:
    """Run a node with an agent's process settings."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr
    )
    lead_own_session()
    work_at(AGENT_NICENESS)
    memory_bytes = mebibytes * 1024**2
    folder.mkdir(mode=0o700)
    asyncio.run(serve(node_id, folder, memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
