"""Quotas of projects: limits of nodes and jobs, and the AWS resources that submitters may use."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from control_plane.api import page_tokens
from control_plane.api.alike import shaped
from control_plane.api.auth import Admin, Reader
from control_plane.api.deps import MaxResults, NextToken, ServicesDep, page_of
from control_plane.api.router import Router
from control_plane.api.schemas import quotas as quotas_schemas
from control_plane.db import events, quotas
from control_plane.db.quotas import QuotaRecord

router = Router(prefix="/v1/quotas", tags=["Quotas"])
ProjectPath = Annotated[str, Path(alias="Project", min_length=1, max_length=63)]


@router.get("", operation_id="ListProjectQuotas")
def list_project_quotas(
    caller: Reader, services: ServicesDep, max_results: MaxResults = 1000, next_token: NextToken = None
) -> quotas_schemas.ListProjectQuotasResponse:
    """List quotas by project. A token of one project sees only that project's quota."""
    after = None if next_token is None else page_tokens.position(next_token, page_tokens.text)[0]
    with services.database.read() as session:
        page = quotas.page(session, only_project=caller.project_filter, after=after, limit=max_results + 1)
    shown, more = page_of(page, max_results, lambda quota: (quota.project,))
    return quotas_schemas.ListProjectQuotasResponse(quotas=[_shown(quota) for quota in shown], next_token=more)


@router.put("/{Project}", operation_id="PutProjectQuota")
def put_project_quota(
    project: ProjectPath, request: quotas_schemas.PutProjectQuotaRequest, _caller: Admin, services: ServicesDep
) -> quotas_schemas.ProjectQuota:
    """Create or replace the quota of a project. A lower quota does not stop running jobs."""
    limits: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in request}
    quota = QuotaRecord(project=project, **limits)
    with services.change() as session:
        if quotas.find(session, project) != quota:
            quotas.put(session, quota)
            nodes = "any number of" if quota.max_node_count is None else quota.max_node_count
            live = "any number of" if quota.max_job_count is None else quota.max_job_count
            message = (
                f"Jobs of the project {project} may hold {nodes} nodes of each fleet; {live} of them may be unfinished."
            )
            if quota.max_source_bytes is not None:
                message += f" Its source archives may use {quota.max_source_bytes} bytes."
            message += f" Submitters may set at most priority {quota.max_priority}, and use {_named(quota)}."
            events.add(session, "QuotaSet", message, services.now(), project=project)
    return _shown(quota)


@router.delete("/{Project}", operation_id="DeleteProjectQuota")
def delete_project_quota(project: ProjectPath, _caller: Admin, services: ServicesDep) -> quotas_schemas.ProjectQuota:
    """Delete a project's quota."""
    with services.change() as session:
        quota = quotas.find(session, project)
        quotas.remove(session, project)
        events.add(
            session, "QuotaLifted", f"The quota of the project {project} was deleted.", services.now(), project=project
        )
    assert quota is not None  # quotas.remove raises an error for a missing quota, so the quota exists here.
    return _shown(quota)


def _named(quota: QuotaRecord) -> str:
    return (
        ", ".join((*quota.allowed_role_arns, *quota.allowed_secrets, *quota.allowed_data)) or "no role, secret or data"
    )


def _shown(quota: QuotaRecord) -> quotas_schemas.ProjectQuota:
    return shaped(quota, quotas_schemas.ProjectQuota)
