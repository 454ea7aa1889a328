"""Messages between an agent and the control plane, over one websocket that the agent opens.

Messages describe states: an `AgentReport` replaces all earlier reports, and the control plane repeats an idempotent
command until a report shows its effect. The agent reports every change, and at least every `lease_seconds / 3`. Only
logged values are acknowledged (`MetricsStored`), because later reports do not repeat them.

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
    SharedItems,
    Text,
    UnixSeconds,
    UploadItems,
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
"""Websocket close code: the node has already joined, so the agent must present the node's session token."""
SEND_LINES_SECONDS = 10.0
MAX_COMMAND_OUTPUT_BYTES = 256 * 1024
CommandOutput: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_COMMAND_OUTPUT_BYTES)]
HOLD_SECONDS = 120.0
"""Seconds after an export's last request until a node releases its snapshots."""
ANOTHER_EXPORT = "another export holds a snapshot"
"""Refusal of `HoldSnapshot` while the node keeps snapshots for another export. A job has at most one export."""
MAX_SNAPSHOT_READ_BYTES = 4 * 1024 * 1024


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

    - ERROR: any exit code except 0.
    - KILLED: a signal from outside the program.
    - CRASHED: a signal that the program caused (SEGV, BUS, ABRT, ILL, FPE).
    - OUT_OF_MEMORY: the kernel killed the rank to free memory, or the rank's last exception reports a lack of memory.
    - HALTED: the agent stopped the rank because its generation ended.
    """

    SUCCESS = "success"
    ERROR = "error"
    KILLED = "killed"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HALTED = "halted"


class MemoryKind(StrEnum):
    """The memory that a rank exhausted. HOST includes the limit of the node's cgroup."""

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
    """The evidence that a rank ran out of memory, and the last measurements in bytes; None: not measured."""

    source: MemorySource
    kind: MemoryKind
    rank_bytes: Count | None = None
    """Resident memory of the ended process: the rank, or the DataLoader worker that the kernel killed."""
    used_bytes: Count | None = None
    """Memory in use on the node, or in its cgroup if the cgroup has a limit."""
    total_bytes: Count | None = None
    """The node's memory, or the limit of its cgroup."""
    words: Text = ""
    """The rank's last exception, or the name of the killed DataLoader worker. Empty if the kernel killed the rank."""


class RankExit(Message, frozen=True):
    """The exit of a rank, as observed by its parent process, the shim."""

    exit_class: ExitClass
    code: ExitCode
    at_seconds: UnixSeconds
    boundary: Step
    """Last reported number of finished steps; -1: none."""
    last_lines: LongText = ""
    """The end of the rank's stderr, or of its stdout and stderr without a traceback, at most 4 KiB."""
    memory: MemoryEnd | None = None
    """Set only if `exit_class` is OUT_OF_MEMORY."""


FIRST_STEP_PHASE = "first_step"
"""Phase that agents report instead of TRAIN until the rank finishes its first step, which compiles and fills caches."""
if TYPE_CHECKING:
    PhaseName = str
else:
    PhaseName = Literal[("", FIRST_STEP_PHASE, *(phase.name.lower() for phase in Phase))]
"""Empty if the agent does not know the phase."""


class RankStatus(Message, frozen=True):
    """The progress of one rank, and its exit if the rank has ended."""

    rank: Rank
    boundary: Step
    """Number of finished steps; -1 before the rank has restored its state."""
    exit: RankExit | None = None
    phase: PhaseName = ""
    """`start`, `restore`, `first_step`, `train`, `eval`, `checkpoint`, `wait`, `close` or `rehearse`."""
    still_seconds: Seconds = 0.0
    """Seconds since the rank last finished a step or changed its phase."""
    limit_seconds: Seconds = 0.0
    """Time limit of the phase that the script has declared, in seconds; 0: none."""
    passed_at_seconds: UnixSeconds = 0.0
    """Unix time at which the rank finished the step `boundary`; 0 if it is not recorded."""
    first_passed_at_seconds: UnixSeconds = 0.0
    """Unix time at which the rank finished its first step in this generation; 0: not yet."""
    rehearsed: Rehearsed | None = None
    resume_revision: Count = 0
    kept_options: KeptOptions = ()


