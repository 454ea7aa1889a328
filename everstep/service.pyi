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

class Channel(TypedDict):
    """One named input of a job."""
    ChannelName: str
    """Ranks find the channel's directory in SM_CHANNEL_<NAME> and with `everstep.training.input_dir("name")`."""
    DataSource: DataSource

class Checkpoint(TypedDict):
    """The shards of one step in S3."""
    Step: int
    Generation: int
    Status: Literal["Uploading", "Complete", "Deleting", "Deleted"]
    S3Uri: str
    Bytes: int
    CreationTime: datetime
    CompletionTime: NotRequired[datetime]
    IsPinned: bool
    """A pinned checkpoint is not deleted until it is unpinned."""
    Verification: Literal["NotVerified", "Verifying", "Intact", "Damaged"]
    """The result of the last VerifyCheckpoint, which reads the objects back."""
    VerificationTime: NotRequired[datetime]
    VerificationMessage: NotRequired[str]
    """What is damaged. Absent if nothing is."""

class CheckpointConfig(TypedDict):
    """Checkpoints in S3: how often they are written and how long they are kept."""
    EverySteps: NotRequired[int]
    """Steps between two checkpoints in S3. 0: write a checkpoint only when the job stops. 0 unless given."""
    S3Uri: NotRequired[str]
    """Prefix for checkpoints. The default is a prefix in the service's bucket."""
    ThirdSlot: NotRequired[bool]
    """Reserve a third memory slot per shard, so that snapshots never wait for an upload. false unless given."""
    MaxCount: NotRequired[int]
    """Number of newest checkpoints to keep, in addition to pinned ones. The default keeps all."""
    MaxAgeInSeconds: NotRequired[int]
    """Age at which checkpoints are deleted. Exempt are the newest checkpoint, the one that the job would be restored from, and pinned ones."""

class CheckpointConfigUpdate(TypedDict):
    """Checkpoint settings to change. The location of checkpoints cannot change after creation."""
    EverySteps: NotRequired[int]
    ThirdSlot: NotRequired[bool]
    """Cannot be disabled once the job has run."""
    MaxCount: NotRequired[int]
    """0 removes the limit."""
    MaxAgeInSeconds: NotRequired[int]
    """At least 60. 0 removes the limit."""

class Condition(TypedDict):
    """A current problem of a node or of the service. It is no longer listed once it is resolved."""
    Type: str
    """The fault code, as listed in docs/reference/metrics.md: disk_full, memory_low, gpu_xid …"""
    Message: str
    """A sentence that includes the measured values."""
    NodeId: NotRequired[str]
    """Absent if the problem is in the service itself."""

class CreateCheckpointResponse(TypedDict):
    """The step that is stored in S3 or will be."""
    TrainingJobName: str
    RunId: str
    Step: int
    """The checkpoint's step. While Status is Requested, the checkpoint is of this step or of the next committed one."""
    Status: Literal["Requested", "Complete"]

class CreateFleetResponse(TypedDict):
    """The new fleet, or the plan of a dry run."""
    FleetName: str
    Fleet: NotRequired[Fleet]
    """Absent after a dry run."""
    Checks: list[GroupCheck]
    """The requirements on the group, all of them met. A group that fails one is rejected with the same sentences."""
    Changes: list[GroupChange]
    """Changes to the group that were made or will be made. After a dry run: changes that a real call would make. Empty if the group already has all settings."""

class CreateJoinTokenResponse(TypedDict):
    """A join token for a fleet's launch template."""
    JoinToken: str
    """Returned only once. The service stores only its digest."""
    TokenId: str
    FleetName: str
    ExpirationTime: NotRequired[datetime]

class CreateSourceResponse(TypedDict):
    """Whether a source is stored already, and if not, where to upload it."""
    SourceId: str
    IsStored: bool
    """True if an earlier upload was checked and stored. No upload is needed."""
    Upload: NotRequired[SourceUpload]
    """Upload the archive there, then call CompleteSource. Absent if the source is stored already, or if the service's store accepts no direct uploads. In the latter case, call PutSource."""

class CreateTokenResponse(TypedDict):
    """A new token with its secret."""
    Secret: str
    """Send it as `Authorization: Bearer …`. Returned only once. The service stores only its digest."""
    Token: Token

class CreateTrainingJobResponse(TypedDict):
    """The accepted job, or the plan of a dry run."""
    TrainingJobName: str
    RunId: NotRequired[str]
    """Absent after a dry run."""
    TrainingJobStatus: NotRequired[Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]]
    """Absent after a dry run."""
    Plan: NotRequired[TrainingJobPlan]
    """Only after a dry run."""

class DataSource(TypedDict):
    """The location of a channel's data. Exactly one of the two fields must be set."""
    S3DataSource: NotRequired[S3DataSource]
    """Each node fetches and verifies the objects before its ranks start. The files are read-only. The node keeps them for later jobs while it has room."""
    FileSystemDataSource: NotRequired[FileSystemDataSource]

class DeleteTrainingJobResponse(TypedDict):
    """What was deleted, or would be deleted after a dry run."""
    TrainingJobName: str
    RunId: str
    IsDeleted: bool
    """Whether the job's records were deleted. False after a dry run, and while objects remain."""
    GenerationCount: int
    CheckpointCount: int
    IncidentCount: int
    NodeSeconds: float
    """Node time that the fleet's totals no longer include."""
    CostUsd: NotRequired[float]
    ObjectCount: int
    """Objects in S3 that this call deleted. After a dry run: objects that a call with DeleteObjects would delete."""
    ObjectBytes: int
    HasMoreObjects: bool
    """Each call deletes a limited number of objects. If true, repeat the same call to continue."""
    S3Uris: list[str]
    """Locations of the objects: checkpoints, logs, outputs."""

class DescribeProtectionResponse(TypedDict):
    """How well the job's state is protected at this moment."""
    TrainingJobName: str
    Generation: int
    CommittedStep: int
    ProposedStep: int
    Boundary: int
    CommittedAt: NotRequired[datetime]
    Copies: int
    ProtectionState: Literal["Protected", "Degraded", "Unprotected"]
    Reason: str
    RecoveryOdds: list[RecoveryOdds]
    """The probability that every shard keeps a copy when one, two or three nodes are lost at once. Only holders in view count. The list is empty until every shard has a committed step. It is shorter if a larger loss has too many cases to compute."""
    DomainOdds: list[DomainOdds]
    """The same for whole failure domains. Empty if AWS has reported none."""
    FatalDomains: list[str]
    """Failure domains whose loss alone would destroy every copy of some shard."""
    Shards: list[ShardProtection]
    LastCheckpoint: NotRequired[LastCheckpoint]

class DomainOdds(TypedDict):
    """Probability that the job's memory survives the simultaneous loss of failure domains."""
    LostDomains: int
    Probability: float
    """Exact probability that every shard keeps a copy. All sets of LostDomains domains are equally likely. A node with an unknown domain counts as its own domain."""

