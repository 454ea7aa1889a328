"""Bearer tokens, with which callers and agents authenticate. The database contains only digests of tokens.

user      a person or a program; has a role, and a project if the token is limited to one project
join      an agent whose instance has not joined its fleet yet (`db.nodes`: `joined_at`)
session   an agent that has joined; bound to its node, revoked when the node ends
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import ColumnElement, and_, bindparam, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.db.errors import Conflict, NotFound
from control_plane.db.models import TokenRow
from control_plane.db.session import changed_rows, record_of, values_of

TOKEN_BYTES = 32
_PREFIX = "est_"
"""Secret scanners recognize tokens by this prefix."""


class TokenKind(StrEnum):
    """Purpose of a token."""

    USER = "user"
    JOIN = "join"
    SESSION = "session"


class Role(StrEnum):
    """Permissions of a caller.

    - ADMIN: all actions in every project.
    - SUBMITTER: all actions on jobs of the token's project, and read access to its other data.
    - VIEWER: read access to the data of the token's project.
    - AGENT: only the websocket of agents.
    """

    ADMIN = "admin"
    SUBMITTER = "submitter"
    VIEWER = "viewer"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A row of the table of API tokens."""

    id: str
    digest: str
    kind: str
    role: str
    project: str
    fleet_name: str | None
    node_id: str | None
    description: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """Properties of a token to create."""

    kind: TokenKind
    role: Role
    project: str = ""
    """Empty means all projects."""
    fleet_name: str | None = None
    node_id: str | None = None
    description: str = ""
    expires_at: datetime | None = None


def new_secret() -> str:
    """Return a new random token."""
    return _PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def mint(session: Session, new: NewToken, now: datetime, *, secret: str | None = None) -> tuple[str, TokenRecord]:
    """Create a token, and return it with its record.

    The caller must show the token now, because only its digest is stored. `secret` comes from `new_secret`, and the
    caller has stored it elsewhere before. None: the function generates it.
    """
    token = secret or new_secret()
    row = TokenRow(**values_of(new), id="tok-" + secrets.token_hex(8), digest=_digest(token), created_at=now)
    session.add(row)
    session.flush()
    return token, record_of(row, TokenRecord)


_ADMIN: Final = (TokenRow.kind == TokenKind.USER, TokenRow.role == Role.ADMIN, TokenRow.revoked_at.is_(None))


def has_admin(session: Session) -> bool:
    """Return whether an administrator's token exists that is not revoked."""
    return session.scalar(select(TokenRow.id).where(*_ADMIN).limit(1)) is not None


def page(
    session: Session,
    *,
    project: str | None,
    with_ended: bool,
    now: datetime,
    after: tuple[datetime, str] | None,
    limit: int,
) -> tuple[TokenRecord, ...]:
    """Return the user tokens of a project, or all user and join tokens (None), oldest first.

    `after` is `(created_at, id)` of the previous page's last token. None means the first page.
    """
    query = (
        select(TokenRow)
        .where(TokenRow.kind.in_((TokenKind.USER, TokenKind.JOIN)))
        .order_by(TokenRow.created_at, TokenRow.id)
        .limit(limit)
    )
    if project is not None:
        query = query.where(TokenRow.project == project, TokenRow.kind == TokenKind.USER)
    if not with_ended:
        query = query.where(_is_good(now))
    if after is not None:
        query = query.where(tuple_(TokenRow.created_at, TokenRow.id) > after)
    return tuple(record_of(row, TokenRecord) for row in session.scalars(query))


def get(session: Session, token_id: str) -> TokenRecord:
    """Return a user or join token, valid or not. Raises NotFound for any other id."""
    row = session.get(TokenRow, token_id)
    if row is None or row.kind == TokenKind.SESSION:
        raise NotFound("token", token_id)
    return record_of(row, TokenRecord)


_BY_DIGEST: Final = select(TokenRow).where(TokenRow.digest == bindparam("digest"))
"""A constant, because each API request executes it and its construction takes time."""


def find(session: Session, token: str, now: datetime) -> TokenRecord | None:
    """Return the record of a valid token, or None. Compares in constant time, so that durations reveal nothing."""
    digest = _digest(token)
    row = session.scalar(_BY_DIGEST, {"digest": digest})
    if row is None or not hmac.compare_digest(row.digest, digest):
        return None
    return _good(row, now)


def find_by_id(session: Session, token_id: str, now: datetime) -> TokenRecord | None:
    """Return the record of a valid token, or None. The caller has verified that the client has the token."""
    row = session.get(TokenRow, token_id)
    return None if row is None else _good(row, now)


def good_ids(session: Session, token_ids: Collection[str], now: datetime) -> frozenset[str]:
    """Return the ids of valid tokens."""
    return frozenset(session.scalars(select(TokenRow.id).where(TokenRow.id.in_(token_ids), _is_good(now))))


def is_revoked(session: Session, token_id: str) -> bool:
    """Return whether a token was revoked or deleted, not only expired."""
    row = session.get(TokenRow, token_id)
    return row is None or row.revoked_at is not None


def expires_before(session: Session, token_id: str, at: datetime) -> bool:
    """Return whether a token expires before a time. A token without an expiry never does."""
    row = session.get(TokenRow, token_id)
    return row is not None and row.expires_at is not None and row.expires_at < at


def extend(session: Session, token_id: str, expires_at: datetime) -> None:
    """Set a later expiry for a token that has an expiry and is not revoked. Idempotent."""
    session.execute(
        update(TokenRow)
        .where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None), TokenRow.expires_at < expires_at)
        .values(expires_at=expires_at)
    )


def require_another_admin(session: Session, token_id: str) -> None:
    """Raise Conflict if this token is the last administrator token without an expiry."""
    ids = set(session.scalars(select(TokenRow.id).where(*_ADMIN, TokenRow.expires_at.is_(None)).limit(2)))
    if ids == {token_id}:
        raise Conflict(
            f"the token {token_id} is the last administrator token without an expiry; create another one first"
        )


def revoke(session: Session, token_id: str, now: datetime) -> bool:
    """Revoke a token. Return False if it was revoked before or does not exist."""
    query = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None)).values(revoked_at=now)
    return bool(changed_rows(session.execute(query)))


def revoke_sessions(session: Session, node_id: str, now: datetime, *, but: str | None = None) -> None:
    """Revoke all session tokens of a node, except the one with the id `but`."""
    query = update(TokenRow).where(
        TokenRow.node_id == node_id, TokenRow.kind == TokenKind.SESSION, TokenRow.revoked_at.is_(None)
    )
    if but is not None:
        query = query.where(TokenRow.id != but)
    session.execute(query.values(revoked_at=now))


def revoke_sessions_of_fleet(session: Session, fleet_name: str, now: datetime) -> None:
    """Revoke the session tokens of all nodes of a fleet."""
    query = update(TokenRow).where(
        TokenRow.fleet_name == fleet_name, TokenRow.kind == TokenKind.SESSION, TokenRow.revoked_at.is_(None)
    )
    session.execute(query.values(revoked_at=now))


def _is_good(now: datetime) -> ColumnElement[bool]:
    return and_(TokenRow.revoked_at.is_(None), or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > now))


def _good(row: TokenRow, now: datetime) -> TokenRecord | None:
    is_over = row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now)
    return None if is_over else record_of(row, TokenRecord)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
