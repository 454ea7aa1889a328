"""API models: the audit log, which records calls that create, change or delete resources."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import Shape


class AuditEntry(Shape):
    """The record of one call that creates, changes or deletes resources: its caller, source address and outcome."""

    entry_id: int
    time: datetime
    operation: str
    """Name of the API operation, for example DeleteFleet."""
    resource: str | None
    """Name of the resource that the call addressed or created. Names of nested resources are joined by `/`."""
    project: str | None
    """Project of the token, or else the project that the request names. Absent if neither names a project."""
    token_id: str
    caller: str
    """Description of the caller's token at the time of the call."""
    role: str
    source_address: str | None
    """IP address of the client, as trusted proxies forwarded it."""
    request_id: str
    """The request's id, which the response and the server's log contain too."""
    outcome: Literal["Succeeded", "Refused", "Failed", "Unfinished"]
    """How the call ended.

    Refused: the caller's error, so nothing changed. Failed: the service's error. Unfinished: the server stopped or the
    client disconnected during the call, so the change may be stored.
    """
    status_code: int | None
    """HTTP status of the response."""
    error_code: str | None


class ListAuditEntriesResponse(Shape):
    """A page of the audit log, newest first."""

    audit_entries: list[AuditEntry]
    next_token: str | None = None
