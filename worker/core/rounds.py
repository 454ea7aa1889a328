"""The rounds of the step protocol (docs/design.md#rounds) as two pure state machines.

One machine, `Shard`, has the state of one shard and runs on its owner's node. The other, `Coordinator`, has the state
of a generation and runs on the coordinator's node.

    Coordinator ──(C, w)──▶ Shard ──wanted──▶ holders ──acknowledge──▶ Shard ──vote──▶ Coordinator

C is the newest committed step and w is the proposed step. Each message contains the sender's newest state, so repeated
or lost messages do no harm. `Shard.hear` applies the coordinator's newest state, and `Coordinator.report` applies a
rank's newest state. `Coordinator.advance` derives the next state from all reports. Neither machine has a clock. When a
timeout expires, the caller calls a method such as `Shard.drop` or `Coordinator.end_final_round`.

Invariant: within a generation, C never decreases. Only two steps may be proposed a second time. The base may be
proposed again after a restart of the coordinator's agent. The final step may be proposed again once every rank has
reported that it has dropped the first proposal.

The module has more than 500 lines. Both machines stay in one module, because every change of the protocol changes both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.protocol.ids import FIRST_STEP, NodeId, Rank, Step
from everstep.protocol.limits import MAX_RANK_STEP
from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, RankHalf, RankStanding, StopState, Vote
from everstep.protocol.rounds import RankRound
from worker.core.lead import Lead
from worker.core.rehearsal import RehearsalAgreement

NONE = Step(-1)
"""Value of a step field that contains no step."""
REASON_BYTES = 500
"""Maximum length in bytes of the reason why a step is abandoned.

