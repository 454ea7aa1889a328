"""Tests rules that hold for every operation of the API.

The service verifies the token before it reads the body, and each response has the security headers.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress

import httpx
import pytest
from starlette.exceptions import HTTPException

from control_plane.api.auth import OPEN_PATHS
from control_plane.api.envelope import Envelope
from control_plane.api.surface import make_surface, operations
from tests.unit.control_plane.api.conftest import Service

EVERY = [(path, method) for path, method, _ in operations(make_surface().openapi())]
TOKENLESS = [(path, method) for path, method in EVERY if path not in OPEN_PATHS]
ENDLESS = {"/v1/events/stream"}


@pytest.fixture(scope="module")
def database_url() -> str:
    return ""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("service")) as running:
        yield running


def filled(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: {"Rank": "0", "Step": "5", "SourceId": "0" * 64}.get(match[1], "x"), path)


def said(service: Service, head: str) -> bytes:
    host, port = service.address.split(":")
    with socket.create_connection((host, int(port)), 10) as opened:
        opened.sendall(head.encode())
        return opened.recv(4096)


@pytest.mark.security
@pytest.mark.parametrize(("path", "method"), TOKENLESS)
@pytest.mark.parametrize("token", ["", "Authorization: Bearer est_wrong\r\n", "Cookie: everstep-00000000=x\r\n"])
def test_no_byte_of_a_body_is_waited_for_before_the_token_is_good(
    service: Service, path: str, method: str, token: str
) -> None:
    answer = said(
        service,
        f"{method} {filled(path)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"1000\r\n{token}\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 401"), answer[:200]


@pytest.mark.security
@pytest.mark.parametrize(("path", "method"), EVERY)
def test_every_answer_carries_the_security_headers(service: Service, path: str, method: str) -> None:
    for token in ("", service.admin_token):
        if token and path in ENDLESS:
            continue
        headers = {"authorization": f"Bearer {token}"} if token else {}
        with suppress(httpx.ReadTimeout):
            answer = httpx.request(
                method, f"http://{service.address}{filled(path)}", headers=headers, trust_env=False, timeout=10
            )
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert "strict-transport-security" not in answer.headers, "this server speaks plain http"


@pytest.mark.security
async def test_over_tls_browsers_are_told_to_stay_with_it() -> None:
    sent = []

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"public")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/assets/x.js", "scheme": "https", "headers": []}
    await Envelope(app, 10)(scope, None, send)
    headers = dict(sent[0]["headers"])
    assert headers[b"strict-transport-security"] == b"max-age=31536000"
    assert headers[b"cache-control"] == b"public", "the dashboard says itself how long its files may be kept"


@pytest.mark.security
async def test_a_body_that_drips_is_cut_off_though_it_is_never_silent() -> None:
    refused = []

    async def drip():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def app(scope, receive, send) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except HTTPException as error:
            refused.append(error.status_code)

    scope = {"type": "http", "method": "POST", "path": "/v1/tokens", "scheme": "http", "headers": []}
    await Envelope(app, 10**6, body_seconds=0.0)(scope, drip, None)
    assert refused == [408]


@pytest.mark.security
@pytest.mark.parametrize(("path", "method"), [(path, method) for path, method in EVERY if method != "GET"])
@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 100_000], ids=["lists", "objects", "digits"]
)
def test_json_that_no_parser_takes_is_no_failure_of_the_service(
    service: Service, path: str, method: str, body: bytes
) -> None:
    headers = {"authorization": f"Bearer {service.admin_token}", "content-type": "application/json"}
    answer = httpx.request(
        method, f"http://{service.address}{filled(path)}", content=body, headers=headers, trust_env=False, timeout=10
    )
    assert 400 <= answer.status_code < 500, answer.text[:200]
