"""Tests `everstep jobs top`: the text that it shows, its polls, and the event stream that it follows."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from rich.console import Console
from urllib3 import HTTPConnectionPool
from urllib3.exceptions import ProtocolError, ReadTimeoutError

from control_plane.db import events as stored
from control_plane.db.events import NewEvent
from control_plane.db.tokens import Role
from everstep.cli import board, following, top
from everstep.cli.board import Board
from everstep.cli.commands import MAX_ITEMS
from everstep.cli.waiting import UNANSWERED_SECONDS
from everstep.config import ClientConfig
from everstep.errors import ServiceFailed
from everstep.event_stream import EventStream, frames
from everstep.failures import UNAVAILABLE
from tests.unit.control_plane.api.conftest import Service
from tests.unit.everstep.conftest import Client
from tests.unit.everstep.test_cli import JOB

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def job(name: str = "gpt", **fields: object) -> dict:
    return {
        **JOB,
        "TrainingJobName": name,
        "RunId": name,
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        **fields,
    }


def event(message: str, number: int = 1) -> dict:
    return {"EventId": number, "Time": NOW, "Type": "JobStateChanged", "Message": message, "TrainingJobName": "gpt"}


def drawn(seen: Board, now: datetime = NOW) -> str:
    console = Console(record=True, width=160, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(board.picture(seen, now, console.width))
        return console.export_text()


def test_the_board_says_where_each_job_stands_and_what_happened() -> None:
    waiting = job(
        "bert",
        SecondaryStatus="Pending",
        Boundary=-1,
        CommittedStep=-1,
        Reason="Waiting for [2] nodes.",
        TrainingStartTime=None,
    )
    seen = board.with_event(
        board.with_jobs(Board(), [job(EttrRatio=0.91), waiting], NOW), event("Generation [3] trains.")
    )
    lines = drawn(seen, NOW + timedelta(seconds=3)).splitlines()
    assert lines[0].startswith("everstep · 2026-03-01 12:00:03 UTC · 2 jobs in progress, as of 3 s ago")
    assert lines[3].split()[:7] == ["gpt", "Training", "200", "-", "-", "0.910", "199"]
    assert lines[4].split()[:5] == ["bert", "Pending", "-", "-", "-"]
    assert "Waiting for [2] nodes." in lines[4]
    assert lines[6].split(maxsplit=2) == ["12:00:00", "JobStateChanged", "Generation [3] trains."]


def test_an_empty_board_says_so() -> None:
    assert "No job is in progress." in drawn(board.with_jobs(Board(), [], NOW))
    assert "not polled yet · the service does not answer" in drawn(
        board.in_trouble(Board(), "the service does not answer")
    )


def test_a_pace_is_taken_over_some_seconds_and_begins_anew_with_an_older_step() -> None:
    seen = board.with_jobs(Board(), [job(Boundary=100)], NOW)
    seen = board.with_jobs(seen, [job(Boundary=104)], NOW + timedelta(seconds=2))
    assert seen.paces["gpt"].steps_per_second is None
    seen = board.with_jobs(seen, [job(Boundary=120)], NOW + timedelta(seconds=10))
    assert seen.paces["gpt"].steps_per_second == 2.0
    assert " 2.00 " in drawn(seen)
    seen = board.with_jobs(seen, [job(Boundary=90)], NOW + timedelta(seconds=12))
    assert seen.paces["gpt"].steps_per_second is None
    assert board.with_jobs(seen, [], NOW).paces == {}


def test_the_newest_events_alone_are_kept() -> None:
    seen = Board()
    for number in range(20):
        seen = board.with_event(seen, event(f"m{number}"))
    assert [each["Message"] for each in seen.events] == [f"m{number}" for number in range(20 - board.EVENTS_SHOWN, 20)]


class World:
    """A fake of the service and the clock. Each wait returns the next scripted event."""

    def __init__(self, looks: list, comes: list) -> None:
        self.looks, self.comes, self.waits, self.now = looks, comes, [], NOW

    def describe_training_job(self, **_: object) -> dict:
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def wait(self, seconds: float) -> dict | None:
        self.waits.append(seconds)
        self.now += timedelta(seconds=seconds)
        return self.comes.pop(0)

    def boards(self, count: int) -> list[Board]:
        made = top.boards(self, "gpt", wait=self.wait, now=lambda: self.now)
        return [next(made)[0] for _ in range(count)]


def test_it_looks_again_for_every_burst_of_events_and_every_two_seconds_without() -> None:
    world = World([job(Boundary=1), job(Boundary=2), job(Boundary=3)], [event("a", 1), event("b", 2), None, None])
    first, second, third = world.boards(3)
    assert [len(each.events) for each in (first, second, third)] == [0, 2, 2]
    assert [each.jobs[0]["Boundary"] for each in (first, second, third)] == [1, 2, 3]
    assert world.waits == [top.REFRESH_SECONDS, 0, 0, top.REFRESH_SECONDS]


def test_a_service_that_does_not_answer_is_shown_with_what_was_known() -> None:
    gone = ServiceFailed("Nobody answers.", code="ServiceUnavailableException")
    first, second, third = World([job(), gone, job(Boundary=201)], [None, None]).boards(3)
    assert (first.trouble, second.trouble, third.trouble) == ("", "the service does not answer", "")
    assert second.jobs == first.jobs
    with pytest.raises(ServiceFailed, match="none of that name"):
        World([ServiceFailed("There is none of that name.", code="ResourceNotFoundException")], []).boards(1)


def test_jobs_under_way_are_those_that_have_not_ended() -> None:
    summaries = {
        "InProgress": [job("new", CreationTime=NOW)],
        "Stopping": [job("newer", CreationTime=NOW + timedelta(hours=1))],
    }
    service = Client(
        {"list_training_jobs": lambda StatusEquals, **_: {"TrainingJobSummaries": summaries[StatusEquals]}}
    )
    assert [each["TrainingJobName"] for each in top.jobs_under_way(service, None)] == ["newer", "new"]


def test_where_nobody_watches_it_is_shown_once_and_programs_get_json(run) -> None:
    code, out, _, _ = run("jobs", "top", "gpt", describe_training_job=job())
    assert code == 0
    assert "1 job in progress, as of now" in out
    _, out, _, _ = run("jobs", "top", "gpt", "-o", "json", describe_training_job=job())
    assert json.loads(out)["TrainingJobSummaries"][0]["TrainingJobName"] == "gpt"


# Tests of the event stream


def test_frames_are_whole_and_in_order() -> None:
    said = (
        b'retry: 1000\nid: 4\n\n: alive\n\nid: 5\ndata: {"EventId": 5}\n\nevent: end\ndata: {"Code": '
        b'"x"}\n\nid: 6\ndata: {"Ev'
    )
    assert [(each.kind, each.data, each.event_id) for each in frames(said.split(b"\n"))] == [
        ("position", {}, 4),
        ("message", {"EventId": 5}, 5),
        ("end", {"Code": "x"}, None),
    ]


class Stream:
    def __init__(self, said: list, last_event_id: int | None) -> None:
        self.said, self.last_event_id, self.is_closed = said, last_event_id, False

    def __iter__(self):
        for each in self.said:
            if isinstance(each, BaseException):
                raise each
            yield each

    def close(self) -> None:
        self.is_closed = True


def test_a_stream_that_breaks_goes_on_where_it_was() -> None:
    streams = [
        Stream([event("a"), ProtocolError("broken")], 7),
        Stream([ProtocolError("again")], 9),
        Stream([event("b")], 10),
    ]
    asked: list[dict] = []

    def follow_events(**query: object) -> Stream:
        asked.append(query)
        return streams[len(asked) - 1]

    found = following.events(
        SimpleNamespace(follow_events=follow_events), {"TrainingJobName": "gpt"}, pause=lambda _: None
    )
    assert [next(found)["Message"] for _ in range(2)] == ["a", "b"]
    found.close()
    assert asked == [
        {"TrainingJobName": "gpt"},
        {"TrainingJobName": "gpt", "AfterEventId": 7},
        {"TrainingJobName": "gpt", "AfterEventId": 9},
    ]
    assert all(stream.is_closed for stream in streams)


def test_a_connection_that_cannot_be_made_again_at_once_forgets_nothing() -> None:
    gone = EndpointConnectionError(endpoint_url="http://x")
    connections: list[object] = [Stream([event("a"), ProtocolError("broken")], 7), gone, gone, Stream([event("b")], 8)]
    asked: list[dict] = []

    def follow_events(**query: object) -> object:
        asked.append(query)
        found = connections.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    found = following.events(SimpleNamespace(follow_events=follow_events), {}, pause=lambda _: None)
    assert [next(found)["Message"] for _ in range(2)] == ["a", "b"]
    found.close()
    assert [query.get("AfterEventId") for query in asked] == [None, 7, 7, 7]


def test_a_stream_that_was_quiet_for_long_is_not_given_up_when_it_breaks() -> None:
    now = [0.0]

    class Quiet(Stream):
        def __iter__(self):
            now[0] += 10 * UNANSWERED_SECONDS
            raise ProtocolError("broken")
            yield

    connections = [Quiet([], 1), Stream([event("a")], 2)]
    found = following.kept_up(
        lambda: connections.pop(0),
        is_over=lambda: False,
        has_spoken=lambda: True,
        pause=lambda _: None,
        monotonic=lambda: now[0],
    )
    assert next(found)["Message"] == "a"
    found.close()


def test_a_stream_that_says_nothing_is_left_for_another_and_given_up_after_a_minute() -> None:
    now, silent = [0.0], ReadTimeoutError(HTTPConnectionPool("x"), "/", "Read timed out.")
    streams = [
        Stream([silent], 7),
        Stream([silent], None),
        Stream([event("a", 8), silent], 8),
        *(Stream([silent], None) for _ in range(9)),
    ]
    asked: list[object] = []

    def follow_events(**query: object) -> Stream:
        asked.append(query.get("AfterEventId"))
        return streams[len(asked) - 1]

    def pause(_: float) -> None:
        now[0] += UNANSWERED_SECONDS / 2

    found = following.events(SimpleNamespace(follow_events=follow_events), {}, pause=pause, monotonic=lambda: now[0])
    assert next(found)["EventId"] == 8
    with pytest.raises(ServiceFailed, match=r"sent nothing for 60 s: .*Read timed out") as given_up:
        next(found)
    assert (given_up.value.code, asked) == (UNAVAILABLE, [None, 7, 7, 8, 8])
    assert all(stream.is_closed for stream in streams[:5])


def test_a_server_that_opens_a_stream_and_falls_silent_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        configuration = ClientConfig(f"http://127.0.0.1:{listener.getsockname()[1]}", "t")

        def open_and_say_nothing() -> None:
            line, _ = listener.accept()
            with line:
                line.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\nid: 7\n\n\r\n")
                while line.recv(4096):
                    pass  # the stream ends when the client disconnects

        server = threading.Thread(target=open_and_say_nothing)
        server.start()
        with (
            closing(EventStream(configuration, {}, silent_seconds=3.0)) as stream,
            pytest.raises(ReadTimeoutError),
        ):
            next(iter(stream))
        assert stream.last_event_id == 7
        server.join(20)
        assert not server.is_alive()


def test_connections_that_end_without_a_word_are_not_made_for_ever() -> None:
    now = iter(range(0, 10_000, 30))
    streams = [Stream([], None) for _ in range(10)]
    service = SimpleNamespace(follow_events=lambda **_: streams.pop())
    with pytest.raises(ServiceFailed, match="it closes them"):
        next(following.events(service, {}, pause=lambda _: None, monotonic=lambda: next(now)))
    assert 1 < 10 - len(streams) <= UNANSWERED_SECONDS / 30 + 1


def follow(run, *words: str, streams: list[Stream]) -> tuple[int, str, str, list]:
    """Run `events list -f` on these streams. A KeyboardInterrupt among their events ends the command."""
    return run("events", "list", "-f", *words, follow_events=lambda **_: streams.pop(0))


def test_events_are_followed_on_the_command_line(run) -> None:
    code, out, err, calls = follow(
        run, "--job", "gpt", streams=[Stream([event("a", 7), event("b", 8), KeyboardInterrupt()], 8)]
    )
    assert (code, err) == (130, "")
    assert out.splitlines() == [
        "2026-03-01 12:00:00  7  JobStateChanged  gpt  a",
        "2026-03-01 12:00:00  8  JobStateChanged  gpt  b",
    ]
    assert calls == [("follow_events", {"TrainingJobName": "gpt"})]


def test_as_many_events_are_followed_as_are_asked_for(run) -> None:
    stream = Stream([event("a", 7), event("b", 8), event("c", 9)], 9)
    code, out, _, calls = follow(run, "--max-items", "2", "-o", "json", "--query", "EventId", streams=[stream])
    assert (code, out, stream.is_closed) == (0, "7\n8\n", True)
    assert calls == [("follow_events", {})]
    many = [event("a", number) for number in range(1, 2 * MAX_ITEMS)]
    _, out, _, _ = follow(run, streams=[Stream([*many, KeyboardInterrupt()], 1)])
    assert len(out.splitlines()) == len(many), "unless so many are asked for there is no end"
    code, _, err, calls = follow(run, "--starting-token", "x", streams=[])
    assert (code, calls) == (2, [])
    assert "--after" in err


def test_followed_events_can_be_queried_one_by_one(run) -> None:
    _, out, _, calls = follow(
        run, "--after", "3", "-o", "json", streams=[Stream([event("a", 4), KeyboardInterrupt()], 4)]
    )
    assert json.loads(out) == {**event("a", 4), "Time": "2026-03-01T12:00:00Z"}
    assert calls == [("follow_events", {"AfterEventId": 3})]
    _, out, _, _ = follow(
        run,
        "--query",
        "[EventId, Message]",
        "-o",
        "text",
        streams=[Stream([event("a", 4), event("b", 5), KeyboardInterrupt()], 5)],
    )
    assert out == "4\ta\n5\tb\n"


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path) as running:
        yield running


def happen(service: Service, *messages: str) -> None:
    with service.database.write() as session:
        for message in messages:
            stored.append(session, NewEvent(at=service.clock(), type="Test", message=message, job_name="gpt"))


def test_the_client_reads_the_real_stream(service) -> None:
    happen(service, "one", "two")
    client = service.client()
    stream = client.follow_events(AfterEventId=0, TrainingJobName="gpt")
    found = iter(stream)
    listed = client.list_events(TrainingJobName="gpt")["Events"]
    assert [next(found), next(found)] == listed
    assert stream.last_event_id == listed[-1]["EventId"]
    happen(service, "three")
    assert next(found)["Message"] == "three"
    stream.close()
    client.close()


@pytest.mark.parametrize(("token", "code"), [("est_wrong", "AccessDeniedException")])
def test_a_stream_that_is_refused_says_why(service, token, code) -> None:
    client = service.client(token)
    with pytest.raises(ClientError) as refused:
        client.follow_events()
    assert refused.value.response["Error"]["Code"] == code
    client.close()


def test_a_stream_whose_token_is_revoked_ends_with_the_reason(service) -> None:
    admin, viewer = service.client(), service.client(service.token(Role.VIEWER))
    found = iter(viewer.follow_events(AfterEventId=0))
    happen(service, "one")
    next(found)
    for token in admin.list_tokens()["Tokens"]:
        if token["Role"] == "viewer":
            admin.revoke_token(TokenId=token["TokenId"])
    with pytest.raises(ClientError, match="revoked") as ended:
        next(found)
    assert ended.value.response["Error"]["Code"] == "AccessDeniedException"
    viewer.close()
    admin.close()
