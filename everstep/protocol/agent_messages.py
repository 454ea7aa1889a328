"""Between an agent and the control plane, over one websocket that the agent opens; level-triggered both ways.

The agent sends `AgentReport`, its whole state, on every change and at least every `lease_seconds / 3`; the newest
replaces all before it. The control plane sends commands that are idempotent: it repeats one until a report shows its
effect. Nothing else is acknowledged.

    agent                                     control plane
    Hello (join token or session token in the HTTP request's Authorization)
                                  ◀─────      AgentWelcome
    AgentReport …                 ─────▶
                                  ◀─────      Prepare(g)              until report.job.generation = g
                                  ◀─────      Load(plan, key)         until phase is loading or later
                                  ◀─────      Start(g)                when every member reports loaded
                                  ◀─────      StopTraining(g)         to the coordinator's agent
                                  ◀─────      HaltRanks(g)            a rank died somewhere: stop yours now
                                  ◀─────      TakeCheckpoint(g, k)   to the coordinator's agent, until k or a later step is a checkpoint
                                  ◀─────      TakeStacks(g, n)        until the report's stacks show n: what are your ranks doing?
                                  ◀─────      Release(run)            the job has ended or left this node: forget it
                                  ◀─────      KeepEvidence(place)     until report.evidence_key = place.key
                                  ◀─────      SendLines(run)          every few seconds, while anybody follows what its ranks print
    LogLines …                    ─────▶                              as they come; what is lost is in the object store
                                  ◀─────      RunCommand(id, argv)    once: a person runs something beside a rank
    CommandEnded(id)              ─────▶                              once, and again where the same id is asked for again

Invariant: an agent acts on no command of a generation below the one it promised.
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
"""Close code of a line whose token is not that of the node which says Hello."""
ALREADY_JOINED = 4410
"""Close code of a join for a node that has joined before: only the node's session token opens its line now."""
SEND_LINES_SECONDS = 10.0
MAX_COMMAND_OUTPUT_BYTES = 256 * 1024
"""Of each stream of a command that a person runs beside a rank."""


class MemberPhase(StrEnum):
    """The phases of a node in one generation of a job.

    PROMISED: The promise is on disk, the old ranks are gone, and the inventory is frozen. Left by Load.
    LOADING: The source is unpacked, the ranks are started, and their shards are fetched and verified.
    LOADED: Every shard is verified. Left by Start.
    LOAD_FAILED: A source did not verify.
    RUNNING: The ranks may train. Left when all have exited.
    EXITED: No rank lives, and outputs and logs are uploaded as far as possible.
    """

    PROMISED = "promised"
    LOADING = "loading"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    RUNNING = "running"
    EXITED = "exited"


class ExitClass(StrEnum):
    """What a rank's exit means.

    SUCCESS: code 0. ERROR: a code of its own, an exception in the script. KILLED: a signal that somebody sent. CRASHED:
    a signal that the program caused (SEGV, BUS, ABRT, ILL, FPE). OUT_OF_MEMORY: the kernel killed the rank for lack of
    memory, or the rank's last exception is one of lack of memory; `RankExit.memory` holds the evidence. HALTED: stopped
    by the agent because the generation was over.
    """

    SUCCESS = "success"
    ERROR = "error"
    KILLED = "killed"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HALTED = "halted"


class MemoryKind(StrEnum):
    """Which memory a rank ran out of. HOST: of the node, or of its cgroup. GPU: of a device."""

    HOST = "host"
    GPU = "gpu"


class MemorySource(StrEnum):
    """What says that a rank ran out of memory.

    KERNEL_LOG: the kernel logged that it killed this process. CGROUP: the kill counter of the rank's memory cgroup
    rose. NODE: only the node's kill counter rose, so the killed process may be another one. EXCEPTION: the rank's own
    last exception.
    """

    KERNEL_LOG = "kernel_log"
    CGROUP = "cgroup"
    NODE = "node"
    EXCEPTION = "exception"


