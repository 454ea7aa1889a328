"""Explicit-state model of parity protection (docs/adr/0035-parity-in-memory.md), over the real decision code.

    worker.core.rounds.Shard, Coordinator       reports and votes; the holders of a member are the rest of its group
    worker.core.slots.writable, kept            which slot may be written, for shards and for shares
    control_plane.core.recovery.choose          the step from which a generation starts, and the slots to keep for it
    control_plane.core.placement.plan           the groups of nodes
    worker.core.parity                          how a share is accumulated, and the slot that it uses
    control_plane.core.rebuilding.rebuilds      what survivors can rebuild

An elastic model also changes the number of nodes: a new generation omits a lost node or adds one. The state is then
divided among another number of ranks (a relayout): the ranks load the earlier shards from the nodes of the earlier
groups, or rebuild one of them.
Nodes are numbered by their *seat*: their position in the plan. Only the node in the last seat leaves or joins, so that
all other nodes keep their ranks and their slots.

Each node has one rank. A rank captures and seals a step in one event, because `tests.model.step_protocol` already
explores captures. This model explores contributions: transfers of one rank's shard into another member's share. Chunks
arrive twice, connections break, and agents restart between two chunks.
Members announce shards of outdated steps. Memory faults damage headers and shares. Nodes are lost at every moment, also
in a restore.

A share is the XOR of one part of each shard of the group's other members. Its bytes are symbolic here: the set of the
shards that it contains an odd number of times. A second application of a chunk removes the shard from the set, exactly
as XOR does.

    python -m tests.model.parity NODES GROUP STEPS FAULTS [--bug NAME] [--walks N] [--seed S] [--steady] [--elastic]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple
from unittest.mock import patch

from control_plane.core import placement, rebuilding, recovery
from control_plane.core.observed.steps import GenerationRecord, RefusedSource
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, Rebuild, holder_of, is_share, share_owner
from everstep.protocol.plan import SlotRecord
from everstep.protocol.rank_messages import RankStanding, Vote
from everstep.protocol.rounds import RankRound
from everstep.protocol.slot import SlotState
from tests.model.explore import Driver, Explored, Found, every_interleaving, walk
from tests.model.step_protocol import Violation
from tests.model.world import NONE, Pair, empty_pair, put
from worker.core import parity, slots
from worker.core.parity import ParityShare
from worker.core.rounds import Coordinator, Shard
from worker.core.slots import EMPTY, Content, SlotView

Event = tuple[object, ...]
Token = tuple[int, Content]
"""The name of one rank's shard. A set of tokens stands for the bytes of a share."""
DAMAGE: Token = (-1, Content(Generation(0), Step(0)))
"""A token that stands for changed bits. A share that a memory fault has damaged contains it."""
WEIGHTS = {
    "boundary": 0.3,
    "drop": 0.3,
    "break": 0.3,
    "restart": 0.15,
    "spoil": 0.1,
    "damage": 0.05,
    "lose": 0.03,
    "lose too many": 0.03,
    "lose again": 0.1,
}
"""Weights of the kinds of events in a random walk; 1 for all others."""
RESIZING = {**WEIGHTS, "boundary": 0.5, "drop": 0.1, "break": 0.1, "restart": 0.05, "lose": 0.2, "shrink": 4, "grow": 4}
"""Weights for walks of elastic jobs, in which most generations change their number of nodes."""
SLOWLY = {**dict.fromkeys(WEIGHTS, 0.0), "boundary": 0.05}
"""Weights for walks without faults. Training is so slow that every contribution to a share can end in time."""


class Phase(IntEnum):
    """State of the connection on which one member contributes to another member's share.

    OFF: no connection. IDLE: connected. OPEN: the holder has granted a slot, and the chunk is in transit. SENT: the
    holder has received the chunk. WAITING: this contribution is complete, and another member's is not. SEALED: the
    acknowledgement is in transit.
    """

    OFF = 0
    IDLE = 1
    OPEN = 2
    SENT = 3
    WAITING = 4
    SEALED = 5


class Line(NamedTuple):
    """The connection from a contributor to the holder of a share."""

    phase: Phase = Phase.OFF
    step: int = NONE


class ShareSlot(NamedTuple):
    """One of the two memory slots in which a node stores a share."""

    view: SlotView = EMPTY
    value: frozenset[Token] = frozenset()
    """Stands for the slot's bytes: the names of the shards that were combined into it an odd number of times."""
    share: ParityShare | None = None
    """The contributions so far. None unless the slot is WRITING."""
    header: frozenset[Contribution] = frozenset()
    """The contributions that the header of a sealed slot names."""


class Plan(NamedTuple):
    """The step from which a new generation starts, and the shards and shares that each node keeps or rebuilds."""

    base: int
    origin: int
    keep: tuple[tuple[frozenset[Content], frozenset[Content]], ...]
    """By rank: generation and step of each slot that its node must keep, for its own shard and for its share."""
    rebuilt: tuple[Contribution | None, ...]
    """For each rank that made the start step: its shard if it must be rebuilt, None if a node has the shard.

    Empty if training starts from step 0.
    """
    size: int
    """Number of nodes of the new generation."""
    is_relayout: bool = False
    """True if another number of ranks made the base."""


class Inventory(NamedTuple):
    """The sealed slots of one node at the time of its promise to join the new generation."""

    committed: int
    shards: tuple[Content, ...]
    shares: tuple[tuple[Content, frozenset[Contribution]], ...]


class Restore(NamedTuple):
    """Progress of a new generation until training starts."""

    dead: frozenset[int]
    """Lost nodes that have no replacement yet."""
    inventories: tuple[Inventory | None, ...]
    """Inventory of each node; None until the node promises."""
    quiet: frozenset[int] = frozenset()
    """Nodes that have promised since the last start to stop all work for the old generation."""
    plan: Plan | None = None
    loaded: tuple[bool, ...] = ()


