"""The memory page that a rank and its agent share (layout: `everstep.protocol.rank_messages`).

The page has two halves: the agent writes one half, the rank writes the other.

Invariant: the agent writes its half before it sends a message that depends on the new content. After a restart, the
agent finds the announced facts on the page.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from everstep.protocol.rank_messages import (
    MAX_TARGET,
    RANK_WORD_BYTES,
    AgentHalf,
    RankHalf,
    read_agent_half,
    read_rank_half,
    write_agent_half,
)


class RankPage:
    """The page that one rank shares with the agent. The generation's `Member` object creates and closes it."""

    def __init__(self, path: Path, *, generation: int) -> None:
        """Open or create the shared page at `path`. Clear its content if it belongs to another generation."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RANK_WORD_BYTES)
            self._mapping = mmap.mmap(descriptor, RANK_WORD_BYTES)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._mapping)
        found = read_agent_half(self._view)
        self.agent = found if found is not None and found.generation == generation else AgentHalf(generation)
        self._rank = RankHalf(generation)
        if self.agent is not found:
            self._view[:] = bytes(RANK_WORD_BYTES)
            write_agent_half(self._view, self.agent)

    def write(self, half: AgentHalf) -> bool:
        """Write the agent's half of the shared page. Return whether this has changed the half's content."""
        if half == self.agent:
            return False
        write_agent_half(self._view, half)
        self.agent = half
        return True

    def rank(self) -> RankHalf:
        """Return what the rank has written to its half of the shared page.

        If the current content is corrupt or belongs to another generation, return the last valid content.
        """
        found = read_rank_half(self._view)
        if found is not None and found.generation == self.agent.generation:
            self._rank = found
        return self._rank

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the shared page; remove its file if `unlink` is True."""
        if unlink:
            self.path.unlink(missing_ok=True)
        self._view.release()
        self._mapping.close()


def last_agent_half(path: Path) -> AgentHalf | None:
    """Return the agent's half of the page that a rank of an earlier generation has left.

    The rank must have exited.

    Args:
        path: path of the page.

    Returns:
        The agent's half. None if the page is unreadable, or if its committed step exceeds the maximum number of steps
        of a training.
    """
    page = _left_page(path)
    half = read_agent_half(page) if page is not None else None
    return half if half is not None and half.committed <= MAX_TARGET else None


def last_half(path: Path) -> RankHalf | None:
    """Return the rank's half of a page, as the rank has left it at its exit.

    Args:
        path: path of the page.

    Returns:
        The rank's half. None if the rank wrote nothing, or if the page is corrupt.
    """
    page = _left_page(path)
    agent = read_agent_half(page) if page is not None else None
    half = read_rank_half(page) if page is not None and agent is not None else None
    return (
        half
        if agent is not None
        and half is not None
        and half.generation == agent.generation
        and half.boundary <= MAX_TARGET
        else None
    )


def _left_page(path: Path) -> memoryview | None:
    """Return the bytes of a page that a rank has left, or None if the file is not such a page.

    The script may have truncated, enlarged or replaced the file, so no more than a page is read, and no link is
    followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.read(descriptor, RANK_WORD_BYTES + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return memoryview(found) if len(found) == RANK_WORD_BYTES else None
