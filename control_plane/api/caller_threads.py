"""Threads for what callers read and upload: they wait for S3 in these, and never in those of the loops, of the agents' door and of every sign-in.

Invariant: no more of it is under way than there are threads, whoever has left meanwhile; what waits for a thread when
its caller leaves is not begun.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

CALLER_THREADS: Final = 8


class CallerThreads:
    """A few threads of one server, for coroutines that answer callers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(CALLER_THREADS, thread_name_prefix="caller")
        self._closed = threading.Event()

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do what blocks in one of the threads; called on the event loop.

        Args:
            work: what to do.
            *arguments: its own.

        Returns:
            What it returns.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def is_closed(self) -> bool:
        """Say whether the server ends; from any thread.

        Python waits for its threads then: what takes long looks here, and leaves off.
        """
        return self._closed.is_set()

    def close(self) -> None:
        """Begin nothing more; called once by the composition root. What is under way is not waited for here."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
