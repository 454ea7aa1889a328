"""The contract: every request and response of the API. `python -m control_plane.contract` makes everything from here that others build on.

Names on the wire are PascalCase, as AWS's are; SageMaker's words where it has one. Times are seconds since 1970, as AWS's JSON has them, durations
whole seconds unless they are measurements. What has no value is absent, never null.

Invariant: a request that validates is well formed by itself; what depends on a fleet or a source is checked in `api/admission.py`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema, model_validator
from pydantic.alias_generators import to_pascal
from pydantic_core import InitErrorDetails

from control_plane.core.checkpoints import CheckpointStatus, Verification
from control_plane.core.observed.drills import DrillKind, DrillState
from control_plane.core.observed.fleets import Hold, NodeRequest
from control_plane.core.observed.jobs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.core.observed.nodes import Cause, Remedy
from control_plane.core.states import FleetStatus, IncidentPhase, JobState, NodeState, ProtectionState, SecondaryStatus, TrainingJobStatus
from everstep.protocol.ids import NAME_PATTERN

MAX_NODE_COUNT = 4096
MAX_RANKS_PER_NODE = 64
MAX_WHOLE_NUMBER = 2**63 - 1
"""What a database holds of one: what callers say beyond it is refused before it is asked."""
MAX_RUNTIME_SECONDS = 2_419_200
"""28 days, as in SageMaker."""
MIN_COST_USD = 0.01
MIN_CHECKPOINT_AGE_SECONDS = 60
MAX_PRIORITY = 1_000
MAX_PRICE_USD_PER_HOUR = 10_000

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""1-63 letters, digits and single hyphens (SageMaker's rule for TrainingJobName)."""
RoleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+=,.@-]{1,64}$")]
RoleArn = Annotated[str, StringConstraints(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]{1,512}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
MAX_S3_PATH_CHARACTERS = 900
S3Uri = Annotated[str, StringConstraints(pattern=rf"^s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](/[^\x00-\x1f]{{0,{MAX_S3_PATH_CHARACTERS}}})?$")]
ShortText = Annotated[str, StringConstraints(max_length=256)]
Value = Annotated[str, StringConstraints(max_length=4096)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
Environment = Annotated[dict[VariableName, Value], Field(max_length=100, json_schema_extra={"x-sensitive": True})]
"""People keep keys in it, although `Secrets` is for that."""
Hidden = Annotated[str, Field(json_schema_extra={"x-sensitive": True})]
"""Shown in no log."""
SecretReference = Annotated[
    str,
    StringConstraints(
        pattern=r"^(secretsmanager:[A-Za-z0-9/_+=.@-]{1,512}|ssm:[A-Za-z0-9/_.-]{1,1011}"
        r"|arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@-]{1,512}|ssm:[a-z0-9-]+:[0-9]{12}:parameter/[A-Za-z0-9/_.-]{1,1011}))$"
    ),
]
HyperParameterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}$")]
ChannelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]{0,4094}$")]
LoggedNumber = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]})]
"""JSON has no number that is not finite: such a one is text, as in AWS's own APIs; clients make it a number again."""
Tags = Annotated[dict[ShortText, ShortText], Field(max_length=50)]


class Shape(BaseModel):
    """Base of everything that is answered: PascalCase outside, times as seconds since 1970."""

    model_config = ConfigDict(
        alias_generator=to_pascal,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_temporal="seconds",
        ser_json_inf_nan="strings",
    )


class SentObject(dict[str, Any]):
    """An object of a request's JSON. Its type separates what a caller sent from what the service builds itself."""


