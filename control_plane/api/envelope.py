"""What surrounds every HTTP request: an id, bounds on its body and on its client's patience with us, and an answer even when we fail.

Invariant: no request reads more than `max_body_bytes` into memory; PutSource alone streams to disk, and bounds itself. A client that for
`SILENT_SECONDS` sends nothing of a body that is not whole, or takes nothing of its answer, is let go; of an answer it sees that it was cut off.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.errors import InternalError, TooLarge, response

log = logging.getLogger(__name__)

STREAMED_PREFIX = "/v1/sources/"
SILENT_SECONDS: Final = 20.0


class _NotRead(Exception):
    """The client takes nothing of its answer."""


class Envelope:
    """ASGI middleware around all routes.

    Args:
        app: what is inside.
        max_body_bytes: of a request that is not streamed to disk.
        silent_seconds: how long a client may send nothing, or take nothing.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, silent_seconds: float = SILENT_SECONDS) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._silent_seconds = silent_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; called by the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-amzn-requestid"] = request_id
            try:
                async with asyncio.timeout(self._silent_seconds):
                    await send(message)
            except TimeoutError:
                raise _NotRead from None

        receive = self._in_time(receive)
        if not (scope["method"] == "PUT" and scope["path"].startswith(STREAMED_PREFIX)):
            if _announced(scope) > self._max_body_bytes:
                await response(TooLarge(self._limit()), request_id)(scope, receive, send_with_id)
                return
            receive = self._bounded(receive)
        try:
            await self._app(scope, receive, send_with_id)
        except _NotRead:
            # Returning without the end of the body makes the server close the connection: the reader, if it comes back, knows that there was more.
            log.info("request %s: its client took nothing for %.0f s and is dropped", request_id, self._silent_seconds)
        except Exception:
            log.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if has_begun:
                raise
            error = InternalError(
                "The request failed inside the service.", hint="Give the RequestId to whoever runs the service: its log has the cause."
            )
            await response(error, request_id)(scope, receive, send_with_id)

    def _in_time(self, receive: Receive) -> Receive:
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()  # what is waited for is that the client leaves
            try:
                async with asyncio.timeout(self._silent_seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"nothing of the body came for {self._silent_seconds:g} s") from None
            is_whole = not message.get("more_body", False)
            return message

        return receive_in_time

    def _bounded(self, receive: Receive) -> Receive:
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._limit())
            return message

        return receive_bounded

    def _limit(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes"


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "0")
    return int(length) if length.isdigit() else 0
