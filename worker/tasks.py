"""Structured waiting: tasks that begin and end together, and something that wakes whoever waits for a change.

Invariant: nobody returns from here while a task that was begun here still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Signal:
    """Wakes everybody who waits for something to change; a change between two waits is not missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.version = 0

    def notify(self) -> None:
        """Wake all who wait."""
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_seconds: float | None = None) -> int:
        """Return the version as soon as it is not `seen`, or as it is when the time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version == seen:
                    await self._event.wait()
        except TimeoutError:
            return self.version
        return self.version


async def first_of(*work: Coroutine[object, object, object]) -> None:
    """Run all of `work` until the first ends; end the others, then raise what the first raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    for task in done:
        task.result()


async def together(*work: Coroutine[object, object, None]) -> None:
    """Run all of `work` at once until all have ended; when one fails, end the others and raise what it raised, of several the first in order."""
    if not work:
        return
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end(*(task for task in tasks if not task.done()))
    errors = [task.exception() for task in tasks if task in done and not task.cancelled()]
    for error in filter(None, errors):
        raise error


async def end(*tasks: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel tasks, each once, and wait until they have ended; what they raise is dropped.

    Args:
        *tasks: None is passed over.

    Raises:
        asyncio.CancelledError: the caller was cancelled; the tasks have ended, and what they do at their end was not
            cut short.
    """
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    try:
        await ended(*begun)
    finally:
        for task in begun:
            if task.done() and not task.cancelled():
                task.exception()  # it is told


async def finish(work: Coroutine[object, object, object]) -> None:
    """Run `work` to its end, also when the caller is cancelled meanwhile; the cancellation is raised afterwards.

    Args:
        work: an ending, which ends soon by itself.

    Raises:
        asyncio.CancelledError: the caller was cancelled; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    await ended(task)
    task.result()


async def ended(*work: asyncio.Future[Any]) -> None:
    """Wait until work has ended, whatever came of it, also when the caller is cancelled meanwhile.

    What has ended before takes no turn of the loop.

    Args:
        *work: goes on if the caller is cancelled.

    Raises:
        asyncio.CancelledError: the caller was cancelled; all has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [each for each in work if not each.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
