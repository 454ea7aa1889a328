"""The product has no code that only tests and benchmarks use, and benchmarks have no unused code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("everstep", "control_plane", "worker", "infra")
BENCHMARKS = ("benchmarks",)
OUTSIDE_PRODUCT = frozenset(
    {"awscli_initialize", "CheckpointManager", "CheckpointReader", "EverstepCallback", "LogExportRow", "session_of"}
)
"""Names that only other programs use: the AWS CLI loads `everstep.aws_plugin`, scripts pass readers to DCP,
torchtitan builds the checkpoint manager that a configuration names, scripts pass the callback to Lightning, callbacks
of scripts ask for the session of a trainer, and servers of the version before write the rows of copied logs."""


def trees(packages: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    """Return the path and the syntax tree of every module of some packages."""
    for package in packages:
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


def names_defined(node: ast.stmt) -> Iterator[str]:
    """Return the names of a class, a function that no decorator registers, or constants."""
    if isinstance(node, ast.ClassDef) or (
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list
    ):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(
    ("packages", "users"), [(PRODUCT, PRODUCT), (BENCHMARKS, (*PRODUCT, *BENCHMARKS))], ids=["product", "benchmarks"]
)
def test_every_name_of_a_module_has_a_user(packages: tuple[str, ...], users: tuple[str, ...]) -> None:
    found = dict(trees(users))
    generator = ast.parse((ROOT / "docs/generate.py").read_text())
    used = Counter(name for tree in [*found.values(), generator] for name in names_used(tree))
    unused = [
        f"{path}:{node.lineno} {name}"
        for path, tree in found.items()
        if path.startswith(packages)
        for node in tree.body
        for name in names_defined(node)
        if name not in OUTSIDE_PRODUCT and not name.startswith("__") and used[name] == Counter(names_used(node))[name]
    ]
    assert unused == []
