"""Implements `CloudOperator` with boto3. Changes an Auto Scaling group only if it has the tag `everstep:fleet`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import CloudError, GroupNotOurs, InvalidRequest, NotFound
from control_plane.cloud.images import creation_times
from control_plane.cloud.instance_batches import described
from control_plane.cloud.instance_types import InstanceTypes
from control_plane.cloud.operator import (
    FLEET_TAG,
    WORK_TAGS,
    Ec2State,
    GroupState,
    InstanceState,
    InstanceStatus,
    Launched,
    LaunchFailure,
    LaunchTemplateRef,
    LifecycleHook,
    MemberState,
    MixedInstances,
    ScheduledEvent,
)
from control_plane.cloud.scaling_activities import recent_failures
from control_plane.steady_clock import steady_now
from everstep.protocol.ids import NodeId

log = logging.getLogger(__name__)

SETTINGS_TTL_SECONDS: Final = 30.0
"""Seconds for which the operator caches the lifecycle hooks, scaling policies and instance type of a group. The control
plane detects a person's change after this time at the latest.
"""
GROUPS: Final = "AutoScalingGroups"
GROUPS_PER_CALL: Final = 100
"""Maximum number of group names and of results per call of DescribeAutoScalingGroups. AWS's default is 50."""
DESCRIBED_PER_CALL: Final = 500
"""Instance ids per call of DescribeInstances. AWS documents no limit. Karpenter uses the same number in production."""
STATUSES_PER_CALL: Final = 100
"""Limit of instance ids per call of DescribeInstanceStatus and DescribeInstanceTopology."""
MEMBERS_PER_CALL: Final = 50
"""Limit of instance ids per call of SetInstanceProtection."""


@dataclass(frozen=True, slots=True)
class _Settings:
    hooks: tuple[LifecycleHook, ...]
    policies: tuple[str, ...]
    instance_type: str
    template: LaunchTemplateRef | None
    read_at: float
    trouble: str


