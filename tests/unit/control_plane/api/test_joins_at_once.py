"""After a restart of the control plane, many agents join at once.

The control plane admits all of them with one recent answer of AWS about the members of the fleet's Auto Scaling group.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from websockets.exceptions import InvalidStatus

from control_plane.api.caller_threads import HANDSHAKE_THREADS
from control_plane.api.memberships import SHARED_SECONDS, Memberships
from control_plane.api.routes import agents
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.identity import MAX_QUESTIONS, Attestation, OwnAccount, RegionalSts
from everstep.protocol.agent_messages import AgentWelcome, ControlToAgent
from everstep.protocol.codec import decode, encode
from everstep.protocol.ids import NodeId
from tests.fakes.cloud import FakeOperator
from tests.unit import sts as local_sts
from tests.unit.control_plane.api.conftest import Service
from tests.unit.control_plane.api.test_agents import hello, join, line
from tests.unit.control_plane.api.test_attestation import ROLE, Instance
from tests.unit.control_plane.api.test_memberships import GROUP, Limited
from tests.unit.sts import ACCOUNT, REGION, Sts, keys_of

LARGE_GROUP = "large-group"
AGENT_COUNT = 24
THOUSAND = 1000
BURST_COUNT = 2
JOIN_SECONDS = 60.0


class Recorder:
    """Records the name of every method of the cloud that the service calls."""

    def __init__(self, operator: FakeOperator) -> None:
        self.called: list[str] = []
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self._operator, name)


@pytest.fixture
def sts() -> Iterator[Sts]:
    with local_sts.serve() as running:
        yield running


@pytest.fixture
def cloud(service: Service, client, sts: Sts) -> Recorder:
    """Return the recorder of a service whose fleet has `AGENT_COUNT` + 1 instances."""
    service.operator.create_group(LARGE_GROUP, desired=AGENT_COUNT + 1, max_size=AGENT_COUNT + 1)
    service.operator.advance(timedelta(seconds=1))
    client.create_fleet(FleetName="main", AutoScalingGroupName=LARGE_GROUP, NodeRoleName=ROLE)
    recorder = Recorder(service.operator)
    service.app.state.services = replace(
        service.services,
        operator=recorder,
        memberships=Memberships(recorder, lambda: service.clock().timestamp()),  # type: ignore[arg-type]
        attestation=Attestation(
            sts=RegionalSts(REGION, endpoint_url=sts.url), region=REGION, account=OwnAccount(lambda: ACCOUNT)
        ),
    )
    return recorder


def nodes(service: Service) -> list[NodeId]:
    return [member.instance_id for member in service.operator.describe_group(LARGE_GROUP).members]


def attested(service: Service, sts: Sts, number: int, node: NodeId) -> str:
    """Prove a node's identity to the service, and return its session token."""
    instance = Instance(service, node, keys_of(node, number=number))
    sts.knows(instance.keys)
    answer = instance.ask(instance.request())
    assert answer.status_code == 201, answer.text
    token: str = answer.json()["SessionToken"]
    return token


async def connect(service: Service, joins: list[tuple[str, NodeId]]) -> None:
    """Open the connections of all agents at once."""
    async with AsyncExitStack() as stack:

        async def one(token: str, node: NodeId) -> None:
            opened = await stack.enter_async_context(line(service, token))
            await join(opened, node, f"agent-of-{node}")

        await asyncio.gather(*(one(*each) for each in joins))


async def test_attested_agents_that_join_after_a_recent_answer_cost_no_call_but_their_proof(
    service: Service, sts: Sts, cloud: Recorder
) -> None:
    first, *others = nodes(service)
    attested(service, sts, 0, first)
    assert set(cloud.called) == {"describe_group", "describe_instances"}
    cloud.called.clear()
    service.clock.advance(SHARED_SECONDS - 0.1)
    # The service asks a further agent to retry while it waits for this many answers of STS.
    with ThreadPoolExecutor(MAX_QUESTIONS) as threads:
        begin = partial(asyncio.get_running_loop().run_in_executor, threads, attested, service, sts)
        tokens = await asyncio.gather(*(begin(number, node) for number, node in enumerate(others, start=1)))
    await connect(service, list(zip(tokens, others, strict=True)))
    assert cloud.called == []
    assert len(sts.asked) == AGENT_COUNT + 1, "STS confirms each proof once"


async def test_agents_with_a_join_token_that_join_after_a_recent_answer_cost_no_call(
    service: Service, client, cloud: Recorder
) -> None:
    token = client.create_join_token(FleetName="main")["JoinToken"]
    first, *others = nodes(service)
    await connect(service, [(token, first)])
    assert set(cloud.called) == {"describe_group", "describe_instances"}
    cloud.called.clear()
    service.clock.advance(SHARED_SECONDS - 0.1)
    await connect(service, [(token, node) for node in others])
    assert cloud.called == []


