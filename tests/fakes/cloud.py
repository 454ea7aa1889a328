"""A cloud in memory, for tests and simulators.

The same contract tests run against this fake and against the local cloud. Nothing happens until the caller advances the
time with `advance`. Instances boot after `boot_delay`. A terminating hook holds an instance until the hook's timeout.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

from control_plane.cloud.errors import CloudError, GroupNotOurs, InvalidRequest, NotFound, ObjectChanged, ObjectTooLarge
from control_plane.cloud.objects import SMALL_BYTES, STREAM_CHUNK_BYTES, ObjectInfo, SignedUpload
from control_plane.cloud.operator import (
    FLEET_TAG,
    IN_SERVICE,
    SHORTAGE_CODE,
    TERMINATING_TRANSITION,
    Ec2State,
    GroupState,
    InstanceState,
    InstanceStatus,
    Launched,
    LaunchFailure,
    LaunchTemplateRef,
    LifecycleHook,
    MemberState,
    ScheduledEvent,
)
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import ObjectReference

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
IMAGE = "ami-1"
"""Image of all instances."""


@dataclass(slots=True)
class _Member:
    state: MemberState
    due_at: datetime
    """When a pending member becomes InService, or when the hook's hold on an instance ends and the instance
    terminates.
    """


@dataclass(slots=True)
class _Group:
    state: GroupState
    members: dict[NodeId, _Member] = field(default_factory=dict)
    failures: list[LaunchFailure] = field(default_factory=list)
    no_launch_before: datetime = EPOCH
    launched: dict[str, tuple[tuple[int, str], Launched]] = field(default_factory=dict)
    """Parameters and answer of each call of LaunchInstances, by its token."""


class FakeOperator:
    """`CloudOperator` over a cloud in memory.

    Instances are InService and `running` after `boot_delay`. `now` is the initial time of the simulated clock.
    """

    def __init__(self, *, boot_delay: timedelta = timedelta(0), now: datetime = EPOCH) -> None:
        self.boot_delay = boot_delay
        self.capacity: int | None = None
        """Maximum number of instances that exist at the same time. None: no limit."""
        self.exhausted_zones: set[str] = set()
        """Availability zones without capacity for more instances."""
        self.launch_retry = timedelta(0)
        """Time that a group waits after a failed launch before it retries.

        A new request for capacity ends the wait.
        """
        self.now = now
        self.calls: list[tuple[object, ...]] = []
        """The changes that callers requested, in order. Tests compare them with the expected ones."""
        self._lock = threading.RLock()
        self._groups: dict[str, _Group] = {}
        self._instances: dict[NodeId, InstanceState] = {}
        self._next_error: list[CloudError] = []
        self.refusal: CloudError | None = None
        """Error that every call of a `CloudOperator` method raises. None: calls succeed."""
        self.refused_count = 0
        """Number of calls that raised the error in `refusal`."""
        self.launch_refusal: CloudError | None = None
        """Error that every new call of `launch_instances` raises. None: AWS permits the call."""
        self.events: dict[NodeId, tuple[ScheduledEvent, ...]] = {}
        """Scheduled events by instance."""
        self.failed_checks: dict[NodeId, tuple[str, ...]] = {}
        """Names of failed status checks, by instance."""
        self.topology: dict[NodeId, tuple[str, ...]] = {}
        """Network nodes of the EC2 topology API above each instance, the nearest last.

        An instance without an entry has no network nodes.
        """
        self.images: dict[str, datetime] = {IMAGE: EPOCH}
        """Creation times of the images that exist."""
        self.omitted: set[NodeId] = set()
        """Instances that AWS's answers omit although they exist."""
        self.reported_ended: set[NodeId] = set()
        """Instances that AWS reports as terminated although they run."""
        self.listed_twice: set[NodeId] = set()
        """Members that the description of their group contains twice."""
        self._launched = 0
        self.tagging_error: CloudError | None = None
        """Error of each call of `set_work_tags`."""

    # Methods by which tests control the cloud

    def create_group(
        self,
        name: str,
        *,
        desired: int = 0,
        min_size: int = 0,
        max_size: int = 100,
        tags: Mapping[str, str] | None = None,
        availability_zones: tuple[str, ...] = ("us-east-1a",),
        instance_type: str = "p5.48xlarge",
    ) -> None:
        """Create a group as the owner of a fleet would, and launch its desired capacity.

        The group does not have the settings that Everstep requires yet: for example, AWS may still replace its
        unhealthy instances.
        """
        state = GroupState(
            name=name,
            desired_count=desired,
            min_size=min_size,
            max_size=max_size,
            availability_zones=availability_zones,
            members=(),
            suspended_processes=frozenset(),
            new_instances_protected=False,
            hooks=(),
            scaling_policies=(),
            tags={FLEET_TAG: name} if tags is None else dict(tags),
            launch_template=LaunchTemplateRef(template_id="lt-0", name=name, version="$Latest"),
            instance_type=instance_type,
            encrypting_types=frozenset({instance_type}),
        )
        with self._lock:
            self._groups[name] = _Group(state)
            self._reconcile()

    def delete_group(self, name: str) -> None:
        """Delete a group, as a person might."""
        with self._lock:
            del self._groups[name]

    def change_group(self, name: str, change: Callable[[GroupState], GroupState]) -> None:
        """Change a group's settings without Everstep, as a person might."""
        with self._lock:
            group = self._group(name)
            group.state = change(group.state)

    def advance(self, by: timedelta) -> None:
        """Advance the simulated time, and make every change that is due by then."""
        with self._lock:
            self.now += by
            self._reconcile()

    def end_instance(self, instance_id: NodeId, state: Ec2State = Ec2State.TERMINATED) -> None:
        """Terminate an instance as EC2 would by itself. Its group keeps it as an unhealthy member."""
        with self._lock:
            self._end(instance_id, state, "Client.UserInitiatedShutdown: User initiated shutdown")
            self._reconcile()

    def shrink(self, instance_id: NodeId) -> None:
        """Make the group terminate an instance by itself.

        The group's terminating hook delays the termination first.
        """
        with self._lock:
            group = next(group for group in self._groups.values() if instance_id in group.members)
            self._begin_termination(group, instance_id)
            self._reconcile()

    def running(self, name: str) -> set[NodeId]:
        """Return the running instances of a group, whatever AWS answers about them."""
        with self._lock:
            return {id for id in self._groups[name].members if self._instances[id].state is Ec2State.RUNNING}

    def put_in_block(self, instance_id: NodeId, reservation: str) -> None:
        """Assign an instance to a capacity block."""
        with self._lock:
            self._instances[instance_id] = replace(self._instances[instance_id], capacity_reservation_id=reservation)

    def fail_next(self, error: CloudError) -> None:
        """Make the next call of a `CloudOperator` method raise this error."""
        with self._lock:
            self._next_error.append(error)

    # the methods of `CloudOperator`

    def describe_group(self, name: str) -> GroupState:
        """Return the present state of a group (see `CloudOperator.describe_group`)."""
        with self._lock:
            self._maybe_fail()
            group = self._group(name)
            members = [
                member.state
                for id, member in group.members.items()
                if id not in self.omitted
                for _ in range(1 + (id in self.listed_twice))
            ]
            return replace(group.state, members=tuple(members))

    def list_groups(self, names: Collection[str]) -> Mapping[str, GroupState]:
        """Return groups by name, with the fields that `complete_group` would add (see `CloudOperator.list_groups`)."""
        found = {}
        for name in names:
            try:
                found[name] = self.describe_group(name)
            except NotFound:
                continue
            except GroupNotOurs:
                found[name] = self._groups[name].state
        return found

    def complete_group(self, group: GroupState) -> GroupState:
        """Return the group unchanged, because `list_groups` has already completed it.

        Raises `GroupNotOurs` if the group lacks the tag `FLEET_TAG` (see `CloudOperator.complete_group`).
        """
        with self._lock:
            self._group(group.name)
        return group

    def describe_instances(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceState]:
        """Return the state of every given instance (see `CloudOperator.describe_instances`)."""
        with self._lock:
            self._maybe_fail()
            absent = {id: InstanceState(instance_id=id, state=Ec2State.ABSENT) for id in instance_ids}
            known = {id: self._instances.get(id, absent[id]) for id in instance_ids if id not in self.omitted}
            ended = {id: replace(known[id], state=Ec2State.TERMINATED) for id in self.reported_ended & known.keys()}
            return absent | known | ended

    def set_desired(self, name: str, desired_count: int) -> None:
        """Set a group's desired capacity (see `CloudOperator.set_desired`)."""
        with self._lock:
            self._maybe_fail()
            group = self._group(name)
            if not group.state.min_size <= desired_count <= group.state.max_size:
                raise InvalidRequest(
                    f"desired capacity {desired_count} is outside of {group.state.min_size} … {group.state.max_size}",
                    code="ValidationError",
                )
            self.calls.append(("set_desired", name, desired_count))
            group.state = replace(group.state, desired_count=desired_count)
            group.no_launch_before = self.now
            self._reconcile()

    def launch_instances(self, name: str, count: int, *, zone: str, token: str) -> Launched:
        """Launch instances and raise the desired capacity (see `CloudOperator.launch_instances`)."""
        with self._lock:
            self._maybe_fail()
            group = self._group(name)
            if token in group.launched:
                parameters, answer = group.launched[token]
                if parameters != (count, zone):
                    raise InvalidRequest("other parameters", code="IdempotentParameterMismatch")
                return answer
            if self.launch_refusal is not None:
                raise self.launch_refusal
            if group.state.desired_count + count > group.state.max_size or zone not in group.state.availability_zones:
                raise InvalidRequest(f"{count} more instances in {zone} are refused", code="ValidationError")
            self.calls.append(("launch_instances", name, count))
            before, failed = set(group.members), len(group.failures)
            group.state = replace(group.state, desired_count=group.state.desired_count + count)
            self._launch(group, count)
            failures = tuple(replace(each, code=SHORTAGE_CODE) for each in group.failures[failed:])
            answer = Launched(instance_ids=tuple(sorted(set(group.members) - before)), failures=failures)
            group.launched[token] = ((count, zone), answer)
            return answer

    def terminate_member(self, instance_id: NodeId, *, decrement: bool) -> None:
        """Terminate one instance of a group (see `CloudOperator.terminate_member`)."""
        with self._lock:
            self._maybe_fail()
            group = next((group for group in self._groups.values() if instance_id in group.members), None)
            if group is None:
                raise NotFound(f"{instance_id} is not a member of any Auto Scaling group")
            self._group(group.state.name)
            if group.members[instance_id].state.is_leaving:
                return
            if decrement and group.state.desired_count <= group.state.min_size:
                words = (
                    f"Currently, desiredSize equals minSize ({group.state.min_size}). Terminating instance without "
                    "replacement will violate"
                )
                raise InvalidRequest(f"{words} group's min size constraint.", code="ValidationError")
            self.calls.append(("terminate_member", instance_id, decrement))
            if decrement:
                group.state = replace(group.state, desired_count=group.state.desired_count - 1)
            self._begin_termination(group, instance_id)
            self._reconcile()

    def reboot_member(self, group: str, instance_id: NodeId) -> None:
        """Reboot one instance of a group (see `CloudOperator.reboot_member`)."""
        with self._lock:
            self._maybe_fail()
            member = self._group(group).members.get(instance_id)
            if member is None or member.state.is_leaving:
                raise NotFound(f"{instance_id} is not a member of the Auto Scaling group {group!r}, or is leaving it")
            self.calls.append(("reboot_member", group, instance_id))

    def strike_member(self, group: str, instance_id: NodeId) -> None:
        """Terminate one instance of a group, as a failure would (see `CloudOperator.strike_member`)."""
        with self._lock:
            self._maybe_fail()
            member = self._group(group).members.get(instance_id)
            if member is None or member.state.is_leaving:
                raise NotFound(f"{instance_id} is not a member of the Auto Scaling group {group!r}, or is leaving it")
            self.calls.append(("strike_member", group, instance_id))
            self._end(instance_id, Ec2State.TERMINATED, "Client.UserInitiatedShutdown: User initiated shutdown")
            self._reconcile()

    def set_work_tags(self, instance_ids: Collection[NodeId], tags: Mapping[str, str]) -> None:
        """Set or remove the tags of instances (see `CloudOperator.set_work_tags`)."""
        with self._lock:
            if self.tagging_error is not None:
                raise self.tagging_error
            for id in instance_ids:
                if id not in self._instances:
                    raise NotFound(f"{id} does not exist")
                self._instances[id] = replace(self._instances[id], work_tags=dict(tags))

    def complete_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Release an instance that a terminating hook holds (see `CloudOperator.complete_termination`)."""
        with self._lock:
            self._maybe_fail()
            member = self._group(group).members.get(instance_id)
            if member and member.state.awaits_termination:
                self.calls.append(("complete_termination", group, hook, instance_id))
                member.due_at = self.now
                self._reconcile()

    def hold_termination(self, group: str, hook: str, instance_id: NodeId) -> None:
        """Extend the time for which a terminating hook holds an instance (see `CloudOperator.hold_termination`)."""
        with self._lock:
            self._maybe_fail()
            member = self._group(group).members.get(instance_id)
            held = next((known for known in self._group(group).state.hooks if known.name == hook), None)
            if member and held and member.state.awaits_termination:
                self.calls.append(("hold_termination", group, hook, instance_id))
                member.due_at = self.now + held.heartbeat_timeout

    def statuses(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, InstanceStatus]:
        """Return scheduled events and failed checks of instances (see `CloudOperator.statuses`)."""
        with self._lock:
            self._maybe_fail()
            found = {
                id: InstanceStatus(events=self.events.get(id, ()), failed_checks=self.failed_checks.get(id, ()))
                for id in instance_ids
            }
            return {id: status for id, status in found.items() if status != InstanceStatus()}

    def network_nodes(self, instance_ids: Collection[NodeId]) -> Mapping[NodeId, tuple[str, ...]]:
        """Return the network nodes above each instance (see `CloudOperator.network_nodes`)."""
        with self._lock:
            self._maybe_fail()
            return {id: self.topology[id] for id in instance_ids if self.topology.get(id)}

    def image_times(self, image_ids: Collection[str]) -> Mapping[str, datetime]:
        """Return the creation times of images (see `CloudOperator.image_times`)."""
        with self._lock:
            self._maybe_fail()
            return {id: self.images[id] for id in image_ids if id in self.images}

    def console_output(self, instance_id: NodeId) -> bytes:
        """Return the newest console output of an instance (see `CloudOperator.console_output`)."""
        with self._lock:
            self._maybe_fail()
            if instance_id not in self._instances:
                raise NotFound(f"The instance ID {instance_id!r} does not exist")
            return f"console of {instance_id}\n".encode()

    def recent_launch_failures(self, name: str) -> tuple[LaunchFailure, ...]:
        """Return a group's failed launches since its last success (see `CloudOperator.recent_launch_failures`)."""
        with self._lock:
            self._maybe_fail()
            return tuple(reversed(self._group(name).failures))

    def protect_new_instances(self, name: str) -> None:
        """Make a group protect new instances from scale-in (see `CloudOperator.protect_new_instances`)."""
        self._change(name, "protect_new_instances", lambda state: replace(state, new_instances_protected=True))

    def protect_members(self, name: str, instance_ids: Collection[NodeId]) -> None:
        """Protect instances of a group from scale-in (see `CloudOperator.protect_members`)."""
        with self._lock:
            self._maybe_fail()
            group = self._group(name)
            unknown = sorted(set(instance_ids) - set(group.members))
            if unknown:
                raise InvalidRequest(
                    f"The instance {unknown[0]} is not part of Auto Scaling group {name}.", code="ValidationError"
                )
            waiting = [id for id in sorted(instance_ids) if group.members[id].state.lifecycle_state != IN_SERVICE]
            if waiting:
                raise InvalidRequest(
                    f"The instance {waiting[0]} is not in InService or EnteringStandby or Standby.",
                    code="ValidationError",
                )
            self.calls.append(("protect_members", name, tuple(sorted(instance_ids))))
            for id in instance_ids:
                group.members[id].state = replace(group.members[id].state, is_protected=True)

    def suspend_processes(self, name: str, processes: Collection[str]) -> None:
        """Suspend Auto Scaling processes of a group (see `CloudOperator.suspend_processes`)."""
        self._change(
            name,
            "suspend_processes",
            lambda state: replace(state, suspended_processes=state.suspended_processes | set(processes)),
        )

    def resume_processes(self, name: str, processes: Collection[str]) -> None:
        """Resume Auto Scaling processes of a group (see `CloudOperator.resume_processes`)."""
        self._change(
            name,
            "resume_processes",
            lambda state: replace(state, suspended_processes=state.suspended_processes - set(processes)),
        )

    def put_termination_hook(self, name: str, hook: LifecycleHook) -> None:
        """Create or replace a group's terminating hook (see `CloudOperator.put_termination_hook`)."""

        def put(state: GroupState) -> GroupState:
            return replace(state, hooks=(*(other for other in state.hooks if other.name != hook.name), hook))

        self._change(name, "put_termination_hook", put)

    # Internals

    def _change(self, name: str, call: str, change: Callable[[GroupState], GroupState]) -> None:
        with self._lock:
            self._maybe_fail()
            group = self._group(name)
            self.calls.append((call, name))
            group.state = change(group.state)

    def _maybe_fail(self) -> None:
        if self.refusal is not None:
            self.refused_count += 1
            raise self.refusal
        if self._next_error:
            raise self._next_error.pop(0)

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            raise NotFound(f"Auto Scaling group {name!r} does not exist")
        group = self._groups[name]
        if not group.state.is_tagged:
            raise GroupNotOurs(f"Auto Scaling group {name!r} has no tag {FLEET_TAG!r}")
        return group

    def _reconcile(self) -> None:
        for group in self._groups.values():
            for id, member in list(group.members.items()):
                self._move(group, id, member)
            active = [member for member in group.members.values() if not member.state.is_leaving]
            missing = group.state.desired_count - len(active)
            if missing > 0 and "Launch" not in group.state.suspended_processes and self.now >= group.no_launch_before:
                self._launch(group, missing)
            elif missing < 0 and "Terminate" not in group.state.suspended_processes:
                unprotected = [member.state.instance_id for member in active if not member.state.is_protected]
                for id in unprotected[:-missing]:
                    self._begin_termination(group, id)

    def _move(self, group: _Group, id: NodeId, member: _Member) -> None:
        has_ended = id not in self._instances or self._instances[id].state.has_ended
        if member.state.is_leaving:
            if has_ended or self.now >= member.due_at:
                self._end(id, Ec2State.TERMINATED, "Client.UserInitiatedShutdown: User initiated shutdown")
                del group.members[id]
        elif has_ended and "HealthCheck" not in group.state.suspended_processes:
            member.state = replace(member.state, health_status="Unhealthy")
            if not {"ReplaceUnhealthy", "Terminate"} & group.state.suspended_processes:
                self._begin_termination(group, id)
                self._move(group, id, member)
        elif member.state.lifecycle_state == "Pending" and self.now >= member.due_at:
            member.state = replace(member.state, lifecycle_state="InService")
            self._instances[id] = replace(self._instances[id], state=Ec2State.RUNNING)

    def _launch(self, group: _Group, count: int) -> None:
        alive = sum(not instance.state.has_ended for instance in self._instances.values())
        possible = count if self.capacity is None else max(0, min(count, self.capacity - alive))
        if self.exhausted_zones.intersection(group.state.availability_zones):
            possible = 0
        for _ in range(possible):
            self._launched += 1
            id = NodeId(f"i-{self._launched:017x}")
            self._instances[id] = InstanceState(
                instance_id=id,
                state=Ec2State.PENDING,
                private_ip=f"10.0.{self._launched // 250}.{self._launched % 250 + 1}",
                instance_type=group.state.instance_type,
                availability_zone=group.state.availability_zones[0],
                image_id=IMAGE,
                launched_at=self.now,
            )
            state = MemberState(
                instance_id=id,
                lifecycle_state="Pending",
                health_status="Healthy",
                is_protected=group.state.new_instances_protected,
                availability_zone=group.state.availability_zones[0],
                instance_type=group.state.instance_type,
            )
            group.members[id] = _Member(state, self.now + self.boot_delay)
            group.failures.clear()
            self._move(group, id, group.members[id])
        if possible < count:
            zone, kind = group.state.availability_zones[0], group.state.instance_type
            message = (
                f"We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone})."
            )
            group.failures.append(LaunchFailure(at=self.now, message=message))
            group.no_launch_before = self.now + self.launch_retry

    def _begin_termination(self, group: _Group, id: NodeId) -> None:
        member = group.members[id]
        hook = next((hook for hook in group.state.hooks if hook.transition == TERMINATING_TRANSITION), None)
        instance = self._instances.get(id)
        if hook and instance and not instance.state.has_ended:
            member.state = replace(member.state, lifecycle_state="Terminating:Wait")
            member.due_at = self.now + hook.heartbeat_timeout
        else:
            member.state = replace(member.state, lifecycle_state="Terminating")
            member.due_at = self.now

    def _end(self, id: NodeId, state: Ec2State, reason: str) -> None:
        if id in self._instances and self._instances[id].state is not Ec2State.TERMINATED:
            self._instances[id] = replace(self._instances[id], state=state, state_reason=reason)