class Drill(TypedDict):
    """An injected fault and its outcome."""
    DrillId: str
    DrillType: Literal["kill-rank", "kill-agent", "terminate-instance"]
    DrillStatus: Literal["requested", "struck", "recovered", "not_recovered", "absorbed", "not_done"]
    """The drill's progress, or its outcome once it is over. `requested`: the fault is not injected yet. `struck`: the fault is injected, and its outcome is open. `recovered`: the fault caused an incident, and training reached the step it was at before. `not_recovered`: the job ended, was paused or was interrupted again before it recovered. `absorbed`: the fault caused no incident. `not_done`: the job did not train in time, so no fault was injected."""
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

class Event(TypedDict):
    """A record of something that happened to a fleet, a job or a node. Events never change."""
    EventId: int
    Time: datetime
    Type: str
    Message: str
    FleetName: NotRequired[str]
    TrainingJobName: NotRequired[str]
    NodeId: NotRequired[str]
    Detail: Any

class ExecuteCommandResponse(TypedDict):
    """Output and exit code of a program that ran beside a rank."""
    TrainingJobName: str
    Rank: int
    Generation: int
    NodeId: str
    ExitCode: NotRequired[int]
    """The exit code as a shell reports it. Absent if the program did not end in time."""
    Stdout: str
    Stderr: str
    """Stdout and Stderr contain at most the first 256 KiB of each stream."""
    IsOutputCut: bool
    """Whether Stdout or Stderr was truncated."""
    IsTimedOut: bool

class FieldChange(TypedDict):
    """The change of one field."""
    Field: str
    """Path of the field: `CheckpointConfig.EverySteps`."""
    Before: NotRequired[str]
    After: NotRequired[str]
    """The new value as text. Absent if the field has no value."""
    Applies: Literal["Now", "NextGeneration"]
    """Now, or with the next generation: a running generation keeps the plan it started with."""

class FieldError(TypedDict):
    """The error of one field of a request."""
    Field: str
    """Path of the field, for example `CheckpointConfig.EverySteps`."""
    Message: str
    """A sentence that includes the invalid value or the limit."""

class FileSystemDataSource(TypedDict):
    """A directory that already exists on every node: a shared file system, or a part of the image."""
    DirectoryPath: str
    """Absolute path. The mount options decide whether ranks may write to the directory."""

class Fleet(TypedDict):
    """A registered Auto Scaling group: its settings and its current state."""
    FleetName: str
    AutoScalingGroupName: str
    Project: str
    FleetStatus: Literal["active", "frozen", "deleting"]
    Reason: str
    SpareCount: int
    SparePolicy: NotRequired[SparePolicy]
    """Computes the number of spares, in place of the fixed SpareCount."""
    MinNodeCount: int
    HoldFailedInstances: bool
    MaxReplacementsPerHour: int
    NodeRoleName: NotRequired[str]
    """Absent if agents can join with a join token only."""
    AllowDrills: bool
    AllowCommands: bool
    MaxNodeCount: int
    """MaxSize of the Auto Scaling group."""
    DesiredNodeCount: int
    NodeCount: int
    ConnectedNodeCount: int
    InstanceType: str
    AvailabilityZone: str
    PriceUsdPerHour: NotRequired[float]
    AccountingSeconds: dict[str, float]
    """Sum over all jobs of the fleet, by accounting bucket."""
    Reliability: Reliability
    """Computed over all jobs of the fleet."""
    IncidentCount: int
    """Incidents of the fleet's jobs, without drills."""
    LostNodeCount: int
    """Nodes that jobs lost because they failed or because AWS reclaimed them. Nodes that a person drained or a drill struck do not count."""
    NodeSeconds: float
    """Total time that the fleet's nodes have worked for jobs."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds. Idle nodes and spares are not included."""
    Drift: list[str]
    """Differences between the group and the settings that Everstep needs. While there are any, Everstep neither resizes the group nor ends or reboots instances."""
    Tags: dict[str, str]
    CreationTime: datetime

class FollowLogsResponse(TypedDict):
    EventStream: NotRequired[EventStream[FollowLogsStream]]

class FollowLogsStream(TypedDict):
    """The events of a FollowLogs stream."""
    LogEvents: NotRequired[LogEvents]

class GetCallerIdentityResponse(TypedDict):
    """The token of the caller, with its role and project."""
    TokenId: str
    Role: Literal["admin", "submitter", "viewer"]
    Project: NotRequired[str]
    """Absent if the token can access every project."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    ServerVersion: str
    ServerTime: datetime
    """Current time of the service's clock."""

class GetLogEventsResponse(TypedDict):
    """A page of lines that a job's ranks printed, oldest line first."""
    Events: list[LogEvent]
    NextForwardToken: str
    """Continues after the last of these lines."""
    NextBackwardToken: str
    """Continues before the first of these lines."""

class GetLogResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class GetMetricDataResponse(TypedDict):
    """Values of a job's metrics, by metric."""
    MetricDataResults: list[MetricDataResult]

class GetOutputResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class GroupChange(TypedDict):
    """A setting of an Auto Scaling group that the registration as a fleet changes."""
    Setting: str
    """The name in Auto Scaling's API: `NewInstancesProtectedFromScaleIn`, `LifecycleHooks.everstep-termination`."""
    Before: NotRequired[str]
    """The value before the change, as text. Absent if the setting has none."""
    After: str
    Reason: str
    """Why Everstep needs the change."""
    Applies: Literal["Now", "Later"]
    """Now: CreateFleet makes the change before it returns. Later: the fleet's loop makes the change after the fleet exists."""

class GroupCheck(TypedDict):
    """A requirement on an Auto Scaling group that Everstep checks and does not change."""
    Setting: str
    """The name in Auto Scaling's API."""
    Message: str
    """The value found, in a sentence."""

class HealthResponse(TypedDict):
    """Status and version of the server that answers."""
    Status: Literal["ok", "degraded"]
    """`degraded`: the server answers, but a person must act on one of Conditions."""
    Version: str
    Conditions: list[ServiceCondition]
    """Empty in normal operation. A condition disappears once its cause is resolved."""

class Holder(TypedDict):
    """A node that keeps a copy of a shard."""
    NodeId: str
    InView: bool
    """Whether the holder counts in the current rounds."""
    VerifiedStep: NotRequired[int]
    """The newest step of which the node holds a complete, verified copy. Absent before the first."""
    VerifiedTime: NotRequired[datetime]
    """When the node reported that step."""
    LagSteps: NotRequired[int]
    """Number of steps by which VerifiedStep trails the newest step that the ranks have finished."""
    FailureDomain: NotRequired[str]
    """The EC2 network node that the instance is attached to. Absent if AWS has not reported one."""

