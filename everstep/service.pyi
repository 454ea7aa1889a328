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
    """One of a job's inputs."""
    ChannelName: str
    """Ranks find its directory in SM_CHANNEL_<NAME>, and by `everstep.training.input_dir("name")`."""
    DataSource: DataSource

class Checkpoint(TypedDict):
    """A set of shards of one step in S3."""
    Step: int
    Generation: int
    Status: Literal["Uploading", "Complete", "Deleting", "Deleted"]
    S3Uri: str
    Bytes: int
    CreationTime: datetime
    CompletionTime: NotRequired[datetime]
    IsPinned: bool
    """It is not deleted until it is unpinned."""
    Verification: Literal["NotVerified", "Verifying", "Intact", "Damaged"]
    """What VerifyCheckpoint found when it last read the objects back."""
    VerificationTime: NotRequired[datetime]
    VerificationMessage: NotRequired[str]
    """What is damaged."""

class CheckpointConfig(TypedDict):
    """The durable tier."""
    EverySteps: NotRequired[int]
    """A checkpoint in S3 every so many steps; 0: only when the job stops. 0 unless given."""
    S3Uri: NotRequired[str]
    """Prefix for checkpoints; the service's bucket by default."""
    ThirdSlot: NotRequired[bool]
    """Keep a third slot per shard, so that an upload never makes snapshots wait. false unless given."""
    MaxCount: NotRequired[int]
    """How many of its newest checkpoints a job keeps, pinned ones besides; all unless said."""
    MaxAgeInSeconds: NotRequired[int]
    """Checkpoints that are older are deleted. The newest one, what the job would be restored from, and pinned ones are always kept."""

class CheckpointConfigUpdate(TypedDict):
    """What to change of the durable tier; where checkpoints go is set at creation."""
    EverySteps: NotRequired[int]
    ThirdSlot: NotRequired[bool]
    """Cannot be taken back once the job has run."""
    MaxCount: NotRequired[int]
    """0: no limit any more."""
    MaxAgeInSeconds: NotRequired[int]
    """At least 60; 0: no limit any more."""

class Condition(TypedDict):
    """Something that is wrong now with a node, or with what a job stands on. It is no longer listed once it is over."""
    Type: str
    """The fault's code, as docs/reference/metrics.md lists them: disk_full, memory_low, gpu_xid …"""
    Message: str
    """A sentence with the figures."""
    NodeId: NotRequired[str]
    """Absent where the service itself is meant."""

class CreateCheckpointResponse(TypedDict):
    """Which step is in S3, or on its way."""
    TrainingJobName: str
    RunId: str
    Step: int
    """The checkpoint is of this step or, while it is Requested, of the next one that is committed."""
    Status: Literal["Requested", "Complete"]

class CreateFleetResponse(TypedDict):
    """The group is a fleet; or, of a dry run, what would become of it."""
    FleetName: str
    Fleet: NotRequired[Fleet]
    """Absent after a dry run."""
    Checks: list[GroupCheck]
    """What a group has to be by itself, all of it met: a group that is something else is refused, with the same sentences."""
    Changes: list[GroupChange]
    """What was changed of the group, and what will be; of a dry run, what would be. Empty where it is as Everstep needs it."""

class CreateJoinTokenResponse(TypedDict):
    """A join token for a fleet's launch template."""
    JoinToken: str
    """Shown once; the service keeps its digest alone."""
    TokenId: str
    FleetName: str
    ExpirationTime: NotRequired[datetime]

class CreateSourceResponse(TypedDict):
    """Whether a source is there already, and where it is to be put if not."""
    SourceId: str
    IsStored: bool
    """It was checked and stored before: there is nothing to do."""
    Upload: NotRequired[SourceUpload]
    """Put it there, then CompleteSource. Absent where it is stored, or where the service's store takes nothing from outside: then PutSource."""

class CreateTokenResponse(TypedDict):
    """A new token."""
    Secret: str
    """What is sent as `Authorization: Bearer …`. Shown once; the service keeps its digest alone."""
    Token: Token

class CreateTrainingJobResponse(TypedDict):
    """The job is accepted and waits for its turn; or, of a dry run, what would become of it."""
    TrainingJobName: str
    RunId: NotRequired[str]
    """Absent after a dry run."""
    TrainingJobStatus: NotRequired[Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]]
    """Absent after a dry run."""
    Plan: NotRequired[TrainingJobPlan]
    """Of a dry run."""

