"""Creates, reads and encodes the access key of a local cluster, which processes share through a private file.

Invariant: only the file's owner can read it. The secret is in no `repr`, log line or command line.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PREFIX: Final = "LOCAL"
"""No AWS access key has this prefix."""
PRIVATE: Final = 0o077
"""Permission bits of group and other users."""


class UnusableKeys(Exception):
    """The key file is missing, malformed, or readable by other users. The message names the file and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalKeys:
    """An access key pair of a local cluster: the only long-lived key that the local AWS accepts."""

    access_key_id: str
    secret_access_key: str = field(repr=False)

    @classmethod
    def random(cls) -> LocalKeys:
        """Return a new key pair with a 256-bit secret."""
        return cls(access_key_id=PREFIX + secrets.token_hex(8).upper(), secret_access_key=secrets.token_urlsafe(32))

    @classmethod
    def read(cls, file: Path) -> LocalKeys:
        """Read the key pair from a file that belongs to this user and has mode 0600. Raises UnusableKeys if the file is
        unreadable, is not a key pair, or is accessible to other users.
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
        """Return the content of the key file. The caller must write the file with mode 0600."""
        return json.dumps({"AccessKeyId": self.access_key_id, "SecretAccessKey": self.secret_access_key}).encode()
