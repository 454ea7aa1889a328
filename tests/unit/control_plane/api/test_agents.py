"""Tests the connection of agents to the control plane. The tests send messages to the real route, as an agent does."""

from __future__ import annotations

import asyncio
import contextlib
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import httpx
import msgspec
import pytest
from cryptography import x509
from msgspec import structs
from sqlalchemy.exc import OperationalError
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from control_plane.api.caller_threads import STRANGER_SECONDS
from control_plane.api.memberships import SHARED_SECONDS
from control_plane.api.routes.agents import (
    BYTES_PER_SECOND,
    CONNECTION_SECONDS,
    MALFORMED,
    MESSAGE_SECONDS,
    OTHER_VERSION,
    OVERSIZED,
    SESSION_CHECK_SECONDS,
    SNAPSHOT_BYTES_PER_SECOND,
    reading_seconds,
)
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.operator import Ec2State, InstanceState
from control_plane.db.session import Database
from control_plane.gate import FIRST_MESSAGE_BYTES
from everstep.protocol.agent_messages import (
    MAX_SNAPSHOT_READ_BYTES,
    AgentReport,
    AgentWelcome,
    CommandEnded,
    ControlToAgent,
    Hello,
    MemberPhase,
    MemberReport,
    MetricBatch,
    NodeMemory,
    NodeNotice,
    NoticeKind,
    RankMemory,
    ReadSnapshot,
    Release,
    SnapshotBytes,
)
from everstep.protocol.certificates import RENEWAL_SECONDS
from everstep.protocol.codec import PROTOCOL_MINOR, PROTOCOL_VERSION, UPDATE_ADVICE, decode, encode
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId
from everstep.protocol.limits import MAX_TEXT_CHARACTERS
from everstep.protocol.manifest import SharedObject
from everstep.protocol.pace import Pace
from everstep.protocol.shared_lists import SharedLists
from tests.newer_release import of_newer_release
from tests.unit.control_plane.api.conftest import GROUP
from tests.unit.protocol.test_shared_lists import upload


def hello(node: str, agent: str = "a1") -> Hello:
    return Hello(
        node_id=NodeId(node), agent_id=agent, address="127.0.0.9", peer_port=4000, memory_bytes=2**30, version="0.1.0"
    )


def report(node: str, sequence: int = 1) -> AgentReport:
    return AgentReport(node_id=NodeId(node), sequence=sequence, member=None)


@asynccontextmanager
async def line(service, token: str):
    url = f"ws://{service.address}/v1/agents/connect"
    async with connect(
        url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None, compression=None, close_timeout=5
    ) as opened:
        yield opened


async def join(opened, node: str, agent: str = "a1") -> AgentWelcome:
    await opened.send(encode(hello(node, agent)))
    welcome = decode(await opened.recv(), ControlToAgent)
    assert isinstance(welcome, AgentWelcome)
    return welcome


async def closed(opened) -> tuple[int, str]:
    """Wait until the server closes the connection. Return the code and the reason."""
    async with asyncio.timeout(10):
        await opened.wait_closed()
    return opened.close_code, opened.close_reason


async def until(condition) -> None:
    """Wait until `condition` returns True.

    The test polls, because the server's thread signals no event.
    """
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_member_joins_reports_and_is_told(client, service, token, node):
    async with line(service, token) as opened:
        welcome = await join(opened, node)
        assert (welcome.fleet, welcome.timeouts.lease_seconds) == ("main", 3.0)
        await opened.send(encode(report(node)))
        await until(lambda: (view := service.services.registry.views().get(node)) and view.report)
        shown = await asyncio.to_thread(client.describe_node, NodeId=node)
        assert (shown["Connected"], shown["Address"], shown["FleetName"]) == (True, "127.0.0.9", "main")
        # The registry belongs to the server's event loop. A call from this thread would not wake that loop.
        service.loop.call_soon_threadsafe(service.services.registry.send, NodeId(node), Release(run=RunId("0" * 32)))
        assert decode(await opened.recv(), ControlToAgent) == Release(run=RunId("0" * 32))
    await until(lambda: not service.services.registry.views()[node].is_connected)


