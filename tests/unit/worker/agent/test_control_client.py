"""Tests the agent's connection to the control plane.

In some tests, the disk is full or the control plane rejects the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from everstep.protocol.agent_messages import (
    ALREADY_JOINED,
    NOT_YOURS,
    AgentReport,
    AgentWelcome,
    CommandEnded,
    ControlToAgent,
    Hello,
    MemberPhase,
    MemberReport,
    Release,
)
from everstep.protocol.codec import PROTOCOL_MINOR, Message, decode, encode
from everstep.protocol.ids import Generation, JobName, NodeId, RunId
from everstep.protocol.pace import Pace
from tests.newer_release import of_newer_release
from tests.unit.protocol.test_shared_lists import LIST, upload
from tests.unit.worker.rank_plans import rank_plan
from worker.agent.control_client import REPORT_SECONDS, ControlClient


class Replica:
    """A fake server of the control plane.

    It accepts the token `join` and its own session tokens, and closes each connection after one report.
    """

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.reports: asyncio.Queue[str] = asyncio.Queue()

    def check(self, line: ServerConnection, request: Request) -> Response | None:
        self.tokens.append(request.headers["Authorization"].removeprefix("Bearer "))
        return None if self.tokens[-1].startswith(("join", "session-")) else line.respond(http.HTTPStatus.FORBIDDEN, "")

    async def speak(self, line: ServerConnection) -> None:
        await line.recv()
        if self.tokens[-1] == "session-of-another":
            await line.close(NOT_YOURS)
            return
        await line.send(
            encode(
                AgentWelcome(session_token=f"session-{len(self.tokens)}", fleet="fleet", timeouts=rank_plan().timeouts)
            )
        )
        await line.recv()
        self.reports.put_nowait(self.tokens[-1])


@contextlib.asynccontextmanager
async def line_to(
    replica: Replica, token_path: Path, *, join_token: str = "join", attest: Callable[[str], str] | None = None
) -> AsyncIterator[None]:
    # A connection that reads nothing answers no close. By default the server would wait 10 s for the answer.
    async with serve(
        replica.speak, "127.0.0.1", 0, process_request=replica.check, compression=None, close_timeout=0.1
    ) as server:
        client = ControlClient(
            [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
            join_token=join_token,
            token_path=token_path,
            attest=attest,
            hello=lambda: Hello(
                node_id=NodeId("i-1"), agent_id="a", address="127.0.0.2", peer_port=1, memory_bytes=1, version="0"
            ),
            report=lambda: AgentReport(node_id=NodeId("i-1"), sequence=1, member=None),
            command=lambda _: None,
            welcomed=lambda _: None,
        )
        running = asyncio.create_task(client.run())
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_a_session_that_cannot_be_kept_on_disk_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token.new").mkdir()  # a folder in place of the file makes every write of the token fail
    replica = Replica()
    async with line_to(replica, tmp_path / "token"):
        assert [await replica.reports.get() for _ in range(3)] == ["join", "session-1", "session-2"]
    assert [record.levelno for record in caplog.records if "cannot be stored" in record.message] == [logging.WARNING], (
        "once"
    )
    assert not (tmp_path / "token").exists()


async def test_a_session_that_is_not_known_and_cannot_be_removed_does_not_keep_the_agent_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "token").write_text("stale")
    monkeypatch.setattr(Path, "unlink", refuse)
    replica = Replica()
    async with line_to(replica, tmp_path / "token"):
        assert await replica.reports.get() == "join"
    assert replica.tokens[:2] == ["stale", "join"]


@pytest.mark.security
async def test_a_session_that_was_refused_once_is_tried_again_where_the_join_token_is_of_no_use_any_more(
    tmp_path: Path,
) -> None:
    """An agent whose session token and join token are both rejected tries its session token again.

    A proxy, for example, may have sent the 403 for the session token. A node can use its join token only once.
    """
    (tmp_path / "token").write_text("session-mine")

    class Once(Replica):
        def check(self, line: ServerConnection, request: Request) -> Response | None:
            answer = super().check(line, request)
            return line.respond(http.HTTPStatus.FORBIDDEN, "") if len(self.tokens) == 1 else answer

        async def speak(self, line: ServerConnection) -> None:
            if self.tokens[-1] == "join":
                await line.recv()
                await line.close(ALREADY_JOINED)
                return
            await super().speak(line)

    replica = Once()
    async with line_to(replica, tmp_path / "token"):
        assert await replica.reports.get() == "session-mine"
    assert replica.tokens[:3] == ["session-mine", "join", "session-mine"]


async def test_the_next_agent_goes_on_with_the_session(tmp_path: Path) -> None:
    replica = Replica()
    for expected in ("join", "session-1"):
        async with line_to(replica, tmp_path / "token"):
            assert await replica.reports.get() == expected
            kept = (tmp_path / "token").read_text()
        assert kept == f"session-{len(replica.tokens)}"


async def test_the_session_of_another_node_is_dropped_and_the_instance_attests_anew(tmp_path: Path) -> None:
    """An agent that starts with another node's session token drops it and attests its own instance.

    This happens if the instance was launched from an image of the other node. The control plane accepts the token,
    reads the Hello of another node, and closes the connection.
    """
    (tmp_path / "token").write_text("session-of-another")
    replica = Replica()
    async with line_to(replica, tmp_path / "token", join_token="", attest=lambda _: "session-attested"):
        assert await replica.reports.get() == "session-attested"
        assert (tmp_path / "token").read_text() == "session-2"
    assert replica.tokens[:2] == ["session-of-another", "session-attested"]


async def test_the_session_of_another_node_gives_way_to_the_join_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("session-of-another")
    replica = Replica()
    async with line_to(replica, tmp_path / "token"):
        assert await replica.reports.get() == "join"


class StoppedReplica(Replica):
    """A server whose process stops after it has welcomed an agent. Its kernel still acknowledges what the agent sends.

    The second connection works, as at another server of the installation.
    """

    async def speak(self, line: ServerConnection) -> None:
        await line.recv()
        timeouts = msgspec.structs.replace(rank_plan().timeouts, lease_seconds=0.3)
        await line.send(encode(AgentWelcome(session_token="session-1", fleet="fleet", timeouts=timeouts)))
        if len(self.tokens) == 1:
            line.transport.pause_reading()
            await line.wait_closed()
            return
        await line.recv()
        self.reports.put_nowait(self.tokens[-1])
        await line.wait_closed()


async def test_an_agent_leaves_a_server_that_stands_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replica = StoppedReplica()
    async with line_to(replica, tmp_path / "token"), asyncio.timeout(20):
        assert await replica.reports.get() == "session-1"
    assert "the server has not answered a ping for 0.3 s" in caplog.text


async def test_each_connection_carries_a_list_of_shared_objects_once(tmp_path: Path) -> None:
    """On each connection, only the first report that names a list of shared objects carries the list.

    The server closes the first connection after two reports. The second connection carries the list again.
    """
    lengths = asyncio.Queue[int]()

    async def speak(line: ServerConnection) -> None:
        await line.recv()
        await line.send(encode(AgentWelcome(session_token="s", fleet="fleet", timeouts=rank_plan().timeouts)))
        for _ in range(2):
            lengths.put_nowait(len(await line.recv()))
            client.changed.notify()

    member = MemberReport(
        job=JobName("gpt"),
        run=RunId("1"),
        generation=Generation(1),
        phase=MemberPhase.RUNNING,
        uploads=(upload(0, 4, LIST),),
    )
    async with serve(speak, "127.0.0.1", 0, compression=None) as server:
        client = ControlClient(
            [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
            join_token="join",
            token_path=tmp_path / "token",
            hello=lambda: Hello(
                node_id=NodeId("i-1"), agent_id="a", address="127.0.0.2", peer_port=1, memory_bytes=1, version="0"
            ),
            report=lambda: AgentReport(node_id=NodeId("i-1"), sequence=1, member=member),
            command=lambda _: None,
            welcomed=lambda _: None,
        )
        running = asyncio.create_task(client.run())
        found = [await lengths.get() for _ in range(4)]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert found[0] == found[2] > 20_000
    assert found[1] == found[3] < 2_000


class Meter(Pace):
    """Records payments, and makes each of them wait until the test releases it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.paid = asyncio.Queue[float]()
        self.may_pay = asyncio.Semaphore(0)

    async def pay(self, seconds: float) -> None:
        self.paid.put_nowait(seconds)
        await self.may_pay.acquire()


