"""Work that a server does again and again in the background, until it stops; and how it waits in between."""

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
    """Do a piece of work in a thread, again and again; what it runs into ends nothing: the next turn begins anew.

    Args:
        work: blocks; where it returns True itself, more of it waits.
        stop: ends this, after the turn that is under way.
        seconds: from one turn to the next.
        trouble: what could not be done, in words, where a turn fails.
        more_seconds: from one turn to the next where more waits.
    """
    while not stop.is_set():
        is_more = False
        try:
            is_more = await asyncio.to_thread(work) is True
        except CloudError as error:
            log.warning("%s; it is tried again: %s", trouble, error)
        except Exception:
            log.exception("%s; it is tried again", trouble)
        await pause(more_seconds if is_more else seconds, until=stop)


async def pause(seconds: float, *, until: asyncio.Event) -> None:
    """Wait for an event, but no longer than this.

    Args:
        seconds: the longest that is waited.
        until: what ends it; set already, there is no pause.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()
