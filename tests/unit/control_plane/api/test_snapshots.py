"""Exports from memory over HTTP: during an export, all nodes keep one committed step. A refusal releases the step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from botocore.exceptions import ClientError
from sqlalchemy.exc import OperationalError

from control_plane.db import events
from control_plane.db.tokens import Role
from everstep.protocol.agent_messages import (
    ANOTHER_EXPORT,
    HeldShard,
    Hello,
    HoldSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.ids import FleetName, Generation, NodeId, Rank, Step
from tests.unit.control_plane.api.conftest import Service, refused
from tests.unit.control_plane.api.test_results import Job

DATA = bytes(range(200))


class Agent:
    """An agent that has sealed some steps, and holds one of them on request."""

    def __init__(self, service: Service, node: str, rank: int, committed: int, sealed: set[int]) -> None:
        self.node = NodeId(node)
        self.rank = Rank(rank)
        self.committed = committed
        self.sealed = sealed
        self.asked: list[HoldSnapshot | ReadSnapshot | ReleaseSnapshot] = []
        self.held: dict[str, int] = {}
        self.ended: set[str] = set()
        self.before_answer: Callable[[HoldSnapshot | ReadSnapshot], None] = lambda _: None
        self._service = service

    @contextmanager
    def connected(self) -> Iterator[Agent]:
        hello = Hello(node_id=self.node, agent_id="a", address="127.0.0.9", peer_port=1, memory_bytes=1, version="0")

        async def accept():
            return self._service.services.registry.accept(hello, FleetName("main"))

        async def obey(connection) -> None:
            while (message := await connection.next_message()) is not None:
                if isinstance(message, HoldSnapshot | ReadSnapshot | ReleaseSnapshot):
                    self.asked.append(message)
                    if (answer := self.answer(message)) is not None:
                        connection.snapshot_answered(answer)

        connection = asyncio.run_coroutine_threadsafe(accept(), self._service.loop).result(10)
        obeying = asyncio.run_coroutine_threadsafe(obey(connection), self._service.loop)
        try:
            yield self
        finally:
            self._service.loop.call_soon_threadsafe(connection.close)
            obeying.result(10)

    def answer(self, request: HoldSnapshot | ReadSnapshot | ReleaseSnapshot) -> SnapshotHeld | SnapshotBytes | None:
        if isinstance(request, ReleaseSnapshot):
            self.held.pop(request.hold_id, None)
            self.ended.add(request.hold_id)
            return None
        self.before_answer(request)
        if isinstance(request, ReadSnapshot):
            if request.hold_id not in self.held:
                return SnapshotBytes(request_id=request.request_id, refusal="the snapshot is no longer held")
            return SnapshotBytes(request_id=request.request_id, data=DATA[request.begin : request.end])
        if request.is_renewal and request.hold_id not in self.held:
            return SnapshotHeld(request_id=request.request_id, refusal="the snapshot is no longer held")
        if request.hold_id in self.ended:
            return SnapshotHeld(request_id=request.request_id, refusal="the export has ended")
        if self.held.keys() - {request.hold_id}:
            return SnapshotHeld(request_id=request.request_id, refusal=ANOTHER_EXPORT)
        newest = self.held.get(request.hold_id, self.committed)
        step = newest if request.step < 0 else request.step
        if step not in self.sealed:
            return SnapshotHeld(request_id=request.request_id, refusal=f"step {step} is not in memory")
        self.held[request.hold_id] = step
        shard = HeldShard(
            rank=self.rank,
            origin_generation=Generation(1),
            object_bytes=len(DATA),
            payload_bytes=100,
            payload_digest=bytes(16),
            layout_hash=b"\x01" * 16,
        )
        return SnapshotHeld(request_id=request.request_id, step=Step(step), shards=(shard,))


@pytest.fixture
def job(service, client, fleet, source):
    made = Job(service, client, source)
    made.launch(1)
    made.run_ranks()
    return made


@pytest.fixture
def agents(service, job) -> Iterator[list[Agent]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Agent(service, f"i-{rank}", rank, committed=7, sealed={6, 7, 8}).connected())
            for rank in range(2)
        ]


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return error.value.response["Error"]["Code"]


@pytest.mark.covers(
    "HoldSnapshot.TrainingJobName",
    "HoldSnapshot.SnapshotId",
    "ReadSnapshot.TrainingJobName",
    "ReadSnapshot.SnapshotId",
    "ReadSnapshot.Rank",
    "ReadSnapshot.Begin",
    "ReadSnapshot.End",
    "ReleaseSnapshot.TrainingJobName",
    "ReleaseSnapshot.SnapshotId",
)
def test_a_snapshot_is_held_read_renewed_and_released(service, client, job, agents) -> None:
    held = client.hold_snapshot(TrainingJobName="gpt")
    assert (held["TrainingJobName"], held["RunId"], held["Generation"], held["Step"]) == ("gpt", job.run, 1, 7)
    assert [shard["Rank"] for shard in held["Shards"]] == [0, 1]
    assert held["Shards"][0] == {
        "Rank": 0,
        "OriginGeneration": 1,
        "ObjectBytes": 200,
        "PayloadBytes": 100,
        "PayloadDigest": "00" * 16,
        "LayoutHash": "01" * 16,
    }
    named = {"TrainingJobName": "gpt", "SnapshotId": held["SnapshotId"]}
    assert client.read_snapshot(**named, Rank=1, Begin=10, End=50)["Body"].read() == DATA[10:50]
    assert isinstance(agents[1].asked[-1], ReadSnapshot)
    assert not any(isinstance(asked, ReadSnapshot) for asked in agents[0].asked)
    assert client.hold_snapshot(**named)["SnapshotId"] == held["SnapshotId"]
    assert all(asked.is_renewal for asked in (agents[0].asked[-1], agents[1].asked[-1]))
    assert client.release_snapshot(**named)["SnapshotId"] == held["SnapshotId"]
    with pytest.raises(ClientError) as lost:
        client.hold_snapshot(**named)
    assert code_of(lost) == "ConflictException"
    assert not agents[0].held
    (event,) = [each for each in client.list_events(TrainingJobName="gpt")["Events"] if each["Type"] == "SnapshotHeld"]
    assert event["Message"].endswith("holds step 7 of gpt in memory for an export.")


@pytest.mark.covers("HoldSnapshot.ClientRequestToken")
def test_a_repeated_request_returns_the_same_hold(client, job, agents) -> None:
    held = client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
    for agent in agents:
        agent.committed = 8
    again = client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
    assert (again["SnapshotId"], again["Step"], again["Shards"]) == (held["SnapshotId"], 7, held["Shards"])
    assert [list(agent.held.values()) for agent in agents] == [[7], [7]]
    told = [each["Type"] for each in client.list_events(TrainingJobName="gpt")["Events"]]
    assert told.count("SnapshotHeld") == 1


def test_a_late_copy_of_a_request_begins_no_second_hold(client, job, agents) -> None:
    held = client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
    client.release_snapshot(TrainingJobName="gpt", SnapshotId=held["SnapshotId"])
    with refused("ConflictException", match="the export has ended"):
        client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
    assert not any(agent.held for agent in agents)
    assert client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="two")["Step"] == 7


def test_a_request_is_repeated_after_an_agent_did_not_answer(service, client, job) -> None:
    agent, other = (Agent(service, f"i-{rank}", rank, committed=7, sealed={7}) for rank in range(2))
    with agent.connected():
        with refused("ServiceUnavailableException"):
            client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
        with other.connected():
            held = client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
            again = client.hold_snapshot(TrainingJobName="gpt", ClientRequestToken="one")
            assert again["SnapshotId"] == held["SnapshotId"]
            assert list(agent.held) == list(other.held) == [held["SnapshotId"].rpartition("-")[2]]


def test_a_second_export_is_refused_with_what_to_do(client, job, agents) -> None:
    client.hold_snapshot(TrainingJobName="gpt")
    with refused("ConflictException", match="one export from memory at a time") as error:
        client.hold_snapshot(TrainingJobName="gpt")
    assert [len(agent.held) for agent in agents] == [1, 1]
    assert "everstep events list --job gpt" in error.value.hint


def test_nodes_that_have_not_heard_of_the_newest_commit_hold_it_too(client, job, agents) -> None:
    agents[1].committed = 8
    held = client.hold_snapshot(TrainingJobName="gpt")
    assert held["Step"] == 8
    assert list(agents[0].held.values()) == list(agents[1].held.values()) == [8]


def test_a_node_that_has_overwritten_the_step_begins_the_hold_anew(client, job, agents) -> None:
    agents[0].committed, agents[1].committed, agents[0].sealed = 6, 8, {6}

    def train_on(request: HoldSnapshot | ReadSnapshot) -> None:
        if isinstance(request, HoldSnapshot) and request.step == 8:
            agents[0].committed, agents[0].sealed = 9, {8, 9}
            agents[1].committed, agents[1].sealed = 9, {8, 9}
            agents[0].sealed.discard(8)

    agents[0].before_answer = train_on
    held = client.hold_snapshot(TrainingJobName="gpt")
    assert held["Step"] == 9
    assert list(agents[0].held.values()) == list(agents[1].held.values()) == [9], "the first hold was released"


def test_a_hold_that_fails_leaves_nothing_held(client, job, agents) -> None:
    agents[1].sealed = set()
    with pytest.raises(ClientError) as failed:
        client.hold_snapshot(TrainingJobName="gpt")
    assert code_of(failed) == "ConflictException"
    assert "step 7 is not in memory" in str(failed.value)
    client.list_events(TrainingJobName="gpt")
    assert isinstance(agents[0].asked[-1], ReleaseSnapshot)


def test_a_hold_whose_event_cannot_be_stored_ends(client, job, agents, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("the database is gone"))

    with monkeypatch.context() as patched:
        patched.setattr(events, "append", refuse)
        with pytest.raises(ClientError):
            client.hold_snapshot(TrainingJobName="gpt")
    client.list_events(TrainingJobName="gpt")
    assert not agents[0].held
    assert client.hold_snapshot(TrainingJobName="gpt")["Step"] == 7


def test_a_node_without_its_agent_makes_the_export_unavailable(service, client, job) -> None:
    with Agent(service, "i-0", 0, committed=7, sealed={7}).connected() as agent, pytest.raises(ClientError) as failed:
        client.hold_snapshot(TrainingJobName="gpt")
    assert code_of(failed) == "ServiceUnavailableException"
    assert "the agent of i-1 is not connected" in str(failed.value)
    assert isinstance(agent.asked[-1], ReleaseSnapshot)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"Rank": 2}, "ValidationException"),
        ({"Begin": 50, "End": 50}, "ValidationException"),
        ({"Begin": 0, "End": 4 * 1024 * 1024 + 1}, "ValidationException"),
        ({"End": 201}, "ConflictException"),
        ({"SnapshotId": "2-7-" + "0" * 32}, "ConflictException"),
        ({"SnapshotId": "1-7-" + "0" * 32}, "ConflictException"),
    ],
)
def test_reads_that_make_no_sense_are_refused(client, job, agents, changes, code) -> None:
    held = client.hold_snapshot(TrainingJobName="gpt")
    request = {"TrainingJobName": "gpt", "SnapshotId": held["SnapshotId"], "Rank": 0, "Begin": 0, "End": 10}
    with pytest.raises(ClientError) as failed:
        client.read_snapshot(**request | changes)
    assert code_of(failed) == code


def test_a_snapshot_of_an_earlier_launch_is_lost(client, job, agents) -> None:
    with refused("ConflictException", match="started again"):
        client.hold_snapshot(TrainingJobName="gpt", SnapshotId="2-7-" + "0" * 32)


def test_a_job_that_does_not_train_has_nothing_in_memory(service, client, fleet, source) -> None:
    Job(service, client, source).launch(1)
    with refused("ConflictException", match="only a running job has a snapshot"):
        client.hold_snapshot(TrainingJobName="gpt")
    with refused("ConflictException", match="only a running job has a snapshot"):
        client.read_snapshot(TrainingJobName="gpt", SnapshotId="1-7-" + "0" * 32, Rank=0, Begin=0, End=5)


def test_viewers_may_neither_hold_a_snapshot_nor_extend_a_hold(service, client, job, agents) -> None:
    held = client.hold_snapshot(TrainingJobName="gpt")
    viewer = service.client(service.token(Role.VIEWER))
    with refused("AccessDeniedException"):
        viewer.hold_snapshot(TrainingJobName="gpt")
    with refused("AccessDeniedException"):
        viewer.read_snapshot(TrainingJobName="gpt", SnapshotId=held["SnapshotId"], Rank=0, Begin=0, End=5)
    viewer.close()