class RankStacks(Message, frozen=True):
    """The Python stacks of one rank, in answer to the `TakeStacks` with this number."""

    rank: Rank
    number: Count
    text: LongText
    """Main thread first, innermost frame first. At most 8 KiB. Empty if the agent could not read the stacks."""
    same_seconds: Seconds
    """Seconds since the agent first read these same stacks; 0 at the first reading."""
    cpu_seconds: Seconds
    """CPU time of the rank and its child processes during `same_seconds`."""
    is_stopped: bool = False
    gpu_percent: Percent | None = None
    """Utilization of the rank's GPU; None: not measured."""
    error: Text = ""


MAX_STATES: Final = 32
StateItems: Final = msgspec.Meta(max_length=MAX_STATES)


class ShardProtection(Message, frozen=True):
    """The holders of one rank's shard, as observed by the shard's owner, the agent of the rank's node. Holders *in
    view* respond to the owner. The owner votes for a step only after all holders in view, and all holders that are
    about to return, have verified it.
    """

    rank: Rank
    holders: Annotated[tuple[NodeId, ...], HolderItems]
    in_view: Annotated[tuple[NodeId, ...], HolderItems]
    committed: Step
    payload_bytes: Count
    reason: Text = ""
    """Why the shard is not fully protected; empty if every holder has the shard of recent steps."""
    verified: Annotated[tuple[tuple[Step, UnixSeconds], ...], HolderItems] = ()
    """Newest verified step (-1: none) of each holder, in the order of `holders`, and its Unix time."""
    unkept: UnkeptCause | None = None
    """Why the owner abandoned the newest proposed step; None: no step since the last commit."""
    lasts: bool = False
    """Whether this cause also prevents the next steps, unless the script or the node's memory changes."""
    states: Annotated[tuple[tuple[Step, StateDigest], ...], StateItems] = ()
    """Digests of the newest sealed steps of this generation, oldest first, at most `state_count(world_size)`."""


