"""Decides how far ahead of the ranks a step is proposed.

All ranks must receive the proposal before they pass the step. The lead is a number of steps. With a lead of one every
step can be kept, with two every second step. A rank that receives a proposal too late loses that step. A lead that is
too short therefore costs one step, but a lead that is too long costs steps all the time. So the lead grows by one after
every late round, and a shorter lead is tried again soon after. If the shorter lead fails at once, the next attempt
waits longer.

Invariant: if rounds are late only now and then, the lead is mostly the shortest possible. If every round is late at
some lead, at most one round in `MAX_PATIENCE` tries that lead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PATIENCE = 32
"""Maximum number of clean rounds before a shorter lead is tried."""
SOON = 2
"""A late round within this many rounds after the lead was shortened means that shortening it failed."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Distance in steps between the ranks and the coordinator's next proposal.

    The coordinator has one instance per generation.
    """

    steps: int = 1
    """Minimum distance from the highest known boundary to the next proposed step."""
    patience: int = 1
    """Number of clean rounds before a shorter lead is tried."""
    clean_rounds: int = 0
    """Clean rounds since the lead last changed or a round was last late."""

    def late(self) -> Lead:
        """Return the lead after a round in which a rank passed the proposed step before it received the proposal."""
        in_vain = self.clean_rounds < SOON
        return Lead(self.steps + 1, min(MAX_PATIENCE, 2 * self.patience) if in_vain else 1)

    def clean(self) -> Lead:
        """Return the lead after a round in which the proposed step was committed."""
        counted = replace(self, clean_rounds=self.clean_rounds + 1)
        return (
            replace(self, steps=self.steps - 1, clean_rounds=0)
            if self.steps > 1 and counted.clean_rounds >= self.patience
            else counted
        )
