"""An agent's TLS identity survives a restart of the agent, and accepts certificates for its own key only."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.certificates import FleetAuthorities
from everstep.protocol.ids import NodeId
from tests.fakes.identities import FLEET, SECRET, identity_of
from worker.errors import PeerRefused
from worker.replication.identity import PeerIdentity

NODE = NodeId("i-1")


def certified(path: Path) -> PeerIdentity:
    identity = PeerIdentity(path)
    identity.accept(FleetAuthorities(SECRET).issue(FLEET, NODE, identity.public_key, datetime.now(UTC)))
    return identity


def test_the_next_agent_process_uses_the_stored_key_and_certificate(tmp_path: Path) -> None:
    path = tmp_path / "peer_identity"
    before = certified(path)
    after = PeerIdentity(path)
    assert after.public_key == before.public_key
    assert after.name_of(NODE) == "everstep://main/i-1"
    after.context(is_server=True)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"\x93", b"not msgpack"])
def test_a_damaged_file_means_a_new_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer_identity"
    before = certified(path)
    path.write_bytes(content)
    after = PeerIdentity(path)
    assert after.public_key != before.public_key
    with pytest.raises(PeerRefused, match="no TLS certificate yet"):
        after.context(is_server=False)


def test_a_certificate_for_another_key_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "peer_identity"
    identity = certified(path)
    stored, context = path.read_bytes(), identity.context(is_server=True)
    other = FleetAuthorities(SECRET).issue(FLEET, NODE, identity_of(NODE).public_key, datetime.now(UTC))
    identity.accept(other)
    assert identity.context(is_server=True) is context
    assert path.read_bytes() == stored


def test_a_full_disk_costs_the_next_process_its_certificate_and_this_one_nothing(tmp_path: Path) -> None:
    identity = certified(tmp_path / "missing" / "peer_identity")
    identity.context(is_server=True)
