"""Types of `everstep.client()`; written by `python -m control_plane.contract`. There is no such module at run time:

    if TYPE_CHECKING:
        from everstep.service import EverstepClient
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Protocol, TypedDict, TypeVar, overload

from botocore.client import ClientMeta
from botocore.exceptions import ClientError as Refusal
from botocore.response import StreamingBody

T_co = TypeVar("T_co", covariant=True)

class EventStream(Protocol[T_co]):
    def __iter__(self) -> Iterator[T_co]: ...
    def close(self) -> None: ...

class AuditEntry(TypedDict):
    """The record of one call that creates, changes or deletes resources: its caller, source address and outcome."""
    EntryId: int
    Time: datetime
    Operation: str
    """Name of the API operation, for example DeleteFleet."""
    Resource: NotRequired[str]
    """Name of the resource that the call addressed or created. Names of nested resources are joined by `/`."""
    Project: NotRequired[str]
    """Project of the token, or else the project that the request names. Absent if neither names a project."""
    TokenId: str
    Caller: str
    """Description of the caller's token at the time of the call."""
    Role: str
    SourceAddress: NotRequired[str]
    """IP address of the client, as trusted proxies forwarded it."""
    RequestId: str
    """The request's id, which the response and the server's log contain too."""
    Outcome: Literal["Succeeded", "Refused", "Failed", "Unfinished"]
    """How the call ended. Refused: the caller's error, so nothing changed. Failed: the service's error. Unfinished: the server stopped or the client disconnected during the call, so the change may be stored."""
    StatusCode: NotRequired[int]
    """HTTP status of the response."""
    ErrorCode: NotRequired[str]

class Automation(TypedDict):
    """The state of the service's automatic actions: active, or paused by an administrator."""
    IsPaused: bool
    Reason: NotRequired[str]
    """Why automation is paused. Absent while automation is active."""
    PausedBy: NotRequired[str]
    """Name of the administrator's token."""
    PauseTime: NotRequired[datetime]

class BatchGetLossCurvesResponse(TypedDict):
    """The loss curves of the requested jobs that log a loss."""
    LossCurves: list[LossCurve]

class CapacityWait(TypedDict):
    """The wait of a job for instances that AWS does not launch."""
    MissingNodeCount: int
    """Number of nodes that the job lacks."""
    InstanceType: str
    """Instance type of the fleet. Empty if unknown."""
    AvailabilityZone: str
    """Zone of the fleet. Empty if unknown."""
    Message: str
    """AWS's message about the newest failed launch."""
    IsOutOfCapacity: bool
    """Whether AWS has too few instances of the type. false: AWS rejected the launch for another reason."""
    FailedAttemptCount: int
    """Number of Everstep's launch attempts that have failed since the last successful launch. The count includes the first launch, but no retries by Auto Scaling itself."""
    NextAttemptTime: datetime
    """When Everstep next attempts to launch the instances. A time in the past means that the attempt is due."""

class CauseReport(TypedDict):
    """The incidents with one cause."""
    Cause: Literal["notice", "requested", "grown", "returned", "pause_failed", "drill", "load_failed", "rank_exit", "hang", "agent_lost", "node_unreachable", "node_fault", "instance_terminated", "shrunk", "group_lost"]
    Kind: Literal["Failure", "Planned", "Drill"]
    Incidents: ReportIncidents

class Changes(TypedDict):
    """The difference between a response and an earlier response to the same request."""
    ChangeToken: str
    """Token to pass as ChangesSince in the next request."""
    IsIncremental: bool
    """Whether the response contains only the changes since the earlier response. False if the server does not know the token in ChangesSince. The response then contains everything."""
    Removed: list[str]
    """Keys of the entries that the earlier response contained and that the complete response no longer contains."""

class Channel(TypedDict):
    """One named input of a job."""
    ChannelName: str
    """Name of the channel. Ranks find its directory in SM_CHANNEL_<NAME> and with `everstep.training.input_dir("name")`."""
    DataSource: DataSource

class Checkpoint(TypedDict):
    """A checkpoint of one step in S3."""
    Step: int
    Generation: int
    Status: Literal["Uploading", "Complete", "Trashed", "Deleting", "Deleted"]
    S3Uri: str
    Bytes: int
    CreationTime: datetime
    CompletionTime: NotRequired[datetime]
    IsPinned: bool
    """Whether a user has pinned the checkpoint. Everstep does not delete a pinned checkpoint before UnpinCheckpoint."""
    PurgeTime: NotRequired[datetime]
    """Earliest time at which Everstep deletes the objects of a trashed checkpoint. Absent outside of the trash."""
    TrashCause: NotRequired[Literal["Retention", "Person"]]
    """Why the checkpoint is in the trash. Absent outside of the trash."""
    Verification: Literal["NotVerified", "Verifying", "Waiting", "Intact", "Damaged"]
    """The result of the last VerifyCheckpoint, which reads the objects back."""
    VerificationTime: NotRequired[datetime]
    VerificationMessage: NotRequired[str]
    """The damaged parts of the checkpoint, or why the verification waits. Absent without damage and without a wait."""
    VerificationWaitingSince: NotRequired[datetime]
    """When the verification first failed to read S3. Absent unless Verification is Waiting."""

class CheckpointActivity(TypedDict):
    """The checkpoints of a job: when the next is due, the running upload, and figures of the last upload."""
    Policy: str
    """A sentence about the rules that make checkpoints due."""
    NextStep: NotRequired[int]
    """The first committed step at or after this step becomes a checkpoint. Absent without EverySteps."""
    NextTime: NotRequired[datetime]
    """The first commit after this time becomes a checkpoint. Absent if the job has no interval."""
    IntervalSeconds: NotRequired[float]
    """The current interval: IntervalInSeconds, or the interval that Everstep computes from MaxOverhead. Absent if the job has no interval, or until the first upload is measured."""
    LastUploadSeconds: NotRequired[float]
    """Duration of the last checkpoint's upload, all shards together. Absent before the first upload."""
    LastUploadCostSeconds: NotRequired[float]
    """Training time that the last upload cost, estimated from how much it slowed training down."""
    Upload: NotRequired[CheckpointUpload]
    """The checkpoint that is being uploaded. Absent if no upload runs."""

class CheckpointConfig(TypedDict):
    """Rules by which Everstep writes checkpoints to S3, and keeps or deletes them. EverySteps, IntervalInSeconds and MaxOverhead each make checkpoints due. With or without them, Everstep also writes a checkpoint when the job completes, stops or pauses, when AWS announces the end of a node, and for each CreateCheckpoint."""
    EverySteps: NotRequired[int]
    """Steps between two checkpoints in S3. 0 disables checkpoints by number of steps. 0 unless given."""
    IntervalInSeconds: NotRequired[int]
    """Seconds between the beginnings of two checkpoints. The first commit after that time becomes a checkpoint. If EverySteps is set too, both rules make checkpoints due."""
    MaxOverhead: NotRequired[float]
    """Share of training time that checkpoints may add, for example 0.01 for 1 %. Everstep computes the interval from the measured duration of uploads and from the training time that they cost. Cannot be set together with EverySteps or IntervalInSeconds."""
    MaxUploadBytesPerSecond: NotRequired[int]
    """Limit of the mean rate at which one node uploads checkpoints. Needs MaxOverhead. Everstep makes fewer checkpoints to meet the limit. A single upload still uses the full bandwidth."""
    OnNotice: NotRequired[bool]
    """Whether a spot or maintenance notice makes a checkpoint due while no other node can replace the affected node. true unless given."""
    S3Uri: NotRequired[str]
    """Prefix for checkpoints. The default is a prefix in the service's bucket."""
    ThirdSlot: NotRequired[bool]
    """Whether to reserve a third memory slot per shard. false unless given. With a third slot, a snapshot never waits for the upload of an earlier snapshot."""
    MaxUploadsInFlight: NotRequired[int]
    """Maximum number of checkpoints that are uploaded at the same time. The default is 1. With a value above 1, a due checkpoint need not wait for the end of an earlier upload. Such a value needs ThirdSlot, and reserves one more memory slot per shard for each further upload. While the maximum number of uploads runs, the newest due checkpoint replaces the checkpoint that waits. Cannot change after creation."""
    MaxCount: NotRequired[int]
    """Number of newest checkpoints to keep, in addition to pinned ones. The default keeps all. Only checkpoints from which the job can be restored count. The others are deleted once a later one is verified. Everstep deletes a checkpoint only after it has verified a later one by reading it back."""
    KeepEverySteps: NotRequired[int]
    """Keep the first checkpoint at or after each multiple of this number of steps. Neither MaxCount nor MaxAgeInSeconds applies to these checkpoints."""
    MaxAgeInSeconds: NotRequired[int]
    """Age at which checkpoints are deleted. At any age, Everstep keeps the newest checkpoint, the checkpoint from which the job would be restored, pinned checkpoints, and the checkpoints that KeepEverySteps selects."""
    TrashHours: NotRequired[int]
    """Hours for which a deleted checkpoint stays in the trash, from which UndeleteCheckpoint returns it. 24 unless given. The objects stay in S3 and cost storage. 0 deletes at once. A change applies to later deletions."""
    StorePatienceSeconds: NotRequired[int]
    """Seconds for which a job keeps its nodes while S3, IAM or KMS prevents a restore. The default is 1800. Then the job returns its nodes, and restores the same step later. A job keeps its nodes in any case while only their memory has committed steps."""

class CheckpointConfigUpdate(TypedDict):
    """Checkpoint settings to change. The location of checkpoints cannot change after creation."""
    EverySteps: NotRequired[int]
    IntervalInSeconds: NotRequired[int]
    """New number of seconds between the beginnings of two checkpoints. 0 removes the interval."""
    MaxOverhead: NotRequired[float]
    """New value of MaxOverhead, at least 0.0001. 0 removes the limit and the computed interval."""
    MaxUploadBytesPerSecond: NotRequired[int]
    """New limit of a node's mean upload rate, in bytes per second. 0 removes the limit."""
    OnNotice: NotRequired[bool]
    ThirdSlot: NotRequired[bool]
    """Whether to reserve a third memory slot per shard. Cannot be disabled once the job has run."""
    MaxCount: NotRequired[int]
    """New number of newest checkpoints to keep. 0 removes the limit."""
    KeepEverySteps: NotRequired[int]
    """New value of KeepEverySteps, in steps. 0 disables the rule, so that only MaxCount and MaxAgeInSeconds apply."""
    MaxAgeInSeconds: NotRequired[int]
    """New age in seconds at which checkpoints are deleted, at least 60. 0 disables deletion by age."""
    TrashHours: NotRequired[int]
    StorePatienceSeconds: NotRequired[int]
    """New number of seconds for which the job keeps its nodes while S3, IAM or KMS prevents a restore."""

class CheckpointUpload(TypedDict):
    """The progress of the checkpoint that is being uploaded, as the agents last reported it."""
    Step: int
    StoredBytes: int
    """Bytes that S3 has stored, of all shards whose upload has begun."""
    TotalBytes: int
    """Total size in bytes of all shards whose upload has begun."""
    SlowestRank: int
    """The rank of whose shard S3 has stored the smallest part."""
    SlowestObject: NotRequired[str]
    """The S3 URI of the slowest rank's object. Absent until the upload of this object begins."""
    SlowestStoredBytes: int
    """Bytes of the slowest rank's shard that S3 has stored."""
    SlowestTotalBytes: int
    """Size of the slowest rank's shard in bytes."""

class Condition(TypedDict):
    """A current problem of a node, of the service or of the job. It is no longer listed once it is resolved."""
    Type: str
    """The fault code, as listed in docs/reference/metrics.md: disk_full, memory_low, gpu_xid … Or ResumeDiffers, or ResumeUnproven."""
    Message: str
    """A sentence that includes the measured values."""
    NodeId: NotRequired[str]
    """The node with the problem. Absent if the problem is not in a node."""

class CreateCheckpointResponse(TypedDict):
    """The step of the requested checkpoint, and whether the checkpoint is complete."""
    TrainingJobName: str
    RunId: str
    Step: int
    """The checkpoint's step. While Status is Requested, Everstep may still choose a later committed step for the checkpoint."""
    Status: Literal["Requested", "Complete"]

class CreateFleetResponse(TypedDict):
    """The new fleet or, after a dry run, the changes that CreateFleet would make."""
    FleetName: str
    Fleet: NotRequired[Fleet]
    """The new fleet. Absent after a dry run."""
    Checks: list[GroupCheck]
    """The requirements on the Auto Scaling group, all of which it meets. If a group fails requirements, CreateFleet returns an error with a sentence about each failed requirement."""
    Changes: list[GroupChange]
    """Changes to the Auto Scaling group that CreateFleet made, or that the fleet's loop will make. After a dry run: changes that the same request without DryRun would make. Empty if the group already has all settings that Everstep needs."""

class CreateJoinTokenResponse(TypedDict):
    """A join token for a fleet's launch template."""
    JoinToken: str
    """The secret token. It is returned only once, because the service stores only its digest."""
    TokenId: str
    FleetName: str
    ExpirationTime: NotRequired[datetime]

class CreateSourceResponse(TypedDict):
    """The state of a source archive, and the upload request if the archive is not stored yet."""
    SourceId: str
    IsStored: bool
    """Whether an earlier upload of this archive was checked and stored. If true, no upload is needed."""
    Upload: NotRequired[SourceUpload]
    """Presigned request with which the client uploads the archive before it calls CompleteSource. Absent if the source is stored already. Also absent if the service's object store accepts no direct uploads; call PutSource in this case."""

class CreateTokenResponse(TypedDict):
    """A new token with its secret."""
    Secret: str
    """The secret token. Clients send it as `Authorization: Bearer …`. It is returned only once, because the service stores only its digest."""
    Token: Token

class CreateTrainingJobResponse(TypedDict):
    """The new job or, after a dry run, its plan."""
    TrainingJobName: str
    RunId: NotRequired[str]
    """Id of the job's run. Absent after a dry run."""
    TrainingJobStatus: NotRequired[Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]]
    """Status of the new job. Absent after a dry run."""
    Plan: NotRequired[TrainingJobPlan]
    """Forecast for the job. Only after a dry run."""

class DataSource(TypedDict):
    """The location of an input channel's data. Exactly one of S3DataSource and FileSystemDataSource must be set."""
    S3DataSource: NotRequired[S3DataSource]
    """Each node fetches and verifies the objects before its ranks start. The files are read-only. The node keeps them for later jobs while its disk has enough space."""
    FileSystemDataSource: NotRequired[FileSystemDataSource]

class DeleteTrainingJobResponse(TypedDict):
    """The records and objects that were deleted, or after a dry run, that a real call would delete."""
    TrainingJobName: str
    RunId: str
    IsDeleted: bool
    """Whether the job's records were deleted. False after a dry run, while objects remain, and in the trash."""
    PurgeTime: NotRequired[datetime]
    """Earliest time at which Everstep deletes the job and its objects for good. Absent outside of the trash."""
    GenerationCount: int
    CheckpointCount: int
    IncidentCount: int
    NodeSeconds: float
    """Total time that nodes worked for the deleted job. The fleet's totals no longer include this time."""
    CostUsd: NotRequired[float]
    ObjectCount: int
    """Objects in S3 that this call deleted. 0 for a job that the call moved to the trash. After a dry run: objects that a call with DeleteObjects would delete."""
    ObjectBytes: int
    HasMoreObjects: bool
    """Whether objects of the job remain, because each call deletes or trashes a limited number. If true, repeat the same call to continue."""
    S3Uris: list[str]
    """S3 locations of the job's checkpoints, logs and outputs, below which the objects are."""

