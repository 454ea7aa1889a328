"""Defines the messages between a rank and its node's agent, and the layout of the page that they share.

Rank and agent exchange rare events and requests over a unix socket, and the state of every boundary through the page,
which both read without a system call. If page and messages disagree, the page is right. `PageChanged` and `Boundary`
only ask the receiver to read the page, so a loss of them is harmless.

A message of the agent names files: the page and slots, which are sealed memory (memfd_create). Their descriptors
accompany the message (SCM_RIGHTS) in the order of `files_of`. No file system shows these files.

The page has `RANK_WORD_BYTES` bytes, little endian, in two halves with one writer each. The body of a half has two
alternating positions. If the sequence number is odd, the body is at the offsets below. If it is even, the body is 512
bytes further. A writer first fills the unused position and then publishes it by storing the next sequence number.

In the table, the base is the step that the rank restores. The copier is the thread of the rank that copies its state
into slots.

    offset  size  field          written by   meaning
    0       8     sequence       agent        number of writes of this half
    8       8     generation     agent
    16      8     committed      agent        C, the newest committed step, or -1
    24      8     proposed       agent        w, the proposed step, or -1
    32      8     slot           agent        index of the rank's slot that is granted for w, or -1
    40      8     stop           agent        step of the announced stop, or -1
    48      8     stop_state     agent        0 none, 1 announced, 2 confirmed
    56      8     vote_step      agent        the w that the owner's agent last voted on, or -1
    64      8     vote           agent        0 none, 1 acked, 2 abandon
    72      8     load           agent        number of the attempt to load the base into a slot, 0 before the first
    80      8     verified       agent        length of the verified beginning of the base's payload, in this attempt
    88      8     zero           agent        ranks of earlier releases wait while it is above 0
    96      8     rehearsal      agent        step after which all ranks rehearse, or -1; earlier releases: 0
    104     8     rehearsal_state agent       as stop_state, for the rehearsal
    112     8     rehearsal_steps agent       number of steps before it that the ranks repeat
    2048    8     sequence       rank         number of writes of this half
    2056    8     generation     rank
    2064    8     boundary       rank         number of steps finished, -1 before the restore has returned
    2072    8     phase          rank         `Phase`
    2080    8     copying        rank         step that the copier is copying, or -1
    2088    8     standing       rank         `RankStanding`
    2096    8     echo_step      rank         step of the stop that the rank answered last, or -1
    2104    8     echo           rank         0 none, 1 yes (not passed), 2 no
    2112    8     target         rank         the script's total number of steps, 0 if not declared
    2120    8     limit          rank         seconds that the script allows for the phase, 0 if not declared
    2128    8     first_passed   rank         end of the first step after the base, monotonic µs, 0 before that
    2136    8     rehearsal_step rank         step of the rehearsal that the rank answered last; earlier releases: 0
    2144    8     rehearsal_echo rank         0 none, 1 yes, 2 no (passed), 3 the rank cannot rehearse
    2152    8     resume_revision rank        changes that need another proof of the resume; earlier releases: 0

Invariant: a reader always gets one consistent half. During a write, and after a writer died during a write, the reader
gets the previous content. After a restart of either side, code may compare fields of the two halves only if their
generations are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import replace

from everstep.protocol.codec import Message, resolve
from everstep.protocol.fixed_length import Digest
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.limits import (
    MAX_RANK_STEP,
    Count,
    GenerationNumber,
    Items,
    MessageBytes,
    MetricValue,
    Microseconds,
    Name,
    PageStep,
    Seconds,
    SlotNumber,
    Text,
    UnixSeconds,
)
from everstep.protocol.options import OptionsKept
from everstep.protocol.rehearsals import Rehearsed

RANK_WORD_BYTES = 4096
_RANK_HALF = 2048
_AGENT = struct.Struct("<QqqqqQqQQQ8xqQQ")
_RANK = struct.Struct("<QqQqQqQQQQqQQ")
# Python's `struct` stores a native integer in one operation, but one with an explicit byte order byte by byte. So the
# other process never reads a half-written number. Every supported machine is little endian.
_SEQUENCE = struct.Struct("Q")
_PLACES_APART = 512
# Python has no release stores and no acquire loads. On aarch64, a reader could see the sequence number before the
# half's content.
ORDERED_MACHINES = ("x86_64",)
"""Values of `platform.machine()` of processors that make a process's stores visible to others in program order."""
NONE = -1
FINISHED = -2
"""`AgentHalf.proposed` when no further step can be committed. A rank that reads it returns from `close()`."""
ECHO_YES = 1
"""`RankHalf.echo`: the rank has not passed the announced step, and can stop there."""
ECHO_NO = 2
"""`RankHalf.echo`: the rank has passed the announced step, or may have."""
ECHO_UNABLE = 3
"""`RankHalf.rehearsal_echo`: the rank cannot rehearse, for the reason in a `Rehearsed`."""
MAX_LIMIT_SECONDS = 86_400
"""A rank without progress for a day counts as hung in any phase."""

