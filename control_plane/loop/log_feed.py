"""Lines of ranks on their way from agents to whoever follows them. On the server's event loop.

Invariant: what waits for a follower is bounded; what is dropped is in the object store, and its follower knows from the
numbers that it is missing.
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
MAX_FOLLOWERS_PER_TOKEN: Final = 16
"""Of one token, so that no caller follows all of them."""
WAITING_LIMIT: Final = 256
"""Messages that wait for one follower; the oldest are dropped."""


class TooManyLogFollowers(Exception):
    """As many follow as may."""


class LogFollower:
    """The reader of one followed run.

    Args:
        token_id: that the reader called with.
    """

    def __init__(self, token_id: str) -> None:
        self.token_id = token_id
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
    def follow(self, run: RunId, token_id: str) -> Iterator[LogFollower]:
        """Give a follower for the time of the block.

        Args:
            run: whose lines.
            token_id: of the reader.

        Yields:
            It.

        Raises:
            TooManyLogFollowers: as many follow as may, in all or with this token.
        """
        open_now = [follower for of_run in self._followers.values() for follower in of_run]
        if (
            len(open_now) >= MAX_FOLLOWERS
            or sum(follower.token_id == token_id for follower in open_now) >= MAX_FOLLOWERS_PER_TOKEN
        ):
            raise TooManyLogFollowers
        follower = LogFollower(token_id)
        self._followers.setdefault(run, set()).add(follower)
        try:
            yield follower
        finally:
            self._followers[run].discard(follower)
            if not self._followers[run]:
                del self._followers[run]
