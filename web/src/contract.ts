// Written by `python -m control_plane.contract`; change the models of control_plane/api/schemas/, not this file.

/** Seconds since 1970, UTC. */
export type Timestamp = number

export type ErrorCode = 'AccessDeniedException' | 'ConflictException' | 'InternalServerException' | 'ResourceNotFoundException' | 'ServiceUnavailableException' | 'ThrottlingException' | 'ValidationException'

/** Body of the response to a request that the server refuses. */
export interface ErrorResponse {
  Code: ErrorCode
  Message: string
  RequestId: string
  Hint: string
  Fields: FieldError[]
}

/** Lets a job repeat training from a step. */
export interface AcceptLossRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** The BaseStep of the job's RepeatChoice. */
  FromStep: number
}

/** Confirms that a person has seen an incident. */
export interface AcknowledgeIncidentRequest {
  IncidentId: string
  /** "" unless given. */
  Note?: string
}

/** The record of one call that creates, changes or deletes resources: its caller, source address and outcome. */
export interface AuditEntry {
  EntryId: number
  Time: Timestamp
  /** Name of the API operation, for example DeleteFleet. */
  Operation: string
  /** Name of the resource that the call addressed or created. Names of nested resources are joined by `/`. */
  Resource?: string
  /** Project of the token, or else the project that the request names. Absent if neither names a project. */
  Project?: string
  TokenId: string
  /** Description of the caller's token at the time of the call. */
  Caller: string
  Role: string
  /** IP address of the client, as trusted proxies forwarded it. */
  SourceAddress?: string
  /** The request's id, which the response and the server's log contain too. */
  RequestId: string
  /** How the call ended. Refused: the caller's error, so nothing changed. Failed: the service's error. Unfinished: the server stopped or the client disconnected during the call, so the change may be stored. */
  Outcome: 'Succeeded' | 'Refused' | 'Failed' | 'Unfinished'
  /** HTTP status of the response. */
  StatusCode?: number
  ErrorCode?: string
}

/** The state of the service's automatic actions: active, or paused by an administrator. */
export interface Automation {
  IsPaused: boolean
  /** Why automation is paused. Absent while automation is active. */
  Reason?: string
  /** Name of the administrator's token. */
  PausedBy?: string
  PauseTime?: Timestamp
}

export interface BatchGetLossCurvesRequest {
  RunIds: string
  /** 40 unless given. */
  MaxPoints?: number
}

/** The loss curves of the requested jobs that log a loss. */
export interface BatchGetLossCurvesResponse {
  LossCurves: LossCurve[]
}

/** The wait of a job for instances that AWS does not launch. */
export interface CapacityWait {
  /** Number of nodes that the job lacks. */
  MissingNodeCount: number
  /** Instance type of the fleet. Empty if unknown. */
  InstanceType: string
  /** Zone of the fleet. Empty if unknown. */
  AvailabilityZone: string
  /** AWS's message about the newest failed launch. */
  Message: string
  /** Whether AWS has too few instances of the type. false: AWS rejected the launch for another reason. */
  IsOutOfCapacity: boolean
  /** Number of Everstep's launch attempts that have failed since the last successful launch. The count includes the first launch, but no retries by Auto Scaling itself. */
  FailedAttemptCount: number
  /** When Everstep next attempts to launch the instances. A time in the past means that the attempt is due. */
  NextAttemptTime: Timestamp
}

/** The incidents with one cause. */
export interface CauseReport {
  Cause: 'notice' | 'requested' | 'grown' | 'returned' | 'pause_failed' | 'drill' | 'load_failed' | 'rank_exit' | 'hang' | 'agent_lost' | 'node_unreachable' | 'node_fault' | 'instance_terminated' | 'shrunk' | 'group_lost'
  Kind: 'Failure' | 'Planned' | 'Drill'
  Incidents: ReportIncidents
}

/** The difference between a response and an earlier response to the same request. */
export interface Changes {
  /** Token to pass as ChangesSince in the next request. */
  ChangeToken: string
  /** Whether the response contains only the changes since the earlier response. False if the server does not know the token in ChangesSince. The response then contains everything. */
  IsIncremental: boolean
  /** Keys of the entries that the earlier response contained and that the complete response no longer contains. */
  Removed: string[]
}

/** One named input of a job. */
export interface Channel {
  /** Name of the channel. Ranks find its directory in SM_CHANNEL_<NAME> and with `everstep.training.input_dir("name")`. */
  ChannelName: string
  DataSource: DataSource
}

/** A checkpoint of one step in S3. */
export interface Checkpoint {
  Step: number
  Generation: number
  Status: 'Uploading' | 'Complete' | 'Trashed' | 'Deleting' | 'Deleted'
  S3Uri: string
  Bytes: number
  CreationTime: Timestamp
  CompletionTime?: Timestamp
  /** Whether a user has pinned the checkpoint. Everstep does not delete a pinned checkpoint before UnpinCheckpoint. */
  IsPinned: boolean
  /** Earliest time at which Everstep deletes the objects of a trashed checkpoint. Absent outside of the trash. */
  PurgeTime?: Timestamp
  /** Why the checkpoint is in the trash. Absent outside of the trash. */
  TrashCause?: 'Retention' | 'Person'
  /** The result of the last VerifyCheckpoint, which reads the objects back. */
  Verification: 'NotVerified' | 'Verifying' | 'Waiting' | 'Intact' | 'Damaged'
  VerificationTime?: Timestamp
  /** The damaged parts of the checkpoint, or why the verification waits. Absent without damage and without a wait. */
  VerificationMessage?: string
  /** When the verification first failed to read S3. Absent unless Verification is Waiting. */
  VerificationWaitingSince?: Timestamp
}

/** The checkpoints of a job: when the next is due, the running upload, and figures of the last upload. */
export interface CheckpointActivity {
  /** A sentence about the rules that make checkpoints due. */
  Policy: string
  /** The first committed step at or after this step becomes a checkpoint. Absent without EverySteps. */
  NextStep?: number
  /** The first commit after this time becomes a checkpoint. Absent if the job has no interval. */
  NextTime?: Timestamp
  /** The current interval: IntervalInSeconds, or the interval that Everstep computes from MaxOverhead. Absent if the job has no interval, or until the first upload is measured. */
  IntervalSeconds?: number
  /** Duration of the last checkpoint's upload, all shards together. Absent before the first upload. */
  LastUploadSeconds?: number
  /** Training time that the last upload cost, estimated from how much it slowed training down. */
  LastUploadCostSeconds?: number
  /** The checkpoint that is being uploaded. Absent if no upload runs. */
  Upload?: CheckpointUpload
}

/** Rules by which Everstep writes checkpoints to S3, and keeps or deletes them. EverySteps, IntervalInSeconds and MaxOverhead each make checkpoints due. With or without them, Everstep also writes a checkpoint when the job completes, stops or pauses, when AWS announces the end of a node, and for each CreateCheckpoint. */
export interface CheckpointConfig {
  /** Steps between two checkpoints in S3. 0 disables checkpoints by number of steps. 0 unless given. */
  EverySteps?: number
  /** Seconds between the beginnings of two checkpoints. The first commit after that time becomes a checkpoint. If EverySteps is set too, both rules make checkpoints due. */
  IntervalInSeconds?: number
  /** Share of training time that checkpoints may add, for example 0.01 for 1 %. Everstep computes the interval from the measured duration of uploads and from the training time that they cost. Cannot be set together with EverySteps or IntervalInSeconds. */
  MaxOverhead?: number
  /** Limit of the mean rate at which one node uploads checkpoints. Needs MaxOverhead. Everstep makes fewer checkpoints to meet the limit. A single upload still uses the full bandwidth. */
  MaxUploadBytesPerSecond?: number
  /** Whether a spot or maintenance notice makes a checkpoint due while no other node can replace the affected node. true unless given. */
  OnNotice?: boolean
  /** Prefix for checkpoints. The default is a prefix in the service's bucket. */
  S3Uri?: string
  /** Whether to reserve a third memory slot per shard. false unless given. With a third slot, a snapshot never waits for the upload of an earlier snapshot. */
  ThirdSlot?: boolean
  /** Maximum number of checkpoints that are uploaded at the same time. The default is 1. With a value above 1, a due checkpoint need not wait for the end of an earlier upload. Such a value needs ThirdSlot, and reserves one more memory slot per shard for each further upload. While the maximum number of uploads runs, the newest due checkpoint replaces the checkpoint that waits. Cannot change after creation. */
  MaxUploadsInFlight?: number
  /** Number of newest checkpoints to keep, in addition to pinned ones. The default keeps all. Only checkpoints from which the job can be restored count. The others are deleted once a later one is verified. Everstep deletes a checkpoint only after it has verified a later one by reading it back. */
  MaxCount?: number
  /** Keep the first checkpoint at or after each multiple of this number of steps. Neither MaxCount nor MaxAgeInSeconds applies to these checkpoints. */
  KeepEverySteps?: number
  /** Age at which checkpoints are deleted. At any age, Everstep keeps the newest checkpoint, the checkpoint from which the job would be restored, pinned checkpoints, and the checkpoints that KeepEverySteps selects. */
  MaxAgeInSeconds?: number
  /** Hours for which a deleted checkpoint stays in the trash, from which UndeleteCheckpoint returns it. 24 unless given. The objects stay in S3 and cost storage. 0 deletes at once. A change applies to later deletions. */
  TrashHours?: number
  /** Seconds for which a job keeps its nodes while S3, IAM or KMS prevents a restore. The default is 1800. Then the job returns its nodes, and restores the same step later. A job keeps its nodes in any case while only their memory has committed steps. */
  StorePatienceSeconds?: number
}

/** Checkpoint settings to change. The location of checkpoints cannot change after creation. */
export interface CheckpointConfigUpdate {
  EverySteps?: number
  /** New number of seconds between the beginnings of two checkpoints. 0 removes the interval. */
  IntervalInSeconds?: number
  /** New value of MaxOverhead, at least 0.0001. 0 removes the limit and the computed interval. */
  MaxOverhead?: number
  /** New limit of a node's mean upload rate, in bytes per second. 0 removes the limit. */
  MaxUploadBytesPerSecond?: number
  OnNotice?: boolean
  /** Whether to reserve a third memory slot per shard. Cannot be disabled once the job has run. */
  ThirdSlot?: boolean
  /** New number of newest checkpoints to keep. 0 removes the limit. */
  MaxCount?: number
  /** New value of KeepEverySteps, in steps. 0 disables the rule, so that only MaxCount and MaxAgeInSeconds apply. */
  KeepEverySteps?: number
  /** New age in seconds at which checkpoints are deleted, at least 60. 0 disables deletion by age. */
  MaxAgeInSeconds?: number
  TrashHours?: number
  /** New number of seconds for which the job keeps its nodes while S3, IAM or KMS prevents a restore. */
  StorePatienceSeconds?: number
}

/** The progress of the checkpoint that is being uploaded, as the agents last reported it. */
export interface CheckpointUpload {
  Step: number
  /** Bytes that S3 has stored, of all shards whose upload has begun. */
  StoredBytes: number
  /** Total size in bytes of all shards whose upload has begun. */
  TotalBytes: number
  /** The rank of whose shard S3 has stored the smallest part. */
  SlowestRank: number
  /** The S3 URI of the slowest rank's object. Absent until the upload of this object begins. */
  SlowestObject?: string
  /** Bytes of the slowest rank's shard that S3 has stored. */
  SlowestStoredBytes: number
  /** Size of the slowest rank's shard in bytes. */
  SlowestTotalBytes: number
}

export interface CompleteSourceRequest {
  SourceId: string
}

/** A current problem of a node, of the service or of the job. It is no longer listed once it is resolved. */
export interface Condition {
  /** The fault code, as listed in docs/reference/metrics.md: disk_full, memory_low, gpu_xid … Or ResumeDiffers, or ResumeUnproven. */
  Type: string
  /** A sentence that includes the measured values. */
  Message: string
  /** The node with the problem. Absent if the problem is not in a node. */
  NodeId?: string
}

export interface CreateCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** The step of the requested checkpoint, and whether the checkpoint is complete. */
export interface CreateCheckpointResponse {
  TrainingJobName: string
  RunId: string
  /** The checkpoint's step. While Status is Requested, Everstep may still choose a later committed step for the checkpoint. */
  Step: number
  Status: 'Requested' | 'Complete'
}

/** An Auto Scaling group to register as a fleet. */
export interface CreateFleetRequest {
  FleetName: string
  /** The Auto Scaling group must have the tag `everstep:fleet`, one Availability Zone and one launch template. */
  AutoScalingGroupName: string
  /** Number of nodes that wait for the failure of another node. 1 unless given. */
  SpareCount?: number
  /** The rule that determines the number of spares. If set, SpareCount has no effect. */
  SparePolicy?: SparePolicy
  /** Number of nodes that the fleet keeps even if no job runs, in addition to spares. 0 unless given. */
  MinNodeCount?: number
  /** Your price of one instance per hour. Everstep computes the cost of jobs and incidents from this price. */
  PriceUsdPerHour?: number
  /** Whether to keep failed instances running for inspection instead of terminating them. false unless given. Everstep keeps a failed instance only while the Auto Scaling group has room for a replacement. */
  HoldFailedInstances?: boolean
  /** Limit of nodes per hour that Everstep replaces because it considers them failed. 20 unless given. Instances that AWS ends do not count. */
  MaxReplacementsPerHour?: number
  /** Name of the IAM role of the fleet's instances. Their agents authenticate with this role through STS. Without a role name, agents need a join token. */
  NodeRoleName?: string
  /** Whether administrators may inject faults into this fleet's nodes with StartDrill. false unless given. */
  AllowDrills?: boolean
  /** Whether submitters may run programs on those of this fleet's nodes that run their ranks (ExecuteCommand). false unless given. The programs run as the Linux user of the ranks. */
  AllowCommands?: boolean
  /** When nodes use TLS for the connections between them. "Auto" unless given. Auto: if their instance type does not encrypt traffic between instances itself. On: always. Off: never. A change takes effect with the next launch of a job's ranks. */
  ReplicaEncryption?: 'Auto' | 'On' | 'Off'
  /** The project of the fleet. The default is the token's project, or `default`. */
  Project?: string
  /** Your own names and values, which the fleet's description shows. */
  Tags?: Record<string, string>
  /** Whether to only check the request and return the planned changes, without changing or creating anything. false unless given. */
  DryRun?: boolean
  /** The Changes of a dry run that a person has approved. If CreateFleet would make any other change, it fails with a ConflictException. */
  ExpectedChanges?: GroupChange[]
}

/** The new fleet or, after a dry run, the changes that CreateFleet would make. */
export interface CreateFleetResponse {
  FleetName: string
  /** The new fleet. Absent after a dry run. */
  Fleet?: Fleet
  /** The requirements on the Auto Scaling group, all of which it meets. If a group fails requirements, CreateFleet returns an error with a sentence about each failed requirement. */
  Checks: GroupCheck[]
  /** Changes to the Auto Scaling group that CreateFleet made, or that the fleet's loop will make. After a dry run: changes that the same request without DryRun would make. Empty if the group already has all settings that Everstep needs. */
  Changes: GroupChange[]
}

