"""A job's whole life from the dashboard's pages.

Chromium, the control plane and the local cloud are real.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browsing import chromium, confirm, open_job, sign_in, verdict, watched
from tests.e2e.conftest import MACHINE_NETWORK
from tests.e2e.jobs import PATIENCE_SECONDS, SCRIPTS, SHAPES, Job, Workplace, wait_until

pytestmark = pytest.mark.xdist_group(MACHINE_NETWORK)

NAME = "from-the-dashboard"
FIRST, SECOND = "1:6", "1:14"
"""Steps after which all ranks wait.

While the ranks wait at the first step, the test checks the pages. The second step keeps the job from completing before
the test terminates an instance.
"""
PATIENCE_MS = PATIENCE_SECONDS * 1000


@pytest.fixture
def drills(place: Workplace) -> Iterator[None]:
    """Allow drills (faults that a person injects from the dashboard) on the shared fleet during this test."""
    place.client.update_fleet(FleetName="local", AllowDrills=True)
    yield
    place.client.update_fleet(FleetName="local", AllowDrills=False)


def test_a_job_is_submitted_watched_hurt_and_finished_from_its_pages(place: Workplace, drills: None) -> None:
    shape = SHAPES[2]
    gate = place.directory / "gates" / NAME
    gate.mkdir(parents=True)
    for moment in (FIRST, SECOND):
        (gate / f"hold {moment}").touch()
    source = place.client.upload_source(Directory=SCRIPTS)["SourceId"]
    job = Job(place, NAME, shape, {}, gate)
    with chromium() as browser, watched(browser, place.cluster.endpoint_url, is_cut=True) as page:
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)  # the timeouts are long, so that the test passes on a busy machine too
        try:
            sign_in(page, place.cluster.token)
            submit(page, source, gate=str(gate))
            watch(page, job)
            restart(page, place)
            strike(page, job)
            tell(page, place, job)
            stop_another(page, place, source)
        finally:
            expect.set_options(timeout=None)


def submit(page: Page, source: str, **parameters: str) -> None:
    """Fill the form, check the plan, and submit the job."""
    page.goto("/submit")
    page.get_by_label(re.compile("^Name")).fill(NAME)
    page.get_by_label("Source").fill(source)
    settings = {"adapter": "plain", "steps": "18", "pace_seconds": "0.05", **parameters}
    page.get_by_label("Hyperparameters").fill("\n".join(f"{key}={value}" for key, value in settings.items()))
    page.get_by_label("Nodes").fill("2")
    page.get_by_role("button", name="Show the plan").click()
    expect(page.get_by_role("region", name="The plan")).to_contain_text("would start now")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(f"/jobs/{NAME}$"))


def watch(page: Page, job: Job) -> None:
    """Check that the page shows the step at which all ranks wait."""
    job.wait_standing(FIRST)
    step = FIRST.split(":")[1]
    expect(verdict(page)).to_contain_text(f"at step {step}")
    expect(verdict(page)).to_contain_text("Nothing to do.")


def restart(page: Page, place: Workplace) -> None:
    """Kill and restart the control plane.

    The page shows that the server is unreachable, and later that it is back. Its event stream resumes after the last
    event that it received.
    """
    expect(page.get_by_text("Live")).to_be_visible()
    place.cluster.kill_control_plane()
    expect(page.get_by_text("No answer", exact=True)).to_be_visible()
    with page.expect_response(lambda answer: "events/stream" in answer.url and answer.ok) as again:
        place.cluster.restart_control_plane()
    assert int(again.value.request.all_headers()["last-event-id"]) > 0
    expect(page.get_by_text("Live")).to_be_visible()


def strike(page: Page, job: Job) -> None:
    """Terminate an instance of the job from the page of drills, while the job's ranks train."""
    job.place.wait_all_connected(job.describe()["NodeIds"])
    page.goto("/drills")
    page.get_by_label("Job").select_option(NAME)
    page.get_by_label("Fault").select_option("terminate-instance")
    page.get_by_role("button", name="Start the drill").click()
    job.let_go(FIRST)
    confirm(page, NAME, "Start")
    expect(page.locator("tbody tr").first).to_contain_text(re.compile("injected|recovered"))


def tell(page: Page, place: Workplace, job: Job) -> None:
    """Check that the top of the page and the timeline describe the incident, and that the job completes."""
    open_job(page, NAME)
    (drill,) = [each for each in place.client.list_drills()["Drills"] if each["TrainingJobName"] == NAME]
    expect(page.get_by_role("region", name=re.compile("Open incident|Latest incident"))).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("^Fault: "))).to_have_count(1)
    expect(page.get_by_role("main")).to_contain_text("Completed")
    expect(page.get_by_role("region", name="Latest incident")).to_be_visible()
    (incident,) = job.incidents()
    story = page.get_by_role("region", name="Latest incident")
    expect(story).to_contain_text(drill["NodeId"])
    expect(story).to_contain_text(re.compile("Recovered|Job completed"))
    expect(page.get_by_role("link", name=re.compile("^Replace: "))).to_have_count(1)
    for node in incident["ReplacementInstanceIds"]:
        expect(page.locator("svg.timeline")).to_contain_text(node)
    # the script finishes its last step before it ends
    expect(page.locator("dl.facts").first).to_contain_text("18 of 18")
    page.goto(f"/jobs/{NAME}/metrics")
    expect(page.get_by_role("main")).to_contain_text("Time per step")
    page.goto(f"/jobs/{NAME}/logs")
    expect(page.get_by_role("log").locator(".line").first).to_be_visible()
    # the page shows the end of the log once the log is complete
    expect(page.get_by_text("Complete", exact=True)).to_be_visible()
    page.goto("/drills")
    expect(page.locator("tbody tr").first).to_contain_text("recovered")


def stop_another(page: Page, place: Workplace, source: str) -> None:
    """Stop a job from its page."""
    name = "to-be-stopped"
    place.client.create_training_job(
        TrainingJobName=name,
        Source={"SourceId": source},
        EntryPoint="train.py",
        NodeCount=1,
        HyperParameters={"adapter": "plain", "steps": "100000", "pace_seconds": "0.05"},
        Rehearsal={"Mode": "Off"},
    )
    open_job(page, name)
    expect(page.get_by_role("main")).to_contain_text("Training")
    page.get_by_role("button", name="Stop").click()
    confirm(page, name, "Stop")
    wait_until(
        "the job to stop",
        lambda: place.client.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "Stopped",
    )
    expect(page.get_by_role("main")).to_contain_text("Stopped")
