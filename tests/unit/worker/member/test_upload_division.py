"""The ranks agree on which rank uploads each equal tensor. A rank without an agreement uploads all of its tensors."""

from __future__ import annotations

import asyncio

import pytest

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.peer_messages import OfferTensors, Open, ShardSealed, TensorsDivided
from everstep.protocol.slot import DIGEST_BYTES
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import RUN
from worker.core.upload_division import MAX_OFFERED, Item
from worker.errors import PeerLost
from worker.member.upload_division import KEPT_STEPS, UploadDivision

PLAN = rank_plan(addresses=("127.0.0.1", "127.0.0.2"))
STEP = Step(7)
ITEMS = (Item(b"f" * DIGEST_BYTES, 5, is_frozen=True), *(Item(bytes([n]) * DIGEST_BYTES, 3 << 20) for n in range(4)))


class Line:
    """One end of a connection between two nodes. Each message arrives at the other end at once."""

    def __init__(self, peer: NodeId) -> None:
        self.peer = peer
        self.opened = Open(
            run=RUN, generation=Generation(1), kind="division", node_id=peer, owner_rank=Rank(-1), nonce=b""
        )
        self.addresses: tuple[tuple[str, int], ...] = ()
        self.other: Line = self
        self.arrived = asyncio.Queue[Message | None]()

    @classmethod
    def pair(cls, first: NodeId, second: NodeId) -> tuple[Line, Line]:
        """Return the ends at `first` and at `second`."""
        one, other = cls(second), cls(first)
        one.other, other.other = other, one
        return one, other

    async def send(self, *messages: Message) -> None:
        for message in messages:
            self.other.arrived.put_nowait(message)

    async def receive(self) -> Message:
        message = await self.arrived.get()
        if message is None:
            raise PeerLost("closed")
        return message

    def close(self) -> None:
        self.other.arrived.put_nowait(None)


class Pair:
    """Two nodes with one rank each. The first node runs the coordinator."""

    def __init__(self, *, is_in_haste: bool = False) -> None:
        """With `is_in_haste`, the coordinator does not wait for the other rank's list of tensors."""
        self.nodes = [node.node_id for node in PLAN.nodes]
        assert PLAN.coordinator == self.nodes[0]
        self.serving: list[asyncio.Task[None]] = []
        self.divisions = [
            UploadDivision(
                PLAN, self.nodes[0], self.dial, pause=lambda seconds: asyncio.sleep(0.0 if is_in_haste else seconds)
            ),
            UploadDivision(PLAN, self.nodes[1], self.dial),
        ]

    async def dial(self, peer: NodeId) -> Line:
        here, there = Line.pair(self.nodes[1], peer)
        self.serving.append(asyncio.create_task(self.divisions[0].serve(there)))
        return here

    async def close(self) -> None:
        for division in self.divisions:
            await division.close()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)


async def test_both_ranks_receive_parts_of_one_division_however_often_they_ask() -> None:
    pair = Pair()
    first, second = await asyncio.gather(*(pair.divisions[rank].agree(Rank(rank), STEP, ITEMS) for rank in range(2)))
    assert first is not None
    assert second is not None
    assert first.objects == second.objects
    assert (first.writes | second.writes, first.writes & second.writes) == ({0, 1, 2}, frozenset())
    assert await pair.divisions[1].agree(Rank(1), STEP, ITEMS) == second
    await pair.close()


async def test_a_rank_that_comes_too_late_shares_nothing() -> None:
    pair = Pair(is_in_haste=True)
    first = await pair.divisions[0].agree(Rank(0), STEP, ITEMS)
    assert first is not None
    assert first.objects == (0, -1, -1, -1, -1), "a frozen object has a writer, even without other ranks"
    assert await pair.divisions[1].agree(Rank(1), STEP, ITEMS) is None
    assert await pair.divisions[0].agree(Rank(0), STEP, ITEMS[:2]) is None, "another offer than before"
    await pair.close()


async def test_a_rank_that_offers_nothing_delays_no_other_rank() -> None:
    pair = Pair()
    assert await pair.divisions[1].agree(Rank(1), STEP, ()) is None
    first = await pair.divisions[0].agree(Rank(0), STEP, ITEMS)
    assert first is not None
    assert first.objects == (0, -1, -1, -1, -1)
    await pair.close()


async def test_a_rank_whose_coordinator_is_lost_uploads_all_tensors() -> None:
    async def dial(_: NodeId) -> Line:
        raise PeerLost("no answer")

    assert await UploadDivision(PLAN, PLAN.nodes[1].node_id, dial).agree(Rank(1), STEP, ITEMS) is None


@pytest.mark.parametrize(
    "answer",
    [
        TensorsDivided(objects=(0, 1)),
        TensorsDivided(objects=(-1, 1, 1, 1, 1)),
        ShardSealed(transfer=1, digest=b""),
        None,
    ],
    ids=["short", "frozen object without writer", "other message", "closed"],
)
async def test_a_wrong_answer_counts_as_none(answer: Message | None) -> None:
    here, _there = Line.pair(PLAN.nodes[1].node_id, PLAN.coordinator)

    async def dial(_: NodeId) -> Line:
        return here

    here.arrived.put_nowait(answer)
    assert await UploadDivision(PLAN, PLAN.nodes[1].node_id, dial).agree(Rank(1), STEP, ITEMS) is None


def offer(**changes: object) -> OfferTensors:
    fields = {"owner_rank": 1, "step": 7, "digests": (b"x" * DIGEST_BYTES,), "sizes": (1,), "frozen_count": 0}
    return OfferTensors(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        offer(owner_rank=0),
        offer(sizes=()),
        offer(sizes=(0,)),
        offer(sizes=(2**63,)),
        offer(frozen_count=2),
        offer(frozen_count=-1),
        offer(digests=(b"x" * DIGEST_BYTES,) * (2 * MAX_OFFERED + 1), sizes=(1,) * (2 * MAX_OFFERED + 1)),
        ShardSealed(transfer=1, digest=b""),
    ],
    ids=["rank", "no size", "zero", "huge", "frozen", "negative", "too many", "other message"],
)
async def test_an_offer_that_is_not_valid_is_refused(message: Message) -> None:
    pair = Pair()
    session = Line(pair.nodes[1])
    session.arrived.put_nowait(message)
    with pytest.raises(MalformedMessage):
        await pair.divisions[0].serve(session)
    await pair.close()


async def test_the_coordinator_keeps_the_newest_steps_only() -> None:
    pair = Pair()
    for step in range(1, KEPT_STEPS + 3):
        parts = await asyncio.gather(*(pair.divisions[rank].agree(Rank(rank), Step(step), ITEMS) for rank in range(2)))
        assert None not in parts
    assert await pair.divisions[1].agree(Rank(1), Step(1), ITEMS) is None
    await pair.close()


async def test_a_division_that_fails_holds_no_upload_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("worker.member.upload_division.divide", fail)
    problems: asyncio.Queue[object] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.put_nowait(context.get("exception")))
    pair = Pair(is_in_haste=True)
    async with asyncio.timeout(30.0):
        assert await pair.divisions[0].agree(Rank(0), STEP, ITEMS) is None
        assert isinstance(await problems.get(), RuntimeError)
    await pair.close()
