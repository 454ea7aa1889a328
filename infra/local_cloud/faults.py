"""Defines conditions: behaviour of AWS that customers cannot influence, but that tests must control.

Tests change conditions through `/_everstep/config`. A condition holds until the next change; a fault (`fault_kinds`) is
a single event. Each purpose has its own stream of random numbers from one seed, so draws for one do not change another.
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
    """A delay with a uniform distribution."""

    low_seconds: Seconds
    high_seconds: Seconds

    def __post_init__(self) -> None:
        if self.low_seconds > self.high_seconds:
            raise ValueError("low_seconds is above high_seconds")


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """A lognormal distribution of delays, such as boot times."""

    median_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    sigma: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.5
    """Standard deviation of the delay's natural logarithm."""
    longest_seconds: Seconds = 3600.0
    """Upper limit of the delay."""


Delay = Seconds | Uniform | Lognormal
"""A plain number is a constant number of seconds."""


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The behaviour of the local cloud. A change replaces the whole object."""

    boot_delay_seconds: Delay = 0.5
    """Time from `pending` to `running`."""
    capacity: dict[str, Count] = {}
    """Maximum by instance type. A missing type has no limit."""
    slot_release_seconds: Delay = 0.0
    """Time for which an ended instance still occupies `capacity`; minutes on the real AWS."""
    launch_retry_seconds: Seconds = 1.0
    """Seconds until a group retries a failed launch; minutes on the real AWS."""
    administrative_suspension_seconds: Seconds | None = None
    """Seconds until AWS suspends Launch if all launches fail; usually 24 hours on the real AWS. None: never."""
    remember_terminated_seconds: Seconds = 3600.0
    """Time for which EC2 describes an ended instance; about an hour on the real AWS."""
    throttle: dict[Service, Share] = {}
    """Share of calls that a service refuses with its throttling error."""
    api_rate_share: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    """Rate limits of EC2 and Auto Scaling, as a fraction of AWS's own (`rates`). None: no limits."""
    visibility_seconds: Delay = 0.0
    """Seconds from a launch or a state change until Describe operations show it."""
    describe_omit_share: Share = 0.0
    """Share of existing instances in each answer of Describe operations."""
    disrupted_zones: tuple[str, ...] = ()
    """Zones in which DescribeInstances and DescribeInstanceStatus fail, without ids or with one of an instance there.
    """
    event_delay_seconds: Delay = 0.0
    """Seconds from a change to its event. Unequal delays change the order of events."""
    event_double_share: Share = 0.0
    """Share of events that are delivered twice, with the same id and independent delays."""
    event_drop_share: Share = 0.0
    """Share of events that are lost."""


CONDITIONS = msgspec.json.Decoder(Conditions)


class Faults:
    """The current conditions of a local cloud, and the random decisions that they need. Thread-safe.

    Equal seeds and equal sequences of calls yield equal results. `changed` is called after every change, so that the
    cloud advances at once.
    """

    def __init__(self, conditions: Conditions, *, seed: int = 0, changed: Callable[[], None] = lambda: None) -> None:
        self.seed = seed
        self.first = self._conditions = conditions
        self._streams: dict[str, random.Random] = {}
        self._changed = changed
        self._lock = threading.Lock()

    @property
    def conditions(self) -> Conditions:
        """The current conditions, one immutable object."""
        with self._lock:
            return self._conditions

    def replace(self, conditions: Conditions) -> None:
        """Replace all conditions. Boots in progress keep their delay."""
        with self._lock:
            self._conditions = conditions
        self._changed()

    def boot_delay(self) -> float:
        """Return the seconds of a boot that starts now."""
        return self._delay("boot", self.conditions.boot_delay_seconds)

    def slot_release_delay(self) -> float:
        """Return for how many seconds an instance that ends now still occupies capacity."""
        return self._delay("slot", self.conditions.slot_release_seconds)

    def is_throttled(self, service: str) -> bool:
        """Decide at random whether a call of a service is throttled."""
        share = self.conditions.throttle.get(service, 0.0)  # type: ignore[call-overload]
        return self._happens(f"throttle/{service}", share)

    def visibility_delay(self) -> float:
        """Return the seconds until Describe operations show a change that happens now."""
        return self._delay("visibility", self.conditions.visibility_seconds)

    def is_omitted(self) -> bool:
        """Decide at random whether a Describe answer omits one instance."""
        return self._happens("describe/omit", self.conditions.describe_omit_share)

    def event_delays(self) -> list[float]:
        """Return the delay in seconds of each copy of an event: usually one, two if duplicated, none if dropped."""
        conditions = self.conditions
        if self._happens("event/drop", conditions.event_drop_share):
            return []
        copies = 2 if self._happens("event/double", conditions.event_double_share) else 1
        return [self._delay("event/delay", conditions.event_delay_seconds) for _ in range(copies)]

    def choose(self, purpose: str, among: int) -> int:
        """Return a random number from 0 to `among` - 1, from the stream for `purpose`."""
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
