"""Creates and stores the server's secrets: the first administrator's token and the server secret.

Each is a file in the state directory, a secret of AWS Secrets Manager (`control_plane.cloud.secrets`), or an
environment variable, which takes precedence. The first start generates missing values. The server's id does not depend
on the secrets, so agents need no new settings when a secret changes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from control_plane.db import tokens
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind

SERVER_SECRET_BYTES: Final = 32
SERVER_SECRET: Final = "server_secret"
ADMIN_TOKEN: Final = "admin_token"
SERVER_ID: Final = "server_id"


class Secrets(Protocol):
    """Stores the secrets of one installation."""

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        """Return the stored secret. If it has no value yet, store the printable text of `fresh`.

        `name` has underscores. Another server may have written the value a moment ago.
        """
        ...


class SecretFiles:
    """`Secrets` in the files of a directory, which only the server's user can read. One server at a time may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        path = self._directory / name
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            value = fresh()
            write_private(path, value + "\n")
            return value


class GivenSecrets:
    """`Secrets` whose values the operator sets. Values that are not set (empty) come from `otherwise`."""

    def __init__(self, given: Mapping[str, str], otherwise: Secrets) -> None:
        self._given = given
        self._otherwise = otherwise

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        return self._given.get(name) or self._otherwise.kept(name, fresh)


def server_secret(stored: Secrets) -> bytes:
    """Return the server secret, from which the server derives the key of each generation.

    A running generation keeps its key when the secret changes. Nodes that load one then get different keys, and the job
    starts another generation.
    """
    return bytes.fromhex(stored.kept(SERVER_SECRET, lambda: secrets.token_hex(SERVER_SECRET_BYTES)))


def server_id(stored: Secrets) -> str:
    """Return the installation's public id, 32 hexadecimal digits, which agents sign: proofs are valid only here."""
    return stored.kept(SERVER_ID, lambda: secrets.token_hex(16))


def ensure_admin(database: Database, stored: Secrets, now: datetime) -> None:
    """Create the first administrator's token, unless the database has one."""
    # The secret is stored before its digest, so after a crash, the next start stores the digest of the same
    # token.
    with database.read() as session:
        if tokens.has_admin(session):
            return
    # This call may send a request to AWS, so it runs outside of a transaction.
    secret = stored.kept(ADMIN_TOKEN, tokens.new_secret)
    with database.write() as session:
        if tokens.has_admin(session):
            return  # Since the first check, another server with the same secrets has stored this token's digest.
        tokens.mint(
            session,
            NewToken(kind=TokenKind.USER, role=Role.ADMIN, description="first administrator"),
            now,
            secret=secret,
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. The file appears completely or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
