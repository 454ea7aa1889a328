"""Drills: faults that a user orders, to see that a job recovers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.steps import NO_GENERATION
from everstep.protocol.ids import Generation, NodeId, Rank


class DrillKind(StrEnum):
    """What a drill does. KILL_RANK: one rank's process. KILL_AGENT: a node's agent.

    TERMINATE_INSTANCE: a node's instance, in EC2.
    """

    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    TERMINATE_INSTANCE = "terminate-instance"


class DrillState(StrEnum):
    """How far a drill is: see `core.drills`."""

    REQUESTED = "requested"
    STRUCK = "struck"
    RECOVERED = "recovered"
    NOT_RECOVERED = "not_recovered"
    ABSORBED = "absorbed"
    NOT_DONE = "not_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillObserved:
    """A drill that has not ended."""

    id: str
    kind: DrillKind
    node_id: NodeId
    rank: Rank | None
    requested_by: str
    requested_at: float
    state: DrillState = DrillState.REQUESTED
    generation: Generation = NO_GENERATION
    """That it struck."""
    struck_at: float | None = None
    incident_id: str = ""
    ended_at: float | None = None
    outcome: str = ""
