"""Messages between an agent and the control plane, over one websocket that the agent opens.

Messages describe states, so the next message makes up for a lost message. The agent sends `AgentReport`, its whole
state, on every change and at least every `lease_seconds / 3`. Each report replaces all earlier reports. The control
plane's commands are idempotent, and it repeats a command until a report shows the effect. Only logged values are
acknowledged (`MetricsStored`), because later reports do not repeat them.

In the diagram, g is a generation, k a step and n a number.

    agent                                     control plane
    Hello (join token or session token in the HTTP request's Authorization)
                                  ◀─────      AgentWelcome
                                  ◀─────      PeerCertificate         now, and before it expires
    AgentReport …                 ─────▶
                                  ◀─────      Prepare(g)              until report.job.generation = g
                                  ◀─────      Load(plan, key)         until phase is loading or later
                                  ◀─────      Start(g)                when every member reports loaded
                                  ◀─────      StopTraining(g)         to the coordinator's agent
                                  ◀─────      HaltRanks(g)            when a rank of the job has died
                                  ◀─────      TakeCheckpoint(g, k)    to the coordinator, until a step ≥ k is stored
                                  ◀─────      Rehearse(g, n, steps)   to the coordinator, until it has taken the order
                                  ◀─────      TakeStacks(g, n)        until the report contains stacks with number n
                                  ◀─────      Release(run)            when the job has ended or released this node
                                  ◀─────      KeepEvidence(place)     until report.evidence_key = place.key
                                  ◀─────      RunBurnIn(n, level)     to a spare, until report.burn_in.number = n
                                  ◀─────      SendLines(run)          every few seconds while a client follows the logs
    LogLines …                    ─────▶      as the ranks print. Lost lines are in the object store
                                  ◀─────      RunCommand(id, argv)    once: run a user's command on a rank's node
    CommandEnded(id)              ─────▶      once, and again when a RunCommand repeats the id

An agent *promises* to join a generation: it ends all older ranks and records the generation's number on disk.

Invariant: an agent ignores commands of generations below the newest promised generation.

The module has more than 500 lines. It is not divided, because the messages of both directions share types: reports
contain the answers to commands.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.fixed_length import Digest, Key, PublicKey, StateDigest
from everstep.protocol.ids import NODE_ID_PATTERN, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.limits import (
    VISIBLE,
    Address,
    Count,
    ExitCode,
    FewItems,
    HexDigest,
    HolderItems,
    Items,
    LongText,
    MetricValue,
    Name,
    Path,
    Percent,
    Port,
    RankItems,
    Seconds,
    Text,
    UnixSeconds,
    require_short,
)
from everstep.protocol.log_chunks import LogLine
from everstep.protocol.manifest import SharedObject
from everstep.protocol.options import KeptOptions
from everstep.protocol.plan import (
    GenerationPlan,
    ObjectReference,
    SlotRecord,
    SourceArchive,
    SourceKind,
    Timeouts,
)
from everstep.protocol.rank_messages import MAX_METRIC_NAME_LENGTH, Phase, StopState, UnkeptCause
from everstep.protocol.rehearsals import Rehearsed

NOT_YOURS = 4401
"""Websocket close code: the session token belongs to another node, or was revoked."""
ALREADY_JOINED = 4410
"""Websocket close code: the node has already joined, so a join token no longer suffices.

The agent must present the node's session token.
"""
SEND_LINES_SECONDS = 10.0
MAX_COMMAND_OUTPUT_BYTES = 256 * 1024
"""Maximum bytes of stdout, and of stderr, that `CommandEnded` carries."""
CommandOutput: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_COMMAND_OUTPUT_BYTES)]
HOLD_SECONDS = 120.0
"""Seconds after the last request of an export until a node releases the snapshots that it keeps for the export."""
ANOTHER_EXPORT = "another export holds a snapshot"
"""Refusal of `HoldSnapshot` by a node that keeps snapshots for another export.

A job has at most one export from memory.
"""
MAX_SNAPSHOT_READ_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a snapshot in one message. Larger messages would delay the agent's reports."""


class MemberPhase(StrEnum):
    """The phases of a node in one generation of a job.

    PROMISED: The promise is on disk, the old ranks have ended, and the reported list of sealed slots does not
        change any more. `Load` ends this phase.
    LOADING: The agent unpacks the source archive, starts the ranks, and fetches and verifies their shards.
    LOADED: Every shard is verified. `Start` ends this phase.
    LOAD_FAILED: A part of the loading failed, for example because no copy of a shard passed verification.
    RUNNING: The ranks may train. The phase ends when all ranks have exited.
    EXITED: No rank is alive. The agent has uploaded the outputs and logs that the object store accepted.
    """

    PROMISED = "promised"
    LOADING = "loading"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    RUNNING = "running"
    EXITED = "exited"


class ExitClass(StrEnum):
    """The cause of a rank's exit, as far as the agent can determine it.

    - SUCCESS: exit code 0.
    - ERROR: any other exit code, for example after an exception in the script.
    - KILLED: a signal from outside the program.
    - CRASHED: a signal that the program caused (SEGV, BUS, ABRT, ILL, FPE).
    - OUT_OF_MEMORY: the kernel killed the rank to free memory, or the rank's last exception reports a lack of memory.
      `RankExit.memory` holds the evidence.
    - HALTED: the agent stopped the rank because its generation ended.
    """

    SUCCESS = "success"
    ERROR = "error"
    KILLED = "killed"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HALTED = "halted"