class World(NamedTuple):
    """One state of the model. A node and its rank are numbered by the node's position in the plan (`seat`)."""

    generation: int
    """The newest started generation."""
    issued: int
    lineage: tuple[tuple[int, int, int, int], ...]
    """Every started generation: its number, its parent's number, the step from which it started, and its size."""
    base: int
    origin: int
    """The generation whose ranks captured the step `base`."""
    size: int
    """Number of nodes of the running generation. Positions in the plan from this number on have no node."""
    earlier: tuple[Contribution | None, ...]
    """After a relayout: for each rank that made the base, its shard if it must be rebuilt. Empty otherwise."""
    loading: frozenset[int]
    """Nodes whose rank is still loading the shards of the base after a relayout."""
    keep: tuple[tuple[frozenset[Content], frozenset[Content]], ...]
    coordinator: Coordinator
    shards: tuple[Shard, ...]
    boundaries: tuple[int, ...]
    own: tuple[Pair, ...]
    """The slots of each node's own shard."""
    shares: tuple[tuple[ShareSlot, ...], ...]
    """The slots in which each node stores shares of the other members' shards."""
    lines: tuple[tuple[Line, ...], ...]
    """Connections, by contributor and by holder of the share."""
    restore: Restore | None
    new: frozenset[int]
    """Nodes whose shared-memory page lacks the started generation's committed step C.

    A load cleared the page, or the node is new.
    """
    refused: frozenset[tuple[int, int, int]]
    faults: int
    # facts that only the checker uses
    best: int
    """The newest committed step that must survive.

    0 before the first commit, and after more losses than parity can repair.
    """
    counted: tuple[int, int]
    """Generation and step of the newest commit that the checker has recorded.

    A restarted coordinator may derive the same commit again. The checker ignores this repetition.
    """
    stood: tuple[bool, ...]
    """By rank: True if all other members of the group counted as holders when the rank last acknowledged a step."""
    covered: tuple[bool, ...]
    """By group: True if every member counted as a holder at the last commit. The group may then lose one member."""
    covered_size: int
    """Number of nodes of the generation that made the last commit, which determines the groups of `covered`."""
    weak: frozenset[int]
    """Nodes that have lost a shard or a share of the last commit. They count as lost nodes until the next commit."""
    spoiled: frozenset[int]
    """Nodes on which a memory fault has damaged a slot since the last commit of a new step.

    A start of a generation clears the set, and so does a commit of a step that was not committed before. If a
    generation commits its base again, these nodes still count as `weak`, because they may have voted before the fault.
    """


@dataclass(frozen=True)
class Rules:
    """All decisions that the model calls. A planted bug replaces one of them."""

    shard: type[Shard] = Shard
    share: type[ParityShare] = ParityShare
    writable: Callable[..., int | None] = slots.writable
    kept: Callable[..., frozenset[Content]] = slots.kept
    place: Callable[..., int | None] = parity.place
    rebuilds: Callable[..., list[tuple[rebuilding.Content, Rebuild]]] = rebuilding.rebuilds
    verifies: bool = True
    """True if a node compares a rebuilt shard with the lost owner's digest."""
    cancels: bool = True
    """True if a member cancels the contribution of a step that is neither committed nor proposed any more."""
    keeps_earlier_shares: bool = True
    """True if nodes keep the shares of the base until the first commit after a relayout."""


@dataclass(frozen=True)
class Shape:
    """The constants of a model."""

    nodes: int
    group: int
    """Nodes per group. Nodes that do not fill another group join the last one."""
    steps: int
    faults: int
    is_elastic: bool = False
    """True if generations may have one node less than `nodes`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The possible numbers of nodes of a generation."""
        return (self.nodes - 1, self.nodes) if self.is_elastic else (self.nodes,)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the nodes of each parity group of a generation, as the control plane's placement code chooses them."""
        return placement.parity_groups([NodeId(f"{seat}") for seat in range(size)], self.group)


