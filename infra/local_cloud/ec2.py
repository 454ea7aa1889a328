"""Emulates EC2's behaviour over time, which moto lacks: boots, addresses, status checks, warnings and removals.

Each change of an instance's state causes one event. The server holds its lock during each call.
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
"""Source: EC2 User Guide, instance launch issues."""
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
"""AWS's state reasons for the end of an instance. The text for `block` is invented, because AWS documents none."""
TOPOLOGY_LAYERS: Final = ((1, 1), (2, 4), (3, 16), (4, 64))
"""Layers of EC2 network nodes above an instance, outermost first: number of the layer, number of its nodes."""


class InsufficientCapacity(EC2ClientError):  # type: ignore[misc]
    """The launch needs more instances of a type than `Conditions.capacity` permits."""

    code = "InsufficientInstanceCapacity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The end or reboot of an instance that a fault has scheduled."""

    at: float
    """Monotonic seconds."""
    at_time: datetime
    how: End
    reason: str
    """A key of `REASONS`."""


@dataclass(slots=True)
class Life:
    """State of an instance for which moto has no field."""

    address: str
    boot: int = 0
    boots_at: float = 0.0
    ended_at: float | None = None
    slot_free_at: float = 0.0
    announced_state: str = ""
    """State in the last event; empty before the first."""
    failed_checks: dict[StatusCheck, datetime] = field(default_factory=dict)
    """Failing checks, each with the time of its first failure."""
    scheduled: tuple[PlannedEvent, ...] = ()
    spot_action: Plan | None = None
    rebalance_at: datetime | None = None
    plan: Plan | None = None
    has_crashed: bool = False
    """Whether the host has crashed. EC2 may still report the instance as running."""


@dataclass(eq=False, repr=False)
class Ec2:
    """Implements operations of EC2's API for all accounts and regions, and advances the states of all instances.

    `faults` has capacity and delays, `answers` AWS's undocumented behaviour. `announcements` receives the events of
    state changes.
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
        """Raise InsufficientCapacity with AWS's message if a launch exceeds the free capacity of the instance type."""
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
        """Start a boot, which ends all earlier processes and clears a crash and failed status checks."""
        self._set_state(instance, PENDING)
        life = self._lives[instance.id]
        life.boot += 1
        life.boots_at = self.monotonic() + self.faults.boot_delay()
        life.has_crashed = False
        life.failed_checks = {}

    def ended(self, instance: Instance) -> None:
        """Record the end of an instance, whose capacity stays occupied for `slot_release_seconds`. moto calls this.

        Idempotent.
        """
        life = self._lives.get(instance.id)
        if life and life.ended_at is None:
            life.ended_at = self.monotonic()
            life.slot_free_at = life.ended_at + self.faults.slot_release_delay()

    def status(self, instance: Instance, check: StatusCheck) -> dict[str, Any]:
        """Return one status check in the format of DescribeInstanceStatus."""
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
        """Return scheduled events in the format of DescribeInstanceStatus."""
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
        """Return the network nodes above an instance, outermost first. They depend only on the instance id."""
        return [
            f"nn-{hashlib.sha256(f'{layer}/{_place(instance.id) % count}'.encode()).hexdigest()[:17]}"
            for layer, count in TOPOLOGY_LAYERS[: self.answers.topology_layers]
        ]

    # The methods below inject faults into instances.

    def find(self, instance_id: str) -> tuple[Instance, Life]:
        """Return an instance that has not ended, with its additional state, or raise FaultRefused."""
        for instance in self._all():
            if instance.id == instance_id and instance.state not in ("terminated", "shutting-down"):
                return instance, self._lives[instance_id]
        raise FaultRefused(f"the instance {instance_id} does not exist or has ended")

    def life(self, instance_id: str) -> Life | None:
        """Return the additional state of an instance, or None if it is unknown."""
        return self._lives.get(instance_id)

    def in_order_of_launch(self) -> list[str]:
        """Return the ids of all instances that EC2 still describes, oldest first."""
        return list(self._lives)

    def plan(self, instance_id: str, how: End, reason: str, seconds: float) -> Plan:
        """Schedule the end or the reboot of an instance after a delay, unless `unplan` cancels it.

        `reason` is a key of `REASONS`. Raises FaultRefused if the instance does not exist or has ended.
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
        """Cancel all planned ends and their notices, and return the ids of the instances."""
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
        """Clear the failed status checks of instances that have not crashed, and return their ids."""
        failing = [
            instance_id for instance_id, life in self._lives.items() if life.failed_checks and not life.has_crashed
        ]
        for instance_id in failing:
            self._lives[instance_id].failed_checks = {}
        return failing

    def end(self, instance_id: str, how: End, reason: str) -> None:
        """Terminate, stop or reboot an instance now, without its Auto Scaling group.

        `reason` is a key of `REASONS`. Raises FaultRefused if the instance does not exist or has ended.
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
        """Finish due boots and planned ends, send events of state changes, and remove instances that ended long ago."""
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
        """Return how many of `wanted` instances fit.

        An ended one still occupies capacity for `slot_release_seconds`.
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
        """Return an instance's zone; None if EC2 does not describe it."""
        return next((str(each.placement.zone) for each in self._all() if each.id == instance_id), None)

    @contextmanager
    def as_described(self) -> Iterator[None]:
        """Make moto's Describe operations return delayed states during the `with` block."""
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
