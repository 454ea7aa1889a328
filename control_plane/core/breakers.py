"""Breakers: rules that decide when a repeatedly failing job gets another node or an older state, and when it fails.

    after MaxAttempts equal failures                                       first change      second change
    the failing node alone holds committed steps                           state             node
    otherwise, at a step that training passed in an earlier attempt        state             node
    otherwise, at a step that training never passed                        node              state

    change of node     a spare replaces the failing rank's node, in case the node causes the failures
    change of state    the job restores an older step than in the last two attempts, in case the state causes them

Failures are equal if their step, exit class and exit code are the same. Each change allows one more attempt, and is
tried at most once. A change of node needs a spare. A change of state needs an older stored state; the state that the
script builds at step 0 does not count. If the job still fails after both changes, the script is at fault, and the job
fails.

An exception of OF_THE_CODE before the first step fails the job at once.

A launch without a new step in which the job loses a node counts as a failure of its own kind (`own_losses`). The job
fails after NODE_LOSS_TIMES of them, on whichever nodes: no other node or state is tried.

A failure counts until training passes the highest step that any generation had reached before the failure.

Invariant: `rule` gives up after at most MaxAttempts + 2 equal failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.incidents import Change, FailureRecord, Repeated
from control_plane.core.observed.jobs import Trial
from control_plane.core.observed.specs import JobSpec
from control_plane.core.tracebacks import exception_class
from everstep.protocol.ids import FIRST_STEP, Generation, Step

NO_PROGRESS_TIMES = 3
"""Number of failures without progress after which a job fails, as a multiple of `max_attempts`.

Progress means that training reached a new highest step. The failures may differ from each other.
"""
OF_THE_CODE = frozenset(
    {
        *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"),
        *("CannotResume", "UnsupportedOption", "UnsupportedVersion"),
    }
)
"""Exceptions that a script raises again whenever it starts. Before the first step, the job fails at the first one."""
UNCAUGHT = 1
"""Python's exit code after an exception that the script did not catch."""
NODE_LOSS_TIMES = 2
"""Number of launches without a new step that each lose a node, after which a job fails."""


class BreakerCourse(StrEnum):
    """The ways in which a job can continue or end after a failure that it may have caused itself.

    - AGAIN: the job restarts on the same nodes, from the newest state.
    - OTHER_NODE: the job restarts with a spare in place of the failing node.
    - OLDER_STATE: the job restarts from an older state.
    - GIVE_UP: the job fails.
    """

    AGAIN = "again"
    OTHER_NODE = "other_node"
    OLDER_STATE = "older_state"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The way in which a job continues or ends after a failure, with the reason."""

    course: BreakerCourse
    why: Repeated | None = None
    """The failures that are the reason for `course`. None if the job simply restarts (AGAIN)."""


def rule(
    failures: Sequence[FailureRecord],
    trials: Sequence[Trial],
    spec: JobSpec,
    *,
    has_spare: bool,
    older_base: Step,
    is_sole_holder: bool = False,
) -> Ruling:
    """Decide whether a job retries after its last failure, changes the node or the state, or fails.

    Args:
        failures: failures that the job itself may have caused, oldest first, and losses of nodes. Consequences of a
            lost node are excluded.
        trials: changes of node or state that earlier calls chose because of these failures.
        spec: the job's specification, with `max_attempts`.
        has_spare: whether a spare can take over the failing node's ranks and restore a step after step 0.
        older_base: the newest step that every rank can restore, older than the step from which the last attempt
            started. 0 without such a step.
        is_sole_holder: whether the job loses committed steps if it gives up the node of the last failure. If so, the
            function chooses the older state before the other node.

    Returns:
        The ruling. Its reason contains the counts and the last failure.
    """
    attempts = spec.max_attempts
    if not failures:
        return Ruling(course=BreakerCourse.AGAIN)
    last = failures[-1]
    if last.is_node_loss:
        lost = own_losses(failures)
        if len(lost) < NODE_LOSS_TIMES:
            return Ruling(course=BreakerCourse.AGAIN)
        nodes = tuple(loss.node_id for loss in lost if loss.node_id is not None)
        return Ruling(course=BreakerCourse.GIVE_UP, why=Repeated(count=len(lost), failure=last, lost=nodes))
    failures = [failure for failure in failures if not failure.is_node_loss]
    if last.code == UNCAUGHT and exception_class(last.error) in OF_THE_CODE and last.step <= FIRST_STEP:
        return Ruling(course=BreakerCourse.GIVE_UP, why=Repeated(count=1, failure=last))
    alike = _alike(failures)
    tried = [trial for trial in trials if _looks_like(trial.failure, last)]
    if len(alike) >= attempts + len(tried):
        changes = (_other_node(alike, tried, has_spare=has_spare), _older_state(alike, tried, older_base))
        for course in changes if last.max_boundary <= last.step and not is_sole_holder else reversed(changes):
            if course is not None and attempts > 1:
                return Ruling(course=course, why=Repeated(count=len(alike), failure=last))
        why = Repeated(count=len(alike), failure=last, tried=tuple(map(change_of, tried)))
        return Ruling(course=BreakerCourse.GIVE_UP, why=why)
    limit = attempts * NO_PROGRESS_TIMES
    if len(failures) >= limit and all(failure.max_boundary == last.max_boundary for failure in failures[-limit:]):
        why = Repeated(count=limit, failure=last, since=failures[-limit].at, alike_count=len(alike))
        return Ruling(course=BreakerCourse.GIVE_UP, why=why)
    return Ruling(course=BreakerCourse.AGAIN)


def remembered(
    failures: Sequence[FailureRecord], failure: FailureRecord | None, spec: JobSpec
) -> tuple[FailureRecord, ...]:
    """Return the failures that the job's record keeps, with `failure` as the newest one.

    The result omits the oldest failures, which `rule` no longer considers.
    """
    longer = [*failures, failure] if failure is not None else list(failures)
    return tuple(longer[-max(1, spec.max_attempts) * NO_PROGRESS_TIMES :])


def forgiven(failures: Sequence[FailureRecord], generation: Generation) -> tuple[FailureRecord, ...]:
    """Return the failures without those of one generation, except its loss of a node.

    The failures of a generation that lost a node can be consequences of this loss.
    """
    return tuple(failure for failure in failures if failure.generation != generation or failure.is_node_loss)


def own_losses(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return the losses of nodes that count against the job: those in launches without a new step.

    `still_ahead` removes earlier losses at each new highest step, so only the first loss can have followed new steps.
    """
    losses = [failure for failure in failures if failure.is_node_loss]
    return [loss for loss in losses if loss is not losses[0] or loss.step <= max(loss.base_step, FIRST_STEP)]


