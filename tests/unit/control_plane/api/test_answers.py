"""The cache of responses: equal requests with the same token get the same stored response for a short time.

The service drops the stored response at the next write to the database, and after one second at the latest.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from control_plane.api.answers import ENTRY_BYTES, MAX_ANSWER_BYTES, MAX_BYTES, Answers
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import START, Clock, refused


class Versions:
    sees_everything = True

    def __init__(self) -> None:
        self.number: int | None = 1

    def current(self) -> int | None:
        return self.number


class Inside:
    """A fake application behind the cache of responses. It counts the requests that the cache passes on."""

    def __init__(self) -> None:
        self.count = 0
        self.status = 200
        self.body = b"answer %d"
        self.is_asked = asyncio.Event()
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def __call__(self, scope, receive, send) -> None:
        self.count += 1
        self.is_asked.set()
        body = self.body % self.count
        await self.may_go.wait()
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": [(b"content-length", str(len(body)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": body[:2], "more_body": True})
        await send({"type": "http.response.body", "body": body[2:]})


class World:
    def __init__(self) -> None:
        self.inside = Inside()
        self.versions = Versions()
        self.clock = Clock()
        self.answers = Answers(self.inside, self.versions, self.clock)  # type: ignore[arg-type]
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the newest response."""

    async def ask(
        self,
        path: str = "/v1/training-jobs/gpt",
        token: str | None = "a",
        method: str = "GET",
        query: bytes = b"",
        more: tuple[tuple[bytes, bytes], ...] = (),
    ) -> bytes:
        headers = [*([(b"authorization", f"Bearer {token}".encode())] if token else []), *more]
        body = b""

        async def send(message) -> None:
            nonlocal body
            body += message.get("body", b"")
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-amzn-requestid", b"of this request"))
                self.headers = message["headers"]

        await self.answers(
            {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}, None, send
        )  # type: ignore[arg-type]
        return body


@pytest.fixture
def world() -> World:
    return World()


async def test_the_same_is_answered_once_until_something_is_written(world: World) -> None:
    assert await world.ask() == await world.ask() == b"answer 1"
    world.versions.number = 2
    assert await world.ask() == await world.ask() == b"answer 2"
    # the stored response must not contain the request id of another request
    assert world.headers == [(b"content-length", b"8"), (b"x-amzn-requestid", b"of this request")]


@pytest.mark.parametrize(
    "other",
    [
        {"token": "b"},
        {"path": "/v1/training-jobs/other"},
        {"path": "/v1/training-jobs/gpt/metric-data"},
        {"query": b"MaxResults=1"},
        {"path": "/v1/training-jobs"},
        {"more": ((b"accept-encoding", b"gzip"),)},
        {"token": None, "more": ((b"cookie", b"everstep-1=a"),)},
    ],
)
async def test_what_differs_is_answered_by_itself(world: World, other: dict) -> None:
    assert await world.ask() == b"answer 1"
    assert await world.ask(**other) == b"answer 2"
    assert await world.ask(**other) == b"answer 2"
    assert await world.ask() == b"answer 1"


@pytest.mark.parametrize(
    "kind", [{"token": None}, {"method": "DELETE"}, {"path": "/v1/training-jobs/gpt/outputs"}, {"path": "/v1/fleets"}]
)
async def test_what_is_not_shared_is_never_held(world: World, kind: dict) -> None:
    assert await world.ask(**kind) == b"answer 1"
    assert await world.ask(**kind) == b"answer 2"


@pytest.mark.parametrize("other", [(b"cookie", b"c=2"), (b"sec-fetch-site", b"cross-site"), (b"origin", b"http://x")])
async def test_an_answer_for_a_session_is_not_used_for_another_cookie_or_site(
    world: World, other: tuple[bytes, bytes]
) -> None:
    session = {b"cookie": b"c=1", b"sec-fetch-site": b"same-origin"}
    for _ in range(2):
        assert await world.ask(token=None, more=tuple(session.items())) == b"answer 1"
    assert await world.ask(token=None, more=tuple((session | dict([other])).items())) == b"answer 2"


async def test_an_answer_gets_old_also_when_a_clock_steps_back(world: World) -> None:
    await world.ask()
    world.clock.advance(0.9)
    assert await world.ask() == b"answer 1"
    world.clock.advance(0.2)
    assert await world.ask() == b"answer 2"
    world.clock.advance(-5)
    assert await world.ask() == b"answer 3"


