"""Finds mechanical symptoms of unclear English in docstrings. A text that passes this test can still be unclear."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.test_public_docstrings import ROOT, Definition, files, tree_of

PRODUCT = ("everstep", "control_plane", "worker", "infra")
PACKAGES = (*PRODUCT, "benchmarks")
COLUMNS = 120
LITERAL = re.compile(r"""(?:\w+: )?(?P<quote>['"`/]).*(?P=quote),?""")
"""A string or pattern of TypeScript that fills its line. The formatter does not break it."""
PRAGMA = re.compile(r"# (type: ignore|noqa|pragma)")
NO_SUBJECT = re.compile(
    r"(Of|On|In|At|By|For|From|To|With|Without|Where|When|As|Between|Since|Until|Behind|Under|Over|Through|Like|"
    r"But|Else|And|Or|Who|Whose|Whoever|That|Those|What|Which|How|Why|Not|So)\b"
)
"""First words of a docstring without subject and verb."""
NO_VERB = re.compile(r"(The|A|An|This|These|All|Any|Each|Every|One|No|None|Its|Their|It|They|There|Nobody|Somebody)\b")
"""First words of a function's docstring that does not say what the function does."""
BANNED = re.compile(
    r"\b(tells?|told|let(s)? go|be had|is had|are had|was had|looked at|looks? at|whoever|it is said|is said|are said|"
    r"is known to|takes? in)\b",
    re.IGNORECASE,
)
"""Everyday verbs that docstrings of public classes and functions replace by verbs of the field."""
WORDS_OF_AN_ENTRY = 5
"""Fewest words of an `Args` entry in which neither a unit nor a value occurs."""
INFORMATIVE = re.compile(r"[`\d/]|second|byte|None|empty|path|step|rank|node|UTC|ms\b", re.IGNORECASE)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_begins_with_a_subject_or_a_verb(package: str) -> None:
    unclear = [place(path, node, first) for path, node, first in first_lines(package) if NO_SUBJECT.match(first)]
    assert unclear == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_functions_docstring_begins_with_what_the_function_does(package: str) -> None:
    unclear = [
        place(path, node, first)
        for path, node, first in first_lines(package)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node) and NO_VERB.match(first)
    ]
    assert unclear == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_use_plain_verbs(package: str) -> None:
    unclear = [
        place(path, node, found.group())
        for path in files(package)
        for node in definitions(path)
        if not node.name.startswith("_") and (found := BANNED.search(ast.get_docstring(node) or ""))
    ]
    assert unclear == []


@pytest.mark.parametrize("package", PRODUCT)
def test_an_entry_of_arguments_says_more_than_the_name(package: str) -> None:
    empty = [
        place(path, node, entry)
        for path in files(package)
        for node in definitions(path)
        for entry in argument_entries(ast.get_docstring(node) or "")
        if len(entry.partition(": ")[2].split()) < WORDS_OF_AN_ENTRY and not INFORMATIVE.search(entry)
    ]
    assert empty == []


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "examples", "docs", "alembic"])
def test_lines_have_at_most_120_columns(folder: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS and not PRAGMA.search(line) and not is_embedded(path, number)
    ]
    assert long == []


def test_lines_of_the_dashboard_have_at_most_120_columns() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for kind in ("*.ts", "*.tsx", "*.css")
        for folder in ("src", "test", "public")
        for path in sorted((ROOT / "web" / folder).rglob(kind))
        if path != ROOT / "web" / "src" / "contract.ts"  # generated from the API's schema
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS and not LITERAL.fullmatch(line.strip())
    ]
    assert long == []


def is_embedded(path: Path, number: int) -> bool:
    """Return whether a line belongs to a script or a log that a test holds as a string."""
    strings = (
        node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    around = [node for node in strings if node.lineno <= number <= (node.end_lineno or 0)]
    in_tests = ROOT / "tests" in path.parents
    return in_tests and any(node.lineno < (node.end_lineno or 0) and node.col_offset > 0 for node in around)


def first_lines(package: str) -> Iterator[tuple[Path, Definition, str]]:
    for path in files(package):
        for node in definitions(path):
            text = ast.get_docstring(node)
            if text:
                yield path, node, text.splitlines()[0]


def definitions(path: Path) -> Iterator[Definition]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Definition))


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def argument_entries(docstring: str) -> Iterator[str]:
    _, _, section = docstring.partition("\nArgs:\n")
    for line in section.splitlines():
        if not line.startswith("    "):
            return
        if re.match(r"    \**\w+: ", line):
            yield line.strip()


def place(path: Path, node: Definition, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text}"
