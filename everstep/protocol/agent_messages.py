"""Messages between an agent and the control plane, over one websocket that the agent opens.

The exchange is level-triggered in both directions: messages describe states, and a later message replaces a lost one.
The agent sends `AgentReport`, its whole state, on every change and at least every `lease_seconds / 3`. Each report
replaces all earlier reports. The control plane's commands are idempotent, and it repeats a command until a report shows
the effect. All other messages are sent without an acknowledgement.

In the diagram, g is a generation, k a step and n a number.

    agent                                     control plane
    Hello (join token or session token in the HTTP request's Authorization)
                                  ◀─────      AgentWelcome
    AgentReport …                 ─────▶
                                  ◀─────      Prepare(g)              until report.job.generation = g
                                  ◀─────      Load(plan, key)         until phase is loading or later
                                  ◀─────      Start(g)                when every member reports loaded
                                  ◀─────      StopTraining(g)         to the coordinator's agent
                                  ◀─────      HaltRanks(g)            when a rank of the job has died
                                  ◀─────      TakeCheckpoint(g, k)    to the coordinator, until a step ≥ k is stored
                                  ◀─────      TakeStacks(g, n)        until the report contains stacks with number n
                                  ◀─────      Release(run)            when the job has ended or released this node
                                  ◀─────      KeepEvidence(place)     until report.evidence_key = place.key
                                  ◀─────      SendLines(run)          every few seconds while a client follows the logs
    LogLines …                    ─────▶      as the ranks print. Lost lines are in the object store
                                  ◀─────      RunCommand(id, argv)    once: run a user's command beside a rank
    CommandEnded(id)              ─────▶      once, and again when a RunCommand repeats the id

Promising a generation means that the agent ends all older ranks and records the number on disk.

Invariant: an agent ignores commands of generations below the newest promised generation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.log_chunks import LogLine
from everstep.protocol.plan import GenerationPlan, ObjectReference, SlotRecord, SourceArchive, Timeouts

NOT_YOURS = 4401
"""Websocket close code: the session token belongs to another node, or was revoked."""
ALREADY_JOINED = 4410
"""Websocket close code: the node has already joined, so a join token no longer suffices.

The agent must present the node's session token.
"""
SEND_LINES_SECONDS = 10.0
MAX_COMMAND_OUTPUT_BYTES = 256 * 1024
"""Maximum bytes of stdout, and of stderr, that `CommandEnded` carries."""


class MemberPhase(StrEnum):
    """The phases of a node in one generation of a job.

    PROMISED: The promise is on disk, the old ranks have ended, and the list of sealed slots is frozen. `Load` ends
        this phase.
    LOADING: The agent unpacks the source, starts the ranks, and fetches and verifies their shards.
    LOADED: Every shard is verified. `Start` ends this phase.
    LOAD_FAILED: A source failed verification.
    RUNNING: The ranks may train. The phase ends when all ranks have exited.
    EXITED: No rank is alive. The agent has uploaded outputs and logs as far as it could.
    """

    PROMISED = "promised"
    LOADING = "loading"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    RUNNING = "running"
    EXITED = "exited"


class ExitClass(StrEnum):
    """The meaning of a rank's exit.

    - SUCCESS: exit code 0.
    - ERROR: another exit code, for example after an exception in the script.
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
    """The memory that a rank exhausted: HOST (the node's or its cgroup's) or GPU (a device's)."""

    HOST = "host"
    GPU = "gpu"


class MemorySource(StrEnum):
    """The kind of evidence that a rank ran out of memory.

    - KERNEL_LOG: the kernel logged that it killed this process.
    - CGROUP: the kill counter of the rank's memory cgroup rose.
    - NODE: only the node's kill counter rose, so the kernel may have killed another process.
    - EXCEPTION: the rank's last exception reports a lack of memory.
    """

    KERNEL_LOG = "kernel_log"
    CGROUP = "cgroup"
    NODE = "node"
    EXCEPTION = "exception"


class MemoryEnd(Message, frozen=True):
    """The evidence that a rank ran out of memory, with the last measurements before its exit.

    Sizes are in bytes. None means that the agent did not measure the value.
    """

    source: MemorySource
    kind: MemoryKind
    rank_bytes: int | None = None
    """Resident memory of the rank's process."""
    used_bytes: int | None = None
    """Memory in use on the node, or in its cgroup if the cgroup has a limit."""
    total_bytes: int | None = None
    """The limit for `used_bytes`."""
    words: str = ""
    """The first line of the exception if the evidence is an exception of the rank; otherwise empty."""


