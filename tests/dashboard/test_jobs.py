"""The list of jobs in Chromium: its order, columns, saved views and loss curves."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import PHONE, signed_in
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def statuses(page: Page) -> list[str]:
    return [text.strip() for text in page.locator("td.c-status [data-figure=status]").all_inner_texts()]


def test_jobs_in_trouble_come_first_and_running_jobs_show_their_loss(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    desk.goto("/jobs")
    jobs = api.get("/training-jobs").json()["TrainingJobSummaries"]
    expect(desk.locator("tbody tr")).to_have_count(len(jobs))
    shown = statuses(desk)
    words = {
        "Restarting": "Recovering",
        "Pending": "Queued",
        "CompletedWithOlderCheckpoint": "Completed, older checkpoint",
    }
    assert sorted(shown) == sorted(words.get(job["SecondaryStatus"], job["SecondaryStatus"]) for job in jobs)
    assert shown[0] == "Failed"
    # Jobs that need a person come first. The others are in the order of their status.
    calm = {job["TrainingJobName"] for job in jobs if job["Duty"]["Urgency"] not in ("Now", "Later")}
    is_calm = [name.strip() in calm for name in desk.locator("td.c-name").all_inner_texts()]
    assert is_calm == sorted(is_calm)
    in_order = ("Recovering", "Queued", "Training", words["CompletedWithOlderCheckpoint"])
    rest = [status for status, is_one in zip(shown, is_calm, strict=True) if is_one and status in in_order]
    assert [*dict.fromkeys(rest)] == [status for status in in_order if status in rest]
    assert len({*rest}) >= 2
    expect(desk.locator("thead th")).to_have_count(1 + 8)
    row = desk.locator("tbody tr", has=desk.get_by_role("link", name=seeded.story.gpu, exact=True))
    expect(row.get_by_role("img", name=re.compile(r"^Loss from \d"))).to_be_visible()
    (curve,) = api.get(
        "/loss-curves", params={"RunIds": next(j["RunId"] for j in jobs if j["TrainingJobName"] == seeded.story.gpu)}
    ).json()["LossCurves"]
    assert 2 <= len(curve["Values"]) <= 40
    expect(desk.get_by_role("status").filter(has_text=re.compile("needs? attention"))).to_be_visible()


def test_loss_curves_are_requested_once_for_all_rows(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/loss-curves" in request.url else None)
        page.goto("/jobs")
        expect(page.get_by_role("img", name=re.compile("^Loss from")).first).to_be_visible()
        for _ in range(2):
            with page.expect_response(lambda answer: "/v1/training-jobs?" in answer.url):
                pass
        assert len(asked) == 1


def test_columns_are_chosen_in_the_address_and_kept_in_a_view(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded) as page:
        page.goto("/jobs")
        expect(page.get_by_role("columnheader", name="Cost")).to_have_count(0)
        page.get_by_role("button", name="Columns").click()
        page.get_by_role("menuitemcheckbox", name="Cost").click()
        page.get_by_role("menuitemcheckbox", name="Reason").click()
        page.keyboard.press("Escape")
        expect(page.get_by_role("columnheader", name="Cost")).to_be_visible()
        expect(page.get_by_role("columnheader", name="Reason")).to_have_count(0)
        page.reload()
        expect(page.get_by_role("columnheader", name="Cost")).to_be_visible()
        page.get_by_role("button", name=re.compile("^Training")).click()
        page.get_by_role("button", name="Views").click()
        page.get_by_role("menuitem", name="Save this view").click()
        page.get_by_label("Name", exact=True).fill("what it costs")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.goto("/jobs")
        expect(page.get_by_role("columnheader", name="Reason")).to_be_visible()
        page.get_by_role("button", name="Views").click()
        page.get_by_role("menuitem", name="what it costs", exact=True).click()
        expect(page.get_by_role("columnheader", name="Cost")).to_be_visible()
        expect(page.get_by_role("button", name=re.compile("^Training"))).to_have_attribute("aria-pressed", "true")
        assert set(statuses(page)) == {"Training"}
        page.get_by_role("button", name="Views").click()
        page.get_by_role("menuitem", name="Delete the view what it costs").click()
        expect(page.get_by_text("No view is saved in this browser.")).to_be_visible()


def test_a_phone_shows_a_card_for_each_job(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded, size=PHONE) as page:
        page.goto("/jobs")
        cards = page.locator("tbody tr")
        expect(cards.first).to_be_visible()
        heights = {round(card.bounding_box()["height"]) for card in cards.all()}
        assert heights == {108}
        for text in ("c-name", "c-status", "c-reason", "c-progress"):
            expect(cards.first.locator(f".{text}")).to_be_visible()
