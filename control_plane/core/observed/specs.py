"""The specification of a job, and the settings that apply to every job and fleet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.ids import FleetName, JobName, RunId
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN, ObjectReference, ScriptPlan, Timeouts

DEFAULT_REPLACEMENTS_PER_HOUR = 20

DEFAULT_PATIENCE_SECONDS = 60
"""A spare joins in less time. A new instance usually needs more time."""

DEFAULT_STORE_PATIENCE_SECONDS = 1800

DEFAULT_REPEATED_MINUTES = 30

DEFAULT_REHEARSAL_STEP = 20

DEFAULT_REHEARSED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings that apply to every job and fleet of this control plane."""

    timeouts: Timeouts
    pause: str = ""
    """The person who paused all automatic actions, and the reason, or empty.

    Jobs and fleets then keep their states, except for manifests of checkpoints and orders that end earlier generations.
    """
    is_local: bool = False
    """Whether the fleets are local clusters, on which a rehearsal may cost any time."""


class OnTotalLoss(StrEnum):
    """The reaction of a job that could only restore a step more than `max_repeated_minutes` before the newest commit.

    WAIT: it holds its nodes and waits for a person. RESTART: it continues from that step, down to step 0.
    """

    WAIT = "Wait"
    RESTART = "Restart"


class RehearsalMode(StrEnum):
    """The condition on which a job rehearses its own resume. AUTO: once, if it costs little time. ON: once, anyway."""

    AUTO = "Auto"
    ON = "On"
    OFF = "Off"


class OnDifference(StrEnum):
    """The reaction of a job whose rehearsal finds a difference: it continues, or it stops."""

    CONTINUE = "Continue"
    STOP = "Stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings that the stored specification of a job (`db.jobs.SavedJobSpec`) and this module's `JobSpec` share."""

    node_count: int
    ranks_per_node: int
    copies: int
    parity_group_size: int | None = None
    """None: copies protect the shards."""
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    checkpoint_every_steps: int = 0
    """0 disables this trigger."""
    checkpoint_interval_seconds: int | None = None
    """None disables this trigger."""
    checkpoint_max_overhead: float | None = None
    """Share of training time that checkpoints may cost, which determines the interval."""
    checkpoint_max_bytes_per_second: int | None = None
    """Limit of a node's mean upload rate with an automatic interval."""
    checkpoint_on_notice: bool = True
    """Whether the job makes a checkpoint when AWS announces the end of a node that no other node can replace."""
    third_slot: bool = False
    checkpoint_max_uploads: int = 1
    """Each upload occupies one memory slot per shard."""
    store_patience_seconds: int = DEFAULT_STORE_PATIENCE_SECONDS
    """Time for which the job keeps its nodes while S3, IAM or KMS prevents a restore."""
    max_runtime_seconds: int | None = None
    max_pending_seconds: int | None = None
    max_cost_usd: float | None = None
    max_attempts: int = 3
    """Equal failures at one step after which the job changes the node or the state, or fails."""
    max_repeated_minutes: int = DEFAULT_REPEATED_MINUTES
    """Training time that the job repeats without a person's consent."""
    on_total_loss: OnTotalLoss = OnTotalLoss.WAIT
    min_node_count: int | None = None
    """None means `node_count`."""
    max_node_count: int | None = None
    """None means `node_count`."""
    patience_seconds: int = DEFAULT_PATIENCE_SECONDS
    """Wait for missing nodes before the job starts or continues with fewer nodes."""
    rehearsal_mode: RehearsalMode = RehearsalMode.AUTO
    rehearsal_on_difference: OnDifference = OnDifference.CONTINUE
    rehearsal_at_step: int = DEFAULT_REHEARSAL_STEP
    rehearsal_steps: int = DEFAULT_REHEARSED_STEPS

    @property
    def world_size(self) -> int:
        """The number of ranks on `node_count` nodes. A plan can have more or fewer nodes than `node_count`."""
        return self.node_count * self.ranks_per_node

    @property
    def least_node_count(self) -> int:
        """The smallest number of nodes that a generation may have."""
        return self.node_count if self.min_node_count is None else self.min_node_count

    @property
    def most_node_count(self) -> int:
        """The largest number of nodes that a generation may have."""
        return self.node_count if self.max_node_count is None else self.max_node_count


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(JobSettings):
    """The specification of a job, as the decisions in `core` use it: the validated request of its user."""

    job: JobName
    run: RunId
    fleet: FleetName
    script: ScriptPlan
    checkpoint_prefix: ObjectReference
    priority: int = 0
    initial_checkpoint: str = ""
    """The other job's checkpoint from which the job starts, or empty."""
    fleets: tuple[FleetName, ...] = ()
    """The fleets in the user's order, including `fleet`. Empty: only `fleet`."""