class DescribeDutiesResponse(TypedDict):
    """All jobs and fleets that need a person, the most urgent first."""
    Duties: list[SubjectDuty]

class DescribeProtectionResponse(TypedDict):
    """The current protection of a job's state."""
    TrainingJobName: str
    Generation: int
    CommittedStep: int
    ProposedStep: int
    Boundary: int
    CommittedAt: NotRequired[datetime]
    Copies: int
    ParityGroupSize: NotRequired[int]
    """Nodes per parity group. The state in memory survives the loss of any one node per group. Absent without parity."""
    ProtectionState: Literal["Protected", "Degraded", "Unprotected"]
    Reason: str
    Lapse: NotRequired[ProtectionLapse]
    """Present while training goes on and nodes keep no further step."""
    RecoveryOdds: list[RecoveryOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes. Only holders in view count. The list is empty until every shard has a committed step. For a large job, it can lack the entry for two or three nodes, because Everstep does not count that many sets of lost nodes."""
    DomainOdds: list[DomainOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three failure domains. Empty until every shard has a committed step, and if AWS has reported no domains."""
    FatalDomains: list[str]
    """Failure domains, each of which would make some shard unrecoverable from memory if it were lost alone."""
    Shards: list[ShardProtection]
    LastCheckpoint: NotRequired[LastCheckpoint]

class DomainOdds(TypedDict):
    """Probability that the nodes' memory keeps every shard of a job when several failure domains are lost at once."""
    LostDomains: int
    Probability: float
    """Exact probability that memory keeps every shard. All sets of LostDomains domains are equally likely. A node whose domain is unknown counts as a separate domain."""

class Drill(TypedDict):
    """An injected fault and its outcome."""
    DrillId: str
    DrillType: Literal["kill-rank", "kill-agent", "terminate-instance"]
    DrillStatus: Literal["requested", "struck", "recovered", "not_recovered", "absorbed", "not_done"]
    """The drill's progress, or its outcome once it is over. `requested`: the fault is not injected yet. `struck`: the fault is injected, and its outcome is open. `recovered`: the fault caused an incident, and training reached the step it was at before the fault. `not_recovered`: the job ended, was paused or was interrupted again before it recovered. `absorbed`: the fault caused no incident. `not_done`: the job did not train in time, so no fault was injected."""
    TrainingJobName: str
    FleetName: str
    NodeId: str
    Rank: NotRequired[int]
    RequestedBy: str
    CreationTime: datetime
    StrikeTime: NotRequired[datetime]
    EndTime: NotRequired[datetime]
    IncidentId: NotRequired[str]
    Outcome: NotRequired[str]

class Duty(TypedDict):
    """The next action of a person for a job or a fleet, and the reason for it. The service computes it when it answers. The command line, the dashboard and notifications show the same duty."""
    Kind: Literal["Nothing", "JobFailed", "TakenOver", "AutomationPaused", "DeletionsPaused", "ConsentToRepeat", "StoreUnreachable", "FleetFrozen", "LaunchesSuspended", "RecoveryLate", "Stalled", "FirstStepLate", "ProtectionLost", "CapacityWait", "NoCheckpoint", "ResumeDiffers", "ResumeUnproven", "HeldNodes", "Degraded", "Unconfirmed", "FewerNodes", "WithoutCopies", "Paused"]
    Urgency: Literal["Now", "Later", "Optional", "None"]
    """Now: the job makes no progress, or loses its protection, until a person acts. Later: something waits for a person. Optional: a person can do something useful. None: there is nothing to do. A job or fleet needs attention if its urgency is Now or Later."""
    Sentence: str
    Explanation: NotRequired[str]
    """What follows from the situation, and what Everstep does by itself. Absent if there is nothing to do."""
    Since: NotRequired[datetime]
    """When the duty began. Absent if the service does not know it."""
    Actions: list[DutyAction]
    """What a person can do, the most urgent first."""

class DutyAction(TypedDict):
    """One thing that a person can do now."""
    Kind: Literal["ReadLogs", "SubmitAgain", "HandBack", "ResumeAutomation", "AcceptRestore", "Resume", "Pause", "Stop", "Shrink", "RepeatWork", "CheckStore", "CorrectGroup", "DescribeFleet", "ResumeLaunches", "ListEvents", "ShowProtection", "CreateCheckpoint", "SetCheckpoints", "DecideNode", "CorrectScript"]
    Urgency: Literal["Now", "Later", "Optional", "None"]
    Description: str
    """What the person should do and why, in one or two sentences."""
    Command: str
    """The command line with which the person begins the action."""
    FurtherCommands: list[str]
    """Alternative commands for the step after Command. The person runs one of them. Empty if Command completes the action."""
    InstanceId: NotRequired[str]
    """The held node that the action concerns. Absent if the action concerns the job or the fleet."""
    IsRecommended: NotRequired[bool]
    """Whether Everstep recommends the action instead of waiting for instances. false unless given."""
    MinNodeCount: NotRequired[int]
    """The ElasticConfig.MinNodeCount that the action gives the job. Absent if the action does not change it."""
    Step: NotRequired[int]
    """The checkpoint from which the job continues after the action. Absent for other actions."""

class ElasticConfig(TypedDict):
    """Limits between which the number of nodes of a job may change while it trains. The number of ranks per node stays the same. Without ElasticConfig, a job keeps its number of nodes."""
    MinNodeCount: NotRequired[int]
    """Smallest number of nodes with which the job starts, resumes and continues while the fleet has no further nodes. The default is NodeCount: the job waits until it has all nodes. When nodes arrive, the job stops at an agreed step and continues with them. A preemptible job also shrinks to this number for a job of higher priority."""
    MaxNodeCount: NotRequired[int]
    """Number of nodes up to which the job grows. The default is NodeCount. The job grows while no other job of the fleet waits for nodes and the quota of its project permits it. When another job can start with the additional nodes, all ranks stop at the same step, and the job returns these nodes."""
    PatienceInSeconds: NotRequired[int]
    """Seconds for which the job waits for missing nodes before it starts or continues with fewer nodes. 60 unless given. A running job that can grow, but not to MaxNodeCount, also waits this time before it grows with the nodes that are ready."""

class ElasticConfigUpdate(TypedDict):
    """Changes of the limits between which a job's number of nodes may change. 0 sets a limit to NodeCount. A job whose generation has more than MaxNodeCount nodes returns nodes at an agreed stop: all ranks stop at the same step, so no step is lost. A job that runs on fewer than MinNodeCount nodes continues; its next generation needs MinNodeCount nodes."""
    MinNodeCount: NotRequired[int]
    MaxNodeCount: NotRequired[int]
    PatienceInSeconds: NotRequired[int]
    """New value of PatienceInSeconds. The value also applies to a wait that has begun."""

class Event(TypedDict):
    """A record of a change or an incident of a fleet, a job or a node. Events never change."""
    EventId: int
    Time: datetime
    Type: str
    Message: str
    FleetName: NotRequired[str]
    TrainingJobName: NotRequired[str]
    NodeId: NotRequired[str]
    Detail: Any

class EvidenceFact(TypedDict):
    """The values of a sentence of Evidence."""
    Kind: str
    """Type of the fact, for example `InstanceEnded` or `RankEnded`. `Recorded`: only the sentence is stored."""
    NodeIds: list[str]
    Ranks: list[int]
    Code: NotRequired[str]
    """Code of the fault that an agent reported, or EC2's code of the state reason."""
    Xid: NotRequired[int]
    ExitCode: NotRequired[int]
    """Exit code of the rank, or the negated signal number."""

class ExecuteCommandResponse(TypedDict):
    """Output and exit code of a program that ran on the node of a rank."""
    TrainingJobName: str
    Rank: int
    Generation: int
    NodeId: str
    ExitCode: NotRequired[int]
    """The exit code as a shell reports it. Absent if the program did not end within TimeoutInSeconds."""
    Stdout: str
    Stderr: str
    """Standard error of the program. Stdout and Stderr contain at most the first 256 KiB of each stream."""
    IsOutputCut: bool
    """Whether Stdout or Stderr was truncated."""
    IsTimedOut: bool

class ExportIncidentResponse(TypedDict):
    """The post-mortem of an incident."""
    IncidentId: str
    Format: Literal["markdown"]
    FileName: str
    """A suitable name for a file with the content."""
    Content: str
    """The document in UTF-8, with line feeds."""

class FieldChange(TypedDict):
    """The change of one field of a job's configuration."""
    Field: str
    """Path of the field: `CheckpointConfig.EverySteps`."""
    Before: NotRequired[str]
    After: NotRequired[str]
    """The new value as text. Absent if the update removes the value."""
    Applies: Literal["Now", "NextGeneration"]
    """When the change takes effect: now, or with the next generation. A running generation keeps the plan that it started with."""

class FieldError(TypedDict):
    """One invalid field of a request, with the problem."""
    Field: str
    """Path of the field, for example `CheckpointConfig.EverySteps`."""
    Message: str
    """A sentence about the problem, with the invalid value or the limit."""

class FileSystemDataSource(TypedDict):
    """A directory that already exists on every node: a shared file system, or a part of the image."""
    DirectoryPath: str
    """Absolute path of the directory. The mount options decide whether ranks may write to the directory."""

class Fleet(TypedDict):
    """A registered Auto Scaling group: its settings and its current state."""
    FleetName: str
    AutoScalingGroupName: str
    Project: str
    FleetStatus: Literal["active", "frozen", "deleting"]
    Reason: str
    Duty: Duty
    """What a person has to do for the fleet and its held nodes."""
    SpareCount: int
    SparePolicy: NotRequired[SparePolicy]
    """The rule that determines the number of spares. If set, SpareCount has no effect."""
    MinNodeCount: int
    HoldFailedInstances: bool
    MaxReplacementsPerHour: int
    NodeRoleName: NotRequired[str]
    """Name of the IAM role of the fleet's instances. Absent if agents can join with a join token only."""
    AllowDrills: bool
    AllowCommands: bool
    ReplicaEncryption: Literal["Auto", "On", "Off"]
    """When nodes use TLS for the connections between them."""
    EncryptsReplicas: bool
    """Whether the nodes of a job would use TLS for the connections between them if the job launched its ranks now."""
    MaxNodeCount: int
    """MaxSize of the Auto Scaling group."""
    DesiredNodeCount: int
    NodeCount: int
    ConnectedNodeCount: int
    InstanceType: str
    AvailabilityZone: str
    PriceUsdPerHour: NotRequired[float]
    AccountingSeconds: dict[str, float]
    """Total time of all jobs of the fleet, by accounting bucket, such as training or queue."""
    Reliability: Reliability
    """Reliability figures of the fleet, computed over all its jobs."""
    IncidentCount: int
    """Number of incidents of the fleet's jobs, without drills."""
    LostNodeCount: int
    """Number of nodes that jobs lost because the node failed or AWS reclaimed it. The number excludes nodes that a person drained, and nodes into which a drill injected a fault."""
    NodeSeconds: float
    """Total time that the fleet's nodes have worked for jobs."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds. Idle nodes and spares are not included."""
    Drift: list[str]
    """Differences between the settings of the Auto Scaling group and the settings that Everstep needs. While the list is not empty, Everstep neither resizes the group nor ends or reboots instances."""
    Roll: NotRequired[FleetRoll]
    """The newest roll. Absent if the fleet never had one."""
    OldestImageTime: NotRequired[datetime]
    """Creation time of the oldest machine image that a node of the fleet runs. Nodes whose ImageCreationTime is absent do not count. Absent if no node has one."""
    Tags: dict[str, str]
    CreationTime: datetime

class FleetReport(TypedDict):
    """Time, cost and incidents of one fleet, including its idle nodes."""
    FleetName: str
    Figures: ReportFigures

class FleetRoll(TypedDict):
    """A roll: the replacement or reboot of all nodes that a fleet had at the start of the roll."""
    RollStatus: Literal["InProgress", "Paused", "Stopped", "Completed"]
    StatusReason: str
    """What the roll does now, or the reason why it waits."""
    Reboot: bool
    MaxUnavailable: int
    NodeCount: int
    """Number of nodes that the roll replaces or reboots. It excludes nodes that were held at the start."""
    FinishedNodeCount: int
    """Number of nodes that need no more work, including nodes that ended for another reason or were skipped."""
    CurrentNodeIds: list[str]
    """Nodes that the roll is replacing or rebooting now."""
    RequestedBy: str
    Reason: str
    StartTime: datetime
    EndTime: NotRequired[datetime]

class FollowLogsResponse(TypedDict):
    EventStream: NotRequired[EventStream[FollowLogsStream]]

class FollowLogsStream(TypedDict):
    """The events of a FollowLogs stream."""
    LogEvents: NotRequired[LogEvents]

class GetCallerIdentityResponse(TypedDict):
    """The token of the caller, with its role and project."""
    TokenId: str
    Project: NotRequired[str]
    """The project of the token. Absent if the token can access every project."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    Role: Literal["admin", "submitter", "viewer"]
    ServerVersion: str
    ServerTime: datetime
    """Current time of the service's clock."""

class GetLogEventsResponse(TypedDict):
    """A page of lines that a job's ranks printed, oldest line first."""
    Events: list[LogEvent]
    NextForwardToken: str
    """Token for the page after the last line of this page."""
    NextBackwardToken: str
    """Token for the page before the first line of this page."""

class GetMetricDataResponse(TypedDict):
    """Values of a job's metrics, by metric."""
    MetricDataResults: list[MetricDataResult]
    """The metrics. An incremental response omits the metrics whose points did not change."""
    Changes: NotRequired[Changes]
    """Only with ChangesSince. Its field Removed names the metrics that have no points any more."""

class GetOutputResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class GroupChange(TypedDict):
    """A change that CreateFleet makes to one setting of an Auto Scaling group."""
    Setting: str
    """The name of the setting in Auto Scaling's API. Examples are `NewInstancesProtectedFromScaleIn` and `LifecycleHooks.everstep-termination`."""
    Before: NotRequired[str]
    """The value before the change, as text. Absent if the Auto Scaling group had no value for the setting."""
    After: str
    Reason: str
    """Why Everstep needs the change."""
    Applies: Literal["Now", "Later"]
    """When the change takes effect. Now: CreateFleet makes the change before it returns. Later: the fleet's loop makes the change once the fleet exists."""

class GroupCheck(TypedDict):
    """A requirement on an Auto Scaling group that Everstep checks and does not change."""
    Setting: str
    """Name of the setting in Auto Scaling's API."""
    Message: str
    """A sentence about the setting, with the value that Everstep found in the Auto Scaling group."""

class HealthResponse(TypedDict):
    """Status and version of the server that answers."""
    Status: Literal["ok", "degraded"]
    """Whether the server has current problems. `degraded`: the server answers requests, but at least one of Conditions needs a person."""
    Version: str
    Conditions: list[ServiceCondition]
    """Current problems of the service. Empty in normal operation. A condition disappears once its cause is resolved."""

class HeldShard(TypedDict):
    """The shard of one rank, which its node keeps in memory during the export. ReadSnapshot returns the shard in the format of a checkpoint's object in S3."""
    Rank: int
    OriginGeneration: int
    ObjectBytes: int
    PayloadBytes: int
    PayloadDigest: str
    """Digest of the shard in hexadecimal, computed as docs/reference/checkpoint-format.md describes."""
    LayoutHash: str

class HoldAdvice(TypedDict):
    """Everstep's recommendation to a person about a held node: a node that is kept out of use."""
    Decision: Literal["Terminate", "Release", "Inspect"]
    Description: str
    """One or two imperative sentences that say what to do and why."""
    Command: str
    """The command line with which the person follows the advice."""
    FurtherCommands: list[str]
    """Alternative commands after the inspection. The person runs one of them. Empty unless Decision is Inspect."""

class HoldSnapshotResponse(TypedDict):
    """The snapshots of all ranks at one committed step. The nodes keep them in memory until the export ends."""
    TrainingJobName: str
    RunId: str
    SnapshotId: str
    Generation: int
    Step: int
    HoldInSeconds: int
    """Seconds from the last HoldSnapshot or ReadSnapshot until the hold ends. ReleaseSnapshot ends it earlier."""
    MaxReadBytes: int
    """Maximum number of bytes that one ReadSnapshot returns."""
    Shards: list[HeldShard]
    """The held shards of all ranks, in the order of ranks."""

class Holder(TypedDict):
    """A node that protects a shard in its memory: with a copy or, with parity, with a share."""
    NodeId: str
    InView: bool
    """Whether a step counts as committed only after this holder has verified it."""
    VerifiedStep: NotRequired[int]
    """The newest step of which the node has received and verified the whole copy. Absent until the node has verified a step."""
    VerifiedTime: NotRequired[datetime]
    """Time at which the node reported that it had verified VerifiedStep."""
    LagSteps: NotRequired[int]
    """Number of steps from VerifiedStep to the newest step that the ranks have finished."""
    FailureDomain: NotRequired[str]
    """The EC2 network node that the instance is attached to. Absent if AWS has not reported one."""

class Incident(TypedDict):
    """A failure and its recovery."""
    TrainingJobName: str
    RunId: str
    IncidentId: str
    Decision: str
    LostSteps: NotRequired[int]
    """Number of steps that training had to repeat: ReachedStep − FromStep."""
    FaultedInstanceIds: list[str]
    """Instances on which the failure occurred, whether or not the job lost them. Either ranks, the agent, network connections or hardware of the instance failed, or AWS announced the end or a maintenance of the instance. Empty if Everstep cannot determine the instances."""
    OpenedAt: datetime
    ClosedAt: NotRequired[datetime]
    Outcome: Literal["Open", "Recovered", "JobPaused", "JobCompleted", "JobFailed", "JobStopped"]
    """How the incident ended."""
    Headline: str
    """What failed, in a few words without a full stop."""
    Project: str
    Cause: Literal["notice", "requested", "grown", "returned", "pause_failed", "drill", "load_failed", "rank_exit", "hang", "agent_lost", "node_unreachable", "node_fault", "instance_terminated", "shrunk", "group_lost"]
    Phase: Literal["replace", "restore", "rework", "closed"]
    Evidence: list[str]
    EvidenceFacts: list[EvidenceFact]
    """The values of each sentence of Evidence, in the same order."""
    Reason: str
    RestoreSource: NotRequired[Literal["local", "peer", "parity", "s3"]]
    """The most distant source from which any rank was restored. The order is the own node, a peer, parity (shards and shares of several peers), and S3."""
    FromStep: NotRequired[int]
    ReachedStep: NotRequired[int]
    GenerationBefore: int
    GenerationAfter: NotRequired[int]
    NodeCountBefore: NotRequired[int]
    """Number of nodes of the generation that failed or stopped. The control plane stores this number together with NodeCountAfter, once the next generation has a plan. Absent until then."""
    NodeCountAfter: NotRequired[int]
    """Number of nodes of the generation after the failure or stop. Absent until that generation has a plan."""
    InstanceId: NotRequired[str]
    """The first of InstanceIds. Absent if the job lost no instance."""
    ReplacementInstanceId: NotRequired[str]
    InstanceIds: list[str]
    """Instances that the job lost or gave up, for any reason."""
    ReplacementInstanceIds: list[str]
    FailedAt: datetime
    RestoredAt: NotRequired[datetime]
    """When training ran again after the failure. Absent until then."""
    DetectSeconds: NotRequired[float]
    ReplaceSeconds: NotRequired[float]
    RestoreSeconds: NotRequired[float]
    ReworkSeconds: NotRequired[float]
    ControlPlaneAbsentSeconds: NotRequired[float]
    """Time after the failure for which no control plane was running. Ranks train without a control plane, but nothing recovers a job after a failure. Absent if a control plane was running."""
    CostUsd: NotRequired[float]
    """The fleet's price × the time during which the job's nodes made no new step because of this incident. While the incident is open, this is the cost until now. Absent if the fleet has no price."""
    RankSources: list[RankSource]
    """Restore source of each rank, by rank. Empty until the recovery plan exists, and if no rank had to be restored."""
    StacksEventId: NotRequired[int]
    """EventId of the event `RanksHang`, whose Detail contains the stacks of all ranks. Only in DescribeIncident, only if ranks hung, and only while the service keeps the event."""
    AcknowledgementTime: NotRequired[datetime]
    """When a person first acknowledged the incident."""
    AcknowledgedBy: NotRequired[str]
    Acknowledgement: NotRequired[str]
    """The note of the person who acknowledged the incident."""
    Owner: NotRequired[str]
    """The person who takes care of the incident, as UpdateIncident sets it."""
    Verdict: NotRequired[str]
    """What failed, and the state of the job now, in two short sentences. Only in DescribeIncident."""
    Why: NotRequired[str]
    """The exception of the script, the reported fault, or a sentence about the cause. The text begins with "Cause unknown" if no stored fact explains the failure. It ends with "Outage: cause unknown." if the control plane was down when the failure occurred. Only in DescribeIncident."""
    Done: NotRequired[list[str]]
    """What Everstep has done. The first sentence sums up all actions, and the others give details. Only in DescribeIncident."""
    ContinuingCost: NotRequired[str]
    """What the incident costs from now on, in at most two sentences. Absent if it costs nothing or the cost is unknown. Only in DescribeIncident."""
    Wait: NotRequired[CapacityWait]
    """The wait for instances that AWS does not launch. Only in DescribeIncident, and only during such a wait."""
    DutySentence: NotRequired[str]
    """Whether a person must act on the incident, in the words of the job's duty. Only in DescribeIncident."""
    Actions: NotRequired[list[DutyAction]]
    """Actions that a person can take now, the most urgent first. Only in DescribeIncident."""
    Milestones: NotRequired[list[Milestone]]
    """The moments that have occurred, oldest first. Only in DescribeIncident."""
    Notes: NotRequired[list[Note]]
    """At most 100 notes, oldest first. Only in DescribeIncident."""

class InitialCheckpoint(TypedDict):
    """A complete checkpoint of another job. Exactly one of TrainingJobName and RunId must be set in a request."""
    TrainingJobName: NotRequired[str]
    """The job that made the checkpoint."""
    RunId: NotRequired[str]
    """The run that made the checkpoint."""
    Step: NotRequired[int]
    """Step of the checkpoint. The default is the newest complete checkpoint at the time of the request."""

class JobReport(TypedDict):
    """Time, cost and incidents of one job."""
    TrainingJobName: str
    RunId: str
    Project: str
    FleetName: str
    Figures: ReportFigures

class LastCheckpoint(TypedDict):
    """The newest complete checkpoint in S3 that no verification found damaged."""
    Step: int
    Generation: int
    CompletedAt: datetime
    Bytes: int

class ListAuditEntriesResponse(TypedDict):
    """A page of the audit log, newest first."""
    AuditEntries: list[AuditEntry]
    NextToken: NotRequired[str]

class ListCheckpointsResponse(TypedDict):
    """A job's checkpoints, newest step first."""
    Checkpoints: list[Checkpoint]
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    """Status of the job. A job that has ended creates no more checkpoints."""
    TrashBytes: int
    """Bytes in S3 of all of the job's checkpoints in the trash, on whatever page."""
    NextToken: NotRequired[str]

class ListDrillsResponse(TypedDict):
    """A page of drills, sorted by the time of their requests."""
    Drills: list[Drill]
    NextToken: NotRequired[str]

class ListEventsResponse(TypedDict):
    """A page of events."""
    Events: list[Event]
    """The events, oldest first, or newest first with SortOrder Descending."""
    NextToken: NotRequired[str]

class ListFleetsResponse(TypedDict):
    """A page of fleets, sorted by name."""
    Fleets: list[Fleet]
    NextToken: NotRequired[str]

class ListIncidentsResponse(TypedDict):
    """A page of incidents."""
    Incidents: list[Incident]
    """The incidents in the order in which they were opened, or newest first with SortOrder Descending."""
    NextToken: NotRequired[str]

class ListMetricsResponse(TypedDict):
    """All metrics of a job. There are at most 256 names, so the response has no pages."""
    Metrics: list[Metric]
    DroppedCount: int
    """Number of values that are lost. Values are lost if the script logs too fast, or under more names than the limit."""

class ListNodesResponse(TypedDict):
    """A page of nodes, oldest first."""
    Nodes: list[Node]
    NextToken: NotRequired[str]

class ListOutputsResponse(TypedDict):
    """A page of a job's output files."""
    Outputs: list[OutputEntry]
    NextToken: NotRequired[str]

class ListProjectQuotasResponse(TypedDict):
    """A page of quotas, by project."""
    Quotas: list[ProjectQuota]
    NextToken: NotRequired[str]

class ListSimilarIncidentsResponse(TypedDict):
    """Incidents with the same cause and in the same project as the requested incident."""
    Incidents: list[SimilarIncident]
    """The most similar incident first: incidents that share the instance, then the instance type, then the fleet. Among equally similar incidents, the newest is first."""

class ListTimeSpansResponse(TypedDict):
    """A page of the periods of a job's life, oldest first."""
    TimeSpans: list[TimeSpan]
    NextToken: NotRequired[str]

class ListTokensResponse(TypedDict):
    """A page of tokens, oldest first."""
    Tokens: list[Token]
    NextToken: NotRequired[str]

class ListTrainingJobNodesResponse(TypedDict):
    """A page of nodes that worked for a job, by start time."""
    Nodes: list[TrainingJobNode]
    NextToken: NotRequired[str]

class ListTrainingJobNotesResponse(TypedDict):
    """The notes of a job, without the notes of its incidents."""
    Notes: list[Note]
    """At most 100 notes, oldest first."""

class ListTrainingJobRevisionsResponse(TypedDict):
    """A page of a job's revisions, oldest first."""
    Revisions: list[TrainingJobRevision]
    NextToken: NotRequired[str]

class ListTrainingJobsResponse(TypedDict):
    """A page of jobs, newest first."""
    TrainingJobSummaries: list[TrainingJobSummary]
    """The jobs of the page. An incremental response omits the jobs whose entry did not change."""
    Changes: NotRequired[Changes]
    """Only with ChangesSince. Its field Removed contains the RunIds of jobs that left the page."""
    NextToken: NotRequired[str]

class LogEvent(TypedDict):
    """One line that a rank printed, or a note that lines are missing."""
    Timestamp: datetime
    """When the node's agent read the line, with a precision of one millisecond."""
    Generation: int
    NodeId: str
    Rank: NotRequired[int]
    """Rank that printed the line. Absent if the event concerns a whole node."""
    Stream: Literal["stdout", "stderr", "gap"]
    """`stdout`, `stderr` or `gap`. A gap marks missing lines. Its Message contains their number and the reason."""
    Message: str
    """The line without its line feed. Lines of more than 16 KiB are split."""
    Overwrites: NotRequired[bool]
    """True for a state of a line that the rank overwrites, such as a progress bar. Absent for other lines. It replaces the previous line of the rank's stream, if that is a state, too. The log has at most one in 5 seconds."""

class LogEvents(TypedDict):
    """A batch of a job's log lines. The service sends a batch without lines to show that the stream is alive."""
    Events: list[LogEvent]
    NextForwardToken: str
    """Token with which FollowLogs or GetLogEvents continues after these lines."""

class LossCurve(TypedDict):
    """The training loss of one job in a few points."""
    RunId: str
    MetricName: str
    Steps: list[int]
    Values: list[float]
    """For each step: the logged value. NaN, Infinity and -Infinity are sent as text."""

class Metric(TypedDict):
    """A metric of a job: a name under which rank 0 logs values, or under which Everstep measures values on nodes."""
    MetricName: str
    LastStep: int
    LastTime: datetime
    LastValue: float
    """The newest value. NaN, Infinity and -Infinity are sent as text."""

class MetricDataResult(TypedDict):
    """One metric in columns: entry i of each list describes point i. Points are in the order of steps. A point covers one step or a span of steps."""
    MetricName: str
    Steps: list[int]
    """For each point: the first step with a value."""
    LastSteps: list[int]
    Times: list[float]
    """For each point: the time of the last value, in seconds since 1970."""
    Counts: list[int]
    """For each point: the number of values."""
    Minimums: list[float]
    """For each point: the minimum of the finite values, or NaN without a finite value. Means and Maximums use the same values."""
    Means: list[float]
    Maximums: list[float]
    LastValues: list[float]
    """For each point: the last value, finite or not. NaN, Infinity and -Infinity are sent as text."""
    MinimumNodeIds: list[str]
    """The node that measured each minimum. Only for metrics named everstep/…, which Everstep measures on every node. For these metrics, Means and LastValues contain the median of the nodes' values, and Counts the number of nodes. The id is empty for a point that contains only the value of rank 0's node. The list is empty for metrics of the script."""
    MaximumNodeIds: list[str]
    """The node that measured each maximum. The rules of MinimumNodeIds apply."""
    SeriesKind: NotRequired[Literal["Node", "Rank"]]
    """The value of Series with which a request returns this metric's series: Node or Rank. Absent if none is stored."""
    Series: NotRequired[list[MetricSeries]]
    """Only with Series: the values of each node or rank, for at most 64 nodes or ranks."""
    KeptPointCount: NotRequired[int]
    """Number of points at the beginning of the earlier response that the client keeps, because they are unchanged. The client drops the remaining points of the earlier response, and appends the points of this response. Only in incremental responses."""

class MetricSeries(TypedDict):
    """The values of one node or of one rank."""
    NodeId: NotRequired[str]
    Rank: NotRequired[int]
    Values: list[float]
    """For each point: the value, or NaN without a value. If the point covers several steps, the value is their mean."""

class Milestone(TypedDict):
    """A moment of an incident."""
    Kind: Literal["Failed", "Detected", "Replaced", "Restored", "Closed"]
    Time: datetime
    Description: str

class Node(TypedDict):
    """An EC2 instance of a fleet, with its agent."""
    NodeId: str
    """The EC2 instance id."""
    FleetName: str
    NodeStatus: Literal["joining", "spare", "assigned", "held", "rebooting", "draining", "gone"]
    Hold: NotRequired[Literal["unreachable", "distrusted", "inspection", "person"]]
    """Reason why the node is held. A held node waits for ReleaseNode. The hold of an unreachable node also ends once the node's agent reports again and no job uses the node."""
    HoldAdvice: NotRequired[HoldAdvice]
    """The advice for a held node. Absent if the node is not held."""
    Request: NotRequired[Literal["drain", "replace", "reboot", "hold"]]
    """A user's request that is not completed yet. ReleaseNode cancels it."""
    RequestReason: NotRequired[str]
    """The person who made the request, and the reason that the person entered."""
    Connected: bool
    Warm: bool
    """Whether ranks can start on this node without importing their libraries first. A job gets a spare that is not warm only if no warm spare is left."""
    TrainingJobName: NotRequired[str]
    Address: str
    MemoryBytes: int
    """Memory of the node that slots, and thereby snapshots and replicas, may use."""
    Memory: NotRequired[NodeMemory]
    """Memory of the node and of its ranks. Absent while the agent is not connected, or before its first measurement."""
    InstanceType: str
    AvailabilityZone: str
    FailureDomain: NotRequired[str]
    """The EC2 network node that the instance is attached to. Absent if AWS has not reported one. AWS does not report it for all instance types."""
    ImageId: NotRequired[str]
    """The machine image that the instance runs. Absent until AWS has reported it."""
    ImageCreationTime: NotRequired[datetime]
    """Absent until AWS has reported it, and for an image that is deregistered or that the account may not use."""
    AgentVersion: str
    RefusedMessageCount: int
    """Number of the agent's messages that the server of the node's fleet rejected since the server's start. Rejected messages are malformed, too long, or contain the id of another node."""
    RefusedSessionCount: int
    """Number of connections that the agent rejected or closed since its start, because of an invalid message. The agent's ranks and other agents opened these connections. A restart of ranks causes a few rejections. If the number keeps growing, read the agent's log."""
    Exposure: NotRequired[str]
    """Warning about data of other jobs or of the node that a job's code can read on this node. The sentence names the agent's files, the instance's metadata, or both. Absent if a job's code can read neither, and until the agent has reported."""
    Reason: str
    Conditions: list[Condition]
    """Current problems that the agent reports about the node and about its job's work on the node. Empty while the agent is not connected."""
    BurnIn: NotRequired[NodeBurnIn]
    """Absent until the node has been tested."""
    Incidents: list[NodeIncident]
    """The node's history, oldest entry first. Only in DescribeNode."""
    CreationTime: datetime
    ConnectionTime: NotRequired[datetime]
    EndTime: NotRequired[datetime]

class NodeBurnIn(TypedDict):
    """The newest test results of a node, which the node's agent measured."""
    Time: datetime
    Level: int
    """Level of DCGM's diagnostics: 1 after the boot, 3 on an idle spare."""
    Seconds: float
    Tests: list[NodeTest]

class NodeIncident(TypedDict):
    """One entry of a node's history: an incident in which the node was involved."""
    IncidentId: str
    """The id of a job's incident, or `fleet-…` if the node had no job."""
    Time: datetime
    Cause: str
    """Cause of the incident: `node_unreachable`, `agent_lost` …, or a fault code with its number: `gpu_xid 79`."""
    Evidence: str
    Remedy: Literal["none", "restart", "release", "hold", "retire", "reboot", "replace", "let_go"]

class NodeMemory(TypedDict):
    """Memory of a node and of its ranks, from the agent's last report."""
    UsedBytes: int
    AvailableBytes: int
    """Memory that can be allocated now without swapping."""
    TotalBytes: int
    """Memory of the machine, or the limit of the cgroup of agent and ranks if that is lower."""
    CgroupLimitBytes: NotRequired[int]
    """Memory limit of the cgroup of agent and ranks. Absent if no cgroup limit is below the machine's memory."""
    Ranks: list[RankMemory]
    """Memory of the running ranks, by rank."""

class NodeTest(TypedDict):
    """The result of one test of a node."""
    Name: str
    Outcome: Literal["passed", "failed", "unknown"]
    """`unknown` if the test could not run to its end."""
    Rate: NotRequired[int]
    """Bytes per second; for a matmul, floating-point operations per second. Absent if the test measures no rate."""
    Text: str
    """Why the test failed or could not run, after the partner of an all-reduce. Empty if a node's own test passed."""

class Note(TypedDict):
    """A note that a person has written about a job or an incident. A note never changes."""
    NoteId: int
    Author: str
    """The author: description and id of the token that the author used."""
    CreationTime: datetime
    Text: str

class OutputDataConfig(TypedDict):
    """The job's outputs, and their location in S3."""
    S3OutputPath: NotRequired[str]
    """Prefix for outputs. Everstep appends the job and the run. The default is a prefix in the service's bucket."""
    Keep: NotRequired[list[str]]
    """Files that ranks write into the source directory and that become outputs of the node's first rank. A pattern is a file, a folder, or has one `*` for any characters, also `/`: `log.txt`, `runs`, `*.pt`. Each launch begins with the source as it was uploaded."""

class OutputEntry(TypedDict):
    """One file that a rank wrote into its output directory."""
    Generation: int
    Path: str
    """Path within the generation: `rank=0/model.safetensors`."""
    Key: str
    Bytes: int

class ProjectQuota(TypedDict):
    """Limits for the jobs of a project."""
    Project: str
    MaxNodeCount: NotRequired[int]
    MaxJobCount: NotRequired[int]
    MaxSourceBytes: NotRequired[int]
    MaxPriority: int
    AllowedRoleArns: list[str]
    AllowedSecrets: list[str]
    AllowedData: list[str]

class ProjectReport(TypedDict):
    """Time, cost and incidents of one project's jobs."""
    Project: str
    Figures: ReportFigures

class ProtectionConfig(TypedDict):
    """Protection of each shard in the memory of nodes, and the limit for the slowdown by snapshots."""
    Copies: NotRequired[int]
    """Nodes that hold each shard, the owner included. 2 unless given. With 1, the job survives lost processes but no lost node. For a job of one node, and for a job with ParityGroupSize, the default is 1 instead of 2."""
    ParityGroupSize: NotRequired[int]
    """Number of nodes in each group that protects its shards by parity, which needs less memory than copies. The default is no parity. Each node keeps its own shards, and the XOR of parts of the shards of the other nodes in its group. The job survives the loss of any one node per group. Groups of g nodes need g ÷ (2 × (g - 1)) of the memory of two copies. The last group also has the remaining nodes, if NodeCount is not a multiple of g. Copies must be 1, and MinNodeCount at least this number. Cannot change after creation."""
    MaxSlowdown: NotRequired[float]
    """Share of the mean iteration time that snapshots may add, 0.01 meaning 1 %. If snapshots cost more, Everstep takes them less often than every step. The default is 0.01. On a local cluster the default is 1, because all nodes share the cores of one machine and the measured cost is unreliable."""

class ProtectionLapse(TypedDict):
    """The time in which a job's training goes on although nodes keep no further step."""
    Cause: Literal["Late", "State", "Capture", "Changed", "Layout", "NoSlot", "Memory", "SilentAgent", "Unconfirmed"]
    KeptStep: int
    """The newest step that nodes keep. A failure repeats all later steps."""
    UnkeptSteps: int
    """Number of steps that training has finished since KeptStep."""
    Since: datetime
    """Time at which KeptStep was committed, or at which the generation finished its first step."""
    Rank: NotRequired[int]
    """The rank whose steps are not kept. Absent if no rank or agent reports the cause."""
    NodeId: NotRequired[str]

class PutSourceResponse(TypedDict):
    """A source archive that was checked and stored."""
    SourceId: str
    Bytes: int
    FileCount: int

class RankMemory(TypedDict):
    """Memory of a rank's process. Child processes of the rank do not count."""
    Rank: int
    ResidentBytes: int
    """Resident memory of the process, including the full size of pages that it shares with other processes."""
    PeakResidentBytes: int
    """The highest ResidentBytes since the process started."""

class RankSource(TypedDict):
    """The source from which a range of ranks restored their shards."""
    Source: Literal["local", "peer", "parity", "s3"]
    FirstRank: int
    LastRank: int

class ReadSnapshotResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class ReadinessResponse(TypedDict):
    """Confirms that the server is ready for requests."""
    Status: Literal["ready"]
    Version: str

class RecoveryOdds(TypedDict):
    """Probability that the nodes' memory keeps every shard of a job when several nodes are lost at the same time."""
    LostNodes: int
    Probability: float
    """Exact probability that memory keeps every shard. All sets of LostNodes nodes are equally likely."""

class RehearsalConfig(TypedDict):
    """The rehearsal of a job's resume, which proves that a restart repeats the job's steps bit for bit. In a rehearsal, a second process of each rank starts from a recent step, repeats the following steps, and compares them with the steps that the job made."""
    Mode: NotRequired[Literal["Auto", "On", "Off"]]
    """Auto: if all rehearsals together cost at most 0.1 % of the expected run. On: at any cost. Off: never. "Auto" unless given. Auto never rehearses a job whose expected run is shorter than 3 minutes. On a local cluster, the cost has no limit. A job rehearses soon after its start, after the first pass over its data ends, and after the set of its modules, parameters or parameter groups changes. It does so at most three times, and not after a difference. RehearseTrainingJob requests further rehearsals."""
    OnDifference: NotRequired[Literal["Continue", "Stop"]]
    """Reaction to a difference. Stop: the job stops as after StopTrainingJob. "Continue" unless given."""
    AtStep: NotRequired[int]
    """The first step that must be committed before the first rehearsal. 20 unless given."""
    Steps: NotRequired[int]
    """Number of steps that a rehearsal repeats. 5 unless given."""

class RehearsalDifference(TypedDict):
    """The first difference between a job's steps and their repetition."""
    Step: int
    """The repeated step with the difference. If it is the step of the restart, the restored state itself differs."""
    Kind: str
    """What differs, for example the state, the data or the loss."""
    Source: str
    """The likely cause."""
    Names: list[str]
    """The first tensors, generators or values that differ."""
    Unkept: list[str]
    """Variables of the script that differed before, as `file:function.name`."""
    Lines: list[RehearsalLine]
    """Lines of the script that change these variables, or use the values that differ. Empty if none is found."""

class RehearsalLine(TypedDict):
    """A line of the script that belongs to a difference."""
    Name: str
    """The variable that the line changes, or the value that it fetches, sets or logs."""
    File: str
    Line: int

class RehearsalResult(TypedDict):
    """The newest result of a rehearsal."""
    Verdict: Literal["Proven", "Unproven", "Differs", "Unstable", "Refused"]
    """Proven: a restart repeats the job's steps bit for bit. Differs: it does not. Unproven: it does, and loses values that the script changes during training, such as a counter. Unstable: two repetitions differ from each other, so the computation itself is not deterministic. Refused: a rank could not rehearse."""
    Step: int
    """The step from which the ranks restarted."""
    Steps: int
    """Number of repeated steps."""
    Seconds: float
    """The longest time for which a rank did not train."""
    Time: datetime
    Rank: NotRequired[int]
    """The rank with the first difference or lost value, or the first rank that could not rehearse. Absent if the verdict is Proven, or if no rank began to rehearse."""
    Difference: NotRequired[RehearsalDifference]
    Message: NotRequired[str]
    """The difference, or the reason of the refusal."""
    Advice: NotRequired[str]
    """What to change in the script."""

class ReleaseSnapshotResponse(TypedDict):
    """Confirms that the nodes need not keep the snapshot in memory any more."""
    SnapshotId: str

class Reliability(TypedDict):
    """Share of time spent on training, and frequency and duration of interruptions."""
    EttrRatio: NotRequired[float]
    """Effective training time ratio: training time ÷ time outside the buckets queue, provision and paused. The job has no nodes during these three accounting buckets. Absent before the first start."""
    EttrWithQueueRatio: NotRequired[float]
    """Training time ÷ total time since the job was created, including time in the queue and paused time."""
    MttfSeconds: NotRequired[float]
    """Mean time to failure: seconds in the accounting buckets train and stall ÷ number of failures. Absent before the first failure. Drills, AWS's notices and users' requests do not count as failures."""
    MttrSeconds: NotRequired[float]
    """Mean time to recovery: from the failure until training reaches the step it was at before. Computed over failures whose incidents are closed."""
    LostSteps: int
    """Steps that training had to repeat."""
    IncidentCostUsd: NotRequired[float]
    """Total cost of the incidents: the CostUsd of all incidents, added up. Absent if the fleet has no price."""

class RepeatChoice(TypedDict):
    """The choice for which a job waits: repeat much training (AcceptLoss), or wait for nodes that may return."""
    BaseStep: int
    """The newest step that every rank can restore now. 0: the script's own initial state."""
    NewestStep: int
    """The newest committed step, which is out of reach."""
    RepeatedSeconds: NotRequired[float]
    """Training time from BaseStep to NewestStep. Absent if it is unknown."""
    StartTime: datetime
    """When the job began to wait for this choice."""
    EndedNodeIds: list[str]
    """Nodes of the last launch whose instances have ended, as AWS reports."""
    SilentNodeIds: list[str]
    """Nodes of the last launch whose agents are silent. Their memory may still hold NewestStep."""
    DamagedSteps: list[int]
    """Newer checkpoints that are damaged."""
    UnknownSteps: list[int]
    """Newer checkpoints that S3 lists and the job cannot use: of another history, in the trash, or not in the database."""
    IsStoreListed: bool
    """Whether S3 could be listed. If not, S3 may have newer checkpoints."""
    IsTotalLoss: bool
    """Whether AWS reports that all nodes of the last launch have ended, and S3 lists no checkpoint."""

class Report(TypedDict):
    """Time, cost and incidents of all matching jobs and fleets over a time range. Total equals the sum of Buckets, and the sum of Fleets. Without idle nodes, it also equals the sum of Projects, and the sum of Jobs and OtherJobs. Deleted jobs and fleets are not included. Costs use the current price of each fleet."""
    StartTime: datetime
    """The requested begin, rounded down to a full hour."""
    EndTime: datetime
    """The requested end, rounded up to a full hour."""
    Total: ReportFigures
    Buckets: list[ReportBucket]
    """Time, cost and incidents in each part of the time range, oldest first, without gaps."""
    Projects: list[ProjectReport]
    """Figures of each project, the most expensive project first."""
    Fleets: list[FleetReport]
    """Figures of each fleet, the most expensive fleet first. A job counts for the fleet in which it runs now or ran last."""
    Jobs: list[JobReport]
    """Figures of at most MaxJobs jobs, the most expensive job first."""
    OtherJobs: NotRequired[ReportFigures]
    """Sums over the jobs that Jobs leaves out. Absent if Jobs contains all jobs."""
    JobCount: int
    Causes: list[CauseReport]
    """Incidents by cause, the most frequent cause first."""

class ReportBucket(TypedDict):
    """Time, cost and incidents in one bucket: a part of the time range, for example one day."""
    StartTime: datetime
    EndTime: datetime
    Figures: ReportFigures

class ReportFigures(TypedDict):
    """Time, cost and incidents of one project, fleet, job or part of the time range, or of the whole report."""
    AccountingSeconds: dict[str, float]
    """Time of the jobs by accounting bucket, as in AccountingSeconds of DescribeTrainingJob."""
    ProductiveSeconds: float
    """Training time: the accounting bucket `train` of AccountingSeconds."""
    EttrRatio: NotRequired[float]
    """Training time ÷ time during which the jobs had nodes, over all jobs together. Absent if no job had nodes."""
    EttrWithQueueRatio: NotRequired[float]
    """Training time ÷ all time of the jobs, including queue and pauses. Absent if no job has any time."""
    NodeSeconds: float
    """Working time of the jobs' nodes, summed over nodes."""
    RankSeconds: float
    """NodeSeconds × ranks per node. With one rank per GPU, this is GPU time."""
    UnpricedNodeSeconds: float
    """Part of NodeSeconds that CostUsd leaves out, because the fleet has no price."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds. It excludes idle nodes. Absent if no fleet has a price."""
    Failures: ReportIncidents
    """Incidents that neither a drill nor a planned stop caused."""
    PlannedStops: ReportIncidents
    """Incidents that do not count as failures, because a stop of the ranks was requested. The request followed from AWS's notice, a person's request about a node, a change of the number of nodes, or a pause that did not succeed."""
    Drills: ReportIncidents
    """Incidents that drills caused. No other count contains them."""
    MttfSeconds: NotRequired[float]
    """Mean time to failure: time in the accounting buckets train and stall ÷ number of failures. Absent without a failure."""
    MttrSeconds: NotRequired[float]
    """Mean recovery time of failures, as in RecoverySeconds. Absent if training recovered from no failure."""
    IdleNodeSeconds: dict[str, float]
    """Time of nodes that work for no job, by node state, summed over nodes. Only in Total, Buckets and Fleets."""
    SpareCostUsd: NotRequired[float]
    """Cost of the spares in IdleNodeSeconds. Absent if no fleet has a price."""
    OtherIdleCostUsd: NotRequired[float]
    """Cost of the other nodes in IdleNodeSeconds: joining, held, rebooting and draining nodes. Absent if no fleet has a price."""

class ReportIncidents(TypedDict):
    """Sums over incidents of one kind: failures, planned stops or drills."""
    Count: int
    """Number of incidents whose failure is in the time range."""
    RecoveredCount: int
    """Number of these incidents from which training has recovered."""
    RecoverySeconds: float
    """Total recovery time of the incidents from which training has recovered. The recovery of an incident lasts from the failure until training has repeated the lost steps."""
    RecomputedSteps: int
    CostUsd: NotRequired[float]
    """Cost of the jobs' nodes during the recoveries, for the part of each recovery inside the time range. Absent if no fleet has a price."""

class RetryStrategy(TypedDict):
    """Limits after which Everstep stops retrying a failing job, or asks a person first."""
    MaxAttempts: NotRequired[int]
    """Number of times that the same failure may occur at the same step. 3 unless given. At the limit, Everstep retries once without the node of the failing rank, then once from an older state. Everstep skips a retry that is impossible. If all retries fail, the job fails."""
    MaxRepeatedMinutes: NotRequired[int]
    """Longest training time, in minutes, that the job repeats without a person's consent. 30 unless given. If the newest step that the job can restore lies further before its newest committed step, the job holds its nodes and waits for AcceptLoss, or until a lost node returns."""
    OnTotalLoss: NotRequired[Literal["Wait", "Restart"]]
    """Restart: the job never waits for AcceptLoss, and continues from the newest step that it can restore, or step 0. "Wait" unless given."""

class S3DataSource(TypedDict):
    """Input objects in S3."""
    S3Uri: str
    """One object, or a prefix. Nodes keep the folder structure below a prefix. Without RoleArn the nodes read the objects with their own permissions."""

class SecondaryStatusTransition(TypedDict):
    """A period that the job spent in one state."""
    Status: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "CompletedWithOlderCheckpoint", "Failed", "Stopped"]
    """The status in SageMaker's terms, derived from the state. While ranks run without a new step, the status is Starting, or Restarting once the job has made steps."""
    State: Literal["queued", "allocating", "preparing", "loading", "starting", "running", "pausing", "stopping", "completed", "failed", "stopped"]
    """Everstep's own state of the job, which is more detailed than Status."""
    StartTime: datetime
    EndTime: NotRequired[datetime]
    StatusMessage: str

