"""The router of the API: audited routes that reject unknown fields and omit response fields without a value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from control_plane.api import errors, json_body
from control_plane.api.audit import AuditedRoute
from control_plane.api.caller_threads import CallerThreads
from control_plane.api.errors import InvalidRequest
from control_plane.api.schemas.common import Shape
from everstep.protocol import constraints


class Router(APIRouter):
    """A router whose routes omit response fields without a value and reject unknown parameters."""

    # If a route ignored unknown parameters, a request with a misspelt DryRun would execute the real operation.
    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=AuditedRoute, **options)

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route. The route decorators call it."""
        gate = _NothingUnknown()
        gates = [*(options.get("dependencies") or ()), Depends(gate)]
        answering = _in_thread(endpoint, options.get("status_code") or 200)
        super().add_api_route(
            path, answering, **{**options, "dependencies": gates, "response_model_exclude_none": True}
        )
        route = self.routes[-1]
        assert isinstance(route, APIRoute)
        gate.query = frozenset(_query_names(route.dependant))
        gate.takes_body = (
            route.body_field is not None
            or "requestBody" in (route.openapi_extra or {})
            or (route.methods or set()) <= {"GET", "HEAD"}
        )


def _in_thread(endpoint: Callable[..., Any], status: int) -> Callable[..., Any]:
    """Return an endpoint that runs and serializes its response in one of its caller's threads."""
    # FastAPI would use threads without a share per caller, and serialize on the event loop.
    if inspect.iscoroutinefunction(endpoint):
        return endpoint
    sets_headers = "response" in inspect.signature(endpoint).parameters

    def call(named: Mapping[str, Any]) -> Any:
        made = endpoint(**named)
        if sets_headers or not isinstance(made, Shape):
            return made
        return Response(made.model_dump_json(by_alias=True, exclude_none=True), status, media_type="application/json")

    @functools.wraps(endpoint)
    async def answer(**named: Any) -> Any:
        threads: CallerThreads = named["services"].caller_threads
        return await threads.run(call, named)

    return answer


class _NothingUnknown:
    """FastAPI dependency that rejects unknown query fields, text that no database can store, and unexpected bodies."""

    def __init__(self) -> None:
        self.query: frozenset[str] = frozenset()
        self.takes_body = True
        """Whether the route declares a body, or its method never has one."""

    async def __call__(self, request: Request) -> None:
        names = [name for name in request.query_params if name not in self.query]
        if not self.takes_body and (await request.body()).strip() not in (b"", b"{}"):
            found, _ = await json_body.parsed(request)
            names += [str(name) for name in found] if isinstance(found, dict) and found else ["Body"]
        fields = [(name, constraints.unknown(name)) for name in islice(dict.fromkeys(names), errors.MAX_FIELDS)]
        for name, value in (*request.path_params.items(), *request.query_params.multi_items()):
            if name not in names and (wrong := json_body.text_complaint(value)) is not None:
                fields.append((name, wrong))
        if fields:
            raise InvalidRequest(constraints.summary(fields), fields=fields)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)
