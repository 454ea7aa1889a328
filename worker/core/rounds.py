"""The rounds of the step protocol (docs/design.md#rounds) as two pure state machines.

One machine describes one shard on its owner's node, the other describes the coordinator of a generation.

    Coordinator ──(C, w)──▶ Shard ──wanted──▶ holders ──acknowledge──▶ Shard ──vote──▶ Coordinator

C is the newest committed step and w is the proposed step. Both machines work on newest states, and repeated or lost
messages do no harm. `Shard.hear` applies the coordinator's newest state, and `Coordinator.report` applies a rank's
newest state. `Coordinator.advance` derives the next state from all reports. Neither machine has a clock. The caller
reports the expiry of timeouts, for example "this holder is dropped" or "the final round is over".

Invariant: within a generation, C never decreases. A step is proposed a second time only after every rank has reported
that it has dropped the first proposal.

The module has more than 500 lines. A change of the protocol changes both machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.protocol.ids import FIRST_STEP, NodeId, Rank, Step
from everstep.protocol.plan import Snapshots
from everstep.protocol.rank_messages import ECHO_NO, ECHO_YES, RankHalf, Standing, StopState, Vote
from everstep.protocol.rounds import RankRound
from worker.core.lead import Lead

NONE = Step(-1)
"""Value of a step field that contains no step."""
REASON_BYTES = 500
"""Maximum length in bytes of the reason why a step is abandoned.

