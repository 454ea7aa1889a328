"""CPU priorities of the agent and the ranks.

Where the kernel groups sessions (autogroups, sched(7)), a niceness applies only among threads of one session. The agent
and each rank then get equal shares of a core, however many threads they have. So work that ranks wait for needs a
raised session.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

AGENT_NICENESS = -10
"""Niceness of the agent's loop, whose short work everybody waits for.

Ranks run at 0, and so do the agent's threads that move bytes (`work_as_ranks_do`).
"""
AUTOGROUP = Path("/proc/self/autogroup")


def work_as_ranks_do() -> None:
    """Set the calling thread to the priority of the ranks.

    Threads that copy, send or hash for long inherit the loop's higher priority. On a node whose cores are all in use,
    they would delay training.
    """
    work_at(0)


def work_at(niceness: int) -> None:
    """Set the calling thread's niceness where the kernel permits it. A pool's thread keeps its last value."""
    with contextlib.suppress(PermissionError):  # the thread may not raise its priority
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # on Linux this affects only the calling thread


def lead_own_session() -> None:
    """Start a new session, so that a raised session affects only this process.

    A process that already leads a session or a process group keeps it.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()


@contextlib.contextmanager
def before_other_sessions() -> Iterator[None]:
    """Raise this process's session during the block, with all its threads, for work that ranks wait for.

    Does nothing where the kernel does not group sessions, where this process does not lead its own session, or where
    the kernel does not permit it.
    """
    before = _session_niceness() if os.getsid(0) == os.getpid() else None
    try:
        if before is not None:
            _set_session_niceness(AGENT_NICENESS)
        yield
    finally:
        if before is not None:
            _set_session_niceness(before)


def _session_niceness() -> int | None:
    try:
        return int(AUTOGROUP.read_text().split()[-1])  # /autogroup-4460 nice 0
    except (OSError, ValueError, IndexError):
        return None


def _set_session_niceness(niceness: int) -> None:
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(niceness))