class DataSource(TypedDict):
    """Where a channel's data are: one of the two."""
    S3DataSource: NotRequired[S3DataSource]
    """Fetched to every node before its ranks start, verified, and kept there for later jobs as long as there is room. Files are read-only."""
    FileSystemDataSource: NotRequired[FileSystemDataSource]

class DeleteTrainingJobResponse(TypedDict):
    """What went, or would go."""
    TrainingJobName: str
    RunId: str
    IsDeleted: bool
    """The job is forgotten. Not after a dry run, and not while objects are left."""
    GenerationCount: int
    CheckpointCount: int
    IncidentCount: int
    NodeSeconds: float
    """What the fleet's figures no longer count."""
    CostUsd: NotRequired[float]
    ObjectCount: int
    """Objects in S3 that this call has deleted; of a dry run, that a call with DeleteObjects would."""
    ObjectBytes: int
    HasMoreObjects: bool
    """A call takes so many objects at the most: the same call again goes on."""
    S3Uris: list[str]
    """Where they are: checkpoints, logs, outputs."""

class DescribeProtectionResponse(TypedDict):
    """How well the job's state is kept right now."""
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
    """For one, two and three lost nodes, by the holders that count right now, as far as they can be counted in time; empty while not every shard is committed."""
    DomainOdds: list[DomainOdds]
    """Likewise for whole failure domains; empty where AWS has told none."""
    FatalDomains: list[str]
    """Failure domains whose loss alone would take every copy of some shard."""
    Shards: list[ShardProtection]
    LastCheckpoint: NotRequired[LastCheckpoint]

class DomainOdds(TypedDict):
    """What becomes of the job's memory when whole failure domains are lost at once."""
    LostDomains: int
    Probability: float
    """That every shard keeps a copy, all sets of so many domains equally likely; exact. A node whose domain is not known is one of its own."""

class Drill(TypedDict):
    """Something that was broken on purpose, and what became of it."""
    DrillId: str
    DrillType: Literal["kill-rank", "kill-agent", "terminate-instance"]
    DrillStatus: Literal["requested", "struck", "recovered", "not_recovered", "absorbed", "not_done"]
    """requested, struck; then recovered (an incident came of it, and training is where it was before), not_recovered (the job ended, was paused or was interrupted again before that), absorbed (no incident came of it) or not_done (the job did not train in time)."""
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
    """Something that happened to a fleet, a job or a node; never changed afterwards."""
    EventId: int
    Time: datetime
    Type: str
    Message: str
    FleetName: NotRequired[str]
    TrainingJobName: NotRequired[str]
    NodeId: NotRequired[str]
    Detail: Any

class ExecuteCommandResponse(TypedDict):
    """What a program beside a rank has said, and how it ended."""
    TrainingJobName: str
    Rank: int
    Generation: int
    NodeId: str
    ExitCode: NotRequired[int]
    """As a shell says it; absent where it did not end in time."""
    Stdout: str
    Stderr: str
    """The first 256 KiB of each."""
    IsOutputCut: bool
    """There was more."""
    IsTimedOut: bool

class FieldChange(TypedDict):
    """One field that was changed."""
    Field: str
    """Its path: `CheckpointConfig.EverySteps`."""
    Before: NotRequired[str]
    After: NotRequired[str]
    """As text; absent where there is no value."""
    Applies: Literal["Now", "NextGeneration"]
    """A running generation goes on with the plan that it began with."""

class FieldError(TypedDict):
    """What is wrong with one field of a request."""
    Field: str
    """Path of the field, as `CheckpointConfig.EverySteps`."""
    Message: str
    """A sentence with the figures."""

class FileSystemDataSource(TypedDict):
    """A directory that is on every node already: a shared file system, or part of the image."""
    DirectoryPath: str
    """Absolute; whether ranks may write to it is a matter of its mount."""

