"""The dashboard during an outage and a deploy, with the keyboard, and on addresses without content."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from control_plane.api.dashboard import STATIC
from control_plane.db.tokens import Role
from tests.dashboard.browsing import PHONE, confirm, install_clock, signed_in
from tests.dashboard.service import Seeded
from tests.dashboard.test_pages import pages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
PLACES = ("Overview", "Queue", "Incidents", "Fleets", "Drills", "Jobs")
LEAST_PIXELS = 24
LIVELY_COLORS = """() => [...document.querySelectorAll('main .tone-good, main .tone-busy')]
  .filter((element) => {
    const style = getComputedStyle(element)
    return style.getPropertyValue('--tone') !== style.getPropertyValue('--idle')
  })
  .map((element) => element.outerHTML.slice(0, 120))"""
"""JavaScript that lists the elements with a green or blue color, which the page must not show while it is outdated."""
SMALL_TARGETS = """(least) => {
  const selector = 'a[href], button, input, select, textarea, summary, [role=button], [role=option], [role=menuitem]'
  const hidden = '.skip, .visually-hidden, [aria-hidden=true]'
  const isShown = (element) => element.getClientRects().length && !element.closest(hidden)
  const all = [...document.querySelectorAll(selector)].filter(isShown)
  const boxOf = (element) => {
    const label = element.closest('label') ?? (element.id && document.querySelector(`label[for="${element.id}"]`))
    const boxes = [element, ...(label ? [label] : [])].map((each) => each.getBoundingClientRect())
    const [top, left] = ['top', 'left'].map((side) => Math.min(...boxes.map((box) => box[side])))
    const [bottom, right] = ['bottom', 'right'].map((side) => Math.max(...boxes.map((box) => box[side])))
    return { top, left, bottom, right }
  }
  const boxes = all.map(boxOf)
  const isFar = (box) => boxes.every((other) => {
    const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2
    const dx = Math.max(other.left - x, x - other.right, 0), dy = Math.max(other.top - y, y - other.bottom, 0)
    return other === box || Math.hypot(dx, dy) >= least / 2
  })
  return all.flatMap((element, index) => {
    const box = boxes[index]
    const height = box.bottom - box.top, width = box.right - box.left
    if (height >= least - 0.5 && width >= least - 0.5) return []
    if (element.tagName === 'A' && (getComputedStyle(element).display === 'inline' || isFar(box))) return []
    if (element.type === 'checkbox' && isFar(box)) return []
    if (element.closest('svg, .log')) return []
    return [`${Math.round(width)}x${Math.round(height)} ${element.outerHTML.slice(0, 120)}`]
  })
}"""
"""JavaScript that lists the interactive elements that are too small (WCAG 2.2, success criterion 2.5.8).

A control counts together with its label. The script leaves out elements to which an exception of the criterion applies:

