"""The `SnapshotDesk` sends each request for a snapshot to one agent, and accepts an answer only from this agent."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.loop.snapshot_desk import MAX_READS, NoAnswer, Request, SnapshotDesk
from everstep.protocol.agent_messages import HoldSnapshot, ReadSnapshot, ReleaseSnapshot, SnapshotBytes, SnapshotHeld
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step

NODE, OTHER = NodeId("i-0"), NodeId("i-1")
RUN = RunId("ab" * 16)


class Agents:
    """Fake agents of a server. They record the messages that they receive."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Request]] = []
        self.is_connected = True
        self.desk = SnapshotDesk(self.send)

    def send(self, node_id: NodeId, request: Request) -> bool:
        self.sent.append((node_id, request))
        return self.is_connected


def reading(request_id: str) -> ReadSnapshot:
    return ReadSnapshot(
        run=RUN, generation=Generation(1), request_id=request_id, hold_id="h", rank=Rank(0), begin=0, end=5
    )


async def test_only_the_agent_that_was_asked_may_answer() -> None:
    agents = Agents()
    asked = asyncio.create_task(agents.desk.read(NODE, reading("a")))
    await asyncio.sleep(0)
    assert agents.sent == [(NODE, reading("a"))]
    agents.desk.answered(OTHER, SnapshotBytes(request_id="a", data=b"wrong"))
    agents.desk.answered(NODE, SnapshotBytes(request_id="b", data=b"wrong"))
    agents.desk.answered(NODE, SnapshotBytes(request_id="a", data=b"right"))
    agents.desk.answered(NODE, SnapshotBytes(request_id="a", data=b"twice"))
    assert (await asked).data == b"right"
    agents.desk.answered(NODE, SnapshotBytes(request_id="a", data=b"late"))


async def test_copies_of_a_request_wait_for_the_one_that_runs() -> None:
    desk, go, count = Agents().desk, asyncio.Event(), 0

    async def begin() -> int:
        nonlocal count
        count += 1
        await go.wait()
        return count

    first, second = (asyncio.create_task(desk.once("a", begin)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    go.set()
    assert await second == 1, "the client that left does not end the hold of its own repeated request"
    assert await desk.once("a", begin) == 2


async def test_an_answer_of_another_kind_is_no_answer() -> None:
    agents = Agents()
    wanted = HoldSnapshot(run=RUN, generation=Generation(1), request_id="a", hold_id="h", step=Step(-1))
    held, read = (
        asyncio.create_task(agents.desk.hold(NODE, wanted)),
        asyncio.create_task(agents.desk.read(NODE, reading("b"))),
    )
    await asyncio.sleep(0)
    agents.desk.answered(NODE, SnapshotBytes(request_id="a"))
    agents.desk.answered(NODE, SnapshotHeld(request_id="b"))
    for asked in (held, read):
        with pytest.raises(NoAnswer, match="sent an answer of the wrong type"):
            await asked


async def test_an_agent_that_is_not_connected_does_not_answer() -> None:
    agents = Agents()
    agents.is_connected = False
    with pytest.raises(NoAnswer, match="i-0 is not connected"):
        await agents.desk.read(NODE, reading("a"))
    agents.desk.release(NODE, ReleaseSnapshot(run=RUN, generation=Generation(1), hold_id="h"))


async def test_reads_that_occupy_memory_wait_for_each_other() -> None:
    agents = Agents()
    asked = [asyncio.create_task(agents.desk.read(NODE, reading(str(number)))) for number in range(MAX_READS + 1)]
    await asyncio.sleep(0)
    assert len(agents.sent) == MAX_READS
    agents.desk.answered(NODE, SnapshotBytes(request_id="0"))
    await asked[0]
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(agents.sent) == MAX_READS + 1
    for number in range(1, MAX_READS + 1):
        agents.desk.answered(NODE, SnapshotBytes(request_id=str(number)))
    await asyncio.gather(*asked)
