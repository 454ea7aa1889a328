"""Wraps all HTTP requests: request ids, limits of body and time, security headers, error responses.

Only PutSource streams its body to disk. A client is disconnected if it neither sends nor reads for `SILENT_SECONDS`, or
if its body takes longer than `BODY_SECONDS` (`UPLOAD_SECONDS` for PutSource). A response that ends early lacks the end
of its body, so the client recognizes it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.caller_threads import UPLOAD_BURST_SECONDS, UPLOAD_BYTES_PER_SECOND
from control_plane.api.errors import InvalidRequest, TooLarge, response, unexpected
from control_plane.api.peers import FORWARDED
from everstep.protocol.pace import Pace

log = logging.getLogger(__name__)

MAX_QUERY_FIELDS: Final = 1_000
STREAMED_PREFIX = "/v1/sources/"
UNKNOWN_BYTES = 1 << 20
"""Assumed length of a body if the request does not state it."""
LITTLE_BYTES = 1 << 16
"""Up to this length, the server discards the rest of a body without a delay for its client."""
SILENT_SECONDS: Final = 20.0
BODY_SECONDS: Final = 60.0
UPLOAD_SECONDS: Final = 900.0
"""Limit that suffices for an archive of 256 MiB at 2.4 Mbit/s."""
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALWAYS: Final = {"x-content-type-options": "nosniff"}
_OF_THE_API: Final = {"cache-control": "no-store"}
_OVER_TLS: Final = {"strict-transport-security": "max-age=31536000"}


class _NotRead(Exception):
    """The client has read nothing for `silent_seconds`."""


class _Body:
    """The body of one request, which has to arrive in time and within a limit.

    `announced_bytes` is 0 without a body, and None for an unknown length. `limit_bytes` None: the route
    streams the body to disk.
    """

    def __init__(
        self,
        receive: Receive,
        silent_seconds: float,
        whole_seconds: float,
        announced_bytes: int | None,
        limit_bytes: int | None,
    ) -> None:
        self._receive = receive
        self._silent_seconds = silent_seconds
        self._whole_seconds = whole_seconds
        self._announced_bytes = announced_bytes
        self._limit_bytes = limit_bytes
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + whole_seconds
        self._received_bytes = 0
        self._is_whole = False

    @property
    def unread_bytes(self) -> int:
        """Bytes that the client has still to send, as far as known."""
        if self._is_whole:
            return 0
        return UNKNOWN_BYTES if self._announced_bytes is None else max(0, self._announced_bytes - self._received_bytes)

    async def receive(self) -> Message:
        """Receive the next message. Raise HTTPException 408 if it is late, or 413 beyond the limit."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(min(self._clock() + self._silent_seconds, self._end)):
                message = await self._receive()
        except TimeoutError:
            is_late = self._clock() >= self._end
            reason = (
                f"the body was not complete within {self._whole_seconds:g} s"
                if is_late
                else f"no byte of the body arrived for {self._silent_seconds:g} s"
            )
            raise HTTPException(408, reason) from None
        self._is_whole = not message.get("more_body", False)
        self._received_bytes += len(message.get("body", b""))
        if self._limit_bytes is not None and self._received_bytes > self._limit_bytes:
            raise HTTPException(413, _too_long(self._limit_bytes))
        return message


class Envelope:
    """ASGI middleware around all routes.

    `max_body_bytes` and `body_seconds` limit a body that is not streamed to disk. `silent_seconds` is the longest time
    in which the client neither sends nor reads. `on_failure` receives each unhandled exception.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        silent_seconds: float = SILENT_SECONDS,
        body_seconds: float = BODY_SECONDS,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._app = app
        self._on_failure = on_failure
        self._max_body_bytes = max_body_bytes
        self._silent_seconds = silent_seconds
        self._body_seconds = body_seconds
        self._discards = Pace(UPLOAD_BURST_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        is_streamed = scope["method"] == "PUT" and scope["path"].startswith(STREAMED_PREFIX)
        whole_seconds = UPLOAD_SECONDS if is_streamed else self._body_seconds
        announced, limit = announced_bytes(scope), None if is_streamed else self._max_body_bytes
        body = _Body(receive, self._silent_seconds, whole_seconds, announced, limit)

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if body.unread_bytes > LITTLE_BYTES:
                    # The HTTP server reads and discards the rest of the body, as fast as the client sends it.
                    await self._discards.pay(min(body.unread_bytes, UPLOAD_BYTES_PER_SECOND) / UPLOAD_BYTES_PER_SECOND)
                headers = MutableHeaders(scope=message)
                headers["x-amzn-requestid"] = request_id
                for name, value in _security_headers(scope).items():
                    headers.setdefault(name, value)
            try:
                async with asyncio.timeout(self._silent_seconds):
                    await send(message)
            except TimeoutError:
                raise _NotRead from None

        if scope.get("query_string", b"").count(b"&") >= MAX_QUERY_FIELDS:
            refused = InvalidRequest(f"The query has more than {MAX_QUERY_FIELDS} fields.")
            await response(refused, request_id)(scope, body.receive, send_with_id)
            return
        if limit is not None and announced is not None and announced > limit:
            await response(TooLarge(_too_long(limit)), request_id)(scope, body.receive, send_with_id)
            return
        try:
            await self._app(scope, body.receive, send_with_id)
        except _NotRead:
            # Return without the end of the body. The HTTP server then closes the connection, and the client recognizes
            # the response as incomplete.
            log.info(
                "request %s: the client received nothing for %.0f s; the server closes its connection",
                request_id,
                self._silent_seconds,
            )
        except ClientDisconnect:
            log.info("request %s: the client left before the end of its body", request_id)
        except Exception as failure:
            log.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if self._on_failure is not None:
                self._on_failure(failure)
            if has_begun:
                raise
            await response(unexpected(failure), request_id)(scope, body.receive, send_with_id)


def _too_long(limit_bytes: int) -> str:
    return f"the body is longer than {limit_bytes} bytes"


def _security_headers(scope: Scope) -> dict[str, str]:
    # Set no cache-control for the dashboard's pages, because the dashboard sets it itself.
    is_page = not scope["path"].startswith("/v1/") and scope["path"] != "/metrics"
    return {**_ALWAYS, **({} if is_page else _OF_THE_API), **(_OVER_TLS if scope["scheme"] == "https" else {})}


def _given_id(scope: Scope) -> str:
    """Return the request id of a forwarded request; empty from a client."""
    given = Headers(scope=scope).get(FORWARDED, "")
    return given if _ID.fullmatch(given) else ""


def announced_bytes(scope: Scope) -> int | None:
    """Return Content-Length, 0 without a body, or None for an unknown length."""
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return None
    length = headers.get("content-length", "0")
    return int(length) if length.isdigit() else 0
