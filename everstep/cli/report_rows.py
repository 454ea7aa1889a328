"""Turns a report into rows of plain values, for tables and CSV files. Pure.

Invariant: a cell contains a figure of the service's answer, without rounding.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from everstep.cli.formats import plain

Row = Mapping[str, Any]
"""Values by column name. A figure that the service leaves out is None."""


class RowKind(StrEnum):
    """The list in a report whose elements become the rows of a CSV file, such as jobs or fleets."""

    BUCKETS = "buckets"
    PROJECTS = "projects"
    FLEETS = "fleets"
    JOBS = "jobs"
    CAUSES = "causes"


_PLAIN: Final = (
    "ProductiveSeconds",
    "EttrRatio",
    "EttrWithQueueRatio",
    "NodeSeconds",
    "RankSeconds",
    "UnpricedNodeSeconds",
    "CostUsd",
    "SpareCostUsd",
    "OtherIdleCostUsd",
    "MttfSeconds",
    "MttrSeconds",
)
_INCIDENTS: Final = ("Failures", "PlannedStops", "Drills")
_SUMS: Final = ("Count", "RecoveredCount", "RecoverySeconds", "RecomputedSteps", "CostUsd")
_TIMES: Final = (
    "queue",
    "provision",
    "start",
    "train",
    "shortage",
    "stall",
    "rehearsal",
    "detect",
    "replace",
    "restore",
    "rework",
    "stopping",
    "paused",
    "unaccounted",
)


def rows(report: Mapping[str, Any], kind: RowKind) -> Sequence[Row]:
    """Return one row per bucket (time interval), project, fleet, job or cause.

    The rows of jobs end with a row for the jobs that the report does not list, if there are any.
    """
    if kind is RowKind.CAUSES:
        return [
            {"Cause": each["Cause"], "Kind": each["Kind"], **{name: each["Incidents"].get(name) for name in _SUMS}}
            for each in report["Causes"]
        ]
    names: Mapping[RowKind, tuple[str, tuple[str, ...]]] = {
        RowKind.BUCKETS: ("Buckets", ("StartTime", "EndTime")),
        RowKind.PROJECTS: ("Projects", ("Project",)),
        RowKind.FLEETS: ("Fleets", ("FleetName",)),
        RowKind.JOBS: ("Jobs", ("TrainingJobName", "RunId", "Project", "FleetName")),
    }
    field, keys = names[kind]
    found = [{**{key: plain(each[key]) for key in keys}, **_figures(each["Figures"])} for each in report[field]]
    if kind is RowKind.JOBS and "OtherJobs" in report:
        found.append({**dict.fromkeys(keys), "TrainingJobName": "(other jobs)", **_figures(report["OtherJobs"])})
    return found


def as_csv(found: Sequence[Row]) -> str:
    """Return rows as CSV (RFC 4180) with a header. A missing figure is an empty cell. Empty text without rows.

    A spreadsheet executes a text that begins with `=`, `+`, `-` or `@`, also after white space, so such a text gets a
    leading apostrophe.
    """
    text = io.StringIO()
    if found:
        writer = csv.DictWriter(text, list(found[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in found)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")) else value


def _figures(figures: Mapping[str, Any]) -> Row:
    def parts() -> Iterator[tuple[str, Any]]:
        get: Callable[[str], Any] = figures.get
        yield from ((name, get(name)) for name in _PLAIN)
        for group in _INCIDENTS:
            yield from ((f"{group}{name}", figures[group].get(name)) for name in _SUMS)
        yield from ((f"{name.capitalize()}Seconds", figures["AccountingSeconds"].get(name, 0.0)) for name in _TIMES)

    return dict(parts())
