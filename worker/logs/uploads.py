"""What ranks print and put out, on its way to the object store.

    <log key>gen=<g>/node=<n>/…                      lines with their time, each second, by `LogShipper`: what GetLogEvents and FollowLogs read
    <log key>gen=<g>/rank=<r>.stdout | .stderr       sent again while the rank runs, and once more when it has ended
    <output key>gen=<g>/rank=<r>/<path>              sent when the ranks have ended

A stream of up to `WHOLE_BYTES` that grows is sent whole each time: at once while it is short, and then each time it has
grown by a quarter, so that all sendings together stay within a few times its length.

Invariant: nothing outside of a rank's output folder, and no other user's file in it, is ever sent, whatever links the
folder holds and whoever changes them meanwhile; and no failure in here stops a job: what is not in the store is told in
a sentence.
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
"""Between two looks at what ranks have printed."""
LIVE_LINES = 500
"""In one message to the control plane, at most."""
LIVE_CHARACTERS = 1024 * 1024
"""Of lines in one message to the control plane: not many more."""
RECENT_CHARACTERS = 256 * 1024
"""Of the newest lines, held for whoever begins to follow: the store has them a second later."""
LIVE_SECONDS = 3.0
"""Between two looks at streams of running ranks."""
SHORT_BYTES = 1024 * 1024
"""A stream of up to this length is sent again whenever it has changed."""
GROWTH = 1.25
STILL_SECONDS = 30.0
"""Uploads of which nothing has reached the store for so long, and for as long as the largest of them takes over a slow line, move no more."""
SLOW_BYTES_PER_SECOND = 8 * 1024 * 1024
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0
MAX_TOLD = 20
"""Sentences about what is not in the store, of one node; the agent's log has all."""


class FileStore(Protocol):
    """The part of an object store that is needed here."""

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> object:
        """Store the first bytes of a file.

        Args:
            reference: where.
            path: an ordinary file.
            size: how many; None: all that it has now.

        Returns:
            What is stored.

        Raises:
            StorageError: of the type that says what can be done about it.
        """