class Request(Shape):
    """Base of everything that callers send: unknown fields are refused, and what is of another type is not made to fit."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_python_names(cls, data: Any) -> Any:
        """Refuse `node_count` for `NodeCount`: only the service's own code may use Python's names."""
        if isinstance(data, SentObject) and (ours := [name for name in data if name in cls.model_fields]):
            unknown = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=data[name]) for name in ours]
            raise ValidationError.from_exception_data(cls.__name__, unknown)
        return data


# Errors ----------------------------------------------------------------------------------------------------------------------------------


class FieldError(Shape):
    """What is wrong with one field of a request."""

    field: str
    """Path of the field, as `CheckpointConfig.EverySteps`."""
    message: str
    """A sentence with the figures."""


class ErrorResponse(Shape):
    """What every refused request answers."""

    code: str
    """The error's type; also in the header `x-amzn-errortype`."""
    message: str
    request_id: str
    """Also in the header `x-amzn-requestid`; the server's log has it."""
    hint: str
    """What to do about it; empty when there is nothing to say."""
    fields: list[FieldError] = Field(default_factory=list)


# Training jobs ---------------------------------------------------------------------------------------------------------------------------


class SourceConfig(Request):
    """The user's code."""

    source_id: Sha256
    """As PutSource returned it: the SHA-256 of the archive."""


class ProtectionConfig(Request):
    """How many nodes keep every shard in memory, and what that may cost."""

    copies: int = Field(default=2, ge=1, le=8)
    """The owner's node included; 1 protects against lost processes alone. One where there is one node, unless said."""
    max_slowdown: float | None = Field(default=None, ge=0.0001, le=1)
    """What snapshots may cost training, as a part of the mean iteration. Above it they are taken less often, below it as often as every step. 0.01
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
    """Checkpoints that are older are deleted. The newest one, what the job would be restored from, and pinned ones are always kept."""


class S3DataSource(Request):
    """Objects in S3."""

    s3_uri: S3Uri
    """One object, or a prefix: then what lies below it, with its own folders. Without RoleArn it is read with the nodes' permissions."""


class FileSystemDataSource(Request):
    """A directory that is on every node already: a shared file system, or part of the image."""

    directory_path: AbsolutePath
    """Absolute; whether ranks may write to it is a matter of its mount."""


class DataSource(Request):
    """Where a channel's data are: one of the two."""

    s3_data_source: S3DataSource | None = None
    """Fetched to every node before its ranks start, verified, and kept there for later jobs as long as there is room. Files are read-only."""
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
    """From its creation to its first nodes. However long it is, a gang that does not come together gives its nodes back meanwhile."""
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
    """The same request with the same token again changes nothing: it is answered with the job that it made. The SDK fills it in."""
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
    """Variables of ranks whose values are in AWS: `secretsmanager:NAME`, `ssm:NAME` or an ARN of either. Each node reads them when it starts its
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


class RecoveryOdds(Shape):
    """What becomes of the job's memory when nodes are lost at once."""

    lost_nodes: int
    probability: float
    """That every shard keeps a copy, all sets of so many nodes equally likely; exact."""


class DomainOdds(Shape):
    """What becomes of the job's memory when whole failure domains are lost at once."""

    lost_domains: int
    probability: float
    """That every shard keeps a copy, all sets of so many domains equally likely; exact. A node whose domain is not known is one of its own."""


