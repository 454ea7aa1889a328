"""`GET /replicas/agents`: the state of this server's agents, for the other servers of the installation.

The route is not part of the published API. The caller proves with a key that it knows the server secret
(`control_plane.api.peers`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import Request, Response

from control_plane.api import peers
from control_plane.api.auth import bearer
from control_plane.api.deps import ServicesDep
from control_plane.api.errors import Unauthenticated
from control_plane.api.router import Router
from control_plane.gate import TRUST

router = Router(include_in_schema=False)


@router.get(peers.PATH)
async def get_agents(request: Request, services: ServicesDep) -> Response:
    """Return the state of this server's agents, encoded by `api.peers.encoded`.

    Raises Unauthenticated if the caller does not send the key of the installation's servers.
    """
    key = bearer(request.headers.get("authorization")).encode()
    if not hmac.compare_digest(key, services.peers.key.encode()):
        raise Unauthenticated("The key is not the one of this installation's servers.")
    trust: Callable[[str], None] | None = request.scope["state"].get(TRUST)
    if trust is not None:
        trust("servers")
    return Response(peers.encoded(services.peers.own()), media_type="application/msgpack")
