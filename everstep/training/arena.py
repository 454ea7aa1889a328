"""Host memory for the tensors that a restore makes anew: a fresh optimizer has no state yet, and memory is slow when it is touched first.

Invariant: each tensor has a storage of its own, so that a script can save, send or drop one without the others; the
mapping goes with the last.
"""

from __future__ import annotations

import mmap

import torch

from everstep.protocol.pages import populate, prefer_huge
from everstep.protocol.slot import align

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class Arena:
    """One mapping, given out from its front.

    Args:
        size: in bytes, with `align` for each tensor.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._offset = 0
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        if len(self._map) >= HUGE_PAGE_BYTES:
            prefer_huge(self._address, len(self._map))

    def prefault(self) -> None:
        """Give the mapping its pages, huge ones where the kernel has them. In a thread."""
        populate(self._address, len(self._map), is_written=True)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for a tensor, zero until it is written; None where no room is left."""
        size = shape.numel() * dtype.itemsize
        if size == 0 or self._offset + size > len(self._map):
            return None
        tensor = torch.frombuffer(self._map, dtype=dtype, count=shape.numel(), offset=self._offset)
        self._offset = align(self._offset + size)
        return tensor.view(shape)
