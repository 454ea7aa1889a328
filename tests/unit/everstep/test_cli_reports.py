"""Tests `everstep reports`: the tables of a report, and its rows as CSV."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime

import pytest

from everstep.cli.report_rows import RowKind, as_csv, rows
from tests.unit.everstep.test_cli import least

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def incidents(count: int, cost_usd: float) -> dict:
    return {
        "Count": count,
        "RecoveredCount": count,
        "RecoverySeconds": 60.0 * count,
        "RecomputedSteps": 5 * count,
        "CostUsd": cost_usd,
    }


def figures(**changes: object) -> dict:
    return {
        "AccountingSeconds": {"train": 3000.0, "detect": 600.0},
        "ProductiveSeconds": 3000.0,
        "EttrRatio": 0.8333,
        "EttrWithQueueRatio": 0.8,
        "NodeSeconds": 7200.0,
        "RankSeconds": 57600.0,
        "UnpricedNodeSeconds": 3600.0,
        "CostUsd": 20.0,
        "Failures": incidents(1, 3.0),
        "PlannedStops": incidents(0, 0.0),
        "Drills": incidents(2, 0.5),
        "MttfSeconds": 3000.0,
        "MttrSeconds": 60.0,
        "IdleNodeSeconds": {"spare": 3600.0},
        "SpareCostUsd": 10.0,
        **changes,
    }


REPORT = {
    "StartTime": START,
    "EndTime": START,
    "Total": figures(),
    "Buckets": [{"StartTime": START, "EndTime": START, "Figures": figures()}],
    "Projects": [{"Project": "speech", "Figures": figures()}],
    "Fleets": [{"FleetName": "main", "Figures": figures()}],
    "Jobs": [{"TrainingJobName": "gpt", "RunId": "r1", "Project": "speech", "FleetName": "main", "Figures": figures()}],
    "OtherJobs": figures(CostUsd=7.5),
    "JobCount": 4,
    "Causes": [{"Cause": "hang", "Kind": "Failure", "Incidents": incidents(1, 3.0)}],
}


def test_a_report_is_shown_as_totals_and_tables(run):
    code, out, _, calls = run(
        "reports", "show", "--since", "2026-02-01", "--until", "2026-03-01T12:30", "--period", "day", "--project",
        "speech", "--fleet", "main", "--max-jobs", "1", get_report=REPORT,
    )  # fmt: skip
    assert code == 0
    assert calls == [
        (
            "get_report",
            {
                "StartTime": datetime(2026, 2, 1, tzinfo=UTC),
                "EndTime": datetime(2026, 3, 1, 12, 30, tzinfo=UTC),
                "Period": "Day",
                "Project": "speech",
                "FleetName": "main",
                "MaxJobs": 1,
            },
        )
    ]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "ETTR 0.833",
        "node hours 2.00",
        "cost of jobs $20.00",
        "cost of failures $3.00",
        "cost of idle spares $10.00",
        "cost of other idle nodes -",
        "MTTF 50 min 00 s",
        "recomputed steps 5",
        "drills 2, $0.5000, 10 recomputed steps",
        "without a price 1.00 node hours",
        "2026-03-01 12:00:00 2.00 0.833 $20.00 1 $3.00 50 min 00 s 1 min 00 s $10.00",
        "(3 other jobs) 2.00 0.833 $7.50 1 $3.00 50 min 00 s 1 min 00 s",
        "hang Failure 1 5 $3.00",
    ):
        assert line in lines


def test_the_rows_of_a_csv_file_have_every_figure_of_the_report():
    (bucket,) = csv.DictReader(io.StringIO(as_csv(rows(REPORT, RowKind.BUCKETS))))
    assert (bucket["StartTime"], bucket["CostUsd"], bucket["OtherIdleCostUsd"]) == ("2026-03-01T12:00:00Z", "20.0", "")
    assert (bucket["FailuresCostUsd"], bucket["DrillsCount"]) == ("3.0", "2")
    assert (bucket["TrainSeconds"], bucket["QueueSeconds"]) == ("3000.0", "0.0")
    jobs = list(csv.DictReader(io.StringIO(as_csv(rows(REPORT, RowKind.JOBS)))))
    assert [(job["TrainingJobName"], job["RunId"], job["CostUsd"]) for job in jobs] == [
        ("gpt", "r1", "20.0"),
        ("(other jobs)", "", "7.5"),
    ]
    for kind, name in ((RowKind.PROJECTS, "Project"), (RowKind.FLEETS, "FleetName"), (RowKind.CAUSES, "Cause")):
        (row,) = rows(REPORT, kind)
        assert row[name] in ("speech", "main", "hang")


def test_a_csv_cell_is_never_a_formula():
    assert as_csv([{"Project": "=cmd()", "CostUsd": -1.5}]) == "Project,CostUsd\r\n'=cmd(),-1.5\r\n"
    assert as_csv([{"Project": "\t@x"}]) == "Project\r\n'\t@x\r\n"
    assert as_csv([]) == ""


@pytest.mark.parametrize("to", [True, False])
def test_a_report_is_exported_to_stdout_or_to_a_file(run, tmp_path, to):
    path = tmp_path / "jobs.csv"
    code, out, _, calls = run("reports", "export", "jobs", *(["--to", str(path)] if to else []), get_report=REPORT)
    assert (code, calls) == (0, [("get_report", {"MaxJobs": 100})])
    text = path.read_bytes().decode() if to else out.replace("\n", "\r\n").replace("\r\r", "\r")
    assert text == as_csv(rows(REPORT, RowKind.JOBS))
    assert (out == "") is to


@pytest.mark.parametrize("kind", [*RowKind])
def test_a_report_of_nothing_is_shown_and_exported(run, kind):
    empty = least("Report")
    assert run("reports", "show", get_report=empty)[0] == 0
    assert run("reports", "export", kind.value, get_report=empty)[0] == 0