class MemoryEnd(Message, frozen=True):
    """The evidence that a rank ran out of memory, with the last figures from before its end.

    Sizes are bytes; None: not measured.
    """

    source: MemorySource
    kind: MemoryKind
    rank_bytes: int | None = None
    """Resident memory of the rank's process."""
    used_bytes: int | None = None
    """Memory in use on the node, or in its cgroup where that has a limit."""
    total_bytes: int | None = None
    """The limit that `used_bytes` counts against."""
    words: str = ""
    """The first line of the exception; empty for other sources."""


class RankExit(Message, frozen=True):
    """How a rank ended, as its shim saw it."""

    exit_class: ExitClass
    code: int
    """Exit code, or minus the signal's number."""
    at_seconds: float
    """Unix time."""
    boundary: Step
    """The last boundary it passed, or -1."""
    last_lines: str = ""
    """The end of its stderr, at most 4 KiB."""
    memory: MemoryEnd | None = None
    """Set for OUT_OF_MEMORY alone."""


class RankStatus(Message, frozen=True):
    """Where one rank is, and how it ended once it has."""

    rank: Rank
    boundary: Step
    """-1 before the rank has restored."""
    exit: RankExit | None = None
    phase: str = ""
    """`start`, `restore`, `first_step`, `train`, `eval`, `checkpoint`, `wait`, `close`: what it said last that it is doing."""
    still_seconds: float = 0.0
    """For how long neither its boundary nor its phase has changed."""
    limit_seconds: float = 0.0
    """How long the phase may take, as its script says; 0: it has not told."""
    passed_at_seconds: float = 0.0
    """Unix time at which the rank passed its boundary, by its own stamp; 0: nobody knows."""
    first_passed_at_seconds: float = 0.0
    """Unix time at which the rank made the first step beyond the one that it was started from; 0: it has not."""


class RankStacks(Message, frozen=True):
    """What one rank was doing when its agent looked."""

    rank: Rank
    number: int
    """Of the `TakeStacks` that it answers."""
    text: str
    """Python stacks, the main thread's first, innermost frame first; at most 8 KiB.

    Empty when they could not be read.
    """
    same_seconds: float
    """For how long these very stacks have been found by every look of this agent; 0 at its first."""
    cpu_seconds: float
    """CPU time that the rank and all that it started have used meanwhile."""
    is_stopped: bool = False
    """Its process is stopped by a signal: it will do nothing until somebody continues it."""
    gpu_percent: float | None = None
    """How busy its GPU is; None where that is not known."""
    error: str = ""
    """Why the stacks could not be read."""


class ShardProtection(Message, frozen=True):
    """Who holds one rank's shard, as its owner's agent sees it."""

    rank: Rank
    holders: tuple[NodeId, ...]
    in_view: tuple[NodeId, ...]
    committed: Step
    payload_bytes: int
    reason: str = ""
    """Why a holder is out of view, slow or hard to reach, or snapshots are refused; empty when all is well."""
    verified: tuple[tuple[Step, float], ...] = ()
    """By holder, in the order of `holders`: the newest step that it is known to hold verified, or -1, and since when, Unix time."""


class RoundStatus(Message, frozen=True):
    """What the coordinator alone knows of a generation."""

    committed: Step
    proposed: Step
    boundary: Step
    """The highest that any rank reported."""
    committed_at_seconds: float
    """Unix time of the last commit; 0 before the first."""
    stopped: bool = False
    """An agreed stop was confirmed."""
    finished: bool = False


class UploadedShard(Message, frozen=True):
    """One rank's shard of a committed step is complete in S3."""

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
    """How long it took: what the control plane expects of the next one."""


class MetricPoint(Message, frozen=True):
    """Values that rank 0 logged for one step, or that were measured on its node; after a restore values beyond the base are superseded."""

    generation: Generation
    step: Step
    values: dict[str, float]
    at_seconds: float
    """When, Unix time."""


class MetricBatch(Message, frozen=True):
    """Values of one run that the control plane has not said to have stored.

    An agent counts all that its ranks log, from 0, lost ones included.
    """

    run: RunId
    first_number: int
    points: tuple[MetricPoint, ...]


