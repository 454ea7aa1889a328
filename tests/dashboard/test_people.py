"""Tasks of people on the dashboard in Chromium: each result is compared with the API."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from control_plane.db import metrics
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from tests.dashboard.browsing import confirm, open_job, sign_in, signed_in, watched
from tests.dashboard.seeded import FINE_SECONDS
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_a_held_node_is_told_and_released_and_another_one_is_to_be_drained_and_called_off(
    desk: Page, api: httpx.Client
) -> None:
    nodes = api.get("/nodes", params={"FleetName": "main"}).json()["Nodes"]
    held = next(node for node in nodes if node["NodeStatus"] == "held")
    desk.goto("/fleets/main")
    attention = desk.locator("section", has=desk.get_by_role("heading", name="Needs attention"))
    expect(attention).to_contain_text(held["NodeId"])
    busy = next(node for node in nodes if node["NodeStatus"] == "assigned" and "Exposure" not in node)["NodeId"]
    desk.get_by_role("button", name=f"Act on {busy}").click()
    dialog = desk.get_by_role("dialog")
    expect(dialog.get_by_role("radio")).to_have_count(3)
    expect(dialog.get_by_label("Drain")).to_be_checked()  # the dialog proposes the action that loses no step
    dialog.get_by_label("Replace").check()
    dialog.get_by_label("Reason").fill("it is loud")
    confirm(desk, busy, "Replace")
    expect(attention).to_contain_text(busy)
    asked = api.get(f"/nodes/{busy}").json()
    assert asked["Request"] == "replace"
    assert "it is loud" in asked["RequestReason"]
    desk.get_by_role("button", name=f"Act on {busy}").click()
    confirm(desk, busy, "Cancel request")
    expect(attention).not_to_contain_text(busy)
    assert "Request" not in api.get(f"/nodes/{busy}").json()


def test_what_the_service_refuses_is_said_where_it_was_asked(
    browser: Browser, seeded: Seeded, api: httpx.Client
) -> None:
    """The server rejects a job's plan, and the page shows the reason beside the form.

    The browser logs the rejected request, which the test allows.
    """
    with signed_in(browser, seeded, refusals=("status of 409", "status of 400")) as page:
        open_job(page, seeded.story.gpu, "/spec")
        page.goto("/submit")
        page.get_by_label(re.compile("^Name")).fill("not ok!")
        # The page checks the name before it sends a request.
        expect(page.get_by_text("must be 1 to 63 letters, digits and single hyphens")).to_be_visible()
        page.get_by_label(re.compile("^Name")).fill("fine")
        expect(page.get_by_text("must be 1 to 63 letters, digits and single hyphens")).to_be_hidden()
        page.get_by_label("Source").fill("0" * 64)
        page.get_by_role("button", name="Show the plan").click()
        refusal = page.get_by_role("alert").first
        expect(refusal).to_contain_text("The job was not submitted")
        expect(refusal).to_contain_text("Code")


def test_a_plan_says_what_would_become_of_a_job(desk: Page, api: httpx.Client) -> None:
    source = upload(api)
    desk.goto("/submit")
    desk.get_by_label(re.compile("^Name")).fill("a-plan")
    desk.get_by_label("Source").fill(source)
    desk.get_by_label("Nodes").fill("3")
    request = {
        "TrainingJobName": "a-plan",
        "Source": {"SourceId": source},
        "EntryPoint": "train.py",
        "NodeCount": 3,
        "Protection": {"Copies": 2},
        "DryRun": True,
    }
    with desk.expect_response(lambda answer: answer.request.method == "POST" and answer.url.endswith("/training-jobs")):
        desk.get_by_role("button", name="Show the plan").click()
    plan = api.post("/training-jobs", json=request).json()["Plan"]
    card = desk.get_by_role("region", name="The plan")
    queued = f"number {plan['QueuePosition']} in the queue" if "QueuePosition" in plan else "would wait for nodes"
    expect(card).to_contain_text("The job would start now" if plan["CanStartNow"] else queued)
    expect(card).to_contain_text(f"${plan['CostUsdPerHour']:,.2f}/h")
    for name in plan["QueuedBehind"]:
        expect(card).to_contain_text(name)
    desk.get_by_label("Nodes").fill("2")
    expect(card).to_be_hidden()  # the page hides the plan, because the request has changed


def test_a_drill_is_started_with_the_jobs_name_and_its_history_tells_the_rest(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.partition
    seeded.run(seeded.story.settle(name))
    desk.goto("/drills")
    desk.get_by_label("Job").select_option(name)
    desk.get_by_label("Fault").select_option("kill-rank")
    desk.get_by_role("button", name="Start the drill").click()
    confirm(desk, name, "Start")
    expect(desk.get_by_text(f"The drill on {name} is requested.")).to_be_visible()
    row = desk.locator("tbody tr").first
    expect(row).to_contain_text(name)
    seeded.run(seeded.story.go(20 * FINE_SECONDS, FINE_SECONDS))
    seeded.run(seeded.story.settle(name))
    (drill,) = api.get("/drills").json()["Drills"]
    assert drill["DrillStatus"] == "recovered", drill
    expect(row).to_contain_text("recovered")
    expect(desk.get_by_label("Fault")).to_have_value("kill-rank")  # the form keeps its values
    expect(desk.get_by_label("Job").locator("option:checked")).to_have_text(name)
    row.get_by_role("link", name="Incident").click()
    expect(desk).to_have_url(re.compile(drill["IncidentId"]))


def test_a_token_is_made_shown_once_used_and_revoked(
    desk: Page, browser: Browser, seeded: Seeded, api: httpx.Client
) -> None:
    desk.goto("/settings")
    desk.get_by_label("Role").select_option("viewer")
    desk.get_by_label("Owner or purpose").fill("the person on call")
    desk.get_by_role("button", name="Create token").click()
    banner = desk.get_by_role("status", name="The new token")
    secret = banner.locator("pre").inner_text().strip()
    (made,) = [each for each in api.get("/tokens").json()["Tokens"] if each["Description"] == "the person on call"]
    assert made["Role"] == "viewer"
    desk.get_by_role("button", name="Done").click()
    expect(desk.get_by_text(secret)).to_have_count(0)
    with watched(browser, seeded.url, refusals=("status of 401",)) as page:
        sign_in(page, secret)
        desk.get_by_role("button", name=f"Revoke {made['TokenId']}").click()
        confirm(desk, made["TokenId"], "Revoke")
        expect(desk.get_by_role("button", name=f"Revoke {made['TokenId']}")).to_have_count(0)
        page.reload()
        expect(page).to_have_url(re.compile("/sign-in"))


def test_a_revision_is_shown_as_what_it_changed(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = "often-revised"
    seeded.story.queue(name)
    before = api.get(f"/training-jobs/{name}").json()["Priority"]
    for priority in (before + 7, before + 9):
        assert api.post(f"/training-jobs/{name}", json={"Priority": priority}).status_code == 200
    open_job(desk, name, "/spec")
    last = desk.get_by_role("region", name="From revision 2 to 3")
    expect(last).to_contain_text(f"− Priority: {before + 7}")
    expect(last).to_contain_text(f"+ Priority: {before + 9}")
    desk.get_by_label("From", exact=True).select_option("1")
    expect(desk.get_by_role("region", name="From revision 1 to 3")).to_contain_text(f"− Priority: {before}")
    assert "from=1" in desk.url
    # the command shows the changed request
    expect(desk.locator(".command pre").first).to_contain_text(f"Priority: {before + 9}")


def test_metrics_are_drawn_with_the_failures_and_saved_as_they_were_logged(
    desk: Page, seeded: Seeded, api: httpx.Client, tmp_path: Path
) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/metrics")
    results = api.get(f"/training-jobs/{name}/metric-data", params={"MaxPoints": 1000}).json()["MetricDataResults"]
    names = sorted(result["MetricName"] for result in results)
    assert names
    expect(desk.locator(".chart canvas")).to_have_count(len(names))
    incident = api.get("/incidents", params={"TrainingJobName": name}).json()["Incidents"][-1]
    expect(desk.get_by_role("list", name="Failures in these charts")).to_contain_text(
        f"step {incident['ReachedStep']:,}"
    )
    with desk.expect_download() as saved:
        desk.get_by_role("button", name="CSV").click()
    saved.value.save_as(tmp_path / "csv")
    head, *rows = (tmp_path / "csv").read_text().splitlines()
    assert head == ",".join(["step", "time", *names])
    finest = max(results, key=lambda result: len(result["LastSteps"]))
    assert [int(row.split(",")[0]) for row in rows] == finest["LastSteps"]


COUNT_SHADED = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
    const near = (at, alpha, ...colour) => data[at + 3] === alpha && colour.every((value, index) => Math.abs(data[at + index] - value) <= 6)
    let count = 0
    for (let at = 0; at < data.length; at += 4) if (near(at, 0x2e, 0x14, 0x56, 0xc4)) count++
    return count
}"""
"""JavaScript that counts the pixels of a chart that show only the shade, not the line.

One point of the chart represents several values. The shade spans the range from the lowest to the highest of them.
"""


