"""How the local cloud behaves today: what AWS's customers cannot choose, and its tests must.

Read and changed at run time at `/_everstep/config`; more kinds of bad days belong here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conditions in force; replaced whole, never changed in place."""

    boot_delay_seconds: Seconds = 0.5
    """From `pending` to `running`."""
    boot_jitter_seconds: Seconds = 0.0
    """At most this much is added to each boot, from a seeded generator."""
    capacity: dict[str, Count] = {}
    """Most instances that may exist of a type; a type that is not named is unlimited."""
    launch_retry_seconds: Seconds = 1.0
    """How long a group waits after a failed launch. AWS backs off for minutes."""
    remember_terminated_seconds: Seconds = 3600.0
    """How long EC2 still describes an instance after its end. AWS: about an hour."""


CONDITIONS = msgspec.json.Decoder(Conditions)


class Faults:
    """The conditions in force, and the chance in them. Thread-safe.

    Args:
        conditions: to begin with.
        seed: of the boot jitter; equal seeds give equal delays in launch order.
        changed: called after every change, to wake who waits.
    """

    def __init__(self, conditions: Conditions, *, seed: int = 0, changed: Callable[[], None] = lambda: None) -> None:
        self._conditions = conditions
        self._random = random.Random(seed)
        self._changed = changed
        self._lock = threading.Lock()

    @property
    def conditions(self) -> Conditions:
        """What is in force now."""
        with self._lock:
            return self._conditions

    def replace(self, conditions: Conditions) -> None:
        """Put other conditions in force; boots that have begun keep their delay."""
        with self._lock:
            self._conditions = conditions
        self._changed()

    def boot_delay(self) -> float:
        """Return the seconds that one boot beginning now takes."""
        with self._lock:
            return self._conditions.boot_delay_seconds + self._random.random() * self._conditions.boot_jitter_seconds
