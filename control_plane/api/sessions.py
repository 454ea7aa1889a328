"""Implements browser sessions: sign-in exchanges a token for a cookie that scripts cannot read.

    cookie   everstep-<installation> = <token id>.<expiry, unix seconds>.<random>.<HMAC-SHA256 of all three>

The cookie is HttpOnly and SameSite=Strict and lasts at most `SESSION_SECONDS`. The database stores only the ids of
signed-out sessions. A session ends with its token, and has the token's current role and project. Requests that a page
of another site caused are rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta
from typing import Final

from fastapi import Request
from starlette.responses import Response

from control_plane.api.deps import Services
from control_plane.api.errors import Forbidden, Unauthenticated
from control_plane.db import nonces
from control_plane.db.tokens import TokenRecord

SESSION_SECONDS: Final = 12 * 3600
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
MAX_COOKIE_LENGTH: Final = 256


def cookie_name(services: Services) -> str:
    """Return the cookie's name, unique per installation, because browsers share cookies between ports of a host."""
    return "everstep-" + hashlib.sha256(b"cookie" + services.session_key).hexdigest()[:8]


def sign_in(request: Request, response: Response, services: Services, record: TokenRecord) -> datetime:
    """Create a browser session for a verified token, after `require_own_site`. Return its end."""
    latest = services.now() + timedelta(seconds=SESSION_SECONDS)
    expires_at = min(latest, record.expires_at) if record.expires_at is not None else latest
    seconds = int(expires_at.timestamp())
    payload = f"{record.id}.{seconds}.{secrets.token_hex(8)}"
    response.set_cookie(
        cookie_name(services),
        f"{payload}.{_seal(services, payload)}",
        max_age=max(0, int((expires_at - services.now()).total_seconds())),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return datetime.fromtimestamp(seconds, UTC)


def sign_out(request: Request, response: Response, services: Services) -> None:
    """End a browser session with all copies of its cookie, if any, after `require_own_site`. Blocks on the database."""
    cookie = request.cookies.get(cookie_name(services))
    if cookie is not None:
        with contextlib.suppress(Unauthenticated):
            _, expiry = _opened(services, cookie)
            with services.database.write() as session:
                nonces.spend(session, cookie, datetime.fromtimestamp(expiry, UTC))
    response.delete_cookie(cookie_name(services), path="/", httponly=True, samesite="strict")


async def find(request: Request, services: Services) -> tuple[TokenRecord, datetime] | None:
    """Return the token of the request's session, and when the session ends.

    Args:
        request: a request without an Authorization header.
        services: provides the key, the time and the tokens.

    Returns:
        The token and the end of the session, or None if the request has no cookie of this installation.

    Raises:
        Unauthenticated: the session has expired, was signed out or is forged, or its token is no longer valid.
        Forbidden: the request comes from another site.
    """
    cookie = request.cookies.get(cookie_name(services))
    if cookie is None:
        return None
    require_own_site(request)
    token_id, expiry = _opened(services, cookie)
    record = await services.tokens.find_of_session(cookie, token_id)
    if record is None:
        raise Unauthenticated(
            "The session was signed out, or its token has expired or was revoked.", hint="Sign in again."
        )
    return record, datetime.fromtimestamp(expiry, UTC)


def require_own_site(request: Request) -> None:
    """Raise Forbidden if a page of another site caused the request, or a change does not state its origin."""
    # A second defence, in case a browser sends a SameSite=Strict cookie with such requests.
    is_safe = request.method in _SAFE_METHODS
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if origin is not None:
        is_own = origin.partition("://")[2] == request.headers.get("host") and site in (None, "same-origin")
    elif site is not None:
        # Browsers send `none` as Sec-Fetch-Site if the user typed the URL or used a bookmark.
        is_own = site == "same-origin" or (is_safe and site == "none")
    else:
        is_own = is_safe
    if not is_own:
        raise Forbidden(
            "A session works only for requests of the dashboard's own pages.",
            hint="Programs send `Authorization: Bearer <token>` instead.",
        )


def _opened(services: Services, cookie: str) -> tuple[str, int]:
    """Return the token id and the expiry (unix seconds) of a verified cookie, or raise Unauthenticated."""
    payload, _, seal = cookie.rpartition(".")
    is_ours = len(cookie) <= MAX_COOKIE_LENGTH and hmac.compare_digest(seal.encode(), _seal(services, payload).encode())
    if not is_ours:
        raise Unauthenticated("The session does not belong to this service.", hint="Sign in again.")
    token_id, expiry, _ = payload.split(".")
    if int(expiry) <= services.now().timestamp():
        raise Unauthenticated("The session has expired.", hint="Sign in again.")
    return token_id, int(expiry)


def _seal(services: Services, payload: str) -> str:
    return hmac.new(services.session_key, payload.encode(), hashlib.sha256).hexdigest()
