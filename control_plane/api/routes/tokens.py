"""Tokens of people, programs and joining instances: create, list and revoke them, and identify the caller.

Invariant: a secret is returned only once, by the call that creates it.
"""

from __future__ import annotations

from datetime import timedelta
from importlib.metadata import version
from typing import Annotated

from fastapi import Query

from control_plane.api import page_tokens
from control_plane.api.alike import shaped
from control_plane.api.auth import Admin, Reader
from control_plane.api.deps import MaxResults, NextToken, ServicesDep, TokenIdPath, page_of
from control_plane.api.errors import invalid
from control_plane.api.router import Router
from control_plane.api.schemas import tokens as tokens_schemas
from control_plane.db import events, tokens
from control_plane.db.tokens import NewToken, Role, TokenKind

router = Router(prefix="/v1", tags=["Tokens"])


@router.post("/tokens", operation_id="CreateToken", status_code=201)
def create_token(
    request: tokens_schemas.CreateTokenRequest, caller: Admin, services: ServicesDep
) -> tokens_schemas.CreateTokenResponse:
    """Create a token. Only this response contains the secret.

    A repeated call creates another token. Raises ValidationException if a request for an `admin` token names a project.
    """
    if Role(request.role) is Role.ADMIN and request.project is not None:
        raise invalid("Project", "an admin token applies to every project", "{field}: {message}.")
    now = services.now()
    new = NewToken(
        kind=TokenKind.USER,
        role=Role(request.role),
        project=request.project or "",
        description=request.description,
        expires_at=None if request.expires_in_seconds is None else now + timedelta(seconds=request.expires_in_seconds),
    )
    with services.database.write() as session:
        secret, record = tokens.mint(session, new, now)
        scope = f"of the project {record.project}" if record.project else "of every project"
        message = f"The token {record.id} was created with the token {caller.token.id}: {record.role} {scope}."
        events.add(session, "TokenCreated", message, now)
    return tokens_schemas.CreateTokenResponse(secret=secret, token=shaped(record, tokens_schemas.Token))


@router.get("/tokens", operation_id="ListTokens")
def list_tokens(
    _caller: Admin,
    services: ServicesDep,
    project: Annotated[str | None, Query(alias="Project", max_length=63)] = None,
    include_ended: Annotated[bool, Query(alias="IncludeEnded")] = False,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
) -> tokens_schemas.ListTokensResponse:
    """List tokens, oldest first, without secrets. IncludeEnded adds revoked and expired tokens."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.moment, page_tokens.text)
    with services.database.read() as session:
        page = tokens.page(
            session, project=project, with_ended=include_ended, now=services.now(), after=after, limit=max_results + 1
        )
    shown, more = page_of(page, max_results, lambda record: (record.created_at.isoformat(), record.id))
    return tokens_schemas.ListTokensResponse(
        tokens=[shaped(record, tokens_schemas.Token) for record in shown], next_token=more
    )


@router.post("/tokens/{TokenId}/revoke", operation_id="RevokeToken", status_code=202)
def revoke_token(token_id: TokenIdPath, caller: Admin, services: ServicesDep) -> tokens_schemas.Token:
    """Revoke a token.

    New requests and browser sessions of the token fail immediately. Its open streams end within a second.

    If the token is a join token, agents that have joined with it stay connected.
    """
    now = services.now()
    with services.database.write() as session:
        before = tokens.get(session, token_id)
        tokens.require_another_admin(session, token_id)
        if tokens.revoke(session, token_id, now):
            message = f"The token {token_id} ({before.role}) was revoked with the token {caller.token.id}."
            events.add(session, "TokenRevoked", message, now, fleet_name=before.fleet_name)
        return shaped(tokens.get(session, token_id), tokens_schemas.Token)


@router.get("/caller-identity", operation_id="GetCallerIdentity")
def get_caller_identity(caller: Reader, services: ServicesDep) -> tokens_schemas.GetCallerIdentityResponse:
    """Return the caller's token: its role, project and expiry."""
    return shaped(
        caller.token,
        tokens_schemas.GetCallerIdentityResponse,
        project=caller.project or None,
        server_version=version("everstep"),
        server_time=services.now(),
    )


@router.post("/join-tokens", operation_id="CreateJoinToken", status_code=201)
def create_join_token(
    request: tokens_schemas.CreateJoinTokenRequest, _caller: Admin, services: ServicesDep
) -> tokens_schemas.CreateJoinTokenResponse:
    """Create a join token for a fleet's launch template.

    Each instance of the fleet's Auto Scaling group can use the token once. Other instances cannot use it.
    """
    now = services.now()
    expires_at = None if request.expires_in_seconds is None else now + timedelta(seconds=request.expires_in_seconds)
    with services.database.write() as session:
        secret, record = tokens.mint(
            session,
            NewToken(
                kind=TokenKind.JOIN,
                role=Role.AGENT,
                fleet_name=request.fleet_name,
                description="join token",
                expires_at=expires_at,
            ),
            now,
        )
        message = f"A join token ({record.id}) for the fleet {request.fleet_name} was created."
        events.add(session, "JoinTokenCreated", message, now, fleet_name=request.fleet_name)
    return tokens_schemas.CreateJoinTokenResponse(
        join_token=secret, token_id=record.id, fleet_name=request.fleet_name, expiration_time=expires_at
    )
