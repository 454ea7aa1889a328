"""The world of the step-protocol model: every part of it is a value, so that states can be compared, hashed and stored.

What decides is real (`Shard`, `Coordinator`, slots as the pure core sees them); what surrounds it (processes, pages,
streams, promises) is drawn here with just the fields that the decisions and the invariants read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from control_plane.core import placement
from control_plane.core.recovery import Path
from everstep.protocol.ids import NodeId
from worker.core.rounds import Coordinator, Shard
from worker.core.slots import EMPTY, Content, SlotView

T = TypeVar("T")
NONE = -1
Pair = tuple[SlotView, ...]
"""The slots of one shard at one holder."""


class Outcome(NamedTuple):
    """What a rank last said of a proposed step."""

    step: int
    slot: int
    """Where it was captured; -1: abandoned."""
    is_late: bool
    is_heard: bool
    """The agent has taken it in."""


class Process(NamedTuple):
    """A rank process and its half of the page."""

    boundary: int
    copying: tuple[int, int] | None = None
    """(step, slot) that its background copier writes."""
    outcome: Outcome | None = None
    is_connected: bool = True
    """Its line to the agent stands."""
    is_closing: bool = False
    """It stands at its last boundary, inside `close()`."""

    @property
    def settled(self) -> int:
        """The newest step that it has captured, is capturing or has abandoned."""
        if self.copying is not None:
            return self.copying[0]
        return self.outcome.step if self.outcome is not None else NONE


class Phase(IntEnum):
    """Of a replica stream. OFF: no session. IDLE: connected. BEGUN: announced. TAKEN: into a granted slot.

    SENT: all bytes are with the holder,
    and the word that they are a snapshot. SEALED: the acknowledgement is on its way."""

    OFF = 0
    IDLE = 1
    BEGUN = 2
    TAKEN = 3
    SENT = 4
    SEALED = 5


class Stream(NamedTuple):
    """The replica session of one shard to one of its holders."""

    phase: Phase = Phase.OFF
    step: int = NONE
    told: int = NONE
    """C as the sender said with the first message."""
    slot: int = NONE
    is_whole: bool = False
    """What was sent is what the owner has sealed."""


class Plan(NamedTuple):
    """The base of the generation that is being loaded."""

    base: int
    origin: int
    keep: tuple[tuple[frozenset[Content], ...], ...]
    """Per seat, per rank."""


class Restore(NamedTuple):
    """A new generation on its way: promises, plan, loads."""

    dead: frozenset[int]
    """Seats whose node is lost and not replaced yet."""
    inventories: tuple[tuple[tuple[int, Content], ...] | None, ...]
    """Per seat: its frozen inventory (rank, content) once it has promised the newest generation."""
    quiet: frozenset[int] = frozenset()
    """Seats that have promised any generation since the last start: nothing of the old one is acted on there any more.

    """
    plan: Plan | None = None
    loaded: tuple[bool, ...] = ()


class World(NamedTuple):
    """One state. A seat is a place in the plan (a GROUP_RANK); the node in it may be replaced."""

    generation: int
    """The newest that was started."""
    issued: int
    lineage: tuple[tuple[int, int, int], ...]
    """(generation, parent, base) of all that were started."""
    base: int
    origin: int
    """Of the base's content."""
    keep: tuple[tuple[frozenset[Content], ...], ...]
    coordinator: Coordinator
    shards: tuple[Shard, ...]
    granted: tuple[int, ...]
    processes: tuple[Process, ...]
    slots: tuple[tuple[Pair, ...], ...]
    """Per rank, per holder."""
    streams: tuple[tuple[Stream, ...], ...]
    restore: Restore | None
    limbo: tuple[tuple[tuple[int, Pair], ...] | None, ...]
    """Per seat: what a node that was only unreachable still holds: (rank, slots)."""
    limbo_commits: tuple[tuple[int, int], ...]
    """Per seat in limbo: the generation and C on its page."""
    recorded: int
    """The C in the control plane's record when it plans: any commit since the last plan, or -1."""
    cleared: frozenset[int]
    """Seats whose page no longer shows the started generation's C: Load cleared it, or the node is a newcomer."""
    refused: frozenset[tuple[int, int, int]]
    faults: int
    # what the checker remembers
    best: int
    """The newest step ever committed on this lineage."""
    owed: tuple[frozenset[int], ...]
    """Per rank: seats that counted at the last commit or were confirmed since."""
    stood: tuple[frozenset[int], ...]
    """Per rank: seats that counted when its owner last acknowledged."""
    dropped: frozenset[tuple[int, int]]
    """(rank, seat) that the owner gave up on."""
    spoiled: frozenset[tuple[int, int, Content]]
    """(rank, seat, content) that a seat has lost behind its word; its owner did not know as it voted, or does not yet.

    It hears so on a new line.
    """
    heard: frozenset[int]
    """Steps that some rank's agent has ever heard proposed in this generation."""
    marked: tuple[int, ...] = ()
    """Per seat: the newest step that its agent has heard is to be uploaded; empty where nothing is uploaded."""
    begun: tuple[int, ...] = ()
    """Per rank: the newest step whose upload was begun."""


@dataclass(frozen=True)
class Shape:
    """What does not change: who holds what, and how far the exploration goes."""

    nodes: int
    copies: int
    steps: int
    faults: int
    ranks_per_node: int = 1
    every_steps: int = 0
    """Interval of uploads; 0: nothing is uploaded, and ranks do not close."""
    has_slow_uploads: bool = False
    """No upload ends before the final round is over."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.ranks_per_node

    def seat_of(self, rank: int) -> int:
        """Return the seat of the node that owns a rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, seat: int) -> range:
        """Return the ranks that the node in a seat owns."""
        return range(seat * self.ranks_per_node, (seat + 1) * self.ranks_per_node)

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Return the seats that hold each rank's shard, the owner's first: the control plane's own placement."""
        planned = placement.plan([NodeId(f"{seat}") for seat in range(self.nodes)], self.copies, {}).holders
        return tuple(
            tuple(int(node) for node in planned[NodeId(f"{self.seat_of(rank)}")]) for rank in range(self.world_size)
        )


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Return `items` with one replaced."""
    return (*items[:index], item, *items[index + 1 :])


def empty_pair(count: int = 2) -> Pair:
    """Return slots that hold nothing."""
    return (EMPTY,) * count


def on_path(path: Path, content: Content | None) -> bool:
    """Say whether a content belongs to the history that the newest started generation stands on."""
    return content is not None and content.step <= path.get(content.origin, NONE)
