"""Every page of the dashboard in Chromium, over the real application and simulated data.

Tests compare each page with the API, because names and numbers depend on a seed.
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from playwright.sync_api import TimeoutError as PageTimeout

from control_plane.db.tokens import Role
from tests.dashboard.browsing import DESKTOP, PHONE, fetch_whole, install_clock, open_job, sentence, sign_in, signed_in
from tests.dashboard.conftest import AXE
from tests.dashboard.seeded import FINE_SECONDS
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
RUN_AXE = """async (only) => {
  const found = await axe.run({ resultTypes: ['violations'], ...only })
  return found.violations.map((each) => [each.id, each.nodes[0].failureSummary, each.nodes[0].html])
}"""
LEAST_INTERVAL_SECONDS, CLOCK_SECONDS = 2.0, 0.1
"""Shortest interval between two requests of a page, and the step of the page's clock."""
CHANGES = re.compile(
    "^(Stop|Pause|Resume|Take over|Hand back|Acknowledge|Submit|Change|Act on|Unfreeze|Start the "
    r"drill|Create token|Revoke)\b"
)
"""First words in the labels of buttons that change a job, a fleet or another object."""


def test_a_control_plane_that_says_nothing_any_more_is_the_first_thing_that_is_said(
    browser: Browser, seeded: Seeded
) -> None:
    with signed_in(browser, seeded, is_cut=True) as page:
        install_clock(page)
        open_job(page, seeded.story.gpu)
        expect(page.get_by_text("Live")).to_be_visible()
        expect(page.locator("section.act")).to_be_visible()  # the section needs more answers than the status "Live"
        seeded.fall_silent()
        try:
            page.clock.run_for(40_000)
            expect(page.get_by_text("No answer", exact=True)).to_be_visible()
            expect(page.get_by_text("The control plane does not answer.")).to_be_visible()
            expect(page.locator("section.act")).to_contain_text("Not urgent")
        finally:
            seeded.serve()
        page.clock.run_for(20_000)
        expect(page.get_by_text("Live")).to_be_visible()
        expect(page.get_by_text("The control plane does not answer.")).to_be_hidden()


def pages(seeded: Seeded, api: httpx.Client) -> list[str]:
    story = seeded.story
    incident = api.get("/incidents").json()["Incidents"][0]["IncidentId"]
    tabs = ("", "/metrics", "/logs", "/protection", "/checkpoints", "/outputs", "/events", "/spec")
    jobs = [f"/jobs/{story.gpu}{tab}" for tab in tabs] + [
        f"/jobs/{story.shortage}",
        f"/jobs/{story.crashing}",
        f"/jobs/{story.waiting}",
    ]
    others = (
        "/queue",
        "/incidents",
        f"/incidents/{incident}",
        "/fleets",
        "/fleets/main",
        "/reports",
        "/drills",
        "/submit",
        "/settings",
        "/no-such-page",
    )
    return ["/", "/jobs", *jobs, *others]


STANCES: tuple[tuple[Literal["light", "dark"], tuple[int, int], dict[str, Any]], ...] = (
    ("light", DESKTOP, {}),
    ("dark", DESKTOP, {}),
    ("dark", PHONE, {"runOnly": ["color-contrast", "scrollable-region-focusable"]}),
)
"""The settings in which each page is checked: color scheme, window, and rules of the accessibility checker axe.

All rules are checked in both color schemes. On a phone, only the rules that depend on the width are checked.
"""


def test_every_page_is_clean_for_axe_and_fits_its_width(browser: Browser, seeded: Seeded, api: httpx.Client) -> None:
    """Each page passes axe, fits its width, and changes its colors when the system's color scheme changes.

    The page is loaded only once.
    """
    axe = AXE.read_text()
    found = []
    with signed_in(browser, seeded) as page:
        for path in pages(seeded, api):
            page.emulate_media(color_scheme=STANCES[0][0], reduced_motion="reduce")
            page.goto(path)
            page.evaluate(axe)
            for scheme, (width, height), only in STANCES:
                page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                page.set_viewport_size({"width": width, "height": height})
                expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", scheme)
                expect(page.get_by_role("heading", level=1)).to_be_visible()
                expect(page.locator("[aria-busy=true]")).to_have_count(0)
                found += [(path, scheme, width, *each) for each in page.evaluate(RUN_AXE, only)]
                fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
                with contextlib.suppress(PageTimeout):  # charts may adapt their size a moment after the window changes
                    page.wait_for_function(fits)
                assert page.evaluate(fits), f"{path} is wider than a window of {width} pixels"
    assert not found, "\n".join(map(str, found))


