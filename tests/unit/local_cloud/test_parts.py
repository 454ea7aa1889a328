"""Each process of a local cluster is detached from its parent and has a record on disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local_cloud.errors import StartFailed
from infra.local_cloud.parts import Parts, write_private
from infra.local_cloud.processes import descendants, wait_gone

PART = """
import json, os, subprocess, sys, threading
from pathlib import Path
mode, ready = sys.argv[1:]
if mode == "dies":
    sys.exit("no reason given")
if mode == "deaf":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["/bin/sleep", "1000"])
if mode != "mute":
    draft = Path(ready + ".draft")
    draft.write_text(json.dumps({"url": "http://127.0.0.1:1"}))
    draft.rename(ready)
threading.Event().wait()
"""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "some_part.py").write_text(PART)
    parts = Parts(tmp_path / "local", tmp_path / "logs")
    yield parts
    parts.end("part", grace_seconds=0.1)


def start(parts: Parts, mode: str, tmp_path: Path) -> None:
    record = parts.start(
        "part", "some_part", [mode, str(parts.ready_file("part"))], {"PYTHONPATH": str(tmp_path / "modules")}
    )
    parts.wait_ready(record, timeout_seconds=0.3 if mode == "mute" else 20)


def test_a_part_is_started_recorded_and_ended(parts: Parts, tmp_path: Path) -> None:
    start(parts, "well", tmp_path)
    assert parts.ready("part") == {"url": "http://127.0.0.1:1"}
    assert parts.is_alive("part")
    record = parts.record("part")
    assert record is not None
    # A second object reads the record from disk, as another process would.
    later = Parts(tmp_path / "local", tmp_path / "logs")
    assert later.record("part") == record
    parts.end("part")
    assert not record.process.is_alive
    assert parts.record("part") is None
    assert parts.ready("part") is None
    parts.end("part")


def test_a_part_that_dies_says_why(parts: Parts, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"(?s)part ended while it started.*part\.log.*no reason given"):
        start(parts, "dies", tmp_path)


def test_a_part_that_is_never_ready_is_not_waited_for(parts: Parts, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="was not ready after"):
        start(parts, "mute", tmp_path)


def test_a_deaf_part_is_killed_with_its_children(parts: Parts, tmp_path: Path) -> None:
    start(parts, "deaf", tmp_path)
    record = parts.record("part")
    assert record is not None
    below = descendants(record.pid)
    assert below
    parts.end("part", grace_seconds=0.05)
    assert not any(process.is_alive for process in [record.process, *below])


def test_a_dead_part_is_known_to_be_dead(parts: Parts, tmp_path: Path) -> None:
    start(parts, "well", tmp_path)
    record = parts.record("part")
    assert record is not None
    record.process.send(signal.SIGKILL)
    assert wait_gone([record.process], timeout_seconds=10)
    assert not parts.is_alive("part")


def test_private_files_are_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_parts_run_isolated_from_the_working_directory(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "json.py").write_text("raise SystemExit('shadowed')")
    start(parts, "well", tmp_path)
    assert parts.is_alive("part")
