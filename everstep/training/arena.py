"""Provides prefaulted host memory for the tensors that a restore creates, because a first access to memory is slow.

Invariant: each tensor has its own storage, so a script can save, send or drop a tensor independently. The mapping is
freed with its last tensor.
"""

from __future__ import annotations

import mmap

import torch

from everstep.protocol.pages import populate, prefer_huge
from everstep.protocol.slot import align

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class Arena:
    """A memory mapping that allocates tensors one after another. Its size counts each tensor rounded up by `align`."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._offset = 0
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        if len(self._map) >= HUGE_PAGE_BYTES:
            prefer_huge(self._address, len(self._map))

    def prefault(self) -> None:
        """Allocate the mapping's pages, as huge pages where possible. Called in a background thread."""
        populate(self._address, len(self._map), is_written=True)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor of zeros in this memory; None if it is empty or the arena is full."""
        size = shape.numel() * dtype.itemsize
        if size == 0 or self._offset + size > len(self._map):
            return None
        tensor = torch.frombuffer(self._map, dtype=dtype, count=shape.numel(), offset=self._offset)
        self._offset = align(self._offset + size)
        return tensor.view(shape)
