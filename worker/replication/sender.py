"""Sends one owned shard to one of its holders, for the lifetime of the generation.

The pure `Shard` (`worker.core.rounds`) selects the steps. Invariant: the sender measures the holder's silence only
while the holder lacks data, so an idle connection never counts as silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Step
from everstep.protocol.peer_messages import (
    CancelShard,
    HolderInventory,
    PreparingShard,
    PrintedLines,
    ReserveShard,
    ShardRefused,
    ShardReserved,
    ShardSealed,
    ShardWanted,
)
from worker.core.broken_line import BrokenLine
from worker.core.line_tails import Tail
from worker.core.rounds import NONE
from worker.core.silence import HolderSilence
from worker.core.slow_link import SlowLink
from worker.core.transfers import StreamCount
from worker.errors import PeerError
from worker.replication.pacing import NodePacer, Unpaced
from worker.replication.streams import OWN_STREAMS, ChunkQueue, Streams
from worker.replication.transfers import announcement, send_shard
from worker.replication.transport import Dialler, Session
from worker.shards.owned_shard import OwnedShard
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.store import Slot, SlotStore
from worker.tasks import finish, first_of

log = logging.getLogger(__name__)
HOLDER_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses before the first, second and further attempts to connect after a failure. The last value repeats."""
REFUSED_SECONDS = 0.2
"""Seconds to wait after a holder rejected a shard, for example because it had no free slot."""
FLOW_BYTES_PER_SECOND = 625e6
"""Assumed rate of a link until a transfer is faster: AWS's limit for one flow, 5 Gbit/s."""
SLOW_RATIO = 0.1
"""Fraction of the best measured rate below which a link counts as slow."""
SUSPECT_RATIO = 1 / 6
"""Fraction of the holder deadline for which a transfer must be slow, while it sends, before its rate is limited."""
MEASURED_TRANSFER_BYTES = 64 * 1024 * 1024
"""Minimum size of a transfer whose rate is measured. The rate of a smaller transfer depends on latency."""
PREPARING_SECONDS = 0.1
"""Seconds between two progress messages. The interval must be far below the holder deadline."""
LOOKS_PER_DEADLINE = 10


Answer = ShardWanted | ShardSealed | ShardRefused
Printed = Callable[[int], Awaitable[Tail]]
"""Returns the log lines of this node's ranks, from the given line number on."""