class RankExit(Message, frozen=True):
    """The exit of a rank, as observed by its shim process."""

    exit_class: ExitClass
    code: int
    """The exit code, or the negated signal number."""
    at_seconds: float
    """Unix time of the exit."""
    boundary: Step
    """The last step boundary that the rank passed, or -1."""
    last_lines: str = ""
    """The end of the rank's stderr, at most 4 KiB."""
    memory: MemoryEnd | None = None
    """Evidence of exhausted memory. Set only if `exit_class` is OUT_OF_MEMORY."""


class RankStatus(Message, frozen=True):
    """The progress of one rank, and its exit if the rank has ended."""

    rank: Rank
    boundary: Step
    """The last step boundary that the rank passed, or -1 before it has restored."""
    exit: RankExit | None = None
    phase: str = ""
    """The phase that the rank reported last.

    One of `start`, `restore`, `first_step`, `train`, `eval`, `checkpoint`, `wait` and `close`.
    """
    still_seconds: float = 0.0
    """Seconds since the rank's boundary or phase last changed."""
    limit_seconds: float = 0.0
    """The phase's time limit that the script declared, in seconds. 0: the script declared none."""
    passed_at_seconds: float = 0.0
    """Unix time at which the rank passed its boundary, as recorded by the rank. 0: not recorded."""
    first_passed_at_seconds: float = 0.0
    """Unix time at which the rank finished its first step after the base step.

    0: the rank has not finished such a step.
    """


class RankStacks(Message, frozen=True):
    """The Python stacks of one rank, taken by its agent on `TakeStacks`."""

    rank: Rank
    number: int
    """Number of the `TakeStacks` command that these stacks answer."""
    text: str
    """Python stacks, the main thread first, innermost frame first. At most 8 KiB.

    Empty if the agent could not read the stacks.
    """
    same_seconds: float
    """Seconds for which all readings returned these same stacks. 0 at the first reading."""
    cpu_seconds: float
    """CPU time that the rank and its child processes used during `same_seconds`."""
    is_stopped: bool = False
    """Whether a signal has stopped the process. A stopped process runs again only after SIGCONT."""
    gpu_percent: float | None = None
    """Utilization of the rank's GPU in percent. None if it is not measured."""
    error: str = ""
    """Why the agent could not read the stacks. Empty if it could."""


class ShardProtection(Message, frozen=True):
    """The holders of one rank's shard and their state, as observed by the owner's agent.

    The *view* is the set of holders that respond to the owner. Votes wait for the holders in view and for holders that
    are returning to the view.
    """

    rank: Rank
    holders: tuple[NodeId, ...]
    in_view: tuple[NodeId, ...]
    committed: Step
    payload_bytes: int
    reason: str = ""
    """Why the shard is not fully protected. Empty if every holder has the shard of recent steps.

    Possible reasons: a holder is out of view, slow or hard to reach, or a holder or agent refused a snapshot.
    """
    verified: tuple[tuple[Step, float], ...] = ()
    """Newest verified step of each holder and the time of its verification, in the order of `holders`.

    The step is -1 if the owner has seen no verified step of the holder. The time is Unix time in seconds.
    """


class RoundStatus(Message, frozen=True):
    """The state of a generation's rounds, which only the coordinator can report."""

    committed: Step
    proposed: Step
    boundary: Step
    """The highest boundary that any rank reported."""
    committed_at_seconds: float
    """Unix time of the last commit. 0: no commit yet."""
    stopped: bool = False
    """Whether all ranks confirmed an agreed stop."""
    finished: bool = False


class UploadedShard(Message, frozen=True):
    """A shard of a committed step that is completely uploaded to S3."""

    rank: Rank
    step: Step
    origin_generation: Generation
    object: ObjectReference
    object_bytes: int
    etag: str
    payload_bytes: int
    payload_digest: bytes
    layout_hash: bytes
    upload_seconds: float = 0.0
    """Duration of the upload in seconds. The control plane expects about the same duration for the next upload."""


class MetricPoint(Message, frozen=True):
    """Metric values of one step: logged by rank 0, or measured on its node.

    After a restore, values of steps beyond the base step are superseded.
    """

    generation: Generation
    step: Step
    values: dict[str, float]
    at_seconds: float
    """Unix time of the values."""


