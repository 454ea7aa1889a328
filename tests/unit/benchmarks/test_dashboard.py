"""The benchmark of the dashboard's response times: its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.dashboard.report import FRAME_MS, PAGE, Run, rows
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
    shown_seconds=[0.1] * 19 + [0.6],
    frames_ms={"the log": [16.7] * 95 + [50.0] * 5},
    is_quick=False,
    seconds=60.0,
)


def test_the_middle_load_the_slowest_faults_and_nearly_all_frames_count() -> None:
    assert [row.value for row in rows(RUN)] == [1.2, 0.1, 16.7]


@pytest.mark.parametrize(
    ("changes", "falls_short"),
    [
        ({"interactive_seconds": [1.6]}, [True, False, False]),
        ({"shown_seconds": [0.1] * 18 + [0.6] * 2}, [False, True, False]),
        ({"frames_ms": {"the log": [16.7] * 9 + [FRAME_MS + 1]}}, [False, False, True]),
    ],
)
def test_what_falls_short_is_said(changes: dict[str, object], falls_short: list[bool]) -> None:
    run = replace(RUN, **changes)  # type: ignore[arg-type]
    assert [row.verdict is Verdict.SHORT for row in rows(run)] == falls_short
    assert render(PAGE, run).count("**falls short**") == 1
    assert render(PAGE, RUN).count("| pass |") == 3


def test_a_quick_run_or_a_busy_machine_is_said() -> None:
    assert "count for nothing" in render(PAGE, replace(RUN, is_quick=True))
    busy = replace(RUN, machine=replace(MACHINE, load_average=(3.0, 1.0, 1.0)), interactive_seconds=[9.0])
    assert "Run the benchmark again" in render(PAGE, busy)
    assert render(PAGE, busy).count("| inconclusive: the machine was busy") == len(rows(busy)), (
        "nothing is reached and nothing missed"
    )
    assert {row.verdict for row in rows(busy)} == {Verdict.INCONCLUSIVE}
    assert "Run the benchmark again" not in render(PAGE, RUN)
