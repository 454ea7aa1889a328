"""API models: training jobs, their configuration and status.

The module has more than 500 lines. It is not divided, because it contains little code: half of the lines are the
docstrings of fields, from which the API's documentation is generated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import (
    MAX_NODE_COUNT,
    MAX_PRIORITY,
    MAX_RUNTIME_SECONDS,
    MAX_STORE_PATIENCE_SECONDS,
    MAX_TRASH_HOURS,
    MAX_WHOLE_NUMBER,
    MIN_CHECKPOINT_AGE_SECONDS,
    MIN_CHECKPOINT_OVERHEAD,
    MIN_COST_USD,
    AbsolutePath,
    ArgumentWord,
    CapacityWait,
    Changes,
    ChannelName,
    Environment,
    FilePattern,
    HyperParameterName,
    ModuleName,
    Name,
    OfRun,
    Request,
    RoleArn,
    S3Uri,
    SecretReference,
    Sha256,
    Shape,
    ShortText,
    StoreWait,
    Tags,
    Value,
    VariableName,
)
from control_plane.api.schemas.duties import Duty
from control_plane.api.schemas.plans import TrainingJobPlan
from control_plane.api.schemas.results import UnstoredOutput
from control_plane.core.checkpoints import DEFAULT_TRASH_HOURS
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import (
    DEFAULT_PATIENCE_SECONDS,
    DEFAULT_REHEARSAL_STEP,
    DEFAULT_REHEARSED_STEPS,
    DEFAULT_REPEATED_MINUTES,
)
from control_plane.core.parity import MAX_GROUP_SIZE, MIN_GROUP_SIZE
from control_plane.core.states import JobState, ProtectionState, SecondaryStatus, TrainingJobStatus
from everstep.protocol.limits import MAX_CONCURRENT_UPLOADS, MAX_RANKS_PER_NODE
from everstep.protocol.rehearsals import RehearsalVerdict


class SourceConfig(Request):
    """The user's code."""

    source_id: Sha256
    """The SHA-256 of the archive, as PutSource and CreateSource return it."""


class ProtectionConfig(Request):
    """Protection of each shard in the memory of nodes, and the limit for the slowdown by snapshots."""

    copies: int = Field(default=2, ge=1, le=8)
    """Nodes that hold each shard, the owner included.

    With 1, the job survives lost processes but no lost node.

    For a job of one node, and for a job with ParityGroupSize, the default is 1 instead of 2.
    """
    parity_group_size: int | None = Field(default=None, ge=MIN_GROUP_SIZE, le=MAX_GROUP_SIZE)
    """Number of nodes in each group that protects its shards by parity, which needs less memory than copies.

    The default is no parity.

    Each node keeps its own shards, and the XOR of parts of the shards of the other nodes in its group. The job survives
    the loss of any one node per group. Groups of g nodes need g ÷ (2 × (g - 1)) of the memory of two copies. The last
    group also has the remaining nodes, if NodeCount is not a multiple of g.

    Copies must be 1, and MinNodeCount at least this number. Cannot change after creation.
    """
    max_slowdown: float | None = Field(default=None, ge=0.0001, le=1)
    """Share of the mean iteration time that snapshots may add, 0.01 meaning 1 %.

    If snapshots cost more, Everstep takes them less often than every step. The default is 0.01. On a local cluster the
    default is 1, because all nodes share the cores of one machine and the measured cost is unreliable.
    """


