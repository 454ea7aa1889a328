"""Generations that continue from a step of another number of ranks. Agents send the earlier shards to their ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, ShardSource
from everstep.protocol.slot import SlotState
from tests.integration.worker.agent.fleet import Fleet, Node, payload, until
from worker.core.slots import Content
from worker.member import base_loading
from worker.replication.transport import Dialler
from worker.shm.store import Slot

WORLD = 3
FIRST = Generation(1)


async def trained(fleet: Fleet, *, per_node: int = 1) -> None:
    """Train generation 1 on three nodes until step 4 is committed."""
    fleet.per_node = per_node
    await fleet.launch()
    await fleet.train(4)


async def shrink(fleet: Fleet) -> GenerationPlan:
    """Stop the last node, and load the next generation's plan on the other two nodes."""
    lost = fleet.nodes[-1]
    fleet.nodes = fleet.nodes[:-1]
    await lost.gone()
    await fleet.prepare()
    plan = fleet.make_chosen_plan({FIRST: WORLD * fleet.per_node})
    assert plan.relayout is not None
    await fleet.load(plan)
    return plan


def check_fetched(fleet: Fleet, plan: GenerationPlan) -> None:
    """Assert that every rank has fetched all earlier shards, byte for byte."""
    assert plan.relayout is not None
    for rank in fleet.ranks:
        expected = {each: payload(each, plan.base_step)[0] for each in range(plan.relayout.world_size)}
        assert rank.earlier == expected


def slot_of(node: Node, rank: int, step: Step) -> Slot | None:
    return node.agent.store.sealed(Rank(rank), Content(FIRST, step))


def faults_of(fleet: Fleet, node: Node) -> tuple[NodeFault, ...]:
    member = fleet.control.member(node.id)
    return () if member is None else member.faults


def damage(slot: Slot | None) -> None:
    assert slot is not None
    with slot.file.payload(0, 1) as view:
        view[0] ^= 1


async def test_fewer_nodes_continue_from_the_shards_of_more(fleet: Fleet) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    await fleet.start()
    check_fetched(fleet, plan)
    layouts = [rank.welcome.relayout for rank in fleet.ranks if rank.welcome is not None and rank.welcome.relayout]
    assert [(layout.world_size, layout.here) for layout in layouts] == [(3, (0, 2)), (3, (0, 1))]
    assert all(rank.boundary == plan.base_step and rank.restored is None for rank in fleet.ranks)
    await fleet.train(plan.base_step + 2)
    for node in fleet.nodes:
        assert Rank(2) not in node.agent.store.shards, "earlier shards are dropped after the first commit"
        assert all(
            slot.file.header.origin_generation == 2 for rank in (0, 1) for slot in node.agent.store.shards[Rank(rank)]
        )


async def test_more_nodes_continue_from_the_shards_of_fewer(fleet: Fleet) -> None:
    every = fleet.nodes
    fleet.nodes = every[:2]
    await fleet.launch()
    await fleet.train(4)
    fleet.nodes = every
    await fleet.prepare()
    plan = fleet.make_chosen_plan({FIRST: 2})
    await fleet.load(plan)
    await fleet.start()
    check_fetched(fleet, plan)
    await fleet.train(plan.base_step + 2)


async def test_a_loss_before_the_first_commit_restores_the_same_base_again(fleet: Fleet) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    await fleet.start()
    fleet.ranks[1].captures = False
    await until("slots", fleet.is_expected)
    while fleet.is_expected():
        for rank in fleet.ranks:
            rank.step()
    captured = Content(Generation(2), Step(fleet.ranks[0].boundary))
    await until("a capture", lambda: fleet.nodes[0].agent.store.sealed(Rank(0), captured))
    await fleet.prepare()
    again = fleet.make_chosen_plan({FIRST: WORLD, Generation(2): 2})
    assert (again.base_step, again.relayout is None) == (plan.base_step, False)
    await fleet.load(again)
    await fleet.start()
    check_fetched(fleet, again)
    await fleet.train(again.base_step + 2)


async def test_ranks_of_a_node_that_need_the_same_shard_share_one_fetch(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[NodeId, Rank]] = []
    fetch = base_loading.fetch_shard

    async def count(dialler: Dialler, rank: Rank, source: ShardSource, store: Any, **options: Any) -> None:
        fetched.append((source.node_id or NodeId(""), rank))
        await fetch(dialler, rank, source, store, **options)

    await trained(fleet, per_node=2)
    monkeypatch.setattr(base_loading, "fetch_shard", count)
    plan = await shrink(fleet)
    await fleet.start()
    check_fetched(fleet, plan)
    # Node 0 lacks the shards of node 1, and node 1 lacks the shards of node 2.
    assert sorted(rank for _, rank in fetched) == [2, 3, 4, 5]


async def test_a_damaged_earlier_shard_is_fetched_from_another_node(fleet: Fleet) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    damage(slot_of(fleet.nodes[0], 0, plan.base_step))  # node 1 still holds a replica of this shard
    await fleet.start()
    check_fetched(fleet, plan)