class ServiceCondition(TypedDict):
    """A problem of the service that a person must resolve."""
    Type: Literal["disk_full"]
    Message: str
    """A sentence about the problem and its location, with the measured values."""
    Hint: str
    """How to resolve the problem."""
    Directory: NotRequired[str]
    """Directory on the affected disk. Absent if the disk belongs to a database on another machine."""
    FreeBytes: NotRequired[int]
    """Free space of the disk. Absent if this server cannot read the value."""
    DurationSeconds: float

class ShardProtection(TypedDict):
    """The holders of one rank's shard."""
    Rank: int
    OwnerNodeId: str
    CommittedStep: int
    Bytes: int
    Holders: list[Holder]
    """Holders of the shard. The owner's node is the first. With parity, the other holders are the other nodes of the group, which keep a share of the shard."""
    Reason: str
    """Reason why a holder is out of view, slow or unreachable, or why the owner or a holder refuses snapshots. Empty without such a problem."""

class SimilarIncident(TypedDict):
    """An incident that is similar to a given incident, with the same cause and project."""
    TrainingJobName: str
    RunId: str
    IncidentId: str
    Decision: str
    LostSteps: NotRequired[int]
    """Number of steps that training had to repeat: ReachedStep − FromStep."""
    FaultedInstanceIds: list[str]
    """Instances on which the failure occurred, whether or not the job lost them. Either ranks, the agent, network connections or hardware of the instance failed, or AWS announced the end or a maintenance of the instance. Empty if Everstep cannot determine the instances."""
    OpenedAt: datetime
    ClosedAt: NotRequired[datetime]
    Outcome: Literal["Open", "Recovered", "JobPaused", "JobCompleted", "JobFailed", "JobStopped"]
    """How the incident ended."""
    FleetName: str
    Likeness: list[Literal["Instance", "InstanceType", "Fleet"]]
    """Properties that both incidents share in addition to cause and project, the most significant first."""

