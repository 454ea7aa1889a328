"""The dashboard in a real Chromium, over the real application and a past that the real decisions made
(`tests/dashboard`).

What a page says is held against what the API answers, never against literals: names and figures of the story come from
its seed.
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
from tests.dashboard.browsing import DESKTOP, PHONE, open_job, sentence, sign_in, signed_in
from tests.dashboard.conftest import AXE
from tests.dashboard.seeded import FINE_SECONDS
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
RUN_AXE = """async (only) => {
  const found = await axe.run({ resultTypes: ['violations'], ...only })
  return found.violations.map((each) => [each.id, each.nodes[0].failureSummary, each.nodes[0].html])
}"""
LEAST_INTERVAL_SECONDS, CLOCK_SECONDS = 2.0, 0.1
"""At which a page asks for anything; and in what steps its clock is moved."""
CHANGES = re.compile(
    "^(Stop|Pause|Resume|Take over|Hand back|Acknowledge|Submit|Change|Act on|Unfreeze|Start the "
    "drill|Make a token|Revoke)"
)
"""How buttons begin that change something."""


def test_a_control_plane_that_says_nothing_any_more_is_the_first_thing_that_is_said(
    browser: Browser, seeded: Seeded
) -> None:
    with signed_in(browser, seeded, is_cut=True) as page:
        page.clock.install()
        open_job(page, seeded.story.gpu)
        expect(page.get_by_text("Live")).to_be_visible()
        seeded.fall_silent()
        try:
            expect(page.get_by_text("No events")).to_be_visible()
            page.clock.run_for(40_000)
            expect(page.get_by_text("The control plane has not answered for")).to_be_visible()
            expect(page.locator("section.act")).to_contain_text("Yes")
        finally:
            seeded.serve()
        page.clock.run_for(20_000)
        expect(page.get_by_text("Live")).to_be_visible()
        expect(page.get_by_text("The control plane has not answered for")).to_be_hidden()


def pages(seeded: Seeded, api: httpx.Client) -> list[str]:
    story = seeded.story
    incident = api.get("/incidents").json()["Incidents"][0]["IncidentId"]
    tabs = ("", "/metrics", "/logs", "/protection", "/checkpoints", "/events", "/spec")
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
        "/drills",
        "/submit",
        "/settings",
        "/no-such-page",
    )
    return ["/", *jobs, *others]


STANCES: tuple[tuple[Literal["light", "dark"], tuple[int, int], dict[str, Any]], ...] = (
    ("light", DESKTOP, {}),
    ("dark", DESKTOP, {}),
    ("dark", PHONE, {"runOnly": ["color-contrast", "scrollable-region-focusable"]}),
)
"""How every page is looked at, one after the other: all rules in both schemes, and on a phone those that another width
can break.
"""


def test_every_page_is_clean_for_axe_and_fits_its_width(browser: Browser, seeded: Seeded, api: httpx.Client) -> None:
    """Each is loaded once: it follows the system from scheme to scheme."""
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
                with contextlib.suppress(PageTimeout):  # charts follow a window that has changed
                    page.wait_for_function(fits)
                assert page.evaluate(fits), f"{path} is wider than a window of {width} pixels"
    assert not found, "\n".join(map(str, found))


def test_a_keyboard_is_enough(desk: Page, seeded: Seeded) -> None:
    desk.goto("/")
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
    assert f"q={seeded.story.crashing}" in desk.url  # the filter is in the address
    desk.reload()
    expect(desk.locator("tbody tr")).to_have_count(1)
    desk.locator("tbody a").first.click()
    expect(desk.get_by_text("What was lost")).to_be_visible()
    desk.go_back()
    expect(desk.get_by_role("heading", level=1, name="Incidents")).to_be_visible()


def test_what_is_typed_before_the_search_is_there_is_not_lost(desk: Page, seeded: Seeded) -> None:
    held: list[Route] = []
    desk.route("**/assets/Palette-*.js", lambda route: held.append(route))
    desk.goto("/")
    expect(desk.get_by_role("heading", name="Jobs")).to_be_visible()
    desk.keyboard.press("Tab")
    expect(desk.get_by_text("Skip to the content")).to_be_focused()  # which must not take what follows for itself
    with desk.expect_request("**/assets/Palette-*.js"):
        desk.keyboard.press("Control+k")
    desk.keyboard.type(seeded.story.partition)
    desk.keyboard.press("Enter")
    for route in held:
        route.continue_()
    expect(desk.get_by_role("heading", level=1, name=seeded.story.partition)).to_be_visible()


def test_an_enter_counts_while_answers_are_on_their_way_and_no_longer(desk: Page, seeded: Seeded) -> None:
    """Whoever typed a name that nothing has, and goes on looking, is not thrown to a page when something of that name
    comes.
    """
    name, listed = seeded.story.partition, "**/v1/training-jobs?*"
    held: list[Route] = []
    is_held, is_there = False, False

    def answer(route: Route) -> None:
        if is_held:
            held.append(route)
            return
        real = route.fetch()
        jobs = [job for job in real.json()["TrainingJobSummaries"] if is_there or job["TrainingJobName"] != name]
        route.fulfill(response=real, json={**real.json(), "TrainingJobSummaries": jobs})

    def release() -> None:
        while held:
            answer(held.pop())

    def seek() -> None:
        expect(desk.get_by_role("button", name="Search")).to_be_visible()  # whoever sees that can press the key
        desk.keyboard.press("Control+k")
        expect(search).to_be_focused()
        desk.keyboard.type(name)
        desk.keyboard.press("Enter")
        expect(desk.get_by_text("Still looking…")).to_be_visible()

    search = desk.get_by_role("combobox", name="Search and go to")
    desk.route(listed, answer)
    desk.goto("/")
    expect(desk.locator("tbody tr").first).to_be_visible()
    is_held = True
    with desk.expect_request(listed):  # what is known is old: the answer that counts is on its way
        pass
    seek()
    is_held = False
    release()
    expect(desk.get_by_text("Nothing has this in its name.")).to_be_visible()
    is_there = True
    expect(desk.get_by_role("listbox", name="Found").get_by_role("option", name=name)).to_be_visible()
    expect(search).to_be_focused()
    is_held = True
    desk.goto("/")
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
            expect(page.get_by_role("link", name="Submit", exact=True)).to_have_count(0)
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
    """The page's clock moves less than any interval at which it asks: what it shows, the stream of events has told
    it.
    """
    story = seeded.story
    with signed_in(browser, seeded) as page:
        page.clock.install()
        open_job(page, story.calm)
        expect(page.get_by_text("Live")).to_be_visible()
        expect(page.get_by_text("The incident now")).to_be_hidden()
        page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=5))
        story.world.terminate(story.world.team(story.calm)[-1])
        seeded.run(story.go(4 * FINE_SECONDS, FINE_SECONDS))
        for _ in range(int(LEAST_INTERVAL_SECONDS / CLOCK_SECONDS) - 1):
            page.clock.run_for(int(CLOCK_SECONDS * 1000))
            with contextlib.suppress(AssertionError):  # its events may still be on their way
                expect(page.get_by_text("The incident now")).to_be_visible(timeout=500)
                break
        expect(page.get_by_text("The incident now")).to_be_visible()


def test_a_stream_that_was_cut_off_goes_on_after_the_last_event_that_was_read(
    browser: Browser, seeded: Seeded, api: httpx.Client
) -> None:
    """The server restarts in the middle, and something happens meanwhile."""
    story = seeded.story
    with signed_in(browser, seeded, is_cut=True) as page:
        open_job(page, story.partition, "/events")
        expect(page.get_by_text("Live")).to_be_visible()
        newest = newest_event(api)
        seeded.fall_silent()
        try:
            expect(page.get_by_text("No events")).to_be_visible()
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
