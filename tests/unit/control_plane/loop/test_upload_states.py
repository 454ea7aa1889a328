"""Processes are killed in every state of an upload, and the job restores the newest complete checkpoint.

    proposed ─▶ assigned ─▶ tensors of all ranks ─▶ parts by owner and holder ─▶ object completed ─▶ reported
             ─▶ manifest put ─▶ recorded ─▶ older checkpoint: manifest deleted ─▶ objects deleted ─▶ recorded

Each test kills some processes in one state of the upload of step 5, or the S3 server. The checkpoint of step 3 is
already complete. With two uploads in flight, step 6 is uploaded at the same time. Afterwards, the living processes
continue, and the S3 server starts again. Then all nodes are lost, so that the job can only restore from S3.

The uploads, the manifests, the deletions, the verification and the restore run the product's code with an S3 in memory
(`uploading`).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from control_plane.core.orphans import KEPT_SECONDS
from control_plane.core.states import JobState
from control_plane.db import checkpoints
from control_plane.loop.checkpoint_keeper import CheckpointKeeper
from control_plane.loop.orphan_keeper import OrphanKeeper
from control_plane.loop.verifier import Verifier
from everstep.protocol.ids import NodeId, Rank
from tests.fakes.s3_client import Request
from tests.sim.world import World
from tests.unit.control_plane.loop.uploading import CONTROL_PLANE, NODES, Cluster, Killed

FIRST, SECOND, THIRD = 3, 5, 6


@pytest.fixture(autouse=True)
async def in_turn() -> AsyncIterator[None]:
    """Run executor calls in threads, because uploads wait in threads for messages of the event loop."""
    with ThreadPoolExecutor() as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        yield


@dataclass(frozen=True)
class Roles:
    """The nodes that take part in the upload of one shard."""

    owner: NodeId
    helper: NodeId
    """The holder of the shard's replica, which sends some parts."""
    coordinator: NodeId
    rank: Rank

    @classmethod
    def of(cls, cluster: Cluster) -> Roles:
        """Return the roles for a rank whose owner and helper are not the coordinator."""
        plan = cluster.world.plan()
        rank = next(each for each in plan.ranks if plan.coordinator not in each.copy_nodes)
        owner, helper = rank.copy_nodes
        return cls(owner, helper, plan.coordinator, rank.rank)


Fits = Callable[[Request, bool, Roles], bool]
"""Returns True for the request at which a state of an upload begins.

The arguments are the request, whether S3 has executed it, and the roles.
"""


def own(operation: str, is_done: bool, part: int | None = None) -> Fits:
    """Return the condition for a state that begins with a request of the owner."""

    def fits(request: Request, is_after: bool, roles: Roles) -> bool:
        is_ours = f"step={SECOND}/" in request.key and request.key.endswith(f"/rank={roles.rank}.safetensors")
        return (
            (request.operation, is_after) == (operation, is_done)
            and is_ours
            and request.client == roles.owner
            and part in (None, request.part)
        )

    return fits


def helped(is_done: bool) -> Fits:
    """Return the condition for a state that begins when the helper uploads a part."""

    def fits(request: Request, is_after: bool, roles: Roles) -> bool:
        return (request.client, request.operation, is_after) == (roles.helper, "upload_part", is_done) and (
            request.key.endswith(f"/rank={roles.rank}.safetensors")
        )

    return fits


def shared(is_done: bool) -> Fits:
    """Return the condition for a state that begins with the upload of a shared tensor."""

    def fits(request: Request, is_after: bool, roles: Roles) -> bool:
        operation = "complete_multipart_upload" if is_done else "upload_part"
        is_ours = f"step={SECOND}/replicated/" in request.key and request.client == roles.owner
        return (request.operation, is_after) == (operation, is_done) and is_ours

    return fits


def of_control_plane(operation: str, key: str, is_done: bool) -> Fits:
    """Return the condition for a state that begins with the control plane's request."""

    def fits(request: Request, is_after: bool, _: Roles) -> bool:
        found = request.client, request.operation, is_after
        return found == (CONTROL_PLANE, operation, is_done) and re.search(key, request.key) is not None

    return fits


