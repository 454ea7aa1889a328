"""Generations on real agents: nodes promise to stop older work, load a plan, start ranks, and commit steps.

Some tests restart an agent in each of these phases.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

import worker.agent.agent
import worker.member.checkpoint_uploads
import worker.member.member
import worker.member.upload_division
from everstep.protocol.agent_messages import (
    ExitClass,
    FaultCode,
    HaltRanks,
    Load,
    MemberPhase,
    MemberReport,
    MetricPoint,
    Prepare,
    Rehearse,
    Release,
    Start,
    StopTraining,
    TakeCheckpoint,
    UploadedShard,
)
from everstep.protocol.errors import CorruptSlot
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ObjectReference
from everstep.protocol.rank_messages import StopState, read_agent_half
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import (
    HEADER_BYTES,
    SlotIndex,
    SlotState,
    TensorEntry,
    pack_header,
    pack_index,
    unpack_header,
)
from tests.integration.worker.agent import fleet as agent_fleet
from tests.integration.worker.agent.fleet import (
    CAPACITY_BYTES,
    JOB,
    KEY_BYTES,
    RUN,
    TIMEOUTS,
    Fleet,
    Node,
    payload,
    until,
)
from worker.agent.promise import Promise, PromiseFile
from worker.core.metric_outbox import MAX_SENT
from worker.core.rounds import NONE
from worker.core.slots import FIRST_PAUSE_SECONDS, UPLOAD_TRIES, Content
from worker.core.upload_division import divide
from worker.core.upload_progress import STALL_SECONDS
from worker.errors import ObjectMissing, PeerLost, StoreDenied, StoreUnavailable
from worker.member import base_loading
from worker.ranks.shim.messages import RankRecord
from worker.replication.transfers import ShardRejected
from worker.replication.transport import Dialler
from worker.shm.store import Slot, SlotStore
from worker.storage.object_store import StoredObject
from worker.storage.shared_tensors import SharedTensors

pytestmark = pytest.mark.integration


def check_restored(fleet: Fleet) -> None:
    """Check that every rank restored the start step of the plan, byte for byte."""
    assert fleet.plan is not None
    assert fleet.plan.base_step > 0
    for rank in fleet.ranks:
        assert rank.restored == payload(rank.rank, fleet.plan.base_step)[0]


async def fail(fleet: Fleet, rank: int = 1) -> None:
    """End one rank. The test then starts a new generation on every agent, as the control plane would."""
    await fleet.nodes[rank].shim.end(Rank(rank))


async def test_steps_are_committed_and_come_back(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(5)
    every = 2 * len(fleet.nodes)
    await until(
        "every copy to be told of", lambda: [step >= 5 and at > 0 for step, at in copies(fleet)] == [True] * every
    )
    await fail(fleet)
    await until("the exit to be reported", lambda: exit_of(fleet, 1) is ExitClass.KILLED)
    await fleet.launch()
    check_restored(fleet)
    assert fleet.plan is not None
    assert fleet.plan.base_step >= 5
    for node in fleet.nodes:
        member = fleet.control.member(node.id)
        assert member is not None
        assert member.restored_from == ("local",)
    await fleet.train(fleet.plan.base_step + 3)
    await fleet.release()
    assert [node.files("*") for node in fleet.nodes] == [{}] * 3
    assert [node.shim.forgotten for node in fleet.nodes] == [[RUN]] * 3


async def test_slots_of_own_ranks_are_made_near_their_gpus(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent allocates the slots of its own ranks on the memory node of their GPU.

    If the kernel has no such memory node, the slots keep the default placement.
    """
    monkeypatch.setattr(worker.agent.agent, "gpu_nodes", lambda: (1,))
    await fleet.nodes[0].stop()
    fleet.nodes[0].start()
    await fleet.launch()
    assert [node.agent.store.memory_nodes for node in fleet.nodes] == [{Rank(0): 1}, {}, {}]
    await fleet.train(2)


def copies(fleet: Fleet) -> list[tuple[Step, float]]:
    """Return each holder's newest verified step, with the time at which it was verified, as the owners' agents report
    them.
    """
    members = [fleet.control.member(node.id) for node in fleet.nodes]
    return [copy for member in members if member is not None for shard in member.protection for copy in shard.verified]


def exit_of(fleet: Fleet, rank: int) -> ExitClass | None:
    member = fleet.control.member(fleet.nodes[rank].id)
    ended = member.ranks[0].exit if member is not None and member.ranks else None
    return ended.exit_class if ended is not None else None


def states(fleet: Fleet, node: Node) -> dict[Step, bytes]:
    """Return the digests of the node's newest states, as its agent reports them."""
    member = fleet.control.member(node.id)
    return dict(member.protection[0].states) if member is not None and member.protection else {}


async def come_back_empty(node: Node) -> None:
    """Replace a node's machine by a new one, without slots and without a promise on disk."""
    await node.gone()
    node.forget()
    node.start()


@pytest.mark.parametrize("is_newer", [False, True], ids=["control plane of this release", "of a newer release"])
async def test_a_new_node_gets_its_shard_from_a_peer(fleet: Fleet, is_newer: bool) -> None:
    fleet.control.is_newer_release = is_newer
    await fleet.launch()
    await fleet.train(4)
    lost = fleet.nodes[1]
    await until("the digest of step 4", lambda: 4 in states(fleet, lost))
    sealed = states(fleet, lost)
    await come_back_empty(lost)
    await fleet.launch()
    check_restored(fleet)
    member = fleet.control.member(lost.id)
    assert member is not None
    assert member.restored_from == ("peer",)
    assert fleet.plan is not None
    base = fleet.plan.base_step
    await until("the digest of the restored state", lambda: base in states(fleet, lost))
    assert states(fleet, lost)[base] == sealed[base]
    await fleet.train(base + 2)


def node_faults(fleet: Fleet, node: Node) -> list[str]:
    return [fault.code for fault in fleet.control.reports[node.id].faults]


