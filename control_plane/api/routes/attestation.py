"""Endpoints with which agents on EC2 prove the identity of their instance (`everstep.protocol.attestation`).

They are not part of the published API, because only agents call them.

Invariant: the server stores nothing for a caller before STS and EC2 have confirmed the instance. The server accepts
each nonce for at most one session.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import StringConstraints

from control_plane.api.deps import Services, ServicesDep
from control_plane.api.errors import Forbidden, NotFound
from control_plane.api.router import Router
from control_plane.api.schemas import common as common_schemas
from control_plane.cloud.errors import AccessDenied
from control_plane.cloud.identity import Attestation
from control_plane.cloud.operator import Ec2State
from control_plane.core import attestation
from control_plane.core.attestation import Signature
from control_plane.db import events, fleets, nonces, tokens
from control_plane.db.fleets import FleetRecord
from control_plane.db.tokens import NewToken, Role, TokenKind
from everstep.protocol.ids import NodeId

router = Router(prefix="/v1/agents", include_in_schema=False)

SESSION_SECONDS = 3600
"""Lifetime in seconds of a session token that an agent obtains through STS.

The server renews the token while the agent is connected, so that the agent can reconnect to a restarted server without
a request to AWS. A running instance can obtain another session token at any time.
"""
HeaderValue = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class NonceResponse(common_schemas.Shape):
    """A nonce that the agent includes in its signed STS request."""

    nonce: str


class SessionRequest(common_schemas.Request):
    """A signed STS request, and the instance on which the agent claims to run."""

    fleet_name: common_schemas.Name
    node_id: Annotated[str, StringConstraints(pattern=r"^i-[0-9a-f]{8,17}$")]
    nonce: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    authorization: HeaderValue
    amz_date: HeaderValue
    security_token: HeaderValue


class SessionResponse(common_schemas.Shape):
    """The session token with which the agent connects to the websocket."""

    session_token: str
    expiration_time: datetime


@router.post("/nonce")
async def make_nonce(services: ServicesDep) -> NonceResponse:
    """Return a nonce that the agent includes in its signed request.

    The endpoint needs no token, because the caller has none yet. The server stores nothing for the caller, and needs no
    thread.
    """
    _attestation(services)
    return NonceResponse(
        nonce=attestation.nonce(services.nonce_key, secrets.token_bytes(16), services.now().timestamp())
    )


@router.post("/session", status_code=201)
def make_session(request: SessionRequest, services: ServicesDep) -> SessionResponse:
    """Create a session token for the agent of an instance.

    STS confirms who signed the request. EC2 and Auto Scaling confirm that the instance runs and belongs to the fleet.
    Raises Forbidden if one of these services does not confirm the claim, if the nonce has expired or was used before,
    or if the fleet has no NodeRoleName.
    """
    cloud = _attestation(services)
    end = attestation.nonce_end(services.nonce_key, request.nonce, services.now().timestamp())
    if end is None:
        raise Forbidden("The nonce is not from this server, or it is older than a minute.", hint="Request a new nonce.")
    signature = Signature(
        authorization=request.authorization, amz_date=request.amz_date, security_token=request.security_token
    )
    _allow(attestation.refusal_of_signature(signature, cloud.region))
    with services.database.read() as session:
        fleet = fleets.find(session, request.fleet_name)
    if fleet is None or not fleet.node_role_name:
        hint = "everstep fleets update NAME --node-role-name ROLE, the role of the launch template's instance profile."
        raise Forbidden(f"No fleet {request.fleet_name!r} has a node role name.", hint=hint)
    node_id = NodeId(request.node_id)
    try:
        principal = cloud.sts.whose(
            attestation.sts_headers(signature, server_id=services.server_id, nonce=request.nonce)
        )
    except AccessDenied as error:
        raise Forbidden(f"{error.message}.") from error
    _allow(
        attestation.refusal_of_principal(
            principal, account=cloud.account(), role_name=fleet.node_role_name, node_id=node_id
        )
    )
    _require_running_member(services, fleet, node_id)
    now = services.now()
    expires_at = now + timedelta(seconds=SESSION_SECONDS)
    new = NewToken(
        kind=TokenKind.SESSION,
        role=Role.AGENT,
        fleet_name=fleet.name,
        node_id=node_id,
        description=f"agent of {node_id}",
        expires_at=expires_at,
    )
    with services.database.write() as session:
        if not nonces.spend(session, request.nonce, datetime.fromtimestamp(end, UTC)):
            raise Forbidden("The nonce was used before.", hint="Request a new nonce.")
        secret, record = tokens.mint(session, new, now)
        tokens.revoke_sessions(session, node_id, now, but=record.id)
        message = f"STS confirmed the identity of {node_id}; it has a session of the fleet {fleet.name}."
        events.add(session, "NodeAttested", message, now, fleet_name=fleet.name, node_id=node_id)
    return SessionResponse(session_token=secret, expiration_time=expires_at)


def _attestation(services: Services) -> Attestation:
    if services.attestation is None:
        raise NotFound(
            "This server's cloud is not AWS; its nodes join with a join token.", hint="everstep fleets join-token NAME"
        )
    return services.attestation


def _allow(refusal: str) -> None:
    if refusal:
        raise Forbidden(f"{refusal[:1].upper()}{refusal[1:]}.")


def _require_running_member(services: Services, fleet: FleetRecord, node_id: NodeId) -> None:
    state = services.memberships.state(fleet.auto_scaling_group_name, node_id)
    if state is None:
        raise Forbidden(f"The instance {node_id} is not a member of the group {fleet.auto_scaling_group_name}.")
    if state is not Ec2State.RUNNING:
        raise Forbidden(f"EC2 reports {node_id} as {state}, not as running.")
