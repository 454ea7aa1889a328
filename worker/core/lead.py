"""Decides how many steps ahead of the ranks the coordinator proposes a step.

This number is the *lead*. When the coordinator proposes a step, all ranks capture their state after this step. A rank
must receive the proposal before it passes the proposed step. Otherwise the rank cannot capture the step, and the round
is *late*. With a lead of one, every step can be committed; with a lead of two, every second step.

A lead that is too short loses one step per late round. A lead that is too long loses steps in every round. The lead
therefore grows by one after every late round. After some committed rounds, the coordinator tries a shorter lead again.
If a round is late soon after the lead was shortened, the coordinator waits longer before the next attempt.
The section *The lead* of docs/benchmarks-scale.md compares how many steps are committed with this lead and with
constant leads.

Invariant: if rounds are rarely late, the lead is mostly the shortest possible. If every round is late at some lead, at
most one round in `MAX_PATIENCE` uses that lead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PATIENCE = 32
"""Maximum number of clean (committed) rounds before the coordinator tries a shorter lead."""
SOON = 2
"""Number of clean rounds that show that a new lead is long enough.

If a round is late after fewer clean rounds, the coordinator doubles its patience.
"""


@dataclass(frozen=True, slots=True)
class Lead:
    """The lead (how many steps ahead of training the coordinator proposes a step), and when it tries a shorter lead.

    The coordinator holds one object per generation. A round (the proposal of one step, and the votes on it) is *clean*
    if its step was committed.
    """

    steps: int = 1
    """The lead: minimum distance from the highest step that a rank has finished to the next proposed step."""
    patience: int = 1
    """Number of rounds with a commit after which the coordinator tries a lead that is one step shorter."""
    clean_rounds: int = 0
    """Rounds with a commit since the lead last changed, or since a rank last received a proposal too late."""

    def late(self) -> Lead:
        """Return a lead one step longer, because a rank finished a proposed step before it received the proposal."""
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
