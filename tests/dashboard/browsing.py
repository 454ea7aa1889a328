"""Chromium for the dashboard's tests.

A test fails if the browser logs an error or a warning: a rejected style, a failed request or an exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import APIResponse, Browser, Locator, Page, Route, expect, sync_playwright

from control_plane.db.tokens import Role
from tests import programs
from tests.dashboard.service import Served

DESKTOP, PHONE = (1440, 900), (390, 844)
WAIT_MS = 10_000
CUT_OFF = (
    "ERR_CONNECTION_REFUSED",
    "ERR_CONNECTION_CLOSED",
    "ERR_SOCKET_NOT_CONNECTED",
    "ERR_INCOMPLETE_CHUNKED",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONNECTION_RESET",
    "status of 503",
)
"""Substrings of the messages that Chromium logs about an unreachable server."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium for the duration of the block."""
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start as root, but containers run tests as root. The pages are our own, so the
        # tests need no sandbox. Other tests fill /dev/shm, so Chromium must not use it.
        expect.set_options(timeout=WAIT_MS)
        started = playwright.chromium.launch(
            executable_path=programs.chromium(),
            env=dict(programs.chromium_environment()),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--font-render-hinting=none"],
        )
        yield started
        started.close()


@contextmanager
def watched(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: Any = "light",
    motion: Any = "reduce",
    is_cut: bool = False,
    refusals: tuple[str, ...] = (),
) -> Iterator[Page]:
    """Open a page in a browser context without a session.

    Args:
        browser: a started browser.
        url: address of the server.
        size: width and height of the window.
        scheme: light or dark.
        motion: `reduce`, or `no-preference`, with which pages have animations that tests must wait for.
        is_cut: True if the test stops the server. The browser may then log that the server is unreachable.
        refusals: substrings of further errors and warnings that the browser may log without failing the test.

    Yields:
        The page. It is closed at the end of the block.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion=motion, base_url=url
    )
    complaints: list[str] = []
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on(
        "console",
        lambda message: (
            complaints.append(f"{message.text} ({message.location['url']})")
            if message.type in ("error", "warning")
            else None
        ),
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    # Remove the test's request handlers, without waiting for those that still hold a request. A test that failed never
    # answers such a request, so the wait would not end.
    page.unroute_all(behavior="ignoreErrors")
    context.close()
    expected = (*refusals, *(CUT_OFF if is_cut else ()))
    unexpected = [each for each in complaints if not any(part in each for part in expected)]
    assert not unexpected, f"the browser complained: {unexpected}"


@contextmanager
def signed_in(browser: Browser, served: Served, role: Role = Role.ADMIN, **more: Any) -> Iterator[Page]:
    """Open a page and sign in with a token of the given role.

    Args:
        browser: a started browser.
        served: the server to open.
        role: role of the token.
        **more: further arguments of `watched`.
    """
    with watched(browser, served.url, **more) as page:
        sign_in(page, served.token(role))
        yield page


def sign_in_unseen(page: Page, served: Served, role: Role = Role.ADMIN) -> None:
    """Exchange a token for a session without a page, so that the browser's cache stays empty."""
    answer = page.context.request.post(
        "/v1/session", data={"Token": served.token(role)}, headers={"origin": served.url}
    )
    assert answer.ok, answer.text()


def sign_in(page: Page, token: str) -> None:
    """Exchange a token for a session on the sign-in page."""
    if "/sign-in" not in page.url:
        page.goto("/sign-in")
    page.get_by_label("Token").first.fill(token)
    page.get_by_role("button", name="Sign in").click()
    # Wait for the next page's own heading, because the sign-in page has a heading too.
    expect(page).not_to_have_url(re.compile("/sign-in"))
    expect(page.get_by_role("main").get_by_role("heading", level=1)).to_be_visible()


def install_clock(page: Page) -> None:
    """Leave the present page, and replace the browser's clock by one that the test advances.

    Playwright first sets the new clock to 1970. An open page of the dashboard could request data of that year.
    """
    page.goto("about:blank")
    page.clock.install()


def open_job(page: Page, name: str, tab: str = "") -> None:
    """Open a job's page or one of its tabs."""
    page.goto(f"/jobs/{name}{tab}")
    expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()


def verdict(page: Page) -> Locator:
    """Return the sentence at the top of a page, which states the situation and whether the reader must act."""
    return page.locator("p.verdict")


def fetch_whole(route: Route) -> APIResponse:
    """Fetch the response to a page's request without the page's ETag and ChangeToken, so that it has all contents."""
    headers = {name: value for name, value in route.request.headers.items() if name != "if-none-match"}
    return route.fetch(url=re.sub(r"ChangesSince=[^&]*", "ChangesSince=Start", route.request.url), headers=headers)


def confirm(page: Page, name: str, verb: str) -> None:
    """Type an object's name into the confirmation dialog, and press the dialog's button."""
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name=verb, exact=True)).to_be_disabled()
    dialog.get_by_label(f"Type {name} to confirm").fill(name)
    dialog.get_by_role("button", name=verb, exact=True).click()
    expect(dialog).to_be_hidden()


def sentence(text: str) -> str:
    """Return a sentence of an API response without its first letter and without its full stop.

    A page may change these two characters, but shows the text between them unchanged.
    """
    return text.strip().splitlines()[0].rstrip(".")[1:]
