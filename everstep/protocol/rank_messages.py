"""Defines the messages between a rank and its node's agent, and the layout of the page that they share.

Rank and agent exchange rare events and requests over a unix socket. They exchange the state of every boundary through
the page, which both read without a system call. If page and messages disagree, the page is right. `PageChanged` and
`Boundary` only ask the receiver to read the page, so a loss of them is harmless.

A message of the agent names files: the page and slots, which are sealed memory (memfd_create). Their descriptors
accompany the message (SCM_RIGHTS) in the order of `files_of`. No file system shows these files.

The page has `RANK_WORD_BYTES` bytes, little endian, in two halves with one writer each. The body of a half has
two alternating positions. If the sequence number is odd, the body is at the offsets below. If it is even, the body is
512 bytes further. A writer first fills the unused position and then publishes it by storing the next sequence number.

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

The module has more than 500 lines. It is not divided, because page and messages share the types of steps, phases and
generations.
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
_SEQUENCE = struct.Struct("Q")
"""Layout of a sequence number, in native byte order (little endian on every supported machine).

Python's `struct` stores a native integer in one operation, so the other process never reads a half-written number. It
stores an integer with an explicit byte order byte by byte.
"""
_PLACES_APART = 512
ORDERED_MACHINES = ("x86_64",)
"""Processors that make a process's stores visible to others in program order.

The names are those of `platform.machine()`. Processes read the page without a lock, and Python has no release stores
and no acquire loads. On other processors (aarch64), a reader could see the sequence number before the half's content.
"""
NONE = -1
FINISHED = -2
"""Value of `AgentHalf.proposed` when no further step can be committed. A rank that reads it returns from `close()`."""
ECHO_YES = 1
"""Value of `RankHalf.echo`: the rank can stop at the announced step, because it has not passed the step."""
ECHO_NO = 2
"""Value of `RankHalf.echo`: the rank cannot stop at the announced step, because it has passed the step or may have."""
ECHO_UNABLE = 3
"""Value of `RankHalf.rehearsal_echo`: the rank cannot rehearse. A message `Rehearsed` has the reason."""
MAX_LIMIT_SECONDS = 86_400
"""Upper limit of the time that a script may allow for a phase: one day.

A rank without progress for a day counts as hung in any phase.
"""

MAX_RANK_MESSAGE_BYTES = 1024 * 1024
"""Upper limit of one message from a rank, in bytes. The agent closes a connection that exceeds the limit."""
MAX_LOGGED_BYTES = 2 * 1024 * 1024
"""Upper limit of the metric values that a rank sends per second, in bytes over all messages.

