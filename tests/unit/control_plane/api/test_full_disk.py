"""A full disk of the control plane shows in errors, in the conditions of jobs and in the service's health.

All three return to normal once the disk has space.
"""

from __future__ import annotations

import errno
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from control_plane.api.errors import DiskFull, InternalError, unexpected
from control_plane.core.full_disk import QUIET_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def send(service: Any, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {service.admin_token}"}
    return httpx.request(
        method, f"http://{service.address}{path}", headers=headers, trust_env=False, timeout=30, **more
    )


def limit(service: Any, pages: int) -> None:
    """Limit the size of the database file, so that writes fail as on a full disk."""
    # SQLite limits a single connection, so the test limits every connection of the pool.
    for connection in [service.services.database.engine.connect() for _ in range(5)]:
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
        connection.close()


def fill(service: Any) -> httpx.Response:
    return send(service, "POST", "/v1/tokens", json={"Role": "viewer", "Description": "x" * 200})


def test_a_database_without_space_is_named_and_reading_goes_on(service: Any) -> None:
    clock = service.services.database.disk.monotonic = Clock()
    assert send(service, "GET", "/v1/health").json()["Status"] == "ok"
    limit(service, 1)  # SQLite allows no limit below the file's current size
    answers = [fill(service) for _ in range(60)]
    refused = next(answer for answer in answers if answer.status_code != 201)
    assert (refused.status_code, refused.headers["x-amzn-errortype"]) == (503, "ServiceUnavailableException")
    assert refused.json()["Message"].startswith("disk_full: ")
    assert "space" in refused.json()["Hint"]
    assert send(service, "GET", "/v1/tokens").status_code == 200
    clock.now += 7
    health = send(service, "GET", "/v1/health")
    (condition,) = health.json()["Conditions"]
    assert (health.status_code, health.json()["Status"], condition["Type"]) == (200, "degraded", "disk_full")
    assert condition["Directory"] == str(service.settings.state_directory)
    assert condition["Directory"] in condition["Message"]
    assert condition["FreeBytes"] > 0
    assert condition["DurationSeconds"] == 7
    assert "Free space" in condition["Hint"]
    limit(service, 1_000_000)
    assert fill(service).status_code == 201
    assert send(service, "GET", "/v1/health").json()["Status"] == "degraded", "larger writes may still fail"
    clock.now += QUIET_SECONDS
    assert send(service, "GET", "/v1/health").json() | {"Version": ""} == {
        "Status": "ok",
        "Version": "",
        "Conditions": [],
    }


def test_a_job_shows_the_full_disk_of_the_service_while_it_lasts(
    service: Any, client: Any, fleet: Any, source: Any
) -> None:
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=2)
    disk = service.services.database.disk
    clock = disk.monotonic = Clock()
    disk.failed(full(service))
    (condition,) = client.describe_training_job(TrainingJobName="gpt")["Conditions"]
    assert condition["Type"] == "disk_full"
    assert str(service.settings.state_directory / "spool") in condition["Message"]
    assert "NodeId" not in condition
    disk.stored()
    clock.now += QUIET_SECONDS
    service.clock.advance(2)  # wait until the cached responses, which are valid for one second, are out of date
    assert client.describe_training_job(TrainingJobName="gpt")["Conditions"] == []


def full(service: Any) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", str(service.settings.state_directory / "spool" / "archive"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_named(code: int) -> None:
    assert isinstance(unexpected(OSError(code, "full")), DiskFull)
    assert isinstance(unexpected(OSError(errno.EIO, "broken")), InternalError)


def test_the_full_disk_of_postgresql_is_named() -> None:
    class Refusal(Exception):
        sqlstate = "53100"

    assert isinstance(unexpected(OperationalError("INSERT", {}, Refusal("could not extend file"))), DiskFull)
