"""Every way to copy writes the same values into live tensors as torch's own copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from everstep.training import host_copy
from everstep.training.copier import Copies
from everstep.training.host_copy import copy_into_live


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of bytes of each copy."""
    sizes: list[int] = []
    move = host_copy.ctypes.memmove

    def note(to: int, of: int, size: int) -> None:
        sizes.append(size)
        move(to, of, size)

    monkeypatch.setattr(host_copy.ctypes, "memmove", note)
    return sizes


def made_in_inference_mode(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.arange(40.0), torch.zeros(40)),
        (torch.arange(40.0), torch.nn.Parameter(torch.zeros(40))),
        (torch.tensor(3.0), torch.tensor(0.0)),
        (torch.empty(0), torch.empty(0)),
        (torch.arange(40.0), made_in_inference_mode(40)),
        (torch.arange(40.0).view(4, 10), torch.zeros(10, 4).t()),
        (torch.arange(40.0).view(10, 4).t(), torch.zeros(4, 10)),
        (torch.arange(40.0).view(2, 5, 2, 2), torch.zeros(2, 5, 2, 2).to(memory_format=torch.channels_last)),
        (torch.arange(40.0), torch.zeros(40, dtype=torch.bfloat16)),
        (torch.view_as_complex(torch.arange(40.0).view(20, 2)).conj(), torch.zeros(20, dtype=torch.complex64)),
    ],
    ids=[
        "plain",
        "parameter",
        "scalar",
        "empty",
        "inference",
        "strided live",
        "strided saved",
        "channels last",
        "type",
        "conj",
    ],
)
def test_a_copy_is_torchs(source: torch.Tensor, target: torch.Tensor) -> None:
    copy_into_live(Copies([source], [target]))
    assert torch.equal(target.detach(), source.to(target.dtype))


def test_large_ones_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = moved(monkeypatch)
    source = torch.arange(2 * host_copy.PIECE_BYTES // 4 + 8.0)
    target = torch.zeros_like(source)
    copy_into_live(Copies([source], [target]))
    assert sizes == [host_copy.PIECE_BYTES, host_copy.PIECE_BYTES, 32]
    assert torch.equal(target, source)


def test_several_threads_of_torchs_do_it_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sizes, target = moved(monkeypatch), torch.zeros(40)
    copy_into_live(Copies([torch.arange(40.0)], [target]))
    assert sizes == []
    assert torch.equal(target, torch.arange(40.0))


class Elsewhere(torch.Tensor):
    """A tensor that pretends to be contiguous host memory at address 0, while another tensor has its data."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(cls, lambda tensor: tensor.held, args), **(kwargs or {}))


def test_a_tensor_without_memory_of_its_own_is_written_to_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy.ctypes, "memmove", lambda *_: pytest.fail("bytes are moved"))
    held = torch.zeros(4)
    copy_into_live(Copies([torch.ones(4)], [Elsewhere(held)]))
    assert held.eq(1).all()


def test_a_buffer_is_moved_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, target = moved(monkeypatch), torch.nn.Buffer(torch.zeros(4))
    copy_into_live(Copies([torch.ones(4)], [target]))
    assert sizes == [16]
    assert target.eq(1).all()


def test_the_order_is_kept_between_both_ways() -> None:
    live = torch.zeros(4, 4)
    plain, strided = torch.ones(4, 4), torch.full((4, 4), 2.0).t()
    copy_into_live(Copies([plain, strided, plain, strided.t()[:1].expand(4, 4)], [live, live, live, live]))
    assert live.eq(2).all()


def test_what_was_computed_with_the_old_values_is_found_stale() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    copy_into_live(Copies([torch.zeros(4)], [weight]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shapes_that_differ_are_refused_before_a_byte_is_moved() -> None:
    target = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="size"):
        copy_into_live(Copies([torch.ones(5, 4)], [target]))
    assert target.eq(0).all()


def test_a_source_without_a_target_is_rejected_before_any_copy() -> None:
    target = torch.zeros(4)
    with pytest.raises(ValueError, match="shorter"):
        copy_into_live(Copies([torch.ones(4), torch.ones(4)], [target]))
    assert target.eq(0).all()
