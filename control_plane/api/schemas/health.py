"""API models: the health of the service."""

from __future__ import annotations

from typing import Literal

from control_plane.api.schemas.common import Shape
from control_plane.api.schemas.tokens import ServiceCondition


class ReadinessResponse(Shape):
    """Confirms that the server is ready for requests."""

    status: Literal["ready"]
    version: str


class HealthResponse(Shape):
    """Status and version of the server that answers."""

    status: Literal["ok", "degraded"]
    """Whether the server has current problems.

    `degraded`: the server answers requests, but at least one of Conditions needs a person.
    """
    version: str
    conditions: list[ServiceCondition]
    """Current problems of the service. Empty in normal operation. A condition disappears once its cause is resolved."""
