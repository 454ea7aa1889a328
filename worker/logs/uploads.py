"""Upload of ranks' log lines, streams and outputs to the object store.

    <log key>gen=<g>/node=<n>/…                  lines with timestamps, every second, by `LogShipper`; read by
                                                 GetLogEvents and FollowLogs
    <log key>gen=<g>/rank=<r>.stdout | .stderr   the raw streams, repeatedly while the rank runs and once at its end
    <output key>gen=<g>/rank=<r>/<path>          output files, once the ranks have ended

A growing stream of up to `WHOLE_BYTES` is uploaded whole each time. A short stream is uploaded at every change, a
longer one each time it has grown by a quarter. So the total of all uploads is limited to a few times the stream's
length.

Invariant: only the rank's own files inside its output folder are uploaded, even if the folder contains links or if a
process changes links during the upload. A failed upload never stops a job. Each missing object is reported in a
sentence.

The module has more than 500 lines. Lines, streams and outputs share the loop that decides what is uploaded next and the
report of missing objects.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from everstep.protocol.agent_messages import LogLines
from everstep.protocol.ids import RunId
from everstep.protocol.log_chunks import FLUSH_SECONDS, LogLine, decode_chunk, encode_lines
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode
from worker.core.line_tails import TAIL_BYTES, Tail
from worker.errors import StorageError
from worker.logs.journal import BEHIND_BYTES, READ_BYTES, WHOLE_BYTES, LogJournal
from worker.node.rank_user import RankUser, user_of
from worker.ranks.files import RankFiles, logs_of, outputs_of
from worker.tasks import end, finish

log = logging.getLogger(__name__)
T = TypeVar("T")

READ_SECONDS = 0.1
"""Seconds between two checks for new output of ranks."""
LIVE_LINES = 500
"""Maximum lines in one message to the control plane."""
LIVE_CHARACTERS = 1024 * 1024
"""Number of characters after which a message to the control plane is complete."""
RECENT_CHARACTERS = 256 * 1024
"""Number of characters of the newest lines that are kept for new followers.

Followers read older lines from the object store, which contains each line after about a second.
"""
LIVE_SECONDS = 3.0
"""Seconds between two checks of the raw streams of running ranks."""
SHORT_BYTES = 1024 * 1024
"""Length up to which a stream is uploaded at every change."""
GROWTH = 1.25
STILL_SECONDS = 30.0
"""Seconds without a finished upload after which pending uploads count as stalled.

