"""The agent's connection to the control plane: one websocket, which the agent opens again after every failure.

Invariant: each sent report contains the state at the time of sending; reports are never queued. A full or broken disk
never ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path

import websockets
from websockets.asyncio.client import ClientConnection, connect

from everstep.protocol.agent_messages import (
    ALREADY_JOINED,
    NOT_YOURS,
    AgentReport,
    AgentWelcome,
    CommandEnded,
    ControlToAgent,
    Hello,
    LogLines,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.codec import MAX_MESSAGE_BYTES, Message, decode, encode, is_supported
from everstep.protocol.errors import ProtocolError
from everstep.protocol.pace import Pace
from everstep.protocol.plan import Timeouts
from everstep.protocol.shared_lists import SharedLists
from worker.errors import AttestationFailed
from worker.node.sockets import tune
from worker.tasks import Signal, first_of

log = logging.getLogger(__name__)
SERVER_PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
# Another server may have taken over the fleet, and waits for the agents only during a grace period.
OPEN_SECONDS = 5.0
"""Maximum seconds until a server has accepted a connection; then the client tries the next server."""
MAX_LINES_WAITING = 64
"""A further message replaces the oldest message."""
MAX_ANSWERS_WAITING = 8
# The server delays an agent that sends more than 128 messages per second, and would receive its reports too late.
REPORT_SECONDS = 1 / 32
"""Seconds that the agent pays (`Pace`) for each report, so that it sends at most 32 reports per second."""
BURST_SECONDS = 4.0
"""Seconds that the agent can pay without a wait after a pause: 128 reports."""


@dataclass(eq=False, repr=False)
class ControlClient:
    """The agent's connection to the control plane; the agent runs `run` for its whole lifetime.

    The client starts with a random URL and tries the URLs in turn. `token_path` is a file with mode 0600 for the
    session token. Without another token, `attest` obtains one from the server with the given URL; it blocks. `report`
    is called right before each send. `command` must not block.
    """

    urls: InitVar[Sequence[str]]
    _: KW_ONLY
    join_token: str
    token_path: Path
    attest: Callable[[str], str] | None = None
    tls: ssl.SSLContext | None = None
    hello: Callable[[], Hello]
    report: Callable[[], AgentReport]
    command: Callable[[Message], None]
    welcomed: Callable[[Timeouts], None]
    pace: Pace = field(default_factory=lambda: Pace(BURST_SECONDS))

    def __post_init__(self, urls: Sequence[str]) -> None:
        self.changed = Signal()
        self._lines: deque[LogLines] = deque(maxlen=MAX_LINES_WAITING)
        self._answers: deque[CommandEnded | SnapshotHeld | SnapshotBytes] = deque(maxlen=MAX_ANSWERS_WAITING)
        self._lines_added = Signal()
        self.is_connected = False
        self._urls = itertools.cycle(random.sample(urls, len(urls)))
        self._session: str | None = None
        """Empty if the node has no session token; None until the token's file has been read."""
        self._is_kept = True
        self._interval_seconds = 1.0
        self._open_seconds = OPEN_SECONDS
        self._server_minor = 0

    def send_lines(self, lines: LogLines) -> None:
        """Queue log lines of ranks if the client is connected. On a slow connection, drop the oldest queued lines."""
        if self.is_connected:
            self._lines.append(lines)
            self._lines_added.notify()

    def send_answer(self, answer: CommandEnded | SnapshotHeld | SnapshotBytes) -> None:
        """Queue the answer to a user's request, even while disconnected. The user may still wait for it."""
        self._answers.append(answer)
        self._lines_added.notify()

    async def run(self) -> None:
        """Connect to the control plane, and reconnect after every failure, until cancelled."""
        failures = 0
        while True:
            try:
                base = next(self._urls)
                token = await self._token(base)
                url = base.rstrip("/").replace("http", "ws", 1) + "/v1/agents/connect"
                async with connect(
                    url,
                    additional_headers={"Authorization": f"Bearer {token}"},
                    ssl=(self.tls or True) if url.startswith("wss:") else None,
                    max_size=MAX_MESSAGE_BYTES,
                    open_timeout=self._open_seconds,
                    ping_interval=None,
                    compression=None,
                    proxy=None,
                    close_timeout=1,
                ) as line:
                    await self._speak(line)
                failures = 0
            except (
                OSError,
                TimeoutError,
                websockets.exceptions.WebSocketException,
                ProtocolError,
                AttestationFailed,
            ) as error:
                if failures == 0 or self.is_connected:
                    log.warning("no connection to the control plane: %s", error)
                if _is_unauthorized(error):
                    # Try the stored session token and the join token in turn. The session token stays on disk until a
                    # server sends a new one, because a proxy may have refused a valid token.
                    self._session = "" if self._session else None
                failures = 0 if self.is_connected else failures + 1
            finally:
                self.is_connected = False
            await asyncio.sleep(
                min(SERVER_PAUSES_SECONDS[min(failures, len(SERVER_PAUSES_SECONDS) - 1)], self._open_seconds / 2)
            )

    async def _token(self, url: str) -> str:
        if self._session is None:
            with contextlib.suppress(FileNotFoundError):
                self._session = self.token_path.read_text().strip()
        if self._session:
            return self._session
        if self.join_token or self.attest is None:
            return self.join_token
        token = await asyncio.to_thread(self.attest, url)
        self._keep(token)  # Store the token, so that the next connection needs no new attestation.
        return token

    def _keep(self, token: str) -> None:
        self._session = token
        scratch = self.token_path.with_suffix(".new")
        try:
            scratch.touch(mode=0o600)
            scratch.write_text(token)
            scratch.replace(self.token_path)
        except OSError as error:
            if self._is_kept:
                log.warning("the session token cannot be stored for the next agent process of this node: %s", error)
            self._is_kept = False
        else:
            self._is_kept = True

    async def _speak(self, line: ClientConnection) -> None:
        await line.send(encode(self.hello()))
        async with asyncio.timeout(self._open_seconds):
            welcome = self._decode(await line.recv())
        if not isinstance(welcome, AgentWelcome):
            raise ProtocolError(f"the control plane's first message is {type(welcome).__name__}, not AgentWelcome")
        self._keep(welcome.session_token)
        self._interval_seconds = welcome.timeouts.lease_seconds / 3
        self._open_seconds = welcome.timeouts.lease_seconds
        self._server_minor = welcome.protocol_minor
        self.welcomed(welcome.timeouts)
        tune(line.transport.get_extra_info("socket"), silence_seconds=welcome.timeouts.lease_seconds)
        self.is_connected = True
        log.info("connected to the control plane as a node of fleet %s", welcome.fleet)
        self._lines.clear()
        await first_of(self._send(line), self._send_lines(line), self._listen(line), self._ping(line))

    async def _send(self, line: ClientConnection) -> None:
        lists = SharedLists()
        while True:
            await self.pace.pay(REPORT_SECONDS)
            seen = self.changed.version
            await line.send(encode(lists.shorten(self.report())))
            await self.changed.wait(seen, self._interval_seconds)

    async def _ping(self, line: ClientConnection) -> None:
        """Send pings. Raise TimeoutError if the server does not answer one within `Timeouts.lease_seconds`."""
        # The kernel of a server that hangs continues to accept reports, but only a running process answers a ping.
        while True:
            answered = await line.ping()
            try:
                async with asyncio.timeout(self._open_seconds):
                    await answered
            except TimeoutError as error:
                raise TimeoutError(f"the server has not answered a ping for {self._open_seconds:.1f} s") from error
            await asyncio.sleep(self._interval_seconds)

    async def _send_lines(self, line: ClientConnection) -> None:
        while True:
            seen = self._lines_added.version
            while self._answers:
                await self._send_supported(line, self._answers[0])
                self._answers.popleft()
            while self._lines:
                await self._send_supported(line, self._lines.popleft())
            await self._lines_added.wait(seen)

    async def _send_supported(self, line: ClientConnection, message: Message) -> None:
        if is_supported(message, self._server_minor):
            await line.send(encode(message))

    async def _listen(self, line: ClientConnection) -> None:
        async for data in line:
            self.command(self._decode(data))

    @staticmethod
    def _decode(data: str | bytes) -> Message:
        if isinstance(data, str):
            raise ProtocolError("the control plane sent a text frame, and only binary frames are valid")
        message: Message = decode(data, ControlToAgent)  # type: ignore[arg-type]
        return message


def _is_unauthorized(error: Exception) -> bool:
    if isinstance(error, websockets.exceptions.ConnectionClosed):
        return error.rcvd is not None and error.rcvd.code in (NOT_YOURS, ALREADY_JOINED)
    return isinstance(error, websockets.exceptions.InvalidStatus) and error.response.status_code in (401, 403)