class TrainingJobPlan(Shape):
    """What would become of a job, by what its fleet is and has seen."""

    fleet_name: str
    node_count: int
    ranks_per_node: int
    world_size: int
    copies: int
    slots_per_node: int
    """Host memory of a node is taken by so many slots, each as large as one rank's state: slots of a shard × Copies × RanksPerNode."""
    node_memory_bytes: int | None
    """What the fleet's smallest node has for them; absent while it has none."""
    largest_shard_bytes: int | None
    """So large may one rank's state be there."""
    recovery_odds: list[RecoveryOdds]
    """For one, two and three lost nodes at once, with all copies in place."""
    can_start_now: bool
    """Its turn has come, and enough nodes are free and connected."""
    queue_position: int | None
    """Its place in the fleet's queue, from 1; absent where its turn would come at once."""
    queued_behind: list[str]
    """Names of the jobs that would be ahead of it there."""
    waits_for: str | None
    """What it would wait for, in words."""
    free_node_count: int
    nodes_to_launch: int
    """Instances that the fleet would have to bring for it."""
    cost_usd_per_hour: float | None
    """The fleet's price × NodeCount; absent where it has none."""
    most_cost_usd: float | None
    """What it can cost at most: by MaxRuntimeInSeconds at that price, or by MaxCostUsd. Absent where neither bounds it."""
    expected_mttf_seconds: float | None
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount; absent before the first incident."""
    expected_recovery_seconds: float | None
    """Mean time to recovery, of the fleet's closed incidents."""
    expected_ettr_ratio: float | None
    """ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds): the part of the time that will be training, the queue not counted."""


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
    """The derived status, SageMaker's words. While ranks run without a new step it is Starting, or Restarting once the job has made steps."""
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
    """Mean time to failure: seconds of training and stall ÷ failures; absent before the first. Drills, AWS's notices and people's wishes are none."""
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
    """What is wrong now with its nodes and with the service. Reported for people: a condition alone changes nothing about the job. Empty once it has
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
    """Nodes assigned to the job; after its end, those that have not released it yet. A job can be deleted once it is 0."""
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


# Protection, checkpoints, logs, outputs, metrics -----------------------------------------------------------------------------------------


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


class LogEntry(Shape):
    """One stream of one rank in one generation, or the fact that it is missing."""

    generation: int
    rank: int
    stream: Literal["stdout", "stderr"] | None
    """None for what is missing altogether."""
    key: str | None
    bytes: int | None
    missing_reason: str | None


class ListLogsResponse(Shape):
    """A page of the streams of a job's ranks, by generation, rank and stream."""

    logs: list[LogEntry]
    next_token: str | None = None


class LogEvent(Shape):
    """One line that a rank printed, or the fact that lines are missing."""

    timestamp: datetime
    """When the node's agent read it, to the millisecond."""
    generation: int
    node_id: str
    rank: int | None
    """Absent where a whole node is meant."""
    stream: Literal["stdout", "stderr", "gap"]
    """`gap`: what was here is not kept; Message says what and why."""
    message: str
    """Without the line feed; lines of more than 16 KiB come in pieces."""


class GetLogEventsResponse(Shape):
    """A page of what a job's ranks printed, oldest line first."""

    events: list[LogEvent]
    next_forward_token: str
    """Reads on after the last of these lines."""
    next_backward_token: str
    """Reads on before the first of them."""


class LogEvents(Shape):
    """Lines that came together; without lines it is a sign of life."""

    events: list[LogEvent]
    next_forward_token: str
    """For FollowLogs and GetLogEvents: goes on after these lines."""


class FollowLogsStream(Shape):
    """What a followed log is made of."""

    log_events: LogEvents | None = None


class OutputEntry(Shape):
    """One file that a rank left in its output directory."""

    generation: int
    path: str
    """Below the generation: `rank=0/model.safetensors`."""
    key: str
    bytes: int


class ListOutputsResponse(Shape):
    """A page of a job's output files."""

    outputs: list[OutputEntry]
    next_token: str | None = None


class Metric(Shape):
    """One name under which rank 0 logs."""

    metric_name: str
    last_step: int
    last_time: datetime
    last_value: LoggedNumber
    """What is not finite is the text NaN, Infinity or -Infinity on the wire."""


class ListMetricsResponse(Shape):
    """What a job has logged: at most 256 names, so that there are no pages."""

    metrics: list[Metric]
    dropped_count: int
    """Steps whose values were lost on the way, because more was logged than could be taken, and values of more names than a job may have."""


