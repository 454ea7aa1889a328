"""The benchmark of the dashboard's response times writes its page from stored samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.dashboard.report import FRAME_MS, METRICS_TAB, PAGE, Run, rows
from benchmarks.measures import Verdict
from benchmarks.page import render
from tests.unit.benchmarks.machine import MACHINE

RUN = Run(
    machine=MACHINE,
    chromium="Chromium 1",
    jobs=1000,
    nodes=256,
    lines=5000,
    interactive_seconds=[1.0, 1.2, 9.0],
    week_seconds=[1.3, 1.4, 9.0],
    shown_seconds=[0.1] * 19 + [0.6],
    frames_ms={"the log": [16.7] * 95 + [50.0] * 5},
    bytes_per_hour={METRICS_TAB: (4e6, 490e6), "the page of a job": (9e6, 90e6)},
    shifts={"/": 0.01, "/jobs": 0.04},
    first_load_bytes={"/": 200_000, "/jobs": 180_000},
    is_quick=False,
    seconds=60.0,
)


def test_the_middle_load_the_slowest_faults_and_nearly_all_frames_count() -> None:
    assert [row.value for row in rows(RUN)] == [1.2, 1.4, 0.1, 16.7, 4.0, 9.0, 0.04, 200.0]


def test_traffic_is_compared_with_complete_uncompressed_responses() -> None:
    page = render(PAGE, RUN)
    assert "| an open Metrics tab receives per hour | **4** MB | 1 | ≤ 5 MB, 490 MB without compression" in page
    assert "| the page of a job receives per hour | **9** MB | 1 | 90 MB without compression and changes |" in page
    assert "| largest layout shift: /jobs | **0.04** | 2 | ≤ 0.05 | pass |" in page


@pytest.mark.parametrize(
    ("changes", "short"),
    [
        ({"interactive_seconds": [1.6]}, 0),
        ({"week_seconds": [2.1]}, 1),
        ({"shown_seconds": [0.1] * 18 + [0.6] * 2}, 2),
        ({"frames_ms": {"the log": [16.7] * 9 + [FRAME_MS + 1]}}, 3),
        ({"bytes_per_hour": {METRICS_TAB: (6e6, 490e6)}}, 4),
        ({"shifts": {"/": 0.06, "/jobs": 0.0}}, 6),
        ({"first_load_bytes": {"/": 251_000}}, 7),
    ],
)
def test_what_falls_short_is_said(changes: dict[str, object], short: int) -> None:
    run = replace(RUN, **{"bytes_per_hour": RUN.bytes_per_hour, **changes})  # type: ignore[arg-type]
    found = [row.what for row in rows(run) if row.verdict is Verdict.SHORT]
    assert len(found) == 1
    assert found[0].partition(":")[0] == rows(RUN)[short].what.partition(":")[0]
    assert render(PAGE, run).count("**falls short**") == 1
    assert render(PAGE, RUN).count("| pass |") == 7


def test_a_quick_run_or_a_busy_machine_is_said() -> None:
    assert "count for nothing" in render(PAGE, replace(RUN, is_quick=True))
    busy = replace(RUN, machine=replace(MACHINE, load_average=(3.0, 1.0, 1.0)), interactive_seconds=[9.0])
    assert "Run the benchmark again" in render(PAGE, busy)
    judged = [row for row in rows(busy) if row.limit is not None]
    assert render(PAGE, busy).count("| inconclusive: the machine was busy") == len(judged), (
        "nothing is reached and nothing missed"
    )
    assert {row.verdict for row in judged} == {Verdict.INCONCLUSIVE}
    assert "Run the benchmark again" not in render(PAGE, RUN)
