"""Bounds on connections that have not shown a token yet: uvicorn has no deadline for headers, and no limit of connections per address.

    connection   until its headers are complete      `HEADER_SECONDS`, and `HEADER_BYTES`, then it is closed
                 before it has shown a good token    one of at most `max_strangers`; the oldest of the busiest address gives way to a newer one
                 afterwards                          not counted

A slow or idle stranger is therefore closed as soon as its place is needed, and a caller that sends its request at once
is always served: also while thousands of slow connections come from the same address, as behind a proxy.

Invariant: connections that have shown no token hold at most `max_strangers` descriptors, whoever opens them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

HEADER_SECONDS: Final = 10.0
HEADER_BYTES: Final = 64 * 1024
MAX_STRANGERS: Final = 1024
OPEN_FILES: Final = 65_536
"""Descriptors that a server asks the kernel for: one for each connection of an agent, a person or a program."""
TRUST: Final = "everstep.trust"
"""Key in the state of a request: a function without arguments; called once the request has shown a good token."""


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as the kernel permits, at most to `OPEN_FILES`.

    Return the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Gate:
    """The connections of one server that have shown no token. On the server's event loop.

    Args:
        max_strangers: how many of them may be open.
        header_seconds: how long the headers of a request may take.
    """

    def __init__(self, max_strangers: int = MAX_STRANGERS, header_seconds: float = HEADER_SECONDS) -> None:
        self.header_seconds = header_seconds
        self._max_strangers = max_strangers
        self._strangers: dict[GuardedHttp, str] = {}
        """The address of each, oldest first."""

    def protocol(self) -> Any:
        """Return what `uvicorn.Config` takes for `http`."""
        return partial(GuardedHttp, gate=self)

    def enter(self, connection: GuardedHttp) -> None:
        """Count a new connection; if there are too many, close the oldest one of the address that has the most."""
        self._strangers[connection] = connection.client[0] if connection.client else ""
        if len(self._strangers) <= self._max_strangers:
            return
        [(busiest, count)] = Counter(self._strangers.values()).most_common(1)
        oldest = next(stranger for stranger, address in self._strangers.items() if address == busiest)
        log.warning(
            "%d connections without a token, %d of them from %s: the oldest one is closed",
            len(self._strangers),
            count,
            busiest,
        )
        self.leave(oldest)
        oldest.transport.abort()

    def leave(self, connection: GuardedHttp) -> None:
        """Stop counting a connection. Idempotent."""
        self._strangers.pop(connection, None)


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's HTTP connection behind a gate; made by uvicorn, one for each connection.

    Args:
        config: of the server.
        server_state: of the server.
        app_state: of the application.
        _loop: that serves the connection; None: the running one.
        gate: of the server.
    """

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
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_body_whole = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's own
        """Count the connection, and expect headers. Called by asyncio."""
        super().connection_made(transport)
        self._gate.enter(self)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection. Called by asyncio."""
        self._forget_deadline()
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the headers are too long. Called by asyncio."""
        if self._deadline is not None and self._is_body_whole:
            if self._header_bytes > HEADER_BYTES:
                log.info(
                    "a request from %s has more than %d bytes of headers: its connection is closed",
                    self._address(),
                    HEADER_BYTES,
                )
                self.transport.abort()
                return
            self._header_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Expect the headers of a request. Called by the parser at its first byte."""
        self._expect_headers()
        super().on_message_begin()
        self.scope["state"][TRUST] = partial(self._gate.leave, self)

    def on_headers_complete(self) -> None:
        """Begin to answer. Called by the parser."""
        self._forget_deadline()
        self._is_body_whole = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Take the end of a body. Called by the parser."""
        self._is_body_whole = True
        if self.cycle is not None and self.cycle.response_complete:
            self._forget_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Expect the rest of a body that nobody reads, in the time of headers. Called by uvicorn."""
        super().on_response_complete()
        if not self._is_body_whole:
            self._expect_headers()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the agents' protocol, whose route checks the token at once. Called by uvicorn."""
        self._forget_deadline()
        self._gate.leave(self)
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
            "a request from %s did not come within %g s: its connection is closed",
            self._address(),
            self._gate.header_seconds,
        )
        self.transport.abort()

    def _address(self) -> str:
        return self.client[0] if self.client else "an unknown address"