@pytest.mark.security
async def test_a_rank_that_causes_many_changes_causes_no_report_beyond_the_pace(tmp_path: Path) -> None:
    meter, received = Meter(), asyncio.Queue[AgentReport]()

    async def speak(line: ServerConnection) -> None:
        await line.recv()
        await line.send(encode(AgentWelcome(session_token="s", fleet="fleet", timeouts=rank_plan().timeouts)))
        async for data in line:
            received.put_nowait(decode(data, AgentReport))  # type: ignore[arg-type]

    numbers = itertools.count()
    async with serve(speak, "127.0.0.1", 0, compression=None) as server:
        client = ControlClient(
            [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
            join_token="join",
            token_path=tmp_path / "token",
            hello=lambda: Hello(
                node_id=NodeId("i-1"), agent_id="a", address="127.0.0.2", peer_port=1, memory_bytes=1, version="0"
            ),
            report=lambda: AgentReport(node_id=NodeId("i-1"), sequence=next(numbers), member=None),
            command=lambda _: None,
            welcomed=lambda _: None,
            pace=meter,
        )
        running = asyncio.create_task(client.run())
        for sequence in range(2):
            assert await meter.paid.get() == REPORT_SECONDS
            for _ in range(100):
                client.changed.notify()
                await asyncio.sleep(0)
            meter.may_pay.release()
            assert (await received.get()).sequence == sequence, "one report has all changes before its payment"
            client.changed.notify()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class LaterAnswer(Message, frozen=True):
    """A message to the control plane that a later minor version of the protocol, version 2, adds."""

    since_minor = 2


@pytest.mark.parametrize(("minor", "is_sent"), [(0, False), (2, True)], ids=["older server", "newer server"])
async def test_servers_of_other_minor_versions_receive_what_their_release_has(
    tmp_path: Path, minor: int, is_sent: bool
) -> None:
    answers, commands = asyncio.Queue[str](), asyncio.Queue[Message]()

    async def speak(line: ServerConnection) -> None:
        assert decode(await line.recv(decode=False), Hello).protocol_minor == PROTOCOL_MINOR
        welcome = AgentWelcome(session_token="s", fleet="fleet", timeouts=rank_plan().timeouts, protocol_minor=minor)
        for message in (welcome, Release(run=RunId("1"))):
            await line.send(of_newer_release(encode(message), ControlToAgent) if minor else encode(message))
        async for data in line:
            assert isinstance(data, bytes)
            if (kind := msgspec.msgpack.decode(data[2:])["type"]) != "AgentReport":
                answers.put_nowait(kind)

    async with serve(speak, "127.0.0.1", 0, compression=None) as server:
        client = ControlClient(
            [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
            join_token="join",
            token_path=tmp_path / "token",
            hello=lambda: Hello(
                node_id=NodeId("i-1"),
                agent_id="a",
                address="127.0.0.2",
                peer_port=1,
                memory_bytes=1,
                version="0",
                protocol_minor=PROTOCOL_MINOR,
            ),
            report=lambda: AgentReport(node_id=NodeId("i-1"), sequence=1, member=None),
            command=commands.put_nowait,
            welcomed=lambda _: None,
        )
        running = asyncio.create_task(client.run())
        assert await commands.get() == Release(run=RunId("1"))
        client.send_answer(LaterAnswer())  # type: ignore[arg-type]  # of a release that does not exist yet
        client.send_answer(CommandEnded(command_id="1"))
        found = [await answers.get() for _ in range(1 + is_sent)]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert found == ["LaterAnswer", "CommandEnded"][not is_sent :]
