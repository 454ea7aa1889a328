"""Checkpoint strategies of a job: Everstep's own, and four others with which users can compare it on the same job.

A strategy is a choice of existing settings. `STRATEGIES` has one row per strategy:

    strategy     ranks capture       next checkpoint                  training during an upload   restores from
    Everstep     every step (*)      the job's own settings           continues                   memory, then S3
    None         no step             never                            -                           the start
    Strawman     checkpoints only    3 h after the last one           waits                       S3
    HighFreq     checkpoints only    at once after the last one       waits                       S3
    CheckFreq    checkpoints only    interval within a cost of 5 %    continues                   S3

(*) Ranks capture fewer steps if snapshots would slow training down by more than MaxSlowdown.

CheckFreq's interval is the automatic interval of `worker.core.checkpoint_schedule`, with max_overhead 0.05:

    interval = max(U, c · (1 + p) / p)      U duration of an upload, c training time that it costs, p overhead bound

Source: Strawman and HighFreq are the baselines of GEMINI (Wang et al., SOSP 2023, section 7.1). CheckFreq is Mohan,
Phanishayee and Chidambaram, FAST 2021; its code bounds the overhead by 5 % by default.

Invariant: a strategy other than Everstep keeps each shard on its owner's node only. A restore uses no shard in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.ids import FIRST_STEP
from everstep.protocol.plan import Snapshots


class Strategy(StrEnum):
    """The rules by which a job stores and restores its state.

    - EVERSTEP: nodes keep each step in memory; checkpoints follow the job's settings.
    - NONE: nothing is stored. After a failure the job starts again from its beginning.
    - STRAWMAN: one checkpoint every three hours; training waits until it is stored.
    - HIGH_FREQ: one checkpoint after the other; training waits until each is stored.
    - CHECK_FREQ: checkpoints in the background, at an interval that follows from their measured cost.
    """

    EVERSTEP = "Everstep"
    NONE = "None"
    STRAWMAN = "Strawman"
    HIGH_FREQ = "HighFreq"
    CHECK_FREQ = "CheckFreq"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySchedule:
    """The settings that determine when a job's checkpoints are due."""

    every_steps: int = 0
    """Steps between two checkpoints. 0 disables this trigger."""
    interval_seconds: int | None = None
    """Seconds between two checkpoints. None disables this trigger."""
    max_overhead: float | None = None
    """Share of training time that checkpoints may cost.

    Everstep derives the interval from it. None: no automatic interval.
    """
    max_bytes_per_second: int | None = None
    """Limit of a node's mean upload rate with an automatic interval. None means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that a strategy consists of: one row of the table in the docstring of this module."""

    snapshots: Snapshots
    is_blocking: bool = False
    uses_memory: bool = False
    """Whether a restore may use shards in the memory of nodes."""
    schedule: StrategySchedule = StrategySchedule()
    """The values of those fields of the schedule that the request of a job does not set."""
    adjustable: tuple[str, ...] = ()
    """Fields of `schedule` that the request of a job may change."""