/** Adds a note to an incident. */
export interface CreateIncidentNoteRequest {
  IncidentId: string
  /** The note. The dashboard and the post-mortem show it as plain text. */
  Text: string
  /** Identifies the request. A repeated request with the same token returns the existing note. The SDK generates a token. */
  ClientRequestToken?: string
}

/** Creates a token that each new instance of a fleet's Auto Scaling group may use once. */
export interface CreateJoinTokenRequest {
  /** The fleet whose instances may join. The fleet does not have to exist yet. */
  FleetName: string
  ExpiresInSeconds?: number
}

/** A join token for a fleet's launch template. */
export interface CreateJoinTokenResponse {
  /** The secret token. It is returned only once, because the service stores only its digest. */
  JoinToken: string
  TokenId: string
  FleetName: string
  ExpirationTime?: Timestamp
}

/** Announces the upload of a source archive. */
export interface CreateSourceRequest {
  /** The SHA-256 of the archive, a gzipped tar. */
  SourceId: string
  /** Size of the archive. */
  Bytes: number
}

/** The state of a source archive, and the upload request if the archive is not stored yet. */
export interface CreateSourceResponse {
  SourceId: string
  /** Whether an earlier upload of this archive was checked and stored. If true, no upload is needed. */
  IsStored: boolean
  /** Presigned request with which the client uploads the archive before it calls CompleteSource. Absent if the source is stored already. Also absent if the service's object store accepts no direct uploads; call PutSource in this case. */
  Upload?: SourceUpload
}

/** Creates a token for a person or a program. */
export interface CreateTokenRequest {
  /** Permissions of the token: viewer, submitter or admin. A viewer can read. A submitter can also create and change training jobs. An admin can do all actions, in every project. */
  Role: 'admin' | 'submitter' | 'viewer'
  /** The only project that the token can access. By default, the token can access every project. Not allowed for an admin. */
  Project?: string
  /** The token's owner or purpose. Shown in lists. "" unless given. */
  Description?: string
  /** Lifetime of the token. By default, the token does not expire. */
  ExpiresInSeconds?: number
}

/** A new token with its secret. */
export interface CreateTokenResponse {
  /** The secret token. Clients send it as `Authorization: Bearer …`. It is returned only once, because the service stores only its digest. */
  Secret: string
  Token: Token
}

/** Adds a note to a training job. */
export interface CreateTrainingJobNoteRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** The note. The dashboard and the post-mortem show it as plain text. */
  Text: string
  /** Identifies the request. A repeated request with the same token returns the existing note. The SDK generates a token. */
  ClientRequestToken?: string
}

/** A training job to run. */
export interface CreateTrainingJobRequest {
  /** Name of the job, unique within its project. */
  TrainingJobName: string
  /** Identifies the request. A repeated request with the same token returns the existing job. The SDK generates a token. */
  ClientRequestToken?: string
  /** The fleet in which the job runs. Optional if exactly one fleet exists. */
  FleetName?: string
  /** Fleets in other subnets, zones or with other instance types. If AWS has no capacity for the whole job, the job moves to the next fleet of the list. From the last fleet of the list, it moves to FleetName. It moves only before its first start. */
  AlternativeFleetNames?: string[]
  Source: SourceConfig
  /** Path of a Python file in the source archive. A request has either EntryPoint or Module. */
  EntryPoint?: string
  /** Module of the source archive that every rank runs as `python -m` does, such as `package.train`. */
  Module?: string
  /** Path of a requirements.txt in the source archive. Each node installs the missing packages once, separately from its own packages. Ranks import from the installed packages first. */
  Requirements?: string
  /** Parameters for the script, passed in EVERSTEP_HYPERPARAMETERS (JSON) and as `--key=value` arguments. */
  HyperParameters?: Record<string, string>
  /** Further arguments of the script's command line, unchanged and in order, after those of HyperParameters. */
  Arguments?: string[]
  /** Environment variables of the ranks. */
  Environment?: Record<string, string>
  /** Environment variables whose values are stored in AWS, each with the location of its value. A location is `secretsmanager:NAME`, `ssm:NAME` or an ARN of either service. Each node reads the values when it starts its ranks. Everstep neither stores, shows nor logs them. */
  Secrets?: Record<string, string>
  /** IAM role of the job. Ranks receive the role's short-lived credentials, which are renewed before they expire. Nodes read Secrets and InputDataConfig with the role, too, and must be allowed to assume it. Without a role, ranks have no AWS credentials. */
  RoleArn?: string
  /** Number of nodes on which the job trains. */
  NodeCount: number
  /** Number of processes on each node that train, usually one per GPU. 1 unless given. */
  RanksPerNode?: number
  /** How snapshots protect the job. The default is two copies, or one copy for a job of one node. */
  Protection?: ProtectionConfig
  CheckpointConfig?: CheckpointConfig
  /** Checkpoint of another job from which this job starts. The default is the script's own initial state. The other job must belong to a project that the caller may see. It may have another number of ranks. Keep the checkpoint until this job has stored one of its own. PinCheckpoint protects the checkpoint from the other job's retention limits. */
  InitialCheckpoint?: InitialCheckpoint
  /** Inputs that each node provides before its ranks start. If an input is missing, the job fails before any rank starts. */
  InputDataConfig?: Channel[]
  OutputDataConfig?: OutputDataConfig
  StoppingCondition?: StoppingCondition
  RetryStrategy?: RetryStrategy
  ElasticConfig?: ElasticConfig
  Rehearsal?: RehearsalConfig
  /** Jobs with a higher priority start first. Among jobs with equal priority, the oldest starts first. 0 unless given. */
  Priority?: number
  /** Whether a job of higher priority that needs the nodes may pause this job. false unless given. At a pause, all ranks stop at one agreed step, which is stored in S3. The job resumes automatically. */
  Preemptible?: boolean
  /** The project of the job. The default is the token's project, or `default`. Only a token without a project may choose another project. */
  Project?: string
  /** Your own names and values, by which lists of jobs can be filtered. */
  Tags?: Record<string, string>
  /** Whether to only check the request and return the plan, without creating a job. false unless given. */
  DryRun?: boolean
}

/** The new job or, after a dry run, its plan. */
export interface CreateTrainingJobResponse {
  TrainingJobName: string
  /** Id of the job's run. Absent after a dry run. */
  RunId?: string
  /** Status of the new job. Absent after a dry run. */
  TrainingJobStatus?: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  /** Forecast for the job. Only after a dry run. */
  Plan?: TrainingJobPlan
}

/** The location of an input channel's data. Exactly one of S3DataSource and FileSystemDataSource must be set. */
export interface DataSource {
  /** Each node fetches and verifies the objects before its ranks start. The files are read-only. The node keeps them for later jobs while its disk has enough space. */
  S3DataSource?: S3DataSource
  FileSystemDataSource?: FileSystemDataSource
}

export interface DeleteCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
  /** false unless given. */
  SkipTrash?: boolean
}

export interface DeleteFleetRequest {
  FleetName: string
}

export interface DeleteProjectQuotaRequest {
  Project: string
}

export interface DeleteTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** false unless given. */
  DeleteObjects?: boolean
  /** false unless given. */
  SkipTrash?: boolean
  /** false unless given. */
  DryRun?: boolean
}

/** The records and objects that were deleted, or after a dry run, that a real call would delete. */
export interface DeleteTrainingJobResponse {
  TrainingJobName: string
  RunId: string
  /** Whether the job's records were deleted. False after a dry run, while objects remain, and in the trash. */
  IsDeleted: boolean
  /** Earliest time at which Everstep deletes the job and its objects for good. Absent outside of the trash. */
  PurgeTime?: Timestamp
  GenerationCount: number
  CheckpointCount: number
  IncidentCount: number
  /** Total time that nodes worked for the deleted job. The fleet's totals no longer include this time. */
  NodeSeconds: number
  CostUsd?: number
  /** Objects in S3 that this call deleted. 0 for a job that the call moved to the trash. After a dry run: objects that a call with DeleteObjects would delete. */
  ObjectCount: number
  ObjectBytes: number
  /** Whether objects of the job remain, because each call deletes or trashes a limited number. If true, repeat the same call to continue. */
  HasMoreObjects: boolean
  /** S3 locations of the job's checkpoints, logs and outputs, below which the objects are. */
  S3Uris: string[]
}

