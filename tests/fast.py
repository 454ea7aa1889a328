"""Decides which tests carry the mark `fast`, which `make test-fast` runs.

A fast test needs neither Chromium, PostgreSQL nor a compiler, and starts no cluster. At collection, `tests/conftest.py`
sets the mark according to the folder of the test, its other marks and its fixtures.

Shells are the parts of Everstep that do I/O, in contrast to its pure cores (CONTRIBUTING.md). A *test of a shell* runs
a server, the local cloud or the control plane's loops. These tests take five sixths of the time of all fast tests, so
`make test-fast` runs a random tenth of them. `make test` runs them all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
FOLDERS = ("contract", "golden", "properties", "unit")
OTHER_MARKS = ("e2e", "full", "integration")
HEAVY_FIXTURES = {
    "browser": "Chromium",
    "postgresql": "PostgreSQL",
    "warm_parent": "a C++ compiler, which builds an operator of DeepSpeed",
}
"""Fixtures that start a heavy program, each with the name of that program.

Only these fixtures may start a heavy program, and no fast test may use them.
"""

SHELL_FOLDERS = ("contract", "golden", "unit/control_plane/loop")
SHELL_FIXTURES = frozenset({"aws", "served", "service", "world"})
"""Fixtures that start the API or the local cloud, or that run the control plane's loops.

A test that uses one of them is a "test of a shell".
"""
SHELL_TESTS_PER_DRAWN_TEST = 10


def mark_fast_tests(items: Iterable[pytest.Item]) -> None:
    """Add the mark `fast` to each test that qualifies."""
    for item in items:
        if is_fast(item):
            item.add_marker(pytest.mark.fast)


def is_fast(item: pytest.Item) -> bool:
    """Return True for a test that `make test-fast` runs.

    A test with the parameter "postgresql" is not fast, either. It requests its database only while it runs, so its list
    of fixtures does not contain `postgresql`.
    """
    folder = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (
        folder in FOLDERS
        and not any(item.get_closest_marker(name) for name in OTHER_MARKS)
        and HEAVY_FIXTURES.keys().isdisjoint(getattr(item, "fixturenames", ()))
        and not any(isinstance(value, str) and value == "postgresql" for value in parameters)
    )


def refuse_heavy_fixture(name: str, test: pytest.Item | None) -> None:
    """Fail a fast test that requests a heavy fixture while it runs. Called before each fixture is set up."""
    if name in HEAVY_FIXTURES and test is not None and test.get_closest_marker("fast") is not None:
        pytest.fail(
            f"{test.nodeid} has the mark `fast` and requests the fixture {name!r}, which needs {HEAVY_FIXTURES[name]}. "
            f"Name the fixture in the test's signature, or parametrize `engine`."
        )


def undrawn_shell_tests(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests of servers, the local cloud and the control plane's loops that a fast run skips.

    Args:
        items: the fast tests of the run.
        seed: seed of pytest-randomly, which every worker of a run shares. pytest prints it, and -p repeats it.
    """
    shells = sorted(filter(is_test_of_shell, items), key=lambda item: item.nodeid)
    drawn_count = -(-len(shells) // SHELL_TESTS_PER_DRAWN_TEST)
    return set(random.Random(seed).sample(shells, len(shells) - drawn_count))


def is_test_of_shell(item: pytest.Item) -> bool:
    """Return True for a test that runs a server, the local cloud or the control plane's loops."""
    is_in_folder = any(item.path.is_relative_to(ROOT / folder) for folder in SHELL_FOLDERS)
    return is_in_folder or not SHELL_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