class MetricBatch(Message, frozen=True):
    """Metric values of one run that the control plane has not yet confirmed as stored.

    An agent numbers all values that its ranks log, from 0. Lost values also consume numbers.
    """

    run: RunId
    first_number: int
    points: tuple[MetricPoint, ...]


DEVICE_SILENT_SECONDS = 15.0
"""Seconds after which an unresponsive GPU driver or disk counts as a fault.

NVML answers within milliseconds and a disk within tens of milliseconds. A GPU reset by its driver takes seconds.
"""


class FaultCode(StrEnum):
    """Codes of a `NodeFault` that several modules use.

    Other codes exist, and a newer agent may send more.

    Faults of a job's member:

    - SOURCE_MISMATCH: no source delivered a shard that matches the plan's digest.
    - SOURCE_UNAVAILABLE: no source delivered the shard, and at least one source was unreachable.
    - MEMORY_FULL: the node has too little memory for a shard or a rank's pages.
    - ROLE_UNAVAILABLE: the node could not get credentials of the job's role.
    - RANKS_NOT_GONE: processes of an older generation do not exit.
    - COORDINATOR_UNREACHABLE: the node cannot take part in the rounds.

    Faults of a node's devices (docs/reference/metrics.md#node-faults):

    - GPU_XID, GPU_ECC, GPU_LOST, GPU_THROTTLED, GPU_SILENT: a GPU or its driver.
    - NIC_DOWN, NIC_ERRORS: a network card.
    - DISK_FULL, DISK_READ_ONLY, DISK_SILENT: a volume.
    - MEMORY_LOW, MEMORY_KILLED: the node's memory.
    """

    SOURCE_MISMATCH = "source_mismatch"
    SOURCE_UNAVAILABLE = "source_unavailable"
    MEMORY_FULL = "memory_full"
    ROLE_UNAVAILABLE = "role_unavailable"
    RANKS_NOT_GONE = "ranks_not_gone"
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


class NodeFault(Message, frozen=True):
    """A typed fault that an agent reports about its own node or job."""

    code: str
    """A `FaultCode`, or a code that only one module reports.

    Examples of codes of one module: `protection_does_not_fit`, `source_refused`, `cannot_resume`, `upload_failed`,
    `archive_unavailable`, `input_unavailable`, `secret_unavailable`, `requirements_failed`, `agent_error`.
    """
    message: str
    """One sentence for the user, with the measured values."""
    is_permanent: bool
    """Whether a new generation cannot repair the fault."""
    device: str = ""
    """The faulty device: `gpu 3`, `eth0`, `/var/lib/everstep`.

    Empty if the fault concerns the whole node or the job.
    """
    xid: int | None = None
    """NVIDIA's error number. Set only for `gpu_xid`."""


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
    message: str
    """AWS's own text."""
    ends_at_seconds: float | None = None
    """Unix time from which the instance may be unavailable. None if AWS announces no time."""


class EndedRanks(Message, frozen=True):
    """The last state of the ranks that the agent ended before it promised a new generation.

    The agent reads it from the ranks' shared pages.
    """

    generation: Generation
    """The generation of the ended ranks."""
    boundary: Step
    """The highest boundary that any of the ended ranks passed, or -1."""


class PageCommit(Message, frozen=True):
    """The newest committed step (C) on a node's rank pages of one generation.

    An agent writes C to the pages before it acts on C, and the pages outlive the agent process. The control plane
    counts a commit only if its step is on the path of the newest started generation. Branches that were abandoned by a
    restore from an older step have commits too.
    """

    generation: Generation
    step: Step


class MemberReport(Message, frozen=True):
    """A node's state as a member of its job."""

    job: JobName
    run: RunId
    generation: Generation
    """The highest promised generation. The agent ignores commands of lower generations."""
    phase: MemberPhase
    inventory: tuple[SlotRecord, ...] = ()
    """The node's sealed slots, frozen at the promise. Sent only while PROMISED."""
    ended: EndedRanks | None = None
    """The run's last ranks on this node. Sent only while PROMISED.

    None: no rank of the run has run on this node.
    """
    commits: tuple[PageCommit, ...] = ()
    """One entry per generation that has a commit on this node's pages, oldest first.

    The agent reads the pages at the promise and sends the entries only while PROMISED.
    """
    ranks: tuple[RankStatus, ...] = ()
    protection: tuple[ShardProtection, ...] = ()
    """The protection of each rank's shard, for the ranks of this node."""
    silent_peers: tuple[NodeId, ...] = ()
    """Peers of this node that have sent nothing for longer than the holder deadline."""
    round: RoundStatus | None = None
    """The state of the rounds. Set only by the coordinator's agent."""
    uploads: tuple[UploadedShard, ...] = ()
    """Uploads of the newest two steps at most."""
    faults: tuple[NodeFault, ...] = ()
    load_seconds: float = 0.0
    longest: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Longest time without progress of any rank in this generation, in seconds, by phase."""
    stacks: tuple[RankStacks, ...] = ()
    """Stacks of the living ranks, for as long as the control plane repeats `TakeStacks`."""
    restored_from: tuple[Literal["local", "peer", "s3"], ...] = ()
    """The source that delivered each rank's shard, in rank order. Set once LOADED.

    It is a later source of the plan if an earlier source failed verification.
    """
    target: Step = Step(0)
    """Total steps of the training, as declared by the script. 0: not declared."""
    measured: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The newest measurements on this node, by metric name. Each is a mean over some seconds.

    Empty until the first iteration has ended.
    """


