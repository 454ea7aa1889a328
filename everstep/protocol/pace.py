"""Slows senders down, so that a server keeps time for its other connections.

Invariant: a sender that stays below its rate never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

LONGEST_SECONDS: Final = 10.0
"""Longest wait, so that a caller does not wait for the work of callers that left while they waited."""


class Pace:
    """Slows callers that share it down to a rate of work. Used on the event loop only. A caller that pays more than
    `burst_seconds` beyond the time that has passed waits for the excess, at most `LONGEST_SECONDS`.
    """

    def __init__(
        self,
        burst_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._burst_seconds = burst_seconds
        self._monotonic = monotonic
        self._wait = wait
        self._paid_until = monotonic() - burst_seconds

    async def pay(self, seconds: float) -> None:
        """Pay for work in seconds, and wait until the caller may go on."""
        now = self._monotonic()
        paid_until = max(self._paid_until, now - self._burst_seconds) + seconds
        self._paid_until = min(paid_until, now + LONGEST_SECONDS)
        if self._paid_until > now:
            await self._wait(self._paid_until - now)
