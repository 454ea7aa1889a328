"""The documents match the code: generated parts are current, and every name in the prose exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("everstep", "control_plane", "worker", "infra")
NAMED = (
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/design.md", "docs/operating.md")),
    *sorted((ROOT / "docs/design").glob("*.md")),
    *sorted((ROOT / "docs/adr").glob("[0-9]*.md")),
)
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|txt|json|toml|ini|mako)")
SYMBOL = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?")
EXTERNAL = frozenset({"ec2", "httpx", "moto", "msgspec", "rich", "torch", "boto3", "asyncio", "atexit"})
"""First components of dotted names that belong to other projects."""


def test_generated_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_says_in_its_first_line_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in modules()
        if not (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 110), ("ARCHITECTURE.md", 300), ("CHANGELOG.md", 60), ("docs/design.md", 700)]
)
def test_a_document_that_is_read_first_stays_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("document", NAMED, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    missing = [name for name in code_spans(document) if FILE.fullmatch(name) and not file_exists(name)]
    assert missing == []


@pytest.mark.parametrize("document", NAMED, ids=lambda path: path.name)
def test_every_name_of_the_code_exists(document: Path) -> None:
    unknown = [name for name in code_spans(document) if is_symbol(name) and not symbol_exists(name)]
    assert unknown == []


@pytest.mark.parametrize("document", NAMED, ids=lambda path: path.name)
def test_every_name_that_is_given_with_its_file_is_defined_there(document: Path) -> None:
    text = " ".join(document.read_text().split())
    given = re.findall(r"`([\w.]+)(?:\(\))?`,? \(`([\w/]+\.py)`", text)
    wrong = [
        (name, path)
        for name, path in given
        if path not in tracked() or not set(name.split(".")) <= defined_in(path) | {Path(path).stem}
    ]
    assert wrong == []
    assert given or document.name != "ARCHITECTURE.md"


def test_every_field_of_every_request_has_a_test() -> None:
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs/reference/field-coverage.md").read_text().splitlines()
        if " | `" in line
    ]
    assert len(rows) > 150
    assert [
        f"{operation.removeprefix('| ')}.{field.strip('`')}" for operation, field, tests in rows if tests == "– |"
    ] == []


def test_the_websites_navigation_names_every_page() -> None:
    text = (ROOT / "docs/site/nav.yml").read_text()
    patterns = re.findall(r"^ +- (\S+\.md)$", text, re.MULTILINE)
    pages = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    named = {page for page in pages if any(PurePath(page).match(pattern) for pattern in patterns)}
    assert sorted(pages - named) == []
    assert [pattern for pattern in patterns if not any(PurePath(page).match(pattern) for page in pages)] == []


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/adr").glob("[0-9]*.md"))]
    assert len(numbers) == len(set(numbers)), "two decisions have the same number"


def test_every_variable_is_documented_and_every_documented_one_is_used() -> None:
    variable = re.compile(r"EVERSTEP_[A-Z_]*[A-Z]")
    used = {name for path in modules() for name in variable.findall(path.read_text())}
    documented = set(variable.findall((ROOT / "docs/reference/settings.md").read_text()))
    assert documented == used


@pytest.mark.parametrize("document", [ROOT / "README.md", *NAMED], ids=lambda path: path.name)
def test_every_command_and_option_exists(document: Path) -> None:
    promised = {
        tuple(line.split()[:3]): set(line.replace("/", " ").split())
        for line in (ROOT / "tests/tidy/flags.txt").read_text().splitlines()
    }
    text = document.read_text().replace("\\\n", " ")
    for command in re.findall(
        r"(?:^|[`$;(\s])(everstep (?:jobs|local|fleets|nodes|incidents|events|protection|checkpoints) [a-z][^`\n;)]*)",
        text,
    ):
        first, *options = re.split(r"\s&&\s|\s#\s|\s{3,}", command)[0].split()
        noun, verb, *rest = options
        assert (first, noun, verb) in promised, command
        if noun != "local":  # the command `local` continues with another program, which has its own options
            # The words after `--` belong to another program.
            options_of = rest[: rest.index("--")] if "--" in rest else rest
            assert {word.rstrip(",") for word in options_of if word.startswith("--")} <= promised[first, noun, verb], (
                command
            )


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if path.name != "__init__.py")


def code_spans(document: Path) -> Iterator[str]:
    """Yield the text between backquotes outside of code blocks."""
    yield from re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


def file_exists(name: str) -> bool:
    """Return True if the path of a file in the checkout equals or ends with this path."""
    return (ROOT / name).exists() or any(f"/{path}".endswith(f"/{name}") for path in tracked())


@cache
def tracked() -> tuple[str, ...]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(done.stdout.splitlines())


def is_symbol(name: str) -> bool:
    """Return True if a code span looks like a name of this repository: with a dot, with parentheses, or in CamelCase.

    Names of files, options and messages of AWS are not symbols.
    """
    if (
        FILE.fullmatch(name)
        or name.endswith(".sock")
        or not SYMBOL.fullmatch(name)
        or name.partition(".")[0] in EXTERNAL
    ):
        return False
    return "." in name or name.endswith("()") or bool(re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}", name))


def symbol_exists(name: str) -> bool:
    parts = name.removesuffix("()").split(".")
    known = names()
    return all(part in known for part in parts)


@cache
def defined_in(path: str) -> frozenset[str]:
    """Return every class, function and variable that a file defines."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(
        defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    )


@cache
def names() -> frozenset[str]:
    """Return every module, class, function, attribute and field of the packages.

    For each field, the PascalCase name in the API is included.
    """
    found: set[str] = set(PACKAGES)
    for path in (*modules(), *(ROOT / package / "__init__.py" for package in PACKAGES)):
        found |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return frozenset(found | {"".join(word.capitalize() for word in name.split("_")) for name in found})
