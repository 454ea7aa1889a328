"""What EC2 does with time and moto does not: instances boot, have an address of this machine, and are forgotten after their end.

Works on moto's own instances under the lock that the server holds around every request. Invariant: an instance that this has seen is `pending`
until its boot is over, and its PrivateIpAddress is a loopback address that nobody else has.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moto.core.types import Base64EncodedString
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.instances import Instance

from infra.local_cloud.addresses import AddressPool
from infra.local_cloud.faults import Faults
from infra.local_cloud.instances import RunningInstance

PENDING, RUNNING = ("pending", 0), ("running", 16)
NO_USER_DATA = b"#!/bin/sh\n"


@dataclass(slots=True)
class _Life:
    """What moto's instance has no field for."""

    address: str
    boot: int = 0
    boots_at: float = 0.0
    ended_at: float | None = None


class Ec2:
    """The lives of all instances of all accounts and regions.

    Args:
        faults: boot delays, and how long the dead are remembered.
        addresses: where private addresses come from.
        monotonic: seconds.
    """

    def __init__(self, faults: Faults, addresses: AddressPool, monotonic: Callable[[], float]) -> None:
        self._faults = faults
        self._addresses = addresses
        self._monotonic = monotonic
        self._lives: dict[str, _Life] = {}

    def launched(self, instance: Instance) -> None:
        """Begin an instance's first boot."""
        life = self._lives[instance.id] = _Life(self._addresses.take())
        nic = instance.nics[0]
        nic.private_ip_address = life.address
        nic.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": life.address}]
        self.boot(instance)

    def boot(self, instance: Instance) -> None:
        """Begin a boot: the first one, or one after a stop. What ran before is gone."""
        self._set_state(instance, PENDING)
        life = self._lives[instance.id]
        life.boot += 1
        life.boots_at = self._monotonic() + self._faults.boot_delay()

    def advance(self) -> None:
        """Finish the boots that are due, and forget instances that ended long ago; called on every pass."""
        now = self._monotonic()
        memory = self._faults.conditions.remember_terminated_seconds
        for backend, instance in list(self._all()):
            life = self._lives.get(instance.id)
            if life is None:
                continue
            if instance.state == "pending" and now >= life.boots_at:
                self._set_state(instance, RUNNING)
            elif instance.state == "terminated":
                life.ended_at = now if life.ended_at is None else life.ended_at
                if now - life.ended_at >= memory:
                    self._forget(backend, instance)

    def running(self) -> list[RunningInstance]:
        """Return the instances that should run now."""
        return [
            RunningInstance(instance_id=instance.id, boot=life.boot, address=life.address, user_data=_decoded(instance.user_data))
            for _, instance in self._all()
            if instance.state == "running" and (life := self._lives.get(instance.id))
        ]

    def alive_count(self, instance_type: str) -> int:
        """Return how many instances of a type take up capacity."""
        return sum(instance.instance_type == instance_type and instance.state in ("pending", "running") for _, instance in self._all())

    def _all(self) -> Iterator[tuple[EC2Backend, Instance]]:
        for account in list(ec2_backends.values()):
            for backend in list(account.values()):
                for reservation in list(backend.reservations.values()):
                    for instance in list(reservation.instances):
                        yield backend, instance

    def _forget(self, backend: EC2Backend, instance: Instance) -> None:
        del self._lives[instance.id]
        for key, reservation in list(backend.reservations.items()):
            if instance in reservation.instances:
                reservation.instances.remove(instance)
                if not reservation.instances:
                    del backend.reservations[key]

    @staticmethod
    def _set_state(instance: Instance, state: tuple[str, int]) -> None:
        instance._state.name, instance._state.code = state


def _decoded(user_data: Base64EncodedString | None) -> bytes:
    """Return user data as the machine sees it."""
    return base64.b64decode(user_data.as_bytes()) if user_data else NO_USER_DATA
