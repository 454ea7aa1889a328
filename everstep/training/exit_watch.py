"""Closes or drains a session that the script did not close before the process ends.

    no exception, code 0    call `close`: the last step is committed if possible
    every end               call `drain`, which waits for running torch calls, also after an interrupted `close`

A thread that returns from a torch call after the interpreter has shut down ends the process with SIGABRT, and a
recording profiler with SIGSEGV. Either would replace the script's exit code. `raise SystemExit(3)` looks like a
successful end, so `close` is called.

Invariant: if the script failed, the end of the process waits for `drain` and nothing else.
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
"""Python's module `site` adds the last two, so both may be missing."""


class ExitWatch:
    """Calls `close` at most once after success, and `drain` last, at every end but `os._exit` and fatal signals."""

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
        """Remove the watch. Idempotent."""
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
            # Record that the script failed, because an atexit function cannot read the exit code.
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
