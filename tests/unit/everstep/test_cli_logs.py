"""Tests `everstep jobs logs` with `-f`, `--since` and `--grep`.

The tests cover lines of several ranks in one list, and broken connections.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
import typer
from botocore.exceptions import EndpointConnectionError
from urllib3.exceptions import ProtocolError

from everstep.cli import logs
from everstep.cli.waiting import UNANSWERED_SECONDS
from everstep.errors import ServiceFailed

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def event(text: str, rank: int | None = 0, stream: str = "stdout") -> dict:
    found = {"Timestamp": NOW, "Generation": 1, "NodeId": "i-1", "Stream": stream, "Message": text}
    return found if rank is None else {**found, "Rank": rank}


class Stream:
    """The events of one fake connection. An exception among them breaks it."""

    def __init__(self, said: list) -> None:
        self._said = said
        self.is_closed = False

    def __iter__(self):
        for item in self._said:
            if isinstance(item, Exception):
                raise item
            events, token = item
            yield {"LogEvents": {"Events": events, "NextForwardToken": token}}

    def close(self) -> None:
        self.is_closed = True


class Service:
    def __init__(self, *connections, status: str = "Completed") -> None:
        self._connections = list(connections)
        self.asked: list[dict] = []
        self.streams: list[Stream] = []
        self._status = status

    def follow_logs(self, **query):
        self.asked.append(query)
        said = self._connections.pop(0)
        if isinstance(said, Exception):
            raise said
        self.streams.append(Stream(said))
        return {"EventStream": self.streams[-1]}

    def describe_training_job(self, TrainingJobName):
        return {"TrainingJobStatus": self._status if not self._connections else "InProgress"}


def test_a_connection_that_breaks_is_made_again_with_the_token_of_the_last_lines() -> None:
    gone = EndpointConnectionError(endpoint_url="http://x")
    service = Service(
        [([event("a")], "1"), ([event("b")], "2"), ProtocolError("broken")],
        gone,
        [([], "2"), ([event("c")], "3")],
        [([event("d")], "4")],
    )
    pauses: list[float] = []
    found = [said["Message"] for said in logs.follow(service, "gpt", {"Rank": 0}, pause=pauses.append)]
    assert found == ["a", "b", "c", "d"]
    assert [query.get("NextToken") for query in service.asked] == [None, "2", "2", "3"]
    assert all(query["Rank"] == 0 for query in service.asked)
    assert len(pauses) == 3
    assert all(stream.is_closed for stream in service.streams)


@pytest.mark.parametrize("broken", [ProtocolError("x"), EndpointConnectionError(endpoint_url="http://x")])
def test_a_service_that_does_not_answer_for_a_minute_is_given_up(broken) -> None:
    clock = iter(range(0, 10_000, 30))
    service = Service(*([broken] * 10))
    with pytest.raises(ServiceFailed):
        list(logs.follow(service, "gpt", {}, pause=lambda _: None, monotonic=lambda: next(clock)))
    assert 1 < len(service.asked) <= UNANSWERED_SECONDS / 30 + 1


def test_lines_that_come_faster_than_they_are_read_have_an_end() -> None:
    printed = itertools.count()

    def get_log_events(EndTime=None, **query):
        asked = NOW + timedelta(seconds=next(printed))
        is_later = EndTime is not None and asked >= EndTime
        found = [] if is_later else [event(str(asked))]
        answer = {"Events": found, "NextForwardToken": "end" if is_later else str(asked)}
        return {**answer, "ResponseMetadata": {"HTTPHeaders": {"date": format_datetime(NOW, usegmt=True)}}}

    found = list(itertools.islice(logs.read(SimpleNamespace(get_log_events=get_log_events), "gpt", {}), 100))
    assert [said["Message"] for said in found] == [str(NOW)], "what was printed when it was asked for"


def test_all_pages_are_read() -> None:
    pages = iter([(["a"], "1"), ([], "2"), (["b"], "3"), ([], "3")])
    asked = []

    def get_log_events(**query):
        asked.append(query)
        texts, token = next(pages)
        return {"Events": [event(text) for text in texts], "NextForwardToken": token}

    found = list(logs.read(SimpleNamespace(get_log_events=get_log_events), "gpt", {"FilterPattern": "x"}))
    assert [said["Message"] for said in found] == ["a", "b"]
    assert [query.get("NextToken") for query in asked] == [None, "1", "2", "3"]
    assert all(query["FilterPattern"] == "x" for query in asked)


@pytest.mark.parametrize(("count", "numbers"), [(1, [6]), (3, [4, 5, 6]), (7, list(range(7))), (100, list(range(7)))])
def test_the_tail_has_the_newest_lines_in_order_over_all_pages(count: int, numbers: list[int]) -> None:
    def get_log_events(*, TrainingJobName, Rank, Limit, NextToken="7"):
        assert (TrainingJobName, Rank) == ("gpt", 2)
        end = int(NextToken)
        begin = max(0, end - min(Limit, 2))  # a page may be shorter than its limit
        return {"Events": [event(str(number)) for number in range(begin, end)], "NextBackwardToken": str(begin)}

    found = logs.tail(SimpleNamespace(get_log_events=get_log_events), "gpt", {"Rank": 2}, count)
    assert [int(each["Message"]) for each in found] == numbers


def test_lines_say_when_and_who_and_go_where_they_came_from(capsys) -> None:
    logs.show(iter([event("out"), event("[err]", 1, "stderr"), event("Node i-1 was lost", None, "gap")]), None)
    out, err = capsys.readouterr()
    assert "12:00:00.000 g1 r0" in out
    assert "out" in out
    assert "r1" in err
    assert "[err]" in err
    assert "--- generation 1 · Node i-1 was lost" in err
    seen: list[dict] = []
    logs.show(iter([event("out")]), seen.append)
    assert (seen, capsys.readouterr().out) == ([event("out")], "")
    logs.show(iter([]), None)
    assert "No line matches" in capsys.readouterr().err


def test_since() -> None:
    assert logs.since_when("90s", NOW) == NOW - timedelta(seconds=90)
    assert logs.since_when("2h", NOW) == NOW - timedelta(hours=2)
    assert logs.since_when("2026-03-01T11:00:00", NOW) == NOW - timedelta(hours=1)
    assert logs.since_when("2026-03-01T12:00:00+01:00", NOW) == NOW - timedelta(hours=1)
    with pytest.raises(typer.BadParameter):
        logs.since_when("yesterday", NOW)


def test_since_is_sent_as_the_contract_has_times(run) -> None:
    page = {"Events": [], "NextForwardToken": "1"}
    _, _, _, calls = run("jobs", "logs", "gpt", "--since", "2026-03-01T12:00:00", get_log_events=page)
    assert {request.get("StartTime") for _, request in calls} == {NOW}


@pytest.mark.parametrize("options", [(), ("--rank", "1"), ("--stream", "stderr")])
def test_without_following_all_lines_so_far_are_shown_merged_and_with_times(run, options) -> None:
    """Without `-f`, the command prints all current lines of all ranks in one list, with their times.

    This also holds for a running job, whose newest lines are not stored yet.
    """
    said = [event("zero"), event("one", 1), event("bad", 1, "stderr"), event("Node i-1 was lost", None, "gap")]

    def get_log_events(**query):
        wanted = [each for each in said if "Rank" not in query or each.get("Rank") in (query["Rank"], None)]
        return {"Events": [] if "NextToken" in query else wanted, "NextForwardToken": "end"}

    code, out, err, _ = run("jobs", "logs", "gpt", *options, get_log_events=get_log_events)
    lines = out.splitlines()
    assert code == 0
    expected = {(): ["r0 zero", "r1 one"], ("--rank", "1"): ["r1 one"], ("--stream", "stderr"): []}[options]
    assert lines == [f"12:00:00.000 g1 {line}" for line in expected]
    assert "12:00:00.000 g1 r1 bad" in err
    assert "--- generation 1 · Node i-1 was lost" in err


def test_the_tail_is_printed_and_excludes_following(run) -> None:
    page = {"Events": [event("last words")], "NextBackwardToken": "0", "NextForwardToken": "1"}
    code, out, _, calls = run("jobs", "logs", "gpt", "--rank", "0", "--tail", "1", get_log_events=page)
    assert (code, out.endswith("last words\n")) == (0, True)
    assert {"Rank": 0, "Limit": 1}.items() <= calls[0][1].items()
    code, _, err, _ = run("jobs", "logs", "gpt", "--tail", "1", "-f")
    assert (code, "--tail and --follow exclude each other" in err) == (2, True)


def state(text: str, rank: int = 0) -> dict:
    return {**event(text, rank), "Overwrites": True}


def test_a_read_log_has_the_last_state_of_each_moving_line():
    events = [
        event("begin"),
        state("1%"),
        state("5%", rank=1),
        state("2%"),
        event("other", stream="stderr"),
        event("end"),
        state("7%", rank=1),
        state("3%"),
    ]
    found = [(each["Rank"], each["Message"]) for each in logs.settled(iter(events))]
    assert found == [(0, "begin"), (0, "other"), (0, "2%"), (0, "end"), (1, "7%"), (0, "3%")]


def test_a_followed_log_draws_a_moving_line_in_place(monkeypatch, capfd):
    """The terminal has 40 columns. A state that wraps to a second row could not be overwritten."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    events = [state("1%"), state(f"2% {'█' * 80}"), state("5%", rank=1), state("3%"), event("a\rb")]
    logs.show(iter(events), None)
    assert capfd.readouterr().out.split("\n") == [
        "12:00:00.000 g1 r0 1%",
        f"\x1b[1A\x1b[2K12:00:00.000 g1 r0 2% {'█' * 18}",
        "12:00:00.000 g1 r1 5%",
        "12:00:00.000 g1 r0 3%",
        "12:00:00.000 g1 r0 a\N{REPLACEMENT CHARACTER}b",
        "",
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    logs.show(iter(events[:2]), None)
    assert capfd.readouterr().out == f"12:00:00.000 g1 r0 1%\n12:00:00.000 g1 r0 2% {'█' * 80}\n"