class Incident(TypedDict):
    """A failure and its recovery."""
    IncidentId: str
    TrainingJobName: str
    RunId: str
    Cause: Literal["notice", "requested", "pause_failed", "drill", "load_failed", "rank_exit", "hang", "agent_lost", "node_unreachable", "node_fault", "instance_terminated", "group_lost"]
    Phase: Literal["replace", "restore", "rework", "closed"]
    Evidence: list[str]
    Decision: str
    Reason: str
    RestoreSource: NotRequired[Literal["local", "peer", "s3"]]
    """The most distant source that any rank used. S3 is more distant than a peer, a peer more than the own node."""
    FromStep: NotRequired[int]
    ReachedStep: NotRequired[int]
    LostSteps: NotRequired[int]
    """Number of steps that training had to repeat: ReachedStep − FromStep."""
    GenerationBefore: int
    GenerationAfter: NotRequired[int]
    InstanceId: NotRequired[str]
    """The first of InstanceIds. Absent if the job lost no instance."""
    ReplacementInstanceId: NotRequired[str]
    InstanceIds: list[str]
    """Instances that the job lost or left, for any reason."""
    FaultedInstanceIds: list[str]
    """Instances on which the failure occurred, whether or not the job lost them. Their ranks, agent, links or hardware failed, or AWS announced an end or a maintenance. Empty if Everstep cannot determine them."""
    ReplacementInstanceIds: list[str]
    FailedAt: datetime
    OpenedAt: datetime
    RestoredAt: NotRequired[datetime]
    """When training ran again. Absent until then."""
    ClosedAt: NotRequired[datetime]
    DetectSeconds: NotRequired[float]
    ReplaceSeconds: NotRequired[float]
    RestoreSeconds: NotRequired[float]
    ReworkSeconds: NotRequired[float]
    CostUsd: NotRequired[float]
    """The fleet's price × the time in which the job's nodes made no new step. While the incident is open, the cost so far. Absent if the fleet has no price."""
    RankSources: list[RankSource]
    """By rank. Empty until the recovery plan exists, and if nothing was restored."""
    StacksEventId: NotRequired[int]
    """EventId of the event `RanksHang`, whose Detail contains the stacks of all ranks. Only in DescribeIncident, only if ranks hung, and only while the service keeps the event."""
    AcknowledgementTime: NotRequired[datetime]
    """When a person first acknowledged the incident."""
    AcknowledgedBy: NotRequired[str]
    Acknowledgement: NotRequired[str]
    """The note of that person."""

class LastCheckpoint(TypedDict):
    """The newest complete checkpoint in S3 that no verification found damaged."""
    Step: int
    Generation: int
    CompletedAt: datetime
    Bytes: int

class ListCheckpointsResponse(TypedDict):
    """A job's checkpoints, newest step first."""
    Checkpoints: list[Checkpoint]
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    """Status of the job. A job that has ended creates no more checkpoints."""
    NextToken: NotRequired[str]

class ListDrillsResponse(TypedDict):
    """A page of drills, in the order of their requests."""
    Drills: list[Drill]
    NextToken: NotRequired[str]

class ListEventsResponse(TypedDict):
    """A page of events."""
    Events: list[Event]
    """Oldest first, or newest first with SortOrder Descending."""
    NextToken: NotRequired[str]

class ListFleetsResponse(TypedDict):
    """A page of fleets, by name."""
    Fleets: list[Fleet]
    NextToken: NotRequired[str]

class ListIncidentsResponse(TypedDict):
    """A page of incidents."""
    Incidents: list[Incident]
    """In the order in which they were opened, or newest first with SortOrder Descending."""
    NextToken: NotRequired[str]

class ListLogsResponse(TypedDict):
    """A page of a job's log streams, by generation, rank and stream."""
    Logs: list[LogEntry]
    NextToken: NotRequired[str]

class ListMetricsResponse(TypedDict):
    """All metrics of a job. There are at most 256 names, so the response has no pages."""
    Metrics: list[Metric]
    DroppedCount: int
    """Number of values lost. It counts steps whose values were dropped because the script logged too fast, and values beyond the limit of names."""

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

class ListTokensResponse(TypedDict):
    """A page of tokens, oldest first."""
    Tokens: list[Token]
    NextToken: NotRequired[str]

class ListTrainingJobNodesResponse(TypedDict):
    """A page of nodes that worked for a job, by start time."""
    Nodes: list[TrainingJobNode]
    NextToken: NotRequired[str]

class ListTrainingJobRevisionsResponse(TypedDict):
    """A page of a job's revisions, oldest first."""
    Revisions: list[TrainingJobRevision]
    NextToken: NotRequired[str]

class ListTrainingJobsResponse(TypedDict):
    """A page of jobs, newest first."""
    TrainingJobSummaries: list[TrainingJobSummary]
    NextToken: NotRequired[str]

class LogEntry(TypedDict):
    """One output stream of one rank in one generation, or a note that it is missing."""
    Generation: int
    Rank: int
    Stream: NotRequired[Literal["stdout", "stderr"]]
    """Absent if both streams of the rank are missing."""
    Key: NotRequired[str]
    Bytes: NotRequired[int]
    MissingReason: NotRequired[str]

class LogEvent(TypedDict):
    """One line that a rank printed, or a note that lines are missing."""
    Timestamp: datetime
    """When the node's agent read the line, in milliseconds."""
    Generation: int
    NodeId: str
    Rank: NotRequired[int]
    """Absent if the event concerns a whole node."""
    Stream: Literal["stdout", "stderr", "gap"]
    """`gap`: lines are missing here. Message says how many and why."""
    Message: str
    """The line without its line feed. Lines of more than 16 KiB are split."""

class LogEvents(TypedDict):
    """A batch of lines. A batch without lines shows that the stream is alive."""
    Events: list[LogEvent]
    NextForwardToken: str
    """Continues after these lines, in FollowLogs and GetLogEvents."""

class Metric(TypedDict):
    """A metric of a job: a name that rank 0 logs, or that Everstep measures."""
    MetricName: str
    LastStep: int
    LastTime: datetime
    LastValue: float
    """NaN, Infinity and -Infinity are sent as text."""

class MetricDataResult(TypedDict):
    """One metric in columns: entry i of each list describes point i. Points are in the order of steps. A point covers one step or a span of steps."""
    MetricName: str
    Steps: list[int]
    """The first step of each point that has a value."""
    LastSteps: list[int]
    Times: list[float]
    """When the last value of each point was logged, in seconds since 1970."""
    Counts: list[int]
    """Number of values in each point."""
    Minimums: list[float]
    """Minimums, means and maximums are computed over the finite values. NaN if a point has none."""
    Means: list[float]
    Maximums: list[float]
    LastValues: list[float]
    """The last value of each point, finite or not. NaN, Infinity and -Infinity are sent as text."""
    MinimumNodeIds: list[str]
    """The node that measured each minimum. Only for metrics named everstep/…, which Everstep measures on every node. For these metrics, the mean and the last value are the median of the nodes, and Counts counts nodes. A point with the value of rank 0's node alone has an empty id. The list is empty for metrics of the script."""
    MaximumNodeIds: list[str]
    """The node that measured each maximum; otherwise like MinimumNodeIds."""

