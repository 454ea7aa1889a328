"""GetReadiness needs no token, and says why a server should not receive requests."""

from __future__ import annotations

from typing import Any

import httpx


def answer(service: Any, path: str) -> httpx.Response:
    return httpx.get(f"http://{service.address}{path}", trust_env=False, timeout=30)


def test_a_server_that_is_not_ready_still_lives(service: Any) -> None:
    ready = answer(service, "/v1/ready")
    assert (ready.status_code, ready.json()["Status"]) == (200, "ready")
    service.services.readiness.expect(("job",), 9.0, lambda: 0.0)
    refusal = answer(service, "/v1/ready")
    assert (refusal.status_code, refusal.headers["x-amzn-errortype"]) == (503, "ServiceUnavailableException")
    assert refusal.json()["Message"] == "This server is not ready: the job loop has not finished its first sweep."
    assert answer(service, "/v1/health").status_code == 200
