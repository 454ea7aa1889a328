"""Between a rank and its node's agent: messages on a unix socket, and one shared page.

The socket carries what happens rarely or must be answered; the page carries what both sides read at every boundary
without a system call. The page is level-triggered truth; `WordChanged` and `Boundary` only say "look now" and may be
lost.

A rank's page (`RANK_WORD_BYTES`, on tmpfs), little endian, each half written by one side only. A half has two places,
and its sequence says in which of them it is: an odd one here, an even one 512 bytes further. The next is written where
it is not, and is there as soon as the sequence says so.

    offset  size  field          written by   meaning
    0       8     sequence       agent        how often it was written
    8       8     generation     agent
    16      8     committed      agent        C, or -1
    24      8     proposed       agent        w, or -1
    32      8     slot           agent        which of the rank's slots is granted for w, or -1
    40      8     stop           agent        step of the announced stop, or -1
    48      8     stop_state     agent        0 none, 1 announced, 2 confirmed
    56      8     vote_step      agent        the w that the owner's agent last voted on, or -1
    64      8     vote           agent        0 none, 1 acked, 2 abandon
    72      8     load           agent        which attempt to bring the base into a slot, 0 before the first
    80      8     verified       agent        so many first bytes of the base's payload have come and are verified, in this attempt
    2048    8     sequence       rank         how often it was written
    2056    8     generation     rank
    2064    8     boundary       rank         last boundary passed (-1 before restore has returned)
    2072    8     phase          rank         `Phase`
    2080    8     copying        rank         step whose copier is running, or -1
    2088    8     standing       rank         `Standing`
    2096    8     echo_step      rank         the stop it answered last, or -1
    2104    8     echo           rank         0 none, 1 yes (not passed), 2 no
    2112    8     target         rank         steps finished when the script will be done, or 0: not told
    2120    8     limit          rank         seconds that its phase may take, as the script says, or 0: not told
    2128    8     first_passed   rank         when it made the first step beyond its base, monotonic µs, or 0: it has not

Invariant: a reader gets one consistent half, the one before while another is written, also by who died at it; the two
halves are never compared field by field across a restart of either side without their generation.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step

RANK_WORD_BYTES = 4096
_RANK_HALF = 2048
_AGENT = struct.Struct("<QqqqqQqQQQ")
_RANK = struct.Struct("<QqQqQqQQQQ")
_SEQUENCE = struct.Struct("Q")
"""Of the machine's own order, little endian wherever this runs: stored in one go, where a given order is stored byte by byte."""
_PLACES_APART = 512
ORDERED_MACHINES = ("x86_64",)
"""Processors that make a process's stores visible to others in their order, as `platform.machine()` names them.

A page is read without a lock, and
Python has no store with release or load with acquire order: on other processors (aarch64) a half could be seen before
it is written.
"""
NONE = -1
FINISHED = -2
"""Value of `AgentHalf.proposed` once the final round is over: the rank returns from `close()`."""
ECHO_YES = 1
"""Value of `RankHalf.echo`: the rank has not passed the announced stop."""
ECHO_NO = 2
"""Value of `RankHalf.echo`: the rank has passed the announced stop, or may have."""
LATE_REASON = "late"
"""Beginning of `Abandoned.reason` if the rank passed the step before its slot was granted. More notice helps then."""
MAX_TARGET = 2**53
"""More steps are no target: as a number of JSON it would be another one."""
MAX_LIMIT_SECONDS = 86_400
"""No script may ask that nobody looks at a phase for longer: a gate that stays shut for a day is one that nobody will open."""

MAX_RANK_MESSAGE_BYTES = 1024 * 1024
"""Of one message of a rank: its agent closes a line that announces more."""
MAX_LOGGED_BYTES = 2 * 1024 * 1024
"""Of the values that a rank sends in a second, in as many messages as that takes.

More of them wait, until there are too many.
"""

OWN_METRICS = "everstep/"
"""How the names of values begin that Everstep logs itself."""


class Phase(IntEnum):
    """What a rank says it is doing; every phase has a time limit of its own. WAIT: it stands still on purpose."""

    START = 0
    RESTORE = 1
    TRAIN = 2
    EVAL = 3
    CHECKPOINT = 4
    CLOSE = 5
    WAIT = 6


class Standing(IntEnum):
    """Whether a rank stands still at its boundary. MOVING: no. STOPPED: at a confirmed stop.

    CLOSING: inside `close()`. CLOSED: done.
    """

    MOVING = 0
    STOPPED = 1
    CLOSING = 2
    CLOSED = 3