class RankMemory(Message, frozen=True):
    """Memory of one rank's process in bytes, without the processes that the rank started."""

    rank: Rank
    resident_bytes: int
    """Resident memory. Shared pages count in full, including the pages of snapshots."""
    peak_bytes: int
    """The highest `resident_bytes` since the process started."""


class NodeMemory(Message, frozen=True):
    """Memory of a node and of its ranks in bytes, measured within the last seconds."""

    total_bytes: int
    """The machine's memory, or the limit of the agent's and ranks' cgroup if that is lower."""
    available_bytes: int
    """Memory that the agent and the ranks can allocate without swapping."""
    limit_bytes: int | None = None
    """The limit of their cgroup. None: only the machine limits them."""
    ranks: tuple[RankMemory, ...] = ()
    """Living ranks, in rank order."""


class AgentReport(Message, frozen=True):
    """The whole state of an agent."""

    node_id: NodeId
    sequence: int
    """Increases by one per report. The control plane drops a report with a lower number."""
    member: MemberReport | None
    metrics: MetricBatch | None = None
    """New metric values, which are the only part of a report that is not state.

    The agent sends a batch once. It sends the batch again after a timeout or on a new connection, until `MetricsStored`
    confirms it.
    """
    refused_count: int = 0
    """Peer sessions and rank connections that the agent rejected or closed for invalid input.

    The count begins when the agent starts.
    """
    faults: tuple[NodeFault, ...] = ()
    """Current faults of the node itself, with or without a job. A fault that ends is removed."""
    notices: tuple[NodeNotice, ...] = ()
    """Events that the instance's metadata currently announces."""
    evidence_key: str = ""
    """Key prefix in the object store that holds this node's logs.

    Empty until the agent has stored the logs for a `KeepEvidence`.
    """
    is_warm: bool = True
    """Whether a new rank starts without importing its modules first.

    True also if nothing has to be preloaded. False while the agent preloads, and where preloading failed.
    """
    exposure: str = ""
    """Other data than its own that a job's code can access on this node, as one sentence.

    It names the agent's files, the instance's metadata, or both. Empty: neither is accessible.
    """
    sources: tuple[str, ...] = ()
    """SHA-256 of each source archive that is verified on this node or failed verification."""
    memory: NodeMemory | None = None
    """Memory values for display only. None: not measured yet.

    A change of these values alone triggers no report.
    """


class Hello(Message, frozen=True):
    """First message of an agent on a new connection."""

    node_id: NodeId
    agent_id: str
    """Random id that is new at every start of the agent. Distinguishes a restart from a reconnect."""
    address: str
    peer_port: int
    memory_bytes: int
    """Host memory that the agent may use for slots."""
    version: str
    run: RunId | None = None
    """The run whose state is still on the node. None: no state."""


class AgentWelcome(Message, frozen=True):
    """The control plane accepts the agent. `session_token` replaces the join token from now on."""

    session_token: str
    fleet: str
    timeouts: Timeouts


class Prepare(Message, frozen=True):
    """Command to promise this generation: end the ranks, close streams of older ones, list the slots.

    The control plane repeats the command until the report shows the generation.
    """

    job: JobName
    run: RunId
    generation: Generation
    parent: Generation
    """The newest started generation that is recorded in the control plane."""


class Load(Message, frozen=True):
    """Command to fetch and verify the shards that the plan assigns to this node.

    Valid only for the promised generation.
    """

    plan: GenerationPlan
    key: bytes
    """The generation's key, 32 bytes. Agents use it to authenticate peers. Never logged."""


