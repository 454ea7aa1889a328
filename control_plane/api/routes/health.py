"""Whether this server answers; the one route that needs no token."""

from __future__ import annotations

from importlib.metadata import version

from control_plane.api import schemas
from control_plane.api.deps import Router

router = Router(prefix="/v1/health", tags=["Health"])


@router.get("", operation_id="GetHealth")
async def get_health() -> schemas.HealthResponse:
    """Say that the server answers, and which version it is."""
    return schemas.HealthResponse(status="ok", version=version("everstep"))