class MetricDataResult(Shape):
    """One metric as columns: the first entry of each is the first point, and so on, in order of steps. A point is one step or a span of them."""

    metric_name: str
    steps: list[int]
    """The first step of each point that has a value."""
    last_steps: list[int]
    times: list[float]
    """When the last value of each point was logged, seconds since 1970."""
    counts: list[int]
    """Values in each point."""
    minimums: list[LoggedNumber]
    """Of the finite values, as means and maximums; NaN where there are none."""
    means: list[LoggedNumber]
    maximums: list[LoggedNumber]
    last_values: list[LoggedNumber]
    """The last value of each point, finite or not. What is not finite is the text NaN, Infinity or -Infinity on the wire."""
    minimum_node_ids: list[str]
    """Of what Everstep measures on every node (names that begin with everstep/): the node of each minimum; empty for what the script logs. There the
    mean and the last value are the median of the nodes, and the counts count nodes. A point that was made while one node alone was heard is of rank
    0's node, and has an empty name."""
    maximum_node_ids: list[str]
    """Likewise of each maximum."""


class GetMetricDataResponse(Shape):
    """What a job has logged, by metric."""

    metric_data_results: list[MetricDataResult]


# Incidents and events --------------------------------------------------------------------------------------------------------------------


class RankSource(Shape):
    """Where the shards of some ranks came from."""

    source: Literal["local", "peer", "s3"]
    first_rank: int
    last_rank: int


class Incident(Shape):
    """A failure and its recovery."""

    incident_id: str
    training_job_name: str
    run_id: str
    cause: Cause
    phase: IncidentPhase
    evidence: list[str]
    decision: str
    reason: str
    restore_source: Literal["local", "peer", "s3"] | None
    """The farthest source that any rank used."""
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    """Steps done again: reached_step − from_step."""
    generation_before: int
    generation_after: int | None
    instance_id: str | None
    """The first of those that were lost, if any."""
    replacement_instance_id: str | None
    instance_ids: list[str]
    """Those that were left, for whatever cause."""
    faulted_instance_ids: list[str]
    """Where it happened: whose ranks, agent, links or hardware failed, or what AWS announced, lost by it or not. Empty where that cannot be told."""
    replacement_instance_ids: list[str]
    failed_at: datetime
    opened_at: datetime
    restored_at: datetime | None
    """When training ran again; absent where it has not."""
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    """The fleet's price × the seconds in which the job's nodes made no new step; so far, while it is open. Absent where the fleet has no price."""
    rank_sources: list[RankSource]
    """By rank; empty before that is known, or when nothing was restored."""
    stacks_event_id: int | None
    """The event `RanksHang` whose Detail has the stacks of all ranks: where ranks hung, in DescribeIncident alone, for as long as events are kept."""
    acknowledgement_time: datetime | None
    """When a person first said to have seen it."""
    acknowledged_by: str | None
    acknowledgement: str | None
    """What they noted."""


class AcknowledgeIncidentRequest(Request):
    """Somebody has seen an incident."""

    note: ShortText = ""


class ListIncidentsResponse(Shape):
    """A page of incidents."""

    incidents: list[Incident]
    """In the order they were opened, unless the newest were asked for first."""
    next_token: str | None = None


class Event(Shape):
    """Something that happened to a fleet, a job or a node; never changed afterwards."""

    event_id: int
    time: datetime
    type: str
    message: str
    fleet_name: str | None
    training_job_name: str | None
    node_id: str | None
    detail: dict[str, Any]


class ListEventsResponse(Shape):
    """A page of events."""

    events: list[Event]
    """Oldest first, unless the newest were asked for first."""
    next_token: str | None = None


# Fleets and nodes ------------------------------------------------------------------------------------------------------------------------


class SparePolicy(Request):
    """How many spares are kept, from what the fleet has seen of failures and replacements."""

    probability: float = Field(ge=0.5, le=0.999999)
    """How probable it has to be that a spare is free when a failure comes."""


class GroupChange(Request):
    """Something of an Auto Scaling group that becomes another with its registration."""

    setting: Annotated[str, StringConstraints(max_length=512)]
    """In the words of Auto Scaling's API: `NewInstancesProtectedFromScaleIn`, `LifecycleHooks.everstep-termination`."""
    before: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """As text; absent where there is nothing."""
    after: Annotated[str, StringConstraints(max_length=1024)]
    reason: Value
    """Why it cannot stay as it is."""
    applies: Literal["Now", "Later"]
    """Now: CreateFleet makes it before it answers. Later: the fleet's loop does, from its first look at the group on."""