class CheckpointConfig(Request):
    """Rules by which Everstep writes checkpoints to S3, and keeps or deletes them.

    EverySteps, IntervalInSeconds and MaxOverhead each make checkpoints due. With or without them, Everstep also writes
    a checkpoint when the job completes, stops or pauses, when AWS announces the end of a node, and for each
    CreateCheckpoint.
    """

    every_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """Steps between two checkpoints in S3. 0 disables checkpoints by number of steps."""
    interval_in_seconds: int | None = Field(default=None, ge=1, le=MAX_RUNTIME_SECONDS)
    """Seconds between the beginnings of two checkpoints. The first commit after that time becomes a checkpoint.

    If EverySteps is set too, both rules make checkpoints due.
    """
    max_overhead: float | None = Field(default=None, ge=MIN_CHECKPOINT_OVERHEAD, le=1)
    """Share of training time that checkpoints may add, for example 0.01 for 1 %.

    Everstep computes the interval from the measured duration of uploads and from the training time that they cost.
    Cannot be set together with EverySteps or IntervalInSeconds.
    """
    max_upload_bytes_per_second: int | None = Field(default=None, ge=1, le=MAX_WHOLE_NUMBER)
    """Limit of the mean rate at which one node uploads checkpoints. Needs MaxOverhead.

    Everstep makes fewer checkpoints to meet the limit. A single upload still uses the full bandwidth.
    """
    on_notice: bool = True
    """Whether a spot or maintenance notice makes a checkpoint due while no other node can replace the affected node."""
    s3_uri: S3Uri | None = None
    """Prefix for checkpoints. The default is a prefix in the service's bucket."""
    third_slot: bool = False
    """Whether to reserve a third memory slot per shard.

    With a third slot, a snapshot never waits for the upload of an earlier snapshot.
    """
    max_uploads_in_flight: int | None = Field(default=None, ge=1, le=MAX_CONCURRENT_UPLOADS)
    """Maximum number of checkpoints that are uploaded at the same time. The default is 1.

    With a value above 1, a due checkpoint need not wait for the end of an earlier upload. Such a value needs ThirdSlot,
    and reserves one more memory slot per shard for each further upload. While the maximum number of uploads runs, the
    newest due checkpoint replaces the checkpoint that waits. Cannot change after creation.
    """
    max_count: int | None = Field(default=None, ge=1, le=100_000)
    """Number of newest checkpoints to keep, in addition to pinned ones. The default keeps all.

    Only checkpoints from which the job can be restored count. The others are deleted once a later one is verified.
    Everstep deletes a checkpoint only after it has verified a later one by reading it back.
    """
    keep_every_steps: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Keep the first checkpoint at or after each multiple of this number of steps.

    Neither MaxCount nor MaxAgeInSeconds applies to these checkpoints.
    """
    max_age_in_seconds: int | None = Field(default=None, ge=MIN_CHECKPOINT_AGE_SECONDS, le=3_660 * 86_400)
    """Age at which checkpoints are deleted.

    At any age, Everstep keeps the newest checkpoint, the checkpoint from which the job would be restored, pinned
    checkpoints, and the checkpoints that KeepEverySteps selects.
    """
    trash_hours: int = Field(default=DEFAULT_TRASH_HOURS, ge=0, le=MAX_TRASH_HOURS)
    """Hours for which a deleted checkpoint stays in the trash, from which UndeleteCheckpoint returns it.

    The objects stay in S3 and cost storage. 0 deletes at once. A change applies to later deletions.
    """
    store_patience_seconds: int | None = Field(default=None, ge=0, le=MAX_STORE_PATIENCE_SECONDS)
    """Seconds for which a job keeps its nodes while S3, IAM or KMS prevents a restore. The default is 1800.

    Then the job returns its nodes, and restores the same step later. A job keeps its nodes in any case while only their
    memory has committed steps.
    """


class InitialCheckpoint(Request):
    """A complete checkpoint of another job. Exactly one of TrainingJobName and RunId must be set in a request."""

    training_job_name: Name | None = None
    """The job that made the checkpoint."""
    run_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = None
    """The run that made the checkpoint."""
    step: int | None = Field(default=None, ge=1, le=MAX_WHOLE_NUMBER)
    """Step of the checkpoint. The default is the newest complete checkpoint at the time of the request."""


class S3DataSource(Request):
    """Input objects in S3."""

    s3_uri: S3Uri
    """One object, or a prefix. Nodes keep the folder structure below a prefix.

    Without RoleArn the nodes read the objects with their own permissions.
    """


class FileSystemDataSource(Request):
    """A directory that already exists on every node: a shared file system, or a part of the image."""

    directory_path: AbsolutePath
    """Absolute path of the directory. The mount options decide whether ranks may write to the directory."""


class DataSource(Request):
    """The location of an input channel's data. Exactly one of S3DataSource and FileSystemDataSource must be set."""

    s3_data_source: S3DataSource | None = None
    """Each node fetches and verifies the objects before its ranks start.

    The files are read-only. The node keeps them for later jobs while its disk has enough space.
    """
    file_system_data_source: FileSystemDataSource | None = None


class Channel(Request):
    """One named input of a job."""

    channel_name: ChannelName
    """Name of the channel.

    Ranks find its directory in SM_CHANNEL_<NAME> and with `everstep.training.input_dir("name")`.
    """
    data_source: DataSource