class SourceConfig(TypedDict):
    """The user's code."""
    SourceId: str
    """The SHA-256 of the archive, as PutSource and CreateSource return it."""

class SourceUpload(TypedDict):
    """A presigned upload to S3: the client sends `PUT Url` with these headers and the archive as body. The request needs no token."""
    Url: str
    """Secret. The URL accepts only this archive, because its checksum and length are signed."""
    Headers: dict[str, str]
    ExpirationTime: datetime
    """When the URL expires. After that, CreateSource returns another URL."""

class SparePolicy(TypedDict):
    """A rule from which Everstep computes the number of spares: a required probability that a spare is free. The computation uses the fleet's measured failure rate and replacement times."""
    Probability: float
    """The probability with which a spare must be free when a failure occurs."""

class StoppingCondition(TypedDict):
    """Limits at which a job is stopped."""
    MaxRuntimeInSeconds: NotRequired[int]
    """Limit of the time since the job's first start. Time without nodes after a pause does not count."""
    MaxPendingTimeInSeconds: NotRequired[int]
    """Limit of the time from the job's creation until it gets its first nodes. Independently of this limit, a job that cannot get all of its nodes releases the nodes that it already holds."""
    MaxCostUsd: NotRequired[float]
    """Limit of the cost of the job's nodes, at the fleet's price. At the limit, the job stops as after StopTrainingJob. The fleet must have a price."""

