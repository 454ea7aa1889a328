"""The access key of one local cloud, and the private file that carries it between processes.

Invariant: the file is readable by its owner only, and the secret appears in no `repr`, log line or command line.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PREFIX: Final = "LOCAL"
"""No access key of AWS begins like this."""
PRIVATE: Final = 0o077
"""Permission bits that nobody but the owner may have."""


class UnusableKeys(Exception):
    """The keys file is missing, malformed, or readable by others; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalKeys:
    """An access key pair. `everstep local up` makes one per cluster; the local AWS accepts no other long-lived key."""

    access_key_id: str
    secret_access_key: str = field(repr=False)

    @classmethod
    def random(cls) -> LocalKeys:
        """Return a new key pair with 256 bits of secret."""
        return cls(access_key_id=PREFIX + secrets.token_hex(8).upper(), secret_access_key=secrets.token_urlsafe(32))

    @classmethod
    def read(cls, file: Path) -> LocalKeys:
        """Read the key pair from a file that `encoded` filled.

        Args:
            file: owned by this user, mode 0600.

        Returns:
            The key pair.

        Raises:
            UnusableKeys: the file cannot be read, is no key pair, or is open to other users.
        """
        try:
            with file.open("rb") as opened:
                status = os.fstat(opened.fileno())
                content = json.loads(opened.read())
            keys = cls(access_key_id=content["AccessKeyId"], secret_access_key=content["SecretAccessKey"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnusableKeys(
                f"{file} has no access key of a local cloud ({type(error).__name__}): run everstep local up"
            ) from error
        if status.st_uid != os.geteuid() or status.st_mode & PRIVATE:
            raise UnusableKeys(
                f"{file} must belong to this user with mode 0600, not mode {status.st_mode & 0o777:04o}: chmod 600 it"
            )
        return keys

    def encoded(self) -> bytes:
        """Return the content of the file; the caller writes it with mode 0600."""
        return json.dumps({"AccessKeyId": self.access_key_id, "SecretAccessKey": self.secret_access_key}).encode()
