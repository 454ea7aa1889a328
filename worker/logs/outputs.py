"""Uploads the files that ranks wrote into their output folders and, where the job keeps them, into the source tree.

    <output key>gen=<g>/rank=<r>/<path>          path in the output folder of rank r
    <output key>gen=<g>/rank=<first>/<path>      path in the source tree of a node, whose first rank is `first`

Files that the ranks wrote into the source tree and that the job does not keep are reported.

Invariant: only the rank's own files inside these folders are uploaded, even if a folder contains links or if a process
changes links during the upload. A failed upload never stops a job.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from everstep.protocol.agent_messages import OutputCause, OutputFailure
from everstep.protocol.ids import Rank, RunId
from everstep.protocol.limits import MAX_PATH_CHARACTERS, cut
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode, SourceArchive
from worker.errors import StorageError
from worker.node.file_trees import remove_tree
from worker.node.rank_user import RankUser, user_of
from worker.ranks.files import RankFiles, ended_source_of, logs_of, outputs_of, source_of

log = logging.getLogger(__name__)

STILL_SECONDS = 30.0
"""Seconds without any finished upload after which the pending uploads count as stalled (`still_seconds`)."""
SLOW_BYTES_PER_SECOND = 8 * 1024 * 1024
MAX_ATTEMPTS = 3
OUTPUT_RETRY_SECONDS = 1.0
OUTPUT_POLL_SECONDS = 1.0
MAX_FOLDER_DEPTH = 100
"""Limit of folders within folders in a rank's output. Deeper files are reported, and not uploaded."""
MAX_UNSTORED = 20
"""Maximum number of unstored outputs in a node's report and in the agent's log."""
MAX_ENTRIES = 10_000
"""Limit of entries of an output folder that the agent reads, because an ended job keeps its nodes meanwhile."""
Unstored = tuple[OutputFailure, str]
"""An output that is not in S3, and a sentence about it for people."""
_Files = list[tuple[str, Path]]
_Refused = list[tuple[str, OutputCause, str]]
_NOT_KEPT = "a rank wrote it into the source directory, and OutputDataConfig.Keep does not name it"


class FileStore(Protocol):
    """The method of an object store that this module uses."""

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> object:
        """Store the first `size` bytes of a regular file, or all if None. Raises StorageError."""