DEVICE_SILENT_SECONDS = 15.0
"""A driver or a disk that has not answered for so long is a fault: NVML answers in milliseconds, a disk in tens of them; a GPU that is being reset
by its driver takes seconds."""


class FaultCode(StrEnum):
    """Codes of a `NodeFault` that more than one place speaks of; there are others, and a newer agent may have more.

    Of a job's member. SOURCE_MISMATCH: what should have been loaded is not what the plan says, wherever it was looked
    for. SOURCE_UNAVAILABLE: a shard was not to be had, and at least one place was out of reach. MEMORY_FULL: there was
    no room for a shard or a rank's pages. ROLE_UNAVAILABLE: there are no keys of the job's role. RANKS_NOT_GONE:
    processes of an older generation will not end. COORDINATOR_UNREACHABLE: it takes no part in the rounds.

    Of a node's devices (docs/reference/metrics.md#node-faults). GPU_XID, GPU_ECC, GPU_LOST, GPU_THROTTLED, GPU_SILENT:
    of a GPU or its driver. NIC_DOWN, NIC_ERRORS: of a network card. DISK_FULL, DISK_READ_ONLY, DISK_SILENT: of a
    volume. MEMORY_LOW, MEMORY_KILLED: of the node's memory.
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
    """A typed fault that the live agent reports about its own node or job."""

    code: str
    """A `FaultCode`, or what one place alone reports: `protection_does_not_fit`, `source_refused`, `cannot_resume`, `upload_failed`,
    `archive_unavailable`, `input_unavailable`, `secret_unavailable`, `requirements_failed`, `agent_error` …"""
    message: str
    """A sentence for the user, with the figures."""
    is_permanent: bool
    """No new generation can help."""
    device: str = ""
    """What of the node is meant: `gpu 3`, `eth0`, `/var/lib/everstep`; empty when it is the node or the job."""
    xid: int | None = None
    """Of `gpu_xid`: NVIDIA's number of the error."""


class NoticeKind(StrEnum):
    """What AWS has announced for an instance.

    SPOT_INTERRUPTION: taken back in two minutes. REBALANCE: more likely than others to be interrupted soon.
    MAINTENANCE: a scheduled event: reboot, retirement, stop. CAPACITY_BLOCK_END: its reservation ends. TERMINATING: its
    group ends it; a lifecycle hook holds it until this is answered.
    """

    SPOT_INTERRUPTION = "spot_interruption"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    CAPACITY_BLOCK_END = "capacity_block_end"
    TERMINATING = "terminating"


class NodeNotice(Message, frozen=True):
    """Something that will happen to this node's instance, as its own metadata says."""

    kind: NoticeKind
    message: str
    """AWS's own words."""
    ends_at_seconds: float | None = None
    """Unix time from which the instance may be gone; None where AWS names none."""


class EndedRanks(Message, frozen=True):
    """What ranks that were ended for a promise have left on their pages."""

    generation: Generation
    """Theirs."""
    boundary: Step
    """The highest that one of them passed, or -1."""


class PageCommit(Message, frozen=True):
    """The newest committed step (C) on a node's rank pages of one generation.

    An agent writes C to the pages before it acts on C, and the pages survive the agent. The control plane counts a C
    only if it is on the path of the newest started generation: an abandoned branch has commits, too.
    """

    generation: Generation
    step: Step


