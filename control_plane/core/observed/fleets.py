"""The specification of a fleet, its stored group and nodes, and the input of one pass of its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from control_plane.core.observed.jobs import DEFAULT_REPLACEMENTS_PER_HOUR, Departure, Exclusion
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.states import LAUNCHED_JOBS, JobState, NodeState
from everstep.protocol.ids import FleetName, JobName, NodeId, RunId
from everstep.protocol.plan import SourceArchive


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Settings of a registered fleet, as a pass reads them from the database."""

    name: FleetName
    group: str
    min_node_count: int
    spare_count: int
    spare_probability: float | None = None
    """The wanted probability that a failure finds a free spare. If it is set, the fleet ignores `spare_count`."""
    is_deleting: bool = False
    """Whether a user requested the deletion.

    The fleet terminates all nodes, then the control plane deletes the fleet.
    """
    is_blindness_lifted: bool = False
    """Whether a person confirmed that the silent nodes are lost.

    A fleet whose agents are mostly silent is then not frozen. The confirmation ends when most agents report again.
    """
    holds_failed_instances: bool = False
    """Whether the fleet keeps failed instances for inspection instead of terminating them.

    The fleet holds an instance only if the group's MaxSize still leaves room for the nodes that jobs need.
    """
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR


Vacancies: TypeAlias = tuple[tuple[float, int], ...]
"""Vacancies of a group, oldest first: instances that the group desires and does not have.

Each pair contains the start in Unix seconds and the number of vacancies.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory:
    """Failures and replacements that a fleet has observed."""

    node_seconds: float = 0.0
    """Time that the fleet's nodes have worked for jobs, summed over nodes."""
    lost_node_count: int = 0
    """Nodes that jobs lost in the time of `node_seconds`, because they failed or AWS reclaimed them."""
    replacement_count: int = 0
    replacement_seconds: float = 0.0
    """Total duration of the `replacement_count` replacements.

    Each replacement lasts from the start of the vacancy until the agent connects, including the wait for capacity.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance as its group lists it."""

    node_id: NodeId
    is_leaving: bool
    awaits_termination: bool
    lifecycle_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObserved:
    """The Auto Scaling group of a fleet."""

    desired_count: int
    min_size: int
    max_size: int
    members: tuple[GroupMember, ...]
    termination_hooks: tuple[str, ...]
    drift: tuple[str, ...]
    launch_failure: str = ""
    """AWS's reason for the newest failed launch. Empty if a later launch succeeded."""
    hook_seconds: float = 60.0
    """Timeout of the terminating hooks in seconds."""
    failed_at: float | None = None
    """Time of the newest failed launch, in Unix seconds. None while launches succeed."""
    failing_since: float | None = None
    """Time of the first failed launch since the last successful one, in Unix seconds.

    Set if and only if `failed_at` is set.
    """
    launch_suspension: str | None = None
    """AWS's reason for the suspension of the group's Launch process. None if the process is not suspended."""
    is_suspension_administrative: bool = False
    """Whether AWS suspended the launches by itself, after a long period of failures."""

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """The members that are not terminating."""
        return tuple(member.node_id for member in self.members if not member.is_leaving)


class Hold(StrEnum):
    """Reason for holding a node.

    - UNREACHABLE: the node's agent is silent. The hold ends when the agent reports again and no job uses the node.
    - DISTRUSTED: the node is under suspicion, but no evidence permits its termination. A person ends the hold.
    - INSPECTION: the node failed, and its fleet keeps failed instances. A person ends the hold.
    - PERSON: a person wants to keep the node. A person ends the hold.
    """

    UNREACHABLE = "unreachable"
    DISTRUSTED = "distrusted"
    INSPECTION = "inspection"
    PERSON = "person"


