"""Every reference in code and documents leads to something that exists in this repository.

References name decisions, pages, sections, files and rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = "everstep|control_plane|worker|infra|tests|benchmarks|docs|examples|web|alembic"
KINDS = "py|pyi|md|ts|tsx|css|json|toml|txt|ini|mako|svg|png|html|cpp"
PATH = re.compile(rf"(?<![\w/.$<-])((?:{TOP})/[\w./-]*\.(?:{KINDS}))(#[\w-]+)?(?![\w-]|/)")
SHORT = re.compile(rf"`((?:[\w-]+/)+[\w-]+\.(?:{KINDS}))`")
LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
DECISION = re.compile(r"\bADR\s+(\d{4})\b")
UNKNOWN_SECTION = "\N{SECTION SIGN}"
"""Matches a reference to a section by number. Numbers change, so references must use anchors."""
OWN = frozenset(TOP.split("|")) - {"alembic"}  # a library has this name
BUILT = ("control_plane/static/", "web/dist/", "web/node_modules/", "docs/pictures/")
"""Folders of generated files."""
TEXT = (".py", ".md", ".ts", ".tsx", ".toml", ".cpp", ".css", ".mako", ".ini", "Makefile")


@cache
def tracked() -> tuple[str, ...]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())


def sources() -> list[str]:
    """Return the files of the repository that people write, except this test file."""
    return [name for name in tracked() if name.endswith(TEXT) and name != "tests/tidy/test_references.py"]


MARKDOWN = [name for name in tracked() if name.endswith(".md") and not name.startswith("tests/")]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def prose_of(name: str) -> str:
    """Return a document without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text_of(name), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(name: str) -> frozenset[str]:
    """Return the anchors of a document's headings in GitHub's form."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", prose_of(name), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def docstrings(name: str) -> Iterator[str]:
    """Return all docstrings and comments of a module. Attributes have docstrings too."""
    text = text_of(name)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    yield from re.findall(r"(?:^|\s)# .*", text)


def dangling(text: str) -> Iterator[str]:
    """Return the paths in a text, with their anchors, that do not exist."""
    for path, anchor in PATH.findall(text):
        if path.startswith(BUILT):
            continue
        if not (ROOT / path).exists() or (anchor and path.endswith(".md") and anchor[1:] not in anchors(path)):
            yield path + anchor


def test_no_section_is_named_by_a_number() -> None:
    assert [name for name in sources() if UNKNOWN_SECTION in text_of(name)] == []


def test_every_decision_that_is_named_exists() -> None:
    known = {Path(name).name[:4] for name in tracked() if name.startswith("docs/adr/")}
    named = {(name, number) for name in sources() for number in DECISION.findall(text_of(name))}
    assert len(named) > 30
    assert sorted((name, number) for name, number in named if number not in known) == []


@pytest.mark.parametrize("name", MARKDOWN)
def test_every_link_leads_to_a_file_and_a_section(name: str) -> None:
    prose = re.sub(r"`[^`\n]*`", "", prose_of(name))
    lost = []
    for target in LINK.findall(prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        exists = file.is_relative_to(ROOT) and file.exists()
        if not exists or (anchor and file.suffix == ".md" and anchor not in anchors(str(file.relative_to(ROOT)))):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("name", MARKDOWN)
def test_every_path_in_a_document_exists(name: str) -> None:
    assert sorted(set(dangling(prose_of(name)))) == []


@pytest.mark.parametrize("name", MARKDOWN)
def test_every_short_path_in_a_document_ends_one_of_a_file(name: str) -> None:
    """A short path in a document, such as `core/moves.py`, is the end of the path of an existing file."""
    named = set(SHORT.findall(prose_of(name))) - {path for path, _ in PATH.findall(prose_of(name))}
    assert sorted(path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in tracked())) == []


def test_every_path_in_a_docstring_or_comment_exists() -> None:
    lost = {
        (name, path)
        for name in sources()
        if name.endswith(".py")
        for text in docstrings(name)
        for path in dangling(text)
    }
    assert sorted(lost) == []


def test_every_short_path_in_a_docstring_ends_one_of_a_file() -> None:
    ends = {path for name in tracked() for path in ends_of(name)}
    named = {(name, path) for name in sources() if name.endswith(".py") for path in short_paths(name)}
    assert len(named) > 20
    assert sorted((name, path) for name, path in named if path not in ends) == []


def ends_of(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[first:]) for first in range(len(parts)))


def short_paths(name: str) -> Iterator[str]:
    return (path for text in docstrings(name) for path in SHORT.findall(text))


def test_every_path_in_other_code_exists() -> None:
    """Paths in TypeScript and build files exist.

    The test checks their whole text, because it cannot parse their comments.
    """
    others = [name for name in sources() if not name.endswith((".py", ".md"))]
    assert (
        sorted({(name, path) for name in others for path in dangling(text_of(name)) if path.startswith("docs/")}) == []
    )


def test_the_rules_of_the_design_are_numbered_in_order_and_those_that_are_named_exist() -> None:
    pages = ["docs/design.md", *(name for name in sources() if name.startswith("docs/design/"))]
    texts = [prose_of(name) for name in pages]
    rules = [[int(number) for number in re.findall(r"^\*\*R(\d+)\.", text, re.MULTILINE)] for text in texts]
    assert [numbers for numbers in rules if numbers != sorted(numbers)] == []
    every = sorted(number for numbers in rules for number in numbers)
    assert every == list(range(1, len(every) + 1))
    assert len(every) > 50
    assert {int(number) for text in texts for number in re.findall(r"\bR(\d+)\b", text)} == set(every)


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "examples"])
def test_every_import_of_the_repositorys_own_code_exists(folder: str) -> None:
    """No type checker and no test looks into scripts that only a benchmark or a rank starts."""
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{name.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OWN
        for name in node.names
        if not has_name(node.module or "", name.name)
    ]
    assert missing == []


def has_name(module: str, name: str) -> bool:
    """Return whether a module of this repository defines or imports a name, or is a package with this module."""
    path = ROOT / module.replace(".", "/")
    is_part = (path / f"{name}.py").exists() or (path / name).is_dir()
    files = [path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi")]
    return is_part or any(name == "*" or name in top_level_names(file) for file in files if file.exists())


@cache
def top_level_names(file: Path) -> frozenset[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
    return frozenset(names)
