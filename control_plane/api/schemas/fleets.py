"""API models: fleets, and the settings that their Auto Scaling groups need."""

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
    ShortText,
    Tags,
    Value,
)
from control_plane.api.schemas.duties import Duty
from control_plane.api.schemas.jobs import Reliability
from control_plane.core.encryption import ReplicaEncryption
from control_plane.core.observed.rolls import RollStatus
from control_plane.core.observed.specs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.core.states import FleetStatus


class SparePolicy(Request):
    """A rule from which Everstep computes the number of spares: a required probability that a spare is free.

    The computation uses the fleet's measured failure rate and replacement times.
    """

    probability: float = Field(ge=0.5, le=0.999999)
    """The probability with which a spare must be free when a failure occurs."""


class GroupChange(Request):
    """A change that CreateFleet makes to one setting of an Auto Scaling group."""

    setting: Annotated[str, StringConstraints(max_length=512)]
    """The name of the setting in Auto Scaling's API.

    Examples are `NewInstancesProtectedFromScaleIn` and `LifecycleHooks.everstep-termination`.
    """
    before: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """The value before the change, as text. Absent if the Auto Scaling group had no value for the setting."""
    after: Annotated[str, StringConstraints(max_length=1024)]
    reason: Value
    """Why Everstep needs the change."""
    applies: Literal["Now", "Later"]
    """When the change takes effect.

    Now: CreateFleet makes the change before it returns. Later: the fleet's loop makes the change once the fleet exists.
    """


class CreateFleetRequest(Request):
    """An Auto Scaling group to register as a fleet."""

    fleet_name: Name
    auto_scaling_group_name: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    """The Auto Scaling group must have the tag `everstep:fleet`, one Availability Zone and one launch template."""
    spare_count: int = Field(default=1, ge=0, le=MAX_NODE_COUNT)
    """Number of nodes that wait for the failure of another node."""
    spare_policy: SparePolicy | None = None
    """The rule that determines the number of spares. If set, SpareCount has no effect."""
    min_node_count: int = Field(default=0, ge=0, le=MAX_NODE_COUNT)
    """Number of nodes that the fleet keeps even if no job runs, in addition to spares."""
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """Your price of one instance per hour. Everstep computes the cost of jobs and incidents from this price."""
    hold_failed_instances: bool = False
    """Whether to keep failed instances running for inspection instead of terminating them.

    Everstep keeps a failed instance only while the Auto Scaling group has room for a replacement.
    """
    max_replacements_per_hour: int = Field(default=DEFAULT_REPLACEMENTS_PER_HOUR, ge=0, le=MAX_NODE_COUNT)
    """Limit of nodes per hour that Everstep replaces because it considers them failed.

    Instances that AWS ends do not count.
    """
    node_role_name: RoleName | None = None
    """Name of the IAM role of the fleet's instances. Their agents authenticate with this role through STS.

    Without a role name, agents need a join token.
    """
    allow_drills: bool = False
    """Whether administrators may inject faults into this fleet's nodes with StartDrill."""
    allow_commands: bool = False
    """Whether submitters may run programs on those of this fleet's nodes that run their ranks (ExecuteCommand).

    The programs run as the Linux user of the ranks.
    """
    replica_encryption: Annotated[ReplicaEncryption, Field(strict=False)] = ReplicaEncryption.AUTO
    """When nodes use TLS for the connections between them.

    Auto: if their instance type does not encrypt traffic between instances itself. On: always. Off: never. A change
    takes effect with the next launch of a job's ranks.
    """
    project: Name | None = None
    """The project of the fleet. The default is the token's project, or `default`."""
    tags: Tags = Field(default_factory=dict)
    """Your own names and values, which the fleet's description shows."""
    dry_run: bool = False
    """Whether to only check the request and return the planned changes, without changing or creating anything."""
    expected_changes: Annotated[list[GroupChange], Field(max_length=100)] | None = None
    """The Changes of a dry run that a person has approved.

    If CreateFleet would make any other change, it fails with a ConflictException.
    """


class GroupCheck(Shape):
    """A requirement on an Auto Scaling group that Everstep checks and does not change."""

    setting: str
    """Name of the setting in Auto Scaling's API."""
    message: str
    """A sentence about the setting, with the value that Everstep found in the Auto Scaling group."""


class UpdateFleetRequest(Request):
    """Settings of a fleet to change. Omitted fields keep their value."""

    spare_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    """Fixed number of spares. Setting it removes the SparePolicy, unless the request also sets a SparePolicy."""
    spare_policy: SparePolicy | None = None
    min_node_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    """Number of nodes that the fleet keeps even if no job runs, in addition to spares."""
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """Price of one instance per hour.

    The price also applies to the past cost of jobs and incidents that have not ended. Ended jobs and incidents keep
    their cost.
    """
    hold_failed_instances: bool | None = None
    """Whether to keep failed instances running for inspection instead of terminating them."""
    max_replacements_per_hour: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    """Limit of nodes per hour that Everstep replaces because it considers them failed."""
    node_role_name: RoleName | None = None
    """Name of the IAM role of the fleet's instances. Their agents authenticate with this role through STS."""
    allow_drills: bool | None = None
    """Whether administrators may inject faults into this fleet's nodes with StartDrill."""
    allow_commands: bool | None = None
    """Whether submitters may run programs on those of this fleet's nodes that run their ranks (ExecuteCommand)."""
    replica_encryption: Annotated[ReplicaEncryption | None, Field(strict=False)] = None
    """When nodes use TLS between them. A change takes effect with the next launch of a job's ranks."""


