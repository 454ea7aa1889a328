"""Emulates EC2 Auto Scaling for the groups of moto, with delays and lifecycle states.

    Pending ──boot──▶ InService ──unhealthy, scale-in, by request──▶ Terminating[:Wait] ──▶ removed

moto does not change groups over time. In a pass, which the server starts regularly, `AutoScaling` advances each member
of each group by one lifecycle state. The server holds its lock during each call.
Source: Amazon EC2 Auto Scaling User Guide (lifecycle, suspended processes, instance scale-in protection, lifecycle
hooks).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import (
    Activity,
    AutoScalingBackend,
    FakeAutoScalingGroup,
    InstanceState,
    LifecycleHook,
    autoscaling_backends,
)

from infra.local_cloud.ec2 import INSUFFICIENT_CAPACITY, Ec2
from infra.local_cloud.events import Announcements, Owner, lifecycle_action, scaling_outcome, stamp
from infra.local_cloud.faults import Faults

LAUNCHING: Final = "autoscaling:EC2_INSTANCE_LAUNCHING"
TERMINATING: Final = "autoscaling:EC2_INSTANCE_TERMINATING"
PROCESSES: Final = frozenset(
    {
        "Launch",
        "Terminate",
        "AddToLoadBalancer",
        "AlarmNotification",
        "AZRebalance",
        "HealthCheck",
        "InstanceRefresh",
        "ReplaceUnhealthy",
        "ScheduledActions",
    }
)
PROTECTABLE: Final = frozenset({"InService", "EnteringStandby", "Standby"})
"""States in which SetInstanceProtection succeeds."""
RETAINED: Final = "Terminating:Retained"
"""Termination abandoned in a group with an instance lifecycle policy. The member runs outside of the desired capacity.
Source: https://docs.aws.amazon.com/autoscaling/ec2/userguide/instance-lifecycle-policy.html.
"""
ACTIVITIES_KEPT: Final = 500
LAUNCH_FAILED: Final = f"{INSUFFICIENT_CAPACITY} Launching EC2 instance failed."
GLOBAL_TIMEOUT_SECONDS: Final = 172_800
"""Longest hold of a member by a hook, heartbeats included. The limit of 100 times its timeout applies as well."""
ADMINISTRATIVE: Final = (
    "Amazon EC2 Auto Scaling suspended this process: the group has repeatedly failed to launch instances since {since}."
)
"""Reason of a suspension by AWS itself. AWS does not document this text, which is invented."""
ALL_PROTECTED: Final = (
    "Could not scale to desired capacity because all remaining instances are protected from scale-in."
)


@dataclass(slots=True)
class _Wait:
    """A lifecycle hook's hold of an instance, with monotonic deadlines."""

    hook: LifecycleHook
    deadline: float
    last_deadline: float
    token: str
    result: str | None = None


@dataclass(slots=True)
class _Member:
    """State of a member for which moto has no field."""

    launch: Activity | None = None
    termination: Activity | None = None
    wait: _Wait | None = None
    launch_hook_done: bool = False
    will_be_protected: bool = False
    """Whether protection begins with InService."""


@dataclass(slots=True)
class _Record:
    """State of a group for which moto has no field."""

    activities: list[Activity] = field(default_factory=list)
    """Newest first, at most `ACTIVITIES_KEPT`."""
    no_launch_before: float = 0.0
    protected_at_desired: int | None = None
    """Desired capacity that protected surplus members prevented, so that the failure becomes an activity only once.
    None without a failure.
    """
    failing_since: tuple[float, str] | None = None
    """Start of the series of failed launches, as monotonic seconds and timestamp. None after a success or a resumption.
    """
    suspensions: dict[str, str] = field(default_factory=dict)
    """Reason by process. moto stores only the names."""


