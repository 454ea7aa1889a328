"""What is done about a session that the script left open, when the process ends.

    no exception, code 0    close: the last step is kept
    however it ends         drain: what is under way in torch comes to its end, what a `close` that broke off has left too

A thread that comes out of a call to torch when the interpreter has gone takes the process with it (SIGABRT), and so
does a recording of torch's profiler that nobody ended (SIGSEGV): the script's own exit code, that says how it failed,
would be lost.

A `raise SystemExit(3)` of the script's own cannot be told from a good end before it is over: the session is closed, and
the code is the script's.

Invariant: a script that fails is held no longer than `drain` takes; nothing else is done for it.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final

_EXITS: Final = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
"""What scripts end with; the last two are there where `site` was imported."""


class ExitWatch:
    """Watches how the process ends.

    Args:
        close: called at most once, at a good end, in the process that made the watch.
        drain: called last, at any end at which Python still runs.
    """

    def __init__(self, close: Callable[[], None], drain: Callable[[], None]) -> None:
        self._close = close
        self._drain = drain
        self._pid = os.getpid()
        self._has_failed = False
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        self._exits = [
            (module, name, getattr(module, name), self._watched(getattr(module, name)))
            for module, name in _EXITS
            if hasattr(module, name)
        ]
        for module, name, _, watched in self._exits:
            setattr(module, name, watched)
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        """Stop watching. Idempotent."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        for module, name, original, watched in self._exits:
            if getattr(module, name, None) is watched:
                setattr(module, name, original)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._has_failed = True
        self._excepthook(kind, error, traceback)

    def _watched(self, leave: Callable[[int | str | None], object]) -> Callable[[int | str | None], object]:
        def leave_watched(status: int | str | None = None, /) -> object:
            # atexit cannot see the code of an exit, only whether an exception was printed
            self._has_failed = self._has_failed or status not in (None, 0)
            return leave(status)

        return leave_watched

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            try:
                if not self._has_failed:
                    self._close()
            finally:
                self._drain()
