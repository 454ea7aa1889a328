"""A group of agents with parity in memory: one lost node is rebuilt bit-identically, a second loss needs S3.

The agents refuse a damaged share, commit without a member that they cannot reach, and survive their own restart.

Each state has several chunks and another size than the states of other ranks.
"""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache
from typing import Any

import pytest
from msgspec import structs

from everstep.protocol.agent_messages import (
    FaultCode,
    Load,
    MemberPhase,
    NodeFault,
    ShardProtection,
    Start,
    TakeCheckpoint,
    UploadedShard,
)
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.parity import share_owner
from everstep.protocol.plan import ShardSource
from everstep.protocol.slot import CHUNK_BYTES, SlotIndex, TensorEntry, pack_index
from tests.integration.worker.agent import fleet as harness
from tests.integration.worker.agent.fleet import JOB, KEY_BYTES, RUN, Fleet, Node, until
from worker.core.slots import Content
from worker.member import base_loading
from worker.replication.rebuilding import rebuild_shard
from worker.replication.tcp import TcpSession
from worker.shm.store import Slot

pytestmark = pytest.mark.integration


@lru_cache(maxsize=64)
def state(rank: int, step: int) -> bytes:
    """Return a state of two to four chunks, which all differ."""
    return random.Random(1000 * rank + step).randbytes((2 + rank % 3) * CHUNK_BYTES - 4096 * (rank + 1))


def payload(rank: int, step: int) -> tuple[bytes, int]:
    """Return a payload with one tensor, which S3 can restore, and the offset of its index."""
    data = state(rank, step)
    tensor = TensorEntry("w", "uint8", (len(data),), 0, len(data))
    return data + pack_index(SlotIndex(tensors=(tensor,), values=b"")), len(data)


