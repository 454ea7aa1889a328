"""How the local cloud behaves today: what AWS's customers cannot choose, and its tests must.

Read and changed at run time at `/_everstep/config`. What happens once, to one target, is a fault (`fault_kinds`); what
holds until it is changed is a condition, and all chance in it comes from here: one seed, one stream per purpose, so
that more of one thing does not move another.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Service = Literal["autoscaling", "ec2", "events", "s3", "sqs"]


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Anything between two times, equally probable."""

    low_seconds: Seconds
    high_seconds: Seconds

    def __post_init__(self) -> None:
        if self.low_seconds > self.high_seconds:
            raise ValueError("low_seconds is above high_seconds")


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Most near the median, a few far above it: what boots do."""

    median_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    sigma: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.5
    """Standard deviation of the logarithm."""
    longest_seconds: Seconds = 3600.0
    """None takes longer."""


Delay = Seconds | Uniform | Lognormal
"""A number is that many seconds, always."""


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conditions in force; replaced whole, never changed in place."""

    boot_delay_seconds: Delay = 0.5
    """From `pending` to `running`."""
    capacity: dict[str, Count] = {}
    """Most instances that may exist of a type; a type that is not named is unlimited."""
    slot_release_seconds: Delay = 0.0
    """How long an instance that has ended still takes up capacity: a reserved slot is not free at once.

    AWS: minutes.
    """
    launch_retry_seconds: Seconds = 1.0
    """How long a group waits after a failed launch. AWS backs off for minutes."""
    administrative_suspension_seconds: Seconds | None = None
    """How long launches of a group may fail, none succeeding, before AWS suspends its Launch process.

    AWS: most often 24 hours.
    """
    remember_terminated_seconds: Seconds = 3600.0
    """How long EC2 still describes an instance after its end. AWS: about an hour."""
    throttle: dict[Service, Share] = {}
    """Which share of the calls of a service is refused with that service's own throttling error."""
    event_delay_seconds: Delay = 0.0
    """From what happens to its event; delays of different lengths change the order."""
    event_double_share: Share = 0.0
    """Of events that come twice, with the same id, each with a delay of its own."""
    event_drop_share: Share = 0.0
    """Of events that never come."""


CONDITIONS = msgspec.json.Decoder(Conditions)


class Faults:
    """The conditions in force, and the chance in them. Thread-safe.

    Args:
        conditions: to begin with.
        seed: equal seeds and equal questions give equal answers.
        changed: called after every change, to wake who waits.
    """

    def __init__(self, conditions: Conditions, *, seed: int = 0, changed: Callable[[], None] = lambda: None) -> None:
        self.seed = seed
        self.first = self._conditions = conditions
        self._streams: dict[str, random.Random] = {}
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
        return self._delay("boot", self.conditions.boot_delay_seconds)

    def slot_release_delay(self) -> float:
        """Return the seconds for which the slot of one instance that ends now stays taken."""
        return self._delay("slot", self.conditions.slot_release_seconds)

    def is_throttled(self, service: str) -> bool:
        """Say whether one call of a service is refused."""
        return self._happens(f"throttle/{service}", self.conditions.throttle.get(service, 0.0))  # type: ignore[call-overload]

    def event_delays(self) -> list[float]:
        """Return the seconds after which one event comes: one of them mostly, two when it is doubled, none when it is lost."""
        conditions = self.conditions
        if self._happens("event/drop", conditions.event_drop_share):
            return []
        copies = 2 if self._happens("event/double", conditions.event_double_share) else 1
        return [self._delay("event/delay", conditions.event_delay_seconds) for _ in range(copies)]

    def choose(self, purpose: str, among: int) -> int:
        """Return one of 0 … among-1."""
        with self._lock:
            return self._stream(purpose).randrange(among)

    def _happens(self, purpose: str, share: float) -> bool:
        with self._lock:
            return self._stream(purpose).random() < share

    def _delay(self, purpose: str, delay: Delay) -> float:
        with self._lock:
            stream = self._stream(purpose)
            match delay:
                case Uniform():
                    return stream.uniform(delay.low_seconds, delay.high_seconds)
                case Lognormal():
                    return min(
                        stream.lognormvariate(math.log(delay.median_seconds), delay.sigma), delay.longest_seconds
                    )
                case _:
                    return delay

    def _stream(self, purpose: str) -> random.Random:
        return self._streams.setdefault(purpose, random.Random(f"{self.seed}/{purpose}"))