class Fleet(TypedDict):
    """A registered Auto Scaling group, as wanted and as it is."""
    FleetName: str
    AutoScalingGroupName: str
    Project: str
    FleetStatus: Literal["active", "frozen", "deleting"]
    Reason: str
    SpareCount: int
    SparePolicy: NotRequired[SparePolicy]
    """Counts spares instead of SpareCount."""
    MinNodeCount: int
    HoldFailedInstances: bool
    MaxReplacementsPerHour: int
    NodeRoleName: NotRequired[str]
    """Absent: agents join with a join token alone."""
    AllowDrills: bool
    AllowCommands: bool
    MaxNodeCount: int
    """The group's MaxSize."""
    DesiredNodeCount: int
    NodeCount: int
    ConnectedNodeCount: int
    InstanceType: str
    AvailabilityZone: str
    PriceUsdPerHour: NotRequired[float]
    AccountingSeconds: dict[str, float]
    """Of all its jobs, by bucket."""
    Reliability: Reliability
    """Of all its jobs together."""
    IncidentCount: int
    """Of its jobs; drills are not counted."""
    LostNodeCount: int
    """Nodes that its jobs have lost: that failed, or that AWS took. None that a person drained, or that a drill struck."""
    NodeSeconds: float
    """How long its nodes have worked for jobs, all together."""
    CostUsd: NotRequired[float]
    """What that has cost; idle nodes and spares are not in it."""
    Drift: list[str]
    """How the group differs from what Everstep needs; freezes destructive actions."""
    Tags: dict[str, str]
    CreationTime: datetime

class FollowLogsResponse(TypedDict):
    EventStream: NotRequired[EventStream[FollowLogsStream]]

class FollowLogsStream(TypedDict):
    """What a followed log is made of."""
    LogEvents: NotRequired[LogEvents]

class GetCallerIdentityResponse(TypedDict):
    """Who is calling, and as what."""
    TokenId: str
    Role: Literal["admin", "submitter", "viewer"]
    Project: NotRequired[str]
    """Absent: every project."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    ServerVersion: str
    ServerTime: datetime
    """By the service's clock."""

class GetLogEventsResponse(TypedDict):
    """A page of what a job's ranks printed, oldest line first."""
    Events: list[LogEvent]
    NextForwardToken: str
    """Reads on after the last of these lines."""
    NextBackwardToken: str
    """Reads on before the first of them."""

class GetLogResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class GetMetricDataResponse(TypedDict):
    """What a job has logged, by metric."""
    MetricDataResults: list[MetricDataResult]

class GetOutputResponse(TypedDict):
    Body: NotRequired[StreamingBody]

class GroupChange(TypedDict):
    """Something of an Auto Scaling group that becomes another with its registration."""
    Setting: str
    """In the words of Auto Scaling's API: `NewInstancesProtectedFromScaleIn`, `LifecycleHooks.everstep-termination`."""
    Before: NotRequired[str]
    """As text; absent where there is nothing."""
    After: str
    Reason: str
    """Why it cannot stay as it is."""
    Applies: Literal["Now", "Later"]
    """Now: CreateFleet makes it before it answers. Later: the fleet's loop does, from its first look at the group on."""

class GroupCheck(TypedDict):
    """Something that an Auto Scaling group has to be by itself."""
    Setting: str
    """In the words of Auto Scaling's API."""
    Message: str
    """What is there, in a sentence."""

class HealthResponse(TypedDict):
    """The server answers."""
    Status: Literal["ok", "degraded"]
    """degraded: the server answers, and one of Conditions needs a person."""
    Version: str
    Conditions: list[ServiceCondition]
    """Empty while all is well; a condition ends by itself once its cause is gone."""

class Holder(TypedDict):
    """A node that keeps a copy of a shard."""
    NodeId: str
    InView: bool
    """It counts in the current rounds."""
    VerifiedStep: NotRequired[int]
    """The newest step that it is known to hold, whole and verified; absent before the first."""
    VerifiedTime: NotRequired[datetime]
    """Since when."""
    LagSteps: NotRequired[int]
    """How far that is behind the newest step that the ranks have finished."""
    FailureDomain: NotRequired[str]
    """The network node that its instance hangs on; absent where AWS has not told."""

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
    """The farthest source that any rank used."""
    FromStep: NotRequired[int]
    ReachedStep: NotRequired[int]
    LostSteps: NotRequired[int]
    """Steps done again: reached_step − from_step."""
    GenerationBefore: int
    GenerationAfter: NotRequired[int]
    InstanceId: NotRequired[str]
    """The first of those that were lost, if any."""
    ReplacementInstanceId: NotRequired[str]
    InstanceIds: list[str]
    """Those that were left, for whatever cause."""
    FaultedInstanceIds: list[str]
    """Where it happened: whose ranks, agent, links or hardware failed, or what AWS announced, lost by it or not. Empty where that cannot be told."""
    ReplacementInstanceIds: list[str]
    FailedAt: datetime
    OpenedAt: datetime
    RestoredAt: NotRequired[datetime]
    """When training ran again; absent where it has not."""
    ClosedAt: NotRequired[datetime]
    DetectSeconds: NotRequired[float]
    ReplaceSeconds: NotRequired[float]
    RestoreSeconds: NotRequired[float]
    ReworkSeconds: NotRequired[float]
    CostUsd: NotRequired[float]
    """The fleet's price × the seconds in which the job's nodes made no new step; so far, while it is open. Absent where the fleet has no price."""
    RankSources: list[RankSource]
    """By rank; empty before that is known, or when nothing was restored."""
    StacksEventId: NotRequired[int]
    """The event `RanksHang` whose Detail has the stacks of all ranks: where ranks hung, in DescribeIncident alone, for as long as events are kept."""
    AcknowledgementTime: NotRequired[datetime]
    """When a person first said to have seen it."""
    AcknowledgedBy: NotRequired[str]
    Acknowledgement: NotRequired[str]
    """What they noted."""