def test_a_long_run_shows_its_extremes_and_every_step_of_what_one_zooms_into(desk: Page, seeded: Seeded) -> None:
    name, run = seeded.story.finished, RunId(seeded.world.job(seeded.story.finished).run_id)
    generation = Generation(seeded.world.job(name).generation)
    values = [3.0 * (step % 2) for step in range(3_000)]
    values[100], values[2_000] = 9.0, -9.0
    points = tuple(
        MetricPoint(generation=generation, step=Step(step), at_seconds=1e9 + step, values={"spiky": value})
        for step, value in enumerate(values)
    )
    with seeded.world.database.write() as session:
        metrics.store(session, "of the test", MetricBatch(run=run, first_number=0, points=points))
    open_job(desk, name, "/metrics")
    chart = desk.get_by_role("img", name=re.compile("^spiky over"))
    # The chart's range includes the lowest and the highest value, which no mean over several steps reaches.
    expect(chart).to_have_accessible_name(re.compile(r"from -9 to 9,"))
    assert chart.locator("canvas").evaluate(COUNT_SHADED) > 1_000, "the extremes of the points are shaded"
    count = re.compile(r"over (\d+) steps")

    def drawn() -> int:
        found = count.search(chart.get_attribute("aria-label") or "")
        assert found is not None
        return int(found[1])

    coarse = drawn()
    assert coarse < len(points)
    over = chart.locator(".u-over").bounding_box()
    assert over is not None
    middle = over["y"] + over["height"] / 2
    desk.mouse.move(over["x"] + over["width"] * 0.4, middle)
    desk.mouse.down()
    desk.mouse.move(over["x"] + over["width"] * 0.5, middle, steps=4)
    desk.mouse.up()
    expect(chart).not_to_have_accessible_name(re.compile(f"over {coarse} steps"))
    assert coarse + 100 < drawn() < coarse + 400, "a tenth of 3,000 steps, instead of its joined points"
    chart.locator(".u-over").dblclick()
    expect(chart).to_have_accessible_name(re.compile(f"over {coarse} steps"))


