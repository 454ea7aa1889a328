"""Lets the threads of torch's Gloo backend release their last collective before the interpreter shuts down.

A Gloo thread releases a collective's tensors after the caller has continued, and needs the interpreter's lock. If the
interpreter has shut down, the process ends with SIGABRT. `destroy_process_group` does not prevent this, because a
`DistributedDataParallel` keeps the threads alive.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

TASKS: Final = Path("/proc/self/task")
GLOO_THREAD: Final = "pt_gloo_runloop"
"""Name that torch gives each thread that runs collectives."""
LIMIT_SECONDS: Final = 5.0
"""Longest wait, after which the process ends in any case."""

_LEAST_PAUSE_SECONDS: Final = 0.01


def settle_gloo_threads_at_exit() -> None:
    """Call `settle_gloo_threads` once when this process ends, after all functions that are registered later."""
    atexit.unregister(settle_gloo_threads)
    atexit.register(settle_gloo_threads)


def settle_gloo_threads(limit_seconds: float = LIMIT_SECONDS) -> bool:
    """Wait until no Gloo thread runs or waits for the interpreter's lock. Return whether this is so within the limit. A
    thread that waits for other ranks counts as settled, so the end of a failed script does not wait for them.
    """
    deadline = time.monotonic() + limit_seconds
    before = _states()
    while before:
        # The pause frees the lock for longer than a thread waits before it requests the lock again. A thread that
        # wanted the lock has therefore run during the pause, and its count of context switches has changed.
        threading.Event().wait(max(_LEAST_PAUSE_SECONDS, 2 * sys.getswitchinterval()))
        after = _states()
        if after == before and all(is_asleep for is_asleep, _ in after.values()):
            return True
        if time.monotonic() > deadline:
            return False
        before = after
    return True


def _states() -> dict[str, tuple[bool, tuple[str, ...]]]:
    """Return, by thread id, whether each Gloo thread sleeps, and its counts of context switches."""
    found = {}
    try:
        threads = os.listdir(TASKS)
    except OSError:  # the kernel is not Linux
        return {}
    for thread in threads:
        try:
            if (TASKS / thread / "comm").read_text().strip() != GLOO_THREAD:
                continue
            lines = (TASKS / thread / "status").read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        state = next(line for line in lines if line.startswith("State:"))
        found[thread] = state.split()[1] == "S", tuple(line for line in lines if "ctxt_switches" in line)
    return found
