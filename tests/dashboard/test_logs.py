"""The page of a job's log in Chromium: lines of all ranks in one list, live lines, search, links, and jumps to a
failure.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.dashboard.browsing import open_job
from tests.dashboard.printed import say
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
PAGE = 1_000
"""Number of lines that the page requests at once."""


def log(page: Page) -> Locator:
    return page.get_by_role("log")


def lines(page: Page) -> Locator:
    return log(page).locator(".line")


def stored(api: httpx.Client, name: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(
        f"/training-jobs/{name}/logs/events", params={"Limit": 10_000, **query}
    ).json()["Events"]
    return found


def printed_by_rank_0(seeded: Seeded, api: httpx.Client, name: str) -> int:
    """Return the number of lines that rank 0's node printed in the current launch."""
    plan = seeded.world.plan(name)
    node = next(node for node in plan.nodes if 0 in node.ranks).node_id
    return sum((event["NodeId"], event["Generation"]) == (node, plan.generation) for event in stored(api, name))


def shown(text: str) -> str:
    """Return a printed line as the page shows it: without color codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_newest_lines_of_all_ranks_are_shown_and_what_is_printed_comes_by_itself(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.gpu
    open_job(desk, name, "/logs")
    newest = stored(api, name)[-1]
    expect(lines(desk).last).to_contain_text(shown(newest["Message"]))
    expect(desk.get_by_text("Following")).to_be_visible()
    say(seeded.world, name, ["a line that was printed just now"], printed_by_rank_0(seeded, api, name))
    expect(lines(desk).last).to_contain_text("a line that was printed just now")
    desk.get_by_label("Rank").select_option("1")
    expect(lines(desk).last).to_contain_text(shown(stored(api, name, Rank=1)[-1]["Message"]))
    assert "rank=1" in desk.url


def test_the_failure_is_one_click_away_and_its_line_has_an_address(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    name = seeded.story.crashing
    incident = api.get("/incidents", params={"TrainingJobName": name}).json()["Incidents"][-1]
    open_job(desk, name, "/logs")
    desk.get_by_role("button", name="To the failure").click()
    here = log(desk).locator(".here")
    told = [
        event["Message"]
        for event in stored(api, name, Generation=incident["GenerationBefore"])
        if event["Stream"] == "stderr"
    ]
    expect(here).to_contain_text(told[-1])  # the traceback ends with the exception
    expect(here).to_be_in_viewport()
    here.get_by_role("button").click()
    desk.wait_for_url(re.compile("at="))
    desk.reload()
    expect(here).to_contain_text(told[-1])
    desk.goto(f"/incidents/{incident['IncidentId']}")
    desk.get_by_role("link", name="Open the log at this moment").click()
    expect(here).to_contain_text(told[-1])


def test_a_line_that_was_found_stays_in_sight_while_older_ones_are_read(
    desk: Page, seeded: Seeded, api: httpx.Client
) -> None:
    """A search jumps to an older hit, and the page then loads lines above the hit. The hit stays visible.

    The test chooses a hit so close to the oldest loaded line that the page must load older lines.
    """
    name = seeded.story.gpu
    hits = {PAGE // 2, PAGE + 5, 2 * PAGE - 5}
    say(
        seeded.world,
        name,
        [f"needle {number}" if number in hits else f"hay {number}" for number in range(2 * PAGE)],
        printed_by_rank_0(seeded, api, name),
    )
    open_job(desk, name, "/logs")
    desk.get_by_label("Find in the log").fill("needle")
    here = log(desk).locator(".here")
    expect(here).to_contain_text(f"needle {2 * PAGE - 5}")
    expect(desk.get_by_text("2 of 2")).to_be_visible()
    desk.get_by_role("button", name="Previous").click()
    # one more hit is in older lines, which the page has not loaded yet
    expect(desk.get_by_text("2 of 3")).to_be_visible()
    expect(desk.get_by_text(f"{2 * PAGE:,} lines loaded")).to_be_visible()
    expect(here).to_contain_text(f"needle {PAGE + 5}")
    log(desk).evaluate("box => box.scrollIntoView()")
    expect(here).to_be_in_viewport()


def test_what_is_searched_is_found_among_all_lines_and_downloaded(
    desk: Page, seeded: Seeded, api: httpx.Client, tmp_path: Path
) -> None:
    name = seeded.story.crashing
    everything = stored(api, name, StartFromHead=True)
    wanted = everything[0]["Message"]
    words = shown(wanted).partition(":")[0]
    open_job(desk, name, "/logs")
    desk.get_by_label("Find in the log").fill(words)
    expect(log(desk).locator("mark").first).to_have_text(words)
    only = desk.get_by_label("Only matches, in the whole log")
    only.click()  # click, because the checkbox changes only after the address does
    expect(only).to_be_checked()
    expect(lines(desk)).to_have_count(len(stored(api, name, FilterPattern=words)))
    # With only hits shown, a row marks each gap between two hits.
    expect(lines(desk).filter(has_text=words)).to_have_count(sum(words in event["Message"] for event in everything))
    only.click()
    expect(only).not_to_be_checked()
    desk.get_by_label("Find in the log").fill("")
    expect(lines(desk).last).to_be_visible()
    with desk.expect_download() as saved:
        desk.get_by_role("button", name="Download these lines").click()
    saved.value.save_as(tmp_path / "log")
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == len(everything)
    assert all(line.endswith(shown(event["Message"])) for line, event in zip(said, everything, strict=True))
