"""What a rank does about the agent's word at a boundary: the rank's part of the step protocol (docs/design.md#rounds), pure.

Invariant: a proposed step is settled (captured or abandoned) at most once, and a stop is obeyed only at its very step.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, FINISHED, LATE_REASON, NONE, AgentHalf, StopState


@dataclass(frozen=True, slots=True)
class RankView:
    """What the rank knows when it looks at the word."""

    boundary: int
    """Steps finished."""
    base: int
    """The step that was restored, 0 for none: it is never captured again."""
    settled: int
    """The proposed step that was captured or abandoned, as long as it is the proposed one."""
    echo_step: int = NONE
    """The newest announced stop that was answered."""
    has_slots: bool = False
    obstacle: str = ""
    """Why no step can be captured for now; empty when one can."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. At most one of `capture_slot` and `abandon` is set."""

    capture_slot: int | None = None
    abandon: tuple[int, str] | None = None
    """(step, reason)."""
    echo: tuple[int, int] | None = None
    """(stop, yes or no)."""
    must_wait: bool = False
    """The stop at this very boundary is announced and not yet confirmed: stand still and look again."""
    is_stopped: bool = False
    is_quiet: bool = False
    """Nothing follows from this boundary: the step that is proposed lies ahead.

    The agent need not hear of it at once.
    """


def decide(view: RankView, half: AgentHalf) -> Decision:
    """Return what the rank does on reading `half`.

    Called at every boundary, and again and again while the rank stands still.

    Args:
        view: the rank's own state.
        half: the agent's half of the page, of this generation.

    Returns:
        The decision; the same input gives the same one.
    """
    capture_slot, abandon = _on_proposal(view, half)
    is_here = half.stop == view.boundary
    return Decision(
        capture_slot=capture_slot,
        abandon=abandon,
        echo=_on_stop(view, half),
        must_wait=is_here and half.stop_state is StopState.ANNOUNCED,
        is_stopped=is_here and half.stop_state is StopState.CONFIRMED,
        is_quiet=half.proposed > view.boundary and half.stop_state is not StopState.ANNOUNCED,
    )


def decide_alone(view: RankView, word: AgentHalf) -> Decision:
    """Return what the rank does without a word of the moment: nothing can be captured or answered, but what it agreed to, it keeps. Called while the
    agent is away, or its page cannot be read.

    Args:
        view: the rank's own state.
        word: the agent's last, of this generation.

    Returns:
        Whether to stop here, or to stand still until the agent is back: the other ranks may have been told to stop.
    """
    is_here = word.stop == view.boundary
    has_agreed = view.echo_step == word.stop
    return Decision(
        must_wait=is_here and has_agreed and word.stop_state is StopState.ANNOUNCED,
        is_stopped=is_here and word.stop_state is StopState.CONFIRMED,
    )


def is_final_round_over(boundary: int, half: AgentHalf) -> bool:
    """Say whether a rank that stands at `boundary` may leave: its step is committed, or nothing more will come."""
    return half.proposed == FINISHED or half.committed == boundary


def _on_proposal(view: RankView, half: AgentHalf) -> tuple[int | None, tuple[int, str] | None]:
    step = half.proposed
    if step <= view.base or step == view.settled or step > view.boundary:
        return None, None
    if view.obstacle:
        return None, (step, view.obstacle)
    if step < view.boundary:
        return None, None if half.vote_step == step else (step, LATE_REASON)
    if half.slot == NONE or not view.has_slots:
        return None, None  # granted in time while the rank stands still, or late at the next boundary
    return half.slot, None


def _on_stop(view: RankView, half: AgentHalf) -> tuple[int, int] | None:
    if half.stop == NONE or half.stop_state is not StopState.ANNOUNCED or half.stop == view.echo_step:
        return None
    return half.stop, ECHO_YES if view.boundary <= half.stop else ECHO_NO
