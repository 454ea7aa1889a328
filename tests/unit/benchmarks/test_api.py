"""The API benchmark computes values, their verdicts (whether they meet their limits) and a page from samples."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.api.report import PAGE, Run, rows
from benchmarks.measures import Verdict
from benchmarks.page import render, write
from benchmarks.rows import Row
from tests.unit.benchmarks.machine import MACHINE

GOOD = Run(
    machine=MACHINE,
    is_quick=False,
    seconds=90.0,
    bare_rates=(1000.0, 1010.0, 1020.0),
    describe_rates=(600.0, 610.0),
    describe_new_rates=(300.0,),
    writes_per_second=10.0,
    job_count=10_000,
    list_seconds=(0.01,) * 99 + (0.2,),
    heartbeat_rates=(12_000.0, 13_000.0),
    heartbeat_bytes=700,
    agent_count=50,
    follow_seconds=(0.1, 0.12),
    command_seconds={"everstep --help": (0.15, 0.16), "everstep jobs list": (0.3, 0.4)},
    quiet_seconds=(0.01, 0.02),
    hostile_seconds={"uploads": (0.03, 0.04), "listings": (0.06,)},
    hostile_bytes={"uploads": 2.0**20, "listings": 2.0**21},
)


def verdicts(run: Run) -> list[str]:
    return [str(row.verdict) for row in rows(run)]


def test_a_good_run_passes_everywhere() -> None:
    assert verdicts(GOOD) == ["pass", "", *["pass"] * 8]
    assert [round(row.value, 2) for row in rows(GOOD)] == [
        *(0.6, 0.3, 10.0, 12_500.0, 120.0, 155.0, 350.0),
        *(2.0, 3.0, 2.0),
    ]
    assert rows(GOOD)[1].reason == "not judged; would fall short"
    assert rows(dataclasses.replace(GOOD, describe_new_rates=(600.0,)))[1].reason == "not judged; would pass"


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"describe_rates": (400.0,)}, 0),
        ({"list_seconds": (0.01,) * 98 + (0.06,) * 2}, 2),
        ({"heartbeat_rates": (9_999.0,)}, 3),
        ({"follow_seconds": (0.31,)}, 4),
        ({"command_seconds": {"everstep --help": (0.21,), "everstep jobs list": (0.3,)}}, 5),
        ({"command_seconds": {"everstep --help": (0.1,), "everstep jobs list": (0.51,)}}, 6),
        ({"hostile_seconds": {"uploads": (0.03,), "listings": (0.061,)}}, 8),
        ({"hostile_bytes": {"uploads": 2.0**20, "listings": 2.0**28 + 1}}, 9),
    ],
)
def test_what_falls_short_is_said_of_its_row_alone(change: dict[str, object], row: int) -> None:
    found = verdicts(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert [n for n, verdict in enumerate(found) if verdict != "pass" and n != 1] == [row]
    assert found[row] == "falls short"


def test_where_the_bare_route_moved_nothing_is_said() -> None:
    (row, *_) = rows(dataclasses.replace(GOOD, bare_rates=(1000.0, 1100.0, 1500.0), describe_rates=(1.0,)))
    assert (row.verdict, row.reason) == (Verdict.INCONCLUSIVE, "the bare route moved by 50%")


def test_on_a_busy_machine_nothing_is_reached_and_nothing_missed() -> None:
    run = dataclasses.replace(GOOD, machine=dataclasses.replace(MACHINE, load_average=(3.0, 1.0, 1.0)))
    assert set(verdicts(run)) == {"inconclusive", ""}


def test_a_limit_itself_is_reached() -> None:
    assert Row(value=50.0, limit=50.0).judged().verdict is Verdict.PASS
    assert Row(value=0.5, limit=0.5, is_least=True).judged().verdict is Verdict.PASS


def test_what_was_left_out_has_no_row_and_no_words() -> None:
    run = Run(
        machine=MACHINE, is_quick=True, seconds=1.0, heartbeat_rates=(20_000.0,), heartbeat_bytes=7, agent_count=2
    )
    assert len(rows(run)) == 1
    text = render(PAGE, run)
    assert "ListTrainingJobs" not in text.partition("## What this does not say")[0]
    assert "This was a quick run" in text


def test_the_document_has_every_verdict_and_the_file_every_figure(tmp_path: Path) -> None:
    write(PAGE, GOOD, tmp_path / "bench" / "api.json", tmp_path / "api.md")
    text = (tmp_path / "api.md").read_text()
    assert text.count("| pass |") == 9
    assert "**0.599** ×" in text
    assert "**12,500** /s" in text
    figures = json.loads((tmp_path / "bench" / "api.json").read_text())
    assert figures["describe_rates"] == [600.0, 610.0]
