"""Few tests read private attributes of the product, or replace its constants.

Such a test fails at each rename, and tests no behaviour that a user sees. A test should observe an object through its
public methods, messages and files, or through a method such as `idle` that waits for background work. A test reaches a
limit with the product's own value, or passes a smaller limit as an option at construction.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("control_plane", "everstep", "infra", "worker")
Nodes = list[ast.AST]
MAX_PRIVATE_ACCESSES = 54
"""Maximum number of accesses to private names. Lower it with each access that you remove, and never raise it."""
NO_ACCESS = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples, although their names begin with an underscore."""


MAX_REPLACED_CONSTANTS = 1
"""Maximum number of product constants that tests replace.

Lower it with each one that you remove, and never raise it.
"""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NO_ACCESS


def modules(*folders: str) -> Iterator[tuple[Path, Nodes]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, nodes_of(path.read_text())


def nodes_of(text: str) -> Nodes:
    """Return all nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(text)))


@functools.cache
def counted() -> tuple[Counter[Path], Counter[Path]]:
    """Return the number of private accesses of each test file, and the number of product constants that it replaces.

    The function parses each module only once, because that takes most of these tests' time.
    """
    private, constant = set[str](), set[str]()
    for _, nodes in modules(*PRODUCT):
        private |= defined(nodes)
        constant |= constants(nodes)
    of_private, of_constants = Counter[Path](), Counter[Path]()
    for path, nodes in modules("tests"):
        of_private[path] = len(list(accesses(nodes, private)))
        of_constants[path] = len(list(replaced_constants(nodes, constant)))
    return of_private, of_constants


def defined(nodes: Nodes) -> set[str]:
    """Return the private names that a module defines."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if is_private(name)}


def accesses(nodes: Nodes, names: set[str]) -> Iterator[str]:
    """Return each access to a private name of another object, including `monkeypatch.setattr`."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node.value):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
            "getattr",
            "setattr",
        }:
            yield from (
                ast.unparse(node) for word in node.args if isinstance(word, ast.Constant) and word.value in names
            )


def constants(nodes: Nodes) -> set[str]:
    """Return the constants that a module defines, which are names in capital letters."""
    names = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {name for name in names if re.fullmatch(r"_?[A-Z][A-Z0-9_]+", name)}


def replaced_constants(nodes: Nodes, names: set[str]) -> Iterator[str]:
    """Return each call of `monkeypatch.setattr` that replaces a constant with one of these names.

    The function leaves out constants of modules that the file imports from the tests or the benchmarks, because they
    may have the same names.
    """
    foreign = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("benchmarks", "tests")
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setattr":
            if node.args and isinstance(node.args[0], ast.Name) and node.args[0].id in foreign:
                continue
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            if any(str(word).rpartition(".")[2] in names for word in words):
                yield ast.unparse(node)


def is_own(node: ast.expr) -> bool:
    """Return True if the expression is `self`, `cls` or `super()`."""
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return call or (isinstance(node, ast.Name) and node.id in {"self", "cls"})


def test_tests_access_few_private_attributes_of_the_product():
    counts, _ = counted()
    most = "\n".join(f"{count:4} {path.relative_to(ROOT)}" for path, count in counts.most_common(20) if count)
    assert counts.total() <= MAX_PRIVATE_ACCESSES, (
        f"{counts.total()} private accesses, MAX_PRIVATE_ACCESSES is {MAX_PRIVATE_ACCESSES}. Observe the object "
        f"through its public interface, or lower the number. Files with most of them:\n{most}"
    )


def test_tests_replace_few_constants_of_the_product():
    _, counts = counted()
    most = "\n".join(f"{count:4} {path.relative_to(ROOT)}" for path, count in counts.most_common(20) if count)
    assert counts.total() <= MAX_REPLACED_CONSTANTS, (
        f"Tests replace {counts.total()} constants of the product, MAX_REPLACED_CONSTANTS is {MAX_REPLACED_CONSTANTS}. Reach the limit "
        f"at its real size, or make it an option of the object. Files with most of them:\n{most}"
    )


def test_each_kind_of_replaced_constant_counts():
    names = constants(nodes_of("LIMIT = 1\nLIMIT_BYTES: Final = 2\n_LIMIT, limit = 3, 4"))
    assert names == {"LIMIT", "LIMIT_BYTES", "_LIMIT"}
    test = nodes_of(
        "from tests.a import harness as h\nfrom benchmarks import b\nfrom worker import module\n"
        "monkeypatch.setattr(h, 'LIMIT', 1)\nmonkeypatch.setattr(b, 'LIMIT', 1)\n"
        "monkeypatch.setattr(tests, 'OF_TESTS', 1)\nmonkeypatch.setattr(module, 'LIMIT', 1)\nmonkeypatch.setattr('package.module.LIMIT_BYTES', 1)\n"
        "monkeypatch.setattr(module, '_LIMIT', 1)\nmonkeypatch.setattr(module, 'pause', LIMIT)\n"
        "setattr(a, 'value', 'LIMIT')\nmonkeypatch.setattr(Class, 'limit', 1)"
    )
    assert len(list(replaced_constants(test, names))) == 3


def test_each_kind_of_access_counts():
    product = nodes_of("class A:\n    _field: int = 0\n    def _do(self):\n        self._set = 1\n_CONSTANT = 3")
    names = defined(product)
    assert names == {"_field", "_do", "_set", "_CONSTANT"}
    test = nodes_of(
        "a._field\na.b._do()\nself._set\nsuper()._do()\nmonkeypatch.setattr(module, '_CONSTANT', 4)\n"
        "getattr(a, '_set')\nworld._replace(x=1)\ntorch._dynamo\na.__dict__"
    )
    assert len(list(accesses(test, names))) == 4
