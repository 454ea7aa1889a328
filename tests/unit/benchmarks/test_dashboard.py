"""The report of how fast the dashboard is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.dashboard.report import FRAME_MS, Run, render, rows
from benchmarks.machine import Machine

MACHINE = Machine(
    processor="a processor",
    cores=2,
    memory_gib=8.0,
    kernel="Linux 6",
    python="3.11",
    versions={},
    load_average=(0.1, 0.1, 0.1),
)
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
    measured = {row.what.split()[0]: (row.measured, row.falls_short) for row in rows(RUN)}
    assert measured["list"] == (1.2, False)
    assert rows(RUN)[1].measured == 0.1
    assert rows(RUN)[2].measured == 16.7


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
    assert [row.falls_short for row in rows(run)] == falls_short
    assert render(run).count("**falls short**") == 1
    assert render(RUN).count("| pass |") == 3


def test_a_quick_run_or_a_busy_machine_is_said() -> None:
    assert "measures nothing" in render(replace(RUN, is_quick=True))
    busy = replace(RUN, machine=replace(MACHINE, load_average=(3.0, 1.0, 1.0)), interactive_seconds=[9.0])
    assert "run it again" in render(busy)
    assert render(busy).count("| inconclusive |") == len(rows(busy)), "nothing is reached and nothing missed"
    assert not any(row.falls_short for row in rows(busy))
    assert "run it again" not in render(RUN)
