"""Tests which slots may be overwritten, and which steps must be kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ObjectReference
from everstep.protocol.slot import SlotState
from worker.core.slots import (
    EMPTY,
    Content,
    SlotView,
    being_written,
    find_sealed,
    is_superseded,
    kept,
    may_upload,
    memory_nodes,
    newest_uploads,
    retry_pause,
    slot_bytes_per_node,
    slots_per_shard,
    writable,
)


def content(step: int, origin: int = 1) -> Content:
    return Content(Generation(origin), Step(step))


def sealed(step: int, origin: int = 1, **more: bool) -> SlotView:
    return SlotView(SlotState.SEALED, content(step, origin), **more)


def writing(step: int, **more: bool) -> SlotView:
    return SlotView(SlotState.WRITING, content(step), **more)


@pytest.mark.parametrize(
    ("slots", "keep", "index"),
    [
        ((sealed(7), EMPTY), (7,), 1),
        ((EMPTY, EMPTY), (), 0),
        ((sealed(7), sealed(6)), (7,), 1),
        ((sealed(7), sealed(6)), (6,), 0),
        ((sealed(7), sealed(6)), (), 1),
        ((sealed(7), writing(8)), (7,), 1),
        ((sealed(6), writing(8)), (), 1),
        ((sealed(7), sealed(6)), (6, 7), None),
        ((sealed(7), writing(8, is_busy=True)), (7,), None),
        ((sealed(7), sealed(6, is_pinned=True)), (7,), None),
        ((sealed(7), sealed(6, is_pinned=True), sealed(5)), (7,), 2),
        ((sealed(7), writing(7)), (7,), 1),
        ((sealed(7, origin=2), sealed(6)), (7,), 1),
        ((), (), None),
    ],
)
def test_writable(slots: Sequence[SlotView], keep: Sequence[int], index: int | None) -> None:
    assert writable(slots, [content(step) for step in keep]) == index


@given(
    st.lists(
        st.builds(
            SlotView,
            st.sampled_from(SlotState),
            st.builds(content, st.integers(0, 3), st.integers(1, 2)),
            is_pinned=st.booleans(),
            is_busy=st.booleans(),
        ),
        max_size=3,
    ),
    st.sets(st.builds(content, st.integers(0, 3), st.integers(1, 2)), max_size=3),
)
def test_what_must_survive_is_never_offered(slots: list[SlotView], keep: set[Content]) -> None:
    index = writable(slots, keep)
    free = [
        slot
        for slot in slots
        if not (slot.is_pinned or slot.is_busy or (slot.state is SlotState.SEALED and slot.content in keep))
    ]
    if index is None:
        assert not free
    else:
        assert slots[index] in free
        if slots[index].state is SlotState.SEALED:
            assert all(slot.state is SlotState.SEALED for slot in free)


@pytest.mark.parametrize(
    ("committed", "planned", "base", "expected"),
    [
        (None, (), None, set()),
        (None, (content(3), content(5)), content(5), {content(3), content(5)}),
        (None, (content(3),), content(5), {content(3), content(5)}),
        (content(9), (content(3),), content(5), {content(9)}),
    ],
)
def test_kept(
    committed: Content | None, planned: Sequence[Content], base: Content | None, expected: set[Content]
) -> None:
    assert kept(committed, planned, base) == expected


def test_an_unsealed_slot_is_overwritten_after_an_empty_one_also_at_step_0() -> None:
    assert writable((writing(0), EMPTY), ()) == 1


@pytest.mark.parametrize(
    ("slots", "index"),
    [
        ((sealed(8), writing(8)), 1),
        ((writing(7), writing(8)), 1),
        ((writing(8, is_pinned=True),), None),
        ((writing(8, is_busy=True),), None),
        ((sealed(8), EMPTY), None),
    ],
)
def test_a_capture_that_still_runs_is_granted_its_slot_again(slots: Sequence[SlotView], index: int | None) -> None:
    assert being_written(slots, content(8)) == index


def test_only_the_very_content_is_found_and_only_sealed() -> None:
    slots = (writing(7), sealed(7, origin=2), sealed(7))
    assert find_sealed(slots, content(7)) == 2
    assert find_sealed(slots[:2], content(7)) is None


@pytest.mark.parametrize(
    ("gpu_nodes", "expected"),
    [
        ((0, 0, 1, 1), {Rank(8): 0, Rank(9): 0, Rank(10): 1}),
        ((1, -1, 0), {Rank(8): 1, Rank(10): 0}),
        ((1,), {Rank(8): 1}),
        ((), {}),
    ],
)
def test_a_ranks_slots_lie_near_the_gpu_that_has_its_local_rank(
    gpu_nodes: Sequence[int], expected: dict[Rank, int]
) -> None:
    assert memory_nodes((Rank(8), Rank(9), Rank(10)), gpu_nodes) == expected


def test_memory_of_a_node() -> None:
    assert slot_bytes_per_node(copies=2, shard_bytes=[10] * 8) == 320
    assert slot_bytes_per_node(copies=3, shard_bytes=[10], slot_count=3) == 90
    assert slot_bytes_per_node(copies=2, shard_bytes=[20, 8]) == 112


@pytest.mark.parametrize(
    ("uploading", "committed", "proposed", "persist", "expected"),
    [
        (100, 159, 160, 160, True),
        (0, 1, 2, 2, True),
        (100, 101, 102, 100, False),
        (100, 159, 160, 100, False),
        (-1, 159, 160, 160, False),
        (160, 160, 160, 160, False),
        (100, 160, 160, 160, False),
        (100, 159, -1, 160, False),
        (100, 160, -1, -1, False),
        (159, 159, 160, 160, False),
        (100, -1, 160, 160, False),
    ],
)
def test_only_a_marked_proposal_replaces_an_upload_of_a_step_before_the_commit(
    uploading: int, committed: int, proposed: int, persist: int, expected: bool
) -> None:
    steps = {"committed": Step(committed), "proposed": Step(proposed), "persist": Step(persist)}
    assert is_superseded(Step(uploading), **steps) is expected


@pytest.mark.parametrize(
    ("step", "begun", "uploading", "expected"),
    [(7, 4, (4,), True), (7, 4, (), True), (7, 6, (4, 6), False), (7, 7, (), False), (6, 7, (), False)],
    ids=["beside another", "alone", "both busy", "again", "older"],
)
def test_two_uploads_of_a_shard_may_run_newest_first(
    step: int, begun: int, uploading: tuple[int, ...], expected: bool
) -> None:
    steps = [Step(each) for each in uploading]
    assert may_upload(Step(step), begun=Step(begun), uploading=steps, max_uploads=2) is expected


def test_each_upload_has_a_slot_besides_two() -> None:
    counts = [slots_per_shard(has_third_slot=True, max_uploads=count) for count in (1, 2, 4)]
    assert (counts, slots_per_shard(has_third_slot=False, max_uploads=1)) == ([3, 4, 6], 2)


def test_a_node_reports_the_newest_steps_of_each_rank_whatever_the_order_of_their_ends() -> None:
    def uploaded(rank: int, step: int) -> UploadedShard:
        return UploadedShard(
            rank=Rank(rank),
            step=Step(step),
            origin_generation=Generation(1),
            object=ObjectReference(bucket="bucket", key=f"{step}/{rank}"),
            object_bytes=1,
            etag="",
            payload_bytes=1,
            payload_digest=b"",
            layout_hash=b"",
        )

    reported: list[UploadedShard] = []
    for rank, step in ((0, 3), (0, 1), (1, 1), (0, 4), (0, 5), (0, 2)):
        reported = newest_uploads([*reported, uploaded(rank, step)], max_uploads=2)
    assert [(each.rank, each.step) for each in reported] == [(0, 3), (1, 1), (0, 4), (0, 5), (0, 2)]


def test_the_pauses_before_the_attempts_of_an_upload_double_up_to_the_last() -> None:
    assert [retry_pause(failures) for failures in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]