class MemoryKind(StrEnum):
    """The memory that a rank exhausted: HOST (memory of the node or of its cgroup) or GPU (memory of a device)."""

    HOST = "host"
    GPU = "gpu"


class MemorySource(StrEnum):
    """The kind of evidence that a rank ran out of memory.

    - KERNEL_LOG: the kernel logged that it killed the rank or its DataLoader worker.
    - CGROUP: the kill counter of the rank's memory cgroup rose.
    - NODE: only the node's kill counter rose, so the kernel may have killed another process.
    - EXCEPTION: the rank's last exception reports a lack of memory.
    """

    KERNEL_LOG = "kernel_log"
    CGROUP = "cgroup"
    NODE = "node"
    EXCEPTION = "exception"


class MemoryEnd(Message, frozen=True):
    """The evidence that a rank ran out of memory, with the last measurements before the rank ended.

    Sizes are in bytes. None means that the agent did not measure the value.
    """

    source: MemorySource
    kind: MemoryKind
    rank_bytes: Count | None = None
    """Resident memory of the process that ended: the rank, or the DataLoader worker that the kernel killed."""
    used_bytes: Count | None = None
    """Memory in use on the node, or in its cgroup if the cgroup has a limit."""
    total_bytes: Count | None = None
    """Size of the memory of which `used_bytes` is in use: the node's memory, or the limit of its cgroup."""
    words: Text = ""
    """The line of the rank's stderr with the rank's last exception.

    If the kernel killed a DataLoader worker of the rank, the line names the worker. Empty if the kernel killed the rank
    itself.
    """


class RankExit(Message, frozen=True):
    """The exit of a rank, as observed by the shim (the process of the node that is the parent of all ranks)."""

    exit_class: ExitClass
    code: ExitCode
    """The rank's exit code, or the negated signal number."""
    at_seconds: UnixSeconds
    """Unix time of the exit."""
    boundary: Step
    """Number of steps that the rank had finished when it last reported to its agent; -1 if it had reported none."""
    last_lines: LongText = ""
    """The end of the rank's stderr, at most 4 KiB. Without a traceback, the end of its stdout precedes it."""
    memory: MemoryEnd | None = None
    """Evidence of exhausted memory. Set only if `exit_class` is OUT_OF_MEMORY."""


FIRST_STEP_PHASE = "first_step"
"""Name under which agents report the phase TRAIN until the rank has finished its first step after a start.

The job compiles kernels and fills caches in this time, so its duration is recorded separately.
"""
if TYPE_CHECKING:
    PhaseName = str
else:
    PhaseName = Literal[("", FIRST_STEP_PHASE, *(phase.name.lower() for phase in Phase))]
"""Name of a rank's phase in a report; empty if the agent does not know the phase."""


class RankStatus(Message, frozen=True):
    """The progress of one rank, and its exit if the rank has ended."""

    rank: Rank
    boundary: Step
    """Number of optimizer steps that the rank has finished and reported; -1 before the rank has restored its state."""
    exit: RankExit | None = None
    phase: PhaseName = ""
    """The phase that the rank reported last.

    One of `start`, `restore`, `first_step`, `train`, `eval`, `checkpoint`, `wait`, `close` and `rehearse`.
    """
    still_seconds: Seconds = 0.0
    """Seconds since the rank last finished a step or changed its phase."""
    limit_seconds: Seconds = 0.0
    """Time limit that the script has declared for the phase, in seconds; 0 if it has declared none."""
    passed_at_seconds: UnixSeconds = 0.0
    """Unix time at which the rank finished the step `boundary`, as recorded by the rank; 0 if it is not recorded."""
    first_passed_at_seconds: UnixSeconds = 0.0
    """Unix time at which the rank finished its first step in this generation; 0 if it has not finished one."""
    rehearsed: Rehearsed | None = None
    """The rank's newest rehearsal in this generation."""
    resume_revision: Count = 0
    """How often the rank has changed so that its resume needs another proof (`RankHalf.resume_revision`)."""
    kept_options: KeptOptions = ()
    """Options that the script sets, and that the restored step of this generation replaced."""


class RankStacks(Message, frozen=True):
    """The Python stacks of one rank, read by its agent after the command `TakeStacks`."""

    rank: Rank
    number: Count
    """Number of the `TakeStacks` command that these stacks answer."""
    text: LongText
    """Python stacks, the main thread first, innermost frame first. At most 8 KiB.

    Empty if the agent could not read the stacks.
    """
    same_seconds: Seconds
    """Seconds since the agent first read these same stacks; 0 at the first reading."""
    cpu_seconds: Seconds
    """CPU time that the rank and its child processes used during `same_seconds`."""
    is_stopped: bool = False
    """Whether a signal has stopped the process. A stopped process runs again only after SIGCONT."""
    gpu_percent: Percent | None = None
    """Utilization of the rank's GPU in percent; None if the agent does not measure it."""
    error: Text = ""
    """Reason why the agent could not read the stacks; empty if it has read them."""


MAX_STATES: Final = 32
StateItems: Final = msgspec.Meta(max_length=MAX_STATES)