class StoppingConditionUpdate(TypedDict):
    """New limits of a job's duration and cost. The value 0 removes a limit."""
    MaxRuntimeInSeconds: NotRequired[int]
    MaxPendingTimeInSeconds: NotRequired[int]
    MaxCostUsd: NotRequired[float]
    """New cost limit: at least 0.01, or 0 for no limit."""

class StoreWait(TypedDict):
    """The wait of a job for S3, IAM or KMS during a restore."""
    Obstacle: Literal["Denied", "NoCredentials", "Throttled", "NoAnswer", "Garbled", "NoBucket", "Refused"]
    """Why the nodes could not load."""
    Message: str
    """The message of the node that reported the obstacle."""
    Since: datetime
    AttemptCount: int
    """Number of failed attempts since then."""
    NextAttemptTime: datetime

class SubjectDuty(TypedDict):
    """The duty of one job or fleet."""
    TrainingJobName: NotRequired[str]
    """Absent for the duty of a fleet."""
    RunId: NotRequired[str]
    FleetName: str
    Project: str
    Duty: Duty

class TimeSpan(TypedDict):
    """A period in which a job did one thing. Periods have no gaps between them."""
    Bucket: Literal["queue", "provision", "start", "train", "shortage", "stall", "rehearsal", "detect", "replace", "restore", "rework", "stopping", "paused", "unaccounted"]
    """What the job did, as in AccountingSeconds. Time with missing nodes is one period in the bucket `train`."""
    StartTime: datetime
    EndTime: NotRequired[datetime]
    """End of the period. Absent for the newest period of a job that has not ended."""
    MissingNodeCount: int
    """Number of nodes that the job lacked for its NodeCount. Their share of the time counts as `shortage`."""

class Token(TypedDict):
    """A token without its secret."""
    TokenId: str
    Project: NotRequired[str]
    """The project of the token. Absent if the token can access every project."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    Kind: Literal["user", "join"]
    """Kind of the token. user: a token of a person or a program. join: a token with which instances join a fleet."""
    Role: Literal["admin", "submitter", "viewer", "agent"]
    FleetName: NotRequired[str]
    """The fleet of a join token. Absent for other tokens."""
    RevocationTime: NotRequired[datetime]

class TrainingJob(TypedDict):
    """A training job: its configuration, its state, its progress and its cost."""
    TrainingJobName: str
    RunId: str
    FleetName: str
    """The fleet in which the job runs or waits."""
    Project: str
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    SecondaryStatus: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "CompletedWithOlderCheckpoint", "Failed", "Stopped"]
    FinalCheckpointStep: NotRequired[int]
    """Step of the newest checkpoint at the end of a job whose ranks all ended with success; 0 without a checkpoint. If the step lies before Boundary, a completed job has the SecondaryStatus CompletedWithOlderCheckpoint. Absent before the end, and for a job that makes no checkpoint at its end."""
    Reason: str
    """Reason for the job's state, for example the event that the job waits for, or the cause of its end."""
    NodeCount: int
    GenerationNodeCount: int
    """Number of nodes of the current generation. With ElasticConfig, it is below NodeCount while the fleet lacks nodes, and can be above NodeCount after the job has grown. Equals NodeCount before the first generation."""
    Priority: int
    CreationTime: datetime
    LastModifiedTime: datetime
    """Time when the job last changed its state, or when a user last changed the job."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    PurgeTime: NotRequired[datetime]
    """Earliest time at which Everstep deletes a job in the trash for good, with its objects. Absent outside of it."""
    Generation: int
    """Number of the current launch of all ranks; 0 before the first launch."""
    CommittedStep: int
    """The newest step that all holders in view have verified; -1 before the first such step."""
    Boundary: int
    """Number of steps that the ranks of the current generation have finished; -1 before they start."""
    MaxBoundary: int
    """The highest Boundary of any generation: the largest number of steps that the ranks have ever finished."""
    TargetStep: NotRequired[int]
    """The step at which the script ends, as passed to `session.batches(until_step=…)`. Absent if the script passes none."""
    EstimatedRemainingSeconds: NotRequired[float]
    """Time until the ranks reach TargetStep at the job's mean pace, if no failure occurs and the job does not wait. Absent if the pace or the target is unknown, and once the job has ended."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price."""
    AlternativeFleetNames: list[str]
    """The other fleets in which the job may start."""
    SecondaryStatusTransitions: list[SecondaryStatusTransition]
    UnstoredOutputs: list[UnstoredOutput]
    """Outputs of the ranks that are not in S3, at most 50."""
    UnstoredOutputCount: int
    """Number of outputs that are not in S3, including those that UnstoredOutputs does not name."""
    Duty: Duty
    """What a person has to do for the job."""
    RepeatChoice: NotRequired[RepeatChoice]
    """Absent unless the job waits for AcceptLoss."""
    CapacityWait: NotRequired[CapacityWait]
    """The wait for instances that AWS does not launch. Absent if the job waits for none."""
    StoreWait: NotRequired[StoreWait]
    """The wait for S3, IAM or KMS, which prevent a restore. Absent without such a wait."""
    FailureReason: NotRequired[str]
    """Why the job failed. Absent if the job has not failed."""
    Conditions: list[Condition]
    """Current problems of the job's nodes and of the service. Conditions inform people. A condition alone does not make Everstep change the job. Empty once the job has ended."""
    Source: SourceConfig
    EntryPoint: str
    """Path of the Python file that every rank runs, in the source archive."""
    Module: NotRequired[str]
    """The request's Module. Absent if the request named EntryPoint instead."""
    Requirements: NotRequired[str]
    HyperParameters: dict[str, str]
    Arguments: list[str]
    Environment: dict[str, str]
    Secrets: dict[str, str]
    """The location in AWS of each environment variable's value. The values are never shown."""
    RoleArn: NotRequired[str]
    RanksPerNode: int
    Protection: ProtectionConfig
    CheckpointConfig: CheckpointConfig
    CheckpointActivity: CheckpointActivity
    InitialCheckpoint: NotRequired[InitialCheckpoint]
    """The checkpoint of another job from which this job started or will start. Everstep sets all its fields. Absent if the job starts from the script's own initial state."""
    InputDataConfig: list[Channel]
    OutputDataConfig: OutputDataConfig
    StoppingCondition: StoppingCondition
    RetryStrategy: RetryStrategy
    ElasticConfig: ElasticConfig
    Rehearsal: RehearsalConfig
    RehearsalResult: NotRequired[RehearsalResult]
    """The newest result of a rehearsal. Absent before the first."""
    IsRehearsalPending: bool
    """Whether a rehearsal was requested, by a person or by Everstep, and has no result yet."""
    Preemptible: bool
    QueuePosition: NotRequired[int]
    """Position in the fleet's queue, from 1. Absent while the job is not in the queue."""
    QueuedBehind: list[str]
    """Names of the jobs ahead of this job in the queue."""
    Tags: dict[str, str]
    StopRequestedTime: NotRequired[datetime]
    PauseRequestedTime: NotRequired[datetime]
    """Time when a person paused the job. Absent after the job was resumed."""
    Revision: int
    """Revision of the job's configuration: 1 at creation, plus one with each update."""
    ObservedRevision: NotRequired[int]
    """The revision of the configuration that the newest generation uses. Absent before the first generation."""
    TakenOverTime: NotRequired[datetime]
    """Time when a person took control of the job. Everstep only observes the job until the hand-back. Absent if Everstep controls the job."""
    TakenOverBy: NotRequired[str]
    BaseStep: int
    """The step from which the current generation resumed."""
    HealthyNodeCount: int
    """Number of the job's nodes that are connected and report no fault of their own."""
    AssignedNodeCount: int
    """Number of nodes assigned to the job. After the job's end, it is the number of nodes that still hold resources of the job. The job can be deleted once the number is 0."""
    NodeIds: list[str]
    """The job's nodes in the order of GROUP_RANK. Empty while the job has no nodes."""
    CoordinatorNodeId: NotRequired[str]
    IncidentCount: int
    OpenIncidentCount: int
    """Incidents from which the job has not recovered yet."""
    OpenDrillId: NotRequired[str]
    """Id of the drill of this job that has no outcome yet. Absent without such a drill."""
    AccountingSeconds: dict[str, float]
    """The time from CreationTime to AccountedUntil, by accounting bucket. The buckets add up to that time exactly, to the microsecond."""
    AccountedUntil: NotRequired[datetime]
    """Time up to which AccountingSeconds counts. For an ended job, this is the time of its end."""
    Reliability: Reliability
    NodeSeconds: float
    """Total time that nodes have worked for the job."""

