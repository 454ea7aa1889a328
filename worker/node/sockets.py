"""How the agent's TCP lines are set: at once, and lost when the other end has vanished without a word.

A node that loses its power or its network sends no FIN. Whoever only reads from it would wait for ever; whoever writes
to it, for the kernel's quarter of an hour. Invariant: every line of the agent has been through `tune`.
"""

from __future__ import annotations

import socket
from typing import Protocol

PROBES = 2
"""Keepalive probes without an answer before a line that nobody writes to is lost."""


class TunableLine(Protocol):
    """A socket, or what asyncio shows of one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """As `socket.socket.setsockopt`."""


def tune(line: TunableLine, *, silence_seconds: float) -> None:
    """Set a connected line's options; called by either end as soon as it knows the generation's timeouts.

    Both options are needed: keepalive notices a lost peer on a line that is only read from, TCP_USER_TIMEOUT on one
    with unacknowledged bytes (keepalive is silent while those are retried). The kernel counts keepalive in whole
    seconds, so a quiet line takes 2 s at the least.

    Args:
        line: a TCP socket.
        silence_seconds: how long the other end's kernel may be silent before the line is lost; `holder_deadline`
            between agents.
    """
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
