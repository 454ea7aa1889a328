"""Records in the audit log each call that may create, change or delete resources.

    before the call    operation, resource, caller, source address, request id
    after the call     status, error code, and the name of a resource that the service generated

GET requests, dry runs, calls without a valid token, and those of a token with too many refusals get no entry, so that
nobody can fill the database. Invariant: a call changes nothing before its entry is stored. Entries contain names only:
no body, no token, no value of a variable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from fastapi import Request, Response

from control_plane.api import errors, json_body
from control_plane.api.json_body import JsonRoute
from control_plane.db import audit
from control_plane.db.audit import NewAuditEntry

if TYPE_CHECKING:
    from control_plane.api.auth import Caller
    from control_plane.api.deps import Services

log = logging.getLogger(__name__)

READ_METHODS: Final = frozenset({"GET", "HEAD"})
NAMES: Final = ("TrainingJobName", "FleetName", "SourceId", "TokenId", "IncidentId", "Step", "DrillId", "SnapshotId")
"""Fields that name a resource. The entry takes the first that the body contains."""
NESTED: Final = ("Token", "Drill")
"""Fields of responses that contain the created resource as a nested object."""
MAX_RESOURCE_CHARACTERS: Final = 256


class AuditedRoute(JsonRoute):
    """A route that stores an audit entry for each call that may change resources."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler. FastAPI calls it once."""
        handle = super().get_route_handler()
        operation = self.operation_id
        if operation is None or (self.methods or set()) <= READ_METHODS:
            return handle
        has_body = self.body_field is not None
        # Other operations refuse DryRun, and a refused call has an entry.
        has_dry_run = "DryRun" in _inputs_of(self)

        async def handle_audited(request: Request) -> Response:
            caller: Caller | None = getattr(request.state, "caller", None)
            sent = (await json_body.parsed(request))[0] if has_body and await request.body() else {}
            sent = sent if isinstance(sent, dict) else {}
            if caller is None or (has_dry_run and _is_dry(request, sent)):
                return await handle(request)
            services: Services = request.app.state.services
            if not services.refused_calls.is_left(caller.token.id):
                raise errors.Throttled("Too many calls of this token were refused.", hint="Correct them, and wait.")
            entry = _entry(operation, request, sent, caller, services)
            entry_id = await services.caller_threads.run(_begin, services, entry)
            try:
                response = await handle(request)
            except Exception as error:
                refusal = errors.translated(error)
                services.refused_calls.spend(caller.token.id)
                await _finish(services, entry_id, entry.resource, refusal.status, refusal.code)
                raise
            answer = _object_in(bytes(getattr(response, "body", b"")))
            await _finish(services, entry_id, entry.resource or _created(answer), response.status_code, "")
            services.tracer.record(
                operation,
                str(answer.get("RunId", "")),
                entry.at.timestamp(),
                services.now().timestamp(),
                {"request_id": entry.request_id, "role": entry.role},
            )
            return response

        return handle_audited


def _inputs_of(route: AuditedRoute) -> set[str]:
    """Return the names of an operation's query parameters and body fields."""
    dependant = route.dependant
    names = {parameter.alias for parameter in dependant.query_params}
    for body in dependant.body_params:
        fields: Any = getattr(body.field_info.annotation, "model_fields", {})
        names |= {str(field.alias) for field in fields.values()}
    return names


def _entry(
    operation: str, request: Request, sent: Mapping[str, Any], caller: Caller, services: Services
) -> NewAuditEntry:
    project = sent.get("Project")
    return NewAuditEntry(
        at=services.now(),
        operation=operation,
        resource=_cut("/".join(map(str, request.path_params.values())) or _name(sent)),
        project=_cut(project)[:63] if isinstance(project, str) and not caller.project else caller.project,
        token_id=caller.token.id,
        caller=caller.token.description,
        role=caller.role.value,
        source_address="" if request.client is None else request.client.host[:64],
        request_id=request.state.request_id,
    )


def _begin(services: Services, entry: NewAuditEntry) -> int:
    with services.database.write() as session:
        return audit.begin(session, entry)


async def _finish(services: Services, entry_id: int, resource: str, status: int, code: str) -> None:
    """Store the outcome of a call in its entry."""

    # A failure is only logged: the change is already stored, and a caller with an error would repeat the call.
    def write() -> None:
        with services.database.write() as session:
            audit.finish(session, entry_id, status_code=status, error_code=code, resource=resource)

    try:
        await services.caller_threads.finish(write)
    except Exception:
        log.exception("audit entry %d: could not store the outcome %d %s", entry_id, status, code)


def _is_dry(request: Request, sent: Mapping[str, Any]) -> bool:
    return sent.get("DryRun") is True or request.query_params.get("DryRun") == "true"


def _created(answer: Mapping[str, Any]) -> str:
    """Return the resource's name in a response, or an empty string."""
    nested: list[Mapping[str, Any]] = [answer[name] for name in NESTED if isinstance(answer.get(name), dict)]
    return next((name for each in (answer, *nested) if (name := _name(each))), "")


def _object_in(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _name(found: Mapping[str, Any]) -> str:
    return next((_cut(str(found[name])) for name in NAMES if isinstance(found.get(name), str | int)), "")


def _cut(text: str) -> str:
    cut = text[:MAX_RESOURCE_CHARACTERS].encode("utf-8", "replace")[:MAX_RESOURCE_CHARACTERS]
    return cut.decode("utf-8", "ignore").replace("\0", "\ufffd")