def state_count(world_size: int) -> int:
    """Return the number of sealed steps per rank whose digests agents report and the control plane keeps."""
    return max(2, min(MAX_STATES, 2048 // world_size))


class CheckpointPace(Message, frozen=True):
    """The next checkpoint in S3 that is due, and the measurements for an automatic interval."""

    due_step: Step = Step(-1)
    due_at_seconds: UnixSeconds = 0.0
    """Unix time after which the next commit becomes a checkpoint; 0 if the job has no interval."""
    interval_seconds: Seconds = 0.0
    """Current interval between checkpoints; 0 if the job has none, or if no upload is measured yet."""
    upload_seconds: Seconds = 0.0
    cost_seconds: Seconds = 0.0
    """Seconds by which the newest upload delayed training; at most the upload's duration."""


class RoundStatus(Message, frozen=True):
    """The state of a generation's commit rounds. Only the coordinator's agent reports it."""

    committed: Step
    proposed: Step
    boundary: Step
    """The highest number of finished steps of any rank."""
    committed_at_seconds: UnixSeconds
    stopped: bool = False
    finished: bool = False
    checkpoints: CheckpointPace = CheckpointPace()
    rehearsal_number: Count = 0
    """Number of the newest `Rehearse` that the coordinator has taken; 0: none."""
    rehearsal_state: StopState = StopState.NONE


class UploadedShard(Message, frozen=True):
    """A shard of a committed step whose upload to S3 is complete."""

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
    sha256: HexDigest = ""
    part_bytes: Count = 0
    frozen: Annotated[tuple[SharedObject, ...], SharedItems] = ()
    """Objects, as in `replicated`, that S3 has stored completely."""
    replicated: Annotated[tuple[SharedObject, ...], SharedItems] = ()
    lists: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Digest of `frozen` and `replicated`, which are empty if the last report had them (`shared_lists`)."""


class RunningUpload(Message, frozen=True):
    """The progress of the upload of one shard to S3."""

    rank: Rank
    step: Step
    object_name: Path
    """s3://bucket/key; empty until the first attempt begins."""
    stored_bytes: Count
    object_bytes: Count
    """Size of the object; of the shard in memory until the first attempt begins."""


class MetricPoint(Message, frozen=True):
    """Metric values of one step of rank 0 or its agent. A repeated step's values replace the earlier ones."""

    generation: Generation
    step: Step
    values: Annotated[dict[str, MetricValue], Items]
    at_seconds: UnixSeconds


class MetricBatch(Message, frozen=True):
    """Unconfirmed metric values of one run, numbered consecutively from 0. A lost value's number is not reused."""

    run: RunId
    first_number: Count
    points: Annotated[tuple[MetricPoint, ...], Items]


# NVML answers within milliseconds and a disk within tens of them. A GPU reset by its driver takes seconds.
DEVICE_SILENT_SECONDS = 15.0
"""Seconds without a response after which a GPU driver or disk is faulty."""


class FaultCode(StrEnum):
    """Codes of a `NodeFault` that several modules use. A newer agent may send others.

    Faults of a job's member:

    - SOURCE_MISMATCH: no source delivered a shard that matches the plan's digest.
    - SOURCE_UNAVAILABLE: no source delivered the shard, and at least one source was unreachable.
    - MEMORY_FULL: the node has too little memory for a shard or a rank's pages.
    - ROLE_UNAVAILABLE: the agent could not get credentials of the job's IAM role.
    - RANKS_NOT_GONE: processes of an older generation do not exit.
    - TASKS_FULL: a rank ended because the job reached the node's limit of processes and threads.
    - COORDINATOR_UNREACHABLE: the node cannot vote on commits.

    GPU, NIC, DISK and MEMORY codes are faults of devices (docs/reference/metrics.md#node-faults). From a burn-in, the
    control plane derives BURN_IN_FAILED, and NODE_SLOW: much slower in a test than the other nodes of the fleet.
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
    """Path in the rank's output folder or, for NOT_KEPT, in the source directory. A slash at its end names a folder."""
    cause: OutputCause
    generation: Generation | None = None
    """The generation of the report if None, as from older agents."""
    omitted_count: Count = 0
    """Number of further unstored outputs that the agent does not name. Only in the node's last entry."""


class NodeFault(Message, frozen=True):
    """A fault that an agent reports about its own node or its job."""

    code: Name
    """A `FaultCode`, or a code of one module, such as `cannot_resume` or `upload_failed`."""
    message: Text
    is_permanent: bool
    """Whether a new generation cannot repair the fault."""
    device: Path = ""
    """The faulty device, such as `gpu 3`, `eth0` or a path; empty for the whole node or the job."""
    xid: Count | None = None
    obstacle: Obstacle | None = None
    """Why AWS did not deliver an input of a load. None if the fault has another cause, and from older agents."""
    output: OutputFailure | None = None
    shard: Rank | None = None
    """The shard of the earlier launch that the node could not fetch. Set only during a relayout."""


class NoticeKind(StrEnum):
    """The kinds of events that AWS announces for an instance.

    - SPOT_INTERRUPTION: AWS takes the instance back in two minutes.
    - REBALANCE: the instance has a raised risk of interruption.
    - MAINTENANCE: AWS has scheduled a reboot, a retirement or a stop.
    - CAPACITY_BLOCK_END: the instance's capacity reservation ends.
    - TERMINATING: the Auto Scaling group terminates the instance after its lifecycle hook.
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
    ends_at_seconds: UnixSeconds | None = None
    """Unix time from which the instance may be unavailable; None if AWS announces none."""


class EndedRanks(Message, frozen=True):
    """The last state of the ranks of an earlier generation, read from their pages after the agent ended them."""

    generation: Generation
    boundary: Step
    """The highest number of finished steps of any of the ranks; -1 if none had restored its state."""


class PageCommit(Message, frozen=True):
    """The newest committed step of one generation on the pages of a node's ranks.

    The agent writes a commit to the pages before it informs any other process, and the pages outlive the agent process.
    They may show commits that a restore from an older step abandoned. The control plane therefore ignores commits
    outside the path of the newest started generation.
    """

    generation: Generation
    step: Step


MAX_SERIES = 64
"""Maximum number of nodes or ranks for which metric values are stored one by one; above it, only summaries."""


class RankValues(Message, frozen=True):
    """The newest logged values of one rank, by metric name."""

    rank: Rank
    values: Annotated[dict[str, MetricValue], Items]


class MemberReport(Message, frozen=True):
    """The part of an agent's report that describes the job to which the node belongs."""

    job: JobName
    run: RunId
    generation: Generation
    """The highest generation that the agent has promised to join."""
    phase: MemberPhase
    inventory: Annotated[tuple[SlotRecord, ...], Items] = ()
    """The node's complete shards at the promise. Sent only while PROMISED."""
    ended: EndedRanks | None = None
    """The run's newest earlier generation on this node; None if there is none. Sent only while PROMISED."""
    commits: Annotated[tuple[PageCommit, ...], Items] = ()
    """One entry per generation with a commit on this node's pages, oldest first. Sent only while PROMISED."""
    ranks: Annotated[tuple[RankStatus, ...], RankItems] = ()
    protection: Annotated[tuple[ShardProtection, ...], RankItems] = ()
    silent_peers: Annotated[tuple[NodeId, ...], Items] = ()
    """Peers that have sent nothing for longer than `Timeouts.holder_deadline_seconds`."""
    round: RoundStatus | None = None
    """Set only if this node's agent is the coordinator."""
    uploads: Annotated[tuple[UploadedShard, ...], UploadItems] = ()
    """The newest complete uploads of each rank: per rank, at most two more than the maximum of concurrent uploads."""
    running_uploads: Annotated[tuple[RunningUpload, ...], UploadItems] = ()
    faults: Annotated[tuple[NodeFault, ...], FewItems] = ()
    load_seconds: Seconds = 0.0
    longest: Annotated[dict[PhaseName, Seconds], FewItems] = msgspec.field(default_factory=dict[str, float])
    """The longest time without progress of any rank of the node in this generation, by phase."""
    stacks: Annotated[tuple[RankStacks, ...], RankItems] = ()
    restored_from: Annotated[tuple[SourceKind, ...], RankItems] = ()
    """The source that delivered each rank's shard, in rank order; set once the node is LOADED."""
    target: Step = Step(0)
    """Total number of steps that the script has declared; 0: none."""
    measured: Annotated[dict[str, MetricValue], Items] = msgspec.field(default_factory=dict[str, float])
    """Means over some seconds, by metric name; empty before the first measurement."""
    logged: Annotated[tuple[RankValues, ...], RankItems] = ()
    """Newest logged values of the ranks except rank 0, in rank order. Empty above `MAX_SERIES` ranks."""

    @property
    def unstored(self) -> tuple[OutputFailure, ...]:
        """Outputs of the node's ranks that are not in S3."""
        return tuple(fault.output for fault in self.faults if fault.output is not None)


class RankMemory(Message, frozen=True):
    """Memory of one rank's process in bytes, without its child processes."""

    rank: Rank
    resident_bytes: Count
    """Counts shared pages in full, and the pages of snapshots."""
    peak_bytes: Count


class NodeMemory(Message, frozen=True):
    """Memory of a node and of its ranks in bytes."""

    total_bytes: Count
    """The machine's memory, or the limit of the agent's and ranks' cgroup if that is lower."""
    available_bytes: Count
    limit_bytes: Count | None = None
    """Memory limit of the cgroup; None if only the machine's memory limits the ranks."""
    ranks: Annotated[tuple[RankMemory, ...], RankItems] = ()


MAX_BURN_IN_TESTS = 64


class BurnInOutcome(StrEnum):
    """The outcome of one test: PASSED, FAILED, or UNKNOWN if the test could not run to its end."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class BurnInTest(Message, frozen=True):
    """The result of one test of a node."""

    name: Name
    """`matmul`, `disk-write`, `disk-read`, `loopback`, `gpus`, `dcgm`, `all-reduce`, or `gpu-matmul-` and a number."""
    outcome: BurnInOutcome
    rate: Count | None = None
    """Bytes per second, or floating-point operations per second of a matmul; None if the test measures no rate."""
    text: Text = ""


class BurnInResult(Message, frozen=True):
    """The results of a node's newest complete burn-in (`RunBurnIn`)."""

    number: Count
    level: Count
    seconds: Seconds
    tests: Annotated[tuple[BurnInTest, ...], msgspec.Meta(max_length=MAX_BURN_IN_TESTS)] = ()


class AgentReport(Message, frozen=True):
    """The whole state of an agent. Each report replaces all earlier reports."""

    node_id: NodeId
    sequence: Count
    """The number of the previous report plus one. The control plane drops a report with a lower number."""
    member: MemberReport | None
    metrics: MetricBatch | None = None
    """New metric values. The agent repeats a batch after a timeout or on a new connection until `MetricsStored`."""
    refused_count: Count = 0
    """Connections of peers and ranks that the agent closed for invalid input since it started."""
    faults: Annotated[tuple[NodeFault, ...], FewItems] = ()
    notices: Annotated[tuple[NodeNotice, ...], FewItems] = ()
    evidence_key: Path = ""
    """Key prefix of the stored logs; empty until the agent has stored them for a `KeepEvidence`."""
    is_warm: bool = True
    """Whether ranks start without importing the job's modules. False while the agent imports them, or cannot."""
    exposure: Text = ""
    """A sentence that names data of the node or of other jobs that the job's code can read; empty: none."""
    sources: Annotated[tuple[HexDigest, ...], Items] = ()
    memory: NodeMemory | None = None
    """A change triggers no report, because the value is for display only. None before the first measurement."""
    burn_in: BurnInResult | None = None
    """Results of this agent process, or None."""

    def __post_init__(self) -> None:
        """Raise ValueError, and make decoding fail, if a name is too long, or an id not printable ASCII."""
        # One check of all names takes much less time than a pattern, or a limit of a key, per field.
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
    """First message of an agent on a new connection. A new random `agent_id` shows that the agent restarted."""

    node_id: Annotated[NodeId, msgspec.Meta(pattern=NODE_ID_PATTERN)]
    agent_id: Name
    address: Address
    peer_port: Port
    memory_bytes: Count
    version: Name
    run: Annotated[RunId, msgspec.Meta(pattern=VISIBLE)] | None = None
    protocol_minor: Count = 0
    """The agent's `codec.PROTOCOL_MINOR`; the control plane sends only messages of this version."""
    public_key: PublicKey | None = None
    """Ed25519 key that the control plane certifies for TLS between agents. None: no certificate."""


class AgentWelcome(Message, frozen=True):
    """The control plane's acceptance of an agent. `session_token` replaces the join token."""

    session_token: str
    fleet: str
    timeouts: Timeouts
    protocol_minor: int = 0
    """The control plane's `codec.PROTOCOL_MINOR`; the agent sends only messages of this version."""


class PeerCertificate(Message, frozen=True):
    """Certificate with which an agent proves its node and its fleet to other agents over TLS."""

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
    """Command to promise to join this generation, repeated until the report shows the generation. The agent ends the
    ranks, closes the connections of older generations, and lists the sealed slots.
    """

    parent: Generation
    """The newest earlier generation whose start the control plane has recorded."""


class Load(Message, frozen=True):
    """Command to fetch and verify the shards of this node. Valid only for the newest promised generation."""

    plan: GenerationPlan
    key: Key
    """The generation's key, with which agents authenticate peers. Never logged."""


class Start(JobMessage, frozen=True):
    """Command to start training, sent when all nodes of the job are LOADED."""


class StopTraining(JobMessage, frozen=True):
    """Command to the coordinator's agent to stop training at a step that all ranks agree on."""


class HaltRanks(JobMessage, frozen=True):
    """Command to kill this node's ranks now, because the generation is over."""

    reason: str


class TakeCheckpoint(JobMessage, frozen=True):
    """Command to the coordinator's agent to upload the next committed step ≥ `step`, repeated until it is stored."""

    step: Step
    ends_exports: bool = False
    """Whether AWS has announced an instance's end. The agents then end an export that keeps a needed slot."""


class Rehearse(JobMessage, frozen=True):
    """Command to the coordinator's agent to rehearse the resume, repeated until `RoundStatus.rehearsal_number` is
    `number`. Only a number above the newest number counts. The coordinator forgets the newest number when its agent
    restarts.
    """

    since_minor: ClassVar[int] = 1

    number: int
    """Above 0, and above the number of each earlier command of the generation."""
    steps: int


class TakeStacks(JobMessage, frozen=True):
    """Command to read all ranks' Python stacks. The agent repeats its answer unless the number is higher."""

    number: int


class KillForDrill(RunMessage, frozen=True):
    """Command to kill a rank, or the agent, for a drill. Sent once; ignored in a different generation."""

    drill: str
    rank: Rank | None = None
    """The agent itself if None."""


class Release(Message, frozen=True):
    """Command to delete everything that the node stores of this run, until the report no longer names the run."""

    run: RunId
    unstored_count: int | None = None
    """Number of unstored outputs that the control plane has recorded. The agent deletes nothing while it has more.
    None, from older control planes: the agent need not wait.
    """


class KeepEvidence(Message, frozen=True):
    """Command to upload the logs of a failed node, repeated until the report's `evidence_key` is the key of `place`."""

    place: ObjectReference
    """Key prefix that ends with a slash. The agent appends `agent.log` and `shim.log`."""


class KeepSources(Message, frozen=True):
    """Command to an idle node to keep exactly these source archives, repeated until they are reported."""

    sources: tuple[SourceArchive, ...]


class BurnInPartner(Message, frozen=True):
    """The other node of an all-reduce. The node with `place` 0 listens at `port`, the other one has place 1."""

    since_minor: ClassVar[int] = 3

    node_id: NodeId
    address: str
    port: int
    place: int


class RunBurnIn(Message, frozen=True):
    """Command to test an idle node, repeated until the report contains a result with this number. A node that has
    promised to join a generation ignores it. A promise ends a running burn-in without a result.
    """

    since_minor: ClassVar[int] = 2

    number: int
    level: int
    """Level of DCGM's diagnostics (`dcgmi diag -r`), from 1 to 3."""
    partner: BurnInPartner | None = None
    """With a partner, the only test is an all-reduce. Sent only to agents that know `BurnInPartner`."""


class SendLines(Message, frozen=True):
    """Command to send the newest lines, and lines as the ranks print them, for the next `SEND_LINES_SECONDS`."""

    run: RunId


class LogLines(RunMessage, frozen=True):
    """Lines that a node's ranks have printed. Lost lines are in the object store after `FLUSH_SECONDS`."""

    first: Count
    """Number of the first line, counted over all lines of this node and generation."""
    lines: Annotated[tuple[LogLine, ...], Items]


class RunCommand(RunMessage, frozen=True):
    """Command to run a program on the node of a rank. For an id that has already run, the agent repeats the result."""

    command_id: str
    rank: Rank
    argv: tuple[str, ...]
    """Program and arguments, passed without a shell."""
    timeout_seconds: float
    stdin: bytes = b""


class CommandEnded(Message, frozen=True):
    """The result of a `RunCommand`. If the message is lost, the client may repeat the request with the same id."""

    command_id: Name
    exit_code: ExitCode | None = None
    """Exit code as in a shell: 127 no such program, 128 + n signal n. None: the program did not end by itself."""
    stdout: CommandOutput = b""
    stderr: CommandOutput = b""
    """The first `MAX_COMMAND_OUTPUT_BYTES` bytes, as in `stdout`."""
    is_cut: bool = False
    is_timed_out: bool = False
    refusal: Text = ""


class HoldSnapshot(RunMessage, frozen=True):
    """Command to keep the snapshots of this node's ranks at one step for an export. The answer is `SnapshotHeld`.

    Until the hold ends, no rank overwrites the step's slots. The agent ends the hold `HOLD_SECONDS` after the last
    request with this `hold_id`, and refuses later requests with this id. A node has at most one hold. During a hold, a
    request for step -1 returns the hold's step, even if a newer step is committed. A request for another step replaces
    it.
    """

    request_id: str
    hold_id: str
    step: Step
    """-1: the newest step whose commit this node has received."""
    is_renewal: bool = False
    """Whether the request only prolongs a hold. Without a hold of this `hold_id`, the node refuses it."""


class HeldShard(Message, frozen=True):
    """A shard that a node keeps for an export, described as the checkpoint object that the node would store in S3."""

    rank: Rank
    origin_generation: Generation
    object_bytes: Count
    payload_bytes: Count
    payload_digest: Digest
    layout_hash: Digest


class SnapshotHeld(Message, frozen=True):
    """The answer to `HoldSnapshot`."""

    request_id: Name
    step: Step = Step(-1)
    shards: Annotated[tuple[HeldShard, ...], Items] = ()
    refusal: Text = ""


class ReadSnapshot(RunMessage, frozen=True):
    """Request for a byte range of the checkpoint object of a held shard. The answer is `SnapshotBytes`."""

    request_id: str
    hold_id: str
    rank: Rank
    begin: int
    end: int
    """Exclusive; at most `MAX_SNAPSHOT_READ_BYTES` after `begin`."""


class SnapshotBytes(Message, frozen=True):
    """The answer to `ReadSnapshot`; empty bytes and a reason in a refusal."""

    request_id: Name
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_SNAPSHOT_READ_BYTES)] = b""
    refusal: Text = ""


class ReleaseSnapshot(RunMessage, frozen=True):
    """Command to end a hold, so that ranks may use its slots again."""

    hold_id: str


class MetricsStored(Message, frozen=True):
    """Confirmation that the control plane has stored the values of this agent process below `next_number`."""

    agent_id: str
    next_number: int


AgentToControl = AgentReport | LogLines | CommandEnded | SnapshotHeld | SnapshotBytes
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
