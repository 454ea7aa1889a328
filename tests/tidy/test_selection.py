"""Every test runs in exactly one of `make test`, `make test-rest` and `make test-production`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests import durations, selection

MAKEFILE = (selection.ROOT.parent / "Makefile").read_text()
TESTS = """
import pytest
from tests.programs import MissingProgram

@pytest.fixture(scope="module")
def browser():
    raise MissingProgram("Chromium: install it")

def test_needs_a_browser(browser):
    assert False

def test_needs_a_browser_too(browser):
    assert False

def test_needs_none():
    pass
"""


def runs() -> list[tuple[str, list[str]]]:
    """Return the expression of marks and the folders of each pytest run of the Makefile's three targets."""
    found = []
    for target in ("test", "test-rest", "test-production"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        assert recipe is not None
        for quoted, bare, folders in re.findall(r"\$\(PYTEST\).* -m (?:'([^']+)'|(\w+))(.*)", recipe[1]):
            found.append((quoted or bare, folders.split()))
    return found


@pytest.mark.parametrize("marks", [set(), {"e2e"}, {"rest"}, {"e2e", "rest"}, {"production"}], ids=sorted)
def test_each_combination_of_marks_is_in_one_run(marks: set[str]) -> None:
    selecting = [run for run in runs() if Expression.compile(run[0]).evaluate(lambda name, **_: name in marks)]
    assert len(selecting) == 1


def test_every_test_of_this_run_has_such_a_combination(request: pytest.FixtureRequest) -> None:
    combinations = [{mark.name for mark in test.iter_markers()} for test in request.session.items]
    assert not [marks for marks in combinations if "production" in marks and marks & {"e2e", "rest"}]


@pytest.mark.parametrize(("mark", "homes"), [("e2e", {"e2e", "bad_day"}), ("production", {"production"})])
def test_each_run_collects_the_folders_of_its_tests(mark: str, homes: set[str]) -> None:
    marked = {path for path in selection.ROOT.rglob("*.py") if f"pytest.mark.{mark}" in path.read_text()}
    assert {path.relative_to(selection.ROOT).parts[0] for path in marked - {Path(__file__)}} == homes
    for expression, folders in runs():
        if expression in (mark, f"rest and {mark}"):
            assert {*folders} == {f"tests/{home}" for home in homes}


def test_end_to_end_tests_of_make_test_exist_and_are_in_its_folder() -> None:
    for file, names in selection.END_TO_END.items():
        tree = ast.parse((selection.ROOT / "e2e" / file).read_text())
        assert set(names) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, file
    assert [folders for expression, folders in runs() if expression == "e2e and not rest"] == [["tests/e2e"]]


def test_no_test_has_the_mark_of_the_rest_by_hand() -> None:
    mark = "mark." + "rest"
    assert [path.name for path in selection.ROOT.rglob("*.py") if mark in path.read_text()] == ["selection.py"]


class NotComparable:
    """A parameter of a test that raises an error when it is compared with a string, as an array does."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ValueError(other)


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def item(path: str, *marks: Any, test: str = "test_it", **parameters: object) -> Any:
    return Item(
        path=selection.ROOT / path,
        nodeid=f"tests/{path}::{test}" + (f"[{list(parameters.values())}]" if parameters else ""),
        marks={mark.name: getattr(mark, "mark", mark) for mark in marks},
        callspec=SimpleNamespace(params=parameters),
    )


def rest_of(*items: Any) -> list[bool]:
    selection.divide(items)
    return ["rest" in each.marks for each in items]


def test_folders_databases_and_kinds_belong_to_the_rest() -> None:
    for folder in selection.REST_FOLDERS:
        assert (selection.ROOT / folder).is_dir()
        assert rest_of(item(f"{folder}test_it.py")) == [True]
    for place in selection.POSTGRESQL_FOLDERS:
        assert (selection.ROOT / place).exists()
        assert rest_of(item(f"{place}test_it.py", engine="postgresql")) == [False]
    assert rest_of(item("contract/test_it.py", engine="postgresql"), item("contract/test_it.py", engine="sqlite")) == [
        True,
        False,
    ]
    assert rest_of(item("unit/test_it.py", array=NotComparable())) == [False]
    assert rest_of(item("e2e/test_lives.py"), item("e2e/test_new.py")) == [True, True]
    assert rest_of(item("e2e/test_failures.py", test="test_a_lost_group")) == [False]
    assert rest_of(item("contract/test_it.py", pytest.mark.production, engine="postgresql")) == [False]


def test_a_long_test_keeps_the_same_cases_in_each_run() -> None:
    def cases() -> list[Any]:
        return [item("unit/test_it.py", pytest.mark.long(keep=3), number=number) for number in range(20)]

    first, second = cases(), cases()[::-1]
    selection.divide(first)
    selection.divide(second)
    kept = {each.nodeid for each in first if "rest" not in each.marks}
    assert len(kept) == 3
    assert kept == {each.nodeid for each in second if "rest" not in each.marks}
    mixed = [item("unit/test_it.py", mark, number=0) for mark in (pytest.mark.long, pytest.mark.long(keep=1))]
    assert rest_of(*mixed) == [True, False]


def test_the_quickest_slow_test_of_each_file_and_telling_tests_stay() -> None:
    telling = f"tests/{selection.TELLING[0]}::test_it[case]"
    seconds = {"tests/a.py::b": 4.0, "tests/a.py::c": 3.0, "tests/b.py::a": 99.0, telling: 200.0}
    assert selection.omitted_of(seconds) == {"tests/a.py::b", "tests/b.py::a"}
    for each in selection.TELLING:
        place, _, test = each.partition("::")
        assert f"def {test}" in (selection.ROOT / place).read_text()


def test_a_test_keeps_its_shortest_duration() -> None:
    old = "1 tests/a.py::b\n5 tests/a.py::c d\n5 tests/a.py::h\n"
    seconds = {"tests/a.py::b": 0.7, "tests/a.py::h": 9.0, "tests/e.py::f": 6.2, "tests/e2e/a.py::g": 9.0}
    assert durations.renewed(old, seconds) == "5 tests/a.py::c d\n5 tests/a.py::h\n6 tests/e.py::f\n"


def test_the_list_of_slow_tests_names_existing_files() -> None:
    listed = {name.partition("::")[0] for name in selection.slow(selection.SLOW.read_text())}
    assert [each for each in listed if not (selection.ROOT.parent / each).is_file()] == []


def test_a_seed_repeats_a_draw_and_no_drawn_test_may_take_the_time_of_all() -> None:
    tests = [item("unit/test_it.py", number=number) for number in range(41)]
    endless = item("unit/test_it.py", pytest.mark.timeout(selection.MAX_DRAWN_SECONDS + 1))
    drawn = [selection.draw([*tests, endless], 10, seed) for seed in (1, 2)]
    assert [len(each) for each in drawn] == [5, 5]
    assert drawn[0] != drawn[1]
    assert drawn[0] == selection.draw([endless, *tests[::-1]], 10, 1)
    assert not any(endless in selection.draw([endless], 1, seed) for seed in range(9))


@pytest.mark.parametrize(("variable", "code"), [("", 0), ("1", 1)])
def test_a_test_whose_program_is_missing_is_skipped_and_named_or_fails(
    tmp_path: Path, variable: str, code: int
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(selection.ROOT.parent), "EVERSTEP_REQUIRE_ALL": variable}
    ended = subprocess.run(
        [*command, "--junitxml=report.xml"], cwd=tmp_path, env=environment, capture_output=True, timeout=50, check=False
    )
    assert ended.returncode == code, ended.stdout
    said = durations.missing([tmp_path / "report.xml"])
    expected = "Skipped: 2 tests for lack of Chromium: install it"
    assert said == (expected if code == 0 else "No program was missing.")