export interface DescribeCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** All jobs and fleets that need a person, the most urgent first. */
export interface DescribeDutiesResponse {
  Duties: SubjectDuty[]
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
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** The current protection of a job's state. */
export interface DescribeProtectionResponse {
  TrainingJobName: string
  Generation: number
  CommittedStep: number
  ProposedStep: number
  Boundary: number
  CommittedAt?: Timestamp
  Copies: number
  /** Nodes per parity group. The state in memory survives the loss of any one node per group. Absent without parity. */
  ParityGroupSize?: number
  ProtectionState: 'Protected' | 'Degraded' | 'Unprotected'
  Reason: string
  /** Present while training goes on and nodes keep no further step. */
  Lapse?: ProtectionLapse
  /** The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes. Only holders in view count. The list is empty until every shard has a committed step. For a large job, it can lack the entry for two or three nodes, because Everstep does not count that many sets of lost nodes. */
  RecoveryOdds: RecoveryOdds[]
  /** The probability that memory keeps every shard after a simultaneous loss of one, two or three failure domains. Empty until every shard has a committed step, and if AWS has reported no domains. */
  DomainOdds: DomainOdds[]
  /** Failure domains, each of which would make some shard unrecoverable from memory if it were lost alone. */
  FatalDomains: string[]
  Shards: ShardProtection[]
  LastCheckpoint?: LastCheckpoint
}

export interface DescribeSourceRequest {
  SourceId: string
}

export interface DescribeTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** Probability that the nodes' memory keeps every shard of a job when several failure domains are lost at once. */
export interface DomainOdds {
  LostDomains: number
  /** Exact probability that memory keeps every shard. All sets of LostDomains domains are equally likely. A node whose domain is unknown counts as a separate domain. */
  Probability: number
}

/** Moves a node's job to another node, and keeps the drained node out of use. */
export interface DrainNodeRequest {
  NodeId: string
  /** The person's reason for the request. "" unless given. It appears with the node, in the incident of its job, and in the node's history. */
  Reason?: string
}

/** An injected fault and its outcome. */
export interface Drill {
  DrillId: string
  DrillType: 'kill-rank' | 'kill-agent' | 'terminate-instance'
  /** The drill's progress, or its outcome once it is over. `requested`: the fault is not injected yet. `struck`: the fault is injected, and its outcome is open. `recovered`: the fault caused an incident, and training reached the step it was at before the fault. `not_recovered`: the job ended, was paused or was interrupted again before it recovered. `absorbed`: the fault caused no incident. `not_done`: the job did not train in time, so no fault was injected. */
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

/** The next action of a person for a job or a fleet, and the reason for it. The service computes it when it answers. The command line, the dashboard and notifications show the same duty. */
export interface Duty {
  Kind: 'Nothing' | 'JobFailed' | 'TakenOver' | 'AutomationPaused' | 'DeletionsPaused' | 'ConsentToRepeat' | 'StoreUnreachable' | 'FleetFrozen' | 'LaunchesSuspended' | 'RecoveryLate' | 'Stalled' | 'FirstStepLate' | 'ProtectionLost' | 'CapacityWait' | 'NoCheckpoint' | 'ResumeDiffers' | 'ResumeUnproven' | 'HeldNodes' | 'Degraded' | 'Unconfirmed' | 'FewerNodes' | 'WithoutCopies' | 'Paused'
  /** Now: the job makes no progress, or loses its protection, until a person acts. Later: something waits for a person. Optional: a person can do something useful. None: there is nothing to do. A job or fleet needs attention if its urgency is Now or Later. */
  Urgency: 'Now' | 'Later' | 'Optional' | 'None'
  Sentence: string
  /** What follows from the situation, and what Everstep does by itself. Absent if there is nothing to do. */
  Explanation?: string
  /** When the duty began. Absent if the service does not know it. */
  Since?: Timestamp
  /** What a person can do, the most urgent first. */
  Actions: DutyAction[]
}

/** One thing that a person can do now. */
export interface DutyAction {
  Kind: 'ReadLogs' | 'SubmitAgain' | 'HandBack' | 'ResumeAutomation' | 'AcceptRestore' | 'Resume' | 'Pause' | 'Stop' | 'Shrink' | 'RepeatWork' | 'CheckStore' | 'CorrectGroup' | 'DescribeFleet' | 'ResumeLaunches' | 'ListEvents' | 'ShowProtection' | 'CreateCheckpoint' | 'SetCheckpoints' | 'DecideNode' | 'CorrectScript'
  Urgency: 'Now' | 'Later' | 'Optional' | 'None'
  /** What the person should do and why, in one or two sentences. */
  Description: string
  /** The command line with which the person begins the action. */
  Command: string
  /** Alternative commands for the step after Command. The person runs one of them. Empty if Command completes the action. */
  FurtherCommands: string[]
  /** The held node that the action concerns. Absent if the action concerns the job or the fleet. */
  InstanceId?: string
  /** Whether Everstep recommends the action instead of waiting for instances. false unless given. */
  IsRecommended?: boolean
  /** The ElasticConfig.MinNodeCount that the action gives the job. Absent if the action does not change it. */
  MinNodeCount?: number
  /** The checkpoint from which the job continues after the action. Absent for other actions. */
  Step?: number
}

/** Limits between which the number of nodes of a job may change while it trains. The number of ranks per node stays the same. Without ElasticConfig, a job keeps its number of nodes. */
export interface ElasticConfig {
  /** Smallest number of nodes with which the job starts, resumes and continues while the fleet has no further nodes. The default is NodeCount: the job waits until it has all nodes. When nodes arrive, the job stops at an agreed step and continues with them. A preemptible job also shrinks to this number for a job of higher priority. */
  MinNodeCount?: number
  /** Number of nodes up to which the job grows. The default is NodeCount. The job grows while no other job of the fleet waits for nodes and the quota of its project permits it. When another job can start with the additional nodes, all ranks stop at the same step, and the job returns these nodes. */
  MaxNodeCount?: number
  /** Seconds for which the job waits for missing nodes before it starts or continues with fewer nodes. 60 unless given. A running job that can grow, but not to MaxNodeCount, also waits this time before it grows with the nodes that are ready. */
  PatienceInSeconds?: number
}

/** Changes of the limits between which a job's number of nodes may change. 0 sets a limit to NodeCount. A job whose generation has more than MaxNodeCount nodes returns nodes at an agreed stop: all ranks stop at the same step, so no step is lost. A job that runs on fewer than MinNodeCount nodes continues; its next generation needs MinNodeCount nodes. */
export interface ElasticConfigUpdate {
  MinNodeCount?: number
  MaxNodeCount?: number
  /** New value of PatienceInSeconds. The value also applies to a wait that has begun. */
  PatienceInSeconds?: number
}

/** A record of a change or an incident of a fleet, a job or a node. Events never change. */
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

/** The values of a sentence of Evidence. */
export interface EvidenceFact {
  /** Type of the fact, for example `InstanceEnded` or `RankEnded`. `Recorded`: only the sentence is stored. */
  Kind: string
  NodeIds: string[]
  Ranks: number[]
  /** Code of the fault that an agent reported, or EC2's code of the state reason. */
  Code?: string
  Xid?: number
  /** Exit code of the rank, or the negated signal number. */
  ExitCode?: number
}

/** A program to run on the node of a rank, as the Linux user of the job's ranks. */
export interface ExecuteCommandRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Rank: number
  /** The program and its arguments, passed on without a shell. `{pid}` is replaced by the process id of the rank. */
  Command: string[]
  /** Time limit of the program. The agent ends the program at the limit. 30 unless given. */
  TimeoutInSeconds?: number
  /** Text that the program reads from stdin, in UTF-8. The default is empty. The event history records the length of the text, not the text. */
  Stdin?: string
  /** Identifies the request. A repeated request with the same token does not run the command again; it returns the same response. */
  ClientRequestToken?: string
}

/** Output and exit code of a program that ran on the node of a rank. */
export interface ExecuteCommandResponse {
  TrainingJobName: string
  Rank: number
  Generation: number
  NodeId: string
  /** The exit code as a shell reports it. Absent if the program did not end within TimeoutInSeconds. */
  ExitCode?: number
  Stdout: string
  /** Standard error of the program. Stdout and Stderr contain at most the first 256 KiB of each stream. */
  Stderr: string
  /** Whether Stdout or Stderr was truncated. */
  IsOutputCut: boolean
  IsTimedOut: boolean
}

export interface ExportIncidentRequest {
  IncidentId: string
  /** "markdown" unless given. */
  Format?: 'markdown'
}

/** The post-mortem of an incident. */
export interface ExportIncidentResponse {
  IncidentId: string
  Format: 'markdown'
  /** A suitable name for a file with the content. */
  FileName: string
  /** The document in UTF-8, with line feeds. */
  Content: string
}

/** The change of one field of a job's configuration. */
export interface FieldChange {
  /** Path of the field: `CheckpointConfig.EverySteps`. */
  Field: string
  Before?: string
  /** The new value as text. Absent if the update removes the value. */
  After?: string
  /** When the change takes effect: now, or with the next generation. A running generation keeps the plan that it started with. */
  Applies: 'Now' | 'NextGeneration'
}

/** One invalid field of a request, with the problem. */
export interface FieldError {
  /** Path of the field, for example `CheckpointConfig.EverySteps`. */
  Field: string
  /** A sentence about the problem, with the invalid value or the limit. */
  Message: string
}

/** A directory that already exists on every node: a shared file system, or a part of the image. */
export interface FileSystemDataSource {
  /** Absolute path of the directory. The mount options decide whether ranks may write to the directory. */
  DirectoryPath: string
}

/** A registered Auto Scaling group: its settings and its current state. */
export interface Fleet {
  FleetName: string
  AutoScalingGroupName: string
  Project: string
  FleetStatus: 'active' | 'frozen' | 'deleting'
  Reason: string
  /** What a person has to do for the fleet and its held nodes. */
  Duty: Duty
  SpareCount: number
  /** The rule that determines the number of spares. If set, SpareCount has no effect. */
  SparePolicy?: SparePolicy
  MinNodeCount: number
  HoldFailedInstances: boolean
  MaxReplacementsPerHour: number
  /** Name of the IAM role of the fleet's instances. Absent if agents can join with a join token only. */
  NodeRoleName?: string
  AllowDrills: boolean
  AllowCommands: boolean
  /** When nodes use TLS for the connections between them. */
  ReplicaEncryption: 'Auto' | 'On' | 'Off'
  /** Whether the nodes of a job would use TLS for the connections between them if the job launched its ranks now. */
  EncryptsReplicas: boolean
  /** MaxSize of the Auto Scaling group. */
  MaxNodeCount: number
  DesiredNodeCount: number
  NodeCount: number
  ConnectedNodeCount: number
  InstanceType: string
  AvailabilityZone: string
  PriceUsdPerHour?: number
  /** Total time of all jobs of the fleet, by accounting bucket, such as training or queue. */
  AccountingSeconds: Record<string, number>
  /** Reliability figures of the fleet, computed over all its jobs. */
  Reliability: Reliability
  /** Number of incidents of the fleet's jobs, without drills. */
  IncidentCount: number
  /** Number of nodes that jobs lost because the node failed or AWS reclaimed it. The number excludes nodes that a person drained, and nodes into which a drill injected a fault. */
  LostNodeCount: number
  /** Total time that the fleet's nodes have worked for jobs. */
  NodeSeconds: number
  /** Cost of NodeSeconds. Idle nodes and spares are not included. */
  CostUsd?: number
  /** Differences between the settings of the Auto Scaling group and the settings that Everstep needs. While the list is not empty, Everstep neither resizes the group nor ends or reboots instances. */
  Drift: string[]
  /** The newest roll. Absent if the fleet never had one. */
  Roll?: FleetRoll
  /** Creation time of the oldest machine image that a node of the fleet runs. Nodes whose ImageCreationTime is absent do not count. Absent if no node has one. */
  OldestImageTime?: Timestamp
  Tags: Record<string, string>
  CreationTime: Timestamp
}

/** Time, cost and incidents of one fleet, including its idle nodes. */
export interface FleetReport {
  FleetName: string
  Figures: ReportFigures
}

/** A roll: the replacement or reboot of all nodes that a fleet had at the start of the roll. */
export interface FleetRoll {
  RollStatus: 'InProgress' | 'Paused' | 'Stopped' | 'Completed'
  /** What the roll does now, or the reason why it waits. */
  StatusReason: string
  Reboot: boolean
  MaxUnavailable: number
  /** Number of nodes that the roll replaces or reboots. It excludes nodes that were held at the start. */
  NodeCount: number
  /** Number of nodes that need no more work, including nodes that ended for another reason or were skipped. */
  FinishedNodeCount: number
  /** Nodes that the roll is replacing or rebooting now. */
  CurrentNodeIds: string[]
  RequestedBy: string
  Reason: string
  StartTime: Timestamp
  EndTime?: Timestamp
}

export interface FollowLogsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
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

/** The events of a FollowLogs stream. */
export interface FollowLogsStream {
  LogEvents?: LogEvents
}

/** The token of the caller, with its role and project. */
export interface GetCallerIdentityResponse {
  TokenId: string
  /** The project of the token. Absent if the token can access every project. */
  Project?: string
  Description: string
  CreationTime: Timestamp
  ExpirationTime?: Timestamp
  Role: 'admin' | 'submitter' | 'viewer'
  ServerVersion: string
  /** Current time of the service's clock. */
  ServerTime: Timestamp
}

export interface GetLogEventsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
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

/** A page of lines that a job's ranks printed, oldest line first. */
export interface GetLogEventsResponse {
  Events: LogEvent[]
  /** Token for the page after the last line of this page. */
  NextForwardToken: string
  /** Token for the page before the first line of this page. */
  NextBackwardToken: string
}

export interface GetMetricDataRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
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
  /** Adds the values of each node (for metrics named everstep/…) or rank (for other metrics). */
  Series?: 'Node' | 'Rank'
  /** ChangeToken of an earlier response to the same request. The response then contains only what changed since. With any other text, such as Start, the response contains everything and a ChangeToken. */
  ChangesSince?: string
}

/** Values of a job's metrics, by metric. */
export interface GetMetricDataResponse {
  /** The metrics. An incremental response omits the metrics whose points did not change. */
  MetricDataResults: MetricDataResult[]
  /** Only with ChangesSince. Its field Removed names the metrics that have no points any more. */
  Changes?: Changes
}

export interface GetOutputRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Key: string
}

export interface GetOutputResponse {
  Body?: Blob
}

export interface GetReportRequest {
  /** Begin of the time range. The default is 7 days before EndTime. */
  StartTime?: Timestamp
  /** End of the time range. The default is now. */
  EndTime?: Timestamp
  /** Length of a bucket. The default depends on the time range. */
  Period?: 'Hour' | 'Day' | 'Week'
  /** Only jobs and fleets of this project. */
  Project?: string
  /** Only this fleet and its jobs. */
  FleetName?: string
  /** Maximum number of jobs with figures of their own. 10 unless given. */
  MaxJobs?: number
}

/** A change that CreateFleet makes to one setting of an Auto Scaling group. */
export interface GroupChange {
  /** The name of the setting in Auto Scaling's API. Examples are `NewInstancesProtectedFromScaleIn` and `LifecycleHooks.everstep-termination`. */
  Setting: string
  /** The value before the change, as text. Absent if the Auto Scaling group had no value for the setting. */
  Before?: string
  After: string
  /** Why Everstep needs the change. */
  Reason: string
  /** When the change takes effect. Now: CreateFleet makes the change before it returns. Later: the fleet's loop makes the change once the fleet exists. */
  Applies: 'Now' | 'Later'
}

/** A requirement on an Auto Scaling group that Everstep checks and does not change. */
export interface GroupCheck {
  /** Name of the setting in Auto Scaling's API. */
  Setting: string
  /** A sentence about the setting, with the value that Everstep found in the Auto Scaling group. */
  Message: string
}

export interface HandBackTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** Status and version of the server that answers. */
export interface HealthResponse {
  /** Whether the server has current problems. `degraded`: the server answers requests, but at least one of Conditions needs a person. */
  Status: 'ok' | 'degraded'
  Version: string
  /** Current problems of the service. Empty in normal operation. A condition disappears once its cause is resolved. */
  Conditions: ServiceCondition[]
}

/** The shard of one rank, which its node keeps in memory during the export. ReadSnapshot returns the shard in the format of a checkpoint's object in S3. */
export interface HeldShard {
  Rank: number
  OriginGeneration: number
  ObjectBytes: number
  PayloadBytes: number
  /** Digest of the shard in hexadecimal, computed as docs/reference/checkpoint-format.md describes. */
  PayloadDigest: string
  LayoutHash: string
}

/** Everstep's recommendation to a person about a held node: a node that is kept out of use. */
export interface HoldAdvice {
  Decision: 'Terminate' | 'Release' | 'Inspect'
  /** One or two imperative sentences that say what to do and why. */
  Description: string
  /** The command line with which the person follows the advice. */
  Command: string
  /** Alternative commands after the inspection. The person runs one of them. Empty unless Decision is Inspect. */
  FurtherCommands: string[]
}

/** Request to keep an idle node out of use. */
export interface HoldNodeRequest {
  NodeId: string
  /** The person's reason for the request. "" unless given. It appears with the node, in the incident of its job, and in the node's history. */
  Reason?: string
}

/** A request to keep a snapshot in memory, or to keep an already held snapshot for longer. */
export interface HoldSnapshotRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** A snapshot whose hold this request extends. Without this field, the request begins a new hold of the newest committed step. */
  SnapshotId?: string
  /** Identifies the request. A repeated request with the same token returns the same hold. After the hold has ended, the service rejects the token. */
  ClientRequestToken?: string
}

/** The snapshots of all ranks at one committed step. The nodes keep them in memory until the export ends. */
export interface HoldSnapshotResponse {
  TrainingJobName: string
  RunId: string
  SnapshotId: string
  Generation: number
  Step: number
  /** Seconds from the last HoldSnapshot or ReadSnapshot until the hold ends. ReleaseSnapshot ends it earlier. */
  HoldInSeconds: number
  /** Maximum number of bytes that one ReadSnapshot returns. */
  MaxReadBytes: number
  /** The held shards of all ranks, in the order of ranks. */
  Shards: HeldShard[]
}

/** A node that protects a shard in its memory: with a copy or, with parity, with a share. */
export interface Holder {
  NodeId: string
  /** Whether a step counts as committed only after this holder has verified it. */
  InView: boolean
  /** The newest step of which the node has received and verified the whole copy. Absent until the node has verified a step. */
  VerifiedStep?: number
  /** Time at which the node reported that it had verified VerifiedStep. */
  VerifiedTime?: Timestamp
  /** Number of steps from VerifiedStep to the newest step that the ranks have finished. */
  LagSteps?: number
  /** The EC2 network node that the instance is attached to. Absent if AWS has not reported one. */
  FailureDomain?: string
}

/** A failure and its recovery. */
export interface Incident {
  TrainingJobName: string
  RunId: string
  IncidentId: string
  Decision: string
  /** Number of steps that training had to repeat: ReachedStep − FromStep. */
  LostSteps?: number
  /** Instances on which the failure occurred, whether or not the job lost them. Either ranks, the agent, network connections or hardware of the instance failed, or AWS announced the end or a maintenance of the instance. Empty if Everstep cannot determine the instances. */
  FaultedInstanceIds: string[]
  OpenedAt: Timestamp
  ClosedAt?: Timestamp
  /** How the incident ended. */
  Outcome: 'Open' | 'Recovered' | 'JobPaused' | 'JobCompleted' | 'JobFailed' | 'JobStopped'
  /** What failed, in a few words without a full stop. */
  Headline: string
  Project: string
  Cause: 'notice' | 'requested' | 'grown' | 'returned' | 'pause_failed' | 'drill' | 'load_failed' | 'rank_exit' | 'hang' | 'agent_lost' | 'node_unreachable' | 'node_fault' | 'instance_terminated' | 'shrunk' | 'group_lost'
  Phase: 'replace' | 'restore' | 'rework' | 'closed'
  Evidence: string[]
  /** The values of each sentence of Evidence, in the same order. */
  EvidenceFacts: EvidenceFact[]
  Reason: string
  /** The most distant source from which any rank was restored. The order is the own node, a peer, parity (shards and shares of several peers), and S3. */
  RestoreSource?: 'local' | 'peer' | 'parity' | 's3'
  FromStep?: number
  ReachedStep?: number
  GenerationBefore: number
  GenerationAfter?: number
  /** Number of nodes of the generation that failed or stopped. The control plane stores this number together with NodeCountAfter, once the next generation has a plan. Absent until then. */
  NodeCountBefore?: number
  /** Number of nodes of the generation after the failure or stop. Absent until that generation has a plan. */
  NodeCountAfter?: number
  /** The first of InstanceIds. Absent if the job lost no instance. */
  InstanceId?: string
  ReplacementInstanceId?: string
  /** Instances that the job lost or gave up, for any reason. */
  InstanceIds: string[]
  ReplacementInstanceIds: string[]
  FailedAt: Timestamp
  /** When training ran again after the failure. Absent until then. */
  RestoredAt?: Timestamp
  DetectSeconds?: number
  ReplaceSeconds?: number
  RestoreSeconds?: number
  ReworkSeconds?: number
  /** Time after the failure for which no control plane was running. Ranks train without a control plane, but nothing recovers a job after a failure. Absent if a control plane was running. */
  ControlPlaneAbsentSeconds?: number
  /** The fleet's price × the time during which the job's nodes made no new step because of this incident. While the incident is open, this is the cost until now. Absent if the fleet has no price. */
  CostUsd?: number
  /** Restore source of each rank, by rank. Empty until the recovery plan exists, and if no rank had to be restored. */
  RankSources: RankSource[]
  /** EventId of the event `RanksHang`, whose Detail contains the stacks of all ranks. Only in DescribeIncident, only if ranks hung, and only while the service keeps the event. */
  StacksEventId?: number
  /** When a person first acknowledged the incident. */
  AcknowledgementTime?: Timestamp
  AcknowledgedBy?: string
  /** The note of the person who acknowledged the incident. */
  Acknowledgement?: string
  /** The person who takes care of the incident, as UpdateIncident sets it. */
  Owner?: string
  /** What failed, and the state of the job now, in two short sentences. Only in DescribeIncident. */
  Verdict?: string
  /** The exception of the script, the reported fault, or a sentence about the cause. The text begins with "Cause unknown" if no stored fact explains the failure. It ends with "Outage: cause unknown." if the control plane was down when the failure occurred. Only in DescribeIncident. */
  Why?: string
  /** What Everstep has done. The first sentence sums up all actions, and the others give details. Only in DescribeIncident. */
  Done?: string[]
  /** What the incident costs from now on, in at most two sentences. Absent if it costs nothing or the cost is unknown. Only in DescribeIncident. */
  ContinuingCost?: string
  /** The wait for instances that AWS does not launch. Only in DescribeIncident, and only during such a wait. */
  Wait?: CapacityWait
  /** Whether a person must act on the incident, in the words of the job's duty. Only in DescribeIncident. */
  DutySentence?: string
  /** Actions that a person can take now, the most urgent first. Only in DescribeIncident. */
  Actions?: DutyAction[]
  /** The moments that have occurred, oldest first. Only in DescribeIncident. */
  Milestones?: Milestone[]
  /** At most 100 notes, oldest first. Only in DescribeIncident. */
  Notes?: Note[]
}

