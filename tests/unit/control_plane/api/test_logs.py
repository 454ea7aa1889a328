"""Tests how boto3 reads the printed lines of ranks over HTTP: in pages, and as a followed log."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from botocore.config import Config

from control_plane.api import log_tokens
from control_plane.api.deps import LogPauses
from control_plane.api.errors import InvalidRequest
from control_plane.api.schemas.common import MAX_NODE_COUNT
from control_plane.db import tokens
from control_plane.db.models import JobRow, NodeRow
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.loop import log_reader
from control_plane.loop.log_feed import WAITING_CHARACTERS, WAITING_LIMIT, LogFeed, LogFollower
from control_plane.loop.log_reader import GenerationFacts
from everstep.protocol.agent_messages import Hello, LogLines
from everstep.protocol.ids import NO_RANK, FleetName, Generation, NodeId, Rank, RunId
from everstep.protocol.log_chunks import LINE_MEMORY, ChunkHead, ChunkName, LogLine, encode_head, encode_lines
from tests.unit.control_plane.api.conftest import START, refused
from tests.unit.control_plane.api.test_results import Job

MS = int(START.timestamp() * 1000)


def line(text: str, at: int = 0, rank: int = 0, stream: str = "stdout", **more) -> LogLine:
    return LogLine(at_ms=MS + at, rank=Rank(rank), stream=stream, text=text, end=1, **more)


END = LogLine(at_ms=MS + 99_000, rank=NO_RANK, stream="end", text="", end=0)


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    made = Job(service, client, source)
    made.launch(1)
    made.connect("i-0", "i-1")
    return made


def test_a_job_that_was_never_planned_has_an_empty_log_that_can_be_followed(service, client, fleet, source):
    Job(service, client, source)
    assert read(client)["Events"] == read(client, StartFromHead=True)["Events"] == []
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        assert next(iter(stream))["LogEvents"]["Events"] == []


def test_the_empty_log_of_a_job_that_ended_before_its_first_launch_has_an_end(service, client, fleet, source):
    job = Job(service, client, source)
    with service.database.write() as session:
        row = session.get(JobRow, job.run)
        row.state, row.ended_at = "stopped", service.clock()
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        assert [event for batch in stream for event in batch["LogEvents"]["Events"]] == []


def put(job: Job, node: int, *lines: LogLine, first: int = 0, generation: int = 1) -> None:
    name = ChunkName(NodeId(f"i-{node}"), first, lines[0].at_ms)
    job.put(
        "logs", f"gen={generation}/{name.path}", encode_head(ChunkHead(first=first, positions={})) + encode_lines(lines)
    )


def read(client, **query):
    return client.get_log_events(TrainingJobName="gpt", **query)


def messages(page) -> list[str]:
    return [event["Message"] for event in page["Events"]]


def everything(client, **query) -> list[str]:
    """Return the messages of all pages, in forward order."""
    page, found = read(client, StartFromHead=True, **query), []
    while page["Events"]:
        found += messages(page)
        page = read(client, NextToken=page["NextForwardToken"], **query)
    return found


@pytest.mark.covers("GetLogEvents.Limit", "GetLogEvents.StartFromHead")
def test_lines_of_all_nodes_are_merged_by_time_and_pages_lose_and_double_nothing(job, client) -> None:
    put(job, 0, *(line(f"a{number}", 10 * number) for number in range(5)))
    put(job, 0, *(line(f"a{number}", 10 * number) for number in range(5, 10)), first=5)
    put(job, 1, *(line(f"b{number}", 10 * number + 5, rank=1, stream="stderr") for number in range(10)))
    wanted = [f"{node}{number}" for number in range(10) for node in "ab"]
    for limit in (1, 3, 7, 100):
        assert everything(client, Limit=limit) == wanted
    event = read(client, StartFromHead=True, Limit=2)["Events"][1]
    assert (event["Timestamp"], event["Generation"], event["NodeId"], event["Rank"], event["Stream"]) == (
        START + timedelta(milliseconds=5),
        1,
        "i-1",
        1,
        "stderr",
    )


@pytest.mark.security
def test_a_stored_line_of_an_impossible_time_ends_its_chunk_and_no_request(job, client) -> None:
    put(job, 0, line("a", 1), line("b", 2**53 - MS), line("c", 3))
    put(job, 1, line("d", 4, rank=1))
    assert everything(client) == ["a", "d"]


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.covers(
    "GetLogEvents.NextToken",
)
def test_the_newest_come_first_and_reading_back_gives_the_rest(job, client, limit) -> None:
    job.launch(2)
    for generation in (1, 2):
        put(job, 0, line(f"a{generation}", 0), line(f"b{generation}", 10), END, generation=generation)
        put(job, 1, line(f"c{generation}", 5, rank=1), END, generation=generation)
    page, found = read(client, Limit=limit), []
    while page["Events"]:
        found = messages(page) + found
        forward = read(client, NextToken=page["NextForwardToken"], Limit=limit)
        assert messages(forward) == ["a1", "c1", "b1", "a2", "c2", "b2"][-len(found) :][len(page["Events"]) :][:limit]
        page = read(client, NextToken=page["NextBackwardToken"], Limit=limit)
    assert found == ["a1", "c1", "b1", "a2", "c2", "b2"]


def test_what_a_node_ships_late_comes_late_and_is_not_missed(job, client) -> None:
    put(job, 0, line("a", 0), line("b", 1000))
    page = read(client, StartFromHead=True)
    assert messages(page) == ["a", "b"]
    assert messages(read(client, NextToken=page["NextForwardToken"])) == []
    put(job, 1, line("late", 500, rank=1))
    put(job, 0, line("a", 0), line("b", 1000), line("c", 1500))
    assert messages(read(client, NextToken=page["NextForwardToken"])) == ["late", "c"]


@pytest.mark.covers(
    "GetLogEvents.TrainingJobName",
    "GetLogEvents.Rank",
    "GetLogEvents.Generation",
    "GetLogEvents.FilterPattern",
    "GetLogEvents.StartTime",
    "GetLogEvents.EndTime",
)
def test_filters(job, client) -> None:
    job.launch(2)
    put(job, 0, line("step 1 loss 0.5", 0), line("step 2 loss 0.4", 2000), END)
    put(job, 1, line("step 1 loss 0.6", 1000, rank=1), line("warning", 3000, rank=1), END)
    put(job, 0, line("again", 9000), generation=2)
    assert everything(client, Rank=1) == ["step 1 loss 0.6", "warning"]
    assert everything(client, Generation=2) == ["again"]
    assert everything(client, FilterPattern="step 1") == ["step 1 loss 0.5", "step 1 loss 0.6"]
    assert everything(client, StartTime=START.timestamp() + 1, EndTime=START.timestamp() + 3) == [
        "step 1 loss 0.6",
        "step 2 loss 0.4",
    ]
    assert messages(read(client, EndTime=START.timestamp() + 2)) == ["step 1 loss 0.5", "step 1 loss 0.6"]


def test_where_a_node_died_is_an_event_of_its_own_in_its_place(service, job, client) -> None:
    put(job, 0, line("a", 0), line("b", 2000), END)
    put(job, 1, line("c", 1000, rank=1))
    assert everything(client) == ["a", "c", "b"]
    job.launch(2)
    put(job, 0, line("next", 5000), generation=2)
    assert everything(client) == ["a", "c", "b"], "the node lives: the rest may come"
    with service.database.write() as session:
        session.get(NodeRow, "i-1").ended_at = service.clock()
    found = everything(client)
    assert found[:3] == ["a", "c", "b"]
    assert found[4:] == ["next"]
    assert found[3].startswith("Output of rank 1 after 12:00:01.000 is missing, because i-1 ended before the upload. ")
    page = read(client)
    (gap,) = [event for event in page["Events"] if event["Stream"] == "gap"]
    assert gap["NodeId"] == "i-1"
    assert "Rank" not in gap
    assert everything(client, Rank=1)[1].startswith("Output of rank 1 ")
    assert not any(text.startswith("Node") for text in everything(client, Rank=0))
    assert everything(client, Limit=1) == found


def test_a_node_that_lives_and_ships_nothing_is_not_waited_for_without_end(service, job, client) -> None:
    put(job, 0, line("a", 0), END)
    job.launch(2)
    put(job, 0, line("next", 5000), generation=2)
    assert everything(client) == ["a"]
    service.clock.advance(log_reader.PATIENCE.total_seconds())
    found = everything(client)
    assert found[1].startswith("Output of rank 1 from the beginning is missing, because i-1 has not uploaded it yet. ")
    assert found[2] == "next"


@pytest.mark.parametrize("token", ["x", "e30=", "eJyrVgIAAUEBAA=="])
def test_a_token_that_was_made_up_is_refused(job, client, token) -> None:
    with refused("ValidationException", "NextToken"):
        read(client, NextToken=token)
    with refused("ValidationException", "NextToken"):
        client.follow_logs(TrainingJobName="gpt", NextToken=token)


def test_a_token_of_the_largest_job_is_one_that_is_taken() -> None:
    dice = random.Random(1)
    nodes = [NodeId(f"i-{dice.getrandbits(68):017x}") for _ in range(MAX_NODE_COUNT)]
    generations = [GenerationFacts(number=7, ranks={node: (Rank(0),) for node in nodes}, over_since=None)]
    positions = {node: dice.randrange(1, 10**6) for node in nodes} | {NodeId("i-other"): 5}
    cursor = log_reader.Cursor(7, positions, frozenset({*dice.sample(nodes, 2_000), NodeId("i-another")}))
    token = log_tokens.encode(cursor, generations, is_back=True)
    assert log_tokens.decode(token, generations) == (True, cursor)
    assert len(token) <= log_tokens.MAX_CHARACTERS
    with pytest.raises(InvalidRequest, match="is no longer stored"):
        log_tokens.decode(token, [])
    before = log_tokens.encode(log_reader.Cursor(7), [])
    assert log_tokens.decode(before, generations) == (False, log_reader.Cursor(7)), (
        "a generation that was waited for is planned"
    )


def test_a_job_of_another_project_has_no_log(service, job) -> None:
    with closing(service.client(service.token(Role.VIEWER, "other"))) as other:
        for call in (other.get_log_events, other.follow_logs):
            with refused("ResourceNotFoundException"):
                call(TrainingJobName="gpt")


class Following:
    """A log that a test follows, with the token of its newest batch."""

    def __init__(self, client, **query) -> None:
        self.stream = client.follow_logs(TrainingJobName="gpt", **query)["EventStream"]
        self.batches = iter(self.stream)
        self.token = next(self.batches)["LogEvents"]["NextForwardToken"]

    def lines(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            batch = next(self.batches)["LogEvents"]
            found += [event["Message"] for event in batch["Events"]]
            self.token = batch["NextForwardToken"]
        return found


def set_pauses(service, **pauses: float) -> None:
    service.app.state.services = replace(service.services, log_pauses=LogPauses(**pauses))


def send(service, job: Job, node: int, first: int, *lines: LogLine, generation: int = 1) -> None:
    said = LogLines(run=RunId(job.run), generation=Generation(generation), first=first, lines=lines)
    service.loop.call_soon_threadsafe(service.services.registry.lines.deliver, NodeId(f"i-{node}"), said)


@pytest.fixture
def frequent_reads(service):
    set_pauses(service, stored_seconds=0.2, catch_up_seconds=0.05)


def test_lines_of_agents_come_at_once_and_what_is_missing_comes_from_the_store(service, job, client) -> None:
    set_pauses(service, stored_seconds=30.0)
    put(job, 0, line("old"))
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        batches = iter(stream)
        next(batches)
        send(service, job, 0, 1, line("one"), line("two"))
        send(service, job, 0, 1, line("one"), line("two"), line("three"))  # the agent repeats two lines and adds one
        send(service, job, 1, 0, line("other", rank=1))
        found = []
        while len(found) < 4:
            found += [event["Message"] for event in next(batches)["LogEvents"]["Events"]]
        assert found == ["one", "two", "three", "other"]
        put(job, 0, *(line(text) for text in ("old", "one", "two", "three", "four", "five")))
        send(service, job, 0, 6, line("six"))  # lines four and five are still missing
        found = []
        while len(found) < 2:
            found += [event["Message"] for event in next(batches)["LogEvents"]["Events"]]
        assert found == ["four", "five"]
        # The service held this line back until the missing lines arrived, and the agent sent it only once.
        assert [event["Message"] for event in next(batches)["LogEvents"]["Events"]] == ["six"]


@pytest.mark.security
def test_lines_of_a_node_that_is_not_in_the_plan_reach_no_follower(service, job, client) -> None:
    set_pauses(service, stored_seconds=30.0)
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        batches = iter(stream)
        next(batches)
        for generation in (1, 2, 10**9):
            send(service, job, 7, 0, line("forged"), generation=generation)
        send(service, job, 0, 0, line("own"))
        found: list[str] = []
        while "own" not in found:
            found += [event["Message"] for event in next(batches)["LogEvents"]["Events"]]
        assert found == ["own"]


def test_lines_that_never_stop_are_live_although_the_first_ones_were_missing(service, job, client) -> None:
    """A follower receives lines while the ranks print without a pause. The first lines are read from the store.

    The agent sends new lines directly, and stores them about a second later. The store therefore never contains the
    newest line. The follower must continue with the lines from the agent as soon as the stored lines reach the first of
    them.
    """
    set_pauses(service, stored_seconds=30.0, catch_up_seconds=0.05)
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        batches = iter(stream)
        next(batches)
        for number in range(2, 7):
            send(service, job, 0, number, line(str(number)))
        # Store lines 0 to 3. The agent has sent lines 2 to 6 directly, so the two ranges overlap.
        put(job, 0, *(line(str(number)) for number in range(4)))
        found: list[str] = []
        while len(found) < 7:
            found += [event["Message"] for event in next(batches)["LogEvents"]["Events"]]
        assert found == [str(number) for number in range(7)]


@pytest.mark.usefixtures("frequent_reads")
@pytest.mark.covers("FollowLogs.TrainingJobName", "FollowLogs.StartFromHead", "FollowLogs.NextToken")
def test_a_follower_begins_with_what_is_stored_goes_on_with_its_token_and_ends_with_the_job(
    service, job, client
) -> None:
    put(job, 0, line("a"))
    following = Following(client, StartFromHead=True)
    assert following.lines(1) == ["a"]
    following.stream.close()
    put(job, 0, line("a"), line("b", 1), END)
    put(job, 1, line("c", 2, rank=1), END)
    again = Following(client, NextToken=following.token)
    assert again.lines(2) == ["b", "c"]
    with service.database.write() as session:
        row = session.get(JobRow, job.run)
        row.state, row.ended_at = "completed", service.clock()
    assert [event["Message"] for batch in again.batches for event in batch["LogEvents"]["Events"]] == []


@pytest.mark.usefixtures("frequent_reads")
def test_a_follower_whose_token_is_revoked_is_told_nothing_more(service, job, client) -> None:
    with service.database.write() as session:
        token, record = tokens.mint(
            session, NewToken(kind=TokenKind.USER, role=Role.VIEWER, project="default"), service.clock()
        )
    with closing(service.client(token)) as reader:
        following = Following(reader)
        with service.database.write() as session:
            tokens.revoke(session, record.id, service.clock())
        assert [batch for batch in following.batches if batch["LogEvents"]["Events"]] == []


@pytest.mark.usefixtures("frequent_reads")
def test_agents_are_asked_for_lines_while_somebody_follows(service, job, client) -> None:
    hello = Hello(node_id=NodeId("i-0"), agent_id="a", address="", peer_port=1, memory_bytes=1, version="1")
    asked = threading.Event()

    async def agent() -> None:
        connection = service.services.registry.accept(hello, FleetName("main"))
        await connection.next_message()
        asked.set()

    asyncio.run_coroutine_threadsafe(agent(), service.loop)
    following = Following(client)
    assert asked.wait(20)
    following.stream.close()


def test_who_follows_before_the_first_launch_has_its_lines_at_once(service, client, fleet, source) -> None:
    set_pauses(service, stored_seconds=30.0, catch_up_seconds=0.05)
    made = Job(service, client, source)
    hello = Hello(node_id=NodeId("i-0"), agent_id="a", address="", peer_port=1, memory_bytes=1, version="1")
    asked = threading.Event()

    async def agent() -> None:
        connection = service.services.registry.accept(hello, FleetName("main"))
        await connection.next_message()
        asked.set()

    asyncio.run_coroutine_threadsafe(agent(), service.loop)
    with closing(client.follow_logs(TrainingJobName="gpt")["EventStream"]) as stream:
        next(iter(stream))
        made.launch(1)
        assert asked.wait(20)


@pytest.mark.usefixtures("frequent_reads")
def test_a_server_that_stops_reads_no_log_on_for_a_follower(service, job, client, monkeypatch) -> None:
    """A server that stops starts no further read of a log.

    Python would wait at exit for the thread of such a read.
    """
    put(job, 0, line("a"))
    put(job, 1, line("b", 1, rank=1))
    reading, answer, get = threading.Event(), threading.Event(), service.objects.get
    readers: list[threading.Thread] = []

    def slow(reference, **limits):
        readers.append(threading.current_thread())
        reading.set()
        assert answer.wait(10)
        return get(reference, **limits)

    monkeypatch.setattr(service.objects, "get", slow)
    following = Following(client, StartFromHead=True)
    assert reading.wait(10)
    following.stream.close()
    service.services.caller_threads.close()
    answer.set()
    readers[0].join(10)
    assert not readers[0].is_alive()
    assert len(readers) == 1


@pytest.mark.security
def test_no_token_follows_all_logs(service, job, client) -> None:
    service.services.registry.lines = LogFeed(followers_per_token_limit=1)
    following = Following(client)
    once = Config(retries={"total_max_attempts": 1})
    with closing(service.client(config=once)) as same, refused("ThrottlingException"):
        same.follow_logs(TrainingJobName="gpt")
    with closing(service.client(service.token(Role.VIEWER, "default"), config=once)) as other:
        Following(other).stream.close()
    following.stream.close()


def test_there_is_a_limit_of_followers(service, job, client) -> None:
    service.services.registry.lines = LogFeed(follower_limit=1)
    following = Following(client)
    with (
        closing(service.client(config=Config(retries={"total_max_attempts": 1}))) as other,
        refused("ThrottlingException"),
    ):
        other.follow_logs(TrainingJobName="gpt")
    following.stream.close()


async def test_what_waits_for_a_follower_is_bounded_in_messages_and_in_characters() -> None:
    feed, run = LogFeed(), RunId("r" * 32)

    def lines(first: int, characters: int) -> LogLines:
        texts = [1 << 14] * (characters >> 14) + [characters % (1 << 14)]
        return LogLines(
            run=run,
            generation=Generation(1),
            first=first,
            lines=tuple(LogLine(at_ms=0, rank=Rank(0), stream="stdout", text="x" * each, end=0) for each in texts),
        )

    def empty(first: int, count: int) -> LogLines:
        line = LogLine(at_ms=0, rank=Rank(0), stream="stdout", text="", end=0)
        return LogLines(run=run, generation=Generation(1), first=first, lines=(line,) * count)

    async def waiting(follower: LogFollower) -> list[int]:
        taken = []
        while (found := await follower.take(0)) is not None:
            taken.append(found[1].first)
        return taken

    with feed.follow(run, "token") as follower:
        follower.listen_to({"i-1"})
        for first in range(WAITING_LIMIT + 2):
            feed.deliver(NodeId("i-1"), lines(first, 1))
        assert await waiting(follower) == list(range(2, WAITING_LIMIT + 2))
        for first in range(3):
            feed.deliver(NodeId("i-1"), lines(first, WAITING_CHARACTERS // 2 - 200 * LINE_MEMORY))
        assert await waiting(follower) == [1, 2]
        for first in range(9):
            feed.deliver(NodeId("i-1"), empty(first, WAITING_CHARACTERS // LINE_MEMORY // 4))
        assert await waiting(follower) == [5, 6, 7, 8], "an empty line needs memory, too"
        feed.deliver(NodeId("i-1"), lines(0, WAITING_CHARACTERS + 1))
        assert await waiting(follower) == []


@pytest.mark.security
async def test_lines_of_other_nodes_displace_no_line_of_the_run() -> None:
    feed, run = LogFeed(), RunId("r" * 32)
    own, foreign = (
        LogLines(run=run, generation=Generation(1), first=first, lines=(line(text),))
        for first, text in ((0, "own"), (7, "forged"))
    )
    with feed.follow(run, "token") as follower:
        follower.listen_to({"i-1"})
        feed.deliver(NodeId("i-1"), own)
        for _ in range(2 * WAITING_LIMIT):
            feed.deliver(NodeId("i-7"), foreign)
        assert await follower.take(0) == (NodeId("i-1"), own)
        assert await follower.take(0) is None
