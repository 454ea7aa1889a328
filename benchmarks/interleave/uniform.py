"""Contains the pacer (the rule for when chunks are sent) of the compared scheme UNIFORM: a constant rate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from worker.replication.pacing import SHORT_SECONDS


class UniformPacer:
    """Delays the pieces of a transfer, so that the node sends at a constant rate, whatever training does.

    If the sender pauses, the unused time is lost: later pieces are not sent faster.

    Args:
        bytes_per_second: rate of the node: bytes of all copies of a snapshot ÷ intended seconds of sending them.
        chunk_bytes: size of a piece.
        clock: returns the time of the event loop's clock, for calls from other threads.
    """

    def __init__(self, bytes_per_second: float, chunk_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.chunk_bytes = chunk_bytes
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()

    async def admit(self, bytes_count: int) -> None:
        """Wait until all earlier pieces are sent at the constant rate.

        Then the caller may send its piece (see `Pacer`).
        """
        now = asyncio.get_running_loop().time
        async with self._turn:
            begin = max(now(), self._free_at)
            await asyncio.sleep(begin - now())
            with self._lock:
                self._free_at = begin + bytes_count / self._rate

    def book(self, bytes_count: int) -> float | None:
        """Reserve the time at which the next piece is sent, if the wait is within `SHORT_SECONDS` (see `Pacer`).

        Return the seconds to wait. Return None, without a reservation, if the wait is longer.
        """
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            if begin - now > SHORT_SECONDS or self._turn.locked():
                return None
            self._free_at = begin + bytes_count / self._rate
            return begin - now