class OutputDataConfig(Request):
    """The job's outputs, and their location in S3."""

    s3_output_path: S3Uri | None = None
    """Prefix for outputs.

    Everstep appends the job and the run. The default is a prefix in the service's bucket.
    """
    keep: Annotated[list[FilePattern], Field(max_length=50)] | None = None
    """Files that ranks write into the source directory and that become outputs of the node's first rank.

    A pattern is a file, a folder, or has one `*` for any characters, also `/`: `log.txt`, `runs`, `*.pt`. Each launch
    begins with the source as it was uploaded.
    """


class StoppingCondition(Request):
    """Limits at which a job is stopped."""

    max_runtime_in_seconds: int | None = Field(default=None, ge=1, le=MAX_RUNTIME_SECONDS)
    """Limit of the time since the job's first start. Time without nodes after a pause does not count."""
    max_pending_time_in_seconds: int | None = Field(default=None, ge=1, le=MAX_RUNTIME_SECONDS)
    """Limit of the time from the job's creation until it gets its first nodes.

    Independently of this limit, a job that cannot get all of its nodes releases the nodes that it already holds.
    """
    max_cost_usd: float | None = Field(default=None, ge=MIN_COST_USD)
    """Limit of the cost of the job's nodes, at the fleet's price.

    At the limit, the job stops as after StopTrainingJob. The fleet must have a price.
    """


