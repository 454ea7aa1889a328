"""What is measured in the browser: by its own clock and its own frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from playwright.sync_api import Page, expect
from sqlalchemy import event
from sqlalchemy.orm import Session

from control_plane.db.models import Incident

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
    """Return how long a page takes until it answers a person: from asking for it until a filter that was typed has narrowed its list.

    Args:
        page: of somebody who is signed in.
        path: of the page.
        rows: selects the rows of its list.
        wanted: leaves one row.

    Returns:
        Seconds since the navigation began, by the browser's clock.
    """
    page.goto(path, wait_until="commit")
    page.locator("[data-filter]").fill(wanted)
    expect(page.locator(rows)).to_have_count(1, timeout=30_000)
    found: float = page.evaluate("performance.now()")
    return found / 1000


def frames(page: Page, selector: str, *, step: int) -> list[float]:
    """Return how long each frame took while something was scrolled, milliseconds.

    Args:
        page: shows it.
        selector: of what scrolls; empty: the page itself.
        step: pixels a frame.

    Returns:
        The time from each frame to the next.
    """
    found: list[float] = page.evaluate(_FRAMES, [selector, SCROLL_MS, step])
    return found


@contextmanager
def incidents_stored() -> Iterator[list[float]]:
    """Note when incidents are stored: Unix times at which the transactions that made them were committed."""
    stored: list[float] = []

    def flushed(session: Session, _: Any) -> None:
        if any(isinstance(each, Incident) for each in session.new):
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
    """Return how long after it was stored a fault is on the page.

    Args:
        page: does not show it yet.
        selector: of what shows it.
        hurt: makes the fault; returns when it is stored.
        stored: see `incidents_stored`.

    Returns:
        Seconds; both clocks are this machine's.
    """
    page.evaluate(_WHEN_SHOWN, selector)
    before = len(stored)
    hurt()
    assert len(stored) == before + 1, "the fault made no incident"
    shown: float = page.evaluate("window.shownAt")
    return shown / 1000 - stored[-1]
