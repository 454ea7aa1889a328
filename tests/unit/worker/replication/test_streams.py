"""Tests the queue of chunks that a holder has requested. The threads of several streams share it.

Other tests cover the reports of a receiver's progress.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.slot import CHUNK_BYTES, chunk_range, digest
from worker.errors import PeerLost
from worker.replication import streams as streams_module
from worker.replication.streams import (
    BUFFER_BYTES,
    PROGRESS_SECONDS,
    ChunkQueue,
    IncomingParts,
    IncomingShard,
    Receiver,
    Streams,
    send_chunks,
)

SO_MAX_PACING_RATE = 47
BEYOND = (32, 33)
"""Socket options SO_SNDBUFFORCE and SO_RCVBUFFORCE, with which root gets larger buffers than other users may have."""


TICK = 1 / 64
"""Seconds of one tick, an exact binary fraction."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_chunks_are_taken_once_and_who_waits_for_more_gets_them() -> None:
    queue, found = ChunkQueue(), []
    lock = threading.Lock()

    def work() -> None:
        while (index := queue.next()) is not None:
            with lock:
                found.append(index)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.add([(0, 2), (5, 1)])
    queue.add([(7, 3)])
    queue.add([])
    queue.complete()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 5, 7, 8, 9]


def test_nobody_gets_what_is_not_wanted_any_more() -> None:
    queue = ChunkQueue()
    waiting = threading.Thread(target=queue.next)
    waiting.start()
    queue.cancel()
    waiting.join()
    queue.add([(0, 1)])
    assert queue.next() is None
    assert queue.cancelled.is_set()


def test_what_was_sent_before_the_end_is_still_sent_in_order() -> None:
    queue = ChunkQueue()
    queue.add([(3, 2)])
    queue.complete()
    assert [queue.next(), queue.next(), queue.next()] == [3, 4, None]


def test_that_a_transfer_goes_on_is_told_now_and_then() -> None:
    clock = Clock()
    queue = ChunkQueue(clock)
    queue.add([(0, 4)])
    told = []
    for seconds in (0.0, 2 * PROGRESS_SECONDS, 0.0, 2 * PROGRESS_SECONDS):
        clock.now += seconds
        told.append(queue.taken(10))
        queue.finish()
    assert told == [False, True, False, True]


def test_time_in_which_there_was_nothing_to_send_is_not_counted() -> None:
    clock = Clock()
    queue = ChunkQueue(clock)
    clock.now += 5 * TICK
    queue.add([(0, 2)])
    clock.now += 1 * TICK
    queue.taken(10)
    queue.finish()
    assert queue.busy_seconds == 1 * TICK
    clock.now += 2 * TICK
    queue.taken(10)
    queue.finish()
    clock.now += 50 * TICK  # time passes in which the queue has no chunk, because the capture makes no progress
    queue.add([])
    assert queue.busy_seconds == 3 * TICK
    queue.add([(2, 1)])
    clock.now += 4 * TICK
    assert queue.busy_seconds == 7 * TICK
    queue.taken(5)
    queue.finish()
    clock.now += 9 * TICK
    assert (queue.busy_seconds, queue.taken_bytes, queue.taken_at) == (7 * TICK, 25, 100 + 62 * TICK)


def test_time_in_which_a_pacer_holds_all_of_it_back_is_not_counted() -> None:
    clock = Clock()
    queue = ChunkQueue(clock)
    queue.add([(0, 3)])
    queue.next()
    with queue.held_back():
        clock.now += 10 * TICK
        queue.next()
        clock.now += 1 * TICK  # during this time, only the second stream sends
        with queue.held_back():
            clock.now += 20 * TICK
        clock.now += 2 * TICK
        queue.taken(5)
        queue.finish()
        clock.now += 40 * TICK
        queue.next()
        clock.now += 3 * TICK
        queue.taken(5)
        queue.finish()
    clock.now += 4 * TICK
    assert queue.busy_seconds == 10 * TICK
    queue.taken(5)
    queue.finish()
    clock.now += 50 * TICK
    assert queue.busy_seconds == 10 * TICK


