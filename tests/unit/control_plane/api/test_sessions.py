"""Browser sessions: sign-in exchanges a token for a cookie with the same permissions.

The service accepts the cookie only in requests from its own pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest

from control_plane.api import sessions
from control_plane.db import tokens
from control_plane.db.tokens import NewToken, Role, TokenKind

pytestmark = pytest.mark.security


@pytest.fixture
def browser(service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{service.address}", trust_env=False, timeout=30) as client:
        client.headers["sec-fetch-site"] = "same-origin"
        yield client


def sign_in(browser: httpx.Client, token: str, **options) -> httpx.Response:
    return browser.post("/v1/session", json={"Token": token}, headers={"origin": str(browser.base_url)}, **options)


def test_a_token_becomes_a_cookie_that_scripts_cannot_read_and_other_sites_do_not_send(service, browser) -> None:
    answer = sign_in(browser, service.admin_token)
    assert answer.status_code == 200
    assert (answer.json()["Role"], answer.json()["Project"]) == ("admin", "")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert service.admin_token.lower() not in cookie
    assert browser.get("/v1/training-jobs").status_code == 200
    assert browser.get("/v1/session").json()["TokenId"] == answer.json()["TokenId"]


def test_a_cookie_over_https_is_secure(service, browser) -> None:
    answer = browser.post(
        "/v1/session",
        json={"Token": service.admin_token},
        headers={"origin": f"https://{service.address}", "x-forwarded-proto": "https"},
    )
    assert "secure" in answer.headers["set-cookie"].lower()
    assert "secure" not in sign_in(browser, service.admin_token).headers["set-cookie"].lower()


@pytest.mark.parametrize("token", ["est_nobody", " "])
def test_a_token_that_is_not_good_is_no_way_in(service, browser, token) -> None:
    answer = sign_in(browser, token)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_an_agents_token_is_no_way_in(service, browser) -> None:
    with service.database.write() as session:
        token, _ = tokens.mint(
            session, NewToken(kind=TokenKind.JOIN, role=Role.AGENT, fleet_name="main"), service.clock()
        )
    assert sign_in(browser, token).status_code == 403


def test_a_session_ends_after_twelve_hours(service, browser) -> None:
    sign_in(browser, service.admin_token)
    service.clock.advance(sessions.SESSION_SECONDS - 1)
    assert browser.get("/v1/training-jobs").status_code == 200
    service.clock.advance(1)
    answer = browser.get("/v1/training-jobs")
    assert answer.status_code == 401
    assert "expired" in answer.json()["Message"]
    assert browser.get("/v1/session").status_code == 204


def test_a_session_ends_with_its_token(service, browser) -> None:
    with service.database.write() as session:
        end = service.clock() + timedelta(minutes=5)
        token, record = tokens.mint(
            session, NewToken(kind=TokenKind.USER, role=Role.VIEWER, project="a", expires_at=end), service.clock()
        )
    assert sign_in(browser, token).json()["ExpiresAt"] == end.timestamp()
    assert browser.get("/v1/training-jobs").status_code == 200
    with service.database.write() as session:
        tokens.revoke(session, record.id, service.clock())
    assert browser.get("/v1/training-jobs").status_code == 401


def test_a_session_has_the_role_of_its_token(service, browser) -> None:
    assert sign_in(browser, service.token(Role.VIEWER, "a")).json()["Role"] == "viewer"
    answer = browser.post("/v1/training-jobs/none/stop", headers={"origin": str(browser.base_url)})
    assert answer.status_code == 403
    assert "viewer" in answer.json()["Message"]


def altered(value: str, change: str) -> str:
    token_id, expiry, seal = value.split(".", 2)
    return {
        "another token": f"tok-0000.{expiry}.{seal}",
        "a later end": f"{token_id}.{int(expiry) + 1}.{seal}",
        "another seal": f"{token_id}.{expiry}.{'0' * len(seal)}",
        "no seal": f"{token_id}.{expiry}.",
        "no figures": f"{token_id}..{seal}",
        "nothing": "x",
        "too long": f"{token_id}.{'9' * 400}.{seal}",
    }[change]


@pytest.mark.parametrize(
    "change", ["another token", "a later end", "another seal", "no seal", "no figures", "nothing", "too long"]
)
def test_a_cookie_that_was_changed_opens_nothing(service, browser, change) -> None:
    sign_in(browser, service.admin_token)
    name, value = next(iter(browser.cookies.items()))
    browser.cookies.clear()
    answer = browser.get("/v1/training-jobs", headers={"cookie": f"{name}={altered(value, change)}"})
    assert answer.status_code == 401


SITES = [
    ("POST", {"sec-fetch-site": "cross-site"}, 403),
    ("POST", {"sec-fetch-site": "same-site"}, 403),
    ("POST", {"sec-fetch-site": "none"}, 403),
    ("POST", {"sec-fetch-site": "same-origin"}, 404),
    ("POST", {"origin": "http://evil.example"}, 403),
    ("POST", {"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 403),
    ("POST", {"origin": "null"}, 403),
    ("POST", {"origin": "own"}, 404),
    ("POST", {}, 403),
    ("GET", {"sec-fetch-site": "cross-site"}, 403),
    ("GET", {"sec-fetch-site": "none"}, 404),
    ("GET", {}, 404),
]


@pytest.mark.parametrize(("method", "headers", "status"), SITES)
def test_a_session_works_for_our_own_pages_alone(service, browser, method, headers, status) -> None:
    sign_in(browser, service.admin_token)
    del browser.headers["sec-fetch-site"]
    headers = {name: str(browser.base_url) if value == "own" else value for name, value in headers.items()}
    path = "/v1/training-jobs/none" + ("/stop" if method == "POST" else "")
    assert browser.request(method, path, headers=headers).status_code == status


def test_another_site_cannot_sign_a_browser_in(service, browser) -> None:
    answer = browser.post("/v1/session", json={"Token": service.admin_token}, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_a_bearer_token_counts_before_a_session_and_needs_no_site(service, browser) -> None:
    sign_in(browser, service.token(Role.VIEWER, "a"))
    headers = {"authorization": f"Bearer {service.admin_token}", "sec-fetch-site": "cross-site"}
    assert browser.post("/v1/training-jobs/none/stop", headers=headers).status_code == 404
    assert browser.get("/v1/training-jobs", headers={"authorization": "Bearer est_nobody"}).status_code == 401


def test_signing_out_makes_the_browser_forget(service, browser) -> None:
    sign_in(browser, service.admin_token)
    assert browser.delete("/v1/session", headers={"origin": str(browser.base_url)}).status_code == 204
    assert not browser.cookies
    assert browser.get("/v1/session").status_code == 204


def test_a_copy_of_a_cookie_opens_nothing_after_its_session_was_signed_out(service, browser) -> None:
    sign_in(browser, service.admin_token)
    copied = dict(browser.cookies)
    sign_in(browser, service.admin_token)
    other = dict(browser.cookies)
    assert copied != other, "each sign-in makes a session of its own"
    browser.cookies.clear()
    for _ in range(2):
        assert (
            browser.delete(
                "/v1/session", headers={"origin": str(browser.base_url), "cookie": cookie_of(copied)}
            ).status_code
            == 204
        )
    answer = browser.get("/v1/training-jobs", headers={"cookie": cookie_of(copied)})
    assert (answer.status_code, "signed out" in answer.json()["Message"]) == (401, True)
    assert browser.get("/v1/training-jobs", headers={"cookie": cookie_of(other)}).status_code == 200


def test_a_cookie_that_was_planted_before_is_replaced_by_signing_in(service, browser) -> None:
    sign_in(browser, service.token(Role.VIEWER, "a"))
    planted = dict(browser.cookies)
    answer = sign_in(browser, service.admin_token)
    assert answer.headers["set-cookie"].split("=", 1)[1].split(";")[0] not in planted.values()
    assert browser.get("/v1/session").json()["Role"] == "admin"
    browser.cookies.clear()
    assert browser.get("/v1/session", headers={"cookie": cookie_of(planted)}).json()["Role"] == "viewer"


def cookie_of(cookies: dict[str, str]) -> str:
    return "; ".join(f"{name}={value}" for name, value in cookies.items())
