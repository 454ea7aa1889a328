// Written by `python -m control_plane.contract`; change the models of control_plane/api/schemas/, not this file.

/** Seconds since 1970, UTC. */
export type Timestamp = number

export type ErrorCode = 'AccessDeniedException' | 'ConflictException' | 'InternalServerException' | 'ResourceNotFoundException' | 'ServiceUnavailableException' | 'ThrottlingException' | 'ValidationException'

/** What every refused request answers. */
export interface ErrorResponse {
  Code: ErrorCode
  Message: string
  RequestId: string
  Hint: string
  Fields: FieldError[]
}

/** Somebody has seen an incident. */
export interface AcknowledgeIncidentRequest {
  IncidentId: string
  /** "" unless given. */
  Note?: string
}

/** One of a job's inputs. */
export interface Channel {
  /** Ranks find its directory in SM_CHANNEL_<NAME>, and by `everstep.training.input_dir("name")`. */
  ChannelName: string
  DataSource: DataSource
}

/** A set of shards of one step in S3. */
export interface Checkpoint {
  Step: number
  Generation: number
  Status: 'Uploading' | 'Complete' | 'Deleting' | 'Deleted'
  S3Uri: string
  Bytes: number
  CreationTime: Timestamp
  CompletionTime?: Timestamp
  /** It is not deleted until it is unpinned. */
  IsPinned: boolean
  /** What VerifyCheckpoint found when it last read the objects back. */
  Verification: 'NotVerified' | 'Verifying' | 'Intact' | 'Damaged'
  VerificationTime?: Timestamp
  /** What is damaged. */
  VerificationMessage?: string
}

/** The durable tier. */
export interface CheckpointConfig {
  /** A checkpoint in S3 every so many steps; 0: only when the job stops. 0 unless given. */
  EverySteps?: number
  /** Prefix for checkpoints; the service's bucket by default. */
  S3Uri?: string
  /** Keep a third slot per shard, so that an upload never makes snapshots wait. false unless given. */
  ThirdSlot?: boolean
  /** How many of its newest checkpoints a job keeps, pinned ones besides; all unless said. */
  MaxCount?: number
  /** Checkpoints that are older are deleted. The newest one, what the job would be restored from, and pinned ones are always kept. */
  MaxAgeInSeconds?: number
}

/** What to change of the durable tier; where checkpoints go is set at creation. */
export interface CheckpointConfigUpdate {
  EverySteps?: number
  /** Cannot be taken back once the job has run. */
  ThirdSlot?: boolean
  /** 0: no limit any more. */
  MaxCount?: number
  /** At least 60; 0: no limit any more. */
  MaxAgeInSeconds?: number
}

export interface CompleteSourceRequest {
  SourceId: string
}

/** Something that is wrong now with a node, or with what a job stands on. It is no longer listed once it is over. */
export interface Condition {
  /** The fault's code, as docs/reference/metrics.md lists them: disk_full, memory_low, gpu_xid … */
  Type: string
  /** A sentence with the figures. */
  Message: string
  /** Absent where the service itself is meant. */
  NodeId?: string
}

export interface CreateCheckpointRequest {
  TrainingJobName: string
}

/** Which step is in S3, or on its way. */
export interface CreateCheckpointResponse {
  TrainingJobName: string
  RunId: string
  /** The checkpoint is of this step or, while it is Requested, of the next one that is committed. */
  Step: number
  Status: 'Requested' | 'Complete'
}

/** An Auto Scaling group to be kept as a fleet. */
export interface CreateFleetRequest {
  FleetName: string
  /** It must carry the tag `everstep:fleet`, one Availability Zone and one launch template. */
  AutoScalingGroupName: string
  /** 1 unless given. */
  SpareCount?: number
  /** Counts spares instead of SpareCount. */
  SparePolicy?: SparePolicy
  /** Nodes kept even when no job runs, spares not included. 0 unless given. */
  MinNodeCount?: number
  /** What one instance costs you; jobs and incidents are valued at it. */
  PriceUsdPerHour?: number
  /** Keep instances that failed running for inspection instead of ending them, as long as that takes nobody's place in the group. false unless given. */
  HoldFailedInstances?: boolean
  /** Nodes that may be taken out by Everstep's own verdicts and replaced within an hour; what AWS ends is not counted. 20 unless given. */
  MaxReplacementsPerHour?: number
  /** Name of the IAM role that the group's instances run with: their agents join by it (STS). Without it they join with a join token. */
  NodeRoleName?: string
  /** Let administrators break nodes of this fleet on purpose: StartDrill. false unless given. */
  AllowDrills?: boolean
  /** Let those who may submit jobs run programs beside their ranks on nodes of this fleet: ExecuteCommand. false unless given. */
  AllowCommands?: boolean
  Project?: string
  Tags?: Record<string, string>
  /** Check everything, change and create nothing, and answer what would be changed. false unless given. */
  DryRun?: boolean
  /** The Changes of a dry run, as it answered them, that somebody has agreed to: a ConflictException where anything else would be changed. */
  ExpectedChanges?: GroupChange[]
}

/** The group is a fleet; or, of a dry run, what would become of it. */
export interface CreateFleetResponse {
  FleetName: string
  /** Absent after a dry run. */
  Fleet?: Fleet
  /** What a group has to be by itself, all of it met: a group that is something else is refused, with the same sentences. */
  Checks: GroupCheck[]
  /** What was changed of the group, and what will be; of a dry run, what would be. Empty where it is as Everstep needs it. */
  Changes: GroupChange[]
}

/** A token that each new instance of a fleet's group may use once. */
export interface CreateJoinTokenRequest {
  /** The fleet may be created later. */
  FleetName: string
  ExpiresInSeconds?: number
}

/** A join token for a fleet's launch template. */
export interface CreateJoinTokenResponse {
  /** Shown once; the service keeps its digest alone. */
  JoinToken: string
  TokenId: string
  FleetName: string
  ExpirationTime?: Timestamp
}

/** An archive that is about to be stored. */
export interface CreateSourceRequest {
  /** The SHA-256 of the archive, a gzipped tar. */
  SourceId: string
  /** Its length. */
  Bytes: number
}

/** Whether a source is there already, and where it is to be put if not. */
export interface CreateSourceResponse {
  SourceId: string
  /** It was checked and stored before: there is nothing to do. */
  IsStored: boolean
  /** Put it there, then CompleteSource. Absent where it is stored, or where the service's store takes nothing from outside: then PutSource. */
  Upload?: SourceUpload
}

/** A token for a person or a program. */
export interface CreateTokenRequest {
  /** viewer reads; submitter also creates and changes training jobs; admin does everything, in every project. */
  Role: 'admin' | 'submitter' | 'viewer'
  /** The only project that it opens; every project unless said. An admin has none. */
  Project?: string
  /** Whose it is or what for; shown in lists. "" unless given. */
  Description?: string
  /** It does not expire unless said. */
  ExpiresInSeconds?: number
}

/** A new token. */
export interface CreateTokenResponse {
  /** What is sent as `Authorization: Bearer …`. Shown once; the service keeps its digest alone. */
  Secret: string
  Token: Token
}