class RetryStrategy(Request):
    """Limits after which Everstep stops retrying a failing job, or asks a person first."""

    max_attempts: int = Field(default=3, ge=1, le=30)
    """Number of times that the same failure may occur at the same step.

    At the limit, Everstep retries once without the node of the failing rank, then once from an older state. Everstep
    skips a retry that is impossible. If all retries fail, the job fails.
    """
    max_repeated_minutes: int = Field(default=DEFAULT_REPEATED_MINUTES, ge=0, le=MAX_RUNTIME_SECONDS // 60)
    """Longest training time, in minutes, that the job repeats without a person's consent.

    If the newest step that the job can restore lies further before its newest committed step, the job holds its nodes
    and waits for AcceptLoss, or until a lost node returns.
    """
    on_total_loss: Literal["Wait", "Restart"] = "Wait"
    """Restart: the job never waits for AcceptLoss, and continues from the newest step that it can restore, or step 0.
    """


class RehearsalConfig(Request):
    """The rehearsal of a job's resume, which proves that a restart repeats the job's steps bit for bit.

    In a rehearsal, a second process of each rank starts from a recent step, repeats the following steps, and compares
    them with the steps that the job made.
    """

    mode: Literal["Auto", "On", "Off"] = "Auto"
    """Auto: if all rehearsals together cost at most 0.1 % of the expected run. On: at any cost. Off: never.

    Auto never rehearses a job whose expected run is shorter than 3 minutes. On a local cluster, the cost has no limit.
    A job rehearses soon after its start, after the first pass over its data ends, and after the set of its modules,
    parameters or parameter groups changes. It does so at most three times, and not after a difference.
    RehearseTrainingJob requests further rehearsals.
    """
    on_difference: Literal["Continue", "Stop"] = "Continue"
    """Reaction to a difference. Stop: the job stops as after StopTrainingJob."""
    at_step: int = Field(default=DEFAULT_REHEARSAL_STEP, ge=1, le=1_000_000_000)
    """The first step that must be committed before the first rehearsal."""
    steps: int = Field(default=DEFAULT_REHEARSED_STEPS, ge=1, le=100)
    """Number of steps that a rehearsal repeats."""


class ElasticConfig(Request):
    """Limits between which the number of nodes of a job may change while it trains.

    The number of ranks per node stays the same. Without ElasticConfig, a job keeps its number of nodes.
    """

    min_node_count: int | None = Field(default=None, ge=1, le=MAX_NODE_COUNT)
    """Smallest number of nodes with which the job starts, resumes and continues while the fleet has no further nodes.

    The default is NodeCount: the job waits until it has all nodes. When nodes arrive, the job stops at an agreed step
    and continues with them. A preemptible job also shrinks to this number for a job of higher priority.
    """
    max_node_count: int | None = Field(default=None, ge=1, le=MAX_NODE_COUNT)
    """Number of nodes up to which the job grows. The default is NodeCount.

    The job grows while no other job of the fleet waits for nodes and the quota of its project permits it. When another
    job can start with the additional nodes, all ranks stop at the same step, and the job returns these nodes.
    """
    patience_in_seconds: int = Field(default=DEFAULT_PATIENCE_SECONDS, ge=0, le=MAX_RUNTIME_SECONDS)
    """Seconds for which the job waits for missing nodes before it starts or continues with fewer nodes.

    A running job that can grow, but not to MaxNodeCount, also waits this time before it grows with the nodes that are
    ready.
    """


class CreateTrainingJobRequest(Request):
    """A training job to run."""

    training_job_name: Name
    """Name of the job, unique within its project."""
    client_request_token: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, json_schema_extra={"x-idempotency-token": True}
    )
    """Identifies the request. A repeated request with the same token returns the existing job.

    The SDK generates a token.
    """
    fleet_name: Name | None = None
    """The fleet in which the job runs. Optional if exactly one fleet exists."""
    alternative_fleet_names: Annotated[list[Name], Field(max_length=7)] = Field(default_factory=list)
    """Fleets in other subnets, zones or with other instance types.

    If AWS has no capacity for the whole job, the job moves to the next fleet of the list. From the last fleet of the
    list, it moves to FleetName. It moves only before its first start.
    """
    source: SourceConfig
    entry_point: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Path of a Python file in the source archive. A request has either EntryPoint or Module."""
    module: ModuleName | None = None
    """Module of the source archive that every rank runs as `python -m` does, such as `package.train`."""
    requirements: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Path of a requirements.txt in the source archive.

    Each node installs the missing packages once, separately from its own packages. Ranks import from the installed
    packages first.
    """
    hyper_parameters: Annotated[dict[HyperParameterName, Value], Field(max_length=100)] = Field(default_factory=dict)
    """Parameters for the script, passed in EVERSTEP_HYPERPARAMETERS (JSON) and as `--key=value` arguments."""
    arguments: Annotated[list[ArgumentWord], Field(max_length=200)] = Field(default_factory=list)
    """Further arguments of the script's command line, unchanged and in order, after those of HyperParameters."""
    environment: Environment = Field(default_factory=dict)
    """Environment variables of the ranks."""
    secrets: Annotated[dict[VariableName, SecretReference], Field(max_length=100)] = Field(default_factory=dict)
    """Environment variables whose values are stored in AWS, each with the location of its value.

    A location is `secretsmanager:NAME`, `ssm:NAME` or an ARN of either service.

    Each node reads the values when it starts its ranks. Everstep neither stores, shows nor logs them.
    """
    role_arn: RoleArn | None = None
    """IAM role of the job.

    Ranks receive the role's short-lived credentials, which are renewed before they expire.

    Nodes read Secrets and InputDataConfig with the role, too, and must be allowed to assume it. Without a role, ranks
    have no AWS credentials.
    """
    node_count: int = Field(ge=1, le=MAX_NODE_COUNT)
    """Number of nodes on which the job trains."""
    ranks_per_node: int = Field(default=1, ge=1, le=MAX_RANKS_PER_NODE)
    """Number of processes on each node that train, usually one per GPU."""
    protection: ProtectionConfig | None = None
    """How snapshots protect the job. The default is two copies, or one copy for a job of one node."""
    checkpoint_config: CheckpointConfig = Field(default_factory=CheckpointConfig)
    initial_checkpoint: InitialCheckpoint | None = None
    """Checkpoint of another job from which this job starts. The default is the script's own initial state.

    The other job must belong to a project that the caller may see. It may have another number of ranks. Keep the
    checkpoint until this job has stored one of its own. PinCheckpoint protects the checkpoint from the other job's
    retention limits.
    """
    input_data_config: Annotated[list[Channel], Field(max_length=20)] = Field(default_factory=list)
    """Inputs that each node provides before its ranks start.

    If an input is missing, the job fails before any rank starts.
    """
    output_data_config: OutputDataConfig = Field(default_factory=OutputDataConfig)
    stopping_condition: StoppingCondition = Field(default_factory=StoppingCondition)
    retry_strategy: RetryStrategy = Field(default_factory=RetryStrategy)
    elastic_config: ElasticConfig = Field(default_factory=ElasticConfig)
    rehearsal: RehearsalConfig = Field(default_factory=RehearsalConfig)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Jobs with a higher priority start first. Among jobs with equal priority, the oldest starts first."""
    preemptible: bool = False
    """Whether a job of higher priority that needs the nodes may pause this job.

    At a pause, all ranks stop at one agreed step, which is stored in S3. The job resumes automatically.
    """
    project: Name | None = None
    """The project of the job. The default is the token's project, or `default`.

    Only a token without a project may choose another project.
    """
    tags: Tags = Field(default_factory=dict)
    """Your own names and values, by which lists of jobs can be filtered."""
    dry_run: bool = False
    """Whether to only check the request and return the plan, without creating a job."""


class AcceptLossRequest(Request):
    """Lets a job repeat training from a step."""

    from_step: int = Field(ge=0, le=MAX_WHOLE_NUMBER)
    """The BaseStep of the job's RepeatChoice."""


