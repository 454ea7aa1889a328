"""Encodes and decodes page tokens: the position from which a list continues.

    token = base64url(deflate?(JSON array))       opaque to callers, not secret, not signed

A token contains only a position. Each part is checked for type and range. The server rejects a forged token, or decodes
it to a valid position in a list that the caller may read anyway.

Invariant: `decode` and the part checks raise `ValueError` for every input that is not valid.
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
"""Limit of a token's bytes after decompression, because a short token can decompress to a huge text."""


def encode(parts: Sequence[Any], *, is_compressed: bool = False) -> str:
    """Return the token of a position.

    Args:
        parts: JSON values that name the position, such as the last item's sort key.
        is_compressed: compress the token. Used for positions that contain one number per node.

    Returns:
        URL-safe text, from which `decode` returns the same values.
    """
    payload = json.dumps(parts, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.compress(payload, 9) if is_compressed else payload).decode()


def decode(token: str, *, is_compressed: bool = False) -> list[Any]:
    """Return the JSON values in a page token. The caller must check each value.

    Args:
        token: text that the caller sent.
        is_compressed: must equal the value passed to `encode`.

    Returns:
        JSON values.

    Raises:
        ValueError: the token is not base64, not JSON, too long, too deep, or not an array.
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
    """Return the checked elements of a page token.

    Args:
        token: text that the caller sent.
        *kinds: one check per element: `whole`, `number`, `text`, `moment`, or a function that raises ValueError.

    Returns:
        One value per check.

    Raises:
        InvalidRequest: the operation did not issue the token, according to the checks.
    """
    try:
        return tuple(kind(part) for kind, part in zip(kinds, decode(token), strict=True))
    except ValueError as error:
        raise refused() from error


def refused(message: str = NOT_OURS) -> InvalidRequest:
    """Return the error for an invalid NextToken."""
    return invalid("NextToken", message, "{field} {message}.")


def whole(part: Any) -> int:
    """Return an element of a page token as an integer of at least 0 that a database can store, or raise ValueError."""
    if type(part) is not int or not 0 <= part <= MAX_WHOLE_NUMBER:
        raise ValueError(NOT_OURS)
    return part


def number(part: Any) -> float:
    """Return an element of a page token as a finite float, or raise ValueError."""
    if type(part) not in (int, float) or not math.isfinite(found := float(whole(part) if type(part) is int else part)):
        raise ValueError(NOT_OURS)
    return found


def text(part: Any) -> str:
    """Return an element of a page token as text that a database can store, or raise ValueError."""
    if not isinstance(part, str) or text_complaint(part) is not None:
        raise ValueError(NOT_OURS)
    return part


def moment(part: Any) -> datetime:
    """Return an element of a decoded page token as a time in UTC, or raise ValueError."""
    found = datetime.fromisoformat(text(part))
    if found.tzinfo is None:
        raise ValueError(NOT_OURS)
    try:
        return found.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(NOT_OURS) from error


def _refuse(_constant: str) -> NoReturn:
    raise ValueError(NOT_OURS)
