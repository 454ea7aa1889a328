"""msgspec must read each message class while modules are imported, never later.

If two threads use a class for the first time at once, the process crashes. `codec.resolve` therefore makes each first
use at import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_parent import ROOT

MODULES = [
    path for part in ("everstep", "worker", "control_plane", "infra") for path in sorted((ROOT / part).rglob("*.py"))
]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Return every call of a module, by the text of the called function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def first_uses(source: str) -> set[str]:
    """Return the calls by which msgspec would read a class for the first time after the import."""
    tree = ast.parse(source)
    at_import = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)]
    made = {id(call) for statement in at_import for _, call in calls(statement)}
    resolved = {
        ast.unparse(call.args[0]) for statement in at_import for name, call in calls(statement) if name == "resolve"
    }
    found = set()
    for name, call in calls(tree):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in ("msgspec.json.decode", "msgspec.msgpack.decode") and "type" in keywords:
            found.add(ast.unparse(keywords["type"]))
        if name in ("msgspec.json.Decoder", "msgspec.msgpack.Decoder") and id(call) not in made:
            found.add(ast.unparse(call.args[0]))
        if name == "msgspec.convert":
            found |= {ast.unparse(call.args[1])} - resolved
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_types_are_read_when_modules_are_imported(path: Path) -> None:
    expected = {"kind"} if path.name == "codec.py" else set()  # `resolve` itself holds a lock during this call
    assert first_uses(path.read_text()) == expected


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(data): return msgspec.json.decode(data, type=Job)", {"Job"}),
        ("def f(data): return msgspec.json.Decoder(Job).decode(data)", {"Job"}),
        ("def f(data): return msgspec.convert(data, Job)", {"Job"}),
        ("def f(data): return msgspec.convert(data, Job)\nresolve(Job)", set()),
        ("_JOB = msgspec.json.Decoder(Job)\ndef f(data): return _JOB.decode(data)", set()),
    ],
)
def test_the_rule_sees_what_it_forbids(source: str, found: set[str]) -> None:
    assert first_uses(source) == found


def unpickled(source: str) -> list[str]:
    """Return the calls of a module that build objects from untrusted bytes."""
    found = []
    for name, call in calls(ast.parse(source)):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_unsafe = (
            name.partition(".")[0] in ("marshal", "shelve", "dill", "cloudpickle", "joblib")
            or name.endswith(("pickle.load", "pickle.loads", "Unpickler", "unsafe_load"))
            or (name == "yaml.load" and keywords.get("Loader") not in ("yaml.SafeLoader", "yaml.BaseLoader"))
            or (name == "torch.load" and keywords.get("weights_only") != "True")
            or keywords.get("allow_pickle", "False") != "False"
        )
        if is_unsafe:
            found.append(name)
    return found


@pytest.mark.security
def test_nothing_is_unpickled() -> None:
    """Except by torch's collectives of objects, with which the ranks of one job agree."""
    assert [(path, found) for path in MODULES if (found := unpickled(path.read_text(encoding="utf-8")))] == []


@pytest.mark.security
@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("pickle.loads(data)", ["pickle.loads"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("numpy.load(path, allow_pickle=True)", ["numpy.load"]),
        ("yaml.load(text, Loader=yaml.FullLoader)", ["yaml.load"]),
        ("yaml.load(text, Loader=yaml.BaseLoader)", []),
    ],
)
def test_what_unpickles_is_found(source: str, found: list[str]) -> None:
    assert unpickled(source) == found