class ShardProtection(Message, frozen=True):
    """The nodes that hold one rank's shard, as observed by the agent of the rank's node (the owner).

    The holders *in view* are the holders that respond to the owner. The owner votes for a step only after all holders
    in view, and all holders that are about to return to the view, have verified it.
    """

    rank: Rank
    holders: Annotated[tuple[NodeId, ...], HolderItems]
    in_view: Annotated[tuple[NodeId, ...], HolderItems]
    committed: Step
    payload_bytes: Count
    reason: Text = ""
    """Reason why the shard is not fully protected; empty if every holder has the shard of recent steps.

    Possible reasons: a holder is out of view, slow or hard to reach, or a holder or agent refused a snapshot.
    """
    verified: Annotated[tuple[tuple[Step, UnixSeconds], ...], HolderItems] = ()
    """Newest verified step of each holder and the time of its verification, in the order of `holders`.

    The step is -1 if the owner has seen no verified step of the holder. The time is Unix time in seconds.
    """
    unkept: UnkeptCause | None = None
    """Why the owner has abandoned the newest proposed step; None if it has abandoned no step since the last commit."""
    lasts: bool = False
    """Whether this cause also prevents the next steps, unless the script or the node's memory changes."""
    states: Annotated[tuple[tuple[Step, StateDigest], ...], StateItems] = ()
    """Digests of the newest steps that the owner has sealed in this generation, oldest first; at most
    `state_count(world_size)`. Empty from an agent that computes none."""


