"""The Reports page and the Outputs tab in Chromium. The figures on the pages equal those of the API."""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from control_plane.db.tokens import Role
from everstep.cli.report_rows import RowKind, as_csv, rows
from everstep.protocol.plan import ObjectReference
from tests.dashboard.browsing import signed_in
from tests.dashboard.service import Seeded, Served
from tests.sim.world import BUCKET

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
WEEK = {"StartTime": "2026-02-28T00:00:00Z", "EndTime": "2026-03-03T00:00:00Z", "MaxJobs": 20}
ADDRESS = "/reports?range=custom&from=2026-02-28&to=2026-03-02"


def report(api: httpx.Client, **changes: object) -> dict[str, Any]:
    answer = api.get("/reports", params={**WEEK, **changes})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def money(usd: float | None) -> str:
    return "–" if usd is None else f"${usd:,.0f}" if usd >= 1000 else f"${usd:,.2f}"


def ratio(value: float) -> str:
    return "100 %" if value >= 1 else f"{min(99.9, round(value * 1000) / 10):.1f} %"


def figure(page: Page, name: str) -> Locator:
    return page.locator(f'[data-figure="{name}"]')


def test_a_report_shows_the_figures_of_the_api(desk: Page, api: httpx.Client) -> None:
    expected = report(api)
    total = expected["Total"]
    assert total["Failures"]["Count"] > 0
    assert total["CostUsd"] > 0
    assert total["SpareCostUsd"] > 0
    desk.goto(ADDRESS)
    expect(figure(desk, "report-ettr")).to_contain_text(ratio(total["EttrRatio"]))
    expect(figure(desk, "report-cost")).to_contain_text(money(total["CostUsd"]))
    expect(figure(desk, "report-failure-cost")).to_contain_text(money(total["Failures"]["CostUsd"]))
    expect(figure(desk, "report-spare-cost")).to_contain_text(money(total["SpareCostUsd"]))
    expect(figure(desk, "report-mttf")).to_contain_text(f"{total['Failures']['Count']} failure")
    steps = total["Failures"]["RecomputedSteps"] + total["PlannedStops"]["RecomputedSteps"]
    expect(figure(desk, "report-recomputed-steps")).to_contain_text(f"{steps:,}")
    expect(figure(desk, "verdict")).to_contain_text(ratio(total["EttrRatio"]))
    for job in expected["Jobs"]:
        row = desk.locator(f'tr[data-row="{job["RunId"]}"]')
        expect(row.locator('[data-name="Job"]')).to_have_text(job["TrainingJobName"])
        expect(row.locator('[data-name="Cost"]')).to_have_text(money(job["Figures"].get("CostUsd")))
    for cause in expected["Causes"]:
        row = desk.locator(f'tr[data-row="{cause["Cause"]}"]')
        expect(row.locator('[data-name="Incidents"]')).to_have_text(str(cause["Incidents"]["Count"]))
    for chart in ("ETTR", "Cost", "Mean time to failure", "Mean time to recovery"):
        expect(
            desk.get_by_role("img", name=re.compile(f"^{chart} in {len(expected['Buckets'])} buckets"))
        ).to_be_visible()


def test_the_csv_of_the_page_equals_the_csv_of_the_command_line(desk: Page, api: httpx.Client) -> None:
    desk.goto(ADDRESS)
    expected = report(api)
    for kind in (RowKind.BUCKETS, RowKind.JOBS, RowKind.CAUSES):
        with desk.expect_download() as downloaded:
            desk.get_by_role("button", name=f"Download {kind.value} as CSV").click()
        text = downloaded.value.path().read_bytes().decode()
        assert downloaded.value.suggested_filename == f"everstep-{kind.value}-2026-02-28-2026-03-02.csv"
        found, wanted = (list(csv.reader(each.splitlines())) for each in (text, as_csv(rows(timed(expected), kind))))
        assert found[0] == wanted[0]
        assert [[number(cell) for cell in row] for row in found] == [[number(cell) for cell in row] for row in wanted]


