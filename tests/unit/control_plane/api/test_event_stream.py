"""Tests the event stream over HTTP.

A follower receives every event of its project once, and no event of another project.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest

from control_plane.api import envelope
from control_plane.api.caller_threads import CallerThreads
from control_plane.api.sessions import SESSION_SECONDS
from control_plane.db import events, tokens
from control_plane.db.events import NewEvent
from control_plane.db.retention import RowRetention, prune
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.loop.event_feed import Batch, End, EventFeed, FeedOptions, Interest
from tests.unit.control_plane.api.conftest import impatient

STREAM = "/v1/events/stream"


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"http://{service.address}",
        headers={"authorization": f"Bearer {service.admin_token}"},
        trust_env=False,
        timeout=30,
    ) as made:
        yield made


def append(service, *messages: str, project: str = "", job: str | None = None, fleet: str | None = None) -> list[int]:
    with service.database.write() as session:
        before = events.newest_id(session)
        for message in messages:
            events.append(
                session,
                NewEvent(
                    at=service.clock(), type="Test", message=message, project=project, job_name=job, fleet_name=fleet
                ),
            )
    return list(range(before + 1, before + 1 + len(messages)))


class Reader:
    """Parses a stream of server-sent events as a browser does."""

    def __init__(self, answer: httpx.Response) -> None:
        self.lines = answer.iter_lines()
        self.last_id: str | None = None
        self.comments = 0

    def __iter__(self) -> Iterator[tuple[str, dict]]:
        kind, data = "message", ""
        for line in self.lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data = value
            elif line.startswith(":"):
                self.comments += 1
            elif not line and data:
                yield kind, json.loads(data)
                kind, data = "message", ""

    def messages(self, count: int) -> list[str]:
        return [event["Message"] for _, event in itertools.islice(self, count)]

    def until_position(self) -> None:
        """Read up to the first event id. The stream sends every event that is stored after that id."""
        for line in self.lines:
            if line.startswith("id: "):
                self.last_id = line.removeprefix("id: ")
                return


@contextmanager
def stream(http: httpx.Client, headers: dict[str, str] | None = None, **query: object) -> Iterator[Reader]:
    with http.stream("GET", STREAM, params=query, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Reader(answer)


def feed(service, **options: Any) -> EventFeed:
    """Replace the service's event feed by a feed with these options, and return it."""
    made = EventFeed(service.database, service.clock, service.services.caller_threads.finish, FeedOptions(**options))
    service.app.state.services = replace(service.services, feed=made)
    return made


def test_what_happens_comes_as_list_events_answers_it(service, http) -> None:
    append(service, "before")
    with stream(http) as reader:
        reader.until_position()
        append(service, "one", "two", job="gpt")
        told = [event for _, event in itertools.islice(reader, 2)]
    assert told == http.get("/v1/events", params={"AfterEventId": 1}).json()["Events"]
    assert [event["Message"] for event in told] == ["one", "two"]
    assert reader.last_id == str(told[-1]["EventId"])


def test_a_follower_that_comes_back_misses_nothing_and_is_told_nothing_twice(service, http) -> None:
    with stream(http) as reader:
        reader.until_position()
        append(service, "one", "two")
        assert reader.messages(1) == ["one"]  # the second event may have arrived, but the reader has not read it
    append(service, "three")
    with stream(http, headers={"last-event-id": str(reader.last_id)}, AfterEventId=0) as again:
        append(service, "four")
        assert again.messages(3) == ["two", "three", "four"]


def test_a_follower_that_was_told_nothing_yet_has_a_position_to_come_back_with(service, http) -> None:
    append(service, "before")
    with stream(http) as reader:
        reader.until_position()
    append(service, "meanwhile")
    with stream(http, headers={"last-event-id": str(reader.last_id)}) as again:
        assert again.messages(1) == ["meanwhile"]


def test_a_follower_that_is_far_behind_gets_there_in_order(service, http) -> None:
    feed(service, page_limit=3, recent_limit=4)
    first = [str(number) for number in range(10)]
    append(service, *first)
    with stream(http, AfterEventId=0) as reader:
        assert reader.messages(5) == first[:5]
        later = [str(number) for number in range(10, 40)]
        append(service, *later)
        assert reader.messages(35) == [*first[5:], *later]


def test_an_id_is_not_given_again_when_the_newest_events_are_let_go(service, http) -> None:
    (last,) = append(service, "old")
    with service.database.write() as session:
        prune(session, RowRetention(), service.clock() + timedelta(days=400))
    with stream(http, AfterEventId=last) as reader:
        append(service, "new")
        assert reader.messages(1) == ["new"]


