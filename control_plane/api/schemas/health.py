"""Shapes of the API: the health of the service."""

from __future__ import annotations

from typing import Literal

from control_plane.api.schemas.common import Shape
from control_plane.api.schemas.tokens import ServiceCondition


class HealthResponse(Shape):
    """The server answers."""

    status: Literal["ok", "degraded"]
    """degraded: the server answers, and one of Conditions needs a person."""
    version: str
    conditions: list[ServiceCondition]
    """Empty while all is well; a condition ends by itself once its cause is gone."""
