"""Shapes of the API: training jobs, their configuration and status."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import (
    MAX_NODE_COUNT,
    MAX_PRIORITY,
    MAX_RANKS_PER_NODE,
    MAX_RUNTIME_SECONDS,
    MIN_CHECKPOINT_AGE_SECONDS,
    MIN_COST_USD,
    AbsolutePath,
    ChannelName,
    Environment,
    HyperParameterName,
    Name,
    Request,
    RoleArn,
    S3Uri,
    SecretReference,
    Sha256,
    Shape,
    ShortText,
    Tags,
    Value,
    VariableName,
)
from control_plane.api.schemas.plans import TrainingJobPlan
from control_plane.core.states import JobState, ProtectionState, SecondaryStatus, TrainingJobStatus


class SourceConfig(Request):
    """The user's code."""

    source_id: Sha256
    """As PutSource returned it: the SHA-256 of the archive."""


class ProtectionConfig(Request):
    """How many nodes keep every shard in memory, and what that may cost."""

    copies: int = Field(default=2, ge=1, le=8)
    """The owner's node included; 1 protects against lost processes alone. One where there is one node, unless said."""
    max_slowdown: float | None = Field(default=None, ge=0.0001, le=1)
    """What snapshots may cost training, as a part of the mean iteration.

    Above it they are taken less often, below it as often as every step. 0.01
    unless said; 1 on a local cluster, whose nodes share the cores of one machine, so that the figure would say nothing."""


class CheckpointConfig(Request):
    """The durable tier."""

    every_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """A checkpoint in S3 every so many steps; 0: only when the job stops."""
    s3_uri: S3Uri | None = None
    """Prefix for checkpoints; the service's bucket by default."""
    third_slot: bool = False
    """Keep a third slot per shard, so that an upload never makes snapshots wait."""
    max_count: int | None = Field(default=None, ge=1, le=100_000)
    """How many of its newest checkpoints a job keeps, pinned ones besides; all unless said."""
    max_age_in_seconds: int | None = Field(default=None, ge=MIN_CHECKPOINT_AGE_SECONDS, le=3_660 * 86_400)
    """Checkpoints that are older are deleted.

    The newest one, what the job would be restored from, and pinned ones are always kept.
    """


class S3DataSource(Request):
    """Objects in S3."""

    s3_uri: S3Uri
    """One object, or a prefix: then what lies below it, with its own folders.

    Without RoleArn it is read with the nodes' permissions.
    """


class FileSystemDataSource(Request):
    """A directory that is on every node already: a shared file system, or part of the image."""

    directory_path: AbsolutePath
    """Absolute; whether ranks may write to it is a matter of its mount."""


class DataSource(Request):
    """Where a channel's data are: one of the two."""

    s3_data_source: S3DataSource | None = None
    """Fetched to every node before its ranks start, verified, and kept there for later jobs as long as there is room.

    Files are read-only.
    """
    file_system_data_source: FileSystemDataSource | None = None


class Channel(Request):
    """One of a job's inputs."""

    channel_name: ChannelName
    """Ranks find its directory in SM_CHANNEL_<NAME>, and by `everstep.training.input_dir("name")`."""
    data_source: DataSource


class OutputDataConfig(Request):
    """Where outputs go."""

    s3_output_path: S3Uri | None = None
    """Prefix for outputs, which lie below it by job and run; the service's bucket by default."""


class StoppingCondition(Request):
    """Limits of a job."""

    max_runtime_in_seconds: int | None = Field(default=None, ge=1, le=MAX_RUNTIME_SECONDS)
    """From its first start; time without nodes after it was paused is not counted."""
    max_pending_time_in_seconds: int | None = Field(default=None, ge=1, le=MAX_RUNTIME_SECONDS)
    """From its creation to its first nodes.

    However long it is, a gang that does not come together gives its nodes back meanwhile.
    """
    max_cost_usd: float | None = Field(default=None, ge=MIN_COST_USD)
    """What its nodes may cost, at the fleet's price; the fleet must have one. Then it stops as a user's stop would."""


class RetryStrategy(Request):
    """When to stop trying."""

    max_attempts: int = Field(default=3, ge=1, le=30)
    """The same failure at the same step this many times; then once more without the failing rank's node and once more from an older state, where
    there are such, and the job has failed."""


