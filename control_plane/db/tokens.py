"""Bearer tokens: who may call, and as what. Only digests are stored.

    user      a person or a program; a role and, unless it is an admin's, perhaps a project
    join      an instance of a fleet that has not joined yet (`db.nodes`: `joined_at`)
    session   an agent that has joined; bound to its node, revoked when the node ends

Invariant: the token itself is returned once, by `mint`, and is nowhere else.
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

from sqlalchemy import and_, bindparam, or_, select, update
from sqlalchemy.orm import Session

from control_plane.db.errors import Conflict, NotFound
from control_plane.db.models import Token
from control_plane.db.session import changed_rows, record_of, values_of

TOKEN_BYTES = 32
_PREFIX = "est_"
"""So that a token in a log or a repository is found by those who look for tokens."""


class TokenKind(StrEnum):
    """What a token is for: see the module."""

    USER = "user"
    JOIN = "join"
    SESSION = "session"


class Role(StrEnum):
    """What a caller may do.

    ADMIN: everything, in every project. SUBMITTER: everything with jobs of its project, reading elsewhere in it.
    VIEWER: reading in its project. AGENT: the agents' connection alone.
    """

    ADMIN = "admin"
    SUBMITTER = "submitter"
    VIEWER = "viewer"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token as it is stored."""

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
    """A token that is about to be made."""

    kind: TokenKind
    role: Role
    project: str = ""
    """Empty: every project."""
    fleet_name: str | None = None
    node_id: str | None = None
    description: str = ""
    expires_at: datetime | None = None


def new_secret() -> str:
    """Return a token that nobody has ever seen."""
    return _PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def mint(session: Session, new: NewToken, now: datetime, *, secret: str | None = None) -> tuple[str, TokenRecord]:
    """Make a token.

    Args:
        session: a writing one.
        new: what it is for.
        now: when.
        secret: from `new_secret`, where it had to be kept safe before it could be stored.

    Returns:
        The token, to be shown once, and its record.
    """
    token = secret or new_secret()
    row = Token(**values_of(new), id="tok-" + secrets.token_hex(8), digest=_digest(token), created_at=now)
    session.add(row)
    session.flush()
    return token, record_of(row, TokenRecord)


def has_admin(session: Session) -> bool:
    """Say whether anybody can administer this service."""
    return (
        session.scalar(
            select(Token.id)
            .where(Token.kind == TokenKind.USER, Token.role == Role.ADMIN, Token.revoked_at.is_(None))
            .limit(1)
        )
        is not None
    )


def page(
    session: Session,
    *,
    project: str | None,
    with_ended: bool,
    now: datetime,
    after: tuple[datetime, str] | None,
    limit: int,
) -> tuple[TokenRecord, ...]:
    """Return the tokens that people handle, oldest first: users' and join tokens; those of agents' sessions are nobody's business.

    Args:
        session: any.
        project: only of this project, or None.
        with_ended: also those that are revoked or have expired.
        now: when.
        after: `(created_at, id)` of the last one of the page before, or None for the first page.
        limit: at most this many.

    Returns:
        At most `limit` tokens.
    """
    query = (
        select(Token)
        .where(Token.kind.in_((TokenKind.USER, TokenKind.JOIN)))
        .order_by(Token.created_at, Token.id)
        .limit(limit)
    )
    if project is not None:
        query = query.where(Token.project == project, Token.kind == TokenKind.USER)
    if not with_ended:
        query = query.where(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now))
    if after is not None:
        created_at, token_id = after
        query = query.where(
            or_(Token.created_at > created_at, and_(Token.created_at == created_at, Token.id > token_id))
        )
    return tuple(record_of(row, TokenRecord) for row in session.scalars(query))


def get(session: Session, token_id: str) -> TokenRecord:
    """Return a token that people handle, good or not.

    Args:
        session: any.
        token_id: which.

    Returns:
        Its record.

    Raises:
        NotFound: there is none of this id, or it is an agent's.
    """
    row = session.get(Token, token_id)
    if row is None or row.kind == TokenKind.SESSION:
        raise NotFound("token", token_id)
    return record_of(row, TokenRecord)


_BY_DIGEST: Final = select(Token).where(Token.digest == bindparam("digest"))
"""Put together once: every request asks for it."""


def find(session: Session, token: str, now: datetime) -> TokenRecord | None:
    """Return the record of a token that is good now, or None.

    The row is found by digest, which says nothing about the token; the comparison that counts takes the same time
    wherever it fails.
    """
    digest = _digest(token)
    row = session.scalar(_BY_DIGEST, {"digest": digest})
    if row is None or not hmac.compare_digest(row.digest, digest):
        return None
    return _good(row, now)


def find_by_id(session: Session, token_id: str, now: datetime) -> TokenRecord | None:
    """Return the record of a token that is good now, or None.

    For those who have proven by other means that the token was shown.
    """
    row = session.get(Token, token_id)
    return None if row is None else _good(row, now)


def good_ids(session: Session, token_ids: Collection[str], now: datetime) -> frozenset[str]:
    """Return those of the tokens that are good now."""
    is_good = and_(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now))
    return frozenset(session.scalars(select(Token.id).where(Token.id.in_(token_ids), is_good)))


def is_revoked(session: Session, token_id: str) -> bool:
    """Return True if a token was revoked or deleted. A token that has only expired counts as not revoked."""
    row = session.get(Token, token_id)
    return row is None or row.revoked_at is not None


def require_another_admin(session: Session, token_id: str) -> None:
    """Check that somebody administers the service, for good, without a token.

    Args:
        session: a writing one.
        token_id: of the token that is about to go.

    Raises:
        Conflict: it is the last administrator's that does not expire.
    """
    lasting = (
        Token.kind == TokenKind.USER,
        Token.role == Role.ADMIN,
        Token.revoked_at.is_(None),
        Token.expires_at.is_(None),
    )
    ids = set(session.scalars(select(Token.id).where(*lasting).limit(2)))
    if ids == {token_id}:
        raise Conflict(f"the token {token_id} is the last administrator's that does not expire: make another one first")


def revoke(session: Session, token_id: str, now: datetime) -> bool:
    """End a token, and say whether it was good until now."""
    return bool(
        changed_rows(
            session.execute(
                update(Token).where(Token.id == token_id, Token.revoked_at.is_(None)).values(revoked_at=now)
            )
        )
    )


def revoke_sessions(session: Session, node_id: str, now: datetime, *, but: str | None = None) -> None:
    """End all session tokens of a node, but for one by its id."""
    query = update(Token).where(Token.node_id == node_id, Token.kind == TokenKind.SESSION, Token.revoked_at.is_(None))
    if but is not None:
        query = query.where(Token.id != but)
    session.execute(query.values(revoked_at=now))


def revoke_sessions_of_fleet(session: Session, fleet_name: str, now: datetime) -> None:
    """Revoke the session tokens of all nodes of a fleet. Called when the fleet is deleted."""
    query = update(Token).where(
        Token.fleet_name == fleet_name, Token.kind == TokenKind.SESSION, Token.revoked_at.is_(None)
    )
    session.execute(query.values(revoked_at=now))


def _good(row: Token, now: datetime) -> TokenRecord | None:
    is_over = row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now)
    return None if is_over else record_of(row, TokenRecord)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
