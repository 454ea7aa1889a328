"""The agreement of all ranks on a step S after which they rehearse (docs/design/rehearsal.md).

    request ─▶ announced ──all ranks wait at S──▶ confirmed ──all ranks have passed S──▶ none
                  │  └─a rank has passed S - n: announced again at a later step, at most `MAX_ANNOUNCEMENTS` times
                  └─a rank cannot rehearse, or training ends: none

n is the number of steps that the ranks repeat. Invariant: a rehearsal is confirmed only while every rank waits at S and
has kept its state at S - n. No two announced rehearsals of a generation have the same step, so an answer to one of them
never counts for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Step
from everstep.protocol.rank_messages import ECHO_UNABLE, ECHO_YES, NONE, RankStanding, StopState
from everstep.protocol.rounds import RankRound

NO_STEP = Step(NONE)
# Ranks of earlier releases answer no announcement, so that every announcement fails.
MAX_ANNOUNCEMENTS = 3


@dataclass(frozen=True, slots=True)
class RehearsalAgreement:
    """State of the agreement. Each method returns the next state."""

    number: int = 0
    steps: int = 0
    """The number n of steps to repeat; 0 if a restarted coordinator does not know it."""
    step: Step = NO_STEP
    """The step S that was announced last; -1 if none was announced."""
    state: StopState = StopState.NONE
    announcements_left: int = 0
    """Steps that may still be announced for the order; 0 if the order is over."""

    def request(self, number: int, steps: int) -> RehearsalAgreement:
        """Accept an order. An order that arrives during a rehearsal begins no other rehearsal."""
        if number <= self.number or steps < 1:
            return self
        if self.state is not StopState.NONE:
            return replace(self, number=number)
        return replace(self, number=number, steps=steps, announcements_left=MAX_ANNOUNCEMENTS)

    def recover(self, ranks: Sequence[RankRound]) -> RehearsalAgreement:
        """Return the state after a restart of the coordinator's agent, from the reports of all ranks."""
        heard = max(each.heard_rehearsal for each in ranks)
        # An announced rehearsal is withdrawn. Its step is not reused, because pages may still contain answers
        # to it.
        is_confirmed = NONE < heard == max(each.confirmed_rehearsal for each in ranks)
        if not is_confirmed:
            return replace(self, step=heard)
        # Reports do not contain the number of steps. The agents keep the number that they received with the step.
        return RehearsalAgreement(number=self.number, step=heard, state=StopState.CONFIRMED)

    def advance(self, ranks: Sequence[RankRound], lead: int, *, is_ending: bool) -> RehearsalAgreement:
        """Announce, confirm, withdraw or end the rehearsal, as far as the newest reports of all ranks permit.

        `lead` counts the steps from the highest boundary to the first that every rank can answer. A second call may
        change the state again.
        """
        if self.state is StopState.CONFIRMED:
            # The script may end at S.
            is_over = all(each.boundary > self.step or each.standing is not RankStanding.MOVING for each in ranks)
            return replace(self, state=StopState.NONE) if is_over else self
        if is_ending:
            return replace(self, state=StopState.NONE, announcements_left=0)
        if self.state is StopState.NONE:
            if not self.announcements_left or any(each.boundary == NONE for each in ranks):
                return self
            highest = max(self.step, *(each.boundary for each in ranks))
            return replace(
                self,
                step=Step(highest + lead + self.steps),
                state=StopState.ANNOUNCED,
                announcements_left=self.announcements_left - 1,
            )
        echoes = [(each.boundary, each.rehearsal_echo if each.rehearsal_step == self.step else 0) for each in ranks]
        if any(echo == ECHO_UNABLE for _, echo in echoes):
            return replace(self, state=StopState.NONE, announcements_left=0)
        # A rank answers before it finishes the next step. Without the answer ECHO_YES, a rank that has passed S - n
        # therefore rejects the step, even if the rank or its agent is of an earlier release.
        if any(boundary > (self.step if echo == ECHO_YES else self.step - self.steps) for boundary, echo in echoes):
            return replace(self, state=StopState.NONE)
        if all(each == (self.step, ECHO_YES) for each in echoes):
            return replace(self, state=StopState.CONFIRMED, announcements_left=0)
        return self
