"""Tests functions of the fault benchmark: the steps in each part of a case, the verdicts, the page and the picture.

A case has three parts: before, during and after a fault.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.faults import report
from benchmarks.faults.cases import CASES, LIMITED, UNLIMITED
from benchmarks.faults.figures import (
    FULL_SPEED_RATIO,
    Boundary,
    Observed,
    Span,
    commits_ratio,
    evaluate,
    judge,
    parse,
    step_seconds,
    steps_in,
)
from benchmarks.faults.picture import draw
from benchmarks.measures import Verdict
from benchmarks.page import render, write
from tests.unit.benchmarks.machine import MACHINE

COUNT = 40


def made(*lengths: Sequence[float], held: float = 0.001, committed: bool = True) -> tuple[Boundary, ...]:
    """Return the trace of a rank whose steps have these durations in seconds. It starts at second 0.

    Each argument contains the durations of one part of a case: before, during and after the fault.
    """
    found, at = [Boundary(0, 0.0, held, -1)], 0.0
    for length in [each for part in lengths for each in part]:
        at += length
        step = len(found)
        found.append(Boundary(step, at, held, step - 1 if committed else -1))
    return tuple(found)


def observed(before: float = 0.2, during: float = 0.2, after: float = 0.2, *, longest: float | None = None) -> Observed:
    """Return a case whose steps take `before`, `during` and `after` seconds in its three parts.

    The step during which the fault strikes takes `longest` seconds, if given.
    """
    parts = [[before] * COUNT, [longest or during, *[during] * (COUNT - 1)], [after] * COUNT]
    passed = made(*parts)
    ends = [passed[COUNT].at, passed[2 * COUNT].at, passed[3 * COUNT].at]
    return Observed(
        name="a peer that stops reading",
        ranks=(passed, passed),
        before=Span(0.0, ends[0]),
        during=Span(ends[0], ends[1]),
        after=Span(ends[1], ends[2]),
        healed_at=ends[1] + 0.5,
        told_at=ends[0] + 3.0,
        word="Degraded",
        reasons=("rank 0 has 1: i-1 | is out of view: it does not answer.",),
        did="SIGSTOP of the holder's agent, i-1",
        span_seconds=0.15,
        copy_seconds=0.01,
        state_mib=64,
    )


# -- tests of the trace files of ranks


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert parse("1 10.5 0.001 0\n2 10.7 0.002 1\n3 10.") == (Boundary(1, 10.5, 0.001, 0), Boundary(2, 10.7, 0.002, 1))
    assert parse("") == ()


def test_the_step_that_a_strike_falls_into_is_of_both_parts() -> None:
    passed = made([1.0, 1.0, 5.0, 1.0])
    assert step_seconds(passed, Span(2.5, 7.5)) == [5.0, 1.0]
    assert step_seconds(passed, Span(1.0, 2.0)) == [1.0], "one that only touches a part is not in it"
    assert [later.step for _, later in steps_in(passed, Span(0.0, 2.5))] == [1, 2, 3]


def test_commits_are_counted_where_a_rank_heard_of_them() -> None:
    passed = made([1.0] * 4)
    assert commits_ratio(passed, Span(0.0, 4.0)) == 1.0
    assert commits_ratio(made([1.0] * 4, committed=False), Span(0.0, 4.0)) == 0.0
    late = (*passed[:3], replace(passed[3], committed=passed[2].committed), passed[4])
    assert commits_ratio(late, Span(0.0, 4.0)) == 0.75


# -- tests of verdicts: whether training stayed at full speed


@pytest.mark.parametrize(
    ("low", "high", "after", "verdict"),
    [
        (0.97, FULL_SPEED_RATIO, 0.2, Verdict.PASS),
        (FULL_SPEED_RATIO, FULL_SPEED_RATIO + 0.001, 0.2, Verdict.INCONCLUSIVE),
        (FULL_SPEED_RATIO + 0.001, 1.5, 0.2, Verdict.SHORT),
        (0.97, 1.0, 0.2 * 1.21, Verdict.INCONCLUSIVE),
        (1.5, 1.6, 0.2 / 1.21, Verdict.INCONCLUSIVE),
    ],
)
def test_full_speed_is_an_upper_end_within_the_limit_where_the_machine_stood_still(
    low: float, high: float, after: float, verdict: Verdict
) -> None:
    assert judge(low, high, 0.2, after)[0] is verdict


def test_a_case_has_its_figures() -> None:
    figure = evaluate(observed(before=0.2, during=0.25, after=0.2))
    assert (figure.verdict, round(figure.ratio, 6)) == (Verdict.SHORT, 1.25)
    assert figure.told_seconds == pytest.approx(3.0)
    assert figure.healed_seconds == pytest.approx(0.5)
    assert (figure.commits_before, figure.commits_during, figure.commits_after) == (1.0, 1.0, 1.0)
    assert figure.held_p99_seconds == 0.001
    assert figure.lost_seconds == pytest.approx(COUNT * 0.05)


def test_one_step_that_stands_still_is_told_although_the_median_is_not_moved_by_it() -> None:
    figure = evaluate(observed(longest=5.0))
    assert figure.verdict is Verdict.PASS
    assert figure.longest_seconds == pytest.approx(5.0)
    assert figure.lost_seconds == pytest.approx(4.8)


def test_a_step_that_stands_still_while_all_heals_is_told_as_well() -> None:
    case = observed()
    passed = made([0.2] * 2 * COUNT, [3.0], [0.2] * COUNT)
    figure = evaluate(
        replace(
            case, ranks=(passed,), after=Span(case.after.begin + 3.0, passed[-1].at), healed_at=case.during.end + 2.0
        )
    )
    assert figure.longest_seconds == pytest.approx(3.0)
    assert figure.lost_seconds == pytest.approx(2.8)
    assert figure.during.maximum == pytest.approx(0.2)


def test_every_case_is_named_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


# -- tests of the page


def run_of(*cases: Observed) -> report.Run:
    return report.Run(machine=MACHINE, observed=cases, is_quick=False, seconds=12.0)


def test_the_page_tells_verdicts_reasons_and_what_was_done(tmp_path: Path) -> None:
    short = replace(observed(during=0.3), name="a link at 1 %")
    run = run_of(observed(), replace(observed(), name="connections reset"), short)
    write(report.PAGE, run, tmp_path / "faults.json", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| a link at 1 % | 200.0 | 300.0 | 200.0 | **1.500** |" in page
    assert "**falls short**: at least 1.500, 1.02 to reach" in page
    assert "has a state of 64 MiB" in " ".join(page.split())
    assert "i-1 \\| is out of view: it does not answer." in page
    assert "(faults.svg)" in page
    written = json.loads((tmp_path / "faults.json").read_text())
    assert [case["name"] for case in written["observed"]] == [case.name for case in run.observed]
    assert [row.verdict for row in report.PAGE.rows(run)] == [Verdict.PASS, Verdict.PASS, Verdict.SHORT]


def test_on_a_busy_machine_nothing_is_reached_and_nothing_missed() -> None:
    busy = replace(run_of(observed()), machine=replace(MACHINE, load_average=(3.0, 1.0, 1.0)))
    (figure,) = report.figures(busy)
    assert figure.verdict is Verdict.INCONCLUSIVE
    assert figure.told.startswith("the machine was busy")


def test_a_fault_without_a_beginning_or_a_word_has_none_on_the_page() -> None:
    page = render(report.PAGE, run_of(replace(observed(), told_at=None, word="Protected", reasons=())))
    assert "| Protected |  |  |  |" in page


def test_the_picture_has_a_strip_for_each_case_and_a_point_for_each_step() -> None:
    root = ElementTree.fromstring(draw([observed(), observed(longest=60.0)]))
    circles = [element for element in root if element.tag.endswith("circle")]
    assert len(circles) == 2 * 3 * COUNT
    height = float(root.attrib["viewBox"].split()[3])
    assert all(0 <= float(circle.attrib["cy"]) <= height for circle in circles), (
        "what is longer than a strip has room for is at its edge"
    )


RUN = run_of(observed(), replace(observed(during=0.3), name="a link at 1 %", told_at=None, reasons=()))


def test_the_rate_limit_is_compared_with_steps_without_it() -> None:
    limited = replace(observed(during=0.21), name=LIMITED)
    unlimited = replace(observed(during=0.28), name=UNLIMITED)
    run = report.Run(machine=MACHINE, is_quick=False, seconds=1.0, observed=(limited, unlimited))
    row = report.rate_limit(run)
    assert row is not None
    assert (round(row.value, 2), row.verdict) == (0.75, Verdict.PASS)
    assert report.row(report.figures(run)[1]).verdict is Verdict.NONE
    worse = report.rate_limit(
        replace(run, observed=(replace(unlimited, name=LIMITED), replace(limited, name=UNLIMITED)))
    )
    assert worse is not None
    assert worse.verdict is Verdict.SHORT
    assert report.rate_limit(replace(run, observed=(limited,))) is None
