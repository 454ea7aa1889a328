"""Shapes of the API: quotas and allow-lists of projects."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import MAX_PRIORITY, Request, Shape

AllowedName = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
AllowedNames = Annotated[list[AllowedName], Field(max_length=100)]
"""Each allows itself; one that ends with `*` allows all that begins like it."""


class PutProjectQuotaRequest(Request):
    """What the jobs of a project may have, and what its submitters may name. Administrators may name anything."""

    max_node_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Nodes of each fleet that all its jobs may hold together, without a limit unless said.

    Jobs beyond wait, and hold up nobody.
    """
    max_job_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Jobs that have not ended, in all fleets, without a limit unless said. CreateTrainingJob is refused beyond."""
    max_source_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """What all uploaded source archives may take together, without a limit unless said. Stored archives are never
    deleted; archives under way count for up to 26 hours. CreateSource, CompleteSource and PutSource are refused beyond."""
    max_priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The highest Priority that its submitters may set."""
    allowed_role_arns: AllowedNames = Field(default=[])
    """The roles that its submitters may name as RoleArn; none unless said.

    A final `*` allows all that begins like it, here and below.
    """
    allowed_secrets: AllowedNames = Field(default=[])
    """What its submitters may name in Secrets where a job has no RoleArn; none unless said."""
    allowed_data: AllowedNames = Field(default=[])
    """S3 URIs that its submitters may name in InputDataConfig where a job has no RoleArn, and directories; none unless said."""


class ProjectQuota(Shape):
    """What the jobs of a project may have."""

    project: str
    max_node_count: int | None
    max_job_count: int | None
    max_source_bytes: int | None
    max_priority: int
    allowed_role_arns: list[str]
    allowed_secrets: list[str]
    allowed_data: list[str]


class ListProjectQuotasResponse(Shape):
    """A page of quotas, by project."""

    quotas: list[ProjectQuota]
    next_token: str | None = None