class AwsOperator:
    """Implements `CloudOperator` with boto3. Thread-safe."""

    def __init__(self, connection: Connection, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._auto_scaling = connection.client("autoscaling")
        self._ec2 = connection.client("ec2")
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._settings: dict[str, _Settings] = {}
        self._tagged: set[str] = set()
        self._types = InstanceTypes(self._ec2, monotonic)
        self._failures: dict[str, tuple[LaunchFailure, ...]] = {}

    def describe_group(self, name: str) -> GroupState:
        return self.complete_group(self._listed(name))

    def list_groups(self, names: Collection[str]) -> Mapping[str, GroupState]:
        wanted, found = sorted(set(names)), dict[str, GroupState]()
        for start in range(0, len(wanted), GROUPS_PER_CALL):
            with translated():
                pages = self._auto_scaling.get_paginator("describe_auto_scaling_groups").paginate(
                    AutoScalingGroupNames=wanted[start : start + GROUPS_PER_CALL],
                    PaginationConfig={"PageSize": GROUPS_PER_CALL},
                )
                found |= {group["AutoScalingGroupName"]: _group(group) for page in pages for group in page[GROUPS]}
        return found

    def complete_group(self, group: GroupState) -> GroupState:
        self._check_tag(group)
        settings = self._group_settings(group.name, group.launch_template, group.members)
        kind, mixed = _instance_type(settings.instance_type, group.mixed), self._with_shapes(group.mixed)
        types = {kind, *(mixed.instance_types if mixed else ()), *(member.instance_type for member in group.members)}
        return replace(
            group,
            hooks=settings.hooks,
            scaling_policies=settings.policies,
            instance_type=kind,
            mixed=mixed,
            encrypting_types=self._types.encrypting(types - {""}),
        )

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        list_reservations = partial(self._paged, "describe_instances", "Reservations")
        reservations = described(list_reservations, instance_ids, size=DESCRIBED_PER_CALL)
        states = [_instance(instance) for reservation in reservations for instance in reservation["Instances"]]
        found = {state.instance_id: state for state in states}
        return {id: found.get(id) or InstanceState(instance_id=id, state=Ec2State.ABSENT) for id in instance_ids}

    def _paged(self, operation: str, key: str, ids: list[NodeId], **options: Any) -> list[dict[str, Any]]:
        with translated():
            pages = self._ec2.get_paginator(operation).paginate(InstanceIds=ids, **options)
            return [entry for page in pages for entry in page[key]]

    def set_desired(self, name: str, desired_count: int) -> None:
        self._require_tag(name)
        with translated():
            self._auto_scaling.set_desired_capacity(
                AutoScalingGroupName=name, DesiredCapacity=desired_count, HonorCooldown=False
            )

    def launch_instances(self, name: str, count: int, *, zone: str, token: str) -> Launched:
        self._require_tag(name)
        with translated():
            answer = self._auto_scaling.launch_instances(
                AutoScalingGroupName=name,
                RequestedCapacity=count,
                ClientToken=token,
                AvailabilityZones=[zone],
                RetryStrategy="retry-with-group-configuration",
            )
        now = steady_now()
        failures = tuple(
            LaunchFailure(at=now, message=each.get("ErrorMessage") or each["ErrorCode"], code=each["ErrorCode"])
            for each in answer.get("Errors") or ()
        )
        with self._lock:
            self._failures[name] = failures
        ids = [id for each in answer.get("Instances") or () for id in each.get("InstanceIds") or ()]
        return Launched(instance_ids=tuple(map(NodeId, ids)), failures=failures)

    def terminate_member(self, instance_id: NodeId, *, decrement: bool) -> None:
        with translated():
            answer = self._auto_scaling.describe_auto_scaling_instances(InstanceIds=[instance_id])
        if not answer["AutoScalingInstances"]:
            raise NotFound(f"{instance_id} is not a member of any Auto Scaling group")
        (member,) = answer["AutoScalingInstances"]
        self._require_tag(member["AutoScalingGroupName"])
        if member["LifecycleState"].startswith("Terminat"):
            return  # The instance is terminating. Send no second request: it would lower the desired capacity again.
        with translated():
            self._auto_scaling.terminate_instance_in_auto_scaling_group(
                InstanceId=instance_id, ShouldDecrementDesiredCapacity=decrement
            )

    def reboot_member(self, group: str, instance_id: NodeId) -> None:
        self._require_member(group, instance_id)
        with translated():
            self._ec2.reboot_instances(InstanceIds=[instance_id])

    def strike_member(self, group: str, instance_id: NodeId) -> None:
        self._require_member(group, instance_id)
        with translated():
            self._ec2.terminate_instances(InstanceIds=[instance_id])

    def _require_member(self, group: str, instance_id: NodeId) -> None:
        state = self._listed(group)
        self._check_tag(state)
        if instance_id not in {member.instance_id for member in state.members if not member.is_leaving}:
            raise NotFound(f"{instance_id} is not a member of the Auto Scaling group {group!r}, or is leaving it")

    def set_work_tags(self, instance_ids: Collection[NodeId], tags: Mapping[str, str]) -> None:
        ids = sorted(instance_ids)
        for start in range(0, len(ids), DESCRIBED_PER_CALL):
            batch = ids[start : start + DESCRIBED_PER_CALL]
            with translated():
                if tags:
                    given = [{"Key": key, "Value": value} for key, value in tags.items()]
                    self._ec2.create_tags(Resources=batch, Tags=given)
                else:
                    self._ec2.delete_tags(Resources=batch, Tags=[{"Key": key} for key in WORK_TAGS])

    def complete_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        self._require_tag(group)
        with _unless_hook_has_ended():
            self._auto_scaling.complete_lifecycle_action(
                AutoScalingGroupName=group,
                LifecycleHookName=hook,
                InstanceId=instance_id,
                LifecycleActionResult="CONTINUE",
            )

    def hold_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        self._require_tag(group)
        with _unless_hook_has_ended():
            self._auto_scaling.record_lifecycle_action_heartbeat(
                AutoScalingGroupName=group, LifecycleHookName=hook, InstanceId=instance_id
            )

    def statuses(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceStatus]:
        list_statuses = partial(self._paged, "describe_instance_status", "InstanceStatuses", IncludeAllInstances=True)
        statuses = described(list_statuses, instance_ids, size=STATUSES_PER_CALL)
        found = {NodeId(status["InstanceId"]): _status(status) for status in statuses}
        return {id: status for id, status in found.items() if status != InstanceStatus()}

    def network_nodes(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, tuple[str, ...]]:
        list_topology = partial(self._paged, "describe_instance_topology", "Instances")
        instances = described(list_topology, instance_ids, size=STATUSES_PER_CALL)
        found = {NodeId(instance["InstanceId"]): tuple(instance.get("NetworkNodes") or ()) for instance in instances}
        return {id: network for id, network in found.items() if network}

    def image_times(self, image_ids: Collection[str]) -> Mapping[str, datetime]:
        """Return the creation times of machine images (see `CloudOperator.image_times`)."""
        return creation_times(self._ec2, image_ids)

    def console_output(self, instance_id: NodeId) -> bytes:
        with translated():
            answer = self._ec2.get_console_output(InstanceId=instance_id, Latest=True)
        output: str = answer.get("Output", "")  # boto3 has already decoded the output from Base64.
        return output.encode(errors="replace")

    def recent_launch_failures(self, name: str) -> tuple[LaunchFailure, ...]:
        with translated():
            answer = self._auto_scaling.describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=100)
        with self._lock:
            own = self._failures.get(name, ())
        return recent_failures(answer["Activities"], own)

    def protect_new_instances(self, name: str) -> None:
        self._require_tag(name)
        with translated():
            self._auto_scaling.update_auto_scaling_group(
                AutoScalingGroupName=name, NewInstancesProtectedFromScaleIn=True
            )

    def protect_members(self, name: str, instance_ids: Collection[NodeId]) -> None:
        self._require_tag(name)
        ids = sorted(instance_ids)
        for start in range(0, len(ids), MEMBERS_PER_CALL):
            with translated():
                self._auto_scaling.set_instance_protection(
                    AutoScalingGroupName=name,
                    InstanceIds=ids[start : start + MEMBERS_PER_CALL],
                    ProtectedFromScaleIn=True,
                )

    def suspend_processes(self, name: str, processes: Collection[str]) -> None:
        self._switch_processes(self._auto_scaling.suspend_processes, name, processes)

    def resume_processes(self, name: str, processes: Collection[str]) -> None:
        self._switch_processes(self._auto_scaling.resume_processes, name, processes)

    def _switch_processes(self, call: Callable[..., object], name: str, processes: Collection[str]) -> None:
        if not processes:
            return  # A request without process names would change all processes.
        self._require_tag(name)
        with translated():
            call(AutoScalingGroupName=name, ScalingProcesses=sorted(processes))

    def put_termination_hook(self, name: str, hook: LifecycleHook) -> None:
        self._require_tag(name)
        with translated():
            self._auto_scaling.put_lifecycle_hook(
                AutoScalingGroupName=name,
                LifecycleHookName=hook.name,
                LifecycleTransition=hook.transition,
                HeartbeatTimeout=int(hook.heartbeat_timeout.total_seconds()),
                DefaultResult=hook.default_result,
            )
        self._forget_settings(name)

    def _listed(self, name: str) -> GroupState:
        group = self.list_groups([name]).get(name)
        if group is None:
            raise NotFound(f"Auto Scaling group {name!r} does not exist")
        return group

    def _check_tag(self, group: GroupState) -> None:
        with self._lock:
            (self._tagged.add if group.is_tagged else self._tagged.discard)(group.name)
        if not group.is_tagged:
            raise GroupNotOurs(
                f"Auto Scaling group {group.name!r} has no tag {FLEET_TAG!r}; Everstep changes only groups with this "
                "tag"
            )

    def _require_tag(self, name: str) -> None:
        with self._lock:
            if name in self._tagged:
                return
        self._check_tag(self._listed(name))

    def _group_settings(
        self, name: str, template: LaunchTemplateRef | None, members: Sequence[MemberState]
    ) -> _Settings:
        now = self._monotonic()
        with self._lock:
            known = self._settings.get(name)
        if known and known.template == template and now - known.read_at < SETTINGS_TTL_SECONDS:
            return known
        with translated():
            hooks = self._auto_scaling.describe_lifecycle_hooks(AutoScalingGroupName=name)["LifecycleHooks"]
            pages = self._auto_scaling.get_paginator("describe_policies").paginate(AutoScalingGroupName=name)
            policies = tuple(policy["PolicyName"] for page in pages for policy in page["ScalingPolicies"])
        trouble = ""
        try:
            instance_type = self._instance_type(template)
        except CloudError as error:
            # A person may have deleted the launch template while the instances run. The control plane still needs the
            # group's state, so use the last known instance type or that of a member.
            instance_type = known.instance_type if known else next((member.instance_type for member in members), "")
            if not instance_type:
                raise
            trouble = error.message
            if known is None or known.trouble != trouble:
                log.warning("%s: its launch template cannot be read: %s", name, trouble)
        settings = _Settings(tuple(_hook(hook) for hook in hooks), policies, instance_type, template, now, trouble)
        with self._lock:
            self._settings[name] = settings
        return settings

    def _forget_settings(self, name: str) -> None:
        with self._lock:
            self._settings.pop(name, None)

    def _instance_type(self, template: LaunchTemplateRef | None) -> str:
        if template is None:
            return ""
        with translated():
            answer = self._ec2.describe_launch_template_versions(
                LaunchTemplateId=template.template_id, Versions=[template.version]
            )
        versions = answer["LaunchTemplateVersions"]
        return str(versions[0]["LaunchTemplateData"].get("InstanceType", "")) if versions else ""

    def _with_shapes(self, mixed: MixedInstances | None) -> MixedInstances | None:
        if mixed is None or mixed.features or len(mixed.instance_types) < 2:
            return mixed
        shapes = self._types.shapes(mixed.instance_types)
        return replace(mixed, shapes={each: shapes[each] for each in mixed.instance_types})


