"""One shard of this node: keeps its state in the commit protocol, its slots, and its rank's page consistent.

    rank, holders, coordinator ──event──▶ OwnedShard ──▶ pure `Shard` ──▶ page ──▶ senders and the next report

Each method passes one event to the pure `Shard` (`worker.core.rounds`) and publishes the new state.

Invariant: the agent writes the committed step, the proposed step and the vote to the page before it sends them. A task
that waits on `changed` sees the state that woke the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from time import monotonic

from msgspec.structs import replace

from everstep.protocol.agent_messages import ShardProtection
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.rank_messages import (
    FINISHED,
    Arriving,
    RankHalf,
    RankStanding,
    StopState,
    UnkeptCause,
    Vote,
)
from everstep.protocol.rounds import Announcement, RankRound
from everstep.protocol.slot import SlotHeader
from worker.core.rounds import NONE, Shard, echo_of
from worker.core.slots import Content
from worker.shm.rank_page import RankPage
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore
from worker.tasks import Signal

# Single abandoned steps are normal, for example after a change of the layout of a rank's tensors.
TROUBLE_COUNT = 3
"""Abandoned steps in a row after which the agent reports the shard's protection as degraded."""


@dataclass(eq=False, repr=False, kw_only=True)
class OwnedShard:
    """Keeps the state, slots and shared page of one local rank's shard consistent. The `Member` object owns it.

    `base` is the content that the generation was restored from; None without a restore or after a relayout, and then
    `base_step` counts. `now` is Unix time. `on_change` is called after every change to report; `on_progress` when the
    rank finishes a step, which the agent reports only to the coordinator.
    """

    rank: Rank
    generation: Generation
    core: Shard
    """The shard's state in the commit protocol, which each event replaces."""
    base: Content | None
    base_step: InitVar[Step] = FIRST_STEP
    store: SlotStore
    page: RankPage
    now: Callable[[], float]
    on_change: Callable[[], None]
    on_progress: Callable[[], None] = lambda: None

    def __post_init__(self, base_step: Step) -> None:
        self.changed = Signal()
        self.pinned: frozenset[Step] = frozenset()
        """Steps that the agent is uploading to S3. Their slots must not be overwritten."""
        self.exported: Step = NONE
        """The step that an export reads from memory, or `NONE`. Its slot must not be overwritten."""
        self.uploaded: Step = NONE
        """The newest step whose upload to S3 was started, or `NONE`."""
        self.stored: Step = NONE
        """The newest step that is completely uploaded to S3, or `NONE`."""
        self.granted_slot = -1
        self.arriving: Arriving | None = None
        """Message with which the rank copies its state while it arrives; None until the list of tensors is here."""
        self.refusal = ""
        """Reason why this rank cannot capture a snapshot now; empty if it can."""
        self.refusal_cause = UnkeptCause.NO_SLOT
        """Valid only with a refusal."""
        self.reserved: tuple[int, bytes] | None = None
        """(capacity in bytes, layout hash) of the rank's current slots; None before the rank's first request."""
        self.unready: frozenset[NodeId] = frozenset()
        """Holders that have not yet created slots with the capacity and layout in `reserved`."""
        self.holder_troubles: dict[NodeId, str] = {}
        """By holder: why it has not sealed the step that this node sent. Removed when the holder seals a step."""
        self.slow_holders: dict[NodeId, str] = {}
        """By holder to which a step takes longer than the holder deadline: a text about the slow link."""
        self.broken_lines: dict[NodeId, str] = {}
        """By holder whose connection keeps breaking within a step: a text about the last broken transfer."""
        self.verified: dict[NodeId | None, tuple[Step, float]] = {}
        """By holder (None: this node): the newest step that it has verified, and the Unix time of the record."""
        self.acked: tuple[Step, float] = (NONE, 0.0)
        """The newest step on which this shard voted ACKED, and the monotonic time of that vote."""
        self.passed: tuple[Step, float] = (NONE, 0.0)
        """The last step that the rank finished, and the Unix time at which the rank began the next step."""
        self.first_passed_at = 0.0
        """Unix time at which the rank finished its first step of this generation; 0 until `note_first` sets it."""
        self._states: dict[Step, bytes] = {}
        """Digests of the newest sealed steps of this generation (`ShardProtection.states`)."""
        self._base_step = base_step if self.base is None else self.base.step
        self._given_up: list[str] = []
        """Reasons of the newest abandoned steps since the last commit, without proposals that came too late."""
        self._unkept: UnkeptCause | None = None
        """Cause of the newest abandoned step since the last commit, or None."""
        self._note(None, self.core.sealed)

    @property
    def trouble(self) -> str:
        """Reason of the last abandoned step, if at least `TROUBLE_COUNT` steps in a row were abandoned; else empty."""
        return self._given_up[-1] if len(self._given_up) >= TROUBLE_COUNT else ""

    @property
    def _lasting(self) -> UnkeptCause | None:
        """The cause that also prevents the next steps, or None. A failed capture counts if it fails repeatedly."""
        cause = self._unkept
        is_sure = cause is not UnkeptCause.CAPTURE or bool(self.trouble)
        return cause if cause is not None and cause.lasts and is_sure else None

    def holders_of(self, step: Step) -> tuple[NodeId, ...]:
        """Return the peers in view that hold a copy of `step`. Empty with parity, because peers then hold no copies."""
        if self.core.has_parity:
            return ()
        return tuple(peer for peer in self.core.peers if peer in self.core.view and (peer, step) in self.core.held)

    @property
    def lacks_base(self) -> bool:
        """True while this node has no copy of the base of its own shard, until the first commit."""
        base = self.core.base
        return bool(base) and self.core.committed == NONE and base not in self.core.sealed

    @property
    def committed_bytes(self) -> int:
        """Bytes of the committed state in this node's slot; 0 before the first commit."""
        slot = self.slot(self.core.committed) if self.core.committed != NONE else None
        return slot.file.header.payload_bytes if slot is not None else 0

    @property
    def late_holders(self) -> tuple[NodeId, ...]:
        """Holders in view that have not created their slots for this shard yet."""
        return tuple(sorted(self.unready & self.core.view))

    @property
    def reported(self) -> tuple[object, ...]:
        """The facts about this shard whose changes the agent reports to the control plane immediately."""
        return (
            self.core.view,
            tuple(self.slow_holders),
            tuple(self.broken_lines),
            self.core.committed == NONE,
            self.refusal,
            self.trouble,
            self._lasting,
        )

    def awaits(self, peer: NodeId) -> bool:
        """Return whether this shard's vote ACKED waits until the holder `peer` has acknowledged the step."""
        return peer in self.core.awaited

    def is_owed(self, peer: NodeId) -> bool:
        """Return whether the holder `peer` lacks a step that this node can send, or has not created its slots yet."""
        return self.core.wanted(peer) != NONE or peer in self.unready

    def needs_slot(self) -> bool:
        """Return whether the rank can still capture the proposed step and has no slot for it."""
        return self.granted_slot < 0 and self.core.is_capturable(self.page.rank())

    def may_wait(self) -> bool:
        """Return whether the rank may be waiting between two steps, for a stop, a rehearsal or the end of training.

        A waiting rank reads its shared-memory page only after the agent has sent it a message.
        """
        is_awaited = StopState.ANNOUNCED in (self.page.agent.stop_state, self.page.agent.rehearsal_state)
        return is_awaited or self.page.rank().standing is not RankStanding.MOVING

    def content(self, step: Step) -> Content:
        """Return the content of `step`. Only the base was captured in an earlier generation."""
        return self.base if self.base is not None and step == self.base.step else Content(self.generation, step)

    def slot(self, step: Step) -> Slot | None:
        """Return the slot of this node in which the shard's state at `step` is sealed, or None."""
        return self.store.sealed(self.rank, self.content(step))

    def source(self, step: Step) -> Slot | None:
        """Return the slot from which `step` can be sent: it is sealed, or being written and digested. Else None."""
        content = self.content(step)
        slots = self.store.shards.get(self.rank, [])
        return self.slot(step) or next(
            (slot for slot in slots if slot.digests is not None and slot.is_written_with(content)), None
        )

    def adopt(self) -> None:
        """Take over the state that an earlier agent process left in this node's slots and on the shared page."""
        half = self.page.agent
        sealed = frozenset(
            record.step
            for record in self.store.inventory()
            if record.owner_rank == self.rank
            and Content(record.origin_generation, record.step) == self.content(record.step)
        )
        self.core = Shard.adopt(
            self.core.base,
            self.core.peers,
            committed=Step(half.committed),
            proposed=Step(max(half.proposed, NONE)),
            vote=half.vote,
            sealed=sealed,
            has_parity=self.core.has_parity,
        )
        self.granted_slot = half.slot

    def begin_load(self) -> None:
        """Increase the number of loads on the shared page, before the agent writes any byte of the restored step."""
        # A rank that has copied parts of a failed load must copy them again when the number changes.
        self.arriving = None
        self.page.write(replace(self.page.agent, load=self.page.agent.load + 1, verified=0))

    def arrive(self, file: SlotFile, header: SlotHeader, verified_bytes: int) -> None:
        """Record on the shared page how much of the base has arrived, so that the rank can copy this part.

        `verified_bytes` is the length of the payload's prefix that was verified against the plan's digest.
        """
        self.page.write(replace(self.page.agent, verified=verified_bytes))
        self.arriving = self.arriving or Arriving(
            generation=self.generation,
            word_path=self.page.name,
            base_step=header.step,
            base_slot_path=file.name,
            load=self.page.agent.load,
            index_offset=header.index_offset,
            index_bytes=header.index_bytes,
        )

    def reserve(self, capacity_bytes: int, layout_hash: bytes) -> None:
        """Ask the holders to create slots with the size and layout of the rank's current slots. Idempotent."""
        if self.reserved == (capacity_bytes, layout_hash):
            return
        self.reserved = (capacity_bytes, layout_hash)
        self.unready = frozenset(self.core.peers)
        self.changed.notify()

    def ready(self, peer: NodeId, capacity_bytes: int, layout_hash: bytes) -> None:
        """Record that `peer` has created its slots, unless the rank has requested another size or layout since."""
        if self.reserved == (capacity_bytes, layout_hash):
            self.unready -= {peer}
            self.changed.notify()

    async def holders_ready(self) -> bool:
        """Wait until all holders in view have created their slots. False if the rank requests other slots meanwhile."""
        reserved = self.reserved
        while reserved is self.reserved and self.unready & self.core.view:
            await self.changed.wait(self.changed.version)
        return reserved is self.reserved

    def pass_boundary(self, boundary: Step, at_seconds: float) -> None:
        """Record that the rank has finished a step, or that another field of its page has changed.

        `at_seconds` is the monotonic time at which the rank began the next step; 0 if the rank changed another field.
        """
        if at_seconds:
            self.passed = boundary, self._unix(at_seconds)
        self.on_progress()

    def note_first(self, half: RankHalf) -> None:
        """Record when the rank finished its first step. Only the first call after that step sets the time."""
        # The wall clock may be adjusted before later calls.
        if not self.first_passed_at and half.first_passed and half.boundary > self._base_step:
            self.first_passed_at = self._unix(min(half.first_passed / 1e6, monotonic()))

    def _unix(self, at_seconds: float) -> float:
        return self.now() - (monotonic() - at_seconds)

    def capture(self, step: Step) -> None:
        """Record that the rank has begun to copy its state at `step` into the granted slot."""
        self._apply(self.core.capture(step))

    def seal(self, step: Step) -> None:
        """Record that the shard's state at `step` is sealed in a slot of this node."""
        self._apply(self.core.seal(step))

    def note_state(self, step: Step, digest: bytes, *, most: int) -> None:
        """Record the digest of the tensors of the sealed `step`, for the next reports. Keep the newest `most` steps."""
        states = {**self._states, step: digest}
        self._states = {each: states[each] for each in sorted(states)[-most:]}

    def refuse(self, cause: UnkeptCause, reason: str) -> None:
        """Record why this rank cannot capture a snapshot now."""
        self.refusal_cause, self.refusal = cause, reason

    def accept(self) -> None:
        """Record that this rank can capture snapshots."""
        self.refusal = ""

    def abandon(self, step: Step, cause: UnkeptCause, reason: str) -> None:
        """Record that the rank has abandoned the capture of `step`."""
        self._apply(self.core.abandon(step, reason, late=cause is UnkeptCause.LATE), unkept=cause)

    def forget(self, step: Step) -> None:
        """Record that no slot of this node contains `step` any more."""
        self._apply(self.core.forget(step))

    def forget_lost(self) -> None:
        """Forget each sealed step of the shard that no slot of this node contains any more."""
        for lost in [step for step in self.core.sealed if self.slot(step) is None]:
            self.forget(lost)

    def give_up_damaged(self, step: Step) -> None:
        """Forget a captured step whose bytes no longer match their digests, and vote ABANDON for it."""
        words = "the captured bytes no longer match their digests"
        self._apply(self.core.forget(step).abandon(step, words), unkept=UnkeptCause.CAPTURE)

    def grant(self, slot: int) -> None:
        """Grant the rank the slot with index `slot` for the proposed step, and write the grant to the shared page."""
        self.granted_slot = slot
        self._publish()

    def apply_announcement(self, announcement: Announcement) -> bool:
        """Apply the coordinator's announcement. Return whether the rank may be waiting and needs a message."""
        might_wait = self.may_wait()
        self._apply(self.core.apply_announcement(announcement.committed, announcement.proposed), announcement)
        return might_wait or self.may_wait()

    def answer(self, peer: NodeId) -> None:
        """Record that `peer`, which was dropped from the view, accepts data again."""
        self._apply(self.core.answer(peer))

    def drop(self, peer: NodeId) -> None:
        """Record that the holder `peer` was silent for too long (the holder deadline). Votes no longer wait for it."""
        self._apply(self.core.drop(peer))

    def acknowledge(self, peer: NodeId, content: Content) -> None:
        """Record that `peer` has acknowledged `content`: it has sealed a replica, or a share that contains it."""
        self.holder_troubles.pop(peer, None)
        if content == self.content(content.step):
            self._note(peer, frozenset({content.step, self.verified.get(peer, (NONE, 0.0))[0]}))
            self._apply(self.core.acknowledge(peer, content.step))

    def _note(self, holder: NodeId | None, steps: frozenset[Step]) -> None:
        """Record the newest of `steps` as the verified step of `holder` (None: this node)."""
        newest = max(steps, default=NONE)
        if newest != self.verified.get(holder, (NONE, 0.0))[0]:
            self.verified[holder] = newest, self.now()

    def record_slow_link(self, peer: NodeId, trouble: str) -> None:
        """Record a description of the slow link to `peer`. An empty description removes the record."""
        self._record_trouble(self.slow_holders, peer, trouble)

    def record_broken_connection(self, peer: NodeId, trouble: str) -> None:
        """Record that connections to `peer` keep breaking. An empty description removes the record."""
        self._record_trouble(self.broken_lines, peer, trouble)

    def _record_trouble(self, troubles: dict[NodeId, str], peer: NodeId, trouble: str) -> None:
        was_troubled = troubles.pop(peer, "")
        if trouble:
            troubles[peer] = trouble
        if bool(was_troubled) != bool(trouble):
            self.on_change()

    def inventory(self, peer: NodeId, sealed: tuple[tuple[Generation, Step, bytes], ...]) -> None:
        """Record the sealed slots that `peer` has reported when it connected.

        A slot counts as a copy only if a sealed slot of this node has the same content and digest.
        """
        steps = set()
        for origin, step, digest in sealed:
            slot = self.store.sealed(self.rank, Content(origin, step))
            if (
                self.content(step) == Content(origin, step)
                and slot is not None
                and slot.file.header.payload_digest == digest
            ):
                steps.add(step)
        self._note(peer, frozenset(steps))
        self._apply(self.core.inventory(peer, frozenset(steps)))

    def protection(self, holders: tuple[NodeId, ...]) -> ShardProtection:
        """Return the protection status of this shard. `holders` are the planned holders; the first is this node."""
        committed, view = self.core.committed, self.core.view
        troubles = [
            *(f"{peer} is out of view: {self._why_out(peer)}" for peer in self.core.peers if peer not in view),
            *(f"{peer} is slow: {trouble}" for peer, trouble in self.slow_holders.items() if peer in view),
            *(f"{peer} is hard to reach: {trouble}" for peer, trouble in self.broken_lines.items() if peer in view),
        ]
        is_short = self.refusal_cause is UnkeptCause.MEMORY
        reason = self.refusal if committed == NONE or (is_short and self.refusal) else self.trouble
        return ShardProtection(
            rank=self.rank,
            holders=holders,
            in_view=(holders[0], *(peer for peer in holders[1:] if peer in view)),
            committed=committed,
            payload_bytes=self.committed_bytes,
            reason=cut("; ".join(troubles) or reason),
            unkept=self._unkept,
            lasts=self._lasting is not None,
            verified=tuple(self.verified.get(peer, (NONE, 0.0)) for peer in (None, *holders[1:])),
            states=tuple(self._states.items()),
        )

    def _why_out(self, peer: NodeId) -> str:
        if peer in self.core.returning:
            return "it answers again and receives the steps that it lacks"
        return self.holder_troubles.get(peer, "it does not answer")

    def round(self) -> RankRound:
        """Return this rank's part of the node's report to the coordinator."""
        half = self.page.rank()
        agent = self.page.agent
        stop, stop_state = Step(agent.stop), agent.stop_state
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
            rehearsal_step=Step(half.rehearsal_step),
            rehearsal_echo=half.rehearsal_echo,
            confirmed_rehearsal=Step(agent.rehearsal) if agent.rehearsal_state is StopState.CONFIRMED else NONE,
            heard_rehearsal=Step(agent.rehearsal),
            pinned_steps=tuple(sorted(self.pinned)),
            held_step=self.exported,
            stored_step=self.stored,
            out_of_view=tuple(sorted(set(self.core.peers) - self.core.view)),
            is_late=self.core.is_late,
            reason=self.core.reason,
        )

    def _apply(
        self, core: Shard, announcement: Announcement | None = None, *, unkept: UnkeptCause | None = None
    ) -> None:
        """Replace the immutable `Shard`, write the rank's page, wake waiting tasks, and call `on_change`.

        If `core` votes ABANDON for the first time, `unkept` is the cause.
        """
        if core == self.core:
            if announcement is not None:
                self._publish(announcement)
            return
        if core.proposed != self.core.proposed:
            self.granted_slot = -1
        if core.committed != self.core.committed:
            self._given_up, self._unkept = [], None
        elif core.vote is Vote.ABANDON and self.core.vote is Vote.NONE:
            self._unkept = unkept
            if not core.is_late:
                self._given_up = [*self._given_up, core.reason][-TROUBLE_COUNT:]
        if core.vote is Vote.ACKED is not self.core.vote:
            self.acked = core.proposed, monotonic()
        if core.sealed != self.core.sealed:
            self._note(None, core.sealed)
        self.core = core
        self._publish(announcement)
        self.changed.notify()
        self.on_change()

    def _publish(self, announcement: Announcement | None = None) -> None:
        """Write the agent's half of the rank's page. Without an announcement, its fields keep their values."""
        half = self.page.agent
        is_finished = half.proposed == FINISHED
        if announcement is not None:
            is_finished = announcement.finished
            half = replace(
                half,
                stop=announcement.stop_step,
                stop_state=announcement.stop_state,
                rehearsal=announcement.rehearsal_step,
                rehearsal_state=announcement.rehearsal_state,
                # A restarted coordinator does not receive the number of steps of a confirmed rehearsal.
                rehearsal_steps=announcement.rehearsal_steps or half.rehearsal_steps,
            )
        self.page.write(
            replace(
                half,
                committed=self.core.committed,
                proposed=FINISHED if is_finished else self.core.proposed,
                slot=self.granted_slot,
                vote_step=NONE if self.core.vote is Vote.NONE else self.core.proposed,
                vote=self.core.vote,
            )
        )


def rounds_of(shards: Mapping[Rank, OwnedShard]) -> tuple[RankRound, ...]:
    """Return the state of each shard's rank, which this node reports to the coordinator, in the order of `shards`."""
    return tuple(shard.round() for shard in shards.values())
