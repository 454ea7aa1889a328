"""Shapes of the API: nodes and what users can order for a node."""

from __future__ import annotations

from datetime import datetime

from control_plane.api.schemas.common import Request, Shape, ShortText
from control_plane.api.schemas.fleets import RankMemory
from control_plane.api.schemas.jobs import Condition
from control_plane.core.observed.fleets import Hold, NodeRequest
from control_plane.core.observed.nodes import Remedy
from control_plane.core.states import NodeState


class NodeIncident(Shape):
    """A line of a node's history: it had its part in an incident."""

    incident_id: str
    """Of a job; `fleet-…` where no job had the node."""
    time: datetime
    cause: str
    """`node_unreachable`, `agent_lost` … or a fault's code with its number: `gpu_xid 79`."""
    evidence: str
    remedy: Remedy


class ReleaseNodeRequest(Request):
    """What becomes of a held node."""

    terminate: bool = False
    """End the instance; else it works again, and its history counts from now on."""


class NodeOperation(Request):
    """Something that a person wants done with a node."""

    reason: ShortText = ""
    """Why; told with the node, its job's incident and in the history."""


class DrainNodeRequest(NodeOperation):
    """A node that its job is to leave, and that is kept."""


class ReplaceNodeRequest(NodeOperation):
    """A node whose instance is to be ended, another one coming."""


class RebootNodeRequest(NodeOperation):
    """A node that is to be rebooted."""


class HoldNodeRequest(NodeOperation):
    """An idle node that is to be kept out of use."""


class ResetNodeSessionRequest(NodeOperation):
    """A node whose agent has lost its session."""


class NodeMemory(Shape):
    """Memory of a node and of its ranks, as its agent reported last."""

    used_bytes: int
    available_bytes: int
    """What can be allocated now without swapping."""
    total_bytes: int
    """What agent and ranks can have at most: of the machine, or of their cgroup where that has a lower limit."""
    cgroup_limit_bytes: int | None
    """Absent where the machine is the limit."""
    ranks: list[RankMemory]
    """Living ranks, in order."""


class Node(Shape):
    """An EC2 instance of a fleet and its agent."""

    node_id: str
    """The EC2 instance id."""
    fleet_name: str
    node_status: NodeState
    hold: Hold | None
    """Why it is held; all but unreachable ones wait for ReleaseNode."""
    request: NodeRequest | None
    """What a person asked for and is still to be done; ReleaseNode calls it off."""
    request_reason: str | None
    """Who asked, and why."""
    connected: bool
    warm: bool
    """Its ranks start without importing first; a spare that is not warm, yet or at all, is given to a job only when no other is there."""
    training_job_name: str | None
    address: str
    memory_bytes: int
    """What snapshots may take."""
    memory: NodeMemory | None
    """Absent while its agent is not connected, or has not measured it yet."""
    instance_type: str
    availability_zone: str
    failure_domain: str | None
    """The network node that its instance hangs on; absent while AWS has not told, which it does not for every instance type."""
    agent_version: str
    refused_message_count: int
    """Messages of its agent that were not decodable, too long or of another node, since this server started."""
    refused_session_count: int
    """Sessions of other agents and of ranks that its agent refused or closed for what they said, since the agent started. A few around a restart of
    ranks are stale ones; more are worth a look at its log."""
    exposure: str | None
    """What a job's code can get at on this node that is not the job's, in a sentence: the agent's files, the instance's metadata. Absent where ranks
    have a user of their own that is kept from both, and while the agent has not reported."""
    reason: str
    conditions: list[Condition]
    """What its agent reports as wrong now, with the node and with its job's work there.

    Empty while the agent is not connected.
    """
    incidents: list[NodeIncident]
    """Its history, oldest line first; listed by DescribeNode alone."""
    creation_time: datetime
    connection_time: datetime | None
    end_time: datetime | None


class ListNodesResponse(Shape):
    """All nodes asked for, oldest first."""

    nodes: list[Node]
    next_token: str | None = None
