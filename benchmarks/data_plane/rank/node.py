"""Runs one of two nodes without a control plane, to measure the transfer of a shard to a waiting rank.

    owner     a real `Member`: opens a generation, accepts its rank, fetches the base from the holder, starts the rounds
    holder    Everstep's listener and receiver: receives copies of the rank's shard and sends the shard back

The fetch starts only when the rank waits for its state. Otherwise, the small state would arrive before the model is
built. A line on stdin is a command, and a line of JSON on stdout its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    ScriptPlan,
    ShardSource,
    SlotRecord,
    SourceArchive,
    Timeouts,
)
from everstep.protocol.rank_messages import RankHello
from tests.fakes.storage import MemoryObjectStore
from worker.core.metric_outbox import MetricOutbox
from worker.core.slots import Content
from worker.member.member import LocalNode, Member
from worker.member.rank_connections import RankConnections
from worker.node.full_disks import FullDisks
from worker.node.priority import AGENT_NICENESS
from worker.provisioning.source import SourceArchives
from worker.ranks.server import RankLine, RankServer
from worker.replication.receiver import ReplicaReceiver
from worker.replication.tcp import PeerListener, TcpSession
from worker.replication.transport import PeerCredentials
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore

JOB, RUN, RANK = JobName("waiting"), RunId("b" * 32), Rank(0)
OWNER, HOLDER = NodeId("i-owner"), NodeId("i-holder")
KEY = b"k" * 32
ADDRESS = "127.0.0.1"
SOCKET = "ranks.sock"
SECONDS = 30.0
"""Seconds of every timeout in the plan. None expires."""
SETTLE_SECONDS = 0.1
"""Seconds from the rank's first message until the fetch. The rank waits by then."""
ENTRY = "train.py"
SLOTS, SPARE_BYTES = 5, 256 * 1024**2
"""Memory of a node: multiples of the rank's state, and bytes. Everstep requires four slots; the fifth is a reserve,
because a slot is larger than the state.
"""


def plan(generation: int, holder_port: int, base: SlotRecord | None) -> GenerationPlan:
    """Return the plan of a generation of one rank. `base` is the holder's slot to restore; None: start at step 0."""
    place = ObjectReference(bucket="bench", key="source")
    source_tree = archive()
    timeouts = dict.fromkeys(Timeouts.__struct_fields__, SECONDS)
    source = base and ShardSource(
        kind="peer",
        origin_generation=base.origin_generation,
        step=base.step,
        digest=base.digest,
        payload_bytes=base.payload_bytes,
        node_id=HOLDER,
    )
    return GenerationPlan(
        job=JOB,
        run=RUN,
        generation=Generation(generation),
        parent=Generation(generation - 1),
        base_step=base.step if base else Step(0),
        nodes=(
            PlanNode(node_id=OWNER, address=ADDRESS, peer_port=0, ranks=(RANK,)),
            PlanNode(node_id=HOLDER, address=ADDRESS, peer_port=holder_port, ranks=()),
        ),
        ranks=(RankPlan(rank=RANK, holders=(OWNER, HOLDER), sources=(source,) if source else ()),),
        coordinator=OWNER,
        master_address=ADDRESS,
        master_port=0,
        script=ScriptPlan(
            source=SourceArchive(object=place, sha256=hashlib.sha256(source_tree).hexdigest(), bytes=len(source_tree)),
            entry_point=ENTRY,
            hyperparameters={},
            environment={},
            output=place,
            logs=place,
        ),
        checkpoint=CheckpointPlan(every_steps=0, prefix=place),
        timeouts=Timeouts(**timeouts),
    )


# Build the archive once: a second archive would have a different time stamp and therefore a different digest
@functools.cache
def archive() -> bytes:
    """Return a source tree with one empty script, which never runs."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(ENTRY))
    return data.getvalue()


class Ear:
    """Forwards the events of a generation's rank to the `Member`, and records whether it has connected."""

    def __init__(self, lines: RankConnections) -> None:
        self._lines = lines
        self.came = asyncio.Event()

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        is_ours = self._lines.hello(hello, line)
        if is_ours:
            self.came.set()
        return is_ours

    def message(self, rank: Rank, message: Message) -> None:
        self._lines.message(rank, message)

    def lost(self, rank: Rank, line: RankLine) -> None:
        self._lines.lost(rank, line)