class TrainingJobNode(TypedDict):
    """A period in which a node worked for a job."""
    NodeId: str
    StartTime: datetime
    EndTime: NotRequired[datetime]
    """End of the period. Absent while the node works for the job. A node may have several periods."""

class TrainingJobPlan(TypedDict):
    """Forecast for a job, based on its fleet's state and history."""
    FleetName: str
    NodeCount: int
    RanksPerNode: int
    WorldSize: int
    Copies: int
    ParityGroupSize: NotRequired[int]
    """Nodes per parity group. Absent without parity."""
    Elasticity: NotRequired[str]
    """A sentence about the numbers of nodes between which the job may change. Absent if the job always has NodeCount nodes."""
    SlotsPerNode: int
    """Number of memory slots that the job needs on each node: slots per shard × Copies × RanksPerNode. Each slot holds the state of one rank. With parity, the number is slots per shard × 2 × RanksPerNode. Half of these slots hold shares, each with 1 ÷ (ParityGroupSize - 1) of the size of a state."""
    MemoryRatio: float
    """Memory of the job's slots on each node ÷ size of the training state of the node's ranks."""
    CopiesMemoryRatio: NotRequired[float]
    """MemoryRatio of the same job with two copies instead of parity. Absent without parity."""
    NodeMemoryBytes: NotRequired[int]
    """Memory for slots on the fleet's smallest node. Absent while the fleet has no node."""
    LargestShardBytes: NotRequired[int]
    """The largest state per rank that fits into NodeMemoryBytes."""
    RecoveryOdds: list[RecoveryOdds]
    """The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes. The computation assumes that every shard has all its holders."""
    CanStartNow: bool
    """Whether enough nodes are free and connected, and no other job is ahead in the queue."""
    QueuePosition: NotRequired[int]
    """Position in the fleet's queue, from 1. Absent if the job would not wait for other jobs."""
    QueuedBehind: list[str]
    """Names of the jobs that would be ahead in the queue."""
    WaitsFor: NotRequired[str]
    """A sentence that says what the job would wait for."""
    FreeNodeCount: int
    NodesToLaunch: int
    """Number of instances that the fleet would have to launch for the job."""
    CostUsdPerHour: NotRequired[float]
    """The fleet's price × NodeCount. Absent if the fleet has no price."""
    MostCostUsd: NotRequired[float]
    """Upper limit of the cost: the lower of MaxCostUsd and MaxRuntimeInSeconds ÷ 3600 × CostUsdPerHour. The second value exists only if the fleet has a price. Absent if neither value exists."""
    ExpectedMttfSeconds: NotRequired[float]
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount. Absent before the fleet's first incident."""
    ExpectedRecoverySeconds: NotRequired[float]
    """Mean time to recovery of the fleet's closed incidents."""
    ExpectedEttrRatio: NotRequired[float]
    """Expected share of training time, queue excluded. ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds)."""

class TrainingJobRevision(TypedDict):
    """The changes that one update made to a job."""
    Revision: int
    """Number of the revision. Revision 1 is the configuration at creation."""
    Time: datetime
    Changes: list[FieldChange]

class TrainingJobSummary(TypedDict):
    """A training job in a list of jobs, with fewer fields than DescribeTrainingJob returns."""
    TrainingJobName: str
    RunId: str
    FleetName: str
    """The fleet in which the job runs or waits."""
    Project: str
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    SecondaryStatus: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "CompletedWithOlderCheckpoint", "Failed", "Stopped"]
    FinalCheckpointStep: NotRequired[int]
    """Step of the newest checkpoint at the end of a job whose ranks all ended with success; 0 without a checkpoint. If the step lies before Boundary, a completed job has the SecondaryStatus CompletedWithOlderCheckpoint. Absent before the end, and for a job that makes no checkpoint at its end."""
    Reason: str
    """Reason for the job's state, for example the event that the job waits for, or the cause of its end."""
    NodeCount: int
    GenerationNodeCount: int
    """Number of nodes of the current generation. With ElasticConfig, it is below NodeCount while the fleet lacks nodes, and can be above NodeCount after the job has grown. Equals NodeCount before the first generation."""
    Priority: int
    CreationTime: datetime
    LastModifiedTime: datetime
    """Time when the job last changed its state, or when a user last changed the job."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    PurgeTime: NotRequired[datetime]
    """Earliest time at which Everstep deletes a job in the trash for good, with its objects. Absent outside of it."""
    Generation: int
    """Number of the current launch of all ranks; 0 before the first launch."""
    CommittedStep: int
    """The newest step that all holders in view have verified; -1 before the first such step."""
    Boundary: int
    """Number of steps that the ranks of the current generation have finished; -1 before they start."""
    MaxBoundary: int
    """The highest Boundary of any generation: the largest number of steps that the ranks have ever finished."""
    TargetStep: NotRequired[int]
    """The step at which the script ends, as passed to `session.batches(until_step=…)`. Absent if the script passes none."""
    EstimatedRemainingSeconds: NotRequired[float]
    """Time until the ranks reach TargetStep at the job's mean pace, if no failure occurs and the job does not wait. Absent if the pace or the target is unknown, and once the job has ended."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price."""
    EttrRatio: NotRequired[float]
    """Effective training time ratio, as in Reliability. Absent before the job has started."""
    ProtectionState: NotRequired[Literal["Protected", "Degraded", "Unprotected"]]
    """Protection of the job's state, as in DescribeProtection. Only in lists. Absent while no agent holds the job's state: before the first launch, while the job is paused, and after its end."""
    SurvivesNodeLoss: NotRequired[bool]
    """Whether memory keeps the job's state after the loss of any one node. Only in lists. Absent whenever ProtectionState is absent."""
    AssignedNodeCount: NotRequired[int]
    """AssignedNodeCount of the job, as in TrainingJob. Only in lists."""
    HealthyNodeCount: NotRequired[int]
    """Number of the job's nodes that are connected and report no fault of their own. Only in lists."""
    IncidentCount: NotRequired[int]
    """Number of the job's incidents. Only in lists."""
    OpenIncidentCount: NotRequired[int]
    """Number of incidents from which the job has not recovered yet. Only in lists."""
    Duty: NotRequired[Duty]
    """What a person has to do for the job, as in TrainingJob. Only in lists."""

class UnstoredOutput(TypedDict):
    """A file, link or other entry of a rank's output directory that is not in S3."""
    Path: str
    """Path below the job's outputs: `gen=1/rank=0/latest`. Bytes that are not UTF-8 are escaped."""
    Cause: Literal["Outside", "NotAFile", "Name", "Unreadable", "Refused", "NotKept", "TooMany"]

class UpdateTrainingJobResponse(TypedDict):
    """The job's newest revision and its changes."""
    TrainingJobName: str
    RunId: str
    Revision: int
    Changes: list[FieldChange]
    """The changed fields. Empty if all fields already had the requested values. The update then creates no revision."""

class PaginatorConfig(TypedDict, total=False):
    MaxItems: int
    PageSize: int
    StartingToken: str

class ListAuditEntriesPages(Protocol):
    def __iter__(self) -> Iterator[ListAuditEntriesResponse]: ...
    def build_full_result(self) -> ListAuditEntriesResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListAuditEntriesPaginator(Protocol):
    def paginate(self, *, Operation: str = ..., TokenId: str = ..., Project: str = ..., TimeAfter: datetime | float | str = ..., TimeBefore: datetime | float | str = ..., PaginationConfig: PaginatorConfig = ...) -> ListAuditEntriesPages: ...

class ListCheckpointsPages(Protocol):
    def __iter__(self) -> Iterator[ListCheckpointsResponse]: ...
    def build_full_result(self) -> ListCheckpointsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListCheckpointsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, MinStep: int = ..., Trashed: bool = ..., PaginationConfig: PaginatorConfig = ...) -> ListCheckpointsPages: ...

class ListDrillsPages(Protocol):
    def __iter__(self) -> Iterator[ListDrillsResponse]: ...
    def build_full_result(self) -> ListDrillsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListDrillsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str = ..., PaginationConfig: PaginatorConfig = ...) -> ListDrillsPages: ...

class ListEventsPages(Protocol):
    def __iter__(self) -> Iterator[ListEventsResponse]: ...
    def build_full_result(self) -> ListEventsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListEventsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str = ..., FleetName: str = ..., AfterEventId: int = ..., TimeAfter: datetime | float | str = ..., TimeBefore: datetime | float | str = ..., SortOrder: Literal["Ascending", "Descending"] = ..., PaginationConfig: PaginatorConfig = ...) -> ListEventsPages: ...

class ListFleetsPages(Protocol):
    def __iter__(self) -> Iterator[ListFleetsResponse]: ...
    def build_full_result(self) -> ListFleetsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListFleetsPaginator(Protocol):
    def paginate(self, *, PaginationConfig: PaginatorConfig = ...) -> ListFleetsPages: ...

class ListIncidentsPages(Protocol):
    def __iter__(self) -> Iterator[ListIncidentsResponse]: ...
    def build_full_result(self) -> ListIncidentsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListIncidentsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str = ..., StatusEquals: Literal["Open", "Closed"] = ..., SortOrder: Literal["Ascending", "Descending"] = ..., PaginationConfig: PaginatorConfig = ...) -> ListIncidentsPages: ...

class ListNodesPages(Protocol):
    def __iter__(self) -> Iterator[ListNodesResponse]: ...
    def build_full_result(self) -> ListNodesResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListNodesPaginator(Protocol):
    def paginate(self, *, FleetName: str = ..., IncludeEnded: bool = ..., PaginationConfig: PaginatorConfig = ...) -> ListNodesPages: ...

class ListOutputsPages(Protocol):
    def __iter__(self) -> Iterator[ListOutputsResponse]: ...
    def build_full_result(self) -> ListOutputsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListOutputsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, PaginationConfig: PaginatorConfig = ...) -> ListOutputsPages: ...

class ListProjectQuotasPages(Protocol):
    def __iter__(self) -> Iterator[ListProjectQuotasResponse]: ...
    def build_full_result(self) -> ListProjectQuotasResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListProjectQuotasPaginator(Protocol):
    def paginate(self, *, PaginationConfig: PaginatorConfig = ...) -> ListProjectQuotasPages: ...

class ListTimeSpansPages(Protocol):
    def __iter__(self) -> Iterator[ListTimeSpansResponse]: ...
    def build_full_result(self) -> ListTimeSpansResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListTimeSpansPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, PaginationConfig: PaginatorConfig = ...) -> ListTimeSpansPages: ...

class ListTokensPages(Protocol):
    def __iter__(self) -> Iterator[ListTokensResponse]: ...
    def build_full_result(self) -> ListTokensResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListTokensPaginator(Protocol):
    def paginate(self, *, Project: str = ..., IncludeEnded: bool = ..., PaginationConfig: PaginatorConfig = ...) -> ListTokensPages: ...

class ListTrainingJobNodesPages(Protocol):
    def __iter__(self) -> Iterator[ListTrainingJobNodesResponse]: ...
    def build_full_result(self) -> ListTrainingJobNodesResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListTrainingJobNodesPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, PaginationConfig: PaginatorConfig = ...) -> ListTrainingJobNodesPages: ...

class ListTrainingJobRevisionsPages(Protocol):
    def __iter__(self) -> Iterator[ListTrainingJobRevisionsResponse]: ...
    def build_full_result(self) -> ListTrainingJobRevisionsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListTrainingJobRevisionsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, PaginationConfig: PaginatorConfig = ...) -> ListTrainingJobRevisionsPages: ...

