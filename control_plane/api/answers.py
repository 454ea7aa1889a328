"""Caches responses to frequent reads until the next commit to the database.

    GET DescribeTrainingJob, GetMetricData or ListTrainingJobs, with a token in the header or a session cookie:
      same path, query, caller and encoding, no commit since, at most `MAX_AGE_SECONDS` old    returns the cached bytes
      an identical request is being processed                                                  waits for its response
      otherwise                                                                                processes the request

One server process answered 9,780 DescribeTrainingJob per second, and 496 without the cache (docs/benchmarks-api.md).
Changes without a commit, such as an expiry, take effect after the maximum age. While this server cannot see other
servers' commits (`Versions`), those commits take effect after `MAX_AGE_UNSEEN_SECONDS`.

Invariant: a response is returned only for the token or cookie it was created for. The size of the cache is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.traffic import accepts_gzip
from control_plane.db.versions import Versions

MAX_AGE_SECONDS: Final = 1.0
MAX_AGE_UNSEEN_SECONDS: Final = 0.2
"""Limit while this server cannot see the commits of other servers."""
MAX_BYTES: Final = 32 * 1024 * 1024
ENTRY_BYTES: Final = 2_048
"""Memory of a response without its body: measured, 1.5 kB."""
MAX_ANSWER_BYTES: Final = 2 * 1024 * 1024
_SHARED: Final = re.compile(r"/v1/training-jobs(/[^/]+(/metric-data)?)?")
_OF_SESSIONS: Final = (b"cookie", b"sec-fetch-site", b"origin")
"""Headers of the cache key that decide whether a browser's session is valid (`api.sessions`)."""

Key = tuple[bytes, bytes, bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """A cached response, with its version of the database."""

    version: int
    made_at: datetime
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def held_bytes(self) -> int:
        """Bytes by which the response fills the cache."""
        return len(self.body) + ENTRY_BYTES


class Answers:
    """ASGI middleware that caches responses to frequent reads. The middleware of request ids wraps it."""

    def __init__(self, app: ASGIApp, versions: Versions, now: Callable[[], datetime]) -> None:
        self._app = app
        self._versions = versions
        self._now = now
        self._max_age_seconds = MAX_AGE_SECONDS if versions.sees_everything else MAX_AGE_UNSEEN_SECONDS
        self._held: OrderedDict[Key, Answer] = OrderedDict()
        self._held_bytes = 0
        self._making: dict[tuple[Key, int], asyncio.Future[Answer | None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key(scope)
        version = self._versions.current() if key is not None else None
        if key is None or version is None:
            await self._app(scope, receive, send)
            return
        answer = self._good(key, version)
        if answer is None and (making := self._making.get((key, version))) is not None:
            answer = await asyncio.shield(making)
        if answer is None:
            await self._make(key, version, scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})

    def _good(self, key: Key, version: int) -> Answer | None:
        answer = self._held.get(key)
        if (
            answer is None
            or answer.version != version
            or not 0 <= (self._now() - answer.made_at).total_seconds() < self._max_age_seconds
        ):
            return None
        self._held.move_to_end(key)
        return answer

    async def _make(self, key: Key, version: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Process the request, and cache a complete response with status 200."""
        made_at = self._now()
        done: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._making[key, version] = done
        start: Message | None = None
        body = bytearray()

        async def send_kept(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                # Copy the headers. The outer middleware later adds headers to the original list. They belong to this
                # one request, such as the request's id, and must not be cached.
                start = {**message, "headers": list(message["headers"])}
            elif message["type"] == "http.response.body" and len(body) <= MAX_ANSWER_BYTES:
                body.extend(message.get("body", b""))
                if (
                    not message.get("more_body")
                    and start is not None
                    and start["status"] == 200
                    and len(body) <= MAX_ANSWER_BYTES
                ):
                    self._hold(key, answer := Answer(version, made_at, start["headers"], bytes(body)))
                    done.set_result(answer)
            await send(message)

        try:
            await self._app(scope, receive, send_kept)
        finally:
            if self._making.get((key, version)) is done:
                del self._making[key, version]
            if not done.done():
                # If the response was not cached, each waiting identical request is then processed separately.
                done.set_result(None)

    def _hold(self, key: Key, answer: Answer) -> None:
        before = self._held.pop(key, None)
        self._held_bytes += answer.held_bytes - (before.held_bytes if before is not None else 0)
        self._held[key] = answer
        while self._held_bytes > MAX_BYTES:
            _, oldest = self._held.popitem(last=False)
            self._held_bytes -= oldest.held_bytes


def _key(scope: Scope) -> Key | None:
    """Return the cache key of a request, or None if it is not cacheable."""
    # A digest of query and credentials: the cache stores no tokens, and a long query takes no memory.
    if scope["type"] != "http" or scope["method"] != "GET" or _SHARED.fullmatch(scope["path"]) is None:
        return None
    credentials = _values(scope, b"authorization")
    if len(credentials) > 1:
        return None
    if not credentials:
        if not _values(scope, b"cookie"):
            return None
        credentials = [repr([_values(scope, name) for name in _OF_SESSIONS]).encode()]
    digest = hashlib.sha256(credentials[0] + b"\n" + scope["query_string"]).digest()
    return scope["path"].encode(), digest, accepts_gzip(scope)


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]
