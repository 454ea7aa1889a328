"""A node's hold for an export ends when its generation, its release or a final step says so, also while it begins."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.protocol.agent_messages import HoldSnapshot, ReadSnapshot, SnapshotHeld
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotState
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.rounds import NONE
from worker.core.slots import Content
from worker.member.held_snapshots import HeldSnapshots
from worker.member.kept_contents import KeptContents
from worker.shards.owned_shard import OwnedShard
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.store import Slot, SlotStore

RANK = Rank(0)
PAYLOAD, OFFSET, SIZE = payload_of([("weight", "uint8", (4000,), bytes(range(250)) * 16)])


@dataclass
class Shard:
    """The part of `OwnedShard` that a hold uses."""

    store: SlotStore
    exported: Step = NONE

    def slot(self, step: Step) -> Slot | None:
        return self.store.sealed(RANK, Content(Generation(1), step))


class SlowStore(SlotStore):
    """A store whose digests wait until the test sets `go`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, memory_bytes=2**20)
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def digests(self, slot: Slot) -> ChunkDigests | None:
        self.has_begun.set()
        await self.go.wait()
        return await super().digests(slot)


class Node:
    """A node that holds the sealed step 7 of one rank."""

    def __init__(self, root: Path) -> None:
        self.store = SlowStore(root)
        self.store.open_run(JOB, RUN)
        self.shard = Shard(self.store)
        plan = rank_plan()
        self.contents = KeptContents(plan, plan.nodes[0])
        self.contents.committed = Step(7)
        self.granted: list[object] = []
        self.changes = 0
        self.held = HeldSnapshots(
            cast("dict[Rank, OwnedShard]", {RANK: self.shard}),
            self.store,
            self.contents,
            grant_if_due=self.granted.append,
            on_change=self.note,
        )

    def note(self) -> None:
        self.changes += 1

    async def seal(self, step: int = 7) -> None:
        header = replace(header_of(PAYLOAD, OFFSET, SIZE, step=step, origin=1), state=SlotState.WRITING)
        index = await self.store.grant(
            RANK,
            Content(Generation(1), Step(step)),
            keep=(),
            capacity_bytes=len(PAYLOAD),
            layout_hash=bytes(16),
            slot_count=2,
        )
        assert index is not None
        with self.store.shards[RANK][index].file.payload(0, len(PAYLOAD)) as payload:
            payload[:] = PAYLOAD
        await self.store.seal(RANK, index, header)

    @property
    def pins(self) -> int:
        return sum(slot.pins for slots in self.store.shards.values() for slot in slots)

    async def hold(self, hold_id: str = "a", step: int = -1, **more: Any) -> SnapshotHeld:
        return await self.held.hold(
            HoldSnapshot(run=RUN, generation=Generation(1), request_id="r", hold_id=hold_id, step=Step(step), **more)
        )

    def hear_final(self, final: int) -> None:
        self.held.hear(
            Announcement(
                generation=Generation(1),
                term=1,
                sequence=1,
                committed=Step(7),
                proposed=Step(final),
                persist_step=Step(final),
            )
        )


@pytest.fixture
async def node(tmp_path: Path) -> Any:
    made = Node(tmp_path)
    await made.seal()
    yield made
    made.held.close()
    made.store.close()


async def begun(node: Node) -> asyncio.Task[SnapshotHeld]:
    """Begin a hold that waits for the digests of its slot."""
    task = asyncio.create_task(node.hold())
    await node.store.has_begun.wait()
    assert node.pins == 1
    return task


async def test_the_coordinator_receives_the_step_of_a_hold(node: Node) -> None:
    node.store.go.set()
    assert (await node.hold()).step == 7
    assert (node.shard.exported, node.pins, node.changes) == (7, 1, 1)
    node.held.release("a")
    assert (node.shard.exported, node.pins, node.changes) == (NONE, 0, 2)
    assert node.granted == [node.shard]


@pytest.mark.parametrize(
    ("end", "refusal"),
    [
        (lambda node: node.held.close(), "the generation has ended on this node"),
        (lambda node: node.held.release("a"), "the hold has ended"),
        (lambda node: node.hear_final(9), "the job stops, and its final step 9 needs the memory"),
    ],
    ids=["generation", "release", "final step"],
)
async def test_a_hold_that_ends_while_it_begins_pins_nothing(node: Node, end: Any, refusal: str) -> None:
    task = await begun(node)
    end(node)
    node.store.go.set()
    assert (await task).refusal == refusal
    assert (node.shard.exported, node.pins) == (NONE, 0)
    assert node.granted == ([] if "generation" in refusal else [node.shard])


async def test_a_cancelled_request_pins_nothing(node: Node) -> None:
    task = await begun(node)
    task.cancel()
    await asyncio.wait([task])
    assert node.pins == 0


async def test_another_export_may_begin_after_a_release(node: Node) -> None:
    node.store.go.set()
    node.held.release("a")
    assert (await node.hold("a")).refusal == "the hold has ended"
    assert (await node.hold("b")).step == 7


async def test_a_hold_gives_its_slots_to_the_final_step(node: Node) -> None:
    node.store.go.set()
    await node.hold()
    node.hear_final(9)
    assert (node.shard.exported, node.pins) == (NONE, 0)
    read = ReadSnapshot(run=RUN, generation=Generation(1), request_id="r", hold_id="a", rank=RANK, begin=0, end=5)
    assert (await node.held.read(read)).refusal == "the snapshot is no longer held"
