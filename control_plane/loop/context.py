"""Dependencies that the control plane's loops share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ObjectStore
from control_plane.cloud.operator import CloudOperator
from control_plane.db.retention import DEFAULT, Retention
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from control_plane.loop.figures import LoopFigures
from control_plane.steady_clock import steady_now
from everstep.protocol.plan import Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """Dependencies of the loops. The composition root (`app`) creates it."""

    database: Database
    operator: CloudOperator
    objects: ObjectStore
    registry: AgentRegistry
    timeouts: Timeouts
    secret: bytes
    """The server secret, from which generation keys are derived."""
    owner: str
    """Owner of this process's leases, new at each start of the server."""
    bucket: str
    """The server's bucket. It receives the evidence of held nodes."""
    events: EventQueue | None = None
    """Queue of AWS events. None: the server polls AWS only."""
    now: Callable[[], datetime] = steady_now
    monotonic: Callable[[], float] = time.monotonic
    retention: Retention = DEFAULT
    figures: LoopFigures = field(default_factory=LoopFigures)
    """Prometheus metrics of the loops."""