class MemberReport(Message, frozen=True):
    """What this node does for its job."""

    job: JobName
    run: RunId
    generation: Generation
    """The highest promised; nothing of a lower one is acted on any more."""
    phase: MemberPhase
    inventory: tuple[SlotRecord, ...] = ()
    """Frozen at the promise; listed while PROMISED."""
    ended: EndedRanks | None = None
    """The last ranks of the run that lived here; told while PROMISED. None: there were none."""
    commits: tuple[PageCommit, ...] = ()
    """One per generation with a commit on the pages here, oldest first. Read at the promise, listed while PROMISED."""
    ranks: tuple[RankStatus, ...] = ()
    protection: tuple[ShardProtection, ...] = ()
    """Of the ranks that live here."""
    silent_peers: tuple[NodeId, ...] = ()
    """Nodes of the job that this one speaks with, and that have said nothing for longer than the holder deadline."""
    round: RoundStatus | None = None
    """From the coordinator's agent alone."""
    uploads: tuple[UploadedShard, ...] = ()
    """The newest two steps at most."""
    faults: tuple[NodeFault, ...] = ()
    load_seconds: float = 0.0
    longest: dict[str, float] = msgspec.field(default_factory=dict)
    """By phase, seconds: the longest that any of its ranks stood still before it moved on, in this generation."""
    stacks: tuple[RankStacks, ...] = ()
    """Of the ranks that live, for as long as `TakeStacks` asks for them."""
    restored_from: tuple[Literal["local", "peer", "s3"], ...] = ()
    """Where each of its ranks' shards really came from, once LOADED; farther than planned where a nearer source did not verify."""
    target: Step = Step(0)
    """Steps finished when the script will be done, as its ranks say; 0: they have not."""
    measured: dict[str, float] = msgspec.field(default_factory=dict)
    """What was measured last on this node, by the name of its metric: means of some seconds.

    Empty until an iteration has ended.
    """


class RankMemory(Message, frozen=True):
    """What the process of one rank has in memory, in bytes; the processes that the rank started do not count."""

    rank: Rank
    resident_bytes: int
    """Pages that the process shares with others count in full, those of snapshots too."""
    peak_bytes: int
    """The highest `resident_bytes` since the process started."""


class NodeMemory(Message, frozen=True):
    """Memory of a node and of its ranks, at most some seconds old, in bytes."""

    total_bytes: int
    """What agent and ranks can have at most: of the machine, or of their cgroup where that has a lower limit."""
    available_bytes: int
    """What they could allocate now without swapping."""
    limit_bytes: int | None = None
    """The limit of their cgroup; None: the machine is the limit."""
    ranks: tuple[RankMemory, ...] = ()
    """Living ranks, in order."""


class AgentReport(Message, frozen=True):
    """An agent's whole state."""

    node_id: NodeId
    sequence: int
    """Grows by one; a lower one is late."""
    member: MemberReport | None
    metrics: MetricBatch | None = None
    """The only part that is not state: sent once, and again after a while or on a new connection, until `MetricsStored` says that it is kept."""
    refused_count: int = 0
    """Sessions and lines of other agents and of ranks that this agent has refused, or closed for what they said, since it started."""
    faults: tuple[NodeFault, ...] = ()
    """Of the node itself, whether or not a job is here: typed, and no longer told when they are over."""
    notices: tuple[NodeNotice, ...] = ()
    """What the instance's metadata announces; empty when it announces nothing."""
    evidence_key: str = ""
    """Below which key of the object store the node's own log lies, once `KeepEvidence` asked for it."""
    is_warm: bool = True
    """Ranks start without importing first, or there is nothing to import.

    False while that is being preloaded, and where it could not be.
    """
    exposure: str = ""
    """What a job's code can get at here that is not the job's, in a sentence: the agent's files, the instance's metadata; empty: neither."""
    sources: tuple[str, ...] = ()
    """SHA-256 of the source archives that are here and verified, or were found unsound."""
    memory: NodeMemory | None = None
    """For people; nothing is decided by it, and a new figure alone sends no report. None: not measured yet."""


class Hello(Message, frozen=True):
    """First message of an agent."""

    node_id: NodeId
    agent_id: str
    """Fresh at every start of the agent: tells a restarted agent from a reconnected one."""
    address: str
    peer_port: int
    memory_bytes: int
    """Host memory that slots may take."""
    version: str
    run: RunId | None = None
    """The run that it still has something of."""


class AgentWelcome(Message, frozen=True):
    """The agent is known. `session_token` replaces the join token from now on."""

    session_token: str
    fleet: str
    timeouts: Timeouts


class Prepare(Message, frozen=True):
    """Promise this generation: end the ranks, close the streams of all below it, and list the slots.

    Repeated until the report shows it.
    """

    job: JobName
    run: RunId
    generation: Generation
    parent: Generation
    """The newest generation that the control plane knows to have been started."""


