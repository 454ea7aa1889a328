"""The docstring of a long module gives the reason why the module is not divided."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
REASON = "The module has more than 500 lines."


@pytest.mark.parametrize("package", ["everstep", "control_plane", "worker", "infra", "benchmarks"])
def test_a_long_module_says_why_it_is_not_two(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines"
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in [path.read_text()]
        if (len(text.splitlines()) > MAX_LINES) != (REASON in (ast.get_docstring(ast.parse(text)) or ""))
    ]
    assert wrong == [], f"a module over {MAX_LINES} lines says why, in a paragraph that begins {REASON!r}"
