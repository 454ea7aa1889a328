from __future__ import annotations

from pathlib import Path

import pytest

from worker.shim.preload import _one_builder


@pytest.mark.parametrize("name", ["operator/lock", "py311_cpu/operator/lock"])
def test_what_a_killed_builder_has_left_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    lock = tmp_path / name
    lock.parent.mkdir(parents=True)
    with lock.open("w"), _one_builder(tmp_path):
        assert lock.exists(), "somebody builds"
    with _one_builder(tmp_path):
        assert not lock.exists()