async def test_an_agent_with_a_key_gets_a_certificate_and_another_before_it_expires(service, token, node):
    key, registry = bytes(range(32)), service.services.registry
    async with line(service, token) as opened:
        await opened.send(encode(structs.replace(hello(node), public_key=key)))
        assert isinstance(decode(await opened.recv(), ControlToAgent), AgentWelcome)
        issued = []
        for _ in range(2):
            issued.append(decode(await opened.recv(), ControlToAgent))
            found = x509.load_der_x509_certificate(issued[-1].certificate)
            found.verify_directly_issued_by(x509.load_der_x509_certificate(issued[-1].authority))
            assert found.public_key().public_bytes_raw() == key
            service.clock.advance(RENEWAL_SECONDS - 1)
            await opened.send(encode(report(node, 2 * len(issued) - 1)))
            await until(lambda: (seen := registry.views()[node].report) and seen.sequence == 2 * len(issued) - 1)
            service.clock.advance(SESSION_CHECK_SECONDS)
            await opened.send(encode(report(node, 2 * len(issued))))
    first, second = (x509.load_der_x509_certificate(each.certificate) for each in issued)
    assert second.not_valid_before_utc - first.not_valid_before_utc == timedelta(
        seconds=RENEWAL_SECONDS - 1 + SESSION_CHECK_SECONDS
    )
    assert issued[0].authority == issued[1].authority
    assert issued[0].fleet == "main"


async def test_the_largest_read_of_a_snapshot_passes_the_connection(service, token, node):
    wanted = ReadSnapshot(
        run=RunId("0" * 32),
        generation=Generation(1),
        request_id="a",
        hold_id="h",
        rank=Rank(0),
        begin=0,
        end=MAX_SNAPSHOT_READ_BYTES,
    )
    data = bytes(range(256)) * (MAX_SNAPSHOT_READ_BYTES // 256)
    async with line(service, token) as opened:
        await join(opened, node)
        desk = service.services.registry.snapshots
        asked = asyncio.run_coroutine_threadsafe(desk.read(NodeId(node), wanted), service.loop)
        assert decode(await opened.recv(), ControlToAgent) == wanted
        await opened.send(encode(SnapshotBytes(request_id="a", data=data)))
        answer = await asyncio.wrap_future(asked)
    assert answer.data == data
    await until(lambda: not service.services.registry.views()[node].is_connected)


async def test_a_session_token_opens_the_next_connections(service, token, node):
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
        await opened.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
    for _ in range(2):
        async with line(service, session) as opened:
            assert (await join(opened, node)).session_token == session


async def joined(service, token: str, node: str) -> str:
    """Join the fleet, send one report and disconnect. Return the session token."""
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
        await opened.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
    await until(lambda: not service.services.registry.views()[node].is_connected)
    return session


class Outage:
    """A database that does not answer while `is_away` is True."""

    def __init__(self, database: Database) -> None:
        self.is_away = False
        self._database = database

    def read(self):
        self._answer()
        return self._database.read()

    def write(self):
        self._answer()
        return self._database.write()

    def _answer(self) -> None:
        if self.is_away:
            raise OperationalError("SELECT 1", {}, Exception("the database is away"))


async def test_an_outage_of_the_database_closes_no_connection_and_new_ones_come_later(service, token, node, caplog):
    outage = Outage(service.database)
    service.app.state.services = replace(service.services, database=outage)
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
        await opened.send(encode(report(node, sequence=1)))
        await until(lambda: service.services.registry.views()[node].report)
        outage.is_away = True
        service.clock.advance(SESSION_CHECK_SECONDS)
        await opened.send(encode(report(node, sequence=2)))
        await until(lambda: service.services.registry.views()[node].report.sequence == 2)
        async with line(service, session) as another:
            assert await closed(another) == (1013, "the database does not answer: OperationalError")
        assert service.services.registry.views()[node].is_connected
    outage.is_away = False
    async with line(service, session) as opened:
        await join(opened, node)
    assert "Exception in ASGI application" not in caplog.text


def test_an_agent_that_leaves_before_it_is_refused_causes_no_error(service, token):
    received = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "a text frame is refused"}]
    sent = []

    async def receive() -> dict[str, object]:
        return received.pop(0)

    async def send(message: dict[str, object]) -> None:
        sent.append(message["type"])
        if message["type"] == "websocket.close":
            raise OSError("the agent has closed the connection")

    scope = {
        "type": "websocket",
        "path": "/v1/agents/connect",
        "query_string": b"",
        "state": {},
        "headers": [(b"authorization", f"Bearer {token}".encode())],
    }
    asyncio.run_coroutine_threadsafe(service.app(scope, receive, send), service.loop).result(20)
    assert sent == ["websocket.accept", "websocket.close"]


