"""The logs of a node are in S3 before its instance ends, and a missing log delays the end only briefly."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.cloud.errors import CloudError
from control_plane.loop.context import LoopContext
from control_plane.loop.last_logs import REMEMBERED_COUNT, WAIT_SECONDS, LastLogs
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import ObjectReference

NODE = NodeId("i-1")


@dataclass
class Report:
    evidence_key: str = ""


@dataclass
class View:
    is_connected: bool = True
    report: Report = field(default_factory=Report)


@dataclass
class FleetRows:
    """The cloud, the object store and the registry of agents, as far as the module uses them."""

    view_of_node: View = field(default_factory=View)
    answers: bool = True
    fails: bool = False
    stored: list[tuple[str, bytes]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)

    def console_output(self, node_id: NodeId) -> bytes:
        if self.fails:
            raise CloudError("not allowed", code="UnauthorizedOperation")
        return f"console of {node_id}".encode()

    def put(self, at: ObjectReference, body: bytes) -> None:
        self.stored.append((f"{at.bucket}/{at.key}", body))

    def view(self, node_id: NodeId) -> View:
        return self.view_of_node

    def send(self, node_id: NodeId, message: Any) -> bool:
        self.sent.append(message)
        if self.answers:
            self.view_of_node.report.evidence_key = message.place.key
        return True


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> datetime:
        return datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)


def last_logs(around: FleetRows, clock: Clock | None = None) -> LastLogs:
    parts = SimpleNamespace(operator=around, objects=around, registry=around, bucket="bucket", now=clock or Clock())
    return LastLogs(cast(LoopContext, parts))


async def test_an_instance_ends_after_its_console_and_its_agents_log_are_stored() -> None:
    around = FleetRows()
    logs = last_logs(around)
    assert not await logs.may_end(NODE)
    assert await logs.may_end(NODE)
    assert around.stored == [("bucket/evidence/i-1/console.log", b"console of i-1")]
    assert [message.place.key for message in around.sent] == ["evidence/i-1/"]


async def test_a_node_without_a_connection_is_not_asked() -> None:
    around = FleetRows(view_of_node=View(is_connected=False))
    assert await last_logs(around).may_end(NODE)
    assert around.sent == []
    assert around.stored


async def test_a_refusal_of_ec2_and_a_silent_agent_delay_an_end_only_briefly(caplog: pytest.LogCaptureFixture) -> None:
    around, clock = FleetRows(fails=True, answers=False), Clock()
    logs = last_logs(around, clock)
    assert not await logs.may_end(NODE)
    clock.seconds = WAIT_SECONDS - 0.1
    assert not await logs.may_end(NODE)
    clock.seconds = WAIT_SECONDS
    assert await logs.may_end(NODE)
    assert caplog.text.count("node i-1: its console output is not stored before its end: not allowed") == 1


async def test_the_number_of_remembered_nodes_is_limited() -> None:
    around = FleetRows(view_of_node=View(is_connected=False))
    logs = last_logs(around)
    for number in range(REMEMBERED_COUNT + 1):
        await logs.may_end(NodeId(f"i-{number}"))
    await logs.may_end(NodeId(f"i-{REMEMBERED_COUNT}"))
    assert len(around.stored) == REMEMBERED_COUNT + 1
    await logs.may_end(NodeId("i-0"))
    assert len(around.stored) == REMEMBERED_COUNT + 2, "the oldest node is forgotten"
