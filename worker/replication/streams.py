"""The data connections of a session: chunks go straight between a slot's memory and a socket, in threads of their own.

    session   ── messages ──▶ the agent's loop
    stream 1  ── chunks ────▶ a thread, blocked in the kernel
    stream 2  ── chunks ────▶ another one

A stream's thread holds no lock while bytes move: sending, receiving and digesting all let go of the interpreter.
Invariant: when `close`, `cut` or a cancelled `run` has returned, no thread reads or writes anybody's memory any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.slot import MAX_CHUNK_BYTES, chunk_bytes, chunk_count, chunk_range, digest
from worker.core.link_use import LinkUse
from worker.core.transfers import Ranges, chunk_digest, ranges
from worker.errors import PeerLost
from worker.node.priority import work_as_ranks_do
from worker.replication.pacing import Pacer, SharedLink
from worker.tasks import ended

OWN_STREAMS = min(32, os.cpu_count() or 1)
"""Of a session that this side opens."""
BUFFER_BYTES = 512 * 1024
"""Asked for, of a stream, in the kernel, each way; Linux allows twice as much, and counts its own bookkeeping in.

Grown to megabytes, as the kernel
would, what lies in it leaves the processor's cache between two copies: moving and verifying a GiB both ways took 441 ms
then and 361 ms with this (loopback). 1 Gbyte/s over 0.4 ms there and back fits; a longer way has more streams."""
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
"""Many kernels allow everybody 208 KiB, and cut what is asked for to that without a word."""
CANCELLED_SECONDS = 0.05
"""How long chunks under way may take to leave after a cancellation before their lines are cut instead."""
DRAIN_BYTES = 1024 * 1024
PROGRESS_SECONDS = 0.05
"""A transfer that goes on says so about so often: every word wakes the loop."""
UNSENT_BYTES = 128 * 1024
"""What the kernel keeps unsent of a paced stream: a chunk that was admitted into an idle span leaves in it, or holds up the next one's asking."""
_TCP_NOTSENT_LOWAT = 25
_SO_MAX_PACING_RATE = 47
_LEAST_RATE = 64 * 1024
"""Bytes per second of a stream that is limited.

The kernel sends that many at once, and the next ones when these have had their time: a connection
that was limited to 1000 was silent for longer than ten seconds, also after the limit was gone (Linux 6.18)."""
_UNLIMITED = 2 ** (8 * struct.calcsize("L")) - 1


