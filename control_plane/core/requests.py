"""What people ask to be done with nodes: whether it can be, and why not.

    DrainNode    assigned: its job leaves it at an agreed stop (`core.moves`) ──▶ spare ──▶ held, for a person
    RebootNode                                   likewise                     ──▶ spare ──▶ rebooted ──▶ spare
    ReplaceNode                                  likewise                     ──▶ spare ──▶ its instance is ended, another one comes
                 of a node that has not joined                                          ──▶ likewise
    HoldNode     of a node that works for nobody                                        ──▶ held, for a person

A request is a column of the node's row until it is done; the fleet loop does it once nobody works there, and gives the
node to nobody meanwhile.

Invariant: pure. What is refused here would harm a job or could not be done; what has become impossible since is waited
for, never forced.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.fleets import Hold, NodeRequest
from control_plane.core.states import FleetStatus, NodeState

_ENDING = (NodeState.DRAINING, NodeState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A node and what is around it, as stored."""

    node_id: str
    state: NodeState
    hold: Hold | None
    request: NodeRequest | None
    fleet_status: FleetStatus
    fleet_reason: str
    spare_count: int
    """Spares that nobody wants something of."""
    node_count: int
    """Of the fleet, that have not ended."""
    max_node_count: int
    job_name: str = ""
    taken_over_by: str = ""
    """Who has taken its job over, if anybody."""


def refusal(asked: NodeRequest, standing: Standing) -> str:
    """Return why something cannot be done with a node, or nothing.

    Args:
        asked: what a person wants.
        standing: the node, its fleet and its job.

    Returns:
        A sentence; empty where it can be done.
    """
    node = f"the node {standing.node_id}"
    if standing.state in _ENDING:
        return f"{node} is {standing.state}: it ends anyway"
    if standing.state is NodeState.JOINING and asked is not NodeRequest.REPLACE:
        return f"{node} has not joined yet"
    if standing.state is NodeState.REBOOTING:
        return f"{node} is being rebooted"
    if standing.request is not None and standing.request is not asked:
        return f"{node} is already to be: {standing.request}; everstep nodes release {standing.node_id} calls that off"
    if standing.fleet_status is FleetStatus.DELETING:
        return f"the fleet of {node} is being deleted"
    if standing.fleet_status is FleetStatus.FROZEN and asked is not NodeRequest.HOLD:
        return f"the fleet of {node} may not act now: {standing.fleet_reason}"
    if standing.state is NodeState.HELD and asked in (NodeRequest.DRAIN, NodeRequest.REBOOT):
        return f"{node} is held and works for nobody: release it first"
    return _refusal_of_job(asked, standing, node) if standing.state is NodeState.ASSIGNED else ""


def _refusal_of_job(asked: NodeRequest, standing: Standing, node: str) -> str:
    if asked is NodeRequest.HOLD:
        return (
            f"{node} works for {standing.job_name}: everstep nodes drain {standing.node_id} lets its ranks move first"
        )
    if standing.taken_over_by:
        return (
            f"{node} works for {standing.job_name}, which {standing.taken_over_by} has taken over: it is to be "
            "handed back first"
        )
    if standing.spare_count == 0 and standing.node_count >= standing.max_node_count:
        return (
            f"{node} works for {standing.job_name} and no other one can take its place: there is no spare, and "
            "the fleet has all "
            f"{standing.max_node_count} nodes that its group may have"
        )
    return ""


def in_words(asked: NodeRequest, node_id: str, who: str, why: str) -> str:
    """Return what a person asked for, as reasons and incidents say it."""
    return f"a person asked to {asked} {node_id} ({who})" + (f": {why}" if why else "")
