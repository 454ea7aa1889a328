"""Pictures of the dashboard for the README and the documents.

They show the recorded incidents and every page of a seeded fleet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import chromium, signed_in
from tests.dashboard.service import Replayed, Seeded, Served

DESKTOP, PHONE = (1200, 780), (390, 844)
FIRST_SCREENS = {
    "recovery": "bad-gpu",
    "capacity-shortage": "capacity-shortage",
    "network-partition": "network-partition",
    "crash-loop": "crash-loop",
    "control-plane-asleep": "frozen-control-plane",
}
"""The recorded incident that a picture shows, by the name of the picture."""
TABS = ("metrics", "logs", "protection", "checkpoints", "events", "spec")


@dataclass(frozen=True, slots=True)
class Shot:
    """A planned screenshot of the dashboard: its file name, page, colour scheme and size."""

    name: str
    path: str
    scheme: Literal["light", "dark"] = "light"
    size: tuple[int, int] = DESKTOP


def first_screens(replayed: Replayed) -> Iterator[Shot]:
    """Yield the job's page of each recorded incident in both color schemes, and one page at the size of a phone."""
    for name, story in FIRST_SCREENS.items():
        yield Shot(name, f"/jobs/{replayed.jobs[story]}")
        yield Shot(f"{name}-dark", f"/jobs/{replayed.jobs[story]}", "dark")
    yield Shot("phone", f"/jobs/{replayed.jobs['frozen-control-plane']}", "dark", PHONE)


def pages(made: Seeded) -> Iterator[Shot]:
    """Yield one screenshot of every kind of page."""
    story = made.story
    for tab in TABS:
        yield Shot(f"job-{tab}", f"/jobs/{story.gpu}/{tab}")
    crash = made.world.incidents(story.crashing)[-1].id
    yield Shot("job-failure", f"/jobs/{story.crashing}/logs?failure={crash}", "dark")
    yield Shot("overview", "/")
    yield Shot("jobs", "/jobs")
    yield Shot("queue", "/queue")
    yield Shot("incidents", "/incidents")
    yield Shot("incident", f"/incidents/{made.world.incidents(story.gpu)[-1].id}")
    yield Shot("fleets", "/fleets")
    yield Shot("fleet", "/fleets/main")
    yield Shot("drills", "/drills")
    yield Shot("submit", "/submit")
    yield Shot("settings", "/settings")


def take(made: Seeded, replayed: Replayed, directory: Path) -> list[Path]:
    """Write a PNG of every page.

    Args:
        made: serves the seeded fleet.
        replayed: serves the recorded incidents.
        directory: folder of the pictures. It is created if it does not exist. Other pictures in it are deleted.

    Returns:
        The written files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        written = [_shot(browser, replayed, shot, directory) for shot in first_screens(replayed)]
        written += [_shot(browser, made, shot, directory) for shot in pages(made)]
    for path in set(directory.glob("*.png")) - set(written):
        path.unlink()
    return written


def _shot(browser: Browser, served: Served, shot: Shot, directory: Path) -> Path:
    with signed_in(browser, served, size=shot.size, scheme=shot.scheme) as page:
        page.goto(shot.path)
        return _take(page, directory / f"{shot.name}.png")


def _take(page: Page, path: Path) -> Path:
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator("main section").first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    if path.stem.startswith("job-"):  # scroll past the page's head to the content of the tab
        page.evaluate("document.querySelector('nav.tabs').scrollIntoView()")
        page.evaluate("window.scrollBy(0, -60)")  # scroll back by the height of the fixed header
    page.screenshot(path=path)
    return path
