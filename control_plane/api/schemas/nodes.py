"""API models: nodes, and the operations that users can request for a node."""

from __future__ import annotations

from datetime import datetime

from control_plane.accounts.held_nodes import HoldDecision
from control_plane.api.schemas.common import Request, Shape, ShortText
from control_plane.api.schemas.fleets import RankMemory
from control_plane.api.schemas.jobs import Condition
from control_plane.core.observed.facts import NodeRequest
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Remedy
from control_plane.core.states import NodeState
from everstep.protocol.agent_messages import BurnInOutcome


class NodeIncident(Shape):
    """One entry of a node's history: an incident in which the node was involved."""

    incident_id: str
    """The id of a job's incident, or `fleet-…` if the node had no job."""
    time: datetime
    cause: str
    """Cause of the incident: `node_unreachable`, `agent_lost` …, or a fault code with its number: `gpu_xid 79`."""
    evidence: str
    remedy: Remedy


class HoldAdvice(Shape):
    """Everstep's recommendation to a person about a held node: a node that is kept out of use."""

    decision: HoldDecision
    description: str
    """One or two imperative sentences that say what to do and why."""
    command: str
    """The command line with which the person follows the advice."""
    further_commands: list[str]
    """Alternative commands after the inspection. The person runs one of them. Empty unless Decision is Inspect."""


class ReleaseNodeRequest(Request):
    """Ends the hold of a node, that is, the time during which Everstep keeps the node out of use."""

    terminate: bool = False
    """True: terminate the instance. False: use the node again and ignore its earlier failures."""


class NodeOperation(Request):
    """Base class of the requests with which a person asks for an operation on a node."""

    reason: ShortText = ""
    """The person's reason for the request.

    It appears with the node, in the incident of its job, and in the node's history.
    """


class DrainNodeRequest(NodeOperation):
    """Moves a node's job to another node, and keeps the drained node out of use."""


class ReplaceNodeRequest(NodeOperation):
    """Terminates a node's instance, so that another instance replaces it."""


class RebootNodeRequest(NodeOperation):
    """Reboots a node."""


class HoldNodeRequest(NodeOperation):
    """Request to keep an idle node out of use."""


class ResetNodeSessionRequest(NodeOperation):
    """Permits a node to join again after its agent lost its session."""


class NodeMemory(Shape):
    """Memory of a node and of its ranks, from the agent's last report."""

    used_bytes: int
    available_bytes: int
    """Memory that can be allocated now without swapping."""
    total_bytes: int
    """Memory of the machine, or the limit of the cgroup of agent and ranks if that is lower."""
    cgroup_limit_bytes: int | None
    """Memory limit of the cgroup of agent and ranks. Absent if no cgroup limit is below the machine's memory."""
    ranks: list[RankMemory]
    """Memory of the running ranks, by rank."""


class NodeTest(Shape):
    """The result of one test of a node."""

    name: str
    outcome: BurnInOutcome
    """`unknown` if the test could not run to its end."""
    rate: int | None
    """Bytes per second; for a matmul, floating-point operations per second. Absent if the test measures no rate."""
    text: str
    """Why the test failed or could not run, after the partner of an all-reduce. Empty if a node's own test passed."""


class NodeBurnIn(Shape):
    """The newest test results of a node, which the node's agent measured."""

    time: datetime
    level: int
    """Level of DCGM's diagnostics: 1 after the boot, 3 on an idle spare."""
    seconds: float
    tests: list[NodeTest]


class Node(Shape):
    """An EC2 instance of a fleet, with its agent."""

    node_id: str
    """The EC2 instance id."""
    fleet_name: str
    node_status: NodeState
    hold: Hold | None
    """Reason why the node is held.

    A held node waits for ReleaseNode. The hold of an unreachable node also ends once the node's agent reports again
    and no job uses the node.
    """
    hold_advice: HoldAdvice | None
    """The advice for a held node. Absent if the node is not held."""
    request: NodeRequest | None
    """A user's request that is not completed yet. ReleaseNode cancels it."""
    request_reason: str | None
    """The person who made the request, and the reason that the person entered."""
    connected: bool
    warm: bool
    """Whether ranks can start on this node without importing their libraries first.

    A job gets a spare that is not warm only if no warm spare is left.
    """
    training_job_name: str | None
    address: str
    memory_bytes: int
    """Memory of the node that slots, and thereby snapshots and replicas, may use."""
    memory: NodeMemory | None
    """Memory of the node and of its ranks. Absent while the agent is not connected, or before its first measurement."""
    instance_type: str
    availability_zone: str
    failure_domain: str | None
    """The EC2 network node that the instance is attached to.

    Absent if AWS has not reported one. AWS does not report it for all instance types.
    """
    image_id: str | None
    """The machine image that the instance runs. Absent until AWS has reported it."""
    image_creation_time: datetime | None
    """Absent until AWS has reported it, and for an image that is deregistered or that the account may not use."""
    agent_version: str
    refused_message_count: int
    """Number of the agent's messages that the server of the node's fleet rejected since the server's start.

    Rejected messages are malformed, too long, or contain the id of another node.
    """
    refused_session_count: int
    """Number of connections that the agent rejected or closed since its start, because of an invalid message.

    The agent's ranks and other agents opened these connections. A restart of ranks causes a few rejections. If the
    number keeps growing, read the agent's log.
    """
    exposure: str | None
    """Warning about data of other jobs or of the node that a job's code can read on this node.

    The sentence names the agent's files, the instance's metadata, or both. Absent if a job's code can read neither, and
    until the agent has reported.
    """
    reason: str
    conditions: list[Condition]
    """Current problems that the agent reports about the node and about its job's work on the node.

    Empty while the agent is not connected.
    """
    burn_in: NodeBurnIn | None
    """Absent until the node has been tested."""
    incidents: list[NodeIncident]
    """The node's history, oldest entry first. Only in DescribeNode."""
    creation_time: datetime
    connection_time: datetime | None
    end_time: datetime | None


class ListNodesResponse(Shape):
    """A page of nodes, oldest first."""

    nodes: list[Node]
    next_token: str | None = None
