"""The rounds of the step protocol (docs/design.md#rounds) as two pure state machines.

    Coordinator ──(C, w)──▶ Shard ──wanted──▶ holders ──acknowledge──▶ Shard ──vote──▶ Coordinator

`Shard` has the state of one shard and runs on its owner's node. `Coordinator` has the state of a generation. Neither
has a clock: when a timeout expires, the caller calls a method such as `Shard.drop` or `Coordinator.end_final_round`.

Invariant: within a generation, C never decreases. Only two steps may be proposed a second time: the base after a
restart of the coordinator's agent, and the final step once every rank has reported that it dropped the first proposal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.protocol.ids import FIRST_STEP, NodeId, Rank, Step
from everstep.protocol.limits import MAX_RANK_STEP
from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, RankHalf, RankStanding, StopState, Vote
from everstep.protocol.rounds import RankRound
from worker.core.proposal_lead import Lead
from worker.core.rehearsal import RehearsalAgreement

NONE = Step(-1)
# Reports of up to 1,024 ranks share one message, and the text of a script's exception can have any length.
REASON_BYTES = 500
"""Maximum length of the reason why a step is abandoned."""


@dataclass(frozen=True, slots=True)
class Shard:
    """State of one shard on its owner's node. Each method returns the next state."""

    base: Step
    """0 if training starts at the state that the script builds."""
    peers: tuple[NodeId, ...]
    """The planned holders of this shard, except the owner's own node."""
    view: frozenset[NodeId]
    """The peers in view. The vote ACKED on a step requires that each of them has acknowledged the step."""
    # The owner is sending these peers the committed step from its slot. A commit without them would allow the rank
    # to overwrite this slot.
    returning: frozenset[NodeId] = frozenset()
    """Peers outside the view that answer again, or that have lost the committed step. A vote also waits for them."""
    silent: frozenset[NodeId] = frozenset()
    """Dropped peers that have sent no message since. An acknowledgement from before the drop does not return a peer."""
    committed: Step = NONE
    proposed: Step = NONE
    vote: Vote = Vote.NONE
    reason: str = ""
    is_late: bool = False
    sealed: frozenset[Step] = frozenset()
    """Steps whose state is sealed in the owner's slots: the base, and steps of this generation."""
    capturing: Step = NONE
    """The proposed step while its rank still captures it, so that parts of it may be sent; `NONE` otherwise."""
    held: frozenset[tuple[NodeId, Step]] = frozenset()
    """Pairs (peer, step) of the valid acknowledgements."""
    has_parity: bool = False
    """True if the peers combine this shard into shares. A peer then acknowledges when it seals its share."""

    @classmethod
    def begin(cls, base: Step, peers: tuple[NodeId, ...], *, has_parity: bool = False) -> Shard:
        """Return the state at the start of a generation. The owner has sealed the base, unless it is step 0."""
        sealed = frozenset({base} if base else ())
        return cls(base=base, peers=peers, view=frozenset(peers), sealed=sealed, has_parity=has_parity)

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
        has_parity: bool = False,
    ) -> Shard:
        """Return the state after a restart of the agent, from the rank's page and the slots. All peers are in view."""
        return cls(
            base=base,
            peers=peers,
            view=frozenset(peers),
            committed=committed,
            proposed=proposed,
            vote=vote,
            sealed=sealed,
            has_parity=has_parity,
        )

    def apply_announcement(self, committed: Step, proposed: Step) -> Shard:
        """Apply the coordinator's newest committed and proposed step. A lower committed step is late and is ignored."""
        if committed < self.committed:
            return self
        held = frozenset((peer, step) for peer, step in self.held if step >= committed)
        if proposed == self.proposed:
            return replace(self, committed=committed, held=held)
        updated = replace(
            self,
            committed=committed,
            held=held,
            proposed=proposed,
            capturing=NONE,
            vote=Vote.NONE,
            reason="",
            is_late=False,
        )
        # A peer that was dropped from the view may have acknowledged the committed step after the owner's vote. If so,
        # the peer returns to the view now.
        if committed > self.committed:
            for peer in self.peers:
                updated = updated if peer in updated.silent else updated._confirmed(peer)
        return updated._settled()

    def capture(self, step: Step) -> Shard:
        """Record that the first parts of `step` are copied.

        No effect unless it is proposed and still to be captured.
        """
        is_awaited = step == self.proposed != self.base and self.vote is Vote.NONE and step not in self.sealed
        return replace(self, capturing=step) if is_awaited else self

    def seal(self, step: Step) -> Shard:
        """Record that the shard's state at `step` is sealed in a slot of its owner's node."""
        return replace(
            self, sealed=self.sealed | {step}, capturing=NONE if step == self.capturing else self.capturing
        )._settled()

    def forget(self, step: Step) -> Shard:
        """Record that the owner's node has overwritten its slot of `step`."""
        # The rank may capture `step` again with another result, so acknowledgements of it no longer count. It
        # never captures the newest committed step again.
        held = self.held if step == self.foundation else frozenset(each for each in self.held if each[1] != step)
        return replace(self, sealed=self.sealed - {step}, held=held)

    def abandon(self, step: Step, reason: str, *, late: bool = False) -> Shard:
        """Record that the rank does not capture `step`, and vote ABANDON. The base cannot be abandoned."""
        if step != self.proposed or self.vote is not Vote.NONE or step == self.base or step in self.sealed:
            return self
        # `late` makes the coordinator propose earlier.
        return replace(self, capturing=NONE, vote=Vote.ABANDON, reason=_cut(reason), is_late=late)

    def acknowledge(self, peer: NodeId, step: Step) -> Shard:
        """Record that `peer` has verified and sealed a replica of `step`."""
        return replace(self, held=self.held | {(peer, step)}, silent=self.silent - {peer})._confirmed(peer)._settled()

    def inventory(self, peer: NodeId, steps: frozenset[Step]) -> Shard:
        """Record that `peer` has connected and holds exactly `steps`. Other acknowledgements are revoked."""
        held = frozenset(each for each in self.held if each[0] != peer) | {(peer, step) for step in steps}
        lost = {peer} if self.committed != NONE and peer in self.view and self.committed not in steps else set[NodeId]()
        updated = replace(
            self, held=held, view=self.view - lost, returning=self.returning | lost, silent=self.silent - {peer}
        )
        return updated._confirmed(peer)._settled()

    def answer(self, peer: NodeId) -> Shard:
        """Record that a dropped `peer` accepts data again. Votes then wait for it, unless it is dropped again."""
        is_back = peer in self.awaited or peer not in self.peers
        return self if is_back else replace(self, returning=self.returning | {peer}, silent=self.silent - {peer})

    def drop(self, peer: NodeId) -> Shard:
        """Drop `peer` from the view, because it missed the holder deadline."""
        silent = self.silent | ({peer} & frozenset(self.peers))
        return replace(self, view=self.view - {peer}, returning=self.returning - {peer}, silent=silent)._settled()

    def wanted(self, peer: NodeId) -> Step:
        """Return the step that the owner sends to `peer` next: the foundation, then the proposed step; or `NONE`."""
        # A combined chunk cannot be removed from a share, so only sealed steps are sent with parity.
        capturing = NONE if self.has_parity else self.capturing
        for step in (self.foundation, self.proposed):
            if step != NONE and (step in self.sealed or step == capturing) and (peer, step) not in self.held:
                return step
        return NONE

    def is_capturable(self, half: RankHalf) -> bool:
        """Return whether the rank can still capture the proposed step: it has not begun the step after it."""
        if self.proposed == NONE or self.proposed in self.sealed:
            return False
        is_before = half.boundary < self.proposed
        return is_before or (half.boundary == self.proposed and half.standing is not RankStanding.MOVING)

    def _confirmed(self, peer: NodeId) -> Shard:
        """Put `peer` into the view if it holds the foundation and the owner has not voted."""
        if peer in self.view or peer not in self.peers or self.vote is not Vote.NONE or self.foundation == NONE:
            return self
        is_there = (peer, self.foundation) in self.held
        return replace(self, view=self.view | {peer}, returning=self.returning - {peer}) if is_there else self

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Holders for whose acknowledgement the owner's vote waits."""
        return self.view | self.returning

    @property
    def is_under_way(self) -> bool:
        """True while a peer lacks a step of this shard, or its owner has voted and waits for other owners' votes."""
        return self.vote is Vote.ACKED or any(self.wanted(peer) != NONE for peer in self.awaited)

    @property
    def foundation(self) -> Step:
        """The newest committed step; before the first commit, the base."""
        return self.committed if self.committed != NONE else (self.base or NONE)

    def _settled(self) -> Shard:
        waiting = self.vote is Vote.NONE and self.proposed != NONE and self.proposed in self.sealed
        if waiting and all((peer, self.proposed) in self.held for peer in self.awaited):
            return replace(self, vote=Vote.ACKED)
        return self


