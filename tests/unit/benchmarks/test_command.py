"""Tests the checks that a benchmark makes before it starts, and its exit code if it cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import command as beginning
from benchmarks.command import Begun, begin
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import Machine
from benchmarks.page import PLACEHOLDER, BenchmarkRun, Page
from benchmarks.page import load as load_results
from benchmarks.rows import Row
from tests.unit.benchmarks.machine import MACHINE

SCRIPT = """
import os, signal
from benchmarks.command import begin
begin()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("what was started is ended")
"""


def test_a_line_says_when_it_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    begun = Begun(machine=MACHINE, at=100.0)
    monkeypatch.setattr(beginning.time, "monotonic", lambda: 161.26)
    begun.say("half of it")
    assert capsys.readouterr().out == "  61.3 s  half of it\n"


def _begun(
    monkeypatch: pytest.MonkeyPatch, loads: list[float], *, is_patient: bool = True
) -> tuple[Begun, list[float]]:
    """Begin a benchmark run on a machine of two cores. `loads` are the machine's loads, one per observation.

    Return the run and the seconds that it waited between its observations.
    """
    seen, waited = iter(loads), list[float]()
    monkeypatch.setattr(Machine, "observe", lambda: replace(MACHINE, cores=2, load_average=(next(seen), 0.0, 0.0)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return begin(is_patient=is_patient, wait=waited.append), waited


def test_a_run_waits_until_what_was_done_before_has_faded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, waited = _begun(monkeypatch, [2.5, 1.2, 1.0, 0.3])
    assert (begun.machine.load_average[0], len(waited)) == (1.0, 2)
    assert capsys.readouterr().out == "the load is 2.50: waiting until it is 1.00, 180 s at most\n"


def test_a_quiet_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _begun(monkeypatch, [1.0])[1] == []
    assert capsys.readouterr().out == ""


def test_a_machine_that_stays_busy_is_waited_for_in_vain_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waited = _begun(monkeypatch, [1.1] * 100)
    assert (begun.machine.load_average[0], sum(waited)) == (1.1, 180.0)


def test_who_only_tries_the_harness_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _begun(monkeypatch, [9.0], is_patient=False)[1] == []


def test_a_run_that_is_terminated_ends_what_it_has_started() -> None:
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "what was started is ended\n")


@dataclass(frozen=True, kw_only=True)
class Timed(BenchmarkRun):
    """Results of a benchmark that measures a single value."""

    milliseconds: float


PAGE = Page(
    name="api",  # the name must belong to an existing page template
    command="make bench-x",
    run=Timed,
    values=lambda _: dict.fromkeys(PLACEHOLDERS),
    rows=lambda run: [Row(what="a call", value=run.milliseconds, unit="ms", limit=2.0).judged()],
)
PLACEHOLDERS = {name for _, name, _ in PLACEHOLDER.findall(PAGE.template)} - {"written", "load", "caveats"}


@pytest.mark.parametrize(
    ("milliseconds", "load", "code", "said"),
    [
        (1.5, 0.1, 0, "pass  a call 1.5 ms (≤ 2 ms)"),
        (2.5, 0.1, 2, "falls short  a call 2.5 ms (≤ 2 ms)"),
        (1.5, 9.0, 3, "pass  a call 1.5 ms"),
    ],
)
def test_a_quick_run_leaves_docs_alone_and_exits_by_its_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    milliseconds: float,
    load: float,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(beginning, "HOME", tmp_path)
    monkeypatch.setattr(Machine, "observe", lambda: replace(MACHINE, load_average=(load, 0.0, 0.0)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert beginning.run(PAGE, lambda _: {"milliseconds": milliseconds}, ["--quick"]) == code
    assert said in capsys.readouterr().out
    assert load_results(PAGE, tmp_path / "quick-api.json").milliseconds == milliseconds
    assert "count for nothing" in (tmp_path / "quick-api.md").read_text()


def test_a_failed_benchmark_writes_nothing_and_names_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(begun: Begun) -> dict[str, object]:
        assert (begun.parts, begun.is_quick) == (["a"], True)
        raise BenchmarkFailed("no network namespaces")

    monkeypatch.setattr(beginning, "HOME", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert beginning.run(PAGE, fail, ["--quick", "--only", "a"], parts=["a", "b"]) == 1
    assert capsys.readouterr().err == f"the benchmark failed: no network namespaces\nlogs: {tmp_path / 'api'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["api"]
