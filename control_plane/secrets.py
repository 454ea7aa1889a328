"""The two secrets in a server's state directory: the first administrator's token, and what generation keys are derived from.

Invariant: both files belong to their user alone and are whole from the moment they exist.
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
    """Return where the first administrator's token is."""
    return state_directory / "admin_token"


def server_secret(state_directory: Path) -> bytes:
    """Return the secret that generation keys are derived from; made at the first start.

    Losing it ends what runs, and nothing else.
    """
    return bytes.fromhex(_kept(state_directory / "server_secret", secrets.token_hex(SERVER_SECRET_BYTES)))


def server_id(state_directory: Path) -> str:
    """Return what tells this installation from every other: agents sign it, so that a signature for one is worth nothing at another. No secret."""
    return hmac.digest(server_secret(state_directory), b"server id", "sha256").hex()[:32]


def ensure_admin(database: Database, state_directory: Path, now: datetime) -> None:
    """Make the first administrator's token, unless there is an administrator already.

    The file is written first: a start that dies between the two finds the token there and stores its digest next time.
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
    """Return what the file holds; where there is none, it holds `fresh` afterwards."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        write_private(path, fresh + "\n")
        return fresh


def write_private(path: Path, text: str) -> None:
    """Write a file that its user alone may read, whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
