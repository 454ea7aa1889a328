"""People's requests to drain, reboot, replace or hold a node: whether the API accepts a request, or why it refuses.

    request       node             result
    DrainNode     assigned         given up at an agreed stop (`core.moves`) ──▶ spare ──▶ held until a ReleaseNode
    RebootNode    assigned         given up in the same way ──▶ spare ──▶ rebooted ──▶ spare
    ReplaceNode   assigned         given up in the same way ──▶ spare ──▶ terminated, and another instance is launched
    ReplaceNode   not joined yet   terminated, and another instance is launched
    HoldNode      without a job    held until a ReleaseNode

The node's row stores the request until it is fulfilled. The fleet loop fulfils the request once no job uses the node.
Until then, the fleet loop assigns the node to no other job.

The API refuses a request that would harm a job or is impossible. If a stored request becomes impossible, it stays
pending until the fleet can fulfil it again.

Invariant: pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.fleets import Hold, NodeRequest
from control_plane.core.states import FleetStatus, NodeState

_ENDING = (NodeState.DRAINING, NodeState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The stored facts from which `refusal` decides about a person's request: the node, its fleet and its job."""

    node_id: str
    state: NodeState
    hold: Hold | None
    request: NodeRequest | None
    fleet_status: FleetStatus
    fleet_reason: str
    spare_count: int
    """Number of the fleet's spares that have no pending request."""
    node_count: int
    """Number of the fleet's nodes that have not ended."""
    max_node_count: int
    job_name: str = ""
    taken_over_by: str = ""
    """The person who manages the node's job instead of Everstep. Empty without such a person."""


def refusal(asked: NodeRequest, standing: RequestContext) -> str:
    """Return why a request for a node is refused, or an empty string.

    Args:
        asked: the kind of the person's request.
        standing: the node, its fleet and its job.

    Returns:
        A sentence. Empty if the fleet can fulfil the request.
    """
    node = f"the node {standing.node_id}"
    if standing.state in _ENDING:
        return f"{node} is already {standing.state}, so its instance is terminated anyway"
    if standing.state is NodeState.JOINING and asked is not NodeRequest.REPLACE:
        return f"{node} has not joined yet"
    if standing.state is NodeState.REBOOTING:
        return f"{node} is rebooting"
    if standing.request is not None and standing.request is not asked:
        return (
            f"{node} already has a pending request: {standing.request}; cancel it with everstep nodes release "
            f"{standing.node_id}"
        )
    if standing.fleet_status is FleetStatus.DELETING:
        return f"the fleet of {node} is being deleted"
    if standing.fleet_status is FleetStatus.FROZEN and asked is not NodeRequest.HOLD:
        return f"the fleet of {node} is frozen: {standing.fleet_reason}"
    if standing.state is NodeState.HELD and asked in (NodeRequest.DRAIN, NodeRequest.REBOOT):
        return f"{node} is held and has no job; release it first"
    return _refusal_of_job(asked, standing, node) if standing.state is NodeState.ASSIGNED else ""


def _refusal_of_job(asked: NodeRequest, standing: RequestContext, node: str) -> str:
    if asked is NodeRequest.HOLD:
        return f"{node} works for {standing.job_name}; everstep nodes drain {standing.node_id} moves the job first"
    if standing.taken_over_by:
        return (
            f"{node} works for {standing.job_name}, which {standing.taken_over_by} has taken over; hand the job back "
            "first"
        )
    if standing.spare_count == 0 and standing.node_count >= standing.max_node_count:
        return (
            f"{node} works for {standing.job_name} and no node can replace it: the fleet has no spare and already "
            f"has its maximum of {standing.max_node_count} nodes"
        )
    return ""


def in_words(asked: NodeRequest, node_id: str, who: str, why: str) -> str:
    """Return a clause that says who requested a node and why, for reason texts and incidents."""
    return f"a user requested to {asked} {node_id} ({who})" + (f": {why}" if why else "")
