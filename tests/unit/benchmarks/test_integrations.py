"""Tests the benchmark of integrations: its limits and its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.integrations import report
from benchmarks.integrations.jobs import EVERSTEP, LM_RESILIENCY, OWN_SAVES, PARTS, PLAIN, TrainerLaunch
from benchmarks.measures import Verdict
from benchmarks.page import render
from tests.unit.benchmarks.machine import MACHINE


def launch(system: str, step: float) -> TrainerLaunch:
    is_own = system == EVERSTEP
    return TrainerLaunch(
        system=system,
        step_seconds=(step, step),
        part_seconds=dict.fromkeys(PARTS, (0.0005, 0.0005)) if is_own else {},
        snapshots_ratio=1.0 if is_own else 0.0,
        state_bytes=24 << 20,
    )


RUN = report.Run(
    machine=MACHINE,
    is_quick=False,
    seconds=200.0,
    launches=[launch(PLAIN, 0.2), launch(EVERSTEP, 0.21), launch(OWN_SAVES, 0.3), launch(LM_RESILIENCY, 0.22)],
)


def changed(system: str, **values: object) -> report.Run:
    launches = [replace(each, **values) if each.system == system else each for each in RUN.launches]  # type: ignore[arg-type]
    return replace(RUN, launches=launches)


def test_the_page_states_what_each_system_adds() -> None:
    page = render(report.PAGE, RUN, "integrations.json")
    assert [row.value for row in report.rows(RUN)] == pytest.approx([0.1, 0.5, 0.005, 1.0])
    assert [row.verdict for row in report.rows(RUN)] == [Verdict.PASS] * 4
    assert "| Everstep, each step on two nodes | ≤ 1 | 210 | 10 | +5.0% |" in page
    assert "| copies and transfers that share the cores, the rest | 8 |" in page


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (changed(EVERSTEP, step_seconds=(0.26,)), 0),
        (changed(LM_RESILIENCY, step_seconds=(0.205,)), 1),
        (changed(EVERSTEP, part_seconds=dict.fromkeys(PARTS, (0.002,))), 2),
        (changed(EVERSTEP, snapshots_ratio=0.9), 3),
    ],
)
def test_a_value_beyond_its_limit_falls_short(run: report.Run, place: int) -> None:
    assert report.rows(run)[place].verdict is Verdict.SHORT


def test_a_system_without_cost_or_a_moved_floor_permits_no_verdict() -> None:
    no_cost = report.rows(changed(LM_RESILIENCY, step_seconds=(0.19,)))
    assert (no_cost[1].verdict, no_cost[1].reason) == (Verdict.INCONCLUSIVE, "lm-resiliency added no time")
    moved = report.rows(replace(RUN, launches=[*RUN.launches, launch(PLAIN, 0.3)]))
    assert [row.verdict for row in moved] == [Verdict.INCONCLUSIVE] * 3 + [Verdict.PASS]


def test_nothing_counts_on_a_busy_machine() -> None:
    busy = replace(RUN, machine=replace(MACHINE, load_average=(9.0, 9.0, 9.0)))
    assert {row.verdict for row in report.rows(busy)} == {Verdict.INCONCLUSIVE}
