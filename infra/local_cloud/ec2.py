"""Emulates EC2's behaviour over time: boots, addresses, status checks, warnings and the removal of instances.

moto, a library that fakes AWS, stores the instances but does not change them over time. The *engine* for instances is
the object `Ec2`. It changes moto's instances while the server of the local AWS holds its lock.

Invariants:

- An instance is `pending` until its boot is over.
- Its PrivateIpAddress is a loopback address that no other instance has.
- Each change of an instance's state causes one event.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.instances import Instance, StateReason

from infra.local_cloud.addresses import AddressPool
from infra.local_cloud.aws_answers import AwsAnswers
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.events import Announcements, Owner, PlannedEvent, state_change
from infra.local_cloud.faults import Faults
from infra.local_cloud.instances import RunningInstance
from infra.local_cloud.visibility import Visibility

PENDING, RUNNING = ("pending", 0), ("running", 16)
NO_USER_DATA = b"#!/bin/sh\n"
INSUFFICIENT_CAPACITY: Final = (
    "We currently do not have sufficient {type} capacity in the Availability Zone you requested "
    "({zone}). Our system will be working on "
    "provisioning additional capacity."
)
"""AWS's message for a launch without capacity. Source: EC2 User Guide, instance launch issues."""
StatusCheck = Literal["instance", "system"]
End = Literal["terminate", "stop", "reboot"]
REASONS: Final = {
    "spot": StateReason("Server.SpotInstanceTermination: Spot instance termination", "Server.SpotInstanceTermination"),
    "outside": StateReason("Client.UserInitiatedShutdown: User initiated shutdown", "Client.UserInitiatedShutdown"),
    "aws": StateReason(
        "Server.InternalError: An internal error caused the instance to terminate during launch.",
        "Server.InternalError",
    ),
    "retirement": StateReason("Server.ScheduledStop: Stopped due to a scheduled retirement.", "Server.ScheduledStop"),
    "block": StateReason(
        "Server.CapacityBlockExpired: The Capacity Block reservation has ended.", "Server.CapacityBlockExpired"
    ),
}
"""AWS's state reasons for the end of an instance, by cause.

AWS documents no reason for the end of a Capacity Block, so the text for `block` is invented.
"""
TOPOLOGY_LAYERS: Final = ((1, 1), (2, 4), (3, 16), (4, 64))
"""Layers of EC2 network nodes above an instance, outermost first.

Each entry contains the number of the layer and the number of its nodes.
"""


class InsufficientCapacity(EC2ClientError):  # type: ignore[misc]
    """The launch needs more instances of a type than `Conditions.capacity` permits."""

    code = "InsufficientInstanceCapacity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planned end or reboot of an instance, which a fault has scheduled."""

    at: float
    """Time of the end or reboot, in monotonic seconds."""
    at_time: datetime
    how: End
    reason: str
    """Cause of the planned end: a key of `REASONS`."""


@dataclass(slots=True)
class Life:
    """Additional state of an instance, for which moto's class has no field."""

    address: str
    boot: int = 0
    boots_at: float = 0.0
    ended_at: float | None = None
    slot_free_at: float = 0.0
    announced_state: str = ""
    """The instance's state in the last event about it; empty before the first event."""
    failed_checks: dict[StatusCheck, datetime] = field(default_factory=dict)
    """Failing status checks, each with the time at which the check began to fail."""
    scheduled: tuple[PlannedEvent, ...] = ()
    spot_action: Plan | None = None
    rebalance_at: datetime | None = None
    plan: Plan | None = None
    has_crashed: bool = False
    """Whether the instance's host has crashed. EC2 may still report the instance as running."""


