"""Command of the dashboard benchmark, in Chromium with a simulated fleet: `make bench-dashboard`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, expect

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.dashboard.crowd import SMALL, WIDE, crowd, small, write_log
from benchmarks.dashboard.report import METRICS_TAB, PAGE
from benchmarks.dashboard.traffic import Logger, Traffic, load_of, traffic_of
from benchmarks.dashboard.watching import (
    frames,
    incidents_stored,
    seconds_until_interactive,
    seconds_until_shown,
    seconds_until_visible,
)
from tests.dashboard import many as week
from tests.dashboard.browsing import chromium, open_job, sign_in_unseen, signed_in, watched
from tests.dashboard.service import Living
from tests.sim.world import World

JOBS, NODES, LINES = 1_000, 256, 100_000
LOADS, FAULTS = 10, 20
HISTORY_STEPS, MEASURED_SECONDS = 2_000, 60
PAGES = ("/", "/jobs", f"/jobs/{SMALL}", f"/jobs/{SMALL}/metrics", f"/jobs/{SMALL}/logs", "/incidents", "/fleets")
INCIDENT: Final = "section[aria-label='Open incident']"
LAST_INCIDENT: Final = "section[aria-label='Latest incident']"


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the list and scrolling with many jobs, then how fast a page shows killed ranks, with few."""
    many_jobs = JOBS, NODES, LINES, LOADS, FAULTS
    jobs, nodes, lines, loads, faults = (60, 8, 3_000, 2, 2) if begun.is_quick else many_jobs
    history, measured = (200, 20) if begun.is_quick else (HISTORY_STEPS, MEASURED_SECONDS)
    with chromium() as browser:
        begun.say(f"{jobs} jobs, one of them on {nodes} nodes")
        with served(begun.home / "crowd", nodes=nodes) as many:
            many.run(crowd(many.world, jobs=jobs, nodes=nodes))
            many.serve()
            write_log(many.world, WIDE, lines)
            interactive = [of_the_list(browser, many) for _ in range(loads)]
            begun.say(f"the list answers after {', '.join(f'{each:.2f}' for each in interactive)} s")
            scrolled = scrolling(browser, many)
            listed = traffic_of(browser, many, "/jobs", lambda: many.run(a_second(many, WIDE)), measured)
        (begun.home / "week").mkdir()
        with week.served(begun.home / "week") as (old, _):
            complete = [of_the_week(browser, old) for _ in range(loads)]
            begun.say(
                f"the page of a job after a week is complete after {', '.join(f'{each:.2f}' for each in complete)} s"
            )
        with served(begun.home / "small", nodes=3) as few:
            few.run(small(few.world))
            few.serve()
            received = {f"the list of {jobs:,} jobs": listed, **of_a_job(browser, few, history, measured)}
            loads_of = {path: load_of(browser, few, path) for path in PAGES}
            shown = of_faults(browser, few, faults)
        version = f"Chromium {browser.version}"
    return {
        "chromium": version,
        "jobs": jobs,
        "nodes": nodes,
        "lines": lines,
        "interactive_seconds": interactive,
        "week_seconds": complete,
        "shown_seconds": shown,
        "frames_ms": scrolled,
        "bytes_per_hour": {page: (each.bytes_per_hour, each.plain_bytes_per_hour) for page, each in received.items()},
        "shifts": {path: each.shift for path, each in loads_of.items()},
        "first_load_bytes": {path: each.first_load_bytes for path, each in loads_of.items()},
    }


def served(directory: Path, *, nodes: int) -> Living:
    directory.mkdir()
    return Living(directory, World(directory, nodes=nodes, spares=0, boot_seconds=1.0, max_size=nodes + 10))


def of_the_list(browser: Browser, many: Living) -> float:
    """Return the seconds until the job list responds in a browser without cached files."""
    with watched(browser, many.url) as page:
        sign_in_unseen(page, many)
        return seconds_until_interactive(page, "/jobs", "tbody tr", WIDE)


def of_the_week(browser: Browser, old: Living) -> float:
    """Return the seconds until a job with a week of history shows verdict, incident and timeline."""
    with watched(browser, old.url) as page:
        sign_in_unseen(page, old)
        return seconds_until_visible(page, f"/jobs/{week.WIDE}", ".verdict", LAST_INCIDENT, "svg.timeline a")


def scrolling(browser: Browser, many: Living) -> dict[str, list[float]]:
    """Scroll the job list, the protection matrix and the log. Return the milliseconds of each frame."""
    found: dict[str, list[float]] = {}
    with signed_in(browser, many) as page:
        page.goto("/jobs")
        expect(page.locator("tbody tr").first).to_be_visible()
        count = int(page.get_by_role("table").get_attribute("aria-rowcount") or 1) - 1
        found[f"the list of {count:,} jobs"] = frames(page, ".joblist", step=120)
        open_job(page, WIDE, "/protection")
        expect(page.locator(".matrix canvas")).to_be_visible()
        found["the matrix"] = frames(page, ".matrix", step=40)
        open_job(page, WIDE, "/logs")
        expect(page.locator(".log .line").first).to_be_visible()
        for _ in range(5):  # Scroll to the top, so that the log page loads older lines.
            page.locator(".log").evaluate("(box) => { box.scrollTop = 0 }")
            page.wait_for_timeout(300)
        found["the log"] = frames(page, ".log", step=120)
    return found


async def a_second(served: Living, name: str) -> None:
    """Advance a simulated fleet by one second and one step of a job."""
    await served.world.train(1, name)
    await served.world.tick(1.0)


def of_a_job(browser: Browser, few: Living, history: int, seconds: int) -> dict[str, Traffic]:
    """Measure the traffic of a job's Metrics tab and main page, after `history` logged steps."""
    logger = Logger(few.world, SMALL)
    logger.log(history)

    async def second() -> None:
        await a_second(few, SMALL)
        logger.log(1)

    paths = {METRICS_TAB: f"/jobs/{SMALL}/metrics", "the page of a job": f"/jobs/{SMALL}"}
    return {what: traffic_of(browser, few, path, lambda: few.run(second()), seconds) for what, path in paths.items()}


def of_faults(browser: Browser, few: Living, count: int) -> list[float]:
    """Kill a rank `count` times. Return the seconds from each incident's commit until the job's page shows it."""
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
    sys.exit(command.run(PAGE, measure))
