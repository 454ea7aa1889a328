"""Step rules: what a rank does at a boundary after reading the agent's half of the page.

Pure. This is the rank's part of the step protocol (docs/design.md#rounds).

Invariant: a rank settles a proposed step at most once, by a capture or an abandon. It stops only at the exact step of
the announced stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, FINISHED, LATE_REASON, NONE, AgentHalf, StopState


@dataclass(frozen=True, slots=True)
class RankView:
    """State of the rank at the moment it reads the agent's half of the page."""

    boundary: int
    """Number of finished steps."""
    base: int
    """The restored step, or 0. The rank never captures this step again."""
    settled: int
    """The step that the rank captured or abandoned, as long as the agent still proposes it."""
    echo_step: int = NONE
    """The newest announced stop that the rank answered."""
    has_slots: bool = False
    obstacle: str = ""
    """Why the rank cannot capture any step now. Empty when it can."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions of the rank at this boundary. At most one of `capture_slot` and `abandon` is set."""

    capture_slot: int | None = None
    abandon: tuple[int, str] | None = None
    """Proposed step to abandon, and the reason."""
    echo: tuple[int, int] | None = None
    """Step of the announced stop, and `ECHO_YES` or `ECHO_NO`."""
    must_wait: bool = False
    """True when a stop is announced for this boundary and not yet confirmed.

    The rank then waits and reads the page again.
    """
    is_stopped: bool = False
    is_quiet: bool = False
    """True when the proposed step lies ahead and no stop is announced.

    The rank may then report this boundary later.
    """


def decide(view: RankView, half: AgentHalf) -> Decision:
    """Return what the rank does after reading `half`.

    The session calls this at every boundary, and repeatedly while the rank waits. Equal inputs give equal decisions.

    Args:
        view: the rank's own state.
        half: the agent's half of the page, of this generation.

    Returns:
        The decision.
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
    """Return what the rank does while the agent is away or its page cannot be read.

    Without the agent the rank captures nothing and answers no stop. It still obeys a stop that it agreed to.

    Args:
        view: the rank's own state.
        word: the last half of the page that the rank read, of this generation.

    Returns:
        Whether to stop here, or to wait until the agent is back because other ranks may stop here.
    """
    is_here = word.stop == view.boundary
    has_agreed = view.echo_step == word.stop
    return Decision(
        must_wait=is_here and has_agreed and word.stop_state is StopState.ANNOUNCED,
        is_stopped=is_here and word.stop_state is StopState.CONFIRMED,
    )


def is_final_round_over(boundary: int, half: AgentHalf) -> bool:
    """Return whether a rank that waits at `boundary` in `close` may leave.

    This is the case when its step is committed, or when no further commit can follow.
    """
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
        # The agent may grant a slot while the rank waits. Otherwise the rank abandons the step as late at the next
        # boundary.
        return None, None
    return half.slot, None


def _on_stop(view: RankView, half: AgentHalf) -> tuple[int, int] | None:
    if half.stop == NONE or half.stop_state is not StopState.ANNOUNCED or half.stop == view.echo_step:
        return None
    return half.stop, ECHO_YES if view.boundary <= half.stop else ECHO_NO
