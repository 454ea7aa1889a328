"""Creates and stores the server's secrets: the first administrator's token and the server secret.

Each secret is a file in the state directory, a secret of AWS Secrets Manager (`control_plane.cloud.secrets`), or an
environment variable of the server, which takes precedence. The server's id is public. It does not depend on the
secrets, so agents need no new settings when a secret changes.

Invariant: the first start generates each value that no environment variable sets. All later starts, and all other
servers, read the same value.
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
        """Return a secret. If it has no value yet, store the result of `fresh`.

        Args:
            name: name of the secret, with underscores.
            fresh: generates a value of printable text.

        Returns:
            The stored value, which another server may have written a moment ago.
        """
        ...


class SecretFiles:
    """`Secrets` in the files of a directory, which only the server's user can read.

    Args:
        directory: state directory of the server, which exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        """Return the secret in file `name` (see `Secrets.kept`). Only one server may use the directory at a time."""
        path = self._directory / name
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            value = fresh()
            write_private(path, value + "\n")
            return value


class GivenSecrets:
    """`Secrets` whose values the operator sets, and other `Secrets` for values that the operator does not set.

    Args:
        given: values by name of the secret. An empty value counts as not set.
        otherwise: supplies each secret without an operator's value, for example from files.
    """

    def __init__(self, given: Mapping[str, str], otherwise: Secrets) -> None:
        self._given = given
        self._otherwise = otherwise

    def kept(self, name: str, fresh: Callable[[], str]) -> str:
        """Return the operator's value of a secret, or the stored one (see `Secrets.kept`)."""
        return self._given.get(name) or self._otherwise.kept(name, fresh)


def server_secret(stored: Secrets) -> bytes:
    """Return the server secret, from which the server derives the key of each generation.

    The nodes of a generation receive the generation's key when they load the generation. A running generation keeps its
    key when the secret changes. If the secret changes while nodes load a generation, they get different keys, and the
    job starts another generation.
    """
    return bytes.fromhex(stored.kept(SERVER_SECRET, lambda: secrets.token_hex(SERVER_SECRET_BYTES)))


def server_id(stored: Secrets) -> str:
    """Return the public id of this installation: 32 hexadecimal digits.

    Agents include this id in what they sign, so that another installation rejects the signature.
    """
    return stored.kept(SERVER_ID, lambda: secrets.token_hex(16))


def ensure_admin(database: Database, stored: Secrets, now: datetime) -> None:
    """Create the first administrator's token, unless the database has an administrator's token.

    The function stores the token as a secret before it writes the token's digest to the database. After a crash between
    the two writes, the next start stores the digest of the same token in the database.
    """
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
