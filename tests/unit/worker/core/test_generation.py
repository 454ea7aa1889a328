"""Tests the phases of a generation on a node: promised, loaded, running and ended.

A node accepts only the commands that the table of transitions contains for its current phase.
"""

from __future__ import annotations

import itertools

import pytest

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation, JobName, RunId
from worker.core.generation import (
    TRANSITIONS,
    InvalidMemberTransition,
    MemberAnswer,
    MemberEvent,
    Membership,
    answer_prepare,
    is_current,
    is_own_run,
    may_load,
)

RUN, OTHER = RunId("ab" * 16), RunId("cd" * 16)


def member(phase: MemberPhase = MemberPhase.PROMISED, generation: int = 3) -> Membership:
    return Membership(JobName("gpt"), RUN, Generation(generation), phase)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(MemberPhase, MemberEvent)))
def test_every_pair_either_moves_or_is_refused(phase: MemberPhase, event: MemberEvent) -> None:
    target = TRANSITIONS.get((phase, event))
    if target is None:
        with pytest.raises(InvalidMemberTransition, match=f"generation 3: {event.value} while {phase.value}"):
            member(phase).on(event)
    else:
        moved = member(phase).on(event)
        assert (moved.phase, moved.generation, moved.run) == (target, 3, RUN)


def test_every_phase_is_reached_and_the_last_ones_have_no_way_out_but_a_prepare() -> None:
    reached = {MemberPhase.PROMISED, *TRANSITIONS.values()}
    assert reached == set(MemberPhase)
    assert {phase for phase, _ in TRANSITIONS} == set(MemberPhase) - {MemberPhase.EXITED, MemberPhase.LOAD_FAILED}


@pytest.mark.parametrize(
    ("before", "run", "generation", "answer"),
    [
        (None, RUN, 1, MemberAnswer.PROMISE),
        (member(), RUN, 4, MemberAnswer.PROMISE),
        (member(), RUN, 3, MemberAnswer.REPEAT),
        (member(MemberPhase.RUNNING), RUN, 3, MemberAnswer.REPEAT),
        (member(), RUN, 2, MemberAnswer.REFUSE),
        (member(), OTHER, 1, MemberAnswer.PROMISE),
    ],
)
def test_answers_to_a_prepare(before: Membership | None, run: RunId, generation: int, answer: MemberAnswer) -> None:
    assert answer_prepare(before, run, Generation(generation)) is answer


@pytest.mark.parametrize(
    ("run", "generation", "current"), [(RUN, 3, True), (RUN, 2, False), (RUN, 4, False), (OTHER, 3, False)]
)
def test_only_the_promised_generation_is_current(run: RunId, generation: int, current: bool) -> None:
    assert is_current(member(), run, Generation(generation)) is current
    assert not is_current(None, run, Generation(generation))


@pytest.mark.parametrize("phase", MemberPhase)
def test_only_a_promised_generation_that_does_not_load_yet_is_loaded(phase: MemberPhase) -> None:
    assert may_load(member(phase), RUN, Generation(3)) is (phase is MemberPhase.PROMISED)
    assert not may_load(member(phase), OTHER, Generation(3))
    assert not may_load(member(phase), RUN, Generation(4))
    assert not may_load(None, RUN, Generation(3))


@pytest.mark.parametrize(("promised", "own"), [(RUN, True), (OTHER, False), (None, False)])
def test_who_comes_from_another_generation_of_the_own_run_is_no_stranger(promised: RunId | None, own: bool) -> None:
    assert is_own_run(promised, RUN) is own
