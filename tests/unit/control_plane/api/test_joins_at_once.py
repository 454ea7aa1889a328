"""After a restart of the control plane, many agents join at once. A fresh view of the group admits all of them."""

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

import pytest

from control_plane.api.memberships import SHARED_SECONDS, Memberships
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.identity import MAX_QUESTIONS, Attestation, OwnAccount, RegionalSts
from everstep.protocol.ids import NodeId
from tests.fakes.cloud import FakeOperator
from tests.unit import sts as local_sts
from tests.unit.control_plane.api.conftest import Service
from tests.unit.control_plane.api.test_agents import join, line
from tests.unit.control_plane.api.test_attestation import ROLE, Instance
from tests.unit.sts import ACCOUNT, REGION, Sts, keys_of

LARGE_GROUP = "large-group"
AGENT_COUNT = 24


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
    """Return the recorder of a service with a fleet of `AGENT_COUNT` instances and one."""
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
            await join(opened, node, f"agent of {node}")

        await asyncio.gather(*(one(*each) for each in joins))


async def test_attested_agents_that_join_with_a_fresh_view_cost_no_call_but_their_proof(
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


async def test_agents_with_a_join_token_that_join_with_a_fresh_view_cost_no_call(
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
