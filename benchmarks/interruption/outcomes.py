"""Computes the time and the steps that a failure costs from the ranks' traces. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.traces import Passed


class Fault(StrEnum):
    """A kind of fault that the benchmark injects.

    - RANK: a rank is killed.
    - INSTANCE: a node ends with all its processes. A replacement node is available immediately.
    """

    RANK = "rank killed"
    INSTANCE = "instance terminated"


class Job(StrEnum):
    """A kind of training job that the benchmark interrupts: the library that distributes its model over the ranks."""

    DDP = "DDP"
    ZERO3 = "DeepSpeed ZeRO-3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One failure, with the time and the steps that it cost."""

    system: str
    job: Job
    fault: Fault
    seconds: float
    """Seconds from the fault until every rank that must continue (`Contender.waited_for`) has finished a new step."""
    lost_steps: int
    """Steps that had finished before the fault and were repeated after it."""
    came_back: bool = True
    """True if the system recovered in time. False if the benchmark had to restart its job."""
    stopped_seconds: float | None = None
    """Seconds from the fault until all ranks of the old launch had ended, including the ranks that the fault did not
    end.

    None if the system does not restart these ranks.
    """
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the incident; empty for systems that record no phases."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One rehearsal, in which the ranks of a job restarted and repeated some steps."""

    job: Job
    is_first: bool
    """True for the first rehearsal of a launch, whose ranks came from a process with the imported libraries."""
    seconds: float
    """The longest time for which a rank did not train."""
    steps: int
    """Number of repeated steps."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The moment at which training continued after a fault."""

    at: float
    """Monotonic seconds at which the last rank finished its first new step."""
    lost_steps: int


def resumed(
    ranks: Sequence[Sequence[Passed]], hurt_at: float, *, waited_for: Collection[int], is_relaunched: bool
) -> Resumed | None:
    """Return when training continued after a fault, or None if it has not continued yet.

    Args:
        ranks: each rank's trace. Their field `Passed.generation` contains the time at which the rank's process started,
            in monotonic milliseconds.
        hurt_at: monotonic seconds of the fault.
        waited_for: ranks that must finish a new step.
        is_relaunched: True if the system restarts all ranks. Otherwise, ranks that the fault did not end continue.

    Returns:
        The time at which the last rank in `waited_for` finished its first new step, and the number of repeated steps.
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
