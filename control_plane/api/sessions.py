"""Sign-in for browsers: a token is exchanged once for a cookie that scripts cannot read, and the cookie stands for that token from then on.

    cookie   everstep-<installation> = <token id>.<expiry, unix seconds>.<random>.<HMAC-SHA256 of all three>

The cookie is HttpOnly and SameSite=Strict and lasts `SESSION_SECONDS` at most. Only sessions that were signed out are
stored, until they expire. Each request looks the token up by its id, so a session ends with its token, and has the role
and project that the token has now.

Invariant: a request that another site made never counts as signed in, a cookie never opens more than its token does,
and each sign-in makes a new cookie that signing out ends everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import Response

from control_plane.api.deps import Services
from control_plane.api.errors import Forbidden, Unauthenticated
from control_plane.db import nonces, tokens
from control_plane.db.tokens import TokenRecord

SESSION_SECONDS: Final = 12 * 3600
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
MAX_COOKIE_LENGTH: Final = 256


def cookie_name(services: Services) -> str:
    """Return the name of the cookie: one for each installation, because browsers do not tell the ports of a machine apart."""
    return "everstep-" + hashlib.sha256(b"cookie" + services.session_key).hexdigest()[:8]


def sign_in(request: Request, response: Response, services: Services, record: TokenRecord) -> datetime:
    """Give the browser a session for a token that was found good.

    Args:
        request: the sign-in, already known to be this site's own (`require_own_site`).
        response: gets the cookie.
        services: for the key and the time.
        record: of the token.

    Returns:
        When the session ends: with the token if that is sooner.
    """
    latest = services.now() + timedelta(seconds=SESSION_SECONDS)
    expires_at = min(latest, record.expires_at) if record.expires_at is not None else latest
    seconds = int(expires_at.timestamp())
    said = f"{record.id}.{seconds}.{secrets.token_hex(8)}"
    response.set_cookie(
        cookie_name(services),
        f"{said}.{_seal(services, said)}",
        max_age=max(0, int((expires_at - services.now()).total_seconds())),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return datetime.fromtimestamp(seconds, UTC)


def sign_out(request: Request, response: Response, services: Services) -> None:
    """End a browser's session, also for copies of its cookie, and make the browser forget it. Blocks on the database.

    Args:
        request: already known to be this site's own (`require_own_site`); it may have no session.
        response: deletes the cookie.
        services: for the key and the database.
    """
    cookie = request.cookies.get(cookie_name(services))
    if cookie is not None:
        with contextlib.suppress(Unauthenticated):
            _, expiry = _opened(services, cookie)
            with services.database.write() as session:
                nonces.spend(session, cookie, datetime.fromtimestamp(expiry, UTC))
    response.delete_cookie(cookie_name(services), path="/", httponly=True, samesite="strict")


def find(request: Request, services: Services) -> tuple[TokenRecord, datetime] | None:
    """Return the token that a request's session stands for, and when the session ends. Blocks on the database.

    Args:
        request: without an Authorization header.
        services: for the key, the time and the tokens.

    Returns:
        None where the request has no cookie of this installation.

    Raises:
        Unauthenticated: the session has expired or was signed out, its token is not good any more, or we never made it.
        Forbidden: another site made the request.
    """
    cookie = request.cookies.get(cookie_name(services))
    if cookie is None:
        return None
    require_own_site(request)
    token_id, expiry = _opened(services, cookie)
    now = services.now()
    with services.database.read() as session:
        if nonces.is_spent(session, cookie):
            raise Unauthenticated("The session was signed out.", hint="Sign in again.")
        record = tokens.find_by_id(session, token_id, now)
    if record is None:
        raise Unauthenticated(
            "The token of this session has expired or was revoked.", hint="Sign in with another token."
        )
    return record, datetime.fromtimestamp(expiry, UTC)


def require_own_site(request: Request) -> None:
    """Refuse what another site's page made the browser send.

    SameSite=Strict keeps the cookie off such requests already; this does not rely on it.

    Args:
        request: with or without a cookie.

    Raises:
        Forbidden: the browser says that it comes from elsewhere, or a request that changes something does not say where
            it comes from.
    """
    is_safe = request.method in _SAFE_METHODS
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if origin is not None:
        is_own = urlsplit(origin).netloc == request.headers.get("host") and site in (None, "same-origin")
    elif site is not None:
        is_own = site == "same-origin" or (is_safe and site == "none")  # none: typed by the user, or from a bookmark
    else:
        is_own = is_safe
    if not is_own:
        raise Forbidden(
            "A session works for requests of the dashboard's own pages alone.",
            hint="Programs send `Authorization: Bearer <token>` instead.",
        )


def _opened(services: Services, cookie: str) -> tuple[str, int]:
    """Return what a cookie of this service says that has not expired.

    Args:
        services: for the key and the time.
        cookie: as the browser sent it.

    Returns:
        The token's id, and the expiry in unix seconds.

    Raises:
        Unauthenticated: it has expired, or this service did not make it.
    """
    said, _, seal = cookie.rpartition(".")
    is_ours = len(cookie) <= MAX_COOKIE_LENGTH and hmac.compare_digest(seal.encode(), _seal(services, said).encode())
    if not is_ours:
        raise Unauthenticated("The session is not one of this service.", hint="Sign in again.")
    token_id, expiry, _ = said.split(".")
    if int(expiry) <= services.now().timestamp():
        raise Unauthenticated("The session has expired.", hint="Sign in again.")
    return token_id, int(expiry)


def _seal(services: Services, said: str) -> str:
    return hmac.new(services.session_key, said.encode(), hashlib.sha256).hexdigest()
