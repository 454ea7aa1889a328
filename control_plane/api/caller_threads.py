"""Limits what one caller of the API takes from the others: threads in which requests block, the disk, and time.

    request ─▶ turn of its token ─▶ turn of its project ─▶ thread: database, S3
               at most PER_TOKEN    at most PER_PROJECT     CALLER_THREADS

Without shares, the slow requests of one caller would hold all threads. Loops use the event loop's
own threads, which nothing in `api` may use; agents and the search for tokens have `Workers`. Requests without a token
share a turn per address and path (`api.auth`). A call whose caller disconnects before its turn never
starts.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from control_plane.api.errors import Throttled

T = TypeVar("T")

CALLER_THREADS: Final = 40
PER_PROJECT: Final = 4
PER_TOKEN: Final = 2
"""Limit of running calls of one token. Python's threads share one core, so more would only slow the other callers."""
MOST_WAITING: Final = 64
"""Limit of waiting calls of one token."""
STRANGER_SECONDS: Final = 0.02
"""Seconds that the refusal of a request without a valid token costs (`Pace`): 50 refusals per second."""
STRANGER_BURST_SECONDS: Final = 4.0
HANDSHAKE_THREADS: Final = 2
"""Number of threads that look for the tokens of connecting agents. Callers of the API do not wait for these threads."""
AGENT_THREADS: Final = 16
"""Number of threads for the connections of agents whose tokens are valid."""
LOOK_UPS: Final = 4
"""Number of threads that look for the tokens of requests, so that strangers with wrong tokens delay only each other."""
UPLOAD_BYTES_PER_SECOND: Final = 64 * 1024 * 1024
"""Rate of all uploads together, because the event loop hashes them."""
UPLOAD_BURST_SECONDS: Final = 1.0
SPOOLED_BODIES: Final = 8
"""Limit of bodies of the largest size on a server's disk."""
CALLER: Final[contextvars.ContextVar[tuple[str, str]]] = contextvars.ContextVar("caller", default=("", ""))
"""Project and token of the running request, or a similar pair without a token. `api.auth` sets it."""
REFUSED_CALLS: Final = 600
"""Limit of a token's refused calls in a burst, each with an entry in the audit log."""
REFUSED_CALLS_PER_SECOND: Final = 0.2
MOST_TOKENS: Final = 10_000
OPEN_DOWNLOADS: Final = 16
"""Limit of one token's simultaneous downloads. Each holds up to 3 MiB."""


class _Turns:
    """Calls of one token or project. Used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_idle(self) -> bool:
        return not (self._running or self.waiting)

    async def enter(self) -> None:
        """Wait for the next turn, first come, first served. A cancelled caller gets none."""
        if self._running < self._limit and not self.waiting:
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            elif turn in self.waiting:  # `leave` may have removed a cancelled turn already
                self.waiting.remove(turn)
            raise

    def leave(self) -> None:
        """End a turn, and give it to the longest waiting call."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1


class CallerThreads:
    """The threads of one server in which API requests block.

    `per_project` and `per_token` limit running calls, and `most_waiting` further calls of a token.
    """

    def __init__(
        self,
        threads: int = CALLER_THREADS,
        per_project: int = PER_PROJECT,
        per_token: int = PER_TOKEN,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="caller")
        self._limits = per_project, per_token
        self._most_waiting = most_waiting
        self._turns: dict[tuple[str, str], _Turns] = {}
        self._closed = threading.Event()

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function in a thread, once its token and project have a turn.

        Raises Throttled if too many wait. Called on the event loop, in the task of the request.
        """
        return await self._run(work, arguments, self._most_waiting)

    async def finish(self, work: Callable[..., T]) -> T:
        """Run the end of a call that `run` has admitted. The end is never refused."""
        return await self._run(work, (), None)

    async def _run(self, work: Callable[..., T], arguments: tuple[object, ...], most_waiting: int | None) -> T:
        project, token = CALLER.get()
        turns = []
        try:
            for key, limit in zip((("token", token), ("project", project)), reversed(self._limits), strict=True):
                queue = self._turns.setdefault(key, _Turns(limit))
                if most_waiting is not None and token and key[0] == "token" and len(queue.waiting) >= most_waiting:
                    raise Throttled(
                        "Too many requests of this caller wait for an answer.", hint="Send fewer at a time."
                    )
                await queue.enter()
                turns.append(key)
            future = self._pool.submit(contextvars.copy_context().run, work, *arguments)
        except BaseException:
            self._leave(turns)
            raise
        loop = asyncio.get_running_loop()

        def leave(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._leave, turns)

        # A thread keeps its turn until it has ended, also if the caller has disconnected.
        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _leave(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            turns = self._turns[key]
            turns.leave()
            if turns.is_idle:
                del self._turns[key]

    def is_closed(self) -> bool:
        """Return whether the server is shutting down, so that long work returns early. Callable from any thread."""
        return self._closed.is_set()

    def close(self) -> None:
        """Reject new work, without waiting for running work."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class Workers:
    """A few threads for one kind of blocking work, so that much of it delays no other kind.

    `count` calls run at the same time, in the context of their callers. Further calls wait.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function in a thread. Return or raise what it returns or raises."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(work, *arguments))

    def close(self) -> None:
        """Reject new work, without waiting for running work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class EventAllowance:
    """Limits the events that each token may cause. The allowance grows back over time. Used on the event loop only."""

    def __init__(self, most: float, per_second: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_second, self._monotonic = most, per_second, monotonic
        self._spent: dict[str, tuple[float, float]] = {}
        """Spent events and the time of this count, by token. A missing token has spent none."""

    def is_left(self, token: str) -> bool:
        """Return whether a token may cause an event."""
        return self._of(token) + 1 <= self._most

    def spend(self, token: str) -> None:
        """Count an event of a token."""
        if len(self._spent) > MOST_TOKENS:
            self._spent = {each: self._spent[each] for each in self._spent if self._of(each) > 0}
        self._spent[token] = self._of(token) + 1, self._monotonic()

    def _of(self, token: str) -> float:
        spent, at = self._spent.get(token, (0.0, 0.0))
        return max(0.0, spent - (self._monotonic() - at) * self._per_second)


class SpoolRoom:
    """Counts the bytes that requests may write to this server's disk. Used on the event loop only."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, project: str, size_bytes: int, largest_bytes: int) -> Iterator[None]:
        """Reserve room for one body while the block runs.

        A project may hold twice `largest_bytes`, and all projects together `SPOOLED_BODIES` times `largest_bytes`.
        Raises Throttled if the room is taken.
        """
        is_full = self._held.total() + size_bytes > SPOOLED_BODIES * largest_bytes
        if is_full or self._held[project] + size_bytes > 2 * largest_bytes:
            raise Throttled("Too many uploads are in progress.", hint="Retry when one of them has ended.")
        self._held[project] += size_bytes
        try:
            yield
        finally:
            self._held[project] -= size_bytes
            if not self._held[project]:
                del self._held[project]
