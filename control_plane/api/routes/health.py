"""GetHealth and GetReadiness: whether a server is alive, and whether it should receive requests.

Both operations need no token.
"""

from __future__ import annotations

from importlib.metadata import version

from control_plane.api import views
from control_plane.api.deps import ServicesDep
from control_plane.api.errors import Unavailable
from control_plane.api.router import Router
from control_plane.api.schemas import health as health_schemas

router = Router(prefix="/v1", tags=["Health"])


@router.get("/health", operation_id="GetHealth")
async def get_health(services: ServicesDep) -> health_schemas.HealthResponse:
    """Return the server's version and the problems that a person must resolve.

    A degraded server also returns status 200, because it still answers requests.
    """
    return views.health(services.database.disk.full(), version("everstep"))


@router.get("/ready", operation_id="GetReadiness")
async def get_readiness(services: ServicesDep) -> health_schemas.ReadinessResponse:
    """Return whether a load balancer should send requests to this server.

    A server is ready if it can read and write the database, its background loops complete their passes in time, and a
    server of the installation manages each fleet. A server that is not ready may still work: do not restart it for that
    reason.

    Raises ServiceUnavailableException if the server is not ready. The message names each reason.
    """
    problems = services.readiness.problems()
    if problems:
        raise Unavailable(f"This server is not ready: {'; '.join(problems)}.", hint="Use another server, or retry.")
    return health_schemas.ReadinessResponse(status="ready", version=version("everstep"))
