"""Provides the control plane's clock: Unix time that never jumps.

The control plane computes deadlines, and how long an agent has been silent, as differences of two clock readings. NTP
or an administrator may set the wall clock at any time. This clock therefore advances with the kernel's boot clock, and
approaches the wall clock slowly.

Invariant: within a process, the difference of two readings deviates from the elapsed time by at most 5 %.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.05
"""Maximum correction toward the wall clock, in seconds per second.

After the wall clock jumps by 60 s, this clock agrees with the wall clock again within 20 minutes.
"""


def boot_seconds() -> float:
    """Return the seconds since boot, including suspended time."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """A clock that never jumps. A call of the object returns the current time. Thread-safe."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = boot_seconds) -> None:
        """Start the clock at the current time of the wall clock.

        Args:
            wall: returns Unix seconds; may jump.
            elapsed: returns the seconds of a clock that never jumps, such as `boot_seconds`.
        """
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
"""The clock of this process. All code must use this instance, because two instances can differ after a clock jump."""


def steady_seconds() -> float:
    """Return the time of `steady_now` as Unix seconds."""
    return steady_now().timestamp()
