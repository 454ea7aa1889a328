"""Tests an agent's own client against the real route of the control plane.

The client exchanges a join token for a session token, which the next agent of the same node uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from control_plane.core.timeouts import ladder
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import Timeouts
from tests.unit.control_plane.api.conftest import GROUP
from tests.unit.control_plane.api.test_agents import hello, join, line, report, until
from worker.agent.control_client import ControlClient


@asynccontextmanager
async def agent(
    service, token: str, node: str, token_path: Path, ladders: list[Timeouts]
) -> AsyncIterator[ControlClient]:
    """Yield the client of an agent after its first report."""
    client = ControlClient(
        [f"http://{service.address}"],
        join_token=token,
        token_path=token_path,
        hello=lambda: hello(node),
        report=lambda: report(node),
        command=lambda _: None,
        welcomed=ladders.append,
    )
    running = asyncio.create_task(client.run())
    try:
        await until(lambda: (view := service.services.registry.views().get(NodeId(node))) and view.report)
        yield client
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_an_agent_joins_over_plain_http_on_this_machine(service, token, node, tmp_path) -> None:
    ladders: list[Timeouts] = []
    async with agent(service, token, node, tmp_path / "session_token", ladders) as client:
        assert ladders == [ladder(3.0)]
        assert client._open_seconds == 3.0, "a server that does not answer within a lease is left for the next one"
    assert (tmp_path / "session_token").read_text().startswith("est_")
    assert (tmp_path / "session_token").stat().st_mode & 0o777 == 0o600


async def test_an_agent_that_has_the_session_of_another_node_joins_anew(service, token, tmp_path) -> None:
    """An agent finds the session token of another node on its disk. It joins with its join token and gets its own
    session.

    This happens if the instance was launched from an image of the other node.
    """
    first, second = (member.instance_id for member in service.operator.describe_group(GROUP).members)
    async with line(service, token) as opened:
        session = (await join(opened, first)).session_token
    (tmp_path / "session_token").write_text(session)
    async with agent(service, token, second, tmp_path / "session_token", []):
        assert (tmp_path / "session_token").read_text() != session
