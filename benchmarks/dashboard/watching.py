"""Measures delays and frame times of the dashboard in the browser, with the browser's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from playwright.sync_api import Page, expect
from sqlalchemy import event
from sqlalchemy.orm import Session

from control_plane.db.models import IncidentRow

SCROLL_MS: Final = 4_000
_WHEN_SHOWN: Final = """(selector) => {
  window.shownAt = new Promise((resolve) => {
    const look = () => document.querySelector(selector) && resolve(Date.now())
    new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true })
  })
}"""
_FRAMES: Final = """([selector, lasts, step]) => new Promise((resolve) => {
  const box = selector ? document.querySelector(selector) : document.scrollingElement
  const frames = []
  let before, begun, by = step
  const next = (now) => {
    begun ??= now
    if (before !== undefined) frames.push(now - before)
    before = now
    const top = box.scrollTop
    box.scrollTop += by
    if (selector) box.scrollLeft += by / 4
    if (box.scrollTop === top) by = -by
    now - begun < lasts ? requestAnimationFrame(next) : resolve(frames)
  }
  requestAnimationFrame(next)
})"""


def seconds_until_interactive(page: Page, path: str, rows: str, wanted: str) -> float:
    """Return the seconds from the navigation until a filter `wanted`, which matches one row, has shortened the list."""
    page.goto(path, wait_until="commit")
    page.locator("[data-filter]").fill(wanted)
    expect(page.locator(rows)).to_have_count(1, timeout=30_000)
    found: float = page.evaluate("performance.now()")
    return found / 1000


def seconds_until_visible(page: Page, path: str, *selectors: str) -> float:
    """Return the seconds from the navigation until elements with all selectors are visible, by the browser's clock."""
    page.goto(path, wait_until="commit")
    for selector in selectors:
        expect(page.locator(selector).first).to_be_visible(timeout=30_000)
    found: float = page.evaluate("performance.now()")
    return found / 1000


def frames(page: Page, selector: str, *, step: int) -> list[float]:
    """Return the milliseconds between frames while an element (empty: the page) scrolls `step` pixels per frame."""
    found: list[float] = page.evaluate(_FRAMES, [selector, SCROLL_MS, step])
    return found


@contextmanager
def incidents_stored() -> Iterator[list[float]]:
    """Yield a list that receives the Unix time of each commit of an incident while the `with` block runs."""
    stored: list[float] = []

    def flushed(session: Session, _: Any) -> None:
        if any(isinstance(each, IncidentRow) for each in session.new):
            session.info["makes_incident"] = True

    def committed(session: Session) -> None:
        if session.info.pop("makes_incident", False):
            stored.append(time.time())

    event.listen(Session, "after_flush", flushed)
    event.listen(Session, "after_commit", committed)
    try:
        yield stored
    finally:
        event.remove(Session, "after_flush", flushed)
        event.remove(Session, "after_commit", committed)


def seconds_until_shown(page: Page, selector: str, hurt: Callable[[], None], stored: list[float]) -> float:
    """Return the seconds from the commit of a fault's incident until the page shows it, by one machine's clock.

    `hurt` causes the fault, and returns when the incident is in `stored`, which `incidents_stored` yields.
    """
    page.evaluate(_WHEN_SHOWN, selector)
    before = len(stored)
    hurt()
    assert len(stored) == before + 1, "the fault made no incident"
    shown: float = page.evaluate("window.shownAt")
    return shown / 1000 - stored[-1]
