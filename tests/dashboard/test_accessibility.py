"""Accessibility of the dashboard.

axe checks dialogs, the search and the sign-in page. Users who ask for reduced motion see no animations.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browsing import open_job, signed_in, watched
from tests.dashboard.conftest import AXE
from tests.dashboard.service import Seeded
from tests.dashboard.test_pages import RUN_AXE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
SCHEMES = ("light", "dark")
MOVING = """() => [...document.querySelectorAll('*')].filter((each) => {
  const style = getComputedStyle(each)
  const longest = (text) => Math.max(...text.split(',').map(parseFloat))
  return longest(style.transitionDuration) > 0 || (style.animationName !== 'none' && longest(style.animationDuration) > 0)
}).length"""


def is_clean(page: Page) -> None:
    """Check the present page with all rules of the accessibility checker axe."""
    page.evaluate(AXE.read_text())
    assert page.evaluate(RUN_AXE, {}) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_sign_in_is_clean(browser: Browser, seeded: Seeded, scheme: str) -> None:
    with watched(browser, seeded.url, scheme=scheme) as page:
        page.goto("/sign-in")
        expect(page.get_by_role("button", name="Sign in")).to_be_visible()
        is_clean(page)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_opens_over_a_page_is_clean(browser: Browser, seeded: Seeded, scheme: str) -> None:
    name = "opened-over"
    if scheme == SCHEMES[0]:
        seeded.story.queue(name)
    with signed_in(browser, seeded, scheme=scheme) as page:
        open_job(page, seeded.story.partition)
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_label(re.compile("^Type .* to confirm$"))).to_be_visible()
        is_clean(page)
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("Control+k")
        expect(page.get_by_role("listbox", name="Found")).to_be_visible()
        is_clean(page)
        page.keyboard.press("Escape")
        page.goto("/fleets/main")
        page.get_by_role("button", name=re.compile("^Act on ")).first.click()
        expect(page.get_by_role("dialog").get_by_role("radio").first).to_be_visible()
        is_clean(page)


@pytest.mark.parametrize(("motion", "may_move"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_for_those_who_want_no_motion(
    browser: Browser, seeded: Seeded, motion: str, may_move: bool
) -> None:
    with signed_in(browser, seeded, motion=motion) as page:
        open_job(page, seeded.story.partition)
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_label(re.compile("^Type .* to confirm$"))).to_be_visible()
        assert (page.evaluate(MOVING) > 0) is may_move