/** A complete checkpoint of another job. Exactly one of TrainingJobName and RunId must be set in a request. */
export interface InitialCheckpoint {
  /** The job that made the checkpoint. */
  TrainingJobName?: string
  /** The run that made the checkpoint. */
  RunId?: string
  /** Step of the checkpoint. The default is the newest complete checkpoint at the time of the request. */
  Step?: number
}

/** Time, cost and incidents of one job. */
export interface JobReport {
  TrainingJobName: string
  RunId: string
  Project: string
  FleetName: string
  Figures: ReportFigures
}

/** The newest complete checkpoint in S3 that no verification found damaged. */
export interface LastCheckpoint {
  Step: number
  Generation: number
  CompletedAt: Timestamp
  Bytes: number
}

export interface ListAuditEntriesRequest {
  /** Only calls of this operation, for example DeleteFleet. */
  Operation?: string
  /** Only calls with the token of this id. */
  TokenId?: string
  /** Only calls for this project. */
  Project?: string
  /** Only calls after this time. */
  TimeAfter?: Timestamp
  /** Only calls before this time. */
  TimeBefore?: Timestamp
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of the audit log, newest first. */
export interface ListAuditEntriesResponse {
  AuditEntries: AuditEntry[]
  NextToken?: string
}

export interface ListCheckpointsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** 0 unless given. */
  MinStep?: number
  /** false unless given. */
  Trashed?: boolean
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A job's checkpoints, newest step first. */
export interface ListCheckpointsResponse {
  Checkpoints: Checkpoint[]
  /** Status of the job. A job that has ended creates no more checkpoints. */
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  /** Bytes in S3 of all of the job's checkpoints in the trash, on whatever page. */
  TrashBytes: number
  NextToken?: string
}

export interface ListDrillsRequest {
  /** Name or RunId of a job. For a token without a project, a name selects jobs of all projects. */
  TrainingJobName?: string
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of drills, sorted by the time of their requests. */
export interface ListDrillsResponse {
  Drills: Drill[]
  NextToken?: string
}

export interface ListEventsRequest {
  /** Name or RunId of a job. For a token without a project, a name selects jobs of all projects. */
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
  /** The events, oldest first, or newest first with SortOrder Descending. */
  Events: Event[]
  NextToken?: string
}

export interface ListFleetsRequest {
  /** 100 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of fleets, sorted by name. */
export interface ListFleetsResponse {
  Fleets: Fleet[]
  NextToken?: string
}

export interface ListIncidentsRequest {
  /** Name or RunId of a job. For a token without a project, a name selects jobs of all projects. */
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
  /** The incidents in the order in which they were opened, or newest first with SortOrder Descending. */
  Incidents: Incident[]
  NextToken?: string
}

export interface ListMetricsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** All metrics of a job. There are at most 256 names, so the response has no pages. */
export interface ListMetricsResponse {
  Metrics: Metric[]
  /** Number of values that are lost. Values are lost if the script logs too fast, or under more names than the limit. */
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

/** A page of nodes, oldest first. */
export interface ListNodesResponse {
  Nodes: Node[]
  NextToken?: string
}

export interface ListOutputsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
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

export interface ListSimilarIncidentsRequest {
  IncidentId: string
  /** 5 unless given. */
  MaxResults?: number
}

/** Incidents with the same cause and in the same project as the requested incident. */
export interface ListSimilarIncidentsResponse {
  /** The most similar incident first: incidents that share the instance, then the instance type, then the fleet. Among equally similar incidents, the newest is first. */
  Incidents: SimilarIncident[]
}

export interface ListTimeSpansRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of the periods of a job's life, oldest first. */
export interface ListTimeSpansResponse {
  TimeSpans: TimeSpan[]
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
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** 1000 unless given. */
  MaxResults?: number
  NextToken?: string
}

/** A page of nodes that worked for a job, by start time. */
export interface ListTrainingJobNodesResponse {
  Nodes: TrainingJobNode[]
  NextToken?: string
}

export interface ListTrainingJobNotesRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** The notes of a job, without the notes of its incidents. */
export interface ListTrainingJobNotesResponse {
  /** At most 100 notes, oldest first. */
  Notes: Note[]
}

export interface ListTrainingJobRevisionsRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
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
  /** Only jobs with this status. */
  StatusEquals?: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  /** Only jobs with this text in the name. */
  NameContains?: string
  /** Only jobs of this fleet. */
  FleetName?: string
  /** Only jobs of this project. */
  Project?: string
  /** Only jobs created after this time. */
  CreationTimeAfter?: Timestamp
  /** Only jobs created before this time. */
  CreationTimeBefore?: Timestamp
  /** Only jobs that changed after this time. */
  LastModifiedTimeAfter?: Timestamp
  /** Only jobs that did not change after this time. */
  LastModifiedTimeBefore?: Timestamp
  /** Only jobs with a tag of this name. */
  TagKey?: string
  TagValue?: string
  /** The field by which the list is sorted. "CreationTime" unless given. */
  SortBy?: 'CreationTime' | 'LastModifiedTime' | 'Name'
  /** The direction in which the list is sorted. "Descending" unless given. */
  SortOrder?: 'Ascending' | 'Descending'
  /** ChangeToken of an earlier response to the same request. The response then contains only what changed since. With any other text, such as Start, the response contains everything and a ChangeToken. */
  ChangesSince?: string
}

/** A page of jobs, newest first. */
export interface ListTrainingJobsResponse {
  /** The jobs of the page. An incremental response omits the jobs whose entry did not change. */
  TrainingJobSummaries: TrainingJobSummary[]
  /** Only with ChangesSince. Its field Removed contains the RunIds of jobs that left the page. */
  Changes?: Changes
  NextToken?: string
}

/** One line that a rank printed, or a note that lines are missing. */
export interface LogEvent {
  /** When the node's agent read the line, with a precision of one millisecond. */
  Timestamp: Timestamp
  Generation: number
  NodeId: string
  /** Rank that printed the line. Absent if the event concerns a whole node. */
  Rank?: number
  /** `stdout`, `stderr` or `gap`. A gap marks missing lines. Its Message contains their number and the reason. */
  Stream: 'stdout' | 'stderr' | 'gap'
  /** The line without its line feed. Lines of more than 16 KiB are split. */
  Message: string
  /** True for a state of a line that the rank overwrites, such as a progress bar. Absent for other lines. It replaces the previous line of the rank's stream, if that is a state, too. The log has at most one in 5 seconds. */
  Overwrites?: boolean
}

/** A batch of a job's log lines. The service sends a batch without lines to show that the stream is alive. */
export interface LogEvents {
  Events: LogEvent[]
  /** Token with which FollowLogs or GetLogEvents continues after these lines. */
  NextForwardToken: string
}

/** The training loss of one job in a few points. */
export interface LossCurve {
  RunId: string
  MetricName: string
  Steps: number[]
  /** For each step: the logged value. NaN, Infinity and -Infinity are sent as text. */
  Values: (number | 'NaN' | 'Infinity' | '-Infinity')[]
}

/** A metric of a job: a name under which rank 0 logs values, or under which Everstep measures values on nodes. */
export interface Metric {
  MetricName: string
  LastStep: number
  LastTime: Timestamp
  /** The newest value. NaN, Infinity and -Infinity are sent as text. */
  LastValue: number | 'NaN' | 'Infinity' | '-Infinity'
}

/** One metric in columns: entry i of each list describes point i. Points are in the order of steps. A point covers one step or a span of steps. */
export interface MetricDataResult {
  MetricName: string
  /** For each point: the first step with a value. */
  Steps: number[]
  LastSteps: number[]
  /** For each point: the time of the last value, in seconds since 1970. */
  Times: number[]
  /** For each point: the number of values. */
  Counts: number[]
  /** For each point: the minimum of the finite values, or NaN without a finite value. Means and Maximums use the same values. */
  Minimums: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  Means: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  Maximums: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  /** For each point: the last value, finite or not. NaN, Infinity and -Infinity are sent as text. */
  LastValues: (number | 'NaN' | 'Infinity' | '-Infinity')[]
  /** The node that measured each minimum. Only for metrics named everstep/…, which Everstep measures on every node. For these metrics, Means and LastValues contain the median of the nodes' values, and Counts the number of nodes. The id is empty for a point that contains only the value of rank 0's node. The list is empty for metrics of the script. */
  MinimumNodeIds: string[]
  /** The node that measured each maximum. The rules of MinimumNodeIds apply. */
  MaximumNodeIds: string[]
  /** The value of Series with which a request returns this metric's series: Node or Rank. Absent if none is stored. */
  SeriesKind?: 'Node' | 'Rank'
  /** Only with Series: the values of each node or rank, for at most 64 nodes or ranks. */
  Series?: MetricSeries[]
  /** Number of points at the beginning of the earlier response that the client keeps, because they are unchanged. The client drops the remaining points of the earlier response, and appends the points of this response. Only in incremental responses. */
  KeptPointCount?: number
}

/** The values of one node or of one rank. */
export interface MetricSeries {
  NodeId?: string
  Rank?: number
  /** For each point: the value, or NaN without a value. If the point covers several steps, the value is their mean. */
  Values: (number | 'NaN' | 'Infinity' | '-Infinity')[]
}

/** A moment of an incident. */
export interface Milestone {
  Kind: 'Failed' | 'Detected' | 'Replaced' | 'Restored' | 'Closed'
  Time: Timestamp
  Description: string
}

/** An EC2 instance of a fleet, with its agent. */
export interface Node {
  /** The EC2 instance id. */
  NodeId: string
  FleetName: string
  NodeStatus: 'joining' | 'spare' | 'assigned' | 'held' | 'rebooting' | 'draining' | 'gone'
  /** Reason why the node is held. A held node waits for ReleaseNode. The hold of an unreachable node also ends once the node's agent reports again and no job uses the node. */
  Hold?: 'unreachable' | 'distrusted' | 'inspection' | 'person'
  /** The advice for a held node. Absent if the node is not held. */
  HoldAdvice?: HoldAdvice
  /** A user's request that is not completed yet. ReleaseNode cancels it. */
  Request?: 'drain' | 'replace' | 'reboot' | 'hold'
  /** The person who made the request, and the reason that the person entered. */
  RequestReason?: string
  Connected: boolean
  /** Whether ranks can start on this node without importing their libraries first. A job gets a spare that is not warm only if no warm spare is left. */
  Warm: boolean
  TrainingJobName?: string
  Address: string
  /** Memory of the node that slots, and thereby snapshots and replicas, may use. */
  MemoryBytes: number
  /** Memory of the node and of its ranks. Absent while the agent is not connected, or before its first measurement. */
  Memory?: NodeMemory
  InstanceType: string
  AvailabilityZone: string
  /** The EC2 network node that the instance is attached to. Absent if AWS has not reported one. AWS does not report it for all instance types. */
  FailureDomain?: string
  /** The machine image that the instance runs. Absent until AWS has reported it. */
  ImageId?: string
  /** Absent until AWS has reported it, and for an image that is deregistered or that the account may not use. */
  ImageCreationTime?: Timestamp
  AgentVersion: string
  /** Number of the agent's messages that the server of the node's fleet rejected since the server's start. Rejected messages are malformed, too long, or contain the id of another node. */
  RefusedMessageCount: number
  /** Number of connections that the agent rejected or closed since its start, because of an invalid message. The agent's ranks and other agents opened these connections. A restart of ranks causes a few rejections. If the number keeps growing, read the agent's log. */
  RefusedSessionCount: number
  /** Warning about data of other jobs or of the node that a job's code can read on this node. The sentence names the agent's files, the instance's metadata, or both. Absent if a job's code can read neither, and until the agent has reported. */
  Exposure?: string
  Reason: string
  /** Current problems that the agent reports about the node and about its job's work on the node. Empty while the agent is not connected. */
  Conditions: Condition[]
  /** Absent until the node has been tested. */
  BurnIn?: NodeBurnIn
  /** The node's history, oldest entry first. Only in DescribeNode. */
  Incidents: NodeIncident[]
  CreationTime: Timestamp
  ConnectionTime?: Timestamp
  EndTime?: Timestamp
}

/** The newest test results of a node, which the node's agent measured. */
export interface NodeBurnIn {
  Time: Timestamp
  /** Level of DCGM's diagnostics: 1 after the boot, 3 on an idle spare. */
  Level: number
  Seconds: number
  Tests: NodeTest[]
}

/** One entry of a node's history: an incident in which the node was involved. */
export interface NodeIncident {
  /** The id of a job's incident, or `fleet-…` if the node had no job. */
  IncidentId: string
  Time: Timestamp
  /** Cause of the incident: `node_unreachable`, `agent_lost` …, or a fault code with its number: `gpu_xid 79`. */
  Cause: string
  Evidence: string
  Remedy: 'none' | 'restart' | 'release' | 'hold' | 'retire' | 'reboot' | 'replace' | 'let_go'
}

/** Memory of a node and of its ranks, from the agent's last report. */
export interface NodeMemory {
  UsedBytes: number
  /** Memory that can be allocated now without swapping. */
  AvailableBytes: number
  /** Memory of the machine, or the limit of the cgroup of agent and ranks if that is lower. */
  TotalBytes: number
  /** Memory limit of the cgroup of agent and ranks. Absent if no cgroup limit is below the machine's memory. */
  CgroupLimitBytes?: number
  /** Memory of the running ranks, by rank. */
  Ranks: RankMemory[]
}

/** The result of one test of a node. */
export interface NodeTest {
  Name: string
  /** `unknown` if the test could not run to its end. */
  Outcome: 'passed' | 'failed' | 'unknown'
  /** Bytes per second; for a matmul, floating-point operations per second. Absent if the test measures no rate. */
  Rate?: number
  /** Why the test failed or could not run, after the partner of an all-reduce. Empty if a node's own test passed. */
  Text: string
}

/** A note that a person has written about a job or an incident. A note never changes. */
export interface Note {
  NoteId: number
  /** The author: description and id of the token that the author used. */
  Author: string
  CreationTime: Timestamp
  Text: string
}

/** The job's outputs, and their location in S3. */
export interface OutputDataConfig {
  /** Prefix for outputs. Everstep appends the job and the run. The default is a prefix in the service's bucket. */
  S3OutputPath?: string
  /** Files that ranks write into the source directory and that become outputs of the node's first rank. A pattern is a file, a folder, or has one `*` for any characters, also `/`: `log.txt`, `runs`, `*.pt`. Each launch begins with the source as it was uploaded. */
  Keep?: string[]
}

/** One file that a rank wrote into its output directory. */
export interface OutputEntry {
  Generation: number
  /** Path within the generation: `rank=0/model.safetensors`. */
  Path: string
  Key: string
  Bytes: number
}

/** A request to pause all automatic actions. */
export interface PauseAutomationRequest {
  /** Why automation is paused. During the pause, the reason of each job and fleet contains this text. */
  Reason: string
}

export interface PauseTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

export interface PinCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** Limits for the jobs of a project. */
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

/** Time, cost and incidents of one project's jobs. */
export interface ProjectReport {
  Project: string
  Figures: ReportFigures
}

/** Protection of each shard in the memory of nodes, and the limit for the slowdown by snapshots. */
export interface ProtectionConfig {
  /** Nodes that hold each shard, the owner included. 2 unless given. With 1, the job survives lost processes but no lost node. For a job of one node, and for a job with ParityGroupSize, the default is 1 instead of 2. */
  Copies?: number
  /** Number of nodes in each group that protects its shards by parity, which needs less memory than copies. The default is no parity. Each node keeps its own shards, and the XOR of parts of the shards of the other nodes in its group. The job survives the loss of any one node per group. Groups of g nodes need g ÷ (2 × (g - 1)) of the memory of two copies. The last group also has the remaining nodes, if NodeCount is not a multiple of g. Copies must be 1, and MinNodeCount at least this number. Cannot change after creation. */
  ParityGroupSize?: number
  /** Share of the mean iteration time that snapshots may add, 0.01 meaning 1 %. If snapshots cost more, Everstep takes them less often than every step. The default is 0.01. On a local cluster the default is 1, because all nodes share the cores of one machine and the measured cost is unreliable. */
  MaxSlowdown?: number
}

/** The time in which a job's training goes on although nodes keep no further step. */
export interface ProtectionLapse {
  Cause: 'Late' | 'State' | 'Capture' | 'Changed' | 'Layout' | 'NoSlot' | 'Memory' | 'SilentAgent' | 'Unconfirmed'
  /** The newest step that nodes keep. A failure repeats all later steps. */
  KeptStep: number
  /** Number of steps that training has finished since KeptStep. */
  UnkeptSteps: number
  /** Time at which KeptStep was committed, or at which the generation finished its first step. */
  Since: Timestamp
  /** The rank whose steps are not kept. Absent if no rank or agent reports the cause. */
  Rank?: number
  NodeId?: string
}

/** Limits for the jobs of a project, and AWS resources that its submitters may use. The allow-lists do not restrict administrators. */
export interface PutProjectQuotaRequest {
  Project: string
  /** Maximum number of nodes per fleet for all jobs of the project together. The default is no limit. Jobs beyond the limit wait, and do not delay other projects' jobs. */
  MaxNodeCount?: number
  /** Limit of unfinished jobs in all fleets. The default is no limit. Beyond the limit, CreateTrainingJob fails. */
  MaxJobCount?: number
  /** Limit of the total size of the project's source archives. The default is no limit. Stored archives are never deleted, and unfinished uploads count for up to 26 hours. Beyond the limit, CreateSource, CompleteSource and PutSource fail. */
  MaxSourceBytes?: number
  /** The highest Priority that submitters of the project may set. 0 unless given. */
  MaxPriority?: number
  /** Roles that submitters of the project may set as RoleArn. The default is none. In this list and in AllowedSecrets and AllowedData, an entry that ends with `*` allows all names with that prefix. */
  AllowedRoleArns?: string[]
  /** Secrets that submitters may use in jobs without RoleArn. The default is none. */
  AllowedSecrets?: string[]
  /** S3 URIs and directories that submitters may use in InputDataConfig, CheckpointConfig and OutputDataConfig. The default is none. Inputs of jobs with RoleArn may have any S3 URI. */
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

/** Memory of a rank's process. Child processes of the rank do not count. */
export interface RankMemory {
  Rank: number
  /** Resident memory of the process, including the full size of pages that it shares with other processes. */
  ResidentBytes: number
  /** The highest ResidentBytes since the process started. */
  PeakResidentBytes: number
}

/** The source from which a range of ranks restored their shards. */
export interface RankSource {
  Source: 'local' | 'peer' | 'parity' | 's3'
  FirstRank: number
  LastRank: number
}

export interface ReadSnapshotRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  SnapshotId: string
  Rank: number
  Begin: number
  End: number
}

export interface ReadSnapshotResponse {
  Body?: Blob
}

/** Confirms that the server is ready for requests. */
export interface ReadinessResponse {
  Status: 'ready'
  Version: string
}

/** Reboots a node. */
export interface RebootNodeRequest {
  NodeId: string
  /** The person's reason for the request. "" unless given. It appears with the node, in the incident of its job, and in the node's history. */
  Reason?: string
}

/** Probability that the nodes' memory keeps every shard of a job when several nodes are lost at the same time. */
export interface RecoveryOdds {
  LostNodes: number
  /** Exact probability that memory keeps every shard. All sets of LostNodes nodes are equally likely. */
  Probability: number
}

/** The rehearsal of a job's resume, which proves that a restart repeats the job's steps bit for bit. In a rehearsal, a second process of each rank starts from a recent step, repeats the following steps, and compares them with the steps that the job made. */
export interface RehearsalConfig {
  /** Auto: if all rehearsals together cost at most 0.1 % of the expected run. On: at any cost. Off: never. "Auto" unless given. Auto never rehearses a job whose expected run is shorter than 3 minutes. On a local cluster, the cost has no limit. A job rehearses soon after its start, after the first pass over its data ends, and after the set of its modules, parameters or parameter groups changes. It does so at most three times, and not after a difference. RehearseTrainingJob requests further rehearsals. */
  Mode?: 'Auto' | 'On' | 'Off'
  /** Reaction to a difference. Stop: the job stops as after StopTrainingJob. "Continue" unless given. */
  OnDifference?: 'Continue' | 'Stop'
  /** The first step that must be committed before the first rehearsal. 20 unless given. */
  AtStep?: number
  /** Number of steps that a rehearsal repeats. 5 unless given. */
  Steps?: number
}

/** The first difference between a job's steps and their repetition. */
export interface RehearsalDifference {
  /** The repeated step with the difference. If it is the step of the restart, the restored state itself differs. */
  Step: number
  /** What differs, for example the state, the data or the loss. */
  Kind: string
  /** The likely cause. */
  Source: string
  /** The first tensors, generators or values that differ. */
  Names: string[]
  /** Variables of the script that differed before, as `file:function.name`. */
  Unkept: string[]
  /** Lines of the script that change these variables, or use the values that differ. Empty if none is found. */
  Lines: RehearsalLine[]
}

/** A line of the script that belongs to a difference. */
export interface RehearsalLine {
  /** The variable that the line changes, or the value that it fetches, sets or logs. */
  Name: string
  File: string
  Line: number
}

/** The newest result of a rehearsal. */
export interface RehearsalResult {
  /** Proven: a restart repeats the job's steps bit for bit. Differs: it does not. Unproven: it does, and loses values that the script changes during training, such as a counter. Unstable: two repetitions differ from each other, so the computation itself is not deterministic. Refused: a rank could not rehearse. */
  Verdict: 'Proven' | 'Unproven' | 'Differs' | 'Unstable' | 'Refused'
  /** The step from which the ranks restarted. */
  Step: number
  /** Number of repeated steps. */
  Steps: number
  /** The longest time for which a rank did not train. */
  Seconds: number
  Time: Timestamp
  /** The rank with the first difference or lost value, or the first rank that could not rehearse. Absent if the verdict is Proven, or if no rank began to rehearse. */
  Rank?: number
  Difference?: RehearsalDifference
  /** The difference, or the reason of the refusal. */
  Message?: string
  /** What to change in the script. */
  Advice?: string
}

export interface RehearseTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** Ends the hold of a node, that is, the time during which Everstep keeps the node out of use. */
export interface ReleaseNodeRequest {
  NodeId: string
  /** True: terminate the instance. False: use the node again and ignore its earlier failures. false unless given. */
  Terminate?: boolean
}

export interface ReleaseSnapshotRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  SnapshotId: string
}

/** Confirms that the nodes need not keep the snapshot in memory any more. */
export interface ReleaseSnapshotResponse {
  SnapshotId: string
}

/** Share of time spent on training, and frequency and duration of interruptions. */
export interface Reliability {
  /** Effective training time ratio: training time ÷ time outside the buckets queue, provision and paused. The job has no nodes during these three accounting buckets. Absent before the first start. */
  EttrRatio?: number
  /** Training time ÷ total time since the job was created, including time in the queue and paused time. */
  EttrWithQueueRatio?: number
  /** Mean time to failure: seconds in the accounting buckets train and stall ÷ number of failures. Absent before the first failure. Drills, AWS's notices and users' requests do not count as failures. */
  MttfSeconds?: number
  /** Mean time to recovery: from the failure until training reaches the step it was at before. Computed over failures whose incidents are closed. */
  MttrSeconds?: number
  /** Steps that training had to repeat. */
  LostSteps: number
  /** Total cost of the incidents: the CostUsd of all incidents, added up. Absent if the fleet has no price. */
  IncidentCostUsd?: number
}

/** The choice for which a job waits: repeat much training (AcceptLoss), or wait for nodes that may return. */
export interface RepeatChoice {
  /** The newest step that every rank can restore now. 0: the script's own initial state. */
  BaseStep: number
  /** The newest committed step, which is out of reach. */
  NewestStep: number
  /** Training time from BaseStep to NewestStep. Absent if it is unknown. */
  RepeatedSeconds?: number
  /** When the job began to wait for this choice. */
  StartTime: Timestamp
  /** Nodes of the last launch whose instances have ended, as AWS reports. */
  EndedNodeIds: string[]
  /** Nodes of the last launch whose agents are silent. Their memory may still hold NewestStep. */
  SilentNodeIds: string[]
  /** Newer checkpoints that are damaged. */
  DamagedSteps: number[]
  /** Newer checkpoints that S3 lists and the job cannot use: of another history, in the trash, or not in the database. */
  UnknownSteps: number[]
  /** Whether S3 could be listed. If not, S3 may have newer checkpoints. */
  IsStoreListed: boolean
  /** Whether AWS reports that all nodes of the last launch have ended, and S3 lists no checkpoint. */
  IsTotalLoss: boolean
}

/** Terminates a node's instance, so that another instance replaces it. */
export interface ReplaceNodeRequest {
  NodeId: string
  /** The person's reason for the request. "" unless given. It appears with the node, in the incident of its job, and in the node's history. */
  Reason?: string
}

/** Time, cost and incidents of all matching jobs and fleets over a time range. Total equals the sum of Buckets, and the sum of Fleets. Without idle nodes, it also equals the sum of Projects, and the sum of Jobs and OtherJobs. Deleted jobs and fleets are not included. Costs use the current price of each fleet. */
export interface Report {
  /** The requested begin, rounded down to a full hour. */
  StartTime: Timestamp
  /** The requested end, rounded up to a full hour. */
  EndTime: Timestamp
  Total: ReportFigures
  /** Time, cost and incidents in each part of the time range, oldest first, without gaps. */
  Buckets: ReportBucket[]
  /** Figures of each project, the most expensive project first. */
  Projects: ProjectReport[]
  /** Figures of each fleet, the most expensive fleet first. A job counts for the fleet in which it runs now or ran last. */
  Fleets: FleetReport[]
  /** Figures of at most MaxJobs jobs, the most expensive job first. */
  Jobs: JobReport[]
  /** Sums over the jobs that Jobs leaves out. Absent if Jobs contains all jobs. */
  OtherJobs?: ReportFigures
  JobCount: number
  /** Incidents by cause, the most frequent cause first. */
  Causes: CauseReport[]
}

/** Time, cost and incidents in one bucket: a part of the time range, for example one day. */
export interface ReportBucket {
  StartTime: Timestamp
  EndTime: Timestamp
  Figures: ReportFigures
}

/** Time, cost and incidents of one project, fleet, job or part of the time range, or of the whole report. */
export interface ReportFigures {
  /** Time of the jobs by accounting bucket, as in AccountingSeconds of DescribeTrainingJob. */
  AccountingSeconds: Record<string, number>
  /** Training time: the accounting bucket `train` of AccountingSeconds. */
  ProductiveSeconds: number
  /** Training time ÷ time during which the jobs had nodes, over all jobs together. Absent if no job had nodes. */
  EttrRatio?: number
  /** Training time ÷ all time of the jobs, including queue and pauses. Absent if no job has any time. */
  EttrWithQueueRatio?: number
  /** Working time of the jobs' nodes, summed over nodes. */
  NodeSeconds: number
  /** NodeSeconds × ranks per node. With one rank per GPU, this is GPU time. */
  RankSeconds: number
  /** Part of NodeSeconds that CostUsd leaves out, because the fleet has no price. */
  UnpricedNodeSeconds: number
  /** Cost of NodeSeconds. It excludes idle nodes. Absent if no fleet has a price. */
  CostUsd?: number
  /** Incidents that neither a drill nor a planned stop caused. */
  Failures: ReportIncidents
  /** Incidents that do not count as failures, because a stop of the ranks was requested. The request followed from AWS's notice, a person's request about a node, a change of the number of nodes, or a pause that did not succeed. */
  PlannedStops: ReportIncidents
  /** Incidents that drills caused. No other count contains them. */
  Drills: ReportIncidents
  /** Mean time to failure: time in the accounting buckets train and stall ÷ number of failures. Absent without a failure. */
  MttfSeconds?: number
  /** Mean recovery time of failures, as in RecoverySeconds. Absent if training recovered from no failure. */
  MttrSeconds?: number
  /** Time of nodes that work for no job, by node state, summed over nodes. Only in Total, Buckets and Fleets. */
  IdleNodeSeconds: Record<string, number>
  /** Cost of the spares in IdleNodeSeconds. Absent if no fleet has a price. */
  SpareCostUsd?: number
  /** Cost of the other nodes in IdleNodeSeconds: joining, held, rebooting and draining nodes. Absent if no fleet has a price. */
  OtherIdleCostUsd?: number
}

/** Sums over incidents of one kind: failures, planned stops or drills. */
export interface ReportIncidents {
  /** Number of incidents whose failure is in the time range. */
  Count: number
  /** Number of these incidents from which training has recovered. */
  RecoveredCount: number
  /** Total recovery time of the incidents from which training has recovered. The recovery of an incident lasts from the failure until training has repeated the lost steps. */
  RecoverySeconds: number
  RecomputedSteps: number
  /** Cost of the jobs' nodes during the recoveries, for the part of each recovery inside the time range. Absent if no fleet has a price. */
  CostUsd?: number
}

/** Permits a node to join again after its agent lost its session. */
export interface ResetNodeSessionRequest {
  NodeId: string
  /** The person's reason for the request. "" unless given. It appears with the node, in the incident of its job, and in the node's history. */
  Reason?: string
}

export interface ResumeTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** Limits after which Everstep stops retrying a failing job, or asks a person first. */
export interface RetryStrategy {
  /** Number of times that the same failure may occur at the same step. 3 unless given. At the limit, Everstep retries once without the node of the failing rank, then once from an older state. Everstep skips a retry that is impossible. If all retries fail, the job fails. */
  MaxAttempts?: number
  /** Longest training time, in minutes, that the job repeats without a person's consent. 30 unless given. If the newest step that the job can restore lies further before its newest committed step, the job holds its nodes and waits for AcceptLoss, or until a lost node returns. */
  MaxRepeatedMinutes?: number
  /** Restart: the job never waits for AcceptLoss, and continues from the newest step that it can restore, or step 0. "Wait" unless given. */
  OnTotalLoss?: 'Wait' | 'Restart'
}

export interface RevokeTokenRequest {
  TokenId: string
}

/** Input objects in S3. */
export interface S3DataSource {
  /** One object, or a prefix. Nodes keep the folder structure below a prefix. Without RoleArn the nodes read the objects with their own permissions. */
  S3Uri: string
}

/** A period that the job spent in one state. */
export interface SecondaryStatusTransition {
  /** The status in SageMaker's terms, derived from the state. While ranks run without a new step, the status is Starting, or Restarting once the job has made steps. */
  Status: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'CompletedWithOlderCheckpoint' | 'Failed' | 'Stopped'
  /** Everstep's own state of the job, which is more detailed than Status. */
  State: 'queued' | 'allocating' | 'preparing' | 'loading' | 'starting' | 'running' | 'pausing' | 'stopping' | 'completed' | 'failed' | 'stopped'
  StartTime: Timestamp
  EndTime?: Timestamp
  StatusMessage: string
}

/** A problem of the service that a person must resolve. */
export interface ServiceCondition {
  Type: 'disk_full'
  /** A sentence about the problem and its location, with the measured values. */
  Message: string
  /** How to resolve the problem. */
  Hint: string
  /** Directory on the affected disk. Absent if the disk belongs to a database on another machine. */
  Directory?: string
  /** Free space of the disk. Absent if this server cannot read the value. */
  FreeBytes?: number
  DurationSeconds: number
}

/** The holders of one rank's shard. */
export interface ShardProtection {
  Rank: number
  OwnerNodeId: string
  CommittedStep: number
  Bytes: number
  /** Holders of the shard. The owner's node is the first. With parity, the other holders are the other nodes of the group, which keep a share of the shard. */
  Holders: Holder[]
  /** Reason why a holder is out of view, slow or unreachable, or why the owner or a holder refuses snapshots. Empty without such a problem. */
  Reason: string
}

/** An incident that is similar to a given incident, with the same cause and project. */
export interface SimilarIncident {
  TrainingJobName: string
  RunId: string
  IncidentId: string
  Decision: string
  /** Number of steps that training had to repeat: ReachedStep − FromStep. */
  LostSteps?: number
  /** Instances on which the failure occurred, whether or not the job lost them. Either ranks, the agent, network connections or hardware of the instance failed, or AWS announced the end or a maintenance of the instance. Empty if Everstep cannot determine the instances. */
  FaultedInstanceIds: string[]
  OpenedAt: Timestamp
  ClosedAt?: Timestamp
  /** How the incident ended. */
  Outcome: 'Open' | 'Recovered' | 'JobPaused' | 'JobCompleted' | 'JobFailed' | 'JobStopped'
  FleetName: string
  /** Properties that both incidents share in addition to cause and project, the most significant first. */
  Likeness: ('Instance' | 'InstanceType' | 'Fleet')[]
}

/** The user's code. */
export interface SourceConfig {
  /** The SHA-256 of the archive, as PutSource and CreateSource return it. */
  SourceId: string
}

/** A presigned upload to S3: the client sends `PUT Url` with these headers and the archive as body. The request needs no token. */
export interface SourceUpload {
  /** Secret. The URL accepts only this archive, because its checksum and length are signed. */
  Url: string
  Headers: Record<string, string>
  /** When the URL expires. After that, CreateSource returns another URL. */
  ExpirationTime: Timestamp
}

/** A rule from which Everstep computes the number of spares: a required probability that a spare is free. The computation uses the fleet's measured failure rate and replacement times. */
export interface SparePolicy {
  /** The probability with which a spare must be free when a failure occurs. */
  Probability: number
}

/** A fault to inject into a running job. */
export interface StartDrillRequest {
  /** Name or RunId of the job. */
  TrainingJobName: string
  DrillType: 'kill-rank' | 'kill-agent' | 'terminate-instance'
  /** A node of the job that the fault affects. The default is the node with the highest GROUP_RANK. */
  NodeId?: string
  /** The rank to kill, which must run on the chosen node. Only valid for the fault `kill-rank`. The default is the node's first rank. */
  Rank?: number
}

/** Settings of a roll, which replaces or reboots all nodes of a fleet, a few at a time. */
export interface StartFleetRollRequest {
  FleetName: string
  /** Limit of nodes out of service at the same time. Below the limit, the roll begins with the next node. 1 unless given. The count also includes nodes that the fleet needs for jobs or as spares, and that are missing or unusable for another reason than the roll. */
  MaxUnavailable?: number
  /** Whether to reboot the nodes. Otherwise their instances are replaced. false unless given. */
  Reboot?: boolean
  /** The person's reason. It appears with each node, in the incidents of jobs, and in the nodes' histories. "" unless given. */
  Reason?: string
}

export interface StopFleetRollRequest {
  FleetName: string
}

export interface StopTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

/** Limits at which a job is stopped. */
export interface StoppingCondition {
  /** Limit of the time since the job's first start. Time without nodes after a pause does not count. */
  MaxRuntimeInSeconds?: number
  /** Limit of the time from the job's creation until it gets its first nodes. Independently of this limit, a job that cannot get all of its nodes releases the nodes that it already holds. */
  MaxPendingTimeInSeconds?: number
  /** Limit of the cost of the job's nodes, at the fleet's price. At the limit, the job stops as after StopTrainingJob. The fleet must have a price. */
  MaxCostUsd?: number
}

/** New limits of a job's duration and cost. The value 0 removes a limit. */
export interface StoppingConditionUpdate {
  MaxRuntimeInSeconds?: number
  MaxPendingTimeInSeconds?: number
  /** New cost limit: at least 0.01, or 0 for no limit. */
  MaxCostUsd?: number
}

/** The wait of a job for S3, IAM or KMS during a restore. */
export interface StoreWait {
  /** Why the nodes could not load. */
  Obstacle: 'Denied' | 'NoCredentials' | 'Throttled' | 'NoAnswer' | 'Garbled' | 'NoBucket' | 'Refused'
  /** The message of the node that reported the obstacle. */
  Message: string
  Since: Timestamp
  /** Number of failed attempts since then. */
  AttemptCount: number
  NextAttemptTime: Timestamp
}

/** The duty of one job or fleet. */
export interface SubjectDuty {
  /** Absent for the duty of a fleet. */
  TrainingJobName?: string
  RunId?: string
  FleetName: string
  Project: string
  Duty: Duty
}

/** Puts a job under the control of a person. */
export interface TakeOverTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  /** "" unless given. */
  Reason?: string
}

/** A period in which a job did one thing. Periods have no gaps between them. */
export interface TimeSpan {
  /** What the job did, as in AccountingSeconds. Time with missing nodes is one period in the bucket `train`. */
  Bucket: 'queue' | 'provision' | 'start' | 'train' | 'shortage' | 'stall' | 'rehearsal' | 'detect' | 'replace' | 'restore' | 'rework' | 'stopping' | 'paused' | 'unaccounted'
  StartTime: Timestamp
  /** End of the period. Absent for the newest period of a job that has not ended. */
  EndTime?: Timestamp
  /** Number of nodes that the job lacked for its NodeCount. Their share of the time counts as `shortage`. */
  MissingNodeCount: number
}

/** A token without its secret. */
export interface Token {
  TokenId: string
  /** The project of the token. Absent if the token can access every project. */
  Project?: string
  Description: string
  CreationTime: Timestamp
  ExpirationTime?: Timestamp
  /** Kind of the token. user: a token of a person or a program. join: a token with which instances join a fleet. */
  Kind: 'user' | 'join'
  Role: 'admin' | 'submitter' | 'viewer' | 'agent'
  /** The fleet of a join token. Absent for other tokens. */
  FleetName?: string
  RevocationTime?: Timestamp
}

/** A training job: its configuration, its state, its progress and its cost. */
export interface TrainingJob {
  TrainingJobName: string
  RunId: string
  /** The fleet in which the job runs or waits. */
  FleetName: string
  Project: string
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  SecondaryStatus: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'CompletedWithOlderCheckpoint' | 'Failed' | 'Stopped'
  /** Step of the newest checkpoint at the end of a job whose ranks all ended with success; 0 without a checkpoint. If the step lies before Boundary, a completed job has the SecondaryStatus CompletedWithOlderCheckpoint. Absent before the end, and for a job that makes no checkpoint at its end. */
  FinalCheckpointStep?: number
  /** Reason for the job's state, for example the event that the job waits for, or the cause of its end. */
  Reason: string
  NodeCount: number
  /** Number of nodes of the current generation. With ElasticConfig, it is below NodeCount while the fleet lacks nodes, and can be above NodeCount after the job has grown. Equals NodeCount before the first generation. */
  GenerationNodeCount: number
  Priority: number
  CreationTime: Timestamp
  /** Time when the job last changed its state, or when a user last changed the job. */
  LastModifiedTime: Timestamp
  TrainingStartTime?: Timestamp
  TrainingEndTime?: Timestamp
  /** Earliest time at which Everstep deletes a job in the trash for good, with its objects. Absent outside of it. */
  PurgeTime?: Timestamp
  /** Number of the current launch of all ranks; 0 before the first launch. */
  Generation: number
  /** The newest step that all holders in view have verified; -1 before the first such step. */
  CommittedStep: number
  /** Number of steps that the ranks of the current generation have finished; -1 before they start. */
  Boundary: number
  /** The highest Boundary of any generation: the largest number of steps that the ranks have ever finished. */
  MaxBoundary: number
  /** The step at which the script ends, as passed to `session.batches(until_step=…)`. Absent if the script passes none. */
  TargetStep?: number
  /** Time until the ranks reach TargetStep at the job's mean pace, if no failure occurs and the job does not wait. Absent if the pace or the target is unknown, and once the job has ended. */
  EstimatedRemainingSeconds?: number
  /** Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price. */
  CostUsd?: number
  /** The other fleets in which the job may start. */
  AlternativeFleetNames: string[]
  SecondaryStatusTransitions: SecondaryStatusTransition[]
  /** Outputs of the ranks that are not in S3, at most 50. */
  UnstoredOutputs: UnstoredOutput[]
  /** Number of outputs that are not in S3, including those that UnstoredOutputs does not name. */
  UnstoredOutputCount: number
  /** What a person has to do for the job. */
  Duty: Duty
  /** Absent unless the job waits for AcceptLoss. */
  RepeatChoice?: RepeatChoice
  /** The wait for instances that AWS does not launch. Absent if the job waits for none. */
  CapacityWait?: CapacityWait
  /** The wait for S3, IAM or KMS, which prevent a restore. Absent without such a wait. */
  StoreWait?: StoreWait
  /** Why the job failed. Absent if the job has not failed. */
  FailureReason?: string
  /** Current problems of the job's nodes and of the service. Conditions inform people. A condition alone does not make Everstep change the job. Empty once the job has ended. */
  Conditions: Condition[]
  Source: SourceConfig
  /** Path of the Python file that every rank runs, in the source archive. */
  EntryPoint: string
  /** The request's Module. Absent if the request named EntryPoint instead. */
  Module?: string
  Requirements?: string
  HyperParameters: Record<string, string>
  Arguments: string[]
  Environment: Record<string, string>
  /** The location in AWS of each environment variable's value. The values are never shown. */
  Secrets: Record<string, string>
  RoleArn?: string
  RanksPerNode: number
  Protection: ProtectionConfig
  CheckpointConfig: CheckpointConfig
  CheckpointActivity: CheckpointActivity
  /** The checkpoint of another job from which this job started or will start. Everstep sets all its fields. Absent if the job starts from the script's own initial state. */
  InitialCheckpoint?: InitialCheckpoint
  InputDataConfig: Channel[]
  OutputDataConfig: OutputDataConfig
  StoppingCondition: StoppingCondition
  RetryStrategy: RetryStrategy
  ElasticConfig: ElasticConfig
  Rehearsal: RehearsalConfig
  /** The newest result of a rehearsal. Absent before the first. */
  RehearsalResult?: RehearsalResult
  /** Whether a rehearsal was requested, by a person or by Everstep, and has no result yet. */
  IsRehearsalPending: boolean
  Preemptible: boolean
  /** Position in the fleet's queue, from 1. Absent while the job is not in the queue. */
  QueuePosition?: number
  /** Names of the jobs ahead of this job in the queue. */
  QueuedBehind: string[]
  Tags: Record<string, string>
  StopRequestedTime?: Timestamp
  /** Time when a person paused the job. Absent after the job was resumed. */
  PauseRequestedTime?: Timestamp
  /** Revision of the job's configuration: 1 at creation, plus one with each update. */
  Revision: number
  /** The revision of the configuration that the newest generation uses. Absent before the first generation. */
  ObservedRevision?: number
  /** Time when a person took control of the job. Everstep only observes the job until the hand-back. Absent if Everstep controls the job. */
  TakenOverTime?: Timestamp
  TakenOverBy?: string
  /** The step from which the current generation resumed. */
  BaseStep: number
  /** Number of the job's nodes that are connected and report no fault of their own. */
  HealthyNodeCount: number
  /** Number of nodes assigned to the job. After the job's end, it is the number of nodes that still hold resources of the job. The job can be deleted once the number is 0. */
  AssignedNodeCount: number
  /** The job's nodes in the order of GROUP_RANK. Empty while the job has no nodes. */
  NodeIds: string[]
  CoordinatorNodeId?: string
  IncidentCount: number
  /** Incidents from which the job has not recovered yet. */
  OpenIncidentCount: number
  /** Id of the drill of this job that has no outcome yet. Absent without such a drill. */
  OpenDrillId?: string
  /** The time from CreationTime to AccountedUntil, by accounting bucket. The buckets add up to that time exactly, to the microsecond. */
  AccountingSeconds: Record<string, number>
  /** Time up to which AccountingSeconds counts. For an ended job, this is the time of its end. */
  AccountedUntil?: Timestamp
  Reliability: Reliability
  /** Total time that nodes have worked for the job. */
  NodeSeconds: number
}

/** A period in which a node worked for a job. */
export interface TrainingJobNode {
  NodeId: string
  StartTime: Timestamp
  /** End of the period. Absent while the node works for the job. A node may have several periods. */
  EndTime?: Timestamp
}

/** Forecast for a job, based on its fleet's state and history. */
export interface TrainingJobPlan {
  FleetName: string
  NodeCount: number
  RanksPerNode: number
  WorldSize: number
  Copies: number
  /** Nodes per parity group. Absent without parity. */
  ParityGroupSize?: number
  /** A sentence about the numbers of nodes between which the job may change. Absent if the job always has NodeCount nodes. */
  Elasticity?: string
  /** Number of memory slots that the job needs on each node: slots per shard × Copies × RanksPerNode. Each slot holds the state of one rank. With parity, the number is slots per shard × 2 × RanksPerNode. Half of these slots hold shares, each with 1 ÷ (ParityGroupSize - 1) of the size of a state. */
  SlotsPerNode: number
  /** Memory of the job's slots on each node ÷ size of the training state of the node's ranks. */
  MemoryRatio: number
  /** MemoryRatio of the same job with two copies instead of parity. Absent without parity. */
  CopiesMemoryRatio?: number
  /** Memory for slots on the fleet's smallest node. Absent while the fleet has no node. */
  NodeMemoryBytes?: number
  /** The largest state per rank that fits into NodeMemoryBytes. */
  LargestShardBytes?: number
  /** The probability that memory keeps every shard after a simultaneous loss of one, two or three nodes. The computation assumes that every shard has all its holders. */
  RecoveryOdds: RecoveryOdds[]
  /** Whether enough nodes are free and connected, and no other job is ahead in the queue. */
  CanStartNow: boolean
  /** Position in the fleet's queue, from 1. Absent if the job would not wait for other jobs. */
  QueuePosition?: number
  /** Names of the jobs that would be ahead in the queue. */
  QueuedBehind: string[]
  /** A sentence that says what the job would wait for. */
  WaitsFor?: string
  FreeNodeCount: number
  /** Number of instances that the fleet would have to launch for the job. */
  NodesToLaunch: number
  /** The fleet's price × NodeCount. Absent if the fleet has no price. */
  CostUsdPerHour?: number
  /** Upper limit of the cost: the lower of MaxCostUsd and MaxRuntimeInSeconds ÷ 3600 × CostUsdPerHour. The second value exists only if the fleet has a price. Absent if neither value exists. */
  MostCostUsd?: number
  /** Mean time to failure: node-seconds of the fleet's jobs ÷ their incidents ÷ NodeCount. Absent before the fleet's first incident. */
  ExpectedMttfSeconds?: number
  /** Mean time to recovery of the fleet's closed incidents. */
  ExpectedRecoverySeconds?: number
  /** Expected share of training time, queue excluded. ExpectedMttfSeconds ÷ (ExpectedMttfSeconds + ExpectedRecoverySeconds). */
  ExpectedEttrRatio?: number
}

/** The changes that one update made to a job. */
export interface TrainingJobRevision {
  /** Number of the revision. Revision 1 is the configuration at creation. */
  Revision: number
  Time: Timestamp
  Changes: FieldChange[]
}

/** A training job in a list of jobs, with fewer fields than DescribeTrainingJob returns. */
export interface TrainingJobSummary {
  TrainingJobName: string
  RunId: string
  /** The fleet in which the job runs or waits. */
  FleetName: string
  Project: string
  TrainingJobStatus: 'InProgress' | 'Completed' | 'Failed' | 'Stopping' | 'Stopped'
  SecondaryStatus: 'Pending' | 'Starting' | 'Downloading' | 'Training' | 'Restarting' | 'Interrupted' | 'Pausing' | 'Paused' | 'Stopping' | 'Completed' | 'CompletedWithOlderCheckpoint' | 'Failed' | 'Stopped'
  /** Step of the newest checkpoint at the end of a job whose ranks all ended with success; 0 without a checkpoint. If the step lies before Boundary, a completed job has the SecondaryStatus CompletedWithOlderCheckpoint. Absent before the end, and for a job that makes no checkpoint at its end. */
  FinalCheckpointStep?: number
  /** Reason for the job's state, for example the event that the job waits for, or the cause of its end. */
  Reason: string
  NodeCount: number
  /** Number of nodes of the current generation. With ElasticConfig, it is below NodeCount while the fleet lacks nodes, and can be above NodeCount after the job has grown. Equals NodeCount before the first generation. */
  GenerationNodeCount: number
  Priority: number
  CreationTime: Timestamp
  /** Time when the job last changed its state, or when a user last changed the job. */
  LastModifiedTime: Timestamp
  TrainingStartTime?: Timestamp
  TrainingEndTime?: Timestamp
  /** Earliest time at which Everstep deletes a job in the trash for good, with its objects. Absent outside of it. */
  PurgeTime?: Timestamp
  /** Number of the current launch of all ranks; 0 before the first launch. */
  Generation: number
  /** The newest step that all holders in view have verified; -1 before the first such step. */
  CommittedStep: number
  /** Number of steps that the ranks of the current generation have finished; -1 before they start. */
  Boundary: number
  /** The highest Boundary of any generation: the largest number of steps that the ranks have ever finished. */
  MaxBoundary: number
  /** The step at which the script ends, as passed to `session.batches(until_step=…)`. Absent if the script passes none. */
  TargetStep?: number
  /** Time until the ranks reach TargetStep at the job's mean pace, if no failure occurs and the job does not wait. Absent if the pace or the target is unknown, and once the job has ended. */
  EstimatedRemainingSeconds?: number
  /** Cost of NodeSeconds at the fleet's price. Absent if the fleet has no price. */
  CostUsd?: number
  /** Effective training time ratio, as in Reliability. Absent before the job has started. */
  EttrRatio?: number
  /** Protection of the job's state, as in DescribeProtection. Only in lists. Absent while no agent holds the job's state: before the first launch, while the job is paused, and after its end. */
  ProtectionState?: 'Protected' | 'Degraded' | 'Unprotected'
  /** Whether memory keeps the job's state after the loss of any one node. Only in lists. Absent whenever ProtectionState is absent. */
  SurvivesNodeLoss?: boolean
  /** AssignedNodeCount of the job, as in TrainingJob. Only in lists. */
  AssignedNodeCount?: number
  /** Number of the job's nodes that are connected and report no fault of their own. Only in lists. */
  HealthyNodeCount?: number
  /** Number of the job's incidents. Only in lists. */
  IncidentCount?: number
  /** Number of incidents from which the job has not recovered yet. Only in lists. */
  OpenIncidentCount?: number
  /** What a person has to do for the job, as in TrainingJob. Only in lists. */
  Duty?: Duty
}

export interface UndeleteCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
}

