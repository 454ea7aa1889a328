"""Base class of shared uploads and shared loads: several nodes transfer the parts of one S3 object.

Invariant: threads of the transfer and the event loop change the state only under one lock. After `end`, no helper's
task runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId
from worker.core.shared_parts import SharedParts
from worker.errors import PeerError, PeerLost
from worker.replication.streams import Receiver, Streams
from worker.replication.transport import Dialler, Session
from worker.tasks import end

log = logging.getLogger(__name__)
HELPER_RETRY_SECONDS = 0.1
"""Seconds between two attempts to reach a helper, which may not have received the generation's plan yet."""
HELPERS_CHECK_SECONDS = 0.1
"""Seconds between two checks for cancellation and late helpers, while a transfer waits for their parts."""


class PartSharing:
    """Divides the parts of one attempt to upload or load between a shard's owner and other nodes (its helpers)."""

    def __init__(self, state: SharedParts, peers: Sequence[NodeId], name: str) -> None:
        """Create the object; no helper is asked for parts yet. `name` is for the names of tasks."""
        self.peers = peers
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._is_closed = False
        self._check: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        """Guards the state and all attributes that the transfer's threads and the event loop share."""
        self._state = state
        self._claimed_at: dict[int, float] = {}
        """Monotonic time at which the owner claimed each unfinished part, by part number."""
        self._own_seconds = 0.0

    def claim(self, number: int) -> bool:
        """Return whether this node must transfer part `number`; if not, a helper does."""
        with self._changed:
            self._state, is_own = self._state.claim(number)
            if is_own:
                self._claimed_at[number] = monotonic()
        return is_own

    def end(self) -> None:
        """Stop the requests to helpers. Called in a thread; blocks until their tasks have ended."""
        # If the event loop ends, it cancels the coroutine, and `result` raises CancelledError.
        with suppress(concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    def _end_own(self, number: int) -> None:
        with self._changed:
            claimed_at = self._claimed_at.pop(number, None)
            if claimed_at is not None:
                self._own_seconds = max(self._own_seconds, monotonic() - claimed_at)

    def _slowest_seconds(self, now: float) -> float:
        """Return the longest time for one of the owner's parts, finished or not. The caller holds the lock."""
        return max([self._own_seconds, *(now - since for since in self._claimed_at.values())])

    def _next_missing(self, review: Callable[[float, float], None], has_failed: Callable[[], bool]) -> int | None:
        """Wait for a part that a helper failed to transfer; None if no such part is left, or `has_failed`."""
        with self._changed:
            while True:
                self._check()
                if has_failed():
                    return None
                now = monotonic()
                review(now, self._slowest_seconds(now))
                self._state, number = self._state.take_missing()
                if number is not None or self._state.is_settled:
                    return number
                self._changed.wait(HELPERS_CHECK_SECONDS)

    async def _close(self) -> None:
        self._is_closed = True
        await end(*self._tasks.values())

    def _ask_all(self) -> None:
        if not self._is_closed:
            for peer in self.peers:
                self._tasks[peer] = asyncio.create_task(self._run(peer), name=f"{self._name} with {peer}")

    async def _run(self, peer: NodeId) -> None:
        raise NotImplementedError


async def dial(dialler: Dialler) -> Session:
    """Open a session to a helper. Repeat failed attempts until one succeeds or the caller is cancelled."""
    while True:
        try:
            return await dialler.session()
        except PeerError as error:
            log.debug("a helper node of a load cannot be reached yet: %s", error)
            await asyncio.sleep(HELPER_RETRY_SECONDS)


async def deliver(streams: Streams, line: socket.socket, receiver: Receiver) -> None:
    """Receive chunks from a helper over a stream until the stream ends. Then raise PeerLost."""
    await streams.run(line, receiver.receive)
    raise PeerLost("the helper node closed its stream")


async def silent(session: Session) -> None:
    """Wait until the owner disconnects. Raises MalformedMessage if it sends a message before `ReadyToLoad`."""
    message = await session.receive()
    raise MalformedMessage(f"{type(message).__name__} received before this node was ready to help")
