"""Sets the CPU priorities of the agent and the ranks, and which of them the kernel ends first for lack of memory.

If the kernel groups sessions (autogroups, sched(7)), a niceness applies only among the threads of one session. The
agent therefore raises the priority of its whole session for work that ranks wait for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

AGENT_NICENESS = -10
"""Niceness of the agent's event loop, for whose short tasks ranks and other nodes wait. Ranks run at niceness 0."""
RANK_OOM_SCORE = 500
"""Adjustment of ranks' OOM scores: the kernel ends a rank before any service of the node. Source: proc(5)."""
AUTOGROUP = Path("/proc/self/autogroup")


def work_as_ranks_do() -> None:
    """Set the calling thread to the priority of the ranks, for work that would delay training."""
    # Threads inherit the event loop's higher priority.
    work_at(0)


def work_at(niceness: int) -> None:
    """Set the niceness of the calling thread, also for its later work in a pool, if the kernel permits the change."""
    with contextlib.suppress(PermissionError):  # Only a privileged process may raise a priority.
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # On Linux, the id 0 names the calling thread only.


def end_first_without_memory(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Make the kernel kill this process and its children before others when the node's memory is exhausted."""
    # A rank would otherwise inherit the agent's protection from the kernel's out-of-memory killer.
    with contextlib.suppress(OSError):
        score.write_text(str(RANK_OOM_SCORE))


def lead_own_session() -> None:
    """Make this process the leader of a new session, so that `before_other_sessions` affects only this process."""
    with contextlib.suppress(PermissionError):
        os.setsid()


@contextlib.contextmanager
def before_other_sessions(autogroup: Path = AUTOGROUP) -> Iterator[None]:
    """Raise the priority of this process's session while the context is open, because ranks wait for its work.

    Without effect if the kernel does not group sessions or permit the change, or if this process does not lead its
    session.
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
