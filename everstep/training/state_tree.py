"""Encodes plain values and tensors (a state tree) as bytes and decodes them, without pickle.

A tree consists of None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set, torch tensors, numpy
arrays and scalars, and torch dtypes, sizes and devices. `encode` writes it as msgpack. Tensors of more than
`INLINE_BYTES` are returned separately under their path, and the caller stores them.

    None, bool, float, str, bytes, int up to 64 bits    the msgpack value itself
    any other value                                     [tag, …], with a tag of `_Tag`

Invariant: `decode(encode(tree))` equals the tree, including all types, the bits of NaN, and a tensor's kind of device.
`encode` raises an error for a value of any other type. `decode` never imports or calls code that the bytes name.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from everstep.protocol.errors import CorruptSlot
from everstep.training.errors import CannotResume

Tree: TypeAlias = object

INLINE_BYTES = 1024
"""Largest tensor inside the encoded tree, whose shape may change without a new capture plan."""
MAX_DEPTH = 64
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Tensor classes with own memory; others may report contiguous host memory at address 0."""

_INT64 = range(-(2**63), 2**64)
_LEAVES = frozenset({type(None), bool, float, str, bytes})
_FLAT = _LEAVES | {int}


class _Tag(IntEnum):
    LIST = 0
    TUPLE = 1
    DICT = 2
    SET = 3
    FROZENSET = 4
    ORDERED_DICT = 5
    COUNTER = 6
    BIG_INT = 7
    COMPLEX = 8
    TENSOR = 9
    INLINE_TENSOR = 10
    ARRAY = 11
    INLINE_ARRAY = 12
    SCALAR = 13
    DTYPE = 14
    SIZE = 15
    DEVICE = 16
    FLAT_LIST = 17
    FLAT_TUPLE = 18


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """The bytes and the large tensors of a state tree."""

    data: bytes
    tensors: tuple[tuple[str, torch.Tensor], ...]
    """Path and live tensor, if it is too large for `data`."""


def encode(tree: Tree, path: str) -> EncodedTree:
    """Encode a tree. `path` is the prefix of the tensors' names, and of the paths in errors. Raises CannotResume if the
    tree holds a value of a type that cannot be restored.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    plain = _encode(tree, path, tensors, 0)
    return EncodedTree(msgspec.msgpack.encode(plain), tuple(tensors))


def decode(data: bytes, tensor: Callable[[str], torch.Tensor]) -> Tree:
    """Decode the tree of `encode`. `tensor` returns a large tensor by its path, which becomes part of the tree. Raises
    CorruptSlot if the bytes are not an encoded tree.
    """
    try:
        return _decode(msgspec.msgpack.decode(data), tensor, {})
    except (
        msgspec.DecodeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RuntimeError,
        AttributeError,
        struct.error,
    ) as error:
        raise CorruptSlot(f"the values of a slot do not decode: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return `torch.float32` for `float32`. Raises CorruptSlot if torch has no dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptSlot(f"no dtype {name!r}")
    return dtype


def place_of(tensor: torch.Tensor) -> list[str]:
    """Return the kind of the tensor's device in a list, empty for host memory. Launches may choose other indices."""
    return [] if tensor.device.type == "cpu" else [tensor.device.type]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes in row-major order, uint8[bytes]: a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def check_dense(tensor: torch.Tensor, path: str) -> None:
    """Raise CannotResume if a tensor is sparse, quantized, or on the meta device."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CannotResume(path, f"a tensor of layout {tensor.layout} on {tensor.device} is not dense memory")


def is_same(one: Tree, other: Tree) -> bool:
    """Return whether two trees are equal, with their types. A tree with NaN differs from each other tree."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return one.dtype is other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return one.keys() == other.keys() and all(is_same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple))
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def _encode(value: Tree, path: str, tensors: list[tuple[str, torch.Tensor]], depth: int) -> object:
    kind = type(value)
    if value is None or kind in _LEAVES:
        return value  # For a float, msgpack preserves all bits, also those of NaN.
    if kind is int:
        assert isinstance(value, int)
        return value if value in _INT64 else [_Tag.BIG_INT, hex(value)]
    if depth > MAX_DEPTH:
        raise CannotResume(path, f"nested deeper than {MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        if _is_flat(value):
            return [_Tag.FLAT_LIST if kind is list else _Tag.FLAT_TUPLE, value]
        items = [_encode(item, f"{path}/{number}", tensors, depth + 1) for number, item in enumerate(value)]
        return [_Tag.LIST if kind is list else _Tag.TUPLE, items]
    if kind in _MAPPINGS:
        assert isinstance(value, Mapping)
        return [_MAPPINGS[kind], _encode_items(value, path, tensors, depth)]
    if kind is set or kind is frozenset:
        assert isinstance(value, (set, frozenset))
        items = [_encode(item, path, tensors, depth + 1) for item in value]
        items.sort(key=repr)  # Sort the items, because a set has no order, and equal states must give equal bytes.
        return [_Tag.SET if kind is set else _Tag.FROZENSET, items]
    return _encode_leaf(value, path, tensors)


def _is_flat(items: list[object] | tuple[object, ...]) -> bool:
    kinds = set(map(type, items))
    return kinds <= _FLAT and (int not in kinds or all(item in _INT64 for item in items if type(item) is int))


def _encode_items(
    value: Mapping[object, object], path: str, tensors: list[tuple[str, torch.Tensor]], depth: int
) -> list[object]:
    items: list[object] = []
    for key, item in value.items():
        if not isinstance(key, (str, int, tuple, float, bytes, type(None))):
            raise CannotResume(
                path, f"a dict key of type {type(key).__qualname__}; use str, int, float, bytes, tuple or None"
            )
        items.append(_encode(key, f"{path}/(key)", tensors, depth + 1))
        items.append(_encode(item, f"{path}/{key if isinstance(key, str) else repr(key)}", tensors, depth + 1))
    return items


def _encode_leaf(value: object, path: str, tensors: list[tuple[str, torch.Tensor]]) -> object:
    if isinstance(value, torch.Tensor):
        if type(value) not in PLAIN_CLASSES:
            raise CannotResume(
                path, f"a tensor of class {type(value).__qualname__}; register its module or its local tensor"
            )
        check_dense(value, path)
        if value.numel() * value.element_size() <= INLINE_BYTES:
            data = bytes(tensor_bytes(value).cpu().numpy())
            return [_Tag.INLINE_TENSOR, dtype_name(value.dtype), list(value.shape), data, *place_of(value)]
        tensors.append((path, value.detach()))
        return [_Tag.TENSOR, path, *place_of(value)]
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or value.dtype.hasobject or value.dtype.names is not None:
            raise CannotResume(path, f"a numpy array of dtype {value.dtype}")
        if value.nbytes <= INLINE_BYTES:
            return [_Tag.INLINE_ARRAY, value.dtype.str, list(value.shape), value.tobytes()]
        tensors.append((path, torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))))
        return [_Tag.ARRAY, value.dtype.str, list(value.shape), path]
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return [_Tag.SCALAR, value.dtype.str, value.tobytes()]
    if isinstance(value, torch.dtype):
        return [_Tag.DTYPE, dtype_name(value)]
    if type(value) is torch.Size:
        return [_Tag.SIZE, list(value)]
    if type(value) is torch.device:
        return [_Tag.DEVICE, str(value)]
    if type(value) is complex:
        return [_Tag.COMPLEX, struct.pack(">dd", value.real, value.imag)]
    raise CannotResume(
        path,
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be restored; keep "
        "plain values and tensors",
    )


