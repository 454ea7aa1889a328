"""The pages of the integrations show the examples in full, and name the tested versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.training import versions

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
SHOWN = re.compile(r"<!-- (examples/\S+) -->\n```python\n(.*?)```\n", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_a_whole_example(page: Path) -> None:
    shown = SHOWN.findall(page.read_text())
    assert shown, f"{page.name} shows no example"
    for path, text in shown:
        assert text == (ROOT / path).read_text(), path


def test_the_table_has_the_tested_versions() -> None:
    rows = [row for row in (ROOT / "docs" / "integrations.md").read_text().splitlines() if row.startswith("| [")]
    linked = [Path(row.split("](")[1].split(")")[0]) for row in rows]
    assert {each.name for each in linked if each.parent.name == "integrations"} == {page.name for page in PAGES}
    for package, version in versions.TESTED.items():
        assert any(package in row and version in row for row in rows), f"no row names {package} {version}"