class LastCheckpoint(TypedDict):
    """The newest complete checkpoint in S3 that was not found damaged."""
    Step: int
    Generation: int
    CompletedAt: datetime
    Bytes: int

class ListCheckpointsResponse(TypedDict):
    """A job's checkpoints, newest step first."""
    Checkpoints: list[Checkpoint]
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    """Of the job: one that has ended makes no more."""
    NextToken: NotRequired[str]

class ListDrillsResponse(TypedDict):
    """A page of drills, in the order they were asked for."""
    Drills: list[Drill]
    NextToken: NotRequired[str]

class ListEventsResponse(TypedDict):
    """A page of events."""
    Events: list[Event]
    """Oldest first, unless the newest were asked for first."""
    NextToken: NotRequired[str]

class ListFleetsResponse(TypedDict):
    """A page of fleets, by name."""
    Fleets: list[Fleet]
    NextToken: NotRequired[str]

class ListIncidentsResponse(TypedDict):
    """A page of incidents."""
    Incidents: list[Incident]
    """In the order they were opened, unless the newest were asked for first."""
    NextToken: NotRequired[str]

class ListLogsResponse(TypedDict):
    """A page of the streams of a job's ranks, by generation, rank and stream."""
    Logs: list[LogEntry]
    NextToken: NotRequired[str]

class ListMetricsResponse(TypedDict):
    """What a job has logged: at most 256 names, so that there are no pages."""
    Metrics: list[Metric]
    DroppedCount: int
    """Steps whose values were lost on the way, because more was logged than could be taken, and values of more names than a job may have."""

class ListNodesResponse(TypedDict):
    """All nodes asked for, oldest first."""
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
    """A page of which nodes have worked for a job, by when they began."""
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
    """One stream of one rank in one generation, or the fact that it is missing."""
    Generation: int
    Rank: int
    Stream: NotRequired[Literal["stdout", "stderr"]]
    """None for what is missing altogether."""
    Key: NotRequired[str]
    Bytes: NotRequired[int]
    MissingReason: NotRequired[str]

class LogEvent(TypedDict):
    """One line that a rank printed, or the fact that lines are missing."""
    Timestamp: datetime
    """When the node's agent read it, to the millisecond."""
    Generation: int
    NodeId: str
    Rank: NotRequired[int]
    """Absent where a whole node is meant."""
    Stream: Literal["stdout", "stderr", "gap"]
    """`gap`: what was here is not kept; Message says what and why."""
    Message: str
    """Without the line feed; lines of more than 16 KiB come in pieces."""

class LogEvents(TypedDict):
    """Lines that came together; without lines it is a sign of life."""
    Events: list[LogEvent]
    NextForwardToken: str
    """For FollowLogs and GetLogEvents: goes on after these lines."""

class Metric(TypedDict):
    """One name under which rank 0 logs."""
    MetricName: str
    LastStep: int
    LastTime: datetime
    LastValue: float
    """What is not finite is the text NaN, Infinity or -Infinity on the wire."""

