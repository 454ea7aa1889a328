"""What the iterations of a node's ranks say about snapshots: when they may use the network, and how often they are worth it.

    Boundary, Captured ──▶ Budget, PacingTrial ──distance, pacing──▶ Coordinator ──pacing──▶ every node
    IdleSpans ──▶ SpanPacer ──pacing──▶ senders

One local rank speaks for all: collectives make their iterations one. So the coordinator's node alone is asked how far
apart steps are proposed and whether replicas wait; the others hear of it. Invariant: what is not known changes nothing:
without a profile chunks go at once, without measurements every step is proposed. What makes kept steps take longer than
no pacing does is not kept up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank, Step
from everstep.protocol.rank_messages import Boundary, IdleSpans, Phase, RankHalf, Standing
from everstep.protocol.rounds import Pacing
from worker.core.budget import Budget
from worker.core.chunks import Link, usable
from worker.core.pacing_trial import PacingTrial, is_tried_paced
from worker.replication.pacing import NodePacer, SpanPacer, Unpaced

log = logging.getLogger(__name__)
ALPHA_SECONDS = 0.0002
"""Start-up time of a chunk: a wake-up and a system call."""
WORTH_RATIO = 0.02
"""Below this part of an iteration, transfers are too short to be in anybody's way, or idle spans to hold anything: chunks go at once."""
UNPACED = Unpaced()
SAID = {
    Pacing.AT_ONCE: "go at once",
    Pacing.TRIED: "go at once or wait for idle spans, to see which of them makes kept steps take less",
    Pacing.IN_IDLE_SPANS: "wait for idle spans",
}
STALE_RATIO = 1.5
"""Iterations that take so much longer or shorter are another training: whether pacing pays is tried anew."""


