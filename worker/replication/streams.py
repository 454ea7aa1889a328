"""The data connections (streams) of a session. Threads move chunks directly between a slot's memory and a socket.

    session   ── messages ──▶ the agent's loop
    stream 1  ── chunks ────▶ a thread, blocked in the kernel, without the interpreter lock
    stream 2  ── chunks ────▶ another thread

Invariant: after `close`, `cut` or a cancelled `run` has returned, no thread reads or writes the caller's memory.
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
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.slot import MAX_CHUNK_BYTES, chunk_bytes, chunk_count, chunk_range, digest
from worker.core.link_use import LinkUse
from worker.core.transfers import Ranges, chunk_digest, ranges
from worker.errors import PeerLost
from worker.node.priority import work_as_ranks_do
from worker.replication.pacing import Pacer, SharedLink
from worker.replication.tls import TlsSocket
from worker.tasks import ended

OWN_STREAMS = min(32, os.cpu_count() or 1)
"""Maximum number of streams that the dialling side opens in a session."""
# With automatic buffers of several megabytes, data would leave the processor's cache between two copies: 1 GiB in both
# directions over loopback took 441 ms with automatic buffers, 361 ms with this size.
BUFFER_BYTES = 512 * 1024
"""Requested size of the kernel's send and receive buffers of a stream. It suffices for 1 GB/s at 0.4 ms round trip."""
# Many kernels limit unprivileged processes to 208 KiB and silently reduce larger requests.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
"""Socket options with which root exceeds the system's buffer limits."""
CANCELLED_SECONDS = 0.05
"""Seconds after a cancellation in which threads may finish their current chunks. Then the streams are closed."""
DRAIN_BYTES = 1024 * 1024
PROGRESS_SECONDS = 0.05
"""Minimum seconds between two progress reports of a transfer. Each report wakes the event loop."""
UNSENT_BYTES = 128 * 1024
"""Maximum unsent bytes that the kernel buffers for a paced stream, so that a chunk leaves within its idle span."""
_TCP_NOTSENT_LOWAT = 25
_SO_MAX_PACING_RATE = 47
# Under a lower limit, the kernel sends one burst and then pauses. With a limit of 1000, a connection was silent for
# more than ten seconds, even after the limit was lifted (Linux 6.18).
_LEAST_RATE = 64 * 1024
"""Lowest rate to which a stream is limited, in bytes per second."""
_UNLIMITED = 2 ** (8 * struct.calcsize("L")) - 1


