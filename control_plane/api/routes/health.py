"""Whether this server answers, and what about it needs a person; the one route that needs no token."""

from __future__ import annotations

from importlib.metadata import version

from control_plane.api import views
from control_plane.api.deps import Router, ServicesDep
from control_plane.api.schemas import health as health_schemas

router = Router(prefix="/v1/health", tags=["Health"])


@router.get("", operation_id="GetHealth")
async def get_health(services: ServicesDep) -> health_schemas.HealthResponse:
    """Say that the server answers, which version it is, and what about it needs a person.

    A degraded server answers with status 200, too: it serves all that it can.
    """
    return views.health(services.database.disk.full(), version("everstep"))