@dataclass(eq=False, repr=False)
class RankOutputs:
    """Uploads this node's outputs, and deletes the files that ranks leave on the node. An agent has one object.

    `archived` returns size and modification time of the files of a source archive on this node. `user` is None for the
    agent's own user. `retry_seconds` is the first pause after a failed upload of a file.
    """

    state: InitVar[Path]
    objects: FileStore
    archived: Callable[[SourceArchive], Mapping[str, tuple[int, int]]]
    user: RankUser | None = None
    monotonic: Callable[[], float] = time.monotonic
    _: KW_ONLY
    retry_seconds: float = OUTPUT_RETRY_SECONDS

    def __post_init__(self, state: Path) -> None:
        self.poll_seconds = OUTPUT_POLL_SECONDS
        self._moved_at = -math.inf
        self._under_way: dict[str, int] = {}
        """Size in bytes of each file that is being uploaded, by its key in the store."""
        self._state = state.absolute()

    async def upload_all(self, plan: GenerationPlan, here: PlanNode) -> tuple[Unstored, ...]:
        """Upload all outputs of ended ranks. Idempotent. Return at most `MAX_UNSTORED` that are not in S3."""
        missing: list[Unstored] = []
        failure = partial(OutputFailure, generation=plan.generation)
        user = user_of(plan.run, self._state, self.user)
        uid = os.getuid() if user is None else user.uid
        for rank, folder, files, refused in await asyncio.to_thread(lambda: list(self._found(plan, here))):
            for relative, cause, why in refused:
                shown = _shown(relative)
                missing.append((failure(rank, shown, cause), f"output {shown} is not in S3: {why}"))
            for relative, path in files:
                key = f"{plan.script.output.key}gen={plan.generation}/rank={rank}/{relative}"
                reference = ObjectReference(bucket=plan.script.output.bucket, key=key)
                if (found := await self._send(folder, path, reference, uid)) is not None:
                    cause, error = found
                    words = f"{reference.key} is not in S3: {error}"
                    missing.append((failure(rank, _shown(relative), cause), words))
        for _, words in missing[:MAX_UNSTORED]:
            log.warning("%s", words)
        if (more := len(missing) - MAX_UNSTORED) > 0:
            last, words = missing[MAX_UNSTORED - 1]
            words = f"{words}; {more:,} more outputs are not in S3"
            missing[MAX_UNSTORED - 1 :] = [(msgspec.structs.replace(last, omitted_count=more), words)]
        return tuple(missing)

    def take_source(self, plan: GenerationPlan) -> None:
        """Move the source tree of ended ranks to where `upload_all` finds it. Idempotent. Called in any thread."""
        # The next generation's tree has the same path.
        try:
            source_of(self._state, plan.run).rename(ended_source_of(self._state, plan.run, plan.generation))
        except FileNotFoundError:  # The tree has been moved, or no rank was started.
            pass
        except OSError as error:
            log.warning("files in the source tree of generation %d are not stored: %s", plan.generation, error)

    def forget_source(self, plan: GenerationPlan) -> None:
        """Delete the source tree that `take_source` has moved. Called in any thread, after `upload_all`."""
        remove_tree(ended_source_of(self._state, plan.run, plan.generation), ignore_errors=True)

    def _found(self, plan: GenerationPlan, here: PlanNode) -> Iterator[tuple[Rank, Path, _Files, _Refused]]:
        """Yield each folder with the rank to which its outputs belong, the files to upload, and the refused entries."""
        taken: set[str] = set()
        for rank in here.ranks:
            folder = RankFiles(self._state, plan.run, plan.generation, rank).output_dir
            files, refused = _collect(folder)
            if rank == here.ranks[0]:
                taken = {relative for relative, _ in files}
            yield rank, folder, files, refused
        folder = ended_source_of(self._state, plan.run, plan.generation)
        if folder.exists():
            yield here.ranks[0], folder, *self._written(plan, folder, taken)

    def _written(self, plan: GenerationPlan, folder: Path, taken: set[str]) -> tuple[_Files, _Refused]:
        """Return the files that ranks wrote into the source tree: those that the job keeps, and the others."""
        try:
            archived, is_archive_lost = self.archived(plan.script.source), False
        except (OSError, tarfile.TarError) as error:
            log.warning("every kept file of the source tree is stored, because its archive cannot be read: %s", error)
            archived, is_archive_lost = {}, True

        def is_kept(name: str) -> bool:
            return any(_matches(name, pattern) for pattern in plan.script.kept_files)

        shipped = {parent.as_posix() for name in archived for parent in PurePosixPath(name).parents}

        def has_kept(name: str) -> bool:
            return name in shipped or any(_reaches(name, pattern) for pattern in plan.script.kept_files)

        files, refused = _collect(folder, has_kept)
        new = [each for each in files if "__pycache__" not in each[0] and _is_new(each[1], archived.get(each[0]))]
        kept = [each for each in new if is_kept(each[0])]
        refused = [
            each for each in refused if each[1] in (OutputCause.NOT_KEPT, OutputCause.TOO_MANY) or is_kept(each[0])
        ]
        own = {".", *shipped, *(parent.as_posix() for name, _ in kept for parent in PurePosixPath(name).parents)}
        # Files in a new folder of which the job keeps none are reported as one entry.
        others: dict[str, None] = {}
        for name, _ in new:
            if not is_kept(name):
                unknown = [parent for parent in PurePosixPath(name).parents if parent.as_posix() not in own]
                others[f"{unknown[-1]}/" if unknown else name] = None
        refused += [(name, OutputCause.NOT_KEPT, _NOT_KEPT) for name in others]
        if is_archive_lost:
            refused = [each for each in refused if each[1] is not OutputCause.NOT_KEPT]
        same = "the rank's output folder has a file of this path"
        refused += [(name, OutputCause.NAME, same) for name, _ in kept if name in taken]
        return [each for each in kept if each[0] not in taken], refused

    def is_moving(self, since: float) -> bool:
        """Return whether the pending uploads still make progress. `since` is the monotonic time of the wait's begin."""
        return self.monotonic() - max(since, self._moved_at) < still_seconds(max(self._under_way.values(), default=0))

    def forget(self, run: RunId) -> None:
        """Delete all streams and output files of a run from this node, when none is uploaded. Called in any thread."""
        for folder in (logs_of(self._state, run), outputs_of(self._state, run)):
            remove_tree(folder, ignore_errors=True)

    def forget_streams(self, plan: GenerationPlan) -> None:
        """Delete a generation's streams from this node, after all lines are uploaded. Called in any thread."""
        remove_tree(logs_of(self._state, plan.run) / f"gen={plan.generation}", ignore_errors=True)

    async def _send(
        self, folder: Path, path: Path, reference: ObjectReference, uid: int
    ) -> tuple[OutputCause, Exception] | None:
        try:
            file = _open_output(folder.resolve(), path, uid)
        except OSError as error:
            return OutputCause.UNREADABLE, error
        try:
            self._under_way[reference.key] = os.fstat(file).st_size
            # Read from the checked descriptor, because a process may replace the file under its name.
            return await self._put(Path(f"/proc/self/fd/{file}"), reference)
        finally:
            self._under_way.pop(reference.key, None)
            os.close(file)

    async def _put(self, path: Path, reference: ObjectReference) -> tuple[OutputCause, Exception] | None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await asyncio.to_thread(self.objects.put_file, reference, path)
            except OSError as error:
                return OutputCause.UNREADABLE, error
            except StorageError as error:
                if not error.retryable or attempt == MAX_ATTEMPTS:
                    return OutputCause.REFUSED, error
            else:
                self._moved_at = self.monotonic()
                return None
            await asyncio.sleep(self.retry_seconds * attempt)
        raise AssertionError


