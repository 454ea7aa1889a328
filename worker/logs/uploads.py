"""Uploads ranks' log lines to the object store, and sends new lines to users who follow the log.

    <log key>gen=<g>/node=<n>/…    lines with timestamps, every second; read by GetLogEvents and FollowLogs

Invariant: a failed upload never stops a job. Lines that are not uploaded stay in the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from everstep.protocol.agent_messages import LogLines
from everstep.protocol.log_chunks import FLUSH_SECONDS, LogLine, decode_chunk, encode_lines, held_characters
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode
from worker.core.line_tails import TAIL_BYTES, Tail
from worker.errors import StorageError
from worker.logs.journal import LIMITS, JournalLimits, LogJournal
from worker.logs.outputs import MAX_ATTEMPTS, OUTPUT_RETRY_SECONDS, FileStore
from worker.ranks.files import RankFiles
from worker.tasks import end, finish

log = logging.getLogger(__name__)
T = TypeVar("T")

READ_SECONDS = 0.1
LIVE_LINES = 500
"""Limit of log lines in one message to the control plane."""
LIVE_CHARACTERS = 1024 * 1024
"""Number of characters at which a message with log lines to the control plane is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipperOptions:
    """Sizes, intervals and limits of a `LogShipper`."""

    journal: JournalLimits = LIMITS
    tail_bytes: int = TAIL_BYTES
    """Maximum bytes of the newest lines that other nodes store, per rank of this node."""
    recent_characters: int = 256 * 1024
    """Characters of the newest lines that new followers receive. They read older lines from the object store."""
    retry_seconds: float = OUTPUT_RETRY_SECONDS
    """Pause after the first failed upload at the end of a generation. Later pauses are multiples of it."""


OPTIONS: Final = ShipperOptions()


