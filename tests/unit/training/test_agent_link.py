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
from everstep.training.agent_link import RECONNECT_SECONDS, UnixAgentLink

HELLO = RankHello(job=JobName("job"), run=RunId("ab" * 16), generation=Generation(1), rank=Rank(0), pid=1)
REQUEST = SlotsRequest(generation=Generation(1), layout_hash=b"h" * 16, capacity_bytes=1)
ANSWER = SlotsRefused(layout_hash=b"h" * 16, reason="no memory")
WAIT_SECONDS = 50.0
"""Upper bound of a wait. No test reaches it."""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Return the socket at which the agent accepts its ranks."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        yield listener


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

    def __init__(self, least: int) -> None:
        """Open a unix socket with a descriptor of at least `least`."""
        with socket.socket(socket.AF_UNIX) as low:
            super().__init__(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, least))
        self.is_awaited = threading.Event()

    def fileno(self) -> int:
        self.is_awaited.set()
        return super().fileno()


@pytest.mark.usefixtures("_many_descriptors")
@pytest.mark.parametrize("least", [0, 1024])
def test_a_rank_waits_for_its_agent_however_many_descriptors_it_has(listener: socket.socket, least: int) -> None:
    awaited = Awaited(least)
    link = UnixAgentLink(Path(listener.getsockname()), HELLO, WAIT_SECONDS, open_socket=lambda: awaited)
    link.poll()
    with contextlib.closing(link), listener.accept()[0] as agent:
        link.send(REQUEST)
        awaited.is_awaited.clear()

        def answer() -> None:
            awaited.is_awaited.wait()
            agent.sendall(frame(ANSWER))

        answering = threading.Thread(target=answer)
        answering.start()
        link.wait(WAIT_SECONDS)
        assert link.slots == ANSWER, "it has not waited"
        answering.join()


def test_a_line_that_is_cut_is_not_waited_for(listener: socket.socket) -> None:
    now = 0.0
    opened: list[socket.socket] = []

    def open_socket() -> socket.socket:
        opened.append(socket.socket(socket.AF_UNIX))
        return opened[-1]

    link = UnixAgentLink(Path(listener.getsockname()), HELLO, WAIT_SECONDS, lambda: now, open_socket)
    with contextlib.closing(link):
        link.poll()
        # close the socket, as another thread could between the link's check of the socket and its wait
        opened[0].close()
        link.wait(WAIT_SECONDS)
        link.poll()
        assert len(opened) == 1, "the rank waits between two attempts to connect"
        now = RECONNECT_SECONDS
        link.poll()
        assert len(opened) == 2
        with listener.accept()[0], listener.accept()[0] as agent:
            agent.sendall(frame(ANSWER))
            link.send(REQUEST)
            link.wait(WAIT_SECONDS)
            assert link.slots == ANSWER


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