@dataclass(eq=False, repr=False)
class ReplicaSender:
    """Sends one shard to one holder (a copy, or a part of it for a share). The owner runs `run` as a task.

    `printed` returns log lines, which the holder receives before the end of a shard. The last of `retry_seconds`
    repeats. The rates of transfers below `measured_bytes` are not measured.
    """

    shard: OwnedShard
    peer: NodeId
    dialler: Dialler
    store: SlotStore
    pacer: NodePacer
    _: KW_ONLY
    holder_deadline_seconds: float
    printed: Printed | None = None
    retry_seconds: Sequence[float] = HOLDER_PAUSES_SECONDS
    measured_bytes: int = MEASURED_TRANSFER_BYTES

    def __post_init__(self) -> None:
        self._held_lines = 0
        """Number of the next log line to send to the holder. Each session begins with line 0."""
        self.stream_count = StreamCount(limit=OWN_STREAMS)
        self.silence = HolderSilence(self.holder_deadline_seconds / LOOKS_PER_DEADLINE)
        self._paused_count = 0
        """Streams that are being opened or wait for the pacer. Meanwhile, the holder does not count as silent."""
        self._is_verifying = False
        self._transfer = 0
        self.queue: ChunkQueue | None = None
        self._best_rate = FLOW_BYTES_PER_SECOND
        self.link = SlowLink()
        self.line = BrokenLine()
        self._filled: tuple[int, float] | None = None
        """(bytes sent, link time used) at the transfer's first check, when the kernel's send buffers are full."""
        self.streams = Streams()
        """Streams of the current session; between sessions, the closed streams of the last session."""
        self._most_streams = self.stream_count.limit
        """Maximum number of streams for this session, lowered if a further stream cannot be opened."""

    async def run(self) -> None:
        """Send the shard's steps to the holder until cancelled, over a new connection after any error."""
        await first_of(self._supply(), self._watch())

    async def _supply(self) -> None:
        failures = 0
        while True:
            streams = self.streams = Streams()
            self._most_streams = self.stream_count.limit
            try:
                session = await self.dialler.session()
                failures = 0
                try:
                    await self._serve(session)
                except (PeerError, ProtocolError) as error:
                    self._cut_short(str(error))
                    raise
                finally:
                    session.close()
                    await finish(streams.close())
            except (PeerError, ProtocolError) as error:
                self._failed(str(error))
                log.debug("replica session of rank %d to %s: %s", self.shard.rank, self.peer, error)
            except Exception as error:  # Commits would stop if an unexpected exception ended the sender.
                self._failed(f"sending to this holder raised {error!r}")
                failures = len(self.retry_seconds)
                log.exception("replica session of rank %d to %s", self.shard.rank, self.peer)
            await asyncio.sleep(self.retry_seconds[min(failures, len(self.retry_seconds) - 1)])
            failures += 1

    async def _serve(self, session: Session) -> None:
        self._held_lines = 0
        first = await session.receive()
        if not isinstance(first, HolderInventory) or first.owner_rank != self.shard.rank:
            raise MalformedMessage("the holder's first message is not its inventory")
        self._progress()
        self.shard.inventory(self.peer, first.sealed)
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        await first_of(self._listen(session, answers), self._feed(session, answers))

    async def _listen(self, session: Session, answers: asyncio.Queue[Answer]) -> None:
        while True:
            message = await session.receive()
            match message:
                case ShardWanted() | ShardSealed() | ShardRefused():
                    answers.put_nowait(message)
                case ShardReserved():
                    self.shard.ready(self.peer, message.capacity_bytes, message.layout_hash)
                case PreparingShard():
                    self._progress()
                case _:
                    raise MalformedMessage(f"the holder sent an unexpected {type(message).__name__} message")

    async def _feed(self, session: Session, answers: asyncio.Queue[Answer]) -> None:
        shard = self.shard
        reserved: tuple[int, bytes] | None = None
        while True:
            seen = shard.changed.version
            if shard.reserved is not None and shard.reserved != reserved:
                reserved = shard.reserved
                await session.send(ReserveShard(capacity_bytes=reserved[0], layout_hash=reserved[1]))
            await self._fit(session)
            # No await may separate the choice of the slot from its use, because the slot could be granted for another
            # step.
            step = shard.core.wanted(self.peer)
            slot = shard.source(step) if step != NONE else None
            if slot is None:
                await shard.changed.wait(seen)
                continue
            self._transfer += 1
            outcome = await self.store.reading(slot, self._send(session, answers, step, slot, self._transfer))
            if not outcome:
                await session.send(CancelShard(transfer=self._transfer))
            elif isinstance(outcome, ShardSealed):
                self.silence = self.silence.succeeded()
                self._tell_of(self.line.arrived(step))
                shard.acknowledge(self.peer, shard.content(step))
            elif (
                isinstance(outcome, ShardRefused)
                and outcome.is_damaged
                and step != shard.core.foundation
                and await self._is_damaged_here(slot)
            ):
                log.error(
                    "rank %d: step %d is damaged in this node's own slot too; the step is abandoned",
                    shard.rank,
                    step,
                )
                shard.give_up_damaged(step)
            elif isinstance(outcome, ShardRefused):
                self._failed(f"it refuses step {step}: {outcome.reason}")
                log.info("%s rejects step %d of rank %d: %s", self.peer, step, shard.rank, outcome.reason)
                await asyncio.sleep(REFUSED_SECONDS)

    async def _send(
        self, session: Session, answers: asyncio.Queue[Answer], step: Step, slot: Slot, transfer: int
    ) -> ShardSealed | ShardRefused | bool:
        """Send one slot. Return False if it was granted for another step, or the capture of its step was abandoned."""
        self._is_verifying = True
        try:
            digests = await self.store.digests(slot)
        finally:
            self._is_verifying = False
        if digests is None:
            return False

        async def answer() -> Answer:
            while (found := await answers.get()).transfer != transfer:  # Skip answers to cancelled transfers.
                continue
            return found

        begin = announcement(digests.header, transfer=transfer, committed=self.shard.core.committed)
        pacer = None if isinstance(self.pacer.current, Unpaced) else self.pacer
        self._held_to(self.link.next_transfer())
        self._filled = None
        queue = self.queue = ChunkQueue(asyncio.get_running_loop().time, self.pacer.link)
        outcome: ShardSealed | ShardRefused | bool = False
        held_lines = self._held_lines

        async def before_end() -> list[PrintedLines]:
            # The slot is sealed, so the rank has printed all lines of its step, and `printed` returns them.
            nonlocal held_lines
            lines = await self.printed(self._held_lines) if self.printed is not None else Tail()
            held_lines = max(self._held_lines, lines.end)
            return [PrintedLines(first=part.first, lines=b"".join(part.rows)) for part in lines.batches()]

        async def send() -> None:
            nonlocal outcome
            outcome = await send_shard(
                session,
                self.streams,
                answer,
                slot.file,
                digests,
                begin,
                queue,
                pacer=pacer,
                progress=self._progress,
                paused=self._paused,
                before_end=before_end,
            )

        with self.pacer.counted(queue):
            try:
                if self.shard.core.has_parity:
                    await first_of(send(), self._unwanted(step), self._say_sending(session, queue))
                elif digests.is_decided:
                    await send()
                else:
                    await first_of(send(), self._dropped(step, digests))
                # A pacer delays chunks, so only a transfer without a pacer measures the link's rate.
                if pacer is None and isinstance(outcome, ShardSealed):
                    self._measured(queue)
            finally:
                self.queue = None
                queue.cancel()
        if isinstance(outcome, ShardSealed):
            self._held_lines = held_lines
        if isinstance(outcome, ShardSealed) and not self.is_slow(queue):
            self.shard.record_slow_link(self.peer, "")
            if self.link.carries and not self._crawls(queue, SUSPECT_RATIO * self.holder_deadline_seconds):
                self._held_to(SlowLink())
                # Close the streams, because the kernel continues to pace a connection that once had a limit.
                self.streams.shrink(0)
        return outcome

    async def _is_damaged_here(self, slot: Slot) -> bool:
        self._is_verifying = True
        try:
            return await self.store.verify(slot) is False
        finally:
            self._is_verifying = False

    async def _dropped(self, step: Step, digests: ChunkDigests) -> None:
        while self.shard.core.capturing == step or digests.is_decided:
            await self.shard.changed.wait(self.shard.changed.version)

    async def _unwanted(self, step: Step) -> None:
        while self.shard.core.wanted(self.peer) == step:
            await self.shard.changed.wait(self.shard.changed.version)

    async def _say_sending(self, session: Session, queue: ChunkQueue) -> None:
        """Send progress messages to the holder of a share while this node sends its contribution or delays it."""
        taken_bytes = 0
        while True:
            # The holder notices only whole chunks, and a chunk on a slow link can take longer than the
            # holder deadline.
            await asyncio.sleep(PREPARING_SECONDS)
            if self._paused_count or queue.taken_bytes > taken_bytes:
                taken_bytes = queue.taken_bytes
                await session.send(PreparingShard())

    def is_slow(self, queue: ChunkQueue) -> bool:
        """Return whether the transfer has been slow for longer than `holder_deadline_seconds`."""
        return self._crawls(queue, self.holder_deadline_seconds)

    def _crawls(self, queue: ChunkQueue, seconds: float) -> bool:
        """Return whether the transfer has sent for more than `seconds`, at less than `SLOW_RATIO` of the best rate."""
        return queue.busy_seconds > seconds and queue.taken_bytes / queue.part_seconds < SLOW_RATIO * self._best_rate

    def _held_to(self, link: SlowLink) -> None:
        """Store a new state of the link. All transfers on this node's link share its limit equally."""
        self.link = link
        self.streams.limit(None if link.limit is None else link.limit / self.pacer.link.sharer_count)

    async def _fit(self, session: Session) -> None:
        """Open or close streams, until their number is the best one by measurement, or no further one can be opened."""
        streams = self.streams
        streams.drop_worn()
        while (count := len(streams.lines)) < min(self.stream_count.count, self._most_streams):
            # While the holder accepts no first stream, it counts as silent. While this node opens a further stream
            # (`beside`), this node itself delays the data, so the holder does not count as silent.
            beside = int(count > 0)
            self._paused(beside)
            try:
                streams.add(await self.dialler.stream(session, count))
            except PeerError as error:
                if not count:
                    raise
                several = "s" if count > 1 else ""
                log.warning(
                    "rank %d sends to %s over only %d stream%s: %s",
                    self.shard.rank,
                    self.peer,
                    count,
                    several,
                    error,
                )
                self._most_streams = count
            finally:
                self._paused(-beside)
        streams.shrink(self.stream_count.count)

    def _measured(self, queue: ChunkQueue) -> None:
        size, seconds = queue.taken_bytes, queue.busy_seconds
        self.pacer.measured(queue)
        if size >= self.measured_bytes and seconds > 0:
            self._best_rate = max(self._best_rate, size / seconds)
            # Do not record the rate for `stream_count` streams if some of these streams could not be opened.
            if self.stream_count.count <= self._most_streams:
                self.stream_count = self.stream_count.measured(size / seconds)

    def _progress(self, _taken_bytes: int = 0) -> None:
        self.silence = self.silence.progressed()
        if not self.shard.awaits(self.peer) and self.silence.may_return:
            self.silence = self.silence.answered()
            self.shard.answer(self.peer)

    def _failed(self, reason: str) -> None:
        self.shard.holder_troubles[self.peer] = reason
        self.silence = self.silence.failed(asyncio.get_running_loop().time())

    def _cut_short(self, words: str) -> None:
        """Record that the connection broke before a step was sent completely; `words` is the error."""
        if (step := self.shard.core.wanted(self.peer)) != NONE:
            self._tell_of(self.line.cut_short(step, words))

    def _tell_of(self, line: BrokenLine) -> None:
        self.line = line
        self.shard.record_broken_connection(self.peer, line.trouble)

    def _paused(self, count: int) -> None:
        self._paused_count += count

    def check_link(self, queue: ChunkQueue) -> None:
        """Measure the rate of the running transfer, and limit it on a slow link."""
        sent, seconds = queue.taken_bytes, queue.part_seconds
        link, filled = self.link, self._filled
        if filled is None and queue.busy_seconds >= self.silence.period_seconds:
            self._filled = sent, seconds
        if (
            filled is not None
            and seconds > filled[1]
            and self._crawls(queue, SUSPECT_RATIO * self.holder_deadline_seconds)
        ):
            link = link.found((sent - filled[0]) / (seconds - filled[1]), sent, seconds)
        if link.carries and self.is_slow(queue):
            self.shard.record_slow_link(
                self.peer,
                f"its link carries {link.carries / 1e6:.3g} MB/s; a step has taken {queue.busy_seconds:.0f} s "
                "of sending so far",
            )
        self._held_to(link.measured(sent, seconds, sound=SLOW_RATIO * self._best_rate))

    async def _watch(self) -> None:
        """Call `check_holder` at regular intervals, until cancelled."""
        while True:
            await asyncio.sleep(self.silence.period_seconds)
            self.check_holder(asyncio.get_running_loop().time())

    def check_holder(self, now: float) -> None:
        """Drop the holder if it lacked data and made no progress for the holder deadline."""
        self.silence = self.silence.checked(
            now,
            is_owed=self.shard.is_owed(self.peer),
            is_asked=not self._paused_count,
            is_occupied=self._is_verifying,
        )
        if self.queue is not None:
            self.check_link(self.queue)
        seconds = self.silence.seconds
        if seconds > self.holder_deadline_seconds and self.shard.awaits(self.peer):
            trouble = self.shard.holder_troubles.setdefault(self.peer, "it does not answer")
            log.warning(
                "rank %d: holder %s leaves the view after %.1f s: %s", self.shard.rank, self.peer, seconds, trouble
            )
            self.silence = self.silence.given_up()
            self.shard.drop(self.peer)
