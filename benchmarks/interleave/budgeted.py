"""Selects Everstep's snapshots in a case whose network is too busy for a snapshot at every step.

    node 0:  Traffic ──distance, pacing──▶ proposed steps ──file──▶ every node: snapshot at the boundary of that step

The budget of `worker.member.traffic.Traffic` determines the steps between two snapshots. Profiled iterations have none,
so they show the step time without snapshots. Node 0's file, one iteration ahead, replaces the product's rounds.
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
"""Shared file: the last two proposed steps, because another node may read before or after a proposal, and the `Pacing`.
"""


class Budgeted:
    """One node that sends snapshots at the steps that Everstep's budget selects.

    Node 0 publishes steps in the file `proposed`. `copies` includes the owner's. `node_pacer` counts all transfers, and
    learns the link's rate from those without pacing.
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
        """Iterations under Everstep."""
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
        """Pacer of a transfer that starts now. None: full rate."""
        return None if isinstance(self.node_pacer.current, Unpaced) else self.node_pacer

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, by the current budget."""
        return self._traffic.budget.interval

    def spans(self, iteration_seconds: float, spans: tuple[IdleSpan, ...]) -> None:
        """Pass an iteration's duration and idle spans to Everstep's traffic control."""
        self._traffic.spans(
            self._rank, IdleSpans(generation=GENERATION, iteration_seconds=iteration_seconds, spans=spans)
        )

    def quiet_boundary(self, at: float) -> None:
        """Report the end of a profiled iteration, without snapshots."""
        self._tell(at, is_sending=False)

    def boundary(self, at: float, *, is_sending: bool) -> bool:
        """Report the end of an iteration (monotonic seconds), and return whether a snapshot begins.

        `is_sending`: the last snapshot is still being sent.
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
        """Report that another scheme runs next, so that `Traffic` ignores the time until the next boundary."""
        message = Boundary(generation=GENERATION, boundary=Step(self._step))
        self._traffic.boundary(self._rank, message, PAUSED, is_sending=False)

    def _tell(self, at: float, *, is_sending: bool) -> None:
        message = Boundary(generation=GENERATION, boundary=Step(self._step), at_seconds=at)
        self._traffic.boundary(self._rank, message, MOVING, is_sending=is_sending)
