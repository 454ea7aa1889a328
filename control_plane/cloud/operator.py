"""The Protocol for the cloud: one Auto Scaling group per fleet, its instances, and the calls that change them.

Invariant: every destructive call names one instance. A call lowers the desired capacity only if it terminates a named
instance, or if the new value is at least the number of existing instances, so that none ends. Calls are synchronous,
thread-safe and limited in time, and raise only `CloudError`. This module does not depend on jobs, agents or the
database.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from everstep.protocol.ids import NodeId

FLEET_TAG = "everstep:fleet"
"""Everstep changes only Auto Scaling groups with this tag. The value of the tag does not matter."""
TERMINATING_TRANSITION = "autoscaling:EC2_INSTANCE_TERMINATING"
IN_SERVICE = "InService"
"""Auto Scaling's lifecycle state of an instance in normal operation."""
WORK_TAGS = ("everstep:job", "everstep:project")
"""Keys of the tags that name the job and the project for which an instance works."""
USER_SUSPENDED = "User suspended"
"""First words of Auto Scaling's reason for a suspension by a customer.

AWS does not document the words for its own suspensions, so any other reason counts as a suspension by AWS.
"""
_SHORTAGE = re.compile(r"sufficient .*capacity|InsufficientInstanceCapacity", re.IGNORECASE)
"""Pattern of AWS's messages about a lack of capacity."""
SHORTAGE_CODE = "InsufficientInstanceCapacity"
"""EC2's error code for a lack of capacity. Source: Amazon EC2 API Reference, error codes."""


