"""API models: what a person has to do."""

from __future__ import annotations

from datetime import datetime

from control_plane.api.schemas.common import Shape
from control_plane.core.duties import ActionKind, DutyKind, Urgency


class DutyAction(Shape):
    """One thing that a person can do now."""

    kind: ActionKind
    urgency: Urgency
    description: str
    """What the person should do and why, in one or two sentences."""
    command: str
    """The command line with which the person begins the action."""
    further_commands: list[str]
    """Alternative commands for the step after Command. The person runs one of them.

    Empty if Command completes the action.
    """
    instance_id: str | None
    """The held node that the action concerns. Absent if the action concerns the job or the fleet."""
    is_recommended: bool = False
    """Whether Everstep recommends the action instead of waiting for instances."""
    min_node_count: int | None = None
    """The ElasticConfig.MinNodeCount that the action gives the job. Absent if the action does not change it."""
    step: int | None = None
    """The checkpoint from which the job continues after the action. Absent for other actions."""


class Duty(Shape):
    """The next action of a person for a job or a fleet, and the reason for it.

    The service computes it when it answers. The command line, the dashboard and notifications show the same duty.
    """

    kind: DutyKind
    urgency: Urgency
    """Now: the job makes no progress, or loses its protection, until a person acts.

    Later: something waits for a person. Optional: a person can do something useful. None: there is nothing to do. A job
    or fleet needs attention if its urgency is Now or Later.
    """
    sentence: str
    explanation: str | None
    """What follows from the situation, and what Everstep does by itself. Absent if there is nothing to do."""
    since: datetime | None
    """When the duty began. Absent if the service does not know it."""
    actions: list[DutyAction]
    """What a person can do, the most urgent first."""


class SubjectDuty(Shape):
    """The duty of one job or fleet."""

    training_job_name: str | None
    """Absent for the duty of a fleet."""
    run_id: str | None
    fleet_name: str
    project: str
    duty: Duty


class DescribeDutiesResponse(Shape):
    """All jobs and fleets that need a person, the most urgent first."""

    duties: list[SubjectDuty]