Reports of up to 1,024 ranks share one message. The limit keeps this message small, because the text of a script's
exception can have any length.
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """State of one shard on its owner's node: its holders, sealed steps and vote on the proposed step.

    The owner's agent holds one object per local rank. Each method returns the next state.
    """

    base: Step
    """The base of the generation; 0 if training starts at the state that the script builds."""
    peers: tuple[NodeId, ...]
    """The nodes, except the owner's own node, that the plan names as holders of this shard."""
    view: frozenset[NodeId]
    """The peers in view: the holders on other nodes for which a commit waits at this moment.

    The vote ACKED on a step requires that each of these peers has acknowledged the step.
    """
    returning: frozenset[NodeId] = frozenset()
    """Peers outside the view that answer again, or that have lost the committed step.

    A vote also waits for these peers, because the owner is sending them the committed step from its slot. A commit
    without them would allow the rank to overwrite this slot.
    """
    silent: frozenset[NodeId] = frozenset()
    """Dropped peers from which no message has arrived since the owner dropped them from the view.

    An acknowledgement that such a peer sent before the drop does not return the peer to the view.
    """
    committed: Step = NONE
    proposed: Step = NONE
    vote: Vote = Vote.NONE
    reason: str = ""
    is_late: bool = False
    sealed: frozenset[Step] = frozenset()
    """Steps whose state is sealed in the owner's slots: the base, and steps of this generation."""
    capturing: Step = NONE
    """The proposed step while its rank still captures it; `NONE` otherwise.

    Parts that are already captured may be sent to the holders.
    """
    held: frozenset[tuple[NodeId, Step]] = frozenset()
    """Pairs (peer, step): the peer has acknowledged that it holds the step, and the acknowledgement is still valid."""
    has_parity: bool = False
    """True if the peers combine this shard with other shards into shares.

    A peer then acknowledges a step when its share of that step is sealed. The owner sends such a peer only sealed
    steps, because a combined chunk cannot be removed from a share.
    """

    @classmethod
    def begin(cls, base: Step, peers: tuple[NodeId, ...], *, has_parity: bool = False) -> Shard:
        """Return the state of a shard at the start of a generation.

        Commits wait for all other planned holders (`peers`). The owner's node has sealed the base, unless it is step 0.
        """
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
        """Return the shard's state when a restarted agent takes over the running generation.

        The rank's page contains the committed step, the proposed step and the vote. The slots contain the sealed steps.
        All holders are in view again, until they are silent for too long (the holder deadline). Each holder reports its
        sealed steps when it connects.
        """
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

    def hear(self, committed: Step, proposed: Step) -> Shard:
        """Apply the coordinator's newest committed and proposed step.

        An announcement with a lower committed step arrived late and is ignored.
        """
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
        """Record that the rank is copying its state at `step` into a slot, and has finished the first parts.

        Senders may now send these parts to the holders. If `step` is not the proposed step, or the rank has already
        voted on it or sealed it, the call changes nothing.
        """
        is_awaited = step == self.proposed != self.base and self.vote is Vote.NONE and step not in self.sealed
        return replace(self, capturing=step) if is_awaited else self

    def seal(self, step: Step) -> Shard:
        """Record that the shard's state at `step` is sealed in a slot of its owner's node."""
        return replace(
            self, sealed=self.sealed | {step}, capturing=NONE if step == self.capturing else self.capturing
        )._settled()

    def forget(self, step: Step) -> Shard:
        """Record that the owner's node has overwritten its slot of `step` with another step.

        The rank may capture `step` again with another result, so the holders' acknowledgements of `step` no longer
        count. Acknowledgements of the newest committed step stay valid, because the rank never captures this step
        again.
        """
        held = self.held if step == self.foundation else frozenset(each for each in self.held if each[1] != step)
        return replace(self, sealed=self.sealed - {step}, held=held)

    def abandon(self, step: Step, reason: str, *, late: bool = False) -> Shard:
        """Record that the rank does not capture `step`, and vote ABANDON.

        `late` is True if the rank received the proposal too late, so that the coordinator must propose earlier. The
        base is never captured, so it cannot be abandoned.
        """
        if step != self.proposed or self.vote is not Vote.NONE or step == self.base or step in self.sealed:
            return self
        return replace(self, capturing=NONE, vote=Vote.ABANDON, reason=_cut(reason), is_late=late)

    def acknowledge(self, peer: NodeId, step: Step) -> Shard:
        """Record that `peer` has verified and sealed a replica of `step`."""
        return replace(self, held=self.held | {(peer, step)}, silent=self.silent - {peer})._confirmed(peer)._settled()

    def inventory(self, peer: NodeId, steps: frozenset[Step]) -> Shard:
        """Record that `peer` has connected, and that it holds exactly the sealed `steps` of this shard.

        Acknowledgements of the peer for steps that are not in `steps` are revoked.
        """
        held = frozenset(each for each in self.held if each[0] != peer) | {(peer, step) for step in steps}
        lost = {peer} if self.committed != NONE and peer in self.view and self.committed not in steps else set[NodeId]()
        updated = replace(
            self, held=held, view=self.view - lost, returning=self.returning | lost, silent=self.silent - {peer}
        )
        return updated._confirmed(peer)._settled()

    def answer(self, peer: NodeId) -> Shard:
        """Record that a `peer` that was dropped from the view accepts data again.

        The owner's votes ACKED then wait for this peer too, unless the peer is dropped again.
        """
        is_back = peer in self.awaited or peer not in self.peers
        return self if is_back else replace(self, returning=self.returning | {peer}, silent=self.silent - {peer})

    def drop(self, peer: NodeId) -> Shard:
        """Drop `peer` from the view, because it missed the holder deadline.

        Commits continue without the peer, and the agent reports the job's protection as degraded.
        """
        silent = self.silent | ({peer} & frozenset(self.peers))
        return replace(self, view=self.view - {peer}, returning=self.returning - {peer}, silent=silent)._settled()

    def wanted(self, peer: NodeId) -> Step:
        """Return the step that the owner sends to the holder `peer` next, or `NONE`.

        A holder first receives the committed step (before the first commit: the base), then the proposed step. Without
        parity, the owner sends the proposed step already while its rank captures it.
        """
        capturing = NONE if self.has_parity else self.capturing
        for step in (self.foundation, self.proposed):
            if step != NONE and (step in self.sealed or step == capturing) and (peer, step) not in self.held:
                return step
        return NONE

    def is_capturable(self, half: RankHalf) -> bool:
        """Return whether the rank can still capture the proposed step.

        A rank that has begun the step after the proposed step can no longer capture it. `half` is the rank's half of
        its page.
        """
        if self.proposed == NONE or self.proposed in self.sealed:
            return False
        is_before = half.boundary < self.proposed
        return is_before or (half.boundary == self.proposed and half.standing is not RankStanding.MOVING)

    def _confirmed(self, peer: NodeId) -> Shard:
        """Put `peer` back into the view if it holds the committed step (before the first commit: the base).

        After the owner's vote, the view does not change.
        """
        if peer in self.view or peer not in self.peers or self.vote is not Vote.NONE or self.foundation == NONE:
            return self
        is_there = (peer, self.foundation) in self.held
        return replace(self, view=self.view | {peer}, returning=self.returning - {peer}) if is_there else self

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Holders for whose acknowledgement the owner's vote waits: those in view, and those returning to the view."""
        return self.view | self.returning

    @property
    def is_under_way(self) -> bool:
        """True while a peer lacks a step of this shard, or its owner has voted and waits for other owners' votes."""
        return self.vote is Vote.ACKED or any(self.wanted(peer) != NONE for peer in self.awaited)

    @property
    def foundation(self) -> Step:
        """The newest committed step; before the first commit, the step from which the generation started."""
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
    """Return a rank's answer to an announced stop, which the rank's agent reports.

    A rank answers only at boundaries. A rank that has already passed the step of the stop saw the announcement too
    late. This rank may wait in a collective for other ranks, which wait at the stop, and so never reach its next
    boundary. The agent therefore answers ECHO_NO for it, and the coordinator announces a later stop.

    Args:
        half: the part of the shared page that the rank writes.
        stop: step of the stop that the agent has announced on the page; -1 without a stop.
        state: state of that stop on the agent's half.

    Returns:
        (the stop that is answered, `ECHO_YES` or `ECHO_NO`). If the agent need not answer for the rank, the result is
        the rank's own answer.
    """
    if state is StopState.ANNOUNCED and half.echo_step != stop and half.boundary >= stop:
        return stop, ECHO_NO
    return Step(half.echo_step), half.echo