def test_many_jobs_are_paused_and_stopped_at_once_and_the_list_is_in_the_address(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = "stopped-with-others"
    seeded.story.queue(name)
    desk.goto("/jobs")
    pending = len([job for job in jobs(api) if job["SecondaryStatus"] == "Pending"])
    desk.get_by_role("button", name=f"Queued {pending}").click()
    expect(desk.locator("tbody tr")).to_have_count(pending)
    desk.get_by_role("button", name=re.compile("^Job")).click()
    assert "status=Pending" in desk.url
    assert "sort=name" in desk.url
    desk.get_by_label(f"Choose {name}").check()
    desk.get_by_role("button", name="Pause 1 job").click()
    expect(desk.get_by_role("button", name="Pause 1 job")).to_be_hidden()
    assert "PauseRequestedTime" in api.get(f"/training-jobs/{name}").json()
    desk.get_by_role("button", name=re.compile("^All ")).click()
    desk.get_by_label(f"Choose {name}").check()
    desk.get_by_role("button", name="Stop 1 job").click()
    confirm(desk, name, "Stop")
    assert "StopRequestedTime" in api.get(f"/training-jobs/{name}").json()


def upload(api: httpx.Client) -> str:
    """Upload a source with one script and return its id."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        script = tarfile.TarInfo("train.py")
        archive.addfile(script, io.BytesIO())
    source = hashlib.sha256(packed.getvalue()).hexdigest()
    assert api.put(f"/sources/{source}", content=packed.getvalue()).is_success
    return source


def jobs(api: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/training-jobs", params={"MaxResults": 1000}).json()["TrainingJobSummaries"]
    return found
