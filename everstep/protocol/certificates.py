"""Defines the name that a TLS certificate of an agent contains, and how long the certificate is valid.

Invariant: a fleet name and a node id contain no slash, so two nodes never have the same name.
"""

from __future__ import annotations

from typing import Final

from everstep.protocol.ids import NodeId

CERTIFICATE_SECONDS: Final = 24 * 3600.0
# An agent that loses the control plane right before the renewal can still open sessions for 18 hours.
RENEWAL_SECONDS: Final = CERTIFICATE_SECONDS / 4
"""Seconds after which the control plane replaces a certificate of a connected agent."""
SKEW_SECONDS: Final = 3600.0
"""A certificate is valid from this many seconds before its issue, because the clock of a node may be behind."""


def peer_uri(fleet: str, node_id: NodeId) -> str:
    """Return the URI that an agent's certificate contains among the subject's alternative names."""
    return f"everstep://{fleet}/{node_id}"
