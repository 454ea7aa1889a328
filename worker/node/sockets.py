"""Sets the options of the agent's TCP connections: no delay, and a timeout for peers that fail without a FIN.

Without these options, a reader would wait forever, and a writer for the kernel's 15 minutes. Invariant: `tune` is
called for every TCP connection of the agent.
"""

from __future__ import annotations

import socket
from typing import Protocol

PROBES = 2
"""Unanswered keepalive probes after which an idle connection counts as lost."""


class TunableLine(Protocol):
    """A socket, or asyncio's wrapper of a socket, whose options can be set."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option, as `socket.socket.setsockopt` does."""


def tune(line: TunableLine, *, silence_seconds: float) -> None:
    """Set a connection's options. It counts as lost after `silence_seconds` of silence, at least 2 s if it is idle."""
    # Keepalive, in whole seconds, detects a lost peer on an idle connection. While bytes are unacknowledged, keepalive
    # is inactive, and TCP_USER_TIMEOUT detects the lost peer.
    interval = max(1, round(silence_seconds / (1 + PROBES)))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * silence_seconds))),
    ):
        line.setsockopt(level, option, value)
