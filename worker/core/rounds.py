"""The rounds of the step protocol (docs/design.md#rounds) as two pure machines: an owner's shard, and the coordinator of a generation.

    Coordinator ──(C, w)──▶ Shard ──wanted──▶ holders ──acknowledge──▶ Shard ──vote──▶ Coordinator

Both are level-triggered: `Shard.hear` takes the coordinator's newest state, `Coordinator.report` a rank's newest state,
and `Coordinator.advance` follows from what is known, however often it is called. Time enters only as facts ("this
holder is dropped", "the final round is over").

Invariant: C never falls within a generation, and no step is ever proposed twice unless every rank has first said that
it forgot the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.protocol.ids import FIRST_STEP, NodeId, Rank, Step
from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, RankHalf, Standing, StopState, Vote
from everstep.protocol.rounds import RankRound
from worker.core.lead import Lead

NONE = Step(-1)
"""No step."""
REASON_BYTES = 500
"""Of why a step is given up: reports of 1,024 ranks are one message, and an exception of a script says as much as it likes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One owned shard in the rounds, as its owner's agent knows it."""

    base: Step
    """The generation's base; 0 when there is nothing to restore."""
    peers: tuple[NodeId, ...]
    """The planned holders beside the owner's own node."""
    view: frozenset[NodeId]
    """Peers that count."""
    returning: frozenset[NodeId] = frozenset()
    """Peers out of view that have lost C or answer again: the vote waits for them, as what they are sent would else be overwritten before it is
    there.
    """
    unheard: frozenset[NodeId] = frozenset()
    """Peers that were dropped and have said nothing since: what they acknowledged earlier does not bring them back into view."""
    committed: Step = NONE
    proposed: Step = NONE
    vote: Vote = Vote.NONE
    reason: str = ""
    is_late: bool = False
    sealed: frozenset[Step] = frozenset()
    """Steps of this generation (and the base) that are sealed in the owner's own slots."""
    capturing: Step = NONE
    """The proposed step while its rank still captures it and holders may be sent what is there: a part of nothing yet, it is never voted on."""
    held: frozenset[tuple[NodeId, Step]] = frozenset()
    """Steps that peers have acknowledged and not revoked."""

    @classmethod
    def begin(cls, base: Step, peers: tuple[NodeId, ...]) -> Shard:
        """Return the shard at the start of a generation: every planned holder in view, the base sealed by Load."""
        return cls(base=base, peers=peers, view=frozenset(peers), sealed=frozenset({base} if base else ()))

    @classmethod
    def adopt(
        cls,
        base: Step,
        peers: tuple[NodeId, ...],
        *,
        committed: Step,
        proposed: Step,
        vote: Vote,
        sealed: frozenset[Step],
    ) -> Shard:
        """Return the shard as a restarted agent finds it: (C, w, vote) from the rank's page, what is sealed from the slots.

        Holders are counted in view again until they have failed to answer; what they hold they say when they are
        connected.
        """
        return cls(
            base=base,
            peers=peers,
            view=frozenset(peers),
            committed=committed,
            proposed=proposed,
            vote=vote,
            sealed=sealed,
        )

    # -- what happens

    def hear(self, committed: Step, proposed: Step) -> Shard:
        """Take the coordinator's newest (C, w). A lower C is refused: the announcement is late."""
        if committed < self.committed:
            return self
        held = frozenset((peer, step) for peer, step in self.held if step >= committed)
        if proposed == self.proposed:
            return replace(self, committed=committed, held=held)
        heard = replace(
            self,
            committed=committed,
            held=held,
            proposed=proposed,
            capturing=NONE,
            vote=Vote.NONE,
            reason="",
            is_late=False,
        )
        if committed > self.committed:  # a dropped peer may hold the new C: it answered after this owner had voted
            for peer in self.peers:
                heard = heard if peer in heard.unheard else heard._confirmed(peer)
        return heard._settled()

    def capture(self, step: Step) -> Shard:
        """The rank writes `step` into the owner's own slot, and says how far it has come."""
        is_awaited = step == self.proposed != self.base and self.vote is Vote.NONE and step not in self.sealed
        return replace(self, capturing=step) if is_awaited else self

    def seal(self, step: Step) -> Shard:
        """The owner's own slot holds `step`, sealed."""
        return replace(
            self, sealed=self.sealed | {step}, capturing=NONE if step == self.capturing else self.capturing
        )._settled()

    def forget(self, step: Step) -> Shard:
        """The owner's own slot no longer holds `step` (it was granted anew): captured once more it is another one than peers have acknowledged."""
        held = self.held if step == self.foundation else frozenset(each for each in self.held if each[1] != step)
        return replace(self, sealed=self.sealed - {step}, held=held)

    def abandon(self, step: Step, reason: str, *, late: bool = False) -> Shard:
        """The rank does not capture `step`. The base is not captured and so never abandoned."""
        if step != self.proposed or self.vote is not Vote.NONE or step == self.base or step in self.sealed:
            return self
        return replace(self, capturing=NONE, vote=Vote.ABANDON, reason=_cut(reason), is_late=late)

    def acknowledge(self, peer: NodeId, step: Step) -> Shard:
        """`peer` has verified and sealed `step`."""
        return replace(self, held=self.held | {(peer, step)}, unheard=self.unheard - {peer})._confirmed(peer)._settled()

    def inventory(self, peer: NodeId, steps: frozenset[Step]) -> Shard:
        """`peer` (re)connected and holds exactly these steps: acknowledgements that it does not list are revoked."""
        held = frozenset(each for each in self.held if each[0] != peer) | {(peer, step) for step in steps}
        lost = {peer} if self.committed != NONE and peer in self.view and self.committed not in steps else set[NodeId]()
        heard = replace(
            self, held=held, view=self.view - lost, returning=self.returning | lost, unheard=self.unheard - {peer}
        )
        return heard._confirmed(peer)._settled()

    def answer(self, peer: NodeId) -> Shard:
        """`peer`, which was dropped, takes what it is sent: until it has returned or is dropped again nothing is voted on without it."""
        is_back = peer in self.awaited or peer not in self.peers
        return self if is_back else replace(self, returning=self.returning | {peer}, unheard=self.unheard - {peer})

    def drop(self, peer: NodeId) -> Shard:
        """`peer` has not answered for the holder deadline: commits go on without it, loudly degraded."""
        unheard = self.unheard | ({peer} & frozenset(self.peers))
        return replace(self, view=self.view - {peer}, returning=self.returning - {peer}, unheard=unheard)._settled()

    # -- what follows

    def wanted(self, peer: NodeId) -> Step:
        """Return the step that `peer` should be sent next, or `NONE`.

        A holder first gets what the generation stands on (C, or the base before the first commit), then what is being
        proposed. Only what the owner has sealed can be sent, or captures just now.
        """
        for step in (self.foundation, self.proposed):
            if step != NONE and (step in self.sealed or step == self.capturing) and (peer, step) not in self.held:
                return step
        return NONE

    def _confirmed(self, peer: NodeId) -> Shard:
        """A dropped holder returns once it has C, in a round that this owner has not voted on yet."""
        if peer in self.view or peer not in self.peers or self.vote is not Vote.NONE or self.foundation == NONE:
            return self
        is_there = (peer, self.foundation) in self.held
        return replace(self, view=self.view | {peer}, returning=self.returning - {peer}) if is_there else self

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Peers that a vote waits for: those in view, and those that return to it."""
        return self.view | self.returning

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot is being sent: of this shard, or, when all of it is there, of another one whose holders the coordinator still awaits."""
        return self.vote is Vote.ACKED or any(self.wanted(peer) != NONE for peer in self.awaited)

    @property
    def foundation(self) -> Step:
        """What the generation stands on: C, or the base before the first commit."""
        return self.committed if self.committed != NONE else (self.base or NONE)

    def _settled(self) -> Shard:
        waiting = self.vote is Vote.NONE and self.proposed != NONE and self.proposed in self.sealed
        if waiting and all((peer, self.proposed) in self.held for peer in self.awaited):
            return replace(self, vote=Vote.ACKED)
        return self


