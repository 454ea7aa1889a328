"""Closes a session that the script left open, when the script ends well.

Invariant: a script that fails is never held: only an exit without exception and with code 0 closes.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType


class ExitWatch:
    """Watches how the process ends.

    Args:
        close: called at most once, at a good end, in the process that made the watch.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._pid = os.getpid()
        self._has_failed = False
        self._excepthook = sys.excepthook
        self._exit = sys.exit
        sys.excepthook = self._on_exception
        sys.exit = self._on_exit  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        """Stop watching. Idempotent."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if sys.exit == self._on_exit:
            sys.exit = self._exit

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._has_failed = True
        self._excepthook(kind, error, traceback)

    def _on_exit(self, status: int | str | None = None, /) -> None:
        # atexit cannot see the code of an exit, only whether an exception was printed
        self._has_failed = self._has_failed or status not in (None, 0)
        self._exit(status)

    def _at_exit(self) -> None:
        if not self._has_failed and os.getpid() == self._pid:
            self._close()
