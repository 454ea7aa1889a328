"""Measures how long a rank stays at one finished step or in one phase, as the rank's page shows.

A rank's boundary is the last step that it finished. A script may announce a time limit for a phase. A *stay* is the
time in which the phase, the boundary and the announced limit of a rank do not change.

Invariant: the duration of a stay is recorded only after the rank has left it by itself. The duration ends at the last
reading that shows the stay. The duration of a phase with an announced limit is not recorded, because it does not show
the job's usual pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everstep.protocol.agent_messages import FIRST_STEP_PHASE
from everstep.protocol.rank_messages import Phase, RankHalf


@dataclass(frozen=True, slots=True)
class PhaseClock:
    """Measures how long one rank stays in its phase, within one generation.

    `MemberStatus` holds one clock per rank and replaces it whenever it reads the rank's shared-memory page.
    """

    base: int
    """The step from which the rank's generation continues training."""
    phase: str = ""
    boundary: int = -2
    since: float = 0.0
    """Monotonic time of the first reading with the current phase, boundary and limit, in seconds."""
    seen_at: float = 0.0
    longest: Mapping[str, float] = field(default_factory=dict[str, float])
    """Longest time in seconds, by phase, after which the rank left the phase or finished a step in it."""
    limit_seconds: float = 0.0
    """Limit in seconds that the script has announced for this phase; 0 if it has announced none."""

    def seen(self, half: RankHalf, now: float) -> PhaseClock:
        """Return the clock after the agent has read the rank's page again.

        Args:
            half: the part of the shared page that the rank writes.
            now: monotonic seconds, not before the last reading.

        Returns:
            The new clock. If a stay (see the module) has ended since the last reading, `longest` counts it, unless the
            script announced a time limit for its phase.
        """
        phase = (
            FIRST_STEP_PHASE if half.phase is Phase.TRAIN and half.boundary <= self.base else half.phase.name.lower()
        )
        if (phase, half.boundary, half.limit) == (self.phase, self.boundary, self.limit_seconds):
            return replace(self, seen_at=now)
        longest = self.longest
        if self.phase and not self.limit_seconds:
            longest = {**longest, self.phase: max(longest.get(self.phase, 0.0), self.seen_at - self.since)}
        return PhaseClock(self.base, phase, half.boundary, now, now, longest, float(half.limit))

    @property
    def still_seconds(self) -> float:
        """Seconds for which the current stay (see the module) has lasted at the last reading of the rank's page."""
        return self.seen_at - self.since
