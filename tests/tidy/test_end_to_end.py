"""All end-to-end tests are in the folders from which the second pytest run of `make test` collects tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "mark." + "e2e"


def test_every_end_to_end_test_is_in_a_folder_that_make_test_names() -> None:
    line = re.search(r"-m 'e2e and not full' (.+)", (ROOT / "Makefile").read_text())
    assert line is not None
    folders = [ROOT / name for name in line[1].split()]
    marked = {path for path in (ROOT / "tests").rglob("*.py") if MARK in path.read_text()}
    assert all(any(path.is_relative_to(folder) for path in marked) for folder in folders), "each has some"
    assert not [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)]
