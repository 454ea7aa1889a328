"""Tests the choice of the step from which a job with parity resumes, for any shards and shares on the remaining nodes.

Each slot is drawn independently: intact, missing (late, lost or emptied by a restarted agent), or of another capture of
the step (stale). A reference computes by brute force which shards exist or follow from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import recovery
from control_plane.core.observed.steps import GenerationRecord
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, holder_of, is_share, share_owner
from everstep.protocol.plan import SlotRecord

ORIGIN = Generation(1)
STEPS = (1, 2, 3)
GROUPS = ((0, 1, 2), (3, 4))
WORLD = 5
LINEAGE = (
    GenerationRecord(generation=ORIGIN, parent=Generation(0), base_step=Step(0), world_size=WORLD, was_started=True),
)


def group_of(rank: int) -> tuple[int, ...]:
    return next(group for group in GROUPS if rank in group)


def node(rank: int) -> NodeId:
    return NodeId(f"n{rank}")


@dataclass(frozen=True)
class Memory:
    """The shards and shares of one step on all nodes. A capture is the number of a rank's attempt to make the step."""

    shards: dict[int, int]
    """The capture of each rank's shard. Ranks without a shard are missing."""
    shares: dict[int, dict[int, int]]
    """The captures that each rank's share contains, by contributor. Ranks without a share are missing."""


def memories() -> st.SearchStrategy[Memory]:
    """Return a strategy for the memory of one step, in which most slots are intact."""
    is_there = st.sampled_from([True, True, True, True, False])
    capture = st.sampled_from([0] * 9 + [1])
    return st.builds(
        lambda shards, shares, is_kept, is_shared: Memory(
            {rank: shards[rank] for rank in range(WORLD) if is_kept[rank]},
            {
                rank: {other: shares[rank][other] for other in group_of(rank) if other != rank}
                for rank in range(WORLD)
                if is_shared[rank]
            },
        ),
        st.lists(capture, min_size=WORLD, max_size=WORLD),
        st.lists(st.lists(capture, min_size=WORLD, max_size=WORLD), min_size=WORLD, max_size=WORLD),
        st.lists(is_there, min_size=WORLD, max_size=WORLD),
        st.lists(is_there, min_size=WORLD, max_size=WORLD),
    )


def digest(*numbers: int) -> bytes:
    return bytes([*numbers]).ljust(16, b"\0")


def contribution(rank: int, step: int, capture: int) -> Contribution:
    return Contribution(
        rank=Rank(rank),
        payload_bytes=100,
        digest=digest(rank, step, capture),
        layout_hash=b"",
        index_offset=90,
        index_bytes=10,
    )


def inventory(rank: int, memory: dict[int, Memory]) -> tuple[SlotRecord, ...]:
    """Return the slots of a rank's node: its shards and its shares."""
    slots: list[SlotRecord] = []
    for step, held in memory.items():
        for owner, payload_digest, contributions in (
            (Rank(rank), None if rank not in held.shards else digest(rank, step, held.shards[rank]), ()),
            (
                share_owner(Rank(rank)),
                None if rank not in held.shares else digest(100 + rank, step, *held.shares[rank].values()),
                tuple(contribution(other, step, capture) for other, capture in held.shares.get(rank, {}).items()),
            ),
        ):
            if payload_digest is not None:
                slots.append(
                    SlotRecord(
                        owner_rank=owner,
                        origin_generation=ORIGIN,
                        step=Step(step),
                        payload_bytes=100,
                        digest=payload_digest,
                        layout_hash=b"",
                        contributions=contributions,
                    )
                )
    return tuple(slots)


def is_available(rank: int, held: Memory, alive: set[int]) -> bool:
    """Return whether a rank's shard is on a remaining node, or can be rebuilt by the rest of its group."""
    if rank in alive and rank in held.shards:
        return True
    others = [other for other in group_of(rank) if other != rank]
    if not all(other in alive and other in held.shards and other in held.shares for other in others):
        return False
    lost = {held.shares[other][rank] for other in others}
    return len(lost) == 1 and all(
        held.shares[one][other] == held.shards[other] for one in others for other in others if other != one
    )


def survey_of(memory: dict[int, Memory], alive: set[int]) -> recovery.Survey:
    return recovery.Survey(
        owners=[node(rank) if rank in alive else NodeId(f"new{rank}") for rank in range(WORLD)],
        inventories={node(rank): inventory(rank, memory) for rank in sorted(alive)},
        path=recovery.path_of(LINEAGE, ORIGIN),
        worlds=recovery.worlds_of(LINEAGE),
        committed=Step(max(STEPS)),
    )


MEMORY = st.fixed_dictionaries(dict.fromkeys(STEPS, memories()))


