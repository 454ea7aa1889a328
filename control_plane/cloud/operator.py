"""What the control plane asks of a cloud: one Auto Scaling group per fleet, its instances, and the few calls that change them.

Invariant: every destructive call names one instance; capacity goes down only by naming who goes. Calls are synchronous,
thread-safe, bounded in time, and raise `CloudError` alone. Nothing here knows jobs, nodes' agents or the database.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from everstep.protocol.ids import NodeId

FLEET_TAG = "everstep:fleet"
"""Everstep touches only groups that carry this tag, whatever its value."""
TERMINATING_TRANSITION = "autoscaling:EC2_INSTANCE_TERMINATING"
USER_SUSPENDED = "User suspended"
"""How the reason begins that Auto Scaling gives for what a customer has suspended.

In which words it tells of its own is not documented.
"""


class Ec2State(StrEnum):
    """The state of an instance in EC2's own words.

    ABSENT is ours: EC2 does not know the id. It drops terminated instances after about an hour, so it means the same as
    TERMINATED, but of a member that its group is still launching: EC2 may not show it yet. Source: Amazon EC2 Developer
    Guide, eventual consistency.
    """

    PENDING = "pending"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting-down"
    TERMINATED = "terminated"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ABSENT = "absent"

    @property
    def has_ended(self) -> bool:
        """AWS says that this instance's memory is gone or going; no other evidence is needed to exclude its node."""
        return self not in (Ec2State.PENDING, Ec2State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceState:
    """One instance as EC2 describes it; only id and state are known of one that is absent."""

    instance_id: NodeId
    state: Ec2State
    state_reason: str = ""
    """EC2's words: `Client.UserInitiatedShutdown: User initiated shutdown`."""
    private_ip: str | None = None
    instance_type: str = ""
    availability_zone: str = ""
    launched_at: datetime | None = None
    capacity_reservation_id: str = ""
    """The reservation or capacity block that it runs in, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """One instance as its group lists it."""

    instance_id: NodeId
    lifecycle_state: str
    """`Pending`, `Pending:Wait`, `InService`, `Terminating`, `Terminating:Wait`, `Standby` …"""
    health_status: str
    """`Healthy` or `Unhealthy`.

    No evidence: who was called Unhealthy once stays so, whatever becomes of it; EC2's checks are asked instead.
    """
    is_protected: bool
    """From scale-in."""
    availability_zone: str
    instance_type: str = ""

    @property
    def is_leaving(self) -> bool:
        """The group is ending or detaching it: it no longer counts towards desired capacity."""
        return self.lifecycle_state.startswith(("Terminat", "Detach"))

    @property
    def awaits_termination(self) -> bool:
        """A terminating hook holds it: `complete_termination` lets it go at once."""
        return self.lifecycle_state == "Terminating:Wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleHook:
    """A hook of a group."""

    name: str
    transition: str
    heartbeat_timeout: timedelta
    default_result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTemplateRef:
    """The launch template of a group and the version it asks for (`$Latest`, `$Default` or a number)."""

    template_id: str
    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """An Auto Scaling group, all of it that Everstep relies on."""

    name: str
    desired_count: int
    min_size: int
    max_size: int
    availability_zones: tuple[str, ...]
    members: tuple[MemberState, ...]
    suspended_processes: frozenset[str]
    new_instances_protected: bool
    hooks: tuple[LifecycleHook, ...]
    scaling_policies: tuple[str, ...]
    tags: Mapping[str, str]
    launch_template: LaunchTemplateRef | None = None
    instance_type: str = ""
    """Of the launch template; empty when the group launches from something else."""
    status: str = ""
    """`Delete in progress` while AWS deletes the group, else empty."""
    suspension_reasons: Mapping[str, str] = field(default_factory=dict)
    """By suspended process: why, in AWS's words, where it gives a reason."""

    def is_suspended_by_aws(self, process: str) -> bool:
        """Say whether AWS itself suspended a process: an administrative suspension.

        Of what gives no reason a person is thought the author.
        """
        reason = self.suspension_reasons.get(process, "")
        return process in self.suspended_processes and bool(reason) and not reason.startswith(USER_SUSPENDED)

    @property
    def is_tagged(self) -> bool:
        """It carries the tag that lets Everstep touch it."""
        return FLEET_TAG in self.tags


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailure:
    """A launch that AWS could not make."""

    at: datetime
    message: str
    """In AWS's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """Something that EC2 has scheduled for an instance, not yet over."""

    event_id: str
    code: str
    """`instance-reboot`, `system-reboot`, `system-maintenance`, `instance-retirement` or `instance-stop`."""
    description: str
    """In AWS's words."""
    not_before: datetime | None
    """When its window begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """What DescribeInstanceStatus tells of an instance."""

    events: tuple[ScheduledEvent, ...] = ()
    """Scheduled, and not over."""
    failed_checks: tuple[str, ...] = ()
    """Status checks that EC2 calls impaired: `system` (its host, power, network), `instance` (its kernel does not answer)."""


class CloudOperator(Protocol):
    """The cloud as the fleet and job loops see it. Called from threads; one instance per control plane.

    Every method raises `CloudError`: `NotFound`, `GroupNotOurs`, `InvalidRequest`, `AccessDenied`, or one of the
    retryable kinds.
    """

    def describe_group(self, name: str) -> GroupState:
        """Return the group as it is now.

        Called once per fleet pass. Hooks, policies and the launch template may be up to a few seconds old.
        """

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        """Return the state of every id asked for; ids that EC2 does not know come back as `Ec2State.ABSENT`."""

    def set_desired(self, name: str, desired_count: int) -> None:
        """Set the group's desired capacity. Idempotent; called by the fleet loop alone, to go up."""

    def terminate_member(self, instance_id: NodeId, *, decrement: bool) -> None:
        """End one instance of a tagged group, or remove one that has ended already.

        Args:
            instance_id: whom. Nothing is ever ended by count.
            decrement: lower desired capacity with it; False brings a replacement.

        Repeating it for an instance that is already leaving or gone raises `NotFound` or does nothing, and never ends
        another one.
        """

    def reboot_member(self, group: str, instance_id: NodeId) -> None:
        """Reboot one instance of a tagged group: same instance, same host, same addresses; what was in its memory is gone. Not idempotent.

        Raises `NotFound` for one that is not a member, or is leaving: nothing outside of a fleet is ever rebooted.
        """

    def strike_member(self, group: str, instance_id: NodeId) -> None:
        """End one instance of a tagged group as a failure does: in EC2, without a word to its group or its hooks.

        For drills alone. Idempotent.

        Raises `NotFound` for one that is not a member, or is leaving.
        """

    def complete_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Let an instance go that a terminating hook holds. Idempotent: one that is held no longer is fine."""

    def hold_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Let a terminating hook hold an instance for another timeout. One that is held no longer is fine."""

    def statuses(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceStatus]:
        """Return what EC2 has scheduled for instances and which checks they fail; ids that it does not know, or has neither for, are left out."""

    def network_nodes(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, tuple[str, ...]]:
        """Return the network nodes above each instance, the nearest last; ids that EC2 tells nothing of are left out."""

    def recent_launch_failures(self, name: str) -> tuple[LaunchFailure, ...]:
        """Return failed launches, newest first, since the last launch that succeeded; of very many the newest."""

    def protect_new_instances(self, name: str) -> None:
        """Make the group protect every new instance from scale-in."""

    def protect_members(self, name: str, instance_ids: Collection[NodeId]) -> None:
        """Protect instances that are members already from scale-in."""

    def suspend_processes(self, name: str, processes: Collection[str]) -> None:
        """Suspend these processes of the group; those already suspended stay so."""

    def resume_processes(self, name: str, processes: Collection[str]) -> None:
        """Resume these processes of the group; those that are not suspended stay so."""

    def put_termination_hook(self, name: str, hook: LifecycleHook) -> None:
        """Create or replace a lifecycle hook of the group."""
