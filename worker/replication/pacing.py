"""Decides when a piece of a shard may leave this node: immediately, or in the network's idle spans.

All senders of a node share one pacer. Invariant: pacing delays pieces, but never drops them. If training stops or
reports no finished steps, pieces are sent without delay.
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
"""Maximum wait of a piece, in iterations. If no step ends for this long, pieces do not wait at all."""

SHORT_SECONDS = 0.002
"""Longest pause that a stream's thread sleeps by itself, because a busy event loop could end a short pause late."""
KEPT_TRANSFERS = 32
ENOUGH_TRANSFERS = 8
"""Number of measurements that `NodePacer` requires before it reports the link's rate."""
MEASURED_PERIOD_BYTES = 64 * 1024
"""Minimum bytes of a busy period that measures the rate. With fewer, the rate would depend on the latency."""


class Pacer(Protocol):
    """Decides when a piece of a shard's chunk may be sent. A sender asks its pacer before it sends each piece."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes per piece. The sender reads this value before each transfer, because the value may change."""

    async def admit(self, bytes_count: int) -> None:
        """Wait until a piece may be sent. The pacer admits pieces in the order of the calls."""

    def book(self, bytes_count: int) -> float | None:
        """Reserve the sending time of a piece, in any thread, and return the seconds until then.

        None if they exceed `SHORT_SECONDS`: the caller then calls `admit`.
        """


class Transfer(Protocol):
    """The counters of one running transfer that `NodePacer` reads."""

    @property
    def taken_bytes(self) -> int:
        """Bytes of the transfer that the kernel has accepted."""

    @property
    def taken_at(self) -> float:
        """Monotonic time at which the kernel last accepted bytes."""


class SharedLink:
    """Measures for how long several transfers, with the same clock, use one network link. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._use = LinkUse()
        self._lock = threading.Lock()

    @property
    def use(self) -> LinkUse:
        """Use of the link until now."""
        with self._lock:
            self._use = self._use.until(self._clock())
            return self._use

    def count(self) -> None:
        """Add the time since the last call. Every active sender calls this regularly."""
        with self._lock:
            self._use = self._use.until(self._clock())

    @property
    def sharer_count(self) -> int:
        """Number of transfers that have data to send now, but at least 1."""
        with self._lock:
            return max(1, self._use.sender_count)

    def join(self) -> LinkUse:
        """Record that one more transfer has data to send, and return the use of the link until now."""
        with self._lock:
            self._use = self._use.joined(self._clock())
            return self._use

    def leave(self) -> LinkUse:
        """Record that a transfer has no more data to send, and return the use of the link until now."""
        with self._lock:
            self._use = self._use.left(self._clock())
            return self._use

    def drain(self, since: float) -> None:
        """Record that a holder has received the last bytes of a transfer, which the kernel accepted at time `since`."""
        with self._lock:
            self._use = self._use.drained(since, self._clock())


class Unpaced:
    """Pacer that admits every piece immediately."""

    chunk_bytes = MAX_CHUNK_BYTES

    def book(self, bytes_count: int) -> float | None:  # noqa: ARG002 — the protocol's
        return 0.0

    async def admit(self, bytes_count: int) -> None: ...


class SpanPacer:
    """Pacer that sends pieces in the profiled idle spans of an iteration, relative to the end of the last step.

    `spans` are in order of time. `clock` is the event loop's clock, for use in threads.
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
        # A sender waits for the middle part of an idle span (`usable`), but the kernel may wake it late. It may then
        # still send its piece until the end of a typical span.
        self._lateness_seconds = (
            (1 - MU_RATIO) / 2 * statistics.median(span.seconds for span in spans) if spans else 0.0
        )
        self.link = link
        self._iteration_seconds = iteration_seconds
        self._boundary_at: float | None = None
        self._clock = clock
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._changed = Signal()

    def boundary(self, at_seconds: float) -> None:
        """Record that a step ended at `at_seconds` on the node's monotonic clock, unless a later end was reported."""
        if self._boundary_at is None or at_seconds > self._boundary_at:
            self._boundary_at = at_seconds
            self._changed.notify()

    def pause(self) -> None:
        """Suspend the pacing: until the next boundary, every piece may be sent immediately."""
        self._boundary_at = None
        self._changed.notify()

    async def admit(self, bytes_count: int) -> None:
        now, cost = asyncio.get_running_loop().time, self.link.seconds(bytes_count)
        async with self._turn:
            asked_at = now()
            # A new boundary during the wait changes the times at which pieces may be sent.
            while (wait := self._wait(cost, asked_at, now(), patience_seconds=0.0)) > 0:
                await self._changed.wait(self._changed.version, wait)

    def book(self, bytes_count: int) -> float | None:
        if self._turn.locked():
            return None
        now = self._clock()
        wait = self._wait(self.link.seconds(bytes_count), now, now, patience_seconds=SHORT_SECONDS)
        return wait if wait <= SHORT_SECONDS else None

    def _wait(self, cost: float, asked_at: float, now: float, *, patience_seconds: float) -> float:
        """Return the seconds until the piece may be sent. A wait of at most `patience_seconds` is reserved for it."""
        with self._lock:
            at = self._opening(cost, asked_at)
            wait = max(0.0, at - now)
            if wait <= patience_seconds:
                self._free_at = at + cost
            return wait

    def _opening(self, cost: float, asked_at: float) -> float:
        earliest = max(self._free_at, asked_at - self._lateness_seconds)
        begun = self._boundary_at
        if begun is None:
            return earliest
        gives_up_at = max(min(begun, asked_at) + PATIENCE_ITERATIONS * self._iteration_seconds, earliest)
        at = opening(self._windows, earliest - begun, cost)
        return gives_up_at if at is None else min(gives_up_at, begun + at)


