from __future__ import annotations

import asyncio
import socket

import pytest

from benchmarks.rounds import FLAT, CountedSession, measure
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import Open
from everstep.protocol.rounds import RoundReport
from worker.replication.tcp import TcpSession


@pytest.mark.parametrize(("arity", "depth", "most_reports"), [(FLAT, 1, 7.0), (2, 3, 7.0)])
async def test_rounds_are_made_and_charged_to_their_agents(arity: int, depth: int, most_reports: float) -> None:
    row = await measure(8, arity)
    assert (row.agents, row.depth) == (8, depth)
    assert 0 < row.root_ms <= row.path_ms
    assert 1 <= row.root_messages <= most_reports


async def test_what_is_sent_in_one_go_is_counted_one_by_one() -> None:
    lines = socket.socketpair()
    for line in lines:
        line.setblocking(False)
    opened = Open(run=RunId("r"), generation=Generation(1), kind="round", node_id=NodeId("i-1"), owner_rank=Rank(-1), nonce=b"")
    ours, theirs = CountedSession(lines[0], opened, NodeId("i-counted")), TcpSession(lines[1], opened, NodeId("i-1"))
    reports = [RoundReport(generation=Generation(number), nodes=()) for number in (1, 2)]
    try:
        await ours.send(*reports)
        assert [await asyncio.wait_for(theirs.receive(), 10.0) for _ in reports] == reports
        assert CountedSession.reports.pop(NodeId("i-counted")) == 2
    finally:
        ours.close()
        theirs.close()
