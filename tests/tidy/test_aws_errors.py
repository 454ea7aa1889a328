"""The code that handles botocore's errors also handles answers that botocore cannot parse.

For such an answer, for example a proxy's HTML page, botocore raises ResponseParserError, which is no BotoCoreError.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_ANSWERS = {"control_plane/cloud/identity.py", "control_plane/cloud/region.py"}
"""Modules that handle only errors in credentials and settings. In these modules, botocore parses no answer."""


def named(node: ast.expr | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()


def handled(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield line and error types of each `except` clause and of each `suppress`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            yield node.lineno, named(node.type)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "suppress":
            yield node.lineno, set().union(*map(named, node.args))


@pytest.mark.parametrize("package", ["everstep", "control_plane", "worker", "infra"])
def test_who_handles_errors_of_botocore_handles_unreadable_answers(package: str) -> None:
    missing = []
    for path in sorted((ROOT / package).rglob("*.py")):
        module = str(path.relative_to(ROOT))
        clauses = list(handled(ast.parse(path.read_text())))
        handles_elsewhere = any("ResponseParserError" in types and "BotoCoreError" not in types for _, types in clauses)
        missing += [
            f"{module}:{line}"
            for line, types in clauses
            if "BotoCoreError" in types
            and "ResponseParserError" not in types
            and not handles_elsewhere
            and module not in WITHOUT_ANSWERS
        ]
    assert missing == []
