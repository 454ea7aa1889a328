from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from everstep.protocol.slot import ALIGNMENT, HEADER_BYTES, SlotIndex, pack_index, unpack_index
from everstep.training.capture import MIN_INDEX_ROOM_BYTES, CapturePlan, SlotMemory, StateTensor, view_of
from everstep.training.copier import Copies, CpuCopier


def states(*tensors: torch.Tensor) -> list[StateTensor]:
    return [StateTensor(f"t{number}", tensor, True) for number, tensor in enumerate(tensors)]


TENSORS = states(
    torch.arange(5.0), torch.tensor(True), torch.zeros(0, 3), torch.ones(16, dtype=torch.bfloat16), torch.tensor(2.5)
)


def test_a_plan_is_aligned_and_its_gaps_are_known() -> None:
    plan = CapturePlan.make(TENSORS)
    assert [entry.offset % ALIGNMENT for entry in plan.entries] == [0] * 5
    covered = sorted(
        [(entry.offset, entry.offset + entry.bytes) for entry in plan.entries if entry.bytes] + list(plan.gaps)
    )
    assert covered[0][0] == 0
    assert covered[-1][1] == plan.index_offset
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
    assert plan.capacity_bytes(b"values") >= plan.index_offset + MIN_INDEX_ROOM_BYTES


@pytest.mark.parametrize(
    "other",
    [
        states(torch.arange(5.0)),
        states(torch.arange(6.0), *(item.tensor for item in TENSORS[1:])),
        states(torch.arange(5), *(item.tensor for item in TENSORS[1:])),
        [StateTensor("renamed", TENSORS[0].tensor, True), *TENSORS[1:]],
        [StateTensor("t0", TENSORS[0].tensor, True, is_frozen=True), *TENSORS[1:]],
    ],
)
def test_a_plan_fits_the_same_tensors_only(other: list[StateTensor]) -> None:
    plan = CapturePlan.make(TENSORS)
    assert plan.fits(TENSORS)
    assert plan.fits([StateTensor(item.name, item.tensor.clone(), False) for item in TENSORS])
    assert not plan.fits(other)


def test_values_may_grow_into_their_room_and_no_further() -> None:
    plan = CapturePlan.make(TENSORS)
    capacity = plan.capacity_bytes(b"x" * 100)
    assert plan.fits_into(capacity, b"y" * 50_000)
    assert not plan.fits_into(capacity, b"y" * MIN_INDEX_ROOM_BYTES)


@pytest.mark.parametrize("values", [b"", b"x" * 31, b"x" * 32, b"x" * 255, b"x" * 256, b"x" * 70_000])
def test_an_index_in_two_parts_is_the_index(tmp_path: Path, values: bytes) -> None:
    plan = CapturePlan.make(TENSORS)
    whole = pack_index(SlotIndex(plan.entries, values))
    assert plan.index.prefix + plan.index.suffix(values) == whole
    assert plan.index.size(values) == len(whole)


def test_copies_land_where_the_plan_says(tmp_path: Path) -> None:
    plan = CapturePlan.make(TENSORS)
    capacity = plan.capacity_bytes(b"")
    path = tmp_path / "slot"
    path.write_bytes(b"\xff" * (HEADER_BYTES + capacity))
    memory = SlotMemory(path, capacity)
    copier = CpuCopier()
    sources, targets = [item.tensor for item in TENSORS], memory.views(plan)
    errors: list[BaseException | None] = []
    copier.copy(Copies(sources[:2], targets[:2]))
    copier.prepare(memory)
    copier.start(Copies(sources[2:], targets[2:]), errors.append).wait()
    copier.close()
    size = memory.write_values(plan, b"long values")
    assert memory.write_values(plan, b"values") == size - 5
    data = path.read_bytes()
    assert errors == [None]
    assert data[:HEADER_BYTES] == b"\xff" * HEADER_BYTES, "the header is the agent's"
    payload = torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.uint8)
    for item, entry in zip(TENSORS, plan.entries, strict=True):
        assert torch.equal(view_of(payload, entry), item.tensor)
    assert all(not any(data[HEADER_BYTES + begin : HEADER_BYTES + end]) for begin, end in plan.gaps)
    begin = HEADER_BYTES + plan.index_offset
    assert unpack_index(data[begin : begin + size - 5], plan.index_offset) == SlotIndex(plan.entries, b"values")
    assert data[begin + size :].startswith(b"\xff")


def test_prefault_allocates_the_pages_of_a_slot_and_keeps_their_content(tmp_path: Path) -> None:
    path, capacity = tmp_path / "slot", 64 * ALIGNMENT
    with path.open("wb") as file:
        file.write(b"header")
        file.truncate(HEADER_BYTES + capacity)
    SlotMemory(path, capacity).prefault()
    assert path.stat().st_blocks * 512 >= HEADER_BYTES + capacity
    assert path.read_bytes() == b"header".ljust(HEADER_BYTES + capacity, b"\0")


def test_a_slot_of_one_plan_taken_over_by_another_holds_nothing_of_the_first(tmp_path: Path) -> None:
    first, second = CapturePlan.make(states(torch.ones(40))), CapturePlan.make(states(torch.ones(3), torch.ones(3)))
    path = tmp_path / "slot"
    path.write_bytes(bytes(HEADER_BYTES + first.capacity_bytes(b"")))
    memory = SlotMemory(path, first.capacity_bytes(b""))
    memory.views(first)[0].fill_(7)
    for view in memory.views(second):
        view.fill_(1)
    assert sum(memory.payload[: second.index_offset].tolist()) == 6 * (0x80 + 0x3F)


def test_a_failed_copy_is_told_and_the_copier_lives_on() -> None:
    copier = CpuCopier()
    errors: list[BaseException | None] = []
    ticket = copier.start(Copies([torch.ones(3)], [torch.ones(2)]), errors.append)
    ticket.wait()
    copier.start(Copies([torch.ones(2)], [torch.ones(2)]), errors.append).wait()
    copier.close()
    assert isinstance(ticket.error, RuntimeError)
    assert errors == [ticket.error, None]


def test_the_index_names_frozen_tensors() -> None:
    plan = CapturePlan.make([StateTensor("base", torch.ones(2), True, is_frozen=True), *TENSORS])
    index = unpack_index(plan.index.prefix + plan.index.suffix(b"values"), plan.index_offset)
    assert [entry.name for entry in index.tensors if entry.is_frozen] == ["base"]
