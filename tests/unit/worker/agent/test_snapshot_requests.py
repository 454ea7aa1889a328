"""The agent answers each request of an export once, and processes a limited number of requests at a time."""

from __future__ import annotations

import asyncio
from typing import cast

from everstep.protocol.agent_messages import ReadSnapshot, SnapshotBytes, SnapshotHeld
from everstep.protocol.ids import Generation, Rank, RunId
from worker.agent.snapshot_requests import MAX_REQUESTS, MAX_WAITING, SnapshotRequests
from worker.member.member import Member

RUN = RunId("ab" * 16)


class Held:
    """A fake of a node's held snapshots. Reads wait until the test sets `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running = 0
        self.most = 0

    async def read(self, wanted: ReadSnapshot) -> SnapshotBytes:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.go.wait()
        self.running -= 1
        return SnapshotBytes(request_id=wanted.request_id, data=b"x")


class Node:
    """A fake member that has held snapshots."""

    def __init__(self) -> None:
        self.held = Held()


def read(number: int) -> ReadSnapshot:
    return ReadSnapshot(
        run=RUN,
        generation=Generation(1),
        request_id=str(number),
        hold_id="a",
        rank=Rank(0),
        begin=0,
        end=1,
    )


async def test_requests_above_the_limit_wait_for_their_turn() -> None:
    answers: asyncio.Queue[SnapshotHeld | SnapshotBytes] = asyncio.Queue()
    requests, node = SnapshotRequests(answers.put_nowait), Node()
    for number in range(MAX_WAITING + 1):
        requests.take(read(number), cast(Member, node))
    await asyncio.sleep(0)
    refused = await answers.get()
    assert (refused.request_id, refused.refusal) == (str(MAX_WAITING), "too many requests on the node")
    node.held.go.set()
    found = [await answers.get() for _ in range(MAX_WAITING)]
    assert {(each.request_id, each.refusal) for each in found} == {(str(number), "") for number in range(MAX_WAITING)}
    assert node.held.most == MAX_REQUESTS
    requests.take(read(0), cast(Member, node))
    assert (await answers.get()).refusal == ""
    await requests.close()


async def test_requests_that_wait_at_the_end_of_the_agent_are_refused() -> None:
    answers: asyncio.Queue[SnapshotHeld | SnapshotBytes] = asyncio.Queue()
    requests, node = SnapshotRequests(answers.put_nowait), Node()
    for number in range(MAX_REQUESTS + 1):
        requests.take(read(number), cast(Member, node))
    await asyncio.sleep(0)
    await requests.close()
    found = [answers.get_nowait() for _ in range(MAX_REQUESTS + 1)]
    assert {each.refusal for each in found} == {"the generation does not run on this node"}
