"""Shapes of the API: protection, holders and checkpoints of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import Shape
from control_plane.api.schemas.plans import DomainOdds, RecoveryOdds
from control_plane.core.checkpoints import CheckpointStatus, Verification
from control_plane.core.states import ProtectionState, TrainingJobStatus


class Holder(Shape):
    """A node that keeps a copy of a shard."""

    node_id: str
    in_view: bool
    """It counts in the current rounds."""
    verified_step: int | None
    """The newest step that it is known to hold, whole and verified; absent before the first."""
    verified_time: datetime | None
    """Since when."""
    lag_steps: int | None
    """How far that is behind the newest step that the ranks have finished."""
    failure_domain: str | None
    """The network node that its instance hangs on; absent where AWS has not told."""


class ShardProtection(Shape):
    """Who holds one rank's shard."""

    rank: int
    owner_node_id: str
    committed_step: int
    bytes: int
    holders: list[Holder]
    """The owner's node first."""
    reason: str
    """Why a holder is out of view, slow or hard to reach, or snapshots are refused; empty when all is well."""


class LastCheckpoint(Shape):
    """The newest complete checkpoint in S3 that was not found damaged."""

    step: int
    generation: int
    completed_at: datetime
    bytes: int


class DescribeProtectionResponse(Shape):
    """How well the job's state is kept right now."""

    training_job_name: str
    generation: int
    committed_step: int
    proposed_step: int
    boundary: int
    committed_at: datetime | None
    copies: int
    protection_state: ProtectionState
    reason: str
    recovery_odds: list[RecoveryOdds]
    """For one, two and three lost nodes, by the holders that count right now, as far as they can be counted in time; empty while not every shard is
    committed."""
    domain_odds: list[DomainOdds]
    """Likewise for whole failure domains; empty where AWS has told none."""
    fatal_domains: list[str]
    """Failure domains whose loss alone would take every copy of some shard."""
    shards: list[ShardProtection]
    last_checkpoint: LastCheckpoint | None


class Checkpoint(Shape):
    """A set of shards of one step in S3."""

    step: int
    generation: int
    status: CheckpointStatus
    s3_uri: str
    bytes: int
    creation_time: datetime
    completion_time: datetime | None
    is_pinned: bool
    """It is not deleted until it is unpinned."""
    verification: Verification
    """What VerifyCheckpoint found when it last read the objects back."""
    verification_time: datetime | None
    verification_message: str | None
    """What is damaged."""


class CreateCheckpointResponse(Shape):
    """Which step is in S3, or on its way."""

    training_job_name: str
    run_id: str
    step: int
    """The checkpoint is of this step or, while it is Requested, of the next one that is committed."""
    status: Literal["Requested", "Complete"]


class ListCheckpointsResponse(Shape):
    """A job's checkpoints, newest step first."""

    checkpoints: list[Checkpoint]
    training_job_status: TrainingJobStatus
    """Of the job: one that has ended makes no more."""
    next_token: str | None = None
