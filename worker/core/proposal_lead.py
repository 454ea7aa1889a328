"""Decides how many steps ahead of the ranks the coordinator proposes a step.

A lead that is too short loses one step per late round; a lead that is too long loses steps in every round. Invariant:
if rounds are rarely late, the lead is mostly the shortest possible. If every round is late at some lead, at most one
round in `MAX_PATIENCE` uses that lead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PATIENCE = 32
SOON = 2
"""Number of clean rounds that show that a new lead is long enough. If fewer follow it, the patience doubles."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The lead of one generation. A round is *clean* if its step was committed."""

    steps: int = 1
    patience: int = 1
    """Number of clean rounds after which the coordinator tries a lead that is one step shorter."""
    clean_rounds: int = 0

    def late(self) -> Lead:
        """Return a lead one step longer, because a rank finished a proposed step before it received the proposal."""
        in_vain = self.clean_rounds < SOON
        return Lead(self.steps + 1, min(MAX_PATIENCE, 2 * self.patience) if in_vain else 1)

    def clean(self) -> Lead:
        """Return the lead after a clean round."""
        counted = replace(self, clean_rounds=self.clean_rounds + 1)
        return (
            replace(self, steps=self.steps - 1, clean_rounds=0)
            if self.steps > 1 and counted.clean_rounds >= self.patience
            else counted
        )
