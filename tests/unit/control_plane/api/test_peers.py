"""Two servers of one installation answer alike, although only one of them hears a fleet's agents.

They reach each other with TLS and a certificate of their own authority.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from botocore.exceptions import ClientError
from msgspec import structs
from websockets.asyncio.server import ServerConnection, serve

from control_plane.api import peers
from control_plane.api.forwarding import OF_AGENTS
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from control_plane.replica import is_predecessor, url_of
from everstep.protocol.agent_messages import (
    AgentReport,
    ControlToAgent,
    MemberPhase,
    MemberReport,
    NodeFault,
    NodeMemory,
    Release,
)
from everstep.protocol.codec import decode, encode
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, RunId
from tests.unit.control_plane.api.conftest import Service, refused, without_metadata
from tests.unit.control_plane.api.test_agents import closed, hello, join, line, report, until
from tests.unit.control_plane.api.test_commands import agent, execute, says
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.api.test_snapshots import Agent as SnapshotAgent

MAIN = frozenset({FleetName("main")})


def leave(service: Service, fleets: frozenset[FleetName]) -> None:
    """Let the loops of a server find that another server manages these fleets."""

    async def change() -> None:
        service.services.registry.leave(fleets)
        service.services.registry.hint()

    asyncio.run_coroutine_threadsafe(change(), service.loop).result(10)


@pytest.fixture
def second(service: Service, fleet: str, tmp_path) -> Iterator[Service]:
    """Return a second server of the installation. The first one holds the lease of the fleet `main`."""
    state = tmp_path / "second" / "server"
    state.mkdir(parents=True)
    for name in ("admin_token", "server_secret"):
        shutil.copy(service.settings.state_directory / name, state / name)
    with Service(state.parent, service.settings.database, objects=service.objects) as running:
        running.operator = service.operator
        with service.database.write() as session:
            Leaser(f"first@https://{service.tls_address}", 3.0, lambda: 0.0).claim(session, "fleet", fleet)
        leave(running, MAIN)
        yield running


@pytest.fixture
def through_second(second: Service):
    with closing(second.client()) as connected:
        yield connected


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    made = Job(service, client, source)
    made.launch(1)
    made.run_ranks()
    client.update_fleet(FleetName="main", AllowCommands=True)
    return made


def failure(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ClientError) as caught:
        call()
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_the_owner_of_a_lease_names_the_address_of_its_server() -> None:
    assert url_of("lineage-incarnation@https://10.0.0.1:8443") == "https://10.0.0.1:8443"
    assert url_of("lineage-incarnation") == ""
    assert is_predecessor("a-2@http://b-c:1", "a-1@http://b-c:1")
    assert not is_predecessor("2@http://b-c:1", "2@http://b-d:1")


@pytest.mark.parametrize(
    ("path", "needs_agents"),
    [
        ("/v1/training-jobs/gpt/ranks/1/commands", True),
        ("/v1/training-jobs/gpt/snapshots", True),
        ("/v1/training-jobs/gpt/snapshots/1-2-abc/shards/0", True),
        ("/v1/training-jobs/gpt/logs/follow", True),
        ("/v1/training-jobs/gpt/logs/events", False),
        ("/v1/training-jobs/gpt", False),
        ("/v1/training-jobs/gpt/snapshotsx", False),
    ],
)
def test_requests_that_need_agents(path: str, needs_agents: bool) -> None:
    assert (OF_AGENTS.fullmatch(path) is not None) == needs_agents


def test_facts_for_another_server_omit_what_no_answer_contains() -> None:
    member = MemberReport(
        job=JobName("gpt"),
        run=RunId("0" * 32),
        generation=Generation(1),
        phase=MemberPhase.RUNNING,
        faults=(NodeFault(code="x", message="y", is_permanent=False),),
        measured={"loss": 1.0},
    )
    seen = AgentReport(node_id=NodeId("i-1"), sequence=3, member=member, sources=("a" * 64,), is_warm=False)
    view = peers.AgentView(
        node_id=NodeId("i-1"),
        fleet=FleetName("main"),
        hello=hello("i-1"),
        report=seen,
        is_connected=True,
        heard_at=1.0,
        heard_at_seconds=2.0,
    )
    known = peers.KnownAgents(views={view.node_id: view}, refused={view.node_id: 2})
    found = peers.decoded(peers.encoded(known))
    assert found.refused == known.refused
    got = found.views[view.node_id].report
    assert got is not None
    assert got.member is not None
    assert (got.is_warm, got.member.faults, got.member.measured, got.sources) == (False, member.faults, {}, ())


async def test_lists_and_descriptions_are_equal_at_both_servers(service, second, client, through_second, job, node):
    token = client.create_join_token(FleetName="main")["JoinToken"]
    async with line(service, token) as opened:
        await join(opened, node)
        memory = NodeMemory(total_bytes=100, available_bytes=25, limit_bytes=100)
        fault = NodeFault(code="gpu_throttled", message="GPU 0 is slow", is_permanent=False)
        await opened.send(
            encode(AgentReport(node_id=NodeId(node), sequence=1, member=None, memory=memory, faults=(fault,)))
        )
        await until(lambda: service.services.registry.views()[node].report)
        service.loop.call_soon_threadsafe(service.services.registry.refuse, NodeId(node))
        for operation, arguments in (
            ("list_nodes", {}),
            ("describe_node", {"NodeId": node}),
            ("list_fleets", {}),
            ("describe_fleet", {"FleetName": "main"}),
            ("list_training_jobs", {}),
            ("describe_training_job", {"TrainingJobName": "gpt"}),
        ):
            first, other = [
                without_metadata(await asyncio.to_thread(getattr(each, operation), **arguments))
                for each in (client, through_second)
            ]
            assert other == first, operation
        shown = await asyncio.to_thread(through_second.describe_node, NodeId=node)
        assert (shown["Connected"], shown["Memory"]["AvailableBytes"], shown["RefusedMessageCount"]) == (True, 25, 1)
        assert shown["Conditions"][0]["Type"] == "gpu_throttled"


def test_a_command_runs_through_either_server(service, second, client, through_second, job) -> None:
    with agent(service, "i-1", says) as asked:
        first = execute(client, ClientRequestToken="one")
        again = execute(through_second, ClientRequestToken="one")
        assert without_metadata(again) == without_metadata(first)
        assert len(asked) == 1
        assert failure(lambda: execute(through_second, Rank=9)) == failure(lambda: execute(client, Rank=9))
        viewer = second.token(Role.VIEWER)
        with closing(second.client(viewer)) as reading, refused("AccessDeniedException"):
            execute(reading)


def test_the_session_of_a_browser_is_valid_at_the_server_that_gets_a_forwarded_request(service, second, job) -> None:
    site = f"http://{second.address}"
    own = {"origin": site, "sec-fetch-site": "same-origin"}
    with httpx.Client(base_url=site, headers=own, trust_env=False, timeout=30) as browser, agent(service, "i-1", says):
        assert browser.post("/v1/session", json={"Token": service.admin_token}).status_code == 200
        answer = browser.post("/v1/training-jobs/gpt/ranks/1/commands", json={"Command": ["x"]})
        assert (answer.status_code, answer.json()["ExitCode"]) == (200, 3)
        foreign = browser.post(
            "/v1/training-jobs/gpt/ranks/1/commands", json={"Command": ["x"]}, headers={"origin": "http://other"}
        )
        assert foreign.status_code == 403


def test_an_export_from_memory_passes_through_either_server(service, second, client, through_second, job) -> None:
    with ExitStack() as stack:
        for rank in (0, 1):
            stack.enter_context(SnapshotAgent(service, f"i-{rank}", rank, 7, {7}).connected())
        held = through_second.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="same")
        assert without_metadata(client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="same")) == (
            without_metadata(held)
        )
        place = {"TrainingJobName": "gpt", "SnapshotId": held["SnapshotId"], "Rank": 1, "Begin": 10, "End": 20}
        assert through_second.read_snapshot(**place)["Body"].read() == client.read_snapshot(**place)["Body"].read()
        through_second.release_snapshot(TrainingJobName="gpt", SnapshotId=held["SnapshotId"])
        assert failure(lambda: client.read_snapshot(**place))[0] == "ConflictException"


def test_followed_lines_pass_through_until_the_reader_leaves(service, second, job) -> None:
    url = f"http://{second.address}/v1/training-jobs/gpt/logs/follow"
    headers = {"Authorization": f"Bearer {service.admin_token}"}

    def follow() -> int:
        with httpx.stream("GET", url, headers=headers, trust_env=False, timeout=30) as answer:
            if answer.status_code == 200:
                assert answer.headers["content-type"] == "application/vnd.amazon.eventstream"
                assert b"NextForwardToken" in next(answer.iter_raw())
            return answer.status_code

    streams_per_token = 16
    assert [follow() for _ in range(streams_per_token)] == [200] * streams_per_token
    deadline = time.monotonic() + 10
    while follow() != 200:  # the first server notices asynchronously that a reader has left
        assert time.monotonic() < deadline, "the first server still sends to readers that have left"


def test_a_request_is_forwarded_once_and_keeps_its_id(service, second, job) -> None:
    leave(service, MAIN)
    url = f"http://{second.address}/v1/training-jobs/gpt/ranks/1/commands"
    headers = {"Authorization": f"Bearer {service.admin_token}"}
    answer = httpx.post(url, headers=headers, json={"Command": ["x"]}, trust_env=False, timeout=30)
    assert (answer.status_code, answer.json()["Message"]) == (
        503,
        "The agent of i-1 is not connected to this server; the command was not run.",
    )
    assert answer.json()["RequestId"] == answer.headers["x-amzn-requestid"]


def test_a_forwarded_call_has_one_audit_entry_with_the_clients_address(service, second, client, job) -> None:
    url = f"http://{second.address}/v1/training-jobs/gpt/ranks/1/commands"
    headers = {"Authorization": f"Bearer {service.admin_token}", "X-Forwarded-For": "198.51.100.7"}
    # The servers trust 127.0.0.1 only, so they ignore the header that the client invents.
    with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=30) as stranger:
        stranger.post(url, headers=headers, json={"Command": ["x"]})
    entries = client.list_audit_entries(Operation="ExecuteCommand")["AuditEntries"]
    assert [entry["SourceAddress"] for entry in entries] == ["127.0.0.2"]


def test_a_holder_that_does_not_answer_is_named(service, second, job, through_second) -> None:
    with service.database.write() as session:
        Leaser("gone@http://127.0.0.1:1", 0.0, lambda: 0.0).claim(session, "fleet", "main", at_once=True)
    code, message = failure(lambda: execute(through_second))
    assert code == "ServiceUnavailableException"
    assert message.startswith("The server that manages the job's fleet does not answer: ")
    assert through_second.list_nodes()["Nodes"] == []


@pytest.mark.security
def test_facts_about_agents_need_the_key_of_the_installation(service) -> None:
    url = f"http://{service.address}{peers.PATH}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {service.admin_token}"}):
        assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code == 401
    key = {"Authorization": f"Bearer {service.services.peers.key}"}
    assert httpx.get(url, headers=key, trust_env=False, timeout=30).status_code == 200


async def test_an_agent_is_relayed_to_the_holder_until_its_server_takes_over(service, second, token, node):
    registry = service.services.registry
    async with line(second, token) as opened:
        welcome = await join(opened, node)
        await opened.send(encode(report(node)))
        await until(lambda: registry.views()[node].report)
        assert node not in second.services.registry.views()
        order = Release(run=RunId("0" * 32))
        service.loop.call_soon_threadsafe(registry.send, node, order)
        assert decode(await opened.recv(), ControlToAgent) == order
        leave(second, frozenset())
        assert await closed(opened) == (1013, "this server has taken the fleet over")
    await until(lambda: not registry.views()[node].is_connected)
    async with line(second, welcome.session_token) as opened:
        await join(opened, node)
        assert second.services.registry.views()[node].is_connected


async def test_an_agent_leaves_a_holder_that_stands_still(service, second, token, node):
    second.app.state.services = replace(
        second.services, timeouts=structs.replace(second.services.timeouts, lease_seconds=0.3)
    )
    connections = list[ServerConnection]()

    async def stand_still(connection: ServerConnection) -> None:
        connections.append(connection)
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with serve(stand_still, "127.0.0.1", 0, ping_interval=None) as holder:
        url = f"http://127.0.0.1:{holder.sockets[0].getsockname()[1]}"
        with service.database.write() as session:
            Leaser(f"stopped@{url}", 0.0, lambda: 0.0).claim(session, "fleet", "main", at_once=True)
        async with line(second, token) as opened:
            await opened.send(encode(hello(node)))
            assert (await closed(opened))[0] == 1013
        for connection in connections:
            connection.transport.abort()
    assert len(connections) == 1


async def test_a_forwarded_request_ends_when_its_server_takes_over(service, second, job):
    arrived, left = asyncio.Event(), asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()
        writer.close()
        left.set()

    holder = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    with service.database.write() as session:
        owner = f"stopped@http://127.0.0.1:{holder.sockets[0].getsockname()[1]}"
        Leaser(owner, 0.0, lambda: 0.0).claim(session, "fleet", "main", at_once=True)
    headers = {"Authorization": f"Bearer {service.admin_token}"}
    async with httpx.AsyncClient(trust_env=False, timeout=30, headers=headers) as caller, holder:
        url = f"http://{second.address}/v1/training-jobs/gpt/ranks/1/commands"
        asking = asyncio.create_task(caller.post(url, json={"Command": ["x"]}))
        async with asyncio.timeout(20):
            await arrived.wait()
            leave(second, frozenset())
            answer = await asking
            await left.wait()
    assert answer.status_code == 503
    assert "this server has taken the fleet over" in answer.text


def test_a_holder_that_does_not_answer_is_asked_once_per_interval(service, second) -> None:
    now, asked = [0.0], []

    class Holder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            now[0] += peers.CONNECT_SECONDS  # The answer arrives when the time limit has nearly passed.
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Holder) as holder:
        threading.Thread(target=holder.serve_forever, daemon=True).start()
        with service.database.write() as session:
            owner = f"slow@http://127.0.0.1:{holder.server_port}"
            Leaser(owner, 0.0, lambda: 0.0).claim(session, "fleet", "main", at_once=True)
        asking = peers.Peers(service.database, second.services.registry, "key", monotonic=lambda: now[0])
        for _ in range(3):
            assert asking.agents().views == {}
        assert asked == [peers.PATH]
        now[0] += peers.FACTS_SECONDS
        asking.agents()
        assert asked == [peers.PATH] * 2
        asyncio.run(asking.close())
        holder.shutdown()


async def test_the_holders_close_code_reaches_the_agent(service, second, token):
    async with line(second, token) as opened:
        await opened.send(encode(hello("i-unknown")))
        assert (await closed(opened))[0] == 4403
    with service.database.write() as session:
        Leaser("gone@http://127.0.0.1:1", 0.0, lambda: 0.0).claim(session, "fleet", "main", at_once=True)
    async with line(second, token) as opened:
        await opened.send(encode(hello("i-unknown")))
        assert (await closed(opened))[0] == 1013
