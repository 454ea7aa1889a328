"""Limits the number and the duration of HTTP connections that have not sent a valid token yet, which uvicorn does not.

- Until its headers are complete, a connection is limited to `HEADER_SECONDS` and about `HEADER_BYTES`.
- At `max_strangers` connections without a valid token, a new one closes the oldest of the address with the most. A
  client that sends its request at once receives a response, because its connection is the newest.
- A connection that sends a request while an earlier one waits for its turn is closed, with or without a token.
- A request whose body has many tiny chunks is answered with 400, because each costs as much time as a large one.
- A websocket is read only after its token is verified. Its messages are limited to `FIRST_MESSAGE_BYTES` until the
  server has sent one. It is closed if it sends more pings or fragments than an agent does.
- A token has at most `MAX_PER_TOKEN` connections. Above, the server closes its oldest one.
- A response that its client does not read is given up after `UNREAD_SECONDS`. The unread responses of one token, and of
  all clients without a token together, are limited to `MAX_UNREAD_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

log = logging.getLogger(__name__)

HEADER_SECONDS: Final = 10.0
HEADER_BYTES: Final = 64 * 1024
MAX_STRANGERS: Final = 1024
TINY_CHUNKS: Final = 256
"""Number of chunks in one read of a socket from which on their average size counts."""
TINY_CHUNK_BYTES: Final = 64
FED_BYTES: Final = 8 * 1024
"""Part of a websocket that is parsed at once: at most 1,365 frames, in about 10 ms."""
EXTRA_FRAMES: Final = 128
"""Limit of a websocket's pings, pongs and fragments in a burst. An agent sends one ping per third of a lease."""
EXTRA_FRAMES_PER_SECOND: Final = 8.0
FIRST_MESSAGE_BYTES: Final = 64 * 1024
CLOSE_SECONDS: Final = 2.0
"""Seconds for the answer to the server's close. Until then, what the client has sent is kept."""
MAX_PER_TOKEN: Final = 512
UNREAD_SECONDS: Final = 20.0
"""Seconds in which a client must read `LEAST_READ_BYTES` of a complete response, or its rest."""
LEAST_READ_BYTES: Final = 512 * 1024
MAX_UNREAD_BYTES: Final = 64 * 1024 * 1024
OPEN_FILES: Final = 65_536
"""Requested limit of open files, one per connection."""
TRUST: Final = "everstep.trust"
"""Key in the ASGI state of a function that exempts the connection from the limits. The API calls it with a name for all
connections of a verified token.
"""


def raise_open_files() -> int:
    """Raise this process's limit of open files to `OPEN_FILES`, or to the kernel's hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Pipelined(Exception):
    """A connection sent a request while an earlier one waits for the end of another response."""


class TinyChunks(Exception):
    """A request's body has many chunks of a few bytes."""