class Node(TypedDict):
    """An EC2 instance of a fleet, with its agent."""
    NodeId: str
    """The EC2 instance id."""
    FleetName: str
    NodeStatus: Literal["joining", "spare", "assigned", "held", "rebooting", "draining", "gone"]
    Hold: NotRequired[Literal["unreachable", "distrusted", "inspection", "person"]]
    """Why the node is held. All held nodes wait for ReleaseNode, except unreachable ones."""
    Request: NotRequired[Literal["drain", "replace", "reboot", "hold"]]
    """A user's request that is not completed yet. ReleaseNode cancels it."""
    RequestReason: NotRequired[str]
    """Who made the request, and why."""
    Connected: bool
    Warm: bool
    """Whether ranks can start here without importing their libraries first. A job gets a spare that is not warm only if no warm spare is left."""
    TrainingJobName: NotRequired[str]
    Address: str
    MemoryBytes: int
    """Memory that snapshots may use."""
    Memory: NotRequired[NodeMemory]
    """Absent while the agent is not connected, or before its first measurement."""
    InstanceType: str
    AvailabilityZone: str
    FailureDomain: NotRequired[str]
    """The EC2 network node that the instance is attached to. Absent if AWS has not reported one. AWS does not report it for all instance types."""
    AgentVersion: str
    RefusedMessageCount: int
    """Number of the agent's messages that this server rejected since its start. They could not be decoded, were too long, or claimed another node."""
    RefusedSessionCount: int
    """Number of sessions that the agent rejected or closed since its start, because of an invalid message. The sessions are those of ranks and of other agents. A restart of ranks causes a few. If there are more, read the agent's log."""
    Exposure: NotRequired[str]
    """What a job's code can access on this node beyond the job: the agent's files, or the instance's metadata. Absent if ranks run as a separate user without access to both, and until the agent has reported."""
    Reason: str
    Conditions: list[Condition]
    """Current problems that the agent reports: of the node, and of its job's work on the node. Empty while the agent is not connected."""
    Incidents: list[NodeIncident]
    """The node's history, oldest entry first. Only in DescribeNode."""
    CreationTime: datetime
    ConnectionTime: NotRequired[datetime]
    EndTime: NotRequired[datetime]

class NodeIncident(TypedDict):
    """One entry of a node's history: an incident in which the node was involved."""
    IncidentId: str
    """The incident of a job, or `fleet-…` if no job had the node."""
    Time: datetime
    Cause: str
    """`node_unreachable`, `agent_lost` …, or a fault code with its number: `gpu_xid 79`."""
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
    """Absent if no cgroup limit is below the machine's memory."""
    Ranks: list[RankMemory]
    """Running ranks, by rank."""

class OutputDataConfig(TypedDict):
    """Where the job's outputs are stored."""
    S3OutputPath: NotRequired[str]
    """Prefix for outputs. Everstep appends the job and the run. The default is a prefix in the service's bucket."""

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

class ProtectionConfig(TypedDict):
    """How many nodes hold each shard in memory, and how much snapshots may slow training."""
    Copies: NotRequired[int]
    """Nodes that hold each shard, the owner included. With 1, the job survives lost processes but no lost node. The default is 1 for a job of one node. 2 unless given."""
    MaxSlowdown: NotRequired[float]
    """Share of the mean iteration time that snapshots may add, 0.01 meaning 1 %. If snapshots cost more, Everstep takes them less often than every step. The default is 0.01. On a local cluster it is 1, because all nodes share one machine's cores and the measurement would mean nothing."""

class PutSourceResponse(TypedDict):
    """A source archive that was checked and stored."""
    SourceId: str
    Bytes: int
    FileCount: int

class RankMemory(TypedDict):
    """Memory of a rank's process. Child processes of the rank do not count."""
    Rank: int
    ResidentBytes: int
    """Includes the full size of pages that the process shares with others."""
    PeakResidentBytes: int
    """The highest ResidentBytes since the process started."""

class RankSource(TypedDict):
    """The source from which a range of ranks restored their shards."""
    Source: Literal["local", "peer", "s3"]
    FirstRank: int
    LastRank: int

class RecoveryOdds(TypedDict):
    """Probability that the job's memory survives the simultaneous loss of nodes."""
    LostNodes: int
    Probability: float
    """Exact probability that every shard keeps a copy. All sets of LostNodes nodes are equally likely."""

class Reliability(TypedDict):
    """Share of the time spent training, and frequency and duration of interruptions."""
    EttrRatio: NotRequired[float]
    """Effective training time ratio: training time ÷ total time without queue, provision and paused. Absent before the first start."""
    EttrWithQueueRatio: NotRequired[float]
    """Training time ÷ total time since the job was created."""
    MttfSeconds: NotRequired[float]
    """Mean time to failure: seconds of training and stall ÷ number of failures. Absent before the first failure. Drills, AWS's notices and users' requests do not count as failures."""
    MttrSeconds: NotRequired[float]
    """Mean time to recovery: from the failure until training reaches the step it was at before. Computed over failures whose incidents are closed."""
    LostSteps: int
    """Steps that training had to repeat."""
    IncidentCostUsd: NotRequired[float]
    """Cost of the nodes while they made no new step. Absent if the fleet has no price."""

class RetryStrategy(TypedDict):
    """When Everstep stops retrying a failing job."""
    MaxAttempts: NotRequired[int]
    """Number of times that the same failure may occur at the same step. Then Everstep retries once without the failing rank's node and once from an older state, where each is possible. After that the job fails. 3 unless given."""

class S3DataSource(TypedDict):
    """Input objects in S3."""
    S3Uri: str
    """One object, or a prefix. The folders below a prefix are kept. Without RoleArn the nodes read the objects with their own permissions."""

class SecondaryStatusTransition(TypedDict):
    """A period that the job spent in one state."""
    Status: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "Failed", "Stopped"]
    """The status in SageMaker's terms, derived from the state. While ranks run without a new step, the status is Starting, or Restarting once the job has made steps."""
    State: Literal["queued", "allocating", "preparing", "loading", "starting", "running", "pausing", "stopping", "completed", "failed", "stopped"]
    """Everstep's own, more detailed state."""
    StartTime: datetime
    EndTime: NotRequired[datetime]
    StatusMessage: str

class ServiceCondition(TypedDict):
    """A problem of the service that needs a person."""
    Type: Literal["disk_full"]
    Message: str
    """What is wrong and where, with the measured values."""
    Hint: str
    """How to resolve the problem."""
    Directory: NotRequired[str]
    """Absent if the disk belongs to a database on another machine."""
    FreeBytes: NotRequired[int]
    """Absent if this server cannot read the value."""
    DurationSeconds: float

class ShardProtection(TypedDict):
    """The holders of one rank's shard."""
    Rank: int
    OwnerNodeId: str
    CommittedStep: int
    Bytes: int
    Holders: list[Holder]
    """The owner's node comes first."""
    Reason: str
    """Why a holder is out of view, slow or unreachable, or why snapshots are refused. Empty if there is no problem."""

class SourceConfig(TypedDict):
    """The user's code."""
    SourceId: str
    """The SHA-256 of the archive, as PutSource and CreateSource return it."""

class SourceUpload(TypedDict):
    """A presigned upload: `PUT Url` with these headers and the archive as body. It needs no token."""
    Url: str
    """Secret. The URL accepts only this archive, because its checksum and length are signed."""
    Headers: dict[str, str]
    ExpirationTime: datetime
    """When the URL expires. CreateSource then returns a new one."""

class SparePolicy(TypedDict):
    """Keep as many spares as the fleet's failure rate and replacement times require."""
    Probability: float
    """The probability with which a spare must be free when a failure occurs."""

