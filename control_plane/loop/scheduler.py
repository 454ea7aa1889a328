"""Calls `work` for many keys (such as run ids), with a limit of simultaneous calls.

    wake(key)   due ──▶ running ──▶ done       a running key that is woken becomes due again when its call ends
                 first in, first out; at most `limit` keys run

Invariant: two calls for one key never overlap. After each wake-up of a key, a call for this key begins. Wake-ups in a
key's back-off (the pause after repeated failures) and after `close` have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Generic, TypeVar

FIRST_BACKOFF_SECONDS = 0.5
"""Back-off (pause before the next call) after a key's second failure in a row, in seconds.

The back-off doubles with each further failure. The first failure causes no back-off, because most failures are short
losses of the database connection.
"""
MAX_BACKOFF_SECONDS = 2.0
"""Longest back-off in seconds. It delays a job's next call by at most this time once the cause has ended."""

K = TypeVar("K", bound=Hashable)


class Scheduler(Generic[K]):
    """Calls `work` for each key, such as a job's run id, after a caller has called `wake` with the key.

    All methods run on the server's event loop. An exception of `work` delays only the next call for its key. `work`
    must log its own exceptions, because the scheduler does not.

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
        """Keys (such as run ids) whose work waits, in order, each with the future that ends with this work."""
        self._running: dict[K, asyncio.Task[None]] = {}
        self._again: set[K] = set()
        """Keys whose work runs now and was requested again since it began."""
        self._failure_count: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._is_closed = False

    def wake(self, key: K) -> asyncio.Future[None] | None:
        """Request that the loop processes a job or fleet (the key) once more, beginning after this call.

        Args:
            key: the job or fleet to process. Several calls before the processing begins have the effect of one.

        Returns:
            A future that is done when the requested processing has ended. None if the key is being processed now: the
            requested processing then follows. Also None if the call has no effect, because the key waits after a
            failure (back-off) or `close` was called.
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
        """Process all jobs or fleets in `keys` once.

        The call returns when the work for every key has begun, and has ended or `patience_seconds` have passed. It
        does not wait for work that was already in progress. Work that hangs therefore delays at most one sweep.

        Args:
            keys: the keys (such as run ids) of the jobs or fleets to process, in order.
            patience_seconds: longest wait for the end of the work, counted from the start of the last key's work.
        """
        ends = [ended for key in keys if (ended := self.wake(key)) is not None]
        while self._due:  # Work for some keys (jobs or fleets) has not started: wait until running work ends.
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        if ends:
            await asyncio.wait(ends, timeout=patience_seconds)

    def retain(self, keys: frozenset[K]) -> None:
        """Forget the failures of all jobs or fleets (keys) that are not in `keys`.

        The caller passes all jobs or fleets that exist and have not ended.
        """
        for key in self._failure_count.keys() - keys:
            self._succeeded(key)

    async def idle(self) -> None:
        """Wait until no job or fleet is being processed, and all processing that `wake` has requested has ended."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def close(self) -> None:
        """Start no further processing of a job or fleet, and wait until the processing in progress has ended."""
        self._begin_nothing()
        await self.idle()

    def cancel(self) -> None:
        """Cancel the processing of all jobs or fleets. The caller does not wait for its end."""
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
        """Record that the work for a key (such as a run id) has ended, and begin the work for keys that are due.

        The event loop calls this method even if the task was cancelled before its start.
        """
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