class AutoScaling:
    """Implements operations of Auto Scaling's API for all accounts and regions, and advances all groups in passes.

    `faults` has the retry delay of a failed launch and the time until AWS suspends launches. `announcements` receives
    the events of launches, terminations and hooks.
    """

    def __init__(self, ec2: Ec2, faults: Faults, announcements: Announcements, monotonic: Callable[[], float]) -> None:
        self._ec2 = ec2
        self._answers = ec2.answers
        self._faults = faults
        self._announcements = announcements
        self._monotonic = monotonic
        self._records: dict[str, _Record] = {}
        self._members: dict[str, _Member] = {}

    # The methods below implement operations of the Auto Scaling API.

    def create(self, group: FakeAutoScalingGroup) -> None:
        """Check the sizes of a group that moto has just created, and begin to manage it."""
        _require_bounds(group.min_size, group.max_size, group.desired_capacity)
        self._records[group.arn] = _Record()

    def set_desired(self, group: FakeAutoScalingGroup, desired: int) -> None:
        """Set the desired capacity, and retry a failed launch at once.

        Raises ValidationError with AWS's message outside the group's bounds.
        """
        if desired > group.max_size:
            raise ValidationError(
                f"New SetDesiredCapacity value {desired} is above max value {group.max_size} for the AutoScalingGroup."
            )
        if desired < group.min_size:
            raise ValidationError(
                f"New SetDesiredCapacity value {desired} is below min value {group.min_size} for the AutoScalingGroup."
            )
        group.desired_capacity = desired
        self._record(group).no_launch_before = 0.0

    def launch_now(
        self, group: FakeAutoScalingGroup, count: int, zone: str, subnet: str | None, *, is_retried: bool
    ) -> dict[str, list[str]]:
        """LaunchInstances: launch up to `count` instances at once, and return the ids by instance type.

        The desired capacity grows by `count` if the group shall retry failed launches (`is_retried`), else by the
        number of launched instances.
        """
        launched = self._start(group, count, zone, subnet)
        total = sum(map(len, launched.values()))
        group.desired_capacity = (group.desired_capacity or 0) + (count if is_retried else total)
        return launched

    def update(
        self, group: FakeAutoScalingGroup, min_size: int | None, max_size: int | None, desired: int | None
    ) -> None:
        """Check a group's new sizes before moto stores them."""
        lowest = group.min_size if min_size is None else min_size
        highest = group.max_size if max_size is None else max_size
        # Without a new desired capacity, AWS raises or lowers the current desired capacity to fit the new bounds.
        _require_bounds(
            lowest, highest, min(max(group.desired_capacity, lowest), highest) if desired is None else desired
        )

    def terminate(self, group: FakeAutoScalingGroup, member: InstanceState, *, decrement: bool) -> Activity:
        """TerminateInstanceInAutoScalingGroup: terminate one member.

        Without a decrement, the group launches a replacement. Raises ValidationError if the decrement would violate the
        group's minimum size.
        """
        before = group.desired_capacity
        if decrement:
            if before - 1 < group.min_size:
                raise ValidationError(
                    f"Currently, desiredSize equals minSize ({group.min_size}). Terminating instance without "
                    "replacement will violate "
                    "group's min size constraint. Either set shouldDecrementDesiredCapacity flag to false or "
                    "lower group's min size."
                )
            group.desired_capacity = before - 1
        change = f", shrinking the capacity from {before} to {group.desired_capacity}." if decrement else "."
        cause = (
            f"At {_stamp()} instance {member.instance.id} was taken out of service in response to a user "
            f"request{change}"
        )
        self._begin_termination(group, member, cause)
        activity = self._member(member).termination
        assert activity is not None
        return activity

    def delete(self, group: FakeAutoScalingGroup, *, force: bool) -> None:
        """DeleteAutoScalingGroup: with `force`, also terminate all instances, even protected or held ones.

        Raises:
            AutoscalingClientError: ResourceInUse, because the group has instances and `force` is not set.
            ValidationError: the group's deletion protection prevents the deletion. Source:
                https://docs.aws.amazon.com/autoscaling/ec2/userguide/resource-deletion-protection.html.
        """
        protection = group.deletion_protection
        if protection == "prevent-all-deletion" or (force and protection == "prevent-force-deletion"):
            raise ValidationError(f"The deletion protection {protection} of {group.name} prevents its deletion.")
        if group.instance_states and not force:
            raise AutoscalingClientError(
                "ResourceInUse",
                "You cannot delete an AutoScalingGroup while there are instances or pending Spot instance "
                "request(s) still in the group.",
            )
        backend = group.autoscaling_backend
        for member in group.instance_states:
            if member.instance.state != "terminated":
                group.ec2_backend.terminate_instances([member.instance.id])
            self._members.pop(member.instance.id, None)
        group.instance_states = []
        backend.autoscaling_groups.pop(group.name, None)
        backend.lifecycle_hooks = {
            key: hook for key, hook in backend.lifecycle_hooks.items() if hook.auto_scaling_group_name != group.name
        }
        backend.policies = {
            key: policy for key, policy in backend.policies.items() if policy.auto_scaling_group_name != group.name
        }
        self._records.pop(group.arn, None)

    def protect(self, group: FakeAutoScalingGroup, instance_ids: Sequence[str], *, is_protected: bool) -> None:
        """SetInstanceProtection.

        If one instance is refused, none changes (see `AwsAnswers.protection_is_all_or_nothing`). Raises ValidationError
        with AWS's message if an instance is not in the group, or neither InService nor in Standby.
        """
        members = {member.instance.id: member for member in group.instance_states}
        accepted = PROTECTABLE | ({"Pending", "Pending:Wait"} if self._answers.pending_member_is_protectable else set())
        refusals = []
        for instance_id in instance_ids:
            if instance_id not in members:
                refusals.append(f"The instance {instance_id} is not part of Auto Scaling group {group.name}.")
            elif members[instance_id].lifecycle_state not in accepted:
                refusals.append(f"The instance {instance_id} is not in InService or EnteringStandby or Standby.")
            elif not self._answers.protection_is_all_or_nothing:
                self._protect(members[instance_id], is_protected)
        if refusals:
            raise ValidationError(refusals[0])
        for instance_id in instance_ids:
            self._protect(members[instance_id], is_protected)

    def _protect(self, member: InstanceState, is_protected: bool) -> None:
        member.protected_from_scale_in = is_protected
        self._member(member).will_be_protected = is_protected

    def complete_lifecycle_action(
        self, group: FakeAutoScalingGroup, hook: str, *, instance_id: str | None, token: str | None, result: str
    ) -> None:
        """CompleteLifecycleAction: release an instance from its hook (CONTINUE) or abandon its launch (ABANDON).

        Either `instance_id` or `token` is set. Raises ValidationError if the result is invalid, or this hook holds no
        such instance.
        """
        if result not in ("CONTINUE", "ABANDON"):
            raise ValidationError(f"Invalid lifecycle action result {result}: CONTINUE or ABANDON")
        self._held(group, hook, instance_id, token).result = result

    def record_heartbeat(
        self, group: FakeAutoScalingGroup, hook: str, *, instance_id: str | None, token: str | None
    ) -> None:
        """RecordLifecycleActionHeartbeat: extend a hook's hold of an instance by the hook's timeout."""
        wait = self._held(group, hook, instance_id, token)
        wait.deadline = min(self._monotonic() + wait.hook.heartbeat_timeout, wait.last_deadline)

    def suspend(self, group: FakeAutoScalingGroup, processes: Iterable[str], reason: str = "") -> None:
        """Suspend processes of a group. An empty reason means a user. A suspended process keeps its reason."""
        record = self._record(group)
        for process in processes:
            record.suspensions.setdefault(process, reason or f"User suspended at {_stamp()}")
        group._suspended_processes = sorted({*group._suspended_processes, *processes})

    def suspend_administratively(self, group: FakeAutoScalingGroup) -> None:
        """Suspend Launch as AWS does after launches have failed for a long time."""
        since = self._record(group).failing_since
        self.suspend(group, ["Launch"], ADMINISTRATIVE.format(since=since[1] if since else _stamp()))

    def resume(self, group: FakeAutoScalingGroup, processes: Iterable[str]) -> None:
        """Resume processes, whether a user or AWS suspended them, and retry a failed launch at once."""
        record = self._record(group)
        for process in processes:
            record.suspensions.pop(process, None)
        group._suspended_processes = sorted({*group._suspended_processes} - {*processes})
        record.no_launch_before, record.failing_since = 0.0, None

    def rebalance(self, instance_id: str) -> None:
        """Replace even a protected member after a rebalance recommendation, if its group has CapacityRebalance.

        AWS may wait until the new instance is in service. The local cloud terminates the member at once.
        """
        for group in self.groups():
            for member in list(group.instance_states):
                if group.capacity_rebalance and member.instance.id == instance_id:
                    cause = (
                        f"At {_stamp()} an instance was taken out of service in response to an EC2 instance rebalance"
                    )
                    self._begin_termination(group, member, f"{cause} recommendation.")

    def suspension_reason(self, group: FakeAutoScalingGroup, process: str) -> str:
        """Return why a process is suspended; empty if it is not."""
        return self._record(group).suspensions.get(process, "")

    def target_lifecycle_state(self, instance_id: str) -> str | None:
        """Return the target lifecycle state in an instance's metadata; None without a group."""
        for group in self.groups():
            for member in group.instance_states:
                if member.instance.id == instance_id:
                    return "Terminated" if member.lifecycle_state.startswith("Terminating") else "InService"
        return None

    def activities(self, group: FakeAutoScalingGroup) -> list[Activity]:
        """Return the scaling activities, newest first, at most `ACTIVITIES_KEPT`."""
        return self._record(group).activities

    # The methods below advance the Auto Scaling groups and their members over time.

    def reconcile(self) -> None:
        """Advance every member of every group by one lifecycle state.

        The server calls this every `aws.PASS_SECONDS`.
        """
        for group in self.groups():
            for member in list(group.instance_states):
                self._check_health(group, member)
                self._move(group, member)
            self._scale(group)

    def groups(self) -> Iterator[FakeAutoScalingGroup]:
        """Yield every group of every account and region."""
        for account in list(autoscaling_backends.values()):
            for backend in list(account.values()):
                yield from list(backend.autoscaling_groups.values())

    def _check_health(self, group: FakeAutoScalingGroup, member: InstanceState) -> None:
        if member.lifecycle_state not in ("InService", "Pending", "Pending:Wait"):
            return
        suspended = set(group._suspended_processes)
        life = self._ec2.life(member.instance.id)
        is_impaired = member.lifecycle_state == "InService" and bool(life and life.failed_checks)
        if (member.instance.state not in ("pending", "running") or is_impaired) and "HealthCheck" not in suspended:
            member.health_status = "Unhealthy"
        keeps = {"ReplaceUnhealthy", "Terminate"} & suspended
        has_ended = member.instance.state == "terminated" and "HealthCheck" not in suspended
        if has_ended and not self._answers.ended_member_stays:
            keeps = set()
        if member.health_status == "Unhealthy" and not keeps:
            cause = (
                f"At {_stamp()} an instance was taken out of service in response to an EC2 health check indicating "
                "it has been terminated or stopped."
            )
            self._begin_termination(group, member, cause)

    def _move(self, group: FakeAutoScalingGroup, member: InstanceState) -> None:
        own = self._member(member)
        if own.wait:
            result = own.wait.result or (
                own.wait.hook.default_result if self._monotonic() >= own.wait.deadline else None
            )
            if result is None:
                return
            own.wait = None
            if member.lifecycle_state == "Pending:Wait" and result == "ABANDON":
                self._begin_termination(
                    group, member, f"At {_stamp()} the lifecycle action of the launch was abandoned."
                )
            elif result == "ABANDON" and _retains(group):
                member.lifecycle_state = RETAINED
            else:
                member.lifecycle_state = member.lifecycle_state.removesuffix(":Wait")
        if member.lifecycle_state == "Pending" and member.instance.state == "running":
            if not own.launch_hook_done and self._hold(group, member, LAUNCHING):
                own.launch_hook_done = True
                return
            member.lifecycle_state = "InService"
            member.protected_from_scale_in = (
                own.will_be_protected
                if self._answers.protection_set_at == "launch"
                else bool(group.new_instances_protected_from_scale_in)
            )
            if own.launch:
                _finish(own.launch)
                self._tell(group, member.instance.id, own.launch, is_launch=True)
        elif member.lifecycle_state == "Terminating":
            self._finish_termination(group, member)

    def _scale(self, group: FakeAutoScalingGroup) -> None:
        suspended = set(group._suspended_processes)
        active = [
            member
            for member in group.instance_states
            if member.lifecycle_state.split(":")[0] in ("Pending", "InService")
        ]
        missing = (group.desired_capacity or 0) - len(active)
        record = self._record(group)
        if missing > 0 and "Launch" not in suspended and self._monotonic() >= record.no_launch_before:
            self._launch(group, missing)
        elif missing < 0 and "Terminate" not in suspended:
            for member in [member for member in active if not member.protected_from_scale_in][:-missing]:
                self._begin_termination(
                    group, member, f"At {_stamp()} an instance was selected for termination: desired capacity is lower."
                )
                missing += 1
            if missing < 0 and record.protected_at_desired != group.desired_capacity:
                record.protected_at_desired = group.desired_capacity
                self._note(group, ALL_PROTECTED, status="Cancelled", message=ALL_PROTECTED)
        if missing >= 0:
            record.protected_at_desired = None

    def _launch(self, group: FakeAutoScalingGroup, count: int) -> None:
        """Launch up to `count` instances while capacity is free, of the group's types in the order of its overrides."""
        record, types = self._record(group), instance_types(group)
        subnet = group.vpc_zone_identifier.split(",")[0] if group.vpc_zone_identifier else None
        launched = sum(map(len, self._start(group, count, group.availability_zones[0], subnet).values()))
        if launched < count:
            record.no_launch_before = self._monotonic() + self._faults.conditions.launch_retry_seconds
            message = LAUNCH_FAILED.format(type=types[-1], zone=group.availability_zones[0])
            failure = self._note(
                group, f"Launching a new EC2 instance.  Status Reason: {message}", status="Failed", message=message
            )
            self._tell(group, "", failure, is_launch=True)
            if not launched:
                self._give_up(group, record)

    def _start(self, group: FakeAutoScalingGroup, count: int, zone: str, subnet: str | None) -> dict[str, list[str]]:
        """Start up to `count` instances while capacity is free, and return their ids by instance type."""
        started: dict[str, list[str]] = {}
        for instance_type in instance_types(group):
            possible = self._ec2.free_count(instance_type, count - sum(map(len, started.values())))
            if possible:
                self._record(group).failing_since = None
                started[instance_type] = self._run(group, instance_type, possible, zone, subnet)
        return started

    def _run(
        self, group: FakeAutoScalingGroup, instance_type: str, count: int, zone: str, subnet: str | None
    ) -> list[str]:
        # Call EC2 here, because moto's Auto Scaling would launch the template's default version, not the group's
        # version.
        reservation = group.ec2_backend.run_instances(
            group.image_id,
            count,
            group.user_data,
            group.security_groups,
            instance_type=instance_type,
            is_instance_type_default=False,
            tags={
                "instance": {
                    **group.get_propagated_tags(),
                    **group.instance_tags,
                    "aws:autoscaling:groupName": group.name,
                }
            },
            placement=zone,
            launch_config=group.launch_config,
            launch_template=_template_of(group),
            subnet_id=subnet,
        )
        for instance in reservation.instances:
            instance.autoscaling_group = group
            is_protected = bool(group.new_instances_protected_from_scale_in)
            member = InstanceState(
                instance,
                lifecycle_state="Pending",
                protected_from_scale_in=is_protected and self._answers.pending_member_shows_protection,
            )
            self._member(member).will_be_protected = is_protected
            group.instance_states.append(member)
            cause = f"At {_stamp()} an instance was started in response to a difference between desired and actual"
            self._member(member).launch = self._note(
                group,
                f"Launching a new EC2 instance: {instance.id}",
                status="InProgress",
                cause=f"{cause} capacity.",
            )
        return [instance.id for instance in reservation.instances]

    def _give_up(self, group: FakeAutoScalingGroup, record: _Record) -> None:
        """Suspend the process Launch, as AWS does, if all launches have failed for the time in `Conditions`."""
        record.failing_since = record.failing_since or (self._monotonic(), _stamp())
        after = self._faults.conditions.administrative_suspension_seconds
        if after is not None and self._monotonic() - record.failing_since[0] >= after:
            self.suspend_administratively(group)

    def _begin_termination(self, group: FakeAutoScalingGroup, member: InstanceState, cause: str) -> None:
        if member.lifecycle_state == RETAINED:
            member.lifecycle_state = "Terminating"  # The hook has ended, so it does not hold the instance again.
        if member.lifecycle_state.startswith("Terminating"):
            return
        own = self._member(member)
        own.wait = None
        own.termination = self._note(
            group, f"Terminating EC2 instance: {member.instance.id}", status="InProgress", cause=cause
        )
        member.lifecycle_state = "Terminating"
        if member.instance.state != "terminated" or self._answers.hook_holds_ended_member:
            self._hold(group, member, TERMINATING)

    def _finish_termination(self, group: FakeAutoScalingGroup, member: InstanceState) -> None:
        if member.instance.state != "terminated":
            group.ec2_backend.terminate_instances([member.instance.id])
        group.instance_states.remove(member)
        own = self._members.pop(member.instance.id, None)
        if own and own.termination:
            _finish(own.termination)
            self._tell(group, member.instance.id, own.termination, is_launch=False)

    def _hold(self, group: FakeAutoScalingGroup, member: InstanceState, transition: str) -> bool:
        hooks = [
            hook
            for hook in group.autoscaling_backend.lifecycle_hooks.values()
            if hook.auto_scaling_group_name == group.name and hook.lifecycle_transition == transition
        ]
        if not hooks:
            return False
        hook, now, token = hooks[0], self._monotonic(), str(uuid.uuid4())
        longest = min(GLOBAL_TIMEOUT_SECONDS, 100 * hook.heartbeat_timeout)
        self._member(member).wait = _Wait(hook, now + hook.heartbeat_timeout, now + longest, token)
        member.lifecycle_state += ":Wait"
        is_launch = transition == LAUNCHING
        detail = {
            "LifecycleActionToken": token,
            "AutoScalingGroupName": group.name,
            "LifecycleHookName": hook.name,
            "EC2InstanceId": member.instance.id,
            "LifecycleTransition": transition,
            "Origin": "EC2" if is_launch else "AutoScalingGroup",
            "Destination": "AutoScalingGroup" if is_launch else "EC2",
        }
        self._announcements.put(lifecycle_action(_owner(group), group.arn, detail, is_launch=is_launch))
        return True

    def _tell(self, group: FakeAutoScalingGroup, instance_id: str, activity: Activity, *, is_launch: bool) -> None:
        is_success = activity.status_code != "Failed"
        detail = {
            # AWS documents InProgress also as the status of a successful launch.
            "StatusCode": "InProgress" if is_success else "Failed",
            "Description": activity.description,
            "AutoScalingGroupName": group.name,
            "ActivityId": activity.activity_id,
            "Details": {
                "Availability Zone": group.availability_zones[0],
                "Subnet ID": (group.vpc_zone_identifier or "").split(",")[0],
            },
            "RequestId": activity.activity_id,
            "StatusMessage": activity.status_message or "",
            "EndTime": stamp(activity.end_time or datetime.now(UTC)),
            "EC2InstanceId": instance_id,
            "StartTime": stamp(activity.start_time),
            "Cause": activity.cause,
        }
        self._announcements.put(
            scaling_outcome(_owner(group), group.arn, instance_id, detail, is_launch=is_launch, is_success=is_success)
        )

    def _held(self, group: FakeAutoScalingGroup, hook: str, instance_id: str | None, token: str | None) -> _Wait:
        for member in group.instance_states:
            wait = self._member(member).wait
            if (
                wait
                and wait.hook.name == hook
                and (member.instance.id == instance_id or (token is not None and wait.token == token))
            ):
                return wait
        raise ValidationError(f"No active Lifecycle Action found with instance ID {instance_id}")

    def _record(self, group: FakeAutoScalingGroup) -> _Record:
        return self._records.setdefault(group.arn, _Record())

    def _member(self, member: InstanceState) -> _Member:
        return self._members.setdefault(member.instance.id, _Member())

    def _note(
        self, group: FakeAutoScalingGroup, description: str, *, status: str, cause: str = "", message: str | None = None
    ) -> Activity:
        activity = Activity(description, cause or description, group, status_code=status)
        activity.status_message = message
        activity.details = f'{{"Availability Zone":"{group.availability_zones[0]}"}}'
        if status == "InProgress":
            activity.end_time = None
        else:
            activity.progress = 100
        activities = self._record(group).activities
        activities.insert(0, activity)
        del activities[ACTIVITIES_KEPT:]
        return activity


