"""Defines the row of a measured value with its limit and verdict, and renders rows as a table. Pure.

A verdict depends on one run only. On a busy machine, every verdict is inconclusive, except for wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from benchmarks.measures import BUSY_LOAD_RATIO, Verdict

BUSY = f"the machine was busy when the run began (load above {BUSY_LOAD_RATIO} per core)"
VERIFIED = {None: "", True: "yes", False: "**no**"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value. Without a limit, it has no verdict."""

    what: str = ""
    value: float
    unit: str = ""
    """Unit of value, interval and limit. With `%`, they are ratios, shown as signed percentages."""
    n: int = 1
    low: float | None = None
    high: float | None = None
    """Upper bound of the 95 % confidence interval, as `low` the lower. None without one."""
    limit: float | None = None
    is_least: bool = False
    """Whether the limit is a minimum instead of a maximum."""
    against: str = ""
    """Origin of the limit, or a value for comparison."""
    floor_moved_ratio: float | None = None
    verified: bool | None = None
    """Whether compared bytes were equal; None if none were compared."""
    verdict: Verdict = Verdict.NONE
    reason: str = ""

    @property
    def is_reached(self) -> bool:
        """Whether the value is within its limit."""
        assert self.limit is not None
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def judged(self, doubt: str = "") -> Self:
        """Return a copy with the verdict. `doubt` is why none is possible; empty if one is."""
        if doubt:
            return replace(self, verdict=Verdict.INCONCLUSIVE, reason=doubt)
        return replace(self, verdict=Verdict.PASS if self.is_reached else Verdict.SHORT)


AnyRow = TypeVar("AnyRow", bound=Row)


def without_verdicts(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """Return the rows with inconclusive verdicts of a busy machine. Verdicts on wrong bytes stay."""
    return [
        replace(row, verdict=Verdict.INCONCLUSIVE, reason=f"{BUSY}; {row.reason}" if row.reason else BUSY)
        if row.verdict is not Verdict.NONE and row.verified is not False
        else row
        for row in rows
    ]


def exit_code(rows: Iterable[Row], *, is_busy: bool) -> int:
    """Return 2 if a row misses its limit, 3 if the machine was busy, else 0."""
    return 2 if any(row.verdict is Verdict.SHORT for row in rows) else 3 if is_busy else 0


def number(value: float) -> str:
    """Return a value with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value in a row's unit, without the unit."""
    return f"{value:+.1%}" if unit == "%" else number(value)


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    titles = tuple(head)
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in (titles, ("---",) * len(titles), *([_cell(text) for text in row] for row in rows))
    )


def limits(
    rows: Sequence[AnyRow],
    lead: Sequence[str] = ("what",),
    cells: Callable[[AnyRow], Sequence[str]] = lambda row: (row.what,),
) -> str | None:
    """Return the table of values, limits and verdicts, without empty columns; None without rows.

    `cells` returns a row's entries in the first columns, which `lead` names.
    """
    if not rows:
        return None
    head = (*lead, "measured", "95 %", "n", "to reach", "floor moved", "verified", "verdict")
    body = [
        (
            *cells(row),
            f"**{quantity(row.value, row.unit)}**{_unit(row)}",
            _interval(row),
            str(row.n),
            limit_of(row),
            "" if row.floor_moved_ratio is None else f"{row.floor_moved_ratio:.0%}",
            VERIFIED[row.verified],
            verdict_of(row),
        )
        for row in rows
    ]
    shown = [column for column in range(len(head)) if column < len(lead) or any(line[column] for line in body)]
    return table((head[column] for column in shown), ([line[column] for column in shown] for line in body))


def limit_of(row: Row) -> str:
    """Return a row's limit with its source."""
    if row.limit is None:
        return row.against
    limit = f"{'≥' if row.is_least else '≤'} {quantity(row.limit, row.unit)}{_unit(row)}"
    return f"{limit}, {row.against}" if row.against else limit


def verdict_of(row: Row) -> str:
    """Return a row's verdict with the reason."""
    verdict = "**falls short**" if row.verdict is Verdict.SHORT else str(row.verdict)
    return ": ".join(part for part in (verdict, row.reason) if part)


def line(row: Row) -> str:
    """Return a row as a line for a terminal."""
    limit = f" ({limit_of(row)})" if limit_of(row) else ""
    reason = f": {row.reason}" if row.reason else ""
    return f"{row.verdict:>12}  {row.what} {quantity(row.value, row.unit)}{_unit(row)}{limit}{reason}"


def _unit(row: Row) -> str:
    return f" {row.unit}" if row.unit not in ("", "%") else ""


def _interval(row: Row) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{quantity(row.low, row.unit)} to {quantity(row.high, row.unit)}"


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
