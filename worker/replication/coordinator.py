"""Runs the rounds of a generation on the coordinator's node.

    RoundMember ──NodeReport──▶ RoundServer ──▶ core.rounds.Coordinator ──Announcement──▶ RoundMember

Invariant: only the newest report of each node counts, and only if it contains this coordinator's term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from everstep.protocol.agent_messages import CheckpointPace, RoundStatus
from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import StopState, Vote
from everstep.protocol.rounds import Announcement, NodeReport, Pacing
from worker.core.checkpoint_schedule import CheckpointSchedule
from worker.core.rounds import NONE, Coordinator
from worker.core.tree import TreeReports
from worker.tasks import Signal

log = logging.getLogger(__name__)


def new_life() -> int:
    """Return the term of a new coordinator: monotonic nanoseconds, higher after each restart on a node."""
    return int(asyncio.get_running_loop().time() * 1e9)


@dataclass(eq=False, repr=False)
class RoundServer:
    """Applies reports to the pure `Coordinator`, and sends its state to the members as announcements.

    `now` returns Unix time, `clock` monotonic time. `node_bytes` returns the bytes of this node's committed shards, an
    estimate for every node. Ranks wait at most `final_round_seconds` for the commit of the final step.
    """

    generation: Generation
    core: Coordinator
    _: KW_ONLY
    final_round_seconds: float
    now: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    schedule: CheckpointSchedule = field(default_factory=CheckpointSchedule)
    node_bytes: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.term = new_life()
        self.committed_at_seconds = 0.0
        self.changed = Signal()
        self._known = TreeReports(self.term)
        self._unix_offset = self.now() - self.clock()
        """Unix time at which the node's monotonic clock was 0."""
        self._final_timer: asyncio.TimerHandle | None = None
        self._pacing = Pacing.AT_ONCE
        self._refused: list[str] = []
        """The last logged reasons why ranks abandoned steps. Only new reasons are logged."""

    def announcement(self) -> Announcement:
        """Return the coordinator's current state as a message for the members."""
        core = self.core
        return Announcement(
            generation=self.generation,
            term=self.term,
            sequence=self.changed.version,
            committed=core.committed,
            proposed=core.proposed,
            persist_step=core.persist,
            stop_step=core.stop,
            stop_state=core.stop_state,
            rehearsal_step=core.rehearsal.step,
            rehearsal_state=core.rehearsal.state,
            rehearsal_steps=core.rehearsal.steps,
            finished=core.is_finished,
            pacing=self._pacing,
            ends_exports=core.ends_exports,
            held=core.held,
            # A restarted coordinator announces no steps until every member has reported.
            is_silent=core.is_recovering,
        )

    @property
    def visible(self) -> tuple[object, ...]:
        """Facts that users see: the end of training, and the progress of a requested stop or rehearsal."""
        return self.core.is_finished, self.core.stop_state, self.core.rehearsal.state

    def status(self) -> RoundStatus:
        """Return the coordinator's state for the control plane."""
        core = self.core
        return RoundStatus(
            committed=core.committed,
            proposed=core.proposed,
            boundary=core.highest_boundary,
            committed_at_seconds=self.committed_at_seconds,
            stopped=core.stop_state is StopState.CONFIRMED,
            finished=core.is_finished,
            checkpoints=self._pace(),
            rehearsal_number=core.rehearsal.number,
            rehearsal_state=core.rehearsal.state,
        )

    def _pace(self) -> CheckpointPace:
        schedule, due_at = self.schedule, self.schedule.due_at
        return CheckpointPace(
            due_step=self.core.due_step,
            due_at_seconds=0.0 if due_at is None else self._unix_offset + due_at,
            interval_seconds=schedule.present_interval or 0.0,
            upload_seconds=schedule.upload_seconds or 0.0,
            cost_seconds=schedule.cost_seconds,
        )

    def take(self, reports: Sequence[NodeReport]) -> None:
        """Apply the reports of nodes. Repeated and outdated reports change nothing."""
        before = self._known
        self._known = before.take(*(each for each in reports if each.term == self.term))
        rounds = [rank for each in self._known.since(before) for rank in each.ranks]
        refused = sorted(
            {each.reason for each in rounds if each.vote is Vote.ABANDON and each.proposed == self.core.proposed}
        )
        if refused and refused != self._refused:
            self._refused = refused
            log.info("step %d is abandoned: %s", self.core.proposed, "; ".join(refused))
        if rounds:
            self._apply(self._with_due_checkpoint().report(*rounds))

    def keep_distance(self, distance: int) -> None:
        """Set the minimum number of steps between two proposed steps."""
        self._apply(self.core.keep_distance(distance))

    def keep_pacing(self, pacing: Pacing) -> None:
        """Announce to all nodes whether they pace snapshots."""
        self._pacing = pacing
        self.changed.notify()

    def request_checkpoint(self, step: Step, *, ends_exports: bool = False) -> None:
        """Request that the first commit at or after `step` is uploaded to S3."""
        self._apply(self.core.request_checkpoint(step, ends_exports=ends_exports))

    def request_stop(self) -> None:
        """Request that all ranks stop at the same step."""
        self._apply(self.core.request_stop())

    def request_rehearsal(self, number: int, steps: int) -> None:
        """Request that all ranks rehearse `steps` steps."""
        self._apply(self.core.request_rehearsal(number, steps))

    def halt(self) -> None:
        """Record that the control plane has ordered the agents to kill the ranks (`Coordinator.halt`)."""
        self._apply(self.core.halt())

    def close(self) -> None:
        """Cancel the timer of the final step."""
        if self._final_timer is not None:
            self._final_timer.cancel()

    def _with_due_checkpoint(self) -> Coordinator:
        core = self.core
        # The check needs no timer: only a commit can become a checkpoint, and commits result from reports.
        if core.wanted > core.persist or not self.schedule.is_due(self.clock()):
            return core
        return core.request_checkpoint(Step(max(core.committed, core.stored) + 1))

    def _apply(self, core: Coordinator) -> None:
        before, self.core = self.core, core
        # A rehearsal is no measurement of the job's pace.
        is_measured = core.highest_boundary > core.base and core.rehearsal.state is not StopState.CONFIRMED
        self.schedule = self.schedule.observe(
            self.clock(),
            boundary=core.highest_boundary if is_measured else NONE,
            persist=core.persist,
            is_uploading=core.is_uploading,
            stored=core.stored_by_all,
            node_bytes=self.node_bytes() if self.schedule.max_bytes_per_second else 0,
        )
        if core.committed != before.committed:
            self.committed_at_seconds = self.now()
        if core.final != NONE and self._final_timer is None:
            loop = asyncio.get_running_loop()
            self._final_timer = loop.call_later(
                self.final_round_seconds, lambda: self._apply(self.core.end_final_round())
            )
        if _spoken(core) != _spoken(before):
            self.changed.notify()


def _spoken(core: Coordinator) -> tuple[object, ...]:
    return (
        core.committed,
        core.proposed,
        core.persist,
        core.stop,
        core.stop_state,
        core.rehearsal,
        core.is_finished,
        core.is_recovering,
        core.ends_exports,
        core.held,
    )