def test_filters_are_those_of_list_events_and_the_position_moves_past_the_rest(service, http) -> None:
    with stream(http, AfterEventId=0, TrainingJobName="gpt", FleetName="main") as reader:
        append(service, "other job", job="bert", fleet="main")
        append(service, "other fleet", job="gpt", fleet="spot")
        append(service, "ours", job="gpt", fleet="main")
        append(service, "other job again", job="bert", fleet="main")
        (last,) = append(service, "end", job="gpt", fleet="main")
        assert reader.messages(2) == ["ours", "end"]
    assert reader.last_id == str(last)
    append(service, "not ours")
    with stream(http, headers={"last-event-id": str(last)}, TrainingJobName="gpt") as again:
        while again.last_id != str(last + 1):
            again.until_position()


def test_a_project_sees_its_own_events(service, http) -> None:
    mine = {"authorization": f"Bearer {service.token(Role.VIEWER, 'mine')}"}
    with stream(http, headers=mine, AfterEventId=0) as reader:
        append(service, "theirs", project="theirs")
        append(service, "nobody's")
        append(service, "mine", project="mine")
        assert reader.messages(1) == ["mine"]
    with stream(http, headers=mine, AfterEventId=0) as behind:
        assert behind.messages(1) == ["mine"]


def test_silence_is_told_from_a_lost_line_by_comments(service, http) -> None:
    feed(service, heartbeat_seconds=0.01)
    with stream(http) as reader:
        assert next(line for line in reader.lines if line.startswith(":")) == ": alive"


@pytest.mark.parametrize("is_behind", [False, True])
def test_it_ends_when_the_token_is_revoked(service, http, is_behind) -> None:
    if is_behind:
        feed(service, recent_limit=0)  # with this limit, followers read all events from the table
    with service.database.write() as session:
        token, record = tokens.mint(
            session, NewToken(kind=TokenKind.USER, role=Role.VIEWER, project="a"), service.clock()
        )
    with stream(http, headers={"authorization": f"Bearer {token}"}, AfterEventId=0) as reader:
        append(service, "seen", project="a")
        assert reader.messages(1) == ["seen"]
        with service.database.write() as session:
            tokens.revoke(session, record.id, service.clock())
        append(service, "not seen", project="a")
        ((kind, end),) = list(reader)
    assert kind == "end"
    assert end["Code"] == "AccessDeniedException"
    assert "revoked" in end["Message"]
    assert http.get(STREAM, headers={"authorization": f"Bearer {token}"}).status_code == 401


