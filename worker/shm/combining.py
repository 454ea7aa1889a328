"""Combines bytes of shards by XOR, for shares of parity and for shards that are rebuilt from them.

Invariant: the caller owns the target's bytes. `combine` is not idempotent, so the caller combines each source once.
"""

from __future__ import annotations

import numpy as np

WORD_BYTES = 8


def combine(target: memoryview, source: memoryview | bytes) -> None:
    """Replace the first bytes of `target` by their XOR with `source`.

    The call releases the interpreter lock. A stream's thread calls it once per verified chunk.

    Args:
        target: uint8[at least the length of `source`], writable and contiguous.
        source: uint8[n], contiguous.
    """
    size = len(source)
    words = size // WORD_BYTES * WORD_BYTES
    whole, more = (
        np.frombuffer(target, np.uint64, words // WORD_BYTES),
        np.frombuffer(source, np.uint64, words // WORD_BYTES),
    )
    np.bitwise_xor(whole, more, out=whole)
    if size > words:
        rest, last = np.frombuffer(target, np.uint8, size - words, words), np.frombuffer(source, np.uint8, -1, words)
        np.bitwise_xor(rest, last, out=rest)
