"""The five recorded incidents, each on one screen of Chromium.

Names, times and numbers depend on a fresh seed, so the tests read the expected content from the API.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.dashboard.browsing import DESKTOP, open_job, sentence, signed_in, verdict
from tests.dashboard.conftest import client_of
from tests.dashboard.record import STORIES
from tests.dashboard.service import Replayed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


MAX_WORDS = 82
"""Maximum number of words above the timeline of an incident's page, so that a person reads them in ten seconds."""
_WORDS_OF_ANSWERS = """() => {
  const words = []
  for (const root of document.querySelectorAll('main .head, main .incident')) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
    for (let node = walker.nextNode(); node; node = walker.nextNode())
      if (node.parentElement.checkVisibility()) words.push(...node.textContent.match(/\\S*\\w\\S*/g) ?? [])
  }
  return words
}"""
"""JavaScript that returns the visible words above the timeline of an incident's page: in its head and its cards."""


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
    card = desk.get_by_role("region", name=re.compile("^(Open|Latest) incident$"))
    expect(card).to_be_visible()
    act = desk.get_by_role("region", name="What to do")
    expect(card).to_contain_text(datetime.fromtimestamp(incident["FailedAt"], UTC).strftime("%H:%M:%S UTC"))
    is_open = "ClosedAt" not in incident
    described = api.get(f"/incidents/{incident['IncidentId']}").json()
    _expect_answers(card, described)
    if job["TrainingJobStatus"] == "Failed":
        # the page of a failed job compares its steps with the last checkpoint
        kept = api.get(f"/training-jobs/{name}/protection").json()["LastCheckpoint"]["Step"]
        lost = job["MaxBoundary"] - kept
        expect(card.locator("[data-figure=unsaved-steps]")).to_have_text(f"{lost:,}")
        expect(desk.locator("dl.facts [data-figure=unsaved-steps]")).to_have_text(f"{lost:,}")
        expect(verdict(desk)).to_contain_text(f"{lost} steps after the checkpoint of step {kept:,} are lost")
        expect(card.get_by_role("heading")).to_contain_text("Job failed")
        expect(verdict(desk)).to_contain_text("Act now: ")
        expect(verdict(desk)).to_contain_text(sentence(job["FailureReason"]))
        # The cause names the script's exception, which is the last line of the reason.
        expect(card).to_contain_text(job["FailureReason"].splitlines()[-1].removeprefix("[rank0]: "))
        expect(act.get_by_role("link", name="Submit again…")).to_be_visible()
    else:
        if incident.get("LostSteps"):
            expect(card.locator("[data-figure=recomputed-steps]")).to_have_text(f"{incident['LostSteps']:,}")
        else:
            expect(card).to_contain_text("0 steps")
        if not is_open:
            expect(card.get_by_role("heading")).to_contain_text("Recovered")
        expect(verdict(desk)).to_contain_text(sentence(job["Duty"]["Sentence"]))
        expect(verdict(desk)).not_to_contain_text("Act now")
    # The page of the job advises the same actions as the API's description of the incident.
    for action in described["Actions"]:
        expect(act).to_contain_text(action["Description"])
        _expect_commands(act, action)
    lanes = desk.locator("svg.timeline > g")
    assert incident["FaultedInstanceIds"]
    for node in incident["FaultedInstanceIds"]:
        lane = lanes.filter(has=desk.locator("text.lane", has_text=node))
        expect(lane.locator(f"a[href='/incidents/{incident['IncidentId']}']")).to_have_count(1)
    # A waiting job shows AWS's message and the time of the next attempt.
    if is_open and job["SecondaryStatus"] != "Training":
        wait = job["CapacityWait"]
        assert wait == described["Wait"]
        assert wait["IsOutOfCapacity"]
        again = f"{datetime.fromtimestamp(wait['NextAttemptTime'], UTC):%H:%M:%S} UTC"
        need = f"{wait['MissingNodeCount']} {wait['InstanceType']} in {wait['AvailabilityZone']}"
        expect(verdict(desk)).to_contain_text(f"Recovering: waiting for {need}.")
        expect(verdict(desk)).to_contain_text("AWS is out of capacity; next attempt in ")
        expect(verdict(desk)).to_contain_text(job["Duty"]["Sentence"])
        for shown in (f"AWS reports: “{wait['Message']}", again):
            expect(act).to_contain_text(shown)
        if _is_long(described):
            expect(act).to_contain_text("Decide: wait for the next attempt")
    # Check the size last, because the cards grow until all their content is loaded.
    for part in (card, act):
        box = part.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= DESKTOP[1], "not on the first screen"


