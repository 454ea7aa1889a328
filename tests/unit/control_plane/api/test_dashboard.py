"""Tests the dashboard's server: pages and files, requests for other paths, and a checkout without a built dashboard."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from control_plane.api.dashboard import NONCE, Dashboard
from hatch_build import WheelHook

INDEX = (
    f'<!doctype html><meta name="csp-nonce" content="{NONCE}"><script type="module" '
    'src="/assets/main-1a2b.js"></script>'
)


@pytest.fixture
def built(service, tmp_path: Path) -> Path:
    directory = tmp_path / "static"
    (directory / "assets").mkdir(parents=True)
    (directory / "index.html").write_text(INDEX)
    (directory / "favicon.svg").write_text("<svg/>")
    (directory / "runbook.html").write_text("<h3>Paused</h3>")
    (directory / "assets" / "main-1a2b.js").write_text("start()")
    (directory / "assets" / "main-1a2b.js.gz").write_bytes(gzip.compress(b"start()"))
    (tmp_path / "secret.txt").write_text("secret")
    router = service.app.router
    router.default = Dashboard(otherwise=router.not_found, directory=directory)
    return directory


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{service.address}", trust_env=False, timeout=30) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/jobs", "/jobs/gpt", "/incidents/inc-1", "/jobs/a.b", "/index.html", "/v2"])
def test_a_path_without_a_route_is_a_page(built, http, path) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-store"


def test_a_page_runs_our_scripts_alone(built, http) -> None:
    first, second = http.get("/"), http.get("/")
    policy = first.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    nonce = re.search(r"'nonce-([^']+)'", policy)
    assert nonce is not None
    assert nonce[1] in first.text
    assert NONCE not in first.text
    assert nonce[1] not in second.text
    assert first.headers["x-content-type-options"] == "nosniff"


def test_a_page_that_is_only_read_runs_nothing(built, http) -> None:
    answer = http.get("/runbook.html")
    assert answer.text == "<h3>Paused</h3>"
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self';")
    assert "script-src" not in policy
    assert "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY"


def test_what_carries_its_hash_is_kept_for_ever(built, http) -> None:
    answer = http.get("/assets/main-1a2b.js")
    assert answer.text == "start()"
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/javascript")
    plain = http.get("/assets/main-1a2b.js", headers={"accept-encoding": "identity"})
    assert plain.text == "start()"
    assert "content-encoding" not in plain.headers
    assert http.get("/favicon.svg").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/assets/main-0000.js",
        "/assets/",
        "/assets/../secret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/assets/.hidden",
    ],
)
def test_a_missing_file_is_not_a_page(built, http, path) -> None:
    answer = http.get(path)
    assert answer.status_code == 404 or answer.text.startswith("<!doctype html>")
    assert "secret" not in answer.text
    assert http.get("/assets/main-0000.js").status_code == 404


@pytest.mark.parametrize("path", ["/%2e%2e%2fsecret.txt", "/..%5csecret.txt", "/%00.txt", "/.env"])
def test_nothing_outside_is_read(built, http, path) -> None:
    assert "secret" not in http.get(path).text


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/none", "/v1/training-jobs/"])
def test_what_is_under_v1_is_the_api(built, service, http, path) -> None:
    answer = http.get(path, headers={"authorization": f"Bearer {service.admin_token}"})
    assert answer.status_code == 404
    assert answer.json()["Code"] == "ResourceNotFoundException"


def test_pages_are_only_read(built, service, http) -> None:
    assert http.post("/jobs").status_code == 405
    assert http.put("/v1/training-jobs", headers={"authorization": f"Bearer {service.admin_token}"}).status_code == 405
    assert http.put("/v1/training-jobs").status_code == 401
    assert http.head("/jobs").status_code == 200


def test_a_checkout_without_a_build_says_how_to_build(service, tmp_path: Path, http) -> None:
    router = service.app.router
    router.default = Dashboard(otherwise=router.not_found, directory=tmp_path / "none")
    answer = http.get("/jobs")
    assert answer.status_code == 503
    assert "make web" in answer.text
    assert http.get("/assets/main-1a2b.js").status_code == 404


def test_a_wheel_without_the_dashboard_is_not_built(tmp_path: Path) -> None:
    hook = WheelHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    assert isinstance(hook, BuildHookInterface)
    with pytest.raises(RuntimeError, match="make web"):
        hook.initialize("standard", {})
    hook.initialize("editable", {})
