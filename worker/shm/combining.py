"""Combines bytes of shards by XOR, to build parity shares and to rebuild lost shards from shares.

An XOR in numpy runs at the speed of a copy. Python's integers take 300 times as long (`make bench-parity`). Invariant:
a second XOR with the same source undoes the first, so the caller combines each source once.
"""

from __future__ import annotations

import ctypes
import importlib


def prepare() -> None:
    """Import numpy, which can take a second. Callers do this before they take a lock. Later calls return at once."""
    importlib.import_module("numpy")


def combine(target: memoryview, source: memoryview) -> None:
    """Replace the first bytes of `target` by their XOR with `source`, without the interpreter lock.

    Both are contiguous uint8. Raises ValueError, with the target unchanged, if `source` is longer.
    """
    import numpy as np

    size = _fitting(target, source)
    words = size // 8 * 8
    for kind, begin, end in ((np.uint64, 0, words), (np.uint8, words, size)):
        if end > begin:
            count = (end - begin) // np.dtype(kind).itemsize
            into = np.frombuffer(target, kind, count, begin)
            np.bitwise_xor(into, np.frombuffer(source, kind, count, begin), out=into)


def replace(target: memoryview, source: memoryview) -> None:
    """Copy `source` to the start of `target`, and fill the rest with zeros, without the interpreter lock.

    Both are contiguous uint8, and ctypes requires that `source` is writable. Raises ValueError, with the target
    unchanged, if `source` is longer.
    """
    size = _fitting(target, source)
    into = (ctypes.c_char * target.nbytes).from_buffer(target)
    out_of = (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(into, out_of, size)
    ctypes.memset(ctypes.addressof(into) + size, 0, target.nbytes - size)
    del into, out_of


def _fitting(target: memoryview, source: memoryview) -> int:
    """Return the size of `source` in bytes. Raise ValueError if `source` is longer than `target`."""
    # ctypes and numpy do not check the lengths.
    if source.nbytes > target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes} bytes")
    return source.nbytes
