"""Tests how a script's session ends for every kind of exit of the script. The tests use real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep.training import exit_watch

SCRIPT = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("exit_watch", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
watch = module.ExitWatch(lambda: print("closed", flush=True), lambda: print("drained", flush=True))
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "output", "code"),
    [
        ("", "closed drained", 0),
        ("sys.exit()", "closed drained", 0),
        ("sys.exit(0)", "closed drained", 0),
        ("sys.exit(3)", "drained", 3),
        ("exit(3)", "drained", 3),
        ("quit('no')", "drained", 1),
        ("quit()", "closed drained", 0),
        ("raise ValueError('no')", "drained", 1),
        ("watch.cancel()", "", 0),
        # a child process must not close its parent's session
        ("os.fork() or sys.exit(); os.wait()", "closed drained", 0),
        ("os.fork() or sys.exit(3); os.wait()", "closed drained", 0),
    ],
)
def test_only_a_good_end_closes_and_every_one_drains(ending: str, output: str, code: int) -> None:
    script = SCRIPT.format(path=exit_watch.__file__, ending=ending)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert (" ".join(done.stdout.split()), done.returncode) == (output, code), done.stderr
