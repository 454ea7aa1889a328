"""How many spares a fleet keeps: a count that the user says, or as many as make it probable that one is free when a failure comes.

A spare that takes over is missing until its replacement is there. Failures come as a Poisson process of rate λ·n (n
nodes at work), a replacement takes R on average, however it is distributed; so the number of replacements under way is
Poisson with mean ρ = λ·n·R (Palm's theorem), and a failure, which sees what an observer at a random moment sees, finds
one of s spares free with

    P(s) = P(Poisson(ρ) ≤ s − 1)            the smallest s with P(s) ≥ Probability is kept

λ is not known but estimated, and a fleet that has seen nothing yet has no reason to hope: one failure in 154 node-days
(RSC-1) is added to what was seen, and λ is the exact upper bound of 95 % confidence: the rate with which so few
failures or fewer would be seen once in twenty. R is the mean of the measured times, with three of 7 minutes (the
paper's longest) counted in. From five failures on, the bound on what was seen alone counts where it is higher: the
node-days of the prior must not water down a fleet that fails ten times a day.

Invariant: pure; more failures, longer replacements, more nodes and a higher probability never mean fewer spares.
Source: Palm 1938; Feeney and Sherbrooke 1966 ((s − 1, s) policy); Garwood 1936 (the interval); Kokolis et al., HPCA'25
(6.5 failures per 1,000 node-days); GEMINI, SOSP'23 (4 to 7 minutes).
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, fsum, lgamma, log, sqrt

from control_plane.core.observed.fleets import FleetHistory, FleetSpec

PRIOR_FAILURES = 1
PRIOR_NODE_SECONDS = 154 * 86_400.0
ENOUGH_FAILURES = 5
"""From this many on, a fleet that fails more often than the prior is believed at once."""
PRIOR_REPLACEMENTS = 3
PRIOR_REPLACEMENT_SECONDS = 420.0
DOUBT = 0.05
"""How improbable it may be that failures come more often than is reckoned with."""
MOST_SPARES = 1_000
NEGLIGIBLE_DEVIATIONS = 10
"""So many standard deviations below its mean a Poisson variable is with a probability below e^-50 (Chernoff)."""


def spare_count(spec: FleetSpec, history: FleetHistory, working_count: int) -> int:
    """Return how many nodes beyond the jobs' own a fleet keeps booted and connected.

    Args:
        spec: what the user wants.
        history: what the fleet has seen.
        working_count: nodes that jobs have or wait for.

    Returns:
        The count asked for, or the smallest that the probability asked for needs.
    """
    if spec.spare_probability is None:
        return max(0, spec.spare_count)
    under_way = failures_per_node_second(history) * working_count * replacement_seconds(history)
    return bisect_left(range(MOST_SPARES), spec.spare_probability, key=lambda count: free_probability(count, under_way))


def free_probability(count: int, under_way: float) -> float:
    """Return the probability that a failure finds one of `count` spares free while `under_way` replacements are expected to be under way."""
    return _poisson_at_most(count - 1, under_way) if count > 0 else 0.0


def failures_per_node_second(history: FleetHistory) -> float:
    """Return the rate to reckon with: the upper bound on what was seen and the prior together, or on what was seen alone once that is worse."""
    lost, worked = history.lost_node_count, history.node_seconds
    reckoned = most_expected(lost + PRIOR_FAILURES) / (worked + PRIOR_NODE_SECONDS)
    return max(reckoned, most_expected(lost) / max(worked, 1.0)) if lost >= ENOUGH_FAILURES else reckoned


def replacement_seconds(history: FleetHistory) -> float:
    """Return the mean time until a replacement is there: AWS has capacity for it, it has booted and its agent is connected."""
    total = history.replacement_seconds + PRIOR_REPLACEMENTS * PRIOR_REPLACEMENT_SECONDS
    return total / (history.replacement_count + PRIOR_REPLACEMENTS)


def most_expected(seen: int) -> float:
    """Return the mean of the Poisson distribution under which `seen` events or fewer come with the probability `DOUBT`."""
    low, high = float(seen), 2.0 * seen + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _poisson_at_most(seen, middle) > DOUBT else (low, middle)
    return high


def _poisson_at_most(count: int, mean: float) -> float:
    """Return P(Poisson(mean) ≤ count), by its terms, each from its logarithm: exp(-mean) alone vanishes for a mean of 745."""
    if mean == 0:
        return 1.0
    first, log_mean = max(0, int(mean - NEGLIGIBLE_DEVIATIONS * sqrt(mean))), log(mean)
    return min(1.0, fsum(exp(number * log_mean - mean - lgamma(number + 1)) for number in range(first, count + 1)))
