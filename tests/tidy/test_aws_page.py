"""A test runs each command block of docs/aws.md or names its exception. Each test that a document cites exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests import aws_page

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DEFINED = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.MULTILINE)
CITED = re.compile(r"`(?:([\w/.-]+\.py)::)?(test_\w+)(?:\[[^`]*\])?`")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if CITED.search(page.read_text())]


def test_every_block_is_a_command_of_a_shell_or_a_transcript() -> None:
    assert {block.language for block in aws_page.blocks()} == {"sh", "console"}


def test_a_test_runs_every_block_of_the_page_or_an_exception_says_why_none_does() -> None:
    """Each section of docs/aws.md with blocks has a test, which runs all blocks except those in `EXCEPTIONS`."""
    assert {block.section for block in aws_page.blocks()} == aws_page.TESTS.keys()
    assert all(aws_page.blocks_to_run(section) for section in aws_page.TESTS)
    for test in aws_page.TESTS.values():
        file, _, name = test.partition("::")
        assert name in defined_in(TESTS / file), test


@pytest.mark.parametrize("command", aws_page.EXCEPTIONS)
def test_each_exception_is_about_one_block_and_has_a_reason(command: str) -> None:
    assert [command in block.text for block in aws_page.blocks()].count(True) == 1
    assert re.fullmatch(r"[A-Z].{30,}\.", aws_page.EXCEPTIONS[command])


def test_the_pages_about_aws_and_faults_cite_tests() -> None:
    assert {"aws.md", "operating.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_document_cites_exists(page: Path) -> None:
    missing = [
        f"{file}::{name}" if file else name
        for file, name in CITED.findall(page.read_text())
        if name not in (defined_in(TESTS / file.removeprefix("tests/")) if file else all_tests())
    ]
    assert missing == []


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file. Empty if the file does not exist."""
    return frozenset(DEFINED.findall(path.read_text())) if path.is_file() else frozenset()


@cache
def all_tests() -> frozenset[str]:
    """Return the names of all tests, and of the modules that contain tests."""
    files = sorted(TESTS.rglob("test_*.py"))
    return frozenset().union({path.stem for path in files}, *map(defined_in, files))