class CreateFleetRequest(Request):
    """An Auto Scaling group to be kept as a fleet."""

    fleet_name: Name
    auto_scaling_group_name: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    """It must carry the tag `everstep:fleet`, one Availability Zone and one launch template."""
    spare_count: int = Field(default=1, ge=0, le=MAX_NODE_COUNT)
    spare_policy: SparePolicy | None = None
    """Counts spares instead of SpareCount."""
    min_node_count: int = Field(default=0, ge=0, le=MAX_NODE_COUNT)
    """Nodes kept even when no job runs, spares not included."""
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """What one instance costs you; jobs and incidents are valued at it."""
    hold_failed_instances: bool = False
    """Keep instances that failed running for inspection instead of ending them, as long as that takes nobody's place in the group."""
    max_replacements_per_hour: int = Field(default=DEFAULT_REPLACEMENTS_PER_HOUR, ge=0, le=MAX_NODE_COUNT)
    """Nodes that may be taken out by Everstep's own verdicts and replaced within an hour; what AWS ends is not counted."""
    node_role_name: RoleName | None = None
    """Name of the IAM role that the group's instances run with: their agents join by it (STS). Without it they join with a join token."""
    allow_drills: bool = False
    """Let administrators break nodes of this fleet on purpose: StartDrill."""
    allow_commands: bool = False
    """Let those who may submit jobs run programs beside their ranks on nodes of this fleet: ExecuteCommand."""
    project: Name | None = None
    tags: Tags = Field(default_factory=dict)
    dry_run: bool = False
    """Check everything, change and create nothing, and answer what would be changed."""
    expected_changes: Annotated[list[GroupChange], Field(max_length=100)] | None = None
    """The Changes of a dry run, as it answered them, that somebody has agreed to: a ConflictException where anything else would be changed."""


class GroupCheck(Shape):
    """Something that an Auto Scaling group has to be by itself."""

    setting: str
    """In the words of Auto Scaling's API."""
    message: str
    """What is there, in a sentence."""


class UpdateFleetRequest(Request):
    """Figures to change; what is left out stays."""

    spare_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    """Ends a SparePolicy, unless one is given as well."""
    spare_policy: SparePolicy | None = None
    min_node_count: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    price_usd_per_hour: float | None = Field(default=None, ge=0.0001, le=MAX_PRICE_USD_PER_HOUR)
    """Jobs and incidents that have not ended are valued anew; what has ended keeps its figure."""
    hold_failed_instances: bool | None = None
    max_replacements_per_hour: int | None = Field(default=None, ge=0, le=MAX_NODE_COUNT)
    node_role_name: RoleName | None = None
    allow_drills: bool | None = None
    allow_commands: bool | None = None


class Fleet(Shape):
    """A registered Auto Scaling group, as wanted and as it is."""

    fleet_name: str
    auto_scaling_group_name: str
    project: str
    fleet_status: FleetStatus
    reason: str
    spare_count: int
    spare_policy: SparePolicy | None
    """Counts spares instead of SpareCount."""
    min_node_count: int
    hold_failed_instances: bool
    max_replacements_per_hour: int
    node_role_name: str | None
    """Absent: agents join with a join token alone."""
    allow_drills: bool
    allow_commands: bool
    max_node_count: int
    """The group's MaxSize."""
    desired_node_count: int
    node_count: int
    connected_node_count: int
    instance_type: str
    availability_zone: str
    price_usd_per_hour: float | None
    accounting_seconds: dict[str, float]
    """Of all its jobs, by bucket."""
    reliability: Reliability
    """Of all its jobs together."""
    incident_count: int
    """Of its jobs; drills are not counted."""
    lost_node_count: int
    """Nodes that its jobs have lost: that failed, or that AWS took. None that a person drained, or that a drill struck."""
    node_seconds: float
    """How long its nodes have worked for jobs, all together."""
    cost_usd: float | None
    """What that has cost; idle nodes and spares are not in it."""
    drift: list[str]
    """How the group differs from what Everstep needs; freezes destructive actions."""
    tags: dict[str, str]
    creation_time: datetime


