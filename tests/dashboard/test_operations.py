"""Buttons that change a job, a fleet or the session, each pressed once in Chromium.

The tests compare the effect with the API.
"""

from __future__ import annotations

import contextlib
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from control_plane.db.tokens import Role
from tests.dashboard.browsing import (
    confirm,
    fetch_whole,
    install_clock,
    open_job,
    sentence,
    sign_in,
    signed_in,
    verdict,
    watched,
)
from tests.dashboard.seeded import FINE_SECONDS
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
ADMINS = re.compile("^(Change|Act on|Unfreeze|Start the drill|Create token|Revoke)")
"""First words in the labels of buttons that only an administrator may press."""
LEAST_INTERVAL_SECONDS, CLOCK_SECONDS = 2.0, 0.1
CONNECTIONS = 6
"""Maximum number of connections that a browser opens to one server, over all its tabs."""
SEEN = """state => {
  Object.defineProperty(document, 'visibilityState', { value: state, configurable: true })
  document.dispatchEvent(new Event('visibilitychange'))
}"""
"""JavaScript that sets whether a page reports itself as visible. Playwright reports every page as visible."""


def test_a_paused_job_is_said_to_wait_for_a_person_until_it_is_resumed(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = "paused-by-a-person"
    seeded.story.queue(name)
    open_job(desk, name)
    act = desk.get_by_role("region", name="What to do")
    expect(verdict(desk)).to_contain_text("Queued.")
    expect(verdict(desk)).to_contain_text("Nothing to do.")
    desk.get_by_role("button", name="Pause").click()
    expect(act).to_contain_text("does not continue by itself")
    expect(act).to_contain_text(f"everstep jobs resume {name}")
    expect(verdict(desk)).to_contain_text("Paused")
    assert api.get(f"/training-jobs/{name}").json()["SecondaryStatus"] == "Paused"
    with desk.expect_popup() as opened:
        act.get_by_role("link", name="The runbook about this").click()
    expect(opened.value.locator("h3:target")).to_have_text("Paused")
    opened.value.close()
    desk.goto("/queue")
    expect(desk.locator("tbody")).to_contain_text(seeded.story.waiting)
    expect(desk.locator("tbody")).not_to_contain_text(name)  # the queue does not list a paused job
    open_job(desk, name)
    desk.get_by_role("button", name="Resume").click()
    expect(verdict(desk)).to_contain_text("Nothing to do.")
    assert "PauseRequestedTime" not in api.get(f"/training-jobs/{name}").json()


def test_a_job_that_was_taken_over_is_recovered_by_nobody_until_it_is_handed_back(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    story = seeded.story
    name = story.partition
    seeded.run(story.settle(name))
    open_job(desk, name)
    act = desk.get_by_role("region", name="What to do")
    desk.get_by_role("button", name="Take over").click()
    expect(act).to_contain_text("Automation is off: a failure waits for")
    expect(act).to_contain_text(f"everstep jobs hand-back {name}")
    story.world.kill_rank(story.world.team(name)[0])
    seeded.run(story.go(8 * FINE_SECONDS, FINE_SECONDS))
    seen = api.get(f"/training-jobs/{name}").json()["Reason"].split("; it observes: ")[1]
    expect(act).to_contain_text("Nothing recovers this job")
    expect(act).to_contain_text(sentence(seen))
    expect(act.get_by_role("link")).to_have_attribute("href", "/runbook.html#taken-over")
    desk.get_by_role("button", name="Hand back").click()
    expect(desk.get_by_text("Automation is off")).to_have_count(0)
    seeded.run(story.go(4 * FINE_SECONDS, FINE_SECONDS))  # let the control plane make another decision
    seeded.run(story.settle(name))
    incident = api.get("/incidents", params={"TrainingJobName": name}).json()["Incidents"][-1]
    assert incident["Evidence"][0] == seen
    expect(verdict(desk)).to_contain_text("Training at step")
    # The page measures the rate of steps in real time, in which the simulated job makes no step. The text at
    # the top of the page may therefore call training slow, but it must not mention the ended takeover.
    expect(verdict(desk)).not_to_contain_text("Automation")
    expect(desk.get_by_text("everstep jobs hand-back")).to_have_count(0)
    last = desk.get_by_role("region", name="Latest incident").get_by_role("link", name="Incident details")
    expect(last).to_have_attribute("href", f"/incidents/{incident['IncidentId']}")
    desk.get_by_role("button", name="Acknowledge").click()
    expect(desk.get_by_text("Acknowledged by")).to_be_visible()
    assert "AcknowledgementTime" in api.get(f"/incidents/{incident['IncidentId']}").json()


def test_a_job_is_stopped_by_its_name(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = "stopped-by-its-name"
    seeded.story.queue(name)
    open_job(desk, name)
    desk.get_by_role("button", name="Stop").click()
    confirm(desk, name, "Stop")
    expect(desk.get_by_role("group", name="What to do with this job")).to_be_hidden()
    assert "StopRequestedTime" in api.get(f"/training-jobs/{name}").json()


def test_checkpoints_are_created_verified_pinned_and_deleted_where_a_viewer_only_reads_them(
    desk: Page, browser: Browser, seeded: Seeded, api: httpx.Client
) -> None:
    story = seeded.story
    name = story.gpu
    seeded.run(story.settle(name))

    def listed() -> dict[tuple[int, int], dict[str, Any]]:
        found = api.get(f"/training-jobs/{name}/checkpoints").json()["Checkpoints"]
        return {(each["Step"], each["Generation"]): each for each in found if each["Status"] == "Complete"}

    before = set(listed())
    open_job(desk, name, "/checkpoints")
    with desk.expect_response(lambda answer: answer.request.method == "POST") as answered:
        desk.get_by_role("button", name="Create a checkpoint").click()
    wanted = answered.value.json()["Step"]
    expect(desk.get_by_text(f"Everstep stores step {wanted:,} or the next step.")).to_be_visible()
    seeded.run(story.world.upload(wanted, name))
    assert {each[0] for each in set(listed()) - before} == {wanted}
    newest, *_, (step, generation) = listed()
    of = f"step {step} of launch {generation}"
    desk.reload()
    expect(desk.get_by_text(f"everstep checkpoints export {name} {newest[0]} --to exported")).to_be_visible()
    row = desk.locator("tbody tr").filter(has=desk.get_by_role("button", name=f"Verify {of}"))
    row.get_by_role("button", name=f"Pin {of}").click()
    expect(row).to_contain_text("pinned")
    expect(row.get_by_role("button", name=f"Delete {of}")).to_have_count(0)
    assert listed()[step, generation]["IsPinned"]
    row.get_by_role("button", name=f"Unpin {of}").click()
    expect(row.get_by_role("button", name=f"Pin {of}")).to_be_visible()
    row.get_by_role("button", name=f"Delete {of}").click()
    confirm(desk, f"step {step}", "Delete")
    expect(desk.get_by_role("button", name=f"Delete {of}", exact=True)).to_have_count(0)
    described = api.get(f"/training-jobs/{name}/checkpoints/{step}", params={"Generation": generation})
    assert described.json()["Status"] == "Trashed"
    desk.get_by_role("button", name=f"Undelete {of}").click()
    expect(desk.get_by_role("button", name=f"Unpin {of}")).to_be_visible()
    assert listed()[step, generation]["IsPinned"]
    desk.get_by_role("button", name=f"Verify step {newest[0]} of launch {newest[1]}").click()
    expect(desk.locator("tbody")).to_contain_text("Verifying")
    assert listed()[newest]["Verification"] == "Verifying"
    with signed_in(browser, seeded, Role.VIEWER) as page:
        open_job(page, name, "/checkpoints")
        expect(page.locator("tbody tr").first).to_be_visible()
        expect(page.get_by_text("everstep checkpoints export")).to_be_visible()
        for verb in ("Create a checkpoint", "Verify", "Pin", "Unpin", "Delete"):
            expect(page.get_by_role("button", name=verb)).to_have_count(0)


def test_a_fleets_exposed_nodes_are_told_its_figures_are_changed_and_it_is_unfrozen_by_its_name(
    desk: Page, api: httpx.Client
) -> None:
    def frozen(route: Route) -> None:
        answer = fetch_whole(route)
        route.fulfill(
            response=answer,
            body=json.dumps({"Fleets": [{**fleet, "FleetStatus": "frozen"} for fleet in answer.json()["Fleets"]]}),
        )

    before = api.get("/fleets/main").json()["MinNodeCount"]
    desk.goto("/fleets/main")
    exposed = [node for node in api.get("/nodes", params={"FleetName": "main"}).json()["Nodes"] if "Exposure" in node]
    assert exposed
    for node in exposed:
        expect(desk.locator(f"tr[id='{node['NodeId']}']")).to_contain_text("exposed to jobs")
        expect(desk.locator(".attention li", has_text=node["NodeId"])).to_contain_text(sentence(node["Exposure"]))
    least = desk.get_by_label("Nodes kept when idle")
    change = desk.get_by_role("button", name="Change")
    expect(change).to_be_disabled()
    for wanted in (before + 1, before):
        least.fill(str(wanted))
        change.click()
        expect(change).to_be_disabled()
        assert api.get("/fleets/main").json()["MinNodeCount"] == wanted
    # Change the response on its way to the page. A fleet that is really frozen would break later tests.
    desk.route("**/v1/fleets?*", frozen)
    desk.reload()
    desk.get_by_role("button", name="Unfreeze").click()
    with desk.expect_response("**/v1/fleets/main/unfreeze") as answered:
        confirm(desk, "main", "Unfreeze")
    assert answered.value.ok


def test_the_theme_is_chosen_and_kept_and_signing_out_ends_the_session(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded) as page:
        scheme = page.locator("html[data-mantine-color-scheme=dark]")
        expect(scheme).to_have_count(0)
        page.get_by_role("button", name="account and theme").click()
        page.get_by_role("menuitem", name="Dark").click()
        expect(scheme).to_have_count(1)
        page.reload()
        expect(scheme).to_have_count(1)
        page.get_by_role("button", name="account and theme").click()
        page.get_by_role("menuitem", name="Sign out").click()
        expect(page).to_have_url(re.compile("/sign-in"))
        page.goto("/jobs")
        expect(page).to_have_url(re.compile("/sign-in"))
        assert not [cookie for cookie in page.context.cookies() if cookie.get("value")]


def test_a_page_that_is_signed_out_on_asks_nothing_more_and_is_back_when_the_session_could_not_be_ended(
    browser: Browser, seeded: Seeded
) -> None:
    ends: list[Route] = []

    def take(route: Route) -> None:
        if route.request.method == "DELETE":
            ends.append(route)
        else:
            route.continue_()

    with signed_in(browser, seeded, refusals=("ERR_FAILED",)) as page:
        install_clock(page)
        open_job(page, seeded.story.gpu)
        heading = page.get_by_role("heading", name=seeded.story.gpu)
        page.route("**/v1/session", take)
        page.get_by_role("button", name="account and theme").click()
        with page.expect_request(is_end):
            page.get_by_role("menuitem", name="Sign out").click()
        expect(heading).to_have_count(0)
        ends.pop().abort()
        expect(heading).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("You are still signed in")
        with page.expect_request(is_end):
            page.get_by_role("button", name="Try again").click()
        expect(heading).to_have_count(0)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(int(5000 * LEAST_INTERVAL_SECONDS))
        ends.pop().continue_()
        expect(page).to_have_url(re.compile(f"/sign-in.next=%2Fjobs%2F{seeded.story.gpu}"))
        assert [url for url in asked if "/v1/" in url and not url.endswith("/v1/session")] == []
        sign_in(page, seeded.token(Role.VIEWER))
        expect(heading).to_be_visible()


def is_end(request: Request) -> bool:
    """Return True if the request ends a session."""
    return request.method == "DELETE"


@pytest.mark.parametrize("teller", ["the stream of events", "a request that is refused"])
def test_a_session_that_ends_under_an_open_page_leads_to_the_sign_in_and_back(
    browser: Browser, seeded: Seeded, api: httpx.Client, teller: str
) -> None:
    """An open page shows the sign-in page after its session has ended elsewhere. After the sign-in, the page returns.

    The event stream reports the end, so the page does not wait for its next poll. If the page has no stream, a rejected
    request shows the end.
    """
    made = api.post("/tokens", json={"Role": "viewer", "Description": teller}).json()
    with watched(browser, seeded.url, refusals=("status of 401", "ERR_FAILED")) as page:
        if teller.startswith("a request"):
            page.route("**/v1/events/stream*", lambda route: route.abort())
        else:
            install_clock(page)
        sign_in(page, made["Secret"])
        open_job(page, seeded.story.finished, "/events")
        if not teller.startswith("a request"):
            expect(page.get_by_text("Live")).to_be_visible()
            page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=5))
        assert api.post(f"/tokens/{made['Token']['TokenId']}/revoke").is_success
        if teller.startswith("a request"):
            expect(page).to_have_url(re.compile(f"/sign-in.next=%2Fjobs%2F{seeded.story.finished}%2Fevents"))
        else:
            for _ in range(int(LEAST_INTERVAL_SECONDS / CLOCK_SECONDS) - 1):
                page.clock.run_for(int(CLOCK_SECONDS * 1000))
                with contextlib.suppress(AssertionError):  # the browser may receive the event later
                    expect(page).to_have_url(re.compile("/sign-in"), timeout=500)
                    break
            expect(page).to_have_url(re.compile("/sign-in"))
            page.clock.resume()
        sign_in(page, seeded.token(Role.VIEWER))
        expect(page).to_have_url(f"{seeded.url}/jobs/{seeded.story.finished}/events")


def test_more_tabs_than_a_browser_has_connections_are_answered_each_when_it_is_seen(desk: Page, seeded: Seeded) -> None:
    """More tabs than a browser has connections are open, and each tab still loads its log when it becomes visible.

    A visible tab with a log uses two streams. Hidden tabs close their streams, which frees connections for the visible
    tab.
    """
    tabs = [desk, *(desk.context.new_page() for _ in range(CONNECTIONS // 2))]
    for tab in tabs:
        open_job(tab, seeded.story.gpu, "/logs")
        expect(tab.get_by_text("Following")).to_be_visible()
        expect(tab.get_by_text("Live")).to_be_visible()
        tab.evaluate(SEEN, "hidden")
        expect(tab.get_by_text("Following")).to_be_hidden()
    tabs[0].evaluate(SEEN, "visible")
    expect(tabs[0].get_by_text("Following")).to_be_visible()
    expect(tabs[0].get_by_text("Live")).to_be_visible()


def test_a_control_plane_that_fails_to_say_how_a_job_is_is_no_news_of_it(browser: Browser, seeded: Seeded) -> None:
    name = seeded.story.gpu
    with signed_in(browser, seeded, refusals=("status of 500",)) as page:
        install_clock(page)
        open_job(page, name)
        expect(verdict(page)).to_contain_text("Training at step")
        failing = json.dumps(
            {"Code": "InternalServerException", "Message": "the disk is full", "RequestId": "req-of-the-test"}
        )
        page.route(
            f"**/v1/training-jobs/{name}",
            lambda route: route.fulfill(status=500, content_type="application/json", body=failing),
        )
        for _ in range(20):  # this time is enough for all failed requests and their retries
            page.clock.run_for(1_000)
        alert = page.get_by_role("alert").first
        expect(alert).to_contain_text("What follows is not renewed")
        expect(alert).to_contain_text("req-of-the-test")
        expect(alert).to_contain_text("the disk is full")
        expect(verdict(page)).to_contain_text("Last known: Training at step")
        expect(verdict(page)).not_to_contain_text("can fail")
        page.unroute(f"**/v1/training-jobs/{name}")
        page.clock.run_for(5_000)
        expect(page.get_by_text("What follows is not renewed")).to_be_hidden()
        expect(verdict(page)).not_to_contain_text("Last known")


def test_a_submitter_is_offered_what_jobs_need_and_nothing_that_would_be_refused(
    browser: Browser, seeded: Seeded
) -> None:
    story = seeded.story
    refused: list[str] = []
    with signed_in(browser, seeded, Role.SUBMITTER) as page:
        page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
        for path in (
            "/",
            "/jobs",
            f"/jobs/{story.gpu}",
            "/queue",
            "/incidents",
            "/fleets/main",
            "/drills",
            "/submit",
            "/settings",
        ):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            expect(page.get_by_role("button", name=ADMINS)).to_have_count(0)
            expect(page.get_by_role("link", name="Submit a job", exact=True)).to_have_count(1)
        open_job(page, story.gpu)
        for verb in ("Take over", "Pause", "Stop"):
            expect(page.get_by_role("button", name=verb, exact=True)).to_be_visible()
    assert refused == []
