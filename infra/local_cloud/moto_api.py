"""Connects moto 5.2.5 with the engine (`auto_scaling` and `ec2`). Only this module replaces functions of moto.

moto answers all calls that the engine does not implement. This module uses private names of moto, so its version is
pinned, and the contract tests check the resulting service.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from functools import wraps
from typing import Any

from botocore import xform_name
from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, InstanceState
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import get_service_model
from moto.ec2.exceptions import InvalidInstanceIdError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.responses.launch_templates import LaunchTemplates
from moto.ec2.responses.tags import TagResponse
from moto.ec2.utils import parse_user_data
from moto.sts.models import sts_backends

from infra.local_cloud.auto_scaling import PROCESSES, AutoScaling, find_group, find_member
from infra.local_cloud.ec2 import Ec2, StatusCheck
from infra.local_cloud.instance_refresh import InstanceRefreshes
from infra.local_cloud.moto_repairs import repair
from infra.local_cloud.rates import READING
from infra.local_cloud.signatures import IssuedKey
from infra.local_cloud.synchronous_launches import LaunchRequest, SynchronousLaunches, zone_id

MAX_ACTIVITIES_PER_PAGE = 100
NEW_SETTINGS = ("DeletionProtection", "InstanceLifecyclePolicy")
"""Settings of a group that moto does not store, although the API accepts them."""
NAMED_GROUP_ACTIONS = (
    "attach_instances",
    "delete_lifecycle_hook",
    "describe_lifecycle_hooks",
    "describe_warm_pool",
    "detach_instances",
    "enable_metrics_collection",
    "enter_standby",
    "exit_standby",
    "put_lifecycle_hook",
    "put_scaling_policy",
    "put_warm_pool",
)
"""Actions that fail inside moto for a missing group. This module answers them with AWS's error."""


def install(ec2: Ec2, auto_scaling: AutoScaling, refreshes: InstanceRefreshes, launches: SynchronousLaunches) -> None:
    """Make moto call the engine until this process ends. Must be called once, before the first request."""
    repair()
    _install_instances(ec2)
    _install_launch_templates()
    _install_groups(auto_scaling)
    _install_members(auto_scaling)
    _install_refreshes(refreshes)
    _install_launches(launches)
    _lock_operated_groups()


def session_key(access_key_id: str) -> IssuedKey | None:
    """Return the key of an assumed role that moto's STS issued, or None. Called under the server's lock."""
    for partitions in sts_backends.values():
        for backend in partitions.values():
            role = backend.get_assumed_role_from_access_key(access_key_id)
            if role is not None:
                expires_at = role.expiration if role.expiration.tzinfo else role.expiration.replace(tzinfo=UTC)
                return IssuedKey(
                    secret_access_key=role.secret_access_key, session_token=role.session_token, expires_at=expires_at
                )
    return None