class Holder:
    """A node that receives the rank's replicas, and sends them to the owner's node."""

    def __init__(self, memory_bytes: int) -> None:
        self._store = SlotStore(HeldFiles(), memory_bytes=memory_bytes)
        self._store.open_run(JOB, RUN)
        self._listener = PeerListener(HOLDER)
        self._listener.start(ADDRESS)
        self._receiver = ReplicaReceiver(
            self._store, held_ranks=[RANK], keep=lambda _, step: {Content(Generation(1), step)}, slot_count=2
        )

    async def open(self, generation: int) -> dict[str, Any]:
        """Open a generation. Return the address for connections of the owner's node."""
        await self._listener.revoke()
        self._listener.admit(
            PeerCredentials(JOB, RUN, Generation(generation), HOLDER, KEY, silence_seconds=SECONDS), self._serve
        )
        return {"port": self._listener.port}

    async def _serve(self, session: TcpSession) -> None:
        serve = {"replica": self._receiver.replica, "fetch": self._receiver.fetch, "stream": self._receiver.stream}
        await serve[session.opened.kind](session)


class Owner:
    """A node that fetches the rank's shard from the holder while the rank waits for it."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        objects = MemoryObjectStore("bench")
        objects.put_bytes(ObjectReference(bucket="bench", key="source"), archive())
        self._store = SlotStore(HeldFiles(), memory_bytes=memory_bytes)
        self._store.open_run(JOB, RUN)
        self._ranks = RankServer(folder / SOCKET, self._store.files)
        self._node = LocalNode(
            node_id=OWNER,
            address=ADDRESS,
            state=folder,
            store=self._store,
            listener=PeerListener(OWNER),
            objects=objects,
            now=time.time,
            outbox=MetricOutbox(),
            archives=SourceArchives(folder / "archives", objects),
            full_disks=FullDisks(folder),
        )
        self._base: SlotRecord | None = None
        self._member: Member | None = None
        self._ear: Ear | None = None

    async def start(self) -> dict[str, Any]:
        await self._ranks.start()
        return {}

    async def open(self, generation: int, holder_port: int) -> dict[str, Any]:
        """Open a generation without state on this node, so that the rank connects and waits."""
        for slot in self._store.shards.get(RANK, []):
            with slot.file.payload(0, slot.file.header.capacity_bytes) as payload:
                payload[:] = bytes(payload.nbytes)
            slot.digests = None
            slot.file.empty()
        self._member = Member(self._node, plan(generation, holder_port, self._base), KEY, on_change=lambda: None)
        await self._member.open()
        self._ear = Ear(self._member.lines)
        self._ranks.events = self._ear
        return {}

    async def load(self) -> dict[str, Any]:
        """Wait for the rank, then fetch its shard. Return when the fetch began and when the shard was verified."""
        assert self._member is not None
        assert self._ear is not None
        await self._ear.came.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        begun = time.monotonic()
        await self._member.base.load()
        loaded = time.monotonic()
        self._member.begin_rounds(is_restarted=False)
        return {"begun": begun, "loaded": loaded}

    async def close(self) -> dict[str, Any]:
        """End the generation. Return the newest step in memory when the first one ended, which later ones restore."""
        assert self._member is not None
        await self._member.close()
        records = self._store.inventory()
        self._base = self._base or max(records, key=lambda record: record.step)
        return {"step": self._base.step}


async def serve(role: str, folder: Path, memory_bytes: int) -> None:
    """Execute the commands on stdin until it is closed."""
    node: Any = Owner(folder, memory_bytes) if role == "owner" else Holder(memory_bytes)
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = json.loads(line)
        print(json.dumps(await getattr(node, command)(*arguments)), flush=True)


def main(role: str, folder: Path, mebibytes: int) -> None:
    """Run the owner's or the holder's node, with an agent's process settings."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr
    )
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, AGENT_NICENESS)
    memory_bytes = SLOTS * mebibytes * 1024**2 + SPARE_BYTES
    folder.mkdir(mode=0o700)
    asyncio.run(serve(role, folder, memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
