"""Tests with which credentials a node opens its connections in one generation."""

from __future__ import annotations

import logging

import msgspec
import pytest

from everstep.protocol.ids import NodeId
from tests.fakes.identities import identity_of
from tests.unit.worker.rank_plans import rank_plan
from worker.member.peer_sessions import PeerSessions
from worker.replication.nixl import Nixl


class Unopened(Nixl):
    """A NIXL agent that this test only passes on."""

    def __init__(self) -> None:
        pass


@pytest.mark.security
@pytest.mark.parametrize("encrypts_peers", [False, True])
def test_a_generation_with_tls_uses_no_nixl_and_the_agent_says_so(
    encrypts_peers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = msgspec.structs.replace(rank_plan(), encrypts_peers=encrypts_peers)
    nixl = Unopened()
    with caplog.at_level(logging.INFO):
        sessions = PeerSessions(
            NodeId("i-0"), "127.0.0.1", plan, b"k" * 32, identity=identity_of(NodeId("i-0")), nixl=nixl
        )
    assert sessions.credentials.nixl is (None if encrypts_peers else nixl)
    assert ("generation 1 uses TCP instead of NIXL, because NIXL carries no TLS" in caplog.text) == encrypts_peers
