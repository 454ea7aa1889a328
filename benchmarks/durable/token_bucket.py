"""Limits a rate of bytes. All threads that share a `TokenBucket` together pass at most its rate on average."""

from __future__ import annotations

import threading
import time

SLICE_SECONDS = 0.02
"""Unused rate that passes without a wait after a pause."""


class TokenBucket:
    """Lets bytes pass at a limited rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        with self._lock:
            begin = max(self._free_at, time.monotonic() - SLICE_SECONDS)
            self._free_at = begin + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            threading.Event().wait(wait)