async def test_a_node_promises_nothing_until_the_processes_of_its_ranks_have_ended(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    slow = fleet.nodes[1]
    slow.shim.remaining = 10**9
    preparing = asyncio.create_task(fleet.prepare())
    await until("the fault", lambda: "ranks_not_gone" in node_faults(fleet, slow))
    await until("the other promises", lambda: fleet.control.member(fleet.nodes[2].id))
    assert fleet.control.member(slow.id) is None
    slow.shim.remaining = 0
    slow.shim.proof.clear()  # the next attempt begins, and takes long
    sequence = fleet.control.reports[slow.id].sequence
    await until("later reports", lambda: fleet.control.reports[slow.id].sequence > sequence + 2)
    assert node_faults(fleet, slow) == ["ranks_not_gone"]
    slow.shim.proof.set()
    await preparing
    await until("the end of the fault", lambda: node_faults(fleet, slow) == [])
    member = fleet.control.member(slow.id)
    assert member is not None
    assert member.faults == ()
    assert {record.step for record in member.inventory} >= {2}
    await fleet.load()
    await fleet.start()
    check_restored(fleet)


async def test_a_node_keeps_a_run_until_the_processes_of_its_ranks_have_ended(fleet: Fleet) -> None:
    await fleet.launch()
    slow = fleet.nodes[1]
    slow.shim.remaining = 1
    await fleet.send(slow, Release(run=RUN))
    await until(
        "the fault",
        lambda: (
            (member := fleet.control.member(slow.id)) is not None
            and [fault.code for fault in member.faults] == ["ranks_not_gone"]
        ),
    )
    assert slow.shim.forgotten == []
    await fleet.release()
    assert slow.shim.forgotten == [RUN]


@pytest.mark.parametrize("slot_count", [4, 100], ids=["of which there is just enough", "of which there is plenty"])
async def test_shards_that_move_to_other_holders_leave_their_memory_behind(fleet: Fleet, slot_count: int) -> None:
    for node in fleet.nodes:
        node.agent.store.memory_bytes = slot_count * (CAPACITY_BYTES + HEADER_BYTES)
    await fleet.launch()
    await fleet.train(5)
    await fail(fleet)
    fleet.holder_distance = 2
    await fleet.launch()
    check_restored(fleet)
    assert fleet.plan is not None
    await fleet.train(fleet.plan.base_step + 3)
    for index, node in enumerate(fleet.nodes):
        member = fleet.control.member(node.id)
        assert member is not None
        assert member.faults == ()
        assert [shard.in_view for shard in member.protection] == [(node.id, fleet.nodes[(index + 2) % 3].id)]
        placed = {f"rank-{rank}.slot-{slot}" for rank in (index, (index + 1) % 3) for slot in range(2)}
        assert set(node.files()) == placed


async def test_a_flipped_bit_is_never_restored(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(4)
    await fleet.prepare()
    for path in fleet.nodes[1].files("rank-1.slot-*").values():
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 4000)
            byte = file.read(1)
            file.seek(HEADER_BYTES + 4000)
            file.write(bytes([byte[0] ^ 1]))
    await fleet.load()
    await fleet.start()
    check_restored(fleet)
    member = fleet.control.member(fleet.nodes[1].id)
    assert member is not None
    assert member.restored_from == ("peer",)


async def test_the_ranks_of_a_node_are_loaded_side_by_side(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node verifies its second rank's sources although the shard of its first rank is lost and arrives later.

    Each rank uses its sources in order.
    """
    fleet.per_node = 2
    await fleet.launch()
    await fleet.train(4)
    await fleet.prepare()
    node = fleet.nodes[1]
    for path in node.files(f"rank-{fleet.ranks_of(1)[0]}.slot-*").values():
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(bytes(100))
    begun: dict[SlotStore, set[Rank]] = {}
    verify, both = SlotStore.verify, asyncio.Barrier(2 * len(fleet.nodes))

    async def verify_with_all_others(store: SlotStore, slot: Slot, *, threads: int, is_pressing: bool) -> bool:
        begun.setdefault(store, set()).add(slot.file.header.owner_rank)
        assert is_pressing, "the ranks wait for it"
        await both.wait()
        return await verify(store, slot, threads=threads, is_pressing=is_pressing)

    monkeypatch.setattr(SlotStore, "verify", verify_with_all_others)
    await fleet.load()
    await fleet.start()
    check_restored(fleet)
    assert begun[node.agent.store] == set(fleet.ranks_of(1))
    members = [fleet.control.member(node.id) for node in fleet.nodes]
    assert [member.restored_from for member in members if member is not None] == [
        ("local", "local"),
        ("peer", "local"),
        ("local", "local"),
    ]


@pytest.mark.parametrize(
    ("error", "code", "is_kept"),
    [(PeerLost("cut"), FaultCode.SOURCE_UNAVAILABLE, True), (ShardRejected("no"), FaultCode.SOURCE_MISMATCH, False)],
)
async def test_what_others_fetch_is_kept_where_another_attempt_may_need_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, is_kept: bool
) -> None:
    """A new node without slots fetches the shards of its two ranks. The fetch of the first rank's shard fails.

    If only the connection failed, another attempt to load the plan may succeed. The node therefore completes the fetch
    of the second rank's shard and keeps the shard. If the first rank's shard was rejected, no attempt can succeed, and
    the node stops the second fetch.
    """
    fleet.per_node = 2
    await fleet.launch()
    await fleet.train(4)
    lost = fleet.nodes[1]
    await come_back_empty(lost)
    await fleet.prepare()
    failing, other = fleet.ranks_of(1)
    has_failed, fetched, fetch = asyncio.Event(), asyncio.Event(), base_loading.fetch_shard

    async def load_peer(dialler: Dialler, rank: Rank, *arguments: Any, **options: Any) -> None:
        if rank == failing:
            has_failed.set()
            raise error
        await has_failed.wait()
        await fetch(dialler, rank, *arguments, **options)
        fetched.set()

    monkeypatch.setattr(base_loading, "fetch_shard", load_peer)
    plan = fleet.make_plan()
    for node in fleet.nodes:
        await fleet.send(node, Load(plan=plan, key=bytes([fleet.generation]) * KEY_BYTES))

    def member() -> MemberReport | None:
        return fleet.control.member(lost.id)

    await until("the refusal", lambda: (found := member()) is not None and found.phase is MemberPhase.LOAD_FAILED)
    found = member()
    assert found is not None
    assert [fault.code for fault in found.faults] == [code]
    assert fetched.is_set() is is_kept
    assert (lost.agent.store.sealed(other, Content(Generation(1), plan.base_step)) is not None) is is_kept


# -- an agent restarted in each phase


async def restart(fleet: Fleet, node: Node) -> None:
    await node.stop()
    node.start()
    await fleet.connected()


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "member"])
async def test_restarted_while_promised(fleet: Fleet, number: int) -> None:
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    before = fleet.control.member(fleet.nodes[number].id)
    await restart(fleet, fleet.nodes[number])
    await until("the promise", lambda: fleet.members(MemberPhase.PROMISED))
    after = fleet.control.member(fleet.nodes[number].id)
    assert before is not None
    assert after is not None
    assert after.inventory == before.inventory
    assert {node.agent.listener.promised_run for node in fleet.nodes} == {RUN}, (
        "peers of the run's other generations are no strangers"
    )
    await fleet.load()
    await fleet.start()
    check_restored(fleet)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "member"])
async def test_restarted_while_loaded(fleet: Fleet, number: int) -> None:
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    await fleet.load()
    await restart(fleet, fleet.nodes[number])
    await until("the load", lambda: fleet.members(MemberPhase.LOADED))
    await fleet.start()
    check_restored(fleet)
    assert fleet.plan is not None
    await fleet.train(fleet.plan.base_step + 2)


async def test_a_restarted_agent_lets_ranks_keep_the_tree_that_they_stand_in(fleet: Fleet) -> None:
    """A restarted agent keeps the source tree from which its running ranks import."""
    await fleet.prepare()
    await fleet.load()
    node = fleet.nodes[1]
    tree = node.state_dir / "sources" / RUN
    before = tree.stat().st_ino
    node.shim.records = (
        RankRecord(
            run=RUN,
            generation=Generation(fleet.generation),
            rank=Rank(1),
            pid=os.getpid(),
            start_ticks=1,
            started_at_seconds=1.0,
            is_warm=False,
            stdout_path="",
            stderr_path="",
        ),
    )
    await restart(fleet, node)
    await until("the load", lambda: fleet.members(MemberPhase.LOADED))
    assert tree.stat().st_ino == before
    node.shim.records = ()  # no rank process uses the source tree
    await restart(fleet, node)
    await until("the load", lambda: fleet.members(MemberPhase.LOADED))
    assert tree.stat().st_ino != before


async def test_ranks_are_started_while_their_shards_are_loaded_and_restore_when_all_nodes_have_verified_theirs(
    fleet: Fleet,
) -> None:
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    await fleet.load()
    members = [node.agent.lifecycle.member for node in fleet.nodes]
    await until("ranks", lambda: all(member is not None and member.lines.waiting for member in members))
    assert {rank.connection_count for rank in fleet.ranks} == {0}, "nobody restores yet"
    await until("all to hear of their bases", lambda: all(rank.arriving is not None for rank in fleet.ranks))
    for rank in fleet.ranks:
        assert rank.arriving is not None
        half = read_agent_half(memoryview(rank.path_of(rank.arriving.word_path).read_bytes()))
        assert half is not None
        assert (half.load, half.verified) == (
            rank.arriving.load,
            rank.arriving.index_offset + rank.arriving.index_bytes,
        )
        assert (
            rank.path_of(rank.arriving.base_slot_path).read_bytes()[HEADER_BYTES:][: half.verified]
            == payload(rank.rank, rank.arriving.base_step)[0]
        )
    await fleet.start()
    check_restored(fleet)


async def test_a_rank_that_ends_before_the_start_is_reported_at_once(fleet: Fleet) -> None:
    await fleet.prepare()
    await fleet.load()
    await fleet.nodes[1].shim.end(Rank(1), ExitClass.ERROR)
    await until("the exit", lambda: exit_of(fleet, 1) is ExitClass.ERROR)
    assert fleet.members(MemberPhase.LOADED)


async def test_restarted_while_both_slots_of_its_rank_were_being_written(fleet: Fleet) -> None:
    """A node's agent dies while it fetches the start step.

    The restarted agent discards partial slots and fetches again.
    """
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    await fleet.load()
    node = fleet.nodes[1]
    await node.stop()
    for path in node.files("rank-1.slot-*").values():
        header = unpack_header(path.read_bytes())
        with path.open("r+b") as file:
            file.write(pack_header(replace(header, state=SlotState.WRITING)))
    node.start()
    await fleet.connected()
    await until("the load", lambda: fleet.members(MemberPhase.LOADED))
    await fleet.start()
    check_restored(fleet)
    assert fleet.plan is not None
    await fleet.train(fleet.plan.base_step + 2)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "member"])
async def test_restarted_while_running(fleet: Fleet, number: int) -> None:
    await fleet.launch()
    await fleet.train(4)
    ranks = fleet.ranks
    committed = min(rank.word.committed for rank in ranks)
    await restart(fleet, fleet.nodes[number])
    await until("its rank to come back", lambda: ranks[number].connection_count == 2)
    await until("the phase", lambda: fleet.members(MemberPhase.RUNNING))
    assert fleet.ranks == ranks, "no rank was started again"
    assert all(rank.word.committed >= committed for rank in ranks), "C never falls"
    await fleet.train(committed + 4)
    await until("every holder to count", lambda: all(is_in_full_view(fleet, node) for node in fleet.nodes))
    await fail(fleet)
    await fleet.launch()
    check_restored(fleet)


async def test_a_first_step_that_no_agent_was_there_for_is_reported_with_its_own_moment(fleet: Fleet) -> None:
    await fleet.launch()
    node, rank = fleet.nodes[1], fleet.ranks[1]
    await node.stop()
    rank.first_passed = int((time.monotonic() - 60.0) * 1e6)
    rank.step()
    rank.step()
    node.start()
    await fleet.connected()
    await until("its rank to come back", lambda: rank.connection_count == 2)
    rank.step()

    def told() -> float:
        member = fleet.control.member(node.id)
        status = member.ranks[0] if member is not None and member.ranks else None
        return status.first_passed_at_seconds if status is not None and status.boundary == rank.boundary else 0.0

    await until("the step", lambda: told() > 0.0)
    assert told() <= 940.0, "60 s ago: neither the newest step nor the moment at which the agent came back"


@pytest.mark.parametrize("is_at_holder", [True, False], ids=["holder", "elsewhere"])
async def test_a_base_that_a_restarted_owner_no_longer_finds_is_fetched_again(fleet: Fleet, is_at_holder: bool) -> None:
    await fleet.launch()
    await fleet.train(4)
    await fleet.prepare()
    await fleet.load()
    coordinator, owner, holder = fleet.nodes
    await coordinator.stop()  # no step is committed without the coordinator
    for node in (owner, holder):
        await fleet.send(node, Start(job=JOB, run=RUN, generation=Generation(fleet.generation)))
    await until(
        "their ranks",
        lambda: all(fleet.control.member(node.id).phase is MemberPhase.RUNNING for node in (owner, holder)),
    )  # type: ignore[union-attr]
    assert fleet.plan is not None
    await owner.stop()
    for path in owner.files("rank-1.slot-*").values():
        with path.open("r+b") as file:
            file.write(bytes(HEADER_BYTES))
    # Remove the holder from the plan's sources, as if the holder had received the shard only after the plan was made.
    if not is_at_holder:
        source = fleet.plan.ranks[1].sources[0]
        promise = PromiseFile(owner.state_dir / "promise")
        kept = promise.read()
        assert kept is not None
        assert kept.plan is not None
        ranks = list(kept.plan.ranks)
        ranks[1] = structs.replace(ranks[1], sources=(source,))
        promise.write(structs.replace(kept, plan=structs.replace(kept.plan, ranks=tuple(ranks))))
    owner.start()
    base = Content(fleet.plan.ranks[1].sources[0].origin_generation, fleet.plan.base_step)
    await until("the base", lambda: owner.agent.store.sealed(Rank(1), base) is not None)
    coordinator.start()
    await fleet.connected()
    await until("its load", lambda: fleet.control.member(coordinator.id).phase is MemberPhase.LOADED)  # type: ignore[union-attr]
    await fleet.start()
    await fleet.train(fleet.plan.base_step + 2)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "member"])
async def test_restarted_before_its_rank_was_started(
    fleet: Fleet, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent records that it starts its ranks, and dies before it requests a rank from the shim.

    The restarted agent starts the rank.
    """
    node = fleet.nodes[number]
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    await fleet.load()
    asked = asyncio.Event()

    async def ends(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(node.shim, "start_rank", ends)
        for each in fleet.nodes:
            await fleet.send(each, Start(job=JOB, run=RUN, generation=Generation(fleet.generation)))
        await asked.wait()
        await node.stop()
    node.start()
    await until(
        "ranks of this generation",
        lambda: all(rank.is_connected and rank.plan.generation == fleet.generation for rank in fleet.ranks),
    )
    check_restored(fleet)
    assert fleet.plan is not None
    await fleet.train(fleet.plan.base_step + 2)


def is_in_full_view(fleet: Fleet, node: Node) -> bool:
    member = fleet.control.member(node.id)
    return member is not None and all(shard.in_view == shard.holders for shard in member.protection)


async def test_the_port_of_the_agent_before_is_taken(fleet: Fleet) -> None:
    """Another process occupies the port of a restarted agent, so that peers cannot reach the node on it.

    The agent takes another port, which the plan of the next generation contains.
    """
    await fleet.launch()
    await fleet.train(2)
    node = fleet.nodes[1]
    port = node.agent.listener.port
    await node.stop()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        node.start()
        await fleet.connected()
        assert node.agent.listener.port != port
        await fleet.launch()
        check_restored(fleet)


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "member"])
async def test_restarted_in_the_middle_of_a_capture(fleet: Fleet, number: int) -> None:
    """An agent restarts while its rank captures into a granted slot.

    The restarted agent grants the slot to no other step, because the rank may still write to the slot.
    """
    await fleet.launch()
    await fleet.train(4)
    rank = fleet.ranks[number]
    rank.captures = False
    await until("a granted slot", fleet.is_expected)
    for each in fleet.ranks:
        each.step()
    await until("its capture", lambda: rank.word.proposed == rank.boundary and rank.word.slot >= 0)
    await restart(fleet, fleet.nodes[number])
    await until("its rank to come back", lambda: rank.connection_count == 2)
    rank.captures = True
    await fleet.train(rank.boundary + 2)


async def test_restarted_after_its_ranks_have_ended(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    for number, node in enumerate(fleet.nodes):
        await node.shim.end(Rank(number), ExitClass.SUCCESS)
    await until("the end", lambda: fleet.members(MemberPhase.EXITED))
    await restart(fleet, fleet.nodes[1])
    await until("the end again", lambda: fleet.members(MemberPhase.EXITED))
    assert exit_of(fleet, 1) is ExitClass.SUCCESS


async def test_ranks_that_hang_during_a_stop_leave_the_newest_commit_in_s3(fleet: Fleet) -> None:
    """Ranks hang and never reach the agreed stop, so the control plane has them killed and halts the generation.

    Each node then uploads its shard of the newest commit, although its rank has ended.
    """
    await fleet.launch()
    await fleet.train(3)
    committed = max(rank.word.committed for rank in fleet.ranks)
    await fleet.send(fleet.nodes[0], StopTraining(job=JOB, run=RUN, generation=Generation(fleet.generation)))
    await until("the stop", lambda: all(rank.word.stop > 0 for rank in fleet.ranks))
    for number, node in enumerate(fleet.nodes):
        await node.shim.end(Rank(number), ExitClass.HALTED)
    await until("the end", lambda: fleet.members(MemberPhase.EXITED))
    assert uploaded(fleet) == [set()] * 3
    await fleet.send(
        fleet.nodes[0], HaltRanks(job=JOB, run=RUN, generation=Generation(fleet.generation), reason="the job stops")
    )
    await until("uploads", lambda: all(uploaded(fleet)))
    assert uploaded(fleet) == [{committed}] * 3


async def test_all_ranks_rehearse_after_the_same_step_and_train_on(fleet: Fleet) -> None:
    """The control plane orders a rehearsal twice. All ranks leave their agents after the announced step and return.

    The control plane receives each rank's result.
    """
    await fleet.launch()
    await fleet.train(3)
    order = Rehearse(job=JOB, run=RUN, generation=Generation(fleet.generation), number=1, steps=2)
    await fleet.send(fleet.nodes[1], order)  # this node is not the coordinator
    await fleet.send(fleet.nodes[0], structs.replace(order, generation=Generation(fleet.generation - 1)))
    assert all(rank.word.rehearsal == NONE for rank in fleet.ranks)
    for _ in range(2):
        await fleet.send(fleet.nodes[0], order)
    await until("the announcement", lambda: all(rank.word.rehearsal > 0 for rank in fleet.ranks))
    (step,) = {rank.word.rehearsal for rank in fleet.ranks}
    assert {rank.word.rehearsal_steps for rank in fleet.ranks} == {2}
    assert step > max(rank.boundary for rank in fleet.ranks) + 2
    for rank in fleet.ranks:
        rank.look()
    while fleet.ranks[0].boundary < step:
        for rank in fleet.ranks:
            rank.step()
    await until(
        "the confirmation", lambda: all(rank.word.rehearsal_state is StopState.CONFIRMED for rank in fleet.ranks)
    )
    committed = min(rank.word.committed for rank in fleet.ranks)
    counts = [rank.connection_count for rank in fleet.ranks]
    for rank in fleet.ranks:
        rank.rehearse()
    await until(
        "the ranks are back",
        lambda: all(
            rank.is_connected and rank.connection_count > count for rank, count in zip(fleet.ranks, counts, strict=True)
        ),
    )
    result = Rehearsed(
        generation=Generation(fleet.generation),
        step=Step(step - 2),
        steps=2,
        seconds=1.0,
        verdict=RehearsalVerdict.PROVEN,
    )

    def results() -> list[Rehearsed | None]:
        members = [fleet.control.member(node.id) for node in fleet.nodes]
        return [status.rehearsed for member in members if member is not None for status in member.ranks]

    for rank in fleet.ranks:
        rank.report(result)
    await until("the results", lambda: results() == [result] * 3)
    member = fleet.control.member(fleet.nodes[0].id)
    assert member is not None
    assert member.round is not None
    assert (member.round.rehearsal_number, member.round.rehearsal_state) == (1, StopState.CONFIRMED)
    assert min(rank.word.committed for rank in fleet.ranks) >= committed
    await fleet.train(step + 2)
    assert [rank.word.rehearsal_state for rank in fleet.ranks] == [StopState.NONE] * 3
    assert all(report.member is not None and report.member.faults == () for report in fleet.control.reports.values())


async def test_a_checkpoint_that_a_person_wants_is_one_commit_of_all(fleet: Fleet) -> None:
    """A person requests a checkpoint, and the control plane sends the request twice.

    All nodes upload the same step once.
    """
    await fleet.launch()
    await fleet.train(3)
    wanted = max(rank.word.committed for rank in fleet.ranks)
    ask = TakeCheckpoint(job=JOB, run=RUN, generation=Generation(fleet.generation), step=wanted)
    await fleet.send(fleet.nodes[0], ask)
    # only the coordinator acts on the request, and this node is not the coordinator
    await fleet.send(fleet.nodes[1], ask)
    await fleet.train(wanted + 3)
    await fleet.send(fleet.nodes[0], ask)
    await fleet.train(wanted + 6)
    await until("uploads", lambda: all(uploaded(fleet)))
    first, *others = uploaded(fleet)
    assert others == [first, first]
    (step,) = first
    assert wanted <= step <= wanted + 3
    old = TakeCheckpoint(job=JOB, run=RUN, generation=Generation(fleet.generation - 1), step=Step(wanted + 6))
    await fleet.send(fleet.nodes[0], old)
    await fleet.train(wanted + 9)
    assert uploaded(fleet) == [first] * 3, "of another generation"


async def test_two_checkpoints_are_uploaded_at_the_same_time_and_the_newest_waits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two uploads run while a third step waits. The newer one ends first, and the waiting step's upload begins."""
    fleet.max_uploads = 2
    begun, ends = set[Step](), dict[Step, asyncio.Event]()
    upload_shard = worker.member.checkpoint_uploads.upload_shard

    async def slow(*given: Any, **named: Any) -> UploadedShard:
        step = given[1].header.step
        begun.add(step)
        await ends.setdefault(step, asyncio.Event()).wait()
        return await upload_shard(*given, **named)

    monkeypatch.setattr(worker.member.checkpoint_uploads, "upload_shard", slow)
    await fleet.launch()
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    shard, steps = member.shards[Rank(0)], list[Step]()
    for count in (3, 6, 9):
        await fleet.train(count)
        await until("a commit", lambda: member.contents.committed > max(steps, default=NONE))
        steps.append(member.contents.committed)
        member.uploads.begin(steps[-1])
    await until("two uploads", lambda: begun == set(steps[:2]))
    assert shard.pinned == set(steps[:2])
    assert [each.step for each in member.uploads.running()] == steps[:2]
    ends[steps[1]].set()
    await until("the third upload", lambda: shard.pinned == {steps[0], steps[2]})
    assert (shard.stored, [each.step for each in member.uploads.uploaded]) == (steps[1], [steps[1]])
    ends[steps[0]].set()
    ends.setdefault(steps[2], asyncio.Event()).set()
    await member.uploads.idle()
    assert (shard.stored, shard.pinned) == (steps[2], frozenset())
    assert {each.step for each in member.uploads.uploaded} == set(steps)


async def test_a_step_is_uploaded_after_the_slow_end_of_a_cancelled_upload(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    upload_shard = worker.member.checkpoint_uploads.upload_shard

    async def slow(*given: Any, **named: Any) -> UploadedShard:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()
        return await upload_shard(*given, **named)

    monkeypatch.setattr(worker.member.checkpoint_uploads, "upload_shard", slow)
    await fleet.launch()
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    await fleet.train(3)
    first = member.contents.committed
    member.uploads.begin(first)
    await begun.wait()
    await fleet.train(first + 1)
    await until("a commit", lambda: member.contents.committed > first)
    newest = member.contents.committed
    final = Step(newest + 1)
    member.uploads.apply_announcement(
        Announcement(
            generation=member.plan.generation, term=1, sequence=1, committed=newest, proposed=final, persist_step=final
        )
    )
    await asyncio.sleep(0)
    assert member.server is not None
    member.server.core = replace(member.server.core, persist=newest, is_finished=True)
    member.uploads.begin(newest)
    assert member.shards[Rank(0)].pinned == {first}
    may_end.set()
    await until("the upload", lambda: [each.step for each in member.uploads.uploaded] == [newest])


async def test_the_upload_of_the_committed_step_is_not_cancelled_for_the_final_step(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    step = member.contents.committed
    final = Step(step + 1)
    member.uploads.begin(step)
    member.uploads.apply_announcement(
        Announcement(
            generation=member.plan.generation, term=1, sequence=1, committed=step, proposed=final, persist_step=final
        )
    )
    await member.uploads.idle()
    assert [each.step for each in member.uploads.uploaded] == [step]


async def test_the_final_step_takes_the_slot_of_an_upload_that_does_not_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object, **__: object) -> UploadedShard:
        await asyncio.Event().wait()
        raise AssertionError

    await fleet.launch()
    await fleet.train(3)
    shards = [
        shard
        for node in fleet.nodes
        if node.agent.lifecycle.member is not None
        for shard in node.agent.lifecycle.member.shards.values()
    ]
    with monkeypatch.context() as slow:
        slow.setattr(worker.member.checkpoint_uploads, "upload_shard", hang)
        wanted = max(rank.word.committed for rank in fleet.ranks)
        await fleet.send(
            fleet.nodes[0], TakeCheckpoint(job=JOB, run=RUN, generation=Generation(fleet.generation), step=wanted)
        )
        await fleet.train(wanted + 2)
        await until("the uploads", lambda: all(max(shard.pinned, default=NONE) >= wanted for shard in shards))
        await fleet.train(max(step for shard in shards for step in shard.pinned) + 1)
    for _ in range(5):
        for rank in fleet.ranks:
            rank.step()
    assert all(rank.word.committed < rank.boundary - 2 for rank in fleet.ranks), "no slot was free for a later step"
    for rank in fleet.ranks:
        rank.close()

    def is_committed() -> bool:
        for rank in fleet.ranks:
            rank.look()
        return all(rank.word.committed == rank.boundary for rank in fleet.ranks)

    await until("the commit of the final step", is_committed)
    await until("its upload", lambda: all(uploaded(fleet)))
    assert uploaded(fleet) == [{fleet.ranks[0].boundary}] * 3


async def test_of_failed_uploads_the_newest_of_a_rank_is_told_until_one_succeeds(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> UploadedShard:
        raise StoreUnavailable("it is down")

    await fleet.launch()
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    shard = member.shards[Rank(0)]
    pauses = RecordedPauses()
    monkeypatch.setattr(member.uploads, "pause", pauses)

    async def upload(step: int) -> list[str]:
        await fleet.train(step)
        await until("its commit", lambda: member.contents.committed > shard.uploaded)
        member.uploads.begin(member.contents.committed)
        await member.uploads.idle()
        now = asyncio.get_running_loop().time()
        return [fault.message for fault in member.status.faults(now) if fault.code == "upload_failed"]

    with monkeypatch.context() as down:
        down.setattr(worker.member.checkpoint_uploads, "upload_shard", refuse)
        for step in (3, 6, 9):
            (message,) = await upload(step)
            assert message == f"step {shard.uploaded} of rank 0 is not in S3: it is down"
            assert pauses.count == UPLOAD_TRIES - 1
            assert not shard.pinned, "the slot is free again"
            pauses.count = 0
    assert await upload(12) == []


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (StoreUnavailable("it is down"), 3),
        (StoreDenied("access denied"), 1),
        (CorruptSlot("too deep"), 1),
        (KeyError(), 1),
    ],
    ids=["down", "denied", "corrupt", "unexpected"],
)
async def test_a_failed_upload_is_tried_again_for_the_same_step(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int
) -> None:
    """The agent uploads a step again after two failures of the store, and then succeeds.

    It tries only once if the store denies access, because the same call would be denied again.
    """
    await fleet.launch()
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    shard, tried, pinned = member.shards[Rank(0)], [], []
    upload_shard = worker.member.checkpoint_uploads.upload_shard

    async def failing(*given: Any, **named: Any) -> UploadedShard:
        tried.append(shard.uploaded)
        pinned.extend(shard.pinned)
        if len(tried) < 3:
            raise error
        return await upload_shard(*given, **named)

    monkeypatch.setattr(member.uploads, "pause", RecordedPauses())
    monkeypatch.setattr(worker.member.checkpoint_uploads, "upload_shard", failing)
    await fleet.train(3)
    await until("a commit", lambda: member.contents.committed > 0)
    step = member.contents.committed
    member.uploads.begin(step)
    await member.uploads.idle()
    assert tried == pinned == [step] * tries
    assert [each.step for each in member.uploads.uploaded] == ([step] if tries == 3 else [])
    assert (shard.pinned, shard.stored) == (frozenset(), step if tries == 3 else NONE)
    failed = [
        fault.message
        for fault in member.status.faults(asyncio.get_running_loop().time())
        if fault.code == "upload_failed"
    ]
    assert len(failed) == (tries == 1)


@pytest.mark.parametrize("is_frozen", [True, False])
async def test_the_checkpoints_of_all_ranks_share_one_object_of_equal_tensors(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    base = bytes(range(256)) * 64
    entry = TensorEntry("model/base", "uint8", (len(base),), 0, len(base), is_frozen=is_frozen)

    def partly_equal(rank: int, step: int) -> tuple[bytes, int]:
        data = base + agent_fleet.state(rank, step)[len(base) :]
        return data + pack_index(SlotIndex(tensors=(entry,), values=b"")), len(data)

    monkeypatch.setattr(worker.member.checkpoint_uploads, "SharedTensors", partial(SharedTensors, least_bytes=1))
    monkeypatch.setattr(worker.member.upload_division, "divide", partial(divide, least_bytes=1))
    monkeypatch.setattr(agent_fleet, "payload", partly_equal)
    sent: list[str] = []
    put_stream = fleet.objects.put_stream

    def counted(reference: ObjectReference, *given: Any, **named: Any) -> StoredObject:
        sent.append(reference.key)
        return put_stream(reference, *given, **named)

    monkeypatch.setattr(fleet.objects, "put_stream", counted)
    await fleet.launch()
    members = [member for node in fleet.nodes if (member := node.agent.lifecycle.member) is not None]
    for step in (3, 6):
        await fleet.train(step)
        for member in members:
            await until("a commit", lambda contents=member.contents, step=step: contents.committed >= step)
        committed = min(member.contents.committed for member in members)
        for member in members:
            member.uploads.begin(committed)
        for member in members:
            await member.uploads.idle()
    uploads = [upload for member in members for upload in member.uploads.uploaded]
    assert len(uploads) == 2 * len(members)
    named = {(upload.frozen, upload.replicated) for upload in uploads}
    keys = {shared.key for objects in named for kind in objects for shared in kind}
    assert len(keys) == len(named) == (1 if is_frozen else 2), "a frozen object serves both checkpoints"
    objects = fleet.objects.objects[uploads[0].object.bucket]
    assert sorted(key for key in sent if "/rank=" not in key) == sorted(keys), "each object is sent once"
    assert [base in objects[upload.object.key] for upload in uploads] == [False] * len(uploads)


class RecordedPauses:
    """Counts the pauses between tries instead of waiting."""

    count = 0

    async def __call__(self, seconds: float) -> None:
        self.count += 1
        assert 0.0 <= seconds <= FIRST_PAUSE_SECONDS * 2 ** (self.count - 1)


async def test_an_upload_without_progress_is_reported_with_its_object(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def hang(
        *_: object, on_begun: Callable[[str, int], None], on_stored: Callable[[int], None], **__: object
    ) -> UploadedShard:
        on_begun("s3://bucket/key", 1000)
        on_stored(300)
        begun.set()
        await go.wait()
        raise ObjectMissing("the bucket does not exist")

    await fleet.launch()
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    monkeypatch.setattr(worker.member.checkpoint_uploads, "upload_shard", hang)
    await fleet.train(3)
    await until("its commit", lambda: member.contents.committed > 0)
    member.uploads.begin(member.contents.committed)
    await begun.wait()
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time()
    assert member.uploads.stalls(now) == ()
    report = fleet.nodes[0].agent.reports.report().member
    assert report is not None
    (running,) = report.running_uploads
    assert (running.rank, running.step) == (0, member.contents.committed)
    assert (running.object_name, running.stored_bytes, running.object_bytes) == ("s3://bucket/key", 300, 1000)
    (fault,) = member.uploads.stalls(now + STALL_SECONDS)
    assert fault.code == "upload_stalled"
    assert "rank 0" in fault.message
    assert "s3://bucket/key, 300 of 1,000 bytes" in fault.message
    assert fault in member.status.faults(now + STALL_SECONDS)
    go.set()
    await member.uploads.idle()
    assert member.uploads.stalls(now + STALL_SECONDS) == ()
    assert member.uploads.running() == ()


async def test_uploads_that_an_ended_agent_left_are_aborted(fleet: Fleet) -> None:
    await fleet.launch()
    assert fleet.plan is not None
    prefix = fleet.plan.checkpoint.prefix
    folder = f"{prefix.key}run={RUN}/gen={fleet.generation}/step=7/ab"
    own, other = f"{folder}/rank=1.safetensors", f"{prefix.key}run={'0' * 32}/gen=1/step=7/ab/rank=1.safetensors"
    unfinished = fleet.objects.unfinished[prefix.bucket]
    unfinished |= {own, other}
    await fleet.nodes[1].stop()
    fleet.nodes[1].start()
    await fleet.connected()
    await until("the end of its upload", lambda: unfinished == {other})


async def test_the_coordinator_keeps_the_distance_that_its_own_node_can_pay_for(fleet: Fleet) -> None:
    await fleet.launch()
    member, other = (node.agent.lifecycle.member for node in fleet.nodes[:2])
    assert member is not None
    assert member.server is not None
    assert other is not None
    member.lines.traffic.on_distance(5)
    other.lines.traffic.on_distance(7)
    assert (member.server.core.distance, other.server) == (5, None)


async def test_a_halt_without_a_stop_uploads_nothing(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    for node in fleet.nodes:
        await fleet.send(
            node, HaltRanks(job=JOB, run=RUN, generation=Generation(fleet.generation), reason="a rank died")
        )
    for number, node in enumerate(fleet.nodes):
        await node.shim.end(Rank(number), ExitClass.HALTED)
    await until("the end", lambda: fleet.members(MemberPhase.EXITED))
    assert uploaded(fleet) == [set()] * 3


def uploaded(fleet: Fleet) -> list[set[int]]:
    members = [fleet.control.member(node.id) for node in fleet.nodes]
    return [{shard.step for shard in member.uploads} if member is not None else set() for member in members]


async def test_a_rank_ends_while_no_agent_is_there(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    await fleet.nodes[1].stop()
    await fail(fleet)
    fleet.nodes[1].start()
    await fleet.connected()
    await until("its exit", lambda: exit_of(fleet, 1) is ExitClass.KILLED)
    await fleet.launch()
    check_restored(fleet)


async def test_all_agents_restart_at_once(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(4)
    committed = min(rank.word.committed for rank in fleet.ranks)
    await asyncio.gather(*(node.stop() for node in fleet.nodes))
    for rank in fleet.ranks:
        rank.step()  # the ranks continue to train without their agents
    for node in fleet.nodes:
        node.start()
    await until("the ranks", lambda: all(rank.connection_count == 2 and rank.is_connected for rank in fleet.ranks))
    await fleet.train(committed + 3)


# -- commands that arrive late, twice, or too early


async def test_commands_are_repeated_without_harm(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    ranks = fleet.ranks
    assert fleet.plan is not None
    generation = fleet.plan.generation
    for node in fleet.nodes:
        await fleet.send(node, Prepare(job=JOB, run=RUN, generation=generation, parent=Generation(0)))
        await fleet.send(node, Load(plan=fleet.plan, key=bytes(KEY_BYTES)))
        await fleet.send(node, Start(job=JOB, run=RUN, generation=generation))
        await fleet.send(node, Prepare(job=JOB, run=RUN, generation=Generation(generation - 1), parent=Generation(0)))
    await fleet.train(5)
    assert fleet.ranks == ranks
    assert fleet.members(MemberPhase.RUNNING)


async def test_a_promise_is_told_only_when_it_is_true(fleet: Fleet) -> None:
    """While ranks of an older generation may be alive, a node reports neither the old generation nor its new
    promise.
    """
    await fleet.launch()
    await fleet.train(3)
    node = fleet.nodes[1]
    node.shim.proof.clear()
    await fleet.send(node, Prepare(job=JOB, run=RUN, generation=Generation(2), parent=Generation(1)))
    await until("the ranks to end", lambda: node.shim.ended)
    sequence = fleet.control.reports[node.id].sequence
    await until("two more reports", lambda: fleet.control.reports[node.id].sequence >= sequence + 2)
    assert fleet.control.member(node.id) is None
    node.shim.proof.set()
    await until("the promise", lambda: fleet.control.member(node.id))
    told = fleet.control.member(node.id)
    assert told is not None
    assert (told.generation, told.phase) == (2, MemberPhase.PROMISED)


async def test_an_agent_that_is_killed_while_it_forgets_a_run_starts_none_of_its_ranks(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.launch()
    await fleet.train(3)
    node = fleet.nodes[1]
    forgets = asyncio.Event()

    async def ends(_: object) -> None:
        forgets.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(node.agent.supplies, "forget", ends)
    await fleet.send(node, Release(run=RUN))
    await forgets.wait()
    await node.stop()
    await node.shim.forget_started()
    node.start()
    await until("what it says", lambda: fleet.control.member(node.id))
    told = fleet.control.member(node.id)
    assert told is not None
    assert (told.phase, told.inventory) == (MemberPhase.PROMISED, ())
    assert not node.shim.ranks
    await fleet.release()


async def test_a_disk_that_takes_no_promise_for_a_while_costs_a_while(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk cannot store a promise. The agent starts no work that depends on the promise, and keeps running.

    When the control plane repeats the command after the disk has space, the agent stores the promise.
    """
    await fleet.connected()
    node = fleet.nodes[1]
    refused: set[MemberPhase] = set()
    write = node.agent.promises.write

    def refuse(promise: Promise | None) -> None:
        if promise is not None and promise.phase in refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(promise)

    monkeypatch.setattr(node.agent.promises, "write", refuse)

    async def is_refused(message: Prepare | Load | Start, phase: MemberPhase) -> MemberReport | None:
        caplog.clear()
        refused.add(phase)
        for _ in range(2):
            await fleet.send(node, message)
        await until("the refusal", lambda: "No space left on device" in caplog.text)
        sequence = fleet.control.reports[node.id].sequence
        await until("two more reports", lambda: fleet.control.reports[node.id].sequence >= sequence + 2)
        assert caplog.text.count("No space left on device") == 1, "it is said once"
        refused.clear()
        return fleet.control.member(node.id)

    assert (
        await is_refused(
            Prepare(job=JOB, run=RUN, generation=Generation(1), parent=Generation(0)), MemberPhase.PROMISED
        )
        is None
    )
    await fleet.prepare()
    told = await is_refused(Load(plan=fleet.make_plan(), key=bytes([1]) * KEY_BYTES), MemberPhase.LOADING)
    assert told is not None
    assert told.phase is MemberPhase.PROMISED
    refused.add(MemberPhase.LOADED)
    await fleet.load()
    told = await is_refused(Start(job=JOB, run=RUN, generation=Generation(1)), MemberPhase.RUNNING)
    assert told is not None
    assert told.phase is MemberPhase.LOADED
    assert node.shim.ranks[Rank(1)].connection_count == 0, "its rank trains only when the next agent would know of it"
    await fleet.start()
    await fleet.train(3)
    refused.add(MemberPhase.EXITED)
    for number, each in enumerate(fleet.nodes):
        await each.shim.end(Rank(number), ExitClass.SUCCESS)
    await until("the end", lambda: fleet.members(MemberPhase.EXITED))


async def test_a_disk_that_takes_nothing_keeps_no_node_from_letting_go(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.launch()
    write = PromiseFile.write

    def full(file: PromiseFile, promise: Promise | None) -> None:
        if promise is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, promise)

    monkeypatch.setattr(PromiseFile, "write", full)
    await fleet.release()


async def test_nothing_of_an_older_generation_is_acted_on(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    old = fleet.plan
    assert old is not None
    await fleet.prepare()
    for node in fleet.nodes:
        await fleet.send(node, Load(plan=old, key=bytes([1]) * KEY_BYTES))
        await fleet.send(node, Start(job=JOB, run=RUN, generation=old.generation))
        await fleet.send(node, StopTraining(job=JOB, run=RUN, generation=old.generation))
    await fleet.load()
    await fleet.start()
    check_restored(fleet)


async def test_a_failure_between_prepare_and_start(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    await fleet.load()
    await fleet.launch()  # launch another generation instead of the loaded one, which never starts
    check_restored(fleet)
    assert fleet.plan is not None
    await fleet.train(fleet.plan.base_step + 2)


async def test_what_cannot_be_verified_is_reported(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(3)
    await fleet.prepare()
    plan = fleet.make_plan()
    for node in fleet.nodes:
        for path in node.files("rank-2.slot-*").values():
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES + 10)
                file.write(b"nonsense")
    for node in fleet.nodes:
        await fleet.send(node, Load(plan=plan, key=bytes([2]) * KEY_BYTES))

    def is_refused() -> bool:
        member = fleet.control.member(fleet.nodes[2].id)
        return member is not None and member.phase is MemberPhase.LOAD_FAILED

    await until("the refusal", is_refused)
    member = fleet.control.member(fleet.nodes[2].id)
    assert member is not None
    (fault,) = member.faults
    assert f"step {plan.base_step} of rank 2" in fault.message
    assert not fault.is_permanent
    await fleet.prepare()
    member = fleet.control.member(fleet.nodes[2].id)
    assert member is not None
    offered = [slot.step for slot in member.inventory if slot.owner_rank == 2]
    assert plan.base_step not in offered, (
        "the node that found out does not offer it again; of the peer's copy the control plane knows"
    )


async def test_that_ranks_would_start_warm_is_told_as_soon_as_it_is_so(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    await node.gone()
    node.shim.is_warm = False
    node.start()
    await fleet.connected()
    assert not fleet.control.reports[node.id].is_warm
    assert node.shim.gone_seconds == TIMEOUTS.gone_seconds, "the ladder's, as soon as the control plane has told it"
    node.shim.is_warm = True
    node.shim.changed.notify()
    await until("the next report", lambda: fleet.control.reports[node.id].is_warm)
    node.shim.is_warm = False  # The node cannot start ranks warm, as after the death of its template process.
    await until("a report after it", lambda: not fleet.control.reports[node.id].is_warm)


@pytest.mark.security
async def test_values_that_a_released_run_logged_do_not_delay_those_of_the_next_run(fleet: Fleet) -> None:
    await fleet.launch()
    outbox = fleet.nodes[0].agent.outbox
    point = MetricPoint(generation=Generation(1), step=Step(1), values={"loss": 1.0}, at_seconds=0.0)
    outbox.add(RUN, [point] * (2 * MAX_SENT))
    await fleet.release()
    await until("one message at most", lambda: 0 < len(outbox) <= MAX_SENT)