class RepeatChoice(Shape):
    """The choice for which a job waits: repeat much training (AcceptLoss), or wait for nodes that may return."""

    base_step: int
    """The newest step that every rank can restore now. 0: the script's own initial state."""
    newest_step: int
    """The newest committed step, which is out of reach."""
    repeated_seconds: float | None
    """Training time from BaseStep to NewestStep. Absent if it is unknown."""
    start_time: datetime
    """When the job began to wait for this choice."""
    ended_node_ids: list[str]
    """Nodes of the last launch whose instances have ended, as AWS reports."""
    silent_node_ids: list[str]
    """Nodes of the last launch whose agents are silent. Their memory may still hold NewestStep."""
    damaged_steps: list[int]
    """Newer checkpoints that are damaged."""
    unknown_steps: list[int]
    """Newer checkpoints that S3 lists and the job cannot use: of another history, in the trash, or not in the database.
    """
    is_store_listed: bool
    """Whether S3 could be listed. If not, S3 may have newer checkpoints."""
    is_total_loss: bool
    """Whether AWS reports that all nodes of the last launch have ended, and S3 lists no checkpoint."""


class TakeOverTrainingJobRequest(Request):
    """Puts a job under the control of a person."""

    reason: ShortText = ""


class CreateTrainingJobResponse(Shape):
    """The new job or, after a dry run, its plan."""

    training_job_name: str
    run_id: str | None = None
    """Id of the job's run. Absent after a dry run."""
    training_job_status: TrainingJobStatus | None = None
    """Status of the new job. Absent after a dry run."""
    plan: TrainingJobPlan | None = None
    """Forecast for the job. Only after a dry run."""


class JobFields(OfRun):
    """The fields of a training job that its description and an entry of a list share."""

    fleet_name: str
    """The fleet in which the job runs or waits."""
    project: str
    training_job_status: TrainingJobStatus
    secondary_status: SecondaryStatus
    final_checkpoint_step: int | None
    """Step of the newest checkpoint at the end of a job whose ranks all ended with success; 0 without a checkpoint.

    If the step lies before Boundary, a completed job has the SecondaryStatus CompletedWithOlderCheckpoint. Absent
    before the end, and for a job that makes no checkpoint at its end.
    """
    reason: str
    """Reason for the job's state, for example the event that the job waits for, or the cause of its end."""
    node_count: int
    generation_node_count: int
    """Number of nodes of the current generation.

    With ElasticConfig, it is below NodeCount while the fleet lacks nodes, and can be above NodeCount after the job has
    grown. Equals NodeCount before the first generation.
    """
    priority: int
    creation_time: datetime
    last_modified_time: datetime
    """Time when the job last changed its state, or when a user last changed the job."""
    training_start_time: datetime | None
    training_end_time: datetime | None
    purge_time: datetime | None
    """Earliest time at which Everstep deletes a job in the trash for good, with its objects. Absent outside of it."""
    generation: int
    """Number of the current launch of all ranks; 0 before the first launch."""
    committed_step: int
    """The newest step that all holders in view have verified; -1 before the first such step."""
    boundary: int
    """Number of steps that the ranks of the current generation have finished; -1 before they start."""
    max_boundary: int
    """The highest Boundary of any generation: the largest number of steps that the ranks have ever finished."""
    target_step: int | None
    """The step at which the script ends, as passed to `session.batches(until_step=…)`.

    Absent if the script passes none.
    """
    estimated_remaining_seconds: float | None
    """Time until the ranks reach TargetStep at the job's mean pace, if no failure occurs and the job does not wait.

    Absent if the pace or the target is unknown, and once the job has ended.
    """
    cost_usd: float | None
    """Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price."""


