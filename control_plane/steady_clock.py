"""The control plane's clock: Unix time that a step of the wall clock does not move.

Silences and deadlines are differences of two readings of this clock. NTP or an administrator may step the wall clock at
any time. This clock runs with the kernel's boot clock and approaches the wall clock slowly.

Invariant: within a process, a difference of two readings is within 5 % of the time that has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.05
"""Seconds per second by which this clock may approach the wall clock: a step of one minute is made good in twenty."""


def boot_seconds() -> float:
    """Return the seconds since boot, suspended time included."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """Calling it returns the time. Threads may share one."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = boot_seconds) -> None:
        """Start at the wall clock's time.

        Args:
            wall: Unix seconds; may be stepped.
            elapsed: seconds of a clock that is never stepped.
        """
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._read_at = elapsed()
        self._seconds = wall()

    def __call__(self) -> datetime:
        """Return the time, aware and in UTC."""
        with self._lock:
            at = self._elapsed()
            passed, self._read_at = at - self._read_at, at
            ahead = self._wall() - (self._seconds + passed)
            self._seconds += passed + max(-SLEW * passed, min(SLEW * passed, ahead))
            return datetime.fromtimestamp(self._seconds, UTC)


steady_now = SteadyClock()
"""The process's one clock: two clocks would differ after a step."""


def steady_seconds() -> float:
    """Return the same time as Unix seconds."""
    return steady_now().timestamp()
