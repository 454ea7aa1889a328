"""Tests the control plane's certificates for agents. Each fleet has one authority, the same on every server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.certificates import FleetAuthorities
from everstep.protocol.certificates import CERTIFICATE_SECONDS, RENEWAL_SECONDS, SKEW_SECONDS
from everstep.protocol.ids import FleetName, NodeId

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
KEY = bytes(range(32))
secrets = st.binary(min_size=32, max_size=32)
names = st.from_regex(r"[a-z][a-z0-9-]{0,62}", fullmatch=True)


@settings(max_examples=15, deadline=None)
@given(secret=secrets, fleet=names, node=names)
def test_all_servers_of_an_installation_have_one_authority_per_fleet(secret: bytes, fleet: str, node: str) -> None:
    first, second = (FleetAuthorities(secret).issue(FleetName(fleet), NodeId(node), KEY, NOW) for _ in range(2))
    assert first.authority == second.authority
    assert first.certificate != second.certificate  # serial numbers are random
    authority = x509.load_der_x509_certificate(first.authority)
    issued = x509.load_der_x509_certificate(second.certificate)
    issued.verify_directly_issued_by(authority)
    found = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.UniformResourceIdentifier) == [f"everstep://{fleet}/{node}"]
    assert issued.public_key().public_bytes_raw() == KEY  # type: ignore[union-attr]


@settings(max_examples=15, deadline=None)
@given(secret=secrets, other_secret=secrets, fleet=names, other_fleet=names)
def test_another_fleet_or_another_installation_has_another_authority(
    secret: bytes, other_secret: bytes, fleet: str, other_fleet: str
) -> None:
    def key(secret: bytes, fleet: str) -> bytes:
        issued = FleetAuthorities(secret).issue(FleetName(fleet), NodeId("i-1"), KEY, NOW)
        return x509.load_der_x509_certificate(issued.authority).public_key().public_bytes_raw()  # type: ignore[union-attr]

    assert (key(secret, fleet) == key(secret, other_fleet)) is (fleet == other_fleet)
    assert (key(secret, fleet) == key(other_secret, fleet)) is (secret == other_secret)


def test_a_certificate_is_short_lived_and_tolerates_a_slow_clock() -> None:
    issued = x509.load_der_x509_certificate(
        FleetAuthorities(b"s" * 32).issue(FleetName("main"), NodeId("i-1"), KEY, NOW).certificate
    )
    assert issued.not_valid_before_utc == NOW - timedelta(seconds=SKEW_SECONDS)
    assert issued.not_valid_after_utc == NOW + timedelta(seconds=CERTIFICATE_SECONDS)
    # The renewal leaves room for an hour of skew and half a day without a control plane.
    assert RENEWAL_SECONDS + SKEW_SECONDS + 12 * 3600 < CERTIFICATE_SECONDS
    constraints = issued.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
