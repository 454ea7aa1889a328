"""Whatever is public says what it is; nothing is left to be done, slept through or described some other day."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("everstep", "control_plane", "worker", "infra")
CODE = (*PACKAGES, "alembic", "tests", "examples", "benchmarks", "docs")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "To be (described|written)")))
"""Spelled so that this file does not find itself."""
FEWEST_WORDS = 6
"""A module's docstring with fewer words is a label, not a description."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_class_and_function_has_a_docstring(package: str) -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{found.lineno} {name}"
        for path in files(package)
        for name, found in undescribed(path)
    ]
    assert silent == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_described_in_a_sentence(package: str) -> None:
    labels = [
        f"{path.relative_to(ROOT)}: {said}"
        for path in files(package)
        if len((said := ast.get_docstring(tree_of(path)) or "").split()) < FEWEST_WORDS
    ]
    assert labels == []


def test_nothing_is_left_for_later() -> None:
    left = [place for path in python_files() for place in lines_with(path, UNFINISHED)]
    assert left == []


def test_nobody_sleeps() -> None:
    """Also where the linter's ban does not look: an alias, a bare `sleep`."""
    sleeping = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if is_sleep(node)
    ]
    assert sleeping == []


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, package
    return found


def python_files() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def lines_with(path: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if pattern.search(line):
            yield f"{path.relative_to(ROOT)}:{number} {line.strip()}"


def is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(name.name == "sleep" for name in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "sleep"
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    )


def undescribed(path: Path) -> Iterator[tuple[str, Definition]]:
    """Yield what is public and has no docstring, except what a Protocol or a base class has described for it."""
    for scope, found in public(tree_of(path)):
        if ast.get_docstring(found) or (scope is not None and found.name in promised(path.parent, scope)):
            continue
        yield found.name if scope is None else f"{scope.name}.{found.name}", found


def public(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yield the public definitions of a module, and those of its public classes with their class."""
    for found in definitions(tree.body):
        yield None, found
        if isinstance(found, ast.ClassDef):
            yield from ((found, member) for member in definitions(found.body))


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def promised(folder: Path, scope: ast.ClassDef) -> frozenset[str]:
    """Return the methods that are described for `scope` where its interface is: in a Protocol of the same folder, or in
    a base class there.
    """
    bases = {ast.unparse(base) for base in scope.bases}
    return frozenset(
        name
        for owner, names in interfaces(folder).items()
        if owner.name != scope.name and (is_protocol(owner) or owner.name in bases)
        for name in names
    )


@cache
def interfaces(folder: Path) -> dict[ast.ClassDef, frozenset[str]]:
    """Return the methods with a docstring of every class in a folder."""
    classes = [
        node for path in sorted(folder.glob("*.py")) for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    ]
    return {
        owner: frozenset(member.name for member in definitions(owner.body) if ast.get_docstring(member))
        for owner in classes
    }


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0].endswith("Protocol") for base in owner.bases)
