"""GetHealth: the server's version and problems. This operation needs no token."""

from __future__ import annotations

from importlib.metadata import version

from control_plane.api import views
from control_plane.api.deps import Router, ServicesDep
from control_plane.api.schemas import health as health_schemas

router = Router(prefix="/v1/health", tags=["Health"])


@router.get("", operation_id="GetHealth")
async def get_health(services: ServicesDep) -> health_schemas.HealthResponse:
    """Return the server's version and the problems that need a person.

    A degraded server also returns status 200, because it still answers requests.
    """
    return views.health(services.database.disk.full(), version("everstep"))