@given(MEMORY, st.sets(st.integers(0, WORLD - 1), max_size=3))
def test_the_base_is_the_newest_step_whose_shards_exist_or_can_be_rebuilt(
    memory: dict[int, Memory], lost: set[int]
) -> None:
    alive = set(range(WORLD)) - lost
    restore = recovery.choose(survey_of(memory, alive))
    whole = [step for step in STEPS if all(is_available(rank, memory[step], alive) for rank in range(WORLD))]
    assert restore.base_step == max(whole, default=0)
    if not whole:
        return
    held = memory[restore.base_step]
    for rank, sources in enumerate(restore.sources):
        assert (sources[0].kind == "local") == (rank in alive and rank in held.shards)
        is_rebuildable = is_available(rank, held, alive - {rank})
        if sources[0].kind == "local":
            named = {held.shares[other][rank] for other in group_of(rank) if other != rank and is_rebuildable}
            is_rebuildable = named == {held.shards[rank]}
        assert [source.kind for source in sources] == ["local"] * (sources[0].kind == "local") + (
            ["parity"] * is_rebuildable
        )
        source = sources[-1]
        if source.rebuild is not None:
            others = [other for other in group_of(rank) if other != rank]
            assert source.rebuild.stripe == group_of(rank)
            assert source.digest == source.rebuild.lost.digest
            assert source.digest == digest(rank, restore.base_step, held.shares[others[0]][rank])
            for survivor, other in zip(source.rebuild.survivors, others, strict=True):
                assert (survivor.rank, survivor.node_id) == (other, node(other))
                assert survivor.shard_digest == digest(other, restore.base_step, held.shards[other])
                assert survivor.share_digest == digest(100 + other, restore.base_step, *held.shares[other].values())


@given(MEMORY, st.sets(st.integers(0, WORLD - 1), max_size=3))
def test_a_node_keeps_what_a_restore_of_the_base_needs_and_one_slot_for_what_it_lacks(
    memory: dict[int, Memory], lost: set[int]
) -> None:
    survey = survey_of(memory, set(range(WORLD)) - lost)
    restore = recovery.choose(survey)
    for holder, slots in survey.inventories.items():
        for owner in {slot.owner_rank for slot in slots}:
            kept = [each.step for each in restore.keep[holder] if each.owner_rank == owner]
            held = [slot.step for slot in slots if slot.owner_rank == owner]
            assert is_share(owner) or holder == node(holder_of(owner))
            assert set(kept) <= set(held)
            assert (restore.base_step in kept) == (restore.base_step in held)
            assert restore.base_step in (0, *held) or len(kept) < survey.slot_count


@given(st.sampled_from(GROUPS), st.data())
def test_a_group_that_lost_one_member_since_a_whole_commit_loses_no_step(
    group: tuple[int, ...], data: st.DataObject
) -> None:
    """Every member of every group has its shard and its share of the committed step. One node per group is lost.

    The job resumes from the committed step or from a newer one.
    """
    whole = Memory(
        dict.fromkeys(range(WORLD), 0),
        {rank: {other: 0 for other in group_of(rank) if other != rank} for rank in range(WORLD)},
    )
    newer = data.draw(memories())
    lost = {data.draw(st.sampled_from(each)) for each in GROUPS if each == group or data.draw(st.booleans())}
    restore = recovery.choose(survey_of({1: newer, 2: whole, 3: data.draw(memories())}, set(range(WORLD)) - lost))
    assert restore.base_step >= 2
    assert restore.forgotten == ()


def whole_memory() -> Memory:
    return Memory(
        dict.fromkeys(range(WORLD), 0),
        {rank: {other: 0 for other in group_of(rank) if other != rank} for rank in range(WORLD)},
    )


@given(st.sampled_from(range(WORLD)), st.sets(st.integers(0, WORLD - 1)))
def test_fewer_ranks_resume_from_a_newer_step_only_if_all_its_shares_are_sealed(lost: int, unsealed: set[int]) -> None:
    """One node is lost without a replacement. Step 2 is committed, and some shares of step 3 may not be sealed yet.

    The job resumes from step 3 only if all its shares are sealed, and otherwise from step 2.
    """
    alive = set(range(WORLD)) - {lost}
    newer = whole_memory()
    for rank in unsealed:
        del newer.shares[rank]
    survey = replace(
        survey_of({2: whole_memory(), 3: newer}, alive),
        owners=[node(rank) for rank in sorted(alive)],
        committed=Step(2),
    )
    restore = recovery.choose(survey)
    assert restore.base_step == (2 if unsealed & alive else 3)
    assert restore.relayout is not None
    assert [sources[0].kind for sources in restore.relayout.shards] == [
        "parity" if rank == lost else "peer" for rank in range(WORLD)
    ]
    for holder, kept in restore.keep.items():
        rank = next(rank for rank in alive if node(rank) == holder)
        assert {(each.owner_rank, each.step) for each in kept} == {
            (rank, restore.base_step),
            (share_owner(Rank(rank)), restore.base_step),
        }