@pytest.mark.security
async def test_a_fresh_join_token_does_not_take_over_a_node_that_has_joined(client, service, token, node):
    session = await joined(service, token, node)
    fresh = (await asyncio.to_thread(client.create_join_token, FleetName="main"))["JoinToken"]
    for thief in (fresh, token):
        async with line(service, thief) as opened:
            await opened.send(encode(hello(node, "thief")))
            code, reason = await closed(opened)
        assert code == 4410
        assert f"everstep nodes reset-session {node}" in reason
    # The first agent stays connected while another client tries to join as the same node.
    async with (
        line(service, session) as opened,
        line(service, fresh) as other,
    ):
        await join(opened, node)
        await opened.send(encode(report(node, 2)))
        await other.send(encode(hello(node, "thief")))
        assert (await closed(other))[0] == 4410
        assert service.services.registry.views()[node].is_connected


@pytest.mark.security
async def test_of_two_that_join_as_one_node_only_the_first_to_report_stays(service, token, node):
    async with line(service, token) as first, line(service, token) as second:
        taken = (await join(first, node)).session_token
        mine = (await join(second, node, "a2")).session_token
        await second.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
    with pytest.raises(InvalidStatus):
        async with line(service, taken):
            pass
    async with line(service, mine) as opened:
        await join(opened, node, "a2")


@pytest.mark.security
async def test_a_node_that_shows_a_session_has_joined(service, token, node):
    """A node has joined as soon as its agent connects with the session token, even before any report.

    The service issues the session token during the first connection. In the test, this connection ends before the first
    report. Until the node has joined, the join token still admits another agent under the node's id (the thief). Then
    the first agent connects with the session token, and the service closes the thief's connection. It now accepts
    neither the join token nor the thief's session token for this node.
    """
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
    async with line(service, token) as thief:
        stolen = (await join(thief, node, "thief")).session_token
        async with line(service, session) as opened:
            await join(opened, node)
            assert (await closed(thief))[0] == 4409
    for refused in (stolen, token):
        with contextlib.suppress(InvalidStatus):
            async with line(service, refused) as opened:
                await opened.send(encode(hello(node, "thief")))
                assert (await closed(opened))[0] == 4410


@pytest.mark.security
@pytest.mark.covers("ResetNodeSession.NodeId", "ResetNodeSession.Reason")
async def test_an_administrator_resets_a_session_and_the_node_joins_once_more(client, service, token, node):
    session = await joined(service, token, node)
    async with line(service, session) as opened:
        await join(opened, node)
        await asyncio.to_thread(client.reset_node_session, NodeId=node, Reason="its disk is new")
        service.clock.advance(SESSION_CHECK_SECONDS)
        await opened.send(encode(report(node, 2)))
        code, reason = await closed(opened)
    assert (code, "was revoked" in reason) == (4401, True)
    assert await joined(service, token, node) != session
    told = [
        event
        for event in (await asyncio.to_thread(client.list_events))["Events"]
        if event["Type"] == "NodeSessionReset"
    ]
    assert "its disk is new" in told[0]["Message"]


@pytest.mark.security
@pytest.mark.parametrize("seconds", [SESSION_CHECK_SECONDS, -3600.0])
async def test_any_message_ends_a_revoked_session_even_if_the_clock_was_set_back(client, service, token, node, seconds):
    session = await joined(service, token, node)
    async with line(service, session) as opened:
        await join(opened, node)
        await asyncio.to_thread(client.reset_node_session, NodeId=node)
        service.clock.advance(seconds)
        await opened.send(encode(CommandEnded(command_id="c1")))
        assert (await closed(opened))[0] == 4401


