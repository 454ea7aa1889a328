"""Tests the framing of streams over NIXL. The reads themselves are copies within this process."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.ids import NodeId
from worker.replication.nixl import BLOCK_BYTES, Nixl
from worker.replication.nixl_line import BLOCK, FRAME, NixlPath, NixlSocket

SMALL = 100
NODE = NodeId("i-peer")
MAX_PACING_RATE = 47


class Memory(Nixl):
    """Blocks of one node. `read` copies from the other node's blocks."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(2 * BLOCK_BYTES))
        self.small_bytes = SMALL
        self.peer: Memory | None = None
        self.read_sizes: list[int] = []
        self.released: list[int] = []

    def address(self, block: int) -> int:
        return block

    def memory(self, block: int) -> memoryview:
        return self.data[block : block + BLOCK_BYTES]

    def release(self, blocks: list[int]) -> None:
        self.released += blocks
        blocks.clear()

    def read(
        self, node_id: NodeId, peer: str, address: int, size: int, blocks: list[int], cut: threading.Event
    ) -> None:
        assert (node_id, peer, self.peer is not None) == (NODE, "peer", True)
        assert self.peer is not None
        self.read_sizes.append(size)
        self.data[blocks[0] : blocks[0] + size] = self.peer.data[address : address + size]


@contextmanager
def line() -> Iterator[tuple[NixlSocket, NixlSocket, Memory, Memory]]:
    """Yield the sending and the receiving end of a stream, and the memory of both nodes."""
    ours, theirs = Memory(), Memory()
    theirs.peer = ours
    ends = [
        NixlSocket(end, NixlPath(memory, [0, BLOCK_BYTES], NODE, "peer"))
        for end, memory in zip(socket.socketpair(), (ours, theirs), strict=True)
    ]
    with ends[0], ends[1]:
        yield ends[0], ends[1], ours, theirs


def received(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    count = end.recv_into(data, 0, socket.MSG_WAITALL)
    return bytes(data[:count])


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4 * SMALL) | st.integers(BLOCK_BYTES - 1, 2 * BLOCK_BYTES + 1), max_size=4),
    cuts=st.lists(st.integers(1, BLOCK_BYTES), max_size=4),
)
def test_all_bytes_arrive_in_order_however_they_are_divided(sizes: list[int], cuts: list[int]) -> None:
    pieces = [
        bytearray((7 * number + index) % 251 for index in range(min(size, 600))) for number, size in enumerate(sizes)
    ]
    pieces = [(piece * (size // len(piece) + 1))[:size] for piece, size in zip(pieces, sizes, strict=True)]
    with line() as (sender, receiver, _, theirs):

        def send() -> None:
            for piece in pieces:
                sender.sendall(piece)
                piece[:] = bytes(len(piece))  # The caller may change the bytes after the call.
            sender.shutdown(socket.SHUT_WR)

        sent = b"".join(map(bytes, pieces))
        thread = threading.Thread(target=send)
        thread.start()
        found, number = bytearray(), 0
        whole = [*cuts, BLOCK_BYTES]
        while part := received(receiver, whole[number % len(whole)]):
            found += part
            number += 1
        thread.join()
        assert found == sent
        assert all(SMALL <= size <= BLOCK_BYTES for size in theirs.read_sizes)
        assert bool(theirs.read_sizes) == any(size >= SMALL for size in sizes)


def test_a_block_is_used_again_only_after_the_peer_has_read_it() -> None:
    with line() as (sender, receiver, ours, _):
        timeout = struct.pack("ll", 0, 10_000)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        first, second, third, fourth = (bytearray([value]) * 1000 for value in (1, 2, 3, 4))
        assert [sender.send(first), sender.send(second)] == [1000, 1000]
        with pytest.raises(BlockingIOError):
            sender.send(third)
        assert received(receiver, 1000) == first
        assert sender.send(third) == 1000
        assert received(receiver, 1000) == second
        assert sender.send(fourth) == 1000
        assert received(receiver, 2000) == third + fourth
        assert ours.released == []


def test_bytes_travel_over_tcp_while_the_kernel_limits_the_rate() -> None:
    with line() as (sender, receiver, _, theirs):
        for value, over_nixl in ((1_000_000, 0), (2**64 - 1, 1)):
            sender.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, struct.pack("L", value))
            sender.sendall(bytearray(1000))
            assert received(receiver, 1000) == bytes(1000)
            assert len(theirs.read_sizes) == over_nixl


def test_a_piece_of_which_the_kernel_takes_a_part_continues_in_the_same_frame() -> None:
    with line() as (sender, receiver, _, _):
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
        data = bytes(range(256)) * 8192  # `bytes` are read-only, so the socket sends them over TCP.
        sent = sender.send(data)
        assert 0 < sent < len(data)
        with pytest.raises(BlockingIOError):
            sender.send(data[sent:])
        thread = threading.Thread(target=lambda: _send_rest(sender, data[sent:]))
        thread.start()
        assert received(receiver, len(data)) == data
        thread.join()


def _send_rest(sender: NixlSocket, data: bytes) -> None:
    while data:
        try:
            data = data[sender.send(data) :]
        except BlockingIOError:
            continue


@pytest.mark.security
@pytest.mark.parametrize(
    "frame", [FRAME.pack(2, 10, 0), FRAME.pack(BLOCK, BLOCK_BYTES + 1, 0), FRAME.pack(BLOCK, 0, 0)]
)
def test_an_invalid_frame_ends_the_stream(frame: bytes) -> None:
    with line() as (sender, receiver, _, theirs):
        socket.socket.sendall(sender, frame)
        with pytest.raises(ConnectionAbortedError, match="the peer sent a frame"):
            received(receiver, 10)
        assert theirs.read_sizes == []


@pytest.mark.parametrize("data", [FRAME.pack(0, 10, 0) + b"half", FRAME.pack(0, 10, 0)[:7]])
def test_an_end_within_a_frame_is_an_error_and_an_end_between_frames_is_none(data: bytes) -> None:
    with line() as (sender, receiver, _, theirs):
        sender.close()
        assert received(receiver, 10) == b""
    with line() as (sender, receiver, _, theirs):
        socket.socket.sendall(sender, data)
        sender.close()
        with pytest.raises(ConnectionResetError, match="within a frame"):
            received(receiver, 10)
    assert theirs.released == [0, BLOCK_BYTES]