export interface UndeleteTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
}

export interface UnfreezeFleetRequest {
  FleetName: string
}

export interface UnpinCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** A file, link or other entry of a rank's output directory that is not in S3. */
export interface UnstoredOutput {
  /** Path below the job's outputs: `gen=1/rank=0/latest`. Bytes that are not UTF-8 are escaped. */
  Path: string
  Cause: 'Outside' | 'NotAFile' | 'Name' | 'Unreadable' | 'Refused' | 'NotKept' | 'TooMany'
}

/** Settings of a fleet to change. Omitted fields keep their value. */
export interface UpdateFleetRequest {
  FleetName: string
  /** Fixed number of spares. Setting it removes the SparePolicy, unless the request also sets a SparePolicy. */
  SpareCount?: number
  SparePolicy?: SparePolicy
  /** Number of nodes that the fleet keeps even if no job runs, in addition to spares. */
  MinNodeCount?: number
  /** Price of one instance per hour. The price also applies to the past cost of jobs and incidents that have not ended. Ended jobs and incidents keep their cost. */
  PriceUsdPerHour?: number
  /** Whether to keep failed instances running for inspection instead of terminating them. */
  HoldFailedInstances?: boolean
  /** Limit of nodes per hour that Everstep replaces because it considers them failed. */
  MaxReplacementsPerHour?: number
  /** Name of the IAM role of the fleet's instances. Their agents authenticate with this role through STS. */
  NodeRoleName?: string
  /** Whether administrators may inject faults into this fleet's nodes with StartDrill. */
  AllowDrills?: boolean
  /** Whether submitters may run programs on those of this fleet's nodes that run their ranks (ExecuteCommand). */
  AllowCommands?: boolean
  /** When nodes use TLS between them. A change takes effect with the next launch of a job's ranks. */
  ReplicaEncryption?: 'Auto' | 'On' | 'Off'
}

