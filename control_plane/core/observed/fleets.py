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
    """The probability that a spare is free when a node fails. It replaces `spare_count` if set."""
    is_deleting: bool = False
    is_blindness_lifted: bool = False
    """Whether a person confirmed that silent nodes are lost although most agents are silent."""
    holds_failed_instances: bool = False
    """Whether the fleet keeps failed instances for inspection, as far as the group's MaxSize has room."""
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR


Vacancies: TypeAlias = tuple[tuple[float, int], ...]
"""Unix times and numbers of the instances that a group desires and does not have, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory:
    """Failures and replacements of a fleet's nodes, from which `core.spares` computes the number of spares."""

    node_seconds: float = 0.0
    """Working time for jobs, summed over nodes."""
    lost_node_count: int = 0
    replacement_count: int = 0
    replacement_seconds: float = 0.0
    """Sum of the times from the lack of an instance to the connection of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance, as its Auto Scaling group lists it."""

    node_id: NodeId
    is_leaving: bool
    awaits_termination: bool
    lifecycle_state: str = ""

    @property
    def counts(self) -> bool:
        """Whether the instance counts towards the desired capacity: it neither leaves nor stands by."""
        return not self.is_leaving and not self.lifecycle_state.startswith(("Standby", "EnteringStandby"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObserved:
    """The Auto Scaling group of a fleet, as AWS reports it. Times are Unix seconds."""

    desired_count: int
    min_size: int
    max_size: int
    members: tuple[GroupMember, ...]
    termination_hooks: tuple[str, ...]
    drift: tuple[str, ...]
    launch_failure: str = ""
    """Empty if a later launch succeeded."""
    is_short: bool = False
    """Whether AWS had too few instances of the type."""
    hook_seconds: float = 60.0
    """Timeout of the lifecycle hooks that hold terminating instances."""
    failed_at: float | None = None
    """None while launches succeed."""
    failing_since: float | None = None
    """The first failed launch since the last success. Set together with `failed_at`."""
    launch_suspension: str | None = None
    is_suspension_administrative: bool = False
    """Whether AWS suspended the launches by itself, after a long period of failures."""
    zone: str = ""
    """The group's only Availability Zone. Empty if the group has several, or launches without a launch template."""
    unprotected: tuple[NodeId, ...] = ()
    """Instances in service, sorted, that lack protection from scale-in."""

    @property
    def is_launch_suspended_by_person(self) -> bool:
        """Whether a person suspended the group's launches. Everstep resumes only launches that AWS suspended."""
        return self.launch_suspension is not None and not self.is_suspension_administrative

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """The instances of the group that it is not terminating."""
        return tuple(member.node_id for member in self.members if not member.is_leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A fleet's newest call of LaunchInstances, as the control plane stored it before the call."""

    key: str
    """The call's idempotency key. The ClientToken is its digest."""
    count: int
    desired_count: int
    since: float
    """Unix seconds of AWS's answer, or of the first attempt while `is_open`."""
    is_open: bool = False
    """Whether AWS has not answered, or the control plane ended before it stored the answer."""
    is_refused: bool = False
    """Whether AWS refused the call. With neither flag, AWS executed it."""


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
    """A node's row in the database, as decisions about its fleet read and change it. Times are Unix seconds."""

    node_id: NodeId
    state: NodeState
    run: RunId | None
    reason: Reason
    created_at: float
    wanted_at: float | None = None
    """Time since which the group lacked this instance. None if the fleet loop did not observe the lack."""
    since: float = 0.0
    """Start of the current state."""
    hold: Hold | None = None
    """Set only in state HELD."""
    replaced_at: float | None = None
    """Time of the request for a replacement."""
    release: HoldRelease | None = None
    request: Requested | None = None
    connected_at: float | None = None
    evidence_at: float | None = None
    """Time at which the node's logs were in S3."""
    burn_in: BurnIn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A job that has not ended, with the facts that decisions about its fleet use. Times are Unix seconds."""

    job: JobName
    run: RunId
    state: JobState
    node_count: int
    priority: int
    created_at: float
    least_node_count: int = 0
    """0 means `node_count`."""
    most_node_count: int = 0
    """0 means `node_count`."""
    member_count: int = 0
    """Nodes of the next generation if decided, else of the newest. 0 before the first."""
    smaller_from: float | None = None
    """Time from which a waiting job starts with `least_node_count` nodes."""
    exclusions: tuple[Exclusion, ...] = ()
    source: SourceArchive | None = None
    project: str = ""
    quota: int | None = None
    """Limit of this fleet's nodes for all jobs of the project together."""
    is_paused: bool = False
    """Whether a person has paused the job. A queued job then gets no nodes."""
    is_taken_over: bool = False
    """Whether a person controls the job. Only AWS can then remove its nodes, and the fleet assigns none."""
    is_preemptible: bool = False
    """Whether a job of higher priority may make this job pause or continue on fewer nodes."""
    is_settled: bool = False
    """Whether the job trains without an open incident, and its newest generation has committed a new step."""
    not_before: float | None = None
    no_pause_before: float | None = None
    moves: tuple[Departure, ...] = ()
    """Nodes that the job should give up. While it trains, the fleet assigns one more node for each."""
    avoided: tuple[NodeId, ...] = ()
    """Nodes that the job gave up to test whether they caused its failures. The fleet prefers others."""

    def needed_count(self, now: float) -> int:
        """Return the number of nodes that the job needs to start or continue at `now` (Unix seconds)."""
        least = self.least_node_count or self.node_count
        if self.state in LAUNCHED_JOBS:
            most = max(self.node_count, self.most_node_count)
            return min(max(self.member_count or self.node_count, least), most)
        return least if self.smaller_from is not None and now >= self.smaller_from else self.node_count

    def claim_count(self, now: float) -> int:
        """Return the number of nodes that the fleet reserves for the job before elastic jobs may grow."""
        return max(self.node_count, self.needed_count(now))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """The input of one decision about a fleet, except its specification (`FleetSpec`) and the `Policy`."""

    group: GroupObserved
    records: tuple[NodeRecord, ...]
    nodes: Mapping[NodeId, NodeObserved]
    jobs: tuple[FleetJob, ...]
    history: FleetHistory = FleetHistory()
    vacancies: Vacancies = ()
    replaced: tuple[float, ...] = ()
    """Unix times of requested replacements in at least the last hour, without ends by AWS and rolls."""
    failed_join_count: int = 0
    """Number of consecutive instances that ended because their agents did not connect in time."""
    rebooted: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Unix times at which EC2 accepted the reboot. A REBOOTING node without an entry still needs its request."""
    launch: LaunchRecord | None = None
    roll: FleetRoll | None = None
    """The newest roll, which may have ended."""
    roll_progress: RollProgress | None = None
    """The progress of the newest roll, or of the one before if a roll has just been requested."""
