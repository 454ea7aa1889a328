from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_UNABLE,
    ECHO_YES,
    FINISHED,
    NONE,
    AgentHalf,
    StopState,
    UnkeptCause,
    Vote,
)
from everstep.training.step_rules import RankView, StepDecision, decide, decide_alone, is_final_round_over

LATE = (4, UnkeptCause.LATE, "late")


def view(boundary: int = 5, **changes: object) -> RankView:
    return RankView(boundary=boundary, **{"base": 0, "settled": NONE, "has_slots": True, **changes})  # type: ignore[arg-type]


def half(**changes: object) -> AgentHalf:
    return AgentHalf(1, **changes)  # type: ignore[arg-type]


NOTHING, QUIET = StepDecision(), StepDecision(is_quiet=True)


@pytest.mark.parametrize(
    ("view", "half", "expected"),
    [
        (view(), half(), NOTHING),
        (view(), half(proposed=5, slot=1), StepDecision(capture_slot=1)),
        (view(), half(proposed=5, slot=0), StepDecision(capture_slot=0)),
        (view(), half(proposed=6, slot=1), QUIET),  # the rank has not reached the proposed step yet
        (view(), half(proposed=6, stop=4, stop_state=StopState.ANNOUNCED), StepDecision(echo=(4, ECHO_NO))),
        (view(), half(proposed=8, stop=7, stop_state=StopState.CONFIRMED), QUIET),
        (view(), half(proposed=5, slot=NONE), NOTHING),  # the agent may still grant a slot for this step
        (view(has_slots=False), half(proposed=5, slot=1), NOTHING),
        (view(), half(proposed=4, slot=1), StepDecision(abandon=LATE)),
        (view(settled=4), half(proposed=4, slot=1), NOTHING),  # the copy of this step may still be running
        (view(settled=5), half(proposed=5, slot=1), NOTHING),
        # the agent has already voted to abandon this step
        (view(), half(proposed=4, vote_step=4, vote=Vote.ABANDON), NOTHING),
        (view(), half(proposed=4, vote_step=3, vote=Vote.ACKED), StepDecision(abandon=LATE)),
        (view(base=5), half(proposed=5, slot=1), NOTHING),
        (view(base=5), half(proposed=4, slot=1), NOTHING),
        (view(obstacle="no room"), half(proposed=5, slot=1), StepDecision(abandon=(5, UnkeptCause.CAPTURE, "no room"))),
        (view(obstacle="no room"), half(proposed=6, slot=1), QUIET),
        (view(), half(proposed=FINISHED), NOTHING),
        (view(), half(stop=7, stop_state=StopState.ANNOUNCED), StepDecision(echo=(7, ECHO_YES))),
        (view(echo_step=7), half(stop=7, stop_state=StopState.ANNOUNCED), NOTHING),
        (view(echo_step=4), half(stop=7, stop_state=StopState.ANNOUNCED), StepDecision(echo=(7, ECHO_YES))),
        (view(), half(stop=4, stop_state=StopState.ANNOUNCED), StepDecision(echo=(4, ECHO_NO))),
        (view(), half(stop=5, stop_state=StopState.ANNOUNCED), StepDecision(echo=(5, ECHO_YES), must_wait=True)),
        (view(echo_step=5), half(stop=5, stop_state=StopState.ANNOUNCED), StepDecision(must_wait=True)),
        (view(echo_step=5), half(stop=5, stop_state=StopState.CONFIRMED), StepDecision(is_stopped=True)),
        (view(echo_step=7), half(stop=7, stop_state=StopState.CONFIRMED), NOTHING),
        (view(echo_step=4), half(stop=4, stop_state=StopState.CONFIRMED), NOTHING),
    ],
)
def test_decisions(view: RankView, half: AgentHalf, expected: StepDecision) -> None:
    assert decide(view, half) == expected


# In these cases, the rank has lost its agent, and the other ranks may have received the confirmation of the stop.
def rehearsal(step: int, state: StopState = StopState.ANNOUNCED, **changes: object) -> AgentHalf:
    return half(rehearsal=step, rehearsal_state=state, rehearsal_steps=3, **changes)


YES = (8, ECHO_YES)