class OpenLine:
    """The connection of one agent to the application, without a socket. It stays open until `close`."""

    def __init__(self, service: Service, token: str, node: NodeId) -> None:
        self._messages: list[dict[str, Any]] = [
            {"type": "websocket.connect"},
            {"type": "websocket.receive", "bytes": encode(hello(node, f"agent-of-{node}"))},
        ]
        self._closes = asyncio.Event()
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The first message after the application has accepted the connection, or the message that refuses it."""
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "scheme": "ws",
            "http_version": "1.1",
            "path": "/v1/agents/connect",
            "raw_path": b"/v1/agents/connect",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", service.address.encode()), (b"authorization", f"Bearer {token}".encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self._task = asyncio.create_task(service.app(scope, self._receive, self._send))
        self._task.add_done_callback(self._fail)

    def _fail(self, task: asyncio.Task[None]) -> None:
        if not self.answer.done():
            self.answer.set_exception(task.exception() or ConnectionError("no answer"))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._closes.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] != "websocket.accept" and not self.answer.done():
            self.answer.set_result(message)

    async def close(self) -> None:
        self._closes.set()
        await self._task


async def joined(service: Service, cloud: Limited, token: str) -> None:
    """Let all agents of the group join within a minute of the injected clock, `BURST_COUNT` of them at a time."""
    nodes = [member.instance_id for member in FakeOperator.describe_group(cloud, GROUP).members]
    begun, lines = service.clock(), list[OpenLine]()
    for first in range(0, len(nodes), BURST_COUNT):
        cloud.seconds = JOIN_SECONDS * first / len(nodes)
        service.clock.now = begun + timedelta(seconds=cloud.seconds)
        burst = [OpenLine(service, token, node) for node in nodes[first : first + BURST_COUNT]]
        lines += burst
        for answer in await asyncio.gather(*(each.answer for each in burst)):
            assert answer["type"] == "websocket.send", answer
            assert isinstance(decode(answer["bytes"], ControlToAgent), AgentWelcome)
    assert service.services.registry.connected().keys() == set(nodes)
    await asyncio.gather(*(each.close() for each in lines))


@pytest.mark.timeout(300)
def test_a_thousand_agents_join_the_application_within_a_minute_without_a_throttled_call(
    service: Service, client: Any
) -> None:
    """The agents join after a restart of the server, which has no cached answers of AWS."""
    cloud = Limited(THOUSAND)
    service.app.state.services = replace(
        service.services,
        operator=cloud,
        memberships=Memberships(cloud, lambda: service.clock().timestamp()),
        timeouts=msgspec.structs.replace(service.services.timeouts, lease_seconds=600.0),  # no agent reports again
    )
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    token = client.create_join_token(FleetName="main")["JoinToken"]
    cloud.throttled_count = cloud.described_count = 0
    asyncio.run_coroutine_threadsafe(joined(service, cloud, token), service.loop).result(timeout=290)
    assert cloud.throttled_count == 0
    assert 0 < cloud.described_count <= 13


async def test_handshakes_without_a_valid_token_leave_the_other_threads_free(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Semaphore(0), threading.Event()

    def find(*_: object) -> None:
        begun.release()
        assert answered.wait(30)

    async def refused() -> None:
        with pytest.raises(InvalidStatus):
            async with line(service, "est_stranger"):
                pass

    monkeypatch.setattr(agents, "find_token", find)
    strangers = asyncio.gather(*(refused() for _ in range(4 * HANDSHAKE_THREADS)))
    for _ in range(HANDSHAKE_THREADS):
        assert await asyncio.to_thread(begun.acquire, timeout=30)
    assert not begun.acquire(blocking=False)
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), service.loop).result(timeout=30)
    assert not begun.acquire(blocking=False)
    answered.set()
    await strangers


def test_threads_that_need_the_servers_own_account_share_one_request() -> None:
    asked, arrived = list[int](), threading.Semaphore(0)

    def ask() -> str:
        asked.append(1)
        for _ in range(AGENT_COUNT):
            assert arrived.acquire(timeout=30)
        return ACCOUNT

    account = OwnAccount(ask)

    def needed(_: int) -> str:
        arrived.release()
        return account()

    with ThreadPoolExecutor(AGENT_COUNT) as threads:
        assert set(threads.map(needed, range(AGENT_COUNT))) == {ACCOUNT}
    assert len(asked) == 1


def test_a_failed_request_for_the_account_is_repeated_by_the_next_agent() -> None:
    answers = [CloudUnavailable("no answer"), ACCOUNT]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, CloudUnavailable):
            raise answer
        return answer

    account = OwnAccount(ask)
    with pytest.raises(CloudUnavailable):
        account()
    assert (account(), account()) == (ACCOUNT, ACCOUNT)
