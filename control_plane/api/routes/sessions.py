"""The dashboard's session endpoints: sign in, describe the session, sign out.

They are not part of the published API, because only the dashboard in a browser calls them.
"""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version
from typing import Annotated

from fastapi import Request, Response
from pydantic import StringConstraints

from control_plane.api import auth, sessions
from control_plane.api.deps import ServicesDep
from control_plane.api.errors import Unauthenticated
from control_plane.api.router import Router
from control_plane.api.schemas.common import Request as RequestShape
from control_plane.api.schemas.common import Shape
from control_plane.db.tokens import TokenRecord

router = Router(prefix="/v1/session", include_in_schema=False)


class SignIn(RequestShape):
    """Request to exchange a token for a browser session."""

    token: Annotated[str, StringConstraints(min_length=1, max_length=auth.MAX_TOKEN_LENGTH)]


class Session(Shape):
    """A browser session: its expiry, and the role and project of the token with which the user signed in."""

    role: str
    project: str
    """The project of the token. Empty if the token may access every project."""
    token_id: str
    description: str
    expires_at: datetime
    version: str
    """Version of the server."""
    time: datetime
    """Time of the server's clock, because a browser's clock may be wrong."""


@router.post("")
def create_session(sign_in: SignIn, request: Request, response: Response, services: ServicesDep) -> Session:
    """Exchange a user's token for a browser session of the dashboard."""
    sessions.require_own_site(request)
    record = auth.require_user(auth.find_token(services, sign_in.token.strip()))
    return _session(record, sessions.sign_in(request, response, services, record), services.now())


@router.get("", response_model=Session)
async def describe_session(request: Request, services: ServicesDep) -> Session | Response:
    """Return the current session, or status 204 without a valid session.

    A missing session is normal. With an error status, the browser's console would show an error.
    """
    try:
        found = await sessions.find(request, services)
    except Unauthenticated:
        found = None
    return (
        Response(status_code=204) if found is None else _session(auth.require_user(found[0]), found[1], services.now())
    )


@router.delete("", status_code=204)
def delete_session(request: Request, services: ServicesDep) -> Response:
    """End the browser session, and invalidate all copies of its cookie."""
    sessions.require_own_site(request)
    response = Response(status_code=204)
    sessions.sign_out(request, response, services)
    return response


def _session(record: TokenRecord, expires_at: datetime, now: datetime) -> Session:
    return Session(
        role=record.role,
        project=record.project,
        token_id=record.id,
        description=record.description,
        expires_at=expires_at,
        version=version("everstep"),
        time=now,
    )
