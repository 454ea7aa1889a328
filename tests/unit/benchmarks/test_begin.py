"""How a harness begins, and how it ends before its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import begin as beginning
from benchmarks.begin import Begun
from tests.unit.benchmarks.test_document import MACHINE

SCRIPT = """
import os, signal
from benchmarks.begin import begin
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


def test_a_run_that_is_terminated_ends_what_it_has_started() -> None:
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "what was started is ended\n")
