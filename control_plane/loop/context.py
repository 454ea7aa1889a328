"""Dependencies that the control plane's loops share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.operator import CloudOperator
from control_plane.db.retention import DEFAULT, RowRetention
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.loop_metrics import LoopMetrics
from control_plane.loop.readiness import Readiness
from control_plane.steady_clock import steady_now
from control_plane.tracing import Tracer
from everstep.protocol.plan import Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """Dependencies of the loops. The module `app` creates this object."""

    database: Database
    operator: CloudOperator
    objects: ServiceStore
    registry: AgentRegistry
    timeouts: Timeouts
    secret: bytes
    owner: str
    """The name by which this process owns leases. Each start of the server makes a new name."""
    bucket: str
    is_local: bool = False
    """Whether the fleets are local clusters, whose nodes share one machine."""
    events: EventQueue | None = None
    """The SQS queue of AWS events. None means that the server only polls AWS."""
    now: Callable[[], datetime] = steady_now
    monotonic: Callable[[], float] = time.monotonic
    retention: RowRetention = DEFAULT
    tracer: Tracer = field(default_factory=Tracer)
    loop_metrics: LoopMetrics = field(default_factory=LoopMetrics)
    readiness: Readiness = field(default_factory=Readiness)
