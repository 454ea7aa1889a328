"""A log record for machines is one line of valid JSON. It names the objects to which the record refers."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest

from everstep.host.log_records import (
    LINES_PER_PERIOD,
    MAX_KINDS,
    PERIOD_SECONDS,
    JsonFormatter,
    RateLimit,
    TextFormatter,
    about,
)


def line(message: str, *arguments: object, formatter: JsonFormatter | None = None, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord(
        "control_plane.loop", logging.WARNING, __file__, 1, message, arguments, **{"exc_info": None, **more}
    )
    record.created = 1_700_000_000.25
    text = (formatter or JsonFormatter()).format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_the_fields_that_both_programs_write() -> None:
    assert line("job %s\nis %d", "gpt", 3) == {
        "time": "2023-11-14T22:13:20.250000+00:00",
        "level": "warning",
        "logger": "control_plane.loop",
        "message": "job gpt\nis 3",
    }


@pytest.mark.security
@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b", "\x9b", "\x85", "\u2028", "\u202e", "\0"])
def test_no_line_and_no_command_of_a_terminal_is_forged_in_text(sign: str) -> None:
    formatter = TextFormatter("%(levelname)s %(message)s")

    def text(exception: Exception | None) -> str:
        told = None if exception is None else (type(exception), exception, None)
        return formatter.format(
            logging.LogRecord("x", logging.WARNING, __file__, 1, "path /a%sERROR forged", (sign,), told)
        )

    assert text(None).startswith("WARNING path /a\\")
    assert not any(sign in line for line in text(None).split("\n")[:1])
    assert len(text(None).splitlines()) == 1
    lines = text(ValueError(f"bad{sign}ERROR forged")).split("\n")
    assert all(line.startswith("    ") for line in lines[1:])
    assert lines[0].startswith("WARNING path")
    assert not any(sign in line for line in lines)


def test_what_it_is_about_is_said_within_and_in_threads_and_not_after() -> None:
    async def work() -> dict[str, Any]:
        with about(job="gpt", generation=2, node=None):
            return await asyncio.to_thread(line, "m")

    found = asyncio.run(work())
    assert (found["job"], found["generation"]) == ("gpt", 2)
    assert "node" not in found
    assert "job" not in line("m")
    with about(job="gpt"), about(node="i-1"):
        assert (line("m")["job"], line("m")["node"]) == ("gpt", "i-1")


def test_what_is_always_so_is_asked_for_at_every_line() -> None:
    facts = {"node": "i-1"}
    formatter = JsonFormatter(lambda: facts)
    assert line("m", formatter=formatter)["node"] == "i-1"
    facts["job"] = "gpt"
    assert line("m", formatter=formatter)["job"] == "gpt"


def test_a_traceback_is_a_field_and_anything_can_be_logged() -> None:
    try:
        raise RuntimeError("no\nway")
    except RuntimeError:
        found = line("m", exc_info=sys.exc_info())
    assert "RuntimeError: no\nway" in found["exception"]
    with about(job=object()):
        assert line("m")["job"].startswith("<object")


def test_lines_of_one_kind_have_a_limit_per_period() -> None:
    clock = [0.0]
    limit = RateLimit("api", monotonic=lambda: clock[0])

    def passes(message: str, logger: str = "api.routes", argument: int = 0) -> str | None:
        record = logging.LogRecord(logger, logging.INFO, __file__, 1, message, (argument,), None)
        return record.getMessage() if limit.filter(record) else None

    assert [passes("request %d", argument=each) for each in range(LINES_PER_PERIOD + 7)] == [
        *(f"request {each}" for each in range(LINES_PER_PERIOD)),
        *[None] * 7,
    ]
    assert passes("another %d") == "another 0"
    assert passes("request %d", "api2") == "request 0", "a logger without a limit"
    assert passes("request %d", "api") == "request 0", "another logger"
    clock[0] = PERIOD_SECONDS - 0.1
    assert passes("request %d") is None
    clock[0] = PERIOD_SECONDS
    assert passes("request %d") == "request 0 (8 lines of this kind were left out before)"
    assert passes("request %d") == "request 0"


def test_the_limit_of_lines_counts_a_bounded_number_of_kinds() -> None:
    limit = RateLimit("api", monotonic=lambda: 0.0)

    def passes(message: str) -> bool:
        return limit.filter(logging.LogRecord("api", logging.INFO, __file__, 1, message, (), None))

    assert [passes("a") for _ in range(LINES_PER_PERIOD + 1)][-1] is False
    for kind in range(MAX_KINDS - 1):
        assert passes(str(kind))
    assert not passes("a")
    for kind in range(MAX_KINDS):
        assert passes(str(kind))
    assert passes("a")
