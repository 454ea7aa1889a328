"""API models: protection (the nodes that hold copies of a job's state), and checkpoints in S3."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import OfRun, Shape
from control_plane.api.schemas.plans import DomainOdds, RecoveryOdds
from control_plane.core.checkpoints import CheckpointStatus, TrashCause, Verification
from control_plane.core.states import ProtectionState, TrainingJobStatus
from everstep.protocol.rank_messages import UnkeptCause


class Holder(Shape):
    """A node that protects a shard in its memory: with a copy or, with parity, with a share."""

    node_id: str
    in_view: bool
    """Whether a step counts as committed only after this holder has verified it."""
    verified_step: int | None
    """The newest step of which the node has received and verified the whole copy.

    Absent until the node has verified a step.
    """
    verified_time: datetime | None
    """Time at which the node reported that it had verified VerifiedStep."""
    lag_steps: int | None
    """Number of steps from VerifiedStep to the newest step that the ranks have finished."""
    failure_domain: str | None
    """The EC2 network node that the instance is attached to. Absent if AWS has not reported one."""


class ShardProtection(Shape):
    """The holders of one rank's shard."""

    rank: int
    owner_node_id: str
    committed_step: int
    bytes: int
    holders: list[Holder]
    """Holders of the shard. The owner's node is the first.

    With parity, the other holders are the other nodes of the group, which keep a share of the shard.
    """
    reason: str
    """Reason why a holder is out of view, slow or unreachable, or why the owner or a holder refuses snapshots.

    Empty without such a problem.
    """


class LastCheckpoint(Shape):
    """The newest complete checkpoint in S3 that no verification found damaged."""

    step: int
    generation: int
    completed_at: datetime
    bytes: int


class ProtectionLapse(Shape):
    """The time in which a job's training goes on although nodes keep no further step."""

    cause: UnkeptCause
    kept_step: int
    """The newest step that nodes keep. A failure repeats all later steps."""
    unkept_steps: int
    """Number of steps that training has finished since KeptStep."""
    since: datetime
    """Time at which KeptStep was committed, or at which the generation finished its first step."""
    rank: int | None
    """The rank whose steps are not kept. Absent if no rank or agent reports the cause."""
    node_id: str | None


class DescribeProtectionResponse(Shape):
    """The current protection of a job's state."""

    training_job_name: str
    generation: int
    committed_step: int
    proposed_step: int
    boundary: int
    committed_at: datetime | None
    copies: int
    parity_group_size: int | None
    """Nodes per parity group.

    The state in memory survives the loss of any one node per group. Absent without parity.
    """
    protection_state: ProtectionState
    reason: str
    lapse: ProtectionLapse | None
    """Present while training goes on and nodes keep no further step."""
    recovery_odds: list[RecoveryOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes.

    Only holders in view count. The list is empty until every shard has a committed step. For a large job, it can lack
    the entry for two or three nodes, because Everstep does not count that many sets of lost nodes.
    """
    domain_odds: list[DomainOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three failure domains.

    Empty until every shard has a committed step, and if AWS has reported no domains.
    """
    fatal_domains: list[str]
    """Failure domains, each of which would make some shard unrecoverable from memory if it were lost alone."""
    shards: list[ShardProtection]
    last_checkpoint: LastCheckpoint | None


class Checkpoint(Shape):
    """A checkpoint of one step in S3."""

    step: int
    generation: int
    status: CheckpointStatus
    s3_uri: str
    bytes: int
    creation_time: datetime
    completion_time: datetime | None
    is_pinned: bool
    """Whether a user has pinned the checkpoint. Everstep does not delete a pinned checkpoint before UnpinCheckpoint."""
    purge_time: datetime | None
    """Earliest time at which Everstep deletes the objects of a trashed checkpoint. Absent outside of the trash."""
    trash_cause: TrashCause | None
    """Why the checkpoint is in the trash. Absent outside of the trash."""
    verification: Verification
    """The result of the last VerifyCheckpoint, which reads the objects back."""
    verification_time: datetime | None
    verification_message: str | None
    """The damaged parts of the checkpoint, or why the verification waits. Absent without damage and without a wait."""
    verification_waiting_since: datetime | None
    """When the verification first failed to read S3. Absent unless Verification is Waiting."""


class CreateCheckpointResponse(OfRun):
    """The step of the requested checkpoint, and whether the checkpoint is complete."""

    step: int
    """The checkpoint's step.

    While Status is Requested, Everstep may still choose a later committed step for the checkpoint.
    """
    status: Literal["Requested", "Complete"]


class ListCheckpointsResponse(Shape):
    """A job's checkpoints, newest step first."""

    checkpoints: list[Checkpoint]
    training_job_status: TrainingJobStatus
    """Status of the job. A job that has ended creates no more checkpoints."""
    trash_bytes: int
    """Bytes in S3 of all of the job's checkpoints in the trash, on whatever page."""
    next_token: str | None = None
