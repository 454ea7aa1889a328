"""Simulates the training of a job whose agents follow the checkpoint settings of its plan, in virtual seconds.

plan of the real loops ──▶ RoundServer of the agent (steps, checkpoints) ◀──▶ two simulated ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import NodeReport, RankRound
from worker.core.checkpoint_schedule import CheckpointSchedule
from worker.core.rounds import NONE, Coordinator
from worker.replication.coordinator import RoundServer

TICK_SECONDS = 10.0


@dataclass
class Training:
    """Trains with a plan. A step takes `TICK_SECONDS`, and `slowed` times as long during an upload.

    Create it inside a running event loop.
    """

    plan: GenerationPlan
    upload_seconds: float
    slowed: float = 1.0
    now: float = 0.0
    uploads: list[tuple[float, Step]] = field(default_factory=list)
    """Time and step of each upload, oldest first."""
    _steps: float = 0.0
    _stored: Step = NONE
    _sequence: int = 0

    def __post_init__(self) -> None:
        plan = self.plan.checkpoint
        core = Coordinator(
            world_size=self.plan.world_size,
            base=self.plan.base_step,
            every_steps=plan.every_steps,
            max_uploads=plan.max_uploads,
        )
        schedule = CheckpointSchedule(
            interval_seconds=plan.interval_seconds,
            max_overhead=plan.max_overhead,
            max_bytes_per_second=plan.max_bytes_per_second,
            begun_at=self.now,
        )
        self.server = RoundServer(
            self.plan.generation,
            core.begin(),
            final_round_seconds=60.0,
            now=lambda: self.now,
            clock=lambda: self.now,
            schedule=schedule,
        )

    @property
    def steps(self) -> int:
        return int(self._steps)

    @property
    def intervals(self) -> list[float]:
        """Seconds between the beginnings of two uploads."""
        begun = [at for at, _ in self.uploads]
        return [later - earlier for earlier, later in pairwise(begun)]

    def train(self, seconds: float) -> None:
        """Advance the time."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_SECONDS
            is_uploading = self._is_uploading()
            self._steps += 1 / (self.slowed if is_uploading else 1.0)
            if is_uploading and self.now >= self.uploads[-1][0] + self.upload_seconds:
                self._stored = self.uploads[-1][1]
            self._report()
            persist = self.server.core.persist
            if persist != NONE and persist not in {step for _, step in self.uploads}:
                self.uploads.append((self.now, persist))
            self._report()

    def _is_uploading(self) -> bool:
        return bool(self.uploads) and self._stored < self.uploads[-1][1]

    def _report(self) -> None:
        core = self.server.core
        self._sequence += 1
        has_captured = core.proposed != NONE and core.proposed <= self.steps
        ranks = tuple(
            RankRound(
                rank=Rank(number),
                boundary=Step(self.steps),
                committed=core.committed,
                proposed=core.proposed,
                vote=Vote.ACKED if has_captured else Vote.NONE,
                pinned_steps=(self.uploads[-1][1],) if self._is_uploading() else (),
                stored_step=self._stored,
            )
            for number in range(self.plan.world_size)
        )
        self.server.take([NodeReport(NodeId("n"), self.server.term, self._sequence, ranks)])
