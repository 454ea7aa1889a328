"""API models: the health of the service."""

from __future__ import annotations

from typing import Literal

from control_plane.api.schemas.common import Shape
from control_plane.api.schemas.tokens import ServiceCondition


class HealthResponse(Shape):
    """Status and version of the server that answers."""

    status: Literal["ok", "degraded"]
    """`degraded`: the server answers, but a person must act on one of Conditions."""
    version: str
    conditions: list[ServiceCondition]
    """Current problems of the service. Empty in normal operation. A condition disappears once its cause is resolved."""
