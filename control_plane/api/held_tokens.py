"""The tokens that requests bring, looked up once for as long as nothing was written to the database.

    the token was found good, nothing committed since, it has not expired meanwhile    its record
    else                                                                               looked up

To revoke a token is a commit, whichever replica makes it: the next request looks it up. Where commits of other replicas
cannot be seen (`Versions`), nothing is held and every request looks.

Invariant: a record is given to whoever shows the token that it is of, and the token was good when the request came. The
token itself is not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import Final

from control_plane.db import tokens
from control_plane.db.session import Database
from control_plane.db.tokens import TokenRecord
from control_plane.db.versions import Versions

MAX_HELD: Final = 10_000


class HeldTokens:
    """Finds the records of tokens. Used on the server's event loop.

    Args:
        database: where they are stored.
        versions: of that database.
        now: the time in UTC.
    """

    def __init__(self, database: Database, versions: Versions, now: Callable[[], datetime]) -> None:
        self._database = database
        self._versions = versions
        self._now = now
        self._held: dict[bytes, TokenRecord] = {}
        self._version: int | None = None

    async def find(self, token: str) -> TokenRecord | None:
        """Return the record of a token that is good now, or None."""
        version = self._versions.current() if self._versions.sees_everything else None
        if version != self._version:
            self._held.clear()
            self._version = version
        digest = hashlib.sha256(token.encode()).digest()
        held = self._held.get(digest)
        if held is not None and (held.expires_at is None or self._now() < held.expires_at):
            return held
        found = await asyncio.to_thread(self._look_up, token)
        if found is not None and version is not None and version == self._version and len(self._held) < MAX_HELD:
            self._held[digest] = found
        return found

    def _look_up(self, token: str) -> TokenRecord | None:
        with self._database.read() as session:
            return tokens.find(session, token, self._now())
