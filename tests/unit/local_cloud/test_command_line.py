"""Tests `python -P -m infra.local_cloud` and `everstep local` in cases that need no running cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep.cli import local
from infra.local_cloud import __main__ as command_line
from infra.local_cloud.errors import StartFailed
from infra.local_cloud.up import LocalCluster
from tests.unit.local_cloud.served import eventually


def test_an_operating_error_is_one_line_whatever_is_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(self: LocalCluster) -> None:
        raise StartFailed("node [i-1] " + "is far away " * 30)

    monkeypatch.setattr(LocalCluster, "down", fail)
    monkeypatch.setattr(sys, "argv", ["x", "down", "--state-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("error: node [i-1] is far away")
    assert told.count("\n") == 1


def test_options_and_help_are_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(local.os, "execv", lambda _, words: run.append(words))
    for words in (
        ["up", "--nodes", "4", "--spares", "1"],
        ["up", "--help"],
        ["env", "--unset"],
        ["down"],
        ["status", "--output", "json"],
        ["fault", "kill-rank", "2"],
    ):
        assert CliRunner().invoke(local.app, words).exit_code == 0
    prefix = [sys.executable, "-P", "-m", "infra.local_cloud"]
    assert run == [
        [*prefix, "up", "--nodes", "4", "--spares", "1"],
        [*prefix, "up", "--help"],
        [*prefix, "env", "--unset"],
        [*prefix, "down"],
        [*prefix, "status", "--output", "json"],
        [*prefix, "fault", "kill-rank", "2"],
    ]


def test_a_missing_extra_is_answered_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: None)
    told = CliRunner().invoke(local.app, ["up"])
    assert told.exit_code == 2
    assert "pip install 'everstep[local]'" in told.output


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_up_ends_what_it_began(number: signal.Signals, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-P",
        "-m",
        "infra.local_cloud",
        "up",
        "--nodes",
        "1",
        "--spares",
        "0",
        "--boot-delay",
        "600",
    ]
    # If the tests run in the background, they ignore SIGINT, and a child process would inherit this.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [*words, "--state-dir", str(tmp_path / "state")], stderr=subprocess.PIPE, preexec_fn=heeded
    ) as up:
        cluster = LocalCluster(tmp_path / "state")
        eventually(lambda: len(cluster.status()) == 2 and cluster.status()[1].url, timeout_seconds=40)
        up.send_signal(number)
        assert up.stderr is not None
        told = up.stderr.read().decode()
        assert up.wait(timeout=30) != 0
    assert cluster.status() == ()
    assert "Traceback" not in told
