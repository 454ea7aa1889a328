"""Whether pacing pays: iterations whose snapshot waited for idle spans against iterations whose snapshot went at once.

    steps 0-3 paced ─▶ 4-7 at once ─▶ 8-11 at once ─▶ 12-15 paced ─▶ … ─▶ verdict

Pacing keeps chunks out of the way of collectives, and costs wake-ups and time in which the processor is needed elsewhere: where agents share the
cores of ranks that wait for the network, it sends while they compute and rests while they wait. So both are tried.

Invariant: which steps are tried how follows from their numbers alone. One node whose chunks are in the way makes everybody's iteration longer, so
all nodes of a job have to try the same at the same time, and they share nothing else.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from everstep.protocol.ids import Step
from everstep.protocol.slot import digest
from worker.core.medians import median_error

RUN_STEPS = 4
"""One after the other in the same way: what an iteration leaves to the next one counts where it belongs."""
LEAST, ENOUGH = 8, 32
"""Iterations of either kind before anything is concluded, and after which the trial ends whatever they say."""
BEYOND_DOUBT = 2.0
"""Standard errors between the medians that end it before."""
WORTH_RATIO = 0.01
"""Of an iteration, that pacing has to gain: less is noise, and going at once is simpler."""


@dataclass(frozen=True, slots=True)
class PacingTrial:
    """What has been tried. One per node and training."""

    paced: tuple[float, ...] = ()
    """Seconds of iterations whose snapshot was paced."""
    at_once: tuple[float, ...] = ()
    """Seconds of iterations whose snapshot went at once."""
    verdict: bool | None = None
    """Pacing pays; None: not known yet."""

    def is_paced(self, step: Step) -> bool:
        """Say whether the snapshot of a step waits for idle spans; while that is tried, without a pattern that steps at a regular distance meet."""
        if self.verdict is not None:
            return self.verdict
        pair, place = divmod(step // RUN_STEPS, 2)
        return bool(place ^ digest(pair.to_bytes(8, "little"))[0] & 1)

    def iteration(self, seconds: float, *, is_paced: bool) -> PacingTrial:
        """Take an iteration into account in which a snapshot was captured, and all that was sent went one way.

        Args:
            seconds: from boundary to boundary.
            is_paced: which way.

        Returns:
            The trial, with a verdict where there is one now; one that is over stays as it is.
        """
        if self.verdict is not None:
            return self
        if is_paced:
            return replace(self, paced=(*self.paced, seconds)[-ENOUGH:])._judged()
        return replace(self, at_once=(*self.at_once, seconds)[-ENOUGH:])._judged()

    def _judged(self) -> PacingTrial:
        fewest = min(len(self.paced), len(self.at_once))
        if fewest < LEAST:
            return self
        gained = statistics.median(self.at_once) - statistics.median(self.paced)
        doubt = BEYOND_DOUBT * math.hypot(median_error(self.paced), median_error(self.at_once))
        return replace(self, verdict=gained > WORTH_RATIO * statistics.median(self.at_once)) if fewest == ENOUGH or abs(gained) > doubt else self
