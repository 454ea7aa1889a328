"""Computes digests of batches, states and other values of a script.

Invariant: equal values have equal digests in every process. An object without readable content counts by its type only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import cast

import numpy as np
import torch
import xxhash

from everstep.training.state_tree import tensor_bytes

MAX_DEPTH = 24
"""Below this depth, only types count, which ends the traversal of cyclic values."""


def digest_of(value: object) -> str:
    """Return the xxh3-128 digest of a value's content, types and shapes, hexadecimal."""
    hasher = xxhash.xxh3_128()
    _feed(hasher, value, 0)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_128, value: object, depth: int) -> None:
    hasher.update(f"<{type(value).__qualname__}>".encode())
    if depth == MAX_DEPTH:
        return
    if isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, complex, str, np.generic)):
        hasher.update(repr(value).encode())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        hasher.update(value)
    elif isinstance(value, (set, frozenset)):
        hasher.update("".join(sorted(map(digest_of, cast("set[object]", value)))).encode())
    else:
        for part in _parts(value):
            _feed(hasher, part, depth + 1)


def _feed_tensor(hasher: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    hasher.update(f"{local.dtype}{tuple(local.shape)}".encode())
    if local.layout is torch.strided and not local.is_quantized and not local.is_meta:
        hasher.update(tensor_bytes(local).cpu().numpy().data)


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [part for item in cast("Mapping[object, object]", value).items() for part in item]
    if isinstance(value, (list, tuple, np.ndarray)):
        return list(cast("list[object]", value))
    if callable(content := getattr(value, "tobytes", None)):
        # Use the raw bytes of an object such as a PIL image, which has neither fields nor items.
        return [content()]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return [part for item in vars(value).items() for part in item] if hasattr(value, "__dict__") else []