class Gate:
    """Counts the connections of one server that have not sent a valid token. Used on the server's event loop only.

    `header_seconds` limits the headers of a request, and `unread_seconds` the reading of a part of a complete response.
    """

    def __init__(
        self,
        max_strangers: int = MAX_STRANGERS,
        header_seconds: float = HEADER_SECONDS,
        unread_seconds: float = UNREAD_SECONDS,
    ) -> None:
        self.header_seconds = header_seconds
        self._unread_seconds = unread_seconds
        self._max_strangers = max_strangers
        self._strangers: dict[str, dict[GuardedHttp, None]] = {}
        """The counted connections of each remote address, oldest first."""
        self._stranger_count = 0
        self._of_tokens: dict[str, dict[GuardedHttp, None]] = {}
        """Connections by token, oldest first."""
        self._unread: dict[GuardedHttp, asyncio.TimerHandle] = {}
        """Next look at each connection with an unread complete response, oldest first."""

    def protocol(self) -> Any:
        """Return the factory for `uvicorn.Config` as `http`."""
        return partial(GuardedHttp, gate=self)

    def enter(self, connection: GuardedHttp) -> None:
        """Count a new connection as a connection without a valid token.

        Above the limit, close the oldest counted connection of the address with the most counted connections.
        """
        self._strangers.setdefault(_address(connection), {})[connection] = None
        self._stranger_count += 1
        if self._stranger_count <= self._max_strangers:
            return
        busiest, connections = max(self._strangers.items(), key=lambda each: len(each[1]))
        log.warning(
            "%d connections have no token, %d of them from %s: the server closes the oldest of these",
            self._stranger_count,
            len(connections),
            busiest,
        )
        oldest = next(iter(connections))
        self.leave(oldest)
        oldest.transport.abort()

    def leave(self, connection: GuardedHttp) -> None:
        """Stop counting a connection as one without a valid token: it ended, or has sent a valid token. Idempotent."""
        address = _address(connection)
        of_address = self._strangers.get(address, {})
        if connection not in of_address:
            return
        del of_address[connection]
        self._stranger_count -= 1
        if not of_address:
            del self._strangers[address]

    def trust(self, connection: GuardedHttp, owner: str) -> None:
        """Count a connection of a valid token, and close the token's oldest one if it has too many."""
        self.leave(connection)
        if connection.owner != owner:
            self.forget(connection)
            connection.owner = owner
        own = self._of_tokens.setdefault(owner, {})
        own[connection] = None
        if len(own) > MAX_PER_TOKEN:
            oldest = next(iter(own))
            log.info("a token has more than %d connections: the server closes the oldest one", MAX_PER_TOKEN)
            self.forget(oldest)
            oldest.transport.abort()

    def forget(self, connection: GuardedHttp) -> None:
        """Stop counting a connection as one of its token. Idempotent."""
        own = self._of_tokens.get(connection.owner, {})
        own.pop(connection, None)
        if not own:
            self._of_tokens.pop(connection.owner, None)

    def hold(self, connection: GuardedHttp) -> None:
        """Watch how the client reads its complete response, and limit the unread responses of its token."""
        self.release(connection)
        if not connection.unread_bytes:
            return
        self._look_later(connection)
        held = [each for each in self._unread if each.owner == connection.owner]
        total = sum(each.unread_bytes for each in held)
        for oldest in held:
            if total <= MAX_UNREAD_BYTES:
                break
            total -= oldest.unread_bytes
            self._give_up(oldest)

    def release(self, connection: GuardedHttp) -> None:
        """Stop watching a connection. Idempotent."""
        if (timer := self._unread.pop(connection, None)) is not None:
            timer.cancel()

    def _look_later(self, connection: GuardedHttp) -> None:
        look = partial(self._look, connection, connection.unread_bytes)
        self._unread[connection] = connection.loop.call_later(self._unread_seconds, look)

    def _look(self, connection: GuardedHttp, before: int) -> None:
        del self._unread[connection]
        if connection.unread_bytes and before - connection.unread_bytes < LEAST_READ_BYTES:
            self._give_up(connection)
        elif connection.unread_bytes:
            self._look_later(connection)

    def _give_up(self, connection: GuardedHttp) -> None:
        log.info("a client does not read %d bytes: the server closes its connection", connection.unread_bytes)
        self.release(connection)
        connection.transport.abort()


def _address(connection: GuardedHttp) -> str:
    return connection.client[0] if connection.client else ""


