"""TLS between nodes is on, unless EC2 encrypts the traffic between all of them or the fleet turns it off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.encryption import ReplicaEncryption, is_needed

TYPES = st.sets(st.sampled_from(["p5.48xlarge", "c7i.2xlarge", "m5.large", "p3.16xlarge", "future9.large", ""]))


@given(types=TYPES, described=TYPES)
def test_auto_needs_tls_unless_every_type_is_known_to_encrypt(types: set[str], described: set[str]) -> None:
    encrypting = described & {"p5.48xlarge", "c7i.2xlarge"}
    assert is_needed(ReplicaEncryption.AUTO, types, encrypting) is not bool(types and types <= encrypting)
    assert is_needed(ReplicaEncryption.ON, types, encrypting)
    assert not is_needed(ReplicaEncryption.OFF, types, encrypting)