class MetricDataResult(TypedDict):
    """One metric as columns: the first entry of each is the first point, and so on, in order of steps. A point is one step or a span of them."""
    MetricName: str
    Steps: list[int]
    """The first step of each point that has a value."""
    LastSteps: list[int]
    Times: list[float]
    """When the last value of each point was logged, seconds since 1970."""
    Counts: list[int]
    """Values in each point."""
    Minimums: list[float]
    """Of the finite values, as means and maximums; NaN where there are none."""
    Means: list[float]
    Maximums: list[float]
    LastValues: list[float]
    """The last value of each point, finite or not. What is not finite is the text NaN, Infinity or -Infinity on the wire."""
    MinimumNodeIds: list[str]
    """Of what Everstep measures on every node (names that begin with everstep/): the node of each minimum; empty for what the script logs. There the mean and the last value are the median of the nodes, and the counts count nodes. A point that was made while one node alone was heard is of rank 0's node, and has an empty name."""
    MaximumNodeIds: list[str]
    """Likewise of each maximum."""

class Node(TypedDict):
    """An EC2 instance of a fleet and its agent."""
    NodeId: str
    """The EC2 instance id."""
    FleetName: str
    NodeStatus: Literal["joining", "spare", "assigned", "held", "rebooting", "draining", "gone"]
    Hold: NotRequired[Literal["unreachable", "distrusted", "inspection", "person"]]
    """Why it is held; all but unreachable ones wait for ReleaseNode."""
    Request: NotRequired[Literal["drain", "replace", "reboot", "hold"]]
    """What a person asked for and is still to be done; ReleaseNode calls it off."""
    RequestReason: NotRequired[str]
    """Who asked, and why."""
    Connected: bool
    Warm: bool
    """Its ranks start without importing first; a spare that is not warm, yet or at all, is given to a job only when no other is there."""
    TrainingJobName: NotRequired[str]
    Address: str
    MemoryBytes: int
    """What snapshots may take."""
    Memory: NotRequired[NodeMemory]
    """Absent while its agent is not connected, or has not measured it yet."""
    InstanceType: str
    AvailabilityZone: str
    FailureDomain: NotRequired[str]
    """The network node that its instance hangs on; absent while AWS has not told, which it does not for every instance type."""
    AgentVersion: str
    RefusedMessageCount: int
    """Messages of its agent that were not decodable, too long or of another node, since this server started."""
    RefusedSessionCount: int
    """Sessions of other agents and of ranks that its agent refused or closed for what they said, since the agent started. A few around a restart of ranks are stale ones; more are worth a look at its log."""
    Exposure: NotRequired[str]
    """What a job's code can get at on this node that is not the job's, in a sentence: the agent's files, the instance's metadata. Absent where ranks have a user of their own that is kept from both, and while the agent has not reported."""
    Reason: str
    Conditions: list[Condition]
    """What its agent reports as wrong now, with the node and with its job's work there. Empty while the agent is not connected."""
    Incidents: list[NodeIncident]
    """Its history, oldest line first; listed by DescribeNode alone."""
    CreationTime: datetime
    ConnectionTime: NotRequired[datetime]
    EndTime: NotRequired[datetime]

class NodeIncident(TypedDict):
    """A line of a node's history: it had its part in an incident."""
    IncidentId: str
    """Of a job; `fleet-…` where no job had the node."""
    Time: datetime
    Cause: str
    """`node_unreachable`, `agent_lost` … or a fault's code with its number: `gpu_xid 79`."""
    Evidence: str
    Remedy: Literal["none", "restart", "release", "hold", "retire", "reboot", "replace", "let_go"]

class NodeMemory(TypedDict):
    """Memory of a node and of its ranks, as its agent reported last."""
    UsedBytes: int
    AvailableBytes: int
    """What can be allocated now without swapping."""
    TotalBytes: int
    """What agent and ranks can have at most: of the machine, or of their cgroup where that has a lower limit."""
    CgroupLimitBytes: NotRequired[int]
    """Absent where the machine is the limit."""
    Ranks: list[RankMemory]
    """Living ranks, in order."""

class OutputDataConfig(TypedDict):
    """Where outputs go."""
    S3OutputPath: NotRequired[str]
    """Prefix for outputs, which lie below it by job and run; the service's bucket by default."""

class OutputEntry(TypedDict):
    """One file that a rank left in its output directory."""
    Generation: int
    Path: str
    """Below the generation: `rank=0/model.safetensors`."""
    Key: str
    Bytes: int

class ProjectQuota(TypedDict):
    """What the jobs of a project may have."""
    Project: str
    MaxNodeCount: NotRequired[int]
    MaxJobCount: NotRequired[int]
    MaxSourceBytes: NotRequired[int]
    MaxPriority: int
    AllowedRoleArns: list[str]
    AllowedSecrets: list[str]
    AllowedData: list[str]

