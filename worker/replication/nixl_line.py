"""A stream whose large blocks travel over NIXL: a socket that behaves like a plain socket.

    sender                                        receiver
    copies bytes into a block of its memory
    frame (BLOCK, size, address)        ──TCP──▶  reads the block over NIXL, copies it to its place
                                        ◀──TCP──  one byte: the block may be used again
    frame (INLINE, size), the bytes     ──TCP──▶

A frame (integers big endian):

    offset  size  field
    0       4     kind      0: the bytes follow on the connection; 1: they are in a block
    4       4     size      bytes
    8       8     address   of the block in the sender's memory; 0 for INLINE

The TCP connection is the authenticated stream. It orders the blocks, and its end is the stream's end.

Invariant: the sender never changes a block before the receiver has read it, unless the connection is closed.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from everstep.protocol.ids import NodeId
from worker.replication.library_sockets import fill, wait_for
from worker.replication.nixl import BLOCK_BYTES, Nixl

FRAME = struct.Struct(">IIQ")
INLINE: Final = 0
BLOCK: Final = 1
_SO_MAX_PACING_RATE = 47


@dataclass(slots=True)
class NixlPath:
    """The NIXL agent and the blocks of registered memory with which a stream sends or receives chunks over NIXL."""

    nixl: Nixl
    blocks: list[int]
    """Blocks of this node's registered memory that only this stream uses."""
    node_id: NodeId
    """Node at the other end."""
    peer: str = ""
    """Name of the peer's NIXL agent; set by the handshake."""

    def release(self) -> None:
        """Return the memory blocks to this node's NIXL agent, so that other streams can use them. Idempotent."""
        self.nixl.release(self.blocks)