class TrainingJobSummary(JobFields):
    """A training job in a list of jobs, with fewer fields than DescribeTrainingJob returns."""

    ettr_ratio: float | None
    """Effective training time ratio, as in Reliability. Absent before the job has started."""
    protection_state: ProtectionState | None = None
    """Protection of the job's state, as in DescribeProtection. Only in lists.

    Absent while no agent holds the job's state: before the first launch, while the job is paused, and after its end.
    """
    survives_node_loss: bool | None = None
    """Whether memory keeps the job's state after the loss of any one node. Only in lists.

    Absent whenever ProtectionState is absent.
    """
    assigned_node_count: int | None = None
    """AssignedNodeCount of the job, as in TrainingJob. Only in lists."""
    healthy_node_count: int | None = None
    """Number of the job's nodes that are connected and report no fault of their own.

    Only in lists.
    """
    incident_count: int | None = None
    """Number of the job's incidents. Only in lists."""
    open_incident_count: int | None = None
    """Number of incidents from which the job has not recovered yet. Only in lists."""
    duty: Duty | None = None
    """What a person has to do for the job, as in TrainingJob. Only in lists."""


class ListTrainingJobsResponse(Shape):
    """A page of jobs, newest first."""

    training_job_summaries: list[TrainingJobSummary]
    """The jobs of the page. An incremental response omits the jobs whose entry did not change."""
    changes: Changes | None = None
    """Only with ChangesSince. Its field Removed contains the RunIds of jobs that left the page."""
    next_token: str | None = None


class DeleteTrainingJobResponse(OfRun):
    """The records and objects that were deleted, or after a dry run, that a real call would delete."""

    is_deleted: bool
    """Whether the job's records were deleted. False after a dry run, while objects remain, and in the trash."""
    purge_time: datetime | None
    """Earliest time at which Everstep deletes the job and its objects for good. Absent outside of the trash."""
    generation_count: int
    checkpoint_count: int
    incident_count: int
    node_seconds: float
    """Total time that nodes worked for the deleted job. The fleet's totals no longer include this time."""
    cost_usd: float | None
    object_count: int
    """Objects in S3 that this call deleted. 0 for a job that the call moved to the trash.

    After a dry run: objects that a call with DeleteObjects would delete.
    """
    object_bytes: int
    has_more_objects: bool
    """Whether objects of the job remain, because each call deletes or trashes a limited number.

    If true, repeat the same call to continue.
    """
    s3_uris: list[str]
    """S3 locations of the job's checkpoints, logs and outputs, below which the objects are."""


class SecondaryStatusTransition(Shape):
    """A period that the job spent in one state."""

    status: SecondaryStatus
    """The status in SageMaker's terms, derived from the state.

    While ranks run without a new step, the status is Starting, or Restarting once the job has made steps.
    """
    state: JobState
    """Everstep's own state of the job, which is more detailed than Status."""
    start_time: datetime
    end_time: datetime | None
    status_message: str


class Reliability(Shape):
    """Share of time spent on training, and frequency and duration of interruptions."""

    ettr_ratio: float | None
    """Effective training time ratio: training time ÷ time outside the buckets queue, provision and paused.

    The job has no nodes during these three accounting buckets. Absent before the first start.
    """
    ettr_with_queue_ratio: float | None
    """Training time ÷ total time since the job was created, including time in the queue and paused time."""
    mttf_seconds: float | None
    """Mean time to failure: seconds in the accounting buckets train and stall ÷ number of failures.

    Absent before the first failure.

    Drills, AWS's notices and users' requests do not count as failures.
    """
    mttr_seconds: float | None
    """Mean time to recovery: from the failure until training reaches the step it was at before.

    Computed over failures whose incidents are closed.
    """
    lost_steps: int
    """Steps that training had to repeat."""
    incident_cost_usd: float | None
    """Total cost of the incidents: the CostUsd of all incidents, added up. Absent if the fleet has no price."""


class Condition(Shape):
    """A current problem of a node, of the service or of the job. It is no longer listed once it is resolved."""

    type: str
    """The fault code, as listed in docs/reference/metrics.md: disk_full, memory_low, gpu_xid … Or ResumeDiffers, or
    ResumeUnproven.
    """
    message: str
    """A sentence that includes the measured values."""
    node_id: str | None
    """The node with the problem. Absent if the problem is not in a node."""


