"""A rank waits for its agent, which is a plain socket in these tests."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.codec import frame
from everstep.protocol.ids import Generation, JobName, Rank, RunId
from everstep.protocol.rank_messages import RankHello, SlotsRefused, SlotsRequest
from everstep.training.agent_link import UnixAgentLink

HELLO = RankHello(job=JobName("job"), run=RunId("ab" * 16), generation=Generation(1), rank=Rank(0), pid=1)
REQUEST = SlotsRequest(generation=Generation(1), layout_hash=b"h" * 16, capacity_bytes=1)
ANSWER = SlotsRefused(layout_hash=b"h" * 16, reason="no memory")
WAIT_SECONDS = 50.0
"""Upper bound of a wait. No test reaches it."""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[UnixAgentLink, socket.socket]]:
    """Return a rank's link that has requested slots, and the agent's end of its connection."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        link = UnixAgentLink(tmp_path / "agent", HELLO, WAIT_SECONDS)
        stack.callback(link.close)
        link.send(REQUEST)
        link.poll()
        yield link, stack.enter_context(listener.accept()[0])


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Awaited(socket.socket):
    """A socket that sets an event when a thread is about to wait for it.

    A thread calls `fileno` before it waits, so this method sets the event.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.is_awaited = threading.Event()

    def fileno(self) -> int:
        self.is_awaited.set()
        return super().fileno()


@pytest.mark.usefixtures("_many_descriptors")
@pytest.mark.parametrize("least", [0, 1024])
def test_a_rank_waits_for_its_agent_however_many_descriptors_it_has(
    ends: tuple[UnixAgentLink, socket.socket], least: int
) -> None:
    link, agent = ends
    assert link._socket is not None
    with link._socket as line:
        link._socket = awaited = Awaited(fcntl.fcntl(line, fcntl.F_DUPFD_CLOEXEC, least))

    def answer() -> None:
        awaited.is_awaited.wait()
        agent.sendall(frame(ANSWER))

    answering = threading.Thread(target=answer)
    answering.start()
    link.wait(WAIT_SECONDS)
    assert link.slots == ANSWER, "it has not waited"
    answering.join()


def test_a_line_that_is_cut_is_not_waited_for(ends: tuple[UnixAgentLink, socket.socket]) -> None:
    link, agent = ends
    assert link._socket is not None
    # close the socket, as another thread could between the link's check of the socket and its wait
    link._socket.close()
    link.wait(WAIT_SECONDS)
    assert link._socket is None
    link._next_attempt = 0
    link.poll()
    assert link._socket is not None
    agent.close()


def test_a_closed_link_does_not_connect_again(tmp_path: Path) -> None:
    """A closed link does not connect again, because no code would close the new connection."""
    now = 0.0
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        link = UnixAgentLink(tmp_path / "agent", HELLO, WAIT_SECONDS, clock=lambda: now)
        link.close()
        now = WAIT_SECONDS
        assert link.poll() is None
        link.wait(0.0)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
