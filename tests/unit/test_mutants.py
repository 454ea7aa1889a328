"""The program that plants mutants changes each kind of rule once, and nothing that has no behaviour."""

from __future__ import annotations

import ast
import importlib
import mmap
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import mutants
from tests.mutants import change, examined, marked, mutants_of, mutated

SOURCE = '''
LIMIT = 7


def allowed(room: int = 1, *, names: "list[str]" = ()) -> bool:
    """Return 3."""
    assert room >= 0, "3 rooms"
    if not names:
        raise ValueError(f"{room + 1} rooms")
    for name, _ in zip(names, names, strict=True):
        if name == "all" and room > 2:
            continue
        room -= 1
    names.clear()
    return min(room, 4) < 5
'''


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "rooms.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


def test_each_rule_of_a_module_has_a_mutant(module: str) -> None:
    assert sorted(mutant.change for mutant in mutants_of(module)) == [
        "1 becomes 0",
        "2 becomes 3",
        "4 becomes 5",
        "5 becomes 6",
        "And becomes Or",
        "Eq becomes NotEq",
        "Gt becomes GtE",
        "Lt becomes LtE",
        "Sub becomes Add",
        "continue becomes break",
        "min becomes max",
        "not is dropped",
        "the call is dropped",
        "the condition is negated",
        "the condition is negated",
    ]


def test_a_mutant_changes_one_place(module: str) -> None:
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants_of(module):
        after = ast.unparse(mutated(mutant)).splitlines()
        assert len([1 for old, new in zip(before, after, strict=True) if old != new]) == 1, mutant


TESTS = """
import pytest
from rooms import allowed

def test_nobody():
    with pytest.raises(ValueError):
        allowed(3)

def test_some():
    assert allowed(6, names=["one"])

def test_broken():
    assert False
"""


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module from a root of its own."""
    (tmp_path / "rooms.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rooms", raising=False)
    return importlib.import_module("rooms")


def test_a_loaded_function_gets_the_code_of_a_mutant_and_its_own_again(rooms: ModuleType) -> None:
    allowed = rooms.allowed  # as another module has imported it
    mutant = next(each for each in mutants_of("rooms.py") if each.change == "min becomes max")
    change("rooms.py", mutated(mutant))
    assert not allowed(6, names=["one"])
    change("rooms.py", ast.parse(SOURCE))
    assert allowed(6, names=["one"])


CACHED = """
import functools

@functools.cache
def objects():
    return [object()]
"""


def test_a_change_clears_the_caches_of_the_product_and_keeps_those_of_installed_packages(rooms: ModuleType) -> None:
    def cached(path: str) -> Callable[[], object]:
        names: dict[str, Any] = {}
        exec(compile(CACHED, path, "exec"), names)
        return names["objects"]

    own, installed = cached("rooms.py"), cached(f"{sysconfig.get_path('purelib')}/installed.py")
    before = own(), installed()
    change("rooms.py", ast.parse(SOURCE))
    assert own() is not before[0]
    assert installed() is before[1]


def test_marks_are_set_where_a_mutant_is_reached(rooms: ModuleType) -> None:
    found = list(enumerate(mutants_of("rooms.py")))
    marks = mmap.mmap(-1, len(found))
    change("rooms.py", marked("rooms.py", found), marks)
    rooms.allowed(3, names=["one"])
    reached = {mutant.change for index, mutant in found if marks[index]}
    assert {"min becomes max", "Sub becomes Add", "not is dropped"} <= reached
    assert "continue becomes break" not in reached


@pytest.mark.timeout(300)
def test_a_mutant_is_killed_by_a_test_that_passes_without_it(module: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_rooms.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/conftest.py").touch()  # which pytest leaves out of hooks for tests of other folders
    (tmp_path / "other/test_other.py").write_text("def test_other():\n    pass\n", encoding="utf-8")
    found = [replace(each, path="rooms.py") for each in mutants_of(module)]
    drawn = [each for each in found if each.change != "the condition is negated"]
    *outcomes, (nothing, unfit) = examined(drawn, [str(tmp_path)], time.monotonic() + 300, root=tmp_path)
    assert nothing is None
    assert unfit == ["test_rooms.py::test_broken"]
    killers = {mutant.change: killer.rpartition("::")[2] for mutant, killer in outcomes if mutant is not None}
    assert len(outcomes) == len(drawn)
    assert killers["min becomes max"] == "test_some"
    assert killers["continue becomes break"] == "", "no test reaches it"
