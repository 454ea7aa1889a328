"""API models: events of jobs, fleets and nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from control_plane.api.schemas.common import Shape


class Event(Shape):
    """A record of a change or an incident of a fleet, a job or a node. Events never change."""

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
    """The events, oldest first, or newest first with SortOrder Descending."""
    next_token: str | None = None
