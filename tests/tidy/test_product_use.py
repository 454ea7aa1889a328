"""The product ships no fakes, and no code that only tests and benchmarks use."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("everstep", "control_plane", "worker", "infra")
OUTSIDE_PRODUCT = frozenset({"awscli_initialize", "CheckpointManager", "CheckpointReader", "session_of"})
"""Names that only other programs use: the AWS CLI loads `everstep.aws_plugin`, scripts pass readers to DCP,
torchtitan builds the checkpoint manager that a configuration names, and callbacks of scripts ask for the session of a
trainer."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Return the path and the syntax tree of every product module."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def names_used(tree: ast.AST) -> Iterator[str]:
    """Return the names that code uses: variables, attributes, keywords, and names in strings such as `module:name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value) if re.fullmatch(r"[\w.:]+", node.value) else ()


def test_every_class_and_function_of_the_product_has_a_user_in_the_product() -> None:
    found = dict(trees())
    generator = ast.parse((ROOT / "docs/generate.py").read_text())
    used = Counter(name for tree in [*found.values(), generator] for name in names_used(tree))
    unused = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in found.items()
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and (isinstance(node, ast.ClassDef) or not node.decorator_list)
        and node.name not in OUTSIDE_PRODUCT
        and not node.name.startswith("__")
        and used[node.name] == Counter(names_used(node))[node.name]
    ]
    assert unused == []