/** Changes to the fleet's roll. Omitted fields keep their value. */
export interface UpdateFleetRollRequest {
  FleetName: string
  MaxUnavailable?: number
  /** True: the roll replaces or reboots no further nodes, except those that it has begun. False: it continues. */
  Paused?: boolean
}

/** Changes the fields of an incident that only people set. */
export interface UpdateIncidentRequest {
  IncidentId: string
  /** The person who takes care of the incident. An empty text removes the owner. Omitted: the owner stays. */
  Owner?: string
}

/** Fields of a training job to change. Omitted fields keep their value. */
export interface UpdateTrainingJobRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Priority?: number
  Preemptible?: boolean
  RetryStrategy?: RetryStrategy
  StoppingCondition?: StoppingConditionUpdate
  Protection?: ProtectionConfig
  CheckpointConfig?: CheckpointConfigUpdate
  ElasticConfig?: ElasticConfigUpdate
  /** The complete new set of tags. Tags of the job that this set omits are removed. */
  Tags?: Record<string, string>
}

/** The job's newest revision and its changes. */
export interface UpdateTrainingJobResponse {
  TrainingJobName: string
  RunId: string
  Revision: number
  /** The changed fields. Empty if all fields already had the requested values. The update then creates no revision. */
  Changes: FieldChange[]
}

