"""Measures the floors of this machine, in two processes together.

    memcpy      copy of the state's bytes into shared memory with allocated pages, tensor by tensor, in one thread
    digest      xxh3-128 of the same number of bytes
    one_way     rank 0 sends the same number of bytes to rank 1 over one loopback socket with default options
    both_ways   both ranks send the same number of bytes to each other, over one socket per direction

A line on stdin requests all floors, answered by a line of JSON: seconds by floor. Needs xxhash, so it runs in
Everstep's environment.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
import xxhash

from benchmarks.data_plane.rank.state import RANKS, Meeting

MAX_BUFFER_BYTES = 512 * 1024**2
"""Largest buffer, far larger than any CPU cache. More bytes use it repeatedly, which leaves memory to the systems."""
TENSOR_BYTES = 4 * 1024**2
SOCKET_PIECE_BYTES = 8 * 1024**2


class Floors:
    """One of the two processes. Rank 0 listens, rank 1 connects. Every operation moves `size` bytes."""

    def __init__(self, rank: int, meeting: Meeting, size: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._meeting = meeting
        self._passes = -(-size // MAX_BUFFER_BYTES)
        self._source = torch.empty(size // self._passes, dtype=torch.uint8).random_()
        self._shared = mmap.mmap(-1, size // self._passes)
        self._target = torch.frombuffer(self._shared, dtype=torch.uint8)
        # Copy once before the first measurement, so that the kernel has allocated all pages of the buffers.
        self._target.copy_(self._source)
        self._lines = self._connect()

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        """Return the connections from rank 0 to rank 1, and from rank 1 to rank 0."""
        store = self._meeting.store
        if self._rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("floors", str(server.getsockname()[1]))
                return server.accept()[0], server.accept()[0]
        port = int(store.get("floors"))
        return socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port))

    def round(self) -> dict[str, float]:
        """Time every operation once, together with the other process. Return the seconds by operation."""
        floors: dict[str, Callable[[], None]] = {
            "memcpy": self._copy,
            "digest": self._digest,
            "one_way": self._one_way,
            "both_ways": self._both_ways,
        }
        seconds = {}
        for name, work in floors.items():
            self._meeting.wait()
            begun = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - begun
        return seconds

    def _copy(self) -> None:
        for _ in range(self._passes):
            for start in range(0, len(self._shared), TENSOR_BYTES):
                self._target[start : start + TENSOR_BYTES].copy_(self._source[start : start + TENSOR_BYTES])

    def _digest(self) -> None:
        hasher = xxhash.xxh3_128()
        for _ in range(self._passes):
            hasher.update(self._shared)
        hasher.digest()

    def _one_way(self) -> None:
        if self._rank == 0:
            self._send(self._lines[0])
            self._lines[0].recv(1)  # wait until the other rank confirms that it has received all bytes
        else:
            self._receive(self._lines[0])
            self._lines[0].sendall(b"k")

    def _both_ways(self) -> None:
        sending = threading.Thread(target=self._send, args=(self._lines[self._rank],))
        sending.start()
        self._receive(self._lines[1 - self._rank])
        sending.join()
        self._meeting.wait()

    def _send(self, line: socket.socket) -> None:
        data = memoryview(self._source.numpy())  # type: ignore[arg-type]
        for _ in range(self._passes):
            for start in range(0, len(data), SOCKET_PIECE_BYTES):
                line.sendall(data[start : start + SOCKET_PIECE_BYTES])

    def _receive(self, line: socket.socket) -> None:
        memory = memoryview(self._shared)
        for _ in range(self._passes):
            position = 0
            while position < len(memory):
                count = line.recv_into(memory[position : position + SOCKET_PIECE_BYTES])
                if count == 0:
                    raise ConnectionError("the other process has gone")
                position += count


def main(rank: int, port: int, mebibytes: int) -> None:
    """Measure all floors per line on stdin, until it is closed."""
    assert RANKS == 2
    floors = Floors(rank, Meeting(rank, port), mebibytes * 1024**2)
    floors.round()
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(floors.round()), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