class StartFleetRollRequest(Request):
    """Settings of a roll, which replaces or reboots all nodes of a fleet, a few at a time."""

    max_unavailable: int = Field(default=1, ge=1, le=MAX_NODE_COUNT)
    """Limit of nodes out of service at the same time. Below the limit, the roll begins with the next node.

    The count also includes nodes that the fleet needs for jobs or as spares, and that are missing or unusable for
    another reason than the roll.
    """
    reboot: bool = False
    """Whether to reboot the nodes. Otherwise their instances are replaced."""
    reason: ShortText = ""
    """The person's reason. It appears with each node, in the incidents of jobs, and in the nodes' histories."""


class UpdateFleetRollRequest(Request):
    """Changes to the fleet's roll. Omitted fields keep their value."""

    max_unavailable: int | None = Field(default=None, ge=1, le=MAX_NODE_COUNT)
    paused: bool | None = None
    """True: the roll replaces or reboots no further nodes, except those that it has begun. False: it continues."""


class FleetRoll(Shape):
    """A roll: the replacement or reboot of all nodes that a fleet had at the start of the roll."""

    roll_status: RollStatus
    status_reason: str
    """What the roll does now, or the reason why it waits."""
    reboot: bool
    max_unavailable: int
    node_count: int
    """Number of nodes that the roll replaces or reboots. It excludes nodes that were held at the start."""
    finished_node_count: int
    """Number of nodes that need no more work, including nodes that ended for another reason or were skipped."""
    current_node_ids: list[str]
    """Nodes that the roll is replacing or rebooting now."""
    requested_by: str
    reason: str
    start_time: datetime
    end_time: datetime | None


class Fleet(Shape):
    """A registered Auto Scaling group: its settings and its current state."""

    fleet_name: str
    auto_scaling_group_name: str
    project: str
    fleet_status: FleetStatus
    reason: str
    duty: Duty
    """What a person has to do for the fleet and its held nodes."""
    spare_count: int
    spare_policy: SparePolicy | None
    """The rule that determines the number of spares. If set, SpareCount has no effect."""
    min_node_count: int
    hold_failed_instances: bool
    max_replacements_per_hour: int
    node_role_name: str | None
    """Name of the IAM role of the fleet's instances. Absent if agents can join with a join token only."""
    allow_drills: bool
    allow_commands: bool
    replica_encryption: ReplicaEncryption
    """When nodes use TLS for the connections between them."""
    encrypts_replicas: bool
    """Whether the nodes of a job would use TLS for the connections between them if the job launched its ranks now."""
    max_node_count: int
    """MaxSize of the Auto Scaling group."""
    desired_node_count: int
    node_count: int
    connected_node_count: int
    instance_type: str
    availability_zone: str
    price_usd_per_hour: float | None
    accounting_seconds: dict[str, float]
    """Total time of all jobs of the fleet, by accounting bucket, such as training or queue."""
    reliability: Reliability
    """Reliability figures of the fleet, computed over all its jobs."""
    incident_count: int
    """Number of incidents of the fleet's jobs, without drills."""
    lost_node_count: int
    """Number of nodes that jobs lost because the node failed or AWS reclaimed it.

    The number excludes nodes that a person drained, and nodes into which a drill injected a fault.
    """
    node_seconds: float
    """Total time that the fleet's nodes have worked for jobs."""
    cost_usd: float | None
    """Cost of NodeSeconds. Idle nodes and spares are not included."""
    drift: list[str]
    """Differences between the settings of the Auto Scaling group and the settings that Everstep needs.

    While the list is not empty, Everstep neither resizes the group nor ends or reboots instances.
    """
    roll: FleetRoll | None
    """The newest roll. Absent if the fleet never had one."""
    oldest_image_time: datetime | None
    """Creation time of the oldest machine image that a node of the fleet runs.

    Nodes whose ImageCreationTime is absent do not count. Absent if no node has one.
    """
    tags: dict[str, str]
    creation_time: datetime


class CreateFleetResponse(Shape):
    """The new fleet or, after a dry run, the changes that CreateFleet would make."""

    fleet_name: str
    fleet: Fleet | None = None
    """The new fleet. Absent after a dry run."""
    checks: list[GroupCheck]
    """The requirements on the Auto Scaling group, all of which it meets.

    If a group fails requirements, CreateFleet returns an error with a sentence about each failed requirement.
    """
    changes: list[GroupChange]
    """Changes to the Auto Scaling group that CreateFleet made, or that the fleet's loop will make.

    After a dry run: changes that the same request without DryRun would make.

    Empty if the group already has all settings that Everstep needs.
    """


class ListFleetsResponse(Shape):
    """A page of fleets, sorted by name."""

    fleets: list[Fleet]
    next_token: str | None = None


class RankMemory(Shape):
    """Memory of a rank's process. Child processes of the rank do not count."""

    rank: int
    resident_bytes: int
    """Resident memory of the process, including the full size of pages that it shares with other processes."""
    peak_resident_bytes: int
    """The highest ResidentBytes since the process started."""
