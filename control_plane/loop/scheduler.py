"""Calls `work` for many keys (such as run ids), with a limit of simultaneous calls.

    wake(key)   due ──▶ running ──▶ done       a running key that is woken becomes due again when its call ends
                 first in, first out; at most `limit` keys run

Invariant: two calls for one key never overlap. After each wake-up of a key, a call for this key begins. Wake-ups in a
key's back-off and after `close` have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Generic, TypeVar

# The first failure causes no back-off, because most failures are short losses of the database connection.
FIRST_BACKOFF_SECONDS = 0.5
"""Pause after a key's second failure in a row, doubled with each further failure."""
MAX_BACKOFF_SECONDS = 2.0
"""Longest pause, and so the longest delay of a job's next call once the cause has ended."""

K = TypeVar("K", bound=Hashable)


class Scheduler(Generic[K]):
    """Calls `work` for each key after a caller has called `wake` with the key. All methods run on the event loop.

    `work` must log its own exceptions, which delay only the next call for its key. At most `limit` calls run at a time.
    """

    def __init__(self, work: Callable[[K], Awaitable[object]], limit: int, monotonic: Callable[[], float]) -> None:
        self._work = work
        self._limit = limit
        self._monotonic = monotonic
        self._due: dict[K, asyncio.Future[None]] = {}
        """Keys whose work waits, in order, each with the future that ends with this work."""
        self._running: dict[K, asyncio.Task[None]] = {}
        self._again: set[K] = set()
        self._failure_count: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._is_closed = False

    def wake(self, key: K) -> asyncio.Future[None] | None:
        """Request one more call for a key, beginning after this call of `wake`.

        Return a future that is done when the requested call has ended. None if a call for the key runs now, which the
        requested one then follows, or if the request has no effect.
        """
        if self._is_closed or self._monotonic() < self._not_before.get(key, float("-inf")):
            return None
        if key in self._running:
            self._again.add(key)
            return None
        ended = self._due.setdefault(key, asyncio.get_running_loop().create_future())
        self._fill()
        return ended

    async def sweep(self, keys: Iterable[K], patience_seconds: float) -> None:
        """Wake all keys in order, and wait for at most `patience_seconds` after the last call has begun."""
        # Work already in progress is not waited for, so work that hangs delays at most one sweep.
        ends = [ended for key in keys if (ended := self.wake(key)) is not None]
        while self._due:  # Work for some keys (jobs or fleets) has not started: wait until running work ends.
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        if ends:
            await asyncio.wait(ends, timeout=patience_seconds)

    def retain(self, keys: frozenset[K]) -> None:
        """Forget the failures of all keys that are not in `keys`."""
        for key in self._failure_count.keys() - keys:
            self._succeeded(key)

    async def idle(self) -> None:
        """Wait until no call runs, and all requested calls have ended."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def close(self) -> None:
        """Start no further call, and wait until running calls have ended."""
        self._begin_nothing()
        await self.idle()

    def cancel(self) -> None:
        """Cancel all running calls. The caller does not wait for their end."""
        self._begin_nothing()
        for task in self._running.values():
            task.cancel()

    def _begin_nothing(self) -> None:
        self._is_closed = True
        for ended in self._due.values():
            ended.cancel()
        self._due.clear()

    def _fill(self) -> None:
        while self._due and len(self._running) < self._limit:
            key = next(iter(self._due))
            ended = self._due.pop(key)
            task = self._running[key] = asyncio.create_task(self._run(key))
            task.add_done_callback(partial(self._end, key, ended))

    async def _run(self, key: K) -> None:
        try:
            await self._work(key)
        except Exception:
            self._failed(key)
        else:
            self._succeeded(key)

    def _end(self, key: K, ended: asyncio.Future[None], _task: asyncio.Task[None]) -> None:
        """Begin the work for keys that are due. Runs even if the task was cancelled before its start."""
        del self._running[key]
        if not ended.done():
            ended.set_result(None)
        if key in self._again:
            self._again.discard(key)
            self.wake(key)  # Queue this job or fleet behind all others, so that it does not delay them.
        self._fill()

    def _failed(self, key: K) -> None:
        count = self._failure_count[key] = self._failure_count.get(key, 0) + 1
        if count > 1:
            # The exponent is limited, because 2.0 ** 1024 overflows.
            seconds = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(count - 2, 10))
            self._not_before[key] = self._monotonic() + seconds

    def _succeeded(self, key: K) -> None:
        self._failure_count.pop(key, None)
        self._not_before.pop(key, None)
