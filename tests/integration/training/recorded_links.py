"""Records what sessions in this process send to their agents: bytes on the socket, and halves of the page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from everstep.protocol.codec import LENGTH, decode, frame_length
from everstep.protocol.rank_messages import RankHalf, RankHello, RankToAgent
from everstep.training.agent_link import UnixAgentLink
from tests.integration.training.fake_agent import FakeAgent


class RecordedSocket(socket.socket):
    """A rank's socket to its agent."""

    def __init__(self, links: Links) -> None:
        super().__init__(socket.AF_UNIX)
        self._links = links

    def send(self, data: bytearray, flags: int = 0) -> int:  # type: ignore[override]
        """Send bytes, and record them with the thread that sends them."""
        if self._links.is_full:
            raise BlockingIOError
        count = super().send(data, flags)
        self._links.sent.append((threading.current_thread().name, bytes(data[:count])))
        return count


class RecordedLink(UnixAgentLink):
    """A rank's link to its agent, which calls `on_publish` when the rank writes to the shared-memory page."""

    published: list[RankHalf]
    on_publish: Callable[[], None] = staticmethod(lambda: None)
    """Function that the link calls after each change of the rank's half of the shared-memory page."""

    def publish(self, half: RankHalf) -> None:
        super().publish(half)
        self.published.append(half)
        self.on_publish()


class Links:
    """The connections of a test's sessions to their agents, and the bytes that the sessions send."""

    def __init__(self) -> None:
        self.links: list[RecordedLink] = []
        self.sockets: list[RecordedSocket] = []
        self.sent: list[tuple[str, bytes]] = []
        """For each system call: the name of the thread, and the bytes that the kernel accepted."""
        self.is_full = False
        """True: the kernel accepts no bytes."""

    def open(self, path: Path, hello: RankHello, welcome_seconds: float) -> RecordedLink:
        """Return a new link, whose sockets are recorded."""
        self.links.append(link := RecordedLink(path, hello, welcome_seconds, open_socket=self._socket))
        link.published = []
        return link

    def _socket(self) -> RecordedSocket:
        self.sockets.append(RecordedSocket(self))
        return self.sockets[-1]

    @property
    def newest(self) -> RecordedLink:
        """The link of the newest session."""
        return self.links[-1]

    def notify(self, agent: FakeAgent) -> None:
        """Let each change of the rank's half of the shared-memory page wake the calls of `agent.wait_for`."""

        def wake() -> None:
            with agent.changed:
                agent.changed.notify_all()

        self.newest.on_publish = wake

    def messages(self, first: int = 0) -> list[tuple[str, list[object]]]:
        """Return each system call's thread and messages, from the call with the number `first`."""
        data, found = b"", []
        for thread, sent in self.sent[first:]:
            data, complete = data + sent, list[object]()
            while len(data) >= LENGTH.size and len(data) >= (end := LENGTH.size + frame_length(data[: LENGTH.size])):
                complete.append(decode(data[LENGTH.size : end], RankToAgent))  # type: ignore[arg-type]
                data = data[end:]
            found.append((thread, complete))
        return found