class LogShipper:
    """Reads one generation's log lines on this node, uploads them, and sends them to users who follow the log.

    `live` sends new lines to followers and must not block. `on_trouble` is called on the loop each time a write of
    lines to the disk fails. `now` is Unix time in seconds.
    """

    def __init__(
        self,
        state: Path,
        objects: FileStore,
        plan: GenerationPlan,
        here: PlanNode,
        now: Callable[[], float],
        live: Callable[[LogLines], None],
        on_trouble: Callable[[OSError], object] | None = None,
        options: ShipperOptions = OPTIONS,
    ) -> None:
        self._options = options
        self._on_trouble = on_trouble
        files = {rank: RankFiles(state.absolute(), plan.run, plan.generation, rank) for rank in here.ranks}
        streams = {
            (rank, stream): path
            for rank in here.ranks
            for stream, path in (("stdout", files[rank].stdout), ("stderr", files[rank].stderr))
        }
        self.run = plan.run
        self.generation = plan.generation
        self._folder = files[here.ranks[0]].stdout.parent
        self._streams = streams
        self._node_id = here.node_id
        self._place = plan.script.logs
        self._objects = objects
        self._now = now
        self._live = live
        self._journal: LogJournal | None = None
        self._reading = asyncio.Lock()
        self._shipping = asyncio.Lock()
        self._tail = Tail()
        self._tail_bytes = options.tail_bytes * len(here.ranks)
        self._recent: deque[LogLines] = deque()
        self._recent_characters = 0
        self._is_failing = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start to read the ranks' log lines, and to upload them to the object store."""
        self._tasks = [
            asyncio.create_task(self._read_on(), name="lines of ranks"),
            asyncio.create_task(self._ship_on(), name="chunks of lines"),
        ]

    def show_recent(self) -> None:
        """Send the newest lines to all followers again, because a new follower lacks lines that are not uploaded."""
        for lines in self._recent:
            self._live(lines)

    async def printed(self, number: int) -> Tail:
        """Read all printed lines, and return those from `number` on for a holder, at most `tail_bytes` per rank."""
        # A cancelled call must not lose lines, because followers of the log must receive them.
        await finish(self._read_up())
        return self._tail.since(number).newest(self._tail_bytes)

    async def close(self) -> None:
        """Stop reading and uploading log lines. The node's next agent process uploads the rest. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await end(*tasks)

    async def finish(self) -> tuple[str, ...]:
        """Upload all remaining lines, after all ranks have exited. Return sentences about lines that failed."""
        await self.close()
        await self._try(self._drain)  # The calls below retry a failed upload and report its error.
        failures = [await self._try(partial(self._read, is_last=True)), await self._try(self._ship)]
        return tuple(
            f"the last lines of this node's ranks are not in S3: {error}" for error in failures if error is not None
        )

    async def _drain(self) -> None:
        """Read and upload the remaining output piece by piece, because the journal on disk has limited room."""
        # The number of repetitions is limited, because a process that escaped from its rank may print for ever.
        for _ in range(self._options.journal.behind_bytes // self._options.journal.read_bytes):
            if not await self._read():
                return
            await self._ship()

    async def _try(self, work: Callable[[], Coroutine[object, object, object]]) -> Exception | None:
        """Run a read or an upload, and repeat it after retryable errors. Return the last error, or None on success."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await work()
            except (StorageError, OSError) as error:
                if attempt == MAX_ATTEMPTS or (isinstance(error, StorageError) and not error.retryable):
                    return error
            else:
                return None
            await asyncio.sleep(self._options.retry_seconds * attempt)
        raise AssertionError

    async def _read_on(self) -> None:
        while True:
            try:
                # First check without a thread, because a thread would take CPU time from training in vain.
                if self._journal is None or self._journal.has_news():
                    await self._read()
            except OSError as error:
                if self._on_trouble is not None:
                    self._on_trouble(error)
                if not self._is_failing:
                    log.warning(
                        "log lines of ranks cannot be written to disk yet: %s", error
                    )  # This loop reads the same lines again after `READ_SECONDS`.
                self._is_failing = True
            else:
                self._is_failing = False
            await asyncio.sleep(READ_SECONDS)

    async def _ship_on(self) -> None:
        while True:
            try:
                await self._ship()
            except (StorageError, OSError) as error:
                log.info("log lines of ranks cannot be uploaded yet: %s", error)
            await asyncio.sleep(FLUSH_SECONDS - READ_SECONDS)

    async def _read(self, *, is_last: bool = False) -> int:
        async with self._reading:
            first, lines = await _to_end(self._read_journal, is_last)
        for some in batches(lines):
            self._pass_on(LogLines(run=self.run, generation=self.generation, first=first, lines=some))
            first += len(some)
        return len(lines)

    def _pass_on(self, lines: LogLines) -> None:
        self._recent.append(lines)
        self._recent_characters += held_characters(lines.lines)
        while self._recent_characters > self._options.recent_characters:
            self._recent_characters -= held_characters(self._recent.popleft().lines)
        self._live(lines)

    def _read_journal(self, is_last: bool) -> tuple[int, list[LogLine]]:
        if self._journal is None:
            self._journal = LogJournal(self._folder, self._node_id, self._streams, self._now, self._options.journal)
            self._tail = self._tail_of(self._journal)
        first = self._journal.count
        lines = self._journal.end() if is_last else self._journal.read()
        self._tail = self._tail.extended(first, [encode_lines([line]) for line in lines], limit_bytes=self._tail_bytes)
        return first, lines

    async def _read_up(self) -> None:
        """Read everything that the ranks have printed, unless a write to the disk fails."""
        try:
            if self._journal is None:
                await self._read()
            assert self._journal is not None
            ends = self._journal.ends()
            while not self._journal.is_read(ends) and await self._read():
                continue
        except OSError as error:
            log.info("log lines of ranks cannot be read for peers yet: %s", error)

    def _tail_of(self, journal: LogJournal) -> Tail:
        """Return the newest log lines that an earlier agent process wrote and did not upload completely."""
        tail = Tail()
        for chunk in journal.unstored():
            head, lines, _ = decode_chunk(chunk.path.read_bytes())
            if head is not None:
                tail = tail.extended(head.first, [encode_lines([line]) for line in lines], limit_bytes=self._tail_bytes)
        return tail

    async def _ship(self) -> None:
        async with self._shipping:
            async with self._reading:
                due = self._journal.unstored() if self._journal is not None else []
            for chunk in due:
                key = f"{self._place.key}gen={self.generation}/{chunk.name.path}"
                await _to_end(
                    self._objects.put_file, ObjectReference(bucket=self._place.bucket, key=key), chunk.path, chunk.size
                )
                async with self._reading:
                    assert self._journal is not None
                    self._journal.stored(chunk)


def batches(lines: Sequence[LogLine]) -> Iterator[tuple[LogLine, ...]]:
    """Split log lines into batches, each for one message to the control plane, in order. Pure."""
    some: list[LogLine] = []
    characters = 0
    for line in lines:
        some.append(line)
        characters += len(line.text)
        if len(some) == LIVE_LINES or characters >= LIVE_CHARACTERS:
            yield tuple(some)
            some, characters = [], 0
    if some:
        yield tuple(some)


async def _to_end(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a thread and wait for its end, even if the caller is cancelled."""
    # Otherwise, a cancelled call's thread could upload an older content of a file after a newer upload.
    found: list[T] = []

    async def work() -> None:
        found.append(await asyncio.to_thread(function, *arguments))

    await finish(work())
    return found[0]