class ProtectionConfig(TypedDict):
    """How many nodes keep every shard in memory, and what that may cost."""
    Copies: NotRequired[int]
    """The owner's node included; 1 protects against lost processes alone. One where there is one node, unless said. 2 unless given."""
    MaxSlowdown: NotRequired[float]
    """What snapshots may cost training, as a part of the mean iteration. Above it they are taken less often, below it as often as every step. 0.01 unless said; 1 on a local cluster, whose nodes share the cores of one machine, so that the figure would say nothing."""

class PutSourceResponse(TypedDict):
    """A source archive that was checked and stored."""
    SourceId: str
    Bytes: int
    FileCount: int

class RankMemory(TypedDict):
    """What the process of a rank has in memory; the processes that the rank started do not count."""
    Rank: int
    ResidentBytes: int
    """Pages that the process shares with others count in full."""
    PeakResidentBytes: int
    """The highest ResidentBytes since the process started."""

class RankSource(TypedDict):
    """Where the shards of some ranks came from."""
    Source: Literal["local", "peer", "s3"]
    FirstRank: int
    LastRank: int

class RecoveryOdds(TypedDict):
    """What becomes of the job's memory when nodes are lost at once."""
    LostNodes: int
    Probability: float
    """That every shard keeps a copy, all sets of so many nodes equally likely; exact."""

class Reliability(TypedDict):
    """How much of the time was training, and how often and how long it was interrupted."""
    EttrRatio: NotRequired[float]
    """Seconds of training ÷ all seconds but those without nodes (queue, provision, paused); absent before the first start."""
    EttrWithQueueRatio: NotRequired[float]
    """Seconds of training ÷ all seconds since the job was created."""
    MttfSeconds: NotRequired[float]
    """Mean time to failure: seconds of training and stall ÷ failures; absent before the first. Drills, AWS's notices and people's wishes are none."""
    MttrSeconds: NotRequired[float]
    """Mean time to recovery, from the failure until training is where it was before; of failures whose incidents are closed."""
    LostSteps: int
    """Steps done again."""
    IncidentCostUsd: NotRequired[float]
    """What nodes cost while they made no new step; absent where the fleet has no price."""

class RetryStrategy(TypedDict):
    """When to stop trying."""
    MaxAttempts: NotRequired[int]
    """The same failure at the same step this many times; then once more without the failing rank's node and once more from an older state, where there are such, and the job has failed. 3 unless given."""

class S3DataSource(TypedDict):
    """Objects in S3."""
    S3Uri: str
    """One object, or a prefix: then what lies below it, with its own folders. Without RoleArn it is read with the nodes' permissions."""

class SecondaryStatusTransition(TypedDict):
    """The job was in a state for a while."""
    Status: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "Failed", "Stopped"]
    """The derived status, SageMaker's words. While ranks run without a new step it is Starting, or Restarting once the job has made steps."""
    State: Literal["queued", "allocating", "preparing", "loading", "starting", "running", "pausing", "stopping", "completed", "failed", "stopped"]
    """Everstep's own, finer state."""
    StartTime: datetime
    EndTime: NotRequired[datetime]
    StatusMessage: str

class ServiceCondition(TypedDict):
    """Something about the service that needs a person."""
    Type: Literal["disk_full"]
    Message: str
    """What is wrong, where, and with which figures."""
    Hint: str
    """What to do."""
    Directory: NotRequired[str]
    """Absent where the disk belongs to a database on another machine."""
    FreeBytes: NotRequired[int]
    """Absent where it cannot be read from here."""
    DurationSeconds: float

class ShardProtection(TypedDict):
    """Who holds one rank's shard."""
    Rank: int
    OwnerNodeId: str
    CommittedStep: int
    Bytes: int
    Holders: list[Holder]
    """The owner's node first."""
    Reason: str
    """Why a holder is out of view, slow or hard to reach, or snapshots are refused; empty when all is well."""

class SourceConfig(TypedDict):
    """The user's code."""
    SourceId: str
    """As PutSource returned it: the SHA-256 of the archive."""

class SourceUpload(TypedDict):
    """Where an archive is to be put, without a token: `PUT Url` with these headers and the archive as its body."""
    Url: str
    """Whoever has it may put this very archive there, and no other: checksum and length are signed."""
    Headers: dict[str, str]
    ExpirationTime: datetime
    """After it CreateSource gives another address."""

