"""Every public name has a docstring, and public functions document their exceptions.

No code contains a mark of unfinished work or a sleep.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from control_plane.api import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("everstep", "control_plane", "worker", "infra")
CODE = (*PACKAGES, "alembic", "tests", "examples", "benchmarks", "docs")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "To be (described|written)")))
"""Marks of unfinished code. They are spelled in parts, so that this file contains none of them."""
FEWEST_WORDS = 6
"""A module's docstring with fewer words is a label, not a description."""
UNDOCUMENTED = {"AssertionError", "NotImplementedError", "SystemExit"}
"""Exceptions that functions need not document: they show a mistake in the code, or end the process."""
ON_THE_WIRE = {
    **{error.__name__: error.code for error in errors.MODELED},
    "AlreadyExists": errors.InUse.code,
    "Conflict": errors.InUse.code,
}
"""For exception classes that routes raise: the error code that API clients receive."""


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
    """Finds calls that the linter's ban on sleeps misses: through an alias, or as a bare `sleep`."""
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
    """Yield the public names without a docstring. The docstring may be in a Protocol or a base class instead."""
    for scope, found in public(tree_of(path)):
        if ast.get_docstring(found) or (scope is not None and found.name in promised(path.parent, scope)):
            continue
        yield found.name if scope is None else f"{scope.name}.{found.name}", found


def public(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yield the public definitions of a module and of its public classes, with their class."""
    for found in definitions(tree.body):
        yield None, found
        if isinstance(found, ast.ClassDef):
            yield from ((found, member) for member in definitions(found.body))


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def promised(folder: Path, scope: ast.ClassDef) -> frozenset[str]:
    """Return the methods of `scope` that a Protocol or a base class in the same folder already describes."""
    bases = {ast.unparse(base) for base in scope.bases}
    return frozenset(
        name
        for owner, names in interfaces(folder).items()
        if owner.name != scope.name and (is_protocol(owner) or owner.name in bases)
        for name in names
    )


@cache
def interfaces(folder: Path) -> dict[ast.ClassDef, frozenset[str]]:
    """Return the methods with a docstring, for every class in a folder."""
    classes = [
        node for path in sorted(folder.glob("*.py")) for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    ]
    return {
        owner: frozenset(member.name for member in definitions(owner.body) if ast.get_docstring(member))
        for owner in classes
    }


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0].endswith("Protocol") for base in owner.bases)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_documents_the_exceptions_that_it_raises(package: str) -> None:
    """Public functions document the exceptions that they raise themselves.

    Other linters also reject exceptions of called functions, and skip docstrings of one line.
    """
    missing = [
        f"{path.relative_to(ROOT)}:{found.lineno} {found.name}: {name}"
        for path in files(package)
        for scope, found in public(tree_of(path))
        if not isinstance(found, ast.ClassDef) and not is_described_elsewhere(path, scope, found)
        for name in sorted(raised(path, found))
        if not kinds_of(name) & documented(found)
    ]
    assert missing == []


def is_described_elsewhere(path: Path, scope: ast.ClassDef | None, found: Function) -> bool:
    """Return whether an interface describes the method, or the docstring is the help of a command."""
    if any(ast.unparse(node).startswith(("command(", "app.command(")) for node in found.decorator_list):
        return True
    return scope is not None and found.name in promised(path.parent, scope)


def raised(path: Path, function: Function) -> set[str]:
    """Return the classes of the exceptions that a function raises itself.

    Exceptions that the function re-raises belong to a callee. For `raise f()`, the class is the return type of `f`, if
    the module defines `f`.
    """
    names = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            named = [last_name(part) for part in ([kind.body, kind.orelse] if isinstance(kind, ast.IfExp) else [kind])]
            names |= {returned_by(path).get(name, name) for name in named}
    parts = {part for name in names for part in name.split(" | ")}
    return {name for name in parts if name[:1].isupper() and name not in UNDOCUMENTED}


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a function, without those of inner functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


@cache
def returned_by(path: Path) -> dict[str, str]:
    """Return the annotated return type of every function and method of a module."""
    return {
        node.name: last_name(node.returns)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None
    }


def documented(function: Function) -> set[str]:
    """Return the exceptions that a docstring names, under `Raises:` or in a sentence with "raise"."""
    text = ast.get_docstring(function) or ""
    section = re.search(r"^Raises:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^    [\w.]+(?=:)", section[1], re.MULTILINE) if section else []
    sentences = re.findall(r"\b[Rr]aises?\s+([^.]*)", text)
    return {entry.strip().rpartition(".")[2] for entry in entries} | set(re.findall(r"\w+", " ".join(sentences)))


def kinds_of(name: str) -> set[str]:
    """Return the names under which an exception may be documented: its class, a base class, or its error code in the
    API.
    """
    kinds = {name}
    while more := {base for kind in kinds for base in bases().get(kind, ())} - kinds:
        kinds |= more
    return (kinds | {ON_THE_WIRE[kind] for kind in kinds & ON_THE_WIRE.keys()}) - {"Exception", "BaseException"}


@cache
def bases() -> dict[str, frozenset[str]]:
    """Return the names of the base classes of every exception of Python and of every class of the packages."""
    found = {
        name: frozenset(base.__name__ for base in kind.__mro__[1:])
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    for package in PACKAGES:
        for path in files(package):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = found.get(node.name, frozenset()) | {last_name(base) for base in node.bases}
    return found
