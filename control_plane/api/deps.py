"""Provides the dependencies of the routes: services, common parameters, and paging.

Invariant: a route with a `Caller` parameter runs only with a valid token.
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
from control_plane.api.audit import AuditedRoute
from control_plane.api.caller_threads import CallerThreads
from control_plane.api.changes import Snapshots
from control_plane.api.errors import InvalidRequest
from control_plane.api.held_tokens import HeldTokens
from control_plane.api.memberships import Memberships
from control_plane.api.peers import Peers
from control_plane.api.schemas.common import FieldError, Shape
from control_plane.certificates import FleetAuthorities
from control_plane.cloud.identity import Attestation
from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.operator import CloudOperator
from control_plane.db.metric_samples import MetricSamples
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.event_feed import EventFeed
from control_plane.loop.figures import LoopFigures
from control_plane.loop.readiness import Readiness
from control_plane.tracing import Tracer
from everstep.protocol import constraints
from everstep.protocol.plan import Timeouts

T = TypeVar("T")


class Router(APIRouter):
    """A router whose routes omit response fields without a value and reject unknown parameters.

    If a route ignored unknown parameters, a request with a misspelt DryRun would execute the real operation.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=AuditedRoute, **options)

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Add a route. The route decorators call it."""
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
    """Return an endpoint that serializes its response to JSON in the thread that runs the endpoint.

    FastAPI would validate the model in another thread and serialize it on the event loop. Coroutines and endpoints that
    set their own headers stay unchanged.
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
    """FastAPI dependency that rejects unknown query fields, text that no database can store, and unexpected bodies.

    A body that the route declares is checked elsewhere: by `json_body` and the route's model.
    """

    def __init__(self) -> None:
        self.query: frozenset[str] = frozenset()
        self.takes_body = True
        """True if this dependency ignores the body: the route declares a body, or requests with this method never have
        a body.
        """

    async def __call__(self, request: Request) -> None:
        names = [name for name in request.query_params if name not in self.query]
        if not self.takes_body and (body := (await request.body()).strip()) not in (b"", b"{}"):
            names += _names_in(body)
        fields = [FieldError(field=name, message=constraints.unknown(name)) for name in dict.fromkeys(names)]
        for name, value in (*request.path_params.items(), *request.query_params.multi_items()):
            if name not in names and (wrong := json_body.text_complaint(value)) is not None:
                fields.append(FieldError(field=name, message=wrong))
        if fields:
            raise InvalidRequest(constraints.summary([(field.field, field.message) for field in fields]), fields=fields)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


