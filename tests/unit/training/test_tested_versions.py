"""The versions of frameworks in the documents and in the integrations are the versions that the tests use."""

from __future__ import annotations

import re
from pathlib import Path

from everstep.training.versions import TESTED
from tests.integrations_latest import SUITES, pinned, table

ROOT = Path(__file__).parents[3]
PINNED = pinned((ROOT / "requirements/development.txt").read_text())


def documented() -> dict[str, str]:
    """Return the tested version of each framework in the table of the page on frameworks."""
    rows = [
        line.split("|") for line in (ROOT / "docs/integrations.md").read_text().splitlines() if line.startswith("|")
    ]
    return {name: version for row in rows for name, version in re.findall(r"([a-z]+) (\d+\.\d+)", row[2])}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_documented_versions_are_the_pinned_ones() -> None:
    found = documented()
    assert found
    assert found == {name: minor(PINNED[name]) for name in found}


def test_the_versions_that_the_integrations_accept_are_the_pinned_and_documented_ones() -> None:
    assert {name: minor(PINNED[name]) for name in TESTED} == TESTED
    assert documented().items() >= TESTED.items()


def test_each_tested_package_has_tests_with_its_newest_version() -> None:
    assert SUITES.keys() >= TESTED.keys() - {"deepspeed"}, "the environment's torch decides which DeepSpeed works"
    selected = {name: files for name, (files, _) in SUITES.items()}
    assert all((ROOT / file).is_file() for files in selected.values() for file in files)
    assert all(
        "tests/integration/training/test_matrix.py" in selected[name]
        for name in ("transformers", "accelerate", "lightning", "torchtitan")
    )


def test_a_table_shows_tested_and_newest_versions() -> None:
    lock = "peft==0.21.2 \\\n    --hash=sha256:00\ntrl==1.16.0 ; python_version >= '3.11' \\\n    --hash=sha256:00\n"
    assert pinned(lock) == {"peft": "0.21.2", "trl": "1.16.0"}
    lines = table(pinned(lock), {"peft": "0.22.0"}, {"peft": "passed", "trl": "no tests"})
    assert [line.split(maxsplit=3) for line in lines[1:]] == [
        ["peft", "0.21.2", "0.22.0", "passed"],
        ["trl", "1.16.0", "-", "no tests"],
    ]
