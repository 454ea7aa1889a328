"""People's requests to drain, reboot, replace or hold a node: whether the API accepts a request, or why it refuses.

    request       node             result
    DrainNode     assigned         given up at an agreed stop (`core.moves`) ──▶ spare ──▶ held until a ReleaseNode
    RebootNode    assigned         given up in the same way ──▶ spare ──▶ rebooted ──▶ spare
    ReplaceNode   assigned         given up in the same way ──▶ spare ──▶ terminated, and another instance is launched
    ReplaceNode   not joined yet   terminated, and another instance is launched
    HoldNode      without a job    held until a ReleaseNode

Invariant: pure. A stored request stays pending until the fleet can fulfil it, and the node gets no other job meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.causes import Reason, RefusalKind, RequestRefused
from control_plane.core.observed.facts import NodeRequest
from control_plane.core.observed.fleets import Hold
from control_plane.core.states import FleetStatus, NodeState

_ENDING = (NodeState.DRAINING, NodeState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The stored facts from which `refusal` decides about a person's request."""

    node_id: str
    state: NodeState
    hold: Hold | None
    request: NodeRequest | None
    fleet_status: FleetStatus
    fleet_reasons: tuple[Reason, ...]
    spare_count: int
    node_count: int
    max_node_count: int
    job_name: str = ""
    taken_over_by: str = ""


def refusal(asked: NodeRequest, disposition: RequestContext) -> RequestRefused | None:
    """Return why a request for a node is refused, or None if the fleet can fulfil the request."""
    why = _why_refused(asked, disposition)
    if why is None:
        return None
    return RequestRefused(
        why=why,
        node_id=disposition.node_id,
        state=disposition.state,
        request=disposition.request,
        job=disposition.job_name,
        by=disposition.taken_over_by,
        max_node_count=disposition.max_node_count,
        frozen=disposition.fleet_reasons,
    )


def _why_refused(asked: NodeRequest, disposition: RequestContext) -> RefusalKind | None:
    if disposition.state in _ENDING:
        return RefusalKind.ENDING
    if disposition.state is NodeState.JOINING and asked is not NodeRequest.REPLACE:
        return RefusalKind.NOT_JOINED
    if disposition.state is NodeState.REBOOTING:
        return RefusalKind.REBOOTING
    if disposition.request is not None and disposition.request is not asked:
        return RefusalKind.OTHER_REQUEST
    if disposition.fleet_status is FleetStatus.DELETING:
        return RefusalKind.FLEET_DELETED
    if disposition.fleet_status is FleetStatus.FROZEN and asked is not NodeRequest.HOLD:
        return RefusalKind.FLEET_FROZEN
    if disposition.state is NodeState.HELD and asked in (NodeRequest.DRAIN, NodeRequest.REBOOT):
        return RefusalKind.HELD
    if disposition.state is not NodeState.ASSIGNED:
        return None
    if asked is NodeRequest.HOLD:
        return RefusalKind.WORKS
    if disposition.taken_over_by:
        return RefusalKind.TAKEN_OVER
    if disposition.spare_count == 0 and disposition.node_count >= disposition.max_node_count:
        return RefusalKind.NO_REPLACEMENT
    return None
