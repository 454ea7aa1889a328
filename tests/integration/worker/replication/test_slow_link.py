"""The link of a node runs at a hundredth of its usual rate.

The owner reports the slow link with its rate, and withdraws the report when the link is fast again.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.protocol.rank_messages import IdleSpan, Vote
from tests.integration.worker.replication.own_network import OwnLoopback, in_own_network, may_have_one
from tests.integration.worker.replication.pair import HOLDER, Pair, payload
from worker.core.chunks import Link
from worker.member.traffic import ALPHA_SECONDS
from worker.replication.pacing import SpanPacer

# The time limit is long, because 24 MiB take half a minute over the slow link.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
]
PAYLOAD_BYTES = 24 << 20
SO_MAX_PACING_RATE = 47


@pytest.mark.parametrize("paced", [False, True], ids=["at_once", "paced"])
def test_a_slow_holder_stays_in_view_is_named_with_its_rate_and_heals_by_itself(tmpfs: Path, paced: bool) -> None:
    if not may_have_one():
        pytest.skip("no right to a network namespace")

    async def body(loopback: OwnLoopback) -> None:
        pair = Pair(tmpfs, payload_bytes=PAYLOAD_BYTES, memory_bytes=1 << 27, holder_memory_bytes=1 << 27)
        if paced:  # the pacer still assumes the rate of the fast link
            pair.pacer.current = SpanPacer([IdleSpan(0.0, 0.5)], Link(1e9, ALPHA_SECONDS), iteration_seconds=1.0)
        try:
            await limp_and_heal(pair, loopback)
        finally:
            await pair.close()

    in_own_network(body)


def pacing_rate(line: socket.socket) -> int:
    """Return the kernel's limit for a connection, in bytes per second."""
    (rate,) = struct.unpack("L", line.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.calcsize("L")))
    return int(rate)


async def limp_and_heal(pair: Pair, loopback: OwnLoopback) -> None:
    pair.listen()
    sender = pair.send(deadline_seconds=2.0)
    # Two streams share the slow link, so their first chunks are incomplete for about 2 s. The sender must therefore
    # count the bytes of unfinished chunks, or the holder would seem silent.
    sender.stream_count = replace(sender.stream_count, limit=2, count=2, is_settled=True)
    pair.apply_announcement(-1, 1)
    loopback.limit(4_000_000)
    await pair.capture(1)
    await pair.until(lambda: HOLDER in pair.shard.slow_holders)
    told = re.search(r"its link carries ([\d.]+) MB/s", pair.shard.slow_holders[HOLDER])
    assert told is not None
    # No chunk is complete yet, so the rate counts the bytes of unfinished chunks. A busy machine sends fewer of them.
    assert 0.0 < float(told[1]) < 12.0

    def leaves_training_its_part() -> bool:
        return all(0 < pacing_rate(line) < 4_000_000 for line in sender.streams.lines)

    # wait for a limited rate, because the sender lifts its limit now and then to measure the link
    await pair.until(leaves_training_its_part)
    limited = list(sender.streams.lines)
    assert limited
    assert pair.shard.core.view == {HOLDER}
    assert pair.shard.core.vote is Vote.NONE
    changes = pair.changes
    loopback.unlimited()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    step = 1
    # Send steps until one passes at full rate. Without other load, this is the next step.
    while pair.shard.slow_holders or sender.link.carries:
        step += 1
        pair.apply_announcement(step - 1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.changes > changes
    assert all(line.fileno() < 0 for line in limited), "connections that were limited once are not used again"
    assert pair.held()[step] == payload(step, PAYLOAD_BYTES)