The transfer time of the largest pending upload over a slow connection is added.
"""
SLOW_BYTES_PER_SECOND = 8 * 1024 * 1024
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0
MAX_TOLD = 20
"""Maximum sentences about missing objects in a node's report. The agent's log contains all of them."""


class FileStore(Protocol):
    """The part of an object store that this module uses."""

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> object:
        """Store the first bytes of a file.

        Args:
            reference: bucket and key; an existing object is replaced.
            path: a regular file.
            size: number of bytes; None for the whole file.

        Returns:
            A description of the stored object.

        Raises:
            StorageError: the subtype shows whether a retry can help.
        """


class LogShipper:
    """Reads the log lines of one generation on this node into the journal, uploads them, and sends them to followers.

    Lines enter the journal every `READ_SECONDS` and are uploaded every second. The agent owns the shipper from the
    start of the ranks until all lines are uploaded or the agent ends.

    Args:
        state: state directory of the agent; the journal is below it.
        objects: object store that receives the uploads.
        plan: the plan of the generation.
        here: this node's entry in the plan.
        now: returns Unix time in seconds.
        live: receives new lines with the number of the first line; must not block.
        on_trouble: called on the loop each time the disk refuses lines; None for no callback.
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
    ) -> None:
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
        self._tail_bytes = TAIL_BYTES * len(here.ranks)
        self._recent: deque[LogLines] = deque()
        self._recent_characters = 0
        self._is_failing = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start to read and upload lines."""
        self._tasks = [
            asyncio.create_task(self._read_on(), name="lines of ranks"),
            asyncio.create_task(self._ship_on(), name="chunks of lines"),
        ]

    def show_recent(self) -> None:
        """Send the newest lines to `live` again, so that a new follower gets lines that are not uploaded yet."""
        for lines in self._recent:
            self._live(lines)

    async def printed(self, number: int) -> Tail:
        """Read all lines that the ranks have printed before this call, and return the newest lines of this node.

        Every sender calls this before the end of each shard. So a holder has all lines up to a step before it
        acknowledges the step.

        Args:
            number: number of the first line that the caller needs.

        Returns:
            Lines from `number` on, or from the oldest line that peers keep. Lines that the disk refuses are missing.
        """
        # `finish` protects the read from cancellation: followers must receive the lines that were read.
        await finish(self._read_up())
        return self._tail.since(number).newest(self._tail_bytes)

    async def close(self) -> None:
        """Stop reading and uploading. Lines that are not uploaded stay for this node's next agent. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await end(*tasks)

    async def finish(self) -> tuple[str, ...]:
        """Upload all remaining lines, after all ranks have exited. A repeated call retries failed uploads.

        Returns:
            Sentences about lines that are not in the store; empty on success.
        """
        await self.close()
        await self._try(self._drain)  # The calls below retry a failed upload and report its error.
        failures = [await self._try(partial(self._read, is_last=True)), await self._try(self._ship)]
        return tuple(
            f"the last lines of this node's ranks are not in S3: {error}" for error in failures if error is not None
        )

    async def _drain(self) -> None:
        """Read and upload alternately, because the journal may be too small for all remaining output."""
        # bounded, because a process that escaped from its rank may print forever
        for _ in range(BEHIND_BYTES // READ_BYTES):
            if not await self._read():
                return
            await self._ship()

    async def _try(self, work: Callable[[], Coroutine[object, object, object]]) -> Exception | None:
        """Run `work`, and repeat it after retryable errors. Return the last error, or None on success."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await work()
            except (StorageError, OSError) as error:
                if attempt == MAX_ATTEMPTS or (isinstance(error, StorageError) and not error.retryable):
                    return error
            else:
                return None
            await asyncio.sleep(RETRY_SECONDS * attempt)
        raise AssertionError

    async def _read_on(self) -> None:
        while True:
            try:
                # This is usually False, and a thread for every check would take CPU time from training.
                if self._journal is None or self._journal.has_news():
                    await self._read()
            except OSError as error:
                if self._on_trouble is not None:
                    self._on_trouble(error)
                if not self._is_failing:
                    log.warning("lines of ranks cannot be kept yet: %s", error)  # The next check tries again.
                self._is_failing = True
            else:
                self._is_failing = False
            await asyncio.sleep(READ_SECONDS)

    async def _ship_on(self) -> None:
        while True:
            try:
                await self._ship()
            except (StorageError, OSError) as error:
                log.info("lines of ranks are not shipped yet: %s", error)
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
        self._recent_characters += _length(lines)
        while self._recent_characters > RECENT_CHARACTERS:
            self._recent_characters -= _length(self._recent.popleft())
        self._live(lines)

    def _read_journal(self, is_last: bool) -> tuple[int, list[LogLine]]:
        if self._journal is None:
            self._journal = LogJournal(self._folder, self._node_id, self._streams, self._now)
            self._tail = self._tail_of(self._journal)
        first = self._journal.count
        lines = self._journal.end() if is_last else self._journal.read()
        self._tail = self._tail.extended(first, [encode_lines([line]) for line in lines], limit_bytes=self._tail_bytes)
        return first, lines

    async def _read_up(self) -> None:
        """Read all streams up to the length that they have at the call."""
        try:
            if self._journal is None:
                await self._read()
            assert self._journal is not None
            ends = self._journal.ends()
            while not self._journal.is_read(ends) and await self._read():
                continue
        except OSError as error:
            log.info("lines of ranks are not read for peers yet: %s", error)

    def _tail_of(self, journal: LogJournal) -> Tail:
        """Return the newest lines that an earlier agent of this node has read."""
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
    """Split lines into batches for messages, in order. Pure.

    Args:
        lines: log lines; a character may take four bytes.

    Yields:
        Batches of at most `LIVE_LINES` lines, with at most `LIVE_CHARACTERS` characters plus one line.
    """
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


def _length(lines: LogLines) -> int:
    return sum(len(line.text) for line in lines.lines)


class RankLogs:
    """Uploads of this node's raw streams and outputs; one object per agent."""

    def __init__(
        self,
        state: Path,
        objects: FileStore,
        user: RankUser | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the object; nothing is uploaded yet.

        Args:
            state: state directory of the agent; the ranks' streams are below it.
            objects: object store that receives the uploads.
            user: users of this node's ranks; None means the agent's own user.
            monotonic: returns seconds of a monotonic clock.
        """
        self.monotonic = monotonic
        self._moved_at = -math.inf
        self._under_way: dict[str, int] = {}
        """Length in bytes of each upload in progress, by key."""
        self._state = state.absolute()
        self._objects = objects
        self._user = user
        self._sent: dict[Path, int] = {}
        """Length of each stream at its last upload."""

    async def follow(self, plan: GenerationPlan, here: PlanNode, *, interval_seconds: float = LIVE_SECONDS) -> None:
        """Upload the streams of this node's running ranks repeatedly, until cancelled.

        Args:
            plan: the plan of the running generation.
            here: this node's entry in the plan.
            interval_seconds: seconds between two checks.
        """
        while True:
            for path, reference in self._streams(plan, here):
                try:
                    size = _size(path)
                    if size is None or size > WHOLE_BYTES or not is_due(size, self._sent.get(path)):
                        continue
                    await asyncio.to_thread(self._objects.put_file, reference, path, size)
                except (StorageError, OSError) as error:
                    log.info("%s is not shown live: %s", reference.key, error)  # The next check tries again.
                else:
                    self._sent[path] = size
            await asyncio.sleep(interval_seconds)

    async def upload_all(self, plan: GenerationPlan, here: PlanNode) -> tuple[str, ...]:
        """Upload all streams and outputs of this node's ended ranks. A repeated call stores the same objects.

        Args:
            plan: the plan of the ended generation.
            here: this node's entry in the plan.

        Returns:
            At most `MAX_TOLD` + 1 sentences about missing objects; empty on success.
        """
        missing = []
        for path, reference in self._streams(plan, here):
            size = _size(path)
            if size is None or size > WHOLE_BYTES:
                continue  # The rank was never started, or its stream is too long and only its lines are uploaded.
            missing += await self._send(path, reference, size)
            self._sent.pop(path, None)
        user = user_of(plan.run, self._state, self._user)
        uid = os.getuid() if user is None else user.uid
        for rank in here.ranks:
            folder = RankFiles(self._state, plan.run, plan.generation, rank).output_dir
            files, refused = await asyncio.to_thread(_collect, folder)
            missing += refused
            for relative, path in files:
                key = f"{plan.script.output.key}gen={plan.generation}/rank={rank}/{relative}"
                missing += await self._send_output(
                    folder, path, ObjectReference(bucket=plan.script.output.bucket, key=key), uid
                )
        for sentence in missing:
            log.warning("%s", sentence)
        more = (
            [f"{len(missing) - MAX_TOLD:,} more outputs are not in S3; the agent's log names them"]
            if len(missing) > MAX_TOLD
            else []
        )
        return (*missing[:MAX_TOLD], *more)

    def is_moving(self, since: float) -> bool:
        """Return whether pending uploads still progress, so that the caller should wait for them.

        Args:
            since: monotonic time at which the caller began to wait.

        Returns:
            False if no upload has finished for longer than `still_seconds` allows for the largest pending upload.
        """
        return self.monotonic() - max(since, self._moved_at) < still_seconds(max(self._under_way.values(), default=0))

    def forget(self, run: RunId) -> None:
        """Delete all streams and outputs of a run from this node.

        Called in any thread, when no upload of the run is in progress.
        """
        for folder in (logs_of(self._state, run), outputs_of(self._state, run)):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_streams(self, plan: GenerationPlan) -> None:
        """Delete the uploaded streams of a generation from this node. Called in any thread."""
        shutil.rmtree(logs_of(self._state, plan.run) / f"gen={plan.generation}", ignore_errors=True)

    def _streams(self, plan: GenerationPlan, here: PlanNode) -> Iterator[tuple[Path, ObjectReference]]:
        place = plan.script.logs
        for rank in here.ranks:
            files = RankFiles(self._state, plan.run, plan.generation, rank)
            for path in (files.stdout, files.stderr):
                yield path, ObjectReference(bucket=place.bucket, key=f"{place.key}gen={plan.generation}/{path.name}")

    async def _send_output(self, folder: Path, path: Path, reference: ObjectReference, uid: int) -> list[str]:
        """Upload the file through its checked descriptor, because the name may now refer to another file."""
        try:
            file = _open_output(folder.resolve(), path, uid)
        except OSError as error:
            return [f"{reference.key} is not in S3: {error}"]
        try:
            return await self._send(Path(f"/proc/self/fd/{file}"), reference, None)
        finally:
            os.close(file)

    async def _send(self, path: Path, reference: ObjectReference, size: int | None) -> list[str]:
        try:
            self._under_way[reference.key] = path.stat().st_size if size is None else size
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    await asyncio.to_thread(self._objects.put_file, reference, path, size)
                except StorageError as error:
                    if not error.retryable or attempt == MAX_ATTEMPTS:
                        return [f"{reference.key} is not in S3: {error}"]
                else:
                    self._moved_at = self.monotonic()
                    return []
                await asyncio.sleep(RETRY_SECONDS * attempt)
        except OSError as error:
            return [f"{reference.key} is not in S3: {error}"]
        finally:
            self._under_way.pop(reference.key, None)
        raise AssertionError


async def _to_end(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a thread and wait for its end even if the caller is cancelled.

    So only one thread at a time reads or uploads, and no older chunk replaces a newer chunk.
    """
    found: list[T] = []

    async def work() -> None:
        found.append(await asyncio.to_thread(function, *arguments))

    await finish(work())
    return found[0]


def still_seconds(size: int) -> float:
    """Return the seconds without progress after which an upload of `size` bytes counts as stalled. Pure."""
    return STILL_SECONDS + size / SLOW_BYTES_PER_SECOND


def is_due(size: int, sent: int | None) -> bool:
    """Return whether a stream of `size` bytes needs an upload, given its length `sent` at the last upload. Pure."""
    if sent is None or size < sent:  # A stream that is shorter than before was truncated.
        return True
    if size == sent:
        return False
    return size <= SHORT_BYTES or size >= sent * GROWTH


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _collect(folder: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the uploadable files below a folder with their relative paths, and a sentence for each other entry.

    A link is uploaded as its target if the target is a file within the folder.
    """
    root = folder.resolve()
    files, refused = [], []
    for parent, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted([*names, *(name for name in folders if (Path(parent) / name).is_symlink())]):
            path = Path(parent) / name
            relative = path.relative_to(root).as_posix()
            target = Path(os.path.realpath(path))  # unlike `resolve`, returns a loop of links unchanged
            if not target.is_relative_to(root):
                refused.append(
                    f"output {_shown(relative)} is not in S3: it is a link that leads out of the output folder"
                )
            elif not target.is_file():
                refused.append(f"output {_shown(relative)} is not in S3: it is not a file")
            elif not _is_text(relative):
                refused.append(f"output {_shown(relative)} is not in S3: its name is not UTF-8")
            else:
                files.append((relative, target))
    return files, refused


def _open_output(root: Path, path: Path, uid: int) -> int:
    """Open a file of a rank's output folder, and refuse any other file.

    Args:
        root: the folder, without links in its path.
        path: a result of `_collect`.
        uid: the required owner. A hard link to another user's file is refused.

    Returns:
        A descriptor; the caller closes it.

    Raises:
        OSError: the file cannot be opened or is refused.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    told = os.fstat(file)
    if not (
        stat.S_ISREG(told.st_mode)
        and told.st_uid == uid
        and Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(root)
    ):
        os.close(file)
        raise PermissionError(errno.EACCES, "it is no file of the rank's in its output folder")
    return file


def _shown(name: str) -> str:
    """Return a name in printable form."""
    return name if _is_text(name) else ascii(name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