def test_a_stream_from_which_nothing_leaves_says_that_it_is_at_it() -> None:
    """A stream that is blocked because the link carries nothing still reports that it tries to send.

    Without these reports, a blocked link would look like a stopped process.
    """
    own, peer = socket.socketpair()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000))
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    taken: list[int] = []

    def drain() -> None:
        while peer.recv(1 << 16):
            continue

    draining = threading.Thread(target=drain)

    def note(size: int) -> None:
        taken.append(size)
        if taken.count(0) == 3 and not draining.is_alive():
            draining.start()

    with peer:
        with own:
            streams_module.send_all(own, b"head", memoryview(bytes(1 << 20)), note)
        draining.join()
    assert taken.count(0) >= 3
    assert sum(taken) == 1 << 20
    clock = Clock()
    queue = ChunkQueue(clock)
    queue.add([(0, 1)])
    for _ in range(40):
        clock.now += 0.1
        assert queue.taken(0) is False
    assert queue.busy_seconds == pytest.approx(4.0)
    assert (queue.taken_bytes, queue.taken_at) == (0, 0.0)
    clock.now += 30
    assert queue.busy_seconds == pytest.approx(4.0)


class Memory:
    """A slot's payload in memory. `when_read` runs in the thread that reads the payload."""

    def __init__(self, size: int, when_read: Callable[[], object] = lambda: None) -> None:
        self._bytes = bytearray(size)
        self._when_read = when_read

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        self._when_read()
        return memoryview(self._bytes)[start:end]

    def resize(self) -> None:
        """Raise `BufferError` while a thread reads or writes the payload."""
        self._bytes.append(0)


async def test_a_stream_without_a_thread_is_lost_and_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, line = Streams(), socket.socket()
    streams.add(line)

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(PeerLost, match="no thread"):
            await streams.run(line, lambda _: None)
    await streams.run(line, lambda _: None)  # the streams start new threads for the next transfer
    await streams.close()


class Asked(socket.socket):
    """A socket that records the options set on it.

    Without `is_root`, the options in `BEYOND` raise PermissionError, as for an ordinary user. With `is_root`, every
    option succeeds.
    """

    def __init__(self, *, is_root: bool) -> None:
        super().__init__()
        self.is_root = is_root
        self.options: dict[int, object] = {}

    def setsockopt(self, _level: int, option: int, value: object) -> None:  # type: ignore[override]
        if option in BEYOND and not self.is_root:
            raise PermissionError
        self.options[option] = value


@pytest.mark.parametrize(("is_root", "asked"), [(True, BEYOND), (False, (socket.SO_SNDBUF, socket.SO_RCVBUF))])
async def test_a_stream_has_its_buffers_even_where_the_kernel_gives_everybody_less(
    is_root: bool, asked: tuple[int, int]
) -> None:
    """A stream gets large buffers although the kernel's limit for all users is low.

    Many kernels limit buffers to 208 KiB, which allows only 0.2 GB/s at a round trip of 1 ms.
    """
    streams, line = Streams(), Asked(is_root=is_root)
    streams.add(line)
    assert {option for option, value in line.options.items() if value == BUFFER_BYTES} == set(asked)
    await streams.close()


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


async def test_what_leaves_of_a_chunk_counts_as_it_leaves() -> None:
    """Each sent part of a chunk counts as progress, not only a whole chunk.

    If only whole chunks counted, a link of 2 MB/s would seem blocked for seconds, and the owner would drop the holder.
    """
    sender, receiver = connected()
    streams, queue = Streams(), ChunkQueue()
    streams.add(sender)
    queue.add([(0, 1)])
    queue.complete()
    memory, told = Memory(CHUNK_BYTES), asyncio.Queue[int]()
    sending = asyncio.create_task(
        send_chunks(streams, memory, 1, queue, payload_bytes=CHUNK_BYTES, pacer=None, progress=told.put_nowait)
    )
    left = CHUNK_HEADER.size + CHUNK_BYTES
    loop = asyncio.get_running_loop()
    receiver.setblocking(False)
    assert 0 < await told.get() < CHUNK_BYTES
    while left:
        left -= len(await loop.sock_recv(receiver, left))
    await sending
    assert queue.taken_bytes == CHUNK_BYTES
    receiver.close()
    await streams.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_nobody_reads_a_slot_any_more_whose_sending_was_given_up(count: int) -> None:
    """After a transfer is cancelled, no thread reads the transfer's slot any more.

    The transfer may be cancelled twice: when the capture is abandoned, and when the slot is granted again.
    """
    sender, receiver = connected()
    streams, queue, is_read, loop = Streams(), ChunkQueue(), asyncio.Event(), asyncio.get_running_loop()
    memory = Memory(8 * CHUNK_BYTES, lambda: loop.call_soon_threadsafe(is_read.set))
    streams.add(sender)
    queue.add([(0, 8)])
    sending = asyncio.create_task(
        send_chunks(streams, memory, 1, queue, payload_bytes=8 * CHUNK_BYTES, pacer=None, progress=lambda _: None)
    )
    await is_read.wait()
    for _ in range(count):
        sending.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await sending
    memory.resize()
    receiver.close()
    await streams.close()


