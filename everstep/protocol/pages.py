"""Allocates the memory pages of a mapping before their first use, because a first copy takes twelve times as long.

Invariant: the pages' content does not change. On a kernel too old for a call, the call does nothing.
"""

from __future__ import annotations

import ctypes
import mmap

PIECE_BYTES = 64 * 1024 * 1024
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
"""Linux supports it since version 5.14."""

# Use ctypes, because its calls release the GIL and mmap.madvise does not.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(address: int, size: int, *, is_written: bool, piece_bytes: int = PIECE_BYTES) -> bool:
    """Allocate all pages of an address range now. Return whether the kernel allocated all of them. Call this in a
    background thread: it takes 0.1 to 1 s per GiB of unused memory. `address` is rounded down to a page. `piece_bytes`
    is the range of one system call, a multiple of the page size.
    """
    advice = _MADV_POPULATE_WRITE if is_written else _MADV_POPULATE_READ
    return _advise(address, size, advice, piece_bytes)


def prefer_huge(address: int, size: int) -> bool:
    """Ask the kernel for huge pages in a range that has no pages yet. Return whether it accepted the request."""
    return _advise(address, size, mmap.MADV_HUGEPAGE)


def _advise(address: int, size: int, advice: int, piece_bytes: int = PIECE_BYTES) -> bool:
    begin, end = address - address % mmap.PAGESIZE, address + size
    return all(_madvise(start, min(piece_bytes, end - start), advice) == 0 for start in range(begin, end, piece_bytes))
