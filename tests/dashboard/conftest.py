"""Fixtures of the dashboard's tests.

- `seeded`: a simulated fleet, which all tests that change something share, because it takes long to make.
- `replayed`: the recorded incidents with other names and numbers, from a fresh seed in each run.
- `browser`: one Chromium for each module. While it is open, Playwright runs an event loop in the test thread, so no
  asyncio test can run there. Tests run in random order, so asyncio tests may follow each module.
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
    """Fail if the dashboard is not built, or if the accessibility checker axe is not installed."""
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
    """Return a client of the server's API with its admin token."""
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