_MAPPINGS: dict[type, _Tag] = {dict: _Tag.DICT, OrderedDict: _Tag.ORDERED_DICT, Counter: _Tag.COUNTER}


def _decode(value: object, tensor: Callable[[str], torch.Tensor], tuples: dict[bytes, Tree]) -> Tree:
    """Decode a value. Equal flat tuples, in `tuples` by their encoded items, become one object."""
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag == _Tag.FLAT_LIST:
        return parts[0]
    if tag == _Tag.FLAT_TUPLE:
        return tuples.setdefault(msgspec.msgpack.encode(parts[0]), tuple(parts[0]))
    if tag in _CONTAINERS:
        items = [_decode(item, tensor, tuples) for item in parts[0]]
        return _CONTAINERS[tag](items)
    return _decode_leaf(tag, parts, tensor)


def _pairs(items: list[object]) -> Iterable[tuple[object, object]]:
    # Python interns names such as "exp_avg". pickle writes equal strings only once if they are one object, so a
    # restored state pickles to the same bytes as the original one.
    keys = (sys.intern(key) if type(key) is str else key for key in items[::2])
    return zip(keys, items[1::2], strict=True)


_CONTAINERS: Mapping[int, Callable[[list[object]], Tree]] = {
    _Tag.LIST: list,
    _Tag.TUPLE: tuple,
    _Tag.SET: set,
    _Tag.FROZENSET: frozenset,
    _Tag.DICT: lambda items: dict(_pairs(items)),
    _Tag.ORDERED_DICT: lambda items: OrderedDict(_pairs(items)),
    _Tag.COUNTER: lambda items: Counter(dict(_pairs(items))),
}


def _decode_leaf(tag: int, parts: list[object], tensor: Callable[[str], torch.Tensor]) -> Tree:
    match tag, parts:
        case _Tag.BIG_INT, [str(text)]:
            return int(text, 16)
        case _Tag.COMPLEX, [bytes(data)]:
            return complex(*struct.unpack(">dd", data))
        case _Tag.TENSOR, [str(path), *place]:
            return _placed(tensor(path), place)
        case _Tag.INLINE_TENSOR, [str(name), list(shape), bytes(data), *place]:
            if not data:
                return _placed(torch.empty(shape, dtype=dtype_of(name)), place)
            return _placed(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype_of(name)).view(shape), place)
        case _Tag.ARRAY, [str(name), list(shape), str(path)]:
            return np.frombuffer(bytearray(tensor(path).numpy().tobytes()), dtype=np.dtype(name)).reshape(shape)
        case _Tag.INLINE_ARRAY, [str(name), list(shape), bytes(data)]:
            return np.frombuffer(bytearray(data), dtype=np.dtype(name)).reshape(shape)
        case _Tag.SCALAR, [str(name), bytes(data)]:
            return np.frombuffer(data, dtype=np.dtype(name))[0]
        case _Tag.DTYPE, [str(name)]:
            return dtype_of(name)
        case _Tag.SIZE, [list(shape)]:
            return torch.Size(shape)
        case _Tag.DEVICE, [str(name)]:
            return torch.device(name)
        case _:
            raise CorruptSlot(f"a value of unknown kind {tag}")


def _placed(tensor: torch.Tensor, place: list[object]) -> torch.Tensor:
    match place:
        case []:
            return tensor
        case [str(kind)]:
            return tensor.to(kind)
        case _:
            raise CorruptSlot(f"a tensor on {place}")
