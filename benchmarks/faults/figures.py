"""Decides from the ranks' traces whether training continued at full speed during a fault.

    before ──▶ fault starts ── during ──▶ fault ends ── healing ──▶ the API reports Protected ── after ──▶

The functions are pure. Invariant: a verdict depends on this run only, and no measurement is repeated because of its
verdict.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, Verdict, bootstrap_interval, moved_ratio, percentile
from benchmarks.traces import whole_rows

FULL_SPEED_RATIO = 1.02
"""Largest ratio of median step times, during ÷ before the fault, that counts as full speed."""
WHOLE = "Protected"
"""Protection state that the API reports for a job whose shards all have their copies."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One line of a rank's trace: the boundary after one finished step."""

    step: int
    at: float
    """Monotonic seconds at which the rank finished the step."""
    held_seconds: float
    """Seconds for which the session blocked the script in the step that ends at this boundary."""
    committed: int
    """The newest committed step on the rank's page; -1 before the first commit."""


@dataclass(frozen=True, slots=True)
class Span:
    """One of the time spans of a case (before, during or after the fault), in monotonic seconds."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations around one fault: the steps of every rank, and the protection states that the API reported."""

    name: str
    ranks: tuple[tuple[Boundary, ...], ...]
    before: Span
    during: Span
    after: Span
    healed_at: float
    """Monotonic seconds at which the API reported Protected after the fault."""
    told_at: float | None
    """Monotonic seconds at which the API first reported a state other than Protected.

    None if the API did not.
    """
    word: str
    """The last protection state that the API reported during the fault."""
    reasons: tuple[str, ...]
    """The reasons that the API reported for incomplete protection, each once, in the order of their first report."""
    did: str
    """Sentence about the effect that the injected fault had, with numbers (`cases.Struck.did`)."""
    span_seconds: float
    """Duration in seconds of the wait that replaces forward and backward in each step."""
    copy_seconds: float
    """Duration of a plain copy of the rank's whole state within memory, in seconds."""
    state_mib: int
    """Size of one rank's state in MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The measured values of one case, which form one row of the benchmark's page in `docs/`."""

    name: str
    did: str
    before: Summary
    during: Summary
    after: Summary
    """Step times after healing, in seconds. `before` and `during` have the same unit."""
    ratio: float
    """Median step time during the fault ÷ median step time before the fault."""
    low: float
    high: float
    longest_seconds: float
    """Duration of the longest step between the start of the fault and the end of healing."""
    lost_seconds: float
    """Training time that the fault cost, in seconds.

    The value is the duration of all steps from the start of the fault to the end of healing, minus the median step time
    before the fault × the number of these steps.
    """
    held_p99_seconds: float
    """99th percentile of the time for which the session blocked a step during the fault, over all ranks."""
    commits_before: float
    """Number of commits ÷ number of steps, before the fault."""
    commits_during: float
    commits_after: float
    told_seconds: float | None
    """Seconds from the fault's start until the API reported a state other than Protected.

    None if the API did not.
    """
    word: str
    reasons: tuple[str, ...]
    healed_seconds: float
    """Seconds from the fault's end until the API reported Protected."""
    verdict: Verdict
    told: str
    """Sentence that explains why training counts as undisturbed, as disturbed, or as neither (`verdict`)."""


def parse(text: str) -> tuple[Boundary, ...]:
    """Return the boundaries in one rank's trace, in order. An incomplete last line is skipped."""
    return tuple(
        Boundary(int(step), float(at), float(held), int(committed)) for step, at, held, committed in whole_rows(text)
    )


def steps_in(passed: Sequence[Boundary], span: Span) -> list[tuple[Boundary, Boundary]]:
    """Return the trace entries before and after each step that overlaps a time span completely or partly."""
    return [(earlier, later) for earlier, later in pairwise(passed) if later.at > span.begin and earlier.at < span.end]


def step_seconds(passed: Sequence[Boundary], span: Span) -> list[float]:
    """Return the duration in seconds of each step that overlaps `span`, for example the time of the fault."""
    return [later.at - earlier.at for earlier, later in steps_in(passed, span)]


def commits_ratio(passed: Sequence[Boundary], span: Span) -> float:
    """Return commits ÷ steps of a time span, as one rank saw them.

    A step counts as a commit if the newest committed step on the rank's shared page rose during the step.
    """
    steps = steps_in(passed, span)
    return sum(later.committed > earlier.committed for earlier, later in steps) / len(steps)


def evaluate(observed: Observed) -> Figure:
    """Compute the measured values of one case, and whether training stayed at full speed (the verdict).

    Step times come from the first rank's trace, because the collective in each step keeps all ranks together.
    """
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
    """Return the verdict whether training stayed at full speed during the fault, and the reason for it.

    Args:
        low: lower bound of the median step time during the fault ÷ the median step time before the fault.
        high: upper bound of that ratio.
        before: median step time before the fault in seconds.
        after: median step time in seconds after the benchmark has ended the fault.
    """
    moved = moved_ratio(before, after)
    if moved > FLOOR_TOLERANCE_RATIO:
        return Verdict.INCONCLUSIVE, f"steps before and after differ by {moved:.0%}"
    if high <= FULL_SPEED_RATIO:
        return Verdict.PASS, f"at most {high:.3f} of {FULL_SPEED_RATIO}"
    if low > FULL_SPEED_RATIO:
        return Verdict.SHORT, f"at least {low:.3f}, {FULL_SPEED_RATIO} to reach"
    return Verdict.INCONCLUSIVE, f"{low:.3f} to {high:.3f} has {FULL_SPEED_RATIO} in it"
