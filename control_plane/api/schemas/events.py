"""Shapes of the API: events of jobs, fleets and nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from control_plane.api.schemas.common import Shape


class Event(Shape):
    """Something that happened to a fleet, a job or a node; never changed afterwards."""

    event_id: int
    time: datetime
    type: str
    message: str
    fleet_name: str | None
    training_job_name: str | None
    node_id: str | None
    detail: dict[str, Any]


class ListEventsResponse(Shape):
    """A page of events."""

    events: list[Event]
    """Oldest first, unless the newest were asked for first."""
    next_token: str | None = None
