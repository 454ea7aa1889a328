"""A job loses a node during the upload of a checkpoint, and S3 fails while the manifest is written.

Each shard has one copy in memory, so a job that has lost a node can resume only from S3. Step 3 is a complete
checkpoint, and the failure occurs during the upload of step 5. `test_upload_states` kills each process in each state of
an upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from control_plane.cloud.errors import CloudUnavailable, ObjectChanged
from control_plane.core.states import JobState
from control_plane.db import checkpoints
from control_plane.loop import records
from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Rank, Step
from everstep.protocol.plan import ObjectReference
from tests.sim.world import World

NODES = 4


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, nodes=NODES, spares=0, max_size=NODES)
    yield made
    made.close()


async def before_the_upload(world: World) -> None:
    world.submit(copies=1, nodes=NODES)
    await world.running()
    await world.train(3)
    await world.upload(3)
    await world.train(3)


def complete(world: World) -> list[int]:
    return [record.step for record in world.checkpoints() if record.state == checkpoints.COMPLETE]


async def restored_after_the_loss_of(world: World, place: int) -> int:
    world.terminate(world.team()[place])
    await world.until(lambda: world.job().generation == 2)
    return world.plan().base_step


@pytest.mark.parametrize("lost", [0, NODES - 1], ids=["uploaded first", "uploads last"])
@pytest.mark.parametrize("uploaded", range(NODES + 1))
async def test_a_node_lost_after_so_many_shards(world: World, uploaded: int, lost: int) -> None:
    await before_the_upload(world)
    await world.upload(5, nodes=uploaded)
    expected = 5 if uploaded == NODES else 3
    assert complete(world)[0] == expected
    assert await restored_after_the_loss_of(world, lost) == expected
    sources = {source.kind for rank in world.plan().ranks for source in rank.sources}
    assert "s3" in sources


async def test_a_node_lost_while_the_manifest_cannot_be_put(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await before_the_upload(world)

    def down(at: ObjectReference, body: bytes) -> None:
        raise CloudUnavailable("no answer")

    monkeypatch.setattr(world.objects, "put_if_unchanged", down)
    await world.upload(5)
    assert complete(world) == [3]
    assert await restored_after_the_loss_of(world, 0) == 3


async def test_a_manifest_that_was_put_and_not_recorded_is_put_again_with_the_same_content(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await before_the_upload(world)
    put, bodies, is_cut = world.objects.put_if_unchanged, [], True

    def put_without_answer(at: ObjectReference, body: bytes) -> object:
        bodies.append(body)
        if not is_cut:
            return put(at, body)
        with suppress(ObjectChanged):
            put(at, body)
        raise CloudUnavailable("the answer was lost")

    monkeypatch.setattr(world.objects, "put_if_unchanged", put_without_answer)
    await world.upload(5)
    assert complete(world) == [3], "what is not recorded is no checkpoint"
    is_cut = False
    world.start_server()
    await world.until(lambda: complete(world) == [5, 3])
    assert len(bodies) > 1
    assert len({*bodies}) == 1
    assert await restored_after_the_loss_of(world, 0) == 5


async def test_a_lost_node_ends_the_upload_that_users_see(world: World) -> None:
    await before_the_upload(world)
    for rank, agent in enumerate(world.team()):
        agent.running_uploads = (
            RunningUpload(rank=Rank(rank), step=Step(5), object_name="", stored_bytes=1, object_bytes=100),
        )
    await world.until(lambda: records.job_record(world.job()).uploading is not None)
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().state == JobState.PREPARING)
    assert records.job_record(world.job()).uploading is None
