"""The benchmark computes the cost of a failure from the traces of the ranks, and writes its report."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.interruption import report
from benchmarks.interruption.elastic import Shrink
from benchmarks.interruption.faults import Blackout, Silence
from benchmarks.interruption.outcomes import Fault, Interruption, Job, Rehearsed, resumed
from benchmarks.interruption.survivors import last_gone_at, watched
from benchmarks.measures import Verdict
from benchmarks.page import render
from benchmarks.traces import Passed
from tests.unit.benchmarks.machine import MACHINE

BEFORE, AFTER = 1_000, 11_000
"""Start times of the processes of two launches, in milliseconds."""


def steps(start: int, *moments: tuple[int, float]) -> list[Passed]:
    return [Passed(start, step, at) for step, at in moments]


def test_training_goes_on_when_the_last_rank_has_made_a_step_that_none_had_made_before() -> None:
    ranks = [
        steps(BEFORE, (8, 9.0), (9, 9.5), (10, 10.2)) + steps(AFTER, (9, 12.0), (10, 12.1), (11, 12.2)),
        steps(BEFORE, (8, 9.0), (9, 9.6)) + steps(AFTER, (9, 12.0), (10, 12.1), (11, 12.5)),
    ]
    found = resumed(ranks, 10.0, waited_for=(0, 1), is_relaunched=True)
    assert found is not None, "what a survivor of the old launch finished late is not new"
    assert found.at == 12.5
    assert found.lost_steps == 2


@pytest.mark.parametrize("missing", [0, 1])
def test_it_has_not_gone_on_while_a_rank_lacks_a_new_step(missing: int) -> None:
    ranks = [steps(BEFORE, (9, 9.5)) + steps(AFTER, (9, 12.0), (10, 12.1)) for _ in range(2)]
    ranks[missing] = ranks[missing][:-1]
    assert resumed(ranks, 10.0, waited_for=(0, 1), is_relaunched=True) is None


def test_a_survivor_goes_on_in_its_own_process() -> None:
    ranks = [steps(BEFORE, (9, 9.9), (10, 11.0)), steps(BEFORE, (9, 9.9))]
    found = resumed(ranks, 10.0, waited_for=(0,), is_relaunched=False)
    assert found is not None
    assert (found.at, found.lost_steps) == (11.0, 0)


def test_the_end_of_processes_is_heard_from_the_kernel() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with watched([child.pid, os.getpid()]) as both, watched([child.pid]) as one:
        assert last_gone_at(both, timeout_seconds=0) is None
        child.stdin.close()
        assert last_gone_at(one, timeout_seconds=30) is not None
        assert last_gone_at(both, timeout_seconds=0) is None, "the other one lives"
    child.wait()


def interruption(system: str, seconds: float, fault: Fault = Fault.RANK, **changes: object) -> Interruption:
    return dataclasses.replace(
        Interruption(system=system, job=Job.DDP, fault=fault, seconds=seconds, lost_steps=0, stopped_seconds=0.05),
        **changes,  # type: ignore[arg-type]
    )


def run_of(
    *interruptions: Interruption,
    silences: Sequence[Silence] = (),
    blackouts: Sequence[Blackout] = (),
    shrinks: Sequence[Shrink] = (),
    rehearsals: Sequence[Rehearsed] = (),
) -> report.Run:
    return report.Run(
        machine=MACHINE,
        interruptions=interruptions,
        silences=silences,
        blackouts=blackouts,
        shrinks=shrinks,
        rehearsals=rehearsals,
        is_quick=False,
        seconds=1.0,
    )


def short(run: report.Run) -> dict[str, bool]:
    return {f"{row.what} {row.against}": row.verdict is Verdict.SHORT for row in report.rows(run)}


def test_a_fifth_of_torchruns_time_is_to_be_reached_and_no_more_than_torchfts() -> None:
    peers = (interruption("torchrun + torch.save", 5.0), interruption("torchft", 0.9))
    assert not any(short(run_of(interruption("Everstep", 0.9), *peers)).values())
    found = short(run_of(interruption("Everstep", 1.0), *peers))
    assert [what for what, falls_short in found.items() if falls_short] == ["rank killed, DDP, median torchft's 0.90 s"]
    found = short(run_of(interruption("Everstep", 1.01), *peers))
    assert sum(found.values()) == 2


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (run_of(interruption("Everstep", 1.0, stopped_seconds=0.11)), "all survivors stopped"),
        (run_of(interruption("Everstep", 1.0, lost_steps=3)), "steps lost, most"),
        (run_of(silences=[Silence(verdict_seconds=4.1, detection_seconds=3.0)]), "verdict"),
        (run_of(blackouts=[Blackout(seconds=3.0, lost_steps=0, restarted_ranks=1, steps=5)]), "ranks restarted"),
        (run_of(blackouts=[Blackout(seconds=3.0, lost_steps=1, restarted_ranks=0, steps=5)]), "steps lost"),
        (
            run_of(
                shrinks=[
                    Shrink(verdict_seconds=0.4, seconds=3.0, lost_steps=1),
                    Shrink(verdict_seconds=0.4, seconds=10.1, lost_steps=1),
                ]
            ),
            "no spare, 4 → 3 nodes: verdict → next new step, most",
        ),
    ],
)
def test_every_limit_can_be_missed(run: report.Run, what: str) -> None:
    missed = [row.what for row in report.rows(run) if row.verdict is Verdict.SHORT]
    assert len(missed) == 1
    assert what in missed[0]


def test_a_limit_that_is_the_harnesss_own_patience_or_nobodys_knows_is_no_limit() -> None:
    ours = interruption("Everstep", 1.0)
    patience = [interruption("torchrun + torch.save", 61.0, came_back=False)] * 7 + [
        interruption("torchrun + torch.save", 8.0)
    ] * 3
    (row, *_) = report.rows(run_of(ours, *patience))
    assert row.reason == "7 of 10 runs of the peer did not come back"
    assert row.against == "1/5 of torchrun + torch.save's 61.00 s; 3 of its 10 came back by themselves"
    (row, *_) = report.rows(
        run_of(ours, *(interruption("torchrun + torch.save", seconds) for seconds in (4.3, 4.5, 11.9, 36.6, 36.6)))
    )
    assert row.verdict is Verdict.INCONCLUSIVE, "anything from 0.86 to 7.3 s"
    (row, *_) = report.rows(
        run_of(ours, *(interruption("torchrun + torch.save", seconds) for seconds in (9.0, 9.5, 11.9)))
    )
    assert row.verdict is Verdict.PASS


def test_on_a_busy_machine_nothing_is_reached_and_nothing_missed() -> None:
    run = run_of(interruption("Everstep", 1.0, lost_steps=3), interruption("torchft", 2.0))
    busy = dataclasses.replace(run, machine=dataclasses.replace(MACHINE, load_average=(9.0, 1.0, 1.0)))
    assert any(row.verdict is Verdict.SHORT for row in report.rows(run))
    assert {row.verdict for row in report.rows(busy)} == {Verdict.INCONCLUSIVE}
    assert "| pass |" not in render(report.PAGE, busy)


def test_what_was_not_measured_is_said_and_is_no_pass() -> None:
    run = run_of(
        interruption("Everstep", 1.0), blackouts=[Blackout(seconds=3.0, lost_steps=0, restarted_ranks=0, steps=5)]
    )
    assert len(report.rows(run)) + len(report.unmeasured(run)) == 12
    assert "rank killed, DDP, beside torchft" in report.unmeasured(run)
    assert "verdict" in report.unmeasured(run)
    assert "**Not measured**: rank killed, DDP, beside torchrun + torch.save, " in render(report.PAGE, run)


def test_the_report_and_the_ranks_agree_on_a_steps_least_time() -> None:
    assert (
        f"STEP_SECONDS = {report.STEP_SECONDS:g}\n" in (Path(report.__file__).parent / "rank" / "work.py").read_text()
    )


def test_the_report_names_the_largest_phase_and_who_did_not_come_back() -> None:
    phases = {"detect": 0.1, "replace": 0.2, "restore": 0.9, "rework": 0.0}
    run = run_of(interruption("Everstep", 1.2, phases=phases), interruption("torchrun + DCP", 180.0, came_back=False))
    text = render(report.PAGE, run)
    assert "| DDP | rank killed | 0.10 | 0.20 | 0.90 | 0.00 | **restore** |" in text
    assert "| torchrun + DCP | **180.00** | 180.00 to 180.00 | 180.00 to 180.00 | 50 | 0 | 1 | 1 |" in text
    assert report.draw(run).count("<rect") > 6


def test_a_run_of_the_elastic_part_alone_shows_each_loss_of_a_node() -> None:
    text = render(report.PAGE, run_of(shrinks=[Shrink(verdict_seconds=0.41, seconds=3.26, lost_steps=1)]))
    assert "## Without a spare\n" in text
    assert "| 0.41 | **3.26** | 1 |" in text
    assert "## Without a spare" not in render(report.PAGE, run_of(interruption("Everstep", 1.0)))


def test_the_page_tells_from_which_length_of_a_run_on_rehearsals_are_cheap() -> None:
    found = [Rehearsed(Job.DDP, is_first, seconds, 5) for is_first, seconds in ((True, 7.2), (False, 3.6))]
    text = render(report.PAGE, run_of(rehearsals=found))
    assert "| DDP | first | **7.2** | 6.7 | 2.0 | 1 |" in text
    assert "| DDP | second | **3.6** | 3.1 | 1.0 | 1 |" in text
    assert "## Rehearsals" not in render(report.PAGE, run_of(interruption("Everstep", 1.0)))


RUN = run_of(
    interruption("Everstep", 1.2, phases={"detect": 0.1, "replace": 0.2, "restore": 0.9, "rework": 0.0}),
    interruption("torchrun + DCP", 180.0, came_back=False),
    silences=[Silence(verdict_seconds=3.1, detection_seconds=3.0)],
    blackouts=[Blackout(seconds=3.0, lost_steps=0, restarted_ranks=0, steps=5)],
)
