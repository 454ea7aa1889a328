"""One seeded world for all tests of the dashboard that let something happen, because it takes longer to make than they
do; the recorded incidents,
with names and figures of a fresh seed each time; and a browser for each module.

Playwright holds the thread's event loop while a browser is open: tests of other packages that run in between, in random
order, need it back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from control_plane.api.dashboard import STATIC
from tests.dashboard.browsing import chromium, signed_in
from tests.dashboard.service import Replayed, Seeded, Served

AXE = Path(__file__).resolve().parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def built() -> None:
    """The dashboard's build, and the checker that came with it."""
    if not (STATIC / "index.html").is_file() or not AXE.is_file():
        pytest.fail("the dashboard is not built: make web")


@pytest.fixture(scope="session")
def seeded(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with Seeded(tmp_path_factory.mktemp("seeded")) as made:
        yield made


@pytest.fixture(scope="session")
def replayed(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replayed]:
    with Replayed(tmp_path_factory.mktemp("replayed"), random.SystemRandom().randrange(1 << 32)) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def client_of(served: Served) -> httpx.Client:
    """A client of a server's API, with its admin token."""
    return httpx.Client(
        base_url=f"{served.url}/v1",
        headers={"authorization": f"Bearer {served.admin_token}"},
        trust_env=False,
        timeout=30,
    )


@pytest.fixture(scope="session")
def api(seeded: Seeded) -> Iterator[httpx.Client]:
    with client_of(seeded) as client:
        yield client


@pytest.fixture
def desk(browser: Browser, seeded: Seeded) -> Iterator[Page]:
    with signed_in(browser, seeded) as page:
        yield page
