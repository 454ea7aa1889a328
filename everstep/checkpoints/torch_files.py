"""Produces files in the format of `torch.save` as a stream, without a second copy of the tensor.

Invariant: `torch.load` of the joined pieces returns an object equal to the saved one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.logical import Box, LogicalTensor
from everstep.protocol.dtypes import ITEM_BYTES

Pieces = list[bytes | memoryview]


SLAB_BYTES: Final = 8 * 1024 * 1024
"""Maximum bytes that `tensor_of` reads before it converts them."""


def tensor_of(checkpoint: Checkpoint, tensor: LogicalTensor, target: torch.dtype | None = None) -> torch.Tensor:
    """Read a whole tensor.

    Args:
        checkpoint: the open checkpoint that has the tensor.
        tensor: a value of `Checkpoint.tensors`.
        target: dtype of the result. The conversion needs no memory for a second whole tensor. None: the dtype of the
            checkpoint.

    Returns:
        A new tensor with its own memory.

    Raises:
        CheckpointError: an object cannot be read, or bytes do not hash to their digest.
    """
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if target in (None, dtype):
        return _viewed(checkpoint.read(tensor), dtype, tensor.shape)
    assert target is not None
    whole = _viewed(bytearray(math.prod(tensor.shape) * target.itemsize), target, tensor.shape)
    for box in tensor.boxes:
        for slab in slabs(box, ITEM_BYTES[tensor.dtype]):
            part = _viewed(checkpoint.read_box(tensor, slab), dtype, slab.sizes)
            whole[tuple(slice(at, at + size) for at, size in zip(slab.offsets, slab.sizes, strict=True))] = part
    return whole


def slabs(box: Box, item_bytes: int, slab_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Divide a box into boxes of at most `slab_bytes`, in the order of their bytes.

    Args:
        box: rectangular piece of a tensor, at least one element.
        item_bytes: bytes of an element.
        slab_bytes: maximum bytes of a slab, at least one element.

    Yields:
        Boxes that together cover `box`.
    """
    axis = next((each for each, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or math.prod(box.sizes) * item_bytes <= slab_bytes:
        yield box
        return
    row = math.prod(box.sizes[axis + 1 :]) * item_bytes
    count = max(1, slab_bytes // row)
    for first in range(0, box.sizes[axis], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += first
        sizes[axis] = min(count, box.sizes[axis] - first)
        yield from slabs(Box(tuple(offsets), tuple(sizes), box.rank, box.begin + first * row), item_bytes, slab_bytes)


def _viewed(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def saved(content: Any, tensor: torch.Tensor | None = None) -> Pieces:
    """Return the bytes of the file that `torch.save` would write, as pieces.

    Args:
        content: an object that torch can pickle.
        tensor: a contiguous CPU tensor within `content`. The pieces share its memory, so the caller must not change the
            tensor while it uses the pieces. None: all pieces are copies.

    Returns:
        The file's bytes, in order.
    """
    sink = _Sink(tensor)
    torch.save(content, sink)  # type: ignore[arg-type]
    return sink.pieces


def size_of(pieces: Pieces) -> int:
    """Return the size in bytes of a file whose content `saved` returned as pieces."""
    return sum(len(piece) for piece in pieces)


class _Sink:
    """File object for `torch.save` that collects the written pieces without copying the tensor.

    torch passes views of memory that torch may free later. The sink replaces each view of the tensor's memory by its
    own view, which keeps the tensor alive. It copies all other views.
    """

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.pieces: Pieces = []
        self._memory = memoryview(b"")
        self._begin = 0
        if tensor is not None and tensor.numel():
            self._memory = tensor.detach().flatten().view(torch.uint8).numpy().data
            self._begin = tensor.data_ptr()

    def write(self, piece: bytes | memoryview) -> int:
        size = len(piece)
        place = np.frombuffer(piece, np.uint8).ctypes.data - self._begin if size else 0
        is_own = place >= 0 and place + size <= len(self._memory)
        self.pieces.append(self._memory[place : place + size] if is_own else bytes(piece))
        return size

    def flush(self) -> None:
        pass