class LogShipper:
    """Lines of one generation on this node: into the journal every `READ_SECONDS`, into the store every second, and live to whoever follows.

    Owned by the agent, from the start of the ranks until all is shipped or the agent ends.

    Args:
        state: the agent's directory.
        objects: where chunks go.
        plan: of the generation.
        here: this node in it.
        now: Unix time, seconds.
        live: takes new lines, the number of the first before them; None: nobody follows. Must not block.
        on_trouble: called on the loop at each look at which the disk does not take lines.
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
        """Begin to read and to ship."""
        self._tasks = [
            asyncio.create_task(self._read_on(), name="lines of ranks"),
            asyncio.create_task(self._ship_on(), name="chunks of lines"),
        ]

    def show_recent(self) -> None:
        """Pass the newest lines on once more: whoever begins to follow has what is stored, and would wait for what is not yet."""
        for lines in self._recent:
            self._live(lines)

    async def printed(self, number: int) -> Tail:
        """Read on until all is read that the ranks have printed by now, and return the newest lines of this node.

        Called for each shard that is about to end, by every sender: a holder has the lines of a step before it
        acknowledges it.

        Args:
            number: of the first line that is wanted.

        Returns:
            Lines from `number` on, or from the oldest one that peers keep. What the disk does not take is missing.
        """
        await finish(self._read_up())  # what is half read goes to followers all the same
        return self._tail.since(number).newest(self._tail_bytes)

    async def close(self) -> None:
        """Stop, and leave what is not shipped to the next agent of this node. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await end(*tasks)

    async def finish(self) -> tuple[str, ...]:
        """Ship all that is left; the ranks are gone. Again ships what could not be shipped before.

        Returns:
            A sentence for what is not in the store; empty when all is.
        """
        await self.close()
        await self._try(self._drain)  # what cannot be shipped now is tried and told below
        failures = [await self._try(partial(self._read, is_last=True)), await self._try(self._ship)]
        return tuple(
            f"the last lines of this node's ranks are not in S3: {error}" for error in failures if error is not None
        )

    async def _drain(self) -> None:
        """Read and ship in turn: the journal has no room for all that ranks may have printed last."""
        for _ in range(BEHIND_BYTES // READ_BYTES):  # what a process prints that has got away from its rank has no end
            if not await self._read():
                return
            await self._ship()

    async def _try(self, work: Callable[[], Coroutine[object, object, object]]) -> Exception | None:
        """Try it as often as it may help; returns what it failed with in the end."""
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
                if (
                    self._journal is None or self._journal.has_news()
                ):  # mostly not: a thread for each look would take a core's time from training
                    await self._read()
            except OSError as error:
                if self._on_trouble is not None:
                    self._on_trouble(error)
                if not self._is_failing:
                    log.warning("lines of ranks cannot be kept yet: %s", error)  # tried again at the next look
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
        """Read on to where the streams end now."""
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
    """Yield lines as they go into messages, in order. Pure.

    Args:
        lines: with whatever ranks print: a character may take four bytes.

    Yields:
        At most `LIVE_LINES`, of `LIVE_CHARACTERS` and one line more.
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
    """One per agent."""

    def __init__(
        self,
        state: Path,
        objects: FileStore,
        user: RankUser | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is sent yet.

        Args:
            state: the agent's directory.
            objects: where all goes.
            user: the users of this node's ranks; None: this process's.
            monotonic: seconds.
        """
        self.monotonic = monotonic
        self._moved_at = -math.inf
        self._under_way: dict[str, int] = {}
        """What is being sent when ranks have ended, by its key, and its length."""
        self._state = state.absolute()
        self._objects = objects
        self._user = user
        self._sent: dict[Path, int] = {}
        """Length of each stream when it was sent last."""

    async def follow(self, plan: GenerationPlan, here: PlanNode, *, interval_seconds: float = LIVE_SECONDS) -> None:
        """Keep the streams of this node's ranks readable in the store while they run; until cancelled.

        Args:
            plan: of the running generation.
            here: this node in it.
            interval_seconds: between two looks.
        """
        while True:
            for path, reference in self._streams(plan, here):
                try:
                    size = _size(path)
                    if size is None or size > WHOLE_BYTES or not is_due(size, self._sent.get(path)):
                        continue
                    await asyncio.to_thread(self._objects.put_file, reference, path, size)
                except (StorageError, OSError) as error:
                    log.info("%s is not shown live: %s", reference.key, error)  # tried again at the next look
                else:
                    self._sent[path] = size
            await asyncio.sleep(interval_seconds)

    async def upload_all(self, plan: GenerationPlan, here: PlanNode) -> tuple[str, ...]:
        """Send all streams and outputs of this node's ranks; they have ended. Again gives the same objects.

        Args:
            plan: of the generation that has ended.
            here: this node in it.

        Returns:
            Sentences about what is not in the store, `MAX_TOLD` and one at most; empty when all is.
        """
        missing = []
        for path, reference in self._streams(plan, here):
            size = _size(path)
            if size is None or size > WHOLE_BYTES:
                continue  # never started; or its lines are all there is
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
        """Say whether uploads get on.

        Args:
            since: monotonic time of when they were first waited for.

        Returns:
            Whether it is worth while to wait for them a little longer.
        """
        return self.monotonic() - max(since, self._moved_at) < still_seconds(max(self._under_way.values(), default=0))

    def forget(self, run: RunId) -> None:
        """Remove all streams and outputs of a run from this node.

        From any thread; nothing of the run is being sent any more.
        """
        for folder in (logs_of(self._state, run), outputs_of(self._state, run)):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_streams(self, plan: GenerationPlan) -> None:
        """Remove the streams of a generation from this node: they are stored. From any thread."""
        shutil.rmtree(logs_of(self._state, plan.run) / f"gen={plan.generation}", ignore_errors=True)

    def _streams(self, plan: GenerationPlan, here: PlanNode) -> Iterator[tuple[Path, ObjectReference]]:
        place = plan.script.logs
        for rank in here.ranks:
            files = RankFiles(self._state, plan.run, plan.generation, rank)
            for path in (files.stdout, files.stderr):
                yield path, ObjectReference(bucket=place.bucket, key=f"{place.key}gen={plan.generation}/{path.name}")

    async def _send_output(self, folder: Path, path: Path, reference: ObjectReference, uid: int) -> list[str]:
        """Send the very file that was looked at: its name may be another's by now."""
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
    """Call a function in a thread and wait for it also when cancelled: nothing is read or stored by two at once, and no older chunk lands last."""
    found: list[T] = []

    async def work() -> None:
        found.append(await asyncio.to_thread(function, *arguments))

    await finish(work())
    return found[0]


def still_seconds(size: int) -> float:
    """Return for how long nothing need reach the store while `size` bytes are on their way. Pure."""
    return STILL_SECONDS + size / SLOW_BYTES_PER_SECOND


def is_due(size: int, sent: int | None) -> bool:
    """Say whether a stream that is now `size` bytes long, and was `sent` bytes long when it was sent last, is to be sent again. Pure."""
    if sent is None or size < sent:  # one that is shorter was begun anew
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
    """Return the files below a folder with their relative paths, and a sentence for each that is not sent.

    A link is sent as what it names, if that is a file within the folder.
    """
    root = folder.resolve()
    files, refused = [], []
    for parent, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted([*names, *(name for name in folders if (Path(parent) / name).is_symlink())]):
            path = Path(parent) / name
            relative = path.relative_to(root).as_posix()
            target = Path(os.path.realpath(path))  # unlike `resolve`, gives a loop of links back as it is
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
    """Open a file of a rank's output folder, and no other.

    Args:
        root: the folder, without links.
        path: as `_collect` has found it.
        uid: whose it must be: a hard link to somebody else's file is not the rank's to give.

    Returns:
        Its descriptor; the caller closes it.

    Raises:
        OSError: it cannot be opened, or is none.
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
    """Return a name as it can be told."""
    return name if _is_text(name) else ascii(name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
