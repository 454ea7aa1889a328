"""Encodes and decodes page tokens: the position from which a list continues.

    token = base64url(deflate?(JSON array))       opaque to callers, not secret, not signed

A forged token is rejected, or names a valid position in a list that the caller may read anyway. `decode` and the part
checks raise `ValueError` for every invalid input.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from control_plane.api.errors import InvalidRequest, invalid
from control_plane.api.json_body import text_complaint
from control_plane.api.schemas.common import MAX_WHOLE_NUMBER

NOT_OURS: Final = "is not a token that this operation returned"
MAX_BYTES: Final = 1_000_000
"""Limit after decompression, because a short token can become a huge text."""


def encode(parts: Sequence[Any], *, is_compressed: bool = False) -> str:
    """Return the URL-safe token of a position's JSON values. `is_compressed` is for tokens with one number per node."""
    payload = json.dumps(parts, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.compress(payload, 9) if is_compressed else payload).decode()


def decode(token: str, *, is_compressed: bool = False) -> list[Any]:
    """Return the JSON values in a page token, each of which the caller must check.

    `is_compressed` must equal that of `encode`. Raises ValueError if the token is not base64, not JSON, too long, too
    deep, or not an array.
    """
    try:
        payload = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if is_compressed:
            unpack = zlib.decompressobj()
            payload = unpack.decompress(payload, MAX_BYTES)
            if not unpack.eof or unpack.unused_data:
                raise ValueError(NOT_OURS)
        parts = json.loads(payload, parse_constant=_refuse)
    except (RecursionError, zlib.error) as error:
        raise ValueError(NOT_OURS) from error
    if not isinstance(parts, list):
        raise ValueError(NOT_OURS)
    return parts


def position(token: str, *kinds: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the elements of a page token, each converted by one of `kinds`: `whole`, `number`, `text`, `moment` …

    If one of `kinds` raises ValueError, the operation did not issue the token, and this function raises InvalidRequest.
    """
    try:
        return tuple(kind(part) for kind, part in zip(kinds, decode(token), strict=True))
    except ValueError as error:
        raise refused() from error


def refused(message: str = NOT_OURS) -> InvalidRequest:
    """Return the error for an invalid NextToken."""
    return invalid("NextToken", message, "{field} {message}.")


def whole(part: Any) -> int:
    """Return an element as a non-negative integer that a database can store, or raise ValueError."""
    if type(part) is not int or not 0 <= part <= MAX_WHOLE_NUMBER:
        raise ValueError(NOT_OURS)
    return part


def number(part: Any) -> float:
    """Return an element as a finite float, or raise ValueError."""
    if type(part) not in (int, float) or not math.isfinite(found := float(whole(part) if type(part) is int else part)):
        raise ValueError(NOT_OURS)
    return found


def text(part: Any) -> str:
    """Return an element as text that a database can store, or raise ValueError."""
    if not isinstance(part, str) or text_complaint(part) is not None:
        raise ValueError(NOT_OURS)
    return part


def moment(part: Any) -> datetime:
    """Return an element as a time in UTC, or raise ValueError."""
    found = datetime.fromisoformat(text(part))
    if found.tzinfo is None:
        raise ValueError(NOT_OURS)
    try:
        return found.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(NOT_OURS) from error


def _refuse(_constant: str) -> NoReturn:
    raise ValueError(NOT_OURS)