class ListTrainingJobsPages(Protocol):
    def __iter__(self) -> Iterator[ListTrainingJobsResponse]: ...
    def build_full_result(self) -> ListTrainingJobsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListTrainingJobsPaginator(Protocol):
    def paginate(self, *, StatusEquals: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"] = ..., NameContains: str = ..., FleetName: str = ..., Project: str = ..., CreationTimeAfter: datetime | float | str = ..., CreationTimeBefore: datetime | float | str = ..., LastModifiedTimeAfter: datetime | float | str = ..., LastModifiedTimeBefore: datetime | float | str = ..., TagKey: str = ..., TagValue: str = ..., SortBy: Literal["CreationTime", "LastModifiedTime", "Name"] = ..., SortOrder: Literal["Ascending", "Descending"] = ..., ChangesSince: str = ..., PaginationConfig: PaginatorConfig = ...) -> ListTrainingJobsPages: ...

class WaiterConfig(TypedDict, total=False):
    Delay: int
    MaxAttempts: int

class TrainingJobRunningWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the ranks train. Fails when the job has ended or is being stopped."""

class TrainingJobRecoveredWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until no incident is open and the ranks train, or the job has completed. Fails when the job has ended another way. A failure that is not detected yet does not count: after you hurt a job, wait for its incident first."""

class TrainingJobCompletedOrStoppedWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the job has completed or was stopped and its nodes are released, so that it can be deleted. Fails when the job has failed."""

class TrainingJobPausedWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until a paused job has released its nodes. Fails when the job has ended or is being stopped."""

class FleetReadyWaiter(Protocol):
    def wait(self, *, FleetName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until every desired node of the fleet is connected; a fleet without desired nodes is ready at once. Fails when the fleet is frozen or being deleted."""

class DrillsOverWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the result of every drill of the job is known."""

class CheckpointAvailableWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, MinStep: int = ..., Trashed: bool = ..., MaxResults: int = ..., NextToken: str = ..., WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the job has a complete checkpoint in S3. With MinStep, as CreateCheckpoint returned it, the checkpoint has that step or a later one. Fails when the job has ended without it."""

class Exceptions(Protocol):
    ClientError: type[Refusal]
    AccessDeniedException: type[Refusal]
    ConflictException: type[Refusal]
    InternalServerException: type[Refusal]
    ResourceNotFoundException: type[Refusal]
    ServiceUnavailableException: type[Refusal]
    ThrottlingException: type[Refusal]
    ValidationException: type[Refusal]

class EverstepClient(Protocol):
    """Trains large models on EC2 Auto Scaling groups and keeps every optimizer step in cluster memory."""
    meta: ClientMeta
    exceptions: Exceptions
    def close(self) -> None: ...
    def can_paginate(self, operation_name: str) -> bool: ...
    def accept_loss(self, *, TrainingJobName: str, FromStep: int) -> TrainingJobSummary:
        """Let a job that waits for a decision (RepeatChoice) continue from FromStep, and repeat the training since then. The consent is valid for this recovery and for FromStep or a later step. Repeated calls change nothing. Raises ConflictException if the job waits for no decision, or can now restore another step than FromStep."""
    def acknowledge_incident(self, *, IncidentId: str, Note: str = ...) -> Incident:
        """Confirm that a person has seen an incident, with a note. The acknowledgement does not affect the recovery. The service stores only the first acknowledgement."""
    def batch_get_loss_curves(self, *, RunIds: str, MaxPoints: int = ...) -> BatchGetLossCurvesResponse:
        """Get the training loss of up to 50 jobs in a few points each. RunIds contains run ids, separated by commas. The loss of a job is its metric `loss`, `train/loss` or `train_loss`, or else the metric with the shortest name that contains `loss`. Jobs without such a metric, and jobs that the caller may not see, are absent. Points have equal distances in steps, and the last point is the newest value."""
    def complete_source(self, *, SourceId: str) -> PutSourceResponse:
        """Check an archive that was uploaded to the URL of CreateSource. After that, jobs can use the source. Repeated calls change nothing. Raises ConflictException if no archive was uploaded. Raises ValidationException if the archive is too large or invalid, and then deletes the upload, unless it has another SHA-256 than `SourceId`. Raises ServiceUnavailableException if S3 returns only a part of the upload, and ThrottlingException while too many archives of the project arrive."""
    def create_checkpoint(self, *, TrainingJobName: str) -> CreateCheckpointResponse:
        """Request a checkpoint in S3 of a running job's newest committed step or of a later step. While a requested checkpoint is not complete, repeated calls change nothing. Raises ConflictException if the job has no checkpoint of its newest step and cannot make one. The job is then not running, or has no committed step."""
    def create_fleet(self, *, FleetName: str, AutoScalingGroupName: str, SpareCount: int = ..., SparePolicy: SparePolicy = ..., MinNodeCount: int = ..., PriceUsdPerHour: float = ..., HoldFailedInstances: bool = ..., MaxReplacementsPerHour: int = ..., NodeRoleName: str = ..., AllowDrills: bool = ..., AllowCommands: bool = ..., ReplicaEncryption: Literal["Auto", "On", "Off"] = ..., Project: str = ..., Tags: Mapping[str, str] = ..., DryRun: bool = ..., ExpectedChanges: Sequence[GroupChange] = ...) -> CreateFleetResponse:
        """Register an Auto Scaling group as a fleet. From then on, only Everstep may resize the group and terminate its instances. The response lists the changes made to the group. With DryRun, the call changes and creates nothing and returns the planned changes. Pass these as ExpectedChanges to make the call fail if it would change anything else."""
    def create_incident_note(self, *, IncidentId: str, Text: str, ClientRequestToken: str = ...) -> Note:
        """Add a note to an incident. The caller's token is the author. Raises ConflictException if the incident has 100 notes."""
    def create_join_token(self, *, FleetName: str, ExpiresInSeconds: int = ...) -> CreateJoinTokenResponse:
        """Create a join token for a fleet's launch template. Each instance of the fleet's Auto Scaling group can use the token once. Other instances cannot use it."""
    def create_source(self, *, SourceId: str, Bytes: int) -> CreateSourceResponse:
        """Request a presigned S3 URL for the upload of a source archive. The URL accepts only this archive and expires after fifteen minutes. If `IsStored` is true, no upload is needed. A repeated call returns another URL. Raises ValidationException if the archive is larger than the service allows."""
    def create_token(self, *, Role: Literal["admin", "submitter", "viewer"], Project: str = ..., Description: str = ..., ExpiresInSeconds: int = ...) -> CreateTokenResponse:
        """Create a token. Only this response contains the secret. A repeated call creates another token. Raises ValidationException if a request for an `admin` token names a project."""
    def create_training_job(self, *, TrainingJobName: str, Source: SourceConfig, NodeCount: int, ClientRequestToken: str = ..., FleetName: str = ..., AlternativeFleetNames: Sequence[str] = ..., EntryPoint: str = ..., Module: str = ..., Requirements: str = ..., HyperParameters: Mapping[str, str] = ..., Arguments: Sequence[str] = ..., Environment: Mapping[str, str] = ..., Secrets: Mapping[str, str] = ..., RoleArn: str = ..., RanksPerNode: int = ..., Protection: ProtectionConfig = ..., CheckpointConfig: CheckpointConfig = ..., InitialCheckpoint: InitialCheckpoint = ..., InputDataConfig: Sequence[Channel] = ..., OutputDataConfig: OutputDataConfig = ..., StoppingCondition: StoppingCondition = ..., RetryStrategy: RetryStrategy = ..., ElasticConfig: ElasticConfig = ..., Rehearsal: RehearsalConfig = ..., Priority: int = ..., Preemptible: bool = ..., Project: str = ..., Tags: Mapping[str, str] = ..., DryRun: bool = ...) -> CreateTrainingJobResponse:
        """Create a training job, which starts once enough nodes are free. The job recovers from failures of ranks and nodes. With DryRun, the call creates nothing and returns a forecast for the job (Plan). Raises ValidationException if the name has the form of a RunId, 32 hexadecimal digits. Raises ConflictException if the project has a job with this name."""
    def create_training_job_note(self, *, TrainingJobName: str, Text: str, ClientRequestToken: str = ...) -> Note:
        """Add a note to a training job, ended or not. The caller's token is the author. Raises ConflictException if the job has 100 notes."""
    def delete_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ..., SkipTrash: bool = ...) -> Checkpoint:
        """Move a checkpoint to the trash, from which Everstep deletes it after CheckpointConfig.TrashHours. Until then, UndeleteCheckpoint returns it. With SkipTrash, or with TrashHours 0, the call deletes the checkpoint from S3 for good, in the trash or not. Raises ConflictException for a pinned checkpoint, for the checkpoint from which an unfinished job would be restored next, and for a checkpoint that another unfinished job names as its InitialCheckpoint. After a restore of the database, a deletion for good needs `everstep db restored` first."""
    def delete_fleet(self, *, FleetName: str) -> Fleet:
        """End a fleet's nodes and delete the fleet. Fails while jobs of the fleet have not ended. Repeated calls change nothing."""
    def delete_project_quota(self, *, Project: str) -> ProjectQuota:
        """Delete a project's quota."""
    def delete_training_job(self, *, TrainingJobName: str, DeleteObjects: bool = ..., SkipTrash: bool = ..., DryRun: bool = ...) -> DeleteTrainingJobResponse:
        """Delete the records of a training job that has ended. Its objects in S3 remain unless DeleteObjects is set. With DeleteObjects, the job and its checkpoints stay in the trash for CheckpointConfig.TrashHours, and UndeleteTrainingJob returns them. Then the service deletes the job with its checkpoints, logs and outputs. With SkipTrash, or with TrashHours 0, the call deletes them for good, in the trash or not. With DryRun, the call deletes nothing and returns what it would delete. Raises ConflictException if the job has not ended, if a node still works for it, if an unfinished job starts from one of its checkpoints, or if DeleteObjects is set and a checkpoint is pinned. After a restore of the database, a deletion for good needs `everstep db restored` first."""
    def describe_automation(self) -> Automation:
        """Return whether the service's automatic actions are active or paused, and who paused them."""
    def describe_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Describe one checkpoint: where its manifest is, whether it is complete and pinned, and its last verification. Until DeleteTrainingJob, the operation also describes a deleted checkpoint, with the status Deleted."""
    def describe_duties(self) -> DescribeDutiesResponse:
        """List the jobs and fleets that need a person now or later, the most urgent first, then the newest. A job that failed longer than a day ago needs nobody. A held node is listed with its fleet, and not again with the job that lost it."""
    def describe_fleet(self, *, FleetName: str) -> Fleet:
        """Describe one fleet."""
    def describe_incident(self, *, IncidentId: str) -> Incident:
        """Describe one incident: its evidence, the decision with its reason, and the cost."""
    def describe_node(self, *, NodeId: str) -> Node:
        """Describe one node."""
    def describe_protection(self, *, TrainingJobName: str) -> DescribeProtectionResponse:
        """Describe which nodes hold which shards of a job at this moment."""
    def describe_source(self, *, SourceId: str) -> PutSourceResponse:
        """Check whether a source is stored already, so that the client can skip the upload."""
    def describe_training_job(self, *, TrainingJobName: str) -> TrainingJob:
        """Describe one training job: its configuration, its state, and the reason for the state."""
    def drain_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Move a node's job to another node, then keep the drained node out of use until ReleaseNode. Once the other node is ready, all ranks stop at the same step, and the job continues on that node. The job loses no step. Repeated calls change nothing."""
    def execute_command(self, *, TrainingJobName: str, Rank: int, Command: Sequence[str], TimeoutInSeconds: int = ..., Stdin: str = ..., ClientRequestToken: str = ...) -> ExecuteCommandResponse:
        """Run a program on the node of a rank and return its output, for example `py-spy dump --pid {pid}`. Requires a fleet with AllowCommands. The program runs as the Linux user of the job's ranks: a uid of the job's own, by default from 61101 to 61163. If the agent is not root or has `--rank-user root`, that is the agent's user. The program runs in the rank's cgroup, with RANK and EVERSTEP_RANK_PID in its environment. It has neither a shell nor a terminal. An event records the caller and the command. Raises ConflictException if the ClientRequestToken belongs to another command or the agent did not run the program. Raises ThrottlingException if too many commands run. Raises ServiceUnavailableException if the agent is not connected or does not answer in time; in the second case, the program may have run."""
    def export_incident(self, *, IncidentId: str, Format: Literal["markdown"] = ...) -> ExportIncidentResponse:
        """Return the post-mortem of an incident as a document. The document contains what failed, the job's state, the impact, the timeline in UTC, the evidence, the decision, the last log lines and stacks before the failure, the notes, similar incidents, and what to do. If S3 does not return the log, the document says so."""
    def follow_logs(self, *, TrainingJobName: str, Rank: int = ..., Generation: int = ..., StartTime: datetime | float | str = ..., FilterPattern: str = ..., StartFromHead: bool = ..., NextToken: str = ...) -> FollowLogsResponse:
        """Follow the lines that a job's ranks print. The stream starts after NextToken, or at the beginning with StartFromHead or StartTime, else with the next new line. Each event has lines and a token from which a new call continues, for example after a disconnect. Agents send lines as they are printed; if an agent is unreachable, the lines come from the object store. Every line appears once. The stream ends after the last line of an ended job. Raises ThrottlingException if too many streams are open."""
    def get_caller_identity(self) -> GetCallerIdentityResponse:
        """Return the caller's token: its role, project and expiry."""
    def get_health(self) -> HealthResponse:
        """Return the server's version and the problems that a person must resolve. A degraded server also returns status 200, because it still answers requests."""
    def get_log_events(self, *, TrainingJobName: str, Rank: int = ..., Generation: int = ..., StartTime: datetime | float | str = ..., EndTime: datetime | float | str = ..., FilterPattern: str = ..., StartFromHead: bool = ..., Limit: int = ..., NextToken: str = ...) -> GetLogEventsResponse:
        """Read the lines that a job's ranks printed, merged by time over all ranks, generation by generation. Without NextToken, the response has the newest lines, or with StartFromHead the oldest. FilterPattern selects the lines that contain its text. Pass NextForwardToken as NextToken for later lines, and NextBackwardToken for earlier lines. A page may be short or empty although further lines exist. If no further lines exist now, the response returns the token that the request passed. Lines that a lost node could not upload appear as one event of the stream `gap`."""
    def get_metric_data(self, *, TrainingJobName: str, MetricName: str = ..., FirstStep: int = ..., LastStep: int = ..., StartTime: datetime | float | str = ..., EndTime: datetime | float | str = ..., ResolutionInSteps: int = ..., ResolutionInSeconds: int = ..., MaxPoints: int = ..., Series: Literal["Node", "Rank"] = ..., ChangesSince: str = ...) -> GetMetricDataResponse:
        """Get the values that a job's rank 0 logged and that Everstep measured on the job's nodes. If a step was repeated after a failure, the value of the last repetition is returned. The newest 4,096 steps have one point each, older steps one point per 8, 64, 512 … steps. If MaxPoints or a resolution requests fewer points, the service merges neighbouring points. If a resolution would return more than MaxPoints points, the service doubles the number of steps per point until the limit is met. With ChangesSince, the response contains only the points that changed: new points, and all points after a step to which a recovery returned. Raises ValidationException if a request sets both ResolutionInSteps and ResolutionInSeconds. With Series and MetricName, the response contains only the points for which the service has stored the value of each node or rank. It contains these values, too. The service stores them every few seconds, and only for jobs of 2 to 64 nodes or ranks. Raises ValidationException for Series without MetricName, and for a metric without such values."""
    def get_output(self, *, TrainingJobName: str, Key: str) -> GetOutputResponse:
        """Download one output file, by a key from ListOutputs. A browser stores the response as a file and never shows it as a page. Raises ThrottlingException while the server sends too many outputs to this token."""
    def get_readiness(self) -> ReadinessResponse:
        """Return whether a load balancer should send requests to this server. A server is ready if it can read and write the database, its background loops complete their passes in time, and a server of the installation manages each fleet. A server that is not ready may still work: do not restart it for that reason. Raises ServiceUnavailableException if the server is not ready. The message names each reason."""
    def get_report(self, *, StartTime: datetime | float | str = ..., EndTime: datetime | float | str = ..., Period: Literal["Hour", "Day", "Week"] = ..., Project: str = ..., FleetName: str = ..., MaxJobs: int = ...) -> Report:
        """Report time, cost and incidents of jobs and fleets over a time range, and their trend. A token of one project sees only that project's jobs and fleets. Raises ValidationException if EndTime is not after StartTime, or if the range has too many buckets, jobs or incidents for one report."""
    def hand_back_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """End a person's takeover of a job, so that Everstep controls the job again. Repeated calls change nothing."""
    def hold_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Keep a node without a job out of use until ReleaseNode. Repeated calls change nothing."""
    def hold_snapshot(self, *, TrainingJobName: str, SnapshotId: str = ..., ClientRequestToken: str = ...) -> HoldSnapshotResponse:
        """Keep the newest committed step of a running job in memory, so that ReadSnapshot can read it. While a job without ThirdSlot holds a snapshot, it commits no further steps; training continues. The hold ends at ReleaseSnapshot, when the job stops or starts again, or HoldInSeconds after the last HoldSnapshot or ReadSnapshot. It also ends if AWS announces the end of a node and the job needs the memory for a checkpoint. A job holds one snapshot at a time. Raises ConflictException if the job is not running, has no committed step, holds another snapshot, or no longer holds the requested one. Raises ServiceUnavailableException if an agent is not connected to this server."""
    def list_audit_entries(self, *, Operation: str = ..., TokenId: str = ..., Project: str = ..., TimeAfter: datetime | float | str = ..., TimeBefore: datetime | float | str = ..., MaxResults: int = ..., NextToken: str = ...) -> ListAuditEntriesResponse:
        """List the calls that create, change or delete resources, newest first. The log contains every such call with a valid token, refused calls included. Reads and dry runs have no entry."""
    def list_checkpoints(self, *, TrainingJobName: str, MinStep: int = ..., Trashed: bool = ..., MaxResults: int = ..., NextToken: str = ...) -> ListCheckpointsResponse:
        """List a job's checkpoints in S3, newest step first. With Trashed, list those in the trash instead. With MinStep, the list contains only that step and later ones. CreateCheckpoint returns a suitable MinStep."""
    def list_drills(self, *, TrainingJobName: str = ..., MaxResults: int = ..., NextToken: str = ...) -> ListDrillsResponse:
        """List the drills of all jobs or of one job, in the order of their requests."""
    def list_events(self, *, TrainingJobName: str = ..., FleetName: str = ..., AfterEventId: int = ..., TimeAfter: datetime | float | str = ..., TimeBefore: datetime | float | str = ..., MaxResults: int = ..., NextToken: str = ..., SortOrder: Literal["Ascending", "Descending"] = ...) -> ListEventsResponse:
        """List events, oldest first, or newest first with SortOrder Descending. To poll for new events, pass the last `EventId` as `AfterEventId`."""
    def list_fleets(self, *, MaxResults: int = ..., NextToken: str = ...) -> ListFleetsResponse:
        """List fleets, sorted by name."""
    def list_incidents(self, *, TrainingJobName: str = ..., StatusEquals: Literal["Open", "Closed"] = ..., MaxResults: int = ..., NextToken: str = ..., SortOrder: Literal["Ascending", "Descending"] = ...) -> ListIncidentsResponse:
        """List the incidents of all jobs or of one job, in the order in which they were opened. SortOrder Descending lists the newest first. StatusEquals selects open or closed incidents."""
    def list_metrics(self, *, TrainingJobName: str) -> ListMetricsResponse:
        """List the metrics of a job, with the last value of each."""
    def list_nodes(self, *, FleetName: str = ..., IncludeEnded: bool = ..., MaxResults: int = ..., NextToken: str = ...) -> ListNodesResponse:
        """List nodes, oldest first. IncludeEnded adds nodes that have ended."""
    def list_outputs(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListOutputsResponse:
        """List the files that a job's ranks wrote into EVERSTEP_OUTPUT_DIR, by generation. A page can have fewer entries than MaxResults although more follow."""
    def list_project_quotas(self, *, MaxResults: int = ..., NextToken: str = ...) -> ListProjectQuotasResponse:
        """List quotas by project. A token of one project sees only that project's quota."""
    def list_similar_incidents(self, *, IncidentId: str, MaxResults: int = ...) -> ListSimilarIncidentsResponse:
        """List the incidents of the same cause and project that are most similar to a given incident, and how they ended. Incidents on the same instance come first, then incidents on the same instance type, then incidents in the same fleet. The service compares the newest 200 incidents of the cause."""
    def list_time_spans(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListTimeSpansResponse:
        """List what a job did in each second of its life: the periods whose sums are AccountingSeconds. A late report can still change the newest periods."""
    def list_tokens(self, *, Project: str = ..., IncludeEnded: bool = ..., MaxResults: int = ..., NextToken: str = ...) -> ListTokensResponse:
        """List tokens, oldest first, without secrets. IncludeEnded adds revoked and expired tokens."""
    def list_training_job_nodes(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListTrainingJobNodesResponse:
        """List the nodes that worked for a job, with the periods of their work. Covers the newest 400 launches."""
    def list_training_job_notes(self, *, TrainingJobName: str) -> ListTrainingJobNotesResponse:
        """List the notes of a training job, without the notes of its incidents."""
    def list_training_job_revisions(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListTrainingJobRevisionsResponse:
        """List the revisions of a training job, oldest first."""
    def list_training_jobs(self, *, MaxResults: int = ..., NextToken: str = ..., StatusEquals: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"] = ..., NameContains: str = ..., FleetName: str = ..., Project: str = ..., CreationTimeAfter: datetime | float | str = ..., CreationTimeBefore: datetime | float | str = ..., LastModifiedTimeAfter: datetime | float | str = ..., LastModifiedTimeBefore: datetime | float | str = ..., TagKey: str = ..., TagValue: str = ..., SortBy: Literal["CreationTime", "LastModifiedTime", "Name"] = ..., SortOrder: Literal["Ascending", "Descending"] = ..., ChangesSince: str = ...) -> ListTrainingJobsResponse:
        """List training jobs, newest first unless SortBy or SortOrder is set. A job must match all filters. With ChangesSince, the response omits jobs whose entry did not change, and names those that left the page. Raises ValidationException if TagValue is set without TagKey."""
    def pause_automation(self, *, Reason: str) -> Automation:
        """Pause all automatic actions until ResumeAutomation, also across restarts of the service. During the pause, the service terminates, launches and reboots no instance, starts and restarts no job, and deletes no checkpoint. Running jobs continue to train and to store snapshots and checkpoints. The service still halts ranks of ended generations. It still accepts requests for jobs and nodes, which take effect after the pause. Actions that the service has already begun may continue for up to a second. If automation is already paused for the same reason, the call changes nothing. Raises ConflictException if automation is paused for another reason."""
    def pause_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Pause a training job: all ranks stop at one agreed step, which is stored in S3. The job gives its nodes back to the fleet until ResumeTrainingJob. A job that is being launched pauses once it trains. Repeated calls change nothing."""
    def pin_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Protect a checkpoint from deletion until UnpinCheckpoint."""
    def put_project_quota(self, *, Project: str, MaxNodeCount: int = ..., MaxJobCount: int = ..., MaxSourceBytes: int = ..., MaxPriority: int = ..., AllowedRoleArns: Sequence[str] = ..., AllowedSecrets: Sequence[str] = ..., AllowedData: Sequence[str] = ...) -> ProjectQuota:
        """Create or replace the quota of a project. A lower quota does not stop running jobs."""
    def put_source(self, *, SourceId: str, Body: bytes | BinaryIO) -> PutSourceResponse:
        """Upload a gzipped tar of a user's code. `SourceId` is the SHA-256 of the archive. A call with an archive that is stored already changes nothing. Raises ValidationException if the archive is too large or invalid. Raises ConflictException if the project's quota has too little space, and ThrottlingException while too many archives of the project arrive."""
    def read_snapshot(self, *, TrainingJobName: str, SnapshotId: str, Rank: int, Begin: int, End: int) -> ReadSnapshotResponse:
        """Read the bytes from Begin to End, exclusive, of a shard that its node has kept since HoldSnapshot. The shard has the format of a checkpoint object in S3. The bytes pass through this server. Each read extends the hold, so the caller needs the same role as for HoldSnapshot. Raises ValidationException if the range is empty or too large, or if the job has no such rank. Raises ConflictException if the snapshot is no longer held. Raises ServiceUnavailableException if the agent is not connected to this server or does not answer."""
    def reboot_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Move the job off a node as DrainNode does, then reboot the node and return it to service. Repeated calls change nothing."""
    def rehearse_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Rehearse a training job's resume at any cost, as soon as the job trains. DescribeTrainingJob returns the result. While a rehearsal is pending, further calls request no further one. Raises ConflictException if the job's Rehearsal.Mode is Off, and for a determinism check."""
    def release_node(self, *, NodeId: str, Terminate: bool = ...) -> Node:
        """End the hold of a node that Everstep keeps out of use: return it to service, or terminate its instance. If the node is not held yet, cancel the pending request to hold it. Everstep terminates a node that is held for inspection only after data for the inspection is stored in S3. Repeated calls change nothing."""
    def release_snapshot(self, *, TrainingJobName: str, SnapshotId: str) -> ReleaseSnapshotResponse:
        """End the hold of a snapshot, so that the job may overwrite it. Repeated calls change nothing."""
    def replace_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Move the job off a node as DrainNode does, then terminate the node's instance and launch a new one. Repeated calls change nothing."""
    def reset_node_session(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Revoke the session of a node's agent, and permit the node to join again with a join token. Use this operation for an instance that lost its state directory, or whose session may have been copied. The agent's open connection ends within ten seconds. A repeated call also revokes the session that the agent has received since."""
    def resume_automation(self) -> Automation:
        """Resume all automatic actions. Repeated calls change nothing. The service then responds to everything that happened during the pause, for example to lost nodes."""
    def resume_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Resume a paused training job: it waits in the queue, then continues bit-identically from its checkpoint. The call does not change a job that is not paused."""
    def revoke_token(self, *, TokenId: str) -> Token:
        """Revoke a token. New requests and browser sessions of the token fail immediately. Its open streams end within a second. If the token is a join token, agents that have joined with it stay connected."""
    def start_drill(self, *, TrainingJobName: str, DrillType: Literal["kill-rank", "kill-agent", "terminate-instance"], NodeId: str = ..., Rank: int = ...) -> Drill:
        """Inject one fault into a training job. Raises AccessDeniedException if the job's fleet does not set AllowDrills. Raises ConflictException if the job is not training, or if a person controls it (TakeOverTrainingJob)."""
    def start_fleet_roll(self, *, FleetName: str, MaxUnavailable: int = ..., Reboot: bool = ..., Reason: str = ...) -> Fleet:
        """Replace or reboot all nodes of a fleet, a few at a time, and lose no step of its jobs. The roll begins with another node only while every launched job of the fleet trains without an open incident and has all its copies. All ranks of a job stop at the same step before the job gives up a node, as with ReplaceNode. The roll replaces or reboots spares first. It skips nodes in state `held` (kept out of use). A repeated call with the same settings changes nothing. Raises ConflictException while another roll of the fleet has not ended, and for a fleet that is being deleted."""
    def stop_fleet_roll(self, *, FleetName: str) -> Fleet:
        """End the fleet's roll, the replacement or reboot of all its nodes. The roll moves no further jobs. Nodes that it has already taken out of service are still replaced or rebooted. Fails if the fleet's newest roll is complete. Repeated calls change nothing."""
    def stop_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Stop a training job: all ranks stop at the same step, and Everstep stores their state at this step. Repeated calls change nothing."""
    def take_over_training_job(self, *, TrainingJobName: str, Reason: str = ...) -> TrainingJobSummary:
        """Take control of a job: until HandBackTrainingJob, Everstep observes it but makes no decision. Everstep continues to halt ranks of ended generations. Requests for the job, including a stop, wait until the hand-back. If the job is already taken over, the call changes nothing. Raises ConflictException if the job has not started or has ended."""
    def undelete_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Take a checkpoint out of the trash, and pin it. Its job leaves the trash, too, with its logs and outputs. Without the pin, the job's limits could delete the checkpoint again. Raises ConflictException for a checkpoint that is being deleted or was deleted."""
    def undelete_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Take a training job out of the trash, with all of its checkpoints that are in the trash. A job that is not in the trash stays unchanged. Raises ConflictException if the job's purge has begun."""
    def unfreeze_fleet(self, *, FleetName: str) -> Fleet:
        """Confirm that the silent nodes of a mostly silent fleet are lost, so that Everstep replaces them. The confirmation expires once most of the fleet is connected again. It has no effect on drift: while the settings of the Auto Scaling group differ from those that Everstep needs, Everstep still replaces no node."""
    def unpin_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Allow the deletion of a pinned checkpoint again."""
    def update_fleet(self, *, FleetName: str, SpareCount: int = ..., SparePolicy: SparePolicy = ..., MinNodeCount: int = ..., PriceUsdPerHour: float = ..., HoldFailedInstances: bool = ..., MaxReplacementsPerHour: int = ..., NodeRoleName: str = ..., AllowDrills: bool = ..., AllowCommands: bool = ..., ReplicaEncryption: Literal["Auto", "On", "Off"] = ...) -> Fleet:
        """Change a fleet's settings: node and spare counts, price, and how failed nodes are handled."""
    def update_fleet_roll(self, *, FleetName: str, MaxUnavailable: int = ..., Paused: bool = ...) -> Fleet:
        """Pause or continue a fleet's roll, or change how many nodes may be out of service at the same time. A roll is the replacement or reboot of all nodes of the fleet."""
    def update_incident(self, *, IncidentId: str, Owner: str = ...) -> Incident:
        """Set or remove the owner of an incident: the person who takes care of it. The owner does not affect the recovery."""
    def update_training_job(self, *, TrainingJobName: str, Priority: int = ..., Preemptible: bool = ..., RetryStrategy: RetryStrategy = ..., StoppingCondition: StoppingConditionUpdate = ..., Protection: ProtectionConfig = ..., CheckpointConfig: CheckpointConfigUpdate = ..., ElasticConfig: ElasticConfigUpdate = ..., Tags: Mapping[str, str] = ...) -> UpdateTrainingJobResponse:
        """Change a training job that has not ended. Omitted fields keep their value, and an update without a change creates no revision. Protection and CheckpointConfig are part of a generation's plan, so changes to them apply from the next generation on. The response says when each change applies. Raises ConflictException if the job has ended."""
    def verify_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Read a checkpoint's objects back and compare their hashes with the manifest. The verification runs in the background. The checkpoint record then shows its result and time."""
    def upload_source(self, *, Directory: str | os.PathLike[str] | None = ..., Body: bytes | BinaryIO | None = ...) -> SourceConfig:
        """Store a user's code: a directory, packed as it is, or a gzipped tar."""
    def follow_events(
        self, *, TrainingJobName: str | None = ..., FleetName: str | None = ..., AfterEventId: int | None = ...
    ) -> EventStream[Event]:
        """Follow what happens, as it happens."""
    def download_outputs(self, *, TrainingJobName: str, Directory: str | os.PathLike[str], Generation: int | None = ...) -> list[Path]:
        """Write the outputs of one generation below a directory."""
    @overload
    def get_paginator(self, operation_name: Literal["list_audit_entries"]) -> ListAuditEntriesPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_checkpoints"]) -> ListCheckpointsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_drills"]) -> ListDrillsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_events"]) -> ListEventsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_fleets"]) -> ListFleetsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_incidents"]) -> ListIncidentsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_nodes"]) -> ListNodesPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_outputs"]) -> ListOutputsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_project_quotas"]) -> ListProjectQuotasPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_time_spans"]) -> ListTimeSpansPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_tokens"]) -> ListTokensPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_training_job_nodes"]) -> ListTrainingJobNodesPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_training_job_revisions"]) -> ListTrainingJobRevisionsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_training_jobs"]) -> ListTrainingJobsPaginator: ...
    @overload
    def get_waiter(self, waiter_name: Literal["training_job_running"]) -> TrainingJobRunningWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["training_job_recovered"]) -> TrainingJobRecoveredWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["training_job_completed_or_stopped"]) -> TrainingJobCompletedOrStoppedWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["training_job_paused"]) -> TrainingJobPausedWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["fleet_ready"]) -> FleetReadyWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["drills_over"]) -> DrillsOverWaiter: ...
    @overload
    def get_waiter(self, waiter_name: Literal["checkpoint_available"]) -> CheckpointAvailableWaiter: ...