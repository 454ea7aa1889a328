"""Lists the audit log of calls that create, change or delete resources. Only administrators can read the log."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import AwareDatetime

from control_plane.api import page_tokens
from control_plane.api.alike import shaped
from control_plane.api.auth import Admin
from control_plane.api.deps import MaxResults, NextToken, ServicesDep, page_of
from control_plane.api.router import Router
from control_plane.api.schemas import audit as audit_schemas
from control_plane.db import audit
from control_plane.db.audit import AuditFilter, AuditRecord

router = Router(prefix="/v1/audit-entries", tags=["Audit"])


@router.get("", operation_id="ListAuditEntries")
def list_audit_entries(
    _caller: Admin,
    services: ServicesDep,
    operation: Annotated[
        str | None,
        Query(alias="Operation", max_length=63, description="Only calls of this operation, for example DeleteFleet."),
    ] = None,
    token_id: Annotated[
        str | None, Query(alias="TokenId", max_length=63, description="Only calls with the token of this id.")
    ] = None,
    project: Annotated[
        str | None, Query(alias="Project", max_length=63, description="Only calls for this project.")
    ] = None,
    time_after: Annotated[
        AwareDatetime | None, Query(alias="TimeAfter", description="Only calls after this time.")
    ] = None,
    time_before: Annotated[
        AwareDatetime | None, Query(alias="TimeBefore", description="Only calls before this time.")
    ] = None,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
) -> audit_schemas.ListAuditEntriesResponse:
    """List the calls that create, change or delete resources, newest first.

    The log contains every such call with a valid token, refused calls included. Reads and dry runs have no entry.
    """
    which = AuditFilter(
        operation=operation,
        token_id=token_id,
        project=project,
        after=time_after,
        before=time_before,
        before_id=None if next_token is None else page_tokens.position(next_token, page_tokens.whole)[0],
    )
    with services.database.read() as session:
        page = audit.page(session, which, limit=max_results + 1)
    shown, more = page_of(page, max_results, lambda record: (record.id,))
    return audit_schemas.ListAuditEntriesResponse(audit_entries=[_shown(record) for record in shown], next_token=more)


def _shown(record: AuditRecord) -> audit_schemas.AuditEntry:
    return shaped(record, audit_schemas.AuditEntry, outcome=_outcome(record.status_code))


def _outcome(status_code: int | None) -> Literal["Succeeded", "Refused", "Failed", "Unfinished"]:
    if status_code is None:
        return "Unfinished"
    if status_code < 400:
        return "Succeeded"
    return "Refused" if status_code < 500 else "Failed"