def test_a_browsers_session_is_enough_and_ends_it(service, http) -> None:
    del http.headers["authorization"]
    http.headers["sec-fetch-site"] = "same-origin"
    assert http.get(STREAM).status_code == 401
    http.post("/v1/session", json={"Token": service.admin_token}, headers={"origin": str(http.base_url)})
    with stream(http) as reader:
        reader.until_position()
        append(service, "seen")
        assert reader.messages(1) == ["seen"]
        service.clock.advance(SESSION_SECONDS)
        ((kind, end),) = list(reader)
    assert (kind, end["Code"]) == ("end", "AccessDeniedException")
    assert "session" in end["Message"]
    assert http.get(STREAM, headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("said", ["x", "-1", "1.5", "9" * 30, "9" * 5000, "²"])
def test_an_id_that_was_never_sent_is_refused(http, said) -> None:
    answer = http.get(STREAM, headers={"last-event-id": said.encode("latin-1")})
    assert (answer.status_code, answer.json()["Code"]) == (400, "ValidationException")
    assert answer.json()["Fields"][0]["Field"] == "Last-Event-ID"


@pytest.mark.parametrize("path", ["/v1/events", STREAM])
def test_an_id_that_no_table_has_is_refused(http, path) -> None:
    assert http.get(path, params={"AfterEventId": 2**63}).status_code == 400
    assert http.get("/v1/events", params={"AfterEventId": 2**63 - 1}).json()["Events"] == []


def test_there_is_a_limit_of_streams_and_one_that_ended_makes_room(service, http) -> None:
    feed(service, follower_limit=1)
    with stream(http, AfterEventId=0) as reader:
        append(service, "seen")
        assert reader.messages(1) == ["seen"]
        refused = http.get(STREAM)
        assert (refused.status_code, refused.json()["Code"]) == (429, "ThrottlingException")
    while (answer := http.send(http.build_request("GET", STREAM), stream=True)).status_code == 429:
        answer.close()
    answer.close()


@pytest.mark.security
def test_no_token_holds_all_streams(service, http) -> None:
    feed(service, followers_per_token_limit=1)
    headers = {"authorization": f"Bearer {service.token(Role.VIEWER, 'other')}"}
    with stream(http, AfterEventId=0) as reader:
        append(service, "seen")
        assert reader.messages(1) == ["seen"]
        assert http.get(STREAM).status_code == 429
        with httpx.stream(
            "GET", f"http://{service.address}{STREAM}", headers=headers, trust_env=False, timeout=20
        ) as other:
            assert other.status_code == 200


@pytest.mark.security
def test_the_past_is_read_and_encoded_in_the_turn_of_the_caller(service, http, monkeypatch) -> None:
    """A stream from an old position has long pages. New events come in short batches."""
    calls: list[str] = []
    finish = CallerThreads.finish

    async def watched(threads: CallerThreads, work: partial[object]) -> object:
        calls.append(work.func.__name__)
        return await finish(threads, work)

    monkeypatch.setattr(CallerThreads, "finish", watched)
    feed(service)
    messages = [str(number) for number in range(30)]
    append(service, *messages)
    with stream(http, AfterEventId=0) as reader:
        assert reader.messages(30) == messages
        assert calls == ["_read_page", "_encoded"]
        append(service, "new")
        assert reader.messages(1) == ["new"]
    assert calls == ["_read_page", "_encoded"]


def test_a_reader_that_reads_nothing_is_cut_off_and_comes_back_where_it_was(service, http, monkeypatch) -> None:
    dropped = threading.Event()
    monkeypatch.setattr(envelope.log, "info", lambda *_: dropped.set())
    http.get("/v1/health")  # the first request builds the middleware that `impatient` changes
    host, port = service.address.split(":")
    with impatient(service, 0.05), socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((host, int(port)))
        line.sendall(
            (
                f"GET {STREAM}?AfterEventId=0 HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {service.admin_token}\r\n\r\n"
            ).encode()
        )
        messages = [f"{number} {'x' * 1_000_000}" for number in range(12)]
        append(service, *messages)
        assert dropped.wait(30)
        received = b""
        while piece := line.recv(2**20):
            received += piece
    assert not received.endswith(b"0\r\n\r\n"), "an answer that was cut off does not look like one that ended"
    whole = [line for line in received.split(b"\n") if line.startswith(b"id: ")]
    assert len(whole) < len(messages)
    with stream(http, AfterEventId=0) as reader:
        assert reader.messages(len(messages)) == messages


def test_a_server_that_stops_ends_every_stream_with_a_word(service, http) -> None:
    with stream(http) as reader:
        reader.until_position()
        service.stop()
        ((kind, end),) = list(reader)
    assert (kind, end["Code"]) == ("end", "ServiceUnavailableException")


def test_nothing_is_looked_at_while_nobody_follows(service, http) -> None:
    with stream(http) as reader:
        reader.until_position()
        is_idle = asyncio.run_coroutine_threadsafe(service.services.feed.idle(), service.loop)
        assert not is_idle.done()
    is_idle.result(10)


async def batch_of(stream: AsyncGenerator[Batch | End, None]) -> tuple[list[str], int]:
    """Return the messages and the position of the stream's next batch."""
    batch = await anext(stream)
    assert isinstance(batch, Batch)
    return [event.message for event in batch.events], batch.position


async def test_what_was_written_between_a_look_and_a_page_comes_once(service) -> None:
    """An event is stored after the feed's poll and before a follower reads the table. The follower receives it once.

    The follower's position then includes the event, so the feed does not send it again.
    """
    _, two = append(service, "one", "two")
    with service.database.write() as session:
        _, record = tokens.mint(session, NewToken(kind=TokenKind.USER, role=Role.VIEWER, project=""), service.clock())
    interest = Interest(token_id=record.id, ends_at=None, project=None, job_name=None, fleet_name=None)
    made = EventFeed(
        service.database, service.clock, service.services.caller_threads.finish, FeedOptions(poll_seconds=3600.0)
    )
    async with aclosing(made.follow(interest, 0)) as before, aclosing(made.follow(interest, 0)) as after:
        assert [await batch_of(before), await batch_of(before)] == [([], 0), (["one", "two"], two)]
        (three,) = append(service, "three")
        assert [await batch_of(after), await batch_of(after)] == [([], 0), (["one", "two", "three"], three)]
        waiting = asyncio.ensure_future(anext(after))
        made.close()
        assert await waiting is End.SERVER
    await made.idle()
