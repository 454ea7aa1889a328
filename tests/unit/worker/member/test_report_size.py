"""Texts that a job writes leave room in an agent's report, whatever its ranks send."""

from __future__ import annotations

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.limits import MAX_FAULTS, MAX_TEXT_CHARACTERS
from everstep.protocol.rehearsals import (
    MAX_REHEARSED_CHARACTERS,
    MAX_REHEARSED_NAMES,
    RehearsalVerdict,
    Rehearsed,
    ReplayDifference,
    ScriptLine,
)
from worker.member.faults import MAX_FAULTS_CHARACTERS, SHORT_CHARACTERS, ReportedFaults
from worker.member.status import WORDED_RANKS, shortened

TEXT = "x" * MAX_REHEARSED_CHARACTERS


def rehearsed(step: int, verdict: RehearsalVerdict = RehearsalVerdict.DIFFERS) -> Rehearsed:
    names, lines = (TEXT,) * MAX_REHEARSED_NAMES, (ScriptLine(name=TEXT, file=TEXT, line=1),) * MAX_REHEARSED_NAMES
    return Rehearsed(
        generation=Generation(1),
        step=Step(4),
        steps=5,
        seconds=1.0,
        verdict=verdict,
        difference=ReplayDifference(step=Step(step), kind="a", source="b", names=names, unkept=names, lines=lines),
        message=TEXT,
        advice=TEXT,
    )


def test_a_report_has_the_texts_of_the_first_differences() -> None:
    reports = {Rank(rank): rehearsed(9 - rank % 2) for rank in range(64)}
    reports[Rank(64)] = rehearsed(5, RehearsalVerdict.UNPROVEN)
    found = shortened(reports)
    worded = [rank for rank, each in found.items() if each.message]
    assert worded == [1, 3, 64]
    assert len(worded) == WORDED_RANKS + 1
    assert all(found[rank] == reports[rank] for rank in worded)
    facts = [(each.verdict, each.difference and each.difference.step) for each in found.values()]
    assert facts == [(each.verdict, each.difference and each.difference.step) for each in reports.values()]


def test_the_messages_of_many_faults_are_short() -> None:
    faults = ReportedFaults(lambda: None)
    for number in range(MAX_FAULTS):
        faults.report("training_error", f"{number:08} {'x' * MAX_TEXT_CHARACTERS}")
    assert len(faults.present) == MAX_FAULTS
    total = sum(len(each.message) for each in faults.present)
    assert total < MAX_FAULTS_CHARACTERS + MAX_TEXT_CHARACTERS + MAX_FAULTS * (SHORT_CHARACTERS + 10)
    assert len(faults.present[0].message) > SHORT_CHARACTERS
    before = faults.present
    faults.report("training_error", f"{0:08} {'x' * MAX_TEXT_CHARACTERS}")
    assert [each.message[:8] for each in faults.present] == [each.message[:8] for each in before], "known already"
