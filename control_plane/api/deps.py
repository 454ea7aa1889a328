"""Provides the dependencies of the routes: services, common parameters, and paging.

Invariant: a route with a `Caller` parameter runs only with a valid token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter
from sqlalchemy.orm import Session

from control_plane.api import page_tokens
from control_plane.api.archive import SourceLimits
from control_plane.api.caller_threads import (
    AGENT_THREADS,
    HANDSHAKE_THREADS,
    REFUSED_CALLS,
    REFUSED_CALLS_PER_SECOND,
    STRANGER_BURST_SECONDS,
    UPLOAD_BURST_SECONDS,
    CallerThreads,
    EventAllowance,
    SpoolRoom,
    Workers,
)
from control_plane.api.changes import ResponseSnapshots
from control_plane.api.held_tokens import HeldTokens
from control_plane.api.memberships import Memberships
from control_plane.api.peers import Peers
from control_plane.certificates import FleetAuthorities
from control_plane.cloud.identity import Attestation
from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.operator import CloudOperator
from control_plane.db.metric_samples import MetricSamples
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.event_feed import EventFeed
from control_plane.loop.loop_metrics import LoopMetrics
from control_plane.loop.readiness import Readiness
from control_plane.tracing import Tracer
from everstep.protocol.pace import Pace
from everstep.protocol.plan import Timeouts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPauses:
    """Seconds between two reads of a followed log from S3."""

    stored_seconds: float = 2.0
    """Pause while the client has received all lines without a gap."""
    catch_up_seconds: float = 0.3
    """Pause while the client lacks a line that precedes a received one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that routes use, one instance per server."""

    database: Database
    tokens: HeldTokens
    operator: CloudOperator
    memberships: Memberships
    """AWS's answers for agents that join."""
    events: EventQueue | None
    """Queue of AWS's events. None if the server only polls."""
    objects: ServiceStore
    registry: AgentRegistry
    peers: Peers
    """Other servers of the installation, and their agents."""
    timeouts: Timeouts
    bucket: str
    """Bucket for sources, logs, and data of jobs without a location of their own."""
    default_max_slowdown: float
    spool_directory: Path
    """Directory for request bodies that are too large for memory."""
    source_limits: SourceLimits
    session_key: bytes
    """Signs browser sessions."""
    nonce_key: bytes
    """Signs the nonces of `routes.attestation`."""
    authorities: FleetAuthorities
    """Issue the TLS certificates of agents."""
    server_id: str
    """Id of this installation. Agents sign it, so that their proof is valid only here."""
    attestation: Attestation | None = None
    """None if agents join with join tokens only."""
    feed: EventFeed
    loop_metrics: LoopMetrics = field(default_factory=LoopMetrics)
    """Prometheus metrics that the server's background loops collect."""
    readiness: Readiness = field(default_factory=Readiness)
    """State of the loops for GetReadiness."""
    caller_threads: CallerThreads = field(default_factory=CallerThreads)
    """The threads in which API requests block, with a share per caller."""
    handshakes: Workers = field(default_factory=lambda: Workers(HANDSHAKE_THREADS, "handshake"))
    """The threads that look for the tokens of agents which connect."""
    agent_threads: Workers = field(default_factory=lambda: Workers(AGENT_THREADS, "agent"))
    """The threads in which connections of agents with valid tokens block."""
    uploads: Pace = field(default_factory=lambda: Pace(UPLOAD_BURST_SECONDS))
    """Slows the reading of all source archives together."""
    strangers: Pace = field(default_factory=lambda: Pace(STRANGER_BURST_SECONDS))
    """Slows the responses to all requests without a valid token together."""
    refused_calls: EventAllowance = field(
        default_factory=lambda: EventAllowance(REFUSED_CALLS, REFUSED_CALLS_PER_SECOND)
    )
    downloads: Counter[str] = field(default_factory=Counter)
    """Open downloads by token. Used on the event loop only."""
    spool_room: SpoolRoom = field(default_factory=SpoolRoom)
    log_pauses: LogPauses = field(default_factory=LogPauses)
    metric_samples: MetricSamples = field(default_factory=MetricSamples)
    snapshots: ResponseSnapshots = field(default_factory=ResponseSnapshots)
    """Digests for clients that poll for changes (`api.changes`)."""
    tracer: Tracer = field(default_factory=Tracer)
    now: Callable[[], datetime]
    wake: Callable[[], None]
    """Makes the background loops process all jobs and fleets now. Callable from any thread."""

    @contextmanager
    def change(self) -> Iterator[Session]:
        """Yield a write session, and wake the background loops after the commit."""
        with self.database.write() as session:
            yield session
        self.wake()


async def services(request: Request) -> Services:
    """Return the services of the request's application."""
    # A coroutine, because FastAPI would run a plain function in a thread.
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
    """Return OpenAPI's description of a binary request body that the route reads as a stream."""
    return {
        "requestBody": {"required": True, "content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}
    }


def binary_answer(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of a binary response."""
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
    """Return the entries of a page, and the opaque token of the next page or None.

    `found` has at least one entry more than the page if the list continues. `position` returns an entry's position as
    JSON values, which `page_tokens.position` decodes.
    """
    shown = list(found[:max_results])
    if len(found) <= max_results:
        return shown, None
    return shown, page_tokens.encode(position(shown[-1]))


def same_order(order: SortOrder) -> Callable[[Any], SortOrder]:
    """Return a check for `page_tokens.position` that rejects a token of the opposite order."""

    def check(value: Any) -> SortOrder:
        if SortOrder(value) is not order:
            raise ValueError(value)
        return order

    return check
