"""Creates and stores the server's secrets: the first administrator's token and the server secret.

Both are files in the state directory.

Invariant: only the server's user can read these files, and a file appears with its complete content.
"""

from __future__ import annotations

import hmac
import os
import secrets
from datetime import datetime
from pathlib import Path

from control_plane.db import tokens
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind

SERVER_SECRET_BYTES = 32


def admin_token_path(state_directory: Path) -> Path:
    """Return the path of the file with the first administrator's token."""
    return state_directory / "admin_token"


def server_secret(state_directory: Path) -> bytes:
    """Return the secret from which the server derives generation keys.

    The first start creates the secret.

    If the secret is lost, the running generations end, because their keys can no longer be derived.
    """
    return bytes.fromhex(_kept(state_directory / "server_secret", secrets.token_hex(SERVER_SECRET_BYTES)))


def server_id(state_directory: Path) -> str:
    """Return the public id of this installation.

    Agents include this id in what they sign, so that another installation rejects the signature.
    """
    return hmac.digest(server_secret(state_directory), b"server id", "sha256").hex()[:32]


def ensure_admin(database: Database, state_directory: Path, now: datetime) -> None:
    """Create the first administrator's token, unless one exists in the database.

    The file is written before the database. After a crash between the two writes, the next start stores the digest of
    the token in the file.
    """
    with database.write() as session:
        if tokens.has_admin(session):
            return
        secret = _kept(admin_token_path(state_directory), tokens.new_secret())
        tokens.mint(
            session,
            NewToken(kind=TokenKind.USER, role=Role.ADMIN, description="first administrator"),
            now,
            secret=secret,
        )


def _kept(path: Path, fresh: str) -> str:
    """Return the content of a file. If the file does not exist, create it with the result of `fresh`."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        write_private(path, fresh + "\n")
        return fresh


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can read."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