class StopState(IntEnum):
    """How far an agreed stop has come. NONE: none, or withdrawn. ANNOUNCED: ranks echo, and wait at the step.

    CONFIRMED: all stop there.
    """

    NONE = 0
    ANNOUNCED = 1
    CONFIRMED = 2


class Vote(IntEnum):
    """An owner's word on the proposed step. NONE: not yet. ACKED: all holders in view have sealed it.

    ABANDON: it cannot be had.
    """

    NONE = 0
    ACKED = 1
    ABANDON = 2


@dataclass(frozen=True, slots=True)
class AgentHalf:
    """What the agent tells its rank (and, after the agent's own restart, itself)."""

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


@dataclass(frozen=True, slots=True)
class RankHalf:
    """What a rank tells its agent."""

    generation: int
    boundary: int = NONE
    phase: Phase = Phase.START
    copying: int = NONE
    standing: Standing = Standing.MOVING
    echo_step: int = NONE
    echo: int = 0
    target: int = 0
    """Steps finished when the script will be done; 0: it has not told."""
    limit: int = 0
    """Seconds that its phase may take, as the script says; 0: it has not told."""
    first_passed: int = 0
    """When the rank made the first step beyond its base, microseconds of the node's monotonic clock; 0: it has not.

    The page outlives the agent, so that an agent that restarts reports the same moment.
    """


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
        if _SEQUENCE.unpack_from(page, offset) == (sequence,):  # else the next but one may have begun in this place
            return body
    return None


def unordered_machine(machine: str) -> str:
    """Say why ranks cannot be trained on a machine; empty where they can.

    Args:
        machine: `platform.machine()`.

    Returns:
        The reason, with what to do.
    """
    if machine in ORDERED_MACHINES:
        return ""
    return f"nodes need {' or '.join(ORDERED_MACHINES)} processors, this one is {machine}: choose another instance type"


def write_agent_half(page: memoryview, half: AgentHalf) -> None:
    """Publish the agent's half. One writer: the agent."""
    body = _AGENT.pack(
        half.generation,
        half.committed,
        half.proposed,
        half.slot,
        half.stop,
        half.stop_state,
        half.vote_step,
        half.vote,
        half.load,
        half.verified,
    )
    _write(page, 0, body)


def read_agent_half(page: memoryview) -> AgentHalf | None:
    """Return the agent's half, or None where it is written all the time, or by somebody who does not know this layout: look again later."""
    body = _read(page, 0, _AGENT.size)
    if body is None:
        return None
    generation, committed, proposed, slot, stop, stop_state, vote_step, vote, load, verified = _AGENT.unpack(body)
    try:
        return AgentHalf(
            generation, committed, proposed, slot, stop, StopState(stop_state), vote_step, Vote(vote), load, verified
        )
    except ValueError:  # not written by anybody who knows this layout
        return None


def write_rank_half(page: memoryview, half: RankHalf) -> None:
    """Publish the rank's half. One writer: the rank's training thread and its copier, under the session's lock."""
    body = _RANK.pack(
        half.generation,
        half.boundary,
        half.phase,
        half.copying,
        half.standing,
        half.echo_step,
        half.echo,
        half.target,
        half.limit,
        half.first_passed,
    )
    _write(page, _RANK_HALF, body)


def read_rank_half(page: memoryview) -> RankHalf | None:
    """Return the rank's half, or None where it is written all the time, or the script has written over it."""
    body = _read(page, _RANK_HALF, _RANK.size)
    if body is None:
        return None
    generation, boundary, phase, copying, standing, echo_step, echo, target, limit, first_passed = _RANK.unpack(body)
    target, limit = target if target <= MAX_TARGET else 0, limit if limit <= MAX_LIMIT_SECONDS else 0
    try:
        return RankHalf(
            generation,
            boundary,
            Phase(phase),
            copying,
            Standing(standing),
            echo_step,
            echo,
            target,
            limit,
            first_passed,
        )
    except ValueError:  # the script has written over it
        return None


class RankHello(Message, frozen=True):
    """First message of a rank, and again after either side reconnected."""

    job: JobName
    run: RunId
    generation: Generation
    rank: Rank
    pid: int


class Arriving(Message, frozen=True):
    """The agent's first answer where the base is still on its way: its index is there, and the page says how much of the rest (`verified`).

    What is verified may be copied; nobody goes on with it before `Welcome` has come. Another `load` on the page than
    this one: the slot may be written anew, all that was copied is void, and another `Arriving` follows, or `Welcome`.
    """

    generation: Generation
    word_path: str
    base_step: Step
    base_slot_path: str
    load: int
    index_offset: int
    index_bytes: int


