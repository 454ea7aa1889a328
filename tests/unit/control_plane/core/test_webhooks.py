"""Tests which receivers a webhook may have, and how its messages are signed."""

from __future__ import annotations

import base64
import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.core.webhooks import WebhookRefused, allowed, check_addresses, key_of, signed_headers, target_of

ONLY = allowed(["hooks.example.com", "*.corp.example", "127.0.0.1", "10.1.0.0/16"])
NOWHERE = allowed([])
ENCODED = base64.b64encode(b"a" * 24).decode()
INTERNAL = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "::1",
    "::",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:169.254.169.254",
    "::ffff:127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::1",
]


def test_the_signature_is_that_of_the_standard() -> None:
    # Source: the example of https://github.com/standard-webhooks/standard-webhooks and of its libraries.
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert signed_headers([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}') == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_two_secrets_make_two_signatures() -> None:
    first, second = b"a" * 24, b"b" * 24
    both = signed_headers([first, second], "event-1", 1, b"{}")["webhook-signature"]
    one_each = [signed_headers([key], "event-1", 1, b"{}")["webhook-signature"] for key in (first, second)]
    assert both.split(" ") == one_each
    assert one_each[0] != one_each[1]


def test_receivers_are_host_names_and_networks() -> None:
    found = allowed(["Hooks.example.com", "10.1.0.0/16"])
    assert found.hosts == {"hooks.example.com"}
    assert found.networks == (ipaddress.ip_network("10.1.0.0/16"),)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_YQ==", "whsec_%%%", f"whsec_{ENCODED}%", ENCODED])
def test_a_weak_or_malformed_secret_is_refused(secret: str) -> None:
    with pytest.raises(WebhookRefused, match="EVERSTEP_WEBHOOK_SECRET"):
        key_of(secret)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://hooks.example.com", ("hooks.example.com", 443, "/", True)),
        ("https://HOOKS.example.com:8443/a/b?c=d", ("hooks.example.com", 8443, "/a/b?c=d", True)),
        ("https://a.b.corp.example/x", ("a.b.corp.example", 443, "/x", True)),
        ("http://127.0.0.1/x", ("127.0.0.1", 80, "/x", False)),
        ("https://hooks.example.com/a!b", ("hooks.example.com", 443, "/a!b", True)),
    ],
)
def test_an_allowed_url_has_a_target(url: str, found: tuple[str, int, str, bool]) -> None:
    target = target_of(url, ONLY)
    assert (target.host, target.port, target.path, target.is_secure) == found


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "https://other.example.com/",
        "https://corp.example/",
        "https://notcorp.example/",
        "https://hooks.example.com.attacker.example/",
        "https://hooks.example.com@attacker.example/",
        "https://user:word@hooks.example.com/",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/\r\nx: y",
        "https://hooks.example.com/#part",
        "https://hooks.example.com:99999/",
        "https://[::1/",
        "https:///path",
        "ftp://hooks.example.com/",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(WebhookRefused):
        target_of(url, ONLY)


@pytest.mark.security
@pytest.mark.parametrize("address", INTERNAL)
def test_no_name_leads_to_an_address_that_is_not_public(address: str) -> None:
    with pytest.raises(WebhookRefused, match="is not a public address"):
        check_addresses("hooks.example.com", ["93.184.215.14", address], NOWHERE)


def test_public_addresses_and_allowed_networks_are_reached() -> None:
    assert check_addresses("h", ["93.184.215.14", "2606:2800:21f:cb07::1"], NOWHERE) == "93.184.215.14"
    assert check_addresses("h", ["64:ff9b::5db8:d70e"], NOWHERE) == "64:ff9b::5db8:d70e"
    assert check_addresses("h", ["10.1.2.3"], ONLY) == "10.1.2.3"
    assert check_addresses("h", ["::ffff:10.1.2.3"], ONLY) == "::ffff:10.1.2.3"
    with pytest.raises(WebhookRefused):
        check_addresses("h", ["10.2.0.1"], ONLY)
    with pytest.raises(WebhookRefused, match="h has no address"):
        check_addresses("h", [], ONLY)


NAT64 = ipaddress.ip_network("64:ff9b::/96")


@given(st.lists(st.ip_addresses(), min_size=1, max_size=4))
@example([ipaddress.ip_address("64:ff9b::1.0.0.0")])
@example([ipaddress.ip_address("64:ff9b::10.0.0.1")])
def test_a_checked_address_is_never_private_loopback_or_link_local(found: list[ipaddress.IPv4Address]) -> None:
    try:
        chosen = ipaddress.ip_address(check_addresses("h", [str(address) for address in found], NOWHERE))
    except WebhookRefused:
        return
    assert chosen == found[0]
    for address in found:
        each = getattr(address, "ipv4_mapped", None) or address
        if address in NAT64:  # a gateway translates it into the IPv4 address in its last four bytes
            each = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        kinds = (each.is_private, each.is_loopback, each.is_link_local, each.is_multicast, each.is_reserved)
        assert kinds == (False,) * 5