def state_count(world_size: int) -> int:
    """Return the number of sealed steps per rank of which agents report digests, and the control plane keeps them.

    A state that differs stays different, so the newest two steps suffice for a job of many ranks.
    """
    return max(2, min(MAX_STATES, 2048 // world_size))


class CheckpointPace(Message, frozen=True):
    """The step and the time at which the next checkpoint in S3 is due.

    It also contains the measurements from which the coordinator computes an automatic interval.
    """

    due_step: Step = Step(-1)
    """The first commit of this or a later step becomes a checkpoint. -1 if the job takes no checkpoints by number of
    steps.
    """
    due_at_seconds: UnixSeconds = 0.0
    """Unix time after which the next commit becomes a checkpoint; 0 if the job has no interval."""
    interval_seconds: Seconds = 0.0
    """Current interval between checkpoints in seconds; 0 if the job has no interval, or if no upload is measured yet.
    """
    upload_seconds: Seconds = 0.0
    """Duration in seconds of the newest complete upload of all shards; 0 if no upload is complete."""
    cost_seconds: Seconds = 0.0
    """Seconds by which the newest upload delayed training. At most the duration of the upload."""


class RoundStatus(Message, frozen=True):
    """The state of a generation's commit rounds. Only the agent that is the coordinator reports this state.

    In a round, the agents of all ranks vote on whether a step is committed.
    """

    committed: Step
    proposed: Step
    boundary: Step
    """The highest number of finished steps that any rank has reported."""
    committed_at_seconds: UnixSeconds
    """Unix time of the last commit; 0 before the first commit."""
    stopped: bool = False
    """True if all ranks have stopped training at the step on which they agreed."""
    finished: bool = False
    checkpoints: CheckpointPace = CheckpointPace()
    rehearsal_number: Count = 0
    """Number of the newest command `Rehearse` that the coordinator has taken; 0 if it has taken none."""
    rehearsal_state: StopState = StopState.NONE


class UploadedShard(Message, frozen=True):
    """A shard of a committed step that is completely uploaded to S3."""

    rank: Rank
    step: Step
    origin_generation: Generation
    object: ObjectReference
    object_bytes: Count
    etag: Path
    payload_bytes: Count
    payload_digest: Digest
    layout_hash: Digest
    upload_seconds: Seconds = 0.0
    """Duration of the upload in seconds.

    The control plane expects about the same duration for the next upload.
    """
    sha256: HexDigest = ""
    """SHA-256 over the digests of the object's parts, hexadecimal, as in `ManifestShard.sha256`."""
    part_bytes: Count = 0
    """Size of the parts that `sha256` covers, as in `ManifestShard.part_bytes`."""
    frozen: Annotated[tuple[SharedObject, ...], Items] = ()
    """S3 objects with tensors of the shard that training does not change. Other shards may refer to these objects.

    S3 has stored all of them completely.
    """
    replicated: Annotated[tuple[SharedObject, ...], Items] = ()
    """S3 objects with tensors that are equal on several ranks at this step. S3 has stored all of them completely."""
    lists: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Digest of the lists `frozen` and `replicated`. The agent sets it only in messages to the control plane.

    If the last report on the connection contained the same lists, the agent sends only their digest and leaves the
    lists empty (`everstep.protocol.shared_lists`).
    """


class RunningUpload(Message, frozen=True):
    """The progress of the upload of one shard to S3."""

    rank: Rank
    step: Step
    object_name: Path
    """The object, as s3://bucket/key; empty until the first attempt begins."""
    stored_bytes: Count
    """Number of bytes that S3 has stored in this attempt."""
    object_bytes: Count
    """Size of the object in bytes. Until the first attempt begins, the size of the shard in memory."""


class MetricPoint(Message, frozen=True):
    """Metric values of one step, logged by rank 0 or measured by the agent of its node.

    After a restore, training repeats steps after the restored step. The new values of these steps replace the old
    values.
    """

    generation: Generation
    step: Step
    values: Annotated[dict[str, MetricValue], Items]
    at_seconds: UnixSeconds
    """Unix time at which the values were logged or measured."""


class MetricBatch(Message, frozen=True):
    """Metric values of one run that the control plane has not yet confirmed as stored.

    An agent numbers the values of its ranks consecutively, from 0, and never uses the number of a lost value again.
    """

    run: RunId
    first_number: Count
    points: Annotated[tuple[MetricPoint, ...], Items]


DEVICE_SILENT_SECONDS = 15.0
"""Seconds without a response after which a GPU driver or disk counts as faulty.

NVML answers within milliseconds and a disk within tens of milliseconds. A GPU reset by its driver takes seconds.
"""


class FaultCode(StrEnum):
    """Codes of a `NodeFault` that several modules use.

    Single modules report further codes, and a newer agent may send codes that this version does not contain.

    Faults of a job's member:

    - SOURCE_MISMATCH: no source delivered a shard that matches the plan's digest.
    - SOURCE_UNAVAILABLE: no source delivered the shard, and at least one source was unreachable.
    - MEMORY_FULL: the node has too little memory for a shard or a rank's pages.
    - ROLE_UNAVAILABLE: the agent could not get credentials of the job's IAM role.
    - RANKS_NOT_GONE: processes of an older generation do not exit.
    - TASKS_FULL: a rank ended because the job's processes and threads reached the limit of one node.
    - COORDINATOR_UNREACHABLE: the node cannot reach the coordinator, so it cannot vote on commits.

    Faults of a node's devices (docs/reference/metrics.md#node-faults):

    - GPU_XID, GPU_ECC, GPU_LOST, GPU_THROTTLED, GPU_SILENT: a GPU or its driver.
    - NIC_DOWN, NIC_ERRORS: a network card.
    - DISK_FULL, DISK_READ_ONLY, DISK_SILENT: a volume.
    - MEMORY_LOW, MEMORY_KILLED: the node's memory.

    Faults that the control plane derives from the results of a burn-in:

    - BURN_IN_FAILED: a test failed on the node.
    - NODE_SLOW: the node is much slower in a test than the other nodes of its fleet.
    """

    SOURCE_MISMATCH = "source_mismatch"
    SOURCE_UNAVAILABLE = "source_unavailable"
    MEMORY_FULL = "memory_full"
    ROLE_UNAVAILABLE = "role_unavailable"
    RANKS_NOT_GONE = "ranks_not_gone"
    TASKS_FULL = "tasks_full"
    COORDINATOR_UNREACHABLE = "coordinator_unreachable"
    GPU_XID = "gpu_xid"
    GPU_ECC = "gpu_ecc"
    GPU_LOST = "gpu_lost"
    GPU_THROTTLED = "gpu_throttled"
    GPU_SILENT = "gpu_silent"
    NIC_DOWN = "nic_down"
    NIC_ERRORS = "nic_errors"
    DISK_FULL = "disk_full"
    DISK_READ_ONLY = "disk_read_only"
    DISK_SILENT = "disk_silent"
    MEMORY_LOW = "memory_low"
    MEMORY_KILLED = "memory_killed"
    BURN_IN_FAILED = "burn_in_failed"
    NODE_SLOW = "node_slow"


class Obstacle(StrEnum):
    """The reason why a read of S3 or of another service of AWS came to no result.

    - DENIED: the credentials do not permit the read, have expired, or the KMS key is disabled.
    - NO_CREDENTIALS: the server has no credentials.
    - THROTTLED: AWS throttles the caller.
    - NO_ANSWER: a timeout, a lost connection, or a status 5xx.
    - GARBLED: an answer that does not parse, ends too early, or contradicts another answer.
    - NO_BUCKET: the bucket does not exist, or holds no object of the run.
    - REFUSED: AWS rejected the request for another reason.
    """

    DENIED = "Denied"
    NO_CREDENTIALS = "NoCredentials"
    THROTTLED = "Throttled"
    NO_ANSWER = "NoAnswer"
    GARBLED = "Garbled"
    NO_BUCKET = "NoBucket"
    REFUSED = "Refused"


class OutputCause(StrEnum):
    """The reason why an output file of a rank is not in S3.

    OUTSIDE: It is a link that leads out of the output folder.
    NOT_A_FILE: It is a broken link, or neither a file nor a folder.
    NAME: Its name is not UTF-8, or an output of the rank has the same path.
    UNREADABLE: The agent cannot read it, or another user owns it.
    REFUSED: S3 refused the upload, or did not answer.
    NOT_KEPT: The script wrote it into the source directory, and no pattern of the job keeps it.
    TOO_MANY: The folder has more entries than a node stores. Some of its entries are not in S3.
    """

    OUTSIDE = "Outside"
    NOT_A_FILE = "NotAFile"
    NAME = "Name"
    UNREADABLE = "Unreadable"
    REFUSED = "Refused"
    NOT_KEPT = "NotKept"
    TOO_MANY = "TooMany"


class OutputFailure(Message, frozen=True, tag="UnstoredOutput"):
    """An output file of a rank that is not in S3."""

    rank: Rank
    path: Path
    """Path in the rank's output folder or, for NOT_KEPT, in the source directory. Without bytes that are not UTF-8.

    A path with a slash at its end names a folder of such files.
    """
    cause: OutputCause
    generation: Generation | None = None
    """The generation of the rank. None from older agents: the generation of the report."""
    omitted_count: Count = 0
    """Number of further unstored outputs of the node that the agent does not name. Only in the node's last entry."""


class NodeFault(Message, frozen=True):
    """A fault that an agent reports about its own node or its job, with a code that programs can read."""

    code: Name
    """A `FaultCode`, or a code that only one module reports.

    Examples of codes of one module: `protection_does_not_fit`, `source_refused`, `cannot_resume`, `upload_failed`,
    `archive_unavailable`, `input_unavailable`, `secret_unavailable`, `requirements_failed`, `agent_error`.
    """
    message: Text
    """One sentence for the user, with the measured values."""
    is_permanent: bool
    """True if a new launch of the ranks (a generation) cannot repair the fault."""
    device: Path = ""
    """The faulty device: `gpu 3`, `eth0`, `/var/lib/everstep`.

    Empty if the fault concerns the whole node or the job.
    """
    xid: Count | None = None
    """Number of NVIDIA's Xid error; set only for `gpu_xid`."""
    obstacle: Obstacle | None = None
    """Why S3, IAM, KMS or Secrets Manager did not deliver an input of a load. The same load may succeed later.

    None if the fault has another cause, and from older agents.
    """
    output: OutputFailure | None = None
    """The output file that is not in S3; set only for `output_missing`."""
    shard: Rank | None = None
    """Rank of the earlier launch whose shard the node could not fetch.

    Set only while a job restores a step that a different number of ranks made.
    """


class NoticeKind(StrEnum):
    """The kinds of events that AWS announces for an instance.

    - SPOT_INTERRUPTION: AWS takes the instance back in two minutes.
    - REBALANCE: the instance has a raised risk of interruption.
    - MAINTENANCE: AWS has scheduled a reboot, a retirement or a stop.
    - CAPACITY_BLOCK_END: the instance's capacity reservation ends.
    - TERMINATING: the Auto Scaling group terminates the instance. A lifecycle hook delays the termination until the
      hook is completed.
    """

    SPOT_INTERRUPTION = "spot_interruption"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    CAPACITY_BLOCK_END = "capacity_block_end"
    TERMINATING = "terminating"


class NodeNotice(Message, frozen=True):
    """An event that AWS announced for this node's instance, read from the instance metadata."""

    kind: NoticeKind
    message: Text
    """AWS's text of the announcement."""
    ends_at_seconds: UnixSeconds | None = None
    """Unix time from which the instance may be unavailable; None if AWS announces no time."""


class EndedRanks(Message, frozen=True):
    """The last state of the ranks that a node ran in an earlier generation.

    The agent ended these ranks before it promised to join a new generation. It reads their state from the pages that
    they shared with the agent.
    """

    generation: Generation
    """The generation of the ended ranks."""
    boundary: Step
    """The highest number of steps that any of the ended ranks had finished; -1 if none had restored its state."""


class PageCommit(Message, frozen=True):
    """The newest committed step of one generation, as the shared pages of a node's ranks show it.

    The agent writes a commit to the pages before it informs any other process, and the pages outlive the agent process.
    After a restore from an older step, the pages may still show commits of later steps, which training has abandoned.
    The control plane therefore ignores commits outside the path of the newest started generation.
    """

    generation: Generation
    step: Step


MAX_SERIES = 64
"""Maximum number of nodes or ranks of a job for which metric values are stored per node or per rank.

For a larger job, the control plane stores only summaries over all of them.
"""


class RankValues(Message, frozen=True):
    """The newest values that the script has logged on one rank, by metric name."""

    rank: Rank
    values: Annotated[dict[str, MetricValue], Items]


class MemberReport(Message, frozen=True):
    """The part of an agent's report that describes the job to which the node belongs."""

    job: JobName
    run: RunId
    generation: Generation
    """The highest generation that the agent has promised to join. The agent ignores commands of lower generations."""
    phase: MemberPhase
    inventory: Annotated[tuple[SlotRecord, ...], Items] = ()
    """The complete shards in the node's memory when the agent promised to join the generation.

    Sent only while PROMISED.
    """
    ended: EndedRanks | None = None
    """The last state of the ranks that this node ran in the run's newest earlier generation.

    Sent only while PROMISED. None if no rank of the run has run on this node.
    """
    commits: Annotated[tuple[PageCommit, ...], Items] = ()
    """One entry per generation that has a commit on this node's pages, oldest first.

    The agent reads the pages when it promises to join a generation, and sends the entries only while PROMISED.
    """
    ranks: Annotated[tuple[RankStatus, ...], RankItems] = ()
    protection: Annotated[tuple[ShardProtection, ...], RankItems] = ()
    """The protection of each rank's shard, for the ranks of this node."""
    silent_peers: Annotated[tuple[NodeId, ...], Items] = ()
    """Peers of this node that have sent nothing for longer than `Timeouts.holder_deadline_seconds`."""
    round: RoundStatus | None = None
    """The state of the commit rounds. Set only if this node's agent is the coordinator."""
    uploads: Annotated[tuple[UploadedShard, ...], Items] = ()
    """Shards whose upload to S3 is complete.

    For each rank, the list contains only the newest steps: at most two more than the maximum number of concurrent
    uploads.
    """
    running_uploads: Annotated[tuple[RunningUpload, ...], Items] = ()
    """The uploads of shards to S3 that this node has begun and not ended, in rank order."""
    faults: Annotated[tuple[NodeFault, ...], FewItems] = ()
    load_seconds: Seconds = 0.0
    longest: Annotated[dict[PhaseName, Seconds], FewItems] = msgspec.field(default_factory=dict[str, float])
    """The longest time without progress of any rank of the node in this generation, in seconds, by phase."""
    stacks: Annotated[tuple[RankStacks, ...], RankItems] = ()
    """Stacks of the living ranks, for as long as the control plane repeats `TakeStacks`."""
    restored_from: Annotated[tuple[SourceKind, ...], RankItems] = ()
    """The kind of source from which the agent loaded each rank's shard, in rank order; set once the node is LOADED.

    The agent tries the plan's sources in order, and uses the first source whose bytes pass verification.
    """
    target: Step = Step(0)
    """Total number of steps of the training, as declared by the script; 0 if the script has declared none."""
    measured: Annotated[dict[str, MetricValue], Items] = msgspec.field(default_factory=dict[str, float])
    """The newest measurements of this node's ranks and agent, by metric name.

    Each value is a mean over some seconds. Empty until the agent has measured the time between the ends of two steps.
    """
    logged: Annotated[tuple[RankValues, ...], RankItems] = ()
    """The newest logged values of this node's ranks except rank 0, in rank order.

    Empty for a job of more than `MAX_SERIES` ranks.
    """

    @property
    def unstored(self) -> tuple[OutputFailure, ...]:
        """The outputs of the node's ranks that are not in S3."""
        return tuple(fault.output for fault in self.faults if fault.output is not None)


class RankMemory(Message, frozen=True):
    """Memory of one rank's process in bytes, without the processes that the rank started."""

    rank: Rank
    resident_bytes: Count
    """Resident memory. Shared pages count in full, including the pages of snapshots."""
    peak_bytes: Count
    """The highest `resident_bytes` since the process started."""


class NodeMemory(Message, frozen=True):
    """Memory of a node and of its ranks in bytes, measured within the last seconds."""

    total_bytes: Count
    """The machine's memory, or the limit of the agent's and ranks' cgroup if that is lower."""
    available_bytes: Count
    """Memory that the agent and the ranks can allocate without swapping."""
    limit_bytes: Count | None = None
    """Memory limit of the cgroup of the agent and the ranks; None if only the machine's memory limits them."""
    ranks: Annotated[tuple[RankMemory, ...], RankItems] = ()
    """Memory of each living rank, in rank order."""


MAX_BURN_IN_TESTS = 64


class BurnInOutcome(StrEnum):
    """The outcome of one test: PASSED, FAILED, or UNKNOWN if the test could not run to its end."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class BurnInTest(Message, frozen=True):
    """The result of one test of a node."""

    name: Name
    """`matmul`, `disk-write`, `disk-read`, `loopback`, `gpus`, `dcgm`, or `gpu-matmul-` and the index of a GPU."""
    outcome: BurnInOutcome
    rate: Count | None = None
    """Bytes per second; for a matmul, floating-point operations per second. None if the test measures no rate."""
    text: Text = ""
    """Why the test failed or could not run. Empty if it passed."""


class BurnInResult(Message, frozen=True):
    """The results of a node's newest complete burn-in (`RunBurnIn`)."""

    number: Count
    """Number of the command."""
    level: Count
    seconds: Seconds
    """Duration of all tests."""
    tests: Annotated[tuple[BurnInTest, ...], msgspec.Meta(max_length=MAX_BURN_IN_TESTS)] = ()


class AgentReport(Message, frozen=True):
    """The whole state of an agent. Each report replaces all earlier reports."""

    node_id: NodeId
    sequence: Count
    """Number of the report. Each report has the number of the previous report plus one.

    The control plane drops a report with a lower number.
    """
    member: MemberReport | None
    metrics: MetricBatch | None = None
    """New metric values.

    The agent sends a batch once. It repeats the batch after a timeout or on a new connection, until `MetricsStored`
    confirms it. All other fields of a report describe state and need no confirmation.
    """
    refused_count: Count = 0
    """Peer sessions and rank connections that the agent rejected or closed for invalid input.

    The count begins when the agent starts.
    """
    faults: Annotated[tuple[NodeFault, ...], FewItems] = ()
    """Current faults of the node itself, with or without a job. A fault that ends is removed."""
    notices: Annotated[tuple[NodeNotice, ...], FewItems] = ()
    """Events that the instance's metadata currently announces."""
    evidence_key: Path = ""
    """Key prefix in the object store that holds this node's logs.

    Empty until the agent has stored the logs for a `KeepEvidence`.
    """
    is_warm: bool = True
    """True if the agent can start a rank without importing the rank's modules first.

    Also true if the job names no modules to import in advance. False during such imports, and after a failed import.
    """
    exposure: Text = ""
    """One sentence about data that the current job's code can read although it belongs to the node or to other jobs.

    The sentence names the agent's files, the instance's metadata, or both. Empty if the job's code can read neither.
    """
    sources: Annotated[tuple[HexDigest, ...], Items] = ()
    """SHA-256 of each source archive that this node has checked, whether the archive was valid or not."""
    memory: NodeMemory | None = None
    """Memory of the node and its ranks, for display only; None before the first measurement.

    A change of these values alone triggers no report.
    """
    burn_in: BurnInResult | None = None
    """None until this agent process has completed a burn-in."""

    def __post_init__(self) -> None:
        """Raise ValueError, and make decoding fail, if a name is too long, or an id not printable ASCII.

        A check of all names together takes much less time than a pattern, or a limit of a key, per field.
        """
        names: str = self.node_id
        if (member := self.member) is not None:
            names += member.job + member.run
            if member.silent_peers:
                names += "".join(member.silent_peers)
            known: tuple[NodeId, ...] = ()
            for shard in member.protection:  # The shards of a node usually have the same holders, all of them in view.
                if shard.holders != known or shard.in_view != known:
                    known = shard.holders
                    names += "".join(known + shard.in_view)
            require_short(member.measured, MAX_METRIC_NAME_LENGTH)
            for rank in member.logged:
                require_short(rank.values, MAX_METRIC_NAME_LENGTH)
        if self.metrics is not None:
            names += self.metrics.run
            for point in self.metrics.points:
                require_short(point.values, MAX_METRIC_NAME_LENGTH)
        if not (names.isascii() and names.isprintable()):
            raise ValueError("a report contains the name of a node, run or job that is not printable ASCII")


class Hello(Message, frozen=True):
    """First message of an agent on a new connection."""

    node_id: Annotated[NodeId, msgspec.Meta(pattern=NODE_ID_PATTERN)]
    agent_id: Name
    """Random id that the agent process creates at its start.

    A new id shows the control plane that the agent restarted.
    """
    address: Address
    peer_port: Port
    memory_bytes: Count
    """Host memory that the agent may use for slots."""
    version: Name
    run: Annotated[RunId, msgspec.Meta(pattern=VISIBLE)] | None = None
    """The run whose state is still on the node; None if the node has no run's state."""
    protocol_minor: Count = 0
    """The agent's `codec.PROTOCOL_MINOR`. The control plane sends only messages that this minor version has."""
    public_key: PublicKey | None = None
    """Ed25519 key that the control plane certifies for TLS between agents.

    If it is None, the control plane sends no certificate.
    """


class AgentWelcome(Message, frozen=True):
    """The control plane's acceptance of an agent.

    `session_token` replaces the join token from now on.
    """

    session_token: str
    fleet: str
    timeouts: Timeouts
    protocol_minor: int = 0
    """The control plane's `codec.PROTOCOL_MINOR`. The agent sends only messages that this minor version has."""


class PeerCertificate(Message, frozen=True):
    """Certificate with which an agent proves its node and its fleet to other agents over TLS.

    The control plane sends it after `AgentWelcome`, and again before it expires (`everstep.protocol.certificates`).
    """

    fleet: str
    certificate: bytes
    """X.509 in DER, for the key in `Hello.public_key` and the name `peer_uri`."""
    authority: bytes
    """The certificate of the fleet's authority, X.509 in DER."""


class JobMessage(Message, frozen=True):
    """A message about one generation of a job."""

    job: JobName
    run: RunId
    generation: Generation


class RunMessage(Message, frozen=True):
    """A message about one generation of a run, to or from a node that knows the run's job."""

    run: RunId
    generation: Generation


class Prepare(JobMessage, frozen=True):
    """Command to promise to join this generation.

    The agent ends the ranks, closes the connections of older generations, and lists the sealed slots (the complete
    shards in its memory). The control plane repeats the command until the report shows the generation.
    """

    parent: Generation
    """The newest earlier generation whose start the control plane has recorded."""


class Load(Message, frozen=True):
    """Command to fetch and verify the shards that the plan assigns to this node.

    Valid only for the newest generation that the agent has promised to join.
    """

    plan: GenerationPlan
    key: Key
    """The generation's key, 32 bytes. Agents use it to authenticate peers. Never logged."""


class Start(JobMessage, frozen=True):
    """Command to start training, sent when all nodes of the job have verified the shards that their ranks restore."""


class StopTraining(JobMessage, frozen=True):
    """Command to stop training at a step that all ranks agree on. Sent to the coordinator's agent only."""


class HaltRanks(JobMessage, frozen=True):
    """Command to kill this node's ranks now, because the generation is over."""

    reason: str


class TakeCheckpoint(JobMessage, frozen=True):
    """Command to upload the next committed step that is at least `step`.

    Sent to the coordinator's agent only, and repeated until such a checkpoint is complete.
    """

    step: Step
    ends_exports: bool = False
    """True if AWS has announced the end of a node's instance.

    If the checkpoint needs a slot that an export keeps, the agents then end the export.
    """


class Rehearse(JobMessage, frozen=True):
    """Command to rehearse the job's resume (`everstep.protocol.rehearsals`).

    Sent to the coordinator's agent only, and repeated until `RoundStatus.rehearsal_number` is `number`. A number that
    is not above the newest one changes nothing. The coordinator forgets the numbers when its agent restarts.
    """

    since_minor: ClassVar[int] = 1

    number: int
    """Above 0, and above the number of each earlier command of the generation."""
    steps: int
    """Number of steps to repeat, above 0."""


class TakeStacks(JobMessage, frozen=True):
    """Command to read the Python stacks of every rank without stopping the ranks.

    The control plane numbers these commands. For a number that it has already answered, the agent reports the same
    stacks again. For a higher number, it reads the stacks again and reports the new stacks.
    """

    number: int


class KillForDrill(RunMessage, frozen=True):
    """Command to kill a rank of this generation, or the agent itself, for a drill (a failure that a user injects).

    Sent once. The agent ignores the command if it runs a different generation.
    """

    drill: str
    rank: Rank | None = None
    """The rank to kill; None to kill the agent itself."""


class Release(Message, frozen=True):
    """Command to delete everything that the node stores of this run: slots, pages, files and the recorded promise.

    The control plane repeats the command until the node's report no longer names the run.
    """

    run: RunId
    unstored_count: int | None = None
    """How many of the node's unstored outputs (`OutputFailure`) the control plane has recorded.

    The agent deletes nothing while it has more to report. None from older control planes: it need not wait.
    """


class KeepEvidence(Message, frozen=True):
    """Command to upload the logs of the agent and of the ranks' parent process (the shim) of a failed node.

    A person can then inspect the failure.

    The control plane repeats the command until the agent's report contains the key of `place` (`evidence_key`).
    """

    place: ObjectReference
    """Key prefix that ends with a slash. The agent appends `agent.log` and `shim.log`."""


class KeepSources(Message, frozen=True):
    """Command to keep verified copies of exactly these source archives.

    Sent to idle nodes, so that a job starts there without a download. Repeated until the report lists all of them. A
    node that has promised to join a generation keeps only the archive of its own job.
    """

    sources: tuple[SourceArchive, ...]


class RunBurnIn(Message, frozen=True):
    """Command to test an idle node.

    The control plane repeats the command until the report contains a result with this number. A node that has promised
    to join a generation ignores the command. A promise ends a running burn-in without a result.
    """

    since_minor: ClassVar[int] = 2

    number: int
    level: int
    """Level of DCGM's diagnostics (`dcgmi diag -r`), from 1 to 3."""


class SendLines(Message, frozen=True):
    """Command to send the ranks' output as they print it, for the next `SEND_LINES_SECONDS`.

    Sent while a client follows the logs. The agent first sends its newest lines.
    """

    run: RunId


class LogLines(RunMessage, frozen=True):
    """Lines that the ranks of a node have printed.

    The control plane does not acknowledge them. A follower that misses lines reads them from the object store, after at
    most `FLUSH_SECONDS`.
    """

    first: Count
    """Number of the first line in this message, counted over all lines of this node and generation."""
    lines: Annotated[tuple[LogLine, ...], Items]


class RunCommand(RunMessage, frozen=True):
    """Command to run a program on the node of a rank and report its result.

    Another server of the control plane may send the command again. If the agent has already run a command with this
    id, it reports that result again and runs nothing.
    """

    command_id: str
    rank: Rank
    argv: tuple[str, ...]
    """The program and its arguments, passed without a shell."""
    timeout_seconds: float
    stdin: bytes = b""
    """The complete standard input of the program."""


class CommandEnded(Message, frozen=True):
    """The result of the program that a `RunCommand` started.

    If this message is lost, the waiting client gets an error and may repeat the request with the same id.
    """

    command_id: Name
    exit_code: ExitCode | None = None
    """The exit code as a shell reports it; None if the program did not end by itself.

    127 means that the program does not exist. 128 + n means that signal n ended the program.
    """
    stdout: CommandOutput = b""
    stderr: CommandOutput = b""
    """The program's standard error. Like stdout, it is cut after `MAX_COMMAND_OUTPUT_BYTES`."""
    is_cut: bool = False
    """True if stdout or stderr was cut."""
    is_timed_out: bool = False
    refusal: Text = ""
    """Reason why the agent did not run the program; empty if the agent ran it."""


class HoldSnapshot(RunMessage, frozen=True):
    """Command to keep the snapshots of this node's ranks at one step in memory, for an export.

    The agent answers with `SnapshotHeld`. Until the agent releases the step's slots, the node has a *hold*, and no rank
    overwrites the slots. The agent ends the hold `HOLD_SECONDS` after the last request with this `hold_id`, and refuses
    later requests with this id. A node has at most one hold. During a hold, a request for the newest step (-1) returns
    the hold's step, even if a newer step is committed. A request for another step replaces the hold's step.
    """

    request_id: str
    hold_id: str
    step: Step
    """The step to keep; -1 for the newest step whose commit this node has received."""
    is_renewal: bool = False
    """True if the request only prolongs a hold. A node without a hold of this `hold_id` then refuses the request."""


class HeldShard(Message, frozen=True):
    """A shard that a node keeps for an export, described as the checkpoint object that the node would store in S3."""

    rank: Rank
    origin_generation: Generation
    object_bytes: Count
    payload_bytes: Count
    payload_digest: Digest
    layout_hash: Digest


class SnapshotHeld(Message, frozen=True):
    """The answer to `HoldSnapshot`: the shards that the node now keeps, or the reason of a refusal."""

    request_id: Name
    step: Step = Step(-1)
    shards: Annotated[tuple[HeldShard, ...], Items] = ()
    """The shards of this node's ranks at `step`; empty in a refusal."""
    refusal: Text = ""
    """Reason why the node does not keep the step; empty if it keeps the step."""


class ReadSnapshot(RunMessage, frozen=True):
    """Request for a byte range of a shard that the node keeps for an export. The answer is `SnapshotBytes`.

    Positions count within the checkpoint object that the node would store in S3 for this shard.
    """

    request_id: str
    hold_id: str
    rank: Rank
    begin: int
    end: int
    """End of the range, exclusive; at most `MAX_SNAPSHOT_READ_BYTES` after `begin`."""


class SnapshotBytes(Message, frozen=True):
    """The answer to `ReadSnapshot`: the requested bytes, or the reason of a refusal."""

    request_id: Name
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_SNAPSHOT_READ_BYTES)] = b""
    refusal: Text = ""
    """Reason why the node returns no bytes; empty if it returns them."""


class ReleaseSnapshot(RunMessage, frozen=True):
    """Command to end a hold (slots that a node keeps for an export), so that ranks may use the slots again."""

    hold_id: str


class MetricsStored(Message, frozen=True):
    """Confirmation that the control plane has stored metric values, so that the agent may delete its copy of them."""

    agent_id: str
    """Id of the agent process to which the numbers belong. Each agent process numbers its values from 0."""
    next_number: int
    """The lowest number whose value is not stored yet. The control plane has stored all values with lower numbers."""


AgentToControl = AgentReport | LogLines | CommandEnded | SnapshotHeld | SnapshotBytes
"""Every message of an agent after its `Hello`."""
ControlToAgent = (
    AgentWelcome
    | PeerCertificate
    | Prepare
    | Load
    | Start
    | StopTraining
    | HaltRanks
    | TakeCheckpoint
    | Rehearse
    | TakeStacks
    | KillForDrill
    | Release
    | KeepEvidence
    | KeepSources
    | RunBurnIn
    | SendLines
    | RunCommand
    | HoldSnapshot
    | ReadSnapshot
    | ReleaseSnapshot
    | MetricsStored
)
