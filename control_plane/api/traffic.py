"""Reduces the bytes of JSON responses: compression, and 304 for a response that the client already has.

Only complete JSON responses to GET with status 200 change. A response with a credential of Everstep is never
compressed, because its length could reveal the credential (BREACH): no GET returns one, as a test checks. Environment
variables of DescribeTrainingJob are safe, because only members of the project can send requests with a session or
change the rest of the response.
"""

from __future__ import annotations

import gzip
import hashlib
from abc import ABC, abstractmethod
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.caller_threads import Workers

MIN_BYTES: Final = 1_000
"""Shorter bodies fit into one packet."""
THREAD_BYTES: Final = 64_000
"""Length above which a thread compresses the body.

On the event loop, the compression of such a body would delay other requests by milliseconds.
"""
PACKING_THREADS: Final = 2
LEVEL: Final = 4
"""Level of gzip, measured on ListTrainingJobs of 1,000 jobs: higher ones save little and take much longer."""
ETAG_BYTES: Final = 12


def accepts_gzip(scope: Scope) -> bool:
    """Return whether the client accepts gzip."""
    accepted = Headers(scope=scope).get("accept-encoding", "").lower()
    for offer in accepted.split(","):
        coding, _, weight = offer.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class _Changing(ABC):
    """ASGI middleware that changes complete JSON responses to GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].startswith("/v1/"):
            send = self._changing(scope, send)
        await self._app(scope, receive, send)

    @abstractmethod
    async def _changed(self, scope: Scope, start: Message, body: bytes) -> bytes:
        """Return a response's new body. May modify the headers of the start message."""

    def _changing(self, scope: Scope, send: Send) -> Send:
        start: Message | None = None

        async def send_changed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = {**message, "headers": list(message["headers"])}
                return
            if start is not None:
                begun, start = start, None
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    body = await self._changed(scope, begun, message.get("body", b""))
                    headers = MutableHeaders(raw=begun["headers"])
                    del headers["content-length"]
                    if begun["status"] != 304:
                        headers["content-length"] = str(len(body))
                    message = {**message, "body": body}
                await send(begun)
            await send(message)

        return send_changed


class Compression(_Changing):
    """ASGI middleware that compresses JSON responses."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._threads = Workers(PACKING_THREADS, "compression")

    async def _changed(self, scope: Scope, start: Message, body: bytes) -> bytes:
        headers = MutableHeaders(raw=start["headers"])
        if len(body) < MIN_BYTES or "content-encoding" in headers:
            return body
        headers.add_vary_header("accept-encoding")
        if not accepts_gzip(scope):
            return body
        headers["content-encoding"] = "gzip"
        return await self._threads.run(_packed, body) if len(body) > THREAD_BYTES else _packed(body)


class Conditional(_Changing):
    """ASGI middleware that answers 304 if the client already has the response."""

    async def _changed(self, scope: Scope, start: Message, body: bytes) -> bytes:
        headers = MutableHeaders(raw=start["headers"])
        tag = f'"{hashlib.blake2b(body, digest_size=ETAG_BYTES).hexdigest()}"'
        headers["etag"] = tag
        if tag not in (each.strip() for each in Headers(scope=scope).get("if-none-match", "").split(",")):
            return body
        start["status"] = 304
        for name in ("content-type", "content-encoding"):
            del headers[name]
        return b""


def _is_json(start: Message) -> bool:
    return start["status"] == 200 and Headers(raw=start["headers"]).get("content-type", "") == "application/json"


def _packed(body: bytes) -> bytes:
    return gzip.compress(body, LEVEL, mtime=0)