@contextmanager
def _unless_hook_has_ended() -> Iterator[None]:
    """Translate errors, except the error that the lifecycle hook no longer holds the instance, which is ignored."""
    try:
        with translated():
            yield
    except (NotFound, InvalidRequest) as error:
        if "No active Lifecycle Action found" not in error.message:
            raise


def _group(group: Mapping[str, Any]) -> GroupState:
    suspended = group["SuspendedProcesses"]
    return GroupState(
        name=group["AutoScalingGroupName"],
        desired_count=group["DesiredCapacity"],
        min_size=group["MinSize"],
        max_size=group["MaxSize"],
        availability_zones=tuple(group["AvailabilityZones"]),
        members=tuple(_member(member) for member in group["Instances"]),
        suspended_processes=frozenset(process["ProcessName"] for process in suspended),
        new_instances_protected=group["NewInstancesProtectedFromScaleIn"],
        hooks=(),
        scaling_policies=(),
        tags={tag["Key"]: tag.get("Value", "") for tag in group["Tags"]},
        launch_template=_template(group),
        mixed=_mixed(group.get("MixedInstancesPolicy")),
        has_capacity_rebalance=group.get("CapacityRebalance", False),
        has_warm_pool=bool(group.get("WarmPoolConfiguration")),
        status=group.get("Status", ""),
        suspension_reasons={process["ProcessName"]: process.get("SuspensionReason") or "" for process in suspended},
    )


