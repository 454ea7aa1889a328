"""Decides what a rank does at a boundary, from its own state and the agent's half of the shared page. Pure.

This is the rank's part of the commit rounds (docs/design.md#rounds).

Invariant: a rank answers a proposed step at most once, with a capture or an abandonment. It stops only at the exact
step of the announced stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.rank_messages import (
    ECHO_NO,
    ECHO_YES,
    FINISHED,
    NONE,
    AgentHalf,
    StopState,
    UnkeptCause,
)


@dataclass(frozen=True, slots=True)
class RankView:
    """The rank's own state."""

    boundary: int
    base: int
    """The restored step, which the rank never captures; 0: none."""
    settled: int
    """The proposed step that the rank has already captured or abandoned, reset by a new proposal."""
    echo_step: int = NONE
    """Newest announced stop that the rank has answered."""
    has_slots: bool = False
    obstacle: str = ""
    """Why the rank cannot capture any step now; else empty."""
    rehearsal: tuple[int, int] = (NONE, 0)
    """Newest announced rehearsal that the rank has answered, and its answer."""
    rehearsed: int = NONE
    """Step after which the rank has rehearsed last."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The actions that the rank must take. At most one of `capture_slot` and `abandon` is set."""

    capture_slot: int | None = None
    abandon: tuple[int, UnkeptCause, str] | None = None
    """Proposed step, cause, and the cause in words."""
    echo: tuple[int, int] | None = None
    """Step of the announced stop, and `ECHO_YES` or `ECHO_NO`."""
    must_wait: bool = False
    """Whether a stop after this step is not yet confirmed, so that the rank reads the page again."""
    is_stopped: bool = False
    rehearsal_echo: tuple[int, int] | None = None
    """Step of the announced rehearsal, and `ECHO_YES` or `ECHO_NO`."""
    keeps_from: int | None = None
    """Step after which an agreed rehearsal begins to record; None: no rehearsal."""
    rehearses: bool = False
    """Whether all ranks rehearse now."""
    is_quiet: bool = False
    """Whether the rank may delay its report: no stop is announced, and the proposed step is ahead."""


def decide(view: RankView, half: AgentHalf) -> StepDecision:
    """Return what the rank does next. Called after every step, and repeatedly while the rank waits."""
    capture_slot, abandon = _on_proposal(view, half)
    is_here = half.stop == view.boundary
    rehearsal_echo = _on_rehearsal(view, half)
    waits, rehearses = _at_rehearsal(view, half, rehearsal_echo or view.rehearsal)
    return StepDecision(
        capture_slot=capture_slot,
        abandon=abandon,
        echo=_on_stop(view, half),
        must_wait=waits or (is_here and half.stop_state is StopState.ANNOUNCED),
        is_stopped=is_here and half.stop_state is StopState.CONFIRMED,
        rehearsal_echo=rehearsal_echo,
        keeps_from=_kept(view, half, rehearsal_echo or view.rehearsal),
        rehearses=rehearses,
        is_quiet=half.proposed > view.boundary and StopState.ANNOUNCED not in (half.stop_state, half.rehearsal_state),
    )


def decide_alone(view: RankView, word: AgentHalf) -> StepDecision:
    """Return what the rank does next while the agent is disconnected or the page is unreadable. It captures no step and
    accepts no new stop. At the step of an accepted stop it stops, or waits for the agent. `word` is the agent's half at
    the last read.
    """
    is_here = word.stop == view.boundary
    has_agreed = view.echo_step == word.stop
    waits, rehearses = _at_rehearsal(view, word, view.rehearsal)
    return StepDecision(
        must_wait=waits or (is_here and has_agreed and word.stop_state is StopState.ANNOUNCED),
        is_stopped=is_here and word.stop_state is StopState.CONFIRMED,
        keeps_from=_kept(view, word, view.rehearsal),
        rehearses=rehearses,
    )


def is_final_round_over(boundary: int, half: AgentHalf) -> bool:
    """Return whether `close` after step `boundary` may end: it is committed, or no commit can follow."""
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


def _on_rehearsal(view: RankView, half: AgentHalf) -> tuple[int, int] | None:
    if half.rehearsal_state is not StopState.ANNOUNCED or half.rehearsal in (view.rehearsal[0], view.rehearsed):
        return None
    return half.rehearsal, ECHO_YES if view.boundary <= half.rehearsal - half.rehearsal_steps else ECHO_NO


def _kept(view: RankView, half: AgentHalf, answer: tuple[int, int]) -> int | None:
    is_agreed = half.rehearsal_state is not StopState.NONE and answer == (half.rehearsal, ECHO_YES)
    return half.rehearsal - half.rehearsal_steps if is_agreed and half.rehearsal != view.rehearsed else None


def _at_rehearsal(view: RankView, half: AgentHalf, answer: tuple[int, int]) -> tuple[bool, bool]:
    """Return whether the rank must wait for the rehearsal's confirmation, and whether it rehearses now."""
    if half.rehearsal != view.boundary or _kept(view, half, answer) is None:
        return False, False
    return half.rehearsal_state is StopState.ANNOUNCED, half.rehearsal_state is StopState.CONFIRMED
