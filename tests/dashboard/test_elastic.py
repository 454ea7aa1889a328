"""An elastic job that shrinks without capacity and grows back, in Chromium: its timeline and its two incidents."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from control_plane.core.states import JobState
from tests.dashboard.browsing import open_job, signed_in, verdict
from tests.dashboard.conftest import client_of
from tests.dashboard.service import Living
from tests.sim.world import World
from tests.unit.control_plane.loop.test_elastic_jobs import asked_to_stop, small

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
NODES = 4


@pytest.fixture
def served(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """Serve a job that trains on 3 of its 4 nodes, because AWS has no instance for the lost node."""
    directory = tmp_path_factory.mktemp("elastic")
    with Living(directory, World(directory, nodes=NODES)) as made:
        made.run(small(made.world, nodes=NODES))
        made.run(made.world.train(20))
        made.run(made.world.tick())  # the loops count the training
        made.serve()
        yield made


@pytest.fixture
def api(served: Living) -> Iterator[httpx.Client]:
    with client_of(served) as client:
        yield client


@pytest.fixture
def desk(browser: Browser, served: Living) -> Iterator[Page]:
    with signed_in(browser, served) as page:
        yield page


def expect_incident(desk: Page, api: httpx.Client, cause: str, phases: dict[str, str]) -> None:
    """Expect the newest incident on the job's timeline, and on its own page, as the API describes it.

    `phases`: the words on the incident's page for a phase, by the API's field that contains the duration of the phase.
    """
    incident = api.get("/incidents", params={"TrainingJobName": "gpt"}).json()["Incidents"][-1]
    assert incident["Cause"] == cause
    path = f"/incidents/{incident['IncidentId']}"
    described = api.get(path).json()
    open_job(desk, "gpt")
    lane = desk.locator("svg.timeline")
    for field in phases:
        bar = lane.locator(f"a[href='{path}'] title", has_text=f"{field.removesuffix('Seconds')}: ")
        expect(bar).to_have_text(re.compile(f", {described[field]:g} s$"))
    card = desk.get_by_role("region", name="Latest incident")
    expect(card).to_contain_text(described["Headline"])
    desk.goto(path)
    expect(desk.get_by_role("heading", level=1)).to_have_text(described["Headline"])
    expect(verdict(desk)).to_contain_text("Nothing to do.")
    happened = desk.get_by_role("region", name="What happened")
    expect(happened).to_contain_text(described["Why"])
    for done in described["Done"]:
        expect(happened).to_contain_text(done)
    for words in phases.values():
        expect(desk.locator("main")).to_contain_text(re.compile(words, re.IGNORECASE))
    expect(desk.get_by_text(f"{described['NodeCountBefore']} → {described['NodeCountAfter']}")).to_be_visible()


def test_a_job_that_shrank_and_grew_back_shows_both_as_incidents_of_their_own_kind(
    desk: Page, served: Living, api: httpx.Client
) -> None:
    world = served.world
    expect_incident(
        desk,
        api,
        "shrunk",
        {
            "DetectSeconds": "detecting the failure",
            "ReplaceSeconds": "waiting for nodes",
            "RestoreSeconds": "restoring state",
        },
    )
    (shrunk,) = api.get("/incidents", params={"TrainingJobName": "gpt"}).json()["Incidents"]
    (lost,) = shrunk["InstanceIds"]
    open_job(desk, "gpt")
    lanes = desk.locator("svg.timeline > g")
    fault = lanes.filter(has=desk.locator("text.lane", has_text=lost)).locator(f"a[href*='{shrunk['IncidentId']}']")
    expect(fault).to_have_count(1)
    seen = api.get("/training-jobs/gpt").json()
    assert seen["Reason"].startswith("trains on 3 of 4 nodes")
    expect(lanes.first.locator("title").last).to_contain_text("Train: productive steps")
    expect(verdict(desk)).to_contain_text("on 3 of 4 nodes. The job grows again when capacity returns.")

    world.operator.capacity = None
    served.run(asked_to_stop(world))
    world.finish()
    served.run(world.until(lambda: (world.job().generation, world.job().state) == (3, JobState.RUNNING)))
    served.run(world.train(5))
    expect_incident(
        desk,
        api,
        "grown",
        {
            "DetectSeconds": "noticing the agreed stop",
            "ReplaceSeconds": "adding nodes",
            "RestoreSeconds": "restoring state",
        },
    )
    (added,) = world.incidents()[-1].replacement_instance_ids
    expect(desk.get_by_role("region", name="What happened")).to_contain_text(f"added {added} to continue on 4 nodes")
    open_job(desk, "gpt")
    chart = desk.locator("svg.timeline")
    expect(chart).to_have_attribute("aria-label", re.compile("^Timeline of 5 nodes and 2 incidents"))
    expect(chart.locator("text.lane", has_text=str(added))).to_have_count(1)
    expect(chart.locator(f"a[href='/incidents/{shrunk['IncidentId']}']")).not_to_have_count(0)
    where_time_went = desk.locator("section.card", has=desk.get_by_role("heading", name="Where the time went"))
    expect(where_time_went).to_contain_text("training time lost to missing nodes")
    assert api.get("/training-jobs/gpt").json()["Reason"].startswith("trains from step ")
