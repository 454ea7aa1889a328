"""Pages with much content in Chromium: 500 jobs, 256 nodes and a week of events (`tests/dashboard/many.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import open_job, sentence, signed_in
from tests.dashboard.many import EVENTS, INCIDENTS, JOBS, NODES, STEP, TARGET, WIDE, Many, served
from tests.dashboard.service import Living

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
ROW_PIXELS = 44
"""Height of a row in the list of jobs."""


@pytest.fixture(scope="module")
def week(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Living, Many]]:
    with served(tmp_path_factory.mktemp("many")) as made:
        yield made


@pytest.fixture
def page(browser: Browser, week: tuple[Living, Many]) -> Iterator[Page]:
    with signed_in(browser, week[0]) as opened:
        yield opened


def scroll_down(page: Page, selector: str) -> None:
    """Scroll an element to its end. An empty selector scrolls the page."""
    page.evaluate(
        "(selector) => { const box = selector ? document.querySelector(selector) : "
        "document.scrollingElement; box.scrollTop = box.scrollHeight }",
        selector,
    )


def test_five_hundred_jobs_are_listed_filtered_and_scrolled_and_the_list_asks_for_nothing_else(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/jobs")
    rows = page.locator("tbody tr[aria-rowindex]")
    expect(page.get_by_text(f"{JOBS} jobs", exact=True)).to_be_visible()
    expect(page.get_by_role("table")).to_have_attribute("aria-rowcount", str(JOBS + 1))
    assert not [url for url in asked if "/v1/incidents" in url and "StatusEquals=Open" not in url]
    assert rows.count() < 80, "the page renders only the rows in view"
    seen: set[str] = set()
    for top in range(0, JOBS * ROW_PIXELS, 10 * ROW_PIXELS):
        page.evaluate("(top) => { document.querySelector('.joblist').scrollTop = top }", top)
        expect(page.locator(f"tbody tr[aria-rowindex='{min(JOBS, top // ROW_PIXELS + 5) + 1}']")).to_be_in_viewport()
        seen |= set(rows.locator("td:nth-child(2)").all_inner_texts())
    assert len(seen) == JOBS
    page.locator("[data-filter]").fill(WIDE)
    expect(rows).to_have_count(1)
    row = rows.first
    expect(row).to_contain_text(f"{STEP:,} of {TARGET:,}")
    # No agent is connected, so the page counts no node as connected.
    expect(row).to_contain_text(f"0 of {NODES - 1}")
    expect(row.get_by_role("img", name="48 % done")).to_be_visible()
    page.locator("[data-filter]").fill("")
    page.get_by_role("button", name="Queued 49").click()
    expect(page.get_by_text(f"49 of {JOBS} jobs", exact=True)).to_be_visible()
    expect(rows.filter(has_text="Queued")).to_have_count(rows.count())
    page.get_by_role("button", name="Time left").click()
    expect(rows.first).to_be_in_viewport()


def test_a_job_on_256_nodes_has_a_lane_for_each_and_every_copy_of_its_shards(
    page: Page, week: tuple[Living, Many]
) -> None:
    open_job(page, WIDE)
    chart = page.locator("svg.timeline")
    expect(chart).to_have_attribute(
        "aria-label", re.compile(f"^Timeline of 64 of {NODES} nodes and {INCIDENTS} incidents")
    )
    page.get_by_role("button", name=f"Show {NODES - 64} more nodes").click()
    expect(chart).to_have_attribute("aria-label", re.compile(f"^Timeline of {NODES} nodes"))
    expect(chart.locator("text.lane")).to_have_count(NODES + 1)
    expect(chart).to_contain_text(week[1].spare)  # the job released this node without an incident
    open_job(page, WIDE, "/protection")
    expect(
        page.get_by_role("group", name=f"Holders of {NODES - 1} shards on {NODES - 1} nodes; 1 shard with a problem")
    ).to_be_visible()
    scroll_down(page, ".matrix")
    copies = page.get_by_role("region", name="All copies").locator("tbody tr")
    expect(copies).to_have_count(100)
    expect(copies.first).to_contain_text("not counted")  # shards with a missing copy come first
    expect(copies.nth(1)).to_contain_text("1 of 2")  # the second row is the remaining copy of the same shard
    expect(copies.nth(2)).to_contain_text("3 steps")
    more = page.get_by_role("button", name=re.compile("^Show .* copies"))
    while more.count():
        more.click()
    expect(copies).to_have_count(2 * (NODES - 1))
    losses = page.get_by_role("region", name="Losses at the same time")
    expect(losses).to_contain_text("any 1 failure domain")


def test_a_week_of_events_is_read_from_its_end(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/v1/events?" in request.url else None)
    open_job(page, WIDE, "/events")
    rows = page.locator("tbody tr")
    expect(rows.first).to_contain_text(f"number {EVENTS - 1} of a week")
    expect(rows).to_have_count(500)
    # Requests with `AfterEventId` load events that occurred before the event stream opened.
    assert len([url for url in asked if "AfterEventId" not in url]) == 1
    page.get_by_role("button", name="Load older events").click()
    expect(page.get_by_text("The newest 2,000 events are loaded")).to_be_visible()
    page.get_by_label("Filter events").fill(f"number {EVENTS - 1500} ")
    expect(rows).to_have_count(1)
    assert len([url for url in asked if "SortOrder=Descending" in url]) == 2


def test_many_incidents_and_nodes_are_listed(page: Page, week: tuple[Living, Many]) -> None:
    page.goto("/incidents")
    rows = page.locator("tbody tr")
    expect(page.get_by_text(f"{INCIDENTS} incidents", exact=True)).to_be_visible()
    expect(rows).to_have_count(INCIDENTS)
    scroll_down(page, "")
    expect(rows.last).to_be_in_viewport()
    rows.first.get_by_role("link").first.click()
    entries = page.get_by_role("region", name="Timeline").get_by_role("listitem")
    with httpx.Client(
        base_url=f"{week[0].url}/v1",
        headers={"authorization": f"Bearer {week[0].admin_token}"},
        trust_env=False,
        timeout=30,
    ) as api:
        newest = api.get("/incidents", params={"SortOrder": "Descending", "MaxResults": 1}).json()["Incidents"][0]
        span = {"TrainingJobName": WIDE, "TimeAfter": newest["FailedAt"] - 30, "TimeBefore": newest["ClosedAt"] + 30}
        near = api.get("/events", params=span).json()["Events"]
    expect(page.get_by_text(newest["IncidentId"], exact=True)).to_be_visible()
    assert near
    events = entries.filter(has_not=page.locator(".milestone, pre"))
    expect(events.filter(has_text=near[0]["Type"])).to_have_count(0)  # a person reads the message
    for event in near:
        expect(events.filter(has_text=sentence(event["Message"])).first).to_be_visible()
    expect(page.locator(".moments > li:not(.milestone, :has(pre))")).to_have_count(len(near))
    page.goto("/fleets/main")
    expect(page.get_by_role("link", name=week[1].nodes[-1]).first).to_be_visible()
    scroll_down(page, "")
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
