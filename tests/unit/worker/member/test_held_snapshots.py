"""A node holds a snapshot for an export until a release, a final step or the end of the generation ends the hold.

Each of these events also ends a hold that has just begun.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from everstep.protocol.agent_messages import ANOTHER_EXPORT, HoldSnapshot, ReadSnapshot, SnapshotHeld
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotState
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.rounds import NONE
from worker.core.slots import Content
from worker.member.held_snapshots import HeldSnapshots
from worker.member.retained_steps import RetainedSteps
from worker.shards.owned_shard import OwnedShard
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.held_files import HeldFiles
from worker.shm.store import Slot, SlotStore

NOTICE = "AWS announced the end of a node, and the checkpoint that the job stores before needs the memory"
RANK = Rank(0)
PAYLOAD, OFFSET, SIZE = payload_of([("weight", "uint8", (4000,), bytes(range(250)) * 16)])


@dataclass
class Shard:
    """Implements the part of `OwnedShard` that a hold uses."""

    store: SlotStore
    exported: Step = NONE

    def slot(self, step: Step) -> Slot | None:
        return self.store.sealed(RANK, Content(Generation(1), step))


class SlowStore(SlotStore):
    """A store whose digests wait until the test sets `go`."""

    def __init__(self) -> None:
        super().__init__(HeldFiles(), memory_bytes=2**20)
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def digests(self, slot: Slot) -> ChunkDigests | None:
        self.has_begun.set()
        await self.go.wait()
        return await super().digests(slot)


class Node:
    """A node that holds the sealed step 7 of one rank."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.store.open_run(JOB, RUN)
        self.shard = Shard(self.store)
        plan = rank_plan()
        self.contents = RetainedSteps(plan, plan.nodes[0])
        self.contents.committed = Step(7)
        self.granted: list[object] = []
        self.changes = 0
        self.has_changed = asyncio.Event()
        self.held = HeldSnapshots(
            cast("dict[Rank, OwnedShard]", {RANK: self.shard}),
            self.store,
            self.contents,
            grant_if_due=self.granted.append,
            on_change=self.note,
        )

    def note(self) -> None:
        self.changes += 1
        self.has_changed.set()

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
        self.apply_announcement(committed=Step(final - 1), proposed=Step(final), persist_step=Step(final))

    def hear_notice(self) -> None:
        self.apply_announcement(committed=Step(7), proposed=NONE, ends_exports=True)

    def apply_announcement(self, **named: Any) -> None:
        self.held.apply_announcement(Announcement(generation=Generation(1), term=1, sequence=1, **named))


@pytest.fixture
async def node() -> Any:
    made = Node()
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
        (lambda node: node.held.release("a"), "the export has ended"),
        (lambda node: node.hear_final(9), "the job stops, and its final step 9 needs the memory"),
        (lambda node: node.hear_notice(), NOTICE),
    ],
    ids=["generation", "release", "final step", "notice"],
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
    assert (await node.hold("a")).refusal == "the export has ended"
    assert (await node.hold("b")).step == 7


async def test_a_repeated_request_returns_the_same_hold(node: Node) -> None:
    """A repeated request returns the same hold, although the job has committed another step since the first request.

    A client repeats its request if the answer is lost.
    """
    node.store.go.set()
    first = await node.hold("a")
    await node.seal(8)
    node.contents.committed = Step(8)
    assert await node.hold("a") == first
    assert (node.shard.exported, node.pins, node.changes) == (7, 1, 1)


async def test_two_copies_of_a_request_at_the_same_time_begin_one_hold(node: Node) -> None:
    copies = [asyncio.create_task(node.hold("a")) for _ in range(2)]
    await node.store.has_begun.wait()
    node.store.go.set()
    first, second = await asyncio.gather(*copies)
    assert first == second
    assert (first.step, node.pins, node.changes) == (7, 1, 1)


@pytest.mark.parametrize("is_renewal", [False, True])
async def test_a_late_copy_of_a_request_begins_no_hold_again(node: Node, is_renewal: bool) -> None:
    node.store.go.set()
    await node.hold("a")
    node.held.release("a")
    assert (await node.hold("a", is_renewal=is_renewal)).refusal == "the export has ended"
    assert (node.shard.exported, node.pins) == (NONE, 0)


async def test_a_hold_of_a_silent_client_ends(node: Node) -> None:
    node.store.go.set()
    node.held.hold_seconds = 0.0
    await node.hold("a")
    node.has_changed.clear()
    await node.has_changed.wait()
    assert node.pins == 0
    node.held.hold_seconds = 60.0
    assert (await node.hold("a")).refusal == "the export sent no request for 0 s"
    assert (await node.hold("b")).step == 7


async def test_another_export_waits_for_the_first_one(node: Node) -> None:
    node.store.go.set()
    await node.hold("a")
    assert (await node.hold("b")).refusal == ANOTHER_EXPORT
    assert node.pins == 1


async def test_a_checkpoint_before_the_end_of_a_node_takes_the_slots_of_a_hold(node: Node) -> None:
    node.store.go.set()
    await node.hold()
    node.hear_notice()
    assert (node.shard.exported, node.pins, node.granted) == (NONE, 0, [node.shard])
    read = ReadSnapshot(run=RUN, generation=Generation(1), request_id="r", hold_id="a", rank=RANK, begin=0, end=5)
    assert (await node.held.read(read)).refusal == NOTICE
    assert (await node.hold("b")).refusal == NOTICE, "until the checkpoint has its slot"


async def test_a_hold_gives_its_slots_to_the_final_step(node: Node) -> None:
    node.store.go.set()
    await node.hold()
    node.hear_final(8)
    assert node.pins == 1, "step 7 is committed, so its slot is of no use for step 8"
    node.hear_final(9)
    assert (node.shard.exported, node.pins) == (NONE, 0)
    read = ReadSnapshot(run=RUN, generation=Generation(1), request_id="r", hold_id="a", rank=RANK, begin=0, end=5)
    assert (await node.held.read(read)).refusal == "the job stops, and its final step 9 needs the memory"
