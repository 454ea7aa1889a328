"""TLS between nodes is on, unless EC2 encrypts the traffic between all of them or the fleet turns it off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import moto.ec2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.encryption import ENCRYPTING_FAMILIES, ReplicaEncryption, encrypts_in_transit, is_needed

TYPES = st.sampled_from(["p5.48xlarge", "c7i.2xlarge", "m5.large", "p3.16xlarge", "future9.large", ""])


def supported() -> dict[str, bool]:
    """Return `EncryptionInTransitSupported` of each instance type, from moto's copy of DescribeInstanceTypes."""
    path = Path(moto.ec2.__file__).parent / "resources" / "instance_types.json.gz"
    described = json.loads(gzip.decompress(path.read_bytes()))
    return {name: found["NetworkInfo"]["EncryptionInTransitSupported"] for name, found in described.items()}


def test_no_type_of_the_table_sends_plain_traffic() -> None:
    plain = {name for name, is_supported in supported().items() if encrypts_in_transit(name) and not is_supported}
    assert plain == set()


def test_the_table_contains_every_family_with_accelerators() -> None:
    accelerated = ("p3", "p4", "p5", "p6", "g4dn", "g5", "g6", "gr6", "inf", "trn", "hpc")
    encrypting = {name.partition(".")[0] for name, is_supported in supported().items() if is_supported}
    assert {family for family in encrypting if family.startswith(accelerated)} <= ENCRYPTING_FAMILIES
    assert not encrypts_in_transit("g5g.xlarge")
    assert not encrypts_in_transit("p3.16xlarge")


@given(types=st.sets(TYPES))
def test_auto_needs_tls_unless_every_type_is_known_to_encrypt(types: set[str]) -> None:
    assert is_needed(ReplicaEncryption.AUTO, types) is not bool(types and types <= {"p5.48xlarge", "c7i.2xlarge"})
    assert is_needed(ReplicaEncryption.ON, types)
    assert not is_needed(ReplicaEncryption.OFF, types)


@pytest.mark.parametrize("name", ["p5", "p5.48xlarge"])
def test_a_family_is_the_part_before_the_dot(name: str) -> None:
    assert encrypts_in_transit(name)