@pytest.fixture
def group(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Return a fleet of three nodes in one group with parity."""
    monkeypatch.setattr(harness, "payload", payload)
    for node in fleet.nodes:
        node.shim.capacity_bytes = 4 * CHUNK_BYTES
        node.agent.store.memory_bytes = 1 << 28
    fleet.has_parity = True
    return fleet


def protection(fleet: Fleet, rank: int) -> ShardProtection:
    member = fleet.control.member(fleet.nodes[rank].id)
    assert member is not None
    return member.protection[0]


async def lose(node: Node) -> None:
    """Lose a machine with its memory, and start another machine in its place."""
    await node.gone()
    node.forget()
    node.start()
    node.agent.store.memory_bytes = 1 << 28


def check_restored(fleet: Fleet, step: int) -> None:
    assert fleet.plan is not None
    assert fleet.plan.base_step == step
    for rank in fleet.ranks:
        assert rank.restored == payload(rank.rank, step)[0]


@pytest.mark.parametrize("per_node", [1, 2])
async def test_a_lost_node_is_rebuilt_and_the_job_continues(group: Fleet, per_node: int) -> None:
    """A lost node's shards are rebuilt, and training continues.

    With two ranks per node, the ranks with the same LOCAL_RANK form a stripe.
    """
    group.per_node = per_node
    await group.launch()
    await group.train(3)
    for node in range(3):
        assert protection(group, node).in_view == protection(group, node).holders
    await lose(group.nodes[1])
    await group.launch()
    assert group.plan is not None
    base = group.plan.base_step
    assert base >= 3
    check_restored(group, base)
    restored = [member.restored_from for node in group.nodes if (member := group.control.member(node.id)) is not None]
    assert restored == [("local",) * per_node, ("parity",) * per_node, ("local",) * per_node]
    await group.train(base + 2)
    await lose(group.nodes[2])
    await group.launch()
    check_restored(group, group.plan.base_step)
    assert group.plan.base_step >= base + 2


def checkpoint(fleet: Fleet) -> dict[Rank, UploadedShard]:
    """Return the shards of the one checkpoint that all nodes have uploaded, by rank."""
    members = [fleet.control.member(node.id) for node in fleet.nodes]
    shards = {shard.rank: shard for member in members if member is not None for shard in member.uploads}
    return shards if len(shards) == len(fleet.nodes) else {}


async def test_a_second_loss_before_the_commit_of_the_base_needs_s3(group: Fleet) -> None:
    await group.launch()
    await group.train(2)
    ask = TakeCheckpoint(job=JOB, run=RUN, generation=Generation(group.generation), step=Step(2))
    await group.send(group.nodes[0], ask)
    await group.train(5)
    await until("the checkpoint", lambda: checkpoint(group))
    stored = checkpoint(group)
    await lose(group.nodes[1])
    await group.prepare()
    await group.load()
    assert group.plan is not None
    assert group.plan.base_step > stored[Rank(0)].step
    await lose(group.nodes[2])
    await group.prepare()
    assert group.make_parity_plan().base_step == 0, "the replacement has no share of the base"
    await group.load(group.make_s3_plan(stored))
    await group.start()
    check_restored(group, stored[Rank(0)].step)
    await group.train(stored[Rank(0)].step + 2)
    await lose(group.nodes[2])
    await group.launch()
    check_restored(group, group.plan.base_step)


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_damaged_share_is_refused_by_its_name(group: Fleet, is_read: bool) -> None:
    """An agent refuses a parity share with a changed byte, and its report names the share.

    The byte changes before or after the holder computes the share's digests.
    """
    await group.launch()
    await group.train(2)
    holder, lost = group.nodes[2], group.nodes[1]
    if not is_read:  # A restarted agent has lost the digests, so it reads the share again.
        await group.prepare()
        await restart(holder)
    await lose(lost)
    await group.prepare()
    plan = group.make_parity_plan()
    slot = holder.agent.store.sealed(share_owner(Rank(2)), Content(Generation(1), plan.base_step))
    assert slot is not None
    with slot.file.payload(5, 6) as byte:
        byte[0] ^= 1
    for node in group.nodes:
        await group.send(node, Load(plan=plan, key=bytes(KEY_BYTES)))
    await until("the refusal", lambda: faults(group, 1))
    (fault,) = faults(group, 1)
    assert fault.code == FaultCode.SOURCE_MISMATCH
    assert f"parity: the share of rank 2 on {holder.id}: " in fault.message


def faults(fleet: Fleet, index: int) -> tuple[NodeFault, ...]:
    member = fleet.control.member(fleet.nodes[index].id)
    return () if member is None else member.faults


async def restart(node: Node) -> None:
    await node.stop()
    node.start()
    node.agent.store.memory_bytes = 1 << 28


async def test_an_agent_restarts_while_shares_accumulate(group: Fleet) -> None:
    await group.launch()
    await group.train(2)
    group.ranks[2].captures = False
    await until("a step that all ranks can capture", group.is_expected)
    step = group.ranks[0].word.proposed
    while group.ranks[0].boundary < step:
        for rank in group.ranks:
            rank.step()
    holder = group.nodes[1].agent.store
    await until(
        "rank 0's contribution",
        lambda: any(slot.is_written_with(Content(Generation(1), step)) for slot in holder.shards[share_owner(Rank(1))]),
    )
    await restart(group.nodes[1])
    await until("the agent", lambda: group.members(MemberPhase.RUNNING))
    group.ranks[2].captures = True
    await group.train(step)
    await lose(group.nodes[0])
    await group.launch()
    assert group.plan is not None
    check_restored(group, group.plan.base_step)
    assert group.plan.base_step >= step


async def test_steps_are_committed_without_a_member_that_cannot_be_reached(group: Fleet) -> None:
    """A holder of a parity share receives nothing from one member of the stripe.

    The share stays incomplete, so all members commit steps without this holder.
    """
    group.timeouts = structs.replace(harness.TIMEOUTS, holder_deadline_seconds=1.0)
    await group.launch()
    await group.train(2)
    holder = group.nodes[1]
    member = holder.agent.lifecycle.member
    assert member is not None
    answers = asyncio.Event()
    serve = member.receiver.replica

    async def deaf(session: TcpSession) -> None:
        if session.opened.owner_rank == 2:
            await answers.wait()
        await serve(session)

    member.receiver.replica = deaf  # type: ignore[method-assign]
    await holder.agent.listener.revoke()
    holder.agent.listener.admit(member.sessions.credentials, member.serve)
    await group.train(group.ranks[0].boundary + 3)
    await until(
        "the holder to be out of view of both members",
        lambda: all(holder.id not in protection(group, rank).in_view for rank in (0, 2)),
    )
    answers.set()
    await until("the holder to be back", lambda: is_whole_after_steps(group))
    await group.train(group.ranks[0].boundary + 1)
    await lose(group.nodes[0])
    await group.launch()
    assert group.plan is not None
    check_restored(group, group.plan.base_step)


def is_whole_after_steps(fleet: Fleet) -> bool:
    """Run one step if every rank can capture it. Return True if the commits of every rank wait for all its holders."""
    if fleet.is_expected():
        for rank in fleet.ranks:
            rank.step()
    return all(protection(fleet, rank).in_view == protection(fleet, rank).holders for rank in range(3))


async def test_fewer_nodes_rebuild_the_lost_shard_and_form_a_new_stripe(
    group: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three nodes is lost, and the job continues on the other two.

    One of these rebuilds the lost shard for both.
    """
    rebuilt: list[Rank] = []

    async def count(dialler: Any, source: ShardSource, store: Any, **options: Any) -> None:
        assert source.rebuild is not None
        rebuilt.append(source.rebuild.lost.rank)
        await rebuild_shard(dialler, source, store, **options)

    monkeypatch.setattr(base_loading, "rebuild_shard", count)
    await group.launch()
    await group.train(3)
    *_, lost = group.nodes
    group.nodes = group.nodes[:-1]
    await lost.gone()
    await group.prepare()
    plan = group.make_chosen_plan({Generation(1): 3})
    assert plan.relayout is not None
    assert [sources[0].kind for sources in plan.relayout.shards] == ["peer", "peer", "parity"]
    assert {rank.stripe for rank in plan.ranks} == {(0, 1)}
    await group.load(plan)
    await group.start()
    for rank in group.ranks:
        assert rank.earlier == {Rank(each): payload(each, plan.base_step)[0] for each in range(3)}
    assert rebuilt == [2], "one node rebuilds the shard, and the other fetches it"
    for index, node in enumerate(group.nodes):
        kept = node.agent.store.sealed(share_owner(Rank(index)), Content(Generation(1), plan.base_step))
        assert kept is not None, "the earlier share protects the base until the first commit"
    await group.train(plan.base_step + 2)
    await lose(group.nodes[1])
    await group.launch()
    assert group.plan is not None
    assert group.plan.base_step >= plan.base_step + 2
    check_restored(group, group.plan.base_step)


def base_slot(group: Fleet, index: int) -> Slot:
    assert group.plan is not None
    slot = group.nodes[index].agent.store.sealed(Rank(index), Content(Generation(1), group.plan.base_step))
    assert slot is not None
    return slot


async def test_a_damaged_shard_on_its_own_node_is_rebuilt(group: Fleet) -> None:
    await group.launch()
    await group.train(2)
    await group.prepare()
    await restart(group.nodes[1])  # A restarted agent has lost the digests, so it reads its shard first.
    await group.prepare()
    plan = group.make_parity_plan()
    with base_slot(group, 1).file.payload(5, 6) as byte:
        byte[0] ^= 1
    await group.load(plan)
    await group.start()
    check_restored(group, plan.base_step)
    member = group.control.member(group.nodes[1].id)
    assert member is not None
    assert member.restored_from == ("parity",)
    await group.train(plan.base_step + 1)


async def test_an_agent_that_loses_the_base_before_its_commit_rebuilds_it(group: Fleet) -> None:
    """An agent loses its shard of the generation's start step (the base), and rebuilds it.

    The coordinator starts last, so that the base is not committed before the loss.
    """
    await group.launch()
    await group.train(2)
    await group.prepare()
    plan = group.make_parity_plan()
    await group.load(plan)
    coordinator, holder, _ = group.nodes
    start = Start(job=JOB, run=RUN, generation=Generation(group.generation))
    for node in group.nodes[1:]:
        await group.send(node, start)
    await until("ranks", lambda: all(rank in group.nodes[rank].shim.ranks for rank in (1, 2)))
    await until("the rank", lambda: holder.shim.ranks[Rank(1)].is_connected)
    path = holder.files(base_slot(group, 1).file.name.partition("/")[2]).popitem()[1]
    await holder.stop()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    holder.start()
    holder.agent.store.memory_bytes = 1 << 28
    await until("the rebuilt base", lambda: _has_base(holder, plan.base_step))
    assert payload(1, plan.base_step)[0] == _bytes_of(base_slot(group, 1))
    await group.send(coordinator, start)
    await until("ranks", lambda: all(rank.is_connected for rank in group.ranks))
    await group.train(plan.base_step + 2)


def _has_base(node: Node, step: Step) -> bool:
    return node.agent.store.sealed(Rank(1), Content(Generation(1), step)) is not None


def _bytes_of(slot: Slot) -> bytes:
    with slot.file.payload(0, slot.file.header.payload_bytes) as view:
        return bytes(view)
