"""Starts and ends asyncio tasks in groups, and signals changes to waiting tasks.

Invariant: a function of this module returns only after every task that it started has ended. Only the tasks of a
`Background` run on, until they end or their owner calls `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Signal:
    """Wakes all tasks that wait for a change, and increments `version`.

    A task passes the version that it has seen to `wait`, so it misses no change between two waits.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.version = 0

    def notify(self) -> None:
        """Increment `version`, and wake all tasks that wait in `wait`."""
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_seconds: float | None = None) -> int:
        """Wait until `version` differs from `seen`, or for the timeout, and return `version`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version == seen:
                    await self._event.wait()
        except TimeoutError:
            return self.version
        return self.version


class Background:
    """Background tasks of one owner, which ends all of them together. An exception that leaves a task is a bug."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Start `work` as a background task of this owner, and return the task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # The event loop's exception handler reports the exception as a bug.
            raise task.exception()  # type: ignore[misc]

    @property
    def is_idle(self) -> bool:
        """True if none of the tasks that `begin` started still runs."""
        return not self._tasks

    async def next_end(self) -> None:
        """Wait until one of the running tasks has ended."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    async def idle(self) -> None:
        """Wait until all tasks that `begin` started have ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Cancel all tasks that `begin` started, and wait until they have ended."""
        await end(*self._tasks)


async def first_of(*work: Coroutine[object, object, object]) -> None:
    """Run all of `work` until the first coroutine ends, then cancel the others. Raise the first one's error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    for task in done:
        task.result()


async def together(*work: Coroutine[object, object, None]) -> None:
    """Run all of `work` concurrently until all have ended. If a task fails, cancel the others and raise its error."""
    if not work:
        return
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end(*(task for task in tasks if not task.done()))
    # Of several errors, raise that of the first task in the given order.
    errors = [task.exception() for task in tasks if task in done and not task.cancelled()]
    for error in filter(None, errors):
        raise error


async def end(*tasks: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel tasks and wait until all have ended. None and errors of the tasks are ignored.

    Raises asyncio.CancelledError if the caller was cancelled, but only after the tasks have ended with their whole
    cleanup.
    """
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    try:
        await ended(*begun)
    finally:
        for task in begun:
            if task.done() and not task.cancelled():
                task.exception()  # mark the error as retrieved, so that asyncio does not log it


async def finish(work: Coroutine[object, object, object]) -> None:
    """Run `work`, a cleanup that ends soon by itself, to its end even if the caller is cancelled.

    Raises asyncio.CancelledError afterwards if the caller was cancelled.
    """
    task = asyncio.ensure_future(work)
    await ended(task)
    task.result()


async def ended(*work: asyncio.Future[Any]) -> None:
    """Wait until all of `work` has ended, successfully or with an error, even if the caller is cancelled.

    If all has already ended, the call returns without yielding to the event loop. Raises asyncio.CancelledError
    afterwards if the caller was cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [each for each in work if not each.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