MAX_RANK_MESSAGE_BYTES = 1024 * 1024
"""The agent closes a connection that exceeds the limit."""
MAX_LOGGED_BYTES = 2 * 1024 * 1024
"""Maximum metric values that a rank sends per second. Further values wait in the rank's ring buffer."""

MAX_METRIC_NAME_LENGTH = 255
MetricName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_METRIC_NAME_LENGTH, extra={"is_text": True})]
OWN_METRICS = "everstep/"
"""Prefix of the metrics that Everstep logs itself."""


class Phase(IntEnum):
    """Activity of a rank. Every phase has its own time limit. In WAIT, the rank waits on purpose for something outside
    the job. In REHEARSE, it repeats earlier steps to prove that a resume repeats them (`everstep.protocol.rehearsals`).
    """

    START = 0
    RESTORE = 1
    TRAIN = 2
    EVAL = 3
    CHECKPOINT = 4
    CLOSE = 5
    WAIT = 6
    REHEARSE = 7


class RankStanding(IntEnum):
    """Whether a rank trains, has stopped after the agreed step, or has ended its session.

    - CLOSING: the rank is inside `close()`.
    - CLOSED: the rank has returned from `close()`.
    """

    MOVING = 0
    STOPPED = 1
    CLOSING = 2
    CLOSED = 3


class StopState(IntEnum):
    """The state of an agreed stop, in which all ranks stop at the same step, or of an agreed rehearsal.

    - NONE: no stop is announced, or the stop was withdrawn.
    - ANNOUNCED: each rank answers whether it can still stop at the step, and waits if it reaches the step.
    - CONFIRMED: all ranks stop at the step. A rehearsal is confirmed only when all ranks wait there.
    """

    NONE = 0
    ANNOUNCED = 1
    CONFIRMED = 2


class Vote(IntEnum):
    """The vote of a shard's owner on the step that the coordinator proposes to commit.

    - ACKED: all holders that currently respond have verified and sealed the shard of this step.
    - ABANDON: the shard of this step cannot be replicated.
    """

    NONE = 0
    ACKED = 1
    ABANDON = 2


class AgentHalf(msgspec.Struct, frozen=True, array_like=True):
    """The half of the page that the agent writes. The rank and a restarted agent read it."""

    generation: int
    committed: int = NONE
    proposed: int = NONE
    slot: int = NONE
    stop: int = NONE
    stop_state: StopState = StopState.NONE
    vote_step: int = NONE
    vote: Vote = Vote.NONE
    load: int = 0
    verified: int = 0
    rehearsal: int = NONE
    rehearsal_state: StopState = StopState.NONE
    rehearsal_steps: int = 0


class RankHalf(msgspec.Struct, frozen=True, array_like=True):
    """The half of the page that the rank writes and its agent reads."""

    generation: GenerationNumber
    boundary: PageStep = NONE
    phase: Phase = Phase.START
    copying: PageStep = NONE
    standing: RankStanding = RankStanding.MOVING
    echo_step: PageStep = NONE
    echo: Count = 0
    target: Count = 0
    limit: Count = 0
    first_passed: Microseconds = 0
    """Monotonic µs, so that a restarted agent reports the same time."""
    rehearsal_step: PageStep = NONE
    rehearsal_echo: Count = 0
    resume_revision: Count = 0
    """How often a first pass over the data ended, or modules, parameters or groups changed, in this generation."""