export interface VerifyCheckpointRequest {
  /** Name or RunId of the job. A token without a project needs the RunId if several projects have a job with this name. */
  TrainingJobName: string
  Step: number
  Generation?: number
}

/** Types of the request and the response of each operation. */
export interface Operations {
  AcceptLoss: { request: AcceptLossRequest; response: TrainingJobSummary }
  AcknowledgeIncident: { request: AcknowledgeIncidentRequest; response: Incident }
  BatchGetLossCurves: { request: BatchGetLossCurvesRequest; response: BatchGetLossCurvesResponse }
  CompleteSource: { request: CompleteSourceRequest; response: PutSourceResponse }
  CreateCheckpoint: { request: CreateCheckpointRequest; response: CreateCheckpointResponse }
  CreateFleet: { request: CreateFleetRequest; response: CreateFleetResponse }
  CreateIncidentNote: { request: CreateIncidentNoteRequest; response: Note }
  CreateJoinToken: { request: CreateJoinTokenRequest; response: CreateJoinTokenResponse }
  CreateSource: { request: CreateSourceRequest; response: CreateSourceResponse }
  CreateToken: { request: CreateTokenRequest; response: CreateTokenResponse }
  CreateTrainingJob: { request: CreateTrainingJobRequest; response: CreateTrainingJobResponse }
  CreateTrainingJobNote: { request: CreateTrainingJobNoteRequest; response: Note }
  DeleteCheckpoint: { request: DeleteCheckpointRequest; response: Checkpoint }
  DeleteFleet: { request: DeleteFleetRequest; response: Fleet }
  DeleteProjectQuota: { request: DeleteProjectQuotaRequest; response: ProjectQuota }
  DeleteTrainingJob: { request: DeleteTrainingJobRequest; response: DeleteTrainingJobResponse }
  DescribeAutomation: { request: Record<string, never>; response: Automation }
  DescribeCheckpoint: { request: DescribeCheckpointRequest; response: Checkpoint }
  DescribeDuties: { request: Record<string, never>; response: DescribeDutiesResponse }
  DescribeFleet: { request: DescribeFleetRequest; response: Fleet }
  DescribeIncident: { request: DescribeIncidentRequest; response: Incident }
  DescribeNode: { request: DescribeNodeRequest; response: Node }
  DescribeProtection: { request: DescribeProtectionRequest; response: DescribeProtectionResponse }
  DescribeSource: { request: DescribeSourceRequest; response: PutSourceResponse }
  DescribeTrainingJob: { request: DescribeTrainingJobRequest; response: TrainingJob }
  DrainNode: { request: DrainNodeRequest; response: Node }
  ExecuteCommand: { request: ExecuteCommandRequest; response: ExecuteCommandResponse }
  ExportIncident: { request: ExportIncidentRequest; response: ExportIncidentResponse }
  FollowLogs: { request: FollowLogsRequest; response: FollowLogsResponse }
  GetCallerIdentity: { request: Record<string, never>; response: GetCallerIdentityResponse }
  GetHealth: { request: Record<string, never>; response: HealthResponse }
  GetLogEvents: { request: GetLogEventsRequest; response: GetLogEventsResponse }
  GetMetricData: { request: GetMetricDataRequest; response: GetMetricDataResponse }
  GetOutput: { request: GetOutputRequest; response: GetOutputResponse }
  GetReadiness: { request: Record<string, never>; response: ReadinessResponse }
  GetReport: { request: GetReportRequest; response: Report }
  HandBackTrainingJob: { request: HandBackTrainingJobRequest; response: TrainingJobSummary }
  HoldNode: { request: HoldNodeRequest; response: Node }
  HoldSnapshot: { request: HoldSnapshotRequest; response: HoldSnapshotResponse }
  ListAuditEntries: { request: ListAuditEntriesRequest; response: ListAuditEntriesResponse }
  ListCheckpoints: { request: ListCheckpointsRequest; response: ListCheckpointsResponse }
  ListDrills: { request: ListDrillsRequest; response: ListDrillsResponse }
  ListEvents: { request: ListEventsRequest; response: ListEventsResponse }
  ListFleets: { request: ListFleetsRequest; response: ListFleetsResponse }
  ListIncidents: { request: ListIncidentsRequest; response: ListIncidentsResponse }
  ListMetrics: { request: ListMetricsRequest; response: ListMetricsResponse }
  ListNodes: { request: ListNodesRequest; response: ListNodesResponse }
  ListOutputs: { request: ListOutputsRequest; response: ListOutputsResponse }
  ListProjectQuotas: { request: ListProjectQuotasRequest; response: ListProjectQuotasResponse }
  ListSimilarIncidents: { request: ListSimilarIncidentsRequest; response: ListSimilarIncidentsResponse }
  ListTimeSpans: { request: ListTimeSpansRequest; response: ListTimeSpansResponse }
  ListTokens: { request: ListTokensRequest; response: ListTokensResponse }
  ListTrainingJobNodes: { request: ListTrainingJobNodesRequest; response: ListTrainingJobNodesResponse }
  ListTrainingJobNotes: { request: ListTrainingJobNotesRequest; response: ListTrainingJobNotesResponse }
  ListTrainingJobRevisions: { request: ListTrainingJobRevisionsRequest; response: ListTrainingJobRevisionsResponse }
  ListTrainingJobs: { request: ListTrainingJobsRequest; response: ListTrainingJobsResponse }
  PauseAutomation: { request: PauseAutomationRequest; response: Automation }
  PauseTrainingJob: { request: PauseTrainingJobRequest; response: TrainingJobSummary }
  PinCheckpoint: { request: PinCheckpointRequest; response: Checkpoint }
  PutProjectQuota: { request: PutProjectQuotaRequest; response: ProjectQuota }
  PutSource: { request: PutSourceRequest; response: PutSourceResponse }
  ReadSnapshot: { request: ReadSnapshotRequest; response: ReadSnapshotResponse }
  RebootNode: { request: RebootNodeRequest; response: Node }
  RehearseTrainingJob: { request: RehearseTrainingJobRequest; response: TrainingJobSummary }
  ReleaseNode: { request: ReleaseNodeRequest; response: Node }
  ReleaseSnapshot: { request: ReleaseSnapshotRequest; response: ReleaseSnapshotResponse }
  ReplaceNode: { request: ReplaceNodeRequest; response: Node }
  ResetNodeSession: { request: ResetNodeSessionRequest; response: Node }
  ResumeAutomation: { request: Record<string, never>; response: Automation }
  ResumeTrainingJob: { request: ResumeTrainingJobRequest; response: TrainingJobSummary }
  RevokeToken: { request: RevokeTokenRequest; response: Token }
  StartDrill: { request: StartDrillRequest; response: Drill }
  StartFleetRoll: { request: StartFleetRollRequest; response: Fleet }
  StopFleetRoll: { request: StopFleetRollRequest; response: Fleet }
  StopTrainingJob: { request: StopTrainingJobRequest; response: TrainingJobSummary }
  TakeOverTrainingJob: { request: TakeOverTrainingJobRequest; response: TrainingJobSummary }
  UndeleteCheckpoint: { request: UndeleteCheckpointRequest; response: Checkpoint }
  UndeleteTrainingJob: { request: UndeleteTrainingJobRequest; response: TrainingJobSummary }
  UnfreezeFleet: { request: UnfreezeFleetRequest; response: Fleet }
  UnpinCheckpoint: { request: UnpinCheckpointRequest; response: Checkpoint }
  UpdateFleet: { request: UpdateFleetRequest; response: Fleet }
  UpdateFleetRoll: { request: UpdateFleetRollRequest; response: Fleet }
  UpdateIncident: { request: UpdateIncidentRequest; response: Incident }
  UpdateTrainingJob: { request: UpdateTrainingJobRequest; response: UpdateTrainingJobResponse }
  VerifyCheckpoint: { request: VerifyCheckpointRequest; response: Checkpoint }
}

