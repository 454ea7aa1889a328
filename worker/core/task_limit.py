"""Recognizes from a rank's last lines that the kernel refused it another process or thread.

Each job has its own user on a node, so a script that forks without end fails by itself and cannot stop the agent.
"""

from __future__ import annotations

import re
from typing import Final

# Eight ranks with 32 DataLoader workers each, and the threads of torch, NCCL and CUDA, have about 4,000.
MAX_TASKS: Final = 16_384
"""Maximum number of processes and threads of one job on a node."""
_REFUSED = re.compile(
    r"RuntimeError: can't start new thread"
    r"|(?:fork|clone|pthread_create)\b[^\n]*: Resource temporarily unavailable"
    r"|\b_?(?:fork|fork_exec|Popen)\(.*BlockingIOError: \[Errno 11\]",
    re.DOTALL,
)


def refused_task(last_lines: str) -> str:
    """Return a sentence for the user if a rank's last lines of stderr show a refused process or thread, or ""."""
    if _REFUSED.search(last_lines) is None:
        return ""
    return (
        f"the kernel refused another process or thread: a job has at most {MAX_TASKS:,} of them on a node. "
        "Start fewer processes and threads in the script"
    )
