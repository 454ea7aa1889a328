"""API models: the pause of all automatic actions of the service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import StringConstraints

from control_plane.api.schemas.common import Request, Shape


class PauseAutomationRequest(Request):
    """A request to pause all automatic actions."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]
    """Why automation is paused. During the pause, the reason of each job and fleet contains this text."""


class Automation(Shape):
    """The state of the service's automatic actions: active, or paused by an administrator."""

    is_paused: bool
    reason: str | None = None
    """Why automation is paused. Absent while automation is active."""
    paused_by: str | None = None
    """Name of the administrator's token."""
    pause_time: datetime | None = None
