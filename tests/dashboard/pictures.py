"""Pictures of the dashboard for README and docs: every page over the seeded world, as a person sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect

from control_plane.db.tokens import Role
from tests.dashboard.browsing import chromium, sign_in, watched
from tests.dashboard.service import Seeded

DESKTOP, PHONE = (1200, 780), (390, 844)
TABS = ("metrics", "logs", "protection", "checkpoints", "events", "spec")


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture."""

    name: str
    path: str
    scheme: Literal["light", "dark"] = "light"
    size: tuple[int, int] = DESKTOP


def shots(made: Seeded) -> Iterator[Shot]:
    """Name every page, the five first screens in both schemes."""
    story = made.story
    firsts = {
        "recovery": story.gpu,
        "capacity-shortage": story.shortage,
        "network-partition": story.partition,
        "crash-loop": story.crashing,
        "control-plane-asleep": story.frozen,
    }
    for name, job in firsts.items():
        yield Shot(name, f"/jobs/{job}")
        yield Shot(f"{name}-dark", f"/jobs/{job}", "dark")
    yield Shot("phone", f"/jobs/{story.frozen}", "dark", PHONE)
    for tab in TABS:
        yield Shot(f"job-{tab}", f"/jobs/{story.gpu}/{tab}")
    crash = made.world.incidents(story.crashing)[-1].id
    yield Shot("job-failure", f"/jobs/{story.crashing}/logs?failure={crash}", "dark")
    yield Shot("jobs", "/")
    yield Shot("queue", "/queue")
    yield Shot("incidents", "/incidents")
    yield Shot("incident", f"/incidents/{made.world.incidents(story.gpu)[-1].id}")
    yield Shot("fleets", "/fleets")
    yield Shot("fleet", "/fleets/main")
    yield Shot("drills", "/drills")
    yield Shot("submit", "/submit")
    yield Shot("settings", "/settings")


def take(made: Seeded, directory: Path) -> list[Path]:
    """Write a PNG of every page.

    Args:
        made: serves.
        directory: is made if need be; pictures in it that are none of these are deleted.

    Returns:
        What was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    token = made.token(Role.ADMIN)
    with chromium() as browser:
        for shot in shots(made):
            with watched(browser, made.url, size=shot.size, scheme=shot.scheme) as page:
                page.goto("/sign-in")
                sign_in(page, token)
                page.goto(shot.path)
                written.append(_take(page, directory / f"{shot.name}.png"))
    for path in set(directory.glob("*.png")) - set(written):
        path.unlink()
    return written


def _take(page: Page, path: Path) -> Path:
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator("main section").first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    if path.stem.startswith("job-"):  # what the tab shows, below the first fold
        page.evaluate("document.querySelector('nav.tabs').scrollIntoView()")
        page.evaluate("window.scrollBy(0, -60)")  # below the frame, which stays
    page.screenshot(path=path)
    return path
