"""Sets the CPU priorities of the agent and the ranks, and which of them the kernel ends first for lack of memory.

If the kernel groups sessions (autogroups, sched(7)), a niceness applies only among the threads of one session. The
agent and each rank then receive equal shares of a core, regardless of their numbers of threads. The agent therefore
raises the priority of its whole session for work that ranks wait for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

AGENT_NICENESS = -10
"""Niceness of the agent's event loop, which is preferred to ranks.

Ranks and other nodes wait for the short tasks of the loop. Ranks run at niceness 0.
"""
RANK_OOM_SCORE = 500
"""Adjustment of ranks' OOM scores: the kernel ends a rank before any service of the node. Source: proc(5)."""
AUTOGROUP = Path("/proc/self/autogroup")


def work_as_ranks_do() -> None:
    """Set the calling thread to the priority of the ranks.

    Threads inherit the event loop's higher priority. On a node whose cores are all in use, threads that copy, send or
    hash for a long time would delay training.
    """
    work_at(0)


def work_at(niceness: int) -> None:
    """Set the calling thread's niceness if the kernel permits the change.

    If the thread belongs to a pool, its later work has this niceness, too.
    """
    with contextlib.suppress(PermissionError):  # Only a privileged process may raise a priority.
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # On Linux, the id 0 names the calling thread only.


def end_first_without_memory(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Make the kernel kill this process before others when the node's memory is exhausted. Children inherit this.

    A rank calls this before the job's code runs. Otherwise, a rank would inherit the agent's protection from the
    kernel's out-of-memory killer.

    Args:
        score: the kernel's file `oom_score_adj` of this process.
    """
    with contextlib.suppress(OSError):
        score.write_text(str(RANK_OOM_SCORE))


def lead_own_session() -> None:
    """Make this process the leader of a new session, so that `before_other_sessions` affects only this process.

    A process that already leads a session or a process group keeps its current session.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()


@contextlib.contextmanager
def before_other_sessions(autogroup: Path = AUTOGROUP) -> Iterator[None]:
    """Raise the priority of this process's session while the context is open, because ranks wait for its work.

    The context has no effect if the kernel does not group sessions or does not permit the change. It also has no effect
    if this process does not lead its own session.

    Args:
        autogroup: the kernel's file with the niceness of this process's session.
    """
    before = _session_niceness(autogroup) if os.getsid(0) == os.getpid() else None
    try:
        if before is not None:
            _set_session_niceness(autogroup, AGENT_NICENESS)
        yield
    finally:
        if before is not None:
            _set_session_niceness(autogroup, before)


def _session_niceness(autogroup: Path) -> int | None:
    try:
        return int(autogroup.read_text().split()[-1])  # The text is, for example, `/autogroup-4460 nice 0`.
    except (OSError, ValueError, IndexError):
        return None


def _set_session_niceness(autogroup: Path, niceness: int) -> None:
    with contextlib.suppress(OSError):
        autogroup.write_text(str(niceness))