class StoppingCondition(TypedDict):
    """Limits at which a job is stopped."""
    MaxRuntimeInSeconds: NotRequired[int]
    """Limit of the time since the job's first start. Time without nodes after a pause does not count."""
    MaxPendingTimeInSeconds: NotRequired[int]
    """Limit of the time from the job's creation until it gets its first nodes. Independently of this limit, a job releases its nodes again if it cannot get all of them."""
    MaxCostUsd: NotRequired[float]
    """Limit of the cost of the job's nodes, at the fleet's price. At the limit, the job stops as after StopTrainingJob. The fleet must have a price."""

class StoppingConditionUpdate(TypedDict):
    """Limits to change. 0 removes a limit."""
    MaxRuntimeInSeconds: NotRequired[int]
    MaxPendingTimeInSeconds: NotRequired[int]
    MaxCostUsd: NotRequired[float]
    """At least 0.01, or 0."""

class Token(TypedDict):
    """A token without its secret."""
    TokenId: str
    Kind: Literal["user", "join"]
    """user: a token of a person or a program. join: a token with which instances join a fleet."""
    Role: Literal["admin", "submitter", "viewer", "agent"]
    Project: NotRequired[str]
    """Absent if the token can access every project."""
    FleetName: NotRequired[str]
    """Only for join tokens."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    RevocationTime: NotRequired[datetime]

class TrainingJob(TypedDict):
    """All data about one job."""
    TrainingJobName: str
    RunId: str
    FleetName: str
    """The fleet in which the job runs or waits."""
    AlternativeFleetNames: list[str]
    """The other fleets in which the job may start."""
    Project: str
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    SecondaryStatus: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "Failed", "Stopped"]
    SecondaryStatusTransitions: list[SecondaryStatusTransition]
    Reason: str
    """Why the job is in its state: what it waits for, or how it ended."""
    FailureReason: NotRequired[str]
    """Only if the job has failed."""
    Conditions: list[Condition]
    """Current problems of the job's nodes and of the service. They inform people; a condition alone does not change the job. Empty once the job has ended."""
    Source: SourceConfig
    EntryPoint: str
    Requirements: NotRequired[str]
    HyperParameters: dict[str, str]
    Environment: dict[str, str]
    Secrets: dict[str, str]
    """The location of each variable's value in AWS, not the value."""
    RoleArn: NotRequired[str]
    NodeCount: int
    RanksPerNode: int
    Protection: ProtectionConfig
    CheckpointConfig: CheckpointConfig
    InputDataConfig: list[Channel]
    OutputDataConfig: OutputDataConfig
    StoppingCondition: StoppingCondition
    RetryStrategy: RetryStrategy
    Priority: int
    Preemptible: bool
    QueuePosition: NotRequired[int]
    """Position in the fleet's queue, from 1. Absent while the job does not wait there."""
    QueuedBehind: list[str]
    """Names of the jobs ahead of this job in the queue."""
    Tags: dict[str, str]
    CreationTime: datetime
    LastModifiedTime: datetime
    """When the job last changed its state, or a user last changed the job."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    StopRequestedTime: NotRequired[datetime]
    PauseRequestedTime: NotRequired[datetime]
    """Absent after the job was resumed."""
    Revision: int
    """Revision of the job's configuration: 1 at creation, plus one with each update."""
    ObservedRevision: NotRequired[int]
    """The revision that the newest generation was planned with. Absent before the first generation."""
    TakenOverTime: NotRequired[datetime]
    """Since when a person controls the job. Until hand-back, Everstep only observes the job."""
    TakenOverBy: NotRequired[str]
    Generation: int
    """Number of the current launch of all ranks; 0 before the first."""
    BaseStep: int
    """The step from which the current generation resumed."""
    CommittedStep: int
    """The newest step that all holders in view have verified; -1 before the first."""
    Boundary: int
    """Number of steps that the ranks have finished; -1 before they start."""
    MaxBoundary: int
    """The highest Boundary of any generation."""
    TargetStep: NotRequired[int]
    """The step at which the script ends, as passed to `session.batches(until_step=…)`. Absent if the script passes none."""
    EstimatedRemainingSeconds: NotRequired[float]
    """Time until TargetStep at the mean pace so far, without failures and waiting. Absent if the pace or the target is unknown, and once the job has ended."""
    HealthyNodeCount: int
    """Number of the job's nodes that are connected and report no fault of their own."""
    AssignedNodeCount: int
    """Number of nodes assigned to the job. After its end: nodes that have not released the job yet. The job can be deleted once the number is 0."""
    NodeIds: list[str]
    """In the order of GROUP_RANK. Empty while the job has no nodes."""
    CoordinatorNodeId: NotRequired[str]
    IncidentCount: int
    OpenIncidentCount: int
    """Incidents from which the job has not recovered yet."""
    OpenDrillId: NotRequired[str]
    """The drill of this job that has no outcome yet."""
    AccountingSeconds: dict[str, float]
    """The time from CreationTime to AccountedUntil, by accounting bucket. The buckets add up to that time exactly, to the microsecond."""
    AccountedUntil: NotRequired[datetime]
    """Time up to which AccountingSeconds counts. For an ended job, the time of its end."""
    Reliability: Reliability
    NodeSeconds: float
    """Total time that nodes have worked for the job."""
    CostUsd: NotRequired[float]
    """Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price."""

class TrainingJobNode(TypedDict):
    """A period in which a node worked for a job."""
    NodeId: str
    StartTime: datetime
    EndTime: NotRequired[datetime]
    """Absent while the node works for the job. A node may have several periods."""

class TrainingJobPlan(TypedDict):
    """Forecast for a job, based on its fleet's state and history."""
    FleetName: str
    NodeCount: int
    RanksPerNode: int
    WorldSize: int
    Copies: int
    SlotsPerNode: int
    """Number of memory slots that the job needs on each node: slots per shard × Copies × RanksPerNode. Each slot holds the state of one rank."""
    NodeMemoryBytes: NotRequired[int]
    """Memory for slots on the fleet's smallest node. Absent while the fleet has no node."""
    LargestShardBytes: NotRequired[int]
    """The largest state per rank that fits into NodeMemoryBytes."""
    RecoveryOdds: list[RecoveryOdds]
    """For one, two and three nodes lost at once, with all copies in place."""
    CanStartNow: bool
    """Whether no other job is ahead and enough nodes are free and connected."""
    QueuePosition: NotRequired[int]
    """Position in the fleet's queue, from 1. Absent if the job would not wait for other jobs."""
    QueuedBehind: list[str]
    """Names of the jobs that would be ahead in the queue."""
    WaitsFor: NotRequired[str]
    """What the job would wait for, in words."""
    FreeNodeCount: int
    NodesToLaunch: int
    """Number of instances that the fleet would have to launch for the job."""
    CostUsdPerHour: NotRequired[float]
    """The fleet's price × NodeCount. Absent if the fleet has no price."""
    MostCostUsd: NotRequired[float]
    """Upper limit of the cost, from MaxRuntimeInSeconds at that price or from MaxCostUsd. Absent if neither limits the cost."""
    ExpectedMttfSeconds: NotRequired[float]
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount. Absent before the fleet's first incident."""
    ExpectedRecoverySeconds: NotRequired[float]
    """Mean time to recovery of the fleet's closed incidents."""
    ExpectedEttrRatio: NotRequired[float]
    """Expected share of training time, queue excluded. ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds)."""