Further values wait in the rank's ring buffer. While the buffer is full, the rank drops the values of new log calls.
"""

MAX_METRIC_NAME_LENGTH = 255
"""Maximum number of characters in the name of a metric."""
MetricName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_METRIC_NAME_LENGTH, extra={"is_text": True})]
OWN_METRICS = "everstep/"
"""Prefix of the names of metrics that Everstep logs itself."""


class Phase(IntEnum):
    """Activity of a rank, as the rank reports it. Every phase has its own time limit.

    In WAIT, the rank waits on purpose for something outside the job. In REHEARSE, it repeats earlier steps to prove
    that a resume repeats them (`everstep.protocol.rehearsals`).
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
    """Whether a rank trains, has stopped after a step, or has ended its session.

    - MOVING: the rank has not stopped.
    - STOPPED: the rank has stopped after the step at which all ranks agreed to stop.
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
    """The vote of the agent that owns a shard on the step that the coordinator proposes to commit.

    - NONE: no vote yet.
    - ACKED: all holders that currently respond have verified and sealed the shard of this step.
    - ABANDON: the shard of this step cannot be replicated.
    """

    NONE = 0
    ACKED = 1
    ABANDON = 2


class AgentHalf(msgspec.Struct, frozen=True, array_like=True):
    """The half of the shared-memory page that the agent writes. The rank reads it. A restarted agent reads it, too."""

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
    """Step after which all ranks rehearse: they restart, and repeat the `rehearsal_steps` steps before it."""
    rehearsal_state: StopState = StopState.NONE
    rehearsal_steps: int = 0


class RankHalf(msgspec.Struct, frozen=True, array_like=True):
    """The half of the shared-memory page that the rank writes and its agent reads."""

    generation: GenerationNumber
    boundary: PageStep = NONE
    phase: Phase = Phase.START
    copying: PageStep = NONE
    standing: RankStanding = RankStanding.MOVING
    echo_step: PageStep = NONE
    echo: Count = 0
    target: Count = 0
    """The script's total number of steps; 0 if the script has declared none."""
    limit: Count = 0
    """Seconds that the script allows for the phase; 0 if the script has declared no limit."""
    first_passed: Microseconds = 0
    """End of the rank's first step in this generation, in µs of the node's monotonic clock; 0 before that.

    The page outlives the agent, so a restarted agent reports the same time.
    """
    rehearsal_step: PageStep = NONE
    """Step of the announced rehearsal that the rank has answered last."""
    rehearsal_echo: Count = 0
    """The answer: 0 none, `ECHO_YES`, `ECHO_NO` or `ECHO_UNABLE`."""
    resume_revision: Count = 0
    """How often, in this generation, a first pass over the data ended, or the set of modules, parameters or groups
    changed.
    """


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
    """Return why the shared page is unsafe on a machine's processor, or an empty string if it is safe.

    Args:
        machine: `platform.machine()`.

    Returns:
        The reason and a remedy, as one sentence.
    """
    if machine in ORDERED_MACHINES:
        return ""
    return (
        f"nodes need {' or '.join(ORDERED_MACHINES)} processors; this node has {machine}: choose another instance type"
    )


def write_agent_half(page: memoryview, half: AgentHalf) -> None:
    """Write the agent's half of the page, so that the rank reads it. Only the agent may call this."""
    _write(page, 0, _AGENT.pack(*msgspec.structs.astuple(half)))


def read_agent_half(page: memoryview) -> AgentHalf | None:
    """Return the agent's half of the page, or None if no consistent content can be read now.

    None means that the agent wrote during every attempt, or that a field has a value that this version does not define.
    A rank then keeps the content that it read last, and reads the page again later. The agent's next write replaces
    all fields.
    """
    body = _read(page, 0, _AGENT.size)
    if body is None:
        return None
    try:
        return msgspec.convert(_AGENT.unpack(body), AgentHalf)
    except msgspec.ValidationError:  # A field of the agent's half has a value that this version does not define.
        return None


def write_rank_half(page: memoryview, half: RankHalf) -> None:
    """Write the rank's half of the page, so that the agent reads it.

    Only the rank's training thread and the thread that copies snapshots may call this, while they hold the session's
    lock.
    """
    _write(page, _RANK_HALF, _RANK.pack(*msgspec.structs.astuple(half)))


def read_rank_half(page: memoryview) -> RankHalf | None:
    """Return the rank's half of the page, or None if it cannot be read consistently.

    The result is None if the rank wrote during every attempt to read, or if the script overwrote the page.
    """
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
    """The agent's first answer while it still loads the snapshot that the rank restores.

    `Welcome` follows. The snapshot's index is complete. The shared page's field `verified` is the number of bytes at
    the beginning of the payload that are verified. The rank may copy these bytes, but must not train before `Welcome`.
    `load` is the number of the agent's attempt to load the snapshot. If the page's `load` differs, a new attempt has
    begun and may overwrite the slot. All copied bytes are then invalid, and another `Arriving` or a `Welcome` follows.
    """

    generation: Generation
    word_path: str
    base_step: Step
    base_slot_path: str
    load: int
    index_offset: int
    index_bytes: int


class EarlierLayout(Message, frozen=True):
    """The shards into which a launch with a different number of ranks, or another job, divided the restored step.

    The rank requests those of the shards that it needs with `FetchShard`.
    """

    world_size: int
    """Number of ranks of the generation that made the restored step."""
    here: tuple[Rank, ...]
    """Ranks of the generation that made the restored step, if their shards are already in this node's memory."""