class Ec2State(StrEnum):
    """The state of an instance, with EC2's values and ABSENT.

    ABSENT means that EC2's answer does not list the id. EC2 drops terminated instances after about an hour, so ABSENT
    usually means the same as TERMINATED. But EC2 is eventually consistent: an answer may omit an instance that runs, or
    that its group is still launching. A single answer without the instance is therefore no evidence that the instance
    has ended. Source: Amazon EC2 Developer Guide, eventual consistency.
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
        """Whether EC2 lists the instance as ended or ending. False for ABSENT: EC2 does not list such an instance.

        An ended or ending instance loses its memory. The control plane needs no other evidence to exclude its node.
        """
        return self not in (Ec2State.PENDING, Ec2State.RUNNING, Ec2State.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceState:
    """One instance as EC2 describes it. An absent instance has only id and state."""

    instance_id: NodeId
    state: Ec2State
    state_reason: str = ""
    """EC2's reason for the state, for example `Client.UserInitiatedShutdown: User initiated shutdown`."""
    state_code: str = ""
    """EC2's code of the reason, for example `Client.UserInitiatedShutdown`. Empty without a code."""
    private_ip: str | None = None
    instance_type: str = ""
    availability_zone: str = ""
    launched_at: datetime | None = None
    image_id: str = ""
    capacity_reservation_id: str = ""
    """The capacity reservation or block of the instance, if any."""
    work_tags: Mapping[str, str] = field(default_factory=dict)
    """The instance's tags with a key in `WORK_TAGS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """One instance as its Auto Scaling group lists it."""

    instance_id: NodeId
    lifecycle_state: str
    """Auto Scaling's state: `Pending`, `Pending:Wait`, `InService`, `Terminating`, `Terminating:Wait`, `Standby` …"""
    health_status: str
    """Auto Scaling's health status: `Healthy` or `Unhealthy`.

    The control plane does not use the value as evidence, because Auto Scaling never resets Unhealthy. The control plane
    polls EC2's status checks instead.
    """
    is_protected: bool
    """Whether the instance is protected from scale-in."""
    availability_zone: str
    instance_type: str = ""

    @property
    def is_leaving(self) -> bool:
        """Whether the Auto Scaling group is terminating or detaching the instance.

        Such an instance does not count as capacity.
        """
        return self.lifecycle_state.startswith(("Terminat", "Detach"))

    @property
    def lacks_protection(self) -> bool:
        """Whether Everstep must call `protect_members` for the instance, because it lacks protection from scale-in.

        AWS refuses to protect an instance in another state than InService, for example Pending or Terminating. A new
        instance is protected when it enters service, if its group protected new instances at its launch.
        """
        return self.lifecycle_state == IN_SERVICE and not self.is_protected

    @property
    def awaits_termination(self) -> bool:
        """Whether a terminating hook delays the end of the instance.

        After `complete_termination`, AWS ends the instance immediately.
        """
        return self.lifecycle_state == "Terminating:Wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleHook:
    """A lifecycle hook of an Auto Scaling group."""

    name: str
    transition: str
    heartbeat_timeout: timedelta
    default_result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTemplateRef:
    """The launch template of an Auto Scaling group and its version (`$Latest`, `$Default` or a number)."""

    template_id: str
    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceShape:
    """The hardware properties in which the instance types of a fleet may differ only within limits."""

    accelerator_count: int
    """Number of GPUs or of Neuron devices. A node runs one rank per accelerator."""
    efa_count: int
    """Maximum number of EFA interfaces. The launch template attaches the same interfaces to all nodes."""
    memory_mib: int
    encrypts_in_transit: bool = False
    """Whether EC2 encrypts all traffic between two instances of this type.

    AWS encrypts if both instances are of such a type, in one VPC, and no virtual device is on the path.
    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/data-protection.html#encryption-transit
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInstances:
    """The mixed instances policy of an Auto Scaling group, without its division into Spot and On-Demand instances."""

    instance_types: tuple[str, ...]
    """Instance types of the overrides, each once, in AWS's order. Empty if no override names a type."""
    features: tuple[str, ...] = ()
    """Features of the overrides that a fleet cannot use: `InstanceRequirements`, `WeightedCapacity`,
    `LaunchTemplateSpecification`, `ImageId`.
    """
    shapes: Mapping[str, InstanceShape] = field(default_factory=dict)
    """Hardware by instance type. Valid after `complete_group`. Empty for fewer than two types, or with `features`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The properties of an Auto Scaling group that Everstep uses."""

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
    """The instance type that the Auto Scaling group launches. With several types, the first of the overrides.

    Empty if the group has no launch template, or if neither the template nor the overrides name a type.
    """
    mixed: MixedInstances | None = None
    """The group's mixed instances policy. None if it has a plain launch template or a launch configuration."""
    encrypting_types: frozenset[str] = frozenset()
    """Instance types in the group that encrypt traffic between instances (`encrypts_in_transit`).

    A type that EC2 did not describe is missing. Valid after `complete_group`.
    """
    has_capacity_rebalance: bool = False
    """Whether AWS replaces Spot instances by itself after a rebalance recommendation."""
    has_warm_pool: bool = False
    status: str = ""
    """Auto Scaling's status: `Delete in progress` while AWS deletes the group, else empty."""
    suspension_reasons: Mapping[str, str] = field(default_factory=dict)
    """AWS's reason for each suspension, by suspended process. Processes without a reason are missing."""

    def is_suspended_by_aws(self, process: str) -> bool:
        """Return whether AWS itself suspended a process of the Auto Scaling group (an administrative suspension).

        If AWS gives no reason, this method assumes that a person suspended the process.
        """
        reason = self.suspension_reasons.get(process, "")
        return process in self.suspended_processes and bool(reason) and not reason.startswith(USER_SUSPENDED)

    @property
    def is_tagged(self) -> bool:
        """Whether the Auto Scaling group has the tag that permits Everstep to change it."""
        return FLEET_TAG in self.tags


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailure:
    """One failed launch in an Auto Scaling group's activity history."""

    at: datetime
    message: str
    """AWS's message, unchanged."""
    code: str = ""
    """AWS's error code. Empty for a failure from the activity history, which has only messages."""

    @property
    def is_shortage(self) -> bool:
        """Whether AWS has too few instances of the type."""
        if self.code:
            return self.code == SHORTAGE_CODE
        return _SHORTAGE.search(self.message) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """AWS's answer to LaunchInstances: the instances that it launched, and the failed launches."""

    instance_ids: tuple[NodeId, ...]
    failures: tuple[LaunchFailure, ...] = ()

    def __str__(self) -> str:
        """Return the instances and the error codes, for the stored outcome of the call."""
        return ", ".join([*self.instance_ids, *(failure.code for failure in self.failures)]) or "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """A pending event that EC2 has scheduled for an instance."""

    event_id: str
    code: str
    """Kind of the event: `instance-reboot`, `system-reboot`, `system-maintenance`, `instance-retirement` or
    `instance-stop`.
    """
    description: str
    """Text with which AWS describes the event."""
    not_before: datetime | None
    """The start of the event's time window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """The result of DescribeInstanceStatus for an instance."""

    events: tuple[ScheduledEvent, ...] = ()
    """Scheduled events that have not ended."""
    failed_checks: tuple[str, ...] = ()
    """Status checks that EC2 reports as impaired.

    `system` covers host, power and network. `instance` means that the instance's kernel does not answer.
    """