def timed(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a report whose times are datetimes, as the client returns them."""

    def at(seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, UTC)

    buckets = [
        {**bucket, "StartTime": at(bucket["StartTime"]), "EndTime": at(bucket["EndTime"])}
        for bucket in answer["Buckets"]
    ]
    return {**answer, "Buckets": buckets}


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def test_range_and_filters_are_in_the_address(desk: Page, api: httpx.Client) -> None:
    desk.goto("/reports")
    expect(desk.get_by_role("radio", name="7 days")).to_be_checked()
    desk.get_by_text("24 h", exact=True).click()
    expect(desk).to_have_url(re.compile(r"/reports\?range=24h$"))
    desk.get_by_label("Length of a bucket").select_option("Hour")
    desk.get_by_label("Fleet", exact=True).select_option("main")
    expect(desk).to_have_url(re.compile(r"range=24h&period=Hour&fleet=main$"))
    expect(desk.get_by_role("img", name=re.compile("^ETTR in 2[45] buckets"))).to_be_visible()
    desk.reload()
    expect(desk.get_by_role("radio", name="24 h")).to_be_checked()
    expect(desk.get_by_label("Length of a bucket")).to_have_value("Hour")
    desk.goto("/reports?range=custom&from=2025-01-01&to=2025-01-02")
    expect(desk.get_by_role("heading", name="Nothing ran in this time range")).to_be_visible()


def test_the_overview_shows_the_figures_of_today(desk: Page, api: httpx.Client) -> None:
    desk.goto("/")
    now = desk.request.get("/v1/session").json()["Time"]
    total = report(api, StartTime=now // 86400 * 86400, EndTime=now)["Total"]
    expect(figure(desk, "today-ettr")).to_contain_text(ratio(total["EttrRatio"]))
    expect(figure(desk, "today-cost")).to_contain_text(money(total["CostUsd"]))
    expect(figure(desk, "today-spares")).to_contain_text(money(total["SpareCostUsd"]))
    expect(figure(desk, "today-failures")).to_contain_text(str(total["Failures"]["Count"]))


@pytest.fixture
def stored(seeded: Seeded) -> Served:
    """Store output files of two generations for one job of the seeded fleet, and return the fleet's server."""
    run = seeded.world.job(seeded.story.gpu).run_id
    for path, body in {
        "gen=1/rank=0/model.safetensors": b"old",
        "gen=2/rank=0/model.safetensors": b"newest weights",
        "gen=2/rank=1/a report.html": b"<p>figures</p>",
    }.items():
        key = f"jobs/{seeded.story.gpu}/run={run}/output/{path}"
        seeded.world.objects.put(ObjectReference(bucket=BUCKET, key=key), body)
    return seeded


def test_outputs_are_listed_by_generation_and_downloaded(browser: Browser, stored: Seeded) -> None:
    with signed_in(browser, stored, Role.VIEWER) as page:
        page.goto(f"/jobs/{stored.story.gpu}/outputs")
        expect(page.get_by_role("heading", level=2)).to_have_text([re.compile("Generation 2.*newest"), "Generation 1"])
        expect(page.get_by_role("status").get_by_text("3 files, 31 B")).to_be_visible()
        with page.expect_download() as downloaded:
            page.get_by_role("link", name="Download rank=0/model.safetensors").first.click()
        assert downloaded.value.path().read_bytes() == b"newest weights"
        assert downloaded.value.suggested_filename == "model.safetensors"
        with page.expect_download() as downloaded:
            page.get_by_role("link", name="Download rank=1/a report.html").click()
        assert downloaded.value.suggested_filename == "a report.html"
        page.get_by_label("Filter by path").fill("REPORT")
        expect(page.get_by_role("heading", level=2)).to_have_count(1)
        expect(page).to_have_url(re.compile(r"outputs\?q=REPORT$"))
        page.goto(f"/jobs/{stored.story.calm}/outputs")
        expect(page.get_by_role("heading", name="This job has no outputs")).to_be_visible()
