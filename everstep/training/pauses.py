"""Finds pauses of the training thread: moments when the thread executes no torch operation.

The guard detects changed tensors by their versions. Torch increments a tensor's version when an in-place operation
ends, not when it starts. A check in another thread therefore misses an operation that the main thread is still
executing. While the main thread runs Python code, it executes no operation. A check after such a moment (a pause)
detects all operations that began before it.

Invariant: `await_pause` runs its callback at most once, in the main thread, between two instructions of Python code.
The callback may never run, so callers must also make their check at another moment, for example when the training
thread reaches the guard (`everstep.training.guard`).
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

    Args:
        notify: must be short, must not raise, and must not acquire a lock that the main thread may hold, because it
            interrupts the script's code.

    Returns:
        False if the interpreter's queue of pending calls is full; `notify` is then not called.
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
    """Return whether the Python code that runs now is itself a part of a torch operation.

    Examples are tensor subclasses and dispatch modes.

    torch increments the version counters of the tensors that the operation changes only when this code returns.
    """
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        if outer.f_code.co_name == "__torch_dispatch__":
            return True
        frame = outer
    return False
