"""When a chunk may leave this node: at once, evenly, or in the network's idle spans.

All senders of a node share one pacer, for they share its link. Invariant: pacing delays, it never refuses: a training
that stands still, or whose boundaries are not heard of, leaves the network to the snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from everstep.protocol.rank_messages import IdleSpan
from worker.core.chunks import MAX_CHUNK_BYTES, MU_RATIO, Link, chunk_bytes_for, opening, usable
from worker.core.link_use import LinkUse
from worker.tasks import Signal

PATIENCE_ITERATIONS = 2.0
"""A chunk waits for an opening for so long at most; and for none where no boundary has come for so long: training does something else then."""

SHORT_SECONDS = 0.002
"""A chunk that may go so soon waits in its stream's thread; a way over the loop takes as long on a busy node."""
KEPT_TRANSFERS = 32
ENOUGH_TRANSFERS = 8
"""Times that something was sent, by one transfer or by several at once."""
TELLING_BYTES = 64 * 1024
"""Less says something of latency, not of the link."""


class Pacer(Protocol):
    """What a sender asks before each chunk."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk should have: asked for before each, it may change."""

    async def admit(self, bytes_count: int) -> None:
        """Wait until a chunk may go; chunks are admitted in the order in which they asked.

        Args:
            bytes_count: of the chunk.
        """

    def book(self, bytes_count: int) -> float | None:
        """Admit a chunk without the loop, from any thread, where that needs no more than a short wait.

        Most chunks follow one that just went.

        Args:
            bytes_count: of the chunk.

        Returns:
            Seconds until it may go, at most `SHORT_SECONDS`; None: it is not admitted, and has to wait its turn.
        """


class Transfer(Protocol):
    """What is counted of a transfer."""

    @property
    def taken_bytes(self) -> int:
        """What the kernel has taken of it so far."""

    @property
    def taken_at(self) -> float:
        """When it took the last."""