resolve(AgentHalf)
resolve(RankHalf)


def _place(offset: int, sequence: int) -> int:
    return offset + _SEQUENCE.size + (0 if sequence & 1 else _PLACES_APART)


def _write(page: memoryview, offset: int, body: bytes) -> None:
    (sequence,) = _SEQUENCE.unpack_from(page, offset)
    written = (sequence + 1) & 0xFFFFFFFFFFFFFFFF
    start = _place(offset, written)
    page[start : start + len(body)] = body
    _SEQUENCE.pack_into(page, offset, written)


def _read(page: memoryview, offset: int, size: int) -> bytes | None:
    for _ in range(1000):
        (sequence,) = _SEQUENCE.unpack_from(page, offset)
        start = _place(offset, sequence)
        body = bytes(page[start : start + size])
        # Use this half of the page only if its sequence number is unchanged. Otherwise the writer may have started to
        # overwrite it.
        if _SEQUENCE.unpack_from(page, offset) == (sequence,):
            return body
    return None


def unordered_machine(machine: str) -> str:
    """Return why the page is unsafe on a machine's processor and a remedy, in a sentence; empty if it is safe."""
    if machine in ORDERED_MACHINES:
        return ""
    return (
        f"nodes need {' or '.join(ORDERED_MACHINES)} processors; this node has {machine}: choose another instance type"
    )


def write_agent_half(page: memoryview, half: AgentHalf) -> None:
    """Write the agent's half of the page. Only the agent may call this."""
    _write(page, 0, _AGENT.pack(*msgspec.structs.astuple(half)))


def read_agent_half(page: memoryview) -> AgentHalf | None:
    """Return the agent's half of the page, or None if no consistent content can be read now. None means that the agent
    wrote during every attempt, or that a field has a value that this version does not define. The rank then keeps the
    content that it read last, and reads the page again later.
    """
    body = _read(page, 0, _AGENT.size)
    if body is None:
        return None
    try:
        return msgspec.convert(_AGENT.unpack(body), AgentHalf)
    except msgspec.ValidationError:  # A field of the agent's half has a value that this version does not define.
        return None


def write_rank_half(page: memoryview, half: RankHalf) -> None:
    """Write the rank's half of the page, in the training thread or copier, which hold the session's lock."""
    _write(page, _RANK_HALF, _RANK.pack(*msgspec.structs.astuple(half)))


def read_rank_half(page: memoryview) -> RankHalf | None:
    """Return the rank's half of the page; None if the rank wrote meanwhile, or the script overwrote the page."""
    body = _read(page, _RANK_HALF, _RANK.size)
    if body is None:
        return None
    *state, target, limit, first_passed, rehearsal_step, rehearsal_echo, revision = _RANK.unpack(body)
    target, limit = target if target <= MAX_RANK_STEP else 0, limit if limit <= MAX_LIMIT_SECONDS else 0
    try:
        return msgspec.convert(
            (*state, target, limit, first_passed, rehearsal_step, rehearsal_echo, revision), RankHalf
        )
    except msgspec.ValidationError:  # The rank's half contains invalid values, because the script overwrote the page.
        return None


class RankHello(Message, frozen=True):
    """First message of a rank on each new connection."""

    job: JobName
    run: RunId
    generation: Generation
    rank: Rank
    pid: Count


class Arriving(Message, frozen=True):
    """The agent's first answer while it still loads the snapshot that the rank restores. `Welcome` follows.

    The snapshot's index is complete. The rank may copy the first `verified` bytes (a field of the page), but must not
    train before `Welcome`. `load` is the number of the agent's attempt. If the page's `load` differs, all copied bytes
    are invalid, and another `Arriving` or a `Welcome` follows.
    """

    generation: Generation
    word_path: str
    base_step: Step
    base_slot_path: str
    load: int
    index_offset: int
    index_bytes: int


class EarlierLayout(Message, frozen=True):
    """The shards of a restored step that another job or number of ranks made, for `FetchShard`."""

    world_size: int
    here: tuple[Rank, ...]
    """Ranks of that launch whose shards are already in this node's memory."""


