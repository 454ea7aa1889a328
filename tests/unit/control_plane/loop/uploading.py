"""Simulates a job whose nodes upload and restore with the agent's own code, for tests that kill processes.

    World: the real control plane, simulated agents ──plan──▶ UploadingNode: the agent's real uploads, one per node
                   └──────────────── S3 in memory ──────────────────┘

Each simulated agent of `World` reports the uploads of its `UploadingNode`. S3 and all peers refuse requests of a dead
process.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from control_plane.cloud.s3 import S3ServiceStore as ControlPlaneStore
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.peer_messages import SessionKind
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotState
from tests.fakes.s3_client import MemoryS3, MemoryS3Client, refusal
from tests.sim.world import BUCKET, World
from tests.unit.worker.member.lines import Line
from tests.unit.worker.storage.slots import Tensors, header_of, payload_of
from worker.core.rounds import NONE
from worker.core.slots import Content, slots_per_shard
from worker.core.upload_division import LEAST_BYTES
from worker.errors import PeerLost
from worker.member.checkpoint_uploads import CheckpointUploads
from worker.member.faults import ReportedFaults
from worker.member.retained_steps import RetainedSteps
from worker.member.shared_uploads import UploadHelper
from worker.member.upload_division import UploadDivision
from worker.shards.owned_shard import OwnedShard
from worker.shm.held_files import HeldFiles
from worker.shm.store import Slot, SlotStore
from worker.storage.downloads import download_shard
from worker.storage.s3 import S3ObjectStore

if TYPE_CHECKING:
    from botocore.client import BaseClient

    from control_plane.cloud.connection import Connection

NODES = 3
PART_BYTES = 256 * 1024
CONTROL_PLANE = "control plane"


class Killed(BaseException):
    """Ends the control plane immediately: no code of the product catches it."""


@cache
def payload(rank: int, step: int) -> tuple[bytes, int, int]:
    """Return the payload of a rank's state, and the offset and the size of its index.

    The state contains one tensor that only this rank has, which is uploaded in five parts. It also contains `NODES`
    further tensors, each of which is equal on all ranks.
    """

    def content(name: str) -> bytes:
        return hashlib.shake_128(f"{name}/{step}".encode()).digest(LEAST_BYTES)

    shared: Tensors = [(f"shared{each}", "uint8", (LEAST_BYTES,), content(f"shared{each}")) for each in range(NODES)]
    return payload_of([("own", "uint8", (LEAST_BYTES,), content(f"rank{rank}")), *shared])


@dataclass
class UploadedRank:
    """Implements the part of `OwnedShard` that uploads use."""

    store: SlotStore
    rank: Rank
    origin: Generation
    peers: tuple[NodeId, ...]
    uploaded: Step = NONE
    pinned: frozenset[Step] = frozenset()
    stored: Step = NONE

    def slot(self, step: Step) -> Slot | None:
        return self.store.sealed(self.rank, Content(self.origin, step))

    def holders_of(self, _: Step) -> tuple[NodeId, ...]:
        return self.peers


class UploadingNode:
    """Runs the uploads of one node in one generation."""

    def __init__(self, cluster: Cluster, plan: GenerationPlan, node_id: NodeId) -> None:
        self.node_id = node_id
        self.plan = plan
        self.is_dead = False
        self.lines: set[Line] = set()
        self.ranks = plan.node(node_id).ranks
        self.store = SlotStore(HeldFiles(), memory_bytes=1 << 26)
        self.store.open_run(plan.job, plan.run)
        self.objects = cluster.store_of(node_id)
        self._cluster = cluster
        self._contents = RetainedSteps(plan, plan.node(node_id))
        self._shards = {
            rank: UploadedRank(self.store, rank, plan.generation, plan.ranks[rank].copy_nodes[1:])
            for rank in self.ranks
        }
        held = [each.rank for each in plan.ranks if node_id in each.copy_nodes[1:]]
        self.helper = UploadHelper(plan, self.store, self.objects, held_ranks=held)
        self.division = UploadDivision(
            plan, node_id, lambda peer: self.dial(peer, "division"), pause=cluster.until_a_node_is_dead
        )
        self.uploads = CheckpointUploads(
            plan,
            cast("Mapping[Rank, OwnedShard]", self._shards),
            self.store,
            self.objects,
            self._contents,
            ReportedFaults(lambda: None),
            dial=lambda peer: self.dial(peer, "upload"),
            agree=self.division.agree,
            grant_if_due=lambda _: None,
            on_change=lambda: None,
            pause=lambda _: asyncio.sleep(0),
        )

    async def dial(self, peer: NodeId, kind: SessionKind) -> Line:
        """Open a session to another node. Raise PeerLost if either node is dead."""
        other = self._cluster.nodes[peer]
        if self.is_dead or other.is_dead:
            raise PeerLost(f"{peer} does not answer")
        there, back = asyncio.Queue[Message | None](), asyncio.Queue[Message | None]()
        here_end, there_end = Line(peer, kind, back, there), Line(self.node_id, kind, there, back)
        for node, line in ((self, here_end), (other, there_end)):
            node.lines.add(line)
        self._cluster.begin(other.serve(there_end))
        return here_end

    async def serve(self, line: Line) -> None:
        """Answer one session of another node."""
        try:
            await (self.helper.serve(line) if line.opened.kind == "upload" else self.division.serve(line))
        except PeerLost:
            pass
        finally:
            line.close()

    async def seal(self, step: int) -> None:
        """Seal a step of the node's own shards, and of the replicas that it holds."""
        for rank in self.plan.ranks:
            if self.node_id in rank.copy_nodes:
                await seal(self.store, rank.rank, self.plan, step)
        self._contents.committed = Step(step)

    def apply_announcement(self, persist: int) -> None:
        """Announce to the node that a step is marked for upload."""
        self.uploads.apply_announcement(
            Announcement(
                generation=self.plan.generation,
                term=1,
                sequence=1,
                committed=Step(persist),
                proposed=Step(persist + 1),
                persist_step=Step(persist),
            )
        )

    def die(self) -> None:
        """End the node's process: its requests to S3 are refused, and its sessions end."""
        self.is_dead = True
        self._cluster.s3.dead[self.node_id] = refusal("AccessDenied", 403, "of a dead node")
        for line in self.lines:
            line.close()

    async def close(self) -> None:
        """End the work in this process."""
        await self.uploads.close()
        await self.division.close()
        self.store.close()


