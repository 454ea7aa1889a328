"""When a job that keeps failing alike is given up, and what is changed once before that.

    the same failure MaxAttempts times      was the place ever passed?      no: the node first, then the state
                                                                            yes, or it alone holds committed steps: the
                                                                            state first, then the node
    the node    the failing rank's node is left and a spare takes over: a bad node, or a bad script?
    the state   the base that it failed from twice is left out and an older one is taken: a bad state, or a bad script?

Each change buys one more attempt, each is made once, and only where it can be made: with a spare, with another state
than the script's own initial one to go on from. What still fails after that is the script.

A failure counts until training is further than it ever was before that failure.

Invariant: `rule` gives up after at most MaxAttempts + 2 failures that look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import JobSpec, Trial
from everstep.protocol.ids import Generation, Step

NO_PROGRESS_TIMES = 3
"""This many times `max_attempts` failures without a new highest step, whatever they look like, are a loop too."""


class Course(StrEnum):
    """How it goes on. AGAIN: as before. OTHER_NODE, OLDER_STATE: with one thing changed. GIVE_UP: not at all."""

    AGAIN = "again"
    OTHER_NODE = "other_node"
    OLDER_STATE = "older_state"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the breakers say."""

    course: Course
    why: str = ""
    """A sentence; empty for AGAIN."""


def rule(
    failures: Sequence[FailureRecord],
    trials: Sequence[Trial],
    spec: JobSpec,
    *,
    has_spare: bool,
    older_base: Step,
    is_sole_holder: bool = False,
) -> Ruling:
    """Return how a job goes on after its last failure.

    Args:
        failures: oldest first; all are of the job's own making, none is the consequence of a lost node.
        trials: what was changed so far.
        spec: with `max_attempts`.
        has_spare: a node is there to take over, from another state than the script's own initial one.
        older_base: the newest state older than the base of the last failure that every rank can get; 0 where there is
            none.
        is_sole_holder: committed steps are lost with the node of the last failure: it is changed last.

    Returns:
        The course, with the figures and the last failure in words.
    """
    attempts = max(1, spec.max_attempts)
    if not failures:
        return Ruling(course=Course.AGAIN)
    last = failures[-1]
    alike = _alike(failures)
    tried = [trial for trial in trials if _looks_like(trial.failure, last)]
    if len(alike) >= attempts + len(tried):
        told = f"the same failure {len(alike)} times {_where(last.step)}"
        changes = (_other_node(alike, tried, has_spare=has_spare), _older_state(alike, tried, older_base))
        for course in changes if last.max_boundary <= last.step and not is_sole_holder else reversed(changes):
            if course is not None and attempts > 1:
                return Ruling(course=course, why=f"{told}: {_how(last)}")
        story = "".join(f", also {_story(trial)}" for trial in tried)
        return Ruling(course=Course.GIVE_UP, why=f"{told}{story}: {_how(last)}")
    limit = attempts * NO_PROGRESS_TIMES
    if len(failures) >= limit and all(failure.max_boundary == last.max_boundary for failure in failures[-limit:]):
        since = f"{datetime.fromtimestamp(failures[-limit].at, UTC):%H:%M:%S} UTC"
        which = "the last" if len(alike) == 1 else f"the last {len(alike)} alike"
        return Ruling(
            course=Course.GIVE_UP,
            why=f"{limit} failures since {since} without a step beyond {last.max_boundary}, {which}: {_how(last)}",
        )
    return Ruling(course=Course.AGAIN)


def remembered(
    failures: Sequence[FailureRecord], failure: FailureRecord | None, spec: JobSpec
) -> tuple[FailureRecord, ...]:
    """Return the breakers' memory with one more failure, as long as it can matter."""
    longer = [*failures, failure] if failure is not None else list(failures)
    return tuple(longer[-max(1, spec.max_attempts) * NO_PROGRESS_TIMES :])


def forgiven(failures: Sequence[FailureRecord], generation: Generation) -> tuple[FailureRecord, ...]:
    """Return the breakers' memory without the failures of a generation that turned out to be the consequence of a lost node."""
    return tuple(failure for failure in failures if failure.generation != generation)


def still_ahead(failures: Sequence[FailureRecord], generation: Generation, boundary: Step) -> tuple[FailureRecord, ...]:
    """Return the breakers' memory without the failures that training has left behind: only without progress are failures a loop.

    Args:
        failures: oldest first.
        generation: that runs.
        boundary: that all its ranks have passed.

    Returns:
        Those after which nothing new was reached yet.
    """
    return tuple(
        failure for failure in failures if generation <= failure.generation or boundary <= failure.max_boundary
    )


def passed(trials: Sequence[Trial], generation: Generation, boundary: Step) -> tuple[Trial, ...]:
    """Return the trials that have told: training is beyond the place of their failure, in a later generation than that.

    Args:
        trials: what was changed.
        generation: that runs.
        boundary: that all its ranks have passed.

    Returns:
        Those whose change is what helped.
    """
    return tuple(
        trial
        for trial in trials
        if generation > trial.failure.generation and boundary > max(trial.failure.step, Step(0))
    )


def _other_node(alike: Sequence[FailureRecord], tried: Sequence[Trial], *, has_spare: bool) -> Course | None:
    """Return OTHER_NODE if it was one node's ranks that failed each time, and nothing was tried about it."""
    is_one_node = alike[-1].node_id is not None and len({failure.node_id for failure in alike}) == 1
    return Course.OTHER_NODE if has_spare and is_one_node and all(trial.kind != "node" for trial in tried) else None


def _older_state(alike: Sequence[FailureRecord], tried: Sequence[Trial], older_base: Step) -> Course | None:
    """Return OLDER_STATE if the last two attempts began with the same state, and nothing was tried about it."""
    is_one_state = len(alike) > 1 and alike[-1].base_step == alike[-2].base_step > older_base > 0
    return Course.OLDER_STATE if is_one_state and all(trial.kind != "state" for trial in tried) else None


def _alike(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return the failures at the end that look like the last one."""
    alike: list[FailureRecord] = []
    for failure in reversed(failures):
        if not _looks_like(failure, failures[-1]):
            break
        alike.insert(0, failure)
    return alike


def _looks_like(one: FailureRecord, other: FailureRecord) -> bool:
    return (one.step, one.exit_class, one.code, one.is_hang) == (
        other.step,
        other.exit_class,
        other.code,
        other.is_hang,
    )


def _where(step: Step) -> str:
    return "before its first step" if step <= 0 else f"after step {step}"


def _story(trial: Trial) -> str:
    return (
        f"without {trial.node_id}"
        if trial.kind == "node"
        else f"from an older state than step {trial.failure.base_step}"
    )


def _how(failure: FailureRecord) -> str:
    if failure.is_hang:
        return "its ranks stood still"
    how = (
        "its shards could not be loaded"
        if failure.exit_class is None
        else failure.words or f"{failure.exit_class.value} ({failure.code})"
    )
    return f"{how}\n{failure.last_lines}".rstrip() if failure.last_lines else how