class NodePacer:
    """Decides for all senders of a node when pieces may be sent, by `current`: `Unpaced`, later a `SpanPacer`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.current: Pacer = Unpaced()
        self.link = SharedLink(clock)
        self._rates: deque[float] = deque(maxlen=KEPT_TRANSFERS)
        """Rates of the node's link in bytes per second, one per busy period."""
        self._sizes: deque[int] = deque(maxlen=KEPT_TRANSFERS)
        self._sent_bytes = 0
        self._under_way: set[Transfer] = set()
        self._measured: set[Transfer] = set()
        """Running transfers that were sent without pacing and that the holder has verified completely."""
        self._begun = (0, 0.0)
        self._is_telling = True
        """True while each transfer of this busy period that has ended was sent unpaced and verified."""

    @property
    def sent_bytes(self) -> int:
        """Total bytes that the node's senders have sent, including running transfers."""
        return self._sent_bytes + sum(transfer.taken_bytes for transfer in self._under_way)

    @contextlib.contextmanager
    def counted(self, transfer: Transfer) -> Iterator[None]:
        """Count the bytes of a transfer while the context is open."""
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
            # At the end of a busy period, its bytes and the link time measure the link's rate.
            if not self._under_way and self._is_telling:
                self._learn(self._sent_bytes - self._begun[0], self.link.use.busy_seconds - self._begun[1])

    def _learn(self, bytes_count: int, seconds: float) -> None:
        if bytes_count >= MEASURED_PERIOD_BYTES and seconds > 0:
            self._rates.append(bytes_count / seconds)

    def hold(self, pacer: Pacer) -> None:
        """Let `pacer` decide from now on. Pieces that wait for the previous pacer are sent now."""
        if pacer is not self.current:
            self.pause()
            self.current = pacer

    def unpace(self) -> None:
        """Send every piece immediately, so that the link's rate can be measured again."""
        if not isinstance(self.current, Unpaced):
            self.hold(Unpaced())
            self._rates.clear()
            self._sizes.clear()

    def measured(self, transfer: Transfer) -> None:
        """Record that the holder has verified all bytes of a transfer without pacing. Its rate measures the link."""
        self._measured.add(transfer)
        if transfer.taken_bytes:
            self.link.drain(transfer.taken_at)
        if transfer.taken_bytes >= MEASURED_PERIOD_BYTES:
            self._sizes.append(transfer.taken_bytes)

    @property
    def bytes_per_second(self) -> float | None:
        """Rate of the link in bytes per second; None before there are `ENOUGH_TRANSFERS` measurements."""
        # The fastest measurement counts, because traffic of training slows some transfers.
        return max(self._rates) if len(self._rates) >= ENOUGH_TRANSFERS else None

    @property
    def transfer_bytes(self) -> float:
        """Median size in bytes of the recent transfers, each of one shard to one holder."""
        return statistics.median(self._sizes) if self._sizes else 0.0

    @property
    def chunk_bytes(self) -> int:
        return self.current.chunk_bytes

    async def admit(self, bytes_count: int) -> None:
        await self.current.admit(bytes_count)

    def book(self, bytes_count: int) -> float | None:
        return self.current.book(bytes_count)

    def boundary(self, at_seconds: float) -> None:
        """Report the end of a training step to the current pacer."""
        if isinstance(self.current, SpanPacer):
            self.current.boundary(at_seconds)

    def pause(self) -> None:
        """Send pieces without delay until the next step ends."""
        if isinstance(self.current, SpanPacer):
            self.current.pause()
