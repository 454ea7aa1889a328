"""Tests the rules that stop endless restarts of a job.

After repeated equal failures, the next launch changes one thing, such as the node. If the failure persists, the job
ends.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.responses import repeated
from control_plane.core import breakers
from control_plane.core.breakers import BreakerCourse
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import Trial
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from tests.unit.control_plane.core.cluster import spec_of

SPEC = replace(spec_of("gpt", "a", 4, 2), max_attempts=3)


def failures(count: int, *, base: int = 9, top: int = 10, node: str | None = "i-1") -> list[FailureRecord]:
    return [
        FailureRecord(
            generation=Generation(number + 1),
            step=Step(10),
            exit_class=ExitClass.ERROR,
            code=1,
            at=0.0,
            max_boundary=Step(top),
            last_lines="boom",
            rank=Rank(0),
            node_id=NodeId(node) if node is not None else None,
            base_step=Step(base),
        )
        for number in range(count)
    ]


def trial(kind: str, failure: FailureRecord) -> Trial:
    return Trial(kind=kind, failure=failure, node_id=failure.node_id if kind == "node" else None)  # type: ignore[arg-type]


def rule(
    known: list[FailureRecord],
    *trials: Trial,
    has_spare: bool = True,
    older_base: int = 5,
    attempts: int = 3,
    is_sole_holder: bool = False,
) -> breakers.Ruling:
    spec = replace(SPEC, max_attempts=attempts)
    return breakers.rule(
        known, trials, spec, has_spare=has_spare, older_base=Step(older_base), is_sole_holder=is_sole_holder
    )


def test_nothing_is_changed_before_max_attempts() -> None:
    assert rule([]).course is BreakerCourse.AGAIN
    assert rule(failures(2)).course is BreakerCourse.AGAIN


def test_the_node_is_changed_first_then_the_state_then_it_is_over() -> None:
    known = failures(5)
    assert rule(known[:3]).course is BreakerCourse.OTHER_NODE
    node = trial("node", known[2])
    assert rule(known[:3], node).course is BreakerCourse.AGAIN, "the change has not been tried yet"
    assert rule(known[:4], node).course is BreakerCourse.OLDER_STATE
    state = trial("state", known[3])
    assert rule(known[:4], node, state).course is BreakerCourse.AGAIN
    over = rule(known, node, state)
    assert over.course is BreakerCourse.GIVE_UP
    assert over.why is not None
    assert repeated(over.why) == (
        "the same failure occurred 5 times after step 10, also without i-1, also from an older state than step 9: "
        "rank 0 on i-1 ended first, with exit code 1\nboom"
    )


def test_a_place_that_was_passed_before_speaks_against_the_state() -> None:
    known = failures(4, top=40)
    assert rule(known[:3]).course is BreakerCourse.OLDER_STATE
    assert rule(known, trial("state", known[2])).course is BreakerCourse.OTHER_NODE


def test_a_node_that_alone_holds_committed_steps_is_changed_last() -> None:
    known = failures(4)
    assert rule(known[:3], is_sole_holder=True).course is BreakerCourse.OLDER_STATE
    assert rule(known, trial("state", known[2]), is_sole_holder=True).course is BreakerCourse.OTHER_NODE


@pytest.mark.parametrize(
    ("known", "has_spare", "older_base"),
    [
        (failures(3), False, 0),
        (failures(2) + failures(1, node="i-2"), True, 0),
        (failures(3, node=None), True, 0),
        (failures(2, node=None) + failures(1, base=8, node=None), True, 5),
        (failures(3, node=None, base=0), True, 0),
    ],
)
def test_what_cannot_be_changed_is_not_waited_for(known: list[FailureRecord], has_spare: bool, older_base: int) -> None:
    assert rule(known, has_spare=has_spare, older_base=older_base).course is BreakerCourse.GIVE_UP


def test_who_wants_one_attempt_gets_one() -> None:
    assert rule(failures(1), attempts=1).course is BreakerCourse.GIVE_UP


def test_a_trial_has_told_once_training_is_beyond_its_place() -> None:
    tried = (trial("node", failures(3)[2]),)
    assert breakers.passed(tried, Generation(3), Step(11)) == (), "that was before it"
    assert breakers.passed(tried, Generation(4), Step(10)) == ()
    assert breakers.passed(tried, Generation(4), Step(11)) == tried


def test_failures_that_training_left_behind_are_no_loop() -> None:
    before, again = replace(failures(1)[0], max_boundary=Step(40)), replace(failures(2)[1], max_boundary=Step(60))
    assert breakers.still_ahead([before, again], Generation(2), Step(61)) == (again,), (
        "it is what ended this very generation"
    )
    assert breakers.still_ahead([before, again], Generation(3), Step(40)) == (before, again), "nothing new was reached"
    assert breakers.still_ahead([before, again], Generation(3), Step(41)) == (again,)
    assert breakers.still_ahead([before, again], Generation(3), Step(61)) == ()


def test_a_trial_of_another_failure_does_not_count() -> None:
    other = trial("node", replace(failures(1)[0], code=7))
    assert rule(failures(3), other).course is BreakerCourse.OTHER_NODE


def test_a_loop_without_progress_says_since_when_and_how_many_of_the_last_were_alike() -> None:
    (error,) = failures(1)
    crashed = replace(error, exit_class=ExitClass.CRASHED, code=-11)
    known = [
        replace(each, at=60.0 + number)
        for number, each in enumerate([error, error, crashed] * 2 + [crashed, error, error])
    ]
    over = rule(known)
    assert over.course is BreakerCourse.GIVE_UP
    assert over.why is not None
    assert repeated(over.why).startswith(
        "9 failures occurred since 00:01:00 UTC without a step beyond 10, the last 2 are identical: "
        "rank 0 on i-1 ended first, with exit code 1"
    )
    later = rule([*known[1:], crashed]).why
    assert later is not None
    assert (later.since, later.alike_count) == (61.0, 1)
    assert ", the last: rank 0 on i-1 ended first, with SIGSEGV" in repeated(later)


@pytest.mark.parametrize(
    ("error", "step", "course"),
    [
        ("ModuleNotFoundError: No module named 'yaml'", 0, BreakerCourse.GIVE_UP),
        ("SyntaxError: invalid syntax", -1, BreakerCourse.GIVE_UP),
        ("everstep.integrations.base.UnsupportedOption: ignore_data_skip: no", 0, BreakerCourse.GIVE_UP),
        ("ModuleNotFoundError: No module named 'yaml'", 1, BreakerCourse.AGAIN),
        ("ValueError: no", 0, BreakerCourse.AGAIN),
        (None, 0, BreakerCourse.AGAIN),
    ],
)
def test_an_import_that_fails_at_the_start_is_not_repeated(error: str | None, step: int, course: BreakerCourse) -> None:
    (failure,) = failures(1)
    ruling = rule([replace(failure, error=error, error_place="train.py:3", step=Step(step))])
    assert ruling.course is course
    assert ruling.why is None or repeated(ruling.why).splitlines()[0] == (
        f"the job failed before its first step: rank 0 on i-1 ended first, with exit code 1: {error} (train.py:3)"
        + (
            ". Name missing packages in a requirements file of the source (--requirements)"
            if step == 0 and "Module" in (error or "")
            else ""
        )
    )


def test_a_script_that_caught_the_exception_and_ended_by_itself_is_repeated() -> None:
    (failure,) = failures(1)
    caught = replace(failure, error="ModuleNotFoundError: No module named 'flash_attn'", step=Step(0), code=3)
    assert rule([caught]).course is BreakerCourse.AGAIN


def test_an_exit_that_says_nothing_is_described_by_the_rank_and_its_code() -> None:
    (failure,) = failures(1)
    silent = rule([replace(failure, last_lines="")], attempts=1).why
    assert silent is not None
    assert repeated(silent) == ("the job failed after step 10: rank 0 on i-1 ended first, with exit code 1")


def test_failures_of_a_job_with_one_or_no_attempt_are_remembered_alike() -> None:
    kept = [len(breakers.remembered(failures(99), None, replace(SPEC, max_attempts=each))) for each in (0, 1, 2)]
    assert kept == [breakers.NO_PROGRESS_TIMES, breakers.NO_PROGRESS_TIMES, 2 * breakers.NO_PROGRESS_TIMES]


@pytest.mark.parametrize(
    ("bases", "older", "course"),
    [
        ((9, 9), 5, BreakerCourse.OLDER_STATE),
        ((9, 9), 1, BreakerCourse.OLDER_STATE),
        ((9, 9), 0, BreakerCourse.GIVE_UP),
        ((9, 9), 9, BreakerCourse.GIVE_UP),
        ((8, 9), 5, BreakerCourse.GIVE_UP),
        ((7, 9, 9), 5, BreakerCourse.OLDER_STATE),
    ],
)
def test_an_older_state_is_tried_after_two_equal_ones(
    bases: tuple[int, ...], older: int, course: BreakerCourse
) -> None:
    known = [replace(failures(1, node=None)[0], base_step=Step(base)) for base in bases]
    assert rule(known, older_base=older, attempts=len(known)).course is course


@pytest.mark.parametrize(
    ("generation", "boundary", "has_worked"), [(2, 11, True), (2, 10, False), (1, 11, False), (2, 9, False)]
)
def test_a_trial_has_worked_once_training_has_passed_the_failure(
    generation: int, boundary: int, has_worked: bool
) -> None:
    (failure,) = failures(1)
    found = breakers.passed([trial("node", failure)], Generation(generation), Step(boundary))
    assert bool(found) is has_worked
    early = trial("node", replace(failure, step=Step(-1)))
    worked = [bool(breakers.passed([early], Generation(2), Step(step))) for step in (0, 1)]
    assert worked == [False, True], "a launch alone proves nothing"


def losses(*boundaries: int, base: int = 9) -> list[FailureRecord]:
    """Return one loss of a node per boundary, each in a generation that began after step `base`."""
    return [
        replace(failure, is_node_loss=True, exit_class=None, step=Step(boundary), node_id=NodeId(f"i-{number}"))
        for number, (failure, boundary) in enumerate(zip(failures(len(boundaries), base=base), boundaries, strict=True))
    ]


@pytest.mark.parametrize(
    ("known", "own"),
    [
        pytest.param(losses(), 0, id="none"),
        pytest.param(losses(9), 1, id="no new step"),
        pytest.param(losses(10), 0, id="after a new step"),
        pytest.param(losses(10, 10), 1, id="the second follows no new step"),
        pytest.param(losses(0, base=-1), 1, id="step 0 is not new"),
        pytest.param(failures(2), 0, id="failures of ranks"),
    ],
)
def test_a_loss_in_a_launch_without_a_new_step_counts_against_the_job(known: list[FailureRecord], own: int) -> None:
    assert len(breakers.own_losses(known)) == own


def test_a_job_fails_after_two_own_losses_whatever_else_failed() -> None:
    one, other = losses(9, 9)
    assert rule([one]).course is BreakerCourse.AGAIN
    ruling = rule([*failures(2), one, *failures(2), other])
    assert ruling.course is BreakerCourse.GIVE_UP
    assert ruling.why is not None
    assert (ruling.why.count, ruling.why.lost) == (2, ("i-0", "i-1"))


def test_losses_do_not_count_among_failures_of_ranks() -> None:
    assert rule([*losses(9), *failures(2)]).course is BreakerCourse.AGAIN
    assert rule([failures(1)[0], *losses(9), *failures(2)]).course is BreakerCourse.OTHER_NODE


def test_a_loss_is_not_forgiven_with_the_failures_of_its_generation() -> None:
    known = [*failures(1), *losses(9)]
    assert breakers.forgiven(known, Generation(1)) == tuple(losses(9))
