"""Command of the dashboard benchmark, in Chromium with a simulated fleet: `make bench-dashboard`.

    python -m benchmarks.dashboard [--quick]

Exit code 2: a value missed its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, expect

from benchmarks.begin import begin
from benchmarks.cluster_jobs import ROOT
from benchmarks.dashboard import report
from benchmarks.dashboard.crowd import SMALL, WIDE, crowd, small, write_log
from benchmarks.dashboard.watching import frames, incidents_stored, seconds_until_interactive, seconds_until_shown
from tests.dashboard.browsing import chromium, open_job, sign_in_unseen, signed_in, watched
from tests.dashboard.service import Living
from tests.unit.control_plane.loop.world import World

JOBS, NODES, LINES = 1_000, 256, 100_000
LOADS, FAULTS = 10, 20
INCIDENT: Final = "section[aria-label='The incident now']"
LAST_INCIDENT: Final = "section[aria-label='The last incident']"


def main() -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description="How fast the dashboard is.")
    parser.add_argument("--quick", action="store_true", help="few jobs and samples, to try the harness")
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".everstep" / "bench" / "dashboard.json", help="where the figures go"
    )
    parser.add_argument(
        "--document", type=Path, default=ROOT / "docs" / "benchmarks-dashboard.md", help="where the table goes"
    )
    arguments = parser.parse_args()
    begun = begin(is_patient=not arguments.quick)
    machine, say = begun.machine, begun.say
    jobs, nodes, lines, loads, faults = (60, 8, 3_000, 2, 2) if arguments.quick else (JOBS, NODES, LINES, LOADS, FAULTS)

    with tempfile.TemporaryDirectory(prefix="everstep-dashboard-") as directory, chromium() as browser:
        say(f"{jobs} jobs, one of them on {nodes} nodes")
        with served(Path(directory) / "crowd", nodes=nodes) as many:
            many.run(crowd(many.world, jobs=jobs, nodes=nodes))
            many.serve()
            write_log(many.world, WIDE, lines)
            interactive = [of_the_list(browser, many) for _ in range(loads)]
            say(f"the list answers after {', '.join(f'{each:.2f}' for each in interactive)} s")
            scrolled = scrolling(browser, many)
        with served(Path(directory) / "small", nodes=3) as few:
            few.run(small(few.world))
            few.serve()
            shown = of_faults(browser, few, faults)
            say(f"faults are shown after {', '.join(f'{each:.3f}' for each in shown)} s")
        version = f"Chromium {browser.version}"
    run = report.Run(
        machine=machine,
        chromium=version,
        jobs=jobs,
        nodes=nodes,
        lines=lines,
        interactive_seconds=interactive,
        shown_seconds=shown,
        frames_ms=scrolled,
        is_quick=arguments.quick,
        seconds=begun.seconds,
    )
    report.write(run, arguments.json, arguments.document)
    short = [row for row in report.rows(run) if row.falls_short]
    for row in report.rows(run):
        say(
            f"{row.what}: {row.measured:.3f} {row.unit}, to reach "
            f"{row.limit:.3f}{' FALLS SHORT' if row.falls_short else ''}"
        )
    return 2 if short else 3 if run.is_busy else 0


def served(directory: Path, *, nodes: int) -> Living:
    """Return a server for a new simulated world of this many nodes, in a separate folder."""
    directory.mkdir()
    return Living(directory, World(directory, nodes=nodes, spares=0, boot_seconds=1.0, max_size=nodes + 10))


def of_the_list(browser: Browser, many: Living) -> float:
    """Open the job list once, in a browser without any cached files of the dashboard. Measure the delay."""
    with watched(browser, many.url) as page:
        sign_in_unseen(page, many)
        return seconds_until_interactive(page, "/", "tbody tr", WIDE)


def scrolling(browser: Browser, many: Living) -> dict[str, list[float]]:
    """Scroll the job list, the matrix and the log, and measure the frame times."""
    found: dict[str, list[float]] = {}
    with signed_in(browser, many) as page:
        page.goto("/")
        expect(page.locator("tbody tr").first).to_be_visible()
        while (more := page.get_by_role("button", name="Show")).count():
            more.click()
        found[f"the list of {page.locator('tbody tr').count():,} jobs"] = frames(page, "", step=120)
        open_job(page, WIDE, "/protection")
        expect(page.locator(".matrix canvas")).to_be_visible()
        found["the matrix"] = frames(page, ".matrix", step=40)
        open_job(page, WIDE, "/logs")
        expect(page.locator(".log .line").first).to_be_visible()
        for _ in range(5):  # load older pages first, so that the log is long enough
            page.locator(".log").evaluate("(box) => { box.scrollTop = 0 }")
            page.wait_for_timeout(300)
        found["the log"] = frames(page, ".log", step=120)
    return found


def of_faults(browser: Browser, few: Living, count: int) -> list[float]:
    """Kill a rank repeatedly, and measure the delay until the job's page shows each fault."""
    world = few.world

    async def strike() -> None:
        world.kill_rank(world.team(SMALL)[0])
        before = len(world.incidents(SMALL))
        while len(world.incidents(SMALL)) == before:
            await world.tick(0.1)

    async def recover() -> None:
        while any(each.closed_at is None for each in world.incidents(SMALL)):
            if world.job(SMALL).state == "running":
                await world.train(3, SMALL)
            await world.tick()

    found = []
    with signed_in(browser, few) as page, incidents_stored() as stored:
        open_job(page, SMALL)
        expect(page.get_by_text("Live")).to_be_visible()
        for _ in range(count):
            found.append(seconds_until_shown(page, INCIDENT, lambda: few.run(strike()), stored))
            few.run(recover())
            expect(page.locator(LAST_INCIDENT)).to_be_visible()
    return found


if __name__ == "__main__":
    sys.exit(main())
