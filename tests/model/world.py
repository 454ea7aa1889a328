"""The state of the step-protocol model. Every part is an immutable value, so that states can be compared and stored.

The decisions are real: `Shard`, `Coordinator` and the slot rules of the product. Processes, pages, streams and promises
have only the fields that decisions and invariants read. C is the newest committed step.

Nodes are numbered by their *seat*: their position in the plan, which is their GROUP_RANK. The replacement of a lost
node takes over its seat.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from control_plane.core import placement
from control_plane.core.recovery import Path
from everstep.protocol.ids import NodeId
from worker.core.rounds import Coordinator, Shard
from worker.core.slots import EMPTY, Content, SlotView, slots_per_shard

T = TypeVar("T")
NONE = -1
Pair = tuple[SlotView, ...]
"""The slots in which one holder stores one shard."""


class Outcome(NamedTuple):
    """A rank's newest report about a proposed step."""

    step: int
    slot: int
    """The slot with the captured step, or -1 if the rank abandoned the step."""
    is_late: bool
    is_heard: bool
    """True after the agent has processed this report."""


class Process(NamedTuple):
    """A rank process, with the half of its shared-memory page that the process writes."""

    boundary: int
    copying: tuple[int, int] | None = None
    """Step and slot of the copy that the background copier is writing."""
    outcome: Outcome | None = None
    is_connected: bool = True
    """True while the process has a connection to its agent."""
    is_closing: bool = False
    """True while the process waits inside `close()`, after its last step."""

    @property
    def settled(self) -> int:
        """The newest step that the process has captured, is capturing, or has abandoned."""
        if self.copying is not None:
            return self.copying[0]
        return self.outcome.step if self.outcome is not None else NONE


class Phase(IntEnum):
    """State of a replica stream.

    OFF: no connection. IDLE: connected. BEGUN: the owner has announced the transfer. TAKEN: the holder has granted a
    slot. SENT: the holder has received all bytes and the message that completes them. SEALED: the acknowledgement is in
    transit.
    """

    OFF = 0
    IDLE = 1
    BEGUN = 2
    TAKEN = 3
    SENT = 4
    SEALED = 5


class Stream(NamedTuple):
    """The stream that replicates one shard to one of its holders."""

    phase: Phase = Phase.OFF
    step: int = NONE
    told: int = NONE
    """The committed step C that the first message of the transfer named."""
    slot: int = NONE
    is_whole: bool = False
    """True if the owner had sealed the step when it was transferred."""


class Plan(NamedTuple):
    """The step from which a new generation starts, and the slots that its nodes keep."""

    base: int
    origin: int
    keep: tuple[tuple[frozenset[Content], ...], ...]
    """By node and rank: generation and step of each slot of the rank's shard that the node must keep."""


class Restore(NamedTuple):
    """Progress of a new generation until its ranks start: promises, the plan, and the loads of the plan."""

    dead: frozenset[int]
    """Lost nodes that have no replacement yet."""
    inventories: tuple[tuple[tuple[int, Content], ...] | None, ...]
    """By node: rank, generation and step of each sealed slot that the node listed with its promise.

    None until the node promises the newest generation.
    """
    quiet: frozenset[int] = frozenset()
    """Nodes that have promised since the last start to join a newer generation, and so have stopped their old work."""
    plan: Plan | None = None
    loaded: tuple[bool, ...] = ()


