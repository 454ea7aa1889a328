"""Computes the verdict on each case: whether Everstep's slowdown of training meets its limit. Pure."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.interleave.figures import Figure
from benchmarks.interleave.schemes import MAX_SLOWDOWN, Scheme
from benchmarks.measures import Verdict
from benchmarks.rows import Row

SLOWDOWN_LIMIT = 0.015
"""Limit of the upper bound of the 95 % interval, if a snapshot fits into the idle time."""
BLOCKING_COST = 0.10
"""If BLOCKING costs less, the case cannot show a difference between the schemes."""
KEPT_RATIO = 0.95
LEAST_KEPT = 3
"""Acknowledged snapshots if `Case.is_crowded`. Fewer would have a small slowdown for this reason alone."""


def judge(figure: Figure) -> Row:
    """Return Everstep's slowdown in one case, with its verdict."""
    ours = figure.row(Scheme.EVERSTEP)
    row = Row(
        what=figure.case.name,
        value=ours.slowdown,
        unit="%",
        n=ours.iterations,
        low=ours.low,
        high=ours.high,
        limit=MAX_SLOWDOWN if figure.case.is_crowded else SLOWDOWN_LIMIT,
    )
    if figure.case.is_crowded:
        kept = f"{ours.kept} snapshots in {ours.iterations} steps"
        if ours.kept < LEAST_KEPT:
            return replace(row, verdict=Verdict.SHORT, reason=f"{kept}, limit: at least {LEAST_KEPT}")
        return replace(
            row, verdict=_verdict(row), reason=f"at most {ours.high:+.2%} of {MAX_SLOWDOWN:.0%} (max_slowdown), {kept}"
        )
    blocking = figure.row(Scheme.BLOCKING)
    if blocking.slowdown < BLOCKING_COST:
        return row.judged(f"blocking costs {blocking.slowdown:.1%}, less than {BLOCKING_COST:.0%}")
    verdict = _verdict(row)
    if verdict is Verdict.PASS and ours.kept_ratio < KEPT_RATIO:
        kept = f"{ours.kept_ratio:.2f} snapshots kept per step, limit: {KEPT_RATIO}"
        return replace(row, verdict=Verdict.SHORT, reason=kept)
    bound = f"at most {ours.high:+.2%} of {SLOWDOWN_LIMIT:.1%}, where blocking costs {blocking.slowdown:+.1%}"
    return replace(row, verdict=verdict, reason=bound)


def _verdict(row: Row) -> Verdict:
    assert row.low is not None
    assert row.high is not None
    assert row.limit is not None
    if row.high <= row.limit:
        return Verdict.PASS
    return Verdict.SHORT if row.low > row.limit else Verdict.INCONCLUSIVE


def beats_uniform(figure: Figure) -> bool:
    """Return whether Everstep's interval of slowdowns lies below UNIFORM's."""
    return figure.row(Scheme.EVERSTEP).high < figure.row(Scheme.UNIFORM).low
