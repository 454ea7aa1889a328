"""Parses the JSON bodies of requests, and reports invalid values with their fields.

Unlike Python's parser and the models, it rejects null, non-finite numbers, text that a database or UTF-8 cannot store,
and more than `MAX_DEPTH` levels. The request models check all other rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Final, cast

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from control_plane.api.caller_threads import CallerThreads
from control_plane.api.errors import MAX_FIELDS, InvalidRequest
from control_plane.api.schemas.common import MAX_WHOLE_NUMBER, SentObject
from everstep.protocol import constraints

MAX_DEPTH: Final = 32
MAX_VALUES: Final = 4_096
"""More values than any valid request has. A body of 1 MiB can contain 500,000."""
THREAD_BYTES: Final = 32 * 1024
"""Length above which a thread of the caller parses a body, at up to 0.2 s per MiB."""

Path = tuple[str | int, ...]


class JsonRoute(APIRoute):
    """A route that parses its body with `read`, and reports errors only after the dependencies accept the caller."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that parses the body before FastAPI handles the request.

        FastAPI calls this once per route.
        """
        handle = super().get_route_handler()

        async def handle_read(request: Request) -> Response:
            if not _is_json(request) or not await request.body():
                return await handle(request)
            value, wrong = await parsed(request)
            # Replace the body by a list, which no model accepts. Validation then fails before the endpoint runs.
            request._json = [] if wrong else value
            try:
                return await handle(request)
            except RequestValidationError:
                if not wrong:
                    raise
                raise InvalidRequest(constraints.summary(wrong), fields=wrong) from None

        return handle if self.body_field is None else handle_read


async def parsed(request: Request) -> tuple[Any, list[tuple[str, str]]]:
    """Return the result of `read` for the body of a request, which is parsed once."""
    body = await request.body()
    if not hasattr(request.state, "parsed"):
        threads: CallerThreads = request.app.state.services.caller_threads
        request.state.parsed = await threads.run(read, body) if len(body) > THREAD_BYTES else read(body)
    return cast("tuple[Any, list[tuple[str, str]]]", request.state.parsed)


def read(body: bytes) -> tuple[Any, list[tuple[str, str]]]:
    """Parse a JSON body of at most 1 MiB. Return the value, valid only without complaints, and the complaints."""
    try:
        value = json.loads(body, object_hook=SentObject)
    except (ValueError, RecursionError):  # For a body that is not UTF-8, json raises UnicodeDecodeError, a ValueError.
        return None, [("", constraints.NOT_JSON)]
    found = islice(_complaints(value), MAX_FIELDS)
    return value, [(constraints.path_of(path), message) for path, message in found]


def text_complaint(text: str) -> str | None:
    """Return why a request field may not contain this text, or None."""
    if "\0" in text:
        return constraints.HAS_NUL
    return constraints.HALF_CHARACTER if any("\ud800" <= character <= "\udfff" for character in text) else None


def _complaints(value: Any) -> Iterator[tuple[Path, str]]:
    """Yield the path and the message of each invalid value in a parsed JSON body."""
    # Iterates, because the client chooses how deep the body nests.
    open_parts: list[tuple[Path, Any]] = [((), value)]
    left = MAX_VALUES
    while open_parts:
        path, part = open_parts.pop()
        left -= len(part) if isinstance(part, dict | list) else 0
        if left < 0:
            yield path[:1], constraints.too_many(MAX_VALUES)
            return
        message = _complaint(part)
        if message is not None:
            yield path, message
        elif isinstance(part, dict | list) and part and len(path) >= MAX_DEPTH:
            yield path[:1], constraints.TOO_DEEP
        elif isinstance(part, list):
            open_parts += (((*path, index), item) for index, item in reversed(list(enumerate(part))))
        elif isinstance(part, dict):
            for name in part:
                if (wrong := text_complaint(name)) is not None:
                    yield path, wrong
                    break
            else:
                open_parts += (((*path, name), item) for name, item in reversed(part.items()))


def _complaint(part: Any) -> str | None:
    """Return why one JSON value, without its members, is invalid, or None."""
    if part is None:
        return constraints.NULL
    if isinstance(part, str):
        return text_complaint(part)
    if isinstance(part, float) and not math.isfinite(part):
        return constraints.NOT_FINITE
    if isinstance(part, int) and part > MAX_WHOLE_NUMBER:
        return constraints.at_most(MAX_WHOLE_NUMBER, part)
    if isinstance(part, int) and part < -MAX_WHOLE_NUMBER:
        return constraints.at_least(-MAX_WHOLE_NUMBER, part)
    return None


def _is_json(request: Request) -> bool:
    """Return whether FastAPI would parse this Content-Type as JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