def still_ahead(failures: Sequence[FailureRecord], generation: Generation, boundary: Step) -> tuple[FailureRecord, ...]:
    """Return the failures since which training has reached no new highest step.

    Once training reaches a new highest step, earlier failures no longer count.

    Args:
        failures: failures of the job, oldest first.
        generation: number of the running generation.
        boundary: the newest step that all ranks of the running generation have finished.

    Returns:
        The failures after which training has reached no new highest step.
    """
    return tuple(
        failure for failure in failures if generation <= failure.generation or boundary <= failure.max_boundary
    )


def passed(trials: Sequence[Trial], generation: Generation, boundary: Step) -> tuple[Trial, ...]:
    """Return the trials that succeeded (launches on another node or from an older state, after repeated failures).

    Args:
        trials: changes of node or state that were chosen after failures, up to now.
        generation: number of the running generation.
        boundary: the newest step that all ranks of the running generation have finished.

    Returns:
        The trials after which training has passed the step at which the job had failed.
    """
    return tuple(
        trial
        for trial in trials
        if generation > trial.failure.generation and boundary > max(trial.failure.step, Step(0))
    )


def _other_node(alike: Sequence[FailureRecord], tried: Sequence[Trial], *, has_spare: bool) -> BreakerCourse | None:
    """Return OTHER_NODE if one node caused all failures, a spare exists, and no other node was tried; else None."""
    nodes = {failure.node_id for failure in alike}
    is_one_node = len(nodes) == 1 and None not in nodes
    return (
        BreakerCourse.OTHER_NODE if has_spare and is_one_node and all(trial.kind != "node" for trial in tried) else None
    )


def _older_state(alike: Sequence[FailureRecord], tried: Sequence[Trial], older_base: Step) -> BreakerCourse | None:
    """Return OLDER_STATE if the last two attempts restored the same step, and an older step exists and is untried."""
    is_one_state = len(alike) > 1 and alike[-1].base_step == alike[-2].base_step > older_base > 0
    return BreakerCourse.OLDER_STATE if is_one_state and all(trial.kind != "state" for trial in tried) else None


def _alike(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
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


def change_of(trial: Trial) -> Change:
    """Return the change that a trial made."""
    return Change(node_id=trial.node_id) if trial.kind == "node" else Change(skipped_step=trial.failure.base_step)
