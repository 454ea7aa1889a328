"""A fleet's specification, its group and nodes as stored, and the input of one pass of its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from control_plane.core.observed.jobs import DEFAULT_REPLACEMENTS_PER_HOUR, Departure, Exclusion
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.states import JobState, NodeState
from everstep.protocol.ids import FleetName, JobName, NodeId, RunId
from everstep.protocol.plan import SourceArchive


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """A registered fleet."""

    name: FleetName
    group: str
    min_node_count: int
    spare_count: int
    spare_probability: float | None = None
    """Instead of a count: how probable it has to be that a spare is free when a failure comes."""
    is_deleting: bool = False
    """A user asked for its end: all nodes are ended, then the fleet is forgotten."""
    is_blindness_lifted: bool = False
    """A person has said that who is silent is gone: most of the fleet being silent freezes nothing, until sight returns."""
    holds_failed_instances: bool = False
    """Instances that would be ended for a fault are kept running for inspection, as long as that takes nobody's place."""
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR


Vacancies: TypeAlias = tuple[tuple[float, int], ...]
"""The empty places of a group: since when (Unix seconds), and how many since then; the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory:
    """What a fleet has seen of failures and replacements."""

    node_seconds: float = 0.0
    """How long its nodes have worked for jobs, all together."""
    lost_node_count: int = 0
    """Nodes that its jobs have lost in that time: that failed, or that AWS took."""
    replacement_count: int = 0
    replacement_seconds: float = 0.0
    """How long so many instances took, all together, from when the group lacked them until their agents dialled in: with the wait for capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance as its group lists it."""

    node_id: NodeId
    is_leaving: bool
    awaits_termination: bool
    lifecycle_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObserved:
    """The Auto Scaling group behind a fleet."""

    desired_count: int
    min_size: int
    max_size: int
    members: tuple[GroupMember, ...]
    termination_hooks: tuple[str, ...]
    drift: tuple[str, ...]
    launch_failure: str = ""
    """Why the newest launch failed, in AWS's words; empty where none has failed since the last that succeeded."""
    hook_seconds: float = 60.0
    """How long the terminating hooks hold an instance."""
    failed_at: float | None = None
    """When that was, Unix seconds."""
    failing_since: float | None = None
    """When the first one failed since the last that succeeded, Unix seconds; there where `failed_at` is."""
    launch_suspension: str | None = None
    """AWS's reason while the group's Launch process is suspended; None while it is not."""
    is_suspension_administrative: bool = False
    """AWS itself suspended it, after launches had failed for long."""

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """The members that do not leave it."""
        return tuple(member.node_id for member in self.members if not member.is_leaving)


class Hold(StrEnum):
    """Why a node is held.

    UNREACHABLE: until it is heard again and works for nobody. DISTRUSTED: what it did speaks against it and nothing
    allows to end it; until a person releases it. INSPECTION: it failed and its fleet keeps failed instances; until a
    person releases it. PERSON: a person wants it kept; until one releases it.
    """

    UNREACHABLE = "unreachable"
    DISTRUSTED = "distrusted"
    INSPECTION = "inspection"
    PERSON = "person"


class NodeRequest(StrEnum):
    """What a person wants done with a node; its job leaves it first, at an agreed stop.

    DRAIN: it is held. REPLACE: its instance is ended and another one comes. REBOOT: it works again after a reboot.
    HOLD: as DRAIN, of a node that works for nobody.
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
    """Since when its group had a place for it; None where nobody saw that."""
    since: float = 0.0
    """When it came into its state."""
    hold: Hold | None = None
    """Why it is HELD."""
    replaced_at: float | None = None
    """When another one was asked for in its place."""
    release: Literal["", "return", "terminate"] = ""
    """What a person wants of a held node."""
    request: NodeRequest | None = None
    """What a person wants of it and has not got yet."""
    request_words: str = ""
    connected_at: float | None = None
    """When its agent last dialled in."""
    evidence_at: float | None = None
    """When all that is to be kept of it was in S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A live job as its fleet sees it."""

    job: JobName
    run: RunId
    state: JobState
    node_count: int
    priority: int
    created_at: float
    exclusions: tuple[Exclusion, ...] = ()
    source: SourceArchive | None = None
    """What its nodes need before its ranks can start."""
    project: str = ""
    quota: int | None = None
    """Nodes of this fleet that all jobs of its project may hold together; None: any."""
    is_paused: bool = False
    """A person paused it: it waits for nobody's nodes."""
    is_taken_over: bool = False
    """A person looks after it: it is given nothing and loses nothing but what AWS takes."""
    may_pause: bool = False
    """It is preemptible and trains, nothing is wrong with it, and saving has been seen to work."""
    not_before: float | None = None
    no_pause_before: float | None = None
    moves: tuple[Departure, ...] = ()
    """Nodes that it is to leave; while it trains, another one is given to it for each."""
    avoided: tuple[NodeId, ...] = ()
    """Nodes that it was moved away from: others are given to it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """Everything that a fleet's decision may look at."""

    group: GroupObserved
    records: tuple[NodeRecord, ...]
    nodes: Mapping[NodeId, NodeObserved]
    jobs: tuple[FleetJob, ...]
    """All that have not ended."""
    history: FleetHistory = FleetHistory()
    vacancies: Vacancies = ()
    """As the pass before left them."""
    replaced: tuple[float, ...] = ()
    """When nodes were replaced by Everstep's own verdict, over the last hour at least."""
    failed_join_count: int = 0
    """How many instances were replaced because they did not join, of those that came after the newest one that did; all of them are gone."""
    rebooted: Mapping[NodeId, float] = field(default_factory=dict)
    """When EC2 was known to have taken the reboot that a row is REBOOTING for, Unix seconds; who is missing is still to be asked for."""