class Welcome(Message, frozen=True):
    """The agent's report that every node has verified the shards that its ranks restore.

    The rank may then restore. The message names the slot to restore from and the shared page.
    Exception: with `relayout` (a different number of ranks), no shard is verified yet. The agent then verifies each
    shard of the earlier launch when a rank requests the shard.
    """

    generation: Generation
    word_path: str
    base_step: Step
    """The step to restore; 0 if there is nothing to restore, because the script builds the state of step 0."""
    base_slot_path: str | None
    """The verified slot with the state of `base_step`.

    None if `base_step` is 0, or if `relayout` is set.
    """
    relayout: EarlierLayout | None = None
    """The division of the restored step into shards, if a different number of ranks made the step; None otherwise."""


class FetchShard(Message, frozen=True):
    """The rank's request for the whole shard of an earlier rank (a rank of the generation that made the restored step).

    Valid only after a `Welcome` with `relayout`. The answer is `FetchedShard`. A rank repeats an unanswered request on
    a new connection.
    """

    generation: Generation
    owner_rank: Rank
    """The rank, in the launch that captured the step, whose shard is requested."""


class FetchedShard(Message, frozen=True):
    """The agent's answer to `FetchShard`: the shard's slot, or the reason of a failure.

    The slot with the shard does not change until the rank has finished its next step.
    """

    owner_rank: Rank
    path: str
    """The sealed and verified slot; empty if the shard cannot be loaded."""
    problem: str
    """Reason why the shard cannot be loaded; empty if `path` is set.

    The agent also reports the reason to the control plane, which starts a new generation.
    """


class SlotsRequest(Message, frozen=True):
    """The rank's request for slots whose size fits a new or changed state.

    The answer is `SlotsGranted` or `SlotsRefused`.
    """

    generation: Generation
    layout_hash: Digest
    capacity_bytes: Count


class SlotsGranted(Message, frozen=True):
    """The current files of the rank's slots.

    When the agent has recreated a slot's file, it repeats the message before it grants that slot on the page. A rank
    that reads a grant must therefore first read all pending messages on the socket.
    """

    layout_hash: Digest
    capacity_bytes: int
    paths: tuple[str, ...]


class SlotsRefused(Message, frozen=True):
    """The agent's answer that it has no memory for the requested slots, so the rank's state is not protected.

    Training continues, and the agent votes ABANDON on each proposed step. Users see the reason.
    """

    layout_hash: Digest
    reason: str


class Capturing(Message, frozen=True):
    """The rank's report of how much of a snapshot its background thread has already copied into the slot.

    The agent may compute digests of the finished part and send it to holders before the copy is complete. A later
    `Captured` or `Abandoned` reports whether the copy is a valid snapshot. The rank sends this message only for a large
    state. Each message replaces the earlier ones, so a loss is harmless.
    """

    generation: Generation
    step: Step
    slot: SlotNumber
    layout_hash: Digest
    payload_bytes: Count
    index_offset: Count
    index_bytes: Count
    final_bytes: Count
    """Number of bytes at the beginning of the payload that are final.

    These bytes belong to `step`, and the copier does not write them again.
    """


class Captured(Message, frozen=True):
    """The rank's report that the granted slot contains `step`, complete and consistent but not yet sealed.

    The agent then seals the slot.
    """

    generation: Generation
    step: Step
    slot: SlotNumber
    layout_hash: Digest
    payload_bytes: Count
    index_offset: Count
    index_bytes: Count
    seconds: Seconds = 0.0
    """Seconds from the boundary to the end of the copy.

    An audited snapshot is also compared byte by byte with the live state. For it, the value includes the comparison.
    """
    chunk_digests: MessageBytes = b""
    """Digests of the slot's chunks (`everstep.protocol.slot`), or empty.

    The rank computes them right after the copy, while the data is in the cache. If empty, the agent computes them.
    """


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
    """The rank's report that it does not copy `step` into its slot, or that it has cancelled this copy.

    The copier no longer writes to the slot.
    """

    generation: Generation
    step: Step
    reason: Text
    """The cause in words, for people."""
    cause: UnkeptCause | None = None
    """None if the rank imports an earlier release, which reports only words: `late`, or an obstacle of the capture."""

    @property
    def known_cause(self) -> UnkeptCause:
        """The cause, also if an earlier release reports it."""
        return self.cause or (UnkeptCause.LATE if self.reason == "late" else UnkeptCause.CAPTURE)


