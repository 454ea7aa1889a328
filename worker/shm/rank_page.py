"""The page that a rank and its agent share (layout: `everstep.protocol.rank_messages`), mapped into the agent.

Invariant: the agent's half is what a restarted agent finds, so it is written before anything that depends on it is told
to another node.
"""

from __future__ import annotations

import mmap
import os
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
    """One rank's page. One owner: the node's `SlotStore`, which closes it."""

    def __init__(self, path: Path, *, generation: int) -> None:
        """Open the page at `path`, or make it; a page of another generation is cleared."""
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
        """Publish the agent's half; return whether it changed."""
        if half == self.agent:
            return False
        write_agent_half(self._view, half)
        self.agent = half
        return True

    def rank(self) -> RankHalf:
        """Return the newest whole half of the rank; of another generation, or written over by the script: the last good one."""
        found = read_rank_half(self._view)
        if found is not None and found.generation == self.agent.generation:
            self._rank = found
        return self._rank

    def close(self, *, unlink: bool = False) -> None:
        """Unmap, and remove the file if asked."""
        if unlink:
            self.path.unlink(missing_ok=True)
        self._view.release()
        self._mapping.close()


def last_agent_half(path: Path) -> AgentHalf | None:
    """Return what the agents of this node last wrote to a page. Called at the promise, when the rank is gone.

    Args:
        path: of the page.

    Returns:
        The agent's half; None if the page is unreadable, or its C is no step that training can reach.
    """
    page = memoryview(path.read_bytes()[:RANK_WORD_BYTES])
    half = read_agent_half(page) if len(page) == RANK_WORD_BYTES else None
    return half if half is not None and half.committed <= MAX_TARGET else None


def last_half(path: Path) -> RankHalf | None:
    """Return what a rank that is gone has left on its page.

    Args:
        path: of the page.

    Returns:
        Its half; None if it wrote none, or wrote over it.
    """
    with path.open("rb") as file:
        page = memoryview(file.read(RANK_WORD_BYTES + 1))  # the script may have written to it
    agent = read_agent_half(page) if len(page) == RANK_WORD_BYTES else None
    half = read_rank_half(page) if agent is not None else None
    return (
        half
        if agent is not None
        and half is not None
        and half.generation == agent.generation
        and half.boundary <= MAX_TARGET
        else None
    )
