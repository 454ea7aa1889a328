"""Finds pauses of the training thread: moments when the thread executes no torch operation.

Torch increments a tensor's version when an in-place operation ends, so a check in another thread misses a running one.
A check while the main thread runs Python code detects all operations that began before.

Invariant: `await_pause` runs its callback at most once, in the main thread, between two instructions of Python code.
The callback may never run, so callers must make their check at another moment as well.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable

Notify = Callable[[], None]


def await_pause(notify: Notify) -> bool:
    """Call `notify` as soon as the main thread executes no torch operation. Safe from any thread; never blocks.
    `notify` interrupts the script's code. It must be short, not raise, and not acquire a lock that the main thread may
    hold. Returns False, without a call, if the interpreter's queue of pending calls is full.
    """
    _waiting.append(notify)
    if ctypes.pythonapi.Py_AddPendingCall(_run_next, None) == 0:
        return True
    _waiting.remove(notify)
    return False


def is_main_thread() -> bool:
    """Return whether the caller runs in the main thread."""
    return threading.current_thread() is threading.main_thread()


_waiting: deque[Notify] = deque()


def _run_oldest(_argument: object) -> int:
    notify = _waiting.popleft()
    if not _is_inside_operation():
        notify()
    return 0


_run_next = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_oldest)


def _is_inside_operation() -> bool:
    """Return whether a torch operation runs, which increments versions only after this code returns."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        if outer.f_code.co_name == "__torch_dispatch__":
            return True
        frame = outer
    return False
