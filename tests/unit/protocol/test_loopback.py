"""Addresses of this machine are recognized as such. Every other text counts as the address of another machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.host.loopback import is_loopback, is_this_machine, url_host

BROKEN = [
    "",
    "http",
    "http://",
    "http:///path",
    "127.0.0.1:80",
    "//127.0.0.1",
    "ftp://127.0.0.1",
    "http://[",
    "http://[::1",
    "http://127.0.0.1:port",
]
BROKEN += ["http://127.0.0.1:65536", "http://[127.0.0.1]", "http://127.0.0.1\uff0f@aws.example", "http:127.0.0.1"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "http://127.9.8.7", "https://[::1]:5/path?query", "http://localhost:80", "HTTP://LOCALHOST"],
)
def test_this_machine(url: str) -> None:
    assert is_loopback(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.1",
        "http://0.0.0.0:80",
        "http://127.0.0.1.example",
        "http://localhost.example",
        "http://127.0.0.1@aws.example",
        "http://2130706433",
        "http://[::ffff:192.0.2.1]",
    ],
)
def test_elsewhere(url: str) -> None:
    assert url_host(url)
    assert not is_loopback(url)


@pytest.mark.parametrize("url", BROKEN)
def test_what_is_no_url_has_no_host_and_is_elsewhere(url: str) -> None:
    assert url_host(url) == ""
    assert not is_loopback(url)


@given(st.text() | st.text().map("http://".__add__) | st.text().map("http://[".__add__))
def test_any_text_at_all_is_judged(text: str) -> None:
    assert is_loopback(text) is is_this_machine(url_host(text))


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("127.1.2.3", True), ("::1", True), ("", False), ("0.0.0.0", False), ("::", False)],
)
def test_hosts(host: str, own: bool) -> None:
    assert is_this_machine(host) is own