- links in a line of text,
- links and check boxes that are far enough from other targets,
- marks on the timeline, because each incident also has another link, and
- times of log lines, because they must be as dense as the lines.
"""


def chunk(page_name: str) -> Path:
    """Return the built file of a page that loads when it is opened."""
    (found,) = STATIC.glob(f"assets/{page_name}-*.js")
    return found


def test_a_deploy_that_replaces_files_reloads_the_open_page_once(browser: Browser, seeded: Seeded) -> None:
    """A tab that opens a page whose file a new build has replaced reloads itself once, and then shows the page.

    The test answers requests as the server of the new build does: the page's file has a new name, which the other
    files contain, and the old name does not exist.
    """
    old = chunk("Drills")
    new = "Drills-newbuild1.js"
    is_deployed = False

    def serve(route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[-1]
        if name == old.name:
            route.fulfill(status=404, content_type="text/plain", body="There is no such file; reload the page.")
        elif name == new:
            route.fulfill(body=old.read_text(), content_type="text/javascript")
        elif is_deployed and name.endswith(".js"):
            body = (STATIC / "assets" / name).read_text().replace(old.name, new)
            route.fulfill(body=body, content_type="text/javascript")
        else:
            route.continue_()

    with signed_in(browser, seeded, refusals=("status of 404", "Failed to load module script", "ERR_ABORTED")) as page:
        page.route("**/assets/*", serve)
        page.goto("/jobs")
        expect(page.locator("tbody tr").first).to_be_visible()
        is_deployed = True
        loads: list[str] = []
        page.on("load", lambda loaded: loads.append(loaded.url))
        page.get_by_role("navigation", name="Main").get_by_role("link", name="Drills").click()
        expect(page.get_by_role("heading", level=1, name="Drills")).to_be_visible()
        assert loads == [f"{seeded.url}/drills"]


def test_pages_that_were_never_opened_open_without_the_server_and_lose_their_green(
    browser: Browser, seeded: Seeded
) -> None:
    with signed_in(browser, seeded, is_cut=True) as page:
        install_clock(page)
        page.goto("/jobs")
        expect(page.locator("main .status.tone-good").first).to_be_visible()
        with page.expect_response(lambda answer: f"/assets/{chunk('SignIn').name}" in answer.url):
            page.clock.run_for(4_000)  # the page preloads the files of other pages, and this file last
        seeded.fall_silent()
        try:
            page.clock.run_for(30_000)
            expect(page.locator(".app.is-stale")).to_be_visible()
            expect(page.get_by_text("No answer", exact=True)).to_be_visible()
            assert page.evaluate(LIVELY_COLORS) == []
            for place in PLACES:
                page.get_by_role("navigation", name="Main").get_by_role("link", name=re.compile(f"^{place}")).click()
                expect(page.get_by_role("heading", level=1, name=place)).to_be_visible()
                assert page.evaluate(LIVELY_COLORS) == []
        finally:
            seeded.serve()
        page.clock.run_for(20_000)
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        expect(page.locator("main .status.tone-good").first).to_be_visible()


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("role", "size"), [(Role.ADMIN, (1440, 900)), (Role.ADMIN, PHONE), (Role.VIEWER, PHONE)])
def test_every_target_is_large_enough_for_a_finger(
    browser: Browser, seeded: Seeded, api: httpx.Client, role: Role, size: tuple[int, int]
) -> None:
    small: dict[str, list[str]] = {}
    with signed_in(browser, seeded, role, size=size) as page:
        for path in pages(seeded, api):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            small[path] = page.evaluate(SMALL_TARGETS, LEAST_PIXELS)
    assert not any(small.values()), "\n".join(f"{path}: {each}" for path, found in small.items() for each in found)


def test_an_address_without_content_has_a_heading_that_says_so(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded, refusals=("status of 404",)) as page:
        for path in ("/jobs/no-such-job", "/incidents/no-such-incident", "/fleets/no-such-fleet", "/no-such-page"):
            page.goto(path)
            expect(page.get_by_role("heading", level=1, name=re.compile("not found", re.IGNORECASE))).to_be_visible()


def test_keys_show_their_help_move_through_rows_and_open_one(desk: Page) -> None:
    desk.goto("/jobs")
    expect(desk.locator("tbody tr").nth(2)).to_be_visible()
    names = desk.locator("td.c-name a").all_inner_texts()
    desk.keyboard.press("?")
    expect(desk.get_by_role("dialog", name="Keyboard shortcuts")).to_contain_text("Next row")
    desk.keyboard.press("Escape")
    expect(desk.get_by_role("dialog")).to_be_hidden()
    for key, place in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        desk.keyboard.press(key)
        expect(desk.get_by_role("link", name=names[place], exact=True)).to_be_focused()
    desk.keyboard.press("Enter")
    expect(desk.get_by_role("heading", level=1, name=names[1])).to_be_visible()


def test_actions_run_from_the_search_box(browser: Browser, seeded: Seeded, api: httpx.Client) -> None:
    name = "searched-and-stopped"
    seeded.story.queue(name)
    with signed_in(browser, seeded, Role.SUBMITTER) as page:
        page.goto("/")
        expect(page.get_by_role("heading", level=1, name="Overview")).to_be_visible()
        page.keyboard.press("Control+k")
        page.keyboard.type("theme dark")
        page.keyboard.press("Enter")
        expect(page.locator("html[data-mantine-color-scheme=dark]")).to_have_count(1)
        page.keyboard.press("Control+k")
        page.keyboard.type(f"pause {name}")
        expect(page.get_by_role("option", name=f"Pause {name}")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()
        assert "PauseRequestedTime" in api.get(f"/training-jobs/{name}").json()
        page.keyboard.press("Control+k")
        page.keyboard.type(f"stop {name}")
        page.keyboard.press("Enter")
        confirm(page, name, "Stop")
        assert "StopRequestedTime" in api.get(f"/training-jobs/{name}").json()
        page.keyboard.press("Control+k")
        page.keyboard.type("drain i-")
        expect(page.get_by_text("No page, object or action has this name.")).to_be_visible()