class NodeRequest(StrEnum):
    """A person's request for a node.

    If a job uses the node, the job first gives it up at an agreed stop.

    - DRAIN: the fleet holds the node.
    - REPLACE: the fleet terminates the instance and launches another one.
    - REBOOT: EC2 reboots the node, and the node returns to service.
    - HOLD: the fleet holds a node that works for no job.
    """

    DRAIN = "drain"
    REPLACE = "replace"
    REBOOT = "reboot"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A row of the fleet's node table."""

    node_id: NodeId
    state: NodeState
    run: RunId | None
    reason: str
    created_at: float
    wanted_at: float | None = None
    """Unix seconds at which the group first had the vacancy that this node fills. None if no pass observed it."""
    since: float = 0.0
    """Time at which the node entered its present state, in Unix seconds."""
    hold: Hold | None = None
    """Reason for holding the node. Set only in state HELD."""
    replaced_at: float | None = None
    """Time at which the fleet requested a replacement for the node. None before the request."""
    release: Literal["", "return", "terminate"] = ""
    """A person's decision about a held node: return it to service, or terminate it."""
    request: NodeRequest | None = None
    """A person's request that is not fulfilled yet."""
    request_words: str = ""
    connected_at: float | None = None
    """Time at which the node's agent last connected, in Unix seconds."""
    evidence_at: float | None = None
    """Time at which the upload of the node's logs to S3 was complete. None before the end of the upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A job that has not ended, with the facts that decisions about its fleet use."""

    job: JobName
    run: RunId
    state: JobState
    node_count: int
    """Number of nodes with which the job starts."""
    priority: int
    created_at: float
    most_node_count: int = 0
    """Number of nodes up to which the job grows. 0: `node_count`."""
    member_count: int = 0
    """Number of nodes of the newest generation. 0 before the first one and after a pause."""
    exclusions: tuple[Exclusion, ...] = ()
    source: SourceArchive | None = None
    """The source archive that nodes need before their ranks can start."""
    project: str = ""
    quota: int | None = None
    """Limit for the nodes of this fleet that all jobs of the project hold together. None: no limit."""
    is_paused: bool = False
    """Whether a person paused the job. A paused job in the queue waits for no nodes."""
    is_taken_over: bool = False
    """Whether a person manages the job instead of Everstep.

    The fleet neither assigns nodes to the job nor removes nodes from it. Only AWS can remove nodes.
    """
    may_pause: bool = False
    """Whether the job is preemptible, trains without a fault, and has committed a snapshot in this launch."""
    not_before: float | None = None
    no_pause_before: float | None = None
    moves: tuple[Departure, ...] = ()
    """Nodes that the job should give up.

    While the job trains, the fleet assigns it one additional node for each of these nodes.
    """
    avoided: tuple[NodeId, ...] = ()
    """Nodes that the job has given up. The fleet prefers other nodes for this job."""

    @property
    def claim_count(self) -> int:
        """Number of nodes that no other job receives while this job may hold nodes.

        A job that shrank keeps its claim, so that it grows back. A job that grew keeps the nodes that it uses.
        """
        return max(self.node_count, self.member_count if self.state in LAUNCHED_JOBS else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """The complete input of a fleet's decision."""

    group: GroupObserved
    records: tuple[NodeRecord, ...]
    nodes: Mapping[NodeId, NodeObserved]
    jobs: tuple[FleetJob, ...]
    """All jobs of the fleet that have not ended."""
    history: FleetHistory = FleetHistory()
    vacancies: Vacancies = ()
    """The vacancies of the group after the previous pass."""
    replaced: tuple[float, ...] = ()
    """Times of replacements that Everstep itself decided, over at least the last hour."""
    failed_join_count: int = 0
    """Number of instances that the fleet replaced because they did not join, since the newest instance that joined.

    All these instances have ended.
    """
    rebooted: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Time at which EC2 accepted the reboot, in Unix seconds, for nodes in state REBOOTING.

    For a REBOOTING node without an entry, the fleet must still request the reboot.
    """
