"""Bearer tokens: who may call, and as what. Only digests are stored.

    user      a person or a program; a role and, unless it is an admin's, a project
    join      an instance of a fleet that is new; redeemable once per instance
    session   an agent that has joined; bound to its node

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

from sqlalchemy import and_, or_, select, update
from sqlalchemy.orm import Session

from control_plane.db.models import Redemption, Token
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

    ADMIN: everything, in every project. USER: everything with jobs of its project, reading elsewhere in it. READER: reading in its project.
    AGENT: the agents' connection alone.
    """

    ADMIN = "admin"
    USER = "user"
    READER = "reader"
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
        session.scalar(select(Token.id).where(Token.kind == TokenKind.USER, Token.role == Role.ADMIN, Token.revoked_at.is_(None)).limit(1))
        is not None
    )


def find(session: Session, token: str, now: datetime) -> TokenRecord | None:
    """Return the record of a token that is good now, or None.

    The row is found by digest, which says nothing about the token; the comparison that counts takes the same time wherever it fails.
    """
    digest = _digest(token)
    row = session.scalar(select(Token).where(Token.digest == digest))
    if row is None or not hmac.compare_digest(row.digest, digest):
        return None
    return _good(row, now)


def find_by_id(session: Session, token_id: str, now: datetime) -> TokenRecord | None:
    """Return the record of a token that is good now, or None. For those who have proven by other means that the token was shown."""
    row = session.get(Token, token_id)
    return None if row is None else _good(row, now)


def good_ids(session: Session, token_ids: Collection[str], now: datetime) -> frozenset[str]:
    """Return those of the tokens that are good now."""
    is_good = and_(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now))
    return frozenset(session.scalars(select(Token.id).where(Token.id.in_(token_ids), is_good)))


def is_redeemed(session: Session, token_id: str, node_id: str) -> bool:
    """Say whether an instance has joined with this token already."""
    return session.get(Redemption, (token_id, node_id)) is not None


def redeem(session: Session, token_id: str, node_id: str, now: datetime) -> bool:
    """Use a join token up for an instance, and say whether this was the first time."""
    if is_redeemed(session, token_id, node_id):
        return False
    session.add(Redemption(token_id=token_id, node_id=node_id, redeemed_at=now))
    session.flush()
    return True


def revoke(session: Session, token_id: str, now: datetime) -> bool:
    """End a token, and say whether it was good until now."""
    return bool(changed_rows(session.execute(update(Token).where(Token.id == token_id, Token.revoked_at.is_(None)).values(revoked_at=now))))


def revoke_sessions(session: Session, node_id: str, now: datetime, *, but: str | None = None) -> None:
    """End all session tokens of a node, but for one by its id."""
    query = update(Token).where(Token.node_id == node_id, Token.kind == TokenKind.SESSION, Token.revoked_at.is_(None))
    if but is not None:
        query = query.where(Token.id != but)
    session.execute(query.values(revoked_at=now))


def _good(row: Token, now: datetime) -> TokenRecord | None:
    is_over = row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now)
    return None if is_over else record_of(row, TokenRecord)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
