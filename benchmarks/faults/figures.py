"""Decides from the ranks' traces whether training continued at full speed during a fault. Pure.

before ──▶ fault starts ── during ──▶ fault ends ── healing ──▶ the API reports Protected ── after ──▶
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, Verdict, bootstrap_interval, moved_ratio, percentile
from benchmarks.traces import whole_rows

FULL_SPEED_RATIO = 1.02
"""Largest ratio of median step times, during ÷ before, of full speed."""
WHOLE = "Protected"
"""Protection state of a job whose shards all have their copies."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One line of a rank's trace: a finished step."""

    step: int
    at: float
    """Monotonic seconds."""
    held_seconds: float
    """Seconds for which the session blocked the step that ends here."""
    committed: int
    """Newest committed step on the rank's page; -1 before the first commit."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time before, during or after the fault, in monotonic seconds."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The steps of every rank around one fault, and the protection states that the API reported."""

    name: str
    ranks: tuple[tuple[Boundary, ...], ...]
    before: Span
    during: Span
    after: Span
    healed_at: float
    """First report of Protected after the fault, in monotonic seconds."""
    told_at: float | None
    """First report of another state, in monotonic seconds, or None."""
    word: str
    """Last protection state during the fault."""
    reasons: tuple[str, ...]
    """Reasons for incomplete protection, each once, in order."""
    did: str
    """`cases.Struck.did`."""
    span_seconds: float
    """Wait in place of forward and backward."""
    copy_seconds: float
    """Plain copy of the rank's whole state within memory."""
    state_mib: int
    """MiB of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One case, a row of the page."""

    name: str
    did: str
    before: Summary
    during: Summary
    after: Summary
    """Step times after healing, in seconds, as in `before` and `during`."""
    ratio: float
    """Median step time, during ÷ before."""
    low: float
    high: float
    longest_seconds: float
    """Longest step from the fault to the end of healing."""
    lost_seconds: float
    """Duration of all steps from the fault to the end of healing, beyond the median before × their number."""
    held_p99_seconds: float
    """99th percentile of the session's blocked time per step during the fault, over all ranks."""
    commits_before: float
    """Commits ÷ steps."""
    commits_during: float
    commits_after: float
    told_seconds: float | None
    """Seconds from the fault until the API reported another state, or None."""
    word: str
    reasons: tuple[str, ...]
    healed_seconds: float
    """Seconds from the fault's end until the API reported Protected."""
    verdict: Verdict
    told: str
    """Sentence that explains `verdict`."""


def parse(text: str) -> tuple[Boundary, ...]:
    """Return the boundaries of a trace, in order, without an incomplete last line."""
    return tuple(
        Boundary(int(step), float(at), float(held), int(committed)) for step, at, held, committed in whole_rows(text)
    )


def steps_in(passed: Sequence[Boundary], span: Span) -> list[tuple[Boundary, Boundary]]:
    """Return the entries before and after each step that overlaps a span."""
    return [(earlier, later) for earlier, later in pairwise(passed) if later.at > span.begin and earlier.at < span.end]


def step_seconds(passed: Sequence[Boundary], span: Span) -> list[float]:
    """Return the seconds of each step that overlaps a span."""
    return [later.at - earlier.at for earlier, later in steps_in(passed, span)]


def commits_ratio(passed: Sequence[Boundary], span: Span) -> float:
    """Return commits ÷ steps of a span, as one rank saw them."""
    # A step counts as a commit if the newest committed step on the rank's page rose during it.
    steps = steps_in(passed, span)
    return sum(later.committed > earlier.committed for earlier, later in steps) / len(steps)


def evaluate(observed: Observed) -> Figure:
    """Compute the values and the verdict of one case."""
    # The first rank's trace suffices, because the collective in each step keeps all ranks together.
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
    """Return whether training stayed at full speed, and why.

    `low` and `high` bound the ratio of median step times, during ÷ before. `before` and `after` are medians in seconds.
    """
    moved = moved_ratio(before, after)
    if moved > FLOOR_TOLERANCE_RATIO:
        return Verdict.INCONCLUSIVE, f"steps before and after differ by {moved:.0%}"
    if high <= FULL_SPEED_RATIO:
        return Verdict.PASS, f"at most {high:.3f} of {FULL_SPEED_RATIO}"
    if low > FULL_SPEED_RATIO:
        return Verdict.SHORT, f"at least {low:.3f}, {FULL_SPEED_RATIO} to reach"
    return Verdict.INCONCLUSIVE, f"{low:.3f} to {high:.3f} has {FULL_SPEED_RATIO} in it"