def _template(group: Mapping[str, Any]) -> LaunchTemplateRef | None:
    policy = group.get("MixedInstancesPolicy") or {}
    found = group.get("LaunchTemplate") or (policy.get("LaunchTemplate") or {}).get("LaunchTemplateSpecification")
    if not found:
        return None
    return LaunchTemplateRef(
        template_id=found["LaunchTemplateId"],
        name=found.get("LaunchTemplateName", ""),
        version=found.get("Version") or "$Default",
    )


def _mixed(policy: Mapping[str, Any] | None) -> MixedInstances | None:
    if not policy:
        return None
    overrides = (policy.get("LaunchTemplate") or {}).get("Overrides") or []
    features = ("InstanceRequirements", "WeightedCapacity", "LaunchTemplateSpecification", "ImageId")
    return MixedInstances(
        instance_types=tuple(dict.fromkeys(each["InstanceType"] for each in overrides if "InstanceType" in each)),
        features=tuple(name for name in features if any(name in override for override in overrides)),
    )


def _instance_type(of_template: str, mixed: MixedInstances | None) -> str:
    if mixed is None or not (mixed.instance_types or mixed.features):
        return of_template
    return next(iter(mixed.instance_types), "")


def _member(member: dict[str, Any]) -> MemberState:
    return MemberState(
        instance_id=NodeId(member["InstanceId"]),
        lifecycle_state=member["LifecycleState"],
        health_status=member["HealthStatus"],
        is_protected=member["ProtectedFromScaleIn"],
        availability_zone=member["AvailabilityZone"],
        instance_type=member.get("InstanceType", ""),
    )


