"""Produces files in the format of `torch.save` as a stream, without a second copy of the tensor.

Invariant: `torch.load` of the joined pieces returns an object equal to the saved one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.logical import LogicalTensor

Pieces = list[bytes | memoryview]


def tensor_of(checkpoint: Checkpoint, tensor: LogicalTensor) -> torch.Tensor:
    """Read a whole tensor.

    Args:
        checkpoint: the open checkpoint that has the tensor.
        tensor: a value of `Checkpoint.tensors`.

    Returns:
        A new tensor with its own memory.

    Raises:
        CheckpointError: an object cannot be read, or bytes do not hash to their digest.
    """
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    data = checkpoint.read(tensor)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(tensor.shape)


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
