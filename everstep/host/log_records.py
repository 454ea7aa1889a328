"""Formats the logs of the server and the agent: text for people, JSON lines for log pipelines.

    time        ISO 8601, UTC, microseconds         job, run, generation, node   the subject, where the line has one
    level       debug, info, warning, error …       exception                    the traceback, where there is one
    logger      the module
    message     as in text

Invariant: each JSON record is one line of valid JSON, for any content of the message.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal

from everstep.protocol.visible_text import CONTROLS

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")

LINES_PER_PERIOD: Final = 600
PERIOD_SECONDS: Final = 60.0
MAX_KINDS: Final = 1024
"""Number of kinds of lines that a `RateLimit` counts. It forgets the kind whose last line is the oldest."""
_CONTROL: Final = re.compile(f"[{CONTROLS}]")

# All contexts share this default. Sharing is safe, because no code changes a Mapping.
_about: ContextVar[Mapping[str, object]] = ContextVar("_about", default={})  # noqa: B039


@contextmanager
def about(**fields: object) -> Generator[None, None, None]:
    """Add the fields job, run, generation and node, except None, to log lines of this task and its threads."""
    token = _about.set({**_about.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


class RateLimit(logging.Filter):
    """Limits the lines of the given loggers and their children, so that callers cannot fill a server's log.
    Thread-safe. Lines are of one kind if their logger and their text without arguments are equal. Of each kind,
    `LINES_PER_PERIOD` lines pass in `PERIOD_SECONDS`. The next line that passes states how many were left out.
    """

    def __init__(self, *loggers: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limited = [logging.Filter(name) for name in loggers]
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._periods: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record's line is written."""
        if not any(limited.filter(record) for limited in self._limited):
            return True
        now, kind = self._monotonic(), (record.name, str(record.msg))
        with self._lock:
            began, count = self._periods.pop(kind, (now, 0))
            left_out = 0
            if now - began >= PERIOD_SECONDS:
                began, count, left_out = now, 0, max(0, count - LINES_PER_PERIOD)
            self._periods[kind] = began, count + 1
            if len(self._periods) > MAX_KINDS:
                self._periods.popitem(last=False)
        if left_out:
            record.msg = f"{record.msg} ({left_out} lines of this kind were left out before)"
        return count < LINES_PER_PERIOD


class TextFormatter(logging.Formatter):
    """Formats log lines for people. Escaped control characters cannot forge a line or command a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        first, *more = (
            super().format(record).split("\n")
            if record.exc_info or record.stack_info
            else [_escaped(super().format(record))]
        )
        return "\n".join([_escaped(first), *(f"    {_escaped(line)}" for line in more)])


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{code:02x}" if (code := ord(found[0])) < 256 else f"\\u{code:04x}", text)


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON lines. `always` returns fields of every record, which those of `about` override."""

    def __init__(self, always: Callable[[], Mapping[str, object]] = dict) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always(),
            **_about.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
