"""Remembers digests of the items in responses, so that a client's next poll receives only the changed items.

A client that polls a list sends the ChangeToken of its previous response. The route finds the digests of that response
in `ResponseSnapshots`, and compares them with the current digests. It returns the difference and a new ChangeToken.
The digests of a response are called its contents:

    contents    digests by key: one digest per item of a list, or one per block of a metric's points

Equal contents have equal tokens, so repeated polls of one caller for the same list share an entry. If a token is
unknown, for example after a restart of the server, the route returns everything.

Invariant: a token is valid only for the caller and the request parameters for which it was issued (the `question`). The
memory is bounded.
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
"""Length of the digest of one item. At this length, two different items practically never have equal digests."""
TOKEN_BYTES: Final = 16
_ENTRY_BYTES: Final = 150
"""Memory overhead in bytes of the Python objects for one key and its digest, as tracemalloc measured it."""

Contents = Mapping[str, bytes]


class ResponseSnapshots:
    """The contents (digests of the items) of recent responses, by ChangeToken. Threads may share an instance.

    The class has nothing to do with snapshots of a job's state.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, tuple[Contents, int]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def find(self, question: Hashable, token: str | None) -> Contents | None:
        """Return the contents (digests of the items) of the earlier response to which a ChangeToken belongs.

        Args:
            question: caller and parameters of the request.
            token: the ChangeToken of the request, or None.

        Returns:
            The contents. None if the server does not remember the token, or issued it for another caller or other
            parameters.
        """
        if token is None:
            return None
        with self._lock:
            found = self._held.get(_key(question, token))
            if found is None:
                return None
            self._held.move_to_end(_key(question, token))
        return found[0]

    def keep(self, question: Hashable, contents: Contents) -> str:
        """Store the digests of a response's items (its contents), and return their token.

        Args:
            question: caller and parameters of the request.
            contents: digests by the key of the item. The caller must not change them afterwards.

        Returns:
            The token. Equal contents have equal tokens.
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
    """Return the part of a response that describes its difference from an earlier response.

    Args:
        before: contents (digests by key) of the earlier response. None if the response contains everything.
        now: contents of the complete response, that is, of the response without ChangesSince.
        token: the token of `now`.

    Returns:
        The response field `Changes`: the token, and the keys that only `before` has.
    """
    removed = [key for key in before or {} if key not in now]
    return Changes(change_token=token, is_incremental=before is not None, removed=removed)


def digest_of(item: bytes) -> bytes:
    """Return the digest by which the next poll detects whether an item of a list response has changed."""
    return hashlib.blake2b(item, digest_size=DIGEST_BYTES).digest()


def _key(question: Hashable, token: str) -> bytes:
    return digest_of(f"{question!r} {token}".encode())
