"""Pictures of the dashboard for README and docs: the seeded world, as a person sees it."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from control_plane.db.tokens import Role
from tests.dashboard.chromium import find_chromium
from tests.dashboard.service import Seeded

DESKTOP, PHONE = {"width": 1200, "height": 780}, {"width": 390, "height": 844}


def take(made: Seeded, directory: Path) -> list[Path]:
    """Write a PNG of each incident's first screen, and of the queue.

    Args:
        made: serves.
        directory: is made if need be.

    Returns:
        What was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    story = made.story
    shots = {
        "recovery": (f"/jobs/{story.gpu}", "light", DESKTOP),
        "capacity-shortage": (f"/jobs/{story.shortage}", "dark", DESKTOP),
        "network-partition": (f"/jobs/{story.partition}", "light", DESKTOP),
        "crash-loop": (f"/jobs/{story.crashing}", "light", DESKTOP),
        "control-plane-asleep": (f"/jobs/{story.frozen}", "dark", PHONE),
        "queue": ("/queue", "light", DESKTOP),
    }
    written = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        token = made.token(Role.ADMIN)
        for name, (path, scheme, size) in shots.items():
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", base_url=made.url)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(f"/sign-in?next={path}")
            page.get_by_label("Token").first.fill(token)
            page.get_by_role("button", name="Sign in").click()
            expect(page).to_have_url(f"{made.url}{path}")
            expect(page.locator("main section").first).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            expect(page.get_by_text("Live")).to_be_visible()
            page.screenshot(path=directory / f"{name}.png")
            written.append(directory / f"{name}.png")
            context.close()
        browser.close()
    return written