class Payload(Protocol):
    """Access to the bytes of a shard's payload, for threads that send chunks."""

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end` of the payload."""


class Streams:
    """One node's ends of the streams of a session. Not thread-safe; the code that handles the session closes it."""

    def __init__(self, *, receive_seconds: float | None = None) -> None:
        """Create the object. Receiving threads report parts of a chunk every `receive_seconds`, if not None."""
        self.lines: list[socket.socket] = []
        self.attached = asyncio.Event()
        """Set once a stream has been added to the session."""
        self._receive_seconds = receive_seconds
        self._limit: float | None = None
        self._working: dict[socket.socket, asyncio.Future[None]] = {}
        self._threads: dict[socket.socket, queue.SimpleQueue[Callable[[], None] | None]] = {}

    def add(self, line: socket.socket) -> None:
        """Add a connected, blocking socket as a stream. `close` closes the socket."""
        for forced, asked in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
            try:
                line.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:  # Without root, the kernel's limits net.core.wmem_max and rmem_max apply.
                line.setsockopt(socket.SOL_SOCKET, asked, BUFFER_BYTES)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PROGRESS_SECONDS))
        if self._receive_seconds is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._receive_seconds))
        self.lines.append(line)
        self.attached.set()

    async def run(self, line: socket.socket, work: Callable[[socket.socket], None]) -> None:
        """Run `work` on one stream to its end (see `begin`). A cancellation cuts the connection and waits for it.

        Raises PeerLost if the connection broke, or no thread can start. Raises MalformedMessage for an invalid chunk.
        """
        done = self.begin(line, work)
        try:
            await asyncio.wait([done])
        finally:
            await self.cut(line)
        done.result()

    def begin(self, line: socket.socket, work: Callable[[socket.socket], None]) -> asyncio.Future[None]:
        """Start `work` on an idle stream of `lines`, in the stream's thread, which stays for later work.

        The future raises the errors of `run`. A caller that stops waiting for it must call `cut`, which soon ends
        `work`. Raises PeerLost if this node cannot start another thread.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def body() -> None:
            error: BaseException | None = None
            try:
                work(line)
            except OSError as caught:
                error = PeerLost(f"a stream is lost: {caught}")
            except BaseException as caught:  # `_settle` passes the error to the caller that waits for `done`.
                error = caught
            loop.call_soon_threadsafe(self._settle, line, error)

        # The thread stays, because starting a thread costs more than a small transfer.
        if line not in self._threads:
            bodies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            try:
                threading.Thread(target=_work, args=(bodies,), name="everstep-stream", daemon=True).start()
            except RuntimeError as error:
                raise PeerLost(f"no thread can be started for a stream: {error}") from error
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
            # Mark the error as retrieved. Otherwise, asyncio would log it if the caller of the stream was cancelled.
            done.exception()

    async def cut(self, *lines: socket.socket) -> None:
        """Break the given connections that threads use, and wait until these threads have finished their work."""
        working = [line for line in lines if line in self._working]
        ends = [self._working[line] for line in working]
        for line in working:
            _cut(line)
        await ended(*ends)

    def limit(self, bytes_per_second: float | None) -> None:
        """Limit the total rate of all streams in the kernel, at least `_LEAST_RATE` each; None removes the limit."""
        if bytes_per_second == self._limit:
            return
        self._limit = bytes_per_second
        rate = (
            _UNLIMITED
            if bytes_per_second is None
            else max(_LEAST_RATE, int(bytes_per_second / max(1, len(self.lines))))
        )
        for line in self.lines:
            with contextlib.suppress(OSError):  # Ignore a lost connection; the stream's own thread reports it.
                line.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("L", rate))

    def shrink(self, count: int) -> None:
        """Close all streams but the first `count`. The closed streams must not be sending or receiving."""
        for line in self.lines[count:]:
            self.drop(line)

    def drop_worn(self) -> None:
        """Close the streams whose TLS key has encrypted as many bytes as is safe. No thread may use them."""
        for line in [each for each in self.lines if isinstance(each, TlsSocket) and each.is_worn]:
            self.drop(line)

    def drop(self, line: socket.socket) -> None:
        """Close a stream that is neither sending nor receiving. A closed stream is ignored."""
        if line not in self.lines:
            return
        self.lines.remove(line)
        thread = self._threads.pop(line, None)
        if thread is not None:
            thread.put(None)
        line.close()

    async def close(self) -> None:
        """Break the connection of every stream, and wait until no thread sends or receives any more."""
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
    """Wake the thread that is blocked on the connection, and make all later operations on it fail."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class ChunkQueue:
    """The requested chunks of one transfer, shared by the threads of all streams. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, link: SharedLink | None = None) -> None:
        self.cancelled = threading.Event()
        self.taken_bytes = 0
        self.taken_at = 0.0
        self._clock = clock
        self._link = link or SharedLink(clock)
        self._progress_reported_at = clock()
        self._left: deque[int] = deque()
        self._open_count = 0
        """Number of requested chunks that the kernel has not accepted completely."""
        self._working_count = 0
        self._held_count = 0
        self._busy_since: LinkUse | None = None
        """Use of the link when this transfer last began to have data to send; None while it has none."""
        self._busy_seconds = 0.0
        self._part_seconds = 0.0
        self._is_complete = False
        self._changed = threading.Condition()

    @property
    def busy_seconds(self) -> float:
        """Seconds in which this transfer had data to send, without the time in which all streams wait for the pacer."""
        return self._spent()[0]

    @property
    def part_seconds(self) -> float:
        """Seconds as in `busy_seconds`; a second in which n transfers use the link counts as 1/n."""
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
        """Queue requested chunks, as ranges (index of the first chunk, number of chunks)."""
        with self._changed:
            for first, count in chunks:
                self._left.extend(range(first, first + count))
                self._open_count += count
            self._turn()
            self._changed.notify_all()

    def complete(self) -> None:
        """Record that the receiver requests no further chunks."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make `next` return no further chunk. Threads may still finish their current chunks, without counted time."""
        with self._changed:
            self.cancelled.set()
            self._turn()
        self.complete()

    def next(self) -> int | None:
        """Wait for the next chunk to send, and return it. None means that no more chunks follow."""
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
        """Count one stream as delayed by the pacer while the context is open."""
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
        """Record `size` more accepted bytes, 0 after `PROGRESS_SECONDS` without any. Return whether a report is due."""
        with self._changed:
            self._link.count()
            if not size:
                return False
            self.taken_bytes += size
            self.taken_at = self._clock()
            is_due = self.taken_at - self._progress_reported_at >= PROGRESS_SECONDS
            if is_due:
                self._progress_reported_at = self.taken_at
            return is_due

    def finish(self) -> None:
        """Record that the kernel has accepted all bytes of a chunk."""
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
    """Send the chunks of `queue`, which may grow, over all streams of a session, until the kernel has accepted them.

    A cancelled call returns after all threads have stopped reading `source`, which must stay mapped. Chunks in flight
    may be sent for a short time, then their connections are cut. Raises PeerLost if a stream broke.

    Args:
        streams: at least one stream.
        source: the payload, of which threads read chunks.
        transfer: number of the transfer in `BeginShard`.
        queue: the chunks that the receiver wants.
        payload_bytes: size of the whole payload.
        pacer: decides when each piece of a chunk is sent; None sends every chunk immediately and in one piece.
        progress: called on the loop at most every `PROGRESS_SECONDS`, with the bytes of the newest accepted piece.
        paused: called on the loop with +1 when a stream begins to wait for its time to send, and with -1 afterwards.
    """
    loop = asyncio.get_running_loop()
    piece_bytes = chunk_bytes(payload_bytes) if pacer is None else pacer.chunk_bytes
    waiting: set[concurrent.futures.Future[None]] = set()

    def admit(size: int) -> None:
        """Block the stream's thread until the pacer permits the next `size` bytes of the chunk."""
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
                raise ConnectionAbortedError("the transfer was cancelled between two pieces of a chunk") from error
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
                    send_all(line, header if begin == start else b"", piece, taken)
            queue.finish()

    lines = streams.lines[: chunk_count(payload_bytes)]  # Use no more streams than there are chunks.
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


def send_all(line: socket.socket, header: bytes, data: memoryview, taken: Callable[[int], None]) -> None:
    """Send a chunk without copying it. Call `taken` with accepted data bytes, or 0 after `PROGRESS_SECONDS`."""
    sent = -len(header)
    while sent < data.nbytes:
        try:
            with data[max(0, sent) :] as rest:
                count = line.sendmsg([header[sent:], rest]) if sent < 0 else line.send(rest)
        except BlockingIOError:  # The peer has read nothing for `PROGRESS_SECONDS`.
            taken(0)
            continue
        before, sent = max(0, sent), sent + count
        if sent > before:
            taken(sent - before)


@dataclass(eq=False, repr=False)
class IncomingShard:
    """Tracks one incoming transfer: which chunks are missing, and which chunks threads are writing.

    A thread claims a chunk, writes it into the slot, and lands it. The creator waits for the chunks and closes the
    object. `on_land` is called in a stream's thread with a complete chunk's index, and whether it is intact.
    """

    target: Payload
    _: KW_ONLY
    transfer: int
    payload_bytes: int
    on_land: Callable[[int, bool], None] = lambda _index, _is_good: None

    def __post_init__(self) -> None:
        self.chunk_digests = b""
        """Announced digests of the chunks, from the first chunk on."""
        self.missing: set[int] = set()
        """Chunks that this node wants and has not verified yet."""
        self.damaged: set[int] = set()
        """Chunks of `missing` that arrived with a wrong digest."""
        self.landed_count = 0
        self.come_bytes = 0
        self._lock = threading.Lock()
        self._claimed: set[int] = set()
        self._is_closed = False
        self._index: range | None = None
        self._tell: Callable[[int], None] = lambda _: None
        self._notified_count = 0
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def name(self, chunk_digests: bytes, missing: Iterable[int]) -> None:
        """Add digests of announced chunks, and the indices of the missing ones. Called on the event loop."""
        with self._lock:
            self.chunk_digests += chunk_digests
            self.missing.update(missing)

    def follow(self, index: range, notify: Callable[[int], None]) -> None:
        """Call `notify` on the loop with the verified prefix in bytes, once it contains `index`, and as it grows.

        Called on the loop after all announced digests match the payload's digest.
        """
        self._index, self._tell = index, notify
        self._look()

    def _look(self) -> None:
        if self._is_closed or self._index is None:
            return
        count, end = self._notified_count, chunk_count(self.payload_bytes)
        with self._lock:
            if any(index in self.missing for index in self._index):
                return
            while count < end and count not in self.missing:
                count += 1
        if count > self._notified_count or not self._notified_count:
            self._notified_count = count
            self._tell(chunk_range(count - 1, self.payload_bytes)[1] if count else 0)

    def again(self) -> Ranges:
        """Return the chunks that arrived with a wrong digest and must be requested again. Called on the event loop."""
        with self._lock:
            damaged = ranges(self.damaged)
            self.damaged.clear()
        return damaged

    def claim(self, index: int, size: int) -> memoryview | None:
        """Reserve a missing chunk's memory for the calling thread; otherwise None. Thread-safe.

        The thread must call `land` afterwards, even after an error. Raises MalformedMessage if the payload has no chunk
        `index` of `size` bytes.
        """
        start, stop = chunk_range(index, self.payload_bytes)
        if start >= stop or size != stop - start:
            raise MalformedMessage(
                f"chunk {index} of {size} bytes does not exist in a payload of {self.payload_bytes} bytes"
            )
        with self._lock:
            if self._is_closed or index not in self.missing or index in self._claimed:
                return None
            memory = self.target.payload(start, stop)
            self._claimed.add(index)
            return memory

    def come(self, size: int) -> None:
        """Count received bytes of incomplete chunks, so that `settled` notices that data arrives. Thread-safe."""
        with self._lock:
            self.come_bytes += size

    def land(self, index: int, data: memoryview, *, is_whole: bool) -> None:
        """Verify a received chunk, and end its reservation by `claim`. Releases `data`. Thread-safe."""
        is_good = False
        try:
            # Called at once, while the bytes are in the processor's cache.
            is_good = is_whole and self._is_intact(index, data) and self._keep(index, data)
        finally:  # `close` waits for the release, so it must happen even after an error.
            self._release(data)
            with self._lock:
                self._claimed.discard(index)
                if is_good:
                    self.missing.discard(index)
                    self.landed_count += 1
                elif is_whole:
                    self.damaged.add(index)
                is_news = len(self.missing) == len(self.damaged) or self._is_closed
            if is_whole:
                self.on_land(index, is_good)
            if is_news:
                self._loop.call_soon_threadsafe(self._event.set)
        if is_good and self._index is not None:
            self._loop.call_soon_threadsafe(self._look)

    def _is_intact(self, index: int, data: memoryview) -> bool:
        return digest(data) == chunk_digest(self.chunk_digests, index)

    def _keep(self, index: int, data: memoryview) -> bool:  # noqa: ARG002
        """Keep a verified chunk, and return whether the target then contains it."""
        return True

    def _release(self, data: memoryview) -> None:
        data.release()

    async def settled(self, silence_seconds: float | None) -> None:
        """Wait until every missing chunk has arrived, damaged or not, and intact chunks were reported.

        Raises PeerLost after `silence_seconds` without a byte; None means no limit.
        """
        # Damaged chunks stay in `missing`, because they must be requested again.
        while len(self.missing) > len(self.damaged):
            before = self.come_bytes
            try:
                async with asyncio.timeout(silence_seconds):
                    await self._event.wait()
            except TimeoutError as error:
                if self.come_bytes == before:
                    raise PeerLost(f"no data received for {silence_seconds:g} s") from error
            self._event.clear()
        self._look()

    def shut(self) -> bool:
        """Accept no further chunks. Return True if no thread is receiving a chunk at present."""
        with self._lock:
            self._is_closed = True
            return not self._claimed

    async def close(self) -> None:
        """Accept no further chunks, and wait for those that arrive.

        The caller must first cut streams that may stay silent.
        """
        while True:
            self._event.clear()
            if self.shut():
                return
            await self._event.wait()


class Scratch:
    """Reused buffers for received chunks that are not written into a slot."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return a buffer of `end - start` bytes, into which a thread receives a chunk. Thread-safe."""
        assert end is not None, "a buffer has an end"
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(end - start)
        if len(buffer) < end - start:
            buffer = bytearray(end - start)
        return memoryview(buffer)[: end - start]

    def release(self, data: memoryview) -> None:
        """Make a buffer that `payload` returned available for the next chunk. Thread-safe."""
        buffer = data.obj
        data.release()
        assert isinstance(buffer, bytearray)
        self._free.append(buffer)


class IncomingParts(IncomingShard):
    """Tracks a transfer whose chunks are verified in a buffer, then combined with a share's or shard's bytes."""

    def __init__(self, keep: Callable[[int, memoryview], bool], *, transfer: int, payload_bytes: int) -> None:
        """`keep` combines a verified chunk with the caller's bytes and returns whether it did; called by threads."""
        self._scratch = Scratch()
        super().__init__(self._scratch, transfer=transfer, payload_bytes=payload_bytes)
        self._combine = keep

    def _keep(self, index: int, data: memoryview) -> bool:
        return self._combine(index, data)

    def _release(self, data: memoryview) -> None:
        self._scratch.release(data)


class IncomingPieces(IncomingParts):
    """Tracks an incoming transfer of chunks without digests. The load of the shard verifies them later."""

    def _is_intact(self, index: int, data: memoryview) -> bool:  # noqa: ARG002
        return True


class Receiver:
    """Receives the chunks of a session's streams, for one transfer at a time."""

    def __init__(self) -> None:
        self.current: IncomingShard | None = None
        """Set on the loop and read by threads; a closed transfer accepts no chunk."""

    def receive(self, line: socket.socket) -> None:
        """Receive chunks from a blocking socket to its end. Raises MalformedMessage, and OSError if it breaks."""
        header = bytearray(CHUNK_HEADER.size)
        while _receive_all(line, memoryview(header)):
            transfer, index, size = CHUNK_HEADER.unpack(header)
            if not 0 < size <= MAX_CHUNK_BYTES:
                raise MalformedMessage(f"a chunk of invalid size: {size} bytes")
            incoming = self.current
            place = incoming.claim(index, size) if incoming is not None and incoming.transfer == transfer else None
            if incoming is None or place is None:
                # The chunk is a duplicate, or its transfer has ended, so discard its bytes.
                _drain(line, size)
                continue
            is_whole = False
            try:
                is_whole = _receive_all(line, place, incoming.come)
            finally:
                incoming.land(index, place, is_whole=is_whole)


def _receive_all(line: socket.socket, view: memoryview, come: Callable[[int], None] = lambda _: None) -> bool:
    """Fill `view` from a blocking socket; return False if the other side closed it before the first byte."""
    filled = 0
    while filled < view.nbytes:
        try:
            with view[filled:] as rest:
                count = line.recv_into(rest, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # The read timed out without data. Read again.
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
