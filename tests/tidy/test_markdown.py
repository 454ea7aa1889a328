"""Lines of Markdown have at most 120 columns.

Tables, code, and links or code spans without a possible line break are exempt.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 120
DOCUMENTS = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
UNBROKEN = re.compile(r"\s*(?:[-*+>]|\d+\.)?\s*(?:`[^`]*`|\S)+")
"""Matches a line with a single link or code span. Such a line must not be broken."""


def long_lines(text: str) -> list[str]:
    """Return the numbers and the text of the lines that are too long."""
    found, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        marker = re.match(r" *(```+|~~~+)", line)
        if marker and not fence:
            fence = marker[1]
        elif fence:
            fence = "" if line.strip() == fence else fence
        elif len(line) > COLUMNS and not line.lstrip().startswith(("|", "!", "<")) and not UNBROKEN.fullmatch(line):
            found.append(f"{number}: {line}")
    return found


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if (ROOT / name).exists()])
def test_no_line_of_prose_is_too_long(name: str) -> None:
    assert long_lines((ROOT / name).read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "x" * 121,
        f"| {'x ' * 80} |",
        f"```\n{'x ' * 80}\n```",
        f"- [{'x' * 60}](docs/{'x' * 80}.md)",
        f"![{'x ' * 60}](y.png)",
        "`" + "x " * 70 + "`",
    ],
    ids=["word", "table", "code", "link", "picture", "code span"],
)
def test_what_cannot_be_broken_may_be_longer(text: str) -> None:
    assert long_lines(text) == []


def test_a_long_line_of_words_is_found_also_behind_code() -> None:
    assert long_lines(f"```\ncode\n```\n\n{'word ' * 30}") == [f"5: {'word ' * 30}"]
