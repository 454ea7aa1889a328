"""Provides the control plane's clock: Unix time that never jumps.

NTP or an administrator may set the wall clock at any time. This clock advances with the kernel's boot clock, and
approaches the wall clock, so that differences deviate from the elapsed time by at most 5 %.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.05
"""Largest correction in seconds per second. A jump of 60 s is corrected within 20 minutes."""


def boot_seconds() -> float:
    """Return the seconds since boot, including suspended time."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """A clock that never jumps. A call of the object returns the current time. Thread-safe."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = boot_seconds) -> None:
        """Start at the wall clock's time. `wall` returns Unix seconds, and may jump. `elapsed` never jumps."""
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._read_at = elapsed()
        self._seconds = wall()

    def __call__(self) -> datetime:
        """Return the time as an aware datetime in UTC."""
        with self._lock:
            at = self._elapsed()
            passed, self._read_at = at - self._read_at, at
            ahead = self._wall() - (self._seconds + passed)
            self._seconds += passed + max(-SLEW * passed, min(SLEW * passed, ahead))
            return datetime.fromtimestamp(self._seconds, UTC)


steady_now = SteadyClock()
"""All code must use this instance, because two can differ after a clock jump."""


def steady_seconds() -> float:
    """Return the time of `steady_now` as Unix seconds."""
    return steady_now().timestamp()
