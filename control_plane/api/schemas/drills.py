"""Shapes of the API: drills, which are faults on request."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import MAX_NODE_COUNT, MAX_RANKS_PER_NODE, Name, Request, Shape
from control_plane.core.observed.drills import DrillKind, DrillState


class StartDrillRequest(Request):
    """Something of a job to be broken on purpose."""

    training_job_name: Name
    drill_type: Annotated[DrillKind, Field(strict=False)]
    node_id: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    """One of the job's; the last by GROUP_RANK unless said."""
    rank: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT * MAX_RANKS_PER_NODE - 1)
    """For kill-rank: a rank on that node; its first unless said."""


class Drill(Shape):
    """Something that was broken on purpose, and what became of it."""

    drill_id: str
    drill_type: DrillKind
    drill_status: DrillState
    """requested, struck; then recovered (an incident came of it, and training is where it was before), not_recovered (the job ended, was paused or
    was interrupted again before that), absorbed (no incident came of it) or not_done (the job did not train in time)."""
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
    """A page of drills, in the order they were asked for."""

    drills: list[Drill]
    next_token: str | None = None
