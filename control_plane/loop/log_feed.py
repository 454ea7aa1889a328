"""Passes new log lines from agents to log followers, the API clients that follow a run's log.

Invariant: each follower's queue is bounded. A follower detects dropped lines by missing line numbers, and can read them
from the object store later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from everstep.protocol.agent_messages import LogLines
from everstep.protocol.ids import NodeId, RunId
from everstep.protocol.log_chunks import held_characters

WAITING_LIMIT: Final = 256
"""Limit of queued messages per follower. Above the limit, the follower drops its oldest message."""
WAITING_CHARACTERS: Final = 1 << 22
"""Limit of the characters in the queued messages. A message that alone exceeds it is dropped."""


class TooManyLogFollowers(Exception):
    """Too many log followers are open, in total or for the caller's token."""


class LogFollower:
    """One API client that follows a run's log, with the lines that it has not taken yet."""

    def __init__(self, token_id: str) -> None:
        self.token_id = token_id
        self._waiting: deque[tuple[NodeId, LogLines]] = deque()
        self._characters = 0
        self._filled = asyncio.Event()
        self._nodes: Collection[str] = ()

    def listen_to(self, nodes: Collection[str]) -> None:
        """Accept lines of these nodes only, so that no other node fills the queue. Initially none."""
        self._nodes = nodes

    def put(self, node_id: NodeId, lines: LogLines) -> None:
        """Queue lines of a node. A full queue drops its oldest messages."""
        if node_id not in self._nodes:
            return
        self._waiting.append((node_id, lines))
        self._characters += held_characters(lines.lines)
        while len(self._waiting) > WAITING_LIMIT or self._characters > WAITING_CHARACTERS:
            self._pop()
        self._filled.set()

    async def take(self, timeout_seconds: float) -> tuple[NodeId, LogLines] | None:
        """Remove the oldest queued message and return it. Return None after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._waiting:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            return None
        return self._pop()

    def _pop(self) -> tuple[NodeId, LogLines]:
        node_id, lines = self._waiting.popleft()
        self._characters -= held_characters(lines.lines)
        return node_id, lines


class LogFeed:
    """All open log followers of one server, by run. The limit per token protects the limit of all followers."""

    def __init__(self, *, follower_limit: int = 64, followers_per_token_limit: int = 16) -> None:
        self._follower_limit = follower_limit
        self._followers_per_token_limit = followers_per_token_limit
        self._followers: dict[RunId, set[LogFollower]] = {}

    def deliver(self, node_id: NodeId, lines: LogLines) -> None:
        """Queue an agent's lines for all followers of their run."""
        for follower in self._followers.get(lines.run, ()):
            follower.put(node_id, lines)

    @contextmanager
    def follow(self, run: RunId, token_id: str) -> Iterator[LogFollower]:
        """Register a follower until the block ends. Raises TooManyLogFollowers if a limit is reached."""
        open_now = [follower for of_run in self._followers.values() for follower in of_run]
        if (
            len(open_now) >= self._follower_limit
            or sum(follower.token_id == token_id for follower in open_now) >= self._followers_per_token_limit
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