@dataclass(eq=False, repr=False)
class Ec2:
    """The engine of the simulated EC2: implements operations of its API, and advances the states of all instances.

    One engine serves all accounts and regions.

    Args:
        faults: adjustable behaviour of AWS: capacity, boot delays, and how long an ended instance occupies capacity and
            is described.
        addresses: pool of private addresses for new instances.
        announcements: receives the events of state changes.
        monotonic: returns the seconds of a monotonic clock.
        answers: assumed or measured behaviour of AWS where its documentation is silent.
    """

    faults: Faults
    addresses: AddressPool
    announcements: Announcements
    monotonic: Callable[[], float]
    answers: AwsAnswers

    def __post_init__(self) -> None:
        self._lives: dict[str, Life] = {}
        self._visibility = Visibility(self.faults, self.monotonic)

    # The methods below implement operations of the EC2 API.

    def require_capacity(self, backend: EC2Backend, instance_type: str, count: int) -> None:
        """Refuse a launch that exceeds the free capacity of the instance type.

        Args:
            backend: moto's backend of the region.
            instance_type: type of the instances to launch.
            count: number of instances that the launch requests.

        Raises:
            InsufficientCapacity: the free capacity is too small. The message is AWS's.
        """
        if count > self.free_count(instance_type, count):
            raise InsufficientCapacity(INSUFFICIENT_CAPACITY.format(type=instance_type, zone=f"{backend.region_name}a"))

    def launched(self, instance: Instance) -> None:
        """Assign an address to a new instance and start its first boot."""
        life = self._lives[instance.id] = Life(self.addresses.take())
        nic = instance.nics[0]
        nic.private_ip_address = life.address
        nic.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": life.address}]
        self.boot(instance)

    def boot(self, instance: Instance) -> None:
        """Start a boot: the first boot, or a boot after a stop or a reboot.

        The boot ends all earlier processes of the instance and clears its crash and its failed status checks.
        """
        self._set_state(instance, PENDING)
        life = self._lives[instance.id]
        life.boot += 1
        life.boots_at = self.monotonic() + self.faults.boot_delay()
        life.has_crashed = False
        life.failed_checks = {}

    def ended(self, instance: Instance) -> None:
        """Record the end of an instance. Idempotent.

        moto (the library that fakes AWS) calls this method when it terminates the instance. The ended instance still
        occupies its instance type's capacity for `slot_release_seconds`. A new launch can use the capacity afterwards.
        """
        life = self._lives.get(instance.id)
        if life and life.ended_at is None:
            life.ended_at = self.monotonic()
            life.slot_free_at = life.ended_at + self.faults.slot_release_delay()

    def status(self, instance: Instance, check: StatusCheck) -> dict[str, Any]:
        """Return one status check of an instance in the format of DescribeInstanceStatus."""
        if instance.state != "running":
            return {"Status": "not-applicable"}
        life = self._lives.get(instance.id)
        since = life.failed_checks.get(check) if life else None
        detail = (
            {"Name": "reachability", "Status": "passed"}
            if since is None
            else {"Name": "reachability", "Status": "failed", "ImpairedSince": since}
        )
        return {"Details": [detail], "Status": "ok" if since is None else "impaired"}

    def scheduled_events(self, instance: Instance) -> list[dict[str, Any]]:
        """Return an instance's scheduled events in the format of DescribeInstanceStatus."""
        life = self._lives.get(instance.id)
        return [
            {
                "InstanceEventId": event.event_id,
                "Code": event.code,
                "Description": event.description,
                "NotBefore": event.not_before,
                "NotAfter": event.not_after,
            }
            for event in (life.scheduled if life else ())
        ]

    def topology(self, instance: Instance) -> list[str]:
        """Return the network nodes above an instance, outermost first. The result depends only on the instance id."""
        return [
            f"nn-{hashlib.sha256(f'{layer}/{_place(instance.id) % count}'.encode()).hexdigest()[:17]}"
            for layer, count in TOPOLOGY_LAYERS[: self.answers.topology_layers]
        ]

    # The methods below inject faults into instances.

    def find(self, instance_id: str) -> tuple[Instance, Life]:
        """Find an instance that has not ended.

        Returns moto's instance, and the instance's additional state (see `Life`). Raises FaultRefused if the instance
        does not exist or has ended.
        """
        for instance in self._all():
            if instance.id == instance_id and instance.state not in ("terminated", "shutting-down"):
                return instance, self._lives[instance_id]
        raise FaultRefused(f"the instance {instance_id} does not exist or has ended")

    def life(self, instance_id: str) -> Life | None:
        """Return the additional state of an instance (see `Life`), or None if the instance is unknown."""
        return self._lives.get(instance_id)

    def in_order_of_launch(self) -> list[str]:
        """Return the ids of all instances that EC2 still describes, oldest first."""
        return list(self._lives)

    def plan(self, instance_id: str, how: End, reason: str, seconds: float) -> Plan:
        """Schedule the end or the reboot of an instance.

        Args:
            instance_id: id of an instance that has not ended.
            how: the action to schedule: terminate, stop or reboot.
            reason: why AWS ends the instance, for example `spot`; a key of `REASONS`.
            seconds: delay from now.

        Returns:
            The plan. The local cloud executes the plan after the delay, unless `unplan` cancels it first.

        Raises:
            FaultRefused: the instance does not exist or has ended.
        """
        _, life = self.find(instance_id)
        life.plan = Plan(
            at=self.monotonic() + seconds,
            at_time=datetime.now(UTC) + timedelta(seconds=seconds),
            how=how,
            reason=reason,
        )
        return life.plan

    def unplan(self) -> list[str]:
        """Cancel all planned ends of instances, with their Spot, rebalance and maintenance notices.

        Return the ids of the instances that had a planned end or such a notice.
        """
        lives = {instance_id: life for instance_id, life in self._lives.items() if life.ended_at is None}
        warned = [
            instance_id
            for instance_id, life in lives.items()
            if life.plan or life.spot_action or life.rebalance_at or life.scheduled
        ]
        for instance_id in warned:
            life = self._lives[instance_id]
            life.plan = life.spot_action = life.rebalance_at = None
            life.scheduled = ()
        return warned

    def pass_checks(self) -> list[str]:
        """Clear the failed status checks of all instances that have not crashed, and return their ids."""
        failing = [
            instance_id for instance_id, life in self._lives.items() if life.failed_checks and not life.has_crashed
        ]
        for instance_id in failing:
            self._lives[instance_id].failed_checks = {}
        return failing

    def end(self, instance_id: str, how: End, reason: str) -> None:
        """Terminate, stop or reboot an instance now. Its Auto Scaling group is not involved.

        Args:
            instance_id: id of an instance that has not ended.
            how: the action to carry out: terminate, stop or reboot.
            reason: why AWS ends the instance, for example `spot`; a key of `REASONS`.

        Raises:
            FaultRefused: the instance does not exist or has ended.
        """
        instance, life = self.find(instance_id)
        backend, life.plan = instance.ec2_backend, None
        if how == "reboot":
            backend.reboot_instances([instance_id])
            life.scheduled = ()
            return
        (backend.terminate_instances if how == "terminate" else backend.stop_instances)([instance_id])
        instance.state_reason = REASONS[reason]
        instance._reason = f"{REASONS[reason].code} ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC)"

    # The methods below change the states of instances as time passes.

    def advance(self) -> None:
        """Finish due boots and planned ends, send events of state changes, and remove instances that ended long ago.

        The local AWS calls this repeatedly from its main loop.
        """
        now = self.monotonic()
        memory = self.faults.conditions.remember_terminated_seconds
        for instance in list(self._all()):
            life = self._lives.get(instance.id)
            if life is None:
                continue
            if life.plan and now >= life.plan.at:
                plan, life.plan = life.plan, None
                if instance.state in ("pending", "running"):
                    self.end(instance.id, plan.how, plan.reason)
            if instance.state == "pending" and now >= life.boots_at:
                self._set_state(instance, RUNNING)
            elif instance.state == "terminated":
                self.ended(instance)
                if life.ended_at is not None and now - life.ended_at >= memory and now >= life.slot_free_at:
                    self._forget(instance)
            self._visibility.note(instance)
            self._announce(instance, life)

    def _announce(self, instance: Instance, life: Life) -> None:
        if instance.state == life.announced_state:
            return
        # Also send the event of the preceding state, such as pending. moto skips this state, or leaves it before this
        # method sees it.
        before = {"running": "pending", "terminated": "shutting-down", "stopped": "stopping"}.get(instance.state, "")
        for state in (before, instance.state):
            if state and state != life.announced_state:
                self.announcements.put(state_change(owner_of(instance), instance.id, state))
        life.announced_state = instance.state

    def running(self) -> list[RunningInstance]:
        """Return the instances whose processes should run now."""
        return [
            RunningInstance(
                instance_id=instance.id, boot=life.boot, address=life.address, user_data=_decoded(instance.user_data)
            )
            for instance in self._all()
            if instance.state == "running" and (life := self._lives.get(instance.id)) and not life.has_crashed
        ]

    def free_count(self, instance_type: str, wanted: int) -> int:
        """Return how many of the `wanted` instances of a type can be launched with the free capacity.

        An ended instance still occupies capacity for `slot_release_seconds`.
        """
        limit = self.faults.conditions.capacity.get(instance_type)
        if limit is None:
            return wanted
        now = self.monotonic()
        taken: int = sum(
            instance.instance_type == instance_type
            and (
                instance.state in ("pending", "running")
                or ((life := self._lives.get(instance.id)) is not None and now < life.slot_free_at)
            )
            for instance in self._all()
        )
        return max(0, min(wanted, limit - taken))

    def zone_of(self, instance_id: str) -> str | None:
        """Return the Availability Zone of an instance; None if EC2 does not describe the instance."""
        return next((str(each.placement.zone) for each in self._all() if each.id == instance_id), None)

    @contextmanager
    def as_described(self) -> Iterator[None]:
        """Make moto's Describe operations return delayed states of all instances during the `with` block."""
        with ExitStack() as restore:
            for backend in self._backends():
                restore.enter_context(self._visibility.as_described(backend))
            yield

    def _all(self) -> Iterator[Instance]:
        for backend in self._backends():
            for reservation in list(backend.reservations.values()):
                yield from list(reservation.instances)

    @staticmethod
    def _backends() -> Iterator[EC2Backend]:
        for account in list(ec2_backends.values()):
            yield from list(account.values())

    def _forget(self, instance: Instance) -> None:
        del self._lives[instance.id]
        self._visibility.forget(instance.id)
        reservations = instance.ec2_backend.reservations
        for key, reservation in list(reservations.items()):
            if instance in reservation.instances:
                reservation.instances.remove(instance)
                if not reservation.instances:
                    del reservations[key]

    @staticmethod
    def _set_state(instance: Instance, state: tuple[str, int]) -> None:
        instance._state.name, instance._state.code = state


def owner_of(instance: Instance) -> Owner:
    """Return the account and the region of an instance."""
    return Owner(instance.ec2_backend.account_id, instance.ec2_backend.region_name)


def _decoded(user_data: Base64EncodedString | None) -> bytes:
    return base64.b64decode(user_data.as_bytes()) if user_data else NO_USER_DATA


def _place(instance_id: str) -> int:
    return int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:4], "big")
