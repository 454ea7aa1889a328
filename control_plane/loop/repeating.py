"""Helpers for background loops, which repeat their work until the server stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from control_plane.cloud.errors import CloudError

log = logging.getLogger(__name__)


async def repeat(
    work: Callable[[], object], stop: asyncio.Event, *, seconds: float, trouble: str, more_seconds: float = 0.0
) -> None:
    """Call `work` again and again, in a thread, until `stop` is set. An exception is logged.

    `work` returns True if more work is due after `more_seconds` instead of `seconds`.
    """
    while not stop.is_set():
        is_more = False
        try:
            is_more = await asyncio.to_thread(work) is True
        except CloudError as error:
            log.warning("%s; the next attempt follows: %s", trouble, error)
        except Exception:
            log.exception("%s; the next attempt follows", trouble)
        await pause(more_seconds if is_more else seconds, until=stop)


async def pause(seconds: float, *, until: asyncio.Event) -> None:
    """Wait until an event is set, at most for the given time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()
