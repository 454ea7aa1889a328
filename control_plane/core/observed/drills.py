"""Drills: faults that a user orders, to check that a job recovers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.steps import NO_GENERATION
from everstep.protocol.ids import Generation, NodeId, Rank


class DrillKind(StrEnum):
    """The fault that a drill injects.

    - KILL_RANK: kills the process of one rank.
    - KILL_AGENT: kills the agent of a node.
    - TERMINATE_INSTANCE: terminates the instance of a node in EC2.
    """

    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    TERMINATE_INSTANCE = "terminate-instance"


class DrillState(StrEnum):
    """The progress of a drill. `core.drills` describes the states."""

    REQUESTED = "requested"
    STRUCK = "struck"
    RECOVERED = "recovered"
    NOT_RECOVERED = "not_recovered"
    ABSORBED = "absorbed"
    NOT_DONE = "not_done"


class DrillOutcome(StrEnum):
    """The reason for the end of a drill. `control_plane.accounts.facts` has the sentences."""

    TRAINED_ON = "trained_on"
    JOB_COMPLETED = "job_completed"
    JOB_FAILED = "job_failed"
    JOB_STOPPED = "job_stopped"
    JOB_PAUSED = "job_paused"
    OTHER_INCIDENT = "other_incident"
    NO_LAUNCH_ENDED = "no_launch_ended"
    NOT_TRAINING = "not_training"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillObserved:
    """A drill, as the job loop reads it from the database."""

    id: str
    kind: DrillKind
    node_id: NodeId
    rank: Rank | None
    requested_by: str
    requested_at: float
    state: DrillState = DrillState.REQUESTED
    generation: Generation = NO_GENERATION
    """The generation that ran when the control plane injected the fault, or 0."""
    struck_at: float | None = None
    incident_id: str = ""
    ended_at: float | None = None
    outcome: DrillOutcome | str = ""
    """Empty before the end. A sentence if an earlier version stored it."""
