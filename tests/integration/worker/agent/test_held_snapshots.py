"""A running job's state is exported from the memory of real agents, and opened with the libraries that users have."""

from __future__ import annotations

import asyncio
import io
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from botocore.exceptions import ClientError
from safetensors.torch import load_file

from everstep.checkpoints.dcp_export import export_dcp
from everstep.checkpoints.export import export_safetensors
from everstep.checkpoints.memory import held
from everstep.checkpoints.universal import export_universal
from everstep.protocol.agent_messages import (
    MAX_SNAPSHOT_READ_BYTES,
    HoldSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.parts import parts_of_range
from everstep.protocol.rounds import Announcement
from tests.integration.worker.agent import fleet as agent_fleet
from tests.integration.worker.agent.fleet import RUN, Fleet, Node, until
from tests.unit.everstep.checkpoints import stored

pytestmark = pytest.mark.integration
SIZE = 24_000
"""Elements of the weight. Each of three ranks holds a third of the weight, and of each optimizer state."""


def values(step: int, name: str) -> np.ndarray:
    """Return the elements of a tensor after a step."""
    seed = step * 10 + {"weight": 0, "exp_avg": 1, "exp_avg_sq": 2}[name]
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def payload(rank: int, step: int) -> tuple[bytes, int]:
    """Return the slot payload of a ZeRO rank, which has a part of each tensor, and the offset of its index."""
    begin, end = rank * SIZE // 3, (rank + 1) * SIZE // 3
    names = {
        "model/weight": "weight",
        "optimizer/weight/exp_avg": "exp_avg",
        "optimizer/weight/exp_avg_sq": "exp_avg_sq",
    }
    return stored.payload_of(
        [
            stored.Stored(
                logical, values(step, name)[begin:end], parts_of_range(logical, (100, SIZE // 100), begin, end, 0)
            )
            for logical, name in names.items()
        ]
    )


class MemoryService:
    """The control plane's client, which passes each call to the agents. Its methods block, and run in threads."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.loop = asyncio.get_running_loop()
        self.named = {"run": RUN, "generation": Generation(fleet.generation)}
        self.hold_id = secrets.token_hex(16)
        self.max_read_bytes = 0
        self._turn = threading.Lock()

    def hold_snapshot(self, TrainingJobName: str, SnapshotId: str | None = None) -> dict[str, Any]:
        request = partial(
            HoldSnapshot, **self.named, hold_id=self.hold_id, step=Step(-1), is_renewal=SnapshotId is not None
        )
        answers = [self.ask(node, request) for node in self.fleet.nodes]
        newest = max(answer.step for answer in answers)
        request = partial(HoldSnapshot, **self.named, hold_id=self.hold_id, step=newest)
        answers = [self.ask(node, request) for node in self.fleet.nodes]
        return {
            "TrainingJobName": TrainingJobName,
            "RunId": RUN,
            "SnapshotId": "snapshot",
            "Generation": self.fleet.generation,
            "Step": newest,
            "HoldInSeconds": 120,
            "MaxReadBytes": 10_000,
            "Shards": [
                {
                    "Rank": shard.rank,
                    "OriginGeneration": shard.origin_generation,
                    "ObjectBytes": shard.object_bytes,
                    "PayloadBytes": shard.payload_bytes,
                    "PayloadDigest": shard.payload_digest.hex(),
                    "LayoutHash": shard.layout_hash.hex(),
                }
                for answer in answers
                for shard in answer.shards
            ],
        }

    def read_snapshot(self, TrainingJobName: str, SnapshotId: str, Rank: int, Begin: int, End: int) -> dict[str, Any]:
        self.max_read_bytes = max(self.max_read_bytes, End - Begin)
        request = partial(ReadSnapshot, **self.named, hold_id=self.hold_id, rank=Rank, begin=Begin, end=End)
        return {"Body": io.BytesIO(self.ask(self.fleet.nodes[Rank], request).data)}

    def release_snapshot(self, TrainingJobName: str, SnapshotId: str) -> None:
        message = ReleaseSnapshot(**self.named, hold_id=self.hold_id)
        for node in self.fleet.nodes:
            asyncio.run_coroutine_threadsafe(self.fleet.send(node, message), self.loop).result(30)

    def ask(self, node: Node, request: Callable[..., HoldSnapshot | ReadSnapshot]) -> Any:
        with self._turn:
            answer = asyncio.run_coroutine_threadsafe(asked(self.fleet, node, request), self.loop).result(30)
        if answer.refusal:
            raise ClientError({"Error": {"Code": "ConflictException", "Message": answer.refusal}}, "Hold")
        return answer


async def asked(
    fleet: Fleet, node: Node, request: Callable[..., HoldSnapshot | ReadSnapshot]
) -> SnapshotHeld | SnapshotBytes:
    await fleet.send(node, request(request_id=secrets.token_hex(8)))
    return await fleet.control.answers.get()


@pytest.fixture(autouse=True)
def _payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_fleet, "payload", payload)


def pins(fleet: Fleet) -> int:
    return sum(slot.pins for node in fleet.nodes for slots in node.agent.store.shards.values() for slot in slots)


def export_all(service: MemoryService, folder: Path) -> int:
    with held(service, "job") as checkpoint:
        assert pins(service.fleet) == len(service.fleet.nodes)
        export_safetensors(checkpoint, str(folder / "hf"))
        export_dcp(checkpoint, str(folder / "dcp"))
        export_universal(checkpoint, str(folder / "universal"))
        return int(checkpoint.manifest.step)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_a_running_jobs_memory_opens_in_all_libraries(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.launch()
    await fleet.train(3)
    service = MemoryService(fleet)
    step = await asyncio.to_thread(export_all, service, tmp_path)
    assert step >= 3
    assert service.max_read_bytes <= 10_000
    weight = torch.from_numpy(values(step, "weight")).reshape(100, -1)
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["weight"], weight)
    state = {"model": {"weight": torch.zeros_like(weight)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model"]["weight"], weight)
    (average,) = (tmp_path / "universal").rglob("exp_avg.pt")
    loaded = torch.load(average, weights_only=True)["param"]
    assert torch.equal(loaded.reshape(-1), torch.from_numpy(values(step, "exp_avg")))
    await until("the slots to be free", lambda: pins(fleet) == 0)
    await fleet.train(step + 2)


async def hold(fleet: Fleet, node: int = 0, hold_id: str = "a", step: int = -1, **named: Any) -> SnapshotHeld:
    request = partial(
        HoldSnapshot, run=RUN, generation=Generation(fleet.generation), hold_id=hold_id, step=Step(step), **named
    )
    answer = await asked(fleet, fleet.nodes[node], request)
    assert isinstance(answer, SnapshotHeld)
    return answer


async def read(fleet: Fleet, begin: int, end: int, *, rank: int = 0, hold_id: str = "a") -> SnapshotBytes:
    request = partial(
        ReadSnapshot,
        run=RUN,
        generation=Generation(fleet.generation),
        hold_id=hold_id,
        rank=Rank(rank),
        begin=begin,
        end=end,
    )
    answer = await asked(fleet, fleet.nodes[0], request)
    assert isinstance(answer, SnapshotBytes)
    return answer


async def test_a_held_step_stays_while_training_goes_on(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    answer = await hold(fleet)
    first = (await read(fleet, 0, 5000)).data
    for _ in range(6):
        for rank in fleet.ranks:
            rank.step()
        await asyncio.sleep(0)
    assert (await hold(fleet, is_renewal=True)).step == answer.step
    assert (await read(fleet, 0, 5000)).data == first
    assert pins(fleet) == 1
    await fleet.send(fleet.nodes[0], ReleaseSnapshot(run=RUN, generation=Generation(1), hold_id="other"))
    assert (await hold(fleet, is_renewal=True)).refusal == ""
    await fleet.send(fleet.nodes[0], ReleaseSnapshot(run=RUN, generation=Generation(1), hold_id="a"))
    assert (await read(fleet, 0, 5000)).refusal == "the export has ended"
    await fleet.train(answer.step + 2)


async def test_requests_that_cannot_be_met_are_refused(fleet: Fleet) -> None:
    await fleet.launch()
    assert (await hold(fleet)).refusal == "no step is committed yet"
    await fleet.train(3)
    assert "is not in memory" in (await hold(fleet, step=900)).refusal
    assert (await hold(fleet, is_renewal=True)).refusal == "the snapshot is no longer held"
    size = (await hold(fleet)).shards[0].object_bytes
    assert (await hold(fleet, hold_id="b")).refusal == "another export holds a snapshot"
    for begin, end in ((-1, 5), (5, 5), (0, size + 1), (0, MAX_SNAPSHOT_READ_BYTES + 1)):
        assert "cannot be read in one request" in (await read(fleet, begin, end)).refusal
    assert "is not on this node" in (await read(fleet, 0, 5, rank=1)).refusal
    assert "no longer held" in (await read(fleet, 0, 5, hold_id="b")).refusal
    fleet.generation += 1
    assert "does not run" in (await hold(fleet)).refusal
    fleet.generation -= 1


async def test_a_hold_ends_by_itself(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    member.held.hold_seconds = 0.0
    assert (await hold(fleet)).refusal == ""
    await until("the hold to end", lambda: pins(fleet) == 0)


async def test_the_final_step_takes_the_slots_of_a_hold(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    step = (await hold(fleet)).step
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    committed, final = Step(step + 1), Step(step + 2)
    announcement = Announcement(
        generation=Generation(fleet.generation),
        term=1,
        sequence=1,
        committed=committed,
        proposed=final,
        persist_step=final,
    )
    member.held.apply_announcement(announcement)
    assert pins(fleet) == 0


async def test_a_new_generation_ends_the_hold(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    assert (await hold(fleet)).refusal == ""
    for node in fleet.nodes:
        await node.shim.stop_all()
    await fleet.prepare()
    assert pins(fleet) == 0
