"""Pauses of the training thread: moments at which it is inside no torch operation.

torch counts an in-place operation in a tensor's version when the operation ends, not when it begins. A look at versions
from another thread misses the operation that is under way. The main thread is inside no operation while it runs Python
code, so a look made after such a moment misses none.

Invariant: a callback given to `await_pause` runs at most once, in the main thread, between two instructions of its
Python code. It may never run: callers need another moment to fall back on. It knows threads, never snapshots.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable

Notify = Callable[[], None]


def await_pause(notify: Notify) -> bool:
    """Have `notify` called at the next pause of the main thread. Any thread; never blocks.

    Args:
        notify: must be short, take no lock that the main thread takes, and not raise: it runs in the middle of the
            script's code.

    Returns:
        Whether it was arranged. False when the interpreter's queue of pending calls is full.
    """
    _waiting.append(notify)
    if ctypes.pythonapi.Py_AddPendingCall(_run_next, None) == 0:
        return True
    _waiting.remove(notify)
    return False


def is_main_thread() -> bool:
    """Say whether the calling thread is the one whose pauses `await_pause` finds."""
    return threading.current_thread() is threading.main_thread()


_waiting: deque[Notify] = deque()


def _run_oldest(_argument: object) -> int:
    notify = _waiting.popleft()
    if not _is_inside_operation():
        notify()
    return 0


_run_next = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_oldest)


def _is_inside_operation() -> bool:
    """Say whether the Python code at hand implements an operation (a tensor subclass, a dispatch mode), which is counted when this code returns."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        if outer.f_code.co_name == "__torch_dispatch__":
            return True
        frame = outer
    return False
