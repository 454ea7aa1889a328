"""What the iterations of a node's ranks say about snapshots: when they may use the network, and how often they are worth it.

    Boundary, Captured ──▶ Budget ──distance──▶ Coordinator
    IdleSpans ──▶ SpanPacer ──▶ senders

One local rank speaks for all: collectives make their iterations one. Invariant: what is not known changes nothing: without a profile chunks go at
once, without measurements every step is proposed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from everstep.protocol.ids import Rank
from everstep.protocol.rank_messages import Boundary, IdleSpans, Phase, RankHalf, Standing
from worker.core.budget import Budget
from worker.core.chunks import Link, usable
from worker.replication.pacing import NodePacer, SpanPacer, Unpaced

log = logging.getLogger(__name__)
ALPHA_SECONDS = 0.0002
"""Start-up time of a chunk: a wake-up and a system call."""
WORTH_RATIO = 0.02
"""Below this part of an iteration, transfers are too short to be in anybody's way, or idle spans to hold anything: chunks go at once."""


class Traffic:
    """One owner: the node's `Member`; every method on the agent's loop."""

    def __init__(
        self, ranks: Sequence[Rank], pacer: NodePacer, *, replica_count: int, max_slowdown: float, on_distance: Callable[[int], None]
    ) -> None:
        """Begin with everything unknown.

        Args:
            ranks: of this node; the first one speaks for all.
            pacer: the node's.
            replica_count: shards of this node times their holders on other nodes: what every snapshot sends.
            max_slowdown: the job's.
            on_distance: told how far apart steps are to be proposed, when that changes.
        """
        self.budget = Budget(max_slowdown)
        self._speaker = min(ranks)
        self._pacer = pacer
        self._replica_count = replica_count
        self._on_distance = on_distance
        self._profile: IdleSpans | None = None
        self._passed_at: float | None = None
        self._has_captured = False
        self._was_sending = False
        """At the last boundary."""

    def captured(self, rank: Rank) -> None:
        """A snapshot of a rank is complete on this node."""
        self._has_captured |= rank == self._speaker

    def spans(self, rank: Rank, message: IdleSpans) -> None:
        """Take what a rank's profiler found; a later profile replaces it."""
        if rank == self._speaker:
            self._profile = message
            self._pacer.unpace()

    def boundary(self, rank: Rank, message: Boundary, half: RankHalf, *, is_sending: bool) -> float | None:
        """Take a boundary into account, or that a rank no longer passes any.

        Args:
            rank: whose.
            message: as it came.
            half: the rank's half of its page.
            is_sending: a holder is owed something.

        Returns:
            How long the iteration took that ends here, seconds; None where none does, and of a rank that does not speak for the node.
        """
        if rank != self._speaker:
            return None
        if half.standing is not Standing.MOVING or half.phase is not Phase.TRAIN:
            self._passed_at = None
            self._pacer.pause()
        elif message.at_seconds > (self._passed_at or 0.0):
            seconds = self._iteration(message, is_sending=is_sending)
            self._pace()
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
        self.budget = before.iteration(
            seconds,
            blocked_seconds=message.blocked_seconds,
            is_loaded=has_captured or was_sending or is_sending,
            has_begun=has_captured,
        )
        if self.budget.interval != before.interval:
            log.info("a step is proposed every %d steps: snapshots may cost %.2g of an iteration", self.budget.interval, before.max_slowdown)
        if self.budget.distance != before.distance:
            self._on_distance(self.budget.distance)
        return seconds

    def _pace(self) -> None:
        """Put the profile to use as soon as the link is known, if there is anything to gain.

        A snapshot that the idle spans of one iteration cannot hold would be late: it goes at once as long as the budget pays for that.
        """
        profile, rate = self._profile, self._pacer.bytes_per_second
        if profile is None or rate is None or not isinstance(self._pacer.current, Unpaced):
            return
        least, idle = WORTH_RATIO * profile.iteration_seconds, sum(usable(span).seconds for span in profile.spans)
        needed = self._replica_count * self._pacer.transfer_bytes / rate
        if min(needed, idle) >= least and (needed <= idle or self.budget.interval > 1):
            self._pacer.current = SpanPacer(profile.spans, Link(rate, ALPHA_SECONDS), iteration_seconds=profile.iteration_seconds)
            log.info("replicas go into %d idle spans of an iteration of %.3f s", len(profile.spans), profile.iteration_seconds)
