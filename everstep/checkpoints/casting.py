"""Converts a tensor's bytes to a different floating point type, with torch.

Invariant: the result equals torch's `Tensor.to` element by element. A finite value that would become infinite raises
CheckpointError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from everstep.checkpoints.errors import CheckpointError

SLICE_ELEMENTS: Final = 1024 * 1024
"""Number of elements per conversion, which limits the memory of temporary copies."""


def cast(name: str, data: bytes | bytearray | memoryview, source: str, target: str) -> Iterator[memoryview]:
    """Convert some elements of a tensor.

    Args:
        name: name of the tensor, for messages.
        data: uint8[elements times bytes per element], in row-major order. The function does not change it.
        source: dtype of the elements, for example `float32`.
        target: dtype of the result, for example `bfloat16`.

    Yields:
        The converted elements in order, a slice at a time.

    Raises:
        CheckpointError: a finite value lies beyond the range of the target dtype.
    """
    if not len(data):
        return
    elements = torch.frombuffer(data, dtype=getattr(torch, source))
    for begin in range(0, elements.numel(), SLICE_ELEMENTS):
        part = elements[begin : begin + SLICE_ELEMENTS]
        converted = part.to(getattr(torch, target))
        if bool((converted.isinf() & ~part.isinf()).any()):
            raise CheckpointError(f"{name} has a value beyond the range of {target}; export it as {source}")
        yield converted.view(torch.uint8).numpy().data
