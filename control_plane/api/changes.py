"""Remembers digests of the items in responses, so that a client's next poll receives only the changed items.

A client sends the ChangeToken of its previous response, whose contents (digests by key) are compared with the current
ones. For an unknown token, for example after a restart, the route returns everything. Invariant: a token is valid only
for the same caller and parameters (the `question`). Memory is bounded.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

from control_plane.api.schemas.common import Changes

MAX_BYTES: Final = 16 * 1024 * 1024
DIGEST_BYTES: Final = 8
"""Length of one item's digest. Two different items practically never have equal ones."""
TOKEN_BYTES: Final = 16
_ENTRY_BYTES: Final = 150
"""Python's overhead per key and digest, measured with tracemalloc."""

Contents = Mapping[str, bytes]


class ResponseSnapshots:
    """The contents of recent responses, by ChangeToken. Threads may share an instance.

    Unrelated to snapshots of jobs.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, tuple[Contents, int]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def find(self, question: Hashable, token: str | None) -> Contents | None:
        """Return the contents of a ChangeToken. None if it is forgotten, or of another caller or other parameters."""
        if token is None:
            return None
        with self._lock:
            found = self._held.get(_key(question, token))
            if found is None:
                return None
            self._held.move_to_end(_key(question, token))
        return found[0]

    def keep(self, question: Hashable, contents: Contents) -> str:
        """Store contents, which must not change afterwards, and return their token.

        Equal contents have equal tokens.
        """
        digest = hashlib.blake2b(digest_size=TOKEN_BYTES)
        for key, value in contents.items():
            for part in (key.encode(), value):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        token = digest.hexdigest()
        size = sum(len(key) + len(value) + _ENTRY_BYTES for key, value in contents.items()) + _ENTRY_BYTES
        with self._lock:
            before = self._held.pop(_key(question, token), None)
            self._held_bytes += size - (before[1] if before is not None else 0)
            self._held[_key(question, token)] = contents, size
            while self._held_bytes > self._max_bytes and len(self._held) > 1:
                _, (_, released) = self._held.popitem(last=False)
                self._held_bytes -= released
        return token


def compared(before: Contents | None, now: Contents, token: str) -> Changes:
    """Return the response field `Changes`: the token of `now`, and the keys that only `before` has.

    `now` describes the complete response. If `before` is None, the response contains everything.
    """
    removed = [key for key in before or {} if key not in now]
    return Changes(change_token=token, is_incremental=before is not None, removed=removed)


def digest_of(item: bytes) -> bytes:
    """Return the digest of an item."""
    return hashlib.blake2b(item, digest_size=DIGEST_BYTES).digest()


def _key(question: Hashable, token: str) -> bytes:
    return digest_of(f"{question!r} {token}".encode())
