"""Delays the effect of changes on EC2's Describe operations, because EC2 is eventually consistent.

Until a delay has passed, answers omit a new instance, and show the earlier state of a changed one. Everything else sees
the current state. Source: Amazon EC2 Developer Guide, eventual consistency in the Amazon EC2 API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance

from infra.local_cloud.faults import Faults

DELAYED: Final = frozenset({"DescribeInstances", "DescribeInstanceStatus", "DescribeInstanceTopology"})
"""Operations whose answers show changes only after a delay."""
State = tuple[str, int]
"""Name and EC2 code, such as `("running", 16)`."""


@dataclass(slots=True)
class _Shown:
    """One instance's states for Describe operations."""

    state: State | None = None
    """None: answers omit the instance."""
    newest: State | None = None
    """Current, as `note` recorded it last."""
    coming: list[tuple[float, State]] = field(default_factory=list)
    """States newer than `state`, oldest first, each with the monotonic time from which answers contain it."""


class Visibility:
    """The states of all instances as Describe operations show them. The server holds its lock during each call."""

    def __init__(self, faults: Faults, monotonic: Callable[[], float]) -> None:
        self._faults = faults
        self._monotonic = monotonic
        self._shown: dict[str, _Shown] = {}

    def note(self, instance: Instance) -> None:
        """Record the current state of an instance, at which its delay begins. Idempotent.

        The server calls this before each Describe operation, and whenever it advances the instances.
        """
        shown = self._shown.setdefault(instance.id, _Shown())
        state = (instance._state.name, instance._state.code)
        if state != shown.newest:
            shown.newest = state
            earliest = shown.coming[-1][0] if shown.coming else 0.0
            shown.coming.append((max(earliest, self._monotonic() + self._faults.visibility_delay()), state))

    def forget(self, instance_id: str) -> None:
        """Remove the states of an instance that EC2 no longer describes."""
        self._shown.pop(instance_id, None)

    @contextmanager
    def as_described(self, backend: EC2Backend) -> Iterator[None]:
        """Make moto's Describe operations return delayed states of a region during the `with` block."""
        with ExitStack() as restore:
            reservations = backend.reservations
            restore.callback(setattr, backend, "reservations", reservations)
            backend.reservations = type(reservations)()
            for key, reservation in reservations.items():
                instances = reservation.instances
                restore.callback(setattr, reservation, "instances", instances)
                reservation.instances = [each for each in instances if self._show(each, restore)]
                if reservation.instances:
                    backend.reservations[key] = reservation
            yield

    def _show(self, instance: Instance, restore: ExitStack) -> bool:
        """Set an instance's state to what a delayed answer shows. Return whether answers contain the instance."""
        self.note(instance)
        shown, now = self._shown[instance.id], self._monotonic()
        while shown.coming and shown.coming[0][0] <= now:
            shown.state = shown.coming.pop(0)[1]
        if shown.state is None or self._faults.is_omitted():
            return False
        if shown.state != shown.newest:
            for name, value in (("name", shown.state[0]), ("code", shown.state[1])):
                restore.callback(setattr, instance._state, name, getattr(instance._state, name))
                setattr(instance._state, name, value)
            for name, empty in (("state_reason", None), ("_reason", "")):
                restore.callback(setattr, instance, name, getattr(instance, name))
                setattr(instance, name, empty)
        return True
