"""Measures how long a rank stays at one finished step or in one phase, as the rank's page shows.

A *stay* is the time in which the phase, the boundary and the announced limit of a rank do not change. Invariant: the
duration of a stay is recorded only after the rank has left it by itself, up to the last reading that shows the stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everstep.protocol.agent_messages import FIRST_STEP_PHASE
from everstep.protocol.rank_messages import Phase, RankHalf


@dataclass(frozen=True, slots=True)
class PhaseClock:
    """Measures how long one rank stays in its phase, within one generation."""

    base: int
    phase: str = ""
    boundary: int = -2
    since: float = 0.0
    """Monotonic time of the first reading with the current phase, boundary and limit."""
    seen_at: float = 0.0
    longest: Mapping[str, float] = field(default_factory=dict[str, float])
    """Longest stay in seconds, by phase. Stays with an announced limit are not counted."""
    limit_seconds: float = 0.0
    """Limit that the script has announced for this phase; 0 without one."""

    def seen(self, half: RankHalf, now: float) -> PhaseClock:
        """Return the clock after another reading of the page at `now` (monotonic seconds)."""
        phase = (
            FIRST_STEP_PHASE if half.phase is Phase.TRAIN and half.boundary <= self.base else half.phase.name.lower()
        )
        if (phase, half.boundary, half.limit) == (self.phase, self.boundary, self.limit_seconds):
            return replace(self, seen_at=now)
        longest = self.longest
        # A phase with an announced limit does not show the job's usual pace.
        if self.phase and not self.limit_seconds:
            longest = {**longest, self.phase: max(longest.get(self.phase, 0.0), self.seen_at - self.since)}
        return PhaseClock(self.base, phase, half.boundary, now, now, longest, float(half.limit))

    @property
    def still_seconds(self) -> float:
        """Seconds for which the current stay has lasted at the last reading."""
        return self.seen_at - self.since
