"""Replication over NIXL. The imported tests run on streams over NIXL, because this module overrides `make`.

UCX reads over TCP on loopback here, and serves the reads in software. RDMA devices need a trial on hardware.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable
from functools import partial

import pytest

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from tests.fakes.identities import identity_of
from tests.integration.worker.replication.pair import GENERATION, HOLDER, OWNER, Pair, credentials, payload
from tests.integration.worker.replication.test_captures import (  # noqa: F401  tests of the common contract
    test_an_answer_for_what_was_not_named_ends_the_session,
)
from tests.integration.worker.replication.test_printed_lines import (  # noqa: F401
    test_every_acknowledged_step_has_its_lines_on_the_holder,
)
from tests.integration.worker.replication.test_replicas import (  # noqa: F401
    small_chunks,
    test_a_broken_line_is_dialled_again_and_sending_goes_on,
    test_a_cancelled_shard_is_no_snapshot_and_the_next_one_comes_through,
    test_a_damaged_chunk_is_wanted_again_and_alone,
    test_a_holder_is_not_silent_while_the_pacer_holds_its_chunks_back,
    test_a_holder_that_closes_its_stream_has_given_nothing,
    test_a_holder_that_falls_silent_in_the_middle_is_not_waited_for,
    test_a_slot_granted_anew_while_it_is_being_sent,
    test_a_stream_that_breaks_at_any_chunk_goes_on_where_it_stood,
    test_an_ended_generation_leaves_no_stream_open,
    test_chunks_come_in_any_order_over_any_stream_and_twice,
    test_steps_are_replicated_verified_and_acknowledged,
    test_what_is_fetched_is_what_was_asked_for,
    test_what_is_not_there_exactly_is_not_to_be_fetched,
    test_who_follows_a_fetch_is_told_of_bytes_that_are_there_the_index_first,
)
from worker.core.rounds import Vote
from worker.errors import PeerLost, PeerRefused
from worker.replication.nixl import BLOCK_BYTES, Nixl

pytestmark = pytest.mark.integration


def open_nixl(kind: type[Nixl]) -> Nixl:
    """Open a NIXL agent that reads over TCP on loopback. It uses NIXL also for the small chunks of the tests."""
    nixl = kind.open(transports="tcp", net_devices="lo", pool_bytes=16 * BLOCK_BYTES)
    nixl.small_bytes = 256
    return nixl


@pytest.fixture(scope="module")
def agents() -> tuple[Nixl, Nixl]:
    """Return the NIXL agents of the owner and the holder."""
    pytest.importorskip("nixl_cu12", reason="the package nixl-cu12 is not installed")
    return open_nixl(Nixl), open_nixl(Nixl)


@pytest.fixture
def make(make: Callable[..., Pair], agents: tuple[Nixl, Nixl]) -> Callable[..., Pair]:
    return partial(make, nixl=agents)


async def replicate(pair: Pair) -> None:
    """Replicate step 1 to the holder, and wait for its acknowledgement."""
    pair.send()
    pair.hear(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.vote is Vote.ACKED)
    assert pair.held() == {Step(1): payload(1, pair.payload_bytes)}


async def test_the_chunks_travel_over_nixl(pair: Pair, agents: tuple[Nixl, Nixl]) -> None:
    before = agents[1].read_bytes
    await replicate(pair)
    assert agents[1].read_bytes - before == pair.payload_bytes
    await pair.stop_sending()
    await pair.listener.revoke()
    assert [each.free_count for each in agents] == [16, 16]


@pytest.mark.parametrize("side", [0, 1])
async def test_a_pair_of_which_one_node_has_no_nixl_uses_tcp(
    make: Callable[..., Pair], agents: tuple[Nixl, Nixl], side: int
) -> None:
    before = agents[1].read_bytes
    pair = make(nixl=(agents[0], None) if side else (None, agents[1]))
    pair.listen()
    await replicate(pair)
    assert agents[1].read_bytes == before
    assert [each.free_count for each in agents] == [16, 16]


class Lost(Nixl):
    """A NIXL agent whose peers cannot read its blocks, because it sends them wrong addresses."""

    def address(self, block: int) -> int:
        return 4096 + block


class Held(Nixl):
    """A NIXL agent that rejects the descriptions of its peers."""

    def connect(self, node_id: NodeId, description: bytes) -> str:
        return super().connect(node_id, b"garbage" + description)


async def test_after_a_failed_read_the_shard_arrives_over_tcp(
    make: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    holder = open_nixl(Nixl)
    pair = make(nixl=(open_nixl(Lost), holder))
    pair.listen()
    before = holder.read_bytes
    await replicate(pair)
    assert holder.read_bytes == before
    assert "replicas of i-owner use TCP for 600 s: NIXL failed" in caplog.text
    assert holder.reserve(OWNER) is None
    holder.retry_seconds = 0.0
    blocks = holder.reserve(OWNER)
    assert blocks is not None
    holder.release(blocks)


async def test_a_fetching_node_that_cannot_read_fetches_over_tcp(
    make: Callable[..., Pair], agents: tuple[Nixl, Nixl], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make(nixl=(open_nixl(Held), agents[1]))
    pair.listen()
    session = await pair.dial(kind="fetch", rank=Rank(-1))
    with pytest.raises(PeerLost, match="i-holder accepted NIXL, but this node cannot read from it"):
        await pair.stream(session)
    line = await pair.stream(session)  # The node no longer offers NIXL for its second stream.
    assert type(line) is socket.socket
    line.close()
    session.close()
    assert "replicas of i-holder use TCP for 600 s: NIXL failed" in caplog.text


@pytest.mark.security
async def test_a_stream_of_an_ended_generation_gets_no_blocks(
    make: Callable[..., Pair], agents: tuple[Nixl, Nixl]
) -> None:
    pair = make()
    pair.listen()
    stale = credentials(OWNER, generation=Generation(GENERATION - 1), nixl=agents[0])
    with pytest.raises(PeerRefused, match="not a member of generation"):
        await pair.dial(stale, kind="stream")
    assert [each.free_count for each in agents] == [16, 16]


def test_credentials_with_tls_exclude_nixl(agents: tuple[Nixl, Nixl]) -> None:
    with pytest.raises(AssertionError, match="in plain"):
        credentials(OWNER, identity=identity_of(OWNER), nixl=agents[0])


async def test_a_peer_that_stands_still_within_a_read_costs_a_block_until_it_answers(agents: tuple[Nixl, Nixl]) -> None:
    """A peer process stands still during a read over NIXL. The read fails after its time limit.

    The reader does not use the block of this read again until the peer continues and answers.
    """
    reader = open_nixl(Nixl)
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.worker.replication.nixl_peer", stdin=PIPE, stdout=PIPE
    )
    assert peer.stdout is not None
    try:
        said = (await peer.stdout.readline()).split()
        address, description = int(said[0]), bytes.fromhex(said[1].decode())
        name = reader.connect(HOLDER, description)
        read = partial(reader.read, HOLDER, name, address, BLOCK_BYTES)
        blocks = reader.reserve(HOLDER)
        assert blocks is not None
        read(blocks, threading.Event())
        with reader.memory(blocks[0]) as memory:
            assert bytes(memory) == b"a" * BLOCK_BYTES
        peer.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, peer.pid, os.WSTOPPED)
        reader.read_seconds = 0.1
        with pytest.raises(OSError, match="the peer's memory does not answer"):
            read(blocks, threading.Event())
        assert len(blocks) == 1
        reader.release(blocks)
        assert reader.free_count == 15
        peer.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while reader.free_count < 16:
                await asyncio.to_thread(threading.Event().wait, 0.01)
        peer.kill()
        await peer.wait()
        reader.read_seconds, reader.retry_seconds = 20.0, 0.0
        blocks = reader.reserve(HOLDER)
        assert blocks is not None
        with pytest.raises(OSError, match="a read over NIXL failed"):
            read(blocks, threading.Event())
        reader.release(blocks)
        assert reader.free_count == 16
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()
