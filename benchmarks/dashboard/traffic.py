"""Measures how many bytes an open page receives, how many bytes its first load needs, and how its layout shifts.

The browser's clock is simulated: each second, the fleet trains one step, and the page's timers run. Requests are real,
so bytes per hour are extrapolated from one simulated minute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
from playwright.sync_api import Browser, Page

from control_plane.db import metrics
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from everstep.protocol.rank_messages import OWN_METRICS
from tests.dashboard.browsing import sign_in_unseen, watched
from tests.dashboard.service import Living
from tests.sim.world import World

METRICS: Final = (*(f"train/{name}" for name in ("loss", "lr", "grad_norm", "tokens")), "eval/loss", "eval/accuracy")
OWN: Final = tuple(
    f"{OWN_METRICS}{name}"
    for name in ("step_seconds", "snapshot_blocked_seconds", "replicate_seconds", "network_bytes_per_second")
)
SETTLE_SECONDS: Final = 15
"""Simulated seconds until the page only polls."""
AHEAD_MS: Final = 2_900
"""Milliseconds until a page fetches the code of other pages, which is not part of the first load."""
_OBSERVE_SHIFT: Final = """() => {
  window.layoutShift = 0
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.layoutShift += entry.value
  }).observe({ type: 'layout-shift', buffered: true })
}"""
_FIRST_LOAD: Final = """(ahead) => ['navigation', 'resource'].flatMap((type) => performance.getEntriesByType(type))
  .filter((each) => each.startTime < ahead && !new URL(each.name).pathname.startsWith('/v1/'))
  .reduce((sum, each) => sum + each.transferSize, 0)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that an open page receives while it polls."""

    bytes_per_hour: float
    plain_bytes_per_hour: float
    """Bytes per hour if each response were complete and without compression."""


class Logger:
    """Logs metrics of a simulated running job, one value per metric and step."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        job = world.job(name)
        self._run, self._generation = RunId(job.run_id), Generation(job.generation)
        self._nodes = [NodeId(agent.node_id) for agent in world.team(name)]
        self._step = 0

    def log(self, steps: int) -> None:
        """Store the metrics of the next `steps` steps."""
        first, self._step = self._step, self._step + steps
        points = tuple(
            MetricPoint(
                generation=self._generation,
                step=Step(step + 1),
                at_seconds=self._world.now.timestamp() - (self._step - step),
                values={name: _value(name, step) for name in (*METRICS, *OWN)},
            )
            for step in range(first, self._step)
        )
        measured = {
            node: {name: _value(name, self._step) * (1 + place / 10) for name in OWN}
            for place, node in enumerate(self._nodes)
        }
        with self._world.database.write() as session:
            batch = MetricBatch(run=self._run, first_number=first, points=points)
            metrics.store(session, "benchmark", batch, measured)


def _value(name: str, step: int) -> float:
    if name.endswith("tokens"):
        return 4_194_304.0 * step
    noise = math.sin(step * 12.9898 + len(name)) * 43758.5453 % 1
    return (1.7 + 6.5 * math.exp(-step / 900)) * (1 + 0.05 * noise)


@dataclass
class _Counted:
    """Counts the bytes that the browser receives from the API."""

    # No `__slots__`, because Playwright adds attributes to the object.
    received_bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    streams: set[str] = field(default_factory=set)
    urls: dict[str, str] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)

    def sent(self, event: dict[str, Any]) -> None:
        url = event["request"]["url"]
        if not urlsplit(url).path.startswith("/v1/"):
            return
        if event.get("type") == "EventSource":
            self.streams.add(event["requestId"])
            return
        self.urls[event["requestId"]] = url
        self.in_flight.add(event["requestId"])
        self.requests[_complete(url)] += 1

    def received(self, event: dict[str, Any]) -> None:
        if event["requestId"] in self.streams:
            self.received_bytes += event["encodedDataLength"]

    def finished(self, event: dict[str, Any]) -> None:
        if event["requestId"] in self.urls:
            self.in_flight.discard(event["requestId"])
            self.received_bytes += int(event["encodedDataLength"])

    def failed(self, event: dict[str, Any]) -> None:
        self.in_flight.discard(event["requestId"])


def traffic_of(browser: Browser, served: Living, path: str, second: Callable[[], None], seconds: int) -> Traffic:
    """Count the bytes of an open page for simulated seconds, each of which `second` begins."""
    with watched(browser, served.url) as page:
        sign_in_unseen(page, served)
        with _counted(page) as counted:
            page.clock.install()
            page.goto(path)
            page.locator("h1").first.wait_for()
            _pass(page, counted, second, SETTLE_SECONDS)
            counted.received_bytes = 0
            counted.requests.clear()
            _pass(page, counted, second, seconds)
    hours = seconds / 3600
    plain = sum(_plain_bytes(served, url) * count for url, count in counted.requests.items())
    return Traffic(bytes_per_hour=counted.received_bytes / hours, plain_bytes_per_hour=plain / hours)


@contextmanager
def _counted(page: Page) -> Iterator[_Counted]:
    counted = _Counted()
    browser = page.context.new_cdp_session(page)
    browser.on("Network.requestWillBeSent", counted.sent)
    browser.on("Network.dataReceived", counted.received)
    browser.on("Network.loadingFinished", counted.finished)
    browser.on("Network.loadingFailed", counted.failed)
    browser.send("Network.enable")
    yield counted
    browser.detach()


def _pass(page: Page, counted: _Counted, second: Callable[[], None], seconds: int) -> None:
    for _ in range(seconds):
        second()
        page.clock.run_for(1_000)
        while counted.in_flight:
            page.wait_for_timeout(1)


def _complete(url: str) -> str:
    """Return a poll's URL without the limit to changes."""
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "ChangesSince"]
    return parts._replace(query=urlencode(query)).geturl()


def _plain_bytes(served: Living, url: str) -> int:
    headers = {"authorization": f"Bearer {served.admin_token}", "accept-encoding": "identity"}
    answer = httpx.get(url, headers=headers, trust_env=False, timeout=60)
    return len(answer.content) + sum(len(name) + len(value) + 4 for name, value in answer.headers.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """First load of one page in a browser with an empty cache."""

    shift: float
    """Cumulative layout shift, without shifts that follow an input."""
    first_load_bytes: int
    """Compressed document, scripts, styles and fonts."""


def load_of(browser: Browser, served: Living, path: str) -> Load:
    """Open a page once, and measure its layout shift and the bytes that it loads."""
    with watched(browser, served.url) as page:
        sign_in_unseen(page, served)
        page.add_init_script(f"({_OBSERVE_SHIFT})()")
        page.goto(path)
        page.locator("h1").first.wait_for()
        page.wait_for_timeout(AHEAD_MS)
        return Load(
            shift=page.evaluate("window.layoutShift"), first_load_bytes=int(page.evaluate(_FIRST_LOAD, AHEAD_MS))
        )
