"""Prints the slowest tests of the newest `make test` and `make test-rest`: `make test-durations`.

    pytest ──▶ build/durations/*.xml, one report for each of its runs ──▶ python -m tests.durations [ARGUMENT]

The argument is the number of tests to print, or one of these words:

- `missing` prints which programs were missing for skipped tests. `make test` prints this as its last line.
- `slow` updates `slow.txt`, the list from which `selection` chooses the tests that `make test` leaves out.

A time is the sum of a test's setup, call and teardown. The setup of a shared fixture counts for the first test that
requests it, and the order of tests is random. A test that is slow in only one run may therefore be fast by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.programs import MISSING
from tests.selection import SLOW, SLOW_SECONDS, slow

REPORTS = Path(__file__).parents[1] / "build/durations"
COUNT = 50


def durations(reports: Iterable[Path]) -> dict[str, float]:
    """Return the seconds of each test in pytest's reports.

    A failed teardown gives a test a second entry with the same name. The function adds the times of both entries.
    """
    seconds: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = id_of(case.attrib["classname"].split("."), case.attrib["name"])
            seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    return seconds


def id_of(places: list[str], name: str) -> str:
    """Return a test's id. `places` are the names of its folders, its file and, for a method, its class."""
    classes = [place for place in places if place.startswith("Test")]
    return "::".join(["/".join(places[: len(places) - len(classes)]) + ".py", *classes, name])


def table(seconds: dict[str, float], count: int = COUNT) -> list[str]:
    """Return a line for each of the `count` slowest tests, and a last line with the sums."""
    slowest = sorted(seconds.items(), key=lambda test: (-test[1], test[0]))[:count]
    total = sum(seconds.values())
    share = sum(time for _, time in slowest) / total if total else 0.0
    lines = [f"{time:8.2f} s  {name}" for name, time in slowest]
    return [*lines, f"{total:8.2f} s  in {len(seconds)} tests, {share:.0%} of it in the {len(slowest)} slowest"]


def missing(reports: Iterable[Path]) -> str:
    """Return a sentence about the tests that were skipped because a program is missing."""
    reasons = Counter(
        reason.removeprefix(MISSING)
        for report in reports
        for skipped in ElementTree.parse(report).iter("skipped")
        if (reason := skipped.attrib["message"]).startswith(MISSING)
    )
    if not reasons:
        return "No program was missing."
    return "Skipped: " + "; ".join(f"{count} tests for lack of {reason}" for reason, count in sorted(reasons.items()))


def renewed(text: str, seconds: dict[str, float]) -> str:
    """Return the text of `slow.txt` with new durations.

    A test keeps its shortest duration, because a longer one can contain the setup of a fixture that other tests share.
    """
    old = slow(text)
    least = old | {name: min(time, old.get(name, time)) for name, time in seconds.items()}
    found = {name: time for name, time in least.items() if time >= SLOW_SECONDS and "e2e/" not in name}
    return "".join(f"{time:.0f} {name}\n" for name, time in sorted(found.items()))


def main() -> None:
    reports = sorted(REPORTS.glob("*.xml"))
    if not reports:
        sys.exit(f"There is no report in {REPORTS}. Run make test first.")
    if sys.argv[1:] == ["missing"]:
        print(missing(reports))  # noqa: T201
        return
    if sys.argv[1:] == ["slow"]:
        SLOW.write_text(renewed(SLOW.read_text(), durations(reports)))
        return
    print("\n".join(table(durations(reports), int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)))  # noqa: T201


if __name__ == "__main__":
    main()
