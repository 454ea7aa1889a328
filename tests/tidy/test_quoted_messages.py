"""Each message that the docs quote is a message of the product."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/resume.md", "docs/guides/submitting.md")
QUOTED = [
    quoted
    for page in PAGES
    for quoted in re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
]
ANY = "…"
"""Placeholder on these pages for the part of a message that varies."""


def templates() -> Iterator[str]:
    """Return each string in the product's code, with the placeholder in place of each inserted value."""
    for package in ("everstep", "control_plane", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values)  # type: ignore[misc]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.fixture(scope="module")
def printed() -> str:
    return "\n".join(" ".join(template.split()) for template in templates())


def test_the_pages_quote_ten_messages():
    assert len(QUOTED) == 10


@pytest.mark.parametrize("message", QUOTED)
def test_every_quoted_message_is_printed_by_the_product(printed, message):
    pieces = [piece.strip() for piece in " ".join(message.split()).split(ANY)]
    assert max(map(len, pieces)) >= 15, "a quotation names what is particular to the message"
    assert [piece for piece in pieces if piece not in printed] == []