class World(NamedTuple):
    """One state of the model. Nodes are numbered by their position in the plan (`seat`), also after a replacement."""

    generation: int
    """The newest started generation."""
    issued: int
    lineage: tuple[tuple[int, int, int], ...]
    """Every started generation, as its number, its parent's number, and the step from which it started."""
    base: int
    origin: int
    """The generation whose ranks captured the step `base`."""
    keep: tuple[tuple[frozenset[Content], ...], ...]
    coordinator: Coordinator
    shards: tuple[Shard, ...]
    granted: tuple[int, ...]
    processes: tuple[Process, ...]
    slots: tuple[tuple[Pair, ...], ...]
    """The slots of each shard on each of its holders, by rank and then by holder."""
    streams: tuple[tuple[Stream, ...], ...]
    restore: Restore | None
    limbo: tuple[tuple[tuple[int, Pair], ...] | None, ...]
    """By node: the slots that an unreachable node still has, as pairs of rank and slots.

    None for every reachable node.
    """
    limbo_commits: tuple[tuple[int, int], ...]
    """By node: generation and committed step on the shared-memory page of an unreachable node."""
    recorded: int
    """The committed step that the control plane has recorded when it makes a plan.

    It may be older than the newest commit. -1: none.
    """
    cleared: frozenset[int]
    """Nodes whose shared-memory page lacks the started generation's C. A load cleared the page, or the node is new."""
    refused: frozenset[tuple[int, int, int]]
    faults: int
    # facts that only the checker of the invariants uses
    best: int
    """The newest step ever committed in this generation or its ancestors."""
    owed: tuple[frozenset[int], ...]
    """By rank: nodes that must still have the rank's shard at the newest committed step.

    Each of these nodes counted as a holder at the commit of this step, or was confirmed as a holder later.
    """
    stood: tuple[frozenset[int], ...]
    """By rank: the nodes that counted as holders when the owner last acknowledged a step."""
    dropped: frozenset[tuple[int, int]]
    """Each (rank, node) where the rank's owner no longer counts the node as a holder."""
    spoiled: frozenset[tuple[int, int, Content]]
    """Each (rank, node, generation and step) that the node acknowledged and then lost.

    The owner still counts the node as a holder, and learns of the loss at the next connection.
    """
    heard: frozenset[int]
    """Steps whose proposal has reached any rank's agent in this generation."""
    marked: tuple[int, ...] = ()
    """Per node: the newest step that the announcements to its agent marked for upload. Empty without uploads."""
    begun: tuple[int, ...] = ()
    """Per rank: the newest step whose upload has started."""
    helping: frozenset[tuple[int, int, int]] = frozenset()
    """Each (rank, node, step) for which the node sends parts of the shard's upload from its replica."""
    uploads: frozenset[tuple[int, int]] = frozenset()
    """Each (rank, step) whose upload runs. Only the checker of the invariants uses it; agents use the pins of slots."""


@dataclass(frozen=True)
class Shape:
    """The constants of a model: its sizes, the placement and the number of faults."""

    nodes: int
    copies: int
    steps: int
    faults: int
    ranks_per_node: int = 1
    every_steps: int = 0
    """Interval of uploads, in steps. With 0, owners upload no steps and ranks do not close."""
    has_slow_uploads: bool = False
    """True if every upload outlasts the final round."""
    max_uploads: int = 1
    """Maximum number of simultaneous uploads of a shard. Each upload beyond the first gets one additional slot."""

    @property
    def slot_count(self) -> int:
        """The number of slots of each shard on each of its holders."""
        return slots_per_shard(has_third_slot=self.max_uploads > 1, max_uploads=self.max_uploads)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    def seat_of(self, rank: int) -> int:
        """Return the position in the plan (seat) of the node that owns a rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, seat: int) -> range:
        """Return the ranks of a node, which `seat` names by its position in the plan."""
        return range(seat * self.ranks_per_node, (seat + 1) * self.ranks_per_node)

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that hold each rank's shard, the owner's node first.

        The control plane's placement code chooses them.
        """
        planned = placement.plan([NodeId(f"{seat}") for seat in range(self.nodes)], self.copies, {}).holders
        return tuple(
            tuple(int(node) for node in planned[NodeId(f"{self.seat_of(rank)}")]) for rank in range(self.world_size)
        )


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Return a copy of `items` in which `item` replaces the entry at `index`."""
    return (*items[:index], item, *items[index + 1 :])


def empty_pair(count: int = 2) -> Pair:
    """Return `count` empty slots."""
    return (EMPTY,) * count


def on_path(path: Path, content: Content | None) -> bool:
    """Return whether the generation and step of `content` are in the history of the newest started generation."""
    return content is not None and content.step <= path.get(content.origin, NONE)
