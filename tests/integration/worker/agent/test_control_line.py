"""The control plane's machine vanishes without closing the connection. The agent notices the dead connection."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from everstep.protocol.agent_messages import NoticeKind
from tests.instance_metadata import SPOT, served
from tests.integration.worker.agent.fleet import TIMEOUTS, Fleet, until
from worker.agent import control_client
from worker.node.sockets import tune

pytestmark = pytest.mark.integration


async def test_the_line_is_tuned_to_the_lease_that_the_control_plane_names(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[tuple[int, int]] = []

    def seen(line: socket.socket, *, silence_seconds: float) -> None:
        tune(line, silence_seconds=silence_seconds)
        tuned.append(
            (
                line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
        )

    monkeypatch.setattr(control_client, "tune", seen)
    node = fleet.nodes[0]
    await node.stop()
    node.start()
    await fleet.connected()
    assert set(tuned) == {(1, round(1000 * TIMEOUTS.lease_seconds))}


async def test_an_agent_tries_one_replica_after_the_other(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    await node.stop()
    (url,) = node.settings.control_plane_urls
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # a bound port that does not listen refuses connections
        node.settings = dataclasses.replace(
            node.settings,
            control_plane_urls=(f"http://127.0.0.1:{nobody.getsockname()[1]}", url),
        )
        node.start()
        await fleet.connected()
    assert fleet.control.hellos[-1].node_id == node.id


async def test_what_the_instance_announces_is_in_the_next_report(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    await node.stop()
    with served() as service:
        service.says["spot/instance-action"] = SPOT
        node.settings = dataclasses.replace(node.settings, metadata_endpoint=service.url)
        node.start()
        await until(
            "the notice", lambda: node.id in fleet.control.reports and len(fleet.control.reports[node.id].notices) == 1
        )
        assert fleet.control.reports[node.id].notices[0].kind is NoticeKind.SPOT_INTERRUPTION
        assert all(not fleet.control.reports[other.id].notices for other in fleet.nodes[1:])
