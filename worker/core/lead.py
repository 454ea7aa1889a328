"""How far ahead of the ranks a step is proposed, so that all hear of it before they pass it.

A lead of one keeps every step, of two every second. Who hears too late loses a step, so a lead that is a step too short
is cheap to try and one that is a step too long is not: it grows by one with every late round and is tried shorter again
soon; later where that was in vain.

Invariant: where a round is late now and then, the lead is mostly the shortest; where every round is late at a lead, one
in `MAX_PATIENCE` tries it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PATIENCE = 32
"""Clean rounds before a shorter lead is tried, at most."""
SOON = 2
"""A round that is late before so many were clean says that the shorter lead was tried in vain."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What late rounds have taught. One per generation, of the coordinator."""

    steps: int = 1
    """From the highest boundary known to the next proposed step, at least."""
    patience: int = 1
    """Clean rounds before the next shorter one is tried."""
    clean_rounds: int = 0
    """Since the lead last changed, or since it was last late."""

    def late(self) -> Lead:
        """A rank had passed the proposed step before it heard of it."""
        in_vain = self.clean_rounds < SOON
        return Lead(self.steps + 1, min(MAX_PATIENCE, 2 * self.patience) if in_vain else 1)

    def clean(self) -> Lead:
        """A proposed step was committed."""
        counted = replace(self, clean_rounds=self.clean_rounds + 1)
        return (
            replace(self, steps=self.steps - 1, clean_rounds=0)
            if self.steps > 1 and counted.clean_rounds >= self.patience
            else counted
        )