class CreateFleetResponse(Shape):
    """The group is a fleet; or, of a dry run, what would become of it."""

    fleet_name: str
    fleet: Fleet | None = None
    """Absent after a dry run."""
    checks: list[GroupCheck]
    """What a group has to be by itself, all of it met: a group that is something else is refused, with the same sentences."""
    changes: list[GroupChange]
    """What was changed of the group, and what will be; of a dry run, what would be. Empty where it is as Everstep needs it."""


class ListFleetsResponse(Shape):
    """A page of fleets, by name."""

    fleets: list[Fleet]
    next_token: str | None = None


class NodeIncident(Shape):
    """A line of a node's history: it had its part in an incident."""

    incident_id: str
    """Of a job; `fleet-…` where no job had the node."""
    time: datetime
    cause: str
    """`node_unreachable`, `agent_lost` … or a fault's code with its number: `gpu_xid 79`."""
    evidence: str
    remedy: Remedy


class ReleaseNodeRequest(Request):
    """What becomes of a held node."""

    terminate: bool = False
    """End the instance; else it works again, and its history counts from now on."""


class NodeOperation(Request):
    """Something that a person wants done with a node."""

    reason: ShortText = ""
    """Why; told with the node, its job's incident and in the history."""


class DrainNodeRequest(NodeOperation):
    """A node that its job is to leave, and that is kept."""


class ReplaceNodeRequest(NodeOperation):
    """A node whose instance is to be ended, another one coming."""


class RebootNodeRequest(NodeOperation):
    """A node that is to be rebooted."""


class HoldNodeRequest(NodeOperation):
    """An idle node that is to be kept out of use."""


class ResetNodeSessionRequest(NodeOperation):
    """A node whose agent has lost its session."""


class RankMemory(Shape):
    """What the process of a rank has in memory; the processes that the rank started do not count."""

    rank: int
    resident_bytes: int
    """Pages that the process shares with others count in full."""
    peak_resident_bytes: int
    """The highest ResidentBytes since the process started."""


class NodeMemory(Shape):
    """Memory of a node and of its ranks, as its agent reported last."""

    used_bytes: int
    available_bytes: int
    """What can be allocated now without swapping."""
    total_bytes: int
    """What agent and ranks can have at most: of the machine, or of their cgroup where that has a lower limit."""
    cgroup_limit_bytes: int | None
    """Absent where the machine is the limit."""
    ranks: list[RankMemory]
    """Living ranks, in order."""


class Node(Shape):
    """An EC2 instance of a fleet and its agent."""

    node_id: str
    """The EC2 instance id."""
    fleet_name: str
    node_status: NodeState
    hold: Hold | None
    """Why it is held; all but unreachable ones wait for ReleaseNode."""
    request: NodeRequest | None
    """What a person asked for and is still to be done; ReleaseNode calls it off."""
    request_reason: str | None
    """Who asked, and why."""
    connected: bool
    warm: bool
    """Its ranks start without importing first; a spare that is not warm, yet or at all, is given to a job only when no other is there."""
    training_job_name: str | None
    address: str
    memory_bytes: int
    """What snapshots may take."""
    memory: NodeMemory | None
    """Absent while its agent is not connected, or has not measured it yet."""
    instance_type: str
    availability_zone: str
    failure_domain: str | None
    """The network node that its instance hangs on; absent while AWS has not told, which it does not for every instance type."""
    agent_version: str
    refused_message_count: int
    """Messages of its agent that were not decodable, too long or of another node, since this server started."""
    refused_session_count: int
    """Sessions of other agents and of ranks that its agent refused or closed for what they said, since the agent started. A few around a restart of
    ranks are stale ones; more are worth a look at its log."""
    exposure: str | None
    """What a job's code can get at on this node that is not the job's, in a sentence: the agent's files, the instance's metadata. Absent where ranks
    have a user of their own that is kept from both, and while the agent has not reported."""
    reason: str
    conditions: list[Condition]
    """What its agent reports as wrong now, with the node and with its job's work there. Empty while the agent is not connected."""
    incidents: list[NodeIncident]
    """Its history, oldest line first; listed by DescribeNode alone."""
    creation_time: datetime
    connection_time: datetime | None
    end_time: datetime | None