class Welcome(Message, frozen=True):
    """Every node has verified its ranks' shards, or with `relayout`, verifies each one that a rank requests."""

    generation: Generation
    word_path: str
    base_step: Step
    """0: the script builds the state of step 0."""
    base_slot_path: str | None
    """The verified slot with the state of `base_step`. None if `base_step` is 0, or with `relayout`."""
    relayout: EarlierLayout | None = None


class FetchShard(Message, frozen=True):
    """The rank's request for an earlier rank's shard after a `Welcome` with `relayout`, repeated on reconnect."""

    generation: Generation
    owner_rank: Rank


class FetchedShard(Message, frozen=True):
    """The agent's answer to `FetchShard`. The slot does not change until the rank has finished its next step."""

    owner_rank: Rank
    path: str
    """The sealed and verified slot; empty if the shard cannot be loaded."""
    problem: str
    """Why the shard cannot be loaded; else empty. The control plane receives it and starts a new generation."""


class SlotsRequest(Message, frozen=True):
    """The rank's request for slots that fit a new or changed state. The answer is `SlotsGranted` or `SlotsRefused`."""

    generation: Generation
    layout_hash: Digest
    capacity_bytes: Count


class SlotsGranted(Message, frozen=True):
    """The current files of the rank's slots. The agent repeats the message for a recreated file before it grants that
    slot on the page. A rank that reads a grant must therefore first read all pending messages on the socket.
    """

    layout_hash: Digest
    capacity_bytes: int
    paths: tuple[str, ...]


class SlotsRefused(Message, frozen=True):
    """The agent lacks memory for the slots, so it votes ABANDON on each step while training continues."""

    layout_hash: Digest
    reason: str


class Capturing(Message, frozen=True):
    """The copied part of a large snapshot. Each message replaces the earlier ones. The agent may send the finished part
    to holders. A later `Captured` or `Abandoned` reports whether the copy is valid.
    """

    generation: Generation
    step: Step
    slot: SlotNumber
    layout_hash: Digest
    payload_bytes: Count
    index_offset: Count
    index_bytes: Count
    final_bytes: Count
    """Bytes at the beginning of the payload that belong to `step`, and that the copier does not write again."""


class Captured(Message, frozen=True):
    """The granted slot contains `step`, complete and consistent. The agent then seals the slot."""

    generation: Generation
    step: Step
    slot: SlotNumber
    layout_hash: Digest
    payload_bytes: Count
    index_offset: Count
    index_bytes: Count
    seconds: Seconds = 0.0
    """Seconds from the boundary to the end of the copy, including the comparison of an audited snapshot."""
    # Right after the copy, the data is in the rank's cache.
    chunk_digests: MessageBytes = b""
    """Digests of the slot's chunks (`everstep.protocol.slot`); if empty, the agent computes them."""


class UnkeptCause(StrEnum):
    """The reason why a job does not keep a step that its rank has finished.

    LATE: The rank had passed the step before the agent granted a slot. The coordinator then proposes steps earlier.
    STATE: No restart could restore the state, for example after a module was pruned.
    CAPTURE: The state could not be read or copied.
    CHANGED: A tensor changed while it was copied.
    LAYOUT: The state no longer fits its slots, and the rank has requested other slots.
    NO_SLOT: The rank's slots are not ready, or all of them are in use.
    MEMORY: The node has too little memory for the rank's slots.
    SILENT_AGENT: An agent does not answer, so the coordinator lacks the votes of its ranks.
    UNCONFIRMED: No rank abandons steps, and still no step is committed.

    Ranks and agents report the first seven. The control plane concludes the other two.
    """

    LATE = "Late"
    STATE = "State"
    CAPTURE = "Capture"
    CHANGED = "Changed"
    LAYOUT = "Layout"
    NO_SLOT = "NoSlot"
    MEMORY = "Memory"
    SILENT_AGENT = "SilentAgent"
    UNCONFIRMED = "Unconfirmed"

    @property
    def lasts(self) -> bool:
        """Whether the cause also prevents the next steps, unless the script or the node's memory changes."""
        return self in (UnkeptCause.STATE, UnkeptCause.CAPTURE, UnkeptCause.MEMORY)