class Boundary(Message, frozen=True):
    """A rank's request to its agent to read the rank's half of the shared page, which has changed."""

    generation: Generation
    boundary: Step
    at_seconds: Seconds = 0.0
    """Time at which the rank finished its newest step, on the node's monotonic clock.

    0 if the message reports no finished step, but a change of another field of the rank's half of the page.
    """
    blocked_seconds: Seconds = 0.0
    """Seconds for which snapshots and uploads have blocked the training thread since the previous finished step."""


class IdleSpan(Message, frozen=True, kw_only=False):
    """A time span in every iteration in which training does not use the network.

    An iteration is the training work from one finished optimizer step to the next.
    """

    begin_seconds: Seconds
    """Median time in seconds from the end of the previous step to the beginning of the span."""
    seconds: Seconds
    """Median duration of the span in seconds."""
    deviation_seconds: Seconds = 0.0
    """Standard deviation of the span's beginning or end, whichever is larger."""


class IdleSpans(Message, frozen=True):
    """Result of the network profiler: the times in an iteration when training does not use the network.

    Only the rank with LOCAL_RANK 0 sends it, because collectives synchronize the ranks of a node. A later message
    replaces an earlier message.
    """

    generation: Generation
    iteration_seconds: Seconds
    """Median duration of an iteration in seconds."""
    spans: Annotated[tuple[IdleSpan, ...], Items]
    """The spans in order of time; empty if no pattern was found, or if training sends nothing over the network."""


class PageChanged(Message, frozen=True, tag="WordChanged"):
    """The agent's request to a rank to read the agent's half of the shared page, which has changed.

    The agent sends it only to a rank that may be waiting for a change. A training rank reads the page after every step.
    """


class LogRecord(Message, frozen=True):
    """Metric values that the script logged for one step."""

    step: Step
    values: Annotated[dict[MetricName, MetricValue], Items]
    at_seconds: UnixSeconds
    """Unix time at which the script logged the values."""


class Logged(Message, frozen=True):
    """Metric values logged since the previous message.

    `dropped_count` is the number of log calls whose values the rank has dropped since the previous message, for example
    because its ring buffer was full.
    """

    generation: Generation
    records: Annotated[tuple[LogRecord, ...], Items]
    dropped_count: Count = 0


PERMANENT_RANK_FAULTS = frozenset({"cannot_resume", "cannot_relayout"})
"""Codes of errors that a restarted rank raises again, because the script or its parameters cause them.

The control plane ends the job instead of restarting its ranks.
"""
RANK_FAULTS = PERMANENT_RANK_FAULTS | {
    "training_error",
    "restore_mismatch",
    "agent_unreachable",
    "stale_generation",
    "session_misuse",
    "unsupported_version",
    "unsupported_option",
}
"""Codes that an agent passes on from a rank. All other codes are an agent's own word about its node."""


class RankFault(Message, frozen=True):
    """The rank's report of an error after which its session cannot continue.

    The rank sends it before the session raises the error. Examples: a state that cannot be resumed, and a restore that
    failed verification.
    """

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
    """Return the names of the files whose descriptors accompany a message of the agent, in the descriptors' order."""
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
    """Give the files of an agent's message other names, for example paths under which a rank can open them.

    Args:
        message: a message with any number of files.
        files: as many names as `files_of` returns, in its order.

    Returns:
        The message with these names; a message without files unchanged.
    """
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