class CheckpointUpload(Shape):
    """The progress of the checkpoint that is being uploaded, as the agents last reported it."""

    step: int
    stored_bytes: int
    """Bytes that S3 has stored, of all shards whose upload has begun."""
    total_bytes: int
    """Total size in bytes of all shards whose upload has begun."""
    slowest_rank: int
    """The rank of whose shard S3 has stored the smallest part."""
    slowest_object: str | None
    """The S3 URI of the slowest rank's object. Absent until the upload of this object begins."""
    slowest_stored_bytes: int
    """Bytes of the slowest rank's shard that S3 has stored."""
    slowest_total_bytes: int
    """Size of the slowest rank's shard in bytes."""


class CheckpointActivity(Shape):
    """The checkpoints of a job: when the next is due, the running upload, and figures of the last upload."""

    policy: str
    """A sentence about the rules that make checkpoints due."""
    next_step: int | None
    """The first committed step at or after this step becomes a checkpoint. Absent without EverySteps."""
    next_time: datetime | None
    """The first commit after this time becomes a checkpoint. Absent if the job has no interval."""
    interval_seconds: float | None
    """The current interval: IntervalInSeconds, or the interval that Everstep computes from MaxOverhead.

    Absent if the job has no interval, or until the first upload is measured.
    """
    last_upload_seconds: float | None
    """Duration of the last checkpoint's upload, all shards together. Absent before the first upload."""
    last_upload_cost_seconds: float | None
    """Training time that the last upload cost, estimated from how much it slowed training down."""
    upload: CheckpointUpload | None
    """The checkpoint that is being uploaded. Absent if no upload runs."""


class RehearsalLine(Shape):
    """A line of the script that belongs to a difference."""

    name: str
    """The variable that the line changes, or the value that it fetches, sets or logs."""
    file: str
    line: int


class RehearsalDifference(Shape):
    """The first difference between a job's steps and their repetition."""

    step: int
    """The repeated step with the difference. If it is the step of the restart, the restored state itself differs."""
    kind: str
    """What differs, for example the state, the data or the loss."""
    source: str
    """The likely cause."""
    names: list[str]
    """The first tensors, generators or values that differ."""
    unkept: list[str]
    """Variables of the script that differed before, as `file:function.name`."""
    lines: list[RehearsalLine]
    """Lines of the script that change these variables, or use the values that differ. Empty if none is found."""


class RehearsalResult(Shape):
    """The newest result of a rehearsal."""

    verdict: RehearsalVerdict
    """Proven: a restart repeats the job's steps bit for bit. Differs: it does not.

    Unproven: it does, and loses values that the script changes during training, such as a counter. Unstable: two
    repetitions differ from each other, so the computation itself is not deterministic. Refused: a rank could not
    rehearse.
    """
    step: int
    """The step from which the ranks restarted."""
    steps: int
    """Number of repeated steps."""
    seconds: float
    """The longest time for which a rank did not train."""
    time: datetime
    rank: int | None
    """The rank with the first difference or lost value, or the first rank that could not rehearse.

    Absent if the verdict is Proven, or if no rank began to rehearse.
    """
    difference: RehearsalDifference | None
    message: str | None
    """The difference, or the reason of the refusal."""
    advice: str | None
    """What to change in the script."""


