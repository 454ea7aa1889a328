"""Divides all tests between `make test`, `make test-rest` and `make test-production`.

At collection, `divide` adds the mark `rest` to tests that find little per second. `make test-production` runs the
tests with the mark `production`, `make test-rest` those with `rest`, and `make test` all others. CI runs `make test`
and a random tenth of the rest (`draw`).

`@pytest.mark.long` puts a test into the rest, and `@pytest.mark.long(keep=2)` all but two of its cases. Of the tests
that `slow.txt` lists, `make test` runs the quickest of each file and those in `TELLING`.
"""

from __future__ import annotations

import functools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
REST_FOLDERS = ("bad_day/", "corruption/", "integration/benchmarks/", "unit/benchmarks/")
"""Folders whose tests check a tool of development, which changes seldom."""
POSTGRESQL_FOLDERS = ("tidy/", "unit/control_plane/db/")
"""Tests that `make test` runs on PostgreSQL. Elsewhere, the case on SQLite runs the same code above the database."""
END_TO_END = {
    "test_adapters.py": ("test_a_killed_rank",),
    "test_dashboard.py": ("test_a_job_is_submitted_watched_hurt_and_finished_from_its_pages",),
    "test_failures.py": (
        "test_a_lost_group",
        "test_a_terminated_instance",
        "test_an_agent_is_killed_and_comes_back",
        "test_the_control_plane_is_killed_and_comes_back",
    ),
    "test_guides.py": ("test_the_readmes_own_script_survives_a_kill",),
    "test_life_by_three_clients.py": ("test_the_whole_life_of_a_job",),
    "test_lives.py": ("test_a_stop_is_agreed_and_kept", "test_jobs_wait_for_each_other_in_order"),
    "test_operations.py": ("test_ranks_have_the_data_packages_secrets_and_role_that_were_asked_for",),
}
"""End-to-end tests that `make test` runs: one of each kind of fault and client. Each new one begins in the rest.

All other failures also have tests of the control plane's loops with simulated agents, or of agents without a cluster.
"""
SLOW = ROOT / "slow.txt"
"""Seconds and id of each test that took at least `SLOW_SECONDS` in each run (`python -m tests.durations slow`)."""
SLOW_SECONDS = 1.0
MAX_KEPT_SECONDS = 4.0
"""Limit of a file's quickest slow test. `make test` leaves out a file whose tests all take longer."""
TELLING = (
    "contract/test_failing_reads_of_routes.py",
    "dashboard/test_stories.py::test_the_pages_of_random_stories_agree",
    "unit/control_plane/loop/test_failing_reads.py",
)
TELLING_FOLDER = "sim/"
"""Tests that `make test` runs however long they take: they check the rules whose breach destroys data."""
SECURITY_PAGE = ROOT.parent / "docs" / "security.md"
PROMISED = frozenset(re.findall(r"^\| .+ \| `(tests/\S+::\w+)` \|$", SECURITY_PAGE.read_text(), re.MULTILINE))
"""The tests in the table of promises. Each gets the mark `security`."""
MAX_DRAWN_SECONDS = 400
"""Longest time limit of a test that `draw` may choose: that of ordinary end-to-end tests.

One longer test could take the time of the whole tenth.
"""


def divide(items: Iterable[pytest.Item]) -> None:
    """Add the mark `rest` to each test that `make test` leaves out and that is not a test of production.

    Each test in the table of promises (`PROMISED`) gets the mark `security`.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    omitted = omitted_of(slow(SLOW.read_text()))
    for item in items:
        if function_of(item) in PROMISED:
            item.add_marker(pytest.mark.security)
        if item.get_closest_marker("production") is not None:
            continue
        long = item.get_closest_marker("long")
        if is_rest(item) or item.nodeid in omitted:
            item.add_marker(pytest.mark.rest)
        elif long is not None:
            cases[function_of(item), long.kwargs.get("keep", 0)].append(item)
    for (function, keep), group in cases.items():
        group.sort(key=lambda item: item.nodeid)
        kept = random.Random(function).sample(range(len(group)), min(len(group), keep))
        for number in set(range(len(group))) - set(kept):
            group[number].add_marker(pytest.mark.rest)


def slow(text: str) -> dict[str, float]:
    """Return the seconds of each test that the text of `slow.txt` lists."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: float(seconds) for seconds, _, name in pairs}


def omitted_of(seconds: Mapping[str, float]) -> frozenset[str]:
    """Return the slow tests that `make test` leaves out.

    Args:
        seconds: the duration of each slow test, by its id, which begins with "tests/".

    Returns:
        All of them, without `TELLING` and without the quickest of each file, if it takes at most `MAX_KEPT_SECONDS`.
    """
    untold = {name: time for name, time in seconds.items() if not is_telling(name)}
    quickest: dict[str, str] = {}
    for name in sorted(untold, key=lambda each: (untold[each], each)):
        quickest.setdefault(name.partition("::")[0], name)
    kept = {name for name in quickest.values() if untold[name] <= MAX_KEPT_SECONDS}
    return frozenset(untold.keys() - kept)


def is_telling(name: str) -> bool:
    """Return True if `TELLING` has the test or its file, or the test is in `TELLING_FOLDER`."""
    function = name.removeprefix("tests/").partition("[")[0]
    return function in TELLING or function.partition("::")[0] in TELLING or function.startswith(TELLING_FOLDER)


def is_rest(item: pytest.Item) -> bool:
    """Return True if a test's folder, database or kind puts it into the rest."""
    place = place_of(item.path)
    if place.startswith(REST_FOLDERS):
        return True
    if place.startswith("e2e/"):
        return function_of(item).rpartition("::")[2] not in END_TO_END.get(item.path.name, ())
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    has_postgresql = any(isinstance(value, str) and value == "postgresql" for value in parameters)
    return has_postgresql and not place.startswith(POSTGRESQL_FOLDERS)


@functools.cache
def place_of(path: Path) -> str:
    """Return a file's path below `tests`, or an empty string for another file."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def function_of(item: pytest.Item) -> str:
    """Return the id of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def draw(items: Iterable[pytest.Item], one_in: int, seed: int) -> set[pytest.Item]:
    """Return a random subset of tests, with one in `one_in` of those whose time limit permits it.

    Args:
        items: the tests that the option -m selected.
        one_in: number of tests for each drawn test.
        seed: seed of pytest-randomly, which every worker of a run shares.
    """
    short = [item for item in items if limit_of(item) <= MAX_DRAWN_SECONDS]
    short.sort(key=lambda item: item.nodeid)
    return set(random.Random(seed).sample(short, -(-len(short) // one_in)))


def limit_of(item: pytest.Item) -> float:
    """Return the time limit of a test in seconds, or 0 for a test with the default limit."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark is not None else 0