class ListNodesResponse(Shape):
    """All nodes asked for, oldest first."""

    nodes: list[Node]
    next_token: str | None = None


# Drills ----------------------------------------------------------------------------------------------------------------------------------


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


# Commands --------------------------------------------------------------------------------------------------------------------------------


class ExecuteCommandRequest(Request):
    """A program to be run beside a rank."""

    command: Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=64)]
    """The program and its arguments, as they are: no shell sees them. `{pid}` in one is the rank's process."""
    timeout_in_seconds: int = Field(default=30, ge=1, le=50)
    """It is ended after this long."""
    stdin: Annotated[str | None, StringConstraints(max_length=65_536), Field(json_schema_extra={"x-sensitive": True})] = None
    """What the program reads from its stdin, in UTF-8; nothing unless given. How long it was is told in the history, and no more."""
    client_request_token: Annotated[
        str | None, StringConstraints(min_length=1, max_length=64), Field(json_schema_extra={"x-idempotency-token": True})
    ] = None
    """The same command asked for again with the same token is not run again: it is answered again."""


class ExecuteCommandResponse(Shape):
    """What a program beside a rank has said, and how it ended."""

    training_job_name: str
    rank: int
    generation: int
    node_id: str
    exit_code: int | None
    """As a shell says it; absent where it did not end in time."""
    stdout: str
    stderr: str
    """The first 256 KiB of each."""
    is_output_cut: bool
    """There was more."""
    is_timed_out: bool


# Quotas ----------------------------------------------------------------------------------------------------------------------------------


AllowedName = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
AllowedNames = Annotated[list[AllowedName], Field(max_length=100)]
"""Each allows itself; one that ends with `*` allows all that begins like it."""


class PutProjectQuotaRequest(Request):
    """What the jobs of a project may have, and what its submitters may name. Administrators may name anything."""

    max_node_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Nodes of each fleet that all its jobs may hold together, without a limit unless said. Jobs beyond wait, and hold up nobody."""
    max_job_count: int | None = Field(default=None, ge=0, le=1_000_000)
    """Jobs that have not ended, in all fleets, without a limit unless said. CreateTrainingJob is refused beyond."""
    max_source_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """What all uploaded source archives may take together, without a limit unless said. Stored archives are never
    deleted; archives under way count for up to 26 hours. CreateSource, CompleteSource and PutSource are refused beyond."""
    max_priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The highest Priority that its submitters may set."""
    allowed_role_arns: AllowedNames = []
    """The roles that its submitters may name as RoleArn; none unless said. A final `*` allows all that begins like it, here and below."""
    allowed_secrets: AllowedNames = []
    """What its submitters may name in Secrets where a job has no RoleArn; none unless said."""
    allowed_data: AllowedNames = []
    """S3 URIs that its submitters may name in InputDataConfig where a job has no RoleArn, and directories; none unless said."""


class ProjectQuota(Shape):
    """What the jobs of a project may have."""

    project: str
    max_node_count: int | None
    max_job_count: int | None
    max_source_bytes: int | None
    max_priority: int
    allowed_role_arns: list[str]
    allowed_secrets: list[str]
    allowed_data: list[str]