def instance_types(group: FakeAutoScalingGroup) -> list[str]:
    """Return the types that a group launches, in order of priority: of its overrides, else of its launch template."""
    policy = group.mixed_instances_policy or {}
    overrides = policy.get("LaunchTemplate", {}).get("Overrides") or ()
    types = [override["InstanceType"] for override in overrides if "InstanceType" in override]
    return types or [group.instance_type]


def find_group(backend: AutoScalingBackend, name: str | None) -> FakeAutoScalingGroup:
    """Return a group by name. Raises ValidationError with AWS's message if it does not exist."""
    if name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return backend.autoscaling_groups[name]


def find_member(backend: AutoScalingBackend, instance_id: str | None) -> tuple[FakeAutoScalingGroup, InstanceState]:
    """Return the group and the member with an instance id. Raises ValidationError with AWS's message without one."""
    for group in backend.autoscaling_groups.values():
        for member in group.instance_states:
            if member.instance.id == instance_id:
                return group, member
    raise ValidationError(f"Instance Id not found - No managed instance found for instance ID: {instance_id}")


def _require_bounds(min_size: int, max_size: int, desired: int | None) -> None:
    if min_size > max_size:
        raise ValidationError(f"Max bound, {max_size}, must be greater than or equal to min bound, {min_size}")
    if desired is not None and not min_size <= desired <= max_size:
        raise ValidationError(
            f"Desired capacity:{desired} must be between the specified min size:{min_size} and max size:{max_size}"
        )


def _retains(group: FakeAutoScalingGroup) -> bool:
    triggers = (group.instance_lifecycle_policy or {}).get("RetentionTriggers") or {}
    return bool(triggers.get("TerminateHookAbandon") == "retain")


def _owner(group: FakeAutoScalingGroup) -> Owner:
    return Owner(group.autoscaling_backend.account_id, group.autoscaling_backend.region_name)


def _template_of(group: FakeAutoScalingGroup) -> dict[str, str] | None:
    if group.ec2_launch_template is None:
        return None
    version = group.ec2_launch_template.get_version(group.launch_template_version)
    return {"LaunchTemplateId": group.ec2_launch_template.id, "Version": str(version.number)}


def _finish(activity: Activity) -> None:
    activity.status_code, activity.progress, activity.end_time = "Successful", 100, datetime.now(UTC)


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