class Cluster:
    """Simulates the nodes of one job, and S3."""

    def __init__(self, world: World, folder: Path) -> None:
        """Replace the control plane's S3, and start the control plane again.

        Args:
            world: a world with `NODES` nodes and no job.
            folder: folder for slots.
        """
        self.world = world
        self.folder = folder
        self.s3 = MemoryS3(BUCKET, lambda: world.now)
        self.nodes: dict[NodeId, UploadingNode] = {}
        self._has_dead_node = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.start_server()

    def start_server(self) -> None:
        """Start a control plane that has no state other than its database and S3."""
        self.s3.dead.pop(CONTROL_PLANE, None)
        connection = cast("Connection", MemoryS3Client(self.s3, CONTROL_PLANE))
        self.world.objects = ControlPlaneStore(connection)  # type: ignore[assignment]
        self.world.start_server()

    def store_of(self, client: str) -> S3ObjectStore:
        return S3ObjectStore(cast("BaseClient", MemoryS3Client(self.s3, client)), part_bytes=PART_BYTES)

    def begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def open(self) -> None:
        """Create the nodes of the job's newest plan. Each node aborts the unfinished uploads of ended agents."""
        plan = self.world.plan()
        await self.close()
        self._has_dead_node.clear()
        self.nodes = {node.node_id: UploadingNode(self, plan, node.node_id) for node in plan.nodes}
        for node in self.nodes.values():
            await node.uploads.abort_abandoned()

    async def upload(self, *steps: int) -> None:
        """Seal steps on all nodes, and upload them at the same time from all living nodes.

        The agents do not report the uploads.
        """
        for step in steps:
            for node in self.nodes.values():
                await node.seal(step)
            for node in self.nodes.values():
                node.apply_announcement(step)
        for node in self.nodes.values():
            await node.uploads.idle()

    def report(self, *node_ids: NodeId) -> None:
        """Let agents report the uploads of their nodes. Without arguments, all living agents report."""
        for node_id in node_ids or tuple(self.nodes):
            agent = self.world.agents.get(node_id)
            if agent is not None and not self.nodes[node_id].is_dead:
                agent.uploads = tuple(self.nodes[node_id].uploads.uploaded)

    def kill(self, node_ids: Sequence[NodeId]) -> None:
        """Terminate instances."""
        for node_id in node_ids:
            self._has_dead_node.set()
            self.nodes[node_id].die()
            if node_id in self.world.agents:
                self.world.terminate(self.world.agents[node_id])

    async def until_a_node_is_dead(self, _: float) -> None:
        """Wait as a coordinator does for the ranks' lists of tensors. It waits no longer after a death."""
        await self._has_dead_node.wait()

    async def restored(self) -> set[int]:
        """Download each rank's shard from its source in S3, and return the steps that the shards contain."""
        plan, steps = self.world.plan(), set[int]()
        for rank in plan.ranks:
            (source,) = [each for each in rank.sources if each.kind == "s3"]
            content = Content(source.origin_generation, source.step)
            store = SlotStore(HeldFiles(), memory_bytes=1 << 26)
            store.open_run(plan.job, plan.run)
            await download_shard(
                self.store_of("restore"), source, store, rank=rank.rank, content=content, keep=(), slot_count=1
            )
            slot = store.sealed(rank.rank, content)
            assert slot is not None
            with slot.file.payload() as view:
                assert bytes(view) == payload(rank.rank, source.step)[0]
            store.close()
            steps.add(source.step)
        return steps

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.close()
        await asyncio.gather(*self._serving)


async def seal(store: SlotStore, rank: Rank, plan: GenerationPlan, step: int) -> None:
    origin, checkpoint = plan.generation, plan.checkpoint
    data, offset, size = payload(rank, step)
    index = await store.grant(
        rank,
        Content(origin, Step(step)),
        keep=(),
        capacity_bytes=len(data),
        layout_hash=bytes(range(16)),
        slot_count=slots_per_shard(has_third_slot=checkpoint.third_slot, max_uploads=checkpoint.max_uploads),
    )
    assert index is not None
    with store.shards[rank][index].file.payload(0, len(data)) as view:
        view[:] = data
    header = header_of(data, offset, size, rank=rank, step=step, origin=origin)
    await store.seal(rank, index, replace(header, job=store.job, run=store.run or RunId(""), state=SlotState.WRITING))
