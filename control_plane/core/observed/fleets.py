"""The specification of a fleet, its Auto Scaling group and nodes, and the input of one decision about the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from control_plane.core.observed.causes import Reason
from control_plane.core.observed.facts import Requested
from control_plane.core.observed.jobs import Departure, Exclusion
from control_plane.core.observed.nodes import BurnIn, NodeObserved
from control_plane.core.observed.rolls import FleetRoll, RollProgress
from control_plane.core.observed.specs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.core.states import LAUNCHED_JOBS, JobState, NodeState
from everstep.protocol.ids import FleetName, JobName, NodeId, RunId
from everstep.protocol.plan import SourceArchive


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Settings of a registered fleet, as the fleet loop reads them from the database."""

    name: FleetName
    group: str
    min_node_count: int
    spare_count: int
    spare_probability: float | None = None
    """The probability that the user wants for a free spare when a node fails.

    If this field is set, the fleet ignores `spare_count`.
    """
    is_deleting: bool = False
    """Whether a user requested the deletion.

    The fleet terminates all nodes, then the control plane deletes the fleet.
    """
    is_blindness_lifted: bool = False
    """Whether a person confirmed that the silent nodes are lost.

    The fleet then terminates nodes although most of its agents are silent. The confirmation ends when most agents
    report again.
    """
    holds_failed_instances: bool = False
    """Whether the fleet keeps failed instances for inspection instead of terminating them.

    The fleet holds an instance only if the group's MaxSize still leaves room for the nodes that jobs need.
    """
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR


