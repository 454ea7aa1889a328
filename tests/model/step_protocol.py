"""Explicit-state model of the step protocol (docs/design.md#rounds), with the real decision code.

    worker.core.rounds.Shard, Coordinator       reports, votes, and which holders count
    worker.core.slots.writable, kept            which slot may be written
    everstep.training.step_rules.decide         what a rank does after a step
    control_plane.core.recovery.choose          the step from which a generation starts, and the slots to keep for it

An event may occur at any moment after it has become possible: a report or an announcement is received, a copier
finishes, a stream progresses, an agent or the coordinator restarts, a holder is dropped, nodes die, promise or load.
Another failure may occur before the effects of these events are complete.

A node may own several ranks. Their shards have the same holders, and their agent reports and receives for all ranks
together. With `every_steps`, owners upload committed steps. An upload pins the owner's slot, may fail, and ends with
its node or generation. Holders help with uploads at any time: a helping holder pins its replica, and can learn late
that the upload has ended. Ranks at the last step close, and the coordinator commits that step in a final round.

    python -m tests.model.step_protocol NODES COPIES STEPS FAULTS [--bug NAME] [--walks N] [--seed S] [--steady]
    [--ranks-per-node R] [--every K] [--uploads N]

The command explores every interleaving breadth first, or N random walks with finer steps. FAULTS limits the total
number of faults.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import combinations

from control_plane.core import recovery
from control_plane.core.observed.steps import GenerationRecord, RefusedSource
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import SlotRecord
from everstep.protocol.rank_messages import AgentHalf, RankStanding, UnkeptCause, Vote
from everstep.protocol.rounds import RankRound
from everstep.protocol.slot import SlotState
from everstep.training import step_rules
from tests.model.explore import Driver, Explored, Found, every_interleaving, walk
from tests.model.world import (
    NONE,
    Outcome,
    Pair,
    Phase,
    Plan,
    Process,
    Restore,
    Shape,
    Stream,
    T,
    World,
    empty_pair,
    on_path,
    put,
)
from worker.core import slots
from worker.core.rounds import Coordinator, Shard
from worker.core.slots import EMPTY, Content, SlotView

Event = tuple[object, ...]
NO_STREAM = Stream()
WEIGHTS = {
    "boundary": 0.3,
    "obstacle": 0.1,
    "spoilt": 0.1,
    "drop": 0.4,
    "break": 0.1,
    "restart": 0.1,
    "spoil": 0.1,
    "lose": 0.03,
    "part": 0.03,
    "lose again": 0.1,
    "mismatch": 0.15,
    "uploaded": 0.2,
    "upload fails": 0.1,
    "help breaks": 0.1,
}
"""Weights of the kinds of events in a random walk; 1 for all others.

Training is slow and faults are rare, because otherwise no step is ever committed.
"""
SLOWLY = {**dict.fromkeys(WEIGHTS, 0.0), "boundary": 0.05}
"""Weights for walks without spontaneous faults. Training is so slow that replication keeps up."""


class Violation(Exception):
    """A state violates an invariant."""


@dataclass(frozen=True)
class Rules:
    """All decisions that the model calls. A planted bug replaces one or two of them."""

    shard: type[Shard] = Shard
    coordinator: type[Coordinator] = Coordinator
    writable: Callable[..., int | None] = slots.writable
    kept: Callable[..., frozenset[Content]] = slots.kept
    choose: Callable[[recovery.Survey], recovery.Restore] = recovery.choose
    has_promises: bool = True
    """True if a node that has promised to join a new generation stops all work for the old one."""
    starts_committed: bool = False
    """True if a new generation treats its start step as committed before all holders have it."""
    tells_committed: bool = True
    """True if the first message of a transfer contains the committed step C.

    Otherwise, a holder uses the C that the coordinator sent to the holder, which may be older.
    """
    ends_sealed: bool = True
    """True if the owner ends a transfer after it has sealed the slot, False if after the rank's last write."""
    pins_helped: bool = True
    """True if a holder pins the replica from which it sends parts of an upload."""
    may_upload: Callable[..., bool] = slots.may_upload
    unpins_own_step: bool = True
    """True if the end of an upload unpins only the slot of its own step."""
    ends_helping: bool = True
    """True if a holder unpins its replica when the connection to the owner ends."""
    committed: Callable[[recovery.Path, Step, Iterable[tuple[Generation, Step]]], Step] = recovery.newest_committed
    """Chooses the committed step for a plan, from the control plane's record and the pages of the promised nodes.

    The record may be older than the pages.
    """


