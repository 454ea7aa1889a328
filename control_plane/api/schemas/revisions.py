"""Shapes of the API: updates and revisions of training jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from control_plane.api.schemas.common import MAX_PRIORITY, MAX_RUNTIME_SECONDS, Request, Shape, Tags
from control_plane.api.schemas.jobs import ProtectionConfig, RetryStrategy


class StoppingConditionUpdate(Request):
    """Limits to change; 0 lifts one."""

    max_runtime_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    max_pending_time_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    max_cost_usd: float | None = Field(default=None, ge=0)
    """At least 0.01, or 0."""


class CheckpointConfigUpdate(Request):
    """What to change of the durable tier; where checkpoints go is set at creation."""

    every_steps: int | None = Field(default=None, ge=0, le=1_000_000_000)
    third_slot: bool | None = None
    """Cannot be taken back once the job has run."""
    max_count: int | None = Field(default=None, ge=0, le=100_000)
    """0: no limit any more."""
    max_age_in_seconds: int | None = Field(default=None, ge=0, le=3_660 * 86_400)
    """At least 60; 0: no limit any more."""


class UpdateTrainingJobRequest(Request):
    """Fields to change; what is left out stays."""

    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    preemptible: bool | None = None
    retry_strategy: RetryStrategy | None = None
    stopping_condition: StoppingConditionUpdate | None = None
    protection: ProtectionConfig | None = None
    checkpoint_config: CheckpointConfigUpdate | None = None
    tags: Tags | None = None
    """All of them: those that are left out go."""


class FieldChange(Shape):
    """One field that was changed."""

    field: str
    """Its path: `CheckpointConfig.EverySteps`."""
    before: str | None
    after: str | None
    """As text; absent where there is no value."""
    applies: Literal["Now", "NextGeneration"]
    """A running generation goes on with the plan that it began with."""


class UpdateTrainingJobResponse(Shape):
    """The job's newest revision, and what it changed."""

    training_job_name: str
    run_id: str
    revision: int
    changes: list[FieldChange]
    """Empty where everything was so already: then there is no new revision."""


class TrainingJobRevision(Shape):
    """What was changed at once of a job."""

    revision: int
    """1: what it was created with."""
    time: datetime
    changes: list[FieldChange]


class ListTrainingJobRevisionsResponse(Shape):
    """A page of a job's revisions, oldest first."""

    revisions: list[TrainingJobRevision]
    next_token: str | None = None