@pytest.mark.parametrize("story", STORIES)
def test_the_page_of_an_incident_answers_on_its_first_screen(
    desk: Page, replayed: Replayed, api: httpx.Client, story: str
) -> None:
    """The first screen shows the failure, its cause, the actions, the losses and the required action, as in the API."""
    listed = api.get("/incidents", params={"TrainingJobName": replayed.jobs[story]}).json()["Incidents"][-1]
    incident = api.get(f"/incidents/{listed['IncidentId']}").json()
    desk.goto(f"/incidents/{incident['IncidentId']}")
    verdict = desk.locator("p.verdict")
    duty = api.get(f"/training-jobs/{incident['TrainingJobName']}").json()["Duty"]
    expect(verdict.locator("strong")).to_have_text(incident["DutySentence"])
    assert incident["DutySentence"] == duty["Sentence"], "the page of the job says the same"
    if "Wait" in incident:
        expect(verdict).to_have_attribute("data-tone", "warn" if _is_long(incident) else "busy")
        expect(desk.locator("dl.answers")).to_contain_text(f"AWS reports: “{incident['Wait']['Message']}")
    title = desk.get_by_role("heading", level=1)
    expect(title).to_have_text(incident["Headline"])
    card = desk.get_by_role("region", name="What happened")
    expect(card).not_to_contain_text(incident["Headline"])
    _expect_answers(card, incident)
    if incident.get("LostSteps") and incident["Outcome"] != "JobFailed":
        expect(card.locator("[data-figure=recomputed-steps]")).to_have_text(f"{incident['LostSteps']:,}")
    expect(card.locator("[data-figure=total-seconds]")).to_be_visible()
    todo = desk.get_by_role("region", name="What to do")
    for action in incident["Actions"]:
        expect(todo).to_contain_text(action["Description"])
        _expect_commands(todo, action)
    for part in (verdict, card, todo):
        box = part.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= DESKTOP[1], "not on the first screen"
    words = desk.evaluate(_WORDS_OF_ANSWERS)
    assert 0 < len(words) <= MAX_WORDS, f"too much to read within ten seconds: {' '.join(words)}"


def _expect_commands(card: Locator, action: dict[str, Any]) -> None:
    """Expect the commands of an action, or the button that has the same effect."""
    if "MinNodeCount" in action:
        expect(card.get_by_role("button", name=f"Continue on {action['MinNodeCount']} nodes")).to_be_visible()
        return
    for command in (action["Command"], *action["FurtherCommands"]):
        expect(card).to_contain_text(command)


def _is_long(incident: dict[str, Any]) -> bool:
    """Return whether the API asks a person to decide about an incident that waits for capacity."""
    return any(each["Urgency"] == "Later" and "InstanceId" not in each for each in incident["Actions"])


def _expect_answers(card: Locator, described: dict[str, Any]) -> None:
    """Expect the cause, what Everstep did, and the evidence, all as in the API."""
    expect(card).to_contain_text(described["Why"])
    for sentence_done in described["Done"]:
        expect(card).to_contain_text(sentence_done)
    for evidence in described["Evidence"]:
        expect(card.locator("details")).to_contain_text(sentence(evidence))


def test_a_person_works_on_an_incident_and_finds_it_by_its_owner(
    desk: Page, replayed: Replayed, api: httpx.Client
) -> None:
    """A person takes, acknowledges and annotates an incident, and saves its post-mortem."""
    listed = api.get("/incidents", params={"TrainingJobName": replayed.jobs["network-partition"]}).json()["Incidents"][
        -1
    ]
    path = f"/incidents/{listed['IncidentId']}"
    desk.goto(path)
    desk.get_by_role("button", name="Assign to me").click()
    expect(desk.get_by_role("button", name="Remove")).to_be_visible()
    desk.get_by_role("button", name="Acknowledge").click()
    expect(desk.get_by_text("Acknowledged by")).to_be_visible()
    desk.get_by_role("textbox", name="New note").fill("The switch of the rack failed.\nThe network team replaced it.")
    desk.get_by_role("button", name="Add note").click()
    expect(desk.locator(".notes")).to_contain_text("The network team replaced it.")
    stored = api.get(path).json()
    assert "AcknowledgementTime" in stored
    assert stored["Owner"]
    assert [note["Text"] for note in stored["Notes"]] == [
        "The switch of the rack failed.\nThe network team replaced it."
    ]
    with desk.expect_download() as saved:
        desk.get_by_role("button", name="Export post-mortem").click()
    document = saved.value.path().read_text()
    assert document == api.get(f"{path}/export").json()["Content"]
    assert "> The network team replaced it." in document
    desk.goto("/incidents")
    desk.get_by_role("combobox", name="Owner").select_option(stored["Owner"])
    expect(desk.locator("tbody tr")).to_have_count(1)
    expect(desk.locator("tbody tr")).to_contain_text(replayed.jobs["network-partition"])
    desk.reload()
    expect(desk.locator("tbody tr")).to_have_count(1)
    desk.get_by_role("combobox", name="Owner").select_option("")
    open_count = len(api.get("/incidents", params={"StatusEquals": "Open"}).json()["Incidents"])
    desk.get_by_text("Open", exact=True).first.click()
    expect(desk.locator("tbody tr")).to_have_count(open_count)