@dataclass(frozen=True, slots=True)
class Coordinator:
    """State of the coordinator of one generation: the committed step, the proposed step and the reports of all ranks.

    At most one step is proposed at a time, the same for all ranks. Each method returns the next state.
    """

    world_size: int
    base: Step
    every_steps: int
    """Steps between two checkpoints in S3; 0 for no interval in steps.

    Checkpoints by time, on a user's request, and at a stop do not depend on this value.
    """
    slot_count: int = 2
    stored: Step = FIRST_STEP
    """Step of the newest complete checkpoint in S3 at the start of the generation; 0 without one."""
    strayed: frozenset[Rank] = frozenset()
    """Ranks whose full protection the coordinator announces (`worker.core.strays.strayed`).

    A rank is fully protected when all planned holders have its shard. The set contains the ranks with a stray (a shard
    on a node to which the new plan does not assign it), and all other ranks of the nodes that run these ranks.
    """
    is_relayout: bool = False
    """True if another number of ranks than the current one captured the base (a relayout).

    No slot then contains a shard of the current layout at the base, so the base is neither proposed nor uploaded.
    """
    max_uploads: int = 1
    """Maximum number of steps that agents upload at the same time."""
    distance: int = 1
    """Minimum steps from a committed step to the next proposed step.

    The coordinator's node sets it so that snapshots slow training only within `Protection.MaxSlowdown`
    (`worker.core.budget`).
    """
    committed: Step = NONE
    proposed: Step = NONE
    newest: Step = NONE
    """The highest step that was proposed in this generation.

    Each later proposal is higher, except for the base and the final step (see the module's invariant).
    """
    ranks: tuple[RankRound, ...] = ()
    """The newest report of each rank that has reported, in order of rank."""
    lead: Lead = field(default_factory=Lead)
    cadence: int = 1
    """Steps between the last two commits, but at most twice the value before.

    A proposal may be this many steps later than necessary, so that it falls on a multiple of `every_steps`. Without the
    limit, one long interval between commits, such as an outage, would allow an equally long delay.
    """
    persist: Step = NONE
    """The newest step to upload to S3, or `NONE`.

    The step is committed, or it is the restored step of a job that is stopped before its first commit. Exception: if
    uploads or exports of older steps use all slots, the final step is marked while it is only proposed. Agents then end
    the older upload and the export to free a slot.
    """
    marked: tuple[Step, ...] = ()
    """The newest commits that were marked for upload, at most `max_uploads`, in increasing order.

    No further commit is marked while any agent uploads a step that is not in this tuple. An agent reports only its
    newest finished uploads (`worker.core.slots.newest_uploads`). After too many newer uploads, the other agents would
    no longer report their shards of the older step, and its checkpoint would never become complete.
    """
    wanted: Step = NONE
    """The first commit at or above this step must be uploaded, on a user's request; `NONE` without a request."""
    urgent: Step = NONE
    """The first commit at or above this step must be uploaded, because AWS announced a node's end.

    The value is `NONE` without such a request. If all slots are in use, agents end an export of a snapshot to free a
    slot for this upload.
    """
    is_recovering: bool = False
    """True from a restart of the coordinator's agent until every rank's agent has reported.

    The coordinator proposes no step during this time.
    """
    stop_requested: bool = False
    stop: Step = NONE
    stop_state: StopState = StopState.NONE
    rehearsal: RehearsalAgreement = field(default_factory=RehearsalAgreement)
    final: Step = NONE
    """The last step of the training, once all ranks wait after it; `NONE` before that.

    The coordinator proposes this step, and the ranks wait for its commit.
    """
    is_finished: bool = False

    def begin(self) -> Coordinator:
        """Return the coordinator of a new generation after its first proposal (docs/design.md#rounds)."""
        return self._propose()

    def recover(self) -> Coordinator:
        """Return the coordinator of a running generation after its agent restarted, before the first report."""
        return replace(self, is_recovering=True)

    def report(self, *rounds: RankRound) -> Coordinator:
        """Apply the newest reports of some ranks, then commit, propose or stop if the reports permit (`advance`)."""
        newest = {each.rank: each for each in (*self.ranks, *rounds)}
        return replace(self, ranks=tuple(newest[rank] for rank in sorted(newest))).advance()

    def keep_distance(self, distance: int) -> Coordinator:
        """Set the minimum number of steps from a commit to the next proposal.

        A step that is already proposed is not affected.
        """
        return replace(self, distance=distance)

    def request_checkpoint(self, step: Step, *, ends_exports: bool = False) -> Coordinator:
        """Request the upload of the next commit at or after `step`. A repeated request changes nothing.

        The current commit is not uploaded, because nodes may be about to reuse its slot. The announcement of a later
        commit also names the step to upload, so that each node pins its slot before the slot can be reused.

        Args:
            step: the lowest step to upload.
            ends_exports: True if agents must end the export of a snapshot when the upload needs the export's slot.

        Returns:
            The coordinator with the request.
        """
        urgent = max(self.urgent, step) if ends_exports else self.urgent
        return replace(self, wanted=max(self.wanted, step), urgent=urgent)

    def request_stop(self) -> Coordinator:
        """Request that all ranks stop after the same step (an agreed stop). Repeated requests change nothing."""
        return replace(self, stop_requested=True).advance()

    def request_rehearsal(self, number: int, steps: int) -> Coordinator:
        """Request that all ranks rehearse `steps` steps. A repeated number changes nothing."""
        return replace(self, rehearsal=self.rehearsal.request(number, steps)).advance()

    def end_final_round(self) -> Coordinator:
        """Record that the ranks have waited too long for the commit of the final step.

        The ranks then exit, and the newest committed step is the final state.
        """
        return replace(self, is_finished=True).advance() if self.final != NONE else self

    def halt(self) -> Coordinator:
        """Record that the control plane has ordered the agents to kill the ranks after a requested stop.

        No further step is proposed, and the committed step becomes the job's final state. Without a requested stop, the
        call changes nothing.
        """
        return replace(self, is_finished=True, proposed=NONE).advance() if self._is_stopping else self

    @property
    def highest_boundary(self) -> Step:
        """The highest step that any rank has reported as finished; before any report, the step that was restored.

        At most `MAX_RANK_STEP`, whatever a peer reports.
        """
        return Step(min(max((each.boundary for each in self.ranks), default=self.base), MAX_RANK_STEP))

    @property
    def held(self) -> tuple[Rank, ...]:
        """Ranks in `strayed` whose shards all planned holders have sealed, at the base or a later step.

        The coordinator announces these ranks, so that nodes drop their strays. A rank with a holder out of view is left
        out: its steps are committed without that holder's copy.
        """
        return tuple(
            each.rank
            for each in self.ranks
            if each.rank in self.strayed
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
        """The lowest step that is due as a checkpoint by the interval in steps (`every_steps`).

        The first commit at or above this step is uploaded. The value is `NONE` without such an interval.
        """
        if not self.every_steps:
            return NONE
        floor = self.persist if self.persist != NONE else self.stored
        return Step((floor // self.every_steps + 1) * self.every_steps)

    @property
    def is_complete(self) -> bool:
        """True if the coordinator has received at least one report about every rank of the generation."""
        return len(self.ranks) == self.world_size

    def advance(self) -> Coordinator:
        """Commit or abandon the proposed step, propose the next step, or stop, as far as the ranks' reports permit.

        A second call with the same reports changes nothing.
        """
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
        """Return the step that the coordinator marks for upload to S3 after the commit of the step `committed`.

        The result is `committed` if a checkpoint is due and another upload may begin, otherwise the step that was
        marked before. The base counts as a commit, because the earlier generation may have ended before it uploaded the
        base.
        """
        if not self._may_mark:
            # The running uploads must end first. The checkpoint stays due, so a later call marks a step for upload.
            return self.persist
        if self.persist < self.wanted <= committed:
            return committed
        return committed if NONE < self.due_step <= committed else self.persist

    @property
    def _may_mark(self) -> bool:
        """True if another step may be marked for upload to S3 (see `max_uploads` and `marked`)."""
        running = self.uploads_in_flight
        return len(running) < self.max_uploads and running <= {*self.marked}

    def _stopping(self) -> Coordinator:
        """Agree with all ranks on the step after which they stop (docs/design.md#agreed-stop).

        The coordinator announces a step and collects the ranks' answers. It confirms the stop if all ranks accept it,
        and withdraws the stop if a rank rejects it.
        """
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
        """Propose the final step when all ranks have stopped or called `close` after the same step.

        The rounds end after the commit of this step. If the ranks stopped or called `close` after different steps, no
        common final step exists, and the rounds finish without a final step.
        """
        if self.is_recovering or self.is_finished or not self.is_complete:
            return self
        standing = [each for each in self.ranks if each.standing is not RankStanding.MOVING]
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
        """Mark the newest complete step for upload once all ranks have finished.

        The newest complete step is the committed step; without a commit, it is the base. Nodes are released after the
        job, so S3 must store this step.
        """
        foundation = self.committed if self.committed != NONE else (self._held_base or NONE)
        return replace(self, persist=foundation) if self.is_finished else self

    @property
    def _held_base(self) -> Step:
        """The base (the step that the generation starts from) if slots can contain it, otherwise 0.

        After a relayout (a change of the number of ranks), no slot contains a shard of the current layout at the base.
        """
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
        """True if agents must end an export of a snapshot, so that its slot is free for an urgent checkpoint.

        A checkpoint is urgent, for example, after AWS's notice that it will end a node.
        """
        return self.persist < self.urgent and self._is_full and any(each.held_step != NONE for each in self.ranks)

    @property
    def _is_full(self) -> bool:
        """True if on some rank no slot is free: uploads, an export and the committed step use all slots."""
        unavailable = self.committed, NONE
        return any(
            len({*each.pinned_steps, each.held_step}.difference(unavailable)) >= self.slot_count - 1
            for each in self.ranks
        )