class Payload(Protocol):
    """A slot's payload, as the threads see it."""

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end` of the payload."""


class Streams:
    """The streams of one session's side.

    One owner: that side, which closes it; every method is called on the loop, what `begin` is given is not.
    """

    def __init__(self, *, receive_seconds: float | None = None) -> None:
        """Begin with none.

        Args:
            receive_seconds: how long a thread waits for more before it takes note of what has come of a chunk; None:
                until all of it is there, which wakes nobody in between.
        """
        self.lines: list[socket.socket] = []
        self.attached = asyncio.Event()
        """Set once there is a stream."""
        self._receive_seconds = receive_seconds
        self._limit: float | None = None
        self._working: dict[socket.socket, asyncio.Future[None]] = {}
        """The end of what runs on a stream."""
        self._threads: dict[socket.socket, queue.SimpleQueue[Callable[[], None] | None]] = {}
        """What the thread of each stream that has one does next."""

    def add(self, line: socket.socket) -> None:
        """Take a connected, blocking socket; `close` ends it."""
        for forced, asked in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
            try:
                line.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:  # who is not root gets what `net.core.wmem_max` and `rmem_max` allow
                line.setsockopt(socket.SOL_SOCKET, asked, BUFFER_BYTES)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PROGRESS_SECONDS))
        if self._receive_seconds is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._receive_seconds))
        self.lines.append(line)
        self.attached.set()

    async def run(self, line: socket.socket, work: Callable[[socket.socket], None]) -> None:
        """Run `work` on one stream (see `begin`) to its end; cancelled, its line is cut, and its thread has done with it when this returns.

        Args:
            line: as in `begin`.
            work: as in `begin`.

        Raises:
            PeerLost: the line broke, or this node has no thread for it.
            MalformedMessage: what came on it is no chunk that may come.
        """
        done = self.begin(line, work)
        try:
            await asyncio.wait([done])
        finally:
            await self.cut(line)
        done.result()

    def begin(self, line: socket.socket, work: Callable[[socket.socket], None]) -> asyncio.Future[None]:
        """Begin `work` on one stream in its own thread, which is kept for the next: to start one costs a small transfer more than its bytes do.

        Args:
            line: one of `lines`, on which nothing runs.
            work: blocks as it likes; returns or raises soon when the line is cut.

        Returns:
            Its end, which raises what `run` does; whoever no longer waits for it says `cut`.

        Raises:
            PeerLost: this node has no thread for it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def body() -> None:
            error: BaseException | None = None
            try:
                work(line)
            except OSError as caught:
                error = PeerLost(f"a stream is lost: {caught}")
            except BaseException as caught:  # whatever it is belongs to who waits
                error = caught
            loop.call_soon_threadsafe(self._settle, line, error)

        if line not in self._threads:
            bodies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            try:
                threading.Thread(target=_work, args=(bodies,), name="everstep-stream", daemon=True).start()
            except RuntimeError as error:
                raise PeerLost(f"a stream has no thread: {error}") from error
            self._threads[line] = bodies
        self._working[line] = done
        self._threads[line].put(body)
        return done

    def _settle(self, line: socket.socket, error: BaseException | None) -> None:
        done = self._working.pop(line)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # who was cancelled does not ask for it

    async def cut(self, *lines: socket.socket) -> None:
        """Cut those of these streams on which something runs, and wait until their threads have done with them."""
        working = [line for line in lines if line in self._working]
        ends = [self._working[line] for line in working]
        for line in working:
            _cut(line)
        await ended(*ends)

    def limit(self, bytes_per_second: float | None) -> None:
        """Have the kernel send no more than so much over all that there are, together, or `_LEAST_RATE` over each; None: whatever there is."""
        if bytes_per_second == self._limit:
            return
        self._limit = bytes_per_second
        rate = (
            _UNLIMITED
            if bytes_per_second is None
            else max(_LEAST_RATE, int(bytes_per_second / max(1, len(self.lines))))
        )
        for line in self.lines:
            with contextlib.suppress(OSError):  # it is gone, as who uses it will notice
                line.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("L", rate))

    def shrink(self, count: int) -> None:
        """Close streams beyond `count`; nothing runs on them."""
        for line in self.lines[count:]:
            self.drop(line)

    def drop(self, line: socket.socket) -> None:
        """Close a stream, which then makes room for another; nothing runs on it.

        One that is closed already is passed over.
        """
        if line not in self.lines:
            return
        self.lines.remove(line)
        thread = self._threads.pop(line, None)
        if thread is not None:
            thread.put(None)
        line.close()

    async def close(self) -> None:
        """Cut every stream and wait until its thread is done with it."""
        for line in self.lines:
            _cut(line)
        await ended(*self._working.values())
        self.shrink(0)


def _work(bodies: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    work_as_ranks_do()
    while (body := bodies.get()) is not None:
        body()


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(1e6 * (seconds % 1)))


def _cut(line: socket.socket) -> None:
    """Wake whoever is blocked on the line, for good."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is down already


# -- sending


class ChunkQueue:
    """The chunks of one transfer that are wanted, shared by the threads of all streams: who is free takes the next.

    Any thread.

    Args:
        clock: seconds, monotonic.
        link: what it shares with other transfers, of the same clock; None: nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, link: SharedLink | None = None) -> None:
        self.cancelled = threading.Event()
        self.taken_bytes = 0
        """What the kernel has taken."""
        self.taken_at = 0.0
        """When it took the last."""
        self._clock = clock
        self._link = link or SharedLink(clock)
        self._told_at = clock()
        self._left: deque[int] = deque()
        self._open_count = 0
        """Chunks that are wanted and that the kernel has not taken."""
        self._working_count = 0
        """Streams that have one of them."""
        self._held_count = 0
        """Those of these streams that may not send it yet."""
        self._busy_since: LinkUse | None = None
        """What the link had been used when it began to have something to send; None while it has nothing."""
        self._busy_seconds = 0.0
        self._part_seconds = 0.0
        self._is_complete = False
        self._changed = threading.Condition()

    @property
    def busy_seconds(self) -> float:
        """For how long there has been something to send that might go: the time between, in which nothing was there yet or a pacer held all of it
        back, says nothing of the link.
        """
        return self._spent()[0]

    @property
    def part_seconds(self) -> float:
        """The same, but of a second in which others sent as well over the same link only its part."""
        return self._spent()[1]

    def _spent(self) -> tuple[float, float]:
        with self._changed:
            since, now = self._busy_since, self._link.use
            if since is None:
                return self._busy_seconds, self._part_seconds
            return (
                self._busy_seconds + now.busy_seconds - since.busy_seconds,
                self._part_seconds + now.part_seconds - since.part_seconds,
            )

    def _turn(self) -> None:
        """Begin or end to count time, as it has something to send or not."""
        is_held = 0 < self._held_count == self._working_count
        is_busy = self._open_count > 0 and not is_held and not self.cancelled.is_set()
        if is_busy and self._busy_since is None:
            self._busy_since = self._link.join()
        elif not is_busy and self._busy_since is not None:
            since, now = self._busy_since, self._link.leave()
            self._busy_seconds += now.busy_seconds - since.busy_seconds
            self._part_seconds += now.part_seconds - since.part_seconds
            self._busy_since = None

    def add(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Have (first, count) ranges sent."""
        with self._changed:
            for first, count in chunks:
                self._left.extend(range(first, first + count))
                self._open_count += count
            self._turn()
            self._changed.notify_all()

    def complete(self) -> None:
        """No more will be wanted."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Nobody wants them any more: what is under way may still leave, but it is not counted how fast."""
        with self._changed:
            self.cancelled.set()
            self._turn()
        self.complete()

    def next(self) -> int | None:
        """Return a chunk to send, waiting for one; None: there will be no more."""
        with self._changed:
            while not self._left and not self._is_complete:
                self._changed.wait()
            if not self._left or self.cancelled.is_set():
                return None
            self._working_count += 1
            self._turn()
            return self._left.popleft()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """One stream has a chunk that it may not send, for as long as the context lasts."""
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def _hold(self, count: int) -> None:
        with self._changed:
            self._held_count += count
            self._turn()

    def taken(self, size: int) -> bool:
        """The kernel has taken so many bytes of a chunk, or none for a while; return whether that is worth telling: some are, every now and then."""
        with self._changed:
            self._link.count()
            if not size:
                return False
            self.taken_bytes += size
            self.taken_at = self._clock()
            is_due = self.taken_at - self._told_at >= PROGRESS_SECONDS
            if is_due:
                self._told_at = self.taken_at
            return is_due

    def finish(self) -> None:
        """The kernel has taken all of a chunk."""
        with self._changed:
            self._open_count -= 1
            self._working_count -= 1
            self._turn()


async def send_chunks(
    streams: Streams,
    source: Payload,
    transfer: int,
    queue: ChunkQueue,
    *,
    payload_bytes: int,
    pacer: Pacer | None,
    progress: Callable[[int], None],
    paused: Callable[[int], None] = lambda _: None,
) -> None:
    """Send chunks of a payload over all streams; returns when the queue is complete and the kernel has taken them.

    Cancelled, it returns when no thread reads `source` any more: chunks under way end soon, or their lines are cut.

    Args:
        streams: at least one.
        source: whose payload it is; stays mapped.
        transfer: of the `BeginShard`.
        queue: what the receiver wants; grows meanwhile.
        payload_bytes: of the whole payload.
        pacer: asked before each piece; None: every chunk goes at once and whole.
        progress: told on the loop, every now and then, that the kernel has taken something; how many bytes of a chunk.
        paused: told on the loop +1 when a stream begins to wait for the pacer, -1 when it no longer does.

    Raises:
        PeerLost: a stream broke.
    """
    loop = asyncio.get_running_loop()
    piece_bytes = chunk_bytes(payload_bytes) if pacer is None else pacer.chunk_bytes
    waiting: set[concurrent.futures.Future[None]] = set()

    def admit(size: int) -> None:
        """Wait in the stream's thread for the loop's word.

        A cancellation ends the line: its chunk would never be whole.
        """
        if pacer is None:
            return
        soon = pacer.book(size)
        if soon == 0:
            return
        with queue.held_back():
            if soon is not None:
                queue.cancelled.wait(soon)
                return
            loop.call_soon_threadsafe(paused, 1)
            asked = asyncio.run_coroutine_threadsafe(pacer.admit(size), loop)
            waiting.add(asked)
            try:
                asked.result()
            except concurrent.futures.CancelledError as error:
                raise ConnectionAbortedError("given up between two pieces of a chunk") from error
            finally:
                waiting.discard(asked)
                loop.call_soon_threadsafe(paused, -1)

    def taken(size: int) -> None:
        if queue.taken(size):
            loop.call_soon_threadsafe(progress, size)

    def work(line: socket.socket) -> None:
        line.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 0 if pacer is None else UNSENT_BYTES)
        while (index := queue.next()) is not None:
            start, stop = chunk_range(index, payload_bytes)
            header = CHUNK_HEADER.pack(transfer, index, stop - start)
            for begin in range(start, stop, piece_bytes):
                with source.payload(begin, min(stop, begin + piece_bytes)) as piece:
                    admit(piece.nbytes)
                    _send_all(line, header if begin == start else b"", piece, taken)
            queue.finish()

    lines = streams.lines[: chunk_count(payload_bytes)]  # each will have something to send
    sending: list[asyncio.Future[None]] = []
    try:
        sending += [streams.begin(line, work) for line in lines]
        await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
        for each in sending:
            if each.done():
                each.result()
    finally:
        queue.cancel()
        try:
            if left := [each for each in sending if not each.done()]:
                await asyncio.wait(left, timeout=CANCELLED_SECONDS)
        finally:
            for asked in list(waiting):
                asked.cancel()
            await streams.cut(*lines)


def _send_all(line: socket.socket, header: bytes, data: memoryview, taken: Callable[[int], None]) -> None:
    """Send both, from where they are; what the kernel takes of the data is told, be it nothing for `PROGRESS_SECONDS`."""
    sent = -len(header)
    while sent < data.nbytes:
        try:
            with data[max(0, sent) :] as rest:
                count = line.sendmsg([header[sent:], rest]) if sent < 0 else line.send(rest)
        except (
            BlockingIOError
        ):  # nothing has left meanwhile: whether that is too long somebody else says, who cuts the line
            taken(0)
            continue
        before, sent = max(0, sent), sent + count
        if sent > before:
            taken(sent - before)


# -- receiving


class IncomingShard:
    """The receiving side of one transfer: what is missing of it, and who writes it.

    Its threads claim chunks; its owner awaits and closes it.
    """

    def __init__(self, target: Payload, *, transfer: int, payload_bytes: int) -> None:
        """Begin.

        Args:
            target: the slot, granted for this content.
            transfer: of the `BeginShard`.
            payload_bytes: of the payload.
        """
        self.transfer = transfer
        self.payload_bytes = payload_bytes
        self.chunk_digests = b""
        """What the chunks that were named must hash to, from the first on."""
        self.missing: set[int] = set()
        """Wanted, and not verified yet."""
        self.damaged: set[int] = set()
        """Came, and did not hash to what they should."""
        self.landed_count = 0
        self.come_bytes = 0
        """Of chunks that were claimed, whole or not, verified or not."""
        self._target = target
        self._lock = threading.Lock()
        self._claimed: set[int] = set()
        self._is_closed = False
        self._index: range | None = None
        self._tell: Callable[[int], None] = lambda _: None
        self._told_count = 0
        """So many first chunks were said to be there."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def name(self, chunk_digests: bytes, missing: Iterable[int]) -> None:
        """Take the next chunks' digests, and which of these chunks are wanted. On the loop."""
        with self._lock:
            self.chunk_digests += chunk_digests
            self.missing.update(missing)

    def follow(self, index: range, tell: Callable[[int], None]) -> None:
        """Have somebody told what is there, now and as chunks come.

        On the loop, when all chunks are named and their digests believed.

        Args:
            index: chunks without which nothing is told.
            tell: given how many first bytes of the payload are there; called on the loop.
        """
        self._index, self._tell = index, tell
        self._look()

    def _look(self) -> None:
        if self._is_closed or self._index is None:
            return
        count, end = self._told_count, chunk_count(self.payload_bytes)
        with self._lock:
            if any(index in self.missing for index in self._index):
                return
            while count < end and count not in self.missing:
                count += 1
        if count > self._told_count or not self._told_count:
            self._told_count = count
            self._tell(chunk_range(count - 1, self.payload_bytes)[1] if count else 0)

    def again(self) -> Ranges:
        """Return what came damaged, to be asked for again. On the loop."""
        with self._lock:
            damaged = ranges(self.damaged)
            self.damaged.clear()
        return damaged

    def claim(self, index: int, size: int) -> memoryview | None:
        """Return where a chunk belongs, for one thread alone, or None when it is not wanted. Any thread.

        Args:
            index: of the chunk.
            size: bytes that are announced.

        Returns:
            Its place in the slot; the caller says `land` in the end, whatever comes.

        Raises:
            MalformedMessage: the payload has no such chunk.
        """
        start, stop = chunk_range(index, self.payload_bytes)
        if start >= stop or size != stop - start:
            raise MalformedMessage(f"a chunk {index} of {size} bytes in a payload of {self.payload_bytes}")
        with self._lock:
            if self._is_closed or index not in self.missing or index in self._claimed:
                return None
            self._claimed.add(index)
            return self._target.payload(start, stop)

    def come(self, size: int) -> None:
        """So many bytes of a claimed chunk have come. Any thread."""
        with self._lock:
            self.come_bytes += size

    def land(self, index: int, data: memoryview, *, is_whole: bool) -> None:
        """Take a claimed chunk whose bytes have come; verify it while they are warm. Any thread.

        Args:
            index: of the chunk.
            data: what `claim` returned; released here.
            is_whole: all of it has come.
        """
        is_good = is_whole and digest(data) == chunk_digest(self.chunk_digests, index)
        data.release()
        with self._lock:
            self._claimed.discard(index)
            if is_good:
                self.missing.discard(index)
                self.landed_count += 1
            elif is_whole:
                self.damaged.add(index)
            is_news = len(self.missing) == len(self.damaged) or self._is_closed
        if is_news:
            self._loop.call_soon_threadsafe(self._event.set)
        if is_good and self._index is not None:
            self._loop.call_soon_threadsafe(self._look)

    async def settled(self, silence_seconds: float | None) -> None:
        """Return when every missing chunk has come, whole or damaged, and who follows has been told of it.

        Args:
            silence_seconds: how long nothing may come at all; None: for ever.

        Raises:
            PeerLost: nothing has come for so long.
        """
        while len(self.missing) > len(self.damaged):  # damaged ones are missing, too
            before = self.come_bytes
            try:
                async with asyncio.timeout(silence_seconds):
                    await self._event.wait()
            except TimeoutError as error:
                if self.come_bytes == before:
                    raise PeerLost(f"nothing has come for {silence_seconds:g} s") from error
            self._event.clear()
        self._look()  # the last chunk's own look may still be on its way to the loop

    def shut(self) -> bool:
        """Let nobody claim anything any more; return whether nobody has."""
        with self._lock:
            self._is_closed = True
            return not self._claimed

    async def close(self) -> None:
        """Let nobody claim anything any more, and wait for who has; the streams must be cut where they may be silent for ever."""
        while True:
            self._event.clear()
            if self.shut():
                return
            await self._event.wait()


class Receiver:
    """What a receiving session's streams deliver to: at most one transfer at a time."""

    def __init__(self) -> None:
        self.current: IncomingShard | None = None
        """Set on the loop, read by the threads: one word, and a closed transfer takes nothing."""

    def receive(self, line: socket.socket) -> None:
        """Take chunks off a stream until it ends: the work of a receiving stream's thread.

        Args:
            line: of the stream, blocking.

        Raises:
            OSError: the line broke.
            MalformedMessage: what came is no chunk.
        """
        header = bytearray(CHUNK_HEADER.size)
        while _receive_all(line, memoryview(header)):
            transfer, index, size = CHUNK_HEADER.unpack(header)
            if not 0 < size <= MAX_CHUNK_BYTES:
                raise MalformedMessage(f"a chunk of {size} bytes")
            incoming = self.current
            place = incoming.claim(index, size) if incoming is not None and incoming.transfer == transfer else None
            if incoming is None or place is None:  # of a transfer that is over, or one that came twice
                _drain(line, size)
                continue
            is_whole = False
            try:
                is_whole = _receive_all(line, place, incoming.come)
            finally:
                incoming.land(index, place, is_whole=is_whole)


def _receive_all(line: socket.socket, view: memoryview, come: Callable[[int], None] = lambda _: None) -> bool:
    """Fill `view`.

    Args:
        line: blocking.
        view: uint8[n].
        come: told of what has come of it.

    Returns:
        False when the other side has closed the line before the first byte.

    Raises:
        OSError: the line broke, or ended in the middle.
    """
    filled = 0
    while filled < view.nbytes:
        try:
            with view[filled:] as rest:
                count = line.recv_into(rest, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # nothing has come meanwhile
        come(count)
        if count == 0:
            if filled:
                raise ConnectionResetError("the line ended in the middle of a chunk")
            return False
        filled += count
    return True


def _drain(line: socket.socket, size: int) -> None:
    scratch = memoryview(bytearray(min(size, DRAIN_BYTES)))
    while size:
        piece = scratch[: min(size, len(scratch))]
        if not _receive_all(line, piece):
            raise ConnectionResetError("the line ended in the middle of a chunk")
        size -= piece.nbytes