class SparePolicy(TypedDict):
    """How many spares are kept, from what the fleet has seen of failures and replacements."""
    Probability: float
    """How probable it has to be that a spare is free when a failure comes."""

class StoppingCondition(TypedDict):
    """Limits of a job."""
    MaxRuntimeInSeconds: NotRequired[int]
    """From its first start; time without nodes after it was paused is not counted."""
    MaxPendingTimeInSeconds: NotRequired[int]
    """From its creation to its first nodes. However long it is, a gang that does not come together gives its nodes back meanwhile."""
    MaxCostUsd: NotRequired[float]
    """What its nodes may cost, at the fleet's price; the fleet must have one. Then it stops as a user's stop would."""

class StoppingConditionUpdate(TypedDict):
    """Limits to change; 0 lifts one."""
    MaxRuntimeInSeconds: NotRequired[int]
    MaxPendingTimeInSeconds: NotRequired[int]
    MaxCostUsd: NotRequired[float]
    """At least 0.01, or 0."""

class Token(TypedDict):
    """A token as it is listed: everything but the secret."""
    TokenId: str
    Kind: Literal["user", "join"]
    """user: of a person or a program. join: lets instances of a fleet become its nodes."""
    Role: Literal["admin", "submitter", "viewer", "agent"]
    Project: NotRequired[str]
    """Absent: every project."""
    FleetName: NotRequired[str]
    """Of a join token."""
    Description: str
    CreationTime: datetime
    ExpirationTime: NotRequired[datetime]
    RevocationTime: NotRequired[datetime]

class TrainingJob(TypedDict):
    """Everything about a job."""
    TrainingJobName: str
    RunId: str
    FleetName: str
    """Where it runs or waits now."""
    AlternativeFleetNames: list[str]
    """The others where it may start."""
    Project: str
    TrainingJobStatus: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
    SecondaryStatus: Literal["Pending", "Starting", "Downloading", "Training", "Restarting", "Interrupted", "Pausing", "Paused", "Stopping", "Completed", "Failed", "Stopped"]
    SecondaryStatusTransitions: list[SecondaryStatusTransition]
    Reason: str
    """Why it is where it is: what it waits for, or how it ended."""
    FailureReason: NotRequired[str]
    """Set once the job has failed."""
    Conditions: list[Condition]
    """What is wrong now with its nodes and with the service. Reported for people: a condition alone changes nothing about the job. Empty once it has ended."""
    Source: SourceConfig
    EntryPoint: str
    Requirements: NotRequired[str]
    HyperParameters: dict[str, str]
    Environment: dict[str, str]
    Secrets: dict[str, str]
    """Where the values are, by variable."""
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
    """Its place in the fleet's queue, from 1; absent while it does not wait there."""
    QueuedBehind: list[str]
    """Names of the jobs that are ahead of it there."""
    Tags: dict[str, str]
    CreationTime: datetime
    LastModifiedTime: datetime
    """When it came into its state, or a person last changed what is wanted of it."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    StopRequestedTime: NotRequired[datetime]
    PauseRequestedTime: NotRequired[datetime]
    """Absent once it was resumed."""
    Revision: int
    """Of what was asked for: 1 at its creation, one more with each update."""
    ObservedRevision: NotRequired[int]
    """What the newest generation was planned from; absent before the first."""
    TakenOverTime: NotRequired[datetime]
    """Since when a person looks after it: Everstep observes and decides nothing."""
    TakenOverBy: NotRequired[str]
    Generation: int
    """The launch of all ranks that runs now; 0 before the first."""
    BaseStep: int
    """What that launch resumed from."""
    CommittedStep: int
    """Held, verified, by all holders in view; -1 before the first."""
    Boundary: int
    """Steps that the ranks have finished; -1 before they start."""
    MaxBoundary: int
    """The highest that any generation reached."""
    TargetStep: NotRequired[int]
    """Steps finished when its script will be done: what `session.batches(until_step=…)` was given; absent where the script has not said."""
    EstimatedRemainingSeconds: NotRequired[float]
    """How long the steps up to TargetStep take at the mean pace of those so far, without failures and waiting; absent where either is not known, and once it has ended."""
    HealthyNodeCount: int
    """Of the nodes that belong to it: how many are connected and report no fault of their own."""
    AssignedNodeCount: int
    """Nodes assigned to the job; after its end, those that have not released it yet. A job can be deleted once it is 0."""
    NodeIds: list[str]
    """By GROUP_RANK; empty while it has none."""
    CoordinatorNodeId: NotRequired[str]
    IncidentCount: int
    OpenIncidentCount: int
    """Incidents from which the job has not recovered yet."""
    OpenDrillId: NotRequired[str]
    """The drill of it that is not over: recovered from or not, absorbed, or not done."""
    AccountingSeconds: dict[str, float]
    """Every second from CreationTime to AccountedUntil by bucket, to the microsecond: they add up exactly."""
    AccountedUntil: NotRequired[datetime]
    """The end, once the job has ended."""
    Reliability: Reliability
    NodeSeconds: float
    """How long nodes have worked for the job, all together."""
    CostUsd: NotRequired[float]
    """What they have cost so far at the fleet's price; absent where it has none."""

