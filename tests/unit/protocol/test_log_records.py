"""Log lines for machines: always one line of valid JSON, and what it is about."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from everstep.protocol.log_records import JsonFormatter, about


def line(message: str, *arguments: object, formatter: JsonFormatter | None = None, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("control_plane.loop", logging.WARNING, __file__, 1, message, arguments, **{"exc_info": None, **more})
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
