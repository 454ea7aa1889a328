"""No test with the mark `fast` starts Chromium, PostgreSQL or a compiler."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import fast

STARTERS = {
    "PostgreSql": "postgresql",
    "WarmParent": "pytest_collection_finish",  # Pytest's hook that starts the process behind the fixture `warm_parent`.
    "chromium": "browser",
    "sync_playwright": "browser",
    "load_inline": "",
}
"""Calls that start a heavy program or a compiler.

For each call: the only fixture or hook that may contain it.
"""


def starts(path: Path) -> list[tuple[str, str]]:
    """Return each call of a file that starts a heavy program, with the function around the call."""
    found = []
    tree = ast.parse(path.read_text())
    around = {
        child: function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in STARTERS:
                found.append((name, around.get(node, "")))
    return found


def fast_sources() -> list[Path]:
    folders = [path for folder in fast.FOLDERS for path in (fast.ROOT / folder).rglob("*.py")]
    return [*folders, fast.ROOT / "conftest.py", fast.ROOT / "dashboard/conftest.py"]


def test_only_heavy_fixtures_start_heavy_programs():
    calls = {(path, *call) for path in fast_sources() for call in starts(path)}
    assert {function for _, _, function in calls} == set(STARTERS.values()) - {""}
    assert set(fast.HEAVY_FIXTURES) - set(STARTERS.values()) == {"warm_parent"}
    assert not {(path, name) for path, name, function in calls if STARTERS[name] != function}


def test_no_test_has_the_mark_by_hand():
    mark = "mark." + "fast"
    assert [path for path in fast.ROOT.rglob("*.py") if mark in path.read_text() and path.name != "fast.py"] == []


def test_make_runs_what_has_the_mark():
    makefile = (fast.ROOT.parent / "Makefile").read_text()
    folders = re.search(r"^FAST_FOLDERS := (.*)$", makefile, re.MULTILINE)
    assert folders is not None
    assert folders[1].split() == [f"tests/{name}" for name in fast.FOLDERS]
    assert re.search(
        r"^test-fast:.*\n(\t@.*\n)*\t@.* -m 'fast and not full' \$\(FAST_FOLDERS\)$", makefile, re.MULTILINE
    )


class NotComparable:
    """A parameter of a test that raises an error when it is compared with a string, as an array does."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ValueError(other)


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def item(folder: str, fixtures: tuple[str, ...] = (), marks: tuple[str, ...] = (), **parameters: object) -> Any:
    return Item(
        path=fast.ROOT / folder / "test_it.py",
        nodeid=f"tests/{folder}/test_it.py::test_it{list(parameters.values())}",
        fixturenames=fixtures,
        get_closest_marker=lambda name: name if name in marks else None,
        callspec=SimpleNamespace(params=parameters),
    )


@pytest.mark.parametrize("folder", fast.FOLDERS)
def test_a_test_of_a_fast_folder_is_fast(folder):
    assert fast.is_fast(item(folder, ("tmp_path", "engine"), engine="sqlite"))
    assert fast.is_fast(item(folder, array=NotComparable()))


@pytest.mark.parametrize(
    "test",
    [
        item("integration"),
        item("e2e"),
        item("unit", ("browser",)),
        item("unit", ("tmp_path", "postgresql")),
        item("contract", ("warm_parent",)),
        item("unit", ("engine",), engine="postgresql"),
        item("unit", marks=("integration",)),
        item("properties", marks=("full",)),
    ],
)
def test_a_test_that_needs_more_is_not_fast(test):
    assert not fast.is_fast(test)


@pytest.mark.parametrize("fixture", fast.HEAVY_FIXTURES)
def test_a_fast_test_that_requests_a_heavy_fixture_while_it_runs_fails(fixture):
    fast.refuse_heavy_fixture("tmp_path", item("unit", marks=("fast",)))
    fast.refuse_heavy_fixture(fixture, item("unit"))
    with pytest.raises(pytest.fail.Exception, match=f"requests the fixture '{fixture}'"):
        fast.refuse_heavy_fixture(fixture, item("unit", marks=("fast",)))


def test_a_fast_run_draws_some_tests_of_shells_and_runs_all_others():
    kinds = [item("golden"), item("contract/other"), item("unit/control_plane/loop"), item("unit", ("service",))]
    assert all(fast.is_test_of_shell(kind) for kind in kinds)
    shells = [item("golden", number=str(number)) for number in range(21)]
    others = [item("unit", number=str(number)) for number in range(4)]
    drawn = [{*shells, *others} - fast.undrawn_shell_tests([*shells, *others], seed) for seed in (1, 2)]
    assert all(len(tests) == 3 + 4 and tests >= {*others} for tests in drawn)
    assert drawn[0] != drawn[1]
    assert fast.undrawn_shell_tests(shells, 1) == fast.undrawn_shell_tests(shells[::-1], 1)


def test_every_fast_test_of_this_run_has_the_mark(request):
    unmarked = [test for test in request.session.items if test.get_closest_marker("fast") is None]
    assert [test.nodeid for test in unmarked if fast.is_fast(test)] == []


def test_this_process_refuses_heavy_fixtures(request):
    """A hook of `tests/conftest.py` fails a fast test that requests a heavy fixture while it runs."""
    request.node.add_marker("fast")
    with pytest.raises(pytest.fail.Exception, match="requests the fixture 'browser'"):
        request.getfixturevalue("browser")


@pytest.fixture
def browser() -> None:
    raise AssertionError("the hook runs before the fixture")
