"""A shard that this node owns: the pure `Shard`, the slots that hold it, and the rank's page, kept in step with each other.

Invariant: the page says (C, w, vote) before anybody else is told; whoever waits on `changed` sees the state that woke
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import FINISHED, Arriving, RankHalf, StopState, Vote
from everstep.protocol.rounds import RankRound
from everstep.protocol.slot import SlotHeader
from worker.core.rounds import NONE, Shard, echo_of
from worker.core.slots import Content
from worker.shm.rank_page import RankPage
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore
from worker.tasks import Signal

TROUBLE_COUNT = 3
"""Steps given up in a row before protection is called degraded: layouts change now and then, audits find something once."""


class OwnedShard:
    """One rank's shard on its owner's node. One owner: the node's `Member`."""

    def __init__(
        self,
        *,
        rank: Rank,
        generation: Generation,
        core: Shard,
        base: Content | None,
        store: SlotStore,
        page: RankPage,
        now: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """Take the shard over as `core` knows it.

        Args:
            rank: whose shard it is.
            generation: the running one.
            core: the shard in the rounds.
            base: what the generation began with, if anything.
            store: this node's slots.
            page: the rank's.
            now: Unix time, for what is shown to people.
            on_change: told after every change.
        """
        self.rank = rank
        self.generation = generation
        self.core = core
        self.base = base
        self.page = page
        self.changed = Signal()
        self.pinned: Step = NONE
        """Being uploaded, or `NONE`."""
        self.uploaded: Step = NONE
        """The newest step whose upload was begun."""
        self.granted_slot = -1
        self.arriving: Arriving | None = None
        """The base that is being brought here, from the moment on that its index is there."""
        self.refusal = ""
        """Why no snapshot can be taken of this rank at the moment; empty when all is well."""
        self.reserved: tuple[int, bytes] | None = None
        """Capacity and layout of the slots that its rank has; None before it has asked."""
        self.unready: frozenset[NodeId] = frozenset()
        """Holders that have not made slots yet like those that were reserved."""
        self.holder_troubles: dict[NodeId, str] = {}
        """Why a holder has not sealed what it was sent, in its own words or the line's; gone when it seals again."""
        self.slow_holders: dict[NodeId, str] = {}
        """Holders that take what they are sent, but so slowly that steps wait for them, and how slowly."""
        self.broken_lines: dict[NodeId, str] = {}
        """Holders that answer, but whose lines break again and again before they have what they are sent, and how often they have."""
        self.verified: dict[NodeId | None, tuple[Step, float]] = {}
        """By holder, None for the own node: the newest step that it is known to hold verified, and since when."""
        self.acked: tuple[Step, float] = (NONE, 0.0)
        """The newest step that every holder in view has verified, and when, monotonic seconds."""
        self.passed: tuple[Step, float] = (NONE, 0.0)
        """The newest boundary that its rank has stamped, and when it passed it, Unix seconds."""
        self.first_passed_at = 0.0
        """When its rank made the first step beyond the base, Unix seconds, as `note_first` read it; 0: it has not."""
        self._now = now
        self._given_up: list[str] = []
        """Why this rank has given up steps since the last commit, lateness aside."""
        self._store = store
        self._on_change = on_change
        self._note(None, core.sealed)

    @property
    def trouble(self) -> str:
        """Why this rank has given up several steps in a row; empty when it keeps what it is asked for.

        A single one is everyday life.
        """
        return self._given_up[-1] if len(self._given_up) >= TROUBLE_COUNT else ""

    @property
    def _base_step(self) -> Step:
        return FIRST_STEP if self.base is None else self.base.step

    def content(self, step: Step) -> Content:
        """Name the state of `step` in this generation: the base keeps the generation that captured it."""
        return self.base if self.base is not None and step == self.base.step else Content(self.generation, step)

    def slot(self, step: Step) -> Slot | None:
        """Return the own slot that holds `step` sealed, or None."""
        return self._store.sealed(self.rank, self.content(step))

    def source(self, step: Step) -> Slot | None:
        """Return the own slot that `step` can be sent from: it holds it sealed, or its rank captures into it and the agent follows; or None."""
        content = self.content(step)
        slots = self._store.shards.get(self.rank, [])
        return self.slot(step) or next(
            (slot for slot in slots if slot.digests is not None and slot.is_written_with(content)), None
        )

    def apply(self, core: Shard) -> None:
        """Take the core's new state: page first, then whoever waits, then the node's report."""
        if core == self.core:
            return
        if core.proposed != self.core.proposed:
            self.granted_slot = -1
        if core.committed != self.core.committed:
            self._given_up = []
        elif core.vote is Vote.ABANDON and self.core.vote is Vote.NONE and not core.is_late:
            self._given_up = [*self._given_up, core.reason][-TROUBLE_COUNT:]
        if core.vote is Vote.ACKED is not self.core.vote:
            self.acked = core.proposed, monotonic()
        if core.sealed != self.core.sealed:
            self._note(None, core.sealed)
        self.core = core
        self.publish()
        self.changed.notify()
        self._on_change()

    def publish(
        self, *, finished: bool | None = None, stop: Step | None = None, stop_state: StopState | None = None
    ) -> bool:
        """Write the agent's half of the page; what is not given stays. Returns whether it changed."""
        half = self.page.agent
        is_finished = half.proposed == FINISHED if finished is None else finished
        return self.page.write(
            replace(
                half,
                committed=self.core.committed,
                proposed=FINISHED if is_finished else self.core.proposed,
                slot=self.granted_slot,
                vote_step=NONE if self.core.vote is Vote.NONE else self.core.proposed,
                vote=self.core.vote,
                stop=half.stop if stop is None else stop,
                stop_state=half.stop_state if stop_state is None else stop_state,
            )
        )

    def begin_load(self) -> None:
        """The base is about to be brought, or brought anew: what a rank has copied of it so far is void from here on, before anything is written."""
        self.arriving = None
        self.page.write(replace(self.page.agent, load=self.page.agent.load + 1, verified=0))

    def arrive(self, file: SlotFile, header: SlotHeader, verified_bytes: int) -> None:
        """The base's index is there, and so many of its first bytes.

        Args:
            file: where.
            header: the slot's, as it will be sealed, or is.
            verified_bytes: of the payload; they were seen to be what the plan names.
        """
        self.page.write(replace(self.page.agent, verified=verified_bytes))
        self.arriving = self.arriving or Arriving(
            generation=self.generation,
            word_path=str(self.page.path),
            base_step=header.step,
            base_slot_path=str(file.path),
            load=self.page.agent.load,
            index_offset=header.index_offset,
            index_bytes=header.index_bytes,
        )

    def reserve(self, capacity_bytes: int, layout_hash: bytes) -> None:
        """The rank's slots are made: its holders are to make theirs, if they are not asked for the same already."""
        if self.reserved == (capacity_bytes, layout_hash):
            return
        self.reserved = (capacity_bytes, layout_hash)
        self.unready = frozenset(self.core.peers)
        self.changed.notify()

    def ready(self, peer: NodeId, capacity_bytes: int, layout_hash: bytes) -> None:
        """`peer` has made its slots."""
        if self.reserved == (capacity_bytes, layout_hash):
            self.unready -= {peer}
            self.changed.notify()

    async def holders_ready(self) -> bool:
        """Return whether all holders in view have made their slots, as soon as they have; False: others were reserved meanwhile."""
        reserved = self.reserved
        while reserved is self.reserved and self.unready & self.core.view:
            await self.changed.wait(self.changed.version)
        return reserved is self.reserved

    def note_passed(self, boundary: Step, at_seconds: float) -> None:
        """The rank has passed a boundary, at `at_seconds` of the node's monotonic clock; the control plane counts in Unix time."""
        self.passed = boundary, self._unix(at_seconds)

    def note_first(self, half: RankHalf) -> None:
        """Take in when the rank made its first step.

        Called at each look; the moment is converted once, so that it does not move with the clock.

        Args:
            half: the rank's page: messages that would say so can be lost while the agent restarts.
        """
        if not self.first_passed_at and half.first_passed and half.boundary > self._base_step:
            self.first_passed_at = self._unix(min(half.first_passed / 1e6, monotonic()))

    def _unix(self, at_seconds: float) -> float:
        return self._now() - (monotonic() - at_seconds)

    def acknowledge(self, peer: NodeId, content: Content) -> None:
        """`peer` has sealed `content`."""
        self.holder_troubles.pop(peer, None)
        if content == self.content(content.step):
            self._note(peer, frozenset({content.step, self.verified.get(peer, (NONE, 0.0))[0]}))
            self.apply(self.core.acknowledge(peer, content.step))

    def _note(self, holder: NodeId | None, steps: frozenset[Step]) -> None:
        """Remember the newest step that a holder has now, and since when it has had it."""
        newest = max(steps, default=NONE)
        if newest != self.verified.get(holder, (NONE, 0.0))[0]:
            self.verified[holder] = newest, self._now()

    def told_slow(self, peer: NodeId, trouble: str) -> None:
        """`peer` takes what it is sent slowly, as `trouble` says; empty: it no longer does."""
        self._told(self.slow_holders, peer, trouble)

    def told_broken(self, peer: NodeId, trouble: str) -> None:
        """The line to `peer` breaks again and again, as `trouble` says; empty: it no longer does."""
        self._told(self.broken_lines, peer, trouble)

    def _told(self, troubles: dict[NodeId, str], peer: NodeId, trouble: str) -> None:
        was_troubled = troubles.pop(peer, "")
        if trouble:
            troubles[peer] = trouble
        if bool(was_troubled) != bool(trouble):
            self._on_change()

    def inventory(self, peer: NodeId, sealed: tuple[tuple[Generation, Step, bytes], ...]) -> None:
        """`peer` holds exactly these; only what equals our own content and digest counts."""
        steps = set()
        for origin, step, digest in sealed:
            slot = self._store.sealed(self.rank, Content(origin, step))
            if (
                self.content(step) == Content(origin, step)
                and slot is not None
                and slot.file.header.payload_digest == digest
            ):
                steps.add(step)
        self._note(peer, frozenset(steps))
        self.apply(self.core.inventory(peer, frozenset(steps)))

    def round(self) -> RankRound:
        """This rank's part of the node's report."""
        half = self.page.rank()
        stop, stop_state = Step(self.page.agent.stop), self.page.agent.stop_state
        echo_step, echo = echo_of(half, stop, stop_state)
        return RankRound(
            rank=self.rank,
            boundary=Step(half.boundary),
            committed=self.core.committed,
            proposed=self.core.proposed,
            vote=self.core.vote,
            standing=half.standing,
            echo_step=echo_step,
            echo=echo,
            confirmed_stop=stop if stop_state is StopState.CONFIRMED else NONE,
            heard_stop=stop,
            pinned_step=self.pinned,
            out_of_view=tuple(sorted(set(self.core.peers) - self.core.view)),
            is_late=self.core.is_late,
            reason=self.core.reason,
        )
