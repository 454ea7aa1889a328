"""Everstep where not every step fits: how far apart steps are proposed is the product's own decision, `worker.member.traffic.Traffic` with its `Budget`.

    node 0:  Traffic ──distance, pacing──▶ proposed steps ──file──▶ every node: its snapshot begins at the boundary of that step

The budget is told what the run measures: when boundaries are passed, and whether something was being sent. Nothing is
copied here, so nothing holds the rank. The profiled iterations, in which nothing is saved, are told, too: a job that
saves every step has seen as many quiet ones only after 800 steps. What stands in for the round that all nodes agree in
is a file that node 0 writes an iteration ahead.
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
"""The step proposed before the newest one, and the newest: a node may read it just before or just after node 0 has moved on. And `Pacing`."""


class Budgeted:
    """One node's part.

    Args:
        node: number of the node; 0 proposes.
        copies: of the case.
        proposed: file that all nodes share; made here.
        node_pacer: counts every transfer of the node, and learns from those that go at once how fast the link is.
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
        """Iterations under Everstep so far: those between are another scheme's, and no step of this job."""
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
        """What a transfer that begins now is paced by; None: it goes at once, as in the product."""
        return None if isinstance(self.node_pacer.current, Unpaced) else self.node_pacer

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, as the budget has it now."""
        return self._traffic.budget.interval

    def spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        """Take the profile."""
        self._traffic.spans(
            self._rank, IdleSpans(generation=GENERATION, iteration_seconds=iteration_seconds, spans=spans)
        )

    def quiet_boundary(self, at: float) -> None:
        """Take note of a boundary of training that is not saved."""
        self._tell(at, is_sending=False)

    def boundary(self, at: float, *, is_sending: bool) -> bool:
        """Take note of a boundary.

        Args:
            at: monotonic seconds.
            is_sending: the last snapshot is still on its way.

        Returns:
            A snapshot begins here.
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
        """Training under Everstep is interrupted: no iteration ends with the next boundary."""
        message = Boundary(generation=GENERATION, boundary=Step(self._step))
        self._traffic.boundary(self._rank, message, PAUSED, is_sending=False)

    def _tell(self, at: float, *, is_sending: bool) -> None:
        message = Boundary(generation=GENERATION, boundary=Step(self._step), at_seconds=at)
        self._traffic.boundary(self._rank, message, MOVING, is_sending=is_sending)