def still_seconds(size: int) -> float:
    """Return the seconds without a finished upload after which a pending upload of `size` bytes counts as stalled."""
    return STILL_SECONDS + size / SLOW_BYTES_PER_SECOND


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of `ScriptPlan.kept_files` names a path. Linear in both, as jobs choose both."""
    head, star, tail = pattern.replace("**", "*").partition("*")
    if not star:
        return name == head or name.startswith(f"{head.rstrip('/')}/")
    return name.startswith(head) and name.endswith(tail) and len(name) >= len(head) + len(tail)


def _reaches(folder: str, pattern: str) -> bool:
    """Return whether a pattern can name a path below a folder."""
    head, star, _ = pattern.partition("*")
    start, inside = (head if star else f"{head.rstrip('/')}/"), f"{folder}/"
    return inside.startswith(start) or start.startswith(inside)


def _is_new(path: Path, archived: tuple[int, int] | None) -> bool:
    """Return whether a file differs in size or modification time from the archive's file of the same path."""
    try:
        status = path.lstat()
    except OSError:
        return True
    return (status.st_size, int(status.st_mtime)) != archived


def _collect(folder: Path, enters: Callable[[str], bool] = lambda _folder: True) -> tuple[_Files, _Refused]:
    """Return the files below a folder with their relative paths, and the entries that cannot be uploaded, with reasons.

    A link to a file within the folder counts as this file. A folder for whose path `enters` returns False is refused as
    a whole.
    """
    root, left = folder.resolve(), MAX_ENTRIES
    files: _Files = []
    refused: _Refused = []
    pending = [(root, 0)]
    while pending and left >= 0:
        parent, depth = pending.pop()
        try:
            with os.scandir(parent) as found:
                entries = sorted(islice(found, left + 1), key=lambda entry: entry.name)
        except FileNotFoundError:  # A rank without outputs has no folder.
            continue
        except OSError:
            refused.append((os.path.relpath(parent, root), OutputCause.UNREADABLE, "the agent cannot read it"))
            continue
        if len(entries) > left:
            why = f"a rank's folder has more than {MAX_ENTRIES:,} entries"
            refused.append((os.path.relpath(parent, root), OutputCause.TOO_MANY, why))
        entries, left = entries[:left], left - len(entries)
        for entry in entries:
            path = parent / entry.name
            relative = path.relative_to(root).as_posix()
            if not entry.is_dir(follow_symlinks=False):
                if isinstance(found_file := _file_at(path, root), Path):
                    files.append((relative, found_file))
                else:
                    refused.append((relative, *found_file))
            elif not enters(relative):
                if entry.name != "__pycache__":
                    refused.append((f"{relative}/", OutputCause.NOT_KEPT, _NOT_KEPT))
            elif depth < MAX_FOLDER_DEPTH:
                pending.append((path, depth + 1))
            else:
                why = f"it is a folder below more than {MAX_FOLDER_DEPTH} folders"
                refused.append((relative, OutputCause.UNREADABLE, why))
    return files, refused


def _file_at(path: Path, root: Path) -> Path | tuple[OutputCause, str]:
    """Return the file at a path without links, or why it cannot be uploaded."""
    try:
        # The kernel follows the links, because `os.path.realpath` recurses for each link of a chain.
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            target, mode = Path(os.readlink(f"/proc/self/fd/{file}")), os.fstat(file).st_mode
        finally:
            os.close(file)
    except PermissionError:
        return OutputCause.UNREADABLE, "the agent cannot read it"
    except OSError:
        return OutputCause.NOT_A_FILE, "it is not a file"
    if not target.is_relative_to(root):
        return OutputCause.OUTSIDE, "it is a link that leads out of the output folder"
    if not stat.S_ISREG(mode):
        return OutputCause.NOT_A_FILE, "it is not a file"
    if not _is_text(os.path.relpath(path, root)):
        return OutputCause.NAME, "its name is not UTF-8"
    return target


def _open_output(root: Path, path: Path, uid: int) -> int:
    """Open a file inside a rank's output folder. Refuse files outside it and files of another user."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(file)
    # A hard link to another user's file is refused.
    if not (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == uid
        and Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(root)
    ):
        os.close(file)
        raise PermissionError(errno.EACCES, "this is not a file of the rank in its output folder")
    return file


def _shown(name: str) -> str:
    """Return the name of an output file without unprintable characters and within a message's limit."""
    return cut(name if _is_text(name) else ascii(name), MAX_PATH_CHARACTERS)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
