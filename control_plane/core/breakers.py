"""Breakers: rules that decide when a repeatedly failing job gets another node or an older state, and when it fails.

    after MaxAttempts equal failures                                       first change      second change
    the failing node alone holds committed steps                           state             node
    otherwise, at a step that training passed in an earlier attempt        state             node
    otherwise, at a step that training never passed                        node              state

Each change allows one more attempt, and is tried at most once. A failure counts until training passes the highest step
that any generation had reached before it. Invariant: `rule` gives up after at most MaxAttempts + 2 equal failures.
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
"""A job fails after this multiple of `max_attempts` failures without a new highest step, even if they differ."""
OF_THE_CODE = frozenset(
    {
        *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"),
        *("CannotResume", "UnsupportedOption", "UnsupportedVersion"),
    }
)
"""Exceptions that a script raises at each start. Before the first step, a single such exception fails the job."""
UNCAUGHT = 1
NODE_LOSS_TIMES = 2
"""A job fails after this number of launches without a new step that each lose a node."""


class BreakerCourse(StrEnum):
    """The ways in which a job can continue (on another node, or from an older state) or end after a failure."""

    AGAIN = "again"
    OTHER_NODE = "other_node"
    OLDER_STATE = "older_state"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The way in which a job continues or ends after a failure, with the reason."""

    course: BreakerCourse
    why: Repeated | None = None
    """None if the job simply restarts (AGAIN)."""


def rule(
    failures: Sequence[FailureRecord],
    trials: Sequence[Trial],
    spec: JobSpec,
    *,
    has_spare: bool,
    older_base: Step,
    is_sole_holder: bool = False,
) -> Ruling:
    """Decide how a job continues after its last failure. `failures` also contains losses of nodes, oldest first."""
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
    """Return the failures that the job's record keeps, with `failure` as the newest one."""
    longer = [*failures, failure] if failure is not None else list(failures)
    return tuple(longer[-max(1, spec.max_attempts) * NO_PROGRESS_TIMES :])


def forgiven(failures: Sequence[FailureRecord], generation: Generation) -> tuple[FailureRecord, ...]:
    """Return the failures without those of one generation, which its loss of a node may have caused. The loss stays."""
    return tuple(failure for failure in failures if failure.generation != generation or failure.is_node_loss)


def own_losses(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return the losses of nodes that count against the job: those in launches without a new step."""
    losses = [failure for failure in failures if failure.is_node_loss]
    # `still_ahead` removes earlier losses at each new highest step, so only the first loss can have followed new steps.
    return [loss for loss in losses if loss is not losses[0] or loss.step <= max(loss.base_step, FIRST_STEP)]


def still_ahead(failures: Sequence[FailureRecord], generation: Generation, boundary: Step) -> tuple[FailureRecord, ...]:
    """Return the failures since which training has reached no new highest step."""
    return tuple(
        failure for failure in failures if generation <= failure.generation or boundary <= failure.max_boundary
    )


def passed(trials: Sequence[Trial], generation: Generation, boundary: Step) -> tuple[Trial, ...]:
    """Return the trials after which training has passed the step at which the job had failed."""
    return tuple(
        trial
        for trial in trials
        if generation > trial.failure.generation and boundary > max(trial.failure.step, Step(0))
    )


def _other_node(alike: Sequence[FailureRecord], tried: Sequence[Trial], *, has_spare: bool) -> BreakerCourse | None:
    nodes = {failure.node_id for failure in alike}
    is_one_node = len(nodes) == 1 and None not in nodes
    return (
        BreakerCourse.OTHER_NODE if has_spare and is_one_node and all(trial.kind != "node" for trial in tried) else None
    )


def _older_state(alike: Sequence[FailureRecord], tried: Sequence[Trial], older_base: Step) -> BreakerCourse | None:
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
