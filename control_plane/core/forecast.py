"""Estimates from a fleet's history how often a job will be interrupted, before the job runs. Pure.

    MTTF of the job      node-seconds of all the fleet's jobs ÷ their failures ÷ its nodes
    ETTR                 effective training time ratio: MTTF ÷ (MTTF + MTTR)

A fleet without history gets no forecast, because an assumed failure rate would look like a measured one. Source: the
renewal argument of Kokolis et al., HPCA'25 (arXiv 2410.21680), section III, with the measured recovery time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Expected interruptions of a job, if the fleet's failure rate and recovery time do not change."""

    mttf_seconds: float
    mttr_seconds: float

    @property
    def ettr_ratio(self) -> float:
        """The effective training time ratio, 0 to 1."""
        return self.mttf_seconds / (self.mttf_seconds + self.mttr_seconds)


def expected(
    node_count: int, *, node_seconds: float, failure_count: int, mean_recovery_seconds: float | None
) -> Expectation | None:
    """Return the expected interruptions of a job. None without a failure or a recovery in the fleet's history."""
    if not failure_count or node_seconds <= 0 or mean_recovery_seconds is None:
        return None
    return Expectation(mttf_seconds=node_seconds / failure_count / node_count, mttr_seconds=mean_recovery_seconds)