class GuardedHttp(HttpToolsProtocol):
    """An HTTP connection that a `Gate` counts. uvicorn creates one per connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        gate: Gate,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._gate = gate
        self.owner = ""
        """Token of this connection's requests. Empty without a valid one."""
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_body_whole = True
        self._chunk_count = self._chunk_bytes = 0
        """Pieces of a body in the present read of the socket."""

    # uvicorn's base class has the same `type: ignore` for this method.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and start the deadline for headers. Called by asyncio."""
        super().connection_made(transport)
        self._gate.enter(self)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection. Called by asyncio."""
        self._forget_deadline()
        self._gate.leave(self)
        self._gate.forget(self)
        self._gate.release(self)
        super().connection_lost(exc)

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that neither the client nor the kernel took."""
        return self.transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or abort the connection when its headers are too long. Called by asyncio."""
        if self._deadline is not None and self._is_body_whole:
            if self._header_bytes > HEADER_BYTES:
                log.info(
                    "a request from %s has more than %d bytes of headers: the server closes its connection",
                    _address(self),
                    HEADER_BYTES,
                )
                self.transport.abort()
                return
            self._header_bytes += len(data)
        self._chunk_count = self._chunk_bytes = 0
        super().data_received(data)

    def on_body(self, body: bytes) -> None:
        """Store a piece of a request's body. Raises TinyChunks, which uvicorn answers with 400 and a close."""
        self._chunk_count += 1
        self._chunk_bytes += len(body)
        # A read may begin and end within a chunk: two of its pieces may be shorter than their chunks.
        if self._chunk_count > TINY_CHUNKS and self._chunk_bytes < TINY_CHUNK_BYTES * (self._chunk_count - 2):
            raise TinyChunks
        super().on_body(body)

    def on_message_begin(self) -> None:
        """Start the deadline for headers at a request's first byte. Raises Pipelined if an earlier request waits."""
        if self.pipeline:
            # One read of the socket could otherwise bring thousands of requests, which the event loop would parse at
            # once. The exception ends the parser, and uvicorn answers 400 and closes. One waiting request is permitted:
            # a client may have the whole body of a response before the server has ended the response.
            raise Pipelined
        self._expect_headers()
        if not self.unread_bytes:
            self._gate.release(self)
        super().on_message_begin()
        self.scope["state"][TRUST] = partial(self._gate.trust, self)

    def on_headers_complete(self) -> None:
        """Cancel the deadline for headers and start the response. Called by uvicorn's parser."""
        self._forget_deadline()
        self._is_body_whole = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Record that the request's body is complete. Called by uvicorn's parser."""
        self._is_body_whole = True
        if self.cycle is not None and self.cycle.response_complete:
            self._forget_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start a deadline for the rest of a body that no handler reads. Called by uvicorn."""
        super().on_response_complete()
        self._gate.hold(self)
        if not self._is_body_whole:
            self._expect_headers()

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to a `GuardedSocket`, and count it until its token is verified. Called by uvicorn."""
        self._forget_deadline()
        self.ws_protocol_class = partial(GuardedSocket, gate=self._gate, connection=self)  # type: ignore[assignment]
        super().handle_websocket_upgrade()

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._header_bytes = 0
            self._deadline = self.loop.call_later(self._gate.header_seconds, self._close_slow)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_slow(self) -> None:
        log.info(
            "no complete request from %s arrived within %g s: the server closes the connection",
            _address(self),
            self._gate.header_seconds,
        )
        self.transport.abort()


class GuardedSocket(WebSocketsSansIOProtocol):
    """A websocket whose frames cost the event loop little time, whatever its client sends.

    `connection` is the HTTP connection that became this websocket.
    """

    def __init__(self, *, gate: Gate, connection: GuardedHttp, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._gate = gate
        self._connection = connection
        self.app_state = {**self.app_state, TRUST: partial(gate.trust, connection)}
        self.close_timeout = CLOSE_SECONDS
        self.conn.max_message_size = FIRST_MESSAGE_BYTES
        self._received = bytearray()
        """Bytes that are not parsed yet."""
        self._extra_frames = float(EXTRA_FRAMES)
        self._counted_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the count of the connection. Called by asyncio."""
        self._gate.leave(self._connection)
        self._gate.forget(self._connection)
        self._received.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes in pieces, until the application must first handle a message. Called by asyncio."""
        self._received += data
        self._feed()
        if not self.handshake_complete:
            self.transport.pause_reading()  # until `websocket.accept`

    async def send(self, message: Any) -> None:
        """Send a message. After `accept`, the server reads. After the first message, the client may send long ones."""
        if message["type"] == "websocket.send":
            self.conn.max_message_size = self.config.ws_max_size
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._gate.leave(self._connection)
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Return the next message, and parse the bytes that follow it."""
        message = await super().receive()
        self._feed()
        return message

    def handle_ping(self) -> None:
        """Answer a ping, or abort the connection if the client does not read the answers."""
        if not self.writable.is_set():
            self._received.clear()
            self.transport.abort()
        if self._is_allowed():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        """Count a pong."""
        if self._is_allowed():
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        """Count a fragment of a message."""
        if self._is_allowed():
            super().handle_cont(event)

    def handle_parser_exception(self) -> None:
        """Close a connection that is not a websocket. uvicorn requires a close frame, which may not exist yet."""
        if self.conn.close_sent is None:
            self.transport.abort()
        else:
            super().handle_parser_exception()

    def _feed(self) -> None:
        while self._received and not self.read_paused and not self.transport.is_closing():
            piece = bytes(self._received[:FED_BYTES])
            del self._received[:FED_BYTES]
            super().data_received(piece)

    def _is_allowed(self) -> bool:
        """Count a frame that is no whole message. Abort the connection, and return False, if there are too many."""
        now = self.loop.time()
        earned = (now - self._counted_at) * EXTRA_FRAMES_PER_SECOND
        self._extra_frames = min(float(EXTRA_FRAMES), self._extra_frames + earned) - 1
        self._counted_at = now
        if self._extra_frames < 0 and not self.transport.is_closing():
            log.info("a websocket sends too many pings or fragments: the server closes its connection")
            self._received.clear()
            self.transport.abort()
        return not self.transport.is_closing()
