"""Runs the work of many keys with bounded concurrency.

    wake(key)   due ──▶ running ──▶ done       a key whose work runs becomes due again when that work ends
                 first in, first out; at most `limit` keys run

Invariant: the work of one key never runs twice at the same time, and it runs after each wake-up of the key. The only
exception are wake-ups during a key's back-off and after `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Generic, TypeVar

FIRST_BACKOFF_SECONDS = 0.5
"""Back-off after the second failure in a row. It doubles with each further failure.

There is no back-off after the first failure, because most failures are short losses of the database connection.
"""
MAX_BACKOFF_SECONDS = 2.0
"""Longest back-off. A recovery that begins when the common cause of all failures has ended waits at most this long."""

K = TypeVar("K", bound=Hashable)


class Scheduler(Generic[K]):
    """Runs `work` for the keys that callers wake.

    All methods run on the server's event loop. An exception of `work` delays the next run of its key only. `work` logs
    its exceptions; the scheduler does not.

    Args:
        work: async function that is called with a key.
        limit: number of keys whose work may run at the same time.
        monotonic: seconds of a clock that never jumps, for the back-off.
    """

    def __init__(self, work: Callable[[K], Awaitable[object]], limit: int, monotonic: Callable[[], float]) -> None:
        self._work = work
        self._limit = limit
        self._monotonic = monotonic
        self._due: dict[K, asyncio.Future[None]] = {}
        """Keys that wait for their run, in order, each with the future that ends with this run."""
        self._running: dict[K, asyncio.Task[None]] = {}
        self._again: set[K] = set()
        """Running keys that were woken since their run began."""
        self._failure_count: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._is_closed = False

    def wake(self, key: K) -> asyncio.Future[None] | None:
        """Request a run that begins after this call.

        Args:
            key: the key to run. Several wake-ups before the run begins cause one run.

        Returns:
            A future that ends with the requested run. None if the key runs now and is run again afterwards, or if the
            call has no effect: during the key's back-off, after which the caller must wake it again, and after `close`.
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
        """Wake keys, and wait until their runs have begun and most of them have ended.

        A key that already runs is not waited for, so a key that is stuck delays at most one sweep.

        Args:
            keys: the keys to wake, in order.
            patience_seconds: longest wait for the runs' ends, counted from the begin of the last run.
        """
        ends = [ended for key in keys if (ended := self.wake(key)) is not None]
        while self._due:  # all places are taken while a key is due
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        if ends:
            await asyncio.wait(ends, timeout=patience_seconds)

    def retain(self, keys: frozenset[K]) -> None:
        """Drop the failures of all other keys, which no caller will wake again."""
        for key in self._failure_count.keys() - keys:
            self._succeeded(key)

    async def idle(self) -> None:
        """Wait until no key is due and no work runs."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def close(self) -> None:
        """Start no further run, and wait for the running ones."""
        self._is_closed = True
        for ended in self._due.values():
            ended.cancel()
        self._due.clear()
        await self.idle()

    def cancel(self) -> None:
        """Cancel all runs. The caller does not wait for their end."""
        self._is_closed = True
        for ended in self._due.values():
            ended.cancel()
        self._due.clear()
        for task in self._running.values():
            task.cancel()

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
        """Free the key's place. The event loop calls this also for a task that was cancelled before it began."""
        del self._running[key]
        if not ended.done():
            ended.set_result(None)
        if key in self._again:
            self._again.discard(key)
            self.wake(key)  # behind the keys that are due, so that no key occupies a place for ever
        self._fill()

    def _failed(self, key: K) -> None:
        count = self._failure_count[key] = self._failure_count.get(key, 0) + 1
        if count > 1:
            # the exponent is limited, because 2.0 ** 1024 overflows
            seconds = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(count - 2, 10))
            self._not_before[key] = self._monotonic() + seconds

    def _succeeded(self, key: K) -> None:
        self._failure_count.pop(key, None)
        self._not_before.pop(key, None)
