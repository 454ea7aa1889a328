"""The stored facts about a job's rehearsals (`core.rehearsal`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.steps import NO_GENERATION
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.rehearsals import RehearsalVerdict, ReplayDifference


class NoResult(StrEnum):
    """The reason why a rehearsal has no result of the ranks. `control_plane.accounts.rehearsals` has the sentences."""

    EARLIER_AGENT = "earlier_agent"
    RANKS_ENDED = "ranks_ended"
    NOT_REPORTED = "not_reported"
    JOB_ENDED = "job_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalOutcome:
    """The result of a rehearsal on all ranks."""

    verdict: RehearsalVerdict
    step: Step
    steps: int
    seconds: float
    """The longest time for which a rank did not train."""
    at: float
    """Unix time of the last rank's report."""
    rank: Rank | None = None
    """The rank with the first difference or lost value, or the first that could not rehearse, or None."""
    difference: ReplayDifference | None = None
    unanswered: NoResult | None = None
    node_id: NodeId | None = None
    message: str = ""
    """The rank's words. No code interprets them."""
    advice: str = ""

    @property
    def is_difference(self) -> bool:
        """Whether the repeated steps differ. A refused rehearsal finds no difference."""
        return self.verdict in (RehearsalVerdict.DIFFERS, RehearsalVerdict.UNSTABLE)

    @property
    def is_unproven(self) -> bool:
        """Whether the repeated steps are equal, and a restart loses values that the script changes during training."""
        return self.verdict is RehearsalVerdict.UNPROVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsals:
    """The rehearsals of a job: the newest order, and the newest result."""

    number: int = 0
    """Counts the job's orders from 1."""
    generation: Generation = NO_GENERATION
    is_open: bool = False
    after: Step = NO_STEP
    """The newest step from which a rank had rehearsed before the newest order."""
    served_at: float | None = None
    """`JobRecord.rehearsal_requested_at` of the newest request that an order serves, or None."""
    over_since: float | None = None
    """Unix time since which the coordinator reports the order's end while ranks' reports are missing."""
    unanswered_count: int = 0
    """Orders in a row that ended without a result."""
    automatic_count: int = 0
    """Number of rehearsals that no person has requested. A repeated order counts once."""
    revision: int = 0
    """The highest `RankStatus.resume_revision` of the generation `revision_of`."""
    revision_of: Generation = NO_GENERATION
    is_outdated: bool = False
    """Whether a rank has reported a higher revision since the newest order."""
    is_under_way: bool = False
    ended_at: float | None = None
    """Unix time at which the ranks last stopped repeating steps."""
    result: RehearsalOutcome | None = None