/** A job to run. */
export interface CreateTrainingJobRequest {
  TrainingJobName: string
  /** The same request with the same token again changes nothing: it is answered with the job that it made. The SDK fills it in. */
  ClientRequestToken?: string
  /** May be left out where there is exactly one fleet. */
  FleetName?: string
  /** Other subnets, zones or instance types: asked in this order, in a ring, while AWS has no capacity for the whole job in the one before. Only before the job has started. */
  AlternativeFleetNames?: string[]
  Source: SourceConfig
  /** Path of a Python file in the source. */
  EntryPoint: string
  /** Path of a requirements.txt in the source: each node installs what it lacks of it, once, beside its own packages, and ranks see that first. */
  Requirements?: string
  /** Given to the script as EVERSTEP_HYPERPARAMETERS (JSON) and as `--key value`. */
  HyperParameters?: Record<string, string>
  Environment?: Record<string, string>
  /** Variables of ranks whose values are in AWS: `secretsmanager:NAME`, `ssm:NAME` or an ARN of either. Each node reads them when it starts its ranks; values are stored, shown and logged nowhere. */
  Secrets?: Record<string, string>
  /** Ranks have this role's short-lived keys, renewed before they end; Secrets and InputDataConfig are read with them, too. Nodes must be allowed to assume it. Without it ranks have no AWS credentials. */
  RoleArn?: string
  NodeCount: number
  /** 1 unless given. */
  RanksPerNode?: number
  /** Two copies where there are two nodes, one where there is one, unless said. */
  Protection?: ProtectionConfig
  CheckpointConfig?: CheckpointConfig
  /** What ranks find on their node before their first line; what is missing fails the job before any rank starts. */
  InputDataConfig?: Channel[]
  OutputDataConfig?: OutputDataConfig
  StoppingCondition?: StoppingCondition
  RetryStrategy?: RetryStrategy
  /** Higher first; of equal ones the oldest. 0 unless given. */
  Priority?: number
  /** A job of higher priority that needs its nodes may pause it: all ranks stop at one agreed step, kept in S3, and it resumes by itself. false unless given. */
  Preemptible?: boolean
  /** The token's project, unless the token may name another. */
  Project?: string
  Tags?: Record<string, string>
  /** Check everything, create nothing, and answer the plan. false unless given. */
  DryRun?: boolean
}

/** The job is accepted and waits for its turn; or, of a dry run, what would become of it. */
export interface CreateTrainingJobResponse {
  TrainingJobName: string
  /** Absent after a dry run. */
  RunId?: string
  /** Absent after a dry run. */
  TrainingJobStatus?: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  /** Of a dry run. */
  Plan?: TrainingJobPlan
}

/** Where a channel's data are: one of the two. */
export interface DataSource {
  /** Fetched to every node before its ranks start, verified, and kept there for later jobs as long as there is room. Files are read-only. */
  S3DataSource?: S3DataSource
  FileSystemDataSource?: FileSystemDataSource
}

export interface DeleteCheckpointRequest {
  TrainingJobName: string
  Step: number
  Generation?: number
}

export interface DeleteFleetRequest {
  FleetName: string
}

export interface DeleteProjectQuotaRequest {
  Project: string
}

export interface DeleteTrainingJobRequest {
  TrainingJobName: string
  /** false unless given. */
  DeleteObjects?: boolean
  /** false unless given. */
  DryRun?: boolean
}

/** What went, or would go. */
export interface DeleteTrainingJobResponse {
  TrainingJobName: string
  RunId: string
  /** The job is forgotten. Not after a dry run, and not while objects are left. */
  IsDeleted: boolean
  GenerationCount: number
  CheckpointCount: number
  IncidentCount: number
  /** What the fleet's figures no longer count. */
  NodeSeconds: number
  CostUsd?: number
  /** Objects in S3 that this call has deleted; of a dry run, that a call with DeleteObjects would. */
  ObjectCount: number
  ObjectBytes: number
  /** A call takes so many objects at the most: the same call again goes on. */
  HasMoreObjects: boolean
  /** Where they are: checkpoints, logs, outputs. */
  S3Uris: string[]
}

export interface DescribeFleetRequest {
  FleetName: string
}

export interface DescribeIncidentRequest {
  IncidentId: string
}

export interface DescribeNodeRequest {
  NodeId: string
}

export interface DescribeProtectionRequest {
  TrainingJobName: string
}

/** How well the job's state is kept right now. */
export interface DescribeProtectionResponse {
  TrainingJobName: string
  Generation: number
  CommittedStep: number
  ProposedStep: number
  Boundary: number
  CommittedAt?: Timestamp
  Copies: number
  ProtectionState: 'Protected' | 'Degraded' | 'Unprotected'
  Reason: string
  /** For one, two and three lost nodes, by the holders that count right now, as far as they can be counted in time; empty while not every shard is committed. */
  RecoveryOdds: RecoveryOdds[]
  /** Likewise for whole failure domains; empty where AWS has told none. */
  DomainOdds: DomainOdds[]
  /** Failure domains whose loss alone would take every copy of some shard. */
  FatalDomains: string[]
  Shards: ShardProtection[]
  LastCheckpoint?: LastCheckpoint
}

export interface DescribeSourceRequest {
  SourceId: string
}

export interface DescribeTrainingJobRequest {
  TrainingJobName: string
}

/** What becomes of the job's memory when whole failure domains are lost at once. */
export interface DomainOdds {
  LostDomains: number
  /** That every shard keeps a copy, all sets of so many domains equally likely; exact. A node whose domain is not known is one of its own. */
  Probability: number
}

/** A node that its job is to leave, and that is kept. */
export interface DrainNodeRequest {
  NodeId: string
  /** Why; told with the node, its job's incident and in the history. "" unless given. */
  Reason?: string
}

/** Something that was broken on purpose, and what became of it. */
export interface Drill {
  DrillId: string
  DrillType: 'kill-rank' | 'kill-agent' | 'terminate-instance'
  /** requested, struck; then recovered (an incident came of it, and training is where it was before), not_recovered (the job ended, was paused or was interrupted again before that), absorbed (no incident came of it) or not_done (the job did not train in time). */
  DrillStatus: 'requested' | 'struck' | 'recovered' | 'not_recovered' | 'absorbed' | 'not_done'
  TrainingJobName: string
  FleetName: string
  NodeId: string
  Rank?: number
  RequestedBy: string
  CreationTime: Timestamp
  StrikeTime?: Timestamp
  EndTime?: Timestamp
  IncidentId?: string
  Outcome?: string
}

/** Something that happened to a fleet, a job or a node; never changed afterwards. */
export interface Event {
  EventId: number
  Time: Timestamp
  Type: string
  Message: string
  FleetName?: string
  TrainingJobName?: string
  NodeId?: string
  Detail: unknown
}

/** A program to be run beside a rank. */
export interface ExecuteCommandRequest {
  TrainingJobName: string
  Rank: number
  /** The program and its arguments, as they are: no shell sees them. `{pid}` in one is the rank's process. */
  Command: string[]
  /** It is ended after this long. 30 unless given. */
  TimeoutInSeconds?: number
  /** What the program reads from its stdin, in UTF-8; nothing unless given. How long it was is told in the history, and no more. */
  Stdin?: string
  /** The same command asked for again with the same token is not run again: it is answered again. */
  ClientRequestToken?: string
}

/** What a program beside a rank has said, and how it ended. */
export interface ExecuteCommandResponse {
  TrainingJobName: string
  Rank: number
  Generation: number
  NodeId: string
  /** As a shell says it; absent where it did not end in time. */
  ExitCode?: number
  Stdout: string
  /** The first 256 KiB of each. */
  Stderr: string
  /** There was more. */
  IsOutputCut: boolean
  IsTimedOut: boolean
}

/** One field that was changed. */
export interface FieldChange {
  /** Its path: `CheckpointConfig.EverySteps`. */
  Field: string
  Before?: string
  /** As text; absent where there is no value. */
  After?: string
  /** A running generation goes on with the plan that it began with. */
  Applies: 'Now' | 'NextGeneration'
}

/** What is wrong with one field of a request. */
export interface FieldError {
  /** Path of the field, as `CheckpointConfig.EverySteps`. */
  Field: string
  /** A sentence with the figures. */
  Message: string
}

/** A directory that is on every node already: a shared file system, or part of the image. */
export interface FileSystemDataSource {
  /** Absolute; whether ranks may write to it is a matter of its mount. */
  DirectoryPath: string
}

