"""Who goes first where the agent and ranks want the same cores.

A niceness counts among threads of one session alone where the kernel groups sessions (autogroups, sched(7)): an agent
and each rank then have equal parts of a core, however many threads they have. So what ranks wait for is raised as a
session.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

AGENT_NICENESS = -10
"""An agent's loop does short work that everybody waits for; ranks run at 0, and so do its threads that move bytes (`work_as_ranks_do`)."""
AUTOGROUP = Path("/proc/self/autogroup")


def work_as_ranks_do() -> None:
    """Give the calling thread the priority of the ranks.

    The agent's loop runs above them, for its work is short and everybody waits for it;
    threads that copy, send and digest for long begin with the loop's priority, and would hold up training on a node
    whose cores are all in use.
    """
    work_at(0)


def work_at(niceness: int) -> None:
    """Give the calling thread a priority, as far as it may have it: a thread of a pool keeps that of its last work."""
    with contextlib.suppress(PermissionError):  # it is lower already, and may not rise
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # of this thread alone, on Linux


def lead_own_session() -> None:
    """Begin a session, so that raising it raises nobody else.

    One who leads a session, or a shell's job, stays where it is.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()


@contextlib.contextmanager
def before_other_sessions() -> Iterator[None]:
    """Go before other sessions for as long as the context lasts: with all threads, those that move bytes too.

    For what ranks wait for.

    Nothing happens where the kernel does not group sessions, where this process does not lead its own, and so would
    raise others with it, or where it may not.
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
