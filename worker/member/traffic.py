"""Decides from the ranks' iterations when snapshots may use the network, and how often the job takes a snapshot.

    Boundary, Captured ──▶ Budget, PacingTrial ──distance, pacing──▶ Coordinator ──pacing──▶ every node
    IdleSpans ──▶ SpanPacer ──pacing──▶ senders

The coordinator's node decides for all nodes, from measurements of one of its ranks. Invariant: without a profile of the
idle spans, chunks are sent immediately. Without measurements, every step is proposed. Pacing ends if it makes training
slower per captured step than unpaced sending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from everstep.protocol.ids import Rank, Step
from everstep.protocol.rank_messages import Boundary, IdleSpans, Phase, RankHalf, RankStanding
from everstep.protocol.rounds import Pacing
from worker.core.budget import Budget
from worker.core.chunks import Link, usable
from worker.core.pacing_trial import PacingTrial, is_tried_paced
from worker.replication.pacing import NodePacer, SpanPacer, Unpaced

log = logging.getLogger(__name__)
ALPHA_SECONDS = 0.0002
"""Assumed seconds before a chunk is on the network: a wake-up of the sender and a system call."""
# Shorter transfers hardly disturb training, and shorter idle spans have no room for chunks.
WORTH_RATIO = 0.02
"""Minimum length of transfers and of idle spans for pacing, as a fraction of an iteration."""
UNPACED = Unpaced()
PACING_SENTENCES = {
    Pacing.AT_ONCE: "replicas are sent immediately",
    Pacing.TRIED: "replicas are sent immediately or in idle network time, in turn, to measure which costs less",
    Pacing.IN_IDLE_SPANS: "replicas wait for idle network time",
}
STALE_RATIO = 1.5
"""Factor by which the iteration time must change before the pacing trial is repeated."""


@dataclass(eq=False, repr=False)
class Traffic:
    """Measures iterations and snapshots on one node, and decides on pacing and on the distance between snapshots.

    The first of `ranks` represents all. `replica_count` transfers are sent per step. `max_slowdown` is a fraction of
    the iteration. `on_distance` and `on_pacing` are called when this node's measurements recommend a change.
    """

    ranks: Sequence[Rank]
    pacer: NodePacer
    _: KW_ONLY
    replica_count: int
    max_slowdown: float
    on_distance: Callable[[int], None]
    on_pacing: Callable[[Pacing], None]

    def __post_init__(self) -> None:
        self.budget = Budget(self.max_slowdown)
        self._speaker = min(self.ranks)
        self._pacing = Pacing.AT_ONCE
        self._asked = Pacing.AT_ONCE
        self._trials = _untried()
        self._profile: IdleSpans | None = None
        self._planned: SpanPacer | None = None
        """Pacer for the current profile; None until the link's rate has been measured, and if pacing has no benefit."""
        self._is_every_step = True
        self._tried_seconds: float | None = None
        """Duration of an iteration at the start of the pacing trial; None before a trial."""
        self._is_paced: bool | None = None
        """True if this iteration's chunks wait for idle spans, False if they do not; None without a pacer."""
        self._was_paced: bool | None = None
        self._trying: _Try | None = None
        """The last measured iteration, until the next capture adds it to the trial with its number of lost steps."""
        self._passed_at: float | None = None
        self._has_captured = False
        self._was_sending = False
        """True if a snapshot was still being sent when the rank passed the last boundary."""

    @property
    def trial(self) -> PacingTrial:
        """The current trial: with lost steps while every step is proposed, later only with iteration times."""
        return self._trials[self._is_every_step]

    def apply_announcement(self, pacing: Pacing) -> None:
        """Send snapshots as the coordinator has announced, from the next step on."""
        if pacing is not self._pacing:
            log.info("%s", PACING_SENTENCES[pacing])
            self._pacing = pacing

    def captured(self, rank: Rank) -> None:
        """Record that a rank of this node has captured a snapshot."""
        self._has_captured |= rank == self._speaker

    def spans(self, rank: Rank, message: IdleSpans) -> None:
        """Use the idle spans that a rank's profiler has measured, instead of an earlier measurement."""
        if rank == self._speaker:
            self._profile, self._planned, self._trying = message, None, None
            self.pacer.unpace()
            tried, seconds = self._tried_seconds, message.iteration_seconds
            if tried is not None and not 1 / STALE_RATIO <= seconds / tried <= STALE_RATIO:
                self._trials, self._tried_seconds, self._is_every_step = _untried(), None, True

    def boundary(self, rank: Rank, message: Boundary, half: RankHalf, *, is_sending: bool) -> float | None:
        """Process a rank's message that it has finished a step, or that its page has changed in another way.

        `is_sending` is True while some node may still send chunks. Returns the seconds of the iteration that ended;
        None if none did, or if `rank` is not the node's lowest rank, which alone is measured.
        """
        if rank != self._speaker:
            return None
        if half.standing is not RankStanding.MOVING or half.phase is not Phase.TRAIN:
            self._passed_at = self._trying = None
            self.pacer.pause()
        elif message.at_seconds > (self._passed_at or 0.0):
            seconds = self._iteration(message, is_sending=is_sending)
            self._plan()
            self._ask()
            self._pace(message.boundary)
            self.pacer.boundary(message.at_seconds)
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
                "one of %d steps is captured, because snapshots may slow training by at most %.2g of an iteration",
                self.budget.interval,
                before.max_slowdown,
            )
        if self.budget.distance != before.distance:
            self.on_distance(self.budget.distance)
        return seconds

    def _follow(self, trying: _Try, *, has_captured: bool, was_sending: bool) -> None:
        """Complete the measurement of `trying`, an earlier iteration, or count the newest step as lost."""
        if has_captured or not self._is_every_step:
            self._trying = None
            self._tried(trying)
        elif was_sending:
            self._trying = replace(trying, lost_count=trying.lost_count + 1)
        else:
            # No snapshot was being sent, and still no step was captured. The reason is not known, so discard `trying`.
            self._trying = None

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
                "measured on this node: a captured step takes %.3f s if replicas wait for idle network time, and "
                "%.3f s if they do not",
                *took,
            )

    def _plan(self) -> None:
        """Create the pacer, if waiting for idle spans has a benefit and the link's rate is measured."""
        profile, rate = self._profile, self.pacer.bytes_per_second
        if profile is None or rate is None or self._planned is not None:
            return
        least, idle = WORTH_RATIO * profile.iteration_seconds, sum(usable(span).seconds for span in profile.spans)
        needed = self.replica_count * self.pacer.transfer_bytes / rate
        # At one snapshot per step, a snapshot must fit into the idle spans of one iteration, to arrive before
        # the next.
        is_worth = needed <= idle or self.budget.interval > 1 or self._pacing is not Pacing.AT_ONCE
        if min(needed, idle) >= least and is_worth:
            self._planned = SpanPacer(
                profile.spans, Link(rate, ALPHA_SECONDS), iteration_seconds=profile.iteration_seconds
            )
            self._tried_seconds = self._tried_seconds or profile.iteration_seconds
            log.info(
                "the network has %d idle spans for replicas in an iteration of %.3f s",
                len(profile.spans),
                profile.iteration_seconds,
            )

    @property
    def _wanted(self) -> Pacing:
        if self._planned is None:
            return Pacing.AT_ONCE
        return {None: Pacing.TRIED, True: Pacing.IN_IDLE_SPANS, False: Pacing.AT_ONCE}[self.trial.verdict]

    def _ask(self) -> None:
        if (wanted := self._wanted) is not self._asked:
            self._asked = wanted
            self.on_pacing(wanted)

    def _pace(self, step: Step) -> None:
        self._was_paced, self._is_paced = self._is_paced, None if self._planned is None else self._waits(step)
        if self._planned is not None:
            self.pacer.hold(self._planned if self._is_paced else UNPACED)

    def _waits(self, step: Step) -> bool:
        return is_tried_paced(step) if self._pacing is Pacing.TRIED else self._pacing is Pacing.IN_IDLE_SPANS


@dataclass(frozen=True, slots=True)
class _Try:
    seconds: float
    is_paced: bool
    lost_count: int = 0
    """Number of steps that were not captured, because this iteration's snapshot was still being sent."""


def _untried() -> dict[bool, PacingTrial]:
    """Return trials without measurements, by whether every step is proposed."""
    return {True: PacingTrial(), False: PacingTrial()}
