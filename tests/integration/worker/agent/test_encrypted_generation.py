"""A generation whose plan requires TLS: real agents replicate, commit and restore over encrypted connections."""

from __future__ import annotations

import pytest

from tests.integration.worker.agent.fleet import Fleet
from tests.integration.worker.agent.test_generations import check_restored, come_back_empty

pytestmark = pytest.mark.integration


async def test_a_new_node_restores_from_a_peer_and_an_old_agent_keeps_its_certificate(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.encrypts_peers = True
    await fleet.launch()
    await fleet.train(4)
    lost = fleet.nodes[1]
    await come_back_empty(lost)
    await fleet.launch()
    check_restored(fleet)
    member = fleet.control.member(lost.id)
    assert member is not None
    assert member.restored_from == ("peer",)
    assert fleet.plan is not None
    # The coordinator's agent restarts and gets no new certificate, as if its control plane could not issue one.
    fleet.control.issues_certificates = False
    await fleet.nodes[0].stop()
    fleet.nodes[0].start()
    await fleet.train(fleet.plan.base_step + 3)
    assert not [record for record in caplog.records if "TLS" in record.getMessage()]