class Traffic:
    """One owner: the node's `Member`; every method on the agent's loop."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        pacer: NodePacer,
        *,
        replica_count: int,
        max_slowdown: float,
        on_distance: Callable[[int], None],
        on_pacing: Callable[[Pacing], None],
    ) -> None:
        """Begin with everything unknown.

        Args:
            ranks: of this node; the first one speaks for all.
            pacer: the node's.
            replica_count: shards of this node times their holders on other nodes: what every snapshot sends.
            max_slowdown: the job's.
            on_distance: told how far apart steps are to be proposed, when that changes.
            on_pacing: told how replicas are to leave, when that changes.
        """
        self.budget = Budget(max_slowdown)
        self._speaker = min(ranks)
        self._pacer = pacer
        self._replica_count = replica_count
        self._on_distance = on_distance
        self._on_pacing = on_pacing
        self._pacing = Pacing.AT_ONCE
        """As the coordinator has announced it."""
        self._asked = Pacing.AT_ONCE
        """What it was told last."""
        self._trials = _untried()
        self._profile: IdleSpans | None = None
        self._planned: SpanPacer | None = None
        """For the profile; None until the link is known, and where there is nothing to gain."""
        self._is_every_step = True
        """The budget has had no steps further apart than one in this training."""
        self._tried_seconds: float | None = None
        """What an iteration took when the trial began."""
        self._is_paced: bool | None = None
        """Whether what is sent in this iteration waits for idle spans; None: there are none to wait for."""
        self._was_paced: bool | None = None
        """In the iteration before."""
        self._trying: _Try | None = None
        """Behind whose iteration nothing has been captured yet."""
        self._passed_at: float | None = None
        self._has_captured = False
        self._was_sending = False
        """At the last boundary."""

    @property
    def trial(self) -> PacingTrial:
        """What is known of pacing for steps that are proposed as they are now.

        A snapshot that is on its way for two iterations costs a step where every step is proposed, and none where they
        are further apart. All else that is found where every step is proposed holds there, too. Where the budget has
        been exceeded by every step once, steps that are lost are none that it could pay for: else pacing would bring
        every step back, which would go at once, and exceed it again.
        """
        return self._trials[self._is_every_step]

    def hear(self, pacing: Pacing) -> None:
        """Take how replicas leave from the next boundary on, as the coordinator announces it."""
        if pacing is not self._pacing:
            log.info("replicas %s", SAID[pacing])
            self._pacing = pacing

    def captured(self, rank: Rank) -> None:
        """A snapshot of a rank is complete on this node."""
        self._has_captured |= rank == self._speaker

    def spans(self, rank: Rank, message: IdleSpans) -> None:
        """Take what a rank's profiler found; a later profile replaces it."""
        if rank == self._speaker:
            self._profile, self._planned, self._trying = message, None, None
            self._pacer.unpace()
            tried, seconds = self._tried_seconds, message.iteration_seconds
            if tried is not None and not 1 / STALE_RATIO <= seconds / tried <= STALE_RATIO:
                self._trials, self._tried_seconds, self._is_every_step = _untried(), None, True

    def boundary(self, rank: Rank, message: Boundary, half: RankHalf, *, is_sending: bool) -> float | None:
        """Take a boundary into account, or that a rank no longer passes any.

        Args:
            rank: whose.
            message: as it came.
            half: the rank's half of its page.
            is_sending: a holder of some shard of the job is owed something, or may be.

        Returns:
            How long the iteration took that ends here, seconds; None where none does, and of a rank that does not speak
            for the node.
        """
        if rank != self._speaker:
            return None
        if half.standing is not Standing.MOVING or half.phase is not Phase.TRAIN:
            self._passed_at = self._trying = None
            self._pacer.pause()
        elif message.at_seconds > (self._passed_at or 0.0):
            seconds = self._iteration(message, is_sending=is_sending)
            self._plan()
            self._ask()
            self._pace(message.boundary)
            self._pacer.boundary(message.at_seconds)
            return seconds
        return None

    def _iteration(self, message: Boundary, *, is_sending: bool) -> float | None:
        begun_at, self._passed_at = self._passed_at, message.at_seconds
        has_captured, self._has_captured = self._has_captured, False
        was_sending, self._was_sending = self._was_sending, is_sending
        if begun_at is None:
            return None
        before, seconds = self.budget, message.at_seconds - begun_at
        if self._trying is not None:
            self._follow(self._trying, has_captured=has_captured, was_sending=was_sending)
        if has_captured and self._is_paced is not None and (not was_sending or self._was_paced == self._is_paced):
            self._trying = _Try(seconds, self._is_paced)
        self.budget = before.iteration(
            seconds,
            blocked_seconds=message.blocked_seconds,
            is_loaded=has_captured or was_sending or is_sending,
            has_begun=has_captured,
        )
        self._is_every_step &= self.budget.interval == 1
        if self.budget.interval != before.interval:
            log.info(
                "a step is proposed every %d steps: snapshots may cost %.2g of an iteration",
                self.budget.interval,
                before.max_slowdown,
            )
        if self.budget.distance != before.distance:
            self._on_distance(self.budget.distance)
        return seconds

    def _follow(self, trying: _Try, *, has_captured: bool, was_sending: bool) -> None:
        """Count the steps that are lost to a snapshot until the next one is captured."""
        if has_captured or not self._is_every_step:
            self._trying = None
            self._tried(trying)
        elif was_sending:
            self._trying = replace(trying, lost_count=trying.lost_count + 1)
        else:
            self._trying = None  # the next step was put off by something else: the budget, an upload

    def _tried(self, done: _Try) -> None:
        before = self.trial
        if before.verdict is not None:
            return
        self._trials[False] = self._trials[False].iteration(done.seconds, is_paced=done.is_paced)
        if self._is_every_step:
            self._trials[True] = self._trials[True].iteration(
                done.seconds, is_paced=done.is_paced, lost_count=done.lost_count
            )
        trial = self.trial
        if trial.verdict is not None:
            took = trial.paced.kept_seconds, trial.at_once.kept_seconds
            log.debug(
                "as this node sees it, a kept step takes %.3f s where replicas wait for idle spans, and %.3f s "
                "where they do not",
                *took,
            )

    def _plan(self) -> None:
        """Put the profile to use as soon as the link is known, if there is anything to gain.

        A snapshot that the idle spans of one iteration cannot hold would be late: it goes at once as long as the budget
        pays for that.
        """
        profile, rate = self._profile, self._pacer.bytes_per_second
        if profile is None or rate is None or self._planned is not None:
            return
        least, idle = WORTH_RATIO * profile.iteration_seconds, sum(usable(span).seconds for span in profile.spans)
        needed = self._replica_count * self._pacer.transfer_bytes / rate
        is_worth = needed <= idle or self.budget.interval > 1 or self._pacing is not Pacing.AT_ONCE
        if min(needed, idle) >= least and is_worth:
            self._planned = SpanPacer(
                profile.spans, Link(rate, ALPHA_SECONDS), iteration_seconds=profile.iteration_seconds
            )
            self._tried_seconds = self._tried_seconds or profile.iteration_seconds
            log.info(
                "there are %d idle spans for replicas in an iteration of %.3f s",
                len(profile.spans),
                profile.iteration_seconds,
            )

    @property
    def _wanted(self) -> Pacing:
        """How replicas are to leave, as far as this node can tell."""
        if self._planned is None:
            return Pacing.AT_ONCE
        return {None: Pacing.TRIED, True: Pacing.IN_IDLE_SPANS, False: Pacing.AT_ONCE}[self.trial.verdict]

    def _ask(self) -> None:
        if (wanted := self._wanted) is not self._asked:
            self._asked = wanted
            self._on_pacing(wanted)

    def _pace(self, step: Step) -> None:
        """Say how what is captured at a boundary is sent."""
        self._was_paced, self._is_paced = self._is_paced, None if self._planned is None else self._waits(step)
        if self._planned is not None:
            self._pacer.hold(self._planned if self._is_paced else UNPACED)

    def _waits(self, step: Step) -> bool:
        return is_tried_paced(step) if self._pacing is Pacing.TRIED else self._pacing is Pacing.IN_IDLE_SPANS


@dataclass(frozen=True, slots=True)
class _Try:
    """An iteration in which a snapshot was captured, and all that was sent went one way."""

    seconds: float
    is_paced: bool
    lost_count: int = 0
    """Iterations behind it in which nothing was captured."""


def _untried() -> dict[bool, PacingTrial]:
    """Return trials of which nothing is known, by whether every step is proposed."""
    return {True: PacingTrial(), False: PacingTrial()}