async def test_where_other_replicas_are_not_seen_it_gets_old_sooner(world: World) -> None:
    world.versions.sees_everything = False
    world.answers = Answers(world.inside, world.versions, world.clock)  # type: ignore[arg-type]
    await world.ask()
    world.clock.advance(0.25)
    assert await world.ask() == b"answer 2"


async def test_a_refusal_and_what_cannot_be_dated_are_not_held(world: World) -> None:
    world.inside.status = 404
    assert [await world.ask(), await world.ask()] == [b"answer 1", b"answer 2"]
    world.inside.status, world.versions.number = 200, None
    assert [await world.ask(), await world.ask()] == [b"answer 3", b"answer 4"]


async def test_who_asks_while_it_is_made_waits_for_it(world: World) -> None:
    world.inside.may_go.clear()
    asking = [asyncio.create_task(world.ask()) for _ in range(5)]
    await world.inside.is_asked.wait()
    world.inside.may_go.set()
    assert await asyncio.gather(*asking) == [b"answer 1"] * 5


async def test_who_waits_for_one_that_fails_makes_its_own(world: World) -> None:
    world.inside.may_go.clear()
    world.inside.status = 500
    asking = [asyncio.create_task(world.ask()) for _ in range(2)]
    await world.inside.is_asked.wait()
    world.inside.may_go.set()
    assert sorted(await asyncio.gather(*asking)) == [b"answer 1", b"answer 2"]


async def test_the_bytes_of_stored_responses_are_limited(world: World) -> None:
    count = MAX_BYTES // MAX_ANSWER_BYTES
    world.inside.body = b"%02d" + bytes(MAX_ANSWER_BYTES - 2 - ENTRY_BYTES)
    world.versions.number = 0
    await world.ask("/v1/training-jobs/0")  # replaced below by a newer version, so its bytes no longer count
    world.versions.number = 1
    for number in range(count + 1):
        await world.ask(f"/v1/training-jobs/{number}")
    assert world.inside.count == count + 2
    for number in range(1, count + 1):
        await world.ask(f"/v1/training-jobs/{number}")
    assert world.inside.count == count + 2, "the newest responses are stored"
    await world.ask("/v1/training-jobs/0")
    assert world.inside.count == count + 3, "the oldest response is not stored"


async def test_a_response_above_the_limit_is_not_stored(world: World) -> None:
    world.inside.body = b"%d" + bytes(MAX_ANSWER_BYTES)
    for count in (1, 2):
        await world.ask()
        assert world.inside.count == count


def test_a_revoked_token_is_refused_at_once_and_an_expired_one_soon(service, client, fleet, source):
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=2)
    made = client.create_token(Role=Role.VIEWER, Project="default", ExpiresInSeconds=3600)
    other = service.client(made["Secret"])
    assert other.describe_training_job(TrainingJobName="gpt")["TrainingJobName"] == "gpt"
    service.clock.advance(3601)
    with refused("AccessDeniedException"):
        other.describe_training_job(TrainingJobName="gpt")
    made = client.create_token(Role=Role.VIEWER, Project="default")
    other = service.client(made["Secret"])
    assert other.list_training_jobs()["TrainingJobSummaries"]
    client.revoke_token(TokenId=made["Token"]["TokenId"])
    with refused("AccessDeniedException"):
        other.list_training_jobs()


def test_whoever_changes_a_job_sees_it_at_once(client, fleet, source):
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=2)
    assert "StopRequestedTime" not in client.describe_training_job(TrainingJobName="gpt")
    client.stop_training_job(TrainingJobName="gpt")
    assert client.describe_training_job(TrainingJobName="gpt")["StopRequestedTime"] >= START - timedelta(seconds=1)


async def test_many_small_responses_to_long_queries_are_limited_too(world: World) -> None:
    world.inside.body = b"%d"
    for number in range(MAX_BYTES // (ENTRY_BYTES + 1) + 2):
        await world.ask(f"/v1/training-jobs/{number}")
    before = world.inside.count
    await world.ask(f"/v1/training-jobs/{before - 1}")
    assert world.inside.count == before, "the newest response is stored"
    await world.ask("/v1/training-jobs/0")
    assert world.inside.count == before + 1, "the oldest response is not stored"
