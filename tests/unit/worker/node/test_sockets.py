"""Tests the options of a connection, as the kernel reports them.

With these options, the kernel closes a connection when the other machine no longer answers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from worker.node.sockets import tune

TCP = socket.IPPROTO_TCP


@pytest.fixture
def line() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as line:
        yield line


def options(line: socket.socket) -> tuple[int, ...]:
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return tuple(line.getsockopt(TCP, name) for name in names)


@pytest.mark.parametrize(
    ("silence_seconds", "expected"),
    [(3.0, (1, 1, 2, 3000)), (0.5, (1, 1, 2, 500)), (30.0, (10, 10, 2, 30_000)), (1e-6, (1, 1, 2, 1))],
)
def test_a_silent_line_is_lost_in_time(line: socket.socket, silence_seconds: float, expected: tuple[int, ...]) -> None:
    tune(line, silence_seconds=silence_seconds)
    assert options(line) == expected
    idle, interval, count, user_timeout = expected
    assert idle + count * interval <= max(silence_seconds, 3), "a line that is only read from, too"
    assert user_timeout > 0, "0 would be the kernel's quarter of an hour"


def test_the_line_is_watched_and_waits_for_nothing_to_fill_a_packet(line: socket.socket) -> None:
    tune(line, silence_seconds=3.0)
    assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert line.getsockopt(TCP, socket.TCP_NODELAY)
