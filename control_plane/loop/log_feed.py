"""Lines of ranks on their way from agents to whoever follows them. On the server's event loop.

Invariant: what waits for a follower is bounded; what is dropped is in the object store, and its follower knows from the numbers that it is missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from everstep.protocol.agent_messages import LogLines
from everstep.protocol.ids import NodeId, RunId

MAX_FOLLOWERS: Final = 64
"""Logs that are followed at one time."""
WAITING_LIMIT: Final = 256
"""Messages that wait for one follower; the oldest are dropped."""


class TooManyLogFollowers(Exception):
    """As many follow as may."""


class LogFollower:
    """One who follows a run."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[NodeId, LogLines]] = deque(maxlen=WAITING_LIMIT)
        self._filled = asyncio.Event()

    def put(self, node_id: NodeId, lines: LogLines) -> None:
        """Take lines of a node."""
        self._waiting.append((node_id, lines))
        self._filled.set()

    async def take(self, timeout_seconds: float) -> tuple[NodeId, LogLines] | None:
        """Return the oldest message that waits, or None if none comes in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._waiting:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            return None
        return self._waiting.popleft()


class LogFeed:
    """All who follow, by run."""

    def __init__(self) -> None:
        self._followers: dict[RunId, set[LogFollower]] = {}

    def deliver(self, node_id: NodeId, lines: LogLines) -> None:
        """Pass on what an agent has sent."""
        for follower in self._followers.get(lines.run, ()):
            follower.put(node_id, lines)

    @contextmanager
    def follow(self, run: RunId) -> Iterator[LogFollower]:
        """Give a follower for the time of the block.

        Args:
            run: whose lines.

        Yields:
            It.

        Raises:
            TooManyLogFollowers: as many as may follow already.
        """
        if sum(len(of_run) for of_run in self._followers.values()) >= MAX_FOLLOWERS:
            raise TooManyLogFollowers
        follower = LogFollower()
        self._followers.setdefault(run, set()).add(follower)
        try:
            yield follower
        finally:
            self._followers[run].discard(follower)
            if not self._followers[run]:
                del self._followers[run]
