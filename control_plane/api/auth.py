"""Who is calling, and what they may do.

    role        training jobs, sources, incidents, events    fleets, nodes             tokens
    admin       of all projects                              all                       all
    submitter   of its project                               reading                   its own: reading
    viewer      of its project: reading                      reading                   its own: reading
    agent       nothing over HTTP; the agents' websocket alone

What each operation takes at least is the `Reader`, `User` or `Admin` of its route; docs/security.md has the table that
follows from that.

Fleets and nodes are shared by all projects, so everybody may see them; whose job runs there, only those who may see the
job.

Invariant: something of another project does not exist for a caller: it is answered like something that never was.
Nothing of a request's body is read before its token was found good, except where `OPEN_PATHS` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api import sessions
from control_plane.api.deps import Services, ServicesDep
from control_plane.api.errors import Forbidden, NotFound, Unauthenticated, response
from control_plane.db import tokens
from control_plane.db.tokens import Role, TokenKind, TokenRecord
from control_plane.gate import TRUST

DEFAULT_PROJECT = "default"
OPEN_PATHS: Final = frozenset(
    {"/v1/health", "/v1/openapi.json", "/v1/session", "/v1/agents/nonce", "/v1/agents/session"}
)
"""They take no bearer token: a health check, the contract, a browser's sign-in, and instances that show who they are by another proof."""
MAX_TOKEN_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling."""

    role: Role
    project: str
    """Empty: every project."""
    token: TokenRecord
    """What it calls with."""
    ends_at: datetime | None = None
    """When a browser's session ends; None where there is none. The token may end sooner."""

    @property
    def project_filter(self) -> str | None:
        """The project that lists are narrowed to, or None."""
        return self.project or None

    @property
    def name(self) -> str:
        """Who it is, for reasons and histories: what the token was made for, and its id."""
        return f"{self.token.description}, {self.token.id}" if self.token.description else self.token.id

    def choose_project(self, wanted: str | None) -> str:
        """Return the project that something new belongs to.

        Args:
            wanted: what the request names, or None.

        Returns:
            A project, never empty.

        Raises:
            Forbidden: the caller may not create in the project it named.
        """
        if self.project and wanted and wanted != self.project:
            raise Forbidden(
                f"This token belongs to the project {self.project!r} and cannot create anything in {wanted!r}."
            )
        return wanted or self.project or DEFAULT_PROJECT

    def require_sight(self, noun: str, name: str, project: str) -> None:
        """Check that something that was found may be seen.

        Args:
            noun: what it is, for the error.
            name: its name, for the error.
            project: that it belongs to.

        Raises:
            NotFound: it belongs to another project.
        """
        if self.project and self.project != project:
            raise NotFound(f"There is no {noun} named {name!r}.")


def bearer(authorization: str | None) -> str:
    """Return the token in an Authorization header.

    Args:
        authorization: value of the header, or None.

    Returns:
        The token, not yet looked up.

    Raises:
        Unauthenticated: there is none.
    """
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_LENGTH:
        raise Unauthenticated(
            "The request carries no bearer token.", hint="Set EVERSTEP_TOKEN, or send `Authorization: Bearer <token>`."
        )
    return token


def find_token(services: Services, token: str) -> TokenRecord | None:
    """Return the record of a token that is good now, or None. Blocks on the database."""
    with services.database.read() as session:
        return tokens.find(session, token, services.now())


def is_token_good(scope: Scope, token_id: str) -> bool:
    """Say whether a token is good now. Blocks on the database; called while an answer goes on."""
    services: Services = scope["app"].state.services
    with services.database.read() as session:
        return tokens.find_by_id(session, token_id, services.now()) is not None


async def reader(request: Request, services: ServicesDep) -> Caller:
    """Let anybody with a user's token pass; the other two build on it. Called once per request.

    A coroutine: a token that is held (`held_tokens`) is found without asking for a thread.

    Args:
        request: its Authorization header is looked at and, where there is none, a browser's session.
        services: where tokens are found.

    Returns:
        The token's role and project.

    Raises:
        Unauthenticated: no token, or one that is unknown, expired or revoked.
        Forbidden: it is an agent's, or another site's page used a session.
    """
    found: Caller | None = getattr(request.state, "caller", None)
    return found or await _identify(request, services)


async def _identify(request: Request, services: Services) -> Caller:
    authorization = request.headers.get("authorization")
    session = await asyncio.to_thread(sessions.find, request, services) if authorization is None else None
    record = require_user(await services.tokens.find(bearer(authorization)) if session is None else session[0])
    request.state.token_id = record.id  # an answer that goes on for long ends with its token: `api.open_answers`
    caller = Caller(Role(record.role), record.project, record, None if session is None else session[1])
    request.state.caller = caller
    return caller


class Authenticated:
    """ASGI middleware around the routes: FastAPI reads and parses a body before it asks who is calling, and so this asks first.

    Args:
        app: what is inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; called by the server."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and scope["path"] not in OPEN_PATHS:
            try:
                await _identify(Request(scope), scope["app"].state.services)
            except Forbidden as refusal:
                await response(refusal, scope["state"]["request_id"])(scope, receive, send)
                return
            trust: Callable[[], None] | None = scope["state"].get(TRUST)
            if trust is not None:
                trust()
        await self._app(scope, receive, send)


def require_user(record: TokenRecord | None) -> TokenRecord:
    """Return the record of a token that a person or a program may call with.

    Args:
        record: as it was found.

    Returns:
        The same.

    Raises:
        Unauthenticated: there is none.
        Forbidden: it is an agent's.
    """
    if record is None:
        raise Unauthenticated("The token is unknown, expired or revoked.", hint="Ask an administrator for a new one.")
    if record.kind != TokenKind.USER:
        raise Forbidden("This token is an agent's; it opens the agents' connection alone.")
    return record


async def user(caller: Annotated[Caller, Depends(reader)]) -> Caller:
    """Let those pass who may run jobs.

    Args:
        caller: whoever `reader` let pass.

    Returns:
        The same.

    Raises:
        Forbidden: the role may read only.
    """
    if caller.role not in (Role.SUBMITTER, Role.ADMIN):
        raise Forbidden(
            f"The role {caller.role} may read, not change.",
            hint="Ask an administrator for a token with the role submitter.",
        )
    return caller


async def admin(caller: Annotated[Caller, Depends(reader)]) -> Caller:
    """Let administrators pass.

    Args:
        caller: whoever `reader` let pass.

    Returns:
        The same.

    Raises:
        Forbidden: the role is another.
    """
    if caller.role is not Role.ADMIN:
        raise Forbidden(f"This needs the role admin; the token has the role {caller.role}.")
    return caller


Reader = Annotated[Caller, Depends(reader)]
User = Annotated[Caller, Depends(user)]
Admin = Annotated[Caller, Depends(admin)]
