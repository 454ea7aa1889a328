"""The program that plants mutants changes each kind of rule once, and nothing that has no behaviour."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import Changed, Mutant, mutants_of, mutated, rounds_of

SOURCE = '''
LIMIT = 7


def allowed(room: int = 1, *, names: "list[str]" = ()) -> bool:
    """Return 3."""
    assert room >= 0, "3 rooms"
    if not names:
        raise ValueError(f"{room + 1} rooms")
    for name in names:
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


def test_a_child_imports_the_mutant_instead_of_the_file() -> None:
    mutant = next(each for each in mutants_of("control_plane/core/full_disk.py") if each.line)
    changed = Changed(mutant)
    assert changed.find_spec("control_plane.core.fleets") is None
    spec = changed.find_spec(mutant.module)
    assert spec is not None
    assert spec.loader is changed
    assert changed.get_code(mutant.module) == compile(mutated(mutant), changed.path, "exec")


def test_nearest_tests_come_first() -> None:
    named, imported, wide = rounds_of("control_plane/core/recovery.py")
    assert "tests/unit/control_plane/core/test_recovery.py" in named
    assert not {*named} & {*imported}
    assert "tests/golden" in wide
    assert Mutant("control_plane/core/recovery.py", 0, 1, "").module == "control_plane.core.recovery"
