"""The layout of pages, compared with stored boxes.

A box is the rounded position and size of a card, heading, table or field. Boxes are stable where pixels are not: fonts
of the system, versions of Chromium and anti-aliasing change pixels on each machine. The application ships its font,
which here also shows ids and commands instead of the system's font for code. The seeded fleet has one seed, and its
clock stands still.

`EVERSTEP_UPDATE_LAYOUT=1` writes the present boxes to `layout.json`. Look at the pages before you commit the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import signed_in
from tests.dashboard.service import Seeded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(360)]
BASELINE: Final = Path(__file__).with_name("layout.json")
UPDATE: Final = "EVERSTEP_UPDATE_LAYOUT"
WIDTHS: Final = (390, 1200, 1440, 1920)
HEIGHT: Final = 900
GRID_PIXELS: Final = 8
"""Boxes are rounded to multiples of this number. A difference of one multiple is allowed."""
BOXES = """() => {
  const selector = 'h1, main .verdict, main .card, main table, main .chips, main form, nav.tabs, header.sidebar'
  const boxes = []
  for (const element of document.querySelectorAll(selector)) {
    const { x, y, width, height } = element.getBoundingClientRect()
    if (width) boxes.push([element.tagName.toLowerCase(), x, y + window.scrollY, width, height])
  }
  return boxes
}"""
Boxes = list[list[Any]]


@pytest.fixture(scope="module")
def fresh(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    """Serve a seeded fleet that no other test changes."""
    with Seeded(tmp_path_factory.mktemp("layout")) as made:
        yield made


TABS: Final = ("metrics", "logs", "protection", "checkpoints", "outputs", "events", "spec")
DRAWN: Final = {
    "jobs": "table.jobs svg.spark",
    "incident": "main .actions .row > button",
    "job": "svg.timeline",
    "job metrics": "main canvas",
    "job logs": "main [role=log] .line",
    "job protection": "main canvas",
    "reports": "main .card canvas, main .card svg",
}
"""A drawing or button that a page shows later than its other content, by the name of the page."""
PATHS: Final = {
    "overview": "/",
    "jobs": "/jobs",
    "queue": "/queue",
    "fleets": "/fleets",
    "fleet": "/fleets/main",
    "drills": "/drills",
    "submit": "/submit",
    "settings": "/settings",
    "incidents": "/incidents",
    "reports": "/reports",
}
"""Addresses of the pages whose address does not depend on the fleet, by name."""


def paths_of(made: Seeded) -> dict[str, str]:
    """Return the addresses of all compared pages, by name."""
    job = f"/jobs/{made.story.gpu}"
    incident = made.world.incidents(made.story.gpu)[-1].id
    return {
        **PATHS,
        "incident": f"/incidents/{incident}",
        "job": job,
        **{f"job {tab}": f"{job}/{tab}" for tab in TABS},
        "job failed": f"/jobs/{made.story.crashing}",
    }


def boxes_of(page: Page) -> Boxes:
    return [[tag, *(GRID_PIXELS * round(side / GRID_PIXELS) for side in sides)] for tag, *sides in page.evaluate(BOXES)]


def differences(expected: Boxes, found: Boxes) -> list[str]:
    """Return a line for each box that is missing, new, moved or resized."""
    if [tag for tag, *_ in expected] != [tag for tag, *_ in found]:
        return [f"elements: expected {[tag for tag, *_ in expected]}, found {[tag for tag, *_ in found]}"]
    return [
        f"{before[0]}: expected {before[1:]}, found {after[1:]}"
        for before, after in zip(expected, found, strict=True)
        if any(abs(a - b) > GRID_PIXELS for a, b in zip(before[1:], after[1:], strict=True))
    ]


@pytest.mark.long
def test_pages_have_their_layout_in_light_and_dark_at_every_width(browser: Browser, fresh: Seeded) -> None:
    found: dict[str, Boxes] = {}
    wrong: list[str] = []
    with signed_in(browser, fresh) as page:
        for name, path in paths_of(fresh).items():
            page.set_viewport_size({"width": WIDTHS[-1], "height": HEIGHT})
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            if name in DRAWN:
                expect(page.locator(DRAWN[name]).first).to_be_visible()
            page.evaluate("document.documentElement.style.setProperty('--font-mono', 'var(--font)')")
            page.evaluate("document.fonts.ready.then(() => undefined)")
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": HEIGHT})
                page.emulate_media(color_scheme="light")
                light = found[f"{name} {width}"] = boxes_of(page)
                page.emulate_media(color_scheme="dark")
                wrong += [f"{name} {width}, dark: {line}" for line in differences(light, boxes_of(page))]
    assert not wrong, "\n".join(wrong)
    if os.environ.get(UPDATE):
        lines = (f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'))}" for name in sorted(found))
        BASELINE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    stored: dict[str, Boxes] = json.loads(BASELINE.read_text())
    assert sorted(stored) == sorted(found)
    wrong = [f"{name}: {line}" for name in stored for line in differences(stored[name], found[name])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda boxes: boxes, 0),
        (lambda boxes: [[*box[:4], box[4] + GRID_PIXELS] for box in boxes], 0),
        (lambda boxes: [[*box[:4], box[4] + 2 * GRID_PIXELS] for box in boxes], 2),
        (lambda boxes: boxes[1:], 1),
    ],
)
def test_a_moved_box_is_a_difference(change: Any, count: int) -> None:
    boxes: Boxes = [["h1", 8, 16, 80, 24], ["table", 8, 48, 160, 800]]
    assert len(differences(boxes, change(boxes))) == count
