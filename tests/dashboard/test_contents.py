"""Content of the pages in Chromium, compared with the API: tabs, lists, charts, and empty pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, expect

from tests.dashboard.browsing import PHONE, open_job, sentence, signed_in
from tests.dashboard.service import Seeded, Served
from tests.dashboard.test_accessibility import is_clean
from tests.sim.world import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def rows(place: Page | Locator) -> Locator:
    return place.locator("tbody tr")


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(path, params=query)
    assert answer.is_success, answer.text
    return answer.json()


def test_the_queue_says_why_a_job_waits_who_is_ahead_and_what_would_free_it(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = "waits-behind"
    seeded.story.queue(name)
    desk.goto("/queue")
    row = rows(desk).filter(has=desk.locator("td:nth-child(2)", has_text=name)).first
    job = get(api, f"/training-jobs/{name}")
    assert job["QueuedBehind"]
    expect(row.locator("td").first).to_have_text(str(job["QueuePosition"]))
    expect(row).to_contain_text(sentence(job["Reason"]))
    for ahead in job["QueuedBehind"]:
        expect(row.locator("[data-name='Jobs ahead']")).to_contain_text(ahead)
    expect(row.locator("ul.plain li").first).to_be_visible()


def test_protection_tells_of_every_copy_and_of_what_losses_would_do(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.calm
    open_job(desk, name, "/protection")
    told = get(api, f"/training-jobs/{name}/protection")
    shards = told["Shards"]
    copies = rows(desk.get_by_role("region", name="All copies"))
    expect(copies).to_have_count(sum(len(shard["Holders"]) for shard in shards))
    holder = next(each for each in shards[0]["Holders"] if each["NodeId"] == shards[0]["OwnerNodeId"])
    own = copies.filter(has_text=holder["NodeId"]).filter(
        has=desk.locator("td:first-child", has_text=re.compile(f"^{shards[0]['Rank']}$"))
    )
    expect(own).to_contain_text(f"{holder['VerifiedStep']:,}")
    verified = datetime.fromtimestamp(holder["VerifiedTime"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    expect(own.locator("time")).to_have_attribute("title", verified)
    losses = rows(desk.get_by_role("region", name="Losses at the same time"))
    expect(losses).to_have_count(len(told["RecoveryOdds"]) + len(told["DomainOdds"]))
    for number, odds in enumerate(told["RecoveryOdds"]):
        expect(losses.nth(number)).to_contain_text(f"any {odds['LostNodes']} node")
        expect(losses.nth(number)).to_contain_text({1: "always", 0: "never"}.get(odds["Probability"], "of the cases"))
    expect(desk.get_by_role("group", name=f"Holders of {len(shards)} shards")).to_be_visible()


@pytest.mark.parametrize("tab", ["metrics", "logs", "protection", "checkpoints", "events", "spec"])
def test_the_content_of_a_tab_begins_on_the_upper_third_of_the_screen(desk: Page, seeded: Seeded, tab: str) -> None:
    """A strip of one line with the job's status is above the tabs, and the first chart or table begins above y=300."""
    open_job(desk, seeded.story.gpu, f"/{tab}")
    strip = desk.get_by_role("group", name="Status of this job")
    expect(strip).to_contain_text("Training")
    box = strip.bounding_box()
    assert box is not None
    assert box["height"] <= 48
    first = desk.locator("main").locator("canvas, table, pre, dl.facts, [role=log]").first
    expect(first).to_be_visible()
    content = first.bounding_box()
    assert content is not None
    assert content["y"] < 300, f"the first chart or table of {tab} begins at y={content['y']}"
    desk.mouse.wheel(0, 2_000)
    expect(strip).to_be_in_viewport()


def test_the_status_of_a_job_stays_in_view_on_a_phone(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded, size=PHONE) as page:
        open_job(page, seeded.story.gpu, "/metrics")
        expect(page.locator("main canvas").first).to_be_visible()
        strip = page.get_by_role("group", name="Status of this job")
        page.mouse.move(PHONE[0] / 2, PHONE[1] / 2)
        page.mouse.wheel(0, 1_000)
        expect(page.get_by_role("navigation", name="Sections of this job")).not_to_be_in_viewport()
        bar, box = page.locator("header.sidebar").bounding_box(), strip.bounding_box()
        assert bar is not None
        assert box is not None
        assert box["y"] == bar["y"] + bar["height"] == 88