BAD_FACTS = [
    {"node_id": "i-1\nFORGED"},
    {"node_id": "i" * 65},
    {"node_id": "é" * 200},
    {"node_id": ""},
    {"peer_port": 2**62},
    {"version": "1" * 60_000},
    {"version": "1\0"},
    {"agent_id": "a\u202eb"},
    {"address": "example.org"},
    {"memory_bytes": -1},
]


@pytest.mark.parametrize("changes", BAD_FACTS)
async def test_a_hello_with_what_no_node_has_is_refused(service, token, node, changes):
    async with line(service, token) as opened:
        await opened.send(encode(msgspec.structs.replace(hello(node), **changes)))
        assert (await closed(opened))[0] == 4400


BAD_REPORTS = [
    {"refused_count": 2**63},
    {"notices": (NodeNotice(kind=NoticeKind.REBALANCE, message="m", ends_at_seconds=math.inf),)},
    {"notices": (NodeNotice(kind=NoticeKind.REBALANCE, message="m", ends_at_seconds=math.nan),)},
    {"exposure": "x" * (MAX_TEXT_CHARACTERS + 1)},
    {"metrics": MetricBatch(run=RunId("r"), first_number=-1, points=())},
]


@pytest.mark.parametrize("changes", BAD_REPORTS)
async def test_a_report_beyond_a_limit_ends_its_own_line_and_changes_nothing(service, token, node, client, changes):
    registry = service.services.registry
    other_node = service.operator.describe_group(GROUP).members[1].instance_id
    async with line(service, token) as opened, line(service, token) as other:
        await join(opened, node)
        await join(other, other_node)
        await opened.send(encode(report(node)))
        await until(lambda: (view := registry.views().get(node)) and view.report)
        before = await asyncio.to_thread(client.describe_node, NodeId=node)
        await opened.send(encode(structs.replace(report(node, 2), **changes)))
        assert (await closed(opened))[0] == 4400
        await until(lambda: not registry.views()[node].is_connected)
        assert registry.views()[node].report == report(node)
        after = await asyncio.to_thread(client.describe_node, NodeId=node)
        of_connection = {"Connected", "RefusedMessageCount", "LastHeardAt", "Warm", "ResponseMetadata"}
        assert {name for name in before if before[name] != after.get(name)} <= of_connection
        await other.send(encode(report(other_node, 7)))
        await until(lambda: (seen := registry.views()[other_node].report) and seen.sequence == 7)


async def test_a_node_has_joined_with_its_first_report(service, token, node):
    # The agent has sent no report. It may have missed the answer to its join, so the instance may join again.
    for agent in ("a1", "a2"):
        async with line(service, token) as opened:
            session = (await join(opened, node, agent)).session_token
    async with line(service, token) as opened:
        await join(opened, node)
        await opened.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)))
        code, reason = await closed(opened)
    assert (code, "joined before" in reason) == (4410, True)
    with pytest.raises(InvalidStatus) as refused:  # the second agent's session has replaced the first agent's session
        async with line(service, session):
            pass
    assert refused.value.response.status_code == 403


async def test_another_instance_of_the_group_may_use_it_too(service, token):
    for member in service.operator.describe_group(GROUP).members:
        async with line(service, token) as opened:
            await join(opened, member.instance_id)


async def test_a_session_belongs_to_its_node(service, token):
    first, second = (member.instance_id for member in service.operator.describe_group(GROUP).members)
    async with line(service, token) as opened:
        session = (await join(opened, first)).session_token
    async with line(service, session) as opened:
        await opened.send(encode(hello(second)))
        assert (await closed(opened))[0] == 4401


async def test_who_is_not_a_member_does_not_join(service, token, node):
    async with line(service, token) as opened:
        await opened.send(encode(hello("i-0123456789abcdef0")))
        assert (await closed(opened))[0] == 4403
    service.operator.end_instance(NodeId(node))
    service.clock.advance(SHARED_SECONDS)
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)))
        code, reason = await closed(opened)
    assert code == 4403
    assert "EC2 reports" in reason or "not a member" in reason


