"""Credentials of a role for ranks: a real AWS SDK requests them over loopback, with only the variables of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes.storage import MemoryAws, MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from worker.errors import StoreDenied, StoreUnavailable
from worker.provisioning.credentials import RENEW_SECONDS, STS_RETRY_SECONDS, RoleCredentials, token_of
from worker.ranks.environment import node_environment
from worker.storage.aws import ROLE_SECONDS, JobPrincipal, RoleKeys

pytestmark = pytest.mark.integration
ROLE = "arn:aws:iam::123456789012:role/training"
PROJECT = "team"
KEY = b"k" * 32
PLAN = msgspec.structs.replace(
    rank_plan(), script=msgspec.structs.replace(rank_plan().script, role_arn=ROLE, project=PROJECT)
)
SDK = """
import json
import botocore.session
keys = botocore.session.Session().get_credentials()
print(json.dumps(None if keys is None else [keys.method, keys.access_key, keys.secret_key, keys.token]))
"""


class Clock:
    """A Unix clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Sts(MemoryAws):
    """A fake of STS. The test decides whether a call fails or waits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(MemoryObjectStore("bucket"), now=clock)
        self.roles.add(ROLE)
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def assume_role(self, principal: JobPrincipal) -> RoleKeys:
        self.asked.set()
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        return super().assume_role(principal)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sts(clock: Clock) -> Sts:
    return Sts(clock)


@pytest.fixture
async def credentials(tmp_path: Path, sts: Sts, clock: Clock) -> AsyncIterator[RoleCredentials]:
    made = RoleCredentials(tmp_path, sts, clock)
    yield made
    await made.close()


def as_a_rank(variables: dict[str, str]) -> object:
    """Return the credentials that an AWS SDK finds in a rank's environment, on a node with credentials of its own."""
    node = {
        "AWS_ACCESS_KEY_ID": "AKIANODE",
        "AWS_SECRET_ACCESS_KEY": "node",
        "AWS_PROFILE": "node",
        "HOME": "/home/node",
    }
    environment = {**node_environment(node, "lo"), **variables}
    done = subprocess.run([sys.executable, "-c", SDK], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


async def ask(
    credentials: RoleCredentials, *, token: str | None = None, request: str = "GET /role HTTP/1.1"
) -> tuple[int, dict[str, str]]:
    """Request credentials over loopback as a rank does. Return the status and the decoded body."""
    variables = credentials.variables()
    given = variables["AWS_CONTAINER_AUTHORIZATION_TOKEN"] if token is None else token
    port = int(variables["AWS_CONTAINER_CREDENTIALS_FULL_URI"].split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request}\r\nHost: x\r\nAuthorization: {given}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


async def test_an_sdk_in_a_rank_finds_the_roles_keys_and_without_a_role_none(credentials: RoleCredentials) -> None:
    await credentials.begin(PLAN, KEY)
    found = await asyncio.to_thread(as_a_rank, credentials.variables())
    assert found == ["container-role", f"ASIA{1:016}", f"secret of {ROLE}", "token 1"]
    assert await asyncio.to_thread(as_a_rank, {}) is None


async def test_who_has_no_token_gets_nothing(credentials: RoleCredentials) -> None:
    await credentials.begin(PLAN, KEY)
    other = msgspec.structs.replace(PLAN, generation=PLAN.generation + 1)
    for number, token in enumerate(("", "x", token_of(PLAN, b"o" * 32), token_of(other, KEY)), start=1):
        status, answer = await ask(credentials, token=token)
        assert (status, set(answer), credentials.refused_count) == (401, {"code", "message"}, number)
    assert (await ask(credentials, request="GET / HTTP/1.1"))[0] == 404
    assert (await ask(credentials, request="POST /role HTTP/1.1"))[0] == 404
    token = credentials.variables()["AWS_CONTAINER_AUTHORIZATION_TOKEN"]
    assert (await ask(credentials))[0] == 200
    await credentials.withdraw()
    assert (await ask(credentials, token=token))[0] == 401, "the generation is over"
    assert (await ask(credentials, token=""))[0] == 401


async def test_keys_are_renewed_before_they_end_and_the_old_ones_serve_meanwhile(
    credentials: RoleCredentials, clock: Clock, sts: Sts
) -> None:
    await credentials.begin(PLAN, KEY)
    clock.now += ROLE_SECONDS - RENEW_SECONDS
    assert (await ask(credentials))[1]["Token"] == "token 1"
    assert sts.assumed_count == 1
    clock.now += 1
    sts.gate.clear()
    assert (await ask(credentials))[1]["Token"] == "token 1", "a rank does not wait for STS while its keys are good"
    sts.gate.set()
    await credentials.idle()
    status, answer = await ask(credentials)
    assert (status, answer["Token"], sts.assumed_count) == (200, "token 2", 2)
    assert sts.principals == [JobPrincipal.of(PLAN)] * 2
    assert answer["Expiration"] == "2027-01-15T09:40:01Z"


async def test_while_sts_fails_good_keys_are_given_and_it_is_asked_now_and_then(
    credentials: RoleCredentials, clock: Clock, sts: Sts
) -> None:
    await credentials.begin(PLAN, KEY)
    sts.failure = StoreUnavailable("STS: 503")
    clock.now += ROLE_SECONDS - RENEW_SECONDS + 1
    for _ in range(3):
        assert (await ask(credentials))[1]["Token"] == "token 1"
        sts.asked.clear()
        await credentials.idle()
    assert not sts.asked.is_set(), "it was asked a moment ago"
    clock.now += STS_RETRY_SECONDS
    await ask(credentials)
    await credentials.idle()
    assert sts.asked.is_set()
    clock.now += RENEW_SECONDS
    sts.failure = StoreDenied("STS: AccessDenied")
    assert await ask(credentials) == (503, {"code": "StoreDenied", "message": "STS: AccessDenied"})
    sts.failure = None
    assert (await ask(credentials))[0] == 200


async def test_ranks_find_the_next_agent_of_their_node(
    tmp_path: Path, credentials: RoleCredentials, sts: Sts, clock: Clock
) -> None:
    await credentials.begin(PLAN, KEY)
    variables = credentials.variables()
    await credentials.close()
    successor = RoleCredentials(tmp_path, sts, clock)
    await successor.adopt(PLAN, KEY)
    try:
        assert successor.variables() == variables
        assert (await ask(successor))[1]["Token"] == "token 2"
    finally:
        await successor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["credentials_port"], "no key is on disk"


async def test_a_role_that_is_denied_is_told_in_awss_words(credentials: RoleCredentials, sts: Sts) -> None:
    sts.roles.clear()
    with pytest.raises(StoreDenied, match="not authorized to perform: sts:AssumeRole"):
        await credentials.begin(PLAN, KEY)


async def test_a_rank_that_says_too_much_or_nothing_is_hung_up_on(credentials: RoleCredentials) -> None:
    await credentials.begin(PLAN, KEY)
    port = int(credentials.variables()["AWS_CONTAINER_CREDENTIALS_FULL_URI"].split(":")[2].split("/")[0])
    for said in (b"", b"GET", b"x" * 70_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        if len(said) < 100:
            writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert (await ask(credentials))[0] == 200
