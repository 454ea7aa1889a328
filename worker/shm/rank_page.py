"""The memory page that a rank and its agent share (layout: `everstep.protocol.rank_messages`).

Invariant: the agent writes its half before it sends a message that depends on the new content. After a restart, the
agent finds the announced facts on the page.
"""

from __future__ import annotations

import mmap
import os

from everstep.protocol.limits import MAX_RANK_STEP
from everstep.protocol.rank_messages import (
    RANK_WORD_BYTES,
    AgentHalf,
    RankHalf,
    read_agent_half,
    read_rank_half,
    write_agent_half,
)
from worker.shm.held_files import HeldFiles, create_file, seal


class RankPage:
    """The page that one rank shares with the agent. The generation's `Member` object creates and closes it."""

    def __init__(self, name: str, files: HeldFiles, *, generation: int) -> None:
        """Open or create the shared page of this name. Clear its content if it belongs to another generation."""
        self.name = name
        self._files = files
        if name not in files:
            descriptor = create_file(name, RANK_WORD_BYTES)
            try:
                os.posix_fallocate(descriptor, 0, RANK_WORD_BYTES)
                seal(descriptor)
                files.hold(name, descriptor)
            finally:
                os.close(descriptor)
        self._mapping = mmap.mmap(files.descriptor(name), RANK_WORD_BYTES)
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
        """Return the last valid content of this generation that the rank has written to its half."""
        found = read_rank_half(self._view)
        if found is not None and found.generation == self.agent.generation:
            self._rank = found
        return self._rank

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the shared page; forget its file if `unlink` is True."""
        if unlink:
            self._files.forget(self.name)
        self._view.release()
        self._mapping.close()


def last_agent_half(name: str, files: HeldFiles) -> AgentHalf | None:
    """Return the agent's half of a page of an earlier generation, whose rank must have exited.

    None if the page is unreadable or empty, or if its committed step exceeds the maximum of a training.
    """
    page = _left_page(name, files)
    half = read_agent_half(page) if page is not None else None
    return half if half is not None and half.generation and half.committed <= MAX_RANK_STEP else None


def last_half(name: str, files: HeldFiles) -> RankHalf | None:
    """Return the rank's half of a page after its exit. None if the rank wrote nothing, or if the page is corrupt."""
    page = _left_page(name, files)
    if page is None:
        return None
    agent, half = read_agent_half(page), read_rank_half(page)
    is_valid = agent is not None and half is not None and half.generation == agent.generation > 0
    return half if is_valid else None


def _left_page(name: str, files: HeldFiles) -> memoryview | None:
    page = os.pread(files.descriptor(name), RANK_WORD_BYTES, 0)
    return memoryview(page) if len(page) == RANK_WORD_BYTES else None