class CreateTrainingJobRequest(Request):
    """A job to run."""

    training_job_name: Name
    client_request_token: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, json_schema_extra={"x-idempotency-token": True}
    )
    """The same request with the same token again changes nothing: it is answered with the job that it made.

    The SDK fills it in.
    """
    fleet_name: Name | None = None
    """May be left out where there is exactly one fleet."""
    alternative_fleet_names: Annotated[list[Name], Field(max_length=7)] = Field(default_factory=list)
    """Other subnets, zones or instance types: asked in this order, in a ring, while AWS has no capacity for the whole job in the one before. Only
    before the job has started."""
    source: SourceConfig
    entry_point: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Path of a Python file in the source."""
    requirements: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Path of a requirements.txt in the source: each node installs what it lacks of it, once, beside its own packages, and ranks see that first."""
    hyper_parameters: Annotated[dict[HyperParameterName, Value], Field(max_length=100)] = Field(default_factory=dict)
    """Given to the script as EVERSTEP_HYPERPARAMETERS (JSON) and as `--key value`."""
    environment: Environment = Field(default_factory=dict)
    secrets: Annotated[dict[VariableName, SecretReference], Field(max_length=100)] = Field(default_factory=dict)
    """Variables of ranks whose values are in AWS: `secretsmanager:NAME`, `ssm:NAME` or an ARN of either.

    Each node reads them when it starts its
    ranks; values are stored, shown and logged nowhere."""
    role_arn: RoleArn | None = None
    """Ranks have this role's short-lived keys, renewed before they end; Secrets and InputDataConfig are read with them, too. Nodes must be allowed to
    assume it. Without it ranks have no AWS credentials."""
    node_count: int = Field(ge=1, le=MAX_NODE_COUNT)
    ranks_per_node: int = Field(default=1, ge=1, le=MAX_RANKS_PER_NODE)
    protection: ProtectionConfig | None = None
    """Two copies where there are two nodes, one where there is one, unless said."""
    checkpoint_config: CheckpointConfig = Field(default_factory=CheckpointConfig)
    input_data_config: Annotated[list[Channel], Field(max_length=20)] = Field(default_factory=list)
    """What ranks find on their node before their first line; what is missing fails the job before any rank starts."""
    output_data_config: OutputDataConfig = Field(default_factory=OutputDataConfig)
    stopping_condition: StoppingCondition = Field(default_factory=StoppingCondition)
    retry_strategy: RetryStrategy = Field(default_factory=RetryStrategy)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Higher first; of equal ones the oldest."""
    preemptible: bool = False
    """A job of higher priority that needs its nodes may pause it: all ranks stop at one agreed step, kept in S3, and it resumes by itself."""
    project: Name | None = None
    """The token's project, unless the token may name another."""
    tags: Tags = Field(default_factory=dict)
    dry_run: bool = False
    """Check everything, create nothing, and answer the plan."""


class TakeOverTrainingJobRequest(Request):
    """A person looks after a job from now on."""

    reason: ShortText = ""


class CreateTrainingJobResponse(Shape):
    """The job is accepted and waits for its turn; or, of a dry run, what would become of it."""

    training_job_name: str
    run_id: str | None = None
    """Absent after a dry run."""
    training_job_status: TrainingJobStatus | None = None
    """Absent after a dry run."""
    plan: TrainingJobPlan | None = None
    """Of a dry run."""


class TrainingJobSummary(Shape):
    """One line of a list of jobs."""

    training_job_name: str
    run_id: str
    fleet_name: str
    project: str
    training_job_status: TrainingJobStatus
    secondary_status: SecondaryStatus
    reason: str
    priority: int
    node_count: int
    generation: int
    committed_step: int
    boundary: int
    target_step: int | None
    """As in TrainingJob."""
    estimated_remaining_seconds: float | None
    """As in TrainingJob."""
    creation_time: datetime
    last_modified_time: datetime
    """When it came into its state, or a person last changed what is wanted of it."""
    training_start_time: datetime | None
    training_end_time: datetime | None
    ettr_ratio: float | None
    """As in Reliability; absent before it has started."""
    cost_usd: float | None
    """What its nodes have cost; absent where the fleet has no price."""
    protection_state: ProtectionState | None = None
    """As DescribeProtection says it; in lists alone, and absent while no agent holds its state: before its first launch, paused, ended."""
    healthy_node_count: int | None = None
    """As in TrainingJob; in lists alone."""
    incident_count: int | None = None
    """In lists alone."""
    open_incident_count: int | None = None
    """In lists alone."""


class ListTrainingJobsResponse(Shape):
    """A page of jobs, newest first."""

    training_job_summaries: list[TrainingJobSummary]
    next_token: str | None = None


class DeleteTrainingJobResponse(Shape):
    """What went, or would go."""

    training_job_name: str
    run_id: str
    is_deleted: bool
    """The job is forgotten. Not after a dry run, and not while objects are left."""
    generation_count: int
    checkpoint_count: int
    incident_count: int
    node_seconds: float
    """What the fleet's figures no longer count."""
    cost_usd: float | None
    object_count: int
    """Objects in S3 that this call has deleted; of a dry run, that a call with DeleteObjects would."""
    object_bytes: int
    has_more_objects: bool
    """A call takes so many objects at the most: the same call again goes on."""
    s3_uris: list[str]
    """Where they are: checkpoints, logs, outputs."""


class SecondaryStatusTransition(Shape):
    """The job was in a state for a while."""

    status: SecondaryStatus
    """The derived status, SageMaker's words.

    While ranks run without a new step it is Starting, or Restarting once the job has made steps.
    """
    state: JobState
    """Everstep's own, finer state."""
    start_time: datetime
    end_time: datetime | None
    status_message: str


