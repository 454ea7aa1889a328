from __future__ import annotations

import io

import torch

from everstep.protocol.slot import ALIGNMENT
from everstep.training.arena import Arena


def test_tensors_lie_apart_and_have_storages_of_their_own() -> None:
    arena = Arena(3 * ALIGNMENT)
    arena.prefault()
    one, two = arena.empty(torch.Size([3]), torch.float32), arena.empty(torch.Size([2, 2]), torch.bfloat16)
    assert one is not None
    assert two is not None
    one.fill_(1)
    two.fill_(2)
    assert (one.tolist(), two.tolist()) == ([1.0] * 3, [[2.0, 2.0], [2.0, 2.0]])
    assert (one.untyped_storage().nbytes(), two.untyped_storage().nbytes()) == (12, 8)
    saved = io.BytesIO()
    torch.save(one, saved)
    assert len(saved.getvalue()) < 4096, "one tensor is saved, not the arena"


def test_a_full_arena_says_so() -> None:
    arena = Arena(4096)
    assert arena.empty(torch.Size([1025]), torch.float32) is None
    assert arena.empty(torch.Size([1024]), torch.float32) is not None
    assert arena.empty(torch.Size([]), torch.float32) is None
    assert arena.empty(torch.Size([0]), torch.float32) is None


def test_a_tensor_outlives_its_arena() -> None:
    arena = Arena(4096)
    tensor = arena.empty(torch.Size([4]), torch.int64)
    assert tensor is not None
    del arena
    tensor.fill_(7)
    assert tensor.sum() == 28