class Abandoned(Message, frozen=True):
    """The rank does not copy `step`, or has cancelled the copy. The copier no longer writes to the slot."""

    generation: Generation
    step: Step
    reason: Text
    cause: UnkeptCause | None = None
    """None from a rank of an earlier release, which reports only `reason`."""

    @property
    def known_cause(self) -> UnkeptCause:
        """The cause, derived from `reason` if the rank is of an earlier release."""
        return self.cause or (UnkeptCause.LATE if self.reason == "late" else UnkeptCause.CAPTURE)


class Boundary(Message, frozen=True):
    """The rank's half of the page has changed. The agent reads it."""

    generation: Generation
    boundary: Step
    at_seconds: Seconds = 0.0
    """Monotonic time at which the rank finished its newest step; 0 if another field of its half has changed."""
    blocked_seconds: Seconds = 0.0
    """Seconds for which snapshots and uploads have blocked the training thread since the previous step."""


class IdleSpan(Message, frozen=True, kw_only=False):
    """A span in every iteration in which training does not use the network."""

    begin_seconds: Seconds
    """Median time from the end of the previous step to the beginning of the span."""
    seconds: Seconds
    deviation_seconds: Seconds = 0.0
    """Standard deviation of the span's beginning or end, whichever is larger."""


class IdleSpans(Message, frozen=True):
    """Newest result of the network profiler, from LOCAL_RANK 0 only: collectives synchronize a node's ranks."""

    generation: Generation
    iteration_seconds: Seconds
    spans: Annotated[tuple[IdleSpan, ...], Items]
    """Earliest first; empty if no pattern was found, or if training sends nothing over the network."""


class PageChanged(Message, frozen=True, tag="WordChanged"):
    """The agent's half of the page has changed. The agent sends this only to a rank that may wait for a change."""


class LogRecord(Message, frozen=True):
    """Metric values that the script logged for one step."""

    step: Step
    values: Annotated[dict[MetricName, MetricValue], Items]
    at_seconds: UnixSeconds


class Logged(Message, frozen=True):
    """Metric values logged since the previous message. `dropped_count` counts dropped log calls."""

    generation: Generation
    records: Annotated[tuple[LogRecord, ...], Items]
    dropped_count: Count = 0


PERMANENT_RANK_FAULTS = frozenset({"cannot_resume", "cannot_relayout"})
"""Errors that a restarted rank raises again. The control plane ends the job instead of restarting its ranks."""
RANK_FAULTS = PERMANENT_RANK_FAULTS | {
    "training_error",
    "restore_mismatch",
    "agent_unreachable",
    "stale_generation",
    "session_misuse",
    "unsupported_version",
    "unsupported_option",
}
"""Codes that an agent passes on from a rank. All other codes are about the agent's node."""


class RankFault(Message, frozen=True):
    """The rank's report of an error after which its session cannot continue, sent before the session raises it."""

    generation: Generation
    code: Name
    message: Text


RankToAgent = (
    RankHello
    | FetchShard
    | SlotsRequest
    | Capturing
    | Captured
    | Abandoned
    | Boundary
    | IdleSpans
    | Logged
    | RankFault
    | Rehearsed
    | OptionsKept
)
AgentToRank = Arriving | Welcome | FetchedShard | SlotsGranted | SlotsRefused | PageChanged


def files_of(message: Message) -> tuple[str, ...]:
    """Return the files whose descriptors accompany a message of the agent, in their order."""
    match message:
        case Arriving() | Welcome():
            return (message.word_path, *([message.base_slot_path] if message.base_slot_path is not None else []))
        case FetchedShard(path=path):
            return (path,) if path else ()
        case SlotsGranted(paths=paths):
            return paths
        case _:
            return ()


def with_files(message: AgentToRank, files: Sequence[str]) -> AgentToRank:
    """Replace a message's files, in the order of `files_of`, for example by paths that a rank can open."""
    match message:
        case Arriving():
            return replace(message, word_path=files[0], base_slot_path=files[1])
        case Welcome():
            return replace(message, word_path=files[0], base_slot_path=files[1] if files[1:] else None)
        case FetchedShard(path=path):
            return replace(message, path=files[0]) if path else message
        case SlotsGranted():
            return replace(message, paths=tuple(files))
        case _:
            return message
