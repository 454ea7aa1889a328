"""Copies, digests and transfers release the interpreter's lock, so that training and the agent's loop continue.

The tests measure no time. They set a switch interval of an hour, so that a waiting thread gets the lock only when the
working thread releases it explicitly.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from everstep.protocol.slot import ShardHasher, digest
from everstep.training.capture import StateTensor
from everstep.training.copier import Copies, copy_now
from everstep.training.host_copy import _move
from everstep.training.sources import Sources
from worker.replication.streams import _receive_all, send_all
from worker.replication.transfers import _copy

pytestmark = pytest.mark.integration
SIZE = 4 * 1024 * 1024
"""Bytes that one call copies, digests or sends: the size of a chunk."""
CALLS = 10_000
"""Maximum number of calls before a test fails. So many calls take many seconds.

The other thread usually runs during the first call.
"""
Work = Callable[[], object]


@pytest.fixture(autouse=True)
def nobody_is_interrupted() -> Iterator[None]:
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(3600.0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def lets_others_run(work: Work, calls: int = CALLS) -> bool:
    """Return whether another thread runs Python while this thread calls `work`, at most `calls` times."""
    work()  # the first call imports modules and allocates buffers
    gate, has_run = threading.Lock(), threading.Event()
    gate.acquire()

    def other() -> None:
        with gate:
            has_run.set()

    thread = threading.Thread(target=other)
    thread.start()
    gate.release()  # the thread now waits only for the interpreter's lock
    for _ in range(calls):
        work()
        if has_run.is_set():
            break
    is_let_in = has_run.is_set()
    thread.join()
    return is_let_in


def filled(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


def copied_at_a_boundary() -> Work:
    copies = Copies([filled(1)], [filled(0)])
    return lambda: copy_now(copies)


def copied_into_live_tensors() -> Work:
    source, target = filled(1), filled(0)
    # The test calls `_move` itself, because `copy_into_live` would also release the lock when it queries torch about
    # each tensor.
    return lambda: _move(target.data_ptr(), source.data_ptr(), SIZE)


def compared_in_an_audit() -> Work:
    sources, copy = Sources([(0, StateTensor("one", filled(1), is_deferred=True))]), filled(1)
    return lambda: sources.differing([copy])


def digested() -> Work:
    data = memoryview(bytearray(SIZE))
    return lambda: digest(data)


def digested_piece_by_piece() -> Work:
    data = memoryview(bytearray(SIZE))
    return lambda: ShardHasher(SIZE).update(data)


def copied_between_slots() -> Work:
    source, target = memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE))
    return lambda: _copy(target, source)


@pytest.mark.parametrize(
    "work",
    [
        copied_at_a_boundary,
        copied_into_live_tensors,
        compared_in_an_audit,
        digested,
        digested_piece_by_piece,
        copied_between_slots,
    ],
    ids=lambda work: work.__name__,
)
def test_others_run_while_many_bytes_are(work: Callable[[], Work]) -> None:
    assert lets_others_run(work())


@contextmanager
def line_to(*command: str, end: str) -> Iterator[socket.socket]:
    """Yield a connection to the standard input or output of another process.

    That process does not need this process's lock.
    """
    line, far = socket.socketpair()
    with line, far:
        program = subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, end: far})  # type: ignore[call-overload]
        far.close()
        try:
            yield line
        finally:
            line.close()
            program.wait()


def test_others_run_while_many_bytes_are_sent() -> None:
    data = memoryview(bytearray(SIZE))
    with line_to("cat", end="stdin") as line:
        assert lets_others_run(lambda: send_all(line, b"", data, lambda _: None))


def test_others_run_while_many_bytes_are_received() -> None:
    place = memoryview(bytearray(SIZE))
    with line_to("cat", "/dev/zero", end="stdout") as line:
        assert lets_others_run(lambda: _receive_all(line, place))


def test_nobody_runs_while_what_holds_the_lock_is_at_work() -> None:
    """An assignment between memory views keeps the interpreter's lock, so no other thread runs.

    This shows that the check of the other tests can fail.
    """
    source, target = memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE))

    def assign() -> None:
        target[:] = source

    assert not lets_others_run(assign, calls=100)
