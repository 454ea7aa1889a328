"""TLS identities of agents, with certificates that the control plane's own code issues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from control_plane.certificates import FleetAuthorities
from everstep.protocol.ids import FleetName, NodeId
from worker.replication.identity import PeerIdentity

SECRET = b"s" * 32
FLEET = FleetName("main")


def identity_of(
    node_id: NodeId,
    *,
    fleet: FleetName = FLEET,
    secret: bytes = SECRET,
    age: timedelta = timedelta(),
) -> PeerIdentity:
    """Return the identity of a node whose certificate was issued `age` ago by the server with this secret."""
    identity = PeerIdentity()
    issued_at = datetime.now(UTC) - age
    identity.accept(FleetAuthorities(secret).issue(fleet, node_id, identity.public_key, issued_at))
    return identity
