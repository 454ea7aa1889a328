"""Contains the pacer of the compared scheme UNIFORM: a constant rate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from worker.replication.pacing import SHORT_SECONDS


class UniformPacer:
    """Delays pieces, so that the node sends at a constant rate. Unused time is lost.

    `bytes_per_second` is of all copies together. `clock` is the event loop's, for calls from other threads.
    """

    def __init__(self, bytes_per_second: float, chunk_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.chunk_bytes = chunk_bytes
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()

    async def admit(self, bytes_count: int) -> None:
        """Wait until all earlier pieces are sent at the constant rate (see `Pacer`)."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            begin = max(now(), self._free_at)
            await asyncio.sleep(begin - now())
            with self._lock:
                self._free_at = begin + bytes_count / self._rate

    def book(self, bytes_count: int) -> float | None:
        """Reserve the next piece's time, and return the seconds to wait.

        None, without a reservation, beyond `SHORT_SECONDS`.
        """
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            if begin - now > SHORT_SECONDS or self._turn.locked():
                return None
            self._free_at = begin + bytes_count / self._rate
            return begin - now