async def test_an_instance_that_ec2_does_not_list_yet_may_join_later(service, token, node, monkeypatch):
    def omitting(ids):
        return {node_id: InstanceState(instance_id=node_id, state=Ec2State.ABSENT) for node_id in ids}

    with monkeypatch.context() as omitted:
        omitted.setattr(service.operator, "describe_instances", omitting)
        async with line(service, token) as opened:
            await opened.send(encode(hello(node)))
            assert await closed(opened) == (4403, f"EC2 does not list {node} yet")
    async with line(service, token) as opened:
        await join(opened, node)


async def test_who_is_about_to_leave_does_not_join(service, token, node):
    # A hook delays the termination, so EC2 still reports the instance as running.
    service.operator.terminate_member(NodeId(node), decrement=True)
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)))
        assert (await closed(opened))[0] == 4403


async def test_a_fleet_or_cloud_that_is_not_there_yet_means_later(client, service, token, node):
    early = (await asyncio.to_thread(client.create_join_token, FleetName="later"))["JoinToken"]
    async with line(service, early) as opened:
        await opened.send(encode(hello(node)))
        assert (await closed(opened))[0] == 1013
    service.operator.fail_next(CloudUnavailable("no answer"))
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)))
        assert (await closed(opened))[0] == 1013


@pytest.mark.parametrize("bad", [b"", b"\x00\x01nonsense", encode(Release(run=RunId("0" * 32))), "text"])
async def test_what_is_no_hello_is_refused(service, token, bad):
    async with line(service, token) as opened:
        await opened.send(bad)
        assert (await closed(opened))[0] == 4400


async def test_an_agent_of_another_protocol_version_learns_both_versions_and_where_to_read(service, token, node):
    later = PROTOCOL_VERSION + 1
    async with line(service, token) as opened:
        await opened.send(later.to_bytes(2, "big") + encode(hello(node))[2:])
        assert await closed(opened) == (
            OTHER_VERSION,
            f"a message has protocol version {later}; this process supports {PROTOCOL_VERSION}: {UPDATE_ADVICE}",
        )


async def test_an_agent_of_a_newer_release_joins_and_reports(service, token, node):
    said = msgspec.structs.replace(hello(node), protocol_minor=PROTOCOL_MINOR + 1)
    member = MemberReport(job=JobName("gpt"), run=RunId("0" * 32), generation=Generation(1), phase=MemberPhase.RUNNING)
    whole = msgspec.structs.replace(report(node), member=member)
    async with line(service, token) as opened:
        await opened.send(of_newer_release(encode(said), Hello))
        welcome = decode(await opened.recv(), ControlToAgent)
        assert isinstance(welcome, AgentWelcome)
        assert welcome.protocol_minor == PROTOCOL_MINOR
        await opened.send(of_newer_release(encode(whole), AgentReport))
        await until(lambda: service.services.registry.views()[node].report == whole)
        assert service.services.registry.views()[node].hello == said


async def test_what_is_no_report_ends_the_line_and_nothing_else(client, service, token, node):
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
        await opened.send(encode(report(node)))
        await opened.send(b"\x00\x01\xff\xff")
        assert (await closed(opened))[0] == 4400
    await refusals(client, node, 1)
    async with line(service, session) as opened:
        await join(opened, node)
        await opened.send(encode(report("i-another")))
        assert (await closed(opened))[0] == 4400
    await refusals(client, node, 2)
    # the session token identifies the node that sent the malformed message
    async with line(service, session) as opened:
        await opened.send(b"no Hello")
        assert (await closed(opened))[0] == OTHER_VERSION
    await refusals(client, node, 3)


async def test_nobody_is_charged_with_what_a_stranger_says(client, service, token, node):
    """A malformed message does not count against the node that the message names.

    All instances share the join token. A node id in a message proves nothing until EC2 has confirmed the instance.
    """
    async with line(service, token) as opened:
        await join(opened, node)
        await opened.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
    for message in (encode(hello("i-0123456789abcdef0")), b"noise"):
        async with line(service, token) as opened:
            await opened.send(message)
            await closed(opened)
    await refusals(client, node, 0)
    assert service.services.registry.refusals().get(NodeId("i-0123456789abcdef0")) is None


async def test_what_an_agent_has_refused_itself_is_shown_with_its_node(client, service, token, node):
    async with line(service, token) as opened:
        await join(opened, node)
        await opened.send(encode(AgentReport(node_id=NodeId(node), sequence=1, member=None, refused_count=7)))
        await until(lambda: service.services.registry.views()[node].report)
    shown = await asyncio.to_thread(client.describe_node, NodeId=node)
    assert (shown["RefusedSessionCount"], shown["RefusedMessageCount"]) == (7, 0)


