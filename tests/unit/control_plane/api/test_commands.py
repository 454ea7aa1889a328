"""Tests commands that users run beside ranks, over HTTP: permissions, target nodes, history and repeated requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from control_plane.db.tokens import Role
from everstep.protocol.agent_messages import (
    CommandEnded,
    Hello,
    HoldSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    RunCommand,
)
from everstep.protocol.ids import FleetName, NodeId
from tests.unit.control_plane.api.conftest import Service, refused
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.api.test_snapshots import Agent as SnapshotAgent

Answer = Callable[[RunCommand], CommandEnded | None]


@contextmanager
def agent(
    service: Service, node: str, answer: Answer, snapshots: SnapshotAgent | None = None
) -> Iterator[list[RunCommand]]:
    """Connect an agent that answers commands, and requests for snapshots. Yield the commands that it has received."""
    asked: list[RunCommand] = []

    async def accept():
        hello = Hello(node_id=NodeId(node), agent_id="a", address="127.0.0.9", peer_port=1, memory_bytes=1, version="0")
        return service.services.registry.accept(hello, FleetName("main"))

    async def obey(connection) -> None:
        while (message := await connection.next_message()) is not None:
            if isinstance(message, RunCommand):
                asked.append(message)
                if (ended := answer(message)) is not None:
                    connection.command_ended(ended)
            elif (
                snapshots is not None
                and isinstance(message, HoldSnapshot | ReadSnapshot | ReleaseSnapshot)
                and (told := snapshots.answer(message)) is not None
            ):
                connection.snapshot_answered(told)

    connection = asyncio.run_coroutine_threadsafe(accept(), service.loop).result(10)
    obeying = asyncio.run_coroutine_threadsafe(obey(connection), service.loop)
    try:
        yield asked
    finally:
        service.loop.call_soon_threadsafe(connection.close)
        obeying.result(10)


def says(command: RunCommand) -> CommandEnded:
    return CommandEnded(command_id=command.command_id, exit_code=3, stdout=b"out \xff", stderr=b"err", is_cut=True)


@pytest.fixture
def job(service, client, fleet, source):
    made = Job(service, client, source)
    made.launch(1)
    made.run_ranks()
    client.update_fleet(FleetName="main", AllowCommands=True)
    return made


def execute(client, **changes):
    return client.execute_command(**{"TrainingJobName": "gpt", "Rank": 1, "Command": ["py-spy", "dump"], **changes})


@pytest.mark.covers(
    "ExecuteCommand.TrainingJobName", "ExecuteCommand.Rank", "ExecuteCommand.Command", "ExecuteCommand.TimeoutInSeconds"
)
def test_a_command_is_told_in_the_history_and_answered(service, client, job) -> None:
    with agent(service, "i-1", says) as asked:
        answer = execute(client, TimeoutInSeconds=7, Command=["echo", "a b; rm -rf /"])
    assert {name: value for name, value in answer.items() if name != "ResponseMetadata"} == {
        "TrainingJobName": "gpt",
        "Rank": 1,
        "Generation": 1,
        "NodeId": "i-1",
        "ExitCode": 3,
        "Stdout": "out \ufffd",
        "Stderr": "err",
        "IsOutputCut": True,
        "IsTimedOut": False,
    }
    (command,) = asked
    assert (command.run, command.generation, command.rank) == (job.run, 1, 1)
    assert (command.argv, command.timeout_seconds) == (("echo", "a b; rm -rf /"), 7.0)
    (event,) = [
        event for event in client.list_events(TrainingJobName="gpt")["Events"] if event["Type"] == "CommandExecuted"
    ]
    assert event["Message"].endswith("ran a command on the node of rank 1 of gpt, generation 1: echo 'a b; rm -rf /'")
    assert event["NodeId"] == "i-1"


@pytest.mark.covers("ExecuteCommand.Stdin")
def test_what_a_program_is_given_goes_to_it_and_not_into_the_history(service, client, job) -> None:
    with agent(service, "i-1", says) as asked:
        execute(client, Stdin="hush é\n", ClientRequestToken="same")
        execute(client, ClientRequestToken="other")
        with refused("ConflictException", "used for another command"):
            execute(client, Stdin="hush e\n", ClientRequestToken="same")
        with refused("ValidationException", "Stdin"):
            execute(client, Stdin="x" * 65_537)
    assert [command.stdin for command in asked] == ["hush é\n".encode(), b""]
    told = [
        event["Message"]
        for event in client.list_events(TrainingJobName="gpt")["Events"]
        if event["Type"] == "CommandExecuted"
    ]
    assert [message.endswith("py-spy dump (given 8 bytes)") for message in told] == [True, False]
    assert "hush" not in str(told)


def test_it_is_an_event_before_the_agent_hears_of_it(service, client, job) -> None:
    told: list[list[str]] = []

    def look(command: RunCommand) -> CommandEnded:
        with service.database.read() as session:
            from control_plane.db import events

            page = events.page(session, events.EventFilter(job_name="gpt"), limit=100)
        told.append([event.type for event in page])
        return says(command)

    with agent(service, "i-1", look):
        execute(client)
    assert "CommandExecuted" in told[0]


def test_a_long_command_is_cut_in_the_history(service, client, job) -> None:
    with agent(service, "i-1", says) as asked:
        execute(client, Command=["x" * 4096] * 2)
    assert [len(word) for word in asked[0].argv] == [4096, 4096]
    (event,) = [
        event for event in client.list_events(TrainingJobName="gpt")["Events"] if event["Type"] == "CommandExecuted"
    ]
    assert len(event["Message"]) < 700


@pytest.mark.covers("UpdateFleet.AllowCommands")
def test_only_where_the_fleet_allows_it_and_only_those_who_may_submit(service, client, job) -> None:
    with agent(service, "i-1", says) as asked:
        with refused("AccessDeniedException"):
            execute(service.client(service.token(Role.VIEWER)))
        with refused("ResourceNotFoundException"):
            execute(service.client(service.token(Role.SUBMITTER, "other")))
        client.update_fleet(FleetName="main", AllowCommands=False)
        with refused("AccessDeniedException", "does not allow commands"):
            execute(client)
        assert asked == []
        client.update_fleet(FleetName="main", AllowCommands=True)
        execute(service.client(service.token(Role.SUBMITTER, "default")))
    assert len(asked) == 1


@pytest.mark.covers("CreateFleet.AllowCommands")
def test_a_fleet_allows_nothing_unless_told_to(service, client, fleet) -> None:
    assert client.describe_fleet(FleetName=fleet)["AllowCommands"] is False
    service.operator.create_group("open-group")
    client.create_fleet(FleetName="open", AutoScalingGroupName="open-group", AllowCommands=True)
    assert client.describe_fleet(FleetName="open")["AllowCommands"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Rank": 2}, "Rank is not one of the 2 ranks of gpt"),
        ({"Command": []}, "Command"),
        ({"Command": [""]}, "Command"),
        ({"Command": ["x"] * 65}, "Command"),
        ({"Command": ["a\0b"]}, "NUL"),
        ({"TimeoutInSeconds": 51}, "TimeoutInSeconds"),
    ],
)
def test_what_cannot_be_run_is_refused(service, client, job, changes, words) -> None:
    with agent(service, "i-1", says) as asked, refused("ValidationException", words):
        execute(client, **changes)
    assert asked == []


def test_a_job_without_ranks_has_nothing_to_look_at(service, client, fleet, source) -> None:
    Job(service, client, source)
    client.update_fleet(FleetName="main", AllowCommands=True)
    with refused("ConflictException", "is queued: it has no ranks now"):
        execute(client)


def test_an_agent_that_is_not_there_or_refuses_is_told(service, client, job, monkeypatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    with refused("ServiceUnavailableException", "the command was not run"):
        execute(client)
    refusal = "rank 1 of generation 1 does not run"
    with (
        agent(service, "i-1", lambda command: CommandEnded(command_id=command.command_id, refusal=refusal)),
        refused("ConflictException", refusal),
    ):
        execute(client)


@pytest.mark.covers("ExecuteCommand.ClientRequestToken")
def test_a_request_that_comes_twice_is_run_once(service, client, job) -> None:
    with agent(service, "i-1", says) as asked:
        first = execute(client, ClientRequestToken="same")
        second = execute(client, ClientRequestToken="same")
        assert (first["Stdout"], len(asked)) == (second["Stdout"], 1)
        with refused("ConflictException", "used for another command"):
            execute(client, ClientRequestToken="same", Command=["other"])
        execute(service.client(service.token(Role.SUBMITTER)), ClientRequestToken="same")
        assert len(asked) == 2, "a token of the request is its caller's own"
    told = [
        event for event in client.list_events(TrainingJobName="gpt")["Events"] if event["Type"] == "CommandExecuted"
    ]
    assert len(told) == 2
