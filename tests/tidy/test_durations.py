"""`make test-durations` prints the slowest tests of the run that `make test` stored."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations

ROOT = Path(__file__).parents[2]
TESTS = """
import time
import pytest

@pytest.fixture
def prepared():
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass
    yield
    raise OSError("teardown")

def test_slow(prepared):
    assert True

@pytest.mark.parametrize("n", [1, 2])
def test_quick(n):
    assert True

class TestSame:
    def test_quick(self):
        assert True
"""


def test_a_time_contains_setup_and_teardown(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--junitxml=report.xml"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=50, check=False)
    found = durations.durations([tmp_path / "report.xml"])
    names = ("test_slow", "test_quick[1]", "test_quick[2]", "TestSame::test_quick")
    assert found.keys() == {f"folder/test_it.py::{name}" for name in names}
    assert found["folder/test_it.py::test_slow"] >= 0.3


def test_the_slowest_tests_come_first_and_the_last_line_sums_all() -> None:
    assert durations.table({"a": 1.0, "b": 6.0, "c": 3.0}, 2) == [
        "    6.00 s  b",
        "    3.00 s  c",
        "   10.00 s  in 3 tests, 90% of it in the 2 slowest",
    ]


def test_without_a_run_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "REPORTS", tmp_path)
    with pytest.raises(SystemExit, match="Run make test first"):
        durations.main()


def test_each_run_of_make_test_stores_its_report() -> None:
    makefile = (ROOT / "Makefile").read_text()
    folder = durations.REPORTS.relative_to(ROOT)
    assert re.findall(rf"--junitxml={folder}/([\w-]+)\.xml", makefile) == ["parallel", "e2e", "rest", "rest-e2e"]
    assert f"{folder.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()
