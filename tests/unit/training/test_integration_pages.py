"""The pages of the integrations show the examples in full, and name the tested versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.training import versions

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
SHOWN = re.compile(r"<!-- (examples/\S+) -->\n```python(?: hl_lines=\"([0-9 ]+)\")?\n(.*?)```\n", re.DOTALL)
ADDED = {
    "accelerate": [
        "from everstep.integrations.accelerate import prepare",
        "keep = prepare(accelerator, model=model, optimizer=optimizer, data=loader)",
        "for features, targets in keep.batches(until_step=settings.steps):",
        "keep.close()",
    ],
    "lightning": [
        "from everstep.integrations.lightning import EverstepCallback",
        "    callbacks=[EverstepCallback()],",
    ],
    "torchtitan": [
        "from everstep.integrations.torchtitan import CheckpointManager",
        "    checkpoint=CheckpointManager.Config(),",
    ],
    "transformers": [
        "import everstep.integrations.transformers",
        "everstep.integrations.transformers.attach(trainer)",
    ],
}
"""Lines of each page's script that a user adds or changes for Everstep."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_a_whole_example(page: Path) -> None:
    shown = SHOWN.findall(page.read_text())
    assert shown, f"{page.name} shows no example"
    for path, _, text in shown:
        assert text == (ROOT / path).read_text(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_highlights_the_lines_that_a_user_adds(page: Path) -> None:
    _, numbers, text = SHOWN.findall(page.read_text())[0]
    assert [text.splitlines()[int(number) - 1] for number in numbers.split()] == ADDED[page.stem]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_is_kept_what_is_not_and_what_a_failure_does(page: Path) -> None:
    text = page.read_text()
    assert all(f"**{heading}" in text for heading in ("What is kept.", "Not kept.", "After a failure."))


def test_the_table_has_the_tested_versions() -> None:
    rows = [row for row in (ROOT / "docs" / "integrations.md").read_text().splitlines() if row.startswith("| [")]
    linked = [Path(row.split("](")[1].split(")")[0]) for row in rows]
    assert {each.name for each in linked if each.parent.name == "integrations"} == {page.name for page in PAGES}
    for package, version in versions.TESTED.items():
        assert any(package in row and version in row for row in rows), f"no row names {package} {version}"