def test_a_keyboard_is_enough(desk: Page, seeded: Seeded) -> None:
    desk.goto("/jobs")
    expect(desk.get_by_role("heading", name="Jobs")).to_be_visible()
    desk.keyboard.press("Tab")
    expect(desk.get_by_text("Skip to the content")).to_be_focused()
    desk.keyboard.press("Control+k")
    desk.keyboard.type(seeded.story.partition)
    expect(desk.get_by_role("listbox", name="Found").get_by_role("option", selected=True)).to_contain_text(
        seeded.story.partition
    )
    desk.keyboard.press("Enter")
    expect(desk.get_by_role("heading", level=1, name=seeded.story.partition)).to_be_visible()
    desk.keyboard.press("g")
    desk.keyboard.press("i")
    expect(desk.get_by_role("heading", level=1, name="Incidents")).to_be_visible()
    expect(desk.locator("tbody tr").nth(1)).to_be_visible()
    desk.keyboard.press("/")
    desk.keyboard.type(seeded.story.crashing)
    expect(desk.locator("tbody tr")).to_have_count(1)
    assert f"q={seeded.story.crashing}" in desk.url  # the address contains the filter's text
    desk.reload()
    expect(desk.locator("tbody tr")).to_have_count(1)
    desk.locator("tbody a").first.click()
    expect(desk.get_by_text("Response", exact=True)).to_be_visible()
    desk.go_back()
    expect(desk.get_by_role("heading", level=1, name="Incidents")).to_be_visible()


def test_what_is_typed_before_the_search_is_there_is_not_lost(desk: Page, seeded: Seeded) -> None:
    held: list[Route] = []
    desk.route("**/assets/Palette-*.js", lambda route: held.append(route))
    desk.goto("/jobs")
    expect(desk.get_by_role("heading", name="Jobs")).to_be_visible()
    desk.keyboard.press("Tab")
    # Move the focus to this link. The text that the test then types must reach the search, not the link.
    expect(desk.get_by_text("Skip to the content")).to_be_focused()
    with desk.expect_request("**/assets/Palette-*.js"):
        desk.keyboard.press("Control+k")
    desk.keyboard.type(seeded.story.partition)
    desk.keyboard.press("Enter")
    for route in held:
        route.continue_()
    expect(desk.get_by_role("heading", level=1, name=seeded.story.partition)).to_be_visible()


def test_an_enter_counts_while_answers_are_on_their_way_and_no_longer(desk: Page, seeded: Seeded) -> None:
    """Enter in the search opens a job even if the list of jobs is still loading.

    The page opens the job when the list arrives. If the list contains no job with this name, that Enter has no later
    effect: the page lists a job that appears afterwards, but does not open it.
    """
    name, listed = seeded.story.partition, "**/v1/training-jobs?*"
    held: list[Route] = []
    is_held, is_there = False, False

    def answer(route: Route) -> None:
        if is_held:
            held.append(route)
            return
        real = fetch_whole(route)
        jobs = [job for job in real.json()["TrainingJobSummaries"] if is_there or job["TrainingJobName"] != name]
        route.fulfill(response=real, json={**real.json(), "TrainingJobSummaries": jobs})

    def release() -> None:
        while held:
            answer(held.pop())

    def seek() -> None:
        # once this button is visible, the page reacts to the key
        expect(desk.get_by_role("button", name="Search")).to_be_visible()
        desk.keyboard.press("Control+k")
        expect(search).to_be_focused()
        desk.keyboard.type(name)
        desk.keyboard.press("Enter")
        expect(desk.get_by_text("Still searching…")).to_be_visible()

    search = desk.get_by_role("combobox", name="Search and go to")
    desk.route(listed, answer)
    desk.goto("/jobs")
    expect(desk.locator("tbody tr").first).to_be_visible()
    is_held = True
    with desk.expect_request(listed):  # the page requests the list of jobs again, because its list is old
        pass
    seek()
    is_held = False
    release()
    expect(desk.get_by_text("No page, object or action has this name.")).to_be_visible()
    is_there = True
    expect(desk.get_by_role("listbox", name="Found").get_by_role("option", name=f"{name} job")).to_be_visible()
    expect(search).to_be_focused()
    is_held = True
    desk.goto("/jobs")
    seek()
    is_held = False
    release()
    expect(desk.get_by_role("heading", level=1, name=name)).to_be_visible()