def _hook(hook: dict[str, Any]) -> LifecycleHook:
    return LifecycleHook(
        name=hook["LifecycleHookName"],
        transition=hook["LifecycleTransition"],
        heartbeat_timeout=timedelta(seconds=hook["HeartbeatTimeout"]),
        default_result=hook.get("DefaultResult", "ABANDON"),
    )


def _instance(instance: dict[str, Any]) -> InstanceState:
    reason = instance.get("StateReason") or {}
    return InstanceState(
        instance_id=NodeId(instance["InstanceId"]),
        state=Ec2State(instance["State"]["Name"]),
        state_code=reason.get("Code", ""),
        state_reason=reason.get("Message") or reason.get("Code") or instance.get("StateTransitionReason", ""),
        private_ip=instance.get("PrivateIpAddress"),
        instance_type=instance.get("InstanceType", ""),
        availability_zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        launched_at=instance.get("LaunchTime"),
        image_id=instance.get("ImageId", ""),
        capacity_reservation_id=instance.get("CapacityReservationId", ""),
        work_tags={tag["Key"]: tag["Value"] for tag in instance.get("Tags", ()) if tag["Key"] in WORK_TAGS},
    )


def _status(status: dict[str, Any]) -> InstanceStatus:
    checks = {"system": "SystemStatus", "instance": "InstanceStatus"}
    failed = tuple(name for name, key in checks.items() if (status.get(key) or {}).get("Status") == "impaired")
    return InstanceStatus(events=tuple(_scheduled(status)), failed_checks=failed)


def _scheduled(status: dict[str, Any]) -> Iterator[ScheduledEvent]:
    """Yield the scheduled events that have not ended."""
    # AWS lists a finished event for a week, and puts the word `[Completed]` or `[Canceled]` before its
    # description.
    for event in status.get("Events") or ():
        description = event.get("Description", "")
        if not description.startswith(("[Completed]", "[Canceled]")):
            yield ScheduledEvent(
                event_id=event.get("InstanceEventId") or event["Code"],
                code=event["Code"],
                description=description,
                not_before=event.get("NotBefore"),
            )
