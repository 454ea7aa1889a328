"""Shapes of the API: fleets and the contract with their groups."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import (
    MAX_NODE_COUNT,
    MAX_PRICE_USD_PER_HOUR,
    Name,
    Request,
    RoleName,
    Shape,
    Tags,
    Value,
)
from control_plane.api.schemas.jobs import Reliability
from control_plane.core.observed.jobs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.core.states import FleetStatus


class SparePolicy(Request):
    """How many spares are kept, from what the fleet has seen of failures and replacements."""

    probability: float = Field(ge=0.5, le=0.999999)
    """How probable it has to be that a spare is free when a failure comes."""


class GroupChange(Request):
    """Something of an Auto Scaling group that becomes another with its registration."""

    setting: Annotated[str, StringConstraints(max_length=512)]
    """In the words of Auto Scaling's API: `NewInstancesProtectedFromScaleIn`, `LifecycleHooks.everstep-termination`."""
    before: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """As text; absent where there is nothing."""
    after: Annotated[str, StringConstraints(max_length=1024)]
    reason: Value
    """Why it cannot stay as it is."""
    applies: Literal["Now", "Later"]
    """Now: CreateFleet makes it before it answers.

    Later: the fleet's loop does, from its first look at the group on.
    """


class CreateFleetRequest(Request):
    """An Auto Scaling group to be kept as a fleet."""

    fleet_name: Name
    auto_scaling_group_name: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    """It must carry the tag `everstep:fleet`, one Availability Zone and one launch template."""
    spare_count: int = Field(default=1, ge=0, le=MAX_NODE_COUNT)
    spare_policy: SparePolicy | None = None
    """Counts spares instead of SpareCount."""
    min_node_count: int = Field(default=0, ge=0, le=MAX_NODE_COUNT)
    """Nodes kept even when no job runs, spares not included."""
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """What one instance costs you; jobs and incidents are valued at it."""
    hold_failed_instances: bool = False
    """Keep instances that failed running for inspection instead of ending them, as long as that takes nobody's place in the group."""
    max_replacements_per_hour: int = Field(default=DEFAULT_REPLACEMENTS_PER_HOUR, ge=0, le=MAX_NODE_COUNT)
    """Nodes that may be taken out by Everstep's own verdicts and replaced within an hour; what AWS ends is not counted."""
    node_role_name: RoleName | None = None
    """Name of the IAM role that the group's instances run with: their agents join by it (STS).

    Without it they join with a join token.
    """
    allow_drills: bool = False
    """Let administrators break nodes of this fleet on purpose: StartDrill."""
    allow_commands: bool = False
    """Let those who may submit jobs run programs beside their ranks on nodes of this fleet: ExecuteCommand."""
    project: Name | None = None
    tags: Tags = Field(default_factory=dict)
    dry_run: bool = False
    """Check everything, change and create nothing, and answer what would be changed."""
    expected_changes: Annotated[list[GroupChange], Field(max_length=100)] | None = None
    """The Changes of a dry run, as it answered them, that somebody has agreed to: a ConflictException where anything else would be changed."""


class GroupCheck(Shape):
    """Something that an Auto Scaling group has to be by itself."""

    setting: str
    """In the words of Auto Scaling's API."""
    message: str
    """What is there, in a sentence."""


class UpdateFleetRequest(Request):
    """Figures to change; what is left out stays."""

    spare_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    """Ends a SparePolicy, unless one is given as well."""
    spare_policy: SparePolicy | None = None
    min_node_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """Jobs and incidents that have not ended are valued anew; what has ended keeps its figure."""
    hold_failed_instances: bool | None = None
    max_replacements_per_hour: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    node_role_name: RoleName | None = None
    allow_drills: bool | None = None
    allow_commands: bool | None = None


class Fleet(Shape):
    """A registered Auto Scaling group, as wanted and as it is."""

    fleet_name: str
    auto_scaling_group_name: str
    project: str
    fleet_status: FleetStatus
    reason: str
    spare_count: int
    spare_policy: SparePolicy | None
    """Counts spares instead of SpareCount."""
    min_node_count: int
    hold_failed_instances: bool
    max_replacements_per_hour: int
    node_role_name: str | None
    """Absent: agents join with a join token alone."""
    allow_drills: bool
    allow_commands: bool
    max_node_count: int
    """The group's MaxSize."""
    desired_node_count: int
    node_count: int
    connected_node_count: int
    instance_type: str
    availability_zone: str
    price_usd_per_hour: float | None
    accounting_seconds: dict[str, float]
    """Of all its jobs, by bucket."""
    reliability: Reliability
    """Of all its jobs together."""
    incident_count: int
    """Of its jobs; drills are not counted."""
    lost_node_count: int
    """Nodes that its jobs have lost: that failed, or that AWS took.

    None that a person drained, or that a drill struck.
    """
    node_seconds: float
    """How long its nodes have worked for jobs, all together."""
    cost_usd: float | None
    """What that has cost; idle nodes and spares are not in it."""
    drift: list[str]
    """How the group differs from what Everstep needs; freezes destructive actions."""
    tags: dict[str, str]
    creation_time: datetime


class CreateFleetResponse(Shape):
    """The group is a fleet; or, of a dry run, what would become of it."""

    fleet_name: str
    fleet: Fleet | None = None
    """Absent after a dry run."""
    checks: list[GroupCheck]
    """What a group has to be by itself, all of it met: a group that is something else is refused, with the same sentences."""
    changes: list[GroupChange]
    """What was changed of the group, and what will be; of a dry run, what would be.

    Empty where it is as Everstep needs it.
    """


class ListFleetsResponse(Shape):
    """A page of fleets, by name."""

    fleets: list[Fleet]
    next_token: str | None = None


class RankMemory(Shape):
    """What the process of a rank has in memory; the processes that the rank started do not count."""

    rank: int
    resident_bytes: int
    """Pages that the process shares with others count in full."""
    peak_resident_bytes: int
    """The highest ResidentBytes since the process started."""