class Load(Message, frozen=True):
    """Fetch and verify what the plan names for this node. Only for the generation that is promised."""

    plan: GenerationPlan
    key: bytes
    """The generation's key, 32 bytes; authenticates peers. Never logged."""


class Start(Message, frozen=True):
    """Start the ranks: every member has verified its shards."""

    job: JobName
    run: RunId
    generation: Generation


class StopTraining(Message, frozen=True):
    """To the coordinator's agent: agree on a stop with all ranks, commit what can be committed, end."""

    job: JobName
    run: RunId
    generation: Generation


class HaltRanks(Message, frozen=True):
    """Kill this node's ranks now; the generation is over."""

    job: JobName
    run: RunId
    generation: Generation
    reason: str


class TakeCheckpoint(Message, frozen=True):
    """To the coordinator's agent: have the next commit of `step` or a later one uploaded.

    Repeated until there is such a checkpoint.
    """

    job: JobName
    run: RunId
    generation: Generation
    step: Step


class TakeStacks(Message, frozen=True):
    """Look what every rank is doing, without touching it.

    A number that was taken before is shown again, a higher one is a new look.
    """

    job: JobName
    run: RunId
    generation: Generation
    number: int


class KillForDrill(Message, frozen=True):
    """Kill a rank of this generation, or the agent itself: a person asked for a drill.

    Sent once; one that is late is not for this generation.
    """

    run: RunId
    generation: Generation
    drill: str
    rank: Rank | None = None
    """None: the agent itself."""


class Release(Message, frozen=True):
    """Forget this run: slots, pages, files and the promise of it."""

    run: RunId


class KeepEvidence(Message, frozen=True):
    """Put what this node alone can tell of itself into the object store: a person is to look at it.

    Repeated until the report names the key.
    """

    place: ObjectReference
    """The key ends with a slash; the node adds `agent.log` and `shim.log`."""


class KeepSources(Message, frozen=True):
    """Have these source archives here, verified, and no others: this node waits for work, and a job may need it at once. Repeated until the report
    names all of them. A node that has promised a generation keeps its own job's alone, whatever it is told.
    """

    sources: tuple[SourceArchive, ...]


class SendLines(Message, frozen=True):
    """Send what the ranks of this run print, as they print it, for `SEND_LINES_SECONDS` from now; somebody follows it.

    At first the newest lines.
    """

    run: RunId


class LogLines(Message, frozen=True):
    """What the ranks of a node have printed.

    Not acknowledged: who misses some finds them in the object store within `FLUSH_SECONDS`.
    """

    run: RunId
    generation: Generation
    first: int
    """Number of the first line, among all of this node and generation."""
    lines: tuple[LogLine, ...]


class RunCommand(Message, frozen=True):
    """Run a program beside a rank and say what came of it.

    Sent once: an id that was run already is not run again, it is answered again.
    """

    run: RunId
    generation: Generation
    command_id: str
    rank: Rank
    argv: tuple[str, ...]
    """The program and its arguments, as they are: no shell sees them."""
    timeout_seconds: float
    stdin: bytes = b""
    """All that it can read there."""


class CommandEnded(Message, frozen=True):
    """What came of a `RunCommand`. Where it is lost, whoever waits is told so, and may ask again with the same id."""

    command_id: str
    exit_code: int | None = None
    """None: it did not end by itself.

    As a shell says it: 127 for a program that is not there, 128 and the signal's number.
    """
    stdout: bytes = b""
    stderr: bytes = b""
    """The first `MAX_COMMAND_OUTPUT_BYTES` of each."""
    is_cut: bool = False
    """There was more."""
    is_timed_out: bool = False
    refusal: str = ""
    """Why it was not run."""


class MetricsStored(Message, frozen=True):
    """Logged values are kept: the agent may forget them."""

    agent_id: str
    """Whose numbers these are: another agent of the node has its own."""
    next_number: int
    """Those before it are kept."""


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