async def test_what_a_jobs_code_can_get_at_is_shown_until_it_cannot(client, service, token, node):
    async with line(service, token) as opened:
        await join(opened, node)
        for sequence, exposure in ((1, "ranks run as the agent's user"), (2, "")):
            await opened.send(
                encode(AgentReport(node_id=NodeId(node), sequence=sequence, member=None, exposure=exposure))
            )
            await until(
                lambda at=sequence: (
                    (report := service.services.registry.views()[node].report) is not None and report.sequence == at
                )
            )
            assert (await asyncio.to_thread(client.describe_node, NodeId=node)).get("Exposure", "") == exposure


async def test_that_ranks_start_warm_on_a_node_is_shown(client, service, token, node):
    async with line(service, token) as opened:
        await join(opened, node)
        for sequence, is_warm in ((1, False), (2, True)):
            await opened.send(
                encode(AgentReport(node_id=NodeId(node), sequence=sequence, member=None, is_warm=is_warm))
            )
            await until(
                lambda at=sequence: (
                    (report := service.services.registry.views()[node].report) is not None and report.sequence == at
                )
            )
            assert (await asyncio.to_thread(client.describe_node, NodeId=node))["Warm"] is is_warm


async def test_the_memory_of_a_node_and_its_ranks_is_shown_while_its_agent_is_connected(client, service, token, node):
    ranks = (RankMemory(rank=Rank(2), resident_bytes=30, peak_bytes=40),)
    memory = NodeMemory(total_bytes=100, available_bytes=25, limit_bytes=100, ranks=ranks)
    async with line(service, token) as opened:
        await join(opened, node)
        assert "Memory" not in await asyncio.to_thread(client.describe_node, NodeId=node)
        await opened.send(encode(AgentReport(node_id=NodeId(node), sequence=1, member=None, memory=memory)))
        await until(lambda: service.services.registry.views()[node].report)
        assert (await asyncio.to_thread(client.describe_node, NodeId=node))["Memory"] == {
            "UsedBytes": 75,
            "AvailableBytes": 25,
            "TotalBytes": 100,
            "CgroupLimitBytes": 100,
            "Ranks": [],  # the message names ranks of a job that the database does not contain
        }
    await until(lambda: not service.services.registry.views()[node].is_connected)
    assert "Memory" not in await asyncio.to_thread(client.describe_node, NodeId=node)


async def refusals(client, node: str, count: int) -> None:
    async with asyncio.timeout(10):
        while (found := (await asyncio.to_thread(client.describe_node, NodeId=node))["RefusedMessageCount"]) != count:
            assert found < count
            await asyncio.sleep(0.005)


async def test_a_newer_connection_ends_the_older(service, token, node):
    async with line(service, token) as first, line(service, token) as second:
        await join(first, node)
        await join(second, node, "a2")
        assert (await closed(first))[0] == 4409
        await second.send(encode(report(node)))
        await until(lambda: service.services.registry.views()[node].report)
        assert service.services.registry.views()[node].is_connected


async def test_agents_of_a_fleet_that_another_replica_serves_are_sent_on(service, token, node):
    registry = service.services.registry
    async with line(service, token) as opened:
        await join(opened, node)
        await opened.send(encode(report(node)))
        await until(lambda: registry.views()[node].report)
        service.loop.call_soon_threadsafe(registry.leave, frozenset({FleetName("main")}))
        assert (await closed(opened))[0] == 1013
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)))
        assert (await closed(opened))[0] == 1013


@pytest.mark.parametrize("kind", ["none", "wrong", "user"])
async def test_without_an_agents_token_there_is_no_line(service, kind):
    headers = {
        "wrong": {"Authorization": "Bearer est_wrong"},
        "user": {"Authorization": f"Bearer {service.admin_token}"},
        "none": {},
    }[kind]
    with pytest.raises(InvalidStatus) as refused:
        async with connect(f"ws://{service.address}/v1/agents/connect", additional_headers=headers, proxy=None):
            pass
    assert refused.value.response.status_code == 403