class TrainingJobRevision(TypedDict):
    """The changes that one update made to a job."""
    Revision: int
    """Revision 1 is the configuration at creation."""
    Time: datetime
    Changes: list[FieldChange]

class TrainingJobSummary(TypedDict):
    """One entry of a list of jobs."""
    TrainingJobName: str
    RunId: str
    FleetName: str
    Project: str
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    SecondaryStatus: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "Failed", "Stopped"]
    Reason: str
    Priority: int
    NodeCount: int
    Generation: int
    CommittedStep: int
    Boundary: int
    TargetStep: NotRequired[int]
    """See TrainingJob."""
    EstimatedRemainingSeconds: NotRequired[float]
    """See TrainingJob."""
    CreationTime: datetime
    LastModifiedTime: datetime
    """When the job last changed its state, or a user last changed the job."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    EttrRatio: NotRequired[float]
    """See Reliability. Absent before the job has started."""
    CostUsd: NotRequired[float]
    """Cost of the job's nodes so far. Absent if the fleet has no price."""
    ProtectionState: NotRequired[Literal["Protected", "Degraded", "Unprotected"]]
    """See DescribeProtection. Only in lists. Absent while no agent holds the job's state: before the first launch, while paused, and after the end."""
    HealthyNodeCount: NotRequired[int]
    """See TrainingJob. Only in lists."""
    IncidentCount: NotRequired[int]
    """Only in lists."""
    OpenIncidentCount: NotRequired[int]
    """Only in lists."""

class UpdateTrainingJobResponse(TypedDict):
    """The job's newest revision and its changes."""
    TrainingJobName: str
    RunId: str
    Revision: int
    Changes: list[FieldChange]
    """Empty if all fields already had these values. Then there is no new revision."""

class PaginatorConfig(TypedDict, total=False):
    MaxItems: int
    PageSize: int
    StartingToken: str

class ListCheckpointsPages(Protocol):
    def __iter__(self) -> Iterator[ListCheckpointsResponse]: ...
    def build_full_result(self) -> ListCheckpointsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListCheckpointsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, MinStep: int = ..., PaginationConfig: PaginatorConfig = ...) -> ListCheckpointsPages: ...

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

class ListLogsPages(Protocol):
    def __iter__(self) -> Iterator[ListLogsResponse]: ...
    def build_full_result(self) -> ListLogsResponse: ...
    def search(self, expression: str) -> Iterator[Any]: ...

