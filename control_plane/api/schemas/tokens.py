"""API models: join tokens, access tokens and the caller's identity."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from control_plane.api.schemas.common import Hidden, Name, Request, Shape, ShortText


class CreateJoinTokenRequest(Request):
    """Creates a token that each new instance of a fleet's Auto Scaling group may use once."""

    fleet_name: Name
    """The fleet whose instances may join. The fleet does not have to exist yet."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)


class CreateJoinTokenResponse(Shape):
    """A join token for a fleet's launch template."""

    join_token: Hidden
    """The secret token. It is returned only once, because the service stores only its digest."""
    token_id: str
    fleet_name: str
    expiration_time: datetime | None


class CreateTokenRequest(Request):
    """Creates a token for a person or a program."""

    role: Literal["admin", "submitter", "viewer"]
    """Permissions of the token: viewer, submitter or admin.

    A viewer can read. A submitter can also create and change training jobs. An admin can do all actions, in every
    project.
    """
    project: Name | None = None
    """The only project that the token can access. By default, the token can access every project.

    Not allowed for an admin.
    """
    description: ShortText = ""
    """The token's owner or purpose. Shown in lists."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)
    """Lifetime of the token. By default, the token does not expire."""


class TokenFields(Shape):
    """The fields of a token that every description of it contains."""

    token_id: str
    project: str | None
    """The project of the token. Absent if the token can access every project."""
    description: str
    creation_time: datetime
    expiration_time: datetime | None


class Token(TokenFields):
    """A token without its secret."""

    kind: Literal["user", "join"]
    """Kind of the token. user: a token of a person or a program. join: a token with which instances join a fleet."""
    role: Literal["admin", "submitter", "viewer", "agent"]
    fleet_name: str | None
    """The fleet of a join token. Absent for other tokens."""
    revocation_time: datetime | None


class CreateTokenResponse(Shape):
    """A new token with its secret."""

    secret: Hidden
    """The secret token. Clients send it as `Authorization: Bearer …`.

    It is returned only once, because the service stores only its digest.
    """
    token: Token


class ListTokensResponse(Shape):
    """A page of tokens, oldest first."""

    tokens: list[Token]
    next_token: str | None = None


class GetCallerIdentityResponse(TokenFields):
    """The token of the caller, with its role and project."""

    role: Literal["admin", "submitter", "viewer"]
    server_version: str
    server_time: datetime
    """Current time of the service's clock."""


class ServiceCondition(Shape):
    """A problem of the service that a person must resolve."""

    type: Literal["disk_full"]
    message: str
    """A sentence about the problem and its location, with the measured values."""
    hint: str
    """How to resolve the problem."""
    directory: str | None
    """Directory on the affected disk. Absent if the disk belongs to a database on another machine."""
    free_bytes: int | None
    """Free space of the disk. Absent if this server cannot read the value."""
    duration_seconds: float