PROPOSED, REPORTED = "proposed", "reported by the owner"
"""States that begin with no request to S3."""
STATES: dict[str, Fits | None] = {
    PROPOSED: None,
    "assigned": lambda request, is_after, roles: request.client == roles.owner and not is_after,
    "shared tensor sent in part": shared(False),
    "shared tensor stored": shared(True),
    "multipart upload created": own("create_multipart_upload", True),
    "first part sent": own("upload_part", True, part=1),
    "helper sends a part": helped(False),
    "helper has sent a part": helped(True),
    "all parts sent": own("complete_multipart_upload", False),
    "completed, not reported": own("complete_multipart_upload", True),
    REPORTED: None,
    "manifest about to be put": of_control_plane("put_object", f"step={SECOND}/manifest", False),
    "manifest put, not recorded": of_control_plane("put_object", f"step={SECOND}/manifest", True),
    "older manifest about to be deleted": of_control_plane("delete_objects", f"step={FIRST}/manifest", False),
    "older manifest deleted": of_control_plane("delete_objects", f"step={FIRST}/manifest", True),
    "older objects deleted, not recorded": of_control_plane("delete_objects", f"step={FIRST}/(?!manifest)", True),
}
S3_SERVER = "S3 server"
AGENTS: dict[str, Callable[[Roles, Cluster], list[NodeId]]] = {
    "owner": lambda roles, _: [roles.owner],
    "helper": lambda roles, _: [roles.helper],
    "coordinator": lambda roles, _: [roles.coordinator],
    "control plane": lambda _, __: [],
    "all agents": lambda _, cluster: list(cluster.nodes),
    "everything": lambda _, cluster: list(cluster.nodes),
    S3_SERVER: lambda _, __: [],
}
COMPLETES_LATER = {"control plane"}
"""If these processes are killed in any state, the upload of step 5 still completes. The job then restores step 5."""


def expected_step(state: str, dead: str) -> int:
    """Return the step that the job must restore if `dead` is killed in this state."""
    names = list(STATES)
    if dead in COMPLETES_LATER or names.index(state) > names.index("manifest put, not recorded"):
        return SECOND
    if dead == S3_SERVER:
        # Agents stop after several failed attempts. The control plane retries as long as agents report the shards.
        return FIRST if names.index(state) < names.index(REPORTED) else SECOND
    if state.startswith("manifest"):
        # A new control plane writes the manifest again, but only if agents still report the shards.
        return FIRST if dead == "everything" else SECOND
    if state == REPORTED and dead == "owner":
        return SECOND  # The owner reported its shard before it was killed.
    return FIRST


class Killing:
    """Kills processes at the first request that begins a state.

    The helper sends no part before the owner has sent one. A fast helper could otherwise send all parts of the shard.
    With two uploads in flight, the owner sends no part of step 5 before its upload of step 6 has begun.
    """

    def __init__(self, cluster: Cluster, roles: Roles, state: str, dead: str, in_flight: int) -> None:
        self.are_together = in_flight == 1
        """True if the owner began the upload of step 6 before its upload of step 5 could end.

        Always True if only one step is uploaded at a time.
        """
        self.count = 0
        """Number of times that processes were killed."""
        self._lock = threading.Lock()
        self._is_due = True
        self._helper_may_send = threading.Event()
        self._owner_may_send = threading.Event()
        if in_flight == 1:
            self._owner_may_send.set()
        self._with_s3 = dead == S3_SERVER
        self.with_control_plane = dead in ("control plane", "everything")
        self._cluster = cluster
        self._roles = roles
        self._fits = STATES[state]
        self._nodes = AGENTS[dead](roles, cluster)
        self._loop = asyncio.get_running_loop()
        cluster.s3.on_request = self._on_request

    def kill(self) -> None:
        self.count += 1
        self._helper_may_send.set()
        self._owner_may_send.set()
        self._cluster.kill(self._nodes)
        self._cluster.s3.is_down = self._with_s3
        if self.with_control_plane:
            self._cluster.s3.dead[CONTROL_PLANE] = Killed()

    def _on_request(self, request: Request, is_after: bool) -> None:
        if request.client == self._roles.owner and f"step={THIRD}/" in request.key:
            self.are_together |= not self._owner_may_send.is_set()
            self._owner_may_send.set()
        if own("upload_part", False)(request, is_after, self._roles):
            self._owner_may_send.wait()
        if own("upload_part", True)(request, is_after, self._roles):
            self._helper_may_send.set()
        if helped(False)(request, is_after, self._roles):
            self._helper_may_send.wait()
        with self._lock:  # several threads send requests at the same time
            if not self._is_due or self._fits is None or not self._fits(request, is_after, self._roles):
                return
            self._is_due = False

        async def kill() -> None:
            self.kill()

        asyncio.run_coroutine_threadsafe(kill(), self._loop).result()


@asynccontextmanager
async def surviving(cluster: Cluster) -> AsyncIterator[None]:
    """Start the control plane and the S3 server again after the block if they were killed in the block."""
    with suppress(Killed):
        yield
    cluster.s3.is_down = False
    if CONTROL_PLANE in cluster.s3.dead:
        cluster.start_server()


def keep(world: World) -> None:
    """Run the loops that verify and delete checkpoints, until neither has work left."""
    for _ in range(2):
        CheckpointKeeper(world.database, world.objects, lambda: world.now).delete_due()
        Verifier(world.database, world.objects, lambda: world.now).verify_next()
    CheckpointKeeper(world.database, world.objects, lambda: world.now).delete_due()