def test_who_may_only_read_sees_nothing_that_would_be_refused(browser: Browser, seeded: Seeded) -> None:
    refused: list[str] = []
    with signed_in(browser, seeded, Role.VIEWER) as page:
        page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
        for path in (
            "/",
            "/jobs",
            f"/jobs/{seeded.story.gpu}",
            f"/jobs/{seeded.story.gpu}/logs",
            "/queue",
            "/fleets/main",
            "/drills",
            "/submit",
            "/settings",
        ):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            expect(page.get_by_role("button", name=CHANGES)).to_have_count(0)
            expect(page.get_by_role("link", name="Submit a job", exact=True)).to_have_count(0)
            expect(page.get_by_role("checkbox", name="Choose")).to_have_count(0)
    assert refused == []


def test_a_session_that_has_ended_leads_to_the_sign_in_and_back(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded, refusals=("status of 401",)) as page:
        open_job(page, seeded.story.gpu, "/events")
        page.context.clear_cookies()
        page.reload()
        expect(page).to_have_url(f"{seeded.url}/sign-in?next=%2Fjobs%2F{seeded.story.gpu}%2Fevents")
        sign_in(page, seeded.token(Role.SUBMITTER))
        expect(page).to_have_url(f"{seeded.url}/jobs/{seeded.story.gpu}/events")


def test_what_happens_is_shown_at_once(browser: Browser, seeded: Seeded) -> None:
    """A page shows an incident without polling.

    The test advances the page's clock by less than any polling interval, so that only the event stream can deliver the
    incident.
    """
    story = seeded.story
    with signed_in(browser, seeded) as page:
        install_clock(page)
        open_job(page, story.calm)
        expect(page.get_by_text("Live")).to_be_visible()
        expect(page.get_by_role("heading", name="Open incident")).to_be_hidden()
        page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=5))
        story.world.terminate(story.world.team(story.calm)[-1])
        seeded.run(story.go(4 * FINE_SECONDS, FINE_SECONDS))
        for _ in range(int(LEAST_INTERVAL_SECONDS / CLOCK_SECONDS) - 1):
            page.clock.run_for(int(CLOCK_SECONDS * 1000))
            with contextlib.suppress(AssertionError):  # the browser may receive the events later
                expect(page.get_by_role("heading", name="Open incident")).to_be_visible(timeout=500)
                break
        expect(page.get_by_role("heading", name="Open incident")).to_be_visible()


def test_a_stream_that_was_cut_off_goes_on_after_the_last_event_that_was_read(
    browser: Browser, seeded: Seeded, api: httpx.Client
) -> None:
    """A rank is killed while the server is down, so the page misses events.

    It receives them after the server's restart.
    """
    story = seeded.story
    with signed_in(browser, seeded, is_cut=True) as page:
        open_job(page, story.partition, "/events")
        expect(page.get_by_text("Live")).to_be_visible()
        newest = newest_event(api)
        seeded.fall_silent()
        try:
            expect(page.get_by_text("No answer", exact=True)).to_be_visible()
            story.world.kill_rank(story.world.team(story.partition)[0])
            seeded.run(story.go(4 * FINE_SECONDS, FINE_SECONDS))
        finally:
            with page.expect_response(lambda answer: "events/stream" in answer.url) as caught:
                seeded.serve()
        assert int(caught.value.request.all_headers()["last-event-id"]) == newest
        assert newest_event(api) > newest
        expect(page.get_by_text("Live")).to_be_visible()
        missed = [event for event in events(api, newest) if event.get("TrainingJobName") == story.partition]
        expect(page.locator("tbody tr").first).to_contain_text(sentence(missed[-1]["Message"]))


def events(api: httpx.Client, after: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/events", params={"AfterEventId": after, "MaxResults": 1000}).json()[
        "Events"
    ]
    return found


def newest_event(api: httpx.Client) -> int:
    after = 0
    while page := events(api, after):
        after = page[-1]["EventId"]
    return after
