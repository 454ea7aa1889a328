"""The agent's line to the control plane notices an end that has vanished without a word."""

from __future__ import annotations

import socket

import pytest

from tests.integration.worker.agent.fleet import TIMEOUTS, Fleet, until
from worker import control_client
from worker.sockets import tune

pytestmark = pytest.mark.integration


async def test_the_line_is_tuned_to_the_lease_that_the_control_plane_names(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[tuple[int, int]] = []

    def seen(line: socket.socket, *, silence_seconds: float) -> None:
        tune(line, silence_seconds=silence_seconds)
        tuned.append((line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))

    monkeypatch.setattr(control_client, "tune", seen)
    node = fleet.nodes[0]
    await node.stop()
    await until("the line to end", lambda: not fleet.control.is_connected(node.id))
    node.start()
    await fleet.connected()
    assert set(tuned) == {(1, round(1000 * TIMEOUTS.lease_seconds))}
