"""API models: updates and revisions of training jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from control_plane.api.schemas.common import (
    MAX_NODE_COUNT,
    MAX_PRIORITY,
    MAX_RUNTIME_SECONDS,
    MAX_STORE_PATIENCE_SECONDS,
    MAX_TRASH_HOURS,
    MAX_WHOLE_NUMBER,
    OfRun,
    Request,
    Shape,
    Tags,
)
from control_plane.api.schemas.jobs import ProtectionConfig, RetryStrategy


class StoppingConditionUpdate(Request):
    """New limits of a job's duration and cost. The value 0 removes a limit."""

    max_runtime_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    max_pending_time_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    max_cost_usd: float | None = Field(default=None, ge=0)
    """New cost limit: at least 0.01, or 0 for no limit."""


class CheckpointConfigUpdate(Request):
    """Checkpoint settings to change. The location of checkpoints cannot change after creation."""

    every_steps: int | None = Field(default=None, ge=0, le=1_000_000_000)
    interval_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    """New number of seconds between the beginnings of two checkpoints. 0 removes the interval."""
    max_overhead: float | None = Field(default=None, ge=0, le=1)
    """New value of MaxOverhead, at least 0.0001. 0 removes the limit and the computed interval."""
    max_upload_bytes_per_second: int | None = Field(default=None, ge=0, le=MAX_WHOLE_NUMBER)
    """New limit of a node's mean upload rate, in bytes per second. 0 removes the limit."""
    on_notice: bool | None = None
    third_slot: bool | None = None
    """Whether to reserve a third memory slot per shard. Cannot be disabled once the job has run."""
    max_count: int | None = Field(default=None, ge=0, le=100_000)
    """New number of newest checkpoints to keep. 0 removes the limit."""
    keep_every_steps: int | None = Field(default=None, ge=0, le=1_000_000_000)
    """New value of KeepEverySteps, in steps. 0 disables the rule, so that only MaxCount and MaxAgeInSeconds apply."""
    max_age_in_seconds: int | None = Field(default=None, ge=0, le=3_660 * 86_400)
    """New age in seconds at which checkpoints are deleted, at least 60. 0 disables deletion by age."""
    trash_hours: int | None = Field(default=None, ge=0, le=MAX_TRASH_HOURS)
    store_patience_seconds: int | None = Field(default=None, ge=0, le=MAX_STORE_PATIENCE_SECONDS)
    """New number of seconds for which the job keeps its nodes while S3, IAM or KMS prevents a restore."""


class ElasticConfigUpdate(Request):
    """Changes of the limits between which a job's number of nodes may change. 0 sets a limit to NodeCount.

    A job whose generation has more than MaxNodeCount nodes returns nodes at an agreed stop: all ranks stop at the same
    step, so no step is lost. A job that runs on fewer than MinNodeCount nodes continues; its next generation needs
    MinNodeCount nodes.
    """

    min_node_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    max_node_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    patience_in_seconds: int | None = Field(default=None, ge=0, le=MAX_RUNTIME_SECONDS)
    """New value of PatienceInSeconds. The value also applies to a wait that has begun."""


class UpdateTrainingJobRequest(Request):
    """Fields of a training job to change. Omitted fields keep their value."""

    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    preemptible: bool | None = None
    retry_strategy: RetryStrategy | None = None
    stopping_condition: StoppingConditionUpdate | None = None
    protection: ProtectionConfig | None = None
    checkpoint_config: CheckpointConfigUpdate | None = None
    elastic_config: ElasticConfigUpdate | None = None
    tags: Tags | None = None
    """The complete new set of tags. Tags of the job that this set omits are removed."""


class FieldChange(Shape):
    """The change of one field of a job's configuration."""

    field: str
    """Path of the field: `CheckpointConfig.EverySteps`."""
    before: str | None
    after: str | None
    """The new value as text. Absent if the update removes the value."""
    applies: Literal["Now", "NextGeneration"]
    """When the change takes effect: now, or with the next generation.

    A running generation keeps the plan that it started with.
    """


class UpdateTrainingJobResponse(OfRun):
    """The job's newest revision and its changes."""

    revision: int
    changes: list[FieldChange]
    """The changed fields.

    Empty if all fields already had the requested values. The update then creates no revision.
    """


class TrainingJobRevision(Shape):
    """The changes that one update made to a job."""

    revision: int
    """Number of the revision. Revision 1 is the configuration at creation."""
    time: datetime
    changes: list[FieldChange]


class ListTrainingJobRevisionsResponse(Shape):
    """A page of a job's revisions, oldest first."""

    revisions: list[TrainingJobRevision]
    next_token: str | None = None