def _install_instances(ec2: Ec2) -> None:
    run, start, reboot = EC2Backend.run_instances, EC2Backend.start_instances, EC2Backend.reboot_instances
    terminate = EC2Backend.terminate_instances

    def run_instances(self: EC2Backend, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
        ec2.require_capacity(self, kwargs.get("instance_type", ""), count)
        reservation = run(self, image_id, count, *args, **kwargs)
        for instance in reservation.instances:
            ec2.launched(instance)
        return reservation

    def start_instances(self: EC2Backend, instance_ids: list[str]) -> Any:
        stopped = [instance for instance in self.get_multi_instances_by_id(instance_ids) if instance.state == "stopped"]
        answer = start(self, instance_ids)
        for instance in stopped:
            ec2.boot(instance)
        return answer

    def reboot_instances(self: EC2Backend, instance_ids: list[str]) -> Any:
        answer = reboot(self, instance_ids)
        for instance in answer:
            ec2.boot(instance)
        return answer

    def terminate_instances(self: EC2Backend, instance_ids: list[str]) -> Any:
        answer = terminate(self, instance_ids)
        for instance, _ in answer:
            ec2.ended(instance)
        return answer

    def describe_instance_topology(self: InstanceResponse) -> ActionResult:
        ids = self._get_param("InstanceIds", [])
        filters = [{"name": name, "values": values} for name, values in self._filters_from_querystring().items()]
        found = (
            self.ec2_backend.get_multi_instances_by_id(ids, filters) if ids else self.ec2_backend.all_instances(filters)
        )
        return ActionResult(
            {
                "Instances": [
                    {
                        "InstanceId": instance.id,
                        "InstanceType": instance.instance_type,
                        "NetworkNodes": ec2.topology(instance),
                        "AvailabilityZone": instance.placement.zone,
                        "ZoneId": zone_id(instance.placement.zone),
                    }
                    for instance in found
                    if instance.state in ("pending", "running")
                ]
            }
        )

    def check(which: StatusCheck) -> property:
        return property(lambda instance: ec2.status(instance, which))

    def requiring_known_ids(find: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(find)
        def checked(self: EC2Backend, instance_ids: list[str], filters: Any = None) -> Any:
            found = {instance.id for instance in self.all_instances()}
            absent = [each for each in instance_ids if each not in found]
            if absent:
                raise InvalidInstanceIdError(absent if ec2.answers.unknown_ids_named == "all" else absent[:1])
            return find(self, instance_ids, filters)

        return checked

    def requiring_instances(change: Callable[[TagResponse], ActionResult]) -> Callable[[TagResponse], ActionResult]:
        @wraps(change)
        def checked(self: TagResponse) -> ActionResult:
            ids = [each for each in self._get_param("Resources", []) if each.startswith("i-")]
            if ids:
                self.ec2_backend.get_multi_instances_by_id(ids)
            return change(self)

        return checked

    TagResponse.create_tags = requiring_instances(TagResponse.create_tags)
    TagResponse.delete_tags = requiring_instances(TagResponse.delete_tags)
    Instance.instance_status, Instance.system_status = check("instance"), check("system")
    Instance.events = property(ec2.scheduled_events)
    InstanceResponse.describe_instance_topology = describe_instance_topology
    EC2Backend.run_instances = run_instances
    EC2Backend.start_instances = start_instances
    EC2Backend.terminate_instances = terminate_instances
    EC2Backend.reboot_instances = reboot_instances
    for finder in ("get_multi_instances_by_id", "get_reservations_by_instance_ids"):
        setattr(EC2Backend, finder, requiring_known_ids(getattr(EC2Backend, finder)))


def _install_launch_templates() -> None:
    def create_launch_template_version(self: LaunchTemplates) -> ActionResult:
        name, template_id = self._get_param("LaunchTemplateName"), self._get_param("LaunchTemplateId")
        backend = self.ec2_backend
        template = backend.get_launch_template_by_name(name) if name else backend.get_launch_template(template_id)
        data = dict(self._get_param("LaunchTemplateData", {}))
        user_data = self._get_param("LaunchTemplateData.UserData")
        if user_data:  # Encode the user data, because moto's launches fail without the encoding.
            data["UserData"] = parse_user_data(user_data)
        source = self._get_param("SourceVersion")
        if source:
            data = {**template.get_version(source).data, **data}
        self.error_on_dryrun()
        version = template.create_version(data, self._get_param("VersionDescription"))
        return ActionResult(
            {
                "LaunchTemplateVersion": {
                    "CreateTime": version.create_time,
                    "CreatedBy": f"arn:{self.partition}:iam::{self.current_account}:root",
                    "DefaultVersion": template.is_default(version),
                    "LaunchTemplateData": version.data,
                    "LaunchTemplateId": template.id,
                    "LaunchTemplateName": template.name,
                    "VersionDescription": version.description,
                    "VersionNumber": version.number,
                }
            }
        )

    def launch_template_of(member: InstanceState) -> dict[str, str] | None:
        tags = {tag["key"]: tag["value"] for tag in member.instance.get_tags()}
        template = member.auto_scaling_group.ec2_launch_template
        if template is None:
            return None
        version = tags.get("aws:ec2launchtemplate:version", str(template.default_version_number))
        return {"LaunchTemplateId": template.id, "LaunchTemplateName": template.name, "Version": version}

    LaunchTemplates.create_launch_template_version = create_launch_template_version
    InstanceState.launch_template = property(launch_template_of)


def _install_groups(engine: AutoScaling) -> None:
    create, update = AutoScalingBackend.create_auto_scaling_group, AutoScalingBackend.update_auto_scaling_group
    create_action = AutoScalingResponse.create_auto_scaling_group
    update_action, plain_template = (
        AutoScalingResponse.update_auto_scaling_group,
        FakeAutoScalingGroup.launch_template.fget,
    )

    def store_desired(self: FakeAutoScalingGroup, desired: int | None) -> None:
        self.desired_capacity = self.min_size if desired is None else desired

    def create_auto_scaling_group(self: AutoScalingBackend, **arguments: Any) -> FakeAutoScalingGroup:
        name = arguments["name"]
        if name in self.autoscaling_groups:
            raise AutoscalingClientError(
                "AlreadyExists",
                f"AutoScalingGroup by this name already exists - A group with the name {name} already exists",
            )
        group = create(self, **arguments)
        try:
            engine.create(group)
        except ValidationError:
            del self.autoscaling_groups[name]
            raise
        return group

    def update_auto_scaling_group(self: AutoScalingBackend, **arguments: Any) -> FakeAutoScalingGroup:
        group = find_group(self, arguments["name"])
        engine.update(group, arguments["min_size"], arguments["max_size"], arguments["desired_capacity"])
        policy = group.mixed_instances_policy
        updated = update(self, **arguments)
        if not arguments["launch_template"] and not arguments["mixed_instances_policy"]:
            # moto deletes the group's mixed instances policy if the update contains none, so restore the policy.
            updated.mixed_instances_policy = policy
        updated.desired_capacity = min(max(updated.desired_capacity, updated.min_size), updated.max_size)
        return updated

    def keep_new_settings(self: AutoScalingResponse, *names: str) -> None:
        for name in names:
            if (value := self._get_param(name)) is not None:
                setattr(_group(self), xform_name(name), value)

    def create_with_settings(self: AutoScalingResponse) -> ActionResult:
        answer = create_action(self)
        keep_new_settings(self, *NEW_SETTINGS, "Operator")
        return answer

    def update_with_settings(self: AutoScalingResponse) -> ActionResult:
        answer = update_action(self)
        keep_new_settings(self, *NEW_SETTINGS)
        rebalance = self._get_bool_param("CapacityRebalance", None)
        if rebalance is not None:
            _group(self).capacity_rebalance = rebalance
        return answer

    def launch_template(self: FakeAutoScalingGroup) -> dict[str, str] | None:
        # AWS shows the template of a mixed instances policy inside the policy only.
        return None if self.mixed_instances_policy else plain_template(self)

    def set_desired_capacity(self: AutoScalingBackend, group_name: str, desired: int | None) -> None:
        group = find_group(self, group_name)
        if desired is not None:
            engine.set_desired(group, desired)

    def delete_auto_scaling_group(self: AutoScalingResponse) -> EmptyResult:
        engine.delete(_group(self), force=self._get_bool_param("ForceDelete", False))
        return EmptyResult()

    def suspend_processes(self: AutoScalingResponse) -> EmptyResult:
        group, processes = _group(self), self._get_param("ScalingProcesses", [])
        unknown = sorted(set(processes) - PROCESSES)
        if unknown:
            raise ValidationError(f"Process type {unknown[0]} is not a valid scaling process")
        engine.suspend(group, processes or PROCESSES)
        return EmptyResult()

    def resume_processes(self: AutoScalingResponse) -> EmptyResult:
        engine.resume(_group(self), self._get_param("ScalingProcesses", []) or PROCESSES)
        return EmptyResult()

    def suspended_processes(self: FakeAutoScalingGroup) -> list[dict[str, str]]:
        return [
            {"ProcessName": name, "SuspensionReason": engine.suspension_reason(self, name)}
            for name in self._suspended_processes
        ]

    def set_suspended_processes(self: FakeAutoScalingGroup, processes: list[str]) -> None:
        self._suspended_processes = processes

    def describe_scaling_activities(self: AutoScalingResponse) -> ActionResult:
        name = self._get_param("AutoScalingGroupName")
        groups = (
            [find_group(self.autoscaling_backend, name)]
            if name
            else list(self.autoscaling_backend.autoscaling_groups.values())
        )
        activities = [activity for group in groups for activity in engine.activities(group)]
        first = int(self._get_param("NextToken") or 0)
        size = min(self._get_int_param("MaxRecords") or MAX_ACTIVITIES_PER_PAGE, MAX_ACTIVITIES_PER_PAGE)
        following = str(first + size) if len(activities) > first + size else None
        return ActionResult({"Activities": activities[first : first + size], "NextToken": following})

    FakeAutoScalingGroup.set_desired_capacity = store_desired
    FakeAutoScalingGroup.launch_template = property(launch_template)
    FakeAutoScalingGroup.deletion_protection = "none"
    FakeAutoScalingGroup.instance_lifecycle_policy = FakeAutoScalingGroup.operator = None
    AutoScalingResponse.create_auto_scaling_group = create_with_settings
    AutoScalingResponse.update_auto_scaling_group = update_with_settings
    AutoScalingBackend.create_auto_scaling_group = create_auto_scaling_group
    AutoScalingBackend.update_auto_scaling_group = update_auto_scaling_group
    AutoScalingBackend.set_desired_capacity = set_desired_capacity
    AutoScalingResponse.delete_auto_scaling_group = delete_auto_scaling_group
    AutoScalingResponse.suspend_processes = suspend_processes
    AutoScalingResponse.resume_processes = resume_processes
    FakeAutoScalingGroup.suspended_processes = property(suspended_processes, set_suspended_processes)
    AutoScalingResponse.describe_scaling_activities = describe_scaling_activities
    for action in NAMED_GROUP_ACTIONS:
        setattr(AutoScalingResponse, action, _with_group(getattr(AutoScalingResponse, action)))


def _install_members(engine: AutoScaling) -> None:
    def notify_terminate_instances(self: AutoScalingBackend, instance_ids: list[str]) -> None:
        """Do nothing. A terminated instance stays a member of its group until a health check removes it."""

    def terminate_instance(self: AutoScalingBackend, instance_id: str, should_decrement: bool) -> Any:
        group, member = find_member(self, instance_id)
        return engine.terminate(group, member, decrement=should_decrement)

    def set_instance_health(self: AutoScalingBackend, instance_id: str, health_status: str) -> None:
        find_member(self, instance_id)[1].health_status = health_status

    def set_instance_protection(self: AutoScalingResponse) -> EmptyResult:
        engine.protect(
            _group(self),
            self._get_param("InstanceIds", []),
            is_protected=bool(self._get_bool_param("ProtectedFromScaleIn")),
        )
        return EmptyResult()

    def complete_lifecycle_action(self: AutoScalingResponse) -> EmptyResult:
        engine.complete_lifecycle_action(
            _group(self),
            self._get_param("LifecycleHookName"),
            instance_id=self._get_param("InstanceId"),
            token=self._get_param("LifecycleActionToken"),
            result=self._get_param("LifecycleActionResult"),
        )
        return EmptyResult()

    def record_lifecycle_action_heartbeat(self: AutoScalingResponse) -> EmptyResult:
        engine.record_heartbeat(
            _group(self),
            self._get_param("LifecycleHookName"),
            instance_id=self._get_param("InstanceId"),
            token=self._get_param("LifecycleActionToken"),
        )
        return EmptyResult()

    AutoScalingBackend.notify_terminate_instances = notify_terminate_instances
    AutoScalingBackend.terminate_instance = terminate_instance
    AutoScalingBackend.set_instance_health = set_instance_health
    AutoScalingResponse.set_instance_protection = set_instance_protection
    AutoScalingResponse.complete_lifecycle_action = complete_lifecycle_action
    AutoScalingResponse.record_lifecycle_action_heartbeat = record_lifecycle_action_heartbeat


def _install_refreshes(refreshes: InstanceRefreshes) -> None:
    def start_instance_refresh(self: AutoScalingResponse) -> ActionResult:
        return ActionResult({"InstanceRefreshId": refreshes.start(_group(self))})

    def describe_instance_refreshes(self: AutoScalingResponse) -> ActionResult:
        return ActionResult({"InstanceRefreshes": refreshes.describe(_group(self))})

    AutoScalingResponse.start_instance_refresh = start_instance_refresh
    AutoScalingResponse.describe_instance_refreshes = describe_instance_refreshes


def _install_launches(launches: SynchronousLaunches) -> None:
    def launch_instances(self: AutoScalingResponse) -> ActionResult:
        request = LaunchRequest(
            count=self._get_int_param("RequestedCapacity"),
            token=self._get_param("ClientToken"),
            zones=tuple(self._get_param("AvailabilityZones", [])),
            zone_ids=tuple(self._get_param("AvailabilityZoneIds", [])),
            subnets=tuple(self._get_param("SubnetIds", [])),
            retry_strategy=self._get_param("RetryStrategy", "none"),
        )
        return ActionResult(launches.launch(_group(self), request))

    AutoScalingResponse.launch_instances = launch_instances


def _lock_operated_groups() -> None:
    """Let only a group's Operator, a service principal, change the group if it has one."""

    # Source: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CreateAutoScalingGroup.html.
    def locked(action: Callable[[AutoScalingResponse], Any]) -> Callable[[AutoScalingResponse], Any]:
        @wraps(action)
        def checked(self: AutoScalingResponse) -> Any:
            backend, instance = self.autoscaling_backend, self._get_param("InstanceId")
            names = [self._get_param("AutoScalingGroupName")]
            names += [each["ResourceId"] for each in self._get_param("Tags", []) if "ResourceId" in each]
            for group in backend.autoscaling_groups.values():
                members = {member.instance.id for member in group.instance_states}
                if group.operator and (group.name in names or instance in members):
                    raise AutoscalingClientError("AccessDenied", f"Only the operator of {group.name} may change it.")
            return action(self)

        return checked

    for operation in get_service_model("autoscaling").operation_names:
        name = xform_name(operation)
        if not operation.startswith(READING) and hasattr(AutoScalingResponse, name):
            setattr(AutoScalingResponse, name, locked(getattr(AutoScalingResponse, name)))


def _group(action: AutoScalingResponse) -> FakeAutoScalingGroup:
    """Return the group that a call names, or raise AWS's error."""
    return find_group(action.autoscaling_backend, action._get_param("AutoScalingGroupName"))


def _with_group(action: Callable[[AutoScalingResponse], Any]) -> Callable[[AutoScalingResponse], Any]:
    @wraps(action)
    def checked(self: AutoScalingResponse) -> Any:
        _group(self)
        return action(self)

    return checked
