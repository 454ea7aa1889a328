"""`everstep reports …`: time, cost and incidents of jobs and fleets over a time range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from everstep.cli.accounting import dollars, hours
from everstep.cli.commands import Service, Shown, command
from everstep.cli.output import Facts, Json, Rows, counted, duration, echo, when
from everstep.cli.report_rows import RowKind, as_csv, rows
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns, Detail

app = typer.Typer(no_args_is_help=True, add_completion=False)


_FIELDS: Final = FieldsOf("GetReport", {"StartTime": "--since", "EndTime": "--until", "FleetName": "--fleet"})


@command(app)
def show(service: Service, fields: Annotated[Request, _FIELDS]) -> Shown:
    """Show time, cost and incidents: in total, per time interval, and by project, fleet, job and cause."""
    report = service.get_report(**fields)
    jobs = [{"Name": each["TrainingJobName"], "Project": each["Project"], **each} for each in report["Jobs"]]
    if "OtherJobs" in report:
        count = report["JobCount"] - len(report["Jobs"])
        jobs.append({"Name": f"({counted(count, 'other job')})", "Project": "", "Figures": report["OtherJobs"]})
    return Shown(
        report,
        (
            Facts(_facts(report)),
            "",
            Rows(report["Buckets"], {"FROM (UTC)": lambda row: when(row["StartTime"]), **_IDLE}, empty=""),
            "",
            Rows(report["Projects"], {"PROJECT": "Project", **_FIGURES}, empty="No project has a job in this range."),
            "",
            Rows(report["Fleets"], {"FLEET": "FleetName", **_IDLE}, empty="No fleet matches."),
            "",
            Rows(jobs, {"JOB": "Name", "PROJECT": "Project", **_FIGURES}, empty="No job overlaps this range."),
            "",
            Rows(report["Causes"], _CAUSES, empty="No incidents."),
        ),
    )


@command(app)
def export(
    service: Service,
    kind: Annotated[RowKind, typer.Argument(help="The rows of the file.")] = RowKind.BUCKETS,
    to: Annotated[Path | None, typer.Option(help="File to write; by default stdout.")] = None,
    *,
    fields: Annotated[Request, _FIELDS],
) -> None:
    """Write the figures of a report as CSV, one row per time bucket, project, fleet, job or cause.

    Without --max-jobs, up to 100 jobs have figures of their own.
    """
    request: Request = {"MaxJobs": 100, **fields}
    text = as_csv(rows(service.get_report(**request), kind))
    if to is None:
        echo(text.removesuffix("\r\n"))
    else:
        to.write_text(text, newline="")


def _facts(report: Json) -> Sequence[tuple[str, Any]]:
    total = report["Total"]
    failures, drills = total["Failures"], total["Drills"]
    return (
        ("time range", f"{when(report['StartTime'])} to {when(report['EndTime'])} UTC"),
        ("jobs", f"{report['JobCount']:,}"),
        ("ETTR", _ratio(total, "EttrRatio")),
        ("ETTR with queue", _ratio(total, "EttrWithQueueRatio")),
        ("node hours", hours(total["NodeSeconds"])),
        ("rank hours", hours(total["RankSeconds"])),
        ("cost of jobs", _cost(total)),
        ("cost of failures", _cost(failures)),
        ("cost of idle spares", _cost(total, "SpareCostUsd")),
        ("cost of other idle nodes", _cost(total, "OtherIdleCostUsd")),
        ("failures", f"{failures['Count']:,}"),
        ("MTTF", _span(total, "MttfSeconds")),
        ("MTTR", _span(total, "MttrSeconds")),
        ("recomputed steps", f"{failures['RecomputedSteps'] + total['PlannedStops']['RecomputedSteps']:,}"),
        ("drills", f"{drills['Count']:,}, {_cost(drills)}, {drills['RecomputedSteps']:,} recomputed steps"),
        (
            "without a price",
            f"{hours(total['UnpricedNodeSeconds'])} node hours" if total["UnpricedNodeSeconds"] else None,
        ),
    )


def _cost(figures: Mapping[str, Any], name: str = "CostUsd") -> str:
    return dollars(figures[name]) if name in figures else "-"


def _span(figures: Mapping[str, Any], name: str) -> str:
    return duration(figures[name]) if name in figures else "-"


def _ratio(figures: Mapping[str, Any], name: str = "EttrRatio") -> str:
    return f"{figures[name]:.3f}" if name in figures else "-"


_FIGURES: Columns = {
    "NODE HOURS": lambda row: hours(row["Figures"]["NodeSeconds"]),
    "ETTR": lambda row: _ratio(row["Figures"]),
    "COST": lambda row: _cost(row["Figures"]),
    "FAILURES": lambda row: str(row["Figures"]["Failures"]["Count"]),
    "COST OF FAILURES": lambda row: _cost(row["Figures"]["Failures"]),
    "MTTF": Detail(lambda row: _span(row["Figures"], "MttfSeconds")),
    "MTTR": Detail(lambda row: _span(row["Figures"], "MttrSeconds")),
}
_IDLE: Columns = {**_FIGURES, "IDLE SPARES": Detail(lambda row: _cost(row["Figures"], "SpareCostUsd"))}
_CAUSES: Columns = {
    "CAUSE": "Cause",
    "KIND": "Kind",
    "INCIDENTS": lambda row: str(row["Incidents"]["Count"]),
    "RECOMPUTED STEPS": lambda row: str(row["Incidents"]["RecomputedSteps"]),
    "COST": lambda row: _cost(row["Incidents"]),
}