class Model:
    """The step protocol as a model: every possible event in a state, and the state after the event."""

    def __init__(
        self, shape: Shape, rules: Rules | None = None, *, is_fine: bool = False, start: World | None = None
    ) -> None:
        """Create the model.

        Args:
            shape: sizes and the budget of faults.
            rules: the decisions; the real ones by default.
            is_fine: True makes every small action an event of its own. Otherwise, actions that only one node observes
                happen together with the preceding event.
            start: first state of the exploration; a job's first generation by default.
        """
        self._start = start
        self.shape = shape
        self.rules = rules or Rules()
        self.is_fine = is_fine
        self.holders = shape.holders()
        self.seats = range(shape.nodes)
        self.ranks = range(shape.world_size)
        self.seat_of = shape.seat_of
        self.ranks_of = shape.ranks_of

    # -- the first state of a job and of each generation

    def first(self) -> World:
        """Return the start of the first generation: no snapshot exists, and the script builds step 0."""
        if self._start is not None:
            shards = tuple(_as(self.rules.shard, shard) for shard in self._start.shards)
            coordinator = replace(
                _as(self.rules.coordinator, self._start.coordinator), every_steps=self.shape.every_steps
            )
            started = self._start._replace(shards=shards, coordinator=coordinator)
            return started if started.marked or not self.shape.every_steps else self._uploads_nothing(started)
        n, world_size = self.shape.nodes, self.shape.world_size
        world = World(
            generation=0,
            issued=0,
            lineage=(),
            base=0,
            origin=0,
            keep=((frozenset(),) * world_size,) * n,
            coordinator=self._begun(Step(0), Coordinator),
            shards=(),
            granted=(),
            processes=(),
            slots=tuple(tuple(empty_pair(self.shape.slot_count) for _ in row) for row in self.holders),
            streams=(),
            restore=None,
            limbo=(None,) * n,
            limbo_commits=((0, NONE),) * n,
            recorded=NONE,
            cleared=frozenset(),
            refused=frozenset(),
            faults=0,
            best=0,
            owed=tuple(frozenset(row) for row in self.holders),
            stood=(frozenset(),) * world_size,
            dropped=frozenset(),
            spoiled=frozenset(),
            heard=frozenset(),
        )
        return self._started(world, Plan(0, 0, world.keep), 1)

    def _started(self, world: World, plan: Plan, generation: int) -> World:
        """Return the state when a new generation starts: every node has loaded the plan, and all ranks run."""
        world_size, base = self.shape.world_size, Step(plan.base)
        coordinator = self._begun(base, self.rules.coordinator)
        shards = tuple(self.rules.shard.begin(base, self._peers(rank)) for rank in self.ranks)
        if self.rules.starts_committed and base:
            coordinator = replace(coordinator, committed=base, proposed=Step(NONE))._propose()
            shards = tuple(replace(shard, committed=base) for shard in shards)
        world = world if not self.shape.every_steps else self._uploads_nothing(world)
        return world._replace(
            generation=generation,
            issued=generation,
            lineage=(*world.lineage, (generation, world.generation, plan.base)),
            base=plan.base,
            origin=plan.origin,
            keep=plan.keep,
            coordinator=coordinator,
            shards=shards,
            granted=(NONE,) * world_size,
            processes=(Process(plan.base),) * world_size,
            streams=tuple((NO_STREAM,) * len(row) for row in self.holders),
            restore=None,
            heard=frozenset(),
            cleared=frozenset(),
        )

    def _begun(self, base: Step, kind: type[Coordinator]) -> Coordinator:
        shape = self.shape
        return kind(
            world_size=shape.world_size,
            base=base,
            every_steps=shape.every_steps,
            slot_count=shape.slot_count,
            max_uploads=shape.max_uploads,
        ).begin()

    def _uploads_nothing(self, world: World) -> World:
        return world._replace(
            marked=(NONE,) * self.shape.nodes, begun=(NONE,) * self.shape.world_size, uploads=frozenset()
        )

    def _peers(self, rank: int) -> tuple[NodeId, ...]:
        return tuple(NodeId(f"{seat}") for seat in self.holders[rank][1:])

    # -- what the agents and nodes of a state contain

    def content(self, world: World, step: int) -> Content:
        """Return the generation and step by which slots name `step` in the running generation."""
        return Content(Generation(world.origin if step == world.base and step else world.generation), Step(step))

    def has(self, world: World, rank: int, holder: int, content: Content) -> bool:
        """Return whether a holder has a sealed slot of a rank's shard at the generation and step of `content`."""
        return slots.find_sealed(world.slots[rank][holder], content) is not None

    def acts(self, world: World, seat: int) -> bool:
        """Return whether a node (`seat`: its position in the plan) still works for the running generation."""
        if world.restore is None:
            return True
        if seat in world.restore.dead or world.restore.plan is not None:
            return False
        return seat not in world.restore.quiet or not self.rules.has_promises

    def keeps(self, world: World, rank: int, seat: int, told: int = NONE) -> frozenset[Content]:
        """Return generation and step of each slot of a shard that a node's agent must not overwrite.

        The agent uses only the facts that it has itself. `seat` is the node's position in the plan.
        """
        committed = max(told, *(world.shards[mine].committed for mine in self.ranks_of(seat)))
        base = Content(Generation(world.origin), Step(world.base)) if world.base else None
        return self.rules.kept(
            self.content(world, committed) if committed != NONE else None, world.keep[seat][rank], base
        )

    def path(self, world: World) -> recovery.Path:
        """Return the newest started generation and its ancestors, each with the newest step that counts as its own."""
        return _path(world.lineage, world.generation)

    def half(self, world: World, rank: int) -> AgentHalf:
        """Return the half of a rank's shared-memory page that the agent writes, as `OwnedShard` would write it."""
        shard = world.shards[rank]
        voted = shard.proposed if shard.vote is not Vote.NONE else NONE
        return AgentHalf(
            world.generation, shard.committed, shard.proposed, world.granted[rank], vote_step=voted, vote=shard.vote
        )

    def round(self, world: World, rank: int) -> RankRound:
        """Return the entry for one rank in the report that the rank's node sends to the coordinator."""
        shard = world.shards[rank]
        return RankRound(
            rank=Rank(rank),
            boundary=Step(world.processes[rank].boundary),
            committed=shard.committed,
            proposed=shard.proposed,
            vote=shard.vote,
            is_late=shard.is_late,
            standing=RankStanding.CLOSING if world.processes[rank].is_closing else RankStanding.MOVING,
            pinned_steps=self.pins(world, rank),
        )

    @staticmethod
    def pins(world: World, rank: int) -> tuple[Step, ...]:
        """Return the steps of a rank's shard that the owner is uploading, in increasing order."""
        pinned = [view.content for view in world.slots[rank][0] if view.is_pinned]
        return tuple(sorted(content.step for content in pinned if content is not None))

    @staticmethod
    def pinned(world: World, rank: int) -> Step:
        """Return the oldest step of a rank's shard that the owner is uploading, or -1."""
        return next(iter(Model.pins(world, rank)), Step(NONE))

    # -- all events

    def moves(self, world: World) -> Iterator[tuple[Event, World]]:
        """Yield every possible event with the state after it."""
        for seat in self.seats:
            if self.acts(world, seat):
                yield from self._line(world, seat)
                for rank in self.ranks_of(seat):
                    yield from self._grant(world, rank)
                    yield from self._regain(world, rank)
                    yield from self._process_moves(world, rank)
                    yield from self._upload_moves(world, rank)
        for rank in self.ranks:
            for holder in range(1, len(self.holders[rank])):
                yield from self._stream_moves(world, rank, holder)
                yield from self._help_moves(world, rank, holder)
        if world.restore is None:
            yield from self._failures(world)
        else:
            yield from self._restore_moves(world, world.restore)

    # -- events: reports to the coordinator, its announcements, and uploads

    def _line(self, world: World, seat: int) -> Iterator[tuple[Event, World]]:
        coordinator, ranks = world.coordinator, self.ranks_of(seat)
        if self.acts(world, 0):
            reports = [self.round(world, rank) for rank in ranks]
            if any(report not in coordinator.ranks for report in reports):
                yield ("report", seat), self._coordinated(world, coordinator.report(*reports))
            if not coordinator.is_recovering:
                heard = self._marked(world, seat)
                for rank in ranks:
                    heard = self._released(heard, rank)
                    heard = self._apply(
                        heard, rank, heard.shards[rank].apply_announcement(coordinator.committed, coordinator.proposed)
                    )
                    heard = self._released(heard, rank)
                if heard is not world and heard != world:
                    yield ("hear", seat, coordinator.committed, coordinator.proposed), heard

    def _released(self, world: World, rank: int) -> World:
        """Clear the settled step of a closing rank when its agent no longer announces a proposal of this step.

        The settled step is the step that the rank captured or abandoned last, and the rank answers no second proposal
        of it. At the end of training, the coordinator may propose the same step again, and the rank must then answer
        again. The model clears the step at once, because the rank reads its page before a further proposal can arrive.
        """
        process = world.processes[rank]
        outcome = process.outcome
        if (
            not process.is_closing
            or outcome is None
            or not outcome.is_heard
            or outcome.step == world.shards[rank].proposed
        ):
            return world
        return self._process(world, rank, process._replace(outcome=None))

    def _marked(self, world: World, seat: int) -> World:
        """Pin the slot whose step an announcement marks for upload.

        As in `Member._hear`, this happens before the agent applies the rest of the announcement.
        """
        coordinator = world.coordinator
        if not self.shape.every_steps:
            return world
        if coordinator.persist != world.marked[seat]:
            world = world._replace(marked=put(world.marked, seat, coordinator.persist))
        if coordinator.persist == coordinator.committed:
            for rank in self.ranks_of(seat):
                world = self._upload_if_due(world, rank)
        return world

    def _upload_if_due(self, world: World, rank: int) -> World:
        step = world.marked[self.seat_of(rank)]
        index = slots.find_sealed(world.slots[rank][0], self.content(world, step))
        is_due = self.rules.may_upload(
            Step(step),
            begun=Step(world.begun[rank]),
            uploading=self.pins(world, rank),
            max_uploads=self.shape.max_uploads,
        )
        if not is_due or index is None:
            return world
        pinned = self._slot(world, rank, 0, index, replace(world.slots[rank][0][index], is_pinned=True))
        if len(self.pins(pinned, rank)) > self.shape.max_uploads:
            raise Violation(f"rank {rank} uploads steps {self.pins(pinned, rank)} at the same time")
        return pinned._replace(begun=put(world.begun, rank, step), uploads=world.uploads | {(rank, int(step))})

    def _upload_moves(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        """Yield the possible ends of a rank's upload: success, failure, or cancellation in favour of the final step.

        A failed upload is not retried for the same step.
        """
        for step in self.pins(world, rank):
            yield from self._ends_of_upload(world, rank, step)

    def _ends_of_upload(self, world: World, rank: int, step: Step) -> Iterator[tuple[Event, World]]:
        pair = _unpinned(world.slots[rank][0], step if self.rules.unpins_own_step else NONE)
        unpinned = world._replace(
            slots=put(world.slots, rank, put(world.slots[rank], 0, pair)),
            uploads=world.uploads - {(rank, int(step))},
        )
        if slots.is_superseded(
            step,
            committed=world.shards[rank].committed,
            proposed=world.shards[rank].proposed,
            persist=Step(world.marked[self.seat_of(rank)]),
        ):
            yield ("cancelled", rank, step), unpinned
        if not self.shape.has_slow_uploads or self.is_done(world):
            ended = unpinned
            if world.marked[self.seat_of(rank)] == world.shards[rank].committed:
                ended = self._upload_if_due(unpinned, rank)
            yield ("uploaded", rank, step), ended
        if world.faults < self.shape.faults:
            yield ("upload fails", rank, step), unpinned._replace(faults=world.faults + 1)

    def _help_moves(self, world: World, rank: int, holder: int) -> Iterator[tuple[Event, World]]:
        """Yield the start and the end of a holder's help with a rank's upload, as in `UploadHelper.serve`.

        The connection can break at any time. The holder can learn late that the owner's upload has ended.
        """
        seat, pins = self.holders[rank][holder], self.pins(world, rank)
        helped = [sent for r, s, sent in world.helping if (r, s) == (rank, seat)]
        for sent in helped:
            own = world.shards[self.ranks_of(seat)[0]]
            is_superseded = slots.is_superseded(
                Step(sent), committed=own.committed, proposed=own.proposed, persist=Step(world.marked[seat])
            )
            unhelped = self._unhelped(world, rank, holder, sent)
            if self.rules.ends_helping and (is_superseded or sent not in pins):
                yield ("helped", rank, seat, sent), unhelped
            elif self.is_fine and world.faults < self.shape.faults:
                yield ("help breaks", rank, seat, sent), unhelped._replace(faults=world.faults + 1)
        if not (self.acts(world, self.seat_of(rank)) and self.acts(world, seat)):
            return
        for step in pins:
            index = slots.find_sealed(world.slots[rank][holder], self.content(world, step))
            if index is not None and step not in helped:
                view = replace(world.slots[rank][holder][index], is_pinned=self.rules.pins_helped)
                pinned = self._slot(world, rank, holder, index, view)
                yield ("help", rank, seat, step), pinned._replace(helping=world.helping | {(rank, seat, int(step))})

    def _unhelped(self, world: World, rank: int, holder: int, step: int = NONE) -> World:
        """Return the state after a holder has stopped helping with the upload of a step and has unpinned its replica.

        If `step` is NONE, the holder unpins all slots. If this holder is the owner, its uploads end, too.
        """
        seat, pair = self.holders[rank][holder], _unpinned(world.slots[rank][holder], step)
        ended = {each for each in world.helping if each[:2] == (rank, seat) and step in (NONE, each[2])}
        return world._replace(
            slots=put(world.slots, rank, put(world.slots[rank], holder, pair)),
            helping=world.helping - ended,
            uploads=world.uploads if holder else frozenset(each for each in world.uploads if each[0] != rank),
        )

    def _apply(self, world: World, rank: int, shard: Shard) -> World:
        """Store the new state of a rank's shard, as `OwnedShard` does, and record facts for the invariants."""
        before = world.shards[rank]
        if shard == before:
            return world
        if shard.committed < before.committed:
            raise Violation(f"rank {rank} goes back from C={before.committed} to {shard.committed}")
        gone = {int(peer) for peer in before.view - shard.view}
        # The owner may count a restarted holder again before the holder connects and reports lost slots. The checker
        # therefore counts only holders that really have the step.
        back = {
            seat for seat in map(int, shard.view - before.view) if self._has_at(world, rank, seat, shard.foundation)
        }
        counted = frozenset({self.seat_of(rank), *map(int, shard.view)})
        return world._replace(
            shards=put(world.shards, rank, shard),
            heard=world.heard | ({shard.proposed} - {NONE}),
            stood=put(world.stood, rank, counted) if before.vote is not shard.vote is Vote.ACKED else world.stood,
            granted=put(world.granted, rank, NONE) if shard.proposed != before.proposed else world.granted,
            dropped=(world.dropped | {(rank, seat) for seat in gone}) - {(rank, seat) for seat in back},
            owed=put(world.owed, rank, world.owed[rank] | (back - self._dead(world))),
        )

    @staticmethod
    def _dead(world: World) -> frozenset[int]:
        return world.restore.dead if world.restore is not None else frozenset()

    def _coordinated(self, world: World, coordinator: Coordinator) -> World:
        """Store the coordinator's new state. Check that C never falls and that no step is proposed twice."""
        before = world.coordinator
        world = world._replace(coordinator=coordinator)
        if coordinator.is_recovering:
            return world
        if not before.is_recovering and coordinator.committed < before.committed:
            raise Violation(f"C falls from {before.committed} to {coordinator.committed}")
        if coordinator.proposed not in (NONE, before.proposed):
            # A restarted coordinator proposes the start step again if its commit was not complete.
            again = before.is_recovering and coordinator.proposed == world.base
            is_forgotten = all(shard.proposed != coordinator.proposed for shard in world.shards)
            again |= coordinator.proposed == coordinator.final and is_forgotten
            if coordinator.proposed in world.heard and not again:
                raise Violation(f"step {coordinator.proposed} is proposed twice")
        if coordinator.committed != NONE and (coordinator.committed != before.committed or before.is_recovering):
            world = self._committed(world, coordinator.committed)
        return world

    def _committed(self, world: World, step: int) -> World:
        if step < world.best:
            raise Violation(f"C is {step} although {world.best} was committed before")
        dead = self._dead(world)
        counted = tuple(stood - dead - self._spoilt_at(world, rank, step) for rank, stood in enumerate(world.stood))
        if step > world.best > 0:
            for rank in self.ranks:
                thinned = world.owed[rank] - counted[rank] - self._spoilt_at(world, rank, step) - dead
                thinned = {seat for seat in thinned if (rank, seat) not in world.dropped}
                if thinned:
                    raise Violation(
                        f"step {step} of rank {rank} stands on {sorted(counted[rank])}, the one before also on "
                        f"{sorted(thinned)}, never dropped"
                    )
        elif step == world.best:
            counted = tuple(
                world.owed[rank] | {seat for seat in counted[rank] if self._has_at(world, rank, seat, step)}
                for rank in self.ranks
            )
        return world._replace(best=step if all(counted) else world.best, owed=counted)

    def _spoilt_at(self, world: World, rank: int, step: int) -> set[int]:
        """Return the nodes that correctly acknowledged a step and lost it later, for example by a memory fault."""
        content = self.content(world, step)
        return {
            seat
            for seat in self.holders[rank]
            if (rank, seat, content) in world.spoiled and not self._has_at(world, rank, seat, step)
        }

    def _has_at(self, world: World, rank: int, seat: int, step: int) -> bool:
        return self.has(world, rank, self.holders[rank].index(seat), self.content(world, step))

    # -- events: granted slots, captures and boundaries of a rank

    def _grant(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        """Grant a slot for the proposed step, as `RankSlots._grant` does.

        The agent first releases the slots that the rank was writing when the agent restarted.
        """
        shard = world.shards[rank]
        step = shard.proposed
        if step in (NONE, world.base) or step in shard.sealed or world.granted[rank] != NONE:
            return
        process = world.processes[rank]
        if process.boundary > step or (process.boundary == step and not process.is_closing):
            return
        world = self._settled(world, rank) if process.copying is None else world
        pair = world.slots[rank][0]
        index = slots.being_written(pair, self.content(world, step))
        if index is None:
            index = self.rules.writable(pair, self.keeps(world, rank, self.seat_of(rank)))
        if index is None:
            return
        lost_view = pair[index].content
        if pair[index].is_pinned or (lost_view is not None and (rank, int(lost_view.step)) in world.uploads):
            raise Violation(f"rank {rank} captures step {step} over {lost_view}, which is being uploaded")
        granted = self._slot(world, rank, 0, index, SlotView(SlotState.WRITING, self.content(world, step)))
        for lost in shard.sealed:
            if not self.has(granted, rank, 0, self.content(world, lost)):
                shard = shard.forget(lost)
        yield (
            ("grant", rank, step, index),
            granted._replace(granted=put(world.granted, rank, index), shards=put(world.shards, rank, shard)),
        )

    def _regain(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        """Yield the event in which a restarted owner fetches the start step that it lost, from a holder.

        `Member._regain_base` is the code that this models.
        """
        shard, base = world.shards[rank], Content(Generation(world.origin), Step(world.base))
        if not self._lacks_base(world, rank):
            return
        at = [
            holder
            for holder, seat in enumerate(self.holders[rank])
            if holder and self.acts(world, seat) and self.has(world, rank, holder, base)
        ]
        index = self.rules.writable(world.slots[rank][0], self.keeps(world, rank, self.seat_of(rank)) - {base})
        if at and index is not None:
            regained = self._slot(world, rank, 0, index, SlotView(SlotState.SEALED, base))
            yield ("regain", rank), self._apply(regained, rank, shard.seal(base.step))

    @staticmethod
    def _lacks_base(world: World, rank: int) -> bool:
        """Return whether an owner must fetch the generation's start step again.

        Until then, the owner has no connections to its holders (`Member._supply_regained`).
        """
        shard = world.shards[rank]
        return bool(world.base) and shard.committed == NONE and world.base not in shard.sealed

    @staticmethod
    def _slot(world: World, rank: int, holder: int, index: int, view: SlotView) -> World:
        pair = put(world.slots[rank][holder], index, view)
        return world._replace(slots=put(world.slots, rank, put(world.slots[rank], holder, pair)))

    @staticmethod
    def _process(world: World, rank: int, process: Process) -> World:
        return world._replace(processes=put(world.processes, rank, process))

    def _process_moves(self, world: World, rank: int) -> Iterator[tuple[Event, World]]:
        process = world.processes[rank]
        is_first = min(each.boundary for each in world.processes) >= process.boundary
        if process.boundary < self.shape.steps and is_first and process.copying is None:
            yield ("boundary", rank, process.boundary + 1), self._boundary(world, rank, "")
            if (
                self.is_fine
                and world.faults < self.shape.faults
                and world.shards[rank].proposed == process.boundary + 1
            ):
                yield ("obstacle", rank), self._boundary(world._replace(faults=world.faults + 1), rank, "no memory")
        if (
            process.boundary == self.shape.steps
            and self.shape.every_steps
            and process.is_connected
            and process.copying is None
        ):
            if not process.is_closing:
                yield ("close", rank), self._process(world, rank, process._replace(is_closing=True))
            elif (looked := self._look(world, rank, process, "")) != world:
                yield ("look", rank), looked
        if process.copying is not None:
            step, slot = process.copying
            view = world.slots[rank][0][slot]
            if view.state is SlotState.SEALED:
                raise Violation(f"rank {rank} copies step {step} into slot {slot}, which is sealed with {view.content}")
            copied = self._process(
                world, rank, process._replace(copying=None, outcome=Outcome(step, slot, False, False))
            )
            yield ("copied", rank, step), copied if self.is_fine else self._heard(copied, rank)
            if self.is_fine:
                yield from self._capture_moves(world, rank, step, slot)
        if process.outcome is not None and not process.outcome.is_heard and process.is_connected:
            yield ("deliver", rank, process.outcome.step), self._heard(world, rank)
        if not process.is_connected:
            yield ("hello", rank), self._hello(world, rank)

    def _capture_moves(self, world: World, rank: int, step: int, slot: int) -> Iterator[tuple[Event, World]]:
        """Yield the events during a copy.

        Either the agent receives a progress report, or the rank finds that a tensor changed during the copy and
        abandons the step.
        """
        capturing = world.shards[rank].capture(Step(step))
        if (
            world.processes[rank].is_connected
            and self._is_its_slot(world, rank, step, slot)
            and capturing != world.shards[rank]
        ):
            yield ("capturing", rank, step), self._apply(world, rank, capturing)
        if world.faults < self.shape.faults:
            spoilt = world.processes[rank]._replace(copying=None, outcome=Outcome(step, NONE, False, False))
            yield ("spoilt", rank, step), self._process(world._replace(faults=world.faults + 1), rank, spoilt)

    def _is_its_slot(self, world: World, rank: int, step: int, slot: int) -> bool:
        """Return whether the agent accepts its rank's message about this slot, as `RankConnections` does."""
        is_granted = (step, slot) == (world.shards[rank].proposed, world.granted[rank])
        return is_granted or slot == slots.being_written(world.slots[rank][0], self.content(world, step))

    def _is_followed(self, world: World, rank: int, step: int) -> bool:
        """Return whether an owner's agent still expects the report of a capture that its rank has begun."""
        process = world.processes[rank]
        is_written = any(
            view.state is SlotState.WRITING and view.content == self.content(world, step)
            for view in world.slots[rank][0]
        )
        is_coming = (
            process.outcome is not None
            and process.outcome.step == step
            and process.outcome.slot != NONE
            and not process.outcome.is_heard
        )
        return is_written and (is_coming or (process.copying is not None and process.copying[0] == step))

    def _boundary(self, world: World, rank: int, obstacle: str) -> World:
        """Return the state after a rank has finished its next step.

        A rank that is connected to its agent also reads its page and acts.
        """
        process = world.processes[rank]
        process = process._replace(boundary=process.boundary + 1)
        return (
            self._look(world, rank, process, obstacle) if process.is_connected else self._process(world, rank, process)
        )

    def _look(self, world: World, rank: int, process: Process, obstacle: str) -> World:
        """Return the state after a rank has read its page, and captures or abandons the proposed step."""
        view = step_rules.RankView(process.boundary, world.base, process.settled, has_slots=True, obstacle=obstacle)
        decision = step_rules.decide(view, self.half(world, rank))
        if decision.capture_slot is not None:
            return self._process(world, rank, process._replace(copying=(process.boundary, decision.capture_slot)))
        if decision.abandon is not None:
            step, cause, _ = decision.abandon
            outcome = Outcome(step, NONE, cause is UnkeptCause.LATE, False)
            abandoned = self._process(world, rank, process._replace(outcome=outcome))
            return abandoned if self.is_fine else self._heard(abandoned, rank)
        return self._process(world, rank, process)

    def _heard(self, world: World, rank: int) -> World:
        """Return the state after the agent has received its rank's report.

        The agent seals the captured slot, or records that the rank abandoned the step.

        `RankConnections.message` is the code that this models.
        """
        process = world.processes[rank]
        outcome = process.outcome
        if outcome is None or not process.is_connected:
            return world
        world = self._process(world, rank, process._replace(outcome=outcome._replace(is_heard=True)))
        shard = world.shards[rank]
        if outcome.slot == NONE:
            return self._apply(
                self._settled(world, rank), rank, shard.abandon(Step(outcome.step), "", late=outcome.is_late)
            )
        content = self.content(world, outcome.step)
        if not self._is_its_slot(world, rank, outcome.step, outcome.slot):
            return self._settled(world, rank)
        return self._apply(
            self._slot(world, rank, 0, outcome.slot, SlotView(SlotState.SEALED, content)),
            rank,
            shard.seal(Step(outcome.step)),
        )

    def _settled(self, world: World, rank: int) -> World:
        pair = tuple(EMPTY if view.is_busy else view for view in world.slots[rank][0])
        return world._replace(slots=put(world.slots, rank, put(world.slots[rank], 0, pair)))

    def _hello(self, world: World, rank: int) -> World:
        """Return the state after a rank has reconnected to its restarted agent.

        `RankConnections.hello` and the rank's own code are modelled here.
        """
        process = world.processes[rank]._replace(is_connected=True)
        world = self._process(world, rank, process)
        shard = world.shards[rank]
        if process.copying is None:
            world = self._settled(world, rank)
            if shard.proposed != NONE and process.boundary >= shard.proposed:
                world = self._apply(
                    world, rank, shard.abandon(shard.proposed, "the agent was away when it was captured")
                )
        half, outcome = self.half(world, rank), process.outcome
        if outcome is not None and half.proposed == outcome.step != half.vote_step:
            world = self._process(world, rank, process._replace(outcome=outcome._replace(is_heard=False)))
            return world if self.is_fine else self._heard(world, rank)
        return world

    # -- events: streams of replicas from owners to holders

    def _stream_moves(self, world: World, rank: int, holder: int) -> Iterator[tuple[Event, World]]:
        stream, seat = world.streams[rank][holder], self.holders[rank][holder]
        owner_acts, holder_acts = self.acts(world, self.seat_of(rank)), self.acts(world, seat)
        match stream.phase:
            case Phase.OFF if owner_acts and holder_acts and not self._lacks_base(world, rank):
                yield ("connect", rank, seat), self._connected(world, rank, holder)
            case Phase.IDLE if owner_acts and holder_acts:
                step = world.shards[rank].wanted(NodeId(f"{seat}"))
                is_sealed = self.has(world, rank, 0, self.content(world, step))
                if step != NONE and (is_sealed or self._is_followed(world, rank, step)):
                    begun = self._stream(
                        world,
                        rank,
                        holder,
                        Stream(Phase.BEGUN, step, world.shards[rank].committed if self.rules.tells_committed else NONE),
                    )
                    if self.is_fine:
                        yield ("begin", rank, seat, step), begun
                    elif (taken := self._taken(begun, rank, holder)) is not begun:
                        yield ("send", rank, seat, step), self._sent(taken, rank, holder) if is_sealed else taken
            case Phase.BEGUN if holder_acts:
                taken = self._taken(world, rank, holder)
                refused = self._stream(world, rank, holder, Stream(Phase.IDLE))
                yield ("take", rank, seat, stream.step), refused if taken is world else taken
            case Phase.TAKEN if owner_acts and holder_acts and not self._is_waiting(world, rank, stream.step):
                yield ("sent", rank, seat, stream.step), self._sent(world, rank, holder)
            case Phase.SENT if holder_acts:
                stored = self._stored(world, rank, holder)
                yield (
                    ("store", rank, seat, stream.step),
                    stored if self.is_fine or not owner_acts else self._acknowledged(stored, rank, holder),
                )
            case Phase.SEALED if owner_acts:
                yield ("acknowledge", rank, seat, stream.step), self._acknowledged(world, rank, holder)

    def _is_waiting(self, world: World, rank: int, step: int) -> bool:
        """Return whether a stream waits until its owner seals the captured step."""
        is_sealed = self.has(world, rank, 0, self.content(world, step))
        return self.rules.ends_sealed and not is_sealed and self._is_followed(world, rank, step)

    @staticmethod
    def _stream(world: World, rank: int, holder: int, stream: Stream) -> World:
        return world._replace(streams=put(world.streams, rank, put(world.streams[rank], holder, stream)))

    def _connected(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the holder has sent the list of its steps.

        The owner counts only steps that the owner also has (`OwnedShard.inventory`).
        """
        listed = {
            view.content
            for view in world.slots[rank][holder]
            if view.state is SlotState.SEALED and view.content is not None
        }
        steps = frozenset(
            each.step for each in listed if each == self.content(world, each.step) and self.has(world, rank, 0, each)
        )
        seat = self.holders[rank][holder]
        told = {each for each in world.spoiled if each[:2] == (rank, seat) and not self._is_voted(world, rank, each[2])}
        world = self._stream(world, rank, holder, Stream(Phase.IDLE))._replace(spoiled=world.spoiled - told)
        peer = NodeId(f"{seat}")
        return self._apply(world, rank, world.shards[rank].answer(peer).inventory(peer, steps))

    def _taken(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the holder has granted a slot. Without a free slot, the state is unchanged."""
        stream, seat = world.streams[rank][holder], self.holders[rank][holder]
        index = self.rules.writable(world.slots[rank][holder], self.keeps(world, rank, seat, stream.told))
        if index is None:
            return world
        lost = world.slots[rank][holder][index]
        if lost.state is SlotState.SEALED and lost.content and (rank, seat, lost.content.step) in world.helping:
            raise Violation(f"step {stream.step} overwrites step {lost.content.step}, which {seat} sends to S3")
        world = self._slot(world, rank, holder, index, SlotView(SlotState.WRITING, self.content(world, stream.step)))
        return self._stream(world, rank, holder, stream._replace(phase=Phase.TAKEN, slot=index))

    def _sent(self, world: World, rank: int, holder: int) -> World:
        """Return the state after the owner has sent the whole shard.

        The transfer is cancelled if the owner's slot was granted again or its capture was abandoned meanwhile.
        """
        stream = world.streams[rank][holder]
        is_whole = self.has(world, rank, 0, self.content(world, stream.step))
        if is_whole or (not self.rules.ends_sealed and self._is_followed(world, rank, stream.step)):
            return self._stream(world, rank, holder, stream._replace(phase=Phase.SENT, is_whole=is_whole))
        return self._stream(self._slot(world, rank, holder, stream.slot, EMPTY), rank, holder, Stream(Phase.IDLE))

    def _stored(self, world: World, rank: int, holder: int) -> World:
        stream = world.streams[rank][holder]
        content = self.content(world, stream.step)
        view = world.slots[rank][holder][stream.slot]
        if view.state is not SlotState.WRITING or view.content != content:
            raise Violation(f"a stream of {content} to {self.holders[rank][holder]} ends in a slot that is {view}")
        if not stream.is_whole:
            raise Violation(
                f"{self.holders[rank][holder]} seals {content} of rank {rank}, of which its owner has only a part"
            )
        sealed = self._slot(world, rank, holder, stream.slot, SlotView(SlotState.SEALED, content))
        return self._stream(sealed, rank, holder, stream._replace(phase=Phase.SEALED))

    def _acknowledged(self, world: World, rank: int, holder: int) -> World:
        stream, seat = world.streams[rank][holder], self.holders[rank][holder]
        world = self._stream(world, rank, holder, Stream(Phase.IDLE))
        return self._apply(world, rank, world.shards[rank].acknowledge(NodeId(f"{seat}"), Step(stream.step)))

    def _cut(self, world: World, rank: int, holder: int, *, is_drained: bool) -> World:
        """Return the state after the connection between an owner and a holder has broken.

        Incomplete transfers are discarded. The holder may still seal a shard that is already in its socket.
        """
        stream = world.streams[rank][holder]
        if is_drained and stream.phase is Phase.SENT:
            return world
        if stream.phase in (Phase.TAKEN, Phase.SENT):
            world = self._slot(world, rank, holder, stream.slot, EMPTY)
        return self._stream(world, rank, holder, NO_STREAM)

    # -- events: losses of nodes, crashes, memory faults and restarts of agents

    def _failures(self, world: World) -> Iterator[tuple[Event, World]]:
        if world.faults >= self.shape.faults:
            return
        faulty = world._replace(faults=world.faults + 1)
        for rank in self.ranks:
            for holder, seat in enumerate(self.holders[rank][1:], 1):
                shard = world.shards[rank]
                if NodeId(f"{seat}") in shard.awaited and shard.wanted(NodeId(f"{seat}")) != NONE:
                    yield ("drop", rank, seat), self._apply(faulty, rank, shard.drop(NodeId(f"{seat}")))
                if self.is_fine and world.streams[rank][holder].phase is not Phase.OFF:
                    yield ("break", rank, seat), self._cut(faulty, rank, holder, is_drained=False)
        for seat in self.seats:
            yield ("restart", seat), self._restarted(faulty, seat)
            if self.is_fine:
                yield from self._spoiled(faulty, seat)
        yield from self._losses(faulty, "lose")

    def _losses(self, world: World, name: str) -> Iterator[tuple[Event, World]]:
        """Yield the loss of every set of nodes after which each shard's newest commit still exists on a live node.

        The empty set means that only ranks crashed.
        """
        for size in range(self.shape.nodes):
            for lost in combinations(self.seats, size):
                if all(world.owed[rank] - set(lost) for rank in self.ranks):
                    yield (name, *lost), self._lost(world, frozenset(lost))
                    if self.is_fine and size:
                        yield ("part", *lost), self._lost(world, frozenset(lost), is_unreachable=True)

    def _spoiled(self, world: World, seat: int) -> Iterator[tuple[Event, World]]:
        """Yield the faults in which a restarted agent finds a slot with an invalid header and treats it as empty.

        The model includes only faults after which another node still has the committed step of the shard.
        """
        for rank, row in enumerate(self.holders):
            if seat in row and world.owed[rank] - {seat}:
                holder = row.index(seat)
                for index, view in enumerate(world.slots[rank][holder]):
                    if view.state is not SlotState.SEALED or view.content is None:
                        continue
                    is_voted = self._is_voted(world, rank, view.content)
                    if is_voted and world.stood[rank] - self._spoilt_at(world, rank, view.content.step) == {seat}:
                        # The owner voted, and this node alone counted as a holder. A fault of its slot would lose the
                        # last copy, which the model excludes.
                        continue
                    spoiled = self._slot(world, rank, holder, index, EMPTY)
                    if holder or is_voted:
                        spoiled = spoiled._replace(spoiled=world.spoiled | {(rank, seat, view.content)})
                    if view.content.step == world.best:
                        spoiled = spoiled._replace(owed=put(world.owed, rank, world.owed[rank] - {seat}))
                    yield ("spoil", rank, seat, index), self._restarted(spoiled, seat)

    def _is_voted(self, world: World, rank: int, content: Content) -> bool:
        """Return whether a shard's owner has already voted for this generation and step. A vote cannot be withdrawn."""
        shard = world.shards[rank]
        return shard.vote is Vote.ACKED and content == self.content(world, shard.proposed)

    def _restarted(self, world: World, seat: int) -> World:
        """Restart the agent of a node.

        The new agent finds the node's page and slots. All connections are closed, and the coordinator asks every agent
        again.
        """
        for rank in self.ranks:
            owner = self.seat_of(rank)
            for holder, at in enumerate(self.holders[rank]):
                if holder and seat in (owner, at):
                    world = (
                        self._cut(world, rank, holder, is_drained=False)
                        if seat != at
                        else self._stream(world, rank, holder, NO_STREAM)
                    )
                if seat == at:
                    pair = tuple(
                        replace(view, is_busy=view.state is SlotState.WRITING and not holder)
                        for view in world.slots[rank][holder]
                    )
                    world = world._replace(slots=put(world.slots, rank, put(world.slots[rank], holder, pair)))
                    world = self._unhelped(world, rank, holder)
        if self.shape.every_steps:
            world = world._replace(marked=put(world.marked, seat, NONE))
        for rank in self.ranks_of(seat):
            shard = world.shards[rank]
            sealed = frozenset(
                view.content.step
                for view in world.slots[rank][0]
                if view.state is SlotState.SEALED
                and view.content is not None
                and view.content == self.content(world, view.content.step)
            )
            adopted = self.rules.shard.adopt(
                Step(world.base),
                self._peers(rank),
                committed=shard.committed,
                proposed=shard.proposed,
                vote=shard.vote,
                sealed=sealed,
            )
            process = world.processes[rank]._replace(is_connected=False)
            world = world._replace(
                shards=put(world.shards, rank, adopted), processes=put(world.processes, rank, process)
            )
            if self.shape.every_steps:
                world = world._replace(begun=put(world.begun, rank, NONE))
        if seat == 0:
            coordinator = self.rules.coordinator(
                world_size=self.shape.world_size,
                base=Step(world.base),
                every_steps=self.shape.every_steps,
                slot_count=self.shape.slot_count,
                max_uploads=self.shape.max_uploads,
            ).recover()
            world = world._replace(coordinator=coordinator)
        return world

    def _lost(self, world: World, lost: frozenset[int], *, is_unreachable: bool = False) -> World:
        """Return the state after nodes are lost, or become unreachable and keep their slots.

        The control plane asks every other node for a promise.
        """
        for rank in self.ranks:
            for holder, seat in enumerate(self.holders[rank]):
                if holder and {self.seat_of(rank), seat} & lost:
                    world = self._cut(world, rank, holder, is_drained=seat not in lost)
        limbo, limbo_commits = list(world.limbo), list(world.limbo_commits)
        for seat in lost if is_unreachable else ():
            limbo_commits[seat] = self._page_commit(world, seat)
            held = [(rank, world.slots[rank][row.index(seat)]) for rank, row in enumerate(self.holders) if seat in row]
            limbo[seat] = tuple((rank, _promised(pair)) for rank, pair in held)
        pairs = tuple(
            tuple(
                empty_pair(self.shape.slot_count) if seat in lost else world.slots[rank][holder]
                for holder, seat in enumerate(row)
            )
            for rank, row in enumerate(self.holders)
        )
        before = world.restore
        dead, quiet = lost, frozenset[int]()
        if before is not None:
            dead |= before.dead
            quiet = frozenset(self.seats) if before.plan is not None else before.quiet
        return world._replace(
            slots=pairs,
            limbo=tuple(limbo),
            limbo_commits=tuple(limbo_commits),
            owed=tuple(owed - lost for owed in world.owed),
            helping=frozenset(each for each in world.helping if each[1] not in lost),
            uploads=frozenset(each for each in world.uploads if self.seat_of(each[0]) not in lost),
            issued=world.issued + 1,
            restore=Restore(dead, (None,) * self.shape.nodes, quiet),
        )

    # -- events: promises, the plan and the loads of a new generation

    def _restore_moves(self, world: World, restore: Restore) -> Iterator[tuple[Event, World]]:
        live = [seat for seat in self.seats if seat not in restore.dead]
        missing = [seat for seat in live if restore.inventories[seat] is None]
        for seat in missing:
            yield ("promise", seat), self._promised(world, restore, seat)
        if restore.plan is not None:
            for seat in self.seats:
                if not restore.loaded[seat]:
                    yield ("load", seat), self._loaded(world, restore, restore.plan, seat)
            if all(restore.loaded):
                yield ("start",), self._started(world, restore.plan, world.issued)
        elif not missing:
            # The committed step in the control plane's record may be any number of commits old.
            for step in range(max(world.recorded, 0) + 1, world.best + 1):
                yield ("record", step), world._replace(recorded=step)
            for seats in _subsets([seat for seat in restore.dead if world.limbo[seat] is not None]):
                yield ("plan", *seats), self._planned(world, restore, seats)
        if world.faults < self.shape.faults:
            faulty = world._replace(faults=world.faults + 1)
            yield from self._losses(faulty, "lose again")
            if restore.plan is not None and restore.plan.base and self.is_fine:
                for seat in self.seats:
                    if not restore.loaded[seat]:
                        yield ("mismatch", seat), self._mismatched(faulty, restore, restore.plan, seat)

    def _promised(self, world: World, restore: Restore, seat: int) -> World:
        """Return the state after a node has promised to stop its old work.

        The node ends its ranks, closes its streams, and then lists its sealed slots.
        """
        if self.rules.has_promises:
            for rank in self.ranks:
                for holder, at in enumerate(self.holders[rank]):
                    if holder and seat in (self.seat_of(rank), at):
                        world = self._cut(world, rank, holder, is_drained=seat != at)
                    if seat == at:
                        pair = _promised(world.slots[rank][holder]) if holder == 0 else world.slots[rank][holder]
                        world = world._replace(slots=put(world.slots, rank, put(world.slots[rank], holder, pair)))
                        world = self._unhelped(world, rank, holder)
        inventory = tuple(
            (rank, view.content)
            for rank, row in enumerate(self.holders)
            if seat in row
            for view in world.slots[rank][row.index(seat)]
            if view.state is SlotState.SEALED and view.content is not None
        )
        return world._replace(
            restore=restore._replace(
                inventories=put(restore.inventories, seat, inventory), quiet=restore.quiet | {seat}
            )
        )

    def _planned(self, world: World, restore: Restore, returning: tuple[int, ...]) -> World:
        """Return the state after the control plane has chosen the step from which the new generation starts.

        Each lost node is replaced by a new node in the same position of the plan. An unreachable node may return to its
        position.
        """
        inventories = {
            f"{seat}": inventory for seat, inventory in enumerate(restore.inventories) if inventory is not None
        }
        reported = [self._page_commit(world, seat) for seat in self.seats if seat not in restore.dead]
        for seat in returning:
            held = world.limbo[seat] or ()
            reported.append(world.limbo_commits[seat])
            inventories[f"{seat}"] = tuple(
                (rank, view.content) for rank, pair in held for view in pair if view.content is not None
            )
            for rank, pair in held:
                row = world.slots[rank]
                world = world._replace(slots=put(world.slots, rank, put(row, self.holders[rank].index(seat), pair)))
            world = world._replace(limbo=put(world.limbo, seat, None))
        committed = self.rules.committed(
            self.path(world), Step(world.recorded), [(Generation(g), Step(step)) for g, step in reported]
        )
        survey = recovery.Survey(
            owners=[NodeId(f"{self.seat_of(rank)}") for rank in self.ranks],
            inventories={
                NodeId(node): tuple(_record(rank, content) for rank, content in listed)
                for node, listed in inventories.items()
            },
            path=self.path(world),
            worlds={Generation(generation): self.shape.world_size for generation, _, _ in world.lineage},
            refused=[
                RefusedSource(rank=Rank(r), origin_generation=Generation(o), step=Step(s)) for r, o, s in world.refused
            ],
            committed=committed,
        )
        chosen = self.rules.choose(survey)
        if chosen.base_step < world.best:
            raise Violation(
                f"the base is {chosen.base_step} although {world.best} was committed and every shard kept a "
                "node that counted"
            )
        origin = self._origin(world, chosen)
        keep = tuple(
            tuple(
                frozenset(
                    Content(each.origin_generation, each.step)
                    for each in chosen.keep.get(NodeId(f"{seat}"), ())
                    if each.owner_rank == rank
                )
                for rank in self.ranks
            )
            for seat in self.seats
        )
        plan = Plan(chosen.base_step, origin, keep)
        return world._replace(
            restore=restore._replace(dead=frozenset(), plan=plan, loaded=(False,) * self.shape.nodes),
            recorded=min(committed, chosen.base_step),
            cleared=world.cleared | restore.dead,
        )

    def _page_commit(self, world: World, seat: int) -> tuple[int, int]:
        """Return the generation and the committed step C that a node reports from its ranks' shared-memory pages.

        C is -1 if a load has cleared the pages or a new node has created them.
        """
        committed = max(world.shards[rank].committed for rank in self.ranks_of(seat))
        return world.generation, NONE if seat in world.cleared else committed

    def _origin(self, world: World, chosen: recovery.Restore) -> int:
        """Return the generation whose ranks captured the chosen start step.

        All ranks have the same origin, which is on the path of the newest started generation.
        """
        origins = {source.origin_generation for sources in chosen.sources for source in sources}
        if (
            any(not on_path(self.path(world), Content(origin, chosen.base_step)) for origin in origins)
            or len(origins) > 1
        ):
            raise Violation(f"base {chosen.base_step} as captured by generations {sorted(origins)}")
        return max(origins, default=0)

    def _loaded(self, world: World, restore: Restore, plan: Plan, seat: int) -> World:
        """Return the state after a node has loaded the plan.

        The node empties the slots that the plan does not keep, and fetches its missing shards of the start step.
        """
        base = Content(Generation(plan.origin), Step(plan.base)) if plan.base else None
        for rank, row in enumerate(self.holders):
            if seat in row:
                holder = row.index(seat)
                keep = self.rules.kept(None, plan.keep[seat][rank], base)
                pair = tuple(
                    EMPTY if view.content not in keep or view.state is not SlotState.SEALED else view
                    for view in world.slots[rank][holder]
                )
                world = world._replace(slots=put(world.slots, rank, put(world.slots[rank], holder, pair)))
        for rank in self.ranks_of(seat):
            if base is None or self.has(world, rank, 0, base):
                continue
            if not any(self.has(world, rank, holder, base) for holder in range(1, len(self.holders[rank]))):
                raise Violation(f"step {plan.base} of rank {rank} is planned and nobody has it any more")
            index = self.rules.writable(
                world.slots[rank][0], self.rules.kept(None, plan.keep[seat][rank], base) - {base}
            )
            if index is None:
                raise Violation(f"no slot of node {seat} can take the base {plan.base} of rank {rank}")
            world = self._slot(world, rank, 0, index, SlotView(SlotState.SEALED, base))
        return world._replace(
            restore=restore._replace(loaded=put(restore.loaded, seat, True)), cleared=world.cleared | {seat}
        )

    def _mismatched(self, world: World, restore: Restore, plan: Plan, seat: int) -> World:
        """Return the state after a source in the plan has failed verification because its memory failed.

        No commit is guaranteed after such a fault. A new generation starts from an older step.
        """
        refused = world.refused | {(self.ranks_of(seat)[0], plan.origin, plan.base)}
        owed = tuple(frozenset(row) for row in self.holders)
        return self._lost(world._replace(refused=refused, best=0, owed=owed, restore=restore), frozenset())

    # -- invariants of every state

    def check(self, world: World) -> None:
        """Check that no allowed loss of nodes destroys the newest commit.

        A loss is allowed if each shard keeps a node that must have the commit (`World.owed`). The remaining nodes must
        then hold a common step that is at least as new.

        Raises:
            Violation: the remaining nodes hold no such step.
        """
        if not world.best:
            return
        path = self.path(world)
        sealed = [
            [
                {
                    view.content.step
                    for view in pair
                    if view.state is SlotState.SEALED and view.content and on_path(path, view.content)
                }
                for pair in row
            ]
            for row in world.slots
        ]
        already = self._dead(world)
        for more in self._all_losses:
            dead = already.union(more)
            if any(owed <= dead for owed in world.owed):
                continue
            left = [
                set().union(*(sealed[rank][h] for h, seat in enumerate(row) if seat not in dead))
                for rank, row in enumerate(self.holders)
            ]
            newest = max(set.intersection(*left), default=NONE)
            if newest < world.best:
                raise Violation(
                    f"without {sorted(dead)} the newest common step is {newest}; {world.best} was committed"
                )

    @cached_property
    def _all_losses(self) -> list[tuple[int, ...]]:
        return [lost for size in range(self.shape.nodes) for lost in combinations(self.seats, size)]

    def is_done(self, world: World) -> bool:
        """Return whether every rank is at the last step. With uploads, the final round must also be over."""
        if self.shape.every_steps and not (
            world.coordinator.is_finished and all(process.is_closing for process in world.processes)
        ):
            return False
        return world.restore is None and all(process.boundary == self.shape.steps for process in world.processes)


def _as(kind: type[T], value: T) -> T:
    """Return the value as an object of the class `kind`, whose rules apply from then on."""
    return kind(**{each.name: getattr(value, each.name) for each in fields(value)})  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _path(lineage: tuple[tuple[int, int, int], ...], generation: int) -> recovery.Path:
    records = [
        GenerationRecord(
            generation=Generation(g), parent=Generation(p), base_step=Step(b), world_size=1, was_started=True
        )
        for g, p, b in lineage
    ]
    return recovery.path_of(records, Generation(generation))


def _record(rank: int, content: Content) -> SlotRecord:
    digest = bytes([content.origin, content.step])
    return SlotRecord(
        owner_rank=Rank(rank),
        origin_generation=content.origin,
        step=content.step,
        payload_bytes=1,
        digest=digest,
        layout_hash=b"",
    )


def _promised(pair: Pair) -> Pair:
    """Return a shard's slots after its rank has ended: slots that were being written are free."""
    return tuple(view if view.state is SlotState.SEALED else EMPTY for view in _unpinned(pair))


def _unpinned(pair: Pair, step: int = NONE) -> Pair:
    """Return a shard's slots after the slot of `step` is unpinned. If `step` is NONE, all slots are unpinned."""
    return tuple(
        replace(view, is_pinned=False)
        if view.is_pinned and (step == NONE or (view.content is not None and view.content.step == step))
        else view
        for view in pair
    )


def _subsets(seats: list[int]) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(seats) + 1) for chosen in combinations(seats, size)]


def steady(nodes: int, copies: int, *, committed: int = 2, seed: int = 1, ranks_per_node: int = 1) -> World:
    """Return a state in the middle of training, with a commit that every agent has received."""
    model = Model(Shape(nodes, copies, 99, 0, ranks_per_node))
    driver = Driver(model, seed=seed, weights=SLOWLY)
    driver.until(lambda world: world.best >= committed and all(shard.committed == world.best for shard in world.shards))
    return driver.world


def main(arguments: Sequence[str]) -> int:
    """Explore with the options of the command line and print the counts, or the events of a violation."""
    from tests.model.planted import BUGS

    parser = argparse.ArgumentParser(prog="python -m tests.model.step_protocol")
    for name in ("nodes", "copies", "steps", "faults"):
        parser.add_argument(name, type=int)
    parser.add_argument("--bug", choices=sorted(BUGS))
    parser.add_argument("--walks", type=int, default=0, help="random walks instead of every interleaving")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--steady", action="store_true", help="from the middle of a training; STEPS counts from there")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="steps between uploads; 0: nothing is uploaded")
    parser.add_argument("--uploads", type=int, default=1, help="uploads of a shard at the same time")
    chosen = parser.parse_args(arguments)
    start = steady(chosen.nodes, chosen.copies, ranks_per_node=chosen.ranks_per_node) if chosen.steady else None
    steps = chosen.steps + (max(process.boundary for process in start.processes) if start is not None else 0)
    shape = Shape(
        chosen.nodes,
        chosen.copies,
        steps,
        chosen.faults,
        chosen.ranks_per_node,
        chosen.every,
        max_uploads=chosen.uploads,
    )
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
