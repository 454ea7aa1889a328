from __future__ import annotations

import threading
from pathlib import Path

import pytest

from worker.shim.preload import _one_builder

LOOK_SECONDS = 0.01


def wait_until_gone(lock: Path) -> None:
    """torch's builders look for the file as well: nothing tells them."""
    deadline = threading.Event()
    for _ in range(3000):
        if not lock.exists():
            return
        deadline.wait(LOOK_SECONDS)
    raise AssertionError(f"{lock} is still there")


@pytest.mark.parametrize("name", ["operator/lock", "py311_cpu/operator/lock"])
def test_what_a_killed_builder_has_left_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    lock = tmp_path / name
    lock.parent.mkdir(parents=True)
    lock.touch()
    with _one_builder(tmp_path, LOOK_SECONDS):
        wait_until_gone(lock)


def test_a_builder_that_is_killed_while_others_wait_for_it_keeps_nobody_waiting(tmp_path: Path) -> None:
    lock = tmp_path / "operator" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as held, _one_builder(tmp_path, LOOK_SECONDS):
        for _ in range(20):
            threading.Event().wait(LOOK_SECONDS)
            assert lock.exists(), "somebody builds"
        held.close()
        wait_until_gone(lock)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with _one_builder(tmp_path, LOOK_SECONDS):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before
