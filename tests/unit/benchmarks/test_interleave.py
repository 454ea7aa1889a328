"""The functions of the interleaving benchmark without processes: order of the compared schemes, statistics, verdicts,
page.

Further tests check that the benchmark removes its network and ends its nodes after a failure.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.errors import BenchmarkFailed
from benchmarks.interleave import network, report, runs
from benchmarks.interleave.__main__ import CASES, FIGURE_16
from benchmarks.interleave.budgeted import Budgeted
from benchmarks.interleave.figures import Figure, evaluate, interval, slowdown
from benchmarks.interleave.network import Network
from benchmarks.interleave.schemes import Case, Scheme, program
from benchmarks.interleave.verdicts import beats_uniform, judge
from benchmarks.interleave.wire import read_case, write_case
from benchmarks.measures import Verdict
from benchmarks.page import render, write
from everstep.protocol.rank_messages import IdleSpan
from tests.unit.benchmarks.machine import MACHINE
from tests.unit.worker.replication.wire import Wire
from worker.core.budget import ENOUGH

CASE = Case(
    name="small", blocks=3, block_iterations=2, schemes=(Scheme.NONE, Scheme.BLOCKING, Scheme.UNIFORM, Scheme.EVERSTEP)
)
CROWDED = replace(CASE, is_crowded=True, schemes=(Scheme.NONE, Scheme.EVERSTEP))
SECONDS = {Scheme.NONE: 1.0, Scheme.BLOCKING: 1.2, Scheme.UNIFORM: 1.1, Scheme.EVERSTEP: 1.001}


def recorded(seconds: dict[Scheme, float] = SECONDS, *, late: int = 0, left_out: int = 0, case: Case = CASE) -> Figure:
    """Return the evaluation of a run with these iteration times in seconds.

    In Everstep's part of the run, the first `left_out` snapshots never begin, and the next `late` snapshots end late.
    """
    rank: list[dict[str, Any]] = [{"spans": [[0.0, 0.3, 0.0], [0.5, 0.1, 0.0]], "iteration_seconds": 1.0}]
    sent: list[dict[str, Any]] = []
    number = 0
    for block in program(case):
        for position in range(block.iterations):
            number += 1
            is_measured = block.is_measured and position > 0
            taken = seconds[block.scheme] + number / 1e6
            rank.append(
                {
                    "scheme": block.scheme,
                    "seconds": taken,
                    "busy_seconds": 0.6,
                    "number": number,
                    "is_measured": is_measured,
                }
            )
            is_ours = block.scheme is Scheme.EVERSTEP and is_measured
            if is_ours and left_out:
                left_out -= 1
            elif block.scheme is not Scheme.NONE:
                is_late = is_ours and late > 0
                late -= is_late
                sent.append({"number": number, "seconds": 2.0 if is_late else 0.5})
    agent = {"bandwidth_bytes_per_second": 20e6, "sent": sent}
    other = {"bandwidth_bytes_per_second": 19e6, "sent": [{**each, "seconds": 0.4} for each in sent]}
    return evaluate(case, [rank], [agent, other])


# -- tests of the order in which the schemes run


def test_every_scheme_has_a_turn_in_every_round_and_all_ranks_agree_on_it() -> None:
    blocks = program(FIGURE_16)
    rounds = [blocks[start : start + len(Scheme)] for start in range(0, len(blocks), len(Scheme))]
    assert len(rounds) == FIGURE_16.blocks
    assert all({block.scheme for block in each} == set(Scheme) for each in rounds)
    assert len({tuple(block.scheme for block in each) for each in rounds}) > 1
    assert blocks == program(FIGURE_16)


def test_every_case_has_thirty_pairs_and_what_it_is_judged_by() -> None:
    for case in CASES:
        assert case.blocks * case.block_iterations >= 30
        assert {Scheme.NONE, Scheme.EVERSTEP} <= set(case.schemes)
        assert case.is_crowded or Scheme.BLOCKING in case.schemes
        used = len(case.idle_seconds) * case.collective_seconds
        assert case.is_crowded or 0.55 < used / (used + sum(case.idle_seconds)) < 0.65
    assert set(FIGURE_16.schemes) == set(Scheme)


def test_a_case_settles_under_everstep_before_anything_is_measured() -> None:
    first, *others = program(replace(CROWDED, settle_iterations=50))
    assert (first.scheme, first.iterations, first.is_measured) == (Scheme.EVERSTEP, 50, False)
    assert others == program(CROWDED)
    assert all(block.is_measured for block in others)
    (crowded,) = (case for case in CASES if case.is_crowded)
    # The budget needs `ENOUGH` iterations with snapshots. After each of four doublings of the interval, it needs as
    # many again.
    assert crowded.settle_iterations >= 5 * ENOUGH


# -- tests of the interval between snapshots that the budget chooses


class Fleet:
    """Three simulated nodes that train together.

    An iteration takes `extra` seconds longer while a snapshot is sent. A snapshot is sent for `lasts` iterations.
    """

    def __init__(self, folder: Path, *, extra: float, lasts: int, idle: float = 0.0) -> None:
        self.wires = [Wire(10_000_000.0) for _ in range(3)]
        self.nodes = [Budgeted(number, 2, folder / "proposed", wire.pacer) for number, wire in enumerate(self.wires)]
        self.extra, self.lasts = extra, lasts
        self.now = 0.0
        self.left = 0
        for _ in range(20):
            self.now += 1.0
            for node in self.nodes:
                node.quiet_boundary(self.now)
        for node in self.nodes:
            node.spans(1.0, (IdleSpan(0.5, idle),) if idle else ())

    def iterate(self, count: int) -> int:
        """Run iterations of the Everstep scheme. Return the number of snapshots.

        Check that all nodes begin their snapshots at the same steps.
        """
        begun = 0
        for number in range(count):
            is_first, self.left = self.left == self.lasts, max(0, self.left - 1)
            way = 1.0 if self.nodes[0].pacer is None else 0.2  # paced transfers delay an iteration less
            self.now += 1.0 + self.extra * way * (is_first or self.left > 0)
            # Every second iteration asks the nodes in the opposite order.
            began = {
                node.boundary(self.now, is_sending=self.left > 0) for node in self.nodes[:: 1 if number % 2 else -1]
            }
            assert len(began) == 1
            if began == {True}:
                begun, self.left = begun + 1, self.lasts
                for wire in self.wires:
                    wire.carry(1_000_000)
        return begun


def test_every_step_is_sent_as_long_as_that_costs_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, extra=0.0, lasts=1)
    assert fleet.iterate(60) >= 58
    assert fleet.nodes[0].interval == 1


def test_what_costs_more_than_the_budget_is_sent_less_often_and_never_given_up(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, extra=0.1, lasts=3)
    assert fleet.iterate(9) == 3  # sending a snapshot takes three steps, so nine steps have three snapshots
    fleet.iterate(300)
    # Two of the three steps of a snapshot take a tenth longer. The step in which the snapshot ends does not.
    assert 20 <= fleet.nodes[0].interval <= 21
    assert fleet.iterate(210) in (10, 11)
    (tmp_path / "short").mkdir()
    short = Fleet(tmp_path / "short", extra=0.1, lasts=1)
    short.iterate(200)
    assert short.nodes[0].interval in (10, 11)


def test_replicas_are_paced_by_the_products_own_decision(tmp_path: Path) -> None:
    wide, narrow = (
        Fleet(tmp_path / str(idle), extra=0.1, lasts=1, idle=idle)
        for idle in (0.4, 0.05)
        if (tmp_path / str(idle)).mkdir() is None
    )
    for _ in range(ENOUGH - 2):
        assert narrow.nodes[0].pacer is None
        narrow.iterate(1)
    assert wide.nodes[0].pacer is None
    wide.iterate(60)
    # The interval between snapshots has grown, so that several iterations are available to send one.
    narrow.iterate(300)
    assert all(node.pacer is not None for node in wide.nodes)
    assert all(node.pacer is not None for node in narrow.nodes)


def test_what_another_scheme_does_in_between_is_no_iteration_of_the_job(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, extra=0.0, lasts=1)
    for _ in range(20):
        fleet.iterate(4)
        for node in fleet.nodes:
            node.pause()
        fleet.now += 50.0
    assert fleet.nodes[0].interval == 1


def test_holders_are_other_nodes_of_a_ring() -> None:
    assert Case(name="x", nodes=4, copies=3).holders(3) == [0, 1]


def test_a_case_reaches_the_nodes_as_it_is(tmp_path: Path) -> None:
    for case in CASES:
        write_case(tmp_path / "case.json", case)
        assert read_case(tmp_path / "case.json") == case


# -- tests of statistics


def test_slowdowns_are_against_the_same_round() -> None:
    figure = recorded()
    found = {row.scheme: row.slowdown for row in figure.rows}
    assert found == pytest.approx(
        {Scheme.NONE: 0.0, Scheme.BLOCKING: 0.2, Scheme.UNIFORM: 0.1, Scheme.EVERSTEP: 0.001}, abs=1e-4
    )
    assert all(row.iterations == 6 and row.low <= row.slowdown <= row.high for row in figure.rows)
    assert figure.busy_ratio == pytest.approx(0.6, rel=1e-3)
    assert (figure.idle_seconds, figure.spans, figure.link_bytes_per_second) == (pytest.approx(0.4), 2, 19e6)
    assert figure.load_ratio == pytest.approx(CASE.state_bytes / 19e6 / 0.4)


def test_a_snapshot_is_kept_when_every_holder_has_it_before_the_next_boundary() -> None:
    assert recorded().row(Scheme.EVERSTEP).kept_ratio == 1.0
    assert recorded(late=2).row(Scheme.EVERSTEP).kept_ratio == pytest.approx(4 / 6)
    assert recorded(left_out=2, late=1).row(Scheme.EVERSTEP).kept_ratio == pytest.approx(3 / 6)


def test_where_idle_time_is_short_a_snapshot_may_take_longer_than_a_step_but_must_be_kept() -> None:
    row = recorded(left_out=2, late=3, case=CROWDED).row(Scheme.EVERSTEP)
    assert (row.kept, row.iterations) == (4, 6)


def test_drift_that_both_sides_share_falls_out_and_noise_widens_the_interval() -> None:
    drifting = [(1.1 * factor, factor) for factor in (1.0, 2.0, 3.0, 4.0)]
    assert slowdown(drifting) == pytest.approx(0.1)
    assert interval(drifting) == pytest.approx((0.1, 0.1))
    noisy = [(1.1 + shift, 1.0) for shift in (-0.1, 0.1) * 20]
    low, high = interval(noisy)
    assert 0.06 < low < 0.1 < high < 0.14
    assert interval(noisy) == (low, high)


# -- tests of verdicts: whether a case meets its limit


@pytest.mark.parametrize(
    ("seconds", "late", "verdict"),
    [
        ({}, 0, Verdict.PASS),
        ({Scheme.EVERSTEP: 1.05}, 0, Verdict.SHORT),
        ({Scheme.BLOCKING: 1.05}, 0, Verdict.INCONCLUSIVE),
        ({}, 1, Verdict.SHORT),
    ],
)
def test_what_a_case_has_to_reach(seconds: dict[Scheme, float], late: int, verdict: Verdict) -> None:
    judgement = judge(recorded(SECONDS | seconds, late=late))
    assert judgement.verdict is verdict, judgement.reason


def test_an_interval_on_both_sides_of_the_limit_says_nothing() -> None:
    figure = recorded()
    ours = replace(figure.row(Scheme.EVERSTEP), low=-0.02, high=0.03)
    assert judge(replace(figure, rows=(*figure.rows[:-1], ours))).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("everstep", "left_out", "verdict"),
    [
        (1.009, 3, Verdict.PASS),
        (1.02, 3, Verdict.SHORT),
        (1.0, 4, Verdict.SHORT),
        (1.0, 6, Verdict.SHORT),
    ],
)
def test_a_crowded_case_is_held_to_the_budget_and_to_some_snapshots(
    everstep: float, left_out: int, verdict: Verdict
) -> None:
    judgement = judge(recorded(SECONDS | {Scheme.EVERSTEP: everstep}, left_out=left_out, late=1, case=CROWDED))
    assert judgement.verdict is verdict
    assert f"{6 - left_out} snapshots in 6 steps" in judgement.reason


def test_a_crowded_case_is_judged_by_the_upper_end_of_its_interval() -> None:
    figure = recorded(case=CROWDED)
    ours = replace(figure.row(Scheme.EVERSTEP), low=-0.01, slowdown=0.001, high=0.011)
    assert judge(replace(figure, rows=(figure.rows[0], ours))).verdict is Verdict.INCONCLUSIVE


def test_scheduling_has_to_beat_uniform_pacing_clearly() -> None:
    assert beats_uniform(recorded())
    assert not beats_uniform(recorded(SECONDS | {Scheme.UNIFORM: 1.0}))


# -- tests of the report


def test_the_report_says_what_was_measured_and_claims_nothing_else(tmp_path: Path) -> None:
    figures = [recorded(), recorded(SECONDS | {Scheme.EVERSTEP: 1.05})]
    run = report.Run(machine=MACHINE, figures=figures, is_quick=False, seconds=9.0)
    write(report.PAGE, run, tmp_path / "bench" / "interleave.json", tmp_path / "figure.md")
    text = " ".join((tmp_path / "figure.md").read_text().split())
    assert "**timed wait**" in text
    assert "It says nothing about EFA, NCCL" in text
    assert "| Everstep | 1001.0 | **+0.10%** |" in text
    assert "**pass**" in text
    assert "falls short" in text
    assert "![Iteration time by scheme](interleave.svg)" in text
    assert "acknowledged snapshots, not commits" in text
    assert "commits ÷ steps" not in text
    assert "own sessions" not in text
    assert "the machine was busy" not in text
    cases = json.loads((tmp_path / "bench" / "interleave.json").read_text())["figures"]
    assert [case["rows"][-1]["scheme"] for case in cases] == ["everstep", "everstep"]
    assert [row.verdict for row in report.PAGE.rows(run)] == [Verdict.PASS, Verdict.SHORT]
    assert ElementTree.fromstring((tmp_path / "interleave.svg").read_text()).tag.endswith("svg")


def test_a_busy_machine_a_quick_run_and_a_lost_comparison_are_said() -> None:
    busy = replace(MACHINE, load_average=(3.0, 1.0, 1.0))
    text = render(
        report.PAGE,
        report.Run(machine=busy, figures=[recorded(SECONDS | {Scheme.UNIFORM: 1.0})], is_quick=True, seconds=1.0),
    )
    assert "Run the benchmark again" in text
    assert "**inconclusive**: the machine was busy" in text
    assert "quick run" in text
    assert "**Everstep's slowdown is not smaller than that of uniform pacing here**" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_can_be_reported_alone(case: Case) -> None:
    small = replace(case, blocks=2, block_iterations=2, settle_iterations=2)
    text = render(
        report.PAGE,
        report.Run(
            machine=MACHINE, figures=[recorded(dict.fromkeys(Scheme, 1.0), case=small)], is_quick=True, seconds=1.0
        ),
    )
    assert ("uniform pacing" in text.partition("## The schemes")[2]) is (Scheme.UNIFORM in case.schemes)


# -- tests of the benchmark's network


def test_a_network_is_taken_away_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(tuple(command))
        is_bad = "tbf" in command
        return subprocess.CompletedProcess(command, int(is_bad), "", "no tbf here" if is_bad else "")

    monkeypatch.setattr(network.subprocess, "run", run)
    with pytest.raises(BenchmarkFailed, match="no tbf here"), Network(2, 100):
        pytest.fail("a network without shaping")
    made = Counter(
        command[-1] if "netns" in command[:2] else command[3]
        for command in commands
        if "add" in command[:4] and command[0] == "ip"
    )
    gone = {command[-1] for command in commands if "del" in command}
    assert {name for name in made if name.startswith("ev")} <= gone


def test_a_node_that_fails_ends_the_case_and_all_other_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fake:
        def __init__(self, command: list[object], **options: object) -> None:
            assert options["start_new_session"]
            self.index = int(str(command[-2]))
            self.pid = 10**9 + self.index
            self.has_ended = False

        def wait(self, timeout: float | None = None) -> int:
            self.has_ended = True
            return 3 if self.index == 1 else 0

    killed: list[int] = []
    monkeypatch.setattr(runs, "Network", lambda nodes, rate: Network(0, rate))
    monkeypatch.setattr(network.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    monkeypatch.setattr(runs.subprocess, "Popen", Fake)
    monkeypatch.setattr(runs.os, "killpg", lambda pid, _: killed.append(pid))
    with pytest.raises(BenchmarkFailed, match=r"node 1 ended with 3; see .*node-1\.log"):
        runs.run_case(CASE, tmp_path)
    assert killed == [10**9 + index for index in range(CASE.nodes)]


RUN = report.Run(
    machine=MACHINE, figures=[recorded(), recorded(SECONDS | {Scheme.EVERSTEP: 1.05})], is_quick=False, seconds=9.0
)