def _cut(reason: str) -> str:
    encoded = reason.encode(errors="replace")
    return reason if len(encoded) <= REASON_BYTES else encoded[: REASON_BYTES - 3].decode(errors="ignore") + "…"


def echo_of(half: RankHalf, stop: Step, state: StopState) -> tuple[Step, int]:
    """Return (the answered stop, `ECHO_YES` or `ECHO_NO`), given the stop on the rank's page (-1 for none)."""
    # A rank that has passed the stop may wait in a collective for ranks that wait at the stop, and so never reach
    # its next boundary. The agent answers for it, and the coordinator announces a later stop.
    if state is StopState.ANNOUNCED and half.echo_step != stop and half.boundary >= stop:
        return stop, ECHO_NO
    return Step(half.echo_step), half.echo


@dataclass(frozen=True, slots=True)
class Coordinator:
    """State of the coordinator of one generation. Each method returns the next state."""

    world_size: int
    base: Step
    every_steps: int
    """Steps between two checkpoints in S3; 0 for no interval in steps."""
    slot_count: int = 2
    stored: Step = FIRST_STEP
    """Step of the newest complete checkpoint in S3 at the start of the generation; 0 without one."""
    misplaced_ranks: frozenset[Rank] = frozenset()
    """Ranks whose full protection the coordinator announces (`worker.core.misplaced_shards.misplaced_ranks`)."""
    is_relayout: bool = False
    """True after a relayout: no slot contains the base in this layout, so it is neither proposed nor uploaded."""
    max_uploads: int = 1
    distance: int = 1
    """Minimum steps from a committed step to the next proposed step (`worker.core.budget`)."""
    committed: Step = NONE
    proposed: Step = NONE
    newest: Step = NONE
    ranks: tuple[RankRound, ...] = ()
    """The newest report of each rank that has reported, in order of rank."""
    lead: Lead = field(default_factory=Lead)
    cadence: int = 1
    """Steps between the last two commits, at most twice the value before: the limit for delays to a multiple."""
    # If uploads or exports of older steps use all slots, the final step is marked while it is only proposed. Agents
    # then end these to free a slot.
    persist: Step = NONE
    """The newest step to upload, committed or the base of a job that stops before a commit; or `NONE`."""
    # An agent reports only its newest finished uploads (`worker.core.slots.newest_uploads`). No commit is marked
    # while an agent uploads a step outside this tuple, so that each checkpoint can become complete.
    marked: tuple[Step, ...] = ()
    """The newest commits that were marked for upload, at most `max_uploads`, in increasing order."""
    wanted: Step = NONE
    """The first commit at or above this step must be uploaded, on a user's request; `NONE` without a request."""
    urgent: Step = NONE
    """Like `wanted`, but because AWS announced a node's end. Agents end an export if they need its slot for it."""
    is_recovering: bool = False
    """True from a restart of the coordinator's agent until every rank has reported. No step is proposed meanwhile."""
    stop_requested: bool = False
    stop: Step = NONE
    stop_state: StopState = StopState.NONE
    rehearsal: RehearsalAgreement = field(default_factory=RehearsalAgreement)
    final: Step = NONE
    """The last step of the training, once all ranks wait after it for its commit; `NONE` before."""
    is_finished: bool = False

    def begin(self) -> Coordinator:
        """Return the coordinator of a new generation after its first proposal."""
        return self._propose()

    def recover(self) -> Coordinator:
        """Return the coordinator of a running generation after its agent restarted, before the first report."""
        return replace(self, is_recovering=True)

    def report(self, *rounds: RankRound) -> Coordinator:
        """Apply the newest reports of some ranks, then `advance`."""
        newest = {each.rank: each for each in (*self.ranks, *rounds)}
        return replace(self, ranks=tuple(newest[rank] for rank in sorted(newest))).advance()

    def keep_distance(self, distance: int) -> Coordinator:
        """Set the minimum number of steps from a commit to the next proposal."""
        return replace(self, distance=distance)

    def request_checkpoint(self, step: Step, *, ends_exports: bool = False) -> Coordinator:
        """Request the upload of the next commit at or after `step`; with `ends_exports`, agents end exports for it."""
        # The current commit is not uploaded, because nodes may be about to reuse its slot. The announcement of
        # a later commit names the step to upload, so each node pins its slot in time.
        urgent = max(self.urgent, step) if ends_exports else self.urgent
        return replace(self, wanted=max(self.wanted, step), urgent=urgent)

    def request_stop(self) -> Coordinator:
        """Request that all ranks stop after the same step. Repeated requests change nothing."""
        return replace(self, stop_requested=True).advance()

    def request_rehearsal(self, number: int, steps: int) -> Coordinator:
        """Request that all ranks rehearse `steps` steps. A repeated number changes nothing."""
        return replace(self, rehearsal=self.rehearsal.request(number, steps)).advance()

    def end_final_round(self) -> Coordinator:
        """Record that the ranks waited too long for the final commit. They exit at the newest committed step."""
        return replace(self, is_finished=True).advance() if self.final != NONE else self

    def halt(self) -> Coordinator:
        """Record that agents kill the ranks. After a requested stop, the committed step becomes the final state."""
        return replace(self, is_finished=True, proposed=NONE).advance() if self._is_stopping else self

    @property
    def highest_boundary(self) -> Step:
        """The highest step that any rank has finished, at most `MAX_RANK_STEP`; before any report, the base."""
        return Step(min(max((each.boundary for each in self.ranks), default=self.base), MAX_RANK_STEP))

    @property
    def held(self) -> tuple[Rank, ...]:
        """Ranks in `misplaced_ranks` whose shards all planned holders have sealed, at the base or a later step."""
        return tuple(
            each.rank
            for each in self.ranks
            if each.rank in self.misplaced_ranks
            # Steps of a rank with a holder out of view are committed without that holder's copy.
            and not each.out_of_view
            and (each.committed != NONE or (each.proposed == self.base and each.vote is Vote.ACKED))
        )

    @property
    def is_uploading(self) -> bool:
        """True while any agent uploads a shard of a checkpoint to S3."""
        return bool(self.uploads_in_flight)

    @property
    def uploads_in_flight(self) -> frozenset[Step]:
        """The steps of which at least one agent now uploads a shard to S3."""
        return frozenset(step for each in self.ranks for step in each.pinned_steps)

    @property
    def stored_by_all(self) -> Step:
        """The newest step whose shards are all uploaded; `NONE` without such a step."""
        return min((each.stored_step for each in self.ranks), default=NONE) if self.is_complete else NONE

    @property
    def due_step(self) -> Step:
        """The next commit at or above this step is due by `every_steps`; `NONE` without such an interval."""
        if not self.every_steps:
            return NONE
        floor = self.persist if self.persist != NONE else self.stored
        return Step((floor // self.every_steps + 1) * self.every_steps)

    @property
    def is_complete(self) -> bool:
        """True if every rank of the generation has reported."""
        return len(self.ranks) == self.world_size

    def advance(self) -> Coordinator:
        """Commit, abandon, propose or stop, as far as the reports permit. A second call changes nothing."""
        before, after = None, self
        while after != before:
            before, after = (
                after,
                after._recovered()._decided()._stopping()._rehearsing()._closing()._left_behind()._propose(),
            )
        return after

    def _recovered(self) -> Coordinator:
        if not self.is_recovering or not self.is_complete:
            return self
        newest = max(each.proposed for each in self.ranks)
        newest_committed = max(each.committed for each in self.ranks)
        acked = newest > newest_committed and all(
            each.proposed == newest and each.vote is Vote.ACKED for each in self.ranks
        )
        committed = newest if acked else newest_committed
        known = replace(
            self,
            is_recovering=False,
            stop=max(each.confirmed_stop for each in self.ranks),
            stop_state=StopState.CONFIRMED,
        )
        if known.stop == NONE:
            # A restarted coordinator withdraws an announced stop. It does not reuse the number of this stop, because
            # ranks' shared-memory pages may still contain answers to it.
            known = replace(known, stop=max(each.heard_stop for each in self.ranks), stop_state=StopState.NONE)
        marked = (committed,) if self.every_steps else ()
        return replace(
            known,
            committed=committed,
            newest=max(newest, committed),
            persist=committed if self.every_steps else NONE,
            marked=marked,
            rehearsal=self.rehearsal.recover(self.ranks),
        )

    def _decided(self) -> Coordinator:
        if self.is_recovering or self.proposed == NONE or not self.is_complete:
            return self
        votes = [each for each in self.ranks if each.proposed == self.proposed]
        # The base is already in slots and is not captured, so ignore votes to abandon its capture.
        abandoned = [each for each in votes if each.vote is Vote.ABANDON and each.proposed != self.base]
        late = any(each.is_late for each in abandoned)
        if abandoned:
            # The ranks try to capture the final step only once. If this fails, training ends without this step in
            # memory.
            if self.proposed == self.final and not late:
                return replace(self, proposed=NONE, is_finished=True)
            return replace(self, proposed=NONE, lead=self.lead.late() if late else self.lead)
        if len(votes) < self.world_size or not all(each.vote is Vote.ACKED for each in votes):
            return self
        # `cadence` at most doubles per commit, because a single long interval, such as an outage, is no lasting change.
        cadence = min(self.proposed - self.committed, 2 * self.cadence) if self.committed != NONE else 1
        persist = self._persist(self.proposed)
        marked = self.marked if persist == self.persist else (*self.marked, persist)[-self.max_uploads :]
        return replace(
            self,
            committed=self.proposed,
            proposed=NONE,
            lead=self.lead.clean(),
            cadence=max(1, cadence),
            persist=persist,
            marked=marked,
        )

    def _persist(self, committed: Step) -> Step:
        """Return `committed` if a checkpoint is due and another upload may begin, otherwise the step marked before."""
        if not self._may_mark:
            # The running uploads must end first. The checkpoint stays due, so a later call marks a step for upload.
            return self.persist
        if self.persist < self.wanted <= committed:
            return committed
        # This includes the base: the earlier generation may have ended before it uploaded the base.
        return committed if NONE < self.due_step <= committed else self.persist

    @property
    def _may_mark(self) -> bool:
        running = self.uploads_in_flight
        return len(running) < self.max_uploads and running <= {*self.marked}

    def _stopping(self) -> Coordinator:
        """Agree with all ranks on the step after which they stop (docs/design.md#agreed-stop)."""
        if self.is_recovering or not self.is_complete or self.stop_state is StopState.CONFIRMED:
            return self
        if self.stop_state is StopState.NONE:
            closing = any(each.standing >= RankStanding.CLOSING for each in self.ranks)
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

    def _rehearsing(self) -> Coordinator:
        if self.is_recovering or not self.is_complete:
            return self
        is_ending = (
            self.stop_requested
            or self.stop_state is not StopState.NONE
            or self.is_finished
            or any(each.standing is not RankStanding.MOVING for each in self.ranks)
        )
        return replace(self, rehearsal=self.rehearsal.advance(self.ranks, self.lead.steps, is_ending=is_ending))

    def _closing(self) -> Coordinator:
        """Propose the final step when all ranks have stopped or called `close` after the same step."""
        if self.is_recovering or self.is_finished or not self.is_complete:
            return self
        standing = [each for each in self.ranks if each.standing is not RankStanding.MOVING]
        if len(standing) < self.world_size:
            return self
        boundaries = {each.boundary for each in standing}
        # Without a common last step, the rounds finish without a final step.
        if len(boundaries) > 1:
            return replace(self, is_finished=True, proposed=NONE)
        (boundary,) = boundaries
        if self.committed == boundary or boundary <= self.base:
            return replace(self, is_finished=True, final=boundary, proposed=NONE)
        if self.final != boundary:
            return replace(self, final=boundary, proposed=self.proposed if self.proposed == boundary else NONE)
        return self

    def _left_behind(self) -> Coordinator:
        """Mark the newest complete step for upload once all ranks have finished. Nodes are released after the job."""
        foundation = self.committed if self.committed != NONE else (self._held_base or NONE)
        return replace(self, persist=foundation) if self.is_finished else self

    @property
    def _held_base(self) -> Step:
        return FIRST_STEP if self.is_relayout else self.base

    @property
    def _is_stopping(self) -> bool:
        # A restarted coordinator may receive only one of the two: the user's request, or the stop that ranks confirmed.
        return self.stop_requested or self.stop_state is StopState.CONFIRMED

    def _propose(self) -> Coordinator:
        if self.is_recovering or self.is_finished:
            return self
        if self.proposed != NONE:
            # After the proposal, a user's export of a snapshot may have taken the slot that the final step needs.
            is_short = self.proposed == self.final and self._is_full
            return replace(self, persist=self.final) if is_short else self
        if self.committed == NONE and self._held_base:
            return replace(self, proposed=self.base, newest=max(self.newest, self.base))
        if self.final != NONE:
            if self.final > self.newest or all(each.proposed != self.final for each in self.ranks):
                persist = self.final if self._is_full else self.persist
                return replace(self, proposed=self.final, newest=max(self.newest, self.final), persist=persist)
            return self
        if self._is_full:
            return self
        # Before ranks have restored their state, `highest_boundary` can be below the base. The base is never captured
        # again, so only later steps are proposed.
        soonest = max(self.highest_boundary + self.lead.steps, self.newest + 1, self.base + 1)
        step = max(soonest, self.committed + self.distance)
        if self.every_steps:
            multiple = -(-soonest // self.every_steps) * self.every_steps
            # Prefer a multiple of the checkpoint interval, so that the proposed step can become a checkpoint. It may
            # delay the proposal by at most the distance of the last two commits (`cadence`).
            step = multiple if multiple - step <= self.cadence else step
        if step > MAX_RANK_STEP:
            return self
        return replace(self, proposed=Step(step), newest=Step(step))

    @property
    def ends_exports(self) -> bool:
        """True if agents must end an export, so that its slot is free for an urgent checkpoint."""
        return self.persist < self.urgent and self._is_full and any(each.held_step != NONE for each in self.ranks)

    @property
    def _is_full(self) -> bool:
        unavailable = self.committed, NONE
        return any(
            len({*each.pinned_steps, each.held_step}.difference(unavailable)) >= self.slot_count - 1
            for each in self.ranks
        )