Reports of up to 1,024 ranks share one message. The limit keeps this message small, because the text of a script's
exception can have any length.
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """State of one owned shard in the rounds: its holders, sealed steps and vote.

    The agent on the owner's node holds the object.
    """

    base: Step
    """The step from which the generation was restored; 0 if training starts at the first step."""
    peers: tuple[NodeId, ...]
    """The planned holders except the owner's own node."""
    view: frozenset[NodeId]
    """The holders that currently count for this shard ("in view").

    The vote ACKED on a step requires that each of these peers has acknowledged the step.
    """
    returning: frozenset[NodeId] = frozenset()
    """Peers outside the view that answer again, or that have lost the committed step.

    A vote also waits for these peers. Otherwise, the capture of the next step would overwrite the slot that the owner
    is sending to them.
    """
    unheard: frozenset[NodeId] = frozenset()
    """Dropped peers from which no message has arrived since the owner dropped them.

    An acknowledgement that such a peer sent before it was dropped does not return the peer to the view.
    """
    committed: Step = NONE
    proposed: Step = NONE
    vote: Vote = Vote.NONE
    reason: str = ""
    is_late: bool = False
    sealed: frozenset[Step] = frozenset()
    """Steps whose state is sealed in the owner's slots: the restored step (`base`), and steps of this generation."""
    capturing: Step = NONE
    """The proposed step while its rank still captures it; `NONE` otherwise.

    Holders may already receive the captured parts. The owner never votes on the step before it is sealed.
    """
    held: frozenset[tuple[NodeId, Step]] = frozenset()
    """Pairs (peer, step): the peer has acknowledged the step, and the acknowledgement was not revoked since."""
    has_parity: bool = False
    """True if the peers combine this shard with other shards into shares.

    A peer then acknowledges a step when its share of that step is sealed. The owner sends such a peer only sealed
    steps, because a combined chunk cannot be removed from a share.
    """

    @classmethod
    def begin(cls, base: Step, peers: tuple[NodeId, ...], *, has_parity: bool = False) -> Shard:
        """Return the shard at the start of a generation.

        All planned holders are in view, and the step from which the generation starts (the base) is sealed.
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
        """Return the shard's state after a restart of its agent.

        The rank's shared-memory page contains the committed step, the proposed step and the vote. The slots contain the
        sealed steps. All holders are in view again until they miss the deadline. Each holder reports its steps when it
        connects.
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

    # The methods below apply events.

    def hear(self, committed: Step, proposed: Step) -> Shard:
        """Apply the coordinator's newest committed and proposed step.

        An announcement with a lower committed step arrived late and is ignored.
        """
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
        # A peer that was dropped may have acknowledged the committed step after this owner had voted.
        if committed > self.committed:
            for peer in self.peers:
                heard = heard if peer in heard.unheard else heard._confirmed(peer)
        return heard._settled()

    def capture(self, step: Step) -> Shard:
        """Record that the rank is writing `step` into the owner's own slot and reports its progress."""
        is_awaited = step == self.proposed != self.base and self.vote is Vote.NONE and step not in self.sealed
        return replace(self, capturing=step) if is_awaited else self

    def seal(self, step: Step) -> Shard:
        """Record that `step` is sealed in the owner's own slot."""
        return replace(
            self, sealed=self.sealed | {step}, capturing=NONE if step == self.capturing else self.capturing
        )._settled()

    def forget(self, step: Step) -> Shard:
        """Record that the owner's own slot no longer contains `step`, because the slot was granted again.

        A second capture of the step may differ from the first, so the peers' acknowledgements of the step are revoked.
        The acknowledgements of the `foundation` stay valid, because this step is never captured again.
        """
        held = self.held if step == self.foundation else frozenset(each for each in self.held if each[1] != step)
        return replace(self, sealed=self.sealed - {step}, held=held)

    def abandon(self, step: Step, reason: str, *, late: bool = False) -> Shard:
        """Record that the rank does not capture `step`.

        The restored step (`base`) is never captured, so it cannot be abandoned.
        """
        if step != self.proposed or self.vote is not Vote.NONE or step == self.base or step in self.sealed:
            return self
        return replace(self, capturing=NONE, vote=Vote.ABANDON, reason=_cut(reason), is_late=late)

    def acknowledge(self, peer: NodeId, step: Step) -> Shard:
        """Record that `peer` has verified and sealed a replica of `step`."""
        return replace(self, held=self.held | {(peer, step)}, unheard=self.unheard - {peer})._confirmed(peer)._settled()

    def inventory(self, peer: NodeId, steps: frozenset[Step]) -> Shard:
        """Record that `peer` has connected and holds exactly these sealed steps.

        The peer's acknowledgements of other steps are revoked.
        """
        held = frozenset(each for each in self.held if each[0] != peer) | {(peer, step) for step in steps}
        lost = {peer} if self.committed != NONE and peer in self.view and self.committed not in steps else set[NodeId]()
        heard = replace(
            self, held=held, view=self.view - lost, returning=self.returning | lost, unheard=self.unheard - {peer}
        )
        return heard._confirmed(peer)._settled()

    def answer(self, peer: NodeId) -> Shard:
        """Record that a dropped `peer` accepts data again.

        Votes then wait until the peer has the committed step or is dropped again.
        """
        is_back = peer in self.awaited or peer not in self.peers
        return self if is_back else replace(self, returning=self.returning | {peer}, unheard=self.unheard - {peer})

    def drop(self, peer: NodeId) -> Shard:
        """Record that `peer` missed the holder deadline.

        Commits continue without the peer, and the agent reports the job's protection as degraded.
        """
        unheard = self.unheard | ({peer} & frozenset(self.peers))
        return replace(self, view=self.view - {peer}, returning=self.returning - {peer}, unheard=unheard)._settled()

    # The properties and methods below derive the state and decide the next step.

    def wanted(self, peer: NodeId) -> Step:
        """Return the step to send to `peer` next, or `NONE`.

        A holder first receives the committed step (before the first commit: the restored step), then the proposed step.
        Only steps that the owner has sealed or, without parity, is capturing can be sent.
        """
        capturing = NONE if self.has_parity else self.capturing
        for step in (self.foundation, self.proposed):
            if step != NONE and (step in self.sealed or step == capturing) and (peer, step) not in self.held:
                return step
        return NONE

    def is_capturable(self, half: RankHalf) -> bool:
        """Return whether the rank can still capture the proposed step.

        A rank that has begun the next step can no longer capture the proposed one. `half` is what the rank wrote to its
        shared page.
        """
        if self.proposed == NONE or self.proposed in self.sealed:
            return False
        is_before = half.boundary < self.proposed
        return is_before or (half.boundary == self.proposed and half.standing is not Standing.MOVING)

    def _confirmed(self, peer: NodeId) -> Shard:
        """Return `peer` to the view if it holds the foundation, unless this owner has already voted.

        The foundation is the committed step, or before the first commit the step from which the generation starts.
        """
        if peer in self.view or peer not in self.peers or self.vote is not Vote.NONE or self.foundation == NONE:
            return self
        is_there = (peer, self.foundation) in self.held
        return replace(self, view=self.view | {peer}, returning=self.returning - {peer}) if is_there else self

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Peers whose acknowledgement a vote waits for: the peers in view and the returning peers."""
        return self.view | self.returning

    @property
    def is_under_way(self) -> bool:
        """True while replication of a snapshot is unfinished.

        Either a peer still lacks a step of this shard, or this shard is complete and the coordinator waits for other
        shards.
        """
        return self.vote is Vote.ACKED or any(self.wanted(peer) != NONE for peer in self.awaited)

    @property
    def foundation(self) -> Step:
        """The newest committed step; before the first commit, the step from which the generation was restored."""
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
    """Return a rank's answer to an announced stop, which the rank's agent reports.

    A rank answers only at boundaries. A rank that passed the boundary before the stop could not see the announcement in
    time. It may never reach its next boundary, because the other ranks wait at the stop while this rank waits for them
    in a collective. The agent therefore answers ECHO_NO for such a rank. If the rank answers later, the coordinator
    withdraws the stop and announces a new one, which delays the stop by one round.

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
    """State of the rounds of one generation: at most one proposed step, which is the same for all ranks."""

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
    """Ranks whose protection the coordinator announces (`worker.core.strays.strayed`).

    A stray is a shard on a node to which the new plan does not assign it. The set contains each rank with a stray, and
    all ranks on the same node as such a rank.
    """
    is_relayout: bool = False
    """True if another number of ranks captured the base, the step from which the generation starts.

    No node has a slot of the base in the new layout, so the base is neither proposed nor uploaded.
    """
    snapshots: Snapshots = Snapshots.EVERY_STEP
    """Selects which steps are proposed. The restored step (`base`) is always proposed, except if `is_relayout`."""
    is_blocking: bool = False
    """Whether ranks wait for the upload of each checkpoint."""
    max_uploads: int = 1
    """Maximum number of steps that agents upload at the same time."""
    distance: int = 1
    """Minimum steps from a committed step to the next proposal, set by the job's budget (`worker.core.budget`).
    """
    committed: Step = NONE
    proposed: Step = NONE
    newest: Step = NONE
    """The highest step that was proposed in this generation. The next proposed step is higher."""
    ranks: tuple[RankRound, ...] = ()
    """The newest report of each rank that has reported, in order of rank."""
    lead: Lead = field(default_factory=Lead)
    cadence: int = 1
    """Steps between the last two commits, with limited growth after an outage."""
    persist: Step = NONE
    """The newest step to upload to S3, or `NONE`.

    The step is committed, or it is the restored step of a job that is stopped before its first commit. Exception: if
    the upload or the export of an older step occupies the last slot, the final step is marked while it is proposed.
    Agents then end the older upload and the export.
    """
    marked: tuple[Step, ...] = ()
    """The newest commits that were marked for upload, at most `max_uploads`, in increasing order.

    A checkpoint is complete only if all its shards are reported, and agents report only their newest finished uploads
    (`worker.core.slots.newest_uploads`). While an older commit is uploaded, no further commit is therefore marked.
    """
    wanted: Step = NONE
    """The first commit at or above this step must be uploaded, on a user's request; `NONE` without a request."""
    urgent: Step = NONE
    """The first commit at or above this step must be uploaded, even if an export must end for it; or `NONE`."""
    is_recovering: bool = False
    """True from a restart until every rank's agent has reported. The coordinator proposes no step during this time."""
    stop_requested: bool = False
    stop: Step = NONE
    stop_state: StopState = StopState.NONE
    final: Step = NONE
    """The step after which all ranks wait for the commit of the final step; `NONE` before they wait."""
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
        is_relayout: bool = False,
        snapshots: Snapshots = Snapshots.EVERY_STEP,
        is_blocking: bool = False,
        max_uploads: int = 1,
    ) -> Coordinator:
        """Return the coordinator of a new generation, without a committed step (docs/design.md#rounds).

        The coordinator first proposes the restored step (the base). After a change of the number of ranks (a relayout),
        it first proposes a step of the new generation instead.
        """
        core = cls(
            world_size=world_size,
            base=base,
            every_steps=every_steps,
            slot_count=slot_count,
            stored=stored,
            strayed=strayed,
            is_relayout=is_relayout,
            snapshots=snapshots,
            is_blocking=is_blocking,
            max_uploads=max_uploads,
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
        is_relayout: bool = False,
        snapshots: Snapshots = Snapshots.EVERY_STEP,
        is_blocking: bool = False,
        max_uploads: int = 1,
    ) -> Coordinator:
        """Return the coordinator of a running generation after a restart of its agent, without any report yet."""
        core = cls(
            world_size=world_size,
            base=base,
            every_steps=every_steps,
            slot_count=slot_count,
            stored=stored,
            strayed=strayed,
            is_relayout=is_relayout,
            snapshots=snapshots,
            is_blocking=is_blocking,
            max_uploads=max_uploads,
        )
        return replace(core, is_recovering=True)

    # The methods below apply events.

    def report(self, *rounds: RankRound) -> Coordinator:
        """Apply the newest states of some ranks, and all transitions that result."""
        newest = {each.rank: each for each in (*self.ranks, *rounds)}
        return replace(self, ranks=tuple(newest[rank] for rank in sorted(newest))).advance()

    def keep_distance(self, distance: int) -> Coordinator:
        """Set the minimum number of steps from a commit to the next proposal.

        A step that is already proposed is not affected.
        """
        return replace(self, distance=distance)

    def request_checkpoint(self, step: Step, *, ends_exports: bool = False) -> Coordinator:
        """Request the upload of the next commit at or after `step`. A repeated request changes nothing.

        A later commit is uploaded, because nodes may be about to reuse the slot of the present commit. The announcement
        of a commit also names the step to upload, so that nodes pin its slot before the slot can be reused.

        Args:
            step: the lowest step to upload.
            ends_exports: True if agents end an export that holds the slot that the step needs.

        Returns:
            The coordinator with the request.
        """
        urgent = max(self.urgent, step) if ends_exports else self.urgent
        return replace(self, wanted=max(self.wanted, step), urgent=urgent)

    def request_stop(self) -> Coordinator:
        """Request an agreed stop. Repeated requests change nothing."""
        return replace(self, stop_requested=True).advance()

    def end_final_round(self) -> Coordinator:
        """Record that the final round exceeded its time limit.

        The ranks exit, and the newest committed step is the final state.
        """
        return replace(self, is_finished=True).advance() if self.final != NONE else self

    def halt(self) -> Coordinator:
        """Record that the agents have begun to end the ranks after a requested stop.

        No further step is proposed, and the committed step becomes the job's final state. Without a requested stop, the
        call changes nothing.
        """
        return replace(self, is_finished=True, proposed=NONE).advance() if self._is_stopping else self

    # The properties and methods below derive the state and decide the next step.

    @property
    def highest_boundary(self) -> Step:
        """The highest finished step (boundary) that any rank has reported.

        Before the first report, it is the step from which the generation started (the base).
        """
        return max((each.boundary for each in self.ranks), default=self.base)

    @property
    def held(self) -> tuple[Rank, ...]:
        """Shards in `strayed` that are protected again: all planned holders have sealed the restored or a later step.

        A shard is included only if its owner reports that every holder is in view.
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
        """True while any agent uploads a shard."""
        return bool(self.uploads_in_flight)

    @property
    def uploads_in_flight(self) -> frozenset[Step]:
        """The steps that any agent uploads."""
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
    def hold(self) -> Step:
        """The step for whose upload all ranks wait, or `NONE`.

        The wait begins after the commit and requires no message of a rank, so it cannot block collective operations.
        The wait ends when no agent uploads the step, also after failed uploads. It also ends when the ranks must stop,
        so that the ranks reach the step of the stop while the upload continues.
        """
        is_over = self.is_recovering or self.is_finished or self._is_stopping
        return self.persist if self.is_blocking and self._is_storing and not is_over else NONE

    @property
    def _is_storing(self) -> bool:
        """True from the time when a step is marked for upload until no agent uploads the step.

        An agent reports an upload only after it has pinned the step's slot. Until this report, the mark keeps the value
        True.
        """
        return self.persist != NONE and any(
            each.committed < self.persist or self.persist in each.pinned_steps for each in self.ranks
        )

    @property
    def is_complete(self) -> bool:
        """True if every rank of the generation has reported at least once."""
        return len(self.ranks) == self.world_size

    def advance(self) -> Coordinator:
        """Apply all transitions that the reports allow. A second call changes nothing."""
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
        if known.stop == NONE:
            # A restarted coordinator treats an announced stop as withdrawn. It does not reuse the number of this stop,
            # because ranks' shared-memory pages still contain answers to it.
            known = replace(known, stop=max(each.heard_stop for each in self.ranks), stop_state=StopState.NONE)
        marked = (committed,) if self.every_steps else ()
        return replace(
            known, committed=committed, newest=newest, persist=committed if self.every_steps else NONE, marked=marked
        )

    def _decided(self) -> Coordinator:
        """Commit or abandon the proposed step once the ranks' votes permit a decision."""
        if self.is_recovering or self.proposed == NONE or not self.is_complete:
            return self
        votes = [each for each in self.ranks if each.proposed == self.proposed]
        # No rank captures the restored step (base), so a vote to abandon it is ignored.
        abandoned = [each for each in votes if each.vote is Vote.ABANDON and each.proposed != self.base]
        late = any(each.is_late for each in abandoned)
        if abandoned:
            # A final step is captured once. If the capture failed, the training ends without this step.
            if self.proposed == self.final and not late:
                return replace(self, proposed=NONE, is_finished=True)
            return replace(self, proposed=NONE, lead=self.lead.late() if late else self.lead)
        if len(votes) < self.world_size or not all(each.vote is Vote.ACKED for each in votes):
            return self
        # After an outage, the distance between two commits is unusually long. Limit the cadence's growth.
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
        """Return the step to upload after `committed` was committed.

        If an interval in steps is set, the first commit at or after the interval's next multiple is uploaded. The
        restored step (base) is uploaded if such a multiple is between the newest checkpoint and this step. In this
        case, an earlier generation ended before it had uploaded its checkpoint.
        """
        if not self._may_mark:
            # The checkpoint stays due. The first step that is committed after an upload has ended becomes the
            # checkpoint.
            return self.persist
        if self.persist < self.wanted <= committed:
            return committed
        return committed if NONE < self.due_step <= committed else self.persist

    @property
    def _may_mark(self) -> bool:
        """True if agents may upload a further commit, and report all commits that they upload."""
        running = self.uploads_in_flight
        return len(running) < self.max_uploads and running <= {*self.marked}

    def _stopping(self) -> Coordinator:
        """Agree on the step after which all ranks stop.

        Announce it, collect the ranks' answers, then confirm or withdraw it.

        See docs/design.md#agreed-stop.
        """
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
        """Propose the final step when all ranks wait after the same step, and finish when this step is committed.

        If the ranks wait after different steps, finish without a final step.
        """
        if self.is_recovering or self.is_finished or not self.is_complete:
            return self
        standing = [each for each in self.ranks if each.standing is not Standing.MOVING]
        if len(standing) < self.world_size:
            return self
        boundaries = {each.boundary for each in standing}
        if len(boundaries) > 1:
            return replace(self, is_finished=True, proposed=NONE)
        (boundary,) = boundaries
        if self.committed == boundary or boundary <= self.base or self.snapshots is Snapshots.NEVER:
            return replace(self, is_finished=True, final=boundary, proposed=NONE)
        if self.final != boundary:
            return replace(self, final=boundary, proposed=self.proposed if self.proposed == boundary else NONE)
        return self

    def _left_behind(self) -> Coordinator:
        """Mark the newest complete step for upload when a stopped job has finished.

        This is the committed step, or without a commit the restored step. It is also marked if the final step was
        marked but not committed. In that case, the upload of an older step was cancelled to free a slot for the final
        step.
        """
        foundation = self.committed if self.committed != NONE else (self._held_base or NONE)
        is_due = self._is_stopping or self.persist > foundation
        return replace(self, persist=foundation) if self.is_finished and is_due else self

    @property
    def _held_base(self) -> Step:
        """The restored step (base), if slots contain it in the present layout; 0 after a relayout.

        A relayout is a change of the number of ranks, which changes how the state is divided into shards.
        """
        return FIRST_STEP if self.is_relayout else self.base

    @property
    def _is_stopping(self) -> bool:
        # After a restart of the coordinator, only the request or only the confirmed stop may be known.
        return self.stop_requested or self.stop_state is StopState.CONFIRMED

    def _propose(self) -> Coordinator:
        if self.is_recovering or self.is_finished:
            return self
        if self.proposed != NONE:
            # An export can begin to hold a slot after the proposal. The final step then needs this slot.
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
            # The next capture must wait for the end of an upload or of an export.
            return self
        # No rank captures the base. An agent reports the boundary NONE for a rank that has not restored its state yet.
        soonest = max(self.highest_boundary + self.lead.steps, self.newest + 1, self.base + 1)
        if self.snapshots is not Snapshots.EVERY_STEP:
            return self._propose_checkpoint(Step(soonest))
        step = max(soonest, self.committed + self.distance)
        if self.every_steps:
            multiple = -(-soonest // self.every_steps) * self.every_steps
            # Prefer a multiple of the interval, so that a checkpoint of this step can be committed.
            step = multiple if multiple - step <= self.cadence else step
        return replace(self, proposed=Step(step), newest=Step(step))

    @property
    def ends_exports(self) -> bool:
        """True if agents must end an export, because its slot is needed for a checkpoint after AWS's notice."""
        return self.persist < self.urgent and self._is_full and any(each.held_step != NONE for each in self.ranks)

    @property
    def _is_full(self) -> bool:
        """True if uploaded steps, a step that an export holds, and the committed step occupy all slots of a rank."""
        unavailable = self.committed, NONE
        return any(
            len({*each.pinned_steps, each.held_step}.difference(unavailable)) >= self.slot_count - 1
            for each in self.ranks
        )

    def _propose_checkpoint(self, soonest: Step) -> Coordinator:
        """Propose the next step that becomes a checkpoint, if one is due and another upload may begin.

        `distance` is ignored, because `snapshots` already decides how often ranks capture their state.
        """
        is_wanted = self.wanted > self.persist
        # An agent reports the commit of a marked step only after it has pinned the step's slot. Until all agents have
        # reported the commit, `uploads_in_flight` may lack this step.
        is_marking = self.persist != NONE and any(each.committed < self.persist for each in self.ranks)
        is_busy = is_marking or not self._may_mark
        if self.snapshots is Snapshots.NEVER or is_busy or not (is_wanted or self.every_steps):
            return self
        step = soonest if is_wanted else max(soonest, self.due_step)
        return replace(self, proposed=Step(step), newest=Step(step))
