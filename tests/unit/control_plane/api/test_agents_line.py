"""The agent's own line against the real route: a join token becomes a session, kept for the next agent of the node."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from control_plane.core.timeouts import ladder
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import Timeouts
from tests.unit.control_plane.api.test_agents import hello, report, until
from worker.control_client import ControlClient


async def test_an_agent_joins_over_plain_http_on_this_machine(service, token, node, tmp_path) -> None:
    ladders: list[Timeouts] = []
    line = ControlClient(
        [f"http://{service.address}"],
        join_token=token,
        token_path=tmp_path / "session_token",
        hello=lambda: hello(node),
        report=lambda: report(node),
        command=lambda _: None,
        welcomed=ladders.append,
    )
    running = asyncio.create_task(line.run())
    await until(lambda: (view := service.services.registry.views().get(NodeId(node))) and view.report)
    assert ladders == [ladder(3.0)]
    assert line._open_seconds == 3.0, "a server that does not answer within a lease is left for the next one"
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert (tmp_path / "session_token").read_text().startswith("est_")
    assert (tmp_path / "session_token").stat().st_mode & 0o777 == 0o600
