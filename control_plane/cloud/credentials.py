"""AWS credentials that may become available only after the start of the server.

boto3 searches for credentials only when it creates a client. The server may start before its instance has an IAM role,
so its clients repeat the search at each use. Once a search has found credentials, botocore alone renews them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import botocore.session
from botocore.credentials import Credentials
from botocore.exceptions import NoCredentialsError

log = logging.getLogger(__name__)

SEARCH_SECONDS: Final = 5.0
"""Shortest time between two searches. Outside EC2, a search is slow, because it waits for the metadata service."""


class LateCredentials(Credentials):  # type: ignore[misc]  # botocore has no types
    """Credentials that may not exist when the process starts. Thread-safe.

    Each use searches for them, at most every `pause` seconds. `search` returns None if no source has any.
    """

    def __init__(
        self,
        search: Callable[[], Any] | None = None,
        *,
        pause: float = SEARCH_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._search = search or _search
        self._pause = pause
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._found: Any = None
        self._searched_at = float("-inf")
        self.method = "everstep-late"

    def get_frozen_credentials(self) -> Any:
        """Return access key id, secret key and session token.

        Raises NoCredentialsError if no source has credentials yet.
        """
        with self._lock:
            if self._found is None and self._monotonic() - self._searched_at >= self._pause:
                self._found = self._search()
                self._searched_at = self._monotonic()
                if self._found is not None:
                    log.info("found AWS credentials (%s)", self._found.method)
            found = self._found
        if found is None:
            raise NoCredentialsError
        return found.get_frozen_credentials()

    @property
    def access_key(self) -> str:
        """The current access key id. Raises NoCredentialsError like `get_frozen_credentials`."""
        return str(self.get_frozen_credentials().access_key)

    @property
    def secret_key(self) -> str:
        """The current secret key. Raises NoCredentialsError like `get_frozen_credentials`."""
        return str(self.get_frozen_credentials().secret_key)

    @property
    def token(self) -> str | None:
        """The session token, or None for permanent keys. Raises NoCredentialsError like `get_frozen_credentials`."""
        found: str | None = self.get_frozen_credentials().token
        return found

    @property
    def account_id(self) -> str | None:
        """The AWS account of the access keys, or None before the keys exist. Some services' endpoints contain it."""
        return getattr(self._found, "account_id", None)

    def load_credentials(self) -> LateCredentials:
        """Return this object, because botocore calls this method on the provider of a session's credentials."""
        return self


def _search() -> Any:
    # A botocore session caches the AWS config file, so each search for new credentials needs a new session.
    return botocore.session.Session().get_credentials()