class MemoryObjectStore:
    """`ServiceStore` in memory. The constructor takes the names of the buckets that exist."""

    def __init__(self, *buckets: str) -> None:
        self.now: Callable[[], datetime] = lambda: EPOCH
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, tuple[bytes, ObjectInfo]]] = {bucket: {} for bucket in buckets}

    def put(self, reference: ObjectReference, body: bytes) -> ObjectInfo:
        """Write a small object (see `ServiceStore.put`)."""
        with self._lock:
            return self._write(reference, body)

    def put_if_unchanged(self, reference: ObjectReference, body: bytes, *, etag: str = "") -> ObjectInfo:
        """Write a small object unless another writer has written it (see `ServiceStore.put_if_unchanged`)."""
        with self._lock:
            found = self._bucket(reference).get(reference.key)
            if (found[1].etag if found else "") != etag:
                raise ObjectChanged(f"s3://{reference.bucket}/{reference.key} has changed", code="PreconditionFailed")
            return self._write(reference, body)

    def put_file(self, reference: ObjectReference, file: BinaryIO) -> ObjectInfo:
        """Write a large object from a file (see `ServiceStore.put_file`)."""
        return self.put(reference, file.read())

    def get(self, reference: ObjectReference, *, limit_bytes: int = SMALL_BYTES) -> bytes:
        """Return the whole content of an object (see `ServiceStore.get`)."""
        with self._lock:
            body = self._object(reference)[0]
        if len(body) > limit_bytes:
            raise ObjectTooLarge(f"{reference.key} has more than {limit_bytes:,} bytes")
        return body

    def stream(self, reference: ObjectReference, *, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a range of an object; see `ServiceStore`."""
        body = self.get(reference)[begin:end]
        for offset in range(0, len(body), STREAM_CHUNK_BYTES):
            yield body[offset : offset + STREAM_CHUNK_BYTES]

    def head(self, reference: ObjectReference) -> ObjectInfo:
        """Return an object's size and ETag; see `ServiceStore`."""
        with self._lock:
            return self._object(reference)[1]

    def list(self, prefix: ObjectReference, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys have a prefix (see `ServiceStore.list`)."""
        with self._lock:
            found = [
                info
                for key, (_, info) in sorted(self._bucket(prefix).items())
                if key.startswith(prefix.key) and key > after
            ]
        yield from found

    def sign_upload(
        self,
        reference: ObjectReference,
        *,
        sha256: str,
        size_bytes: int,
        seconds: int,
    ) -> SignedUpload | None:
        """Return None, because no client can reach an object in memory; see `ServiceStore`."""
        return None

    def delete(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete the objects with these keys (see `ServiceStore.delete`)."""
        with self._lock:
            objects = self._bucket(ObjectReference(bucket=bucket, key=""))
            for key in keys:
                objects.pop(key, None)

    def _bucket(self, reference: ObjectReference) -> dict[str, tuple[bytes, ObjectInfo]]:
        if reference.bucket not in self._objects:
            raise NotFound(f"bucket {reference.bucket!r} does not exist", code="NoSuchBucket")
        return self._objects[reference.bucket]

    def _write(self, reference: ObjectReference, body: bytes) -> ObjectInfo:
        etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
        info = ObjectInfo(reference=reference, size_bytes=len(body), etag=etag, modified_at=self.now())
        self._bucket(reference)[reference.key] = (bytes(body), info)
        return info

    def _object(self, reference: ObjectReference) -> tuple[bytes, ObjectInfo]:
        bucket = self._bucket(reference)
        if reference.key not in bucket:
            raise NotFound(f"s3://{reference.bucket}/{reference.key} does not exist", code="NoSuchKey")
        return bucket[reference.key]
