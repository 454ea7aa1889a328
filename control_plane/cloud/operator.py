"""The Protocol for the cloud: one Auto Scaling group per fleet, its instances, and the calls that change them.

Invariant: every destructive call names one instance. A call lowers the desired capacity only if it terminates a named
instance, or if no instance exceeds the new value. Calls are synchronous, thread-safe, limited in time, and raise only
`CloudError`.
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
"""Everstep changes only Auto Scaling groups with this tag, whatever its value."""
TERMINATING_TRANSITION = "autoscaling:EC2_INSTANCE_TERMINATING"
IN_SERVICE = "InService"
WORK_TAGS = ("everstep:job", "everstep:project")
USER_SUSPENDED = "User suspended"
"""First words of Auto Scaling's reason for a suspension by a customer. AWS documents no words for its own suspensions.
"""
_SHORTAGE = re.compile(r"sufficient .*capacity|InsufficientInstanceCapacity", re.IGNORECASE)
SHORTAGE_CODE = "InsufficientInstanceCapacity"
"""Source: Amazon EC2 API Reference, error codes."""


class Ec2State(StrEnum):
    """The state of an instance, with EC2's values and ABSENT: EC2's answer does not list the id.

    EC2 drops terminated instances after about an hour. A single answer without the instance is no evidence of its end,
    because EC2 is eventually consistent. Source: Amazon EC2 Developer Guide, eventual consistency.
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
        """Whether EC2 lists the instance as ended or ending, which is enough evidence to exclude its node.

        False for ABSENT.
        """
        return self not in (Ec2State.PENDING, Ec2State.RUNNING, Ec2State.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceState:
    """One instance as EC2 describes it. An absent instance has only id and state."""

    instance_id: NodeId
    state: Ec2State
    state_reason: str = ""
    """EC2's reason, such as `Client.UserInitiatedShutdown: User initiated shutdown`."""
    state_code: str = ""
    """EC2's code of the reason, such as `Client.UserInitiatedShutdown`. Empty without a code."""
    private_ip: str | None = None
    instance_type: str = ""
    availability_zone: str = ""
    launched_at: datetime | None = None
    image_id: str = ""
    capacity_reservation_id: str = ""
    work_tags: Mapping[str, str] = field(default_factory=dict)
    """The instance's tags in `WORK_TAGS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """One instance as its Auto Scaling group lists it."""

    instance_id: NodeId
    lifecycle_state: str
    """`Pending`, `Pending:Wait`, `InService`, `Terminating`, `Terminating:Wait`, `Standby` …"""
    health_status: str
    """`Healthy` or `Unhealthy`. No evidence, because Auto Scaling never resets Unhealthy."""
    is_protected: bool
    """Whether the instance is protected from scale-in."""
    availability_zone: str
    instance_type: str = ""

    @property
    def is_leaving(self) -> bool:
        """Whether the group is terminating or detaching the instance, which therefore is no capacity."""
        return self.lifecycle_state.startswith(("Terminat", "Detach"))

    @property
    def lacks_protection(self) -> bool:
        """Whether Everstep must call `protect_members`. AWS protects only InService instances."""
        return self.lifecycle_state == IN_SERVICE and not self.is_protected

    @property
    def awaits_termination(self) -> bool:
        """Whether a terminating hook delays the end of the instance."""
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
    """GPUs or Neuron devices. A node runs one rank per accelerator."""
    efa_count: int
    """Maximum number of EFA interfaces."""
    memory_mib: int
    encrypts_in_transit: bool = False
    """Whether EC2 encrypts all traffic between two instances of this type. Source:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/data-protection.html#encryption-transit
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInstances:
    """The mixed instances policy of an Auto Scaling group, without its division into Spot and On-Demand instances."""

    instance_types: tuple[str, ...]
    """Instance types of the overrides, each once, in AWS's order. Empty if no override names a type."""
    features: tuple[str, ...] = ()
    """Features of the overrides that a fleet cannot use, such as `InstanceRequirements` or `WeightedCapacity`."""
    shapes: Mapping[str, InstanceShape] = field(default_factory=dict)
    """Valid after `complete_group`. Empty for fewer than two types, or with `features`."""


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
    """The type that the group launches; of several, the first. Empty if neither template nor overrides name a type."""
    mixed: MixedInstances | None = None
    """None with a plain launch template or a launch configuration."""
    encrypting_types: frozenset[str] = frozenset()
    """Types in the group that encrypt traffic between instances. Valid after `complete_group`."""
    has_capacity_rebalance: bool = False
    """Whether AWS replaces Spot instances by itself after a rebalance recommendation."""
    has_warm_pool: bool = False
    status: str = ""
    """`Delete in progress` while AWS deletes the group, else empty."""
    suspension_reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons by suspended process. Processes without a reason are missing."""

    def is_suspended_by_aws(self, process: str) -> bool:
        """Return whether AWS itself suspended a process of the group. Without a reason from AWS, a person did."""
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
    """AWS's text, unchanged."""
    code: str = ""
    """Empty for a failure from the activity history."""

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
        return ", ".join([*self.instance_ids, *(failure.code for failure in self.failures)]) or "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """A pending event that EC2 has scheduled for an instance."""

    event_id: str
    code: str
    """EC2's code, such as `instance-reboot`, `system-maintenance`, `instance-retirement` or `instance-stop`."""
    description: str
    not_before: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """The result of DescribeInstanceStatus for an instance."""

    events: tuple[ScheduledEvent, ...] = ()
    """Scheduled events that have not ended."""
    failed_checks: tuple[str, ...] = ()
    """Checks that EC2 reports as impaired: `system` (host, power, network) or `instance` (the kernel does not answer).
    """


class CloudOperator(Protocol):
    """The operations on AWS that the server's background loops use. Thread-safe.

    Every method can raise a `CloudError`: `NotFound`, `GroupNotOurs`, `InvalidRequest`, `AccessDenied`, or a retryable
    kind.
    """

    def describe_group(self, name: str) -> GroupState:
        """Return the current state of an Auto Scaling group, with its hooks, scaling policies and instance type."""

    def list_groups(self, names: Collection[str]) -> Mapping[str, GroupState]:
        """Return the groups that exist, by name, also without `FLEET_TAG`. One request per 100 names.

        The fields `hooks`, `scaling_policies`, `instance_type`, `encrypting_types` and `mixed.shapes` are valid only
        after `complete_group`.
        """

    def complete_group(self, group: GroupState) -> GroupState:
        """Return a group from `list_groups` with hooks, scaling policies and instance type, which may be 30 s old."""

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        """Return the state of every given instance. An instance that EC2 does not list is ABSENT."""

    def set_desired(self, name: str, desired_count: int) -> None:
        """Set an Auto Scaling group's desired capacity. Idempotent."""

    def launch_instances(self, name: str, count: int, *, zone: str, token: str) -> Launched:
        """Launch at most 100 instances in one zone of a group with a launch template, and raise its desired capacity.

        AWS raises the capacity even if launches fail for lack of capacity. The group then retries them, and
        `recent_launch_failures` includes the failures. A repeated call with the same token within 8 hours launches
        nothing and returns the first answer, or raises `CloudUnavailable` while AWS still executes it. `token` has 1 to
        64 letters, digits, `-`, `_` and `/`.
        """

    def terminate_member(self, instance_id: NodeId, *, decrement: bool) -> None:
        """Terminate one instance of a group, or remove an ended one. Never ends another instance.

        Without `decrement`, the group launches a replacement. A repeated call raises `NotFound` or does nothing.
        """

    def reboot_member(self, group: str, instance_id: NodeId) -> None:
        """Reboot one instance, which loses its memory. Not idempotent.

        Raises `NotFound` if it is no member or terminates.
        """

    def strike_member(self, group: str, instance_id: NodeId) -> None:
        """Terminate one instance through EC2 without a lifecycle hook, to simulate a failure.

        Only drills use this method. Idempotent. Raises `NotFound` if the instance is no member or terminates.
        """

    def set_work_tags(self, instance_ids: Collection[NodeId], tags: Mapping[str, str]) -> None:
        """Give instances these `WORK_TAGS`, or remove both if `tags` is empty. Idempotent.

        Raises `NotFound`, and may change nothing, if EC2 does not list one of the instances.
        """

    def complete_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Release an instance that a terminating hook holds. No effect if the hook no longer holds it."""

    def hold_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Extend a terminating hook's hold of an instance by the hook's timeout.

        No effect if the hook no longer holds it.
        """

    def statuses(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceStatus]:
        """Return only instances with a scheduled event or a failed status check. Unknown ids cause no error."""

    def network_nodes(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, tuple[str, ...]]:
        """Return the nodes of AWS's network above each instance, the nearest one last.

        Omits instances without nodes.
        """

    def image_times(self, image_ids: Collection[str]) -> Mapping[str, datetime]:
        """Return the creation times of machine images, by image id.

        The result omits images that are deregistered, or that the account may not use.
        """

    def console_output(self, instance_id: NodeId) -> bytes:
        """Return the newest console output of an instance, at most 64 KiB; empty if EC2 has none yet."""

    def recent_launch_failures(self, name: str) -> tuple[LaunchFailure, ...]:
        """Return failed launches since the last successful one, newest first.

        Failures of a long series may be missing.
        """

    def protect_new_instances(self, name: str) -> None:
        """Make the Auto Scaling group protect every new instance from scale-in."""

    def protect_members(self, name: str, instance_ids: Collection[NodeId]) -> None:
        """Protect InService instances of the group from scale-in, in batches.

        Raises `InvalidRequest` if an instance is not InService. All instances of its batch and of later batches then
        remain unprotected.
        """

    def suspend_processes(self, name: str, processes: Collection[str]) -> None:
        """Suspend processes of the Auto Scaling group, in addition to processes that are already suspended."""

    def resume_processes(self, name: str, processes: Collection[str]) -> None:
        """Resume processes of the Auto Scaling group. A process that is not suspended causes no error."""

    def put_termination_hook(self, name: str, hook: LifecycleHook) -> None:
        """Create or replace a lifecycle hook of the Auto Scaling group."""
