"""Creates join tokens, with which the instances of a fleet's Auto Scaling group join the fleet as nodes."""

from __future__ import annotations

from datetime import timedelta

from control_plane.api.auth import Admin
from control_plane.api.deps import ServicesDep
from control_plane.api.router import Router
from control_plane.api.schemas import tokens as tokens_schemas
from control_plane.db import events, tokens
from control_plane.db.tokens import NewToken, Role, TokenKind

router = Router(prefix="/v1/join-tokens", tags=["JoinTokens"])


@router.post("", operation_id="CreateJoinToken", status_code=201)
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