class Start(Message, frozen=True):
    """Command to start training, sent once every member has verified its shards."""

    job: JobName
    run: RunId
    generation: Generation


class StopTraining(Message, frozen=True):
    """Command to stop training at a step that all ranks agree on. Sent to the coordinator's agent only."""

    job: JobName
    run: RunId
    generation: Generation


class HaltRanks(Message, frozen=True):
    """Command to kill this node's ranks now, because the generation is over."""

    job: JobName
    run: RunId
    generation: Generation
    reason: str


class TakeCheckpoint(Message, frozen=True):
    """Command to upload the next committed step that is at least `step`.

    Sent to the coordinator's agent only, and repeated until such a checkpoint is complete.
    """

    job: JobName
    run: RunId
    generation: Generation
    step: Step


class TakeStacks(Message, frozen=True):
    """Command to read the stacks of every rank without disturbing the rank.

    If the number is repeated, the agent reports the earlier stacks again. If the number is higher, it reads new stacks.
    """

    job: JobName
    run: RunId
    generation: Generation
    number: int


class KillForDrill(Message, frozen=True):
    """Command to kill a rank of this generation, or the agent itself, for a user's drill.

    Sent once. The agent ignores the command if it runs another generation.
    """

    run: RunId
    generation: Generation
    drill: str
    rank: Rank | None = None
    """The rank to kill. None: kill the agent itself."""


class Release(Message, frozen=True):
    """Command to delete all state of this run: slots, pages, files and the promise."""

    run: RunId


class KeepEvidence(Message, frozen=True):
    """Command to upload the logs that only this node has, for a person to inspect.

    The control plane repeats the command until the report contains the key.
    """

    place: ObjectReference
    """Key prefix that ends with a slash. The agent appends `agent.log` and `shim.log`."""


class KeepSources(Message, frozen=True):
    """Command to keep verified copies of exactly these source archives.

    Sent to idle nodes, so that a job starts there without a download. Repeated until the report lists all of them. A
    node that has promised a generation keeps only the archive of its own job.
    """

    sources: tuple[SourceArchive, ...]


class SendLines(Message, frozen=True):
    """Command to send the ranks' output as they print it, for the next `SEND_LINES_SECONDS`.

    Sent while a client follows the logs. The agent first sends its newest lines.
    """

    run: RunId


class LogLines(Message, frozen=True):
    """Lines that the ranks of a node printed.

    Not acknowledged: a follower that misses lines reads them from the object store, `FLUSH_SECONDS` later at most.
    """

    run: RunId
    generation: Generation
    first: int
    """Number of the first line, counted over all lines of this node and generation."""
    lines: tuple[LogLine, ...]


class RunCommand(Message, frozen=True):
    """Command to run a program on the node of a rank and report its result.

    Sent once. For an id that the agent has already run, it reports the same result again and runs nothing.
    """

    run: RunId
    generation: Generation
    command_id: str
    rank: Rank
    argv: tuple[str, ...]
    """The program and its arguments, passed without a shell."""
    timeout_seconds: float
    stdin: bytes = b""
    """The complete standard input of the program."""


class CommandEnded(Message, frozen=True):
    """The result of a `RunCommand`.

    If this message is lost, the waiting client gets an error and may repeat the request with the same id.
    """

    command_id: str
    exit_code: int | None = None
    """The exit code in a shell's convention. None: the program did not end by itself.

    127: the program does not exist. 128 + n: signal n ended the program.
    """
    stdout: bytes = b""
    stderr: bytes = b""
    """Both streams are cut after `MAX_COMMAND_OUTPUT_BYTES` each."""
    is_cut: bool = False
    """Whether stdout or stderr was cut."""
    is_timed_out: bool = False
    refusal: str = ""
    """Why the agent did not run the program. Empty if the agent ran it."""


class MetricsStored(Message, frozen=True):
    """The control plane has stored metric values, and the agent may delete its copy."""

    agent_id: str
    """The agent process whose numbering applies. Each start of an agent numbers from 0."""
    next_number: int
    """The control plane has stored all values with lower numbers."""


AgentToControl = Hello | AgentReport | LogLines | CommandEnded
ControlToAgent = (
    AgentWelcome
    | Prepare
    | Load
    | Start
    | StopTraining
    | HaltRanks
    | TakeCheckpoint
    | TakeStacks
    | KillForDrill
    | Release
    | KeepEvidence
    | KeepSources
    | SendLines
    | RunCommand
    | MetricsStored
)
