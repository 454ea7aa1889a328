"""Caches the records of valid tokens until the next commit to the database, such as a revocation.

Measured for DescribeTrainingJob without a cached response (SQLite, one request at a time, 2 cores): CPU time falls from
2.1 ms to 1.4 ms, latency from 3 ms to 1.8 ms. Without sight of other servers' commits (`Versions`), it caches nothing.
It stores digests, not tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from control_plane.api.caller_threads import LOOK_UPS, Workers
from control_plane.db import nonces, tokens
from control_plane.db.session import Database
from control_plane.db.tokens import TokenRecord
from control_plane.db.versions import Versions

TOKEN_LIMIT: Final = 10_000
LookUp = Callable[[Session], TokenRecord | None]


class HeldTokens:
    """Finds token records, with a cache of at most `token_limit` of them. Used on the server's event loop only."""

    def __init__(
        self, database: Database, versions: Versions, now: Callable[[], datetime], *, token_limit: int = TOKEN_LIMIT
    ) -> None:
        self._token_limit = token_limit
        self._database = database
        self._versions = versions
        self._now = now
        self._held: dict[bytes, TokenRecord] = {}
        self._version: int | None = None
        self.threads = Workers(LOOK_UPS, "look-up")
        self._running: dict[tuple[bytes, int], asyncio.Task[TokenRecord | None]] = {}
        """Look-ups that run or wait, by the secret's digest and the version of the database when they began."""

    async def find(self, token: str) -> TokenRecord | None:
        """Return the record of a token, or None if the token is invalid."""
        return await self._find(token, lambda session: tokens.find(session, token, self._now()))

    async def find_of_session(self, cookie: str, token_id: str) -> TokenRecord | None:
        """Return the record of a browser session's token. None if the token is invalid or the session signed out.

        The caller has verified the cookie's signature and expiry.
        """

        def look_up(session: Session) -> TokenRecord | None:
            return None if nonces.is_spent(session, cookie) else tokens.find_by_id(session, token_id, self._now())

        return await self._find(cookie, look_up)

    async def _find(self, secret: str, look_up: LookUp) -> TokenRecord | None:
        version = self._versions.current() if self._versions.sees_everything else None
        if version != self._version:
            self._held.clear()
            self._version = version
        digest = hashlib.sha256(secret.encode()).digest()
        held = self._held.get(digest)
        if held is not None and (held.expires_at is None or self._now() < held.expires_at):
            return held
        found = await self._shared(digest, look_up, version)
        if (
            found is not None
            and version is not None
            and version == self._version
            and len(self._held) < self._token_limit
        ):
            self._held[digest] = found
        return found

    async def _shared(self, digest: bytes, look_up: LookUp, version: int | None) -> TokenRecord | None:
        """Look a secret up. Requests with the same secret share the look-up, unless a commit lies between them."""
        if version is None:
            return await self.threads.run(self._read, look_up)
        key = digest, version
        if (running := self._running.get(key)) is None:
            running = asyncio.create_task(self.threads.run(self._read, look_up))
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(running)

    def _read(self, look_up: LookUp) -> TokenRecord | None:
        with self._database.read() as session:
            return look_up(session)
