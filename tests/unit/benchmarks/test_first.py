"""The benchmark's page contains the required statements for every possible result."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.first.recovery import Recovery, RecoveryRun
from benchmarks.first.report import PAGE, Results, Run, draw
from benchmarks.first.slowdown import Slowdown
from benchmarks.first.snapshot_blocking import AUDITED_COUNT, BlockingRow, Shape, row
from benchmarks.measures import Floor, Summary
from benchmarks.page import render, write
from benchmarks.picture import Bar, Panel, panels
from everstep.training.guard import AUDITED_AT_START
from tests.unit.benchmarks.machine import MACHINE


def floor(before: float, after: float) -> Floor:
    return Floor(Summary.of([before]), Summary.of([after]))


def rank(kind: str, blocked: list[float]) -> dict[str, object]:
    floors = {"memcpy": [0.01], "wait": [0.05], "matmul": [0.06]}
    return {
        "state_bytes": 64 * 1024**2,
        "span_seconds": 0.05,
        "before": floors,
        "after": floors,
        "steps": {kind: [0.05] * 2 * len(blocked)},
        "held": {
            kind: [(count, seconds) for count, snapshot in enumerate(blocked, start=1) for seconds in (snapshot, 0.001)]
        },
        "blocked": {kind: blocked},
    }


ROW = BlockingRow(
    shape=Shape(state_mib=64, nodes=2),
    compute="wait",
    state_bytes=64 * 1024**2,
    span_seconds=0.05,
    memcpy=floor(0.01, 0.01),
    plain_step=floor(0.05, 0.05),
    step=Summary.of([0.06]),
    first_blocked=0.1,
    audited_blocked=Summary.of([0.04]),
    blocked=Summary.of([0.002, 0.003, 0.004]),
    mean_blocked=0.003,
    mean_held=0.0045,
    steps_per_snapshot=2.0,
)
SLOWDOWN = Slowdown(
    order="ABBA",
    step_seconds=tuple(Summary.of([value]) for value in (0.11, 0.1, 0.1, 0.12)),
    ratios=(0.1, 0.2),
    blocked=Summary.of([0.001]),
    snapshots_ratio=0.98,
)
BUDGET = replace(SLOWDOWN, ratios=(0.004, 0.009), snapshots_ratio=0.03, settle_steps=500, max_slowdown=0.01)
RECOVERY = RecoveryRun(
    recoveries=tuple(
        Recovery(
            cause=cause,
            restore_source=source,
            phases={"detect": 0.1, "replace": 0.2, "restore": 1.0, "rework": 0.3},
            lost_steps=1,
            rank_lost_steps=2,
            api_seconds=1.7,
            rank_seconds=1.65,
        )
        for cause, source in (("rank_exit", "local"), ("instance_terminated", "peer"))
    ),  # type: ignore[arg-type]
    step=floor(0.1, 0.11),
)
RUN = Run(
    machine=MACHINE,
    results=Results(blocking=(ROW,), slowdown=SLOWDOWN, recovery=RECOVERY),
    is_quick=False,
    seconds=300.0,
)


def test_a_quiet_run_is_reported_without_reservations() -> None:
    text = render(PAGE, RUN)
    assert "inconclusive**" not in text.lower().partition("### seconds blocked")[2]
    assert "the machine was busy" not in text
    assert "quick run" not in text
    assert "**+15.0%** (median of 2 pairs; +10.0% to +20.0%)" in text
    assert "| 64 MiB | 2 × 2 | wait | 10.0 | 100.0 | 40.0 | **3.00** | 4.00 | 4.00 | 3.00 | 4.50 | 3 | 0.30 |" in text
    assert "| rank killed 1 | local | 0.10 | 0.20 | 1.00 | 0.30 | 1.60 | 1.70 | 1.65 | 1 | 2 |" in text


@pytest.mark.parametrize(
    ("ratios", "alone", "told"),
    [
        ((0.004, 0.009), 0.12, "**+0.7%** (median of 2 pairs; +0.4% to +0.9%), budget 1%: pass."),
        ((0.3, 0.32), 0.12, "+30.0% to +32.0%), budget 1%: **falls short**."),
        # among themselves, the launches without snapshots differ by more than this slowdown
        ((0.02, 0.03), 0.12, "**Inconclusive**: **+2.5%**"),
        ((0.004, 0.03), 0.12, "**Inconclusive**: **+1.7%**"),
        # some launches without snapshots are 30 % slower than the others
        ((0.4, 0.5), 0.13, "**Inconclusive**: **+45.0%**"),
    ],
)
def test_a_budget_is_kept_or_not(ratios: tuple[float, ...], alone: float, told: str) -> None:
    steps = tuple(Summary.of([value]) for value in (0.11, 0.1, alone, 0.12))
    budget = replace(BUDGET, order="ABBA", ratios=ratios, step_seconds=steps)
    text = render(PAGE, replace(RUN, results=Results(budget=budget)))
    assert told in text
    assert "without the first 500 steps of a launch" in " ".join(text.split())
    assert "Snapshots ÷ steps: 0.030." in text


@pytest.mark.parametrize(
    "results",
    [
        Results(blocking=(replace(ROW, memcpy=floor(0.01, 0.013)),)),
        Results(blocking=(replace(ROW, plain_step=floor(0.07, 0.05)),)),
        Results(
            slowdown=replace(SLOWDOWN, step_seconds=tuple(Summary.of([value]) for value in (0.11, 0.1, 0.13, 0.12)))
        ),
        Results(slowdown=replace(SLOWDOWN, order="AB", step_seconds=SLOWDOWN.step_seconds[:2], ratios=(0.1,))),
        Results(recovery=replace(RECOVERY, step=floor(0.1, 0.13))),
    ],
    ids=["memcpy moved", "step moved", "alone moved", "alone only once", "step of the recoveries moved"],
)
def test_a_moved_floor_makes_its_figures_inconclusive(results: Results) -> None:
    text = render(PAGE, replace(RUN, results=results))
    assert "**inconclusive**" in text.lower().partition("\n### ")[2]


@pytest.mark.parametrize(("api_seconds", "agrees"), [(1.7, True), (2.5, True), (0.7, True), (2.7, False), (0.5, False)])
def test_an_incident_that_tells_of_another_interruption_is_marked(api_seconds: float, agrees: bool) -> None:
    first, second = RECOVERY.recoveries
    text = render(
        PAGE,
        replace(
            RUN,
            results=Results(recovery=replace(RECOVERY, recoveries=(replace(first, api_seconds=api_seconds), second))),
        ),
    )
    assert ("| 1.60 **disagrees** |" in text) is not agrees
    assert "| instance terminated 1 | peer | 0.10 | 0.20 | 1.00 | 0.30 | 1.60 | 1.70 |" in text


def test_no_ratio_is_given_to_a_memcpy_that_moved() -> None:
    text = render(PAGE, replace(RUN, results=Results(blocking=(replace(ROW, memcpy=floor(0.01, 0.013)),))))
    assert "| inconclusive |" in text
    assert "| 0.30 |" in render(PAGE, RUN)


def test_a_busy_machine_and_a_quick_run_are_said_at_the_top() -> None:
    text = render(PAGE, replace(RUN, machine=replace(MACHINE, load_average=(7.5, 7.0, 6.0)), is_quick=True))
    head = text.partition("\n### ")[0]
    assert "the machine was busy" in head
    assert "7.50, 7.00, 6.00" in head
    assert "quick run" in head


def test_a_part_that_was_left_out_is_left_out() -> None:
    text = render(PAGE, replace(RUN, results=Results()))
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### What this does not say"]


def test_tables_are_rectangular() -> None:
    lines = render(PAGE, RUN).splitlines()
    for above, below in pairwise(lines):
        if above.startswith("|") and below.startswith("|"):
            assert above.count("|") == below.count("|")


def test_figures_document_and_picture_are_written(tmp_path: Path) -> None:
    write(PAGE, RUN, tmp_path / "bench" / "first.json", tmp_path / "benchmarks.md")
    figures = json.loads((tmp_path / "bench" / "first.json").read_text())
    assert figures["results"]["recovery"]["recoveries"][1]["phases"]["restore"] == 1.0
    assert figures["machine"]["load_average"] == [0.96, 0.2, 0.345]
    assert "(first.svg)" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "first.svg").exists()


def test_bars_are_as_long_as_their_phases() -> None:
    picture = ElementTree.fromstring(str(draw(RUN)))
    rectangles = [each for each in picture if each.tag.endswith("rect") and each.get("height") == "15"]
    widths = [float(each.get("width", "nan")) for each in rectangles[:4]]
    assert len(rectangles) == 8
    starts = [float(each.get("x", "nan")) for each in rectangles[:4]]
    assert starts[1:] == pytest.approx(
        [start + width for start, width in zip(starts[:3], widths[:3], strict=True)], abs=0.2
    )
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2, 10, 3], rel=0.01)


def test_labels_cannot_break_the_picture() -> None:
    picture = ElementTree.fromstring(
        panels('a "title" & more', [Panel(title="<b>", bars=[Bar(label="x&y", parts=[], text="")])])
    )
    assert picture.get("aria-label") == 'a "title" & more'


def test_a_bar_that_is_longer_than_the_picture_is_torn_and_keeps_its_figure() -> None:
    bars = [
        Bar(label="short", parts=[(2.0, "red"), (1.0, "blue")], text="3.00 s"),
        Bar(label="long", parts=[(30.0, "red"), (30.0, "blue")], text="60.00 s"),
    ]
    drawn = ElementTree.fromstring(panels("t", [Panel(title="both", bars=bars)], most=5.0))
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.get("width", "0")) for bar in drawn.iter(f"{space}rect") if bar.get("height") == "15"]
    # The full width of the picture, 520 pixels, represents five seconds.
    assert [round(sum(widths[:2]) / 3 * 5), round(sum(widths[2:]))] == [520, 520]
    assert len(list(drawn.iter(f"{space}polyline"))) == 1
    assert [text.text for text in drawn.iter(f"{space}text")] == ["both", "short", "3.00 s", "long", "60.00 s"]


def test_audited_snapshots_are_shown_apart_and_ranks_taken_together() -> None:
    ranks = [rank("wait", [0.5, 0.2, 0.2, 0.01, 0.02]), rank("wait", [0.7, 0.3, 0.3, 0.03, 0.04])]
    found = row(Shape(state_mib=64, nodes=2), "wait", ranks)
    assert found.first_blocked == 0.7
    assert found.audited_blocked is not None
    assert (found.audited_blocked.count, found.audited_blocked.maximum) == (4, 0.3)
    assert (found.blocked.count, found.blocked.maximum) == (4, 0.04)
    assert found.steps_per_snapshot == 2.0
    assert found.mean_blocked == pytest.approx(0.025)
    # A step without a snapshot follows each snapshot, so the mean is halved.
    assert found.mean_held == pytest.approx(0.026)


def test_only_the_first_computation_of_a_launch_has_first_snapshots() -> None:
    found = row(Shape(state_mib=64, nodes=1), "matmul", [rank("matmul", [0.01, 0.02, 0.03, 0.04])])
    assert found.first_blocked is None
    assert found.audited_blocked is None
    assert found.blocked.count == 4


def test_the_audits_that_are_shown_apart_are_those_of_the_guard() -> None:
    assert AUDITED_COUNT == AUDITED_AT_START