Vacancies: TypeAlias = tuple[tuple[float, int], ...]
"""Vacancies of a group, oldest first: instances that the group desires and does not have.

Each pair contains the Unix time since which these instances are missing, and their number.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory:
    """Failures and replacements of a fleet's nodes so far, from which `core.spares` computes the number of spares."""

    node_seconds: float = 0.0
    """Time that the fleet's nodes have worked for jobs, summed over nodes."""
    lost_node_count: int = 0
    """Number of nodes that jobs lost during `node_seconds`, because the nodes failed or AWS reclaimed them."""
    replacement_count: int = 0
    replacement_seconds: float = 0.0
    """Total duration of the `replacement_count` replacements.

    Each duration starts when the group lacks an instance and ends when the new instance's agent connects. It includes
    the wait for capacity.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance, as its Auto Scaling group lists it."""

    node_id: NodeId
    is_leaving: bool
    awaits_termination: bool
    lifecycle_state: str = ""

    @property
    def counts(self) -> bool:
        """Whether Auto Scaling counts the instance towards the desired capacity: it neither leaves nor stands by."""
        return not self.is_leaving and not self.lifecycle_state.startswith(("Standby", "EnteringStandby"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObserved:
    """The Auto Scaling group of a fleet, as AWS reports it."""

    desired_count: int
    min_size: int
    max_size: int
    members: tuple[GroupMember, ...]
    termination_hooks: tuple[str, ...]
    drift: tuple[str, ...]
    launch_failure: str = ""
    """AWS's reason for the newest failed launch. Empty if a later launch succeeded."""
    is_short: bool = False
    """Whether the newest launch failed because AWS has too few instances of the type."""
    hook_seconds: float = 60.0
    """Timeout, in seconds, of the lifecycle hooks that hold terminating instances."""
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
    zone: str = ""
    """The group's only Availability Zone. Empty if the group has several, or launches without a launch template."""
    unprotected: tuple[NodeId, ...] = ()
    """Instances in service, sorted, that Auto Scaling may terminate because they lack protection from scale-in."""

    @property
    def is_launch_suspended_by_person(self) -> bool:
        """Whether a person suspended the group's launches. Everstep resumes only launches that AWS suspended."""
        return self.launch_suspension is not None and not self.is_suspension_administrative

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """The ids of the instances that the Auto Scaling group contains and is not terminating."""
        return tuple(member.node_id for member in self.members if not member.is_leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A fleet's newest call of LaunchInstances, as the control plane stored it before the call."""

    key: str
    """The call's idempotency key. The ClientToken is its digest."""
    count: int
    desired_count: int
    """Desired capacity that the group has after the call."""
    since: float
    """Time of AWS's answer, or of the first attempt while `is_open`, in Unix seconds."""
    is_open: bool = False
    """Whether the outcome is unknown: AWS has not answered, or the control plane ended before it stored the answer."""
    is_refused: bool = False
    """Whether AWS refused the call. If neither `is_open` nor `is_refused` is set, AWS executed the call."""


class Hold(StrEnum):
    """The reason for which a fleet holds a node, that is, neither uses nor terminates it.

    - UNREACHABLE: the node's agent is silent. The hold ends when the agent reports again and no job uses the node.
    - DISTRUSTED: the node is probably faulty, but no evidence permits its termination. A person ends the hold.
    - INSPECTION: the node failed, and its fleet keeps failed instances. A person ends the hold.
    - PERSON: a person wants to keep the node. A person ends the hold.
    """

    UNREACHABLE = "unreachable"
    DISTRUSTED = "distrusted"
    INSPECTION = "inspection"
    PERSON = "person"


class HoldRelease(StrEnum):
    """A person's decision about a held node: return it to service, or terminate it."""

    RETURN = "return"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node's row in the database, as decisions about its fleet read and change it."""

    node_id: NodeId
    state: NodeState
    run: RunId | None
    reason: Reason
    created_at: float
    wanted_at: float | None = None
    """Unix time since which the group lacked the instance that later became this node.

    None if the fleet loop did not observe that an instance was missing.
    """
    since: float = 0.0
    """Time at which the node entered its current state, in Unix seconds."""
    hold: Hold | None = None
    """Reason for holding the node. Set only in state HELD."""
    replaced_at: float | None = None
    """Time at which the fleet requested a replacement for the node. None before the request."""
    release: HoldRelease | None = None
    """A person's decision about a held node. None without a decision."""
    request: Requested | None = None
    """Pending request for this node, by a person, or by a roll (which reboots or replaces all nodes), or None."""
    connected_at: float | None = None
    """Time at which the node's agent last connected, in Unix seconds."""
    evidence_at: float | None = None
    """Unix time at which the upload of the node's logs to S3 was complete. None before the end of the upload."""
    burn_in: BurnIn | None = None
    """Tests of the node. None before the first order to test it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A job that has not ended, with the facts that decisions about its fleet use."""

    job: JobName
    run: RunId
    state: JobState
    node_count: int
    """Number of nodes that the job requests."""
    priority: int
    created_at: float
    least_node_count: int = 0
    """Smallest number of nodes with which the job starts and continues. 0 means `node_count`."""
    most_node_count: int = 0
    """Number of nodes up to which the job grows. 0 means `node_count`."""
    member_count: int = 0
    """Number of nodes of the next generation if it is already decided, else of the newest generation.

    0 before the first generation.
    """
    smaller_from: float | None = None
    """Unix time from which a waiting job starts with `least_node_count` nodes. None if it waits for all nodes."""
    exclusions: tuple[Exclusion, ...] = ()
    source: SourceArchive | None = None
    """The source archive that nodes need before their ranks can start."""
    project: str = ""
    quota: int | None = None
    """Limit for the nodes of this fleet that all jobs of the project hold together. None means no limit."""
    is_paused: bool = False
    """Whether a person paused the job. The fleet then assigns no nodes to the job while it is in the queue."""
    is_taken_over: bool = False
    """Whether a person has taken the job over (TakeOverTrainingJob).

    The fleet neither assigns nodes to the job nor removes nodes from it. Only AWS can remove nodes.
    """
    is_preemptible: bool = False
    """Whether a job of higher priority may make this job pause or continue on fewer nodes."""
    is_settled: bool = False
    """Whether the job trains without an open incident, and its newest generation has committed a new step."""
    not_before: float | None = None
    no_pause_before: float | None = None
    moves: tuple[Departure, ...] = ()
    """Nodes that the job should give up.

    While the job trains, the fleet assigns one additional node for each of these nodes.
    """
    avoided: tuple[NodeId, ...] = ()
    """Nodes that the job gave up to test whether they caused its failures.

    The fleet prefers other nodes for this job.
    """

    def needed_count(self, now: float) -> int:
        """Return the number of nodes that the job needs to start or continue at `now` (Unix seconds)."""
        least = self.least_node_count or self.node_count
        if self.state in LAUNCHED_JOBS:
            most = max(self.node_count, self.most_node_count)
            return min(max(self.member_count or self.node_count, least), most)
        return least if self.smaller_from is not None and now >= self.smaller_from else self.node_count

    def claim_count(self, now: float) -> int:
        """Return the number of nodes that the fleet reserves for the job before elastic jobs may grow.

        The result is `node_count`, or the current number of nodes of a job that has grown beyond `node_count`.
        """
        return max(self.node_count, self.needed_count(now))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """The input of one decision about a fleet, except its specification (`FleetSpec`) and the `Policy`."""

    group: GroupObserved
    records: tuple[NodeRecord, ...]
    nodes: Mapping[NodeId, NodeObserved]
    jobs: tuple[FleetJob, ...]
    """All jobs of the fleet that have not ended."""
    history: FleetHistory = FleetHistory()
    vacancies: Vacancies = ()
    """The vacancies of the group (missing instances), as the last decision about the fleet stored them."""
    replaced: tuple[float, ...] = ()
    """Unix times at which the fleet requested replacements for nodes that it took out of service.

    Contains at least the times of the last hour, also of replacements that a person requested. Instances that AWS ended
    or will end, and nodes that a roll replaces, do not count.
    """
    failed_join_count: int = 0
    """Number of consecutive instances that ended because their agents did not connect in time."""
    rebooted: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Time at which EC2 accepted the reboot, in Unix seconds, for nodes in state REBOOTING.

    If a REBOOTING node has no entry, the fleet must still request its reboot.
    """
    launch: LaunchRecord | None = None
    """The fleet's newest call of LaunchInstances. None before the first."""
    roll: FleetRoll | None = None
    """The fleet's newest roll (replacement or reboot of all nodes), which may have ended. None without a roll."""
    roll_progress: RollProgress | None = None
    """The stored progress of the newest roll, or of an earlier roll if the newest roll has just been requested."""