async def test_what_comes_of_a_chunk_counts_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, line = connected()
    streams, receiver = Streams(receive_seconds=0.01), Receiver()
    streams.add(line)
    incoming = receiver.current = IncomingShard(Memory(CHUNK_BYTES), transfer=1, payload_bytes=CHUNK_BYTES)
    incoming.name(digest(bytes(CHUNK_BYTES)), [0])
    receiving = asyncio.create_task(streams.run(line, receiver.receive))
    take, has_come, loop = incoming.come, asyncio.Event(), asyncio.get_running_loop()

    def come(size: int) -> None:
        take(size)
        loop.call_soon_threadsafe(has_come.set)

    monkeypatch.setattr(incoming, "come", come)
    sender.sendall(CHUNK_HEADER.pack(1, 0, CHUNK_BYTES) + bytes(1000))
    await has_come.wait()
    assert (incoming.come_bytes, incoming.landed_count) == (1000, 0)
    await asyncio.to_thread(sender.sendall, bytes(CHUNK_BYTES - 1000))
    await incoming.settled(None)
    assert (incoming.come_bytes, incoming.missing) == (CHUNK_BYTES, set())
    sender.close()
    await receiving
    await streams.close()


async def test_who_follows_is_told_of_the_last_chunk_before_the_shard_counts_as_there() -> None:
    size = CHUNK_BYTES + 1
    incoming, told = IncomingShard(Memory(size), transfer=1, payload_bytes=size), []
    ranges = [chunk_range(index, size) for index in range(2)]
    incoming.name(b"".join(digest(bytes(stop - start)) for start, stop in ranges), range(2))
    incoming.follow(range(1), told.append)
    for index, (start, stop) in enumerate(ranges):
        place = incoming.claim(index, stop - start)
        assert place is not None
        incoming.land(index, place, is_whole=True)
    await incoming.settled(None)
    assert told[-1] == size


@pytest.mark.parametrize("count", [1, 8])
async def test_what_the_kernel_holds_back_of_a_stream_it_lets_go_soon(count: int) -> None:
    """The lowest rate limit of a stream lets 64 KiB pass within a second.

    The kernel sends 64 KiB at once, and then waits for as long as the limit at that time requires. A higher limit does
    not end this wait, so even with the lowest limit it must be short.
    """
    streams = Streams()
    for _ in range(count):
        streams.add(socket.socket())

    def rates() -> set[int]:
        size = struct.calcsize("L")
        return {
            int(*struct.unpack("L", line.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, size)))
            for line in streams.lines
        }

    streams.limit(8_000_000.0)
    assert rates() == {8_000_000 // count}
    streams.limit(1.0)
    (least,) = rates()
    assert 64 * 1024 / least <= 1.0
    streams.limit(None)
    (most,) = rates()
    assert most > 1e18
    await streams.close()


async def test_a_transfer_ends_after_a_chunk_that_could_not_be_combined() -> None:
    def combine(index: int, data: memoryview) -> bool:
        raise MemoryError(f"chunk {index} of {data.nbytes} bytes")

    incoming = IncomingParts(combine, transfer=1, payload_bytes=CHUNK_BYTES)
    incoming.name(digest(bytes(CHUNK_BYTES)), [0])
    place = incoming.claim(0, CHUNK_BYTES)
    assert place is not None
    place[:] = bytes(CHUNK_BYTES)
    with pytest.raises(MemoryError):
        incoming.land(0, place, is_whole=True)
    assert incoming.missing == incoming.damaged == {0}
    async with asyncio.timeout(10):
        await incoming.close()