def _cut(reason: str) -> str:
    said = reason.encode(errors="replace")
    return reason if len(said) <= REASON_BYTES else said[: REASON_BYTES - 3].decode(errors="ignore") + "…"


def echo_of(half: RankHalf, stop: Step, state: StopState) -> tuple[Step, int]:
    """Return what a rank's agent reports as the rank's answer to the announced stop.

    A rank answers at boundaries only. One that passed the step just before it could hear of the stop may never come to
    the next: the others wait at the stop, and it waits for them. Its agent says no for it. That may be said of a rank
    that is about to stop after all; then the stop is withdrawn and announced again, which costs a round and does no
    harm.

    Args:
        half: the rank's half of its page.
        stop: the announced stop on the agent's half, or -1.
        state: of that stop.

    Returns:
        (the stop it answers, `ECHO_YES` or `ECHO_NO`); as on the page when there is nothing to add.
    """
    if state is StopState.ANNOUNCED and half.echo_step != stop and half.boundary >= stop:
        return stop, ECHO_NO
    return Step(half.echo_step), half.echo


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The rounds of one generation: at most one proposed step, the same for everybody."""

    world_size: int
    base: Step
    every_steps: int
    """Interval of checkpoints in S3; 0: only at an agreed stop."""
    slot_count: int = 2
    stored: Step = FIRST_STEP
    """The newest complete checkpoint in S3 when the generation began; 0: none."""
    strayed: frozenset[Rank] = frozenset()
    """Ranks whose shard some node keeps that is none of its planned holders, and all other ranks of the same owner (`worker.core.strays`)."""
    distance: int = 1
    """Steps from a committed step to the next proposed one, at least: what the job's budget allows (`worker.core.budget`)."""
    committed: Step = NONE
    proposed: Step = NONE
    newest: Step = NONE
    """The highest step ever proposed or reported as proposed: the next is above it."""
    ranks: tuple[RankRound, ...] = ()
    """The newest report of every rank that has reported, by rank."""
    lead: Lead = field(default_factory=Lead)
    cadence: int = 1
    """Steps between the last two commits."""
    persist: Step = NONE
    """The newest step that is to be uploaded: committed, or the base of a job that is stopped before it is.

    The final step is marked when it is proposed, if the upload of an older step holds its slot: agents cancel that
    upload.
    """
    wanted: Step = NONE
    """A person wants this step or a later one uploaded."""
    is_recovering: bool = False
    """Restarted: proposes nothing until every rank's agent has reported."""
    stop_requested: bool = False
    stop: Step = NONE
    stop_state: StopState = StopState.NONE
    final: Step = NONE
    """The boundary that all ranks stand at, while it is being committed."""
    is_finished: bool = False

    @classmethod
    def begin(
        cls,
        *,
        world_size: int,
        base: Step,
        every_steps: int,
        slot_count: int = 2,
        stored: Step = FIRST_STEP,
        strayed: frozenset[Rank] = frozenset(),
    ) -> Coordinator:
        """Return the coordinator of a new generation: w = base and C = none (docs/design.md#rounds)."""
        core = cls(
            world_size=world_size,
            base=base,
            every_steps=every_steps,
            slot_count=slot_count,
            stored=stored,
            strayed=strayed,
        )
        return core._propose()

    @classmethod
    def recover(
        cls,
        *,
        world_size: int,
        base: Step,
        every_steps: int,
        slot_count: int = 2,
        stored: Step = FIRST_STEP,
        strayed: frozenset[Rank] = frozenset(),
    ) -> Coordinator:
        """Return the coordinator of a generation that is already running, after its agent restarted: it knows nothing yet."""
        core = cls(
            world_size=world_size,
            base=base,
            every_steps=every_steps,
            slot_count=slot_count,
            stored=stored,
            strayed=strayed,
        )
        return replace(core, is_recovering=True)

    # -- what happens

    def report(self, *rounds: RankRound) -> Coordinator:
        """Take the newest state of some ranks and everything that follows from it."""
        newest = {each.rank: each for each in (*self.ranks, *rounds)}
        return replace(self, ranks=tuple(newest[rank] for rank in sorted(newest))).advance()

    def keep_distance(self, distance: int) -> Coordinator:
        """Propose steps so far apart from now on; one that is proposed already stays."""
        return replace(self, distance=distance)

    def request_checkpoint(self, step: Step) -> Coordinator:
        """Have the next commit of `step` or a later one uploaded; asking again changes nothing.

        The next, not the newest: only what is announced together with a commit is known to every member before its slot
        may be used again.
        """
        return replace(self, wanted=max(self.wanted, step))

    def request_stop(self) -> Coordinator:
        """Ask for an agreed stop; asking again changes nothing."""
        return replace(self, stop_requested=True).advance()

    def end_final_round(self) -> Coordinator:
        """The final round has taken too long: ranks leave with what is committed."""
        return replace(self, is_finished=True).advance() if self.final != NONE else self

    def halt(self) -> Coordinator:
        """The ranks are being ended. If a stop was asked for, what is committed now is what the job leaves behind."""
        return replace(self, is_finished=True, proposed=NONE).advance() if self._is_stopping else self

    # -- what follows

    @property
    def highest_boundary(self) -> Step:
        """The highest boundary that any rank has reported; the base before any has."""
        return max((each.boundary for each in self.ranks), default=self.base)

    @property
    def held(self) -> tuple[Rank, ...]:
        """Strayed shards that all planned holders have sealed at the base or a later step: the rank's report names none out of view."""
        return tuple(
            each.rank
            for each in self.ranks
            if each.rank in self.strayed
            and not each.out_of_view
            and (each.committed != NONE or (each.proposed == self.base and each.vote is Vote.ACKED))
        )

    @property
    def is_complete(self) -> bool:
        """Whether every rank of the generation has reported at least once."""
        return len(self.ranks) == self.world_size

    def advance(self) -> Coordinator:
        """Return what follows from everything known; calling it again changes nothing."""
        before, after = None, self
        while after != before:
            before, after = after, after._recovered()._decided()._stopping()._closing()._left_behind()._propose()
        return after

    def _recovered(self) -> Coordinator:
        if not self.is_recovering or not self.is_complete:
            return self
        newest = max(each.proposed for each in self.ranks)
        heard = max(each.committed for each in self.ranks)
        acked = newest > heard and all(each.proposed == newest and each.vote is Vote.ACKED for each in self.ranks)
        committed = newest if acked else heard
        known = replace(
            self,
            is_recovering=False,
            stop=max(each.confirmed_stop for each in self.ranks),
            stop_state=StopState.CONFIRMED,
        )
        if (
            known.stop == NONE
        ):  # withdrawn, if one was announced; its number is not used again: answers to it are still on the ranks' pages
            known = replace(known, stop=max(each.heard_stop for each in self.ranks), stop_state=StopState.NONE)
        return replace(known, committed=committed, newest=newest, persist=committed if self.every_steps else NONE)

    def _decided(self) -> Coordinator:
        """Every rank has voted on w: commit or drop it."""
        if self.is_recovering or self.proposed == NONE or not self.is_complete:
            return self
        votes = [each for each in self.ranks if each.proposed == self.proposed]
        abandoned = [
            each for each in votes if each.vote is Vote.ABANDON and each.proposed != self.base
        ]  # the base is there, nobody captures it
        late = any(each.is_late for each in abandoned)
        if abandoned:
            if self.proposed == self.final and not late:  # it cannot be captured, now or later
                return replace(self, proposed=NONE, is_finished=True)
            return replace(self, proposed=NONE, lead=self.lead.late() if late else self.lead)
        if len(votes) < self.world_size or not all(each.vote is Vote.ACKED for each in votes):
            return self
        # At most twice as far at once: the gap that an outage has left is not how far apart steps are meant to be.
        cadence = min(self.proposed - self.committed, 2 * self.cadence) if self.committed != NONE else 1
        return replace(
            self,
            committed=self.proposed,
            proposed=NONE,
            lead=self.lead.clean(),
            cadence=max(1, cadence),
            persist=self._persist(self.proposed),
        )

    def _persist(self, committed: Step) -> Step:
        """A commit at or past the next multiple of the interval is uploaded.

        The base itself is where a multiple lies between what is stored and it:
        the upload that was due then ended with its generation.
        """
        if self._is_uploading:
            return self.persist
        if self.persist < self.wanted <= committed:
            return committed
        if not self.every_steps:
            return self.persist
        floor = self.persist if self.persist != NONE else self.stored
        return committed if committed // self.every_steps > floor // self.every_steps else self.persist

    @property
    def _is_uploading(self) -> bool:
        return any(each.pinned_step != NONE for each in self.ranks)

    def _stopping(self) -> Coordinator:
        """Agree on a step after which all ranks stop: announce, collect answers, confirm or withdraw (docs/design.md#agreed-stop)."""
        if self.is_recovering or not self.is_complete or self.stop_state is StopState.CONFIRMED:
            return self
        if self.stop_state is StopState.NONE:
            closing = any(each.standing >= Standing.CLOSING for each in self.ranks)
            if not self.stop_requested or closing or any(each.boundary == NONE for each in self.ranks):
                return self
            return replace(
                self, stop=Step(max(self.highest_boundary, self.stop) + self.lead.steps), stop_state=StopState.ANNOUNCED
            )
        echoes = [each.echo for each in self.ranks if each.echo_step == self.stop]
        if any(echo == ECHO_NO for echo in echoes):
            return replace(self, stop_state=StopState.NONE)
        if len(echoes) == self.world_size and all(echo == ECHO_YES for echo in echoes):
            return replace(self, stop_state=StopState.CONFIRMED)
        return self

    def _closing(self) -> Coordinator:
        """All ranks stand still: commit the boundary that they stand at, then let them leave."""
        if self.is_recovering or self.is_finished or not self.is_complete:
            return self
        standing = [each for each in self.ranks if each.standing is not Standing.MOVING]
        if len(standing) < self.world_size:
            return self
        boundaries = {each.boundary for each in standing}
        if len(boundaries) > 1:
            return replace(self, is_finished=True, proposed=NONE)
        (boundary,) = boundaries
        if self.committed == boundary or boundary <= self.base:
            return replace(self, is_finished=True, final=boundary, proposed=NONE)
        if self.final != boundary:
            return replace(self, final=boundary, proposed=self.proposed if self.proposed == boundary else NONE)
        return self

    def _left_behind(self) -> Coordinator:
        """A stopped job leaves what it stands on in S3, however its final round ended.

        So does a job whose final step was marked and not committed: the upload of an older step was cancelled for it.
        """
        foundation = self.committed if self.committed != NONE else (self.base or NONE)
        is_due = self._is_stopping or self.persist > foundation
        return replace(self, persist=foundation) if self.is_finished and is_due else self

    @property
    def _is_stopping(self) -> bool:
        return (
            self.stop_requested or self.stop_state is StopState.CONFIRMED
        )  # who restarted may know the one without the other

    def _propose(self) -> Coordinator:
        if self.is_recovering or self.is_finished or self.proposed != NONE:
            return self
        if self.committed == NONE and self.base:
            return replace(self, proposed=self.base, newest=max(self.newest, self.base))
        is_full = self.slot_count < 3 and any(each.pinned_step not in (NONE, self.committed) for each in self.ranks)
        if self.final != NONE:
            if self.final > self.newest or all(each.proposed != self.final for each in self.ranks):
                persist = self.final if is_full else self.persist
                return replace(self, proposed=self.final, newest=max(self.newest, self.final), persist=persist)
            return self
        if is_full:
            return self  # an upload holds one slot and C the other: the next capture waits for the upload
        soonest = max(self.highest_boundary + self.lead.steps, self.newest + 1)
        step = max(soonest, self.committed + self.distance)
        if self.every_steps:
            multiple = -(-soonest // self.every_steps) * self.every_steps
            step = (
                multiple if multiple - step <= self.cadence else step
            )  # checkpoints fall on multiples of the interval, and none is left out
        return replace(self, proposed=Step(step), newest=Step(step))
