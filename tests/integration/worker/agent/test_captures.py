"""Holders receive a rank's capture while the rank still writes it.

The tests end an agent or a rank during a capture. Later steps must still be committed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.protocol.ids import Rank
from everstep.protocol.slot import CHUNK_BYTES, HEADER_BYTES, SlotState, unpack_header
from tests.integration.worker.agent import fleet as harness
from tests.integration.worker.agent.fleet import Fleet, until

pytestmark = pytest.mark.integration
HALF = CHUNK_BYTES
CAPACITY_BYTES = 2 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def several_chunks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each shard two chunks long."""
    monkeypatch.setattr(harness, "STATE_BYTES", CAPACITY_BYTES - 1024)
    for node in fleet.nodes:
        node.shim.capacity_bytes = CAPACITY_BYTES
        node.settings = replace(node.settings, memory_bytes=8 * CAPACITY_BYTES)
        node.agent.store.memory_bytes = node.settings.memory_bytes


def part_at_holder(fleet: Fleet, rank: int) -> int:
    """Return how many chunks of a rank's unfinished capture its holder has verified."""
    holder = fleet.nodes[(rank + 1) % len(fleet.nodes)].agent.lifecycle.member
    assert holder is not None
    found = [
        owner.receiver.current
        for owner in holder.receiver.open_sessions
        if owner.receiver is not None and owner.peer == fleet.nodes[rank].id
    ]
    return max((incoming.landed_count for incoming in found if incoming is not None), default=0)


def sealed_steps(fleet: Fleet, rank: int) -> set[int]:
    """Return the steps of a rank that any node has sealed, according to the slot headers."""
    headers = [
        unpack_header(path.read_bytes()[:HEADER_BYTES])
        for node in fleet.nodes
        for path in node.files(f"rank-{rank}.slot-*").values()
    ]
    return {header.step for header in headers if header.state is SlotState.SEALED}


async def half_captured(fleet: Fleet) -> int:
    """Train a few steps, then pause every rank in the middle of a capture, and return the captured step.

    When the function returns, each holder has received the first part of the capture.
    """
    await fleet.launch()
    await fleet.train(2)
    for rank in fleet.ranks:
        rank.stops_at = HALF
    await until("a proposed step", fleet.is_expected)
    while any(rank.half_captured is None for rank in fleet.ranks):
        if fleet.is_expected():
            for rank in fleet.ranks:
                rank.step()
        await until(
            "the next proposal",
            lambda: fleet.is_expected() or all(rank.half_captured is not None for rank in fleet.ranks),
        )
    (step,) = {rank.half_captured.step for rank in fleet.ranks if rank.half_captured is not None}
    await until("the beginnings", lambda: all(part_at_holder(fleet, rank) == 1 for rank in range(len(fleet.nodes))))
    assert all(step not in sealed_steps(fleet, rank) for rank in range(len(fleet.nodes)))
    for rank in fleet.ranks:
        rank.stops_at = None
    return step


async def test_what_was_begun_is_committed_when_it_is_captured(fleet: Fleet) -> None:
    step = await half_captured(fleet)
    for rank in fleet.ranks:
        assert rank.word.committed < step
        rank.go_on()
    await until("the commit", lambda: fleet.is_committed(step))
    await fleet.train(step + 2)


async def test_one_that_is_given_up_is_no_snapshot_anywhere_and_the_rounds_go_on(fleet: Fleet) -> None:
    step = await half_captured(fleet)
    fleet.ranks[0].give_up()
    for rank in fleet.ranks[1:]:
        rank.go_on()
    await fleet.train(step + 2)
    assert step not in sealed_steps(fleet, 0)


async def test_a_rank_that_is_killed_in_the_middle(fleet: Fleet) -> None:
    step = await half_captured(fleet)
    committed = fleet.ranks[0].word.committed
    await fleet.nodes[0].shim.end(Rank(0))
    for node in fleet.nodes[1:]:
        await node.shim.stop_all()
    await fleet.launch()
    assert fleet.plan is not None
    assert committed <= fleet.plan.base_step < step
    for number, rank in enumerate(fleet.ranks):
        assert rank.restored == harness.payload(Rank(number), fleet.plan.base_step)[0]
    await fleet.train(step + 2)


async def test_a_node_that_is_lost_in_the_middle_leaves_its_holder_a_part_that_is_no_snapshot(fleet: Fleet) -> None:
    step = await half_captured(fleet)
    await fleet.nodes[0].gone()
    fleet.nodes[0].forget()
    for node in fleet.nodes[1:]:
        await node.shim.stop_all()
    assert step not in sealed_steps(fleet, 0)
    fleet.nodes[0].start()
    await fleet.launch()
    assert fleet.plan is not None
    assert 2 <= fleet.plan.base_step < step
    assert fleet.ranks[0].restored == harness.payload(Rank(0), fleet.plan.base_step)[0]
    await fleet.train(step + 2)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "another"])
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "given up"])
async def test_an_owners_agent_that_is_restarted_in_the_middle(fleet: Fleet, number: int, is_captured: bool) -> None:
    step = await half_captured(fleet)
    await fleet.nodes[number].stop()
    fleet.nodes[number].start()
    await fleet.connected()
    await until(
        "the rank to be back", lambda: fleet.ranks[number].is_connected and fleet.ranks[number].connection_count == 2
    )
    for rank in fleet.ranks:
        if is_captured or rank is not fleet.ranks[number]:
            rank.go_on()
        else:
            rank.give_up()
    await fleet.train(step + 2)
    for index in range(len(fleet.nodes)):
        committed = fleet.ranks[index].word.committed
        assert committed in sealed_steps(fleet, index)


async def test_a_holders_agent_that_is_restarted_in_the_middle_gets_it_all(fleet: Fleet) -> None:
    step = await half_captured(fleet)
    await fleet.nodes[1].stop()  # node 1 holds rank 0's shard
    fleet.nodes[1].start()
    await fleet.connected()
    await until("the beginning", lambda: part_at_holder(fleet, 0) == 1)
    for rank in fleet.ranks:
        rank.go_on()
    await fleet.train(step + 2)
