"""Authenticates and authorizes the callers of the API.

    role        training jobs, sources, incidents, events    fleets, nodes             tokens
    admin       all projects                                 full access               full access
    submitter   own project                                  read                      own token: read
    viewer      own project: read                            read                      own token: read
    agent       none over HTTP; agents may use only their websocket

The dependency of a route (`Reader`, `User` or `Admin`) is the lowest role that may call it. Invariant: a resource of
another project gets the same response as an unknown name. A body is read only after the token is verified, except on
`OPEN_PATHS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api import sessions
from control_plane.api.caller_threads import CALLER, STRANGER_SECONDS
from control_plane.api.deps import Services, ServicesDep
from control_plane.api.envelope import STREAMED_PREFIX, UNKNOWN_BYTES, announced_bytes
from control_plane.api.errors import Forbidden, NotFound, Throttled, TooLarge, Unauthenticated, response
from control_plane.db import tokens
from control_plane.db.tokens import Role, TokenKind, TokenRecord
from control_plane.gate import TRUST
from everstep.protocol.pace import Pace

DEFAULT_PROJECT = "default"
OPENAPI_PATH: Final = "/v1/openapi.json"
OPEN_PATHS: Final = frozenset(
    {"/v1/health", "/v1/ready", OPENAPI_PATH, "/v1/session", "/v1/agents/nonce", "/v1/agents/session"}
)
"""Paths that need no bearer token: health, the OpenAPI document, sign-in, and attestation of agents."""
CHECKED_PATHS: Final = frozenset({"/v1/health", "/v1/ready"})
"""Open paths that no flood of strangers may delay, because a load balancer decides by them."""
MAX_OPEN_BODY_BYTES: Final = 16 * 1024
MAX_HELD_BODY_BYTES: Final = 16 * 1024 * 1024
"""Limit of the bodies of one token's running requests together, except archives (`SpoolRoom`)."""
MAX_TOKEN_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """The person or program whose valid token authenticates a request."""

    role: Role
    project: str
    """Empty if the caller may access every project."""
    token: TokenRecord
    ends_at: datetime | None = None
    """End of the browser session, if any. The token may expire earlier."""

    @property
    def project_filter(self) -> str | None:
        """The project to restrict lists to, or None for all projects."""
        return self.project or None

    @property
    def name(self) -> str:
        """The token's description and id, for reasons and event messages."""
        return f"{self.token.description}, {self.token.id}" if self.token.description else self.token.id

    def choose_project(self, wanted: str | None) -> str:
        """Return the project of a new resource: the wanted one, else the token's, else the default.

        Raises Forbidden if the token belongs to another project.
        """
        if self.project and wanted and wanted != self.project:
            raise Forbidden(
                f"This token belongs to the project {self.project!r} and cannot create anything in {wanted!r}."
            )
        return wanted or self.project or DEFAULT_PROJECT

    def require_sight(self, noun: str, name: str, project: str) -> None:
        """Raise NotFound if the caller may not see a project's resource. `noun` and `name` are for the message."""
        if self.project and self.project != project:
            raise NotFound(f"There is no {noun} named {name!r}.")


