"""What routes are given: the services behind them and who is calling.

Invariant: a route that takes a `Caller` is never reached without a good token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from control_plane.api import json_body, page_tokens
from control_plane.api.archive import SourceLimits
from control_plane.api.caller_threads import CallerThreads
from control_plane.api.errors import InvalidRequest
from control_plane.api.held_tokens import HeldTokens
from control_plane.api.schemas.common import FieldError, Shape
from control_plane.cloud.identity import Attestation
from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.operator import CloudOperator
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.event_feed import EventFeed
from control_plane.loop.figures import LoopFigures
from everstep.protocol import constraints
from everstep.protocol.plan import Timeouts

T = TypeVar("T")


class Router(APIRouter):
    """Routes whose answers leave out what has no value, and that refuse what they do not know: a misspelt DryRun is no permission."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=json_body.JsonRoute, **options)

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route; called by its decorators."""
        gate = _NothingUnknown()
        gates = [*(options.get("dependencies") or ()), Depends(gate)]
        answering = _written(endpoint, options.get("status_code") or 200)
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


def _written(endpoint: Callable[..., Any], status: int) -> Callable[..., Any]:
    """Have what a route answers written as JSON by the thread that has made it.

    FastAPI would have another thread check that a model is one, and write it on the event loop. A route that sets
    headers of its own, or that is a coroutine, is left as it is.
    """
    if inspect.iscoroutinefunction(endpoint) or "response" in inspect.signature(endpoint).parameters:
        return endpoint

    @functools.wraps(endpoint)
    def answer(*arguments: Any, **named: Any) -> Any:
        made = endpoint(*arguments, **named)
        if not isinstance(made, Shape):
            return made
        return Response(made.model_dump_json(by_alias=True, exclude_none=True), status, media_type="application/json")

    return answer


class _NothingUnknown:
    """Refuses unknown query fields, text that no database can hold, and a body where the route takes none.

    Bodies that the route takes are checked by `json_body` and by their model.
    """

    def __init__(self) -> None:
        self.query: frozenset[str] = frozenset()
        self.takes_body = True
        """Or is asked with a method whose bodies nobody sends."""

    async def __call__(self, request: Request) -> None:
        names = [name for name in request.query_params if name not in self.query]
        if not self.takes_body and (body := (await request.body()).strip()) not in (b"", b"{}"):
            names += _names_in(body)
        fields = [FieldError(field=name, message=constraints.unknown(name)) for name in dict.fromkeys(names)]
        for name, value in (*request.path_params.items(), *request.query_params.multi_items()):
            if name not in names and (wrong := json_body.text_complaint(value)) is not None:
                fields.append(FieldError(field=name, message=wrong))
        if fields:
            raise InvalidRequest(constraints.told([(field.field, field.message) for field in fields]), fields=fields)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


def _names_in(body: bytes) -> list[str]:
    found, _ = json_body.read(body)
    return [str(name) for name in found] if isinstance(found, dict) and found else ["Body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the routes stand on; made once by the composition root."""

    database: Database
    tokens: HeldTokens
    operator: CloudOperator
    events: EventQueue | None
    """Where AWS's events come from; None: AWS is polled only."""
    objects: ObjectStore
    registry: AgentRegistry
    timeouts: Timeouts
    bucket: str
    """For sources, logs, and everything that a job does not send elsewhere."""
    default_max_slowdown: float
    spool_directory: Path
    """For bodies that are too large for memory."""
    source_limits: SourceLimits
    session_key: bytes
    """What browsers' sessions are sealed with."""
    nonce_key: bytes
    """What nonces are sealed with."""
    server_id: str
    """What agents sign that they mean this installation and no other."""
    attestation: Attestation | None = None
    """What it takes for agents to show which instance they are; None: they join with join tokens alone."""
    feed: EventFeed
    figures: LoopFigures = field(default_factory=LoopFigures)
    """What the loops count of themselves."""
    caller_threads: CallerThreads = field(default_factory=CallerThreads)
    """For what coroutines read or store in S3 on behalf of callers."""
    now: Callable[[], datetime]
    wake: Callable[[], None]
    """Makes the loops look again; from any thread."""


async def services(request: Request) -> Services:
    """Return the services of the application that the request came to.

    A coroutine, so that no thread is asked for what takes no time.
    """
    found: Services = request.app.state.services
    return found


ServicesDep = Annotated[Services, Depends(services)]
MaxResults = Annotated[int, Query(alias="MaxResults", ge=1, le=1000)]
TrainingJobNamePath = Annotated[str, PathParameter(alias="TrainingJobName", min_length=1, max_length=63)]
FleetNamePath = Annotated[str, PathParameter(alias="FleetName", min_length=1, max_length=63)]
NodeIdPath = Annotated[str, PathParameter(alias="NodeId", min_length=1, max_length=63)]
TokenIdPath = Annotated[str, PathParameter(alias="TokenId", min_length=1, max_length=63)]
IncidentIdPath = Annotated[str, PathParameter(alias="IncidentId", min_length=1, max_length=63)]
SourceIdPath = Annotated[str, PathParameter(alias="SourceId", pattern=r"^[0-9a-f]{64}$")]
NextToken = Annotated[str | None, Query(alias="NextToken", max_length=1024)]


def binary_body(media_type: str) -> dict[str, Any]:
    """Return what the contract says of a request whose body is bytes, for a route that reads them as they come."""
    return {
        "requestBody": {"required": True, "content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}
    }


def binary_answer(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return what the contract says of an answer that is bytes."""
    return {
        200: {
            "description": "The content.",
            "content": {media_type: {"schema": {"type": "string", "format": "binary"}}},
        }
    }


class SortOrder(StrEnum):
    """Which end of a list comes first; SageMaker's words."""

    ASCENDING = "Ascending"
    DESCENDING = "Descending"


def page_of(
    found: Sequence[T], max_results: int, position: Callable[[T], tuple[Any, ...]]
) -> tuple[list[T], str | None]:
    """Return what a page of a list shows, and the token of the next page.

    Args:
        found: what comes next in the list, read at least one entry further than the page may be long.
        max_results: how long it may be, at least 1.
        position: an entry's place in the list, in JSON values; `page_tokens.position` returns it.

    Returns:
        The entries, and an opaque token; None where nothing comes after them.
    """
    shown = list(found[:max_results])
    if len(found) <= max_results:
        return shown, None
    return shown, page_tokens.encode(position(shown[-1]))


def same_order(order: SortOrder) -> Callable[[Any], SortOrder]:
    """Return what refuses a token of a list that was sorted the other way; for `page_tokens.position`."""

    def check(value: Any) -> SortOrder:
        if SortOrder(value) is not order:
            raise ValueError(value)
        return order

    return check
