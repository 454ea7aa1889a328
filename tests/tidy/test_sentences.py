"""No code reads a sentence: it neither compares, searches, splits nor matches the text of a reason or message.

Facts are values, and only `control_plane.accounts` turns them into sentences. Code that reads a sentence changes its
behaviour when somebody rewords it, or when a person's note contains the same words.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "control_plane" / "accounts"
MODULES = [
    path
    for package in ("control_plane", "worker", "everstep")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.is_relative_to(ROOM)
]
TEXTS = {"complaint", "decision", "evidence", "message", "messages", "note", "reason", "reasons", "why", "words"}
"""Names of variables, attributes and keys that contain sentences for people."""
PARTS = {
    "count",
    "endswith",
    "find",
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "split",
    "splitlines",
    "startswith",
}
PATTERNS = {"findall", "finditer", "fullmatch", "match", "search", "split", "sub"}
ALLOWED: dict[str, str] = {}
"""Lines that may read a text, with the reason."""


def is_text(node: ast.expr) -> bool:
    """Return whether an expression is, by its name, a sentence for people."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name.lower().split("_")[-1] in TEXTS
        case ast.Call(func=ast.Attribute(value=value, attr="lower" | "strip" | "casefold" | "get")):
            return is_text(value) or any(
                isinstance(each, ast.Constant) and is_text(ast.Name(str(each.value))) for each in node.args
            )
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return isinstance(value, ast.Name) and value.id in ("error", "exception", "refusal")
        case _:
            return False


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_reading(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> bool:
    """Return whether a comparison reads a sentence. It may ask whether a sentence is empty, or has changed."""
    if not isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
        return False
    if isinstance(operator, ast.In | ast.NotIn):
        return is_text(right) or (is_text(left) and not isinstance(left, ast.Subscript))
    if any(isinstance(side, ast.Constant) and not side.value for side in (left, right)):
        return False
    return (is_text(left) or is_text(right)) and name_of(left) != name_of(right)


def readings(source: str) -> Iterator[int]:
    """Yield the lines that read a sentence."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                if any(is_reading(sides[at], op, sides[at + 1]) for at, op in enumerate(ops)):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in PARTS and is_text(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name), args=args) if name in PATTERNS and any(map(is_text, args)):
                yield node.lineno


def test_no_code_reads_a_sentence():
    found = {
        f"{path.relative_to(ROOT)}: {path.read_text().splitlines()[line - 1].strip()}"
        for path in MODULES
        for line in readings(path.read_text())
    }
    assert sorted(found) == sorted(ALLOWED)
