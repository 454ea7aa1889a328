"""API models: quotas and allow-lists of projects."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import MAX_PRIORITY, Request, Shape

AllowedName = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
AllowedNames = Annotated[list[AllowedName], Field(max_length=100)]
"""Names that a project's submitters may use.

An entry allows the exact name. An entry that ends with `*` allows all names with that prefix.
"""


class PutProjectQuotaRequest(Request):
    """Limits for the jobs of a project, and AWS resources that its submitters may use.

    The allow-lists do not restrict administrators.
    """

    max_node_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Maximum number of nodes per fleet for all jobs of the project together.

    The default is no limit. Jobs beyond the limit wait, and do not delay other projects' jobs.
    """
    max_job_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Limit of unfinished jobs in all fleets. The default is no limit.

    Beyond the limit, CreateTrainingJob fails.
    """
    max_source_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """Limit of the total size of the project's source archives. The default is no limit.

    Stored archives are never deleted, and unfinished uploads count for up to 26 hours. Beyond the limit, CreateSource,
    CompleteSource and PutSource fail.
    """
    max_priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The highest Priority that submitters of the project may set."""
    allowed_role_arns: AllowedNames = Field(default=[])
    """Roles that submitters of the project may set as RoleArn. The default is none.

    In this list and in AllowedSecrets and AllowedData, an entry that ends with `*` allows all names with that prefix.
    """
    allowed_secrets: AllowedNames = Field(default=[])
    """Secrets that submitters may use in jobs without RoleArn. The default is none."""
    allowed_data: AllowedNames = Field(default=[])
    """S3 URIs and directories that submitters may use in InputDataConfig, CheckpointConfig and OutputDataConfig.

    The default is none. Inputs of jobs with RoleArn may have any S3 URI.
    """


class ProjectQuota(Shape):
    """Limits for the jobs of a project."""

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
