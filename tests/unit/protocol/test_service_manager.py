"""The server and the agent report to systemd through its socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.host.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """Yield the name of systemd's socket, as in NOTIFY_SOCKET, and the socket itself."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@everstep-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name.replace("@", "\0", 1))
        end.settimeout(10)
        yield name, end


async def test_a_watched_process_reports_at_half_of_the_limit(systemd: tuple[str, socket.socket]) -> None:
    name, end = systemd
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    manager = ServiceManager(environment)
    assert environment == {"HOME": "/"}, "children do not inherit systemd's variables"
    assert manager.report_seconds == 0.01
    manager.notify("READY=1")
    assert end.recv(100) == b"READY=1"
    alive = asyncio.create_task(manager.keep_alive())
    for _ in range(3):
        assert await asyncio.to_thread(end.recv, 100) == b"WATCHDOG=1"
    alive.cancel()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
    ids=["no systemd", "no socket", "no watchdog", "the watchdog of another process"],
)
async def test_a_process_without_a_watchdog_reports_nothing(environment: dict[str, str]) -> None:
    manager = ServiceManager(environment)
    assert manager.report_seconds is None
    await asyncio.wait_for(manager.keep_alive(), 10)


def test_a_lost_socket_is_logged_and_does_not_end_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")}).notify("READY=1")
    assert "systemd does not receive READY=1" in caplog.text