class SharedLink:
    """A link, as the transfers see it that go over it. Any thread.

    Args:
        clock: seconds, monotonic; the transfers' own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._use = LinkUse()
        self._lock = threading.Lock()

    @property
    def use(self) -> LinkUse:
        """What has been counted until now."""
        with self._lock:
            self._use = self._use.until(self._clock())
            return self._use

    def count(self) -> None:
        """Say that a sender is at it, whatever comes of that: a standstill is told by nobody saying so."""
        with self._lock:
            self._use = self._use.until(self._clock())

    @property
    def sharer_count(self) -> int:
        """Transfers that have something to send now, at least 1."""
        with self._lock:
            return max(1, self._use.sender_count)

    def join(self) -> LinkUse:
        """Begin to have something to send; return what had been counted before."""
        with self._lock:
            self._use = self._use.joined(self._clock())
            return self._use

    def leave(self) -> LinkUse:
        """End what `join` began; return what has been counted since as well."""
        with self._lock:
            self._use = self._use.left(self._clock())
            return self._use

    def drain(self, since: float) -> None:
        """A holder has the last bytes that the kernel took at `since` (see `LinkUse.drained`)."""
        with self._lock:
            self._use = self._use.drained(since, self._clock())


class Unpaced:
    """Every chunk goes at once."""

    chunk_bytes = MAX_CHUNK_BYTES

    def book(self, bytes_count: int) -> float | None:  # noqa: ARG002 — the protocol's
        """Return 0 (see `Pacer`)."""
        return 0.0

    async def admit(self, bytes_count: int) -> None:
        """Return at once (see `Pacer`)."""


class UniformPacer:
    """A constant rate, whatever training does. Nothing is saved up while nobody sends.

    Args:
        bytes_per_second: of the node: the bytes of an iteration's snapshots, all copies, by the time that they shall
            take.
        chunk_bytes: of a chunk.
        clock: the loop's, for threads.
    """

    def __init__(self, bytes_per_second: float, chunk_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.chunk_bytes = chunk_bytes
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()

    async def admit(self, bytes_count: int) -> None:
        """Wait until the chunks before have had their time (see `Pacer`)."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            begin = max(now(), self._free_at)
            await asyncio.sleep(begin - now())
            with self._lock:
                self._free_at = begin + bytes_count / self._rate

    def book(self, bytes_count: int) -> float | None:
        """Admit it where the chunks before leave room soon (see `Pacer`)."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            if begin - now > SHORT_SECONDS or self._turn.locked():
                return None
            self._free_at = begin + bytes_count / self._rate
            return begin - now


class SpanPacer:
    """Chunks go where training leaves the network idle, as profiled and counted from the last boundary.

    Args:
        spans: of an iteration, in order of time.
        link: this node's.
        iteration_seconds: mean.
        clock: the loop's, for threads.
    """

    def __init__(
        self,
        spans: Sequence[IdleSpan],
        link: Link,
        *,
        iteration_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = [usable(span) for span in spans]
        self.chunk_bytes = chunk_bytes_for(self._windows, link)
        # A loop that wakes up late catches up, by as much as a usual span has room for beside its window.
        self._lateness_seconds = (
            (1 - MU_RATIO) / 2 * statistics.median(span.seconds for span in spans) if spans else 0.0
        )
        self._link = link
        self._iteration_seconds = iteration_seconds
        self._boundary_at: float | None = None
        self._clock = clock
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        """Over `_free_at`: chunks are booked from threads, too."""
        self._changed = Signal()

    def boundary(self, at_seconds: float) -> None:
        """Begin an iteration.

        Args:
            at_seconds: when the rank passed the boundary, on the monotonic clock that a node's processes share with its
                agent's event loop. An earlier one than known is late news and changes nothing.
        """
        if self._boundary_at is None or at_seconds > self._boundary_at:
            self._boundary_at = at_seconds
            self._changed.notify()

    def pause(self) -> None:
        """Training stands, or does something else than iterate: nothing is waited for until the next boundary."""
        self._boundary_at = None
        self._changed.notify()

    async def admit(self, bytes_count: int) -> None:
        """Wait for the next opening that the chunk fits into (see `Pacer`)."""
        now, cost = asyncio.get_running_loop().time, self._link.seconds(bytes_count)
        async with self._turn:
            asked_at = now()
            while (
                wait := self._wait(cost, asked_at, now(), patience_seconds=0.0)
            ) > 0:  # a boundary in the meantime moves every opening
                await self._changed.wait(self._changed.version, wait)

    def book(self, bytes_count: int) -> float | None:
        """Admit it where the window that is open has room for it (see `Pacer`)."""
        if self._turn.locked():
            return None
        now = self._clock()
        wait = self._wait(self._link.seconds(bytes_count), now, now, patience_seconds=SHORT_SECONDS)
        return wait if wait <= SHORT_SECONDS else None

    def _wait(self, cost: float, asked_at: float, now: float, *, patience_seconds: float) -> float:
        """Return how long the chunk has to wait for its opening, which is taken when that is no longer than `patience_seconds`."""
        with self._lock:
            at = self._opening(cost, asked_at)
            wait = max(0.0, at - now)
            if wait <= patience_seconds:
                self._free_at = at + cost
            return wait

    def _opening(self, cost: float, asked_at: float) -> float:
        """Return when the chunk may go, or when to give up waiting for an opening."""
        earliest = max(self._free_at, asked_at - self._lateness_seconds)
        begun = self._boundary_at
        if begun is None:
            return earliest
        gives_up_at = max(min(begun, asked_at) + PATIENCE_ITERATIONS * self._iteration_seconds, earliest)
        at = opening(self._windows, earliest - begun, cost)
        return gives_up_at if at is None else min(gives_up_at, begun + at)


class NodePacer:
    """The pacer that a node's senders hold; what it is changes as the job is learnt. One owner: the node's `Member`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.current: Pacer = Unpaced()
        self.link = SharedLink(clock)
        """Of all transfers that are counted here."""
        self._rates: deque[float] = deque(maxlen=KEPT_TRANSFERS)
        """Bytes per second of the node, one each time that something was sent."""
        self._sizes: deque[int] = deque(maxlen=KEPT_TRANSFERS)
        """Bytes of the newest transfers."""
        self._sent_bytes = 0
        """By transfers that are over."""
        self._under_way: set[Transfer] = set()
        self._measured: set[Transfer] = set()
        """Those under way whose bytes and time are known to belong together."""
        self._begun = (0, 0.0)
        """Bytes sent and seconds of the link when the first of those under way began."""
        self._is_telling = True
        """Whether all that have ended since then were measured."""

    @property
    def sent_bytes(self) -> int:
        """What the node's senders have sent so far, transfers under way included."""
        return self._sent_bytes + sum(transfer.taken_bytes for transfer in self._under_way)

    @contextlib.contextmanager
    def counted(self, transfer: Transfer) -> Iterator[None]:
        """Count what a transfer sends for as long as the context lasts, and what it has sent ever after.

        The link is measured from when a transfer begins while none is under way until none is again: only then is it
        known what was sent when.
        """
        if not self._under_way:
            self._begun, self._is_telling = (self._sent_bytes, self.link.use.busy_seconds), True
        self._under_way.add(transfer)
        try:
            yield
        finally:
            self._under_way.discard(transfer)
            self._sent_bytes += transfer.taken_bytes
            self._is_telling &= transfer in self._measured or not transfer.taken_bytes
            self._measured.discard(transfer)
            if not self._under_way and self._is_telling:
                self._learn(self._sent_bytes - self._begun[0], self.link.use.busy_seconds - self._begun[1])

    def _learn(self, bytes_count: int, seconds: float) -> None:
        if bytes_count >= TELLING_BYTES and seconds > 0:
            self._rates.append(bytes_count / seconds)

    def hold(self, pacer: Pacer) -> None:
        """Go on with another pacer: what waits for the one before waits no longer."""
        if pacer is not self.current:
            self.pause()
            self.current = pacer

    def unpace(self) -> None:
        """Let every chunk go at once until the link is known anew: nothing has been measured for as long as chunks were paced."""
        if not isinstance(self.current, Unpaced):
            self.hold(Unpaced())
            self._rates.clear()
            self._sizes.clear()

    def measured(self, transfer: Transfer) -> None:
        """Take note that the holder has now verified all of a transfer that is counted and that went at once."""
        self._measured.add(transfer)
        if transfer.taken_bytes:
            self.link.drain(transfer.taken_at)
        if transfer.taken_bytes >= TELLING_BYTES:
            self._sizes.append(transfer.taken_bytes)

    @property
    def bytes_per_second(self) -> float | None:
        """What the link carries: the fastest of the newest times that something was sent, for the others met with training; None before there
        were enough.
        """
        return max(self._rates) if len(self._rates) >= ENOUGH_TRANSFERS else None

    @property
    def transfer_bytes(self) -> float:
        """What is sent of one shard to one holder, usually."""
        return statistics.median(self._sizes) if self._sizes else 0.0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk now (see `Pacer`)."""
        return self.current.chunk_bytes

    async def admit(self, bytes_count: int) -> None:
        """Wait as the present pacer says (see `Pacer`)."""
        await self.current.admit(bytes_count)

    def book(self, bytes_count: int) -> float | None:
        """Admit it if the present pacer does (see `Pacer`)."""
        return self.current.book(bytes_count)

    def boundary(self, at_seconds: float) -> None:
        """Tell the present pacer of a boundary, where it counts from one (see `SpanPacer.boundary`)."""
        if isinstance(self.current, SpanPacer):
            self.current.boundary(at_seconds)

    def pause(self) -> None:
        """Tell the present pacer that no boundary is to be expected soon (see `SpanPacer.pause`)."""
        if isinstance(self.current, SpanPacer):
            self.current.pause()
