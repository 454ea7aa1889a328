"""What ranks wrote down becomes figures, and a figure a verdict: did training go on at full speed? Pure.

    before ──▶ strike ── during ──▶ end ── healing ──▶ Protected ── after ──▶

Invariant: a verdict follows from the run alone; nothing is repeated because of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, Verdict, bootstrap_interval, moved_ratio, percentile
from benchmarks.traces import whole_rows

FULL_SPEED_RATIO = 1.02
"""A median step during a fault ÷ one without that is full speed still."""
WHOLE = "Protected"
"""The API's word for protection that lacks nothing."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary as its rank wrote it down."""

    step: int
    at: float
    """Seconds of the machine's monotonic clock."""
    held_seconds: float
    """For how long the session held the script in the step that ends here."""
    committed: int
    """The newest committed step, by the rank's page; -1: none."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a case, seconds of the same clock."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One case as it was seen."""

    name: str
    ranks: tuple[tuple[Boundary, ...], ...]
    before: Span
    during: Span
    after: Span
    healed_at: float
    """When the API said Protected again."""
    told_at: float | None
    """When the API said first that protection was not whole; None: it stayed so."""
    word: str
    """What it said last while the fault lasted."""
    reasons: tuple[str, ...]
    """And why, each once, in order."""
    did: str
    """What the fault was, in figures."""
    span_seconds: float
    """Of the wait that stands for forward and backward."""
    copy_seconds: float
    """Of a copy of the whole state."""
    state_mib: int
    """Of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the report."""

    name: str
    did: str
    before: Summary
    during: Summary
    after: Summary
    """Of step times, seconds."""
    ratio: float
    """Median step during ÷ before."""
    low: float
    high: float
    longest_seconds: float
    """The longest step from the strike until all was healed."""
    lost_seconds: float
    """By how much all steps from the strike until all was healed took longer together than as many median ones before it."""
    held_p99_seconds: float
    """Of what the session held the script in a step during the fault, all ranks."""
    commits_before: float
    """Commits ÷ steps."""
    commits_during: float
    commits_after: float
    told_seconds: float | None
    """From the strike to the word of the API; None: it stayed Protected."""
    word: str
    reasons: tuple[str, ...]
    healed_seconds: float
    """From the fault's end to Protected."""
    verdict: Verdict
    told: str
    """The verdict's sentence."""


def parse(text: str) -> tuple[Boundary, ...]:
    """Return the boundaries of one rank's lines, in order; a line that is being written is left out."""
    return tuple(
        Boundary(int(step), float(at), float(held), int(committed)) for step, at, held, committed in whole_rows(text)
    )


def steps_in(passed: Sequence[Boundary], span: Span) -> list[tuple[Boundary, Boundary]]:
    """Return the steps of which any part lies in a span, as the boundaries at their ends: the one that a strike falls into is of its time."""
    return [(earlier, later) for earlier, later in pairwise(passed) if later.at > span.begin and earlier.at < span.end]


def step_seconds(passed: Sequence[Boundary], span: Span) -> list[float]:
    """Return how long each step of a span took."""
    return [later.at - earlier.at for earlier, later in steps_in(passed, span)]


def commits_ratio(passed: Sequence[Boundary], span: Span) -> float:
    """Return the commits that a rank heard of in a span, per step: each is heard of by the boundary after it if it came in time."""
    steps = steps_in(passed, span)
    return sum(later.committed > earlier.committed for earlier, later in steps) / len(steps)


def evaluate(observed: Observed) -> Figure:
    """Return the figures of one case. Steps are the first rank's: a collective in each makes them everybody's."""
    passed = observed.ranks[0]
    before, during, after = (step_seconds(passed, span) for span in (observed.before, observed.during, observed.after))
    usual = statistics.median(before)
    low, high = bootstrap_interval(
        lambda samples: statistics.median(samples[0]) / statistics.median(samples[1]), during, before
    )
    hurt = step_seconds(passed, Span(observed.during.begin, observed.healed_at))
    held = [later.held_seconds for rank in observed.ranks for _, later in steps_in(rank, observed.during)]
    summaries = Summary.of(before), Summary.of(during), Summary.of(after)
    verdict, told = judge(low, high, *(summary.median for summary in (summaries[0], summaries[2])))
    return Figure(
        name=observed.name,
        did=observed.did,
        before=summaries[0],
        during=summaries[1],
        after=summaries[2],
        ratio=statistics.median(during) / usual,
        low=low,
        high=high,
        longest_seconds=max(hurt),
        lost_seconds=sum(hurt) - usual * len(hurt),
        held_p99_seconds=percentile(held, 0.99),
        commits_before=commits_ratio(passed, observed.before),
        commits_during=commits_ratio(passed, observed.during),
        commits_after=commits_ratio(passed, observed.after),
        told_seconds=None if observed.told_at is None else observed.told_at - observed.during.begin,
        word=observed.word,
        reasons=observed.reasons,
        healed_seconds=observed.healed_at - observed.during.end,
        verdict=verdict,
        told=told,
    )


def judge(low: float, high: float, before: float, after: float) -> tuple[Verdict, str]:
    """Return whether training went on at full speed, and why that is said.

    Args:
        low: of the interval of the ratio of median steps, during ÷ before.
        high: likewise.
        before: median step, seconds.
        after: likewise.
    """
    moved = moved_ratio(before, after)
    if moved > FLOOR_TOLERANCE_RATIO:
        return Verdict.INCONCLUSIVE, f"steps before and after differ by {moved:.0%}"
    if high <= FULL_SPEED_RATIO:
        return Verdict.PASS, f"at most {high:.3f} of {FULL_SPEED_RATIO}"
    if low > FULL_SPEED_RATIO:
        return Verdict.SHORT, f"at least {low:.3f}, {FULL_SPEED_RATIO} to reach"
    return Verdict.INCONCLUSIVE, f"{low:.3f} to {high:.3f} has {FULL_SPEED_RATIO} in it"