/** HTTP method, path, query parameters and least role of each operation. Other fields are in the body. */
export const operations = {
  AcceptLoss: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/accept-loss', query: [], role: 'submitter' },
  AcknowledgeIncident: { method: 'POST', path: '/v1/incidents/{IncidentId}/acknowledge', query: [], role: 'submitter' },
  BatchGetLossCurves: { method: 'GET', path: '/v1/loss-curves', query: ['RunIds', 'MaxPoints'], role: 'viewer' },
  CompleteSource: { method: 'POST', path: '/v1/sources/{SourceId}/completion', query: [], role: 'submitter' },
  CreateCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints', query: [], role: 'submitter' },
  CreateFleet: { method: 'POST', path: '/v1/fleets', query: [], role: 'admin' },
  CreateIncidentNote: { method: 'POST', path: '/v1/incidents/{IncidentId}/notes', query: [], role: 'submitter' },
  CreateJoinToken: { method: 'POST', path: '/v1/join-tokens', query: [], role: 'admin' },
  CreateSource: { method: 'POST', path: '/v1/sources', query: [], role: 'submitter' },
  CreateToken: { method: 'POST', path: '/v1/tokens', query: [], role: 'admin' },
  CreateTrainingJob: { method: 'POST', path: '/v1/training-jobs', query: [], role: 'submitter' },
  CreateTrainingJobNote: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/notes', query: [], role: 'submitter' },
  DeleteCheckpoint: { method: 'DELETE', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}', query: ['Generation', 'SkipTrash'], role: 'submitter' },
  DeleteFleet: { method: 'DELETE', path: '/v1/fleets/{FleetName}', query: [], role: 'admin' },
  DeleteProjectQuota: { method: 'DELETE', path: '/v1/quotas/{Project}', query: [], role: 'admin' },
  DeleteTrainingJob: { method: 'DELETE', path: '/v1/training-jobs/{TrainingJobName}', query: ['DeleteObjects', 'SkipTrash', 'DryRun'], role: 'submitter' },
  DescribeAutomation: { method: 'GET', path: '/v1/automation', query: [], role: 'viewer' },
  DescribeCheckpoint: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}', query: ['Generation'], role: 'viewer' },
  DescribeDuties: { method: 'GET', path: '/v1/duties', query: [], role: 'viewer' },
  DescribeFleet: { method: 'GET', path: '/v1/fleets/{FleetName}', query: [], role: 'viewer' },
  DescribeIncident: { method: 'GET', path: '/v1/incidents/{IncidentId}', query: [], role: 'viewer' },
  DescribeNode: { method: 'GET', path: '/v1/nodes/{NodeId}', query: [], role: 'viewer' },
  DescribeProtection: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/protection', query: [], role: 'viewer' },
  DescribeSource: { method: 'GET', path: '/v1/sources/{SourceId}', query: [], role: 'viewer' },
  DescribeTrainingJob: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}', query: [], role: 'viewer' },
  DrainNode: { method: 'POST', path: '/v1/nodes/{NodeId}/drain', query: [], role: 'admin' },
  ExecuteCommand: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/ranks/{Rank}/commands', query: [], role: 'submitter' },
  ExportIncident: { method: 'GET', path: '/v1/incidents/{IncidentId}/export', query: ['Format'], role: 'viewer' },
  FollowLogs: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs/follow', query: ['Rank', 'Generation', 'StartTime', 'FilterPattern', 'StartFromHead', 'NextToken'], role: 'viewer' },
  GetCallerIdentity: { method: 'GET', path: '/v1/caller-identity', query: [], role: 'viewer' },
  GetHealth: { method: 'GET', path: '/v1/health', query: [], role: 'none' },
  GetLogEvents: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/logs/events', query: ['Rank', 'Generation', 'StartTime', 'EndTime', 'FilterPattern', 'StartFromHead', 'Limit', 'NextToken'], role: 'viewer' },
  GetMetricData: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/metric-data', query: ['MetricName', 'FirstStep', 'LastStep', 'StartTime', 'EndTime', 'ResolutionInSteps', 'ResolutionInSeconds', 'MaxPoints', 'Series', 'ChangesSince'], role: 'viewer' },
  GetOutput: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/outputs/content', query: ['Key'], role: 'viewer' },
  GetReadiness: { method: 'GET', path: '/v1/ready', query: [], role: 'none' },
  GetReport: { method: 'GET', path: '/v1/reports', query: ['StartTime', 'EndTime', 'Period', 'Project', 'FleetName', 'MaxJobs'], role: 'viewer' },
  HandBackTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/hand-back', query: [], role: 'submitter' },
  HoldNode: { method: 'POST', path: '/v1/nodes/{NodeId}/hold', query: [], role: 'admin' },
  HoldSnapshot: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/snapshots', query: [], role: 'submitter' },
  ListAuditEntries: { method: 'GET', path: '/v1/audit-entries', query: ['Operation', 'TokenId', 'Project', 'TimeAfter', 'TimeBefore', 'MaxResults', 'NextToken'], role: 'admin' },
  ListCheckpoints: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/checkpoints', query: ['MinStep', 'Trashed', 'MaxResults', 'NextToken'], role: 'viewer' },
  ListDrills: { method: 'GET', path: '/v1/drills', query: ['TrainingJobName', 'MaxResults', 'NextToken'], role: 'viewer' },
  ListEvents: { method: 'GET', path: '/v1/events', query: ['TrainingJobName', 'FleetName', 'AfterEventId', 'TimeAfter', 'TimeBefore', 'MaxResults', 'NextToken', 'SortOrder'], role: 'viewer' },
  ListFleets: { method: 'GET', path: '/v1/fleets', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListIncidents: { method: 'GET', path: '/v1/incidents', query: ['TrainingJobName', 'StatusEquals', 'MaxResults', 'NextToken', 'SortOrder'], role: 'viewer' },
  ListMetrics: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/metrics', query: [], role: 'viewer' },
  ListNodes: { method: 'GET', path: '/v1/nodes', query: ['FleetName', 'IncludeEnded', 'MaxResults', 'NextToken'], role: 'viewer' },
  ListOutputs: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/outputs', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListProjectQuotas: { method: 'GET', path: '/v1/quotas', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListSimilarIncidents: { method: 'GET', path: '/v1/incidents/{IncidentId}/similar', query: ['MaxResults'], role: 'viewer' },
  ListTimeSpans: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/time-spans', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListTokens: { method: 'GET', path: '/v1/tokens', query: ['Project', 'IncludeEnded', 'MaxResults', 'NextToken'], role: 'admin' },
  ListTrainingJobNodes: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/nodes', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListTrainingJobNotes: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/notes', query: [], role: 'viewer' },
  ListTrainingJobRevisions: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/revisions', query: ['MaxResults', 'NextToken'], role: 'viewer' },
  ListTrainingJobs: { method: 'GET', path: '/v1/training-jobs', query: ['MaxResults', 'NextToken', 'StatusEquals', 'NameContains', 'FleetName', 'Project', 'CreationTimeAfter', 'CreationTimeBefore', 'LastModifiedTimeAfter', 'LastModifiedTimeBefore', 'TagKey', 'TagValue', 'SortBy', 'SortOrder', 'ChangesSince'], role: 'viewer' },
  PauseAutomation: { method: 'POST', path: '/v1/automation/pause', query: [], role: 'admin' },
  PauseTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/pause', query: [], role: 'submitter' },
  PinCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/pin', query: ['Generation'], role: 'submitter' },
  PutProjectQuota: { method: 'PUT', path: '/v1/quotas/{Project}', query: [], role: 'admin' },
  PutSource: { method: 'PUT', path: '/v1/sources/{SourceId}', query: [], role: 'submitter' },
  ReadSnapshot: { method: 'GET', path: '/v1/training-jobs/{TrainingJobName}/snapshots/{SnapshotId}/shards/{Rank}', query: ['Begin', 'End'], role: 'submitter' },
  RebootNode: { method: 'POST', path: '/v1/nodes/{NodeId}/reboot', query: [], role: 'admin' },
  RehearseTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/rehearse', query: [], role: 'submitter' },
  ReleaseNode: { method: 'POST', path: '/v1/nodes/{NodeId}/release', query: [], role: 'admin' },
  ReleaseSnapshot: { method: 'DELETE', path: '/v1/training-jobs/{TrainingJobName}/snapshots/{SnapshotId}', query: [], role: 'submitter' },
  ReplaceNode: { method: 'POST', path: '/v1/nodes/{NodeId}/replace', query: [], role: 'admin' },
  ResetNodeSession: { method: 'POST', path: '/v1/nodes/{NodeId}/reset-session', query: [], role: 'admin' },
  ResumeAutomation: { method: 'POST', path: '/v1/automation/resume', query: [], role: 'admin' },
  ResumeTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/resume', query: [], role: 'submitter' },
  RevokeToken: { method: 'POST', path: '/v1/tokens/{TokenId}/revoke', query: [], role: 'admin' },
  StartDrill: { method: 'POST', path: '/v1/drills', query: [], role: 'admin' },
  StartFleetRoll: { method: 'POST', path: '/v1/fleets/{FleetName}/roll', query: [], role: 'admin' },
  StopFleetRoll: { method: 'POST', path: '/v1/fleets/{FleetName}/roll/stop', query: [], role: 'admin' },
  StopTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/stop', query: [], role: 'submitter' },
  TakeOverTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/take-over', query: [], role: 'submitter' },
  UndeleteCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/undelete', query: ['Generation'], role: 'submitter' },
  UndeleteTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/undelete', query: [], role: 'submitter' },
  UnfreezeFleet: { method: 'POST', path: '/v1/fleets/{FleetName}/unfreeze', query: [], role: 'admin' },
  UnpinCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/unpin', query: ['Generation'], role: 'submitter' },
  UpdateFleet: { method: 'POST', path: '/v1/fleets/{FleetName}', query: [], role: 'admin' },
  UpdateFleetRoll: { method: 'POST', path: '/v1/fleets/{FleetName}/roll/update', query: [], role: 'admin' },
  UpdateIncident: { method: 'POST', path: '/v1/incidents/{IncidentId}', query: [], role: 'submitter' },
  UpdateTrainingJob: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}', query: [], role: 'submitter' },
  VerifyCheckpoint: { method: 'POST', path: '/v1/training-jobs/{TrainingJobName}/checkpoints/{Step}/verify', query: ['Generation'], role: 'submitter' },
} as const satisfies Record<keyof Operations, { method: string; path: string; query: readonly string[]; role: string }>

/** Fields of a job that are also fields of the request for one. */
export const jobSettings = ['TrainingJobName', 'FleetName', 'AlternativeFleetNames', 'Source', 'EntryPoint', 'Module', 'Requirements', 'HyperParameters', 'Arguments', 'Environment', 'Secrets', 'RoleArn', 'NodeCount', 'RanksPerNode', 'Protection', 'CheckpointConfig', 'InitialCheckpoint', 'InputDataConfig', 'OutputDataConfig', 'StoppingCondition', 'RetryStrategy', 'ElasticConfig', 'Rehearsal', 'Priority', 'Preemptible', 'Project', 'Tags'] as const satisfies readonly (keyof TrainingJob)[]

/** What happened, by the cause of an incident. A sentence without its full stop. */
export const causeTitles = {
  notice: 'AWS announced the end of a node',
  requested: 'A person requested a node',
  grown: 'The job stopped to continue on more nodes',
  returned: 'The job stopped to return nodes to its fleet',
  pause_failed: 'The job could not be paused',
  drill: 'A drill caused a fault',
  load_failed: 'A shard could not be loaded',
  rank_exit: 'A training process failed',
  hang: 'The ranks hung',
  agent_lost: 'An agent lost its state of the job',
  node_unreachable: 'A node became unreachable',
  node_fault: 'A node reported a fault',
  instance_terminated: 'An instance was terminated',
  shrunk: 'Lost nodes were not replaced',
  group_lost: 'All nodes that held a shard were lost',
} as const satisfies Record<Incident['Cause'], string>

/** Sources from which ranks restore their state. */
export const restoreSources = {
  local: 'the memory of its own nodes',
  peer: 'the memory of other nodes',
  parity: 'parity in the memory of other nodes',
  s3: 'a checkpoint in S3',
} as const satisfies Record<NonNullable<Incident['RestoreSource']>, string>
