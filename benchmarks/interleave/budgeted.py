"""Selects Everstep's snapshots in a case whose network is too busy for a snapshot at every step.

Everstep's budget (`worker.member.traffic.Traffic` with its `Budget`) limits how much snapshots slow training. It
determines the number of steps between two snapshots (the distance).

    node 0:  Traffic ──distance, pacing──▶ proposed steps ──file──▶ every node: snapshot at the boundary of that step

The budget receives the times of boundaries, and whether a snapshot was being sent. Profiled iterations have no
snapshots, so they show the step time without snapshots.

In the product, all nodes learn the next step to capture through a round. Here, node 0 writes the step to a file one
iteration ahead.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from benchmarks.interleave.schemes import MAX_SLOWDOWN
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.rank_messages import Boundary, IdleSpan, IdleSpans, Phase, RankHalf
from everstep.protocol.rounds import Pacing
from worker.member.traffic import Traffic
from worker.replication.pacing import NodePacer, Pacer, Unpaced

GENERATION = Generation(1)
MOVING = RankHalf(generation=GENERATION, phase=Phase.TRAIN)
PAUSED = RankHalf(generation=GENERATION, phase=Phase.WAIT)
PROPOSED = struct.Struct("=qqb")
"""Layout of the file that all nodes share: the last two proposed steps, and the pacing of transfers (`Pacing`).

The file contains two steps, because another node may read the file just before or just after node 0 writes its next
proposal.
"""


class Budgeted:
    """One node that sends snapshots as Everstep does, at the steps that Everstep's budget selects.

    Args:
        node: number of the node; node 0 proposes steps.
        copies: number of copies of each snapshot in this case, including the copy of the owner.
        proposed: path of the file in which node 0 publishes proposed steps to all nodes; created by the constructor.
        node_pacer: counts every transfer of the node, and learns the link's rate from transfers without pacing.
    """

    def __init__(self, node: int, copies: int, proposed: Path, node_pacer: NodePacer) -> None:
        self._leads = node == 0
        self._rank = Rank(node)
        self.node_pacer = node_pacer
        self._traffic = Traffic(
            [self._rank],
            self.node_pacer,
            replica_count=copies - 1,
            max_slowdown=MAX_SLOWDOWN,
            on_distance=self._keep_distance,
            on_pacing=self._keep_pacing,
        )
        self._distance = 1
        self._pacing = Pacing.AT_ONCE
        self._step = 0
        """Number of iterations under Everstep. Iterations under other schemes do not count as steps of this job."""
        self._begun = 0
        with proposed.open("a+b") as file:
            file.truncate(PROPOSED.size)
            self._page = mmap.mmap(file.fileno(), PROPOSED.size)

    def _keep_distance(self, distance: int) -> None:
        self._distance = distance

    def _keep_pacing(self, pacing: Pacing) -> None:
        self._pacing = pacing

    @property
    def pacer(self) -> Pacer | None:
        """Pacer that delays the pieces of a transfer that starts now. None if Everstep would send at full rate now."""
        return None if isinstance(self.node_pacer.current, Unpaced) else self.node_pacer

    @property
    def interval(self) -> int:
        """Number of steps from one snapshot to the next, by the current budget for the slowdown of training."""
        return self._traffic.budget.interval

    def spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        """Pass the duration of an iteration and its idle network spans to Everstep's traffic control.

        The traffic control sends the chunks of snapshots in these spans. It makes snapshots rarer if they slow the
        training down by more than the allowed fraction (the budget).
        """
        self._traffic.spans(
            self._rank, IdleSpans(generation=GENERATION, iteration_seconds=iteration_seconds, spans=spans)
        )

    def quiet_boundary(self, at: float) -> None:
        """Report the end of a profiled iteration, in which no snapshot is sent, to Everstep's traffic control."""
        self._tell(at, is_sending=False)

    def boundary(self, at: float, *, is_sending: bool) -> bool:
        """Report the end of an iteration to Everstep's traffic control, and decide whether a snapshot begins.

        Args:
            at: end of the iteration in monotonic seconds.
            is_sending: whether the last snapshot is still being sent.

        Returns:
            Whether a snapshot of this step begins.
        """
        self._step += 1
        self._tell(at, is_sending=is_sending)
        *proposed, pacing = PROPOSED.unpack_from(self._page)
        self._traffic.apply_announcement(Pacing(pacing))
        due = max((step for step in proposed if self._begun < step <= self._step), default=0)
        begins = bool(due) and not is_sending
        if begins:
            self._begun = due
            self._traffic.captured(self._rank)
        if self._leads and proposed[1] <= self._begun:
            PROPOSED.pack_into(
                self._page, 0, proposed[1], max(self._step + 1, self._begun + self._distance), self._pacing
            )
        return begins

    def pause(self) -> None:
        """Report to `Traffic` that a different scheme (way of sending snapshots) runs next.

        `Traffic` then ignores the time until the next boundary.
        """
        message = Boundary(generation=GENERATION, boundary=Step(self._step))
        self._traffic.boundary(self._rank, message, PAUSED, is_sending=False)

    def _tell(self, at: float, *, is_sending: bool) -> None:
        message = Boundary(generation=GENERATION, boundary=Step(self._step), at_seconds=at)
        self._traffic.boundary(self._rank, message, MOVING, is_sending=is_sending)