async def test_an_earlier_shard_without_a_good_source_is_a_fault_that_names_it(fleet: Fleet) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    damage(slot_of(fleet.nodes[0], 2, plan.base_step))  # the only other copy was lost with node 2
    await fleet.begin()
    await until("the faults", lambda: all(faults_of(fleet, node) for node in fleet.nodes))
    for node in fleet.nodes:
        assert {(fault.code, fault.shard) for fault in faults_of(fleet, node)} == {(FaultCode.SOURCE_MISMATCH, 2)}
    assert all(rank.boundary == -1 and set(rank.earlier) == {0, 1} for rank in fleet.ranks)


async def test_a_request_for_a_shard_that_does_not_exist_is_answered_with_the_reason(fleet: Fleet) -> None:
    await trained(fleet)
    await shrink(fleet)
    await until("ranks", lambda: all(rank in node.shim.ranks for rank, node in enumerate(fleet.nodes)))
    for rank in fleet.ranks:
        rank.wants = (Rank(WORLD), Rank(-1))
    await fleet.start()
    assert all("no shard of an earlier rank 3" in rank.problems[0] for rank in fleet.ranks)
    assert all("no shard of an earlier rank -1" in rank.problems[1] for rank in fleet.ranks)


class Gate:
    """Holds every fetch from a peer until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._fetch: Callable[..., Any] = base_loading.fetch_shard
        monkeypatch.setattr(base_loading, "fetch_shard", self._wait)

    async def _wait(self, *arguments: Any, **options: Any) -> None:
        self.reached.set()
        await self.opened.wait()
        await self._fetch(*arguments, **options)


async def test_an_agent_that_restarts_during_a_fetch_serves_the_repeated_request(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    gate = Gate(monkeypatch)
    await fleet.begin()
    await gate.reached.wait()
    node = fleet.nodes[1]
    await node.stop()
    gate.opened.set()
    node.start()
    await until("ranks", lambda: all(rank.is_connected for rank in fleet.ranks))
    check_fetched(fleet, plan)
    await fleet.train(plan.base_step + 2)


async def test_a_new_generation_ends_a_fetch(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await trained(fleet)
    plan = await shrink(fleet)
    gate = Gate(monkeypatch)
    await fleet.begin()
    await gate.reached.wait()
    await fleet.prepare()
    gate.opened.set()
    again = fleet.make_chosen_plan({FIRST: WORLD, Generation(2): 2})
    assert again.base_step == plan.base_step
    states = {
        slot.file.header.state for node in fleet.nodes for slots in node.agent.store.shards.values() for slot in slots
    }
    assert SlotState.WRITING not in states
    await fleet.load(again)
    await fleet.start()
    check_fetched(fleet, again)


async def test_no_slot_is_granted_while_a_rank_of_the_node_loads(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share a node. One rank waits for slots, while the other rank still waits for a shard of its state.

    The agent grants no slot until both ranks have restored their state.
    """
    await trained(fleet, per_node=2)
    await shrink(fleet)
    node = fleet.nodes[0]
    await until("ranks", lambda: set(fleet.ranks_of(0)) <= set(node.shim.ranks))
    ready, waiting = (node.shim.ranks[rank] for rank in fleet.ranks_of(0))
    ready.wants = (Rank(0),)
    gate = Gate(monkeypatch)
    await fleet.begin()
    await until("the first rank", lambda: ready.boundary >= 0)
    await gate.reached.wait()
    for _ in range(3):
        ready.step()
        await asyncio.sleep(0)
    assert ready.slots is None
    assert waiting.boundary == -1
    gate.opened.set()
    await until("ranks", lambda: all(rank.boundary >= 0 for rank in fleet.ranks))
    waiting.step()
    await until("slots", lambda: ready.slots is not None)


@pytest.mark.parametrize(("code", "is_permanent"), [("cannot_relayout", True), ("restore_mismatch", False)])
async def test_a_state_that_fits_no_other_layout_ends_the_job(fleet: Fleet, code: str, is_permanent: bool) -> None:
    await fleet.launch()
    fleet.ranks[0].fail(code)
    await until("the fault", lambda: faults_of(fleet, fleet.nodes[0]))
    assert [(fault.code, fault.is_permanent) for fault in faults_of(fleet, fleet.nodes[0])] == [(code, is_permanent)]


@pytest.mark.security
@pytest.mark.parametrize("code", ["ranks_not_gone", "gpu_lost", "source_mismatch", "of_a_newer_library"])
async def test_a_rank_does_not_speak_for_its_node(fleet: Fleet, code: str) -> None:
    """The control plane terminates a node whose own agent reports `gpu_lost`."""
    await fleet.launch()
    fleet.ranks[0].fail(code)
    await until("the fault", lambda: faults_of(fleet, fleet.nodes[0]))
    assert [fault.code for fault in faults_of(fleet, fleet.nodes[0])] == ["training_error"]
