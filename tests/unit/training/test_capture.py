from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from everstep.protocol.slot import ALIGNMENT, HEADER_BYTES, unpack_index
from everstep.training.capture import MIN_INDEX_ROOM_BYTES, CapturePlan, CopyPiece, CpuCopier, SlotMemory, StateTensor, view_of


def states(*tensors: torch.Tensor) -> list[StateTensor]:
    return [StateTensor(f"t{number}", tensor, True) for number, tensor in enumerate(tensors)]


TENSORS = states(torch.arange(5.0), torch.tensor(True), torch.zeros(0, 3), torch.ones(16, dtype=torch.bfloat16), torch.tensor(2.5))


def test_a_plan_is_aligned_and_its_gaps_are_known() -> None:
    plan = CapturePlan.make(TENSORS, b"values")
    assert [entry.offset % ALIGNMENT for entry in plan.entries] == [0] * 5
    covered = sorted([(entry.offset, entry.offset + entry.bytes) for entry in plan.entries if entry.bytes] + list(plan.gaps))
    assert covered[0][0] == 0
    assert covered[-1][1] == plan.index_offset
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
    assert plan.capacity_bytes >= plan.index_offset + MIN_INDEX_ROOM_BYTES


@pytest.mark.parametrize(
    "other",
    [
        states(torch.arange(5.0)),
        states(torch.arange(6.0), *(item.tensor for item in TENSORS[1:])),
        states(torch.arange(5), *(item.tensor for item in TENSORS[1:])),
        [StateTensor("renamed", TENSORS[0].tensor, True), *TENSORS[1:]],
    ],
)
def test_a_plan_fits_the_same_tensors_only(other: list[StateTensor]) -> None:
    plan = CapturePlan.make(TENSORS, b"")
    assert plan.fits(TENSORS)
    assert plan.fits([StateTensor(item.name, item.tensor.clone(), False) for item in TENSORS])
    assert not plan.fits(other)


def test_values_may_grow_into_their_room_and_no_further() -> None:
    plan = CapturePlan.make(TENSORS, b"x" * 100)
    index = plan.index(b"y" * 50_000)
    assert index is not None
    assert unpack_index(index, plan.index_offset).values == b"y" * 50_000
    assert plan.index(b"y" * MIN_INDEX_ROOM_BYTES) is None


def test_copies_land_where_the_plan_says(tmp_path: Path) -> None:
    plan = CapturePlan.make(TENSORS, b"")
    path = tmp_path / "slot"
    path.write_bytes(b"\xff" * (HEADER_BYTES + plan.capacity_bytes))
    memory = SlotMemory(path, plan.capacity_bytes)
    copier = CpuCopier()
    pieces = [CopyPiece(item.tensor, target) for item, target in zip(TENSORS, memory.views(plan), strict=True)]
    errors: list[BaseException | None] = []
    copier.copy(pieces[:2])
    copier.prepare(memory)
    copier.start(pieces[2:], errors.append).wait()
    copier.close()
    memory.clear(plan.gaps)
    memory.write(plan.index_offset, b"index")
    data = path.read_bytes()
    assert errors == [None]
    assert data[:HEADER_BYTES] == b"\xff" * HEADER_BYTES, "the header is the agent's"
    payload = torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.uint8)
    for item, entry in zip(TENSORS, plan.entries, strict=True):
        assert torch.equal(view_of(payload, entry), item.tensor)
    assert all(not any(data[HEADER_BYTES + begin : HEADER_BYTES + end]) for begin, end in plan.gaps)
    assert data[HEADER_BYTES + plan.index_offset :].startswith(b"index\xff")


def test_a_failed_copy_is_told_and_the_copier_lives_on() -> None:
    copier = CpuCopier()
    errors: list[BaseException | None] = []
    ticket = copier.start([CopyPiece(torch.ones(3), torch.ones(2))], errors.append)
    ticket.wait()
    copier.start([CopyPiece(torch.ones(2), torch.ones(2))], errors.append).wait()
    copier.close()
    assert isinstance(ticket.error, RuntimeError)
    assert errors == [ticket.error, None]
