"""What may be expected of a job before it runs, from what its fleet has seen. Pure.

    MTBF of a node       node-seconds of all the fleet's jobs ÷ their failures
    MTTF of the job      MTBF ÷ its nodes: any of them interrupts all
    MTTR                 mean of the fleet's failures that are over, from the failure until training is where it was before
    ETTR                 MTTF ÷ (MTTF + MTTR)

Nothing is said where the fleet has no history: an assumed failure rate would look like a measured one.
Source: the renewal argument of Kokolis et al., HPCA'25 (arXiv 2410.21680), section III, with the measured recovery in
place of checkpoint interval and restart overhead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a job's interruptions will be like if the fleet goes on as it has."""

    mttf_seconds: float
    mttr_seconds: float

    @property
    def ettr_ratio(self) -> float:
        """The part of the time that will be training: 0 to 1."""
        return self.mttf_seconds / (self.mttf_seconds + self.mttr_seconds)


def expected(
    node_count: int, *, node_seconds: float, failure_count: int, mean_recovery_seconds: float | None
) -> Expectation | None:
    """Return what to expect of a job.

    Args:
        node_count: of the job.
        node_seconds: how long the fleet's nodes have worked for jobs, all together.
        failure_count: of all the fleet's jobs in that time.
        mean_recovery_seconds: of those that are closed; None where none is.

    Returns:
        None where nothing has failed yet, or nothing has recovered.
    """
    if not failure_count or node_seconds <= 0 or mean_recovery_seconds is None:
        return None
    return Expectation(mttf_seconds=node_seconds / failure_count / node_count, mttr_seconds=mean_recovery_seconds)
