"""Parses the JSON bodies of requests, and reports invalid values with their fields.

Python's JSON parser accepts values that the API does not allow: non-finite numbers, integers of any size, and unpaired
surrogates. The request models accept null for optional fields, although the API allows no null. This parser reports
each of these values, null included, with the path of its field. The request models check all other rules.

Invariant: a value that `read` returns without a fault contains no null, no non-finite number and
no text that a database or UTF-8 cannot store. It has at most `MAX_DEPTH` levels.
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
"""Maximum number of values in a body, more than any valid request has. A body of 1 MiB can contain 500,000."""
THREAD_BYTES: Final = 32 * 1024
"""Length above which a thread of the caller parses a body: the parser needs up to 0.2 s per MiB."""

Path = tuple[str | int, ...]


class JsonRoute(APIRoute):
    """A route whose body is parsed by `read` instead of FastAPI.

    The route reports errors in the body only after its dependencies have checked the caller. A caller without the
    required role therefore gets 403, whatever the body contains.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that parses the body with `read` before FastAPI handles the request.

        FastAPI calls this method once per route.
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
    """Parse the JSON body of a request.

    Args:
        body: at most 1 MiB; `api.envelope` rejects longer bodies.

    Returns:
        The value, and at most `MAX_FIELDS` complaints. The value must not be used if there is a fault.
    """
    try:
        value = json.loads(body, object_hook=SentObject)
    except (ValueError, RecursionError):  # For a body that is not UTF-8, json raises UnicodeDecodeError, a ValueError.
        return None, [("", constraints.NOT_JSON)]
    found = islice(_complaints(value), MAX_FIELDS)
    return value, [(constraints.path_of(path), message) for path, message in found]


def text_complaint(text: str) -> str | None:
    """Return the reason why a request field may not contain this text, or None if the text is valid."""
    if "\0" in text:
        return constraints.HAS_NUL
    return constraints.HALF_CHARACTER if any("\ud800" <= character <= "\udfff" for character in text) else None


def _complaints(value: Any) -> Iterator[tuple[Path, str]]:
    """Yield the path and the message of each invalid value in a parsed JSON body.

    The function iterates instead of recursing, because the client chooses how deep the body nests.
    """
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
    """Return the reason why one JSON value is invalid, or None if it is valid.

    The function ignores the values inside an object or a list.
    """
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
    """Return whether the Content-Type is one for which FastAPI would parse the body as JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