class Model:
    """Parity protection as a model: every possible event in a state, and the state after the event."""

    def __init__(
        self, shape: Shape, rules: Rules | None = None, *, is_fine: bool = False, start: World | None = None
    ) -> None:
        """Create the model.

        Args:
            shape: sizes and the budget of faults.
            rules: the decisions; the real ones by default.
            is_fine: True makes every part of a contribution an event of its own. Otherwise a contribution and its
                acknowledgements are one event.
            start: first state of the exploration; a job's first generation by default.
        """
        self.shape = shape
        self.rules = rules or Rules()
        self.is_fine = is_fine
        self.groups = {size: shape.groups(size) for size in shape.sizes}
        self._start = start

    def first(self) -> World:
        """Return the start of the first generation: no snapshot exists."""
        if self._start is not None:
            return self._start._replace(
                shards=tuple(
                    self.rules.shard(**{name: getattr(shard, name) for name in Shard.__dataclass_fields__})
                    for shard in self._start.shards
                )
            )
        n = self.shape.nodes
        nothing = (frozenset[Content](), frozenset[Content]())
        world = World(
            generation=0,
            issued=0,
            lineage=(),
            base=0,
            origin=0,
            size=n,
            earlier=(),
            loading=frozenset(),
            keep=(nothing,) * n,
            coordinator=Coordinator(world_size=n, base=Step(0), every_steps=0).begin(),
            shards=(),
            boundaries=(),
            own=(empty_pair(),) * n,
            shares=((ShareSlot(),) * 2,) * n,
            lines=(),
            restore=None,
            new=frozenset(),
            refused=frozenset(),
            faults=0,
            best=0,
            counted=(0, NONE),
            stood=(False,) * n,
            covered=(False,) * len(self.groups[n]),
            covered_size=n,
            weak=frozenset(),
            spoiled=frozenset(),
        )
        return self._started(world, Plan(0, 0, world.keep, (), n), 1)

    def _started(self, world: World, plan: Plan, generation: int) -> World:
        n, size, base = self.shape.nodes, plan.size, Step(plan.base)
        coordinator = Coordinator(world_size=size, base=base, every_steps=0, is_relayout=plan.is_relayout).begin()
        first = Step(0) if plan.is_relayout else base
        return world._replace(
            generation=generation,
            issued=generation,
            lineage=(*world.lineage, (generation, world.generation, plan.base, size)),
            base=plan.base,
            origin=plan.origin,
            size=size,
            earlier=plan.rebuilt if plan.is_relayout else (),
            loading=frozenset(range(size)) if plan.is_relayout else frozenset(),
            keep=plan.keep,
            coordinator=coordinator,
            shards=tuple(self.rules.shard.begin(first, self._peers(size, rank)) for rank in range(n)),
            boundaries=(plan.base,) * n,
            lines=((Line(),) * n,) * n,
            restore=None,
            new=frozenset(),
            spoiled=frozenset(),
        )

    # -- what the nodes of a state contain

    def group_of(self, size: int, seat: int) -> tuple[int, ...]:
        """Return the parity group of a node in a generation of `size` nodes. Empty if no node is in `seat`."""
        return self._group_of[size][seat]

    @cached_property
    def _group_of(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        return {
            size: tuple(next((group for group in groups if seat in group), ()) for seat in range(self.shape.nodes))
            for size, groups in self.groups.items()
        }

    def _peers(self, size: int, rank: int) -> tuple[NodeId, ...]:
        return tuple(NodeId(f"{seat}") for seat in self.group_of(size, rank) if seat != rank)

    def content(self, world: World, step: int) -> Content:
        """Return the generation and step by which slots name `step` in the running generation."""
        is_base = step == world.base and step and not world.earlier
        return Content(Generation(world.origin if is_base else world.generation), Step(step))

    @staticmethod
    def has(world: World, rank: int, content: Content) -> bool:
        """Return whether a node has a sealed slot with its own rank's shard at the generation and step of `content`."""
        return slots.find_sealed(world.own[rank], content) is not None

    @staticmethod
    def share(world: World, holder: int, content: Content) -> ShareSlot | None:
        """Return a node's sealed share at the generation and step of `content`, or None."""
        return next(
            (each for each in world.shares[holder] if each.view == SlotView(SlotState.SEALED, content)),
            None,
        )

    def acts(self, world: World, seat: int) -> bool:
        """Return whether a node (`seat`: its position in the plan) still works for the running generation."""
        restore = world.restore
        if restore is None:
            return True
        return restore.plan is None and seat not in restore.dead | restore.quiet

    def keeps(self, world: World, seat: int, *, told: int = NONE, is_share: bool = False) -> frozenset[Content]:
        """Return generation and step of each slot that a node must keep, according to its agent's own state."""
        committed = max(told, world.shards[seat].committed)
        is_loading = seat in world.loading and not is_share
        is_base = world.base and (is_loading or not world.earlier)
        base = Content(Generation(world.origin), Step(world.base)) if is_base else None
        return self.rules.kept(
            self.content(world, committed) if committed != NONE else None, world.keep[seat][is_share], base
        )

    def path(self, world: World) -> recovery.Path:
        """Return the newest started generation and its ancestors, each with the newest step that counts as its own."""
        return _path(world.lineage, world.generation)

    # -- all events

    def moves(self, world: World) -> Iterator[tuple[Event, World]]:
        """Yield every possible event with the state after it."""
        for seat in range(world.size):
            if self.acts(world, seat):
                yield from self._rounds(world, seat)
                if seat not in world.loading:
                    yield from self._boundary(world, seat)
                elif world.restore is None:
                    yield ("earlier", seat), self._loaded_earlier(world, seat)
                for peer in self.group_of(world.size, seat):
                    if peer != seat and self.acts(world, peer):
                        yield from self._line_moves(world, seat, peer)
        yield from self._failures(world) if world.restore is None else self._restore_moves(world, world.restore)

    def _rounds(self, world: World, seat: int) -> Iterator[tuple[Event, World]]:
        if not self.acts(world, 0):
            return
        shard, coordinator = world.shards[seat], world.coordinator
        report = RankRound(
            rank=Rank(seat),
            boundary=Step(world.boundaries[seat]),
            committed=shard.committed,
            proposed=shard.proposed,
            vote=shard.vote,
            is_late=shard.is_late,
            standing=RankStanding.MOVING,
        )
        if report not in coordinator.ranks:
            yield ("report", seat), self._coordinated(world, coordinator.report(report))
        if not coordinator.is_recovering:
            heard = shard.apply_announcement(coordinator.committed, coordinator.proposed)
            if heard.proposed <= world.boundaries[seat] and heard.proposed != NONE:
                heard = heard.abandon(heard.proposed, "late", late=True)
            if heard != shard:
                yield ("hear", seat, coordinator.committed, coordinator.proposed), self._apply(world, seat, heard)

    def _apply(self, world: World, rank: int, shard: Shard) -> World:
        before = world.shards[rank]
        if shard.committed < before.committed:
            raise Violation(f"rank {rank} goes back from C={before.committed} to {shard.committed}")
        if before.vote is not shard.vote is Vote.ACKED:
            world = world._replace(stood=put(world.stood, rank, len(shard.view) == len(shard.peers)))
        return world._replace(shards=put(world.shards, rank, shard))

    def _coordinated(self, world: World, coordinator: Coordinator) -> World:
        before = world.coordinator
        world = world._replace(coordinator=coordinator)
        if coordinator.is_recovering or coordinator.committed == NONE:
            return world
        if not before.is_recovering and coordinator.committed < before.committed:
            raise Violation(f"C falls from {before.committed} to {coordinator.committed}")
        counted = (world.generation, int(coordinator.committed))
        if counted <= world.counted or coordinator.committed < world.best:
            return world
        dead = world.restore.dead if world.restore is not None else frozenset[int]()
        content = self.content(world, coordinator.committed)
        damaged = {
            seat
            for seat in range(world.size)
            if (share := self.share(world, seat, content)) is not None and DAMAGE in share.value
        }
        covered = tuple(all(world.stood[seat] for seat in group) for group in self.groups[world.size])
        spoiled = world.spoiled if coordinator.committed == world.counted[1] else frozenset[int]()
        known = world._replace(
            best=coordinator.committed,
            counted=counted,
            covered=covered,
            covered_size=world.size,
            weak=dead | damaged | spoiled,
            spoiled=spoiled,
        )
        return known if self._is_covered(known, frozenset()) else known._replace(best=0)

    def _boundary(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        """Yield the event in which a rank finishes its next step.

        All other ranks must have finished the step before.
        """
        boundary, shard = world.boundaries[rank] + 1, world.shards[rank]
        if boundary > self.shape.steps or boundary - 1 > min(world.boundaries[: world.size]):
            return
        after = world._replace(boundaries=put(world.boundaries, rank, boundary))
        if shard.proposed == boundary and shard.vote is Vote.NONE and boundary not in shard.sealed:
            index = self.rules.writable(world.own[rank], self.keeps(world, rank))
            if index is None:
                after = self._apply(after, rank, shard.abandon(shard.proposed, "no slot"))
            else:
                content = self.content(world, boundary)
                after = self._own(after, rank, put(world.own[rank], index, SlotView(SlotState.SEALED, content)))
                for lost in shard.sealed:
                    if not self.has(after, rank, self.content(world, lost)):
                        shard = shard.forget(lost)
                after = self._apply(after, rank, shard.seal(Step(boundary)))
        yield ("boundary", rank, boundary), after

    @staticmethod
    def _own(world: World, rank: int, pair: Pair) -> World:
        return world._replace(own=put(world.own, rank, pair))

    # -- events: contributions of a rank's shard to the shares of other members

    def _line_moves(self, world: World, rank: int, holder: int) -> Iterator[tuple[Event, World]]:
        line, shard = world.lines[rank][holder], world.shards[rank]
        is_given_up = line.phase > Phase.IDLE and line.step not in (shard.foundation, shard.proposed)
        if is_given_up and self.rules.cancels:
            yield ("cancel", rank, holder, line.step), self._line(world, rank, holder, Line(Phase.IDLE))
        match line.phase:
            case Phase.OFF if not self._lacks_base(world, rank):
                yield ("connect", rank, holder), self._connected(world, rank, holder)
            case Phase.IDLE:
                begun = self._begun(world, rank, holder)
                if begun is not None and not self.is_fine:
                    yield ("contribute", rank, holder), self._settled(begun, rank, holder)
                elif begun is not None:
                    yield ("begin", rank, holder, begun.lines[rank][holder].step), begun
            case Phase.OPEN:
                yield ("chunk", rank, holder, line.step), self._received(world, rank, holder)
            case Phase.SENT:
                yield ("end", rank, holder, line.step), self._ended(world, rank, holder)
            case Phase.WAITING if self._accumulating(world, rank, holder) is None:
                yield ("refuse", rank, holder, line.step), self._line(world, rank, holder, Line(Phase.IDLE))
            case Phase.SEALED:
                yield ("acknowledge", rank, holder, line.step), self._acknowledged(world, rank, holder)

    def _settled(self, world: World, rank: int, holder: int) -> World:
        """Return the state after a whole contribution and all acknowledgements that it causes."""
        if world.lines[rank][holder].phase is Phase.OPEN:
            world = self._received(world, rank, holder)
        if world.lines[rank][holder].phase is Phase.SENT:
            world = self._ended(world, rank, holder)
        for other in self.group_of(world.size, holder):
            if world.lines[other][holder].phase is Phase.SEALED and self.acts(world, other):
                world = self._acknowledged(world, other, holder)
        return world

    @staticmethod
    def _line(world: World, rank: int, holder: int, line: Line) -> World:
        return world._replace(lines=put(world.lines, rank, put(world.lines[rank], holder, line)))

    @staticmethod
    def _slot(world: World, holder: int, index: int, slot: ShareSlot) -> World:
        return world._replace(shares=put(world.shares, holder, put(world.shares[holder], index, slot)))

    def _lacks_base(self, world: World, rank: int) -> bool:
        """Return whether an owner lacks the generation's start step, and the generation has not committed this step
        yet.

        Such an owner opens no connection until the next generation.
        """
        shard = world.shards[rank]
        is_base = world.base and not world.earlier
        return bool(is_base) and shard.committed == NONE and world.base not in shard.sealed

    def _connected(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the holder has listed its sealed shares to a contributor.

        The contributor treats a share as stored if the share's header names its shard.
        """
        listed = {
            slot.view.content.step
            for slot in world.shares[holder]
            if slot.view.state is SlotState.SEALED
            and slot.view.content is not None
            and slot.view.content == self.content(world, slot.view.content.step)
            and self.has(world, rank, slot.view.content)
            and contribution(rank, slot.view.content) in slot.header
        }
        peer = NodeId(f"{holder}")
        world = self._line(world, rank, holder, Line(Phase.IDLE))
        return self._apply(world, rank, world.shards[rank].answer(peer).inventory(peer, frozenset(listed)))

    def _begun(self, world: World, rank: int, holder: int) -> World | None:
        """Return the state after the contributor has offered the step that the holder's share lacks.

        Return None if there is no such step, or if the holder has no slot for it.
        """
        step = world.shards[rank].wanted(NodeId(f"{holder}"))
        content = self.content(world, step)
        if step == NONE or not self.has(world, rank, content):
            return None
        ours = contribution(rank, content)
        sealed = self.share(world, holder, content)
        if sealed is not None and ours in sealed.header:
            return self._line(world, rank, holder, Line(Phase.SEALED, step))
        keep = self.keeps(world, holder, told=world.shards[rank].committed, is_share=True)
        views = [slot.view for slot in world.shares[holder]]
        index = self.rules.place(views, content, keep, self.rules.writable)
        if index is None:
            return None
        slot = world.shares[holder][index]
        if slot.view != SlotView(SlotState.WRITING, content):
            if content not in keep and slot.view.content is not None and slot.view.content.step > step:
                raise Violation(f"an offer of {content} displaces {slot.view.content} at node {holder}")
            others = frozenset(Rank(member) for member in self.group_of(world.size, holder) if member != holder)
            slot = ShareSlot(SlotView(SlotState.WRITING, content), share=self.rules.share(others))
        assert slot.share is not None
        world = self._slot(world, holder, index, slot._replace(share=slot.share.begin(ours)))
        return self._line(world, rank, holder, Line(Phase.OPEN, step))

    def _accumulating(self, world: World, rank: int, holder: int) -> int | None:
        """Return the index of the holder's slot that still collects this contribution, or None."""
        content = self.content(world, world.lines[rank][holder].step)
        for index, slot in enumerate(world.shares[holder]):
            if slot.share is not None and slot.view.content == content:
                return index if contribution(rank, content) in slot.share.announced else None
        return None

    def _received(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the holder has received and verified the chunk.

        It rejects the chunk if it no longer collects this contribution.
        """
        line, index = world.lines[rank][holder], self._accumulating(world, rank, holder)
        if index is None:
            return self._line(world, rank, holder, Line(Phase.IDLE))
        slot = world.shares[holder][index]
        assert slot.share is not None
        if slot.share.accepts(Rank(rank), 0):
            token = (rank, self.content(world, line.step))
            slot = slot._replace(value=slot.value ^ {token}, share=slot.share.apply(Rank(rank), 0))
        return self._line(self._slot(world, holder, index, slot), rank, holder, line._replace(phase=Phase.SENT))

    def _ended(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the contributor's last chunk has arrived.

        If the contributions of all members are complete, the holder seals the share and acknowledges it to all of them.
        """
        line, index = world.lines[rank][holder], self._accumulating(world, rank, holder)
        if index is None:
            return self._line(world, rank, holder, Line(Phase.IDLE))
        slot, content = world.shares[holder][index], self.content(world, line.step)
        assert slot.share is not None
        share = slot.share.finish(Rank(rank), [0])
        world = self._line(world, rank, holder, line._replace(phase=Phase.WAITING))
        if not share.is_complete:
            return self._slot(world, holder, index, slot._replace(share=share))
        sealed = ShareSlot(SlotView(SlotState.SEALED, content), slot.value, None, share.announced)
        expected = {(member, content) for member in self.group_of(world.size, holder) if member != holder}
        if sealed.value != expected:
            raise Violation(f"node {holder} seals a share of {content} that contains {sorted(map(str, sealed.value))}")
        world = self._slot(world, holder, index, sealed)
        for member in self.group_of(world.size, holder):
            if world.lines[member][holder] == Line(Phase.WAITING, line.step):
                world = self._line(world, member, holder, Line(Phase.SEALED, line.step))
        return world

    def _acknowledged(self, world: World, rank: int, holder: int) -> World:
        step = Step(world.lines[rank][holder].step)
        world = self._line(world, rank, holder, Line(Phase.IDLE))
        return self._apply(world, rank, world.shards[rank].acknowledge(NodeId(f"{holder}"), step))

    # -- events: losses of nodes, memory faults and restarts of agents

    def _failures(self, world: World) -> Iterator[tuple[Event, World]]:
        if world.faults >= self.shape.faults:
            return
        faulty = world._replace(faults=world.faults + 1)
        for rank in range(world.size):
            shard = world.shards[rank]
            for holder in self.group_of(world.size, rank):
                peer = NodeId(f"{holder}")
                if peer in shard.awaited and shard.wanted(peer) != NONE:
                    yield ("drop", rank, holder), self._apply(faulty, rank, shard.drop(peer))
                if self.is_fine and holder != rank and world.lines[rank][holder].phase is not Phase.OFF:
                    yield ("break", rank, holder), self._line(faulty, rank, holder, Line())
            yield ("restart", rank), self._restarted(faulty, rank)
            if self.is_fine and self._is_covered(world, frozenset({rank})):
                yield from self._damages(faulty, rank)
        yield from self._losses(faulty, "lose")

    def _damages(self, world: World, seat: int) -> Iterator[tuple[Event, World]]:
        """Yield each damage that a memory fault can do to a committed shard or share.

        After the damage, the group may lose no node until the next commit.

        A restarted agent finds an invalid header and treats the slot as empty. Changed bytes of a share are detected
        only when the share is used.
        """
        weaker = world._replace(weak=world.weak | {seat}, spoiled=world.spoiled | {seat})
        for index, view in enumerate(world.own[seat]):
            if view.content is not None and view.content.step <= world.best:
                spoiled = self._own(weaker, seat, put(world.own[seat], index, EMPTY))
                yield ("spoil", seat, "shard", view.content.step), self._restarted(spoiled, seat)
        for index, slot in enumerate(world.shares[seat]):
            content = slot.view.content
            if slot.view.state is SlotState.SEALED and content is not None and content.step <= world.best:
                spoiled = self._slot(weaker, seat, index, ShareSlot())
                yield ("spoil", seat, "share", content.step), self._restarted(spoiled, seat)
                changed = slot._replace(value=slot.value | {DAMAGE})
                yield ("damage", seat, content.step), self._slot(weaker, seat, index, changed)

    def _restarted(self, world: World, seat: int) -> World:
        """Restart the agent of a node.

        The new agent finds its page and its sealed slots, and discards unsealed shares.
        """
        world = self._cut(world, {seat})
        world = world._replace(shares=put(world.shares, seat, _sealed_only(world.shares[seat])))
        shard = world.shards[seat]
        sealed = frozenset(
            view.content.step
            for view in world.own[seat]
            if view.content is not None and view.content == self.content(world, view.content.step)
        )
        adopted = self.rules.shard.adopt(
            Step(0 if world.earlier else world.base),
            self._peers(world.size, seat),
            committed=shard.committed,
            proposed=shard.proposed,
            vote=shard.vote,
            sealed=sealed,
        )
        if adopted.proposed != NONE and adopted.proposed <= world.boundaries[seat]:
            adopted = adopted.abandon(adopted.proposed, "the agent was away")
        if seat == 0:
            recovered = Coordinator(
                world_size=world.size, base=Step(world.base), every_steps=0, is_relayout=bool(world.earlier)
            ).recover()
            world = world._replace(coordinator=recovered)
        return world._replace(shards=put(world.shards, seat, adopted))

    @staticmethod
    def _cut(world: World, seats: Collection[int]) -> World:
        lines = tuple(
            tuple(Line() if rank in seats or holder in seats else line for holder, line in enumerate(row))
            for rank, row in enumerate(world.lines)
        )
        return world._replace(lines=lines)

    def _is_covered(self, world: World, lost: frozenset[int]) -> bool:
        """Return whether the last commit must survive the loss of these nodes.

        A group may lose one member if every member counted as a holder at the commit (`covered`). Any other group may
        lose no member. Nodes in `weak` already count as lost.
        """
        return all(
            len((world.weak | lost).intersection(group)) <= is_covered
            for group, is_covered in zip(self.groups[world.covered_size], world.covered, strict=True)
        )

    def _losses(self, world: World, name: str) -> Iterator[tuple[Event, World]]:
        for size in range(world.size):
            for seats in combinations(range(world.size), size):
                lost = frozenset(seats)
                if self._is_covered(world, lost) and world.best:
                    yield (name, *seats), self._lost(world, lost)
                elif name == "lose again" or size <= 2:
                    beyond = self._uncovered(world)
                    yield ("lose too many" if name == "lose" else name, *seats), self._lost(beyond, lost)

    @staticmethod
    def _uncovered(world: World) -> World:
        """Return the state with the checker's facts reset.

        More nodes are lost than the protection covers. The invariants then no longer require that any earlier commit
        survives.
        """
        return world._replace(best=0, covered=(False,) * len(world.covered), weak=frozenset())

    def _lost(self, world: World, lost: frozenset[int]) -> World:
        """Return the state after nodes are lost with all their slots.

        The control plane asks every other node to promise to stop its old work.
        """
        world = self._cut(world, lost)
        before, dead, quiet = world.restore, lost, frozenset[int]()
        if before is not None:
            dead |= before.dead
            quiet = frozenset(range(world.size)) if before.plan is not None else before.quiet
        return world._replace(
            own=tuple(empty_pair() if seat in lost else pair for seat, pair in enumerate(world.own)),
            shares=tuple((ShareSlot(),) * 2 if seat in lost else pair for seat, pair in enumerate(world.shares)),
            weak=(world.weak | lost) if world.best else frozenset(),
            issued=world.issued + 1,
            new=world.new | lost,
            restore=Restore(dead, (None,) * self.shape.nodes, quiet),
        )

    # -- events: promises, the plan and the loads of a new generation

    def _restore_moves(self, world: World, restore: Restore) -> Iterator[tuple[Event, World]]:
        live = [seat for seat in range(world.size) if seat not in restore.dead]
        missing = [seat for seat in live if restore.inventories[seat] is None]
        for seat in missing:
            yield ("promise", seat), self._promised(world, restore, seat)
        if restore.plan is not None:
            for seat in range(restore.plan.size):
                if not restore.loaded[seat]:
                    yield ("load", seat), self._loaded(world, restore, restore.plan, seat)
            if all(restore.loaded[: restore.plan.size]):
                yield ("start",), self._started(world, restore.plan, world.issued)
        elif not missing:
            yield ("plan",), self._planned(world, restore, world.size)
            if world.size + 1 in self.shape.sizes:
                yield ("grow",), self._planned(world, restore, world.size + 1)
            if world.size - 1 in self.shape.sizes and world.size - 1 in restore.dead:
                yield ("shrink",), self._planned(world, restore, world.size - 1)
        if world.faults < self.shape.faults:
            yield from self._losses(world._replace(faults=world.faults + 1), "lose again")

    def _promised(self, world: World, restore: Restore, seat: int) -> World:
        """Return the state after a node has promised to stop its old work.

        It closes its connections, discards unsealed shares, and lists its sealed slots.
        """
        world = self._cut(world, {seat})
        world = world._replace(shares=put(world.shares, seat, _sealed_only(world.shares[seat])))
        committed = NONE if seat in world.new else world.shards[seat].committed
        inventory = Inventory(
            committed,
            tuple(view.content for view in world.own[seat] if view.content is not None),
            tuple((slot.view.content, slot.header) for slot in world.shares[seat] if slot.view.content is not None),
        )
        inventories = put(restore.inventories, seat, inventory)
        return world._replace(restore=restore._replace(inventories=inventories, quiet=restore.quiet | {seat}))

    def _planned(self, world: World, restore: Restore, size: int) -> World:
        """Return the state after the control plane has planned a generation of `size` nodes.

        It chooses the newest step that every rank has or whose lost shard the rank's group can rebuild.
        """
        path = self.path(world)
        present = {seat: listed for seat, listed in enumerate(restore.inventories) if listed is not None}
        inventories = {
            NodeId(f"{seat}"): (
                *(_record(seat, content, contribution(seat, content).digest) for content in listed.shards),
                *(_record(share_owner(Rank(seat)), content, b"share", header) for content, header in listed.shares),
            )
            for seat, listed in present.items()
        }
        survey = recovery.Survey(
            owners=[NodeId(f"{seat}") for seat in range(size)],
            inventories=inventories,
            path=path,
            worlds={Generation(generation): ranks for generation, _, _, ranks in world.lineage},
            refused=[
                RefusedSource(rank=Rank(r), origin_generation=Generation(o), step=Step(s)) for r, o, s in world.refused
            ],
            committed=recovery.newest_committed(
                path, Step(NONE), [(Generation(world.generation), Step(each.committed)) for each in present.values()]
            ),
        )
        with patch.object(rebuilding, "rebuilds", self.rules.rebuilds):
            chosen = recovery.choose(survey)
        if chosen.base_step < world.best:
            raise Violation(f"the base is {chosen.base_step} although {world.best} was committed and covered")
        shards = chosen.sources if chosen.relayout is None else chosen.relayout.shards
        firsts = [sources[0] for sources in shards if sources]
        origins = {source.origin_generation for source in firsts}
        if len(origins) > 1:
            raise Violation(f"base {chosen.base_step} as captured by generations {sorted(origins)}")
        origin = max(origins, default=0)
        keep = tuple(
            (_kept_of(chosen, seat, seat), _kept_of(chosen, seat, share_owner(Rank(seat))))
            for seat in range(self.shape.nodes)
        )
        wanted = tuple(source.rebuild.lost if source.rebuild is not None else None for source in firsts)
        plan = Plan(chosen.base_step, origin, keep, wanted, size, chosen.relayout is not None)
        if plan.is_relayout and not self.rules.keeps_earlier_shares:
            plan = plan._replace(keep=tuple((shards, frozenset[Content]()) for shards, _ in keep))
        return world._replace(restore=restore._replace(dead=frozenset(), plan=plan, loaded=(False,) * self.shape.nodes))

    def _loaded(self, world: World, restore: Restore, plan: Plan, seat: int) -> World:
        """Return the state after a node has loaded the plan: it empties the slots that the plan does not keep.

        If it lacks its shard of the planned step, it rebuilds the shard. In a relayout, its rank loads the earlier
        shards after the start.
        """
        base = Content(Generation(plan.origin), Step(plan.base)) if plan.base and not plan.is_relayout else None
        keep, keep_shares = (self.rules.kept(None, planned, base) for planned in plan.keep[seat])
        world = self._own(world, seat, tuple(EMPTY if view.content not in keep else view for view in world.own[seat]))
        kept = tuple(ShareSlot() if slot.view.content not in keep_shares else slot for slot in world.shares[seat])
        world = world._replace(shares=put(world.shares, seat, kept))
        if base is not None and plan.rebuilt[seat] is not None:
            if not self._is_rebuilt_right(world, plan.size, seat, base):
                if self.rules.verifies:
                    return self._mismatched(world, seat, base)
                raise Violation(f"rank {seat} continues from a wrong state of step {plan.base}")
            index = self.rules.writable(world.own[seat], keep - {base})
            if index is None:
                raise Violation(f"no slot of node {seat} can take the base {plan.base}")
            world = self._own(world, seat, put(world.own[seat], index, SlotView(SlotState.SEALED, base)))
        elif base is not None and not self.has(world, seat, base):
            raise Violation(f"step {plan.base} of rank {seat} is planned and nobody has it any more")
        return world._replace(restore=restore._replace(loaded=put(restore.loaded, seat, True)), new=world.new | {seat})

    def _loaded_earlier(self, world: World, seat: int) -> World:
        """Return the state after a rank has loaded all shards of the base in a relayout.

        Other nodes may train already.

        Each shard comes from its node, or the rank's node rebuilds the shard from the rest of its group.
        """
        base, size = Content(Generation(world.origin), Step(world.base)), len(world.earlier)
        for rank, lost in enumerate(world.earlier):
            if lost is None:
                if not self.has(world, rank, base):
                    raise Violation(f"seat {seat} loads the shard of rank {rank}, and nobody has it any more")
            elif not self._is_rebuilt_right(world, size, rank, base):
                if self.rules.verifies:
                    return self._mismatched(world, rank, base)
                raise Violation(f"seat {seat} continues from a wrong state of step {world.base}")
        return world._replace(loading=world.loading - {seat})

    def _is_rebuilt_right(self, world: World, size: int, lost: int, base: Content) -> bool:
        """Return whether every survivor's share, combined with the other survivors' shards, gives the lost shard.

        `size` is the number of ranks that made the shard.
        """
        others = [seat for seat in self.group_of(size, lost) if seat != lost]
        for holder in others:
            share = self.share(world, holder, base)
            if share is None or not self.has(world, holder, base):
                raise Violation(f"node {holder} no longer has what rank {lost} of step {base.step} is rebuilt from")
            rest = {(seat, base) for seat in others if seat != holder}
            if share.value ^ rest != {(lost, base)}:
                return False
        return True

    def _mismatched(self, world: World, rank: int, base: Content) -> World:
        """Return the state after a rebuilt shard has failed verification.

        A new generation starts from an older step.
        """
        if not any(DAMAGE in slot.value for pair in world.shares for slot in pair):
            raise Violation(f"rank {rank} of step {base.step} is rebuilt wrongly although no share was damaged")
        beyond = world._replace(refused=world.refused | {(rank, base.origin, base.step)})
        return self._lost(self._uncovered(beyond), frozenset())

    # -- invariants of every state

    def check(self, world: World) -> None:
        """Check that the newest commit survives every loss of at most one node per group.

        Raises:
            Violation: the remaining nodes neither have nor can rebuild a common step as new as the commit.
        """
        if not world.best:
            return
        dead = world.restore.dead if world.restore is not None else frozenset[int]()
        for lost in self._all_losses[world.size]:
            if self._is_covered(world, lost) and self._newest_left(world, dead | lost) < world.best:
                raise Violation(f"without {sorted(dead | lost)} no common step from {world.best} on is left")

    @cached_property
    def _all_losses(self) -> Mapping[int, list[frozenset[int]]]:
        return {
            total: [frozenset(lost) for count in range(total) for lost in combinations(range(total), count)]
            for total in self.shape.sizes
        }

    def _newest_left(self, world: World, dead: frozenset[int]) -> int:
        """Return the newest step of which every group has, or can rebuild, all shards.

        The groups are those of the generation that captured the step.
        """
        path = self.path(world)
        sizes = {generation: size for generation, _, _, size in world.lineage}
        found: set[Step] = set()
        for total, groups in self.groups.items():
            found |= set.intersection(
                *(
                    {
                        content.step
                        for seat in group
                        for view in world.own[seat]
                        if (content := view.content) is not None
                        and sizes[content.origin] == total
                        and content.step <= path.get(content.origin, NONE)
                        and self._is_left(world, group, content, dead)
                    }
                    for group in groups
                )
            )
        return max(found, default=NONE)

    def _is_left(self, world: World, group: Sequence[int], content: Content, dead: frozenset[int]) -> bool:
        """Return whether live members of a group have the shards of all its ranks, or can rebuild the only lost
        shard.
        """
        left = [seat for seat in group if seat not in dead and self.has(world, seat, content)]
        if len(left) >= len(group) - 1:
            shares = [self.share(world, seat, content) for seat in left]
            return len(left) == len(group) or all(each is not None and DAMAGE not in each.value for each in shares)
        return False

    def is_done(self, world: World) -> bool:
        """Return whether every rank is at the last step."""
        return world.restore is None and all(each == self.shape.steps for each in world.boundaries[: world.size])


def contribution(rank: int, content: Content) -> Contribution:
    """Return the contribution of a rank's shard to a share. The same rank, generation and step give the same digest."""
    return Contribution(
        rank=Rank(rank),
        payload_bytes=1,
        digest=bytes([rank, content.origin, content.step]),
        layout_hash=b"",
        index_offset=0,
        index_bytes=0,
    )


def _sealed_only(pair: tuple[ShareSlot, ...]) -> tuple[ShareSlot, ...]:
    return tuple(slot if slot.view.state is SlotState.SEALED else ShareSlot() for slot in pair)


def _record(owner: int, content: Content, digest: bytes, contributions: Collection[Contribution] = ()) -> SlotRecord:
    return SlotRecord(
        owner_rank=Rank(owner),
        origin_generation=content.origin,
        step=content.step,
        payload_bytes=1,
        digest=digest,
        layout_hash=b"",
        contributions=tuple(sorted(contributions, key=lambda each: each.rank)),
    )


def _kept_of(chosen: recovery.Restore, seat: int, owner: int) -> frozenset[Content]:
    listed = chosen.keep.get(NodeId(f"{seat}"), ())
    return frozenset(Content(each.origin_generation, each.step) for each in listed if each.owner_rank == owner)


@lru_cache(maxsize=1024)
def _path(lineage: tuple[tuple[int, int, int, int], ...], generation: int) -> recovery.Path:
    records = [
        GenerationRecord(
            generation=Generation(g), parent=Generation(p), base_step=Step(b), world_size=size, was_started=True
        )
        for g, p, b, size in lineage
    ]
    return recovery.path_of(records, Generation(generation))


def steady(nodes: int, group: int, *, committed: int = 2, seed: int = 1) -> World:
    """Return a state in the middle of training.

    Every agent has received the commit, which survives one loss per group.
    """
    driver = Driver(Model(Shape(nodes, group, 99, 0)), seed=seed, weights=SLOWLY)
    driver.until(
        lambda world: (
            world.best >= committed
            and all(world.covered)
            and all(shard.committed == world.best for shard in world.shards)
        )
    )
    return driver.world


# -- bugs that the tests plant into the rules


class AppliesTwice(ParityShare):
    """Planted bug: the holder applies a repeated chunk to the slot a second time, which removes the chunk."""

    __slots__ = ()

    def accepts(self, rank: Rank, row: int) -> bool:
        return True


class SealsEarly(ParityShare):
    """Planted bug: the holder seals a share while one contribution is missing."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return len(self.complete) >= len(self.contributors) - 1


class CountsBegun(ParityShare):
    """Planted bug: the holder counts a contribution as complete before its chunk has arrived."""

    __slots__ = ()

    def begin(self, contribution: Contribution) -> ParityShare:
        begun = super().begin(contribution)
        return replace(begun, complete=begun.complete | {contribution.rank})


def overwrite_oldest(views: Sequence[SlotView], keep: Collection[Content]) -> int | None:
    """Planted bug: overwrite the slot with the oldest step, even if that step is committed."""
    steps = [-1 if view.content is None else view.content.step for view in views]
    return steps.index(min(steps))


def place_in_oldest(
    views: Sequence[SlotView], content: Content, keep: Collection[Content], free: Callable[..., int | None]
) -> int | None:
    """Planted bug: accumulate a new share over the share of the committed step, before a newer step is committed."""
    return parity.place(views, content, keep, overwrite_oldest)


def place_any(
    views: Sequence[SlotView], content: Content, keep: Collection[Content], free: Callable[..., int | None]
) -> int | None:
    """Planted bug: if a member announces its shard of an older step, this may overwrite the share of a newer step."""
    index = slots.being_written(views, content)
    return free(views, keep) if index is None else index


def rebuild_from_some(
    listed: Iterable[tuple[NodeId, SlotRecord]],
    worlds: Mapping[Generation, int],
    *,
    existing: Collection[rebuilding.Content] = (),
) -> list[tuple[rebuilding.Content, Rebuild]]:
    """Planted bug: treat a lost shard as rebuildable as soon as any one share contains it."""
    shares, owners = _sorted(listed)
    return [
        (content, Rebuild(lost=each, survivors=()))
        for content, share in shares
        for each in share.contributions
        if each.rank not in owners[content]
    ]


def rebuild_without_shares(
    listed: Iterable[tuple[NodeId, SlotRecord]],
    worlds: Mapping[Generation, int],
    *,
    existing: Collection[rebuilding.Content] = (),
) -> list[tuple[rebuilding.Content, Rebuild]]:
    """Planted bug: treat a lost shard as rebuildable although a survivor never sealed its share."""
    shares, owners = _sorted(listed)
    return [
        (content, Rebuild(lost=lost[0], survivors=()))
        for content, share in shares
        if holder_of(share.owner_rank) in owners[content]
        and len(lost := [each for each in share.contributions if each.rank not in owners[content]]) == 1
    ]


def _sorted(
    listed: Iterable[tuple[NodeId, SlotRecord]],
) -> tuple[list[tuple[rebuilding.Content, SlotRecord]], Mapping[rebuilding.Content, set[Rank]]]:
    """Sort listed slots into shares and shards.

    Return each share with its generation and step, and the owners of the shards by generation and step.
    """
    shares: list[tuple[rebuilding.Content, SlotRecord]] = []
    owners: defaultdict[rebuilding.Content, set[Rank]] = defaultdict(set)
    for _, slot in listed:
        content = (slot.origin_generation, slot.step)
        if is_share(slot.owner_rank):
            shares.append((content, slot))
        else:
            owners[content].add(slot.owner_rank)
    return shares, owners


class AcksAlone(Shard):
    """Planted bug: a member acknowledges a step when its own shard is sealed, before any share is."""

    __slots__ = ()

    def _settled(self) -> Shard:
        ready = self.vote is Vote.NONE and self.proposed != NONE and self.proposed in self.sealed
        return replace(self, vote=Vote.ACKED) if ready else self


BUGS: Mapping[str, Rules] = {
    "applied-twice": Rules(share=AppliesTwice),
    "sealed-early": Rules(share=SealsEarly),
    "counts-begun": Rules(share=CountsBegun),
    "early-recycle": Rules(place=place_in_oldest),
    "outdated-offer": Rules(place=place_any),
    "unverified": Rules(verifies=False),
    "two-losses": Rules(rebuilds=rebuild_from_some),
    "without-shares": Rules(rebuilds=rebuild_without_shares),
    "owner-ack": Rules(shard=AcksAlone),
    "never-cancels": Rules(cancels=False),
    "drops-earlier-shares": Rules(keeps_earlier_shares=False),
}


def main(arguments: Sequence[str]) -> int:
    """Explore with the options of the command line and print the counts, or the events of a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.parity")
    for name in ("nodes", "group", "steps", "faults"):
        parser.add_argument(name, type=int)
    parser.add_argument("--bug", choices=sorted(BUGS))
    parser.add_argument("--walks", type=int, default=0, help="random walks instead of every interleaving")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--steady", action="store_true", help="from the middle of a training; STEPS counts from there")
    parser.add_argument("--elastic", action="store_true", help="generations may have one node less than NODES")
    chosen = parser.parse_args(arguments)
    start = steady(chosen.nodes, chosen.group) if chosen.steady else None
    steps = chosen.steps + (max(start.boundaries) if start is not None else 0)
    shape = Shape(chosen.nodes, chosen.group, steps, chosen.faults, chosen.elastic)
    model = Model(shape, BUGS.get(chosen.bug), is_fine=bool(chosen.walks), start=start)
    seen = Explored()
    try:
        if not chosen.walks:
            seen = every_interleaving(model, limit=20_000_000)
        for seed in range(chosen.seed, chosen.seed + chosen.walks):
            _, walked = walk(model, random.Random(seed), 60 * max(chosen.steps, 2), weights=WEIGHTS)
            seen.update(walked)
    except Found as found:
        sys.stdout.write(f"{found}\n")
        return 1
    sys.stdout.write(f"{seen.states or sum(seen.values())} states, the invariants hold; {dict(seen.most_common())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