/** A registered Auto Scaling group, as wanted and as it is. */
export interface Fleet {
  FleetName: string
  AutoScalingGroupName: string
  Project: string
  FleetStatus: 'active' | 'frozen' | 'deleting'
  Reason: string
  SpareCount: number
  /** Counts spares instead of SpareCount. */
  SparePolicy?: SparePolicy
  MinNodeCount: number
  HoldFailedInstances: boolean
  MaxReplacementsPerHour: number
  /** Absent: agents join with a join token alone. */
  NodeRoleName?: string
  AllowDrills: boolean
  AllowCommands: boolean
  /** The group's MaxSize. */
  MaxNodeCount: number
  DesiredNodeCount: number
  NodeCount: number
  ConnectedNodeCount: number
  InstanceType: string
  AvailabilityZone: string
  PriceUsdPerHour?: number
  /** Of all its jobs, by bucket. */
  AccountingSeconds: Record<string, number>
  /** Of all its jobs together. */
  Reliability: Reliability
  /** Of its jobs; drills are not counted. */
  IncidentCount: number
  /** Nodes that its jobs have lost: that failed, or that AWS took. None that a person drained, or that a drill struck. */
  LostNodeCount: number
  /** How long its nodes have worked for jobs, all together. */
  NodeSeconds: number
  /** What that has cost; idle nodes and spares are not in it. */
  CostUsd?: number
  /** How the group differs from what Everstep needs; freezes destructive actions. */
  Drift: string[]
  Tags: Record<string, string>
  CreationTime: Timestamp
}

export interface FollowLogsRequest {
  TrainingJobName: string
  Rank?: number
  Generation?: number
  StartTime?: Timestamp
  /** "" unless given. */
  FilterPattern?: string
  /** false unless given. */
  StartFromHead?: boolean
  NextToken?: string
}

export interface FollowLogsResponse {
  EventStream?: FollowLogsStream
}

/** What a followed log is made of. */
export interface FollowLogsStream {
  LogEvents?: LogEvents
}

/** Who is calling, and as what. */
export interface GetCallerIdentityResponse {
  TokenId: string
  Role: 'admin' | 'submitter' | 'viewer'
  /** Absent: every project. */
  Project?: string
  Description: string
  CreationTime: Timestamp
  ExpirationTime?: Timestamp
  ServerVersion: string
  /** By the service's clock. */
  ServerTime: Timestamp
}

export interface GetLogEventsRequest {
  TrainingJobName: string
  Rank?: number
  Generation?: number
  StartTime?: Timestamp
  EndTime?: Timestamp
  /** "" unless given. */
  FilterPattern?: string
  /** false unless given. */
  StartFromHead?: boolean
  /** 1000 unless given. */
  Limit?: number
  NextToken?: string
}

/** A page of what a job's ranks printed, oldest line first. */
export interface GetLogEventsResponse {
  Events: LogEvent[]
  /** Reads on after the last of these lines. */
  NextForwardToken: string
  /** Reads on before the first of them. */
  NextBackwardToken: string
}

export interface GetLogRequest {
  TrainingJobName: string
  Key: string
}

export interface GetLogResponse {
  Body?: Blob
}

export interface GetMetricDataRequest {
  TrainingJobName: string
  MetricName?: string
  /** 0 unless given. */
  FirstStep?: number
  LastStep?: number
  StartTime?: Timestamp
  EndTime?: Timestamp
  ResolutionInSteps?: number
  ResolutionInSeconds?: number
  /** 500 unless given. */
  MaxPoints?: number
}

/** What a job has logged, by metric. */
export interface GetMetricDataResponse {
  MetricDataResults: MetricDataResult[]
}

export interface GetOutputRequest {
  TrainingJobName: string
  Key: string
}

export interface GetOutputResponse {
  Body?: Blob
}

/** Something of an Auto Scaling group that becomes another with its registration. */
export interface GroupChange {
  /** In the words of Auto Scaling's API: `NewInstancesProtectedFromScaleIn`, `LifecycleHooks.everstep-termination`. */
  Setting: string
  /** As text; absent where there is nothing. */
  Before?: string
  After: string
  /** Why it cannot stay as it is. */
  Reason: string
  /** Now: CreateFleet makes it before it answers. Later: the fleet's loop does, from its first look at the group on. */
  Applies: 'Now' | 'Later'
}

/** Something that an Auto Scaling group has to be by itself. */
export interface GroupCheck {
  /** In the words of Auto Scaling's API. */
  Setting: string
  /** What is there, in a sentence. */
  Message: string
}

export interface HandBackTrainingJobRequest {
  TrainingJobName: string
}

/** The server answers. */
export interface HealthResponse {
  /** degraded: the server answers, and one of Conditions needs a person. */
  Status: 'ok' | 'degraded'
  Version: string
  /** Empty while all is well; a condition ends by itself once its cause is gone. */
  Conditions: ServiceCondition[]
}

/** An idle node that is to be kept out of use. */
export interface HoldNodeRequest {
  NodeId: string
  /** Why; told with the node, its job's incident and in the history. "" unless given. */
  Reason?: string
}

/** A node that keeps a copy of a shard. */
export interface Holder {
  NodeId: string
  /** It counts in the current rounds. */
  InView: boolean
  /** The newest step that it is known to hold, whole and verified; absent before the first. */
  VerifiedStep?: number
  /** Since when. */
  VerifiedTime?: Timestamp
  /** How far that is behind the newest step that the ranks have finished. */
  LagSteps?: number
  /** The network node that its instance hangs on; absent where AWS has not told. */
  FailureDomain?: string
}

/** A failure and its recovery. */
export interface Incident {
  IncidentId: string
  TrainingJobName: string
  RunId: string
  Cause: 'notice' | 'requested' | 'pause_failed' | 'drill' | 'load_failed' | 'rank_exit' | 'hang' | 'agent_lost' | 'node_unreachable' | 'node_fault' | 'instance_terminated' | 'group_lost'
  Phase: 'replace' | 'restore' | 'rework' | 'closed'
  Evidence: string[]
  Decision: string
  Reason: string
  /** The farthest source that any rank used. */
  RestoreSource?: 'local' | 'peer' | 's3'
  FromStep?: number
  ReachedStep?: number
  /** Steps done again: reached_step − from_step. */
  LostSteps?: number
  GenerationBefore: number
  GenerationAfter?: number
  /** The first of those that were lost, if any. */
  InstanceId?: string
  ReplacementInstanceId?: string
  /** Those that were left, for whatever cause. */
  InstanceIds: string[]
  /** Where it happened: whose ranks, agent, links or hardware failed, or what AWS announced, lost by it or not. Empty where that cannot be told. */
  FaultedInstanceIds: string[]
  ReplacementInstanceIds: string[]
  FailedAt: Timestamp
  OpenedAt: Timestamp
  /** When training ran again; absent where it has not. */
  RestoredAt?: Timestamp
  ClosedAt?: Timestamp
  DetectSeconds?: number
  ReplaceSeconds?: number
  RestoreSeconds?: number
  ReworkSeconds?: number
  /** The fleet's price × the seconds in which the job's nodes made no new step; so far, while it is open. Absent where the fleet has no price. */
  CostUsd?: number
  /** By rank; empty before that is known, or when nothing was restored. */
  RankSources: RankSource[]
  /** The event `RanksHang` whose Detail has the stacks of all ranks: where ranks hung, in DescribeIncident alone, for as long as events are kept. */
  StacksEventId?: number
  /** When a person first said to have seen it. */
  AcknowledgementTime?: Timestamp
  AcknowledgedBy?: string
  /** What they noted. */
  Acknowledgement?: string
}

/** The newest complete checkpoint in S3 that was not found damaged. */
export interface LastCheckpoint {
  Step: number
  Generation: number
  CompletedAt: Timestamp
  Bytes: number
}

