"""The number of spares of a fleet: a fixed count, or the smallest count for a wanted probability.

    λ      failures per second of one working node
    n      number of working nodes
    R      mean seconds from the loss of a node until another instance has joined
    ρ      λ·n·R, the mean number of replacements under way
    P(s)   probability that a failure finds one of s spares free: P(Poisson(ρ) ≤ s − 1)

By Palm's theorem, the number of replacements under way is Poisson with mean ρ, whatever the distribution of their
times. λ is the upper 95 % confidence bound of the failure rate, with one failure in 154 node-days (Meta's cluster
RSC-1) as a prior. R is the mean of the measured times and of three prior times of 7 minutes, the longest in GEMINI.

Invariant: pure. More failures, longer replacements, more nodes or a higher probability never give fewer spares. Source:
Palm 1938; Feeney and Sherbrooke 1966 ((s − 1, s) policy); Garwood 1936 (the interval); Kokolis et al., HPCA'25 (6.5
failures per 1,000 node-days); GEMINI, SOSP'23 (4 to 7 minutes).
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, fsum, lgamma, log, sqrt

from control_plane.core.observed.fleets import FleetHistory, FleetSpec

PRIOR_FAILURES = 1
PRIOR_NODE_SECONDS = 154 * 86_400.0
ENOUGH_FAILURES = 5
"""From this many failures on, the fleet plans for the higher of the rates with and without the prior."""
PRIOR_REPLACEMENTS = 3
PRIOR_REPLACEMENT_SECONDS = 420.0
DOUBT = 0.05
"""Accepted probability that the true failure rate is above the estimated rate."""
MOST_SPARES = 1_000
NEGLIGIBLE_DEVIATIONS = 10
"""The sum of Poisson terms starts this many standard deviations below the mean (below e^-50, Chernoff bound)."""


def spare_count(spec: FleetSpec, history: FleetHistory, working_count: int) -> int:
    """Return how many connected nodes a fleet keeps besides the `working_count` nodes that jobs hold or wait for."""
    if spec.spare_probability is None:
        return max(0, spec.spare_count)
    under_way = failures_per_node_second(history) * working_count * replacement_seconds(history)
    return bisect_left(range(MOST_SPARES), spec.spare_probability, key=lambda count: free_probability(count, under_way))


def free_probability(count: int, under_way: float) -> float:
    """Return the probability that one of `count` spares is free while `under_way` replacements are, on average."""
    return _poisson_at_most(count - 1, under_way) if count > 0 else 0.0


def failures_per_node_second(history: FleetHistory) -> float:
    """Return the failure rate to plan for, as an upper confidence bound."""
    lost, worked = history.lost_node_count, history.node_seconds
    reckoned = most_expected(lost + PRIOR_FAILURES) / (worked + PRIOR_NODE_SECONDS)
    # The prior's 154 node-days would hide the failures of a new fleet that fails ten times a day.
    return max(reckoned, most_expected(lost) / max(worked, 1.0)) if lost >= ENOUGH_FAILURES else reckoned


def replacement_seconds(history: FleetHistory) -> float:
    """Return the mean seconds until a lost node's replacement is connected, with the wait for capacity."""
    total = history.replacement_seconds + PRIOR_REPLACEMENTS * PRIOR_REPLACEMENT_SECONDS
    return total / (history.replacement_count + PRIOR_REPLACEMENTS)


def most_expected(seen: int) -> float:
    """Return the mean at which a Poisson process has `seen` or fewer events with probability `DOUBT` only."""
    low, high = float(seen), 2.0 * seen + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _poisson_at_most(seen, middle) > DOUBT else (low, middle)
    return high


def _poisson_at_most(count: int, mean: float) -> float:
    if mean == 0:
        return 1.0
    first, log_mean = max(0, int(mean - NEGLIGIBLE_DEVIATIONS * sqrt(mean))), log(mean)
    # Sum the terms by their logarithms, because exp(-mean) underflows at a mean of 745.
    return min(1.0, fsum(exp(number * log_mean - mean - lgamma(number + 1)) for number in range(first, count + 1)))
