"""The comparison of a training with its replays names the cause, and the lines that a user has to change."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from everstep.determinism import Entry, Kind, Record, Source
from everstep.protocol.ids import Generation, Step
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed
from everstep.training.determinism.replays import compare_replays, differing
from everstep.training.determinism.script_lines import lines_of_variables


def step_of(loss: str, generator: str, gradient: str) -> Record:
    """Return the record of a step whose script logs its loss before the update."""
    entries = (Entry(Kind.VALUE, "loss", loss), Entry(Kind.GENERATOR, "torch", generator))
    return Record(3, {4: [*entries, Entry(Kind.GRADIENT, "weight", gradient)]})


def test_a_generator_and_not_the_loss_is_the_cause_if_the_script_logs_before_its_update() -> None:
    training, replay = step_of("a", "a", "a"), step_of("b", "b", "b")
    for records in ([training, replay], [training, replay, replay]):
        finding = compare_replays(0, records)
        assert finding is not None
        assert (finding.kind, finding.names, finding.source) == (Kind.GENERATOR, ("torch",), Source.PREFETCH)


def test_the_loss_is_the_difference_if_the_generators_are_equal_until_the_update() -> None:
    training, replay = step_of("a", "a", "a"), step_of("b", "a", "b")
    finding = compare_replays(0, [training, replay, replay])
    assert finding is not None
    assert (finding.kind, finding.names, finding.source) == (Kind.VALUE, ("loss",), Source.UNKEPT_STATE)


def of_process(noise: str, activation: str) -> Record:
    """Return the record of two steps of a process that built `noise` before its loop."""
    record = Record(3, {step: [Entry(Kind.GRADIENT, "weight", activation)] for step in (4, 5)})
    for moment in range(8, 12):
        variables = {
            "script.noise": f"Tensor {noise}",
            "script.hidden": f"Tensor {activation}{moment}",
            "script.x": "Tensor 1",
        }
        record.variables[moment] = variables | {"script.began": f"float {noise}"}
    return record


def test_tensors_that_each_process_draws_anew_are_the_cause_and_not_a_kernel() -> None:
    records = [of_process(each, each) for each in "abc"]
    finding = compare_replays(0, records)
    assert finding is not None
    proven = Rehearsed(generation=Generation(1), step=Step(3), steps=2, seconds=1.0, verdict=RehearsalVerdict.PROVEN)
    report = differing(proven, finding, records)
    assert report.difference is not None
    assert (report.verdict, report.difference.source) == (RehearsalVerdict.UNSTABLE, Source.UNSEEDED)
    assert report.difference.unkept == ("script.noise",)
    assert "Seed the generators" in report.advice


def test_a_kernel_is_the_cause_if_all_that_precedes_the_loop_is_equal() -> None:
    records = [of_process("a", each) for each in "abc"]
    finding = compare_replays(0, records)
    assert finding is not None
    proven = Rehearsed(generation=Generation(1), step=Step(3), steps=2, seconds=1.0, verdict=RehearsalVerdict.PROVEN)
    report = differing(proven, finding, records)
    assert report.difference is not None
    assert (report.difference.source, report.difference.unkept) == (Source.KERNEL, ())


SCRIPT = """
def evaluate():
    for i in range(3):
        X, Y = i, i

best, step = 0, 0

def remember(score):
    global best
    best = max(best, score)

for i in range(3):
    X, Y = i, i
    step += 1
    remember(i)
"""


def test_the_line_of_a_global_is_that_of_its_loop_and_not_of_a_like_named_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_with_globals.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.import_module("script_with_globals")
    names = [f"script_with_globals.{name}" for name in ("i", "X", "step", "best")]
    changed = {
        each.name.partition(".")[2]: SCRIPT.splitlines()[each.line - 1].strip() for each in lines_of_variables(names)
    }
    assert changed == {
        "i": "for i in range(3):",
        "X": "X, Y = i, i",
        "step": "step += 1",
        "best": "best = max(best, score)",
    }
    assert min(each.line for each in lines_of_variables(names)) > SCRIPT.splitlines().index("best, step = 0, 0") + 1