export interface ListCheckpointsRequest {
  TrainingJobName: string
  /** 0 unless given. */
  MinStep?: number
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A job's checkpoints, newest step first. */
export interface ListCheckpointsResponse {
  Checkpoints: Checkpoint[]
  /** Of the job: one that has ended makes no more. */
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  NextToken?: string
}

export interface ListDrillsRequest {
  TrainingJobName?: string
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of drills, in the order they were asked for. */
export interface ListDrillsResponse {
  Drills: Drill[]
  NextToken?: string
}

export interface ListEventsRequest {
  TrainingJobName?: string
  FleetName?: string
  /** 0 unless given. */
  AfterEventId?: number
  TimeAfter?: Timestamp
  TimeBefore?: Timestamp
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
  /** "Ascending" unless given. */
  SortOrder?: 'Ascending' | 'Descending'
}

/** A page of events. */
export interface ListEventsResponse {
  /** Oldest first, unless the newest were asked for first. */
  Events: Event[]
  NextToken?: string
}

export interface ListFleetsRequest {
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of fleets, by name. */
export interface ListFleetsResponse {
  Fleets: Fleet[]
  NextToken?: string
}

export interface ListIncidentsRequest {
  TrainingJobName?: string
  StatusEquals?: 'Open' | 'Closed'
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
  /** "Ascending" unless given. */
  SortOrder?: 'Ascending' | 'Descending'
}

/** A page of incidents. */
export interface ListIncidentsResponse {
  /** In the order they were opened, unless the newest were asked for first. */
  Incidents: Incident[]
  NextToken?: string
}

export interface ListLogsRequest {
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of the streams of a job's ranks, by generation, rank and stream. */
export interface ListLogsResponse {
  Logs: LogEntry[]
  NextToken?: string
}

export interface ListMetricsRequest {
  TrainingJobName: string
}

/** What a job has logged: at most 256 names, so that there are no pages. */
export interface ListMetricsResponse {
  Metrics: Metric[]
  /** Steps whose values were lost on the way, because more was logged than could be taken, and values of more names than a job may have. */
  DroppedCount: number
}

export interface ListNodesRequest {
  FleetName?: string
  /** false unless given. */
  IncludeEnded?: boolean
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** All nodes asked for, oldest first. */
export interface ListNodesResponse {
  Nodes: Node[]
  NextToken?: string
}

export interface ListOutputsRequest {
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of a job's output files. */
export interface ListOutputsResponse {
  Outputs: OutputEntry[]
  NextToken?: string
}

export interface ListProjectQuotasRequest {
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of quotas, by project. */
export interface ListProjectQuotasResponse {
  Quotas: ProjectQuota[]
  NextToken?: string
}

export interface ListTokensRequest {
  Project?: string
  /** false unless given. */
  IncludeEnded?: boolean
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of tokens, oldest first. */
export interface ListTokensResponse {
  Tokens: Token[]
  NextToken?: string
}

export interface ListTrainingJobNodesRequest {
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of which nodes have worked for a job, by when they began. */
export interface ListTrainingJobNodesResponse {
  Nodes: TrainingJobNode[]
  NextToken?: string
}

export interface ListTrainingJobRevisionsRequest {
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of a job's revisions, oldest first. */
export interface ListTrainingJobRevisionsResponse {
  Revisions: TrainingJobRevision[]
  NextToken?: string
}

export interface ListTrainingJobsRequest {
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
  StatusEquals?: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  NameContains?: string
  FleetName?: string
  Project?: string
  CreationTimeAfter?: Timestamp
  CreationTimeBefore?: Timestamp
  LastModifiedTimeAfter?: Timestamp
  LastModifiedTimeBefore?: Timestamp
  TagKey?: string
  TagValue?: string
  /** "CreationTime" unless given. */
  SortBy?: 'CreationTime' | 'LastModifiedTime' | 'Name'
  /** "Descending" unless given. */
  SortOrder?: 'Ascending' | 'Descending'
}

/** A page of jobs, newest first. */
export interface ListTrainingJobsResponse {
  TrainingJobSummaries: TrainingJobSummary[]
  NextToken?: string
}

/** One stream of one rank in one generation, or the fact that it is missing. */
export interface LogEntry {
  Generation: number
  Rank: number
  /** None for what is missing altogether. */
  Stream?: 'stdout' | 'stderr'
  Key?: string
  Bytes?: number
  MissingReason?: string
}

/** One line that a rank printed, or the fact that lines are missing. */
export interface LogEvent {
  /** When the node's agent read it, to the millisecond. */
  Timestamp: Timestamp
  Generation: number
  NodeId: string
  /** Absent where a whole node is meant. */
  Rank?: number
  /** `gap`: what was here is not kept; Message says what and why. */
  Stream: 'stdout' | 'stderr' | 'gap'
  /** Without the line feed; lines of more than 16 KiB come in pieces. */
  Message: string
}

/** Lines that came together; without lines it is a sign of life. */
export interface LogEvents {
  Events: LogEvent[]
  /** For FollowLogs and GetLogEvents: goes on after these lines. */
  NextForwardToken: string
}

/** One name under which rank 0 logs. */
export interface Metric {
  MetricName: string
  LastStep: number
  LastTime: Timestamp
  /** What is not finite is the text NaN, Infinity or -Infinity on the wire. */
  LastValue: number | 'NaN' | 'Infinity' | '-Infinity'
}

/** One metric as columns: the first entry of each is the first point, and so on, in order of steps. A point is one step or a span of them. */
export interface MetricDataResult {
  MetricName: string
  /** The first step of each point that has a value. */
  Steps: number[]
  LastSteps: number[]
  /** When the last value of each point was logged, seconds since 1970. */
  Times: number[]
  /** Values in each point. */
  Counts: number[]
  /** Of the finite values, as means and maximums; NaN where there are none. */
  Minimums: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  Means: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  Maximums: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  /** The last value of each point, finite or not. What is not finite is the text NaN, Infinity or -Infinity on the wire. */
  LastValues: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  /** Of what Everstep measures on every node (names that begin with everstep/): the node of each minimum; empty for what the script logs. There the mean and the last value are the median of the nodes, and the counts count nodes. A point that was made while one node alone was heard is of rank 0's node, and has an empty name. */
  MinimumNodeIds: string[]
  /** Likewise of each maximum. */
  MaximumNodeIds: string[]
}

/** An EC2 instance of a fleet and its agent. */
export interface Node {
  /** The EC2 instance id. */
  NodeId: string
  FleetName: string
  NodeStatus: 'joining' | 'spare' | 'assigned' | 'held' | 'rebooting' | 'draining' | 'gone'
  /** Why it is held; all but unreachable ones wait for ReleaseNode. */
  Hold?: 'unreachable' | 'distrusted' | 'inspection' | 'person'
  /** What a person asked for and is still to be done; ReleaseNode calls it off. */
  Request?: 'drain' | 'replace' | 'reboot' | 'hold'
  /** Who asked, and why. */
  RequestReason?: string
  Connected: boolean
  /** Its ranks start without importing first; a spare that is not warm, yet or at all, is given to a job only when no other is there. */
  Warm: boolean
  TrainingJobName?: string
  Address: string
  /** What snapshots may take. */
  MemoryBytes: number
  /** Absent while its agent is not connected, or has not measured it yet. */
  Memory?: NodeMemory
  InstanceType: string
  AvailabilityZone: string
  /** The network node that its instance hangs on; absent while AWS has not told, which it does not for every instance type. */
  FailureDomain?: string
  AgentVersion: string
  /** Messages of its agent that were not decodable, too long or of another node, since this server started. */
  RefusedMessageCount: number
  /** Sessions of other agents and of ranks that its agent refused or closed for what they said, since the agent started. A few around a restart of ranks are stale ones; more are worth a look at its log. */
  RefusedSessionCount: number
  /** What a job's code can get at on this node that is not the job's, in a sentence: the agent's files, the instance's metadata. Absent where ranks have a user of their own that is kept from both, and while the agent has not reported. */
  Exposure?: string
  Reason: string
  /** What its agent reports as wrong now, with the node and with its job's work there. Empty while the agent is not connected. */
  Conditions: Condition[]
  /** Its history, oldest line first; listed by DescribeNode alone. */
  Incidents: NodeIncident[]
  CreationTime: Timestamp
  ConnectionTime?: Timestamp
  EndTime?: Timestamp
}

/** A line of a node's history: it had its part in an incident. */
export interface NodeIncident {
  /** Of a job; `fleet-…` where no job had the node. */
  IncidentId: string
  Time: Timestamp
  /** `node_unreachable`, `agent_lost` … or a fault's code with its number: `gpu_xid 79`. */
  Cause: string
  Evidence: string
  Remedy: 'none' | 'restart' | 'release' | 'hold' | 'retire' | 'reboot' | 'replace' | 'let_go'
}

/** Memory of a node and of its ranks, as its agent reported last. */
export interface NodeMemory {
  UsedBytes: number
  /** What can be allocated now without swapping. */
  AvailableBytes: number
  /** What agent and ranks can have at most: of the machine, or of their cgroup where that has a lower limit. */
  TotalBytes: number
  /** Absent where the machine is the limit. */
  CgroupLimitBytes?: number
  /** Living ranks, in order. */
  Ranks: RankMemory[]
}

/** Where outputs go. */
export interface OutputDataConfig {
  /** Prefix for outputs, which lie below it by job and run; the service's bucket by default. */
  S3OutputPath?: string
}

/** One file that a rank left in its output directory. */
export interface OutputEntry {
  Generation: number
  /** Below the generation: `rank=0/model.safetensors`. */
  Path: string
  Key: string
  Bytes: number
}

export interface PauseTrainingJobRequest {
  TrainingJobName: string
}

export interface PinCheckpointRequest {
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** What the jobs of a project may have. */
export interface ProjectQuota {
  Project: string
  MaxNodeCount?: number
  MaxJobCount?: number
  MaxSourceBytes?: number
  MaxPriority: number
  AllowedRoleArns: string[]
  AllowedSecrets: string[]
  AllowedData: string[]
}

/** How many nodes keep every shard in memory, and what that may cost. */
export interface ProtectionConfig {
  /** The owner's node included; 1 protects against lost processes alone. One where there is one node, unless said. 2 unless given. */
  Copies?: number
  /** What snapshots may cost training, as a part of the mean iteration. Above it they are taken less often, below it as often as every step. 0.01 unless said; 1 on a local cluster, whose nodes share the cores of one machine, so that the figure would say nothing. */
  MaxSlowdown?: number
}

/** What the jobs of a project may have, and what its submitters may name. Administrators may name anything. */
export interface PutProjectQuotaRequest {
  Project: string
  /** Nodes of each fleet that all its jobs may hold together, without a limit unless said. Jobs beyond wait, and hold up nobody. */
  MaxNodeCount?: number
  /** Jobs that have not ended, in all fleets, without a limit unless said. CreateTrainingJob is refused beyond. */
  MaxJobCount?: number
  /** What all uploaded source archives may take together, without a limit unless said. Stored archives are never deleted; archives under way count for up to 26 hours. CreateSource, CompleteSource and PutSource are refused beyond. */
  MaxSourceBytes?: number
  /** The highest Priority that its submitters may set. 0 unless given. */
  MaxPriority?: number
  /** The roles that its submitters may name as RoleArn; none unless said. A final `*` allows all that begins like it, here and below. */
  AllowedRoleArns?: string[]
  /** What its submitters may name in Secrets where a job has no RoleArn; none unless said. */
  AllowedSecrets?: string[]
  /** S3 URIs that its submitters may name in InputDataConfig where a job has no RoleArn, and directories; none unless said. */
  AllowedData?: string[]
}

export interface PutSourceRequest {
  SourceId: string
  Body: Blob
}

/** A source archive that was checked and stored. */
export interface PutSourceResponse {
  SourceId: string
  Bytes: number
  FileCount: number
}

/** What the process of a rank has in memory; the processes that the rank started do not count. */
export interface RankMemory {
  Rank: number
  /** Pages that the process shares with others count in full. */
  ResidentBytes: number
  /** The highest ResidentBytes since the process started. */
  PeakResidentBytes: number
}

/** Where the shards of some ranks came from. */
export interface RankSource {
  Source: 'local' | 'peer' | 's3'
  FirstRank: number
  LastRank: number
}

/** A node that is to be rebooted. */
export interface RebootNodeRequest {
  NodeId: string
  /** Why; told with the node, its job's incident and in the history. "" unless given. */
  Reason?: string
}

/** What becomes of the job's memory when nodes are lost at once. */
export interface RecoveryOdds {
  LostNodes: number
  /** That every shard keeps a copy, all sets of so many nodes equally likely; exact. */
  Probability: number
}

/** What becomes of a held node. */
export interface ReleaseNodeRequest {
  NodeId: string
  /** End the instance; else it works again, and its history counts from now on. false unless given. */
  Terminate?: boolean
}

/** How much of the time was training, and how often and how long it was interrupted. */
export interface Reliability {
  /** Seconds of training ÷ all seconds but those without nodes (queue, provision, paused); absent before the first start. */
  EttrRatio?: number
  /** Seconds of training ÷ all seconds since the job was created. */
  EttrWithQueueRatio?: number
  /** Mean time to failure: seconds of training and stall ÷ failures; absent before the first. Drills, AWS's notices and people's wishes are none. */
  MttfSeconds?: number
  /** Mean time to recovery, from the failure until training is where it was before; of failures whose incidents are closed. */
  MttrSeconds?: number
  /** Steps done again. */
  LostSteps: number
  /** What nodes cost while they made no new step; absent where the fleet has no price. */
  IncidentCostUsd?: number
}

/** A node whose instance is to be ended, another one coming. */
export interface ReplaceNodeRequest {
  NodeId: string
  /** Why; told with the node, its job's incident and in the history. "" unless given. */
  Reason?: string
}

/** A node whose agent has lost its session. */
export interface ResetNodeSessionRequest {
  NodeId: string
  /** Why; told with the node, its job's incident and in the history. "" unless given. */
  Reason?: string
}

export interface ResumeTrainingJobRequest {
  TrainingJobName: string
}

/** When to stop trying. */
export interface RetryStrategy {
  /** The same failure at the same step this many times; then once more without the failing rank's node and once more from an older state, where there are such, and the job has failed. 3 unless given. */
  MaxAttempts?: number
}

export interface RevokeTokenRequest {
  TokenId: string
}

/** Objects in S3. */
export interface S3DataSource {
  /** One object, or a prefix: then what lies below it, with its own folders. Without RoleArn it is read with the nodes' permissions. */
  S3Uri: string
}

/** The job was in a state for a while. */
export interface SecondaryStatusTransition {
  /** The derived status, SageMaker's words. While ranks run without a new step it is Starting, or Restarting once the job has made steps. */
  Status: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'Failed' | 'Stopped'
  /** Everstep's own, finer state. */
  State: 'queued' | 'allocating' | 'preparing' | 'loading' | 'starting' | 'running' | 'pausing' | 'stopping' | 'completed' | 'failed' | 'stopped'
  StartTime: Timestamp
  EndTime?: Timestamp
  StatusMessage: string
}

/** Something about the service that needs a person. */
export interface ServiceCondition {
  Type: 'disk_full'
  /** What is wrong, where, and with which figures. */
  Message: string
  /** What to do. */
  Hint: string
  /** Absent where the disk belongs to a database on another machine. */
  Directory?: string
  /** Absent where it cannot be read from here. */
  FreeBytes?: number
  DurationSeconds: number
}

/** Who holds one rank's shard. */
export interface ShardProtection {
  Rank: number
  OwnerNodeId: string
  CommittedStep: number
  Bytes: number
  /** The owner's node first. */
  Holders: Holder[]
  /** Why a holder is out of view, slow or hard to reach, or snapshots are refused; empty when all is well. */
  Reason: string
}

/** The user's code. */
export interface SourceConfig {
  /** As PutSource returned it: the SHA-256 of the archive. */
  SourceId: string
}

/** Where an archive is to be put, without a token: `PUT Url` with these headers and the archive as its body. */
export interface SourceUpload {
  /** Whoever has it may put this very archive there, and no other: checksum and length are signed. */
  Url: string
  Headers: Record<string, string>
  /** After it CreateSource gives another address. */
  ExpirationTime: Timestamp
}

/** How many spares are kept, from what the fleet has seen of failures and replacements. */
export interface SparePolicy {
  /** How probable it has to be that a spare is free when a failure comes. */
  Probability: number
}

/** Something of a job to be broken on purpose. */
export interface StartDrillRequest {
  TrainingJobName: string
  DrillType: 'kill-rank' | 'kill-agent' | 'terminate-instance'
  /** One of the job's; the last by GROUP_RANK unless said. */
  NodeId?: string
  /** For kill-rank: a rank on that node; its first unless said. */
  Rank?: number
}

export interface StopTrainingJobRequest {
  TrainingJobName: string
}

/** Limits of a job. */
export interface StoppingCondition {
  /** From its first start; time without nodes after it was paused is not counted. */
  MaxRuntimeInSeconds?: number
  /** From its creation to its first nodes. However long it is, a gang that does not come together gives its nodes back meanwhile. */
  MaxPendingTimeInSeconds?: number
  /** What its nodes may cost, at the fleet's price; the fleet must have one. Then it stops as a user's stop would. */
  MaxCostUsd?: number
}

/** Limits to change; 0 lifts one. */
export interface StoppingConditionUpdate {
  MaxRuntimeInSeconds?: number
  MaxPendingTimeInSeconds?: number
  /** At least 0.01, or 0. */
  MaxCostUsd?: number
}

/** A person looks after a job from now on. */
export interface TakeOverTrainingJobRequest {
  TrainingJobName: string
  /** "" unless given. */
  Reason?: string
}

/** A token as it is listed: everything but the secret. */
export interface Token {
  TokenId: string
  /** user: of a person or a program. join: lets instances of a fleet become its nodes. */
  Kind: 'user' | 'join'
  Role: 'admin' | 'submitter' | 'viewer' | 'agent'
  /** Absent: every project. */
  Project?: string
  /** Of a join token. */
  FleetName?: string
  Description: string
  CreationTime: Timestamp
  ExpirationTime?: Timestamp
  RevocationTime?: Timestamp
}

/** Everything about a job. */
export interface TrainingJob {
  TrainingJobName: string
  RunId: string
  /** Where it runs or waits now. */
  FleetName: string
  /** The others where it may start. */
  AlternativeFleetNames: string[]
  Project: string
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  SecondaryStatus: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'Failed' | 'Stopped'
  SecondaryStatusTransitions: SecondaryStatusTransition[]
  /** Why it is where it is: what it waits for, or how it ended. */
  Reason: string
  /** Set once the job has failed. */
  FailureReason?: string
  /** What is wrong now with its nodes and with the service. Reported for people: a condition alone changes nothing about the job. Empty once it has ended. */
  Conditions: Condition[]
  Source: SourceConfig
  EntryPoint: string
  Requirements?: string
  HyperParameters: Record<string, string>
  Environment: Record<string, string>
  /** Where the values are, by variable. */
  Secrets: Record<string, string>
  RoleArn?: string
  NodeCount: number
  RanksPerNode: number
  Protection: ProtectionConfig
  CheckpointConfig: CheckpointConfig
  InputDataConfig: Channel[]
  OutputDataConfig: OutputDataConfig
  StoppingCondition: StoppingCondition
  RetryStrategy: RetryStrategy
  Priority: number
  Preemptible: boolean
  /** Its place in the fleet's queue, from 1; absent while it does not wait there. */
  QueuePosition?: number
  /** Names of the jobs that are ahead of it there. */
  QueuedBehind: string[]
  Tags: Record<string, string>
  CreationTime: Timestamp
  /** When it came into its state, or a person last changed what is wanted of it. */
  LastModifiedTime: Timestamp
  TrainingStartTime?: Timestamp
  TrainingEndTime?: Timestamp
  StopRequestedTime?: Timestamp
  /** Absent once it was resumed. */
  PauseRequestedTime?: Timestamp
  /** Of what was asked for: 1 at its creation, one more with each update. */
  Revision: number
  /** What the newest generation was planned from; absent before the first. */
  ObservedRevision?: number
  /** Since when a person looks after it: Everstep observes and decides nothing. */
  TakenOverTime?: Timestamp
  TakenOverBy?: string
  /** The launch of all ranks that runs now; 0 before the first. */
  Generation: number
  /** What that launch resumed from. */
  BaseStep: number
  /** Held, verified, by all holders in view; -1 before the first. */
  CommittedStep: number
  /** Steps that the ranks have finished; -1 before they start. */
  Boundary: number
  /** The highest that any generation reached. */
  MaxBoundary: number
  /** Steps finished when its script will be done: what `session.batches(until_step=…)` was given; absent where the script has not said. */
  TargetStep?: number
  /** How long the steps up to TargetStep take at the mean pace of those so far, without failures and waiting; absent where either is not known, and once it has ended. */
  EstimatedRemainingSeconds?: number
  /** Of the nodes that belong to it: how many are connected and report no fault of their own. */
  HealthyNodeCount: number
  /** Nodes assigned to the job; after its end, those that have not released it yet. A job can be deleted once it is 0. */
  AssignedNodeCount: number
  /** By GROUP_RANK; empty while it has none. */
  NodeIds: string[]
  CoordinatorNodeId?: string
  IncidentCount: number
  /** Incidents from which the job has not recovered yet. */
  OpenIncidentCount: number
  /** The drill of it that is not over: recovered from or not, absorbed, or not done. */
  OpenDrillId?: string
  /** Every second from CreationTime to AccountedUntil by bucket, to the microsecond: they add up exactly. */
  AccountingSeconds: Record<string, number>
  /** The end, once the job has ended. */
  AccountedUntil?: Timestamp
  Reliability: Reliability
  /** How long nodes have worked for the job, all together. */
  NodeSeconds: number
  /** What they have cost so far at the fleet's price; absent where it has none. */
  CostUsd?: number
}

/** A node that works for a job, or has worked for it. */
export interface TrainingJobNode {
  NodeId: string
  StartTime: Timestamp
  /** Absent while it does; a node may come back. */
  EndTime?: Timestamp
}

/** What would become of a job, by what its fleet is and has seen. */
export interface TrainingJobPlan {
  FleetName: string
  NodeCount: number
  RanksPerNode: number
  WorldSize: number
  Copies: number
  /** Host memory of a node is taken by so many slots, each as large as one rank's state: slots of a shard × Copies × RanksPerNode. */
  SlotsPerNode: number
  /** What the fleet's smallest node has for them; absent while it has none. */
  NodeMemoryBytes?: number
  /** So large may one rank's state be there. */
  LargestShardBytes?: number
  /** For one, two and three lost nodes at once, with all copies in place. */
  RecoveryOdds: RecoveryOdds[]
  /** Its turn has come, and enough nodes are free and connected. */
  CanStartNow: boolean
  /** Its place in the fleet's queue, from 1; absent where its turn would come at once. */
  QueuePosition?: number
  /** Names of the jobs that would be ahead of it there. */
  QueuedBehind: string[]
  /** What it would wait for, in words. */
  WaitsFor?: string
  FreeNodeCount: number
  /** Instances that the fleet would have to bring for it. */
  NodesToLaunch: number
  /** The fleet's price × NodeCount; absent where it has none. */
  CostUsdPerHour?: number
  /** What it can cost at most: by MaxRuntimeInSeconds at that price, or by MaxCostUsd. Absent where neither bounds it. */
  MostCostUsd?: number
  /** Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount; absent before the first incident. */
  ExpectedMttfSeconds?: number
  /** Mean time to recovery, of the fleet's closed incidents. */
  ExpectedRecoverySeconds?: number
  /** ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds): the part of the time that will be training, the queue not counted. */
  ExpectedEttrRatio?: number
}

/** What was changed at once of a job. */
export interface TrainingJobRevision {
  /** 1: what it was created with. */
  Revision: number
  Time: Timestamp
  Changes: FieldChange[]
}

/** One line of a list of jobs. */
export interface TrainingJobSummary {
  TrainingJobName: string
  RunId: string
  FleetName: string
  Project: string
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  SecondaryStatus: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'Failed' | 'Stopped'
  Reason: string
  Priority: number
  NodeCount: number
  Generation: number
  CommittedStep: number
  Boundary: number
  /** As in TrainingJob. */
  TargetStep?: number
  /** As in TrainingJob. */
  EstimatedRemainingSeconds?: number
  CreationTime: Timestamp
  /** When it came into its state, or a person last changed what is wanted of it. */
  LastModifiedTime: Timestamp
  TrainingStartTime?: Timestamp
  TrainingEndTime?: Timestamp
  /** As in Reliability; absent before it has started. */
  EttrRatio?: number
  /** What its nodes have cost; absent where the fleet has no price. */
  CostUsd?: number
  /** As DescribeProtection says it; in lists alone, and absent while no agent holds its state: before its first launch, paused, ended. */
  ProtectionState?: 'Protected' | 'Degraded' | 'Unprotected'
  /** As in TrainingJob; in lists alone. */
  HealthyNodeCount?: number
  /** In lists alone. */
  IncidentCount?: number
  /** In lists alone. */
  OpenIncidentCount?: number
}

export interface UnfreezeFleetRequest {
  FleetName: string
}

export interface UnpinCheckpointRequest {
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** Figures to change; what is left out stays. */
export interface UpdateFleetRequest {
  FleetName: string
  /** Ends a SparePolicy, unless one is given as well. */
  SpareCount?: number
  SparePolicy?: SparePolicy
  MinNodeCount?: number
  /** Jobs and incidents that have not ended are valued anew; what has ended keeps its figure. */
  PriceUsdPerHour?: number
  HoldFailedInstances?: boolean
  MaxReplacementsPerHour?: number
  NodeRoleName?: string
  AllowDrills?: boolean
  AllowCommands?: boolean
}

/** Fields to change; what is left out stays. */
export interface UpdateTrainingJobRequest {
  TrainingJobName: string
  Priority?: number
  Preemptible?: boolean
  RetryStrategy?: RetryStrategy
  StoppingCondition?: StoppingConditionUpdate
  Protection?: ProtectionConfig
  CheckpointConfig?: CheckpointConfigUpdate
  /** All of them: those that are left out go. */
  Tags?: Record<string, string>
}

/** The job's newest revision, and what it changed. */
export interface UpdateTrainingJobResponse {
  TrainingJobName: string
  RunId: string
  Revision: number
  /** Empty where everything was so already: then there is no new revision. */
  Changes: FieldChange[]
}

export interface VerifyCheckpointRequest {
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** What each operation takes and answers. */
export interface Operations {
  AcknowledgeIncident: { request: AcknowledgeIncidentRequest; response: Incident }
  CompleteSource: { request: CompleteSourceRequest; response: PutSourceResponse }
  CreateCheckpoint: { request: CreateCheckpointRequest; response: CreateCheckpointResponse }
  CreateFleet: { request: CreateFleetRequest; response: CreateFleetResponse }
  CreateJoinToken: { request: CreateJoinTokenRequest; response: CreateJoinTokenResponse }
  CreateSource: { request: CreateSourceRequest; response: CreateSourceResponse }
  CreateToken: { request: CreateTokenRequest; response: CreateTokenResponse }
  CreateTrainingJob: { request: CreateTrainingJobRequest; response: CreateTrainingJobResponse }
  DeleteCheckpoint: { request: DeleteCheckpointRequest; response: Checkpoint }
  DeleteFleet: { request: DeleteFleetRequest; response: Fleet }
  DeleteProjectQuota: { request: DeleteProjectQuotaRequest; response: ProjectQuota }
  DeleteTrainingJob: { request: DeleteTrainingJobRequest; response: DeleteTrainingJobResponse }
  DescribeFleet: { request: DescribeFleetRequest; response: Fleet }
  DescribeIncident: { request: DescribeIncidentRequest; response: Incident }
  DescribeNode: { request: DescribeNodeRequest; response: Node }
  DescribeProtection: { request: DescribeProtectionRequest; response: DescribeProtectionResponse }
  DescribeSource: { request: DescribeSourceRequest; response: PutSourceResponse }
  DescribeTrainingJob: { request: DescribeTrainingJobRequest; response: TrainingJob }
  DrainNode: { request: DrainNodeRequest; response: Node }
  ExecuteCommand: { request: ExecuteCommandRequest; response: ExecuteCommandResponse }
  FollowLogs: { request: FollowLogsRequest; response: FollowLogsResponse }
  GetCallerIdentity: { request: Record<string, never>; response: GetCallerIdentityResponse }
  GetHealth: { request: Record<string, never>; response: HealthResponse }
  GetLog: { request: GetLogRequest; response: GetLogResponse }
  GetLogEvents: { request: GetLogEventsRequest; response: GetLogEventsResponse }
  GetMetricData: { request: GetMetricDataRequest; response: GetMetricDataResponse }
  GetOutput: { request: GetOutputRequest; response: GetOutputResponse }
  HandBackTrainingJob: { request: HandBackTrainingJobRequest; response: TrainingJobSummary }
  HoldNode: { request: HoldNodeRequest; response: Node }
  ListCheckpoints: { request: ListCheckpointsRequest; response: ListCheckpointsResponse }
  ListDrills: { request: ListDrillsRequest; response: ListDrillsResponse }
  ListEvents: { request: ListEventsRequest; response: ListEventsResponse }
  ListFleets: { request: ListFleetsRequest; response: ListFleetsResponse }
  ListIncidents: { request: ListIncidentsRequest; response: ListIncidentsResponse }
  ListLogs: { request: ListLogsRequest; response: ListLogsResponse }
  ListMetrics: { request: ListMetricsRequest; response: ListMetricsResponse }
  ListNodes: { request: ListNodesRequest; response: ListNodesResponse }
  ListOutputs: { request: ListOutputsRequest; response: ListOutputsResponse }
  ListProjectQuotas: { request: ListProjectQuotasRequest; response: ListProjectQuotasResponse }
  ListTokens: { request: ListTokensRequest; response: ListTokensResponse }
  ListTrainingJobNodes: { request: ListTrainingJobNodesRequest; response: ListTrainingJobNodesResponse }
  ListTrainingJobRevisions: { request: ListTrainingJobRevisionsRequest; response: ListTrainingJobRevisionsResponse }
  ListTrainingJobs: { request: ListTrainingJobsRequest; response: ListTrainingJobsResponse }
  PauseTrainingJob: { request: PauseTrainingJobRequest; response: TrainingJobSummary }
  PinCheckpoint: { request: PinCheckpointRequest; response: Checkpoint }
  PutProjectQuota: { request: PutProjectQuotaRequest; response: ProjectQuota }
  PutSource: { request: PutSourceRequest; response: PutSourceResponse }
  RebootNode: { request: RebootNodeRequest; response: Node }
  ReleaseNode: { request: ReleaseNodeRequest; response: Node }
  ReplaceNode: { request: ReplaceNodeRequest; response: Node }
  ResetNodeSession: { request: ResetNodeSessionRequest; response: Node }
  ResumeTrainingJob: { request: ResumeTrainingJobRequest; response: TrainingJobSummary }
  RevokeToken: { request: RevokeTokenRequest; response: Token }
  StartDrill: { request: StartDrillRequest; response: Drill }
  StopTrainingJob: { request: StopTrainingJobRequest; response: TrainingJobSummary }
  TakeOverTrainingJob: { request: TakeOverTrainingJobRequest; response: TrainingJobSummary }
  UnfreezeFleet: { request: UnfreezeFleetRequest; response: Fleet }
  UnpinCheckpoint: { request: UnpinCheckpointRequest; response: Checkpoint }
  UpdateFleet: { request: UpdateFleetRequest; response: Fleet }
  UpdateTrainingJob: { request: UpdateTrainingJobRequest; response: UpdateTrainingJobResponse }
  VerifyCheckpoint: { request: VerifyCheckpointRequest; response: Checkpoint }
}

/** How each operation is called: fields that are not named here are the body. */
export const operations = {
  AcknowledgeIncident: { method: 'POST', path: '/v1/incidents/{IncidentId}/acknowledge', query: [] },
  CompleteSource: { method: 'POST', path: '/v1/sources/{SourceId}/completion', query: [] },
  CreateCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints', query: [] },
  CreateFleet: { method: 'POST', path: '/v1/fleets', query: [] },
  CreateJoinToken: { method: 'POST', path: '/v1/join-tokens', query: [] },
  CreateSource: { method: 'POST', path: '/v1/sources', query: [] },
  CreateToken: { method: 'POST', path: '/v1/tokens', query: [] },
  CreateTrainingJob: { method: 'POST', path: '/v1/training-jobs', query: [] },
  DeleteCheckpoint: { method: 'DELETE', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}', query: ['Generation'] },
  DeleteFleet: { method: 'DELETE', path: '/v1/fleets/{FleetName}', query: [] },
  DeleteProjectQuota: { method: 'DELETE', path: '/v1/quotas/{Project}', query: [] },
  DeleteTrainingJob: { method: 'DELETE', path: '/v1/training-jobs/{TrainingJobName}', query: ['DeleteObjects', 'DryRun'] },
  DescribeFleet: { method: 'GET', path: '/v1/fleets/{FleetName}', query: [] },
  DescribeIncident: { method: 'GET', path: '/v1/incidents/{IncidentId}', query: [] },
  DescribeNode: { method: 'GET', path: '/v1/nodes/{NodeId}', query: [] },
  DescribeProtection: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/protection', query: [] },
  DescribeSource: { method: 'GET', path: '/v1/sources/{SourceId}', query: [] },
  DescribeTrainingJob: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}', query: [] },
  DrainNode: { method: 'POST', path: '/v1/nodes/{NodeId}/drain', query: [] },
  ExecuteCommand: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/ranks/{Rank}/commands', query: [] },
  FollowLogs: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs/follow', query: ['Rank', 'Generation', 'StartTime', 'FilterPattern', 'StartFromHead', 'NextToken'] },
  GetCallerIdentity: { method: 'GET', path: '/v1/caller-identity', query: [] },
  GetHealth: { method: 'GET', path: '/v1/health', query: [] },
  GetLog: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs/content', query: ['Key'] },
  GetLogEvents: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs/events', query: ['Rank', 'Generation', 'StartTime', 'EndTime', 'FilterPattern', 'StartFromHead', 'Limit', 'NextToken'] },
  GetMetricData: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/metric-data', query: ['MetricName', 'FirstStep', 'LastStep', 'StartTime', 'EndTime', 'ResolutionInSteps', 'ResolutionInSeconds', 'MaxPoints'] },
  GetOutput: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/outputs/content', query: ['Key'] },
  HandBackTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/hand-back', query: [] },
  HoldNode: { method: 'POST', path: '/v1/nodes/{NodeId}/hold', query: [] },
  ListCheckpoints: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/checkpoints', query: ['MinStep', 'MaxResults', 'NextToken'] },
  ListDrills: { method: 'GET', path: '/v1/drills', query: ['TrainingJobName', 'MaxResults', 'NextToken'] },
  ListEvents: { method: 'GET', path: '/v1/events', query: ['TrainingJobName', 'FleetName', 'AfterEventId', 'TimeAfter', 'TimeBefore', 'MaxResults', 'NextToken', 'SortOrder'] },
  ListFleets: { method: 'GET', path: '/v1/fleets', query: ['MaxResults', 'NextToken'] },
  ListIncidents: { method: 'GET', path: '/v1/incidents', query: ['TrainingJobName', 'StatusEquals', 'MaxResults', 'NextToken', 'SortOrder'] },
  ListLogs: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs', query: ['MaxResults', 'NextToken'] },
  ListMetrics: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/metrics', query: [] },
  ListNodes: { method: 'GET', path: '/v1/nodes', query: ['FleetName', 'IncludeEnded', 'MaxResults', 'NextToken'] },
  ListOutputs: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/outputs', query: ['MaxResults', 'NextToken'] },
  ListProjectQuotas: { method: 'GET', path: '/v1/quotas', query: ['MaxResults', 'NextToken'] },
  ListTokens: { method: 'GET', path: '/v1/tokens', query: ['Project', 'IncludeEnded', 'MaxResults', 'NextToken'] },
  ListTrainingJobNodes: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/nodes', query: ['MaxResults', 'NextToken'] },
  ListTrainingJobRevisions: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/revisions', query: ['MaxResults', 'NextToken'] },
  ListTrainingJobs: { method: 'GET', path: '/v1/training-jobs', query: ['MaxResults', 'NextToken', 'StatusEquals', 'NameContains', 'FleetName', 'Project', 'CreationTimeAfter', 'CreationTimeBefore', 'LastModifiedTimeAfter', 'LastModifiedTimeBefore', 'TagKey', 'TagValue', 'SortBy', 'SortOrder'] },
  PauseTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/pause', query: [] },
  PinCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/pin', query: ['Generation'] },
  PutProjectQuota: { method: 'PUT', path: '/v1/quotas/{Project}', query: [] },
  PutSource: { method: 'PUT', path: '/v1/sources/{SourceId}', query: [] },
  RebootNode: { method: 'POST', path: '/v1/nodes/{NodeId}/reboot', query: [] },
  ReleaseNode: { method: 'POST', path: '/v1/nodes/{NodeId}/release', query: [] },
  ReplaceNode: { method: 'POST', path: '/v1/nodes/{NodeId}/replace', query: [] },
  ResetNodeSession: { method: 'POST', path: '/v1/nodes/{NodeId}/reset-session', query: [] },
  ResumeTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/resume', query: [] },
  RevokeToken: { method: 'POST', path: '/v1/tokens/{TokenId}/revoke', query: [] },
  StartDrill: { method: 'POST', path: '/v1/drills', query: [] },
  StopTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/stop', query: [] },
  TakeOverTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/take-over', query: [] },
  UnfreezeFleet: { method: 'POST', path: '/v1/fleets/{FleetName}/unfreeze', query: [] },
  UnpinCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/unpin', query: ['Generation'] },
  UpdateFleet: { method: 'POST', path: '/v1/fleets/{FleetName}', query: [] },
  UpdateTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}', query: [] },
  VerifyCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/verify', query: ['Generation'] },
} as const satisfies Record<keyof Operations, { method: string; path: string; query: readonly string[] }>
