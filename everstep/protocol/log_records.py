"""How server and agent log where machines read it: one JSON object a line, with the same fields from both, so that one pipeline takes them together.

    time        ISO 8601, UTC, microseconds         job, run, generation, node   where the line is about one
    level       debug, info, warning, error …       exception                    the traceback, where there is one
    logger      the module
    message     as in text

Invariant: a line is one line and always valid JSON, whatever was logged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""Control characters, and what Unicode calls the end of a line."""

_about: ContextVar[Mapping[str, object]] = ContextVar("_about", default={})  # noqa: B039  # a mapping that nobody can change through its type


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Say what everything that is logged within, in this task and the threads that it waits for, is about.

    Args:
        **fields: job, run, generation, node; None is left out.
    """
    token = _about.set({**_about.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


class TextFormatter(logging.Formatter):
    """Formats lines for people: control characters are escaped, so that what a client sends forges no line and reaches no terminal as a command.

    The lines of a traceback are indented: a line at the margin is always the beginning of a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record. Called by `logging`, in any thread."""
        first, *more = (
            super().format(record).split("\n")
            if record.exc_info or record.stack_info
            else [_escaped(super().format(record))]
        )
        return "\n".join([_escaped(first), *(f"    {_escaped(line)}" for line in more)])


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """Makes the lines.

    Args:
        always: more fields, asked for at every line; `about` comes after them.
    """

    def __init__(self, always: Callable[[], Mapping[str, object]] = dict) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Return one line. Called by `logging`, in any thread."""
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