class ListLogsPaginator(Protocol):
    def paginate(self, *, TrainingJobName: str, PaginationConfig: PaginatorConfig = ...) -> ListLogsPages: ...

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
    def paginate(self, *, StatusEquals: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"] = ..., NameContains: str = ..., FleetName: str = ..., Project: str = ..., CreationTimeAfter: datetime | float | str = ..., CreationTimeBefore: datetime | float | str = ..., LastModifiedTimeAfter: datetime | float | str = ..., LastModifiedTimeBefore: datetime | float | str = ..., TagKey: str = ..., TagValue: str = ..., SortBy: Literal["CreationTime", "LastModifiedTime", "Name"] = ..., SortOrder: Literal["Ascending", "Descending"] = ..., PaginationConfig: PaginatorConfig = ...) -> ListTrainingJobsPages: ...

class WaiterConfig(TypedDict, total=False):
    Delay: int
    MaxAttempts: int

class TrainingJobRunningWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the ranks train. Fails when the job has ended or is being stopped."""

class TrainingJobRecoveredWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until no incident is open and the ranks train, or the job has completed. Fails when it has ended another way. A failure that nobody has noticed yet is none: after hurting a job, wait for its incident first."""

class TrainingJobCompletedOrStoppedWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the job has completed or was stopped and its nodes have released it: it can be deleted then. Fails when it has failed."""

class TrainingJobPausedWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until a job that was asked to pause has let go of its nodes. Fails when it has ended or is being stopped."""

class FleetReadyWaiter(Protocol):
    def wait(self, *, FleetName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until every node that the fleet wants is connected: at once where it is to have none. Fails when it is frozen or being deleted."""

class DrillsOverWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until no drill of the job is under way: what became of each is known."""

class CheckpointAvailableWaiter(Protocol):
    def wait(self, *, TrainingJobName: str, MinStep: int = ..., MaxResults: int = ..., NextToken: str = ..., WaiterConfig: WaiterConfig = ...) -> None:
        """Waits until the job has a complete checkpoint in S3: with MinStep, as CreateCheckpoint answered it, one of that step or a later one. Fails when the job has ended without."""

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
    def acknowledge_incident(self, *, IncidentId: str, Note: str = ...) -> Incident:
        """Say to have seen an incident, with a note. It changes nothing of the recovery; the first acknowledgement stays."""
    def complete_source(self, *, SourceId: str) -> PutSourceResponse:
        """Have an archive that was put where CreateSource said read back and checked; jobs may use it from then on. Repeating it changes nothing."""
    def create_checkpoint(self, *, TrainingJobName: str) -> CreateCheckpointResponse:
        """Have the newest committed step of a running job, or the next one, put into S3. While one is on its way, asking again changes nothing."""
    def create_fleet(self, *, FleetName: str, AutoScalingGroupName: str, SpareCount: int = ..., SparePolicy: SparePolicy = ..., MinNodeCount: int = ..., PriceUsdPerHour: float = ..., HoldFailedInstances: bool = ..., MaxReplacementsPerHour: int = ..., NodeRoleName: str = ..., AllowDrills: bool = ..., AllowCommands: bool = ..., Project: str = ..., Tags: Mapping[str, str] = ..., DryRun: bool = ..., ExpectedChanges: Sequence[GroupChange] = ...) -> CreateFleetResponse:
        """Register an Auto Scaling group as a fleet. From now on only Everstep changes its size and ends its instances. The answer lists what was changed of the group. A DryRun changes and creates nothing, and answers what would be changed; with that as ExpectedChanges nothing else is changed."""
    def create_join_token(self, *, FleetName: str, ExpiresInSeconds: int = ...) -> CreateJoinTokenResponse:
        """Make a join token for a fleet's launch template. Each instance of the fleet's group may use it once; nobody else can."""
    def create_source(self, *, SourceId: str, Bytes: int) -> CreateSourceResponse:
        """Ask where an archive is to be put: straight into S3, at an address that is good for this archive alone and for fifteen minutes. `IsStored`: it is there already. Repeating it gives another address."""
    def create_token(self, *, Role: Literal["admin", "submitter", "viewer"], Project: str = ..., Description: str = ..., ExpiresInSeconds: int = ...) -> CreateTokenResponse:
        """Make a token. Its secret is in this answer and nowhere else; asking again makes another token."""
    def create_training_job(self, *, TrainingJobName: str, Source: SourceConfig, EntryPoint: str, NodeCount: int, ClientRequestToken: str = ..., FleetName: str = ..., AlternativeFleetNames: Sequence[str] = ..., Requirements: str = ..., HyperParameters: Mapping[str, str] = ..., Environment: Mapping[str, str] = ..., Secrets: Mapping[str, str] = ..., RoleArn: str = ..., RanksPerNode: int = ..., Protection: ProtectionConfig = ..., CheckpointConfig: CheckpointConfig = ..., InputDataConfig: Sequence[Channel] = ..., OutputDataConfig: OutputDataConfig = ..., StoppingCondition: StoppingCondition = ..., RetryStrategy: RetryStrategy = ..., Priority: int = ..., Preemptible: bool = ..., Project: str = ..., Tags: Mapping[str, str] = ..., DryRun: bool = ...) -> CreateTrainingJobResponse:
        """Start a training job: it waits for its nodes, runs, and survives what happens to them. A DryRun creates nothing and answers the plan."""
    def delete_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Delete a checkpoint from S3. Refused for pinned ones, and for the one that a job which has not ended would be restored from next."""
    def delete_fleet(self, *, FleetName: str) -> Fleet:
        """End a fleet's nodes and forget it. Refused while jobs on it have not ended. Asking again changes nothing."""
    def delete_project_quota(self, *, Project: str) -> ProjectQuota:
        """Lift a project's quota."""
    def delete_training_job(self, *, TrainingJobName: str, DeleteObjects: bool = ..., DryRun: bool = ...) -> DeleteTrainingJobResponse:
        """Forget a training job that has ended. What it left in S3 stays unless DeleteObjects is set; a DryRun only says what would go."""
    def describe_fleet(self, *, FleetName: str) -> Fleet:
        """Describe one fleet."""
    def describe_incident(self, *, IncidentId: str) -> Incident:
        """Describe one incident: its evidence, what was decided and why, and what it cost."""
    def describe_node(self, *, NodeId: str) -> Node:
        """Describe one node."""
    def describe_protection(self, *, TrainingJobName: str) -> DescribeProtectionResponse:
        """Describe who holds which shard of a job right now."""
    def describe_source(self, *, SourceId: str) -> PutSourceResponse:
        """Say whether a source is stored already, so that nobody uploads it twice."""
    def describe_training_job(self, *, TrainingJobName: str) -> TrainingJob:
        """Describe one training job: what it is, where it stands, and why."""
    def drain_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Have a node's job leave it at an agreed stop, no step lost, once another node is there; then hold it. Asking again changes nothing."""
    def execute_command(self, *, TrainingJobName: str, Rank: int, Command: Sequence[str], TimeoutInSeconds: int = ..., Stdin: str = ..., ClientRequestToken: str = ...) -> ExecuteCommandResponse:
        """Run a program beside a rank and answer what it has said: `py-spy dump --pid {pid}`. Only where the job's fleet sets AllowCommands. It runs as the agent's user, in the rank's cgroup, with RANK and EVERSTEP_RANK_PID; without a shell or a terminal. Who ran what is an event."""
    def follow_logs(self, *, TrainingJobName: str, Rank: int = ..., Generation: int = ..., StartTime: datetime | float | str = ..., FilterPattern: str = ..., StartFromHead: bool = ..., NextToken: str = ...) -> FollowLogsResponse:
        """Follow what a job's ranks print: from NextToken on, from the beginning with StartFromHead or StartTime, else from now. Each event has lines and a token to go on from, after a broken connection, say. Lines come from the agents as they are printed, from the object store where an agent cannot be reached; every line comes once. The stream ends when the job has ended and everything was given."""
    def get_caller_identity(self) -> GetCallerIdentityResponse:
        """Say who is calling: role, project and how long that lasts."""
    def get_health(self) -> HealthResponse:
        """Say that the server answers, which version it is, and what about it needs a person. A degraded server answers with status 200, too: it serves all that it can."""
    def get_log(self, *, TrainingJobName: str, Key: str) -> GetLogResponse:
        """Stream one log, by the key that ListLogs gave."""
    def get_log_events(self, *, TrainingJobName: str, Rank: int = ..., Generation: int = ..., StartTime: datetime | float | str = ..., EndTime: datetime | float | str = ..., FilterPattern: str = ..., StartFromHead: bool = ..., Limit: int = ..., NextToken: str = ...) -> GetLogEventsResponse:
        """Read what a job's ranks printed, merged by time over all ranks and nodes, one generation after another. FilterPattern is a part of the line. Without NextToken the newest lines are given, or with StartFromHead the first. NextForwardToken and NextBackwardToken read on in either direction: a page may be short or empty while there is more; nothing is left when a token comes back unchanged. What a node could not ship because it was lost is an event of its own, of the stream `gap`."""
    def get_metric_data(self, *, TrainingJobName: str, MetricName: str = ..., FirstStep: int = ..., LastStep: int = ..., StartTime: datetime | float | str = ..., EndTime: datetime | float | str = ..., ResolutionInSteps: int = ..., ResolutionInSeconds: int = ..., MaxPoints: int = ...) -> GetMetricDataResponse:
        """Get what a job's rank 0 has logged, and what Everstep has measured on its nodes. Of steps that were done again after a failure it is what was logged last. The newest 4,096 steps are kept as they were logged, older ones as points of 8, 64, 512 … steps. Where MaxPoints or a resolution asks for fewer points, several are joined into one; where a resolution asks for more than MaxPoints, points span twice as much, four times, and so on."""
    def get_output(self, *, TrainingJobName: str, Key: str) -> GetOutputResponse:
        """Stream one output file, by the key that ListOutputs gave."""
    def hand_back_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Let Everstep look after a job again. Asking again changes nothing."""
    def hold_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Keep a node that works for nobody out of use until ReleaseNode. Asking again changes nothing."""
    def list_checkpoints(self, *, TrainingJobName: str, MinStep: int = ..., MaxResults: int = ..., NextToken: str = ...) -> ListCheckpointsResponse:
        """List a job's checkpoints in S3, newest step first; with MinStep those of that step and later ones, as CreateCheckpoint answers it."""
    def list_drills(self, *, TrainingJobName: str = ..., MaxResults: int = ..., NextToken: str = ...) -> ListDrillsResponse:
        """List drills in the order they were asked for, of all jobs or of one."""
    def list_events(self, *, TrainingJobName: str = ..., FleetName: str = ..., AfterEventId: int = ..., TimeAfter: datetime | float | str = ..., TimeBefore: datetime | float | str = ..., MaxResults: int = ..., NextToken: str = ..., SortOrder: Literal["Ascending", "Descending"] = ...) -> ListEventsResponse:
        """List events, oldest first; the newest first on request. To see what is new later, ask again with the last `EventId` as `AfterEventId`."""
    def list_fleets(self, *, MaxResults: int = ..., NextToken: str = ...) -> ListFleetsResponse:
        """List fleets by name."""
    def list_incidents(self, *, TrainingJobName: str = ..., StatusEquals: Literal["Open", "Closed"] = ..., MaxResults: int = ..., NextToken: str = ..., SortOrder: Literal["Ascending", "Descending"] = ...) -> ListIncidentsResponse:
        """List incidents in the order they were opened, of all jobs or of one; the newest first, or only open or closed ones, on request."""
    def list_logs(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListLogsResponse:
        """List what a job's ranks printed, by generation and rank; what should be there and is not comes with the reason."""
    def list_metrics(self, *, TrainingJobName: str) -> ListMetricsResponse:
        """List the names under which a job's rank 0 has logged values, with the last value of each."""
    def list_nodes(self, *, FleetName: str = ..., IncludeEnded: bool = ..., MaxResults: int = ..., NextToken: str = ...) -> ListNodesResponse:
        """List nodes, oldest first; those that have ended on request."""
    def list_outputs(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListOutputsResponse:
        """List the files that a job's ranks left in EVERSTEP_OUTPUT_DIR, by generation."""
    def list_project_quotas(self, *, MaxResults: int = ..., NextToken: str = ...) -> ListProjectQuotasResponse:
        """List the quotas of projects, by project; a token of one project sees that one's."""
    def list_tokens(self, *, Project: str = ..., IncludeEnded: bool = ..., MaxResults: int = ..., NextToken: str = ...) -> ListTokensResponse:
        """List tokens, oldest first; those that are revoked or have expired on request. Secrets are not known here."""
    def list_training_job_nodes(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListTrainingJobNodesResponse:
        """List the nodes that have worked for a job, and when: those of its newest 400 launches."""
    def list_training_job_revisions(self, *, TrainingJobName: str, MaxResults: int = ..., NextToken: str = ...) -> ListTrainingJobRevisionsResponse:
        """List the revisions of a training job, oldest first."""
    def list_training_jobs(self, *, MaxResults: int = ..., NextToken: str = ..., StatusEquals: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"] = ..., NameContains: str = ..., FleetName: str = ..., Project: str = ..., CreationTimeAfter: datetime | float | str = ..., CreationTimeBefore: datetime | float | str = ..., LastModifiedTimeAfter: datetime | float | str = ..., LastModifiedTimeBefore: datetime | float | str = ..., TagKey: str = ..., TagValue: str = ..., SortBy: Literal["CreationTime", "LastModifiedTime", "Name"] = ..., SortOrder: Literal["Ascending", "Descending"] = ...) -> ListTrainingJobsResponse:
        """List training jobs, the newest first unless sorted otherwise. TagValue goes with TagKey; each filter narrows the others."""
    def pause_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Ask a training job to pause: all ranks stop at one agreed step, kept in S3, and its nodes go back to the fleet until ResumeTrainingJob. One that is being launched pauses once it trains. Asking again changes nothing."""
    def pin_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Keep a checkpoint: it is not deleted until it is unpinned."""
    def put_project_quota(self, *, Project: str, MaxNodeCount: int = ..., MaxJobCount: int = ..., MaxSourceBytes: int = ..., MaxPriority: int = ..., AllowedRoleArns: Sequence[str] = ..., AllowedSecrets: Sequence[str] = ..., AllowedData: Sequence[str] = ...) -> ProjectQuota:
        """Set what the jobs of a project may have, in place of what it was. Nothing that runs is stopped."""
    def put_source(self, *, SourceId: str, Body: bytes | BinaryIO) -> PutSourceResponse:
        """Store a gzipped tar of a user's code. `SourceId` is its SHA-256; storing it again changes nothing."""
    def reboot_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Have the job of a node leave it like DrainNode; then reboot it, and it works again. Asking again changes nothing."""
    def release_node(self, *, NodeId: str, Terminate: bool = ...) -> Node:
        """Let a held node work again, or end its instance; of another one, call off what was asked for. One kept for inspection is ended once its evidence is in S3. Asking again changes nothing."""
    def replace_node(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Have the job of a node leave it like DrainNode; then end its instance, and another one comes. Asking again changes nothing."""
    def reset_node_session(self, *, NodeId: str, Reason: str = ...) -> Node:
        """Revoke the session of a node's agent, and let the node join once more with a join token. For an instance that lost its state directory, or whose session somebody may have copied. The agent's open connection ends within ten seconds. Asking again revokes the newer session, too."""
    def resume_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Let a paused training job go on: back into the queue, then bit-identically from its checkpoint. One that is not paused is left as it is."""
    def revoke_token(self, *, TokenId: str) -> Token:
        """End a token at once: for requests, for browsers signed in with it, and within a second for answers that still go on. Joined agents stay."""
    def start_drill(self, *, TrainingJobName: str, DrillType: Literal["kill-rank", "kill-agent", "terminate-instance"], NodeId: str = ..., Rank: int = ...) -> Drill:
        """Break something of a training job on purpose, once. Only where its fleet sets AllowDrills, and while the job trains undisturbed."""
    def stop_training_job(self, *, TrainingJobName: str) -> TrainingJobSummary:
        """Ask a training job to stop: all ranks stop at one agreed step, which is kept. Asking again changes nothing."""
    def take_over_training_job(self, *, TrainingJobName: str, Reason: str = ...) -> TrainingJobSummary:
        """Look after a job yourself: Everstep observes and records until it is handed back, and decides nothing. Only ranks of generations that have ended are still halted. What is asked for meanwhile, a stop too, waits. Who took it over first stays."""
    def unfreeze_fleet(self, *, FleetName: str) -> Fleet:
        """Say of a fleet most of which is silent: who is silent is gone. It holds until sight returns; a drift of the group stays a freeze."""
    def unpin_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Let a pinned checkpoint be deleted again."""
    def update_fleet(self, *, FleetName: str, SpareCount: int = ..., SparePolicy: SparePolicy = ..., MinNodeCount: int = ..., PriceUsdPerHour: float = ..., HoldFailedInstances: bool = ..., MaxReplacementsPerHour: int = ..., NodeRoleName: str = ..., AllowDrills: bool = ..., AllowCommands: bool = ...) -> Fleet:
        """Change how many nodes and spares are kept, and what becomes of nodes that fail."""
    def update_training_job(self, *, TrainingJobName: str, Priority: int = ..., Preemptible: bool = ..., RetryStrategy: RetryStrategy = ..., StoppingCondition: StoppingConditionUpdate = ..., Protection: ProtectionConfig = ..., CheckpointConfig: CheckpointConfigUpdate = ..., Tags: Mapping[str, str] = ...) -> UpdateTrainingJobResponse:
        """Change a training job that has not ended. What is left out stays; what is so already makes no revision. Protection and CheckpointConfig are part of a generation's plan: they hold from the next generation on, and the answer says so."""
    def verify_checkpoint(self, *, TrainingJobName: str, Step: int, Generation: int = ...) -> Checkpoint:
        """Have a checkpoint's objects read back and hashed against its manifest; the verdict and its time are kept with it."""
    def upload_source(self, *, Directory: str | os.PathLike[str] | None = ..., Body: bytes | BinaryIO | None = ...) -> SourceConfig:
        """Store a user's code: a directory, packed as it is, or a gzipped tar."""
    def follow_events(
        self, *, TrainingJobName: str | None = ..., FleetName: str | None = ..., AfterEventId: int | None = ...
    ) -> EventStream[Event]:
        """Follow what happens, as it happens."""
    def download_outputs(self, *, TrainingJobName: str, Directory: str | os.PathLike[str], Generation: int | None = ...) -> list[Path]:
        """Write the outputs of one generation below a directory."""
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
    def get_paginator(self, operation_name: Literal["list_logs"]) -> ListLogsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_nodes"]) -> ListNodesPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_outputs"]) -> ListOutputsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_project_quotas"]) -> ListProjectQuotasPaginator: ...
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