"""One seeded world for all tests of the dashboard, because it takes longer to make than they do, and a browser for each module.

Playwright holds the thread's event loop while a browser is open: tests of other packages that run in between, in random order, need it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from control_plane.api.dashboard import STATIC
from tests.dashboard.browsing import chromium, signed_in
from tests.dashboard.service import Seeded

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def api(seeded: Seeded) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{seeded.url}/v1", headers={"authorization": f"Bearer {seeded.admin_token}"}, trust_env=False) as client:
        yield client


@pytest.fixture
def desk(browser: Browser, seeded: Seeded) -> Iterator[Page]:
    with signed_in(browser, seeded) as page:
        yield page
