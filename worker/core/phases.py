"""How long a rank stands still: between two boundaries, or between two phases.

Invariant: a length is told as finished only when the rank has moved on by itself, and never as longer than it was seen
to be: what nobody watched may have been many short ones. What a script has told the limit of is not told at all: it is
no measure of the job's own pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everstep.protocol.rank_messages import Phase, RankHalf

FIRST_STEP = "first_step"
"""TRAIN before the first boundary of a launch: kernels are compiled and caches are cold, so it has a length of its own."""


@dataclass(frozen=True, slots=True)
class PhaseClock:
    """What was seen of one rank in one generation."""

    base: int
    """The step that the generation goes on from."""
    phase: str = ""
    boundary: int = -2
    since: float = 0.0
    """When it was first seen to stand where it stands."""
    seen_at: float = 0.0
    longest: Mapping[str, float] = field(default_factory=dict)
    """By phase, seconds."""
    limit_seconds: float = 0.0
    """What the script has told that this phase may take; 0: it has not."""

    def seen(self, half: RankHalf, now: float) -> PhaseClock:
        """Return the clock after a look at the rank's page.

        Args:
            half: the rank's half.
            now: monotonic seconds, not before those of the look before.

        Returns:
            The clock; where the rank has moved, with the finished length remembered if it is the longest of its phase.
        """
        phase = FIRST_STEP if half.phase is Phase.TRAIN and half.boundary <= self.base else half.phase.name.lower()
        if (phase, half.boundary, half.limit) == (self.phase, self.boundary, self.limit_seconds):
            return replace(self, seen_at=now)
        longest = self.longest
        if self.phase and not self.limit_seconds:
            longest = {**longest, self.phase: max(longest.get(self.phase, 0.0), self.seen_at - self.since)}
        return PhaseClock(self.base, phase, half.boundary, now, now, longest, float(half.limit))

    @property
    def still_seconds(self) -> float:
        """How long the rank has stood there, by the last look."""
        return self.seen_at - self.since
