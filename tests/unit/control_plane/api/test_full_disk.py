"""A full disk is named to the caller; reading goes on, and the same request succeeds once there is space."""

from __future__ import annotations

import errno
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from control_plane.api.errors import DiskFull, InternalError, unexpected


def send(service: Any, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {service.admin_token}"}
    return httpx.request(method, f"http://{service.address}{path}", headers=headers, trust_env=False, timeout=30, **more)


def test_a_database_without_space_is_named_and_reading_goes_on(service: Any) -> None:
    def limit(pages: int) -> None:
        for connection in [service.services.database.engine.connect() for _ in range(5)]:  # the pool's, whichever a route gets
            connection.execute(text(f"PRAGMA max_page_count = {pages}"))
            connection.close()

    def fill() -> httpx.Response:
        return send(service, "POST", "/v1/tokens", json={"Role": "viewer", "Description": "x" * 200})

    limit(1)  # SQLite lowers it to what the file has
    answers = [fill() for _ in range(60)]
    refused = next(answer for answer in answers if answer.status_code != 201)
    assert (refused.status_code, refused.headers["x-amzn-errortype"]) == (503, "ServiceUnavailableException")
    assert refused.json()["Message"].startswith("disk_full: ")
    assert "space" in refused.json()["Hint"]
    assert send(service, "GET", "/v1/tokens").status_code == 200
    limit(1_000_000)
    assert fill().status_code == 201


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_named(code: int) -> None:
    assert isinstance(unexpected(OSError(code, "full")), DiskFull)
    assert isinstance(unexpected(OSError(errno.EIO, "broken")), InternalError)
