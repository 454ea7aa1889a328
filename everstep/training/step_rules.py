"""Decides what a rank does at a boundary, from its own state and the agent's half of the shared page.

Pure. This is the rank's part of the commit rounds (docs/design.md#rounds).

Invariant: a rank answers a proposed step at most once, with a capture or an abandonment. It stops only at the exact
step of the announced stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, FINISHED, NONE, AgentHalf, StopState, UnkeptCause


@dataclass(frozen=True, slots=True)
class RankView:
    """The rank's own state, which is one of the two inputs of `decide`.

    The other input is the agent's half of the page.
    """

    boundary: int
    """Number of finished steps."""
    base: int
    """The step that the rank restored; 0 if it restored no step. The rank never captures this step."""
    settled: int
    """The proposed step that the rank has already captured or abandoned.

    The session resets it when the agent's proposal changes.
    """
    echo_step: int = NONE
    """Step of the newest announced stop that the rank has answered."""
    has_slots: bool = False
    obstacle: str = ""
    """Reason why the rank cannot capture any step now; empty if the rank can capture."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The actions that the rank must take after a finished step. At most one of `capture_slot` and `abandon` is set."""

    capture_slot: int | None = None
    abandon: tuple[int, UnkeptCause, str] | None = None
    """Proposed step that the rank abandons, the cause, and the cause in words."""
    echo: tuple[int, int] | None = None
    """Answer to the announced stop: its step, and `ECHO_YES` or `ECHO_NO`."""
    must_wait: bool = False
    """True when a stop after this step is announced but not yet confirmed.

    The rank then waits and reads the page again.
    """
    is_stopped: bool = False
    is_quiet: bool = False
    """True if the rank has not reached the proposed step yet, and no stop is announced.

    The rank may then delay its report of this step.
    """


def decide(view: RankView, half: AgentHalf) -> StepDecision:
    """Return what the rank does next, from its own state and the agent's half of the shared page.

    The session calls this after every step, and repeatedly while the rank waits. Equal inputs give equal decisions.

    Args:
        view: the rank's own state.
        half: the agent's half of the page, of this generation.

    Returns:
        The decision.
    """
    capture_slot, abandon = _on_proposal(view, half)
    is_here = half.stop == view.boundary
    return StepDecision(
        capture_slot=capture_slot,
        abandon=abandon,
        echo=_on_stop(view, half),
        must_wait=is_here and half.stop_state is StopState.ANNOUNCED,
        is_stopped=is_here and half.stop_state is StopState.CONFIRMED,
        is_quiet=half.proposed > view.boundary and half.stop_state is not StopState.ANNOUNCED,
    )


def decide_alone(view: RankView, word: AgentHalf) -> StepDecision:
    """Return what the rank does next while the agent is disconnected or the page is unreadable.

    Without the agent, the rank captures no step and accepts no new stop request of the coordinator. It still stops at
    the step of a request that it has already accepted.

    Args:
        view: the rank's own state.
        word: the agent's half of the page as the rank last read it, of this generation.

    Returns:
        One of three decisions: stop after this step; wait for the agent, because other ranks wait or may stop here;
        continue.
    """
    is_here = word.stop == view.boundary
    has_agreed = view.echo_step == word.stop
    return StepDecision(
        must_wait=is_here and has_agreed and word.stop_state is StopState.ANNOUNCED,
        is_stopped=is_here and word.stop_state is StopState.CONFIRMED,
    )


def is_final_round_over(boundary: int, half: AgentHalf) -> bool:
    """Return whether a rank that waits in `close` after step `boundary` may end.

    True if this step is committed, or if no further commit can follow.
    """
    return half.proposed == FINISHED or half.committed == boundary


def _on_proposal(view: RankView, half: AgentHalf) -> tuple[int | None, tuple[int, UnkeptCause, str] | None]:
    step = half.proposed
    if step <= view.base or step == view.settled or step > view.boundary:
        return None, None
    if view.obstacle:
        return None, (step, UnkeptCause.CAPTURE, view.obstacle)
    if step < view.boundary:
        return None, None if half.vote_step == step else (step, UnkeptCause.LATE, "late")
    if half.slot == NONE or not view.has_slots:
        # Neither capture nor abandon the step yet, because the agent may still grant a slot while the rank waits. If it
        # grants no slot, the rank abandons the step at the next boundary, as late.
        return None, None
    return half.slot, None


def _on_stop(view: RankView, half: AgentHalf) -> tuple[int, int] | None:
    if half.stop == NONE or half.stop_state is not StopState.ANNOUNCED or half.stop == view.echo_step:
        return None
    return half.stop, ECHO_YES if view.boundary <= half.stop else ECHO_NO
