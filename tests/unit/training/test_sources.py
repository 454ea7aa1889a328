from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from everstep.training import sources as every_source
from everstep.training.capture import StateTensor
from everstep.training.sources import COMPARED_BYTES, Sources
from tests.unit.training.test_host_copy import Elsewhere


def sources(*tensors: torch.Tensor) -> Sources:
    return Sources([(number, StateTensor(f"t{number}", tensor, True)) for number, tensor in enumerate(tensors)])


def test_an_alias_keeps_the_memory_of_its_boundary_until_it_is_renewed() -> None:
    live = torch.nn.Parameter(torch.ones(3))
    watched = sources(torch.zeros(2), live)
    live.data = torch.full((3,), 2.0)
    assert watched.aliases[1].tolist() == [1.0, 1.0, 1.0]
    assert watched.renew()
    assert watched.aliases[1].data_ptr() == live.data_ptr()
    assert not watched.aliases[1].requires_grad


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data[:2],
        lambda data: data.reshape(2, 2),
        lambda _: torch.ones(5),
        lambda _: torch.ones(4, dtype=torch.float64),
    ],
    ids=["shorter in place", "reshaped in place", "longer", "of another type"],
)
def test_another_shape_or_type_needs_another_plan(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    live = torch.nn.Parameter(torch.ones(4))
    watched = sources(live)
    live.data = other(live.data)
    assert not watched.renew()


def test_what_moved_is_named() -> None:
    one, two, three, four = torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2)
    watched = sources(one, two, three, four)
    marks = watched.marks()
    assert watched.moved(marks) == []
    one.add_(1)
    two.data = torch.ones(2)
    three.data.add_(1)  # this write does not change the version of `three`
    assert watched.moved(marks) == ["t0", "t1"]


def test_tensors_of_inference_have_an_address_and_no_version() -> None:
    with torch.inference_mode():
        odd = torch.ones(2)
    watched = sources(odd, torch.ones(1))
    marks = watched.marks()
    assert watched.moved(marks) == []
    watched.live[1].add_(1)
    assert watched.moved(marks) == ["t1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_bytes_are_compared_and_nothing_else(dtype: torch.dtype, transposed: bool) -> None:
    live = torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=dtype)
    live = live.t() if transposed else live
    copy = live.clone().contiguous()
    watched = sources(live)
    assert watched.differing([copy]) == []
    copy[-1, -1] = 1
    assert watched.differing([copy]) == ["t0"]


class OnDevice(torch.Tensor):
    """A tensor whose class forbids direct access to its memory. Only torch can compare it, as for device memory."""


@pytest.mark.parametrize("has_room", [True, False])
def test_a_device_compares_a_piece_at_a_time_as_long_as_it_has_room(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = torch.zeros(2 * COMPARED_BYTES + 8, dtype=torch.uint8).as_subclass(OnDevice)
    copies = [torch.zeros(2 * COMPARED_BYTES + 8, dtype=torch.uint8) for _ in range(2)]
    copies[1][-3] += 1
    compared: list[int] = []

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        if not has_room and one.numel() < live.numel():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        compared.append(one.numel())
        return bool((one == other).all())

    monkeypatch.setattr(torch, "equal", equal)
    assert [sources(live).differing([copy]) for copy in copies] == [[], ["t0"]]
    assert compared == ([COMPARED_BYTES, COMPARED_BYTES, 8] * 2 if has_room else [live.numel()] * 2)


def test_a_tensor_without_memory_of_its_own_is_compared_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_source, "_memcmp", lambda *_: pytest.fail("bytes at address 0 are read"))
    watched = sources(Elsewhere(torch.ones(3)))
    assert watched.differing([torch.ones(3)]) == []
    assert watched.differing([torch.zeros(3)]) == ["t0"]


def test_zeros_of_either_sign_differ_and_nan_does_not() -> None:
    watched = sources(torch.tensor([float("nan"), 0.0]), torch.zeros(0))
    assert watched.differing([torch.tensor([float("nan"), 0.0]), torch.zeros(0)]) == []
    assert watched.differing([torch.tensor([float("nan"), -0.0]), torch.zeros(0)]) == ["t0"]