@pytest.mark.parametrize(
    ("view", "half", "expected"),
    [
        (view(5), rehearsal(8), StepDecision(rehearsal_echo=YES, keeps_from=5)),
        (view(4), rehearsal(8, proposed=9), StepDecision(rehearsal_echo=YES, keeps_from=5)),
        (view(6), rehearsal(8), StepDecision(rehearsal_echo=(8, ECHO_NO))),  # too late to keep the state after step 5
        (view(7, rehearsal=YES), rehearsal(8), StepDecision(keeps_from=5)),
        (view(7, rehearsal=(8, ECHO_NO)), rehearsal(8), NOTHING),
        (view(8, rehearsal=YES), rehearsal(8), StepDecision(keeps_from=5, must_wait=True)),
        (view(8, rehearsal=(8, ECHO_UNABLE)), rehearsal(8), NOTHING),
        (view(8, rehearsal=YES), rehearsal(8, StopState.CONFIRMED), StepDecision(keeps_from=5, rehearses=True)),
        (view(8, rehearsal=(8, ECHO_NO)), rehearsal(8, StopState.CONFIRMED), NOTHING),
        (view(8, rehearsal=YES), rehearsal(8, StopState.NONE), NOTHING),  # withdrawn
        (view(8, rehearsal=YES, rehearsed=8), rehearsal(8, StopState.CONFIRMED), NOTHING),
        (view(9, rehearsal=YES, rehearsed=8), rehearsal(8, StopState.CONFIRMED), NOTHING),
        (
            view(9, rehearsal=YES, rehearsed=8),
            rehearsal(15),
            StepDecision(rehearsal_echo=(15, ECHO_YES), keeps_from=12),
        ),
        (view(5), half(), NOTHING),  # an agent of an earlier release announces nothing
    ],
)
def test_decisions_on_a_rehearsal(view: RankView, half: AgentHalf, expected: StepDecision) -> None:
    assert decide(view, half) == expected


@pytest.mark.parametrize(
    ("view", "word", "expected"),
    [
        (view(8, rehearsal=YES), rehearsal(8), StepDecision(keeps_from=5, must_wait=True)),
        (view(8, rehearsal=YES), rehearsal(8, StopState.CONFIRMED), StepDecision(keeps_from=5, rehearses=True)),
        (view(5), rehearsal(8), NOTHING),  # a rank agrees to nothing new without its agent
    ],
)
def test_decisions_on_a_rehearsal_without_the_agent(view: RankView, word: AgentHalf, expected: StepDecision) -> None:
    assert decide_alone(view, word) == expected


@pytest.mark.parametrize(
    ("view", "word", "expected"),
    [
        (view(), half(), NOTHING),
        # the rank captures nothing, because it could not report the capture
        (view(), half(proposed=5, slot=1), NOTHING),
        (view(), half(proposed=4), NOTHING),
        (
            view(echo_step=5),
            half(stop=5, stop_state=StopState.ANNOUNCED),
            StepDecision(must_wait=True),
        ),
        # the rank has not agreed to this stop, so the coordinator cannot have confirmed it
        (view(), half(stop=5, stop_state=StopState.ANNOUNCED), NOTHING),
        (view(echo_step=5), half(stop=5, stop_state=StopState.CONFIRMED), StepDecision(is_stopped=True)),
        (view(echo_step=7), half(stop=7, stop_state=StopState.ANNOUNCED), NOTHING),
        (view(echo_step=7), half(stop=7, stop_state=StopState.CONFIRMED), NOTHING),
        (view(echo_step=5), half(stop=5, stop_state=StopState.NONE), NOTHING),
    ],
)
def test_decisions_while_the_agent_is_away(view: RankView, word: AgentHalf, expected: StepDecision) -> None:
    assert decide_alone(view, word) == expected


STEPS = st.integers(-1, 8)
VIEWS = st.builds(
    RankView,
    boundary=st.integers(0, 8),
    base=st.integers(0, 8),
    settled=STEPS,
    echo_step=STEPS,
    has_slots=st.booleans(),
    obstacle=st.sampled_from(["", "no room"]),
)
HALVES = st.builds(
    AgentHalf,
    st.just(1),
    STEPS,
    st.integers(-2, 8),
    st.integers(-1, 1),
    STEPS,
    st.sampled_from(StopState),
    STEPS,
    st.sampled_from(Vote),
)


@given(VIEWS, HALVES)
def test_invariants(view: RankView, half: AgentHalf) -> None:
    decision = decide(view, half)
    assert decision.capture_slot is None or decision.abandon is None
    if decision.capture_slot is not None:
        assert view.boundary == half.proposed > view.base
        assert half.proposed != view.settled
    if decision.abandon is not None:
        assert view.base < decision.abandon[0] <= view.boundary
    assert not (decision.must_wait and decision.is_stopped)
    if decision.must_wait or decision.is_stopped:
        assert half.stop == view.boundary
    if decision.echo is not None:
        assert (decision.echo[1] == ECHO_YES) == (view.boundary <= half.stop)
    if decision.is_quiet:
        assert decision == StepDecision(is_stopped=decision.is_stopped, is_quiet=True)
        assert half.proposed > view.boundary
    assert decide(view, half) == decision


def test_the_final_round_ends_when_the_step_is_committed_or_nothing_comes() -> None:
    assert is_final_round_over(5, half(committed=5))
    assert is_final_round_over(5, half(committed=3, proposed=FINISHED))
    assert not is_final_round_over(5, half(committed=4, proposed=5))