def bearer(authorization: str | None) -> str:
    """Return the unverified token of an Authorization header. Raises Unauthenticated if it has no bearer token."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_LENGTH:
        raise Unauthenticated(
            "The request carries no bearer token.", hint="Set EVERSTEP_TOKEN, or send `Authorization: Bearer <token>`."
        )
    return token


def find_token(services: Services, token: str) -> TokenRecord | None:
    """Return the record of a valid token, or None. Blocks on the database."""
    with services.database.read() as session:
        return tokens.find(session, token, services.now())


def is_token_good(scope: Scope, token_id: str) -> bool:
    """Return whether a token is still valid. Blocks on the database. `api.open_answers` calls it repeatedly."""
    services: Services = scope["app"].state.services
    with services.database.read() as session:
        return tokens.find_by_id(session, token_id, services.now()) is not None


async def reader(request: Request, services: ServicesDep) -> Caller:
    """Accept any caller with a valid token of a person or a program, in a header or a browser's session cookie.

    Raises:
        Unauthenticated: the request has no token, or one that is unknown, expired or revoked.
        Forbidden: the token belongs to an agent, or a page of another site sent the request with the session's cookie.
    """
    # A coroutine, because FastAPI would run a plain function in a thread, which is too expensive for a cached token.
    found: Caller | None = getattr(request.state, "caller", None)
    return found or await _identify(request, services)


async def _identify(request: Request, services: Services) -> Caller:
    authorization = request.headers.get("authorization")
    try:
        session = await sessions.find(request, services) if authorization is None else None
        record = require_user(await services.tokens.find(bearer(authorization)) if session is None else session[0])
    except Unauthenticated:
        await services.strangers.pay(STRANGER_SECONDS)
        raise
    # `api.open_answers` reads the token's id from the state, and ends a long response when the token becomes invalid.
    request.state.token_id = record.id
    caller = Caller(Role(record.role), record.project, record, None if session is None else session[1])
    request.state.caller = caller
    CALLER.set((record.project or record.id, record.id))
    return caller


class Authenticated:
    """ASGI middleware that authenticates requests below `/v1/` before FastAPI reads and parses their body.

    Requests from one address to one open path share a turn (`CallerThreads`). One `Pace` delays the refusals of all.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held: Counter[str] = Counter()
        """Announced bytes of running requests by token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            send = await self._opened(scope, send)
            if (announced := announced_bytes(scope)) is None or announced > MAX_OPEN_BODY_BYTES:
                refused = TooLarge(f"The body is longer than {MAX_OPEN_BODY_BYTES} bytes, or has no Content-Length.")
                await response(refused, scope["state"]["request_id"])(scope, receive, send)
                return
        elif scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                await _identify(Request(scope), scope["app"].state.services)
            except Forbidden as refusal:
                await response(refusal, scope["state"]["request_id"])(scope, receive, send)
                return
            trust: Callable[[str], None] | None = scope["state"].get(TRUST)
            if trust is not None:
                trust(scope["state"]["token_id"])
            await self._with_body(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, unless its token's running requests already have `MAX_HELD_BODY_BYTES`."""
        announced, owner = announced_bytes(scope), scope["state"]["token_id"]
        size = 0 if scope["path"].startswith(STREAMED_PREFIX) else UNKNOWN_BYTES if announced is None else announced
        if size and self._held[owner] + size > MAX_HELD_BODY_BYTES:
            refused = Throttled("Too many request bodies of this token arrive.", hint="Send fewer at a time.")
            await response(refused, scope["state"]["request_id"])(scope, receive, send)
            return
        self._held[owner] += size
        try:
            await self._app(scope, receive, send)
        finally:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]

    @staticmethod
    async def _opened(scope: Scope, send: Send) -> Send:
        """Give a request to an open path its turn. Return a `send` that may delay a refusal."""
        path, address = scope["path"], scope["client"][0] if scope["client"] else ""
        strangers: Pace = scope["app"].state.services.strangers
        CALLER.set((f"without a token: {path}", f"{path} from {address}"))
        if path in CHECKED_PATHS:
            return send
        if path == OPENAPI_PATH:
            await strangers.pay(STRANGER_SECONDS)

        async def send_paid(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await strangers.pay(STRANGER_SECONDS)
            await send(message)

        return send_paid


def require_user(record: TokenRecord | None) -> TokenRecord:
    """Return the record if it is a valid token of a person or a program.

    Raises:
        Unauthenticated: the record is None.
        Forbidden: the token belongs to an agent.
    """
    if record is None:
        raise Unauthenticated("The token is unknown, expired or revoked.", hint="Ask an administrator for a new one.")
    if record.kind != TokenKind.USER:
        raise Forbidden("This token belongs to an agent and works only for the agents' connection.")
    return record


async def user(caller: Annotated[Caller, Depends(reader)]) -> Caller:
    """Accept submitters and administrators. Raises Forbidden for a role that can only read."""
    if caller.role not in (Role.SUBMITTER, Role.ADMIN):
        raise Forbidden(
            f"The role {caller.role} may read, but not change anything.",
            hint="Ask an administrator for a token with the role submitter.",
        )
    return caller


async def admin(caller: Annotated[Caller, Depends(reader)]) -> Caller:
    """Accept administrators only. Raises Forbidden for any other caller."""
    if caller.role is not Role.ADMIN:
        raise Forbidden(f"This operation needs the role admin; the token has the role {caller.role}.")
    return caller


Reader = Annotated[Caller, Depends(reader)]
User = Annotated[Caller, Depends(user)]
Admin = Annotated[Caller, Depends(admin)]
