"""Formats the logs of the server and the agent: text for people, JSON lines for log pipelines.

Both processes use the same JSON fields, so that one pipeline can read both:

    time        ISO 8601, UTC, microseconds         job, run, generation, node   the subject, where the line has one
    level       debug, info, warning, error …       exception                    the traceback, where there is one
    logger      the module
    message     as in text

Invariant: each JSON record is one line of valid JSON, for any content of the message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping
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
"""Escapes for control characters and for Unicode's line and paragraph separators."""

# All contexts share this default. Sharing is safe, because no code changes a Mapping.
_about: ContextVar[Mapping[str, object]] = ContextVar("_about", default={})  # noqa: B039


@contextmanager
def about(**fields: object) -> Generator[None, None, None]:
    """Add fields to every log line that the `with` block writes, in this task and in threads that the task awaits.

    Args:
        **fields: job, run, generation or node. A field that is None is left out.
    """
    token = _about.set({**_about.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


class TextFormatter(logging.Formatter):
    """Formats log lines for people.

    It escapes control characters, so that text from a client cannot forge a log line or send commands to a terminal. It
    indents the lines of a traceback. Every line of a record except the first is indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text. `logging` calls it in any thread."""
        first, *more = (
            super().format(record).split("\n")
            if record.exc_info or record.stack_info
            else [_escaped(super().format(record))]
        )
        return "\n".join([_escaped(first), *(f"    {_escaped(line)}" for line in more)])


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON lines.

    Args:
        always: returns further fields; called for every record. A field of the same name in the context manager
            `about` overrides them.
    """

    def __init__(self, always: Callable[[], Mapping[str, object]] = dict) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON. `logging` calls it in any thread."""
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