async def test_an_oversized_message_ends_the_line(client, service, token, node):
    async with line(service, token) as opened:
        await join(opened, node)
        # the server closes the connection after it has read the announced length
        with contextlib.suppress(ConnectionClosed):
            await opened.send(bytes(2**24 + 1))
        assert (await closed(opened))[0] in (1009, 1006)
    await until(lambda: not service.services.registry.views()[node].is_connected)
    await refusals(client, node, 1)


async def test_lists_of_shared_objects_are_complete_although_later_reports_only_name_them(service, token, node):
    frozen = (SharedObject(key="k", object_bytes=1, sha256="0" * 64),)
    member = MemberReport(
        job=JobName("gpt"),
        run=RunId("0" * 32),
        generation=Generation(1),
        phase=MemberPhase.RUNNING,
        uploads=(upload(0, 4, frozen),),
    )
    sender = SharedLists()
    async with line(service, token) as opened:
        session = (await join(opened, node)).session_token
        for sequence in (1, 2):
            whole = msgspec.structs.replace(report(node, sequence), member=member)
            sent = sender.shorten(whole)
            assert bool(sent.member.uploads[0].frozen) == (sequence == 1)
            await opened.send(encode(sent))
            await until(lambda whole=whole: service.services.registry.views()[node].report == whole)
    async with line(service, session) as opened:
        await join(opened, node)
        await opened.send(encode(sent))
        code, reason = await closed(opened)
    assert (code, reason) == (MALFORMED, "rank 0 names lists of shared objects that were not sent")


def test_the_server_accepts_no_compressed_frames(service, token) -> None:
    """A few kilobytes can be a message of the largest size, which takes seconds to decode."""

    async def play() -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with connect(
            f"ws://{service.address}/v1/agents/connect", additional_headers=headers, proxy=None
        ) as opened:
            assert opened.response.headers.get("sec-websocket-extensions") is None

    asyncio.run(play())


def test_an_agent_pays_for_each_message_and_its_bytes() -> None:
    snapshot = SnapshotBytes(request_id="r", data=bytes(MAX_SNAPSHOT_READ_BYTES))
    snapshot_seconds = MAX_SNAPSHOT_READ_BYTES / SNAPSHOT_BYTES_PER_SECOND
    assert reading_seconds(report("i-1"), 2 * BYTES_PER_SECOND) == 2 + MESSAGE_SECONDS
    assert reading_seconds(snapshot, MAX_SNAPSHOT_READ_BYTES) == MESSAGE_SECONDS + snapshot_seconds
    assert (
        reading_seconds(snapshot, MAX_SNAPSHOT_READ_BYTES + BYTES_PER_SECOND) == 1 + MESSAGE_SECONDS + snapshot_seconds
    )


async def test_an_agent_pays_before_the_server_reads_on(service, token, node, monkeypatch):
    paid = []

    async def pay(self, seconds):
        paid.append(seconds)

    monkeypatch.setattr(Pace, "pay", pay)
    async with line(service, token) as opened:
        await join(opened, node)
        sent = encode(report(node))
        await opened.send(sent)
        await until(lambda: paid[1:])
    assert paid == [CONNECTION_SECONDS, reading_seconds(report(node), len(sent))]


async def test_a_hello_has_a_limit_of_bytes(service, token, node):
    async with line(service, token) as opened:
        await opened.send(encode(hello(node)) + bytes(FIRST_MESSAGE_BYTES))
        assert (await closed(opened))[0] == OVERSIZED


@pytest.mark.security
async def test_who_has_no_valid_token_pays_for_the_refusal(service, token, node, monkeypatch):
    paid = []

    async def pay(self, seconds):
        paid.append(seconds)

    monkeypatch.setattr(Pace, "pay", pay)
    for secret in ("unknown", "another"):
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"http://{service.address}/v1/fleets", headers=headers)).status_code == 401
        with pytest.raises(InvalidStatus):
            async with line(service, secret):
                pass
    assert paid == [STRANGER_SECONDS] * 4
    async with line(service, token) as opened:
        await join(opened, node)
        await until(lambda: paid[4:])
    assert paid[4:] == [CONNECTION_SECONDS]