class ListProjectQuotasResponse(Shape):
    """A page of quotas, by project."""

    quotas: list[ProjectQuota]
    next_token: str | None = None


# Tokens, sources, health -----------------------------------------------------------------------------------------------------------------


class CreateJoinTokenRequest(Request):
    """A token that each new instance of a fleet's group may use once."""

    fleet_name: Name
    """The fleet may be created later."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)


class CreateJoinTokenResponse(Shape):
    """A join token for a fleet's launch template."""

    join_token: Hidden
    """Shown once; the service keeps its digest alone."""
    token_id: str
    fleet_name: str
    expiration_time: datetime | None


class CreateTokenRequest(Request):
    """A token for a person or a program."""

    role: Literal["admin", "submitter", "viewer"]
    """viewer reads; submitter also creates and changes training jobs; admin does everything, in every project."""
    project: Name | None = None
    """The only project that it opens; every project unless said. An admin has none."""
    description: ShortText = ""
    """Whose it is or what for; shown in lists."""
    expires_in_seconds: int | None = Field(default=None, ge=60, le=366 * 86_400)
    """It does not expire unless said."""


class Token(Shape):
    """A token as it is listed: everything but the secret."""

    token_id: str
    kind: Literal["user", "join"]
    """user: of a person or a program. join: lets instances of a fleet become its nodes."""
    role: Literal["admin", "submitter", "viewer", "agent"]
    project: str | None
    """Absent: every project."""
    fleet_name: str | None
    """Of a join token."""
    description: str
    creation_time: datetime
    expiration_time: datetime | None
    revocation_time: datetime | None


class CreateTokenResponse(Shape):
    """A new token."""

    secret: Hidden
    """What is sent as `Authorization: Bearer …`. Shown once; the service keeps its digest alone."""
    token: Token


class ListTokensResponse(Shape):
    """A page of tokens, oldest first."""

    tokens: list[Token]
    next_token: str | None = None


class GetCallerIdentityResponse(Shape):
    """Who is calling, and as what."""

    token_id: str
    role: Literal["admin", "submitter", "viewer"]
    project: str | None
    """Absent: every project."""
    description: str
    creation_time: datetime
    expiration_time: datetime | None
    server_version: str
    server_time: datetime
    """By the service's clock."""


class CreateSourceRequest(Request):
    """An archive that is about to be stored."""

    source_id: Sha256
    """The SHA-256 of the archive, a gzipped tar."""
    bytes: int = Field(ge=0, le=2**40)
    """Its length."""


class SourceUpload(Shape):
    """Where an archive is to be put, without a token: `PUT Url` with these headers and the archive as its body."""

    url: Hidden
    """Whoever has it may put this very archive there, and no other: checksum and length are signed."""
    headers: dict[str, str]
    expiration_time: datetime
    """After it CreateSource gives another address."""


class CreateSourceResponse(Shape):
    """Whether a source is there already, and where it is to be put if not."""

    source_id: Sha256
    is_stored: bool
    """It was checked and stored before: there is nothing to do."""
    upload: SourceUpload | None
    """Put it there, then CompleteSource. Absent where it is stored, or where the service's store takes nothing from outside: then PutSource."""


class PutSourceResponse(Shape):
    """A source archive that was checked and stored."""

    source_id: Sha256
    bytes: int
    file_count: int


class ServiceCondition(Shape):
    """Something about the service that needs a person."""

    type: Literal["disk_full"]
    message: str
    """What is wrong, where, and with which figures."""
    hint: str
    """What to do."""
    directory: str | None
    """Absent where the disk belongs to a database on another machine."""
    free_bytes: int | None
    """Absent where it cannot be read from here."""
    duration_seconds: float


class HealthResponse(Shape):
    """The server answers."""

    status: Literal["ok", "degraded"]
    """degraded: the server answers, and one of Conditions needs a person."""
    version: str
    conditions: list[ServiceCondition]
    """Empty while all is well; a condition ends by itself once its cause is gone."""
