"""Recognizes from a rank's last lines that the kernel refused it another process or thread. No I/O.

Each job has its own user on a node. The kernel counts the processes and threads of this user, and refuses new ones
above `MAX_TASKS`. A script that forks without end therefore fails by itself, and cannot stop the agent or the node.
"""

from __future__ import annotations

import re
from typing import Final

MAX_TASKS: Final = 16_384
"""Maximum number of processes and threads of one job on a node.

Eight ranks with 32 DataLoader workers each, and with the threads of torch, NCCL and CUDA, have about 4,000.
"""
_REFUSED = re.compile(
    r"RuntimeError: can't start new thread"
    r"|(?:fork|clone|pthread_create)\b[^\n]*: Resource temporarily unavailable"
    r"|\b_?(?:fork|fork_exec|Popen)\(.*BlockingIOError: \[Errno 11\]",
    re.DOTALL,
)


def refused_task(last_lines: str) -> str:
    """Return a sentence about a process or thread that the kernel refused to a rank, or an empty string.

    Args:
        last_lines: the last lines of the rank's stderr.

    Returns:
        One sentence for the user, if the rank ended for this reason.
    """
    if _REFUSED.search(last_lines) is None:
        return ""
    return (
        f"the kernel refused another process or thread: a job has at most {MAX_TASKS:,} of them on a node. "
        "Start fewer processes and threads in the script"
    )
