"""API models: drills, which inject a fault on request."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import MAX_NODE_COUNT, Name, Request, Shape
from control_plane.core.observed.drills import DrillKind, DrillState
from everstep.protocol.limits import MAX_RANKS_PER_NODE


class StartDrillRequest(Request):
    """A fault to inject into a running job."""

    training_job_name: Name
    """Name or RunId of the job."""
    drill_type: Annotated[DrillKind, Field(strict=False)]
    node_id: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    """A node of the job that the fault affects. The default is the node with the highest GROUP_RANK."""
    rank: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT * MAX_RANKS_PER_NODE - 1)
    """The rank to kill, which must run on the chosen node. Only valid for the fault `kill-rank`.

    The default is the node's first rank.
    """


class Drill(Shape):
    """An injected fault and its outcome."""

    drill_id: str
    drill_type: DrillKind
    drill_status: DrillState
    """The drill's progress, or its outcome once it is over.

    `requested`: the fault is not injected yet. `struck`: the fault is injected, and its outcome is open. `recovered`:
    the fault caused an incident, and training reached the step it was at before the fault. `not_recovered`: the job
    ended, was paused or was interrupted again before it recovered. `absorbed`: the fault caused no incident.
    `not_done`: the job did not train in time, so no fault was injected.
    """
    training_job_name: str
    fleet_name: str
    node_id: str
    rank: int | None
    requested_by: str
    creation_time: datetime
    strike_time: datetime | None
    end_time: datetime | None
    incident_id: str | None
    outcome: str | None


class ListDrillsResponse(Shape):
    """A page of drills, sorted by the time of their requests."""

    drills: list[Drill]
    next_token: str | None = None
