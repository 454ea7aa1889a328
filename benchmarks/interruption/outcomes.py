"""Computes the time and the steps that a failure costs from the ranks' traces. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.traces import Passed


class Fault(StrEnum):
    """A kind of fault: a rank is killed, or a node ends with all its processes and has a replacement at once."""

    RANK = "rank killed"
    INSTANCE = "instance terminated"


class Job(StrEnum):
    """The library that distributes the interrupted model."""

    DDP = "DDP"
    ZERO3 = "DeepSpeed ZeRO-3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One failure with its cost."""

    system: str
    job: Job
    fault: Fault
    seconds: float
    """Seconds until every rank in `Contender.waited_for` has finished a new step."""
    lost_steps: int
    """Steps finished before the fault and repeated after it."""
    came_back: bool = True
    """False if the benchmark had to restart the job."""
    stopped_seconds: float | None = None
    """Seconds until all ranks of the old launch had ended. None if the system does not restart them."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the incident; empty for systems without phases."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One rehearsal."""

    job: Job
    is_first: bool
    """The first of a launch, whose ranks came from a warm process."""
    seconds: float
    """Longest time in which a rank did not train."""
    steps: int
    """Number of repeated steps."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The time at which training continued after a fault."""

    at: float
    """Monotonic end of the last rank's first new step."""
    lost_steps: int


def resumed(
    ranks: Sequence[Sequence[Passed]], hurt_at: float, *, waited_for: Collection[int], is_relaunched: bool
) -> Resumed | None:
    """Return when the last rank in `waited_for` finished its first new step, and the repeated steps; None before.

    `Passed.generation` is the start of the rank's process in monotonic milliseconds, `hurt_at` the fault in seconds.
    Without `is_relaunched`, ranks that the fault did not end continue.
    """

    def is_old(passed: Passed) -> bool:
        return passed.generation < hurt_at * 1000 if is_relaunched else passed.at <= hurt_at

    reached = max((each.step for passed in ranks for each in passed if is_old(each)), default=0)
    new = [[each for each in ranks[rank] if not is_old(each)] for rank in waited_for]
    moments = [next((each.at for each in passed if each.step > reached), None) for passed in new]
    if any(at is None for at in moments):
        return None
    first = min(passed[0].step for passed in new)
    return Resumed(max(at for at in moments if at is not None), max(0, reached + 1 - first))