class NixlSocket(socket.socket):
    """A connected, blocking socket that sends large data through NIXL memory blocks. `TcpSession.detach` creates it.

    One side sends, the other receives. The methods wait as long as SO_SNDTIMEO and SO_RCVTIMEO allow, and then raise
    BlockingIOError, like a plain socket. After this error, `send` must get the same bytes again.
    """

    path: NixlPath

    def __init__(self, line: socket.socket, path: NixlPath) -> None:
        """Take over a connection.

        Args:
            line: the connected socket of a stream, blocking; detached afterwards.
            path: the stream's memory blocks and NIXL peer. The new socket owns them, and `close` releases the blocks.
        """
        super().__init__(fileno=line.detach())
        self.path = path
        self.is_limited = False
        """True while the kernel limits the rate of the connection. The bytes then travel over TCP."""
        self._cut = threading.Event()
        self._unused = list(path.blocks)
        """Blocks of the sending side that are free."""
        self._used: deque[int] = deque()
        """Blocks whose address was sent and that the peer has not read yet, oldest first."""
        self._inline_bytes = 0
        """Bytes that the sending side must still send after the last INLINE frame."""
        self._frame = bytearray()
        """Received part of the next frame."""
        self._kind = INLINE
        self._size = 0
        """Size of the frame that is being received."""
        self._left = 0
        """Bytes of this frame that the caller has not received yet."""

    def setsockopt(self, level: int, option: int, value: Any, *rest: Any) -> None:
        """Set a socket option.

        If the option limits the rate, later bytes travel over TCP, where the kernel enforces the limit.
        """
        super().setsockopt(level, option, value, *rest)
        if (level, option) == (socket.SOL_SOCKET, _SO_MAX_PACING_RATE):
            self.is_limited = set(value) != {0xFF}

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send the first bytes of `data`, and return their number. `data` may change afterwards."""
        with memoryview(data) as whole:
            if not self._inline_bytes and not self._goes_inline(whole):
                return self._send_block(whole)
            if not self._inline_bytes:
                self._send_all(FRAME.pack(INLINE, whole.nbytes, 0))
                self._inline_bytes = whole.nbytes
            with whole[: self._inline_bytes] as part:
                count = super().send(part, flags)
            self._inline_bytes -= count
            return count

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Send the first of `buffers`, and return the number of sent bytes."""
        return self.send(next(iter(buffers)))

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send all bytes of `data` in frames."""
        with memoryview(data) as whole:
            sent = 0
            while sent < whole.nbytes:
                with whole[sent:] as rest:
                    sent += self.send(rest, flags)

    def _goes_inline(self, whole: memoryview) -> bool:
        return whole.nbytes < self.path.nixl.small_bytes or whole.readonly or self.is_limited

    def _send_block(self, whole: memoryview) -> int:
        self._take_acknowledgements()
        block = self._unused.pop()
        size = min(whole.nbytes, BLOCK_BYTES)
        with self.path.nixl.memory(block) as target, whole[:size] as source:
            _copy(target, source)
        self._used.append(block)
        self._send_all(FRAME.pack(BLOCK, size, self.path.nixl.address(block)))
        return size

    def _take_acknowledgements(self) -> None:
        """Free the blocks of registered memory that the peer has read. If no block is free, wait at most SO_SNDTIMEO.

        Raises BlockingIOError if no block became free, and ConnectionResetError if the peer closed the connection.
        """
        if not self._used:
            return
        if not self._unused and not wait_for(self, select.POLLIN, socket.SO_SNDTIMEO):
            raise BlockingIOError("the peer reads no block")
        try:
            found = super().recv(len(self._used), socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not self._unused:
                raise
            return
        if not found:
            raise ConnectionResetError("the peer closed the stream")
        for _ in found:
            self._unused.append(self._used.popleft())

    def _send_all(self, data: bytes) -> None:
        """Send a frame or an acknowledgement completely, however long the peer takes."""
        while data:
            try:
                data = data[super().send(data) :]
            except BlockingIOError:
                continue  # SO_SNDTIMEO has passed, because the peer does not read.

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0, /) -> int:  # noqa: ARG002
        """Receive bytes: over the TCP connection, or over NIXL from blocks of the peer's memory.

        The bytes fill the buffer (see `library_sockets.fill`). `nbytes` is unused.
        """
        return fill(buffer, flags, self._receive)

    def _receive(self, target: memoryview) -> int:
        if not self._left and not self._receive_frame():
            return 0
        size = min(self._left, target.nbytes)
        if self._kind == INLINE:
            with target[:size] as part:
                size = super().recv_into(part)
            if not size:
                raise ConnectionResetError("the stream ended within a frame")
        else:
            start = self._size - self._left
            with self.path.nixl.memory(self.path.blocks[0]) as block, block[start : start + size] as source:
                _copy(target, source)
        self._left -= size
        if self._kind == BLOCK and not self._left:
            self._send_all(b"\0")
        return size

    def _receive_frame(self) -> bool:
        """Receive the header of the next frame. If it names a block of the peer's memory, read this block over NIXL.

        Return False at the end of the connection.
        """
        while len(self._frame) < FRAME.size:
            part = super().recv(FRAME.size - len(self._frame))
            if not part:
                if self._frame:
                    raise ConnectionResetError("the stream ended within a frame")
                return False
            self._frame += part
        kind, size, address = FRAME.unpack(self._frame)
        if kind not in {INLINE, BLOCK} or not size or (kind == BLOCK and size > BLOCK_BYTES):
            raise ConnectionAbortedError(f"the peer sent a frame of kind {kind} with {size} bytes")
        if kind == BLOCK:
            self.path.nixl.read(self.path.node_id, self.path.peer, address, size, self.path.blocks, self._cut)
        self._kind, self._size, self._left = kind, size, size
        self._frame.clear()
        return True

    def shutdown(self, how: int, /) -> None:
        """Shut the connection down, so that a waiting thread wakes up soon."""
        self._cut.set()
        super().shutdown(how)

    def close(self) -> None:
        """Close the connection, and free its blocks of registered memory for other streams.

        The caller must ensure that no thread uses the socket.
        """
        self.path.release()
        super().close()


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` to the start of `target`, without the interpreter lock."""
    size = source.nbytes
    to, out_of = (ctypes.c_char * size).from_buffer(target), (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(to, out_of, size)
    del to, out_of
