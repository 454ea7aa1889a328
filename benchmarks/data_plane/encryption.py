"""Measures one stream over loopback between two processes, plain and with TLS, with Everstep's functions for chunks."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.rows import number, table
from everstep.protocol.ids import NodeId
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.slot import CHUNK_BYTES, digest
from tests.fakes.identities import identity_of
from worker.replication.streams import BUFFER_BYTES, send_all

GIB = 1024**3
ROUNDS = 7
"""Transfers of one GiB of each kind, in turn."""
KINDS = {"plain": "plain", "tls": "TLS"}
"""Kinds of streams with their names in the table."""
PIECE_BYTES = 256 * 1024
"""Bytes per call of the sender, as in `worker.replication.streams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of a GiB."""

    kind: str
    """A key of `KINDS`."""
    seconds: float
    processor_seconds: float
    """CPU seconds of both processes together."""


def measure(rounds: int = ROUNDS, size: int = GIB) -> list[Transfer]:
    """Run transfers of each kind in turn. The first of each kind is a warm-up and is not returned."""
    found = [_transfer(size, kind) for _ in range(rounds + 1) for kind in KINDS]
    return found[len(KINDS) :]


def words(transfers: Sequence[Transfer]) -> str:
    """Return a Markdown table with the median duration of each kind of transfer."""
    rows = []
    for kind, title in KINDS.items():
        of = [each for each in transfers if each.kind == kind]
        milliseconds = sorted(1000 * each.seconds for each in of)
        rows.append(
            [
                title,
                number(statistics.median(milliseconds)),
                f"{number(milliseconds[0])} to {number(milliseconds[-1])}",
                number(1000 * statistics.median(each.processor_seconds for each in of)),
                str(len(of)),
            ]
        )
    return table(("stream", "median, ms/GiB", "lowest to highest", "processor time, ms/GiB", "n"), rows)


def _transfer(size: int, kind: str) -> Transfer:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=_receive, args=(there, size, kind))
    receiver.start()
    try:
        line = _line(socket.create_connection(("127.0.0.1", here.recv())), "i-1", kind, is_server=False)
        chunk = bytearray(CHUNK_BYTES)
        here.recv()  # Do not time the receiver's start: wait until it is ready.
        began_at, used = time.monotonic(), time.process_time()
        with line, memoryview(chunk) as whole:
            for index in range(size // CHUNK_BYTES):
                header = CHUNK_HEADER.pack(1, index, CHUNK_BYTES)
                for begin in range(0, CHUNK_BYTES, PIECE_BYTES):
                    with whole[begin : begin + PIECE_BYTES] as piece:
                        send_all(line, header if begin == 0 else b"", piece, lambda _: None)
            theirs = here.recv()
        seconds, own = time.monotonic() - began_at, time.process_time() - used
    finally:
        receiver.join(10)
        receiver.kill()
        receiver.join()
    return Transfer(kind=kind, seconds=seconds, processor_seconds=own + theirs)


def _receive(parent: Connection, size: int, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        parent.send(server.getsockname()[1])
        line = _line(server.accept()[0], "i-2", kind, is_server=True)
    data = memoryview(bytearray(CHUNK_BYTES))
    header = bytearray(CHUNK_HEADER.size)
    parent.send("ready")
    used = time.process_time()
    with line:
        for _ in range(size // CHUNK_BYTES):
            _fill(line, memoryview(header))
            _fill(line, data)
            digest(data)
    parent.send(time.process_time() - used)


def _fill(line: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < view.nbytes:
        with view[filled:] as rest:
            count = line.recv_into(rest, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the sender closed the stream")
        filled += count


def _line(line: socket.socket, node: str, kind: str, *, is_server: bool) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        line.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if kind == "plain":
        return line
    secure = identity_of(NodeId(node)).context(is_server=is_server).wrap_socket(line, server_side=is_server)
    socket.socket.setblocking(secure, False)
    secure.setblocking(True)
    return secure