class Reliability(Shape):
    """How much of the time was training, and how often and how long it was interrupted."""

    ettr_ratio: float | None
    """Seconds of training ÷ all seconds but those without nodes (queue, provision, paused); absent before the first start."""
    ettr_with_queue_ratio: float | None
    """Seconds of training ÷ all seconds since the job was created."""
    mttf_seconds: float | None
    """Mean time to failure: seconds of training and stall ÷ failures; absent before the first.

    Drills, AWS's notices and people's wishes are none.
    """
    mttr_seconds: float | None
    """Mean time to recovery, from the failure until training is where it was before; of failures whose incidents are closed."""
    lost_steps: int
    """Steps done again."""
    incident_cost_usd: float | None
    """What nodes cost while they made no new step; absent where the fleet has no price."""


class Condition(Shape):
    """Something that is wrong now with a node, or with what a job stands on. It is no longer listed once it is over."""

    type: str
    """The fault's code, as docs/reference/metrics.md lists them: disk_full, memory_low, gpu_xid …"""
    message: str
    """A sentence with the figures."""
    node_id: str | None
    """Absent where the service itself is meant."""


class TrainingJob(Shape):
    """Everything about a job."""

    training_job_name: str
    run_id: str
    fleet_name: str
    """Where it runs or waits now."""
    alternative_fleet_names: list[str]
    """The others where it may start."""
    project: str
    training_job_status: TrainingJobStatus
    secondary_status: SecondaryStatus
    secondary_status_transitions: list[SecondaryStatusTransition]
    reason: str
    """Why it is where it is: what it waits for, or how it ended."""
    failure_reason: str | None
    """Set once the job has failed."""
    conditions: list[Condition]
    """What is wrong now with its nodes and with the service.

    Reported for people: a condition alone changes nothing about the job. Empty once it has
    ended."""
    source: SourceConfig
    entry_point: str
    requirements: str | None
    hyper_parameters: dict[str, str]
    environment: Annotated[dict[str, str], Field(json_schema_extra={"x-sensitive": True})]
    secrets: dict[str, str]
    """Where the values are, by variable."""
    role_arn: str | None
    node_count: int
    ranks_per_node: int
    protection: ProtectionConfig
    checkpoint_config: CheckpointConfig
    input_data_config: list[Channel]
    output_data_config: OutputDataConfig
    stopping_condition: StoppingCondition
    retry_strategy: RetryStrategy
    priority: int
    preemptible: bool
    queue_position: int | None
    """Its place in the fleet's queue, from 1; absent while it does not wait there."""
    queued_behind: list[str]
    """Names of the jobs that are ahead of it there."""
    tags: dict[str, str]
    creation_time: datetime
    last_modified_time: datetime
    """When it came into its state, or a person last changed what is wanted of it."""
    training_start_time: datetime | None
    training_end_time: datetime | None
    stop_requested_time: datetime | None
    pause_requested_time: datetime | None
    """Absent once it was resumed."""
    revision: int
    """Of what was asked for: 1 at its creation, one more with each update."""
    observed_revision: int | None
    """What the newest generation was planned from; absent before the first."""
    taken_over_time: datetime | None
    """Since when a person looks after it: Everstep observes and decides nothing."""
    taken_over_by: str | None
    generation: int
    """The launch of all ranks that runs now; 0 before the first."""
    base_step: int
    """What that launch resumed from."""
    committed_step: int
    """Held, verified, by all holders in view; -1 before the first."""
    boundary: int
    """Steps that the ranks have finished; -1 before they start."""
    max_boundary: int
    """The highest that any generation reached."""
    target_step: int | None
    """Steps finished when its script will be done: what `session.batches(until_step=…)` was given; absent where the script has not said."""
    estimated_remaining_seconds: float | None
    """How long the steps up to TargetStep take at the mean pace of those so far, without failures and waiting; absent where either is not known,
    and once it has ended."""
    healthy_node_count: int
    """Of the nodes that belong to it: how many are connected and report no fault of their own."""
    assigned_node_count: int
    """Nodes assigned to the job; after its end, those that have not released it yet.

    A job can be deleted once it is 0.
    """
    node_ids: list[str]
    """By GROUP_RANK; empty while it has none."""
    coordinator_node_id: str | None
    incident_count: int
    open_incident_count: int
    """Incidents from which the job has not recovered yet."""
    open_drill_id: str | None
    """The drill of it that is not over: recovered from or not, absorbed, or not done."""
    accounting_seconds: dict[str, float]
    """Every second from CreationTime to AccountedUntil by bucket, to the microsecond: they add up exactly."""
    accounted_until: datetime | None
    """The end, once the job has ended."""
    reliability: Reliability
    node_seconds: float
    """How long nodes have worked for the job, all together."""
    cost_usd: float | None
    """What they have cost so far at the fleet's price; absent where it has none."""


class TrainingJobNode(Shape):
    """A node that works for a job, or has worked for it."""

    node_id: str
    start_time: datetime
    end_time: datetime | None
    """Absent while it does; a node may come back."""


class ListTrainingJobNodesResponse(Shape):
    """A page of which nodes have worked for a job, by when they began."""

    nodes: list[TrainingJobNode]
    next_token: str | None = None