def test_checkpoints_and_where_the_time_went_are_those_of_the_api(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/checkpoints")
    listed = get(api, f"/training-jobs/{name}/checkpoints")["Checkpoints"]
    expect(rows(desk)).to_have_count(len(listed))
    expect(rows(desk).first).to_contain_text(f"{listed[0]['Step']:,}")
    expect(rows(desk).first).to_contain_text(listed[0]["S3Uri"])
    over = seeded.story.finished
    open_job(desk, over)
    card = desk.locator("section.card", has=desk.get_by_role("heading", name="Where the time went"))
    spent = get(api, f"/training-jobs/{over}")["AccountingSeconds"]
    for bucket, seconds in spent.items():
        if seconds:
            expect(card.locator("li", has_text=re.compile(f"^{bucket}", re.IGNORECASE))).to_have_count(1)
    wall = get(api, f"/training-jobs/{over}")
    minutes = round((wall["TrainingEndTime"] - wall["CreationTime"]) // 60)
    expect(card).to_contain_text(f"Together {minutes} min")


def test_fleets_are_listed_with_what_they_have_and_cost(desk: Page, api: httpx.Client) -> None:
    (fleet,) = get(api, "/fleets")["Fleets"]
    desk.goto("/fleets")
    row = rows(desk).first
    expect(row).to_contain_text(f"{fleet['ConnectedNodeCount']} / {fleet['NodeCount']} / {fleet['DesiredNodeCount']}")
    expect(row).to_contain_text(f"${fleet['PriceUsdPerHour'] * fleet['NodeCount']:.2f}/h")
    row.get_by_role("link").click()
    expect(desk.get_by_role("heading", level=1)).to_contain_text(fleet["FleetName"])


def test_a_job_says_how_far_it_is_what_is_left_and_what_it_costs(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = seeded.story.partition
    open_job(desk, name)
    job = get(api, f"/training-jobs/{name}")
    facts = desk.locator("dl.facts").first
    expect(facts).to_contain_text(f"of {job['TargetStep']:,}")
    expect(facts).to_contain_text(f"${job['CostUsd']:,.2f}")
    expect(facts).to_contain_text(f"{job['HealthyNodeCount']} of {job['NodeCount']}")
    left = facts.locator("div", has_text="Time remaining").locator("dd")
    hours = int(job["EstimatedRemainingSeconds"] // 3600)
    expect(left).to_contain_text(re.compile(rf"^({hours}|{hours + 1}) h|^\d+ d"))
    desk.goto("/jobs")
    row = rows(desk).filter(has=desk.get_by_role("link", name=name, exact=True)).first
    expect(row).to_contain_text(f"of {job['TargetStep']:,}")
    expect(row).to_contain_text(f"{job['HealthyNodeCount']} of {job['NodeCount']}")


def test_a_request_is_the_same_as_yaml_on_the_command_line_in_python_and_for_curl(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.gpu
    job = get(api, f"/training-jobs/{name}")
    open_job(desk, name, "/spec")
    shown = desk.locator(".command pre").first
    asked = yaml.safe_load(shown.inner_text())
    assert (asked["NodeCount"], asked["HyperParameters"], asked["Source"]) == (
        job["NodeCount"],
        job["HyperParameters"],
        job["Source"],
    )
    for form, begin in (
        ("CLI", "aws everstep create-training-job"),
        ("Python", "import everstep"),
        ("curl", "curl --fail-with-body -X POST"),
    ):
        desk.get_by_text(form, exact=True).click()
        expect(shown).to_contain_text(begin)
        text = shown.inner_text()
        assert all(value in text for value in (job["Source"]["SourceId"], *job["HyperParameters"].values()))
        if form != "Python":
            assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == asked


def test_form_and_yaml_follow_each_other(desk: Page) -> None:
    desk.goto("/submit")
    text = desk.get_by_label("YAML", exact=True)
    desk.get_by_label(re.compile("^Name")).fill("both-ways")
    desk.get_by_label("Nodes").fill("7")
    expect(text).to_have_value(re.compile("TrainingJobName: both-ways"))
    expect(text).to_have_value(re.compile("NodeCount: 7"))
    text.fill("TrainingJobName: from-yaml\nNodeCount: 3\nHyperParameters:\n  steps: '200'\n")
    expect(desk.get_by_label(re.compile("^Name"))).to_have_value("from-yaml")
    expect(desk.get_by_label("Nodes")).to_have_value("3")
    expect(desk.get_by_label("Hyperparameters")).to_have_value("steps=200")
    text.fill("- no fields")
    expect(desk.get_by_text("The YAML is not a job")).to_be_visible()
    expect(desk.get_by_label(re.compile("^Name"))).to_have_value("from-yaml")  # the form keeps the last valid value


def test_a_phase_on_the_timeline_leads_to_its_incident(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = seeded.story.gpu
    open_job(desk, name)
    chart = desk.locator("svg.timeline")
    worked = {node["NodeId"] for node in get(api, f"/training-jobs/{name}/nodes")["Nodes"]}
    expect(chart.locator("text.lane")).to_have_count(len(worked) + 1)
    incident = get(api, "/incidents", TrainingJobName=name, SortOrder="Descending", MaxResults=1)["Incidents"][0]
    # Dispatch the event directly: a mouse click could miss the chart, which may still move on the page.
    chart.get_by_role("link", name=re.compile("^Fault: ")).last.dispatch_event("click")
    expect(desk).to_have_url(re.compile(f"/incidents/{incident['IncidentId']}$"))


def metric_results(api: httpx.Client, name: str) -> list[dict[str, Any]]:
    """Return the metrics of a job as the Metrics tab receives them."""
    found: list[dict[str, Any]] = get(api, f"/training-jobs/{name}/metric-data", MaxPoints=1000)["MetricDataResults"]
    return found


def drag(page: Page, chart: Locator, start: float, end: float) -> None:
    """Drag across a plot, between two shares of its width."""
    over = chart.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * start, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, box["y"] + 50, steps=5)
    page.mouse.up()
    page.mouse.move(0, 0)


def test_metrics_are_grouped_and_the_nodes_that_stand_out_are_links(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/metrics")
    results = metric_results(api, name)
    expect(desk.locator(".chart")).to_have_count(len(results))
    for group, prefix in (("Logged by the script", ""), ("Steps and protection", "everstep/"), ("Nodes", "everstep/")):
        charts = desk.get_by_role("region", name=group).locator(".chart")
        expect(charts.first).to_be_visible()
        assert charts.count() <= len([each for each in results if each["MetricName"].startswith(prefix)])
    (idle,) = (each for each in results if each["MetricName"] == "everstep/gpu_least_percent")
    stands_out = (
        desk.get_by_role("region", name="Least utilized GPU of a node").locator(".extremes").get_by_role("link")
    )
    expect(stands_out).to_have_text([idle["MinimumNodeIds"][-1], idle["MaximumNodeIds"][-1]])


def test_a_chart_has_a_line_per_node_that_the_cursor_names(browser: Browser, seeded: Seeded, api: httpx.Client) -> None:
    """A chart shows one line per node after Enter on its button, and the cursor names the node of the nearest line.

    The address keeps the choice of lines per node. The page is that of a phone in dark mode, and has no overflow.
    """
    name, metric, title = seeded.story.gpu, "everstep/gpu_least_percent", "Least utilized GPU of a node"
    asked = {"MetricName": metric, "Series": "Node", "MaxPoints": 400}
    (result,) = get(api, f"/training-jobs/{name}/metric-data", **asked)["MetricDataResults"]
    node_ids = [each["NodeId"] for each in result["Series"]]
    assert len(node_ids) >= 4
    with signed_in(browser, seeded, size=PHONE, scheme="dark") as page:
        open_job(page, name, "/metrics")
        chart = page.get_by_role("region", name=title)
        expect(chart.locator(".extremes")).to_be_visible()
        whole = picture(chart)
        toggle = chart.get_by_role("button", name=f"Per node: {title}")
        toggle.focus()
        page.keyboard.press("Enter")
        expect(toggle).to_have_attribute("aria-pressed", "true")
        expect(page).to_have_url(re.compile("split=everstep%2Fgpu_least_percent"))
        next_picture(page, chart, whole)
        is_clean(page)
        legend = chart.get_by_role("list", name=f"Lines of {title} that stand out").get_by_role("link")
        assert sorted(legend.all_inner_texts()) == node_ids
        newest = {each["NodeId"]: each["Values"][-1] for each in result["Series"] if each["Values"][-1] != "NaN"}
        lowest = min(newest, key=newest.__getitem__)
        over = chart.locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        over.hover(position={"x": box["width"] - 2, "y": box["height"] - 2})
        expect(chart.locator(".readout[data-cursor] .who")).to_have_text(lowest)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.reload()
        expect(legend).to_have_count(len(node_ids))
        toggle.click()
        expect(chart.locator(".extremes")).to_be_visible()
        assert "split=" not in page.url


def test_a_chart_of_the_script_has_a_line_per_rank(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = seeded.story.gpu
    (result,) = get(api, f"/training-jobs/{name}/metric-data", MetricName="loss", Series="Rank")["MetricDataResults"]
    newest = {each["Rank"]: each["Values"][-1] for each in result["Series"]}
    assert sorted(newest) == list(range(8))
    open_job(desk, name, "/metrics")
    chart = desk.get_by_role("region", name="loss", exact=True)
    chart.get_by_role("button", name="Per rank: loss").click()
    legend = chart.get_by_role("list", name="Lines of loss that stand out")
    for rank in (min(newest, key=newest.__getitem__), max(newest, key=newest.__getitem__)):
        expect(legend.get_by_role("listitem").filter(has_text=f"rank {rank}")).to_have_count(1)
    over = chart.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    over.hover(position={"x": box["width"] - 2, "y": box["height"] - 2})
    expect(chart.locator(".readout[data-cursor] .who")).to_have_text(re.compile(r"^rank \d$"))


def test_charts_share_the_cursor_and_do_not_move_while_it_moves(desk: Page, seeded: Seeded) -> None:
    open_job(desk, seeded.story.gpu, "/metrics")
    first, second = desk.locator(".chart").nth(0), desk.locator(".chart").nth(1)
    newest = first.locator(".readout").inner_text()
    over = first.locator(".u-over")
    over.scroll_into_view_if_needed()
    before = second.bounding_box()
    over.hover(position={"x": 60, "y": 60})
    expect(first.locator(".readout[data-cursor]")).to_be_visible()
    at = first.locator(".readout").get_attribute("data-cursor")
    expect(second.locator(".readout")).to_have_attribute("data-cursor", at or "")
    assert first.locator(".readout").inner_text() != newest
    over.hover(position={"x": 160, "y": 60})
    assert second.bounding_box() == before
    desk.mouse.move(0, 0)
    expect(first.locator(".readout")).to_have_text(newest.replace("\n", ""))


def test_the_address_names_axis_zoom_smoothing_and_scale(desk: Page, seeded: Seeded) -> None:
    open_job(desk, seeded.story.gpu, "/metrics")
    loss = desk.get_by_role("region", name="loss", exact=True)
    reset = desk.get_by_role("button", name="Reset zoom")
    expect(reset).to_be_disabled()
    whole = picture(loss)
    drag(desk, loss, 0.2, 0.4)
    expect(reset).to_be_enabled()
    expect(desk).to_have_url(re.compile(r"from=\d+&to=\d+"))
    zoomed = next_picture(desk, loss, whole)
    desk.get_by_label("Smoothing").select_option("0.9")
    desk.get_by_label("Log scale").click()  # not `check`: the box changes only after the address does
    expect(desk).to_have_url(re.compile(r"smooth=0\.9.*log=1"))
    next_picture(desk, loss, zoomed)
    desk.reload()
    expect(desk.get_by_label("Log scale")).to_be_checked()
    expect(reset).to_be_enabled()
    loss.locator(".u-over").dblclick()
    expect(reset).to_be_disabled()
    assert "from=" not in desk.url
    desk.get_by_text("Time", exact=True).click()
    expect(loss.get_by_role("img")).to_have_accessible_name(re.compile("times"))
    assert "axis=wall" in desk.url
    desk.get_by_label("Range").select_option("900")
    expect(desk).to_have_url(re.compile("last=900"))


def picture(chart: Locator) -> str:
    """Return what the canvas of a chart shows now, as a data URL."""
    shown: str = chart.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    return shown


def next_picture(page: Page, chart: Locator, earlier: str) -> str:
    """Wait until a chart shows another picture than `earlier`, and return it.

    The chart draws after the address has changed, and replaces its canvas.
    """
    changed = "([chart, earlier]) => (chart.querySelector('canvas')?.toDataURL() ?? earlier) !== earlier"
    page.wait_for_function(changed, arg=[chart.element_handle(), earlier])
    return picture(chart)


def test_failures_are_numbered_marks_that_lead_to_their_incident(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/metrics")
    incident = get(api, "/incidents", TrainingJobName=name)["Incidents"][0]
    mark = desk.locator(".chart").first.get_by_role("link", name=re.compile("^Failure 1: "))
    box = mark.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) >= 24
    expect(desk.get_by_role("list", name="Failures in these charts").get_by_role("link").first).to_be_visible()
    mark.click()
    expect(desk).to_have_url(re.compile(f"/incidents/{incident['IncidentId']}$"))


def test_a_chart_is_pinned_maximised_and_read_as_a_table(desk: Page, seeded: Seeded, api: httpx.Client) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/metrics")
    charts = desk.locator(".chart")
    count = len(metric_results(api, name))
    title = "Network traffic, per node"
    desk.get_by_role("button", name=f"Pin {title}").click()
    expect(charts.first).to_have_accessible_name(title)
    expect(desk.get_by_role("region", name="Pinned").locator(".chart")).to_have_count(1)
    desk.get_by_role("button", name=f"Maximise {title}").click()
    expect(charts).to_have_count(1)
    assert "chart=everstep" in desk.url
    desk.get_by_role("button", name=f"Values of {title} as a table").click()
    expect(desk.get_by_role("region", name=f"Values of {title} as a table").locator("tbody tr")).to_have_count(20)
    desk.keyboard.press("Escape")
    expect(charts).to_have_count(count)
    desk.get_by_role("button", name=f"Unpin {title}").click()
    expect(desk.get_by_role("region", name="Pinned")).to_have_count(0)


def test_runs_are_compared_with_the_settings_in_which_they_differ(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name, other = seeded.story.gpu, seeded.story.finished
    open_job(desk, name, "/metrics")
    desk.get_by_label("Compare with a job").select_option(other)
    expect(desk).to_have_url(re.compile(f"with={other}"))
    loss = desk.get_by_role("region", name="loss", exact=True)
    expect(loss.locator(".readout")).to_contain_text(other)
    table = desk.get_by_role("region", name="Differences between the jobs").locator("table")
    rates = [get(api, f"/training-jobs/{each}")["HyperParameters"]["learning_rate"] for each in (name, other)]
    row = table.get_by_role("row", name=re.compile("^learning_rate"))
    expect(row.get_by_role("cell")).to_have_text(["learning_rate", *rates])
    desk.get_by_role("button", name=f"Remove {other} from the comparison").click()
    expect(table).to_have_count(0)


@pytest.fixture(scope="module")
def nothing(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server with an empty database."""
    directory = tmp_path_factory.mktemp("nothing")
    with Served(directory, World(directory)) as made:
        made.serve()
        yield made


def test_what_is_empty_says_so_and_names_the_first_command(browser: Browser, nothing: Served) -> None:
    with signed_in(browser, nothing) as page:
        for path, title, command in (
            ("/jobs", "No job yet", "everstep jobs submit"),
            ("/queue", "The queue is empty", "everstep jobs list"),
            ("/incidents", "No incident yet", "everstep incidents list"),
        ):
            page.goto(path)
            expect(page.get_by_text(title)).to_be_visible()
            expect(page.locator(".command")).to_contain_text(command)


def test_an_error_has_its_code_its_request_and_another_try(browser: Browser, seeded: Seeded) -> None:
    with signed_in(browser, seeded, refusals=("status of 404", "status of 500")) as page:
        page.goto("/jobs/nobody-has-this-name")
        problem = page.get_by_role("alert")
        expect(problem).to_contain_text("ResourceNotFoundException")
        expect(problem).to_contain_text(re.compile("request [0-9a-f-]{8,}"))
        answer = {"Code": "InternalServerError", "Message": "Something broke.", "RequestId": "r-1"}
        page.route("**/v1/incidents?*SortOrder*", lambda route: route.fulfill(status=500, json=answer))
        page.goto("/incidents")
        expect(problem).to_contain_text("Something broke.")
        expect(problem).to_contain_text("request r-1")
        page.unroute("**/v1/incidents?*SortOrder*")
        page.get_by_role("button", name="Try again").click()
        expect(rows(page).first).to_be_visible()