class Welcome(Message, frozen=True):
    """Every node has verified what its ranks restore: where to restore from, and where the rank's page lies."""

    generation: Generation
    word_path: str
    base_step: Step
    """0: nothing to restore, the script's own initial state is step 0."""
    base_slot_path: str | None
    """The verified slot that holds `base_step`; None only when `base_step` is 0."""


class SlotsRequest(Message, frozen=True):
    """The rank's layout is known (or has changed): it needs slots of this size.

    Answered by `SlotsGranted` or `SlotsRefused`.
    """

    generation: Generation
    layout_hash: bytes
    capacity_bytes: int


class SlotsGranted(Message, frozen=True):
    """Where the slots lie now.

    Sent again before the page grants a slot whose file was made anew: drain the socket after reading it.
    """

    layout_hash: bytes
    capacity_bytes: int
    paths: tuple[str, ...]


class SlotsRefused(Message, frozen=True):
    """No protection for this rank: training goes on, votes abandon, and the reason is shown to the user."""

    layout_hash: bytes
    reason: str


class Capturing(Message, frozen=True):
    """The copier has come so far.

    What it has written may be digested and sent ahead; whether it is a snapshot is said by `Captured` or `Abandoned`.

    Told every now and then of a large state only; any of them may be lost, for each says everything.
    """

    generation: Generation
    step: Step
    slot: int
    layout_hash: bytes
    payload_bytes: int
    index_offset: int
    index_bytes: int
    final_bytes: int
    """The payload's first bytes, up to here, are those of `step` and are not written any more."""


class Captured(Message, frozen=True):
    """The copier is done, and nothing changed under it: the granted slot holds `step`, unsealed. The agent seals it."""

    generation: Generation
    step: Step
    slot: int
    layout_hash: bytes
    payload_bytes: int
    index_offset: int
    index_bytes: int
    seconds: float = 0.0
    """Since the boundary. Of an audited snapshot until it was compared: before the next change."""
    chunk_digests: bytes = b""
    """Of the slot's chunks (`everstep.protocol.slot`), read back behind the copy while they were in the cache; empty: the agent digests it."""


class Abandoned(Message, frozen=True):
    """The rank does not (or no longer) capture `step`; its copier has stopped."""

    generation: Generation
    step: Step
    reason: str


class Boundary(Message, frozen=True):
    """Look at the rank's page: its half changed."""

    generation: Generation
    boundary: Step
    at_seconds: float = 0.0
    """When the boundary was passed, on the monotonic clock that all processes of a node share; 0: it was not passed just now."""
    blocked_seconds: float = 0.0
    """How long saving has held the training thread since the boundary before."""


class IdleSpan(Message, frozen=True, kw_only=False):
    """A time in every iteration in which training leaves the network alone."""

    begin_seconds: float
    """After the boundary, median."""
    seconds: float
    """Median."""
    deviation_seconds: float = 0.0
    """Standard deviation of its beginning or of its end, whichever moves more."""


class IdleSpans(Message, frozen=True):
    """What the profiler found: when this rank's training leaves the network idle. A later one replaces it.

    Told by the node's lowest rank, whose
    LOCAL_RANK is 0: collectives make the iterations of a node's ranks one.
    """

    generation: Generation
    iteration_seconds: float
    """Median."""
    spans: tuple[IdleSpan, ...]
    """In order of time. Empty: no pattern was found, or nothing is sent over the network."""


class WordChanged(Message, frozen=True):
    """Look at the page: the agent's half changed.

    Said to a rank that may be waiting for that; one that moves looks at every boundary.
    """


class LogRecord(Message, frozen=True):
    """Values that the script logged for one step."""

    step: Step
    values: dict[str, float]
    at_seconds: float
    """When, Unix time."""


class Logged(Message, frozen=True):
    """Values logged since the last such message; `dropped_count` did not fit the ring."""

    generation: Generation
    records: tuple[LogRecord, ...]
    dropped_count: int = 0


class RankFault(Message, frozen=True):
    """The session cannot go on and says why before it raises: what cannot be resumed, a restore that did not verify."""

    generation: Generation
    code: str
    message: str


RankToAgent = RankHello | SlotsRequest | Capturing | Captured | Abandoned | Boundary | IdleSpans | Logged | RankFault
AgentToRank = Arriving | Welcome | SlotsGranted | SlotsRefused | WordChanged
