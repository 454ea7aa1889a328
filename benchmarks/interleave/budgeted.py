"""Everstep where not every step's snapshot fits: the product's own budget decides how far apart snapshots are.

The decision is made by `worker.member.traffic.Traffic` with its `Budget`.

    node 0:  Traffic ──distance, pacing──▶ proposed steps ──file──▶ every node: snapshot at the boundary of that step

The budget receives the run's measurements: the times of boundaries, and whether a snapshot was being sent. Nothing is
copied here, so snapshots never block the rank. The budget also receives the profiled iterations without snapshots: a
job that saves every step would see as many only after 800 steps. A file that node 0 writes one iteration ahead stands
for the round in which all nodes agree.
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
"""The last two proposed steps, and `Pacing`. A node may read the file just before or just after node 0 has proceeded.

"""


class Budgeted:
    """One node's part of the scheme.

    Args:
        node: number of the node; 0 proposes.
        copies: copies in this case.
        proposed: file that all nodes share; created here.
        node_pacer: counts every transfer of the node, and learns the link's rate from unpaced ones.
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
        """Iterations under Everstep so far; iterations under other schemes are no steps of this job."""
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
        """Pacer for a transfer that starts now; None if it is sent at once, as in the product."""
        return None if isinstance(self.node_pacer.current, Unpaced) else self.node_pacer

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, by the present budget."""
        return self._traffic.budget.interval

    def spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        """Set the profile."""
        self._traffic.spans(
            self._rank, IdleSpans(generation=GENERATION, iteration_seconds=iteration_seconds, spans=spans)
        )

    def quiet_boundary(self, at: float) -> None:
        """Record a boundary without a snapshot."""
        self._tell(at, is_sending=False)

    def boundary(self, at: float, *, is_sending: bool) -> bool:
        """Record a boundary.

        Args:
            at: monotonic seconds.
            is_sending: whether the last snapshot is still being sent.

        Returns:
            Whether a snapshot begins here.
        """
        self._step += 1
        self._tell(at, is_sending=is_sending)
        *proposed, pacing = PROPOSED.unpack_from(self._page)
        self._traffic.hear(Pacing(pacing))
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
        """Record that training under Everstep is interrupted, so that the next boundary ends no iteration."""
        message = Boundary(generation=GENERATION, boundary=Step(self._step))
        self._traffic.boundary(self._rank, message, PAUSED, is_sending=False)

    def _tell(self, at: float, *, is_sending: bool) -> None:
        message = Boundary(generation=GENERATION, boundary=Step(self._step), at_seconds=at)
        self._traffic.boundary(self._rank, message, MOVING, is_sending=is_sending)