STRATEGIES: Mapping[Strategy, Rules] = {
    Strategy.EVERSTEP: Rules(
        snapshots=Snapshots.EVERY_STEP,
        uses_memory=True,
        adjustable=("every_steps", "interval_seconds", "max_overhead", "max_bytes_per_second"),
    ),
    Strategy.NONE: Rules(snapshots=Snapshots.NEVER),
    Strategy.STRAWMAN: Rules(
        snapshots=Snapshots.FOR_CHECKPOINTS,
        is_blocking=True,
        schedule=StrategySchedule(interval_seconds=3 * 3600),
        adjustable=("interval_seconds",),
    ),
    Strategy.HIGH_FREQ: Rules(
        snapshots=Snapshots.FOR_CHECKPOINTS, is_blocking=True, schedule=StrategySchedule(every_steps=1)
    ),
    Strategy.CHECK_FREQ: Rules(
        snapshots=Snapshots.FOR_CHECKPOINTS,
        schedule=StrategySchedule(max_overhead=0.05),
        adjustable=("max_overhead", "max_bytes_per_second"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """The settings of a job, apart from its checkpoint schedule, that some checkpoint strategies do not allow."""

    copies: int
    """Number of nodes that hold each shard."""
    third_slot: bool = False
    """Whether nodes reserve a third slot for each shard."""
    on_notice: bool = False
    """Whether a notice of AWS makes a checkpoint due."""
    is_preemptible: bool = False
    """Whether a job of higher priority may pause the job."""
    may_shrink: bool = False
    """Whether MinNodeCount is below NodeCount."""
    may_grow: bool = False
    """Whether MaxNodeCount is above NodeCount."""


_FIELDS = {
    "every_steps": "EverySteps",
    "interval_seconds": "IntervalInSeconds",
    "max_overhead": "MaxOverhead",
    "max_bytes_per_second": "MaxUploadBytesPerSecond",
}
"""The API's names of the fields of `StrategySchedule`."""


def completed(strategy: Strategy, asked: StrategySchedule) -> StrategySchedule:
    """Return the schedule that a job requested, with the strategy's default for each field that the request omits."""
    default = STRATEGIES[strategy].schedule
    return StrategySchedule(
        every_steps=asked.every_steps or default.every_steps,
        interval_seconds=asked.interval_seconds or default.interval_seconds,
        max_overhead=asked.max_overhead or default.max_overhead,
        max_bytes_per_second=asked.max_bytes_per_second,
    )


def contradictions(
    strategy: Strategy, schedule: StrategySchedule, settings: StrategySettings
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a job that contradict its strategy.

    Args:
        strategy: the strategy that the job was created with; it never changes.
        schedule: the job's checkpoint schedule, with the strategy's defaults filled in (`completed`).
        settings: the job's other settings, as requested.

    Yields:
        Name of the API's field and the message, for each setting that must change.
    """
    rules = STRATEGIES[strategy]
    if strategy is Strategy.EVERSTEP:
        return
    for attribute, name in _FIELDS.items():
        default = getattr(rules.schedule, attribute)
        if attribute not in rules.adjustable and getattr(schedule, attribute) != default:
            fixed = f"always has {default:g}" if default else "does not use it"
            yield f"CheckpointConfig.{name}", f"the strategy {strategy} {fixed}; remove the field"
        elif default and not getattr(schedule, attribute):
            yield f"CheckpointConfig.{name}", f"the strategy {strategy} needs it; set a value above 0"
    if settings.copies > 1:
        yield "Protection.Copies", f"the strategy {strategy} keeps no copies on other nodes; remove the field or set 1"
    if settings.third_slot:
        yield "CheckpointConfig.ThirdSlot", f"the strategy {strategy} does not use it; remove the field"
    if strategy is Strategy.NONE:
        yield from _needs_checkpoints(settings)


def _needs_checkpoints(settings: StrategySettings) -> Iterator[tuple[str, str]]:
    """Yield the settings that are impossible without checkpoints, for a job with the strategy None."""
    if settings.on_notice:
        yield "CheckpointConfig.OnNotice", "the strategy None makes no checkpoints; remove the field"
    if settings.is_preemptible:
        yield "Preemptible", "the strategy None stores no state, so a pause would lose every step; remove the field"
    for is_set, name in ((settings.may_shrink, "MinNodeCount"), (settings.may_grow, "MaxNodeCount")):
        if is_set:
            words = "the strategy None stores no state, so a job that grows would lose every step; remove the field"
            yield f"ElasticConfig.{name}", words


def newest_storable(strategy: Strategy, *, committed: int, boundary: int) -> int:
    """Return the newest step that a checkpoint can contain if it is requested now.

    If this step already has a checkpoint, there is no newer state to store. The result is the newest committed step, or
    the newest finished step for a strategy whose ranks capture only steps for checkpoints.

    Args:
        strategy: the strategy that the job was created with.
        committed: the newest committed step, or -1.
        boundary: the newest step that a rank has finished, or -1.

    Returns:
        Number of finished optimizer steps, or -1 without such a step.
    """
    return max(committed, boundary) if _commits_only_checkpoints(strategy) else committed


def requested_step(strategy: Strategy, *, committed: int, boundary: int) -> int:
    """Return the step at or after which the job makes a checkpoint that a person or a notice of AWS requests now.

    The result is 0 or less if the job cannot make a checkpoint yet. The arguments are those of `newest_storable`.
    """
    newest = newest_storable(strategy, committed=committed, boundary=boundary)
    return max(newest, FIRST_STEP) + 1 if _commits_only_checkpoints(strategy) else newest


def _commits_only_checkpoints(strategy: Strategy) -> bool:
    return STRATEGIES[strategy].snapshots is Snapshots.FOR_CHECKPOINTS


def strategy_words(strategy: Strategy) -> str:
    """Return a sentence that says which steps a job of another strategy than Everstep's loses at a failure.

    The other strategies exist for comparison. Empty for Everstep's own strategy.
    """
    if strategy is Strategy.EVERSTEP:
        return ""
    if strategy is Strategy.NONE:
        return "The strategy None keeps no state: after a failure, the job starts again from its beginning."
    words = "memory protects no step: after a failure, the job restores the newest checkpoint"
    return f"With the strategy {strategy}, {words}."
