"""Shapes of the API: join tokens, access tokens and the caller's identity."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from control_plane.api.schemas.common import Hidden, Name, Request, Shape, ShortText


class CreateJoinTokenRequest(Request):
    """A token that each new instance of a fleet's group may use once."""

    fleet_name: Name
    """The fleet may be created later."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)


class CreateJoinTokenResponse(Shape):
    """A join token for a fleet's launch template."""

    join_token: Hidden
    """Shown once; the service keeps its digest alone."""
    token_id: str
    fleet_name: str
    expiration_time: datetime | None


class CreateTokenRequest(Request):
    """A token for a person or a program."""

    role: Literal["admin", "submitter", "viewer"]
    """viewer reads; submitter also creates and changes training jobs; admin does everything, in every project."""
    project: Name | None = None
    """The only project that it opens; every project unless said. An admin has none."""
    description: ShortText = ""
    """Whose it is or what for; shown in lists."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)
    """It does not expire unless said."""


class Token(Shape):
    """A token as it is listed: everything but the secret."""

    token_id: str
    kind: Literal["user", "join"]
    """user: of a person or a program. join: lets instances of a fleet become its nodes."""
    role: Literal["admin", "submitter", "viewer", "agent"]
    project: str | None
    """Absent: every project."""
    fleet_name: str | None
    """Of a join token."""
    description: str
    creation_time: datetime
    expiration_time: datetime | None
    revocation_time: datetime | None


class CreateTokenResponse(Shape):
    """A new token."""

    secret: Hidden
    """What is sent as `Authorization: Bearer …`. Shown once; the service keeps its digest alone."""
    token: Token


class ListTokensResponse(Shape):
    """A page of tokens, oldest first."""

    tokens: list[Token]
    next_token: str | None = None


class GetCallerIdentityResponse(Shape):
    """Who is calling, and as what."""

    token_id: str
    role: Literal["admin", "submitter", "viewer"]
    project: str | None
    """Absent: every project."""
    description: str
    creation_time: datetime
    expiration_time: datetime | None
    server_version: str
    server_time: datetime
    """By the service's clock."""


class ServiceCondition(Shape):
    """Something about the service that needs a person."""

    type: Literal["disk_full"]
    message: str
    """What is wrong, where, and with which figures."""
    hint: str
    """What to do."""
    directory: str | None
    """Absent where the disk belongs to a database on another machine."""
    free_bytes: int | None
    """Absent where it cannot be read from here."""
    duration_seconds: float