class TrainingJob(JobFields):
    """A training job: its configuration, its state, its progress and its cost."""

    alternative_fleet_names: list[str]
    """The other fleets in which the job may start."""
    secondary_status_transitions: list[SecondaryStatusTransition]
    unstored_outputs: list[UnstoredOutput]
    """Outputs of the ranks that are not in S3, at most 50."""
    unstored_output_count: int
    """Number of outputs that are not in S3, including those that UnstoredOutputs does not name."""
    duty: Duty
    """What a person has to do for the job."""
    repeat_choice: RepeatChoice | None
    """Absent unless the job waits for AcceptLoss."""
    capacity_wait: CapacityWait | None
    """The wait for instances that AWS does not launch. Absent if the job waits for none."""
    store_wait: StoreWait | None
    """The wait for S3, IAM or KMS, which prevent a restore. Absent without such a wait."""
    failure_reason: str | None
    """Why the job failed. Absent if the job has not failed."""
    conditions: list[Condition]
    """Current problems of the job's nodes and of the service.

    Conditions inform people. A condition alone does not make Everstep change the job. Empty once the job has ended.
    """
    source: SourceConfig
    entry_point: str
    """Path of the Python file that every rank runs, in the source archive."""
    module: str | None
    """The request's Module. Absent if the request named EntryPoint instead."""
    requirements: str | None
    hyper_parameters: dict[str, str]
    arguments: list[str]
    environment: Annotated[dict[str, str], Field(json_schema_extra={"x-sensitive": True})]
    secrets: dict[str, str]
    """The location in AWS of each environment variable's value. The values are never shown."""
    role_arn: str | None
    ranks_per_node: int
    protection: ProtectionConfig
    checkpoint_config: CheckpointConfig
    checkpoint_activity: CheckpointActivity
    initial_checkpoint: InitialCheckpoint | None
    """The checkpoint of another job from which this job started or will start.

    Everstep sets all its fields. Absent if the job starts from the script's own initial state.
    """
    input_data_config: list[Channel]
    output_data_config: OutputDataConfig
    stopping_condition: StoppingCondition
    retry_strategy: RetryStrategy
    elastic_config: ElasticConfig
    rehearsal: RehearsalConfig
    rehearsal_result: RehearsalResult | None
    """The newest result of a rehearsal. Absent before the first."""
    is_rehearsal_pending: bool
    """Whether a rehearsal was requested, by a person or by Everstep, and has no result yet."""
    preemptible: bool
    queue_position: int | None
    """Position in the fleet's queue, from 1. Absent while the job is not in the queue."""
    queued_behind: list[str]
    """Names of the jobs ahead of this job in the queue."""
    tags: dict[str, str]
    stop_requested_time: datetime | None
    pause_requested_time: datetime | None
    """Time when a person paused the job. Absent after the job was resumed."""
    revision: int
    """Revision of the job's configuration: 1 at creation, plus one with each update."""
    observed_revision: int | None
    """The revision of the configuration that the newest generation uses. Absent before the first generation."""
    taken_over_time: datetime | None
    """Time when a person took control of the job.

    Everstep only observes the job until the hand-back. Absent if Everstep controls the job.
    """
    taken_over_by: str | None
    base_step: int
    """The step from which the current generation resumed."""
    healthy_node_count: int
    """Number of the job's nodes that are connected and report no fault of their own."""
    assigned_node_count: int
    """Number of nodes assigned to the job.

    After the job's end, it is the number of nodes that still hold resources of the job. The job can be deleted once the
    number is 0.
    """
    node_ids: list[str]
    """The job's nodes in the order of GROUP_RANK. Empty while the job has no nodes."""
    coordinator_node_id: str | None
    incident_count: int
    open_incident_count: int
    """Incidents from which the job has not recovered yet."""
    open_drill_id: str | None
    """Id of the drill of this job that has no outcome yet. Absent without such a drill."""
    accounting_seconds: dict[str, float]
    """The time from CreationTime to AccountedUntil, by accounting bucket.

    The buckets add up to that time exactly, to the microsecond.
    """
    accounted_until: datetime | None
    """Time up to which AccountingSeconds counts. For an ended job, this is the time of its end."""
    reliability: Reliability
    node_seconds: float
    """Total time that nodes have worked for the job."""


class TrainingJobNode(Shape):
    """A period in which a node worked for a job."""

    node_id: str
    start_time: datetime
    end_time: datetime | None
    """End of the period. Absent while the node works for the job. A node may have several periods."""


class TimeSpan(Shape):
    """A period in which a job did one thing. Periods have no gaps between them."""

    bucket: Bucket
    """What the job did, as in AccountingSeconds. Time with missing nodes is one period in the bucket `train`."""
    start_time: datetime
    end_time: datetime | None
    """End of the period. Absent for the newest period of a job that has not ended."""
    missing_node_count: int
    """Number of nodes that the job lacked for its NodeCount. Their share of the time counts as `shortage`."""


class ListTimeSpansResponse(Shape):
    """A page of the periods of a job's life, oldest first."""

    time_spans: list[TimeSpan]
    next_token: str | None = None


class ListTrainingJobNodesResponse(Shape):
    """A page of nodes that worked for a job, by start time."""

    nodes: list[TrainingJobNode]
    next_token: str | None = None
