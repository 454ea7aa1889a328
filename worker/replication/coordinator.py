"""The rounds of a generation as the coordinator's node runs them.

    RoundMember ──NodeReport──▶ RoundServer ──▶ core.rounds.Coordinator ──Announcement──▶ RoundMember

Both travel over the tree of agents (`worker.replication.round_member`), whose root is the member on the coordinator's
own node. Invariant: of each node the newest report counts, and only one that answers this coordinator: none that was
made for its agent's earlier life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import Announcement, NodeReport, Pacing
from worker.core.rounds import NONE, Coordinator
from worker.core.tree import Reports
from worker.tasks import Signal

log = logging.getLogger(__name__)


def new_life() -> int:
    """Return a number that is higher in every later life of this node's agent: nanoseconds on a clock that goes on until the node ends."""
    return int(asyncio.get_running_loop().time() * 1e9)


class RoundServer:
    """The coordinator's shell: reports in, announcements out. One owner: the `Member` on the coordinator's node."""

    def __init__(
        self, generation: Generation, core: Coordinator, *, final_round_seconds: float, now: Callable[[], float]
    ) -> None:
        """Begin.

        Args:
            generation: whose rounds these are.
            core: fresh, or recovering after this agent's restart.
            final_round_seconds: how long ranks that stand still wait for their last commit.
            now: Unix time, for what is shown to people.
        """
        self.core = core
        self.term = new_life()
        self.committed_at_seconds = 0.0
        self.changed = Signal()
        self._known = Reports(self.term)
        self._generation = generation
        self._final_round_seconds = final_round_seconds
        self._now = now
        self._final_timer: asyncio.TimerHandle | None = None
        self._pacing = Pacing.AT_ONCE
        self._refused: list[str] = []
        """Why the last step was abandoned; logged when it changes."""

    def announcement(self) -> Announcement:
        """Return the coordinator's state as members hear it."""
        core = self.core
        return Announcement(
            generation=self._generation,
            term=self.term,
            sequence=self.changed.version,
            committed=core.committed,
            proposed=core.proposed,
            persist_step=core.persist,
            stop_step=core.stop,
            stop_state=core.stop_state,
            finished=core.is_finished,
            pacing=self._pacing,
            held=core.held,
            is_silent=core.is_recovering,  # nothing is announced before every member has said what it knows
        )

    def take(self, reports: Sequence[NodeReport]) -> None:
        """Take what members report; taking it again, or what is older, changes nothing."""
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
            self._apply(self.core.report(*rounds))

    def keep_distance(self, distance: int) -> None:
        """Propose steps so far apart from now on."""
        self._apply(self.core.keep_distance(distance))

    def keep_pacing(self, pacing: Pacing) -> None:
        """Have replicas leave like this on every node from now on."""
        self._pacing = pacing
        self.changed.notify()

    def request_checkpoint(self, step: Step) -> None:
        """Have the next commit of this step or a later one uploaded."""
        self._apply(self.core.request_checkpoint(step))

    def request_stop(self) -> None:
        """Ask all ranks to stop at one step."""
        self._apply(self.core.request_stop())

    def halt(self) -> None:
        """The ranks are being ended: after a request to stop, have what is committed uploaded."""
        self._apply(self.core.halt())

    def close(self) -> None:
        """End the timer of the final round."""
        if self._final_timer is not None:
            self._final_timer.cancel()

    def _apply(self, core: Coordinator) -> None:
        before, self.core = self.core, core
        if core.committed != before.committed:
            self.committed_at_seconds = self._now()
        if core.final != NONE and self._final_timer is None:
            loop = asyncio.get_running_loop()
            self._final_timer = loop.call_later(
                self._final_round_seconds, lambda: self._apply(self.core.end_final_round())
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
        core.is_finished,
        core.is_recovering,
        core.held,
    )
