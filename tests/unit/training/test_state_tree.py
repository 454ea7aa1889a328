from __future__ import annotations

import io
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.errors import CorruptSlot
from everstep.training import state_tree
from everstep.training.errors import CannotResume
from everstep.training.state_tree import INLINE_BYTES, MAX_DEPTH, decode, encode, is_same, place_of

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
KEYS = (
    st.text(max_size=5)
    | st.integers(-9, 2**70)
    | st.none()
    | st.booleans()
    | st.tuples(st.integers(0, 9), st.text(max_size=2))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


def round_trip(value: object) -> Any:
    encoded = encode(value, "")
    tensors = {path: tensor.clone() for path, tensor in encoded.tensors}
    assert len(tensors) == len(encoded.tensors), "paths are unique"
    return decode(encoded.data, tensors.__getitem__)


def typed(value: object) -> object:
    """Return the value with the type of every element, because 1, 1.0 and True compare equal."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    return type(value), value


@given(TREES)
def test_every_tree_comes_back(tree: object) -> None:
    assert typed(round_trip(tree)) == typed(tree)


@given(TREES)
def test_equal_trees_give_equal_bytes(tree: object) -> None:
    assert encode(tree, "").data == encode(round_trip(tree), "").data


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        decode(data, {}.__getitem__)
    except CorruptSlot:
        return


def test_floats_keep_their_bits() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    back = round_trip([odd, math.inf, -0.0, {"x": odd}])
    assert struct.pack(">d", back[0]).hex() == struct.pack(">d", back[3]["x"]).hex() == "fff8000000000123"
    assert back[1] == math.inf
    assert math.copysign(1, back[2]) == -1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (40, 50)])
def test_tensors_come_back_inline_or_beside(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    encoded = encode({"t": tensor}, "root")
    is_large = tensor.numel() * tensor.element_size() > INLINE_BYTES
    assert [path for path, _ in encoded.tensors] == (["root/t"] if is_large else [])
    back = round_trip({"t": tensor})["t"]
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back, tensor)


def test_a_strided_tensor_comes_back_by_value() -> None:
    tensor = torch.arange(12).reshape(3, 4).t()
    assert torch.equal(round_trip([tensor])[0], tensor)


@pytest.mark.parametrize(
    "array",
    [np.arange(5), np.zeros((0, 3), np.float32), np.arange(2000, dtype=np.uint32).reshape(40, 50), np.array(3.5)],
)
def test_numpy_comes_back(array: np.ndarray[Any, Any]) -> None:
    back = round_trip((array, array.dtype.type(7)))
    assert type(back[0]) is np.ndarray
    assert back[0].dtype == array.dtype
    assert np.array_equal(back[0], array)
    assert back[0].flags.writeable
    assert type(back[1]) is array.dtype.type


def test_torch_values_come_back() -> None:
    values = [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), Counter({30: 1, 80: 2})]
    back = round_trip(values)
    assert back == values
    assert [type(item) for item in back] == [torch.dtype, torch.Size, torch.device, Counter]


def test_generator_states_come_back() -> None:
    generator = np.random.default_rng(3)
    # numpy's generator state contains 128-bit integers
    assert round_trip(generator.bit_generator.state) == generator.bit_generator.state


class Odd:
    pass


@pytest.mark.parametrize(
    "value",
    [Odd(), lambda: 0, {"x": Odd()}, torch.zeros(2).to_sparse(), torch.zeros(1, device="meta"), np.array([Odd()])],
)
def test_what_cannot_come_back_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(CannotResume, match=r"^state/deep/1"):
        encode({"deep": [0, value]}, "state")


def test_a_key_that_cannot_come_back_is_refused() -> None:
    with pytest.raises(CannotResume, match="dict key of type Odd"):
        encode({Odd(): 1}, "state")


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = [{}]
    tree[0]["again"] = tree
    with pytest.raises(CannotResume, match=f"deeper than {MAX_DEPTH}"):
        encode(tree, "state")


@pytest.mark.parametrize("count", [0, 2, INLINE_BYTES])
def test_a_tensor_comes_back_to_its_kind_of_device(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    assert place_of(torch.ones(count)) == []
    assert round_trip([torch.ones(count)])[0].device.type == "cpu"
    assert place_of(torch.ones(count, device="meta")) == ["meta"]
    monkeypatch.setattr(state_tree, "place_of", lambda _: ["meta"])
    assert round_trip([torch.ones(count)])[0].device.type == "meta"


@pytest.mark.parametrize("place", ["nowhere", 0, None])
def test_a_device_that_is_not_there_is_corrupt(monkeypatch: pytest.MonkeyPatch, place: object) -> None:
    monkeypatch.setattr(state_tree, "place_of", lambda _: [place])
    with pytest.raises(CorruptSlot):
        round_trip([torch.ones(2)])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_restored_optimizer_pickles_to_the_same_bytes(groups: int) -> None:
    """A user compares the files of two runs byte by byte. Parameter groups share the tuple of their betas."""

    def trained(steps: int) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        parameters = list(torch.nn.Linear(40, 40).parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[each::groups]} for each in range(groups)], lr=0.1)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    def saved(optimizer: torch.optim.Optimizer) -> bytes:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        return file.getvalue()

    undisturbed, restored = trained(3), trained(0)
    encoded = encode(undisturbed.state_dict(), "optimizer")
    tensors = dict(encoded.tensors)
    restored.load_state_dict(decode(encoded.data, lambda path: tensors[path].clone()))  # type: ignore[arg-type]
    assert saved(restored) == saved(undisturbed)


@pytest.mark.parametrize(
    "other", [1.0, True, [1], (1, 2), {"a": 2}, torch.ones(1), torch.ones(2, dtype=torch.float64), np.zeros(2)]
)
def test_trees_of_other_types_or_values_differ(other: object) -> None:
    trees = [1, (1,), {"a": 1}, torch.ones(2), np.ones(2)]
    assert not any(is_same(tree, other) for tree in trees)
    assert all(is_same(tree, tree) for tree in trees)