def _names_in(body: bytes) -> list[str]:
    found, _ = json_body.read(body)
    return [str(name) for name in found] if isinstance(found, dict) and found else ["Body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPauses:
    """Pauses between two reads of a job's log from S3, for a client that follows the log."""

    stored_seconds: float = 2.0
    """Seconds between two reads while the client has received every line up to the newest one."""
    catch_up_seconds: float = 0.3
    """Seconds between two reads while the client has received a line but still lacks an earlier line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that routes use. `control_plane.app` creates one instance per server."""

    database: Database
    tokens: HeldTokens
    operator: CloudOperator
    memberships: Memberships
    """Caches AWS's answers about which instances are members of a fleet's group, for agents that join."""
    events: EventQueue | None
    """The SQS queue that receives AWS's events. None if the server only polls AWS."""
    objects: ObjectStore
    registry: AgentRegistry
    peers: Peers
    """The other control-plane servers of the installation, and the agents that are connected to them."""
    timeouts: Timeouts
    bucket: str
    """Bucket for sources, logs, and the data of jobs that set no location of their own."""
    default_max_slowdown: float
    spool_directory: Path
    """Directory for request bodies that are too large for memory."""
    source_limits: SourceLimits
    session_key: bytes
    """Key that signs browser sessions."""
    nonce_key: bytes
    """Key that signs the nonces with which agents on EC2 prove their identity (`routes.attestation`)."""
    authorities: FleetAuthorities
    """Certificate authorities, which issue the TLS certificates of agents."""
    server_id: str
    """Id of this installation. Agents sign this id, so that their proof is valid for this installation only."""
    attestation: Attestation | None = None
    """Verifies which instance an agent runs on. None if agents join with join tokens only."""
    feed: EventFeed
    figures: LoopFigures = field(default_factory=LoopFigures)
    """Prometheus metrics that the server's background loops collect."""
    readiness: Readiness = field(default_factory=Readiness)
    """State of the server's background loops, from which GetReadiness answers."""
    caller_threads: CallerThreads = field(default_factory=CallerThreads)
    """Thread pool for the calls of S3 that requests cause. Other work does not wait for these calls."""
    log_pauses: LogPauses = field(default_factory=LogPauses)
    metric_samples: MetricSamples = field(default_factory=MetricSamples)
    """Cache of metric points at a coarse resolution, for clients that poll the metrics of whole runs."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    """Contents of recent responses, for clients that poll for changes."""
    tracer: Tracer = field(default_factory=Tracer)
    now: Callable[[], datetime]
    wake: Callable[[], None]
    """Makes the server's background loops process all jobs and fleets now. Callable from any thread."""


async def services(request: Request) -> Services:
    """Return the services of the request's application. A coroutine, so that FastAPI calls it without a thread."""
    found: Services = request.app.state.services
    return found


ServicesDep = Annotated[Services, Depends(services)]
MaxResults = Annotated[int, Query(alias="MaxResults", ge=1, le=1000)]
TrainingJobNamePath = Annotated[
    str,
    PathParameter(
        alias="TrainingJobName",
        min_length=1,
        max_length=63,
        description="Name or RunId of the job. A token without a project needs the RunId if several projects have a "
        "job with this name.",
    ),
]
TrainingJobNameFilter = Annotated[
    str | None,
    Query(
        alias="TrainingJobName",
        max_length=63,
        description="Name or RunId of a job. For a token without a project, a name selects jobs of all projects.",
    ),
]
FleetNamePath = Annotated[str, PathParameter(alias="FleetName", min_length=1, max_length=63)]
NodeIdPath = Annotated[str, PathParameter(alias="NodeId", min_length=1, max_length=63)]
TokenIdPath = Annotated[str, PathParameter(alias="TokenId", min_length=1, max_length=63)]
IncidentIdPath = Annotated[str, PathParameter(alias="IncidentId", min_length=1, max_length=63)]
SourceIdPath = Annotated[str, PathParameter(alias="SourceId", pattern=r"^[0-9a-f]{64}$")]
NextToken = Annotated[str | None, Query(alias="NextToken", max_length=1024)]
ChangesSince = Annotated[
    str | None,
    Query(
        alias="ChangesSince",
        max_length=64,
        description="ChangeToken of an earlier response to the same request. The response then contains only what "
        "changed since. With any other text, such as Start, the response contains everything and a ChangeToken.",
    ),
]


def binary_body(media_type: str) -> dict[str, Any]:
    """Return the OpenAPI description of a binary request body, for a route that reads the body as a stream."""
    return {
        "requestBody": {"required": True, "content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}
    }


def binary_answer(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a binary response."""
    return {
        200: {
            "description": "The content.",
            "content": {media_type: {"schema": {"type": "string", "format": "binary"}}},
        }
    }


class SortOrder(StrEnum):
    """Order of a list, in SageMaker's terms."""

    ASCENDING = "Ascending"
    DESCENDING = "Descending"


def page_of(
    found: Sequence[T], max_results: int, position: Callable[[T], tuple[Any, ...]]
) -> tuple[list[T], str | None]:
    """Return the entries of a page and the token of the next page.

    Args:
        found: the next entries of the list. If the list continues after the page, `found` has at least one entry more
            than the page.
        max_results: maximum number of entries on the page, at least 1.
        position: returns an entry's position in the list as JSON values, which `page_tokens.position` decodes.

    Returns:
        The entries, and an opaque token, or None on the last page.
    """
    shown = list(found[:max_results])
    if len(found) <= max_results:
        return shown, None
    return shown, page_tokens.encode(position(shown[-1]))


def same_order(order: SortOrder) -> Callable[[Any], SortOrder]:
    """Return a check for `page_tokens.position` that rejects a page token of a list with the opposite order."""

    def check(value: Any) -> SortOrder:
        if SortOrder(value) is not order:
            raise ValueError(value)
        return order

    return check
