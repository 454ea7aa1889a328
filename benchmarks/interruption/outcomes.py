"""What one failure cost, from what the ranks wrote down. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.traces import Passed


class Fault(StrEnum):
    """What is done to the job.

    RANK: a rank is killed. INSTANCE: a node goes with everything on it; another one is free at once.
    """

    RANK = "rank killed"
    INSTANCE = "instance terminated"


class Job(StrEnum):
    """What trains."""

    DDP = "DDP"
    ZERO3 = "DeepSpeed ZeRO-3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One failure and what it cost."""

    system: str
    job: Job
    fault: Fault
    seconds: float
    """From the fault until every rank that has to go on had finished a step that none had finished before."""
    lost_steps: int
    """Finished before the fault and made again."""
    came_back: bool = True
    """False: it was given up after so many seconds, and started anew by hand."""
    stopped_seconds: float | None = None
    """From the fault until no other rank of the old launch was left; None where they go on."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Of the incident, seconds; empty for systems that keep no record."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """When training went on."""

    at: float
    """Seconds of the machine's monotonic clock."""
    lost_steps: int


def resumed(
    ranks: Sequence[Sequence[Passed]], hurt_at: float, *, waited_for: Collection[int], is_relaunched: bool
) -> Resumed | None:
    """Return when training went on after a fault, or None while it has not.

    Args:
        ranks: what each wrote down; `Passed.generation` is the start of its process in milliseconds of the same clock.
        hurt_at: when the fault was made, seconds.
        waited_for: the ranks that have to finish a new step.
        is_relaunched: all processes begin anew; else those that were not hurt go on.

    Returns:
        The moment at which the last of them finished its first new step.
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