class CloudOperator(Protocol):
    """The operations on AWS that the server's background loops use.

    Each server has one instance, which its threads share. Every method can raise a `CloudError`: `NotFound`,
    `GroupNotOurs`, `InvalidRequest`, `AccessDenied`, or one of the retryable kinds.
    """

    def describe_group(self, name: str) -> GroupState:
        """Return the current state of an Auto Scaling group, with its hooks, scaling policies and instance type.

        Raises `NotFound` if the group does not exist.
        """

    def list_groups(self, names: Collection[str]) -> Mapping[str, GroupState]:
        """Return Auto Scaling groups as a mapping from their names, with one request per 100 names.

        The poller of AWS calls this method for each poll. The result omits groups that do not exist, and includes
        groups without `FLEET_TAG`. The fields `hooks`, `scaling_policies`, `instance_type`, `encrypting_types` and
        `mixed.shapes` are valid only after `complete_group`.
        """

    def complete_group(self, group: GroupState) -> GroupState:
        """Return an Auto Scaling group from `list_groups`, completed by its hooks, scaling policies and instance type.

        These settings may be up to half a minute old. Raises `GroupNotOurs` if the group lacks the tag `FLEET_TAG`,
        which permits Everstep to change the group.
        """

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        """Return the state of every given instance, by instance id.

        Instances that EC2 does not know have the state ABSENT.
        """

    def set_desired(self, name: str, desired_count: int) -> None:
        """Set an Auto Scaling group's desired capacity. Idempotent. Only the fleet loop's decisions cause this call."""

    def launch_instances(self, name: str, count: int, *, zone: str, token: str) -> Launched:
        """Launch instances into an Auto Scaling group, and raise its desired capacity by `count`.

        AWS raises the capacity also if launches fail for lack of capacity, and the group then retries them by itself.
        `recent_launch_failures` includes these failures. A repeated call with the same token within 8 hours launches
        nothing and returns the first answer, or raises `CloudUnavailable` while AWS still executes it.

        Args:
            name: a tagged group with a launch template.
            count: number of instances, at most 100.
            zone: Availability Zone of the instances, one of the group's.
            token: idempotency token of 1 to 64 letters, digits, `-`, `_` and `/`.

        Returns:
            The launched instances, which are still pending, and the failures.
        """

    def terminate_member(self, instance_id: NodeId, *, decrement: bool) -> None:
        """Terminate one instance of a tagged group, or remove an already ended instance from the Auto Scaling group.

        A repeated call for an instance that is terminating or has ended raises `NotFound` or does nothing. The call
        never ends another instance.

        Args:
            instance_id: the only instance that the call may end.
            decrement: whether to lower the desired capacity too. If false, the group launches a replacement.
        """

    def reboot_member(self, group: str, instance_id: NodeId) -> None:
        """Reboot one instance of an Auto Scaling group with `FLEET_TAG`. Not idempotent.

        The instance keeps its host and its addresses, and loses the content of its memory. Raises `NotFound` if the
        instance is no member of the group or is terminating, so the call cannot reboot an instance outside the fleet.
        """

    def strike_member(self, group: str, instance_id: NodeId) -> None:
        """Terminate one instance of an Auto Scaling group through EC2, to simulate a failure. Idempotent.

        Only drills use this method. Auto Scaling gets no announcement, so no lifecycle hook delays the end. Raises
        `NotFound` if the instance is no member of the group or is terminating.
        """

    def set_work_tags(self, instance_ids: Collection[NodeId], tags: Mapping[str, str]) -> None:
        """Give instances these values of `WORK_TAGS`, or remove both tags if `tags` is empty. Idempotent.

        Raises `NotFound`, and may change nothing, if EC2 does not know one of the instances.
        """

    def complete_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Release an instance that a terminating hook holds. Idempotent.

        If the hook no longer holds the instance, the call has no effect.
        """

    def hold_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Extend the time for which a terminating hook holds an instance, by the hook's timeout.

        If the hook no longer holds the instance, the call has no effect.
        """

    def statuses(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceStatus]:
        """Return scheduled events and failed status checks of instances.

        The result contains only instances with an event or a failed check. Ids that EC2 does not list cause no error.
        """

    def network_nodes(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, tuple[str, ...]]:
        """Return the nodes of AWS's network to which each instance is attached, the nearest one last.

        The result omits instances for which EC2 returns no network nodes.
        """

    def image_times(self, image_ids: Collection[str]) -> Mapping[str, datetime]:
        """Return the creation times of machine images, by image id.

        The result omits images that are deregistered, or that the account may not use.
        """

    def console_output(self, instance_id: NodeId) -> bytes:
        """Return the newest console output of an instance, at most 64 KiB; empty if EC2 has none yet.

        Raises `NotFound` if EC2 does not know the instance.
        """

    def recent_launch_failures(self, name: str) -> tuple[LaunchFailure, ...]:
        """Return an Auto Scaling group's failed launches since the last successful launch, newest first.

        The result includes failures of the newest `launch_instances`. AWS lists only recent activities, so older
        failures of a long series are missing.
        """

    def protect_new_instances(self, name: str) -> None:
        """Make the Auto Scaling group protect every new instance from scale-in."""

    def protect_members(self, name: str, instance_ids: Collection[NodeId]) -> None:
        """Protect existing instances of the Auto Scaling group `name` from scale-in.

        AWS receives the instances in batches. Raises `InvalidRequest` if an instance is not InService in the group. All
        instances of its batch and of later batches then remain unprotected.
        """

    def suspend_processes(self, name: str, processes: Collection[str]) -> None:
        """Suspend processes of the Auto Scaling group, in addition to processes that are already suspended."""

    def resume_processes(self, name: str, processes: Collection[str]) -> None:
        """Resume processes of the Auto Scaling group. A process that is not suspended causes no error."""

    def put_termination_hook(self, name: str, hook: LifecycleHook) -> None:
        """Create or replace a lifecycle hook of the Auto Scaling group."""