class TrainingJobNode(TypedDict):
    """A node that works for a job, or has worked for it."""
    NodeId: str
    StartTime: datetime
    EndTime: NotRequired[datetime]
    """Absent while it does; a node may come back."""

class TrainingJobPlan(TypedDict):
    """What would become of a job, by what its fleet is and has seen."""
    FleetName: str
    NodeCount: int
    RanksPerNode: int
    WorldSize: int
    Copies: int
    SlotsPerNode: int
    """Host memory of a node is taken by so many slots, each as large as one rank's state: slots of a shard × Copies × RanksPerNode."""
    NodeMemoryBytes: NotRequired[int]
    """What the fleet's smallest node has for them; absent while it has none."""
    LargestShardBytes: NotRequired[int]
    """So large may one rank's state be there."""
    RecoveryOdds: list[RecoveryOdds]
    """For one, two and three lost nodes at once, with all copies in place."""
    CanStartNow: bool
    """Its turn has come, and enough nodes are free and connected."""
    QueuePosition: NotRequired[int]
    """Its place in the fleet's queue, from 1; absent where its turn would come at once."""
    QueuedBehind: list[str]
    """Names of the jobs that would be ahead of it there."""
    WaitsFor: NotRequired[str]
    """What it would wait for, in words."""
    FreeNodeCount: int
    NodesToLaunch: int
    """Instances that the fleet would have to bring for it."""
    CostUsdPerHour: NotRequired[float]
    """The fleet's price × NodeCount; absent where it has none."""
    MostCostUsd: NotRequired[float]
    """What it can cost at most: by MaxRuntimeInSeconds at that price, or by MaxCostUsd. Absent where neither bounds it."""
    ExpectedMttfSeconds: NotRequired[float]
    """Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount; absent before the first incident."""
    ExpectedRecoverySeconds: NotRequired[float]
    """Mean time to recovery, of the fleet's closed incidents."""
    ExpectedEttrRatio: NotRequired[float]
    """ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds): the part of the time that will be training, the queue not counted."""

class TrainingJobRevision(TypedDict):
    """What was changed at once of a job."""
    Revision: int
    """1: what it was created with."""
    Time: datetime
    Changes: list[FieldChange]

class TrainingJobSummary(TypedDict):
    """One line of a list of jobs."""
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
    """As in TrainingJob."""
    EstimatedRemainingSeconds: NotRequired[float]
    """As in TrainingJob."""
    CreationTime: datetime
    LastModifiedTime: datetime
    """When it came into its state, or a person last changed what is wanted of it."""
    TrainingStartTime: NotRequired[datetime]
    TrainingEndTime: NotRequired[datetime]
    EttrRatio: NotRequired[float]
    """As in Reliability; absent before it has started."""
    CostUsd: NotRequired[float]
    """What its nodes have cost; absent where the fleet has no price."""
    ProtectionState: NotRequired[Literal["Protected", "Degraded", "Unprotected"]]
    """As DescribeProtection says it; in lists alone, and absent while no agent holds its state: before its first launch, paused, ended."""
    HealthyNodeCount: NotRequired[int]
    """As in TrainingJob; in lists alone."""
    IncidentCount: NotRequired[int]
    """In lists alone."""
    OpenIncidentCount: NotRequired[int]
    """In lists alone."""

class UpdateTrainingJobResponse(TypedDict):
    """The job's newest revision, and what it changed."""
    TrainingJobName: str
    RunId: str
    Revision: int
    Changes: list[FieldChange]
    """Empty where everything was so already: then there is no new revision."""

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