def manifests(cluster: Cluster) -> dict[int, str]:
    """Return the key of each manifest in S3, by step."""
    found = {key: re.search(r"/step=(\d+)/manifest\.json$", key) for key in cluster.s3.objects}
    return {int(match[1]): key for key, match in found.items() if match}


def recorded(world: World) -> dict[int, set[str]]:
    """Return the keys of all objects of each complete checkpoint that the control plane has recorded, by step."""
    found = {}
    for record in world.checkpoints():
        manifest = record.contents()
        if record.state == checkpoints.COMPLETE and manifest is not None:
            shared = (each.key for each in (*manifest.frozen, *manifest.replicated))
            found[record.step] = {record.manifest_key, *(shard.key for shard in manifest.shards), *shared}
    return found


async def store_the_first(cluster: Cluster, in_flight: int) -> None:
    """Run a job that uploads up to `in_flight` steps at a time, and complete the checkpoint of step 3."""
    world = cluster.world
    several = {"checkpoint_max_uploads": in_flight, "third_slot": True} if in_flight > 1 else {}
    world.submit(copies=2, nodes=NODES, checkpoint_max_count=1, checkpoint_trash_hours=0, **several)
    await world.running()
    await cluster.open()
    await world.train(FIRST)
    await cluster.upload(FIRST)
    cluster.report()
    await world.until(lambda: list(recorded(world)) == [FIRST])
    await world.train(THIRD - FIRST + 1)


async def lose_all_nodes(cluster: Cluster) -> None:
    """Terminate all instances, and wait until the job runs again on new ones."""
    world, before = cluster.world, cluster.world.job().generation
    for agent in list(world.agents.values()):
        world.terminate(agent)
    await world.until(lambda: world.job().generation > before and world.job().state == JobState.RUNNING)


@pytest.mark.long(keep=8)
@pytest.mark.parametrize("dead", AGENTS)
@pytest.mark.parametrize("state", STATES)
async def test_the_newest_complete_checkpoint_is_restored(tmp_path: Path, state: str, dead: str) -> None:
    await kill_and_restore(tmp_path, state, dead, (SECOND,))


@pytest.mark.long(keep=4)
@pytest.mark.parametrize("dead", AGENTS)
@pytest.mark.parametrize("state", STATES)
async def test_the_newest_complete_checkpoint_is_restored_with_two_uploads_in_flight(
    tmp_path: Path, state: str, dead: str
) -> None:
    await kill_and_restore(tmp_path, state, dead, (SECOND, THIRD))


async def kill_and_restore(tmp_path: Path, state: str, dead: str, steps: tuple[int, ...]) -> None:
    """Upload steps at the same time, kill processes in a state of the first upload, and restore the job from S3."""
    world = World(tmp_path, nodes=NODES, spares=0, max_size=NODES, boot_seconds=0.5)
    cluster = Cluster(world, tmp_path)
    try:
        await store_the_first(cluster, len(steps))
        roles = Roles.of(cluster)
        killing = Killing(cluster, roles, state, dead, len(steps))
        async with surviving(cluster):
            if state == PROPOSED:
                killing.kill()
            await cluster.upload(*steps)
        if state == REPORTED:
            cluster.report(roles.owner)
            await world.tick()
            async with surviving(cluster):
                killing.kill()
        for work in (lambda: None, lambda: keep(world)):
            async with surviving(cluster):
                cluster.report()
                for _ in range(3):
                    await world.tick()
                await asyncio.to_thread(work)
        keep(world)
        assert killing.count == 1
        is_later = list(STATES).index(state) > list(STATES).index("multipart upload created")
        assert killing.are_together or not is_later, "both uploads were in flight"
        await lose_all_nodes(cluster)
        restored, expected = world.plan().base_step, expected_step(state, dead)
        assert restored == max(recorded(world))
        if len(steps) == 1:
            assert restored == expected
        else:  # The processes die in a state of the upload of step 5, and in any state of the other upload.
            assert restored >= (THIRD if dead in COMPLETES_LATER else expected)
        assert await cluster.restored() == {world.plan().base_step}
        assert world.plan().base_step in recorded(world)
        await cluster.open()
        assert not cluster.s3.uploads
        world.now += timedelta(seconds=3 * KEPT_SECONDS)
        OrphanKeeper(world.database, world.objects, lambda: world.now).delete_due()
        keep(world)
        left = {key for key in cluster.s3.objects if "/checkpoints/" in key and "/issued=" not in key}
        known = set().union(*recorded(world).values())
        # A folder with a manifest that the database lacks is never deleted: a restored database may lack it too.
        unknown = tuple(f"{key.rpartition('/')[0]}/" for key in left - known if "manifest" in key.rpartition("/")[2])
        assert {key for key in left if not key.startswith(unknown)} == known
        assert not any(record.is_wrong for record in world.checkpoints())
    finally:
        await cluster.close()
        world.close()
