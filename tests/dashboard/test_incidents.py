"""The five recorded incidents, each on one screen of Chromium.

Names, times and numbers depend on a fresh seed, so the tests read the expected content from the API.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import DESKTOP, open_job, sentence, signed_in
from tests.dashboard.conftest import client_of
from tests.dashboard.record import STORIES
from tests.dashboard.service import Replayed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def desk(browser: Browser, replayed: Replayed) -> Iterator[Page]:
    # Print the command that serves the same data. pytest shows it if a test fails.
    sys.stdout.write(f"python -m tests.dashboard --recorded --seed {replayed.seed}\n")
    with signed_in(browser, replayed) as page:
        yield page


@pytest.fixture(scope="module")
def api(replayed: Replayed) -> Iterator[httpx.Client]:
    with client_of(replayed) as client:
        yield client


@pytest.mark.parametrize("story", STORIES)
def test_one_screen_tells_what_failed_when_why_what_was_done_what_was_lost_and_whether_to_act(
    desk: Page, replayed: Replayed, api: httpx.Client, story: str
) -> None:
    name = replayed.jobs[story]
    open_job(desk, name)
    job = api.get(f"/training-jobs/{name}").json()
    incident = api.get("/incidents", params={"TrainingJobName": name}).json()["Incidents"][-1]
    card = desk.locator("section", has_text="What failed, when and why").last
    expect(card).to_be_visible()
    act = desk.locator("section.act")
    expect(card).to_contain_text(datetime.fromtimestamp(incident["FailedAt"], UTC).strftime("%H:%M:%S UTC"))
    for evidence in incident["Evidence"][:3]:
        expect(card).to_contain_text(sentence(evidence))
    expect(card).to_contain_text(sentence(incident["Decision"]))
    is_open = "ClosedAt" not in incident
    lost = incident.get("LostSteps")
    # the page of a failed job compares its lost steps with the last checkpoint instead
    if job["TrainingJobStatus"] == "Failed":
        kept = api.get(f"/training-jobs/{name}/protection").json()["LastCheckpoint"]["Step"]
        lost = job["MaxBoundary"] - kept
        expect(card).to_contain_text(
            f"It had reached step {job['MaxBoundary']:,}, and the checkpoint of step {kept:,} is what is left"
        )
        expect(desk.locator(".fold")).to_contain_text(f"Only step {kept:,}, in S3")
    unknown = "Not known yet" if is_open else "What no checkpoint has"
    expect(card).to_contain_text({None: unknown, 0: "No step"}.get(lost, f"{lost} step"))
    told = expect(card)
    (told.to_contain_text if is_open else told.not_to_contain_text)("No: ")
    if job["TrainingJobStatus"] == "Failed":
        expect(act).to_contain_text("Yes")
        expect(desk.locator(".fold")).to_contain_text(sentence(job["FailureReason"]))
        # The page shows the last line of the reason: the script's exception.
        expect(card).to_contain_text(job["FailureReason"].splitlines()[-1])
    else:
        expect(act).to_contain_text("No")
    lanes = desk.locator("svg.timeline > g")
    assert incident["FaultedInstanceIds"]
    for node in incident["FaultedInstanceIds"]:
        lane = lanes.filter(has=desk.locator("text.lane", has_text=node))
        expect(lane.locator(f"a[href='/incidents/{incident['IncidentId']}']")).to_have_count(1)
    # A waiting job shows the reason with AWS's message, and the time of the next attempt.
    if is_open and job["SecondaryStatus"] != "Training":
        waits = desk.locator("section", has_text="What it waits for").last
        waits_for, _, rest = job["Reason"].partition(": ")
        said, _, again = rest.partition("; Everstep retries at ")
        assert again
        for part in (sentence(waits_for), f"AWS says: “{said}", "asks again in ", f"({again})"):
            expect(waits).to_contain_text(part)
    box = card.bounding_box()
    assert box is not None
    # Check the size last, because the card of the incident grows until all its content is loaded.
    assert box["y"] + box["height"] <= DESKTOP[1], "not on the first screen"
