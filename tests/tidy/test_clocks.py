"""Only one module of the control plane reads the wall clock, which can jump.

All other modules compute ages and deadlines with that module's clock, which does not jump.
"""

from __future__ import annotations

import ast
from pathlib import Path

import control_plane

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
ROOT = Path(control_plane.__file__).parent


def wall_clock_reads(source: str) -> list[int]:
    """Return the lines of a module that call a wall clock."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    )


def test_it_sees_a_wall_clock() -> None:
    assert wall_clock_reads("import time\nbegun = time.monotonic()\nat = time.time()\nclock = datetime.now\n") == [3, 4]


def test_the_control_plane_reads_the_steady_clock() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        for line in wall_clock_reads(path.read_text())
    }
    assert {place.partition(":")[0] for place in found} == {"steady_clock.py"}, (
        f"use control_plane.steady_clock.steady_now: {sorted(found)}"
    )
