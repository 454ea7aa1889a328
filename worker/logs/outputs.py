"""Uploads the files that ranks wrote into their output folders, after the ranks have ended.

    <output key>gen=<g>/rank=<r>/<path>

Invariant: only the rank's own files inside its output folder are uploaded, even if the folder contains links or if a
process changes links during the upload. A failed upload never stops a job.
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
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.protocol.agent_messages import OutputCause, OutputFailure
from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode
from worker.errors import StorageError
from worker.node.rank_user import RankUser, user_of
from worker.ranks.files import RankFiles, logs_of, outputs_of

log = logging.getLogger(__name__)

STILL_SECONDS = 30.0
"""Seconds without any finished upload after which the pending uploads count as stalled.

`still_seconds` adds the time to transfer the largest pending file.
"""
SLOW_BYTES_PER_SECOND = 8 * 1024 * 1024
MAX_ATTEMPTS = 3
OUTPUT_RETRY_SECONDS = 1.0
OUTPUT_POLL_SECONDS = 1.0
MAX_UNSTORED = 20
"""Maximum number of unstored outputs in a node's report. The agent's log contains all."""
Unstored = tuple[OutputFailure, str]
"""An output that is not in S3, and a sentence about it for people."""


_WORDS = {
    OutputCause.OUTSIDE: "it is a link that leads out of the output folder",
    OutputCause.NOT_A_FILE: "it is not a file",
    OutputCause.NAME: "its name is not UTF-8",
    OutputCause.UNREADABLE: "the agent cannot read it",
}


class FileStore(Protocol):
    """The method of an object store that this module uses."""

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


@dataclass(eq=False, repr=False)
class RankOutputs:
    """Uploads this node's outputs, and deletes the files that ranks leave on the node. An agent has one object.

    Args:
        state: state directory of the agent; the ranks' files are below it.
        objects: object store that receives the uploads.
        user: the Linux user or users of this node's ranks; None means the agent's own user.
        monotonic: returns seconds of a monotonic clock.
        retry_seconds: pause after the first failed upload of a file. Later pauses are multiples of it.
    """

    state: InitVar[Path]
    objects: FileStore
    user: RankUser | None = None
    monotonic: Callable[[], float] = time.monotonic
    _: KW_ONLY
    retry_seconds: float = OUTPUT_RETRY_SECONDS

    def __post_init__(self, state: Path) -> None:
        self.poll_seconds = OUTPUT_POLL_SECONDS
        """Seconds between two checks of the progress of uploads."""
        self._moved_at = -math.inf
        self._under_way: dict[str, int] = {}
        """Size in bytes of each file that is being uploaded, by its key in the store."""
        self._state = state.absolute()

    async def upload_all(self, plan: GenerationPlan, here: PlanNode) -> tuple[Unstored, ...]:
        """Upload all outputs of this node's ended ranks. A repeated call stores the same objects.

        Args:
            plan: the plan of the ended generation.
            here: this node's entry in the plan.

        Returns:
            At most `MAX_UNSTORED` outputs that are not in S3; empty on success.
        """
        missing: list[Unstored] = []
        failure = partial(OutputFailure, generation=plan.generation)
        user = user_of(plan.run, self._state, self.user)
        uid = os.getuid() if user is None else user.uid
        for rank in here.ranks:
            folder = RankFiles(self._state, plan.run, plan.generation, rank).output_dir
            files, refused = await asyncio.to_thread(_collect, folder)
            for relative, cause in refused:
                words = f"output {_shown(relative)} is not in S3: {_WORDS[cause]}"
                missing.append((failure(rank, _shown(relative), cause), words))
            for relative, path in files:
                key = f"{plan.script.output.key}gen={plan.generation}/rank={rank}/{relative}"
                reference = ObjectReference(bucket=plan.script.output.bucket, key=key)
                if (found := await self._send(folder, path, reference, uid)) is not None:
                    cause, error = found
                    words = f"{reference.key} is not in S3: {error}"
                    missing.append((failure(rank, relative, cause), words))
        for _, words in missing:
            log.warning("%s", words)
        if (more := len(missing) - MAX_UNSTORED) > 0:
            last, words = missing[MAX_UNSTORED - 1]
            words = f"{words}; {more:,} more outputs are not in S3, which the agent's log names"
            missing[MAX_UNSTORED - 1 :] = [(msgspec.structs.replace(last, omitted_count=more), words)]
        return tuple(missing)

    def is_moving(self, since: float) -> bool:
        """Return whether the pending uploads of output files still make progress.

        The caller waits for the uploads while the result is True.

        Args:
            since: monotonic time at which the caller began to wait.

        Returns:
            False if no upload has finished for longer than `still_seconds` allows for the largest pending upload.
        """
        return self.monotonic() - max(since, self._moved_at) < still_seconds(max(self._under_way.values(), default=0))

    def forget(self, run: RunId) -> None:
        """Delete the files with stdout and stderr, and all output files, of a run from this node.

        Called in any thread, when no upload of the run is in progress.
        """
        for folder in (logs_of(self._state, run), outputs_of(self._state, run)):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_streams(self, plan: GenerationPlan) -> None:
        """Delete the files with the ranks' stdout and stderr of a generation from this node.

        The agent calls this in any thread, after it has uploaded all lines of the generation.
        """
        shutil.rmtree(logs_of(self._state, plan.run) / f"gen={plan.generation}", ignore_errors=True)

    async def _send(
        self, folder: Path, path: Path, reference: ObjectReference, uid: int
    ) -> tuple[OutputCause, Exception] | None:
        """Upload one file. Return the cause and the error if it is not in S3, or None.

        The upload reads from a checked file descriptor, because a process may replace the file under its name.
        """
        try:
            file = _open_output(folder.resolve(), path, uid)
        except OSError as error:
            return OutputCause.UNREADABLE, error
        try:
            self._under_way[reference.key] = os.fstat(file).st_size
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


def _collect(folder: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, OutputCause]]]:
    """Return the files below a folder with their relative paths, and the entries that cannot be uploaded.

    A link to a file within the folder counts as this file.
    """
    root = folder.resolve()
    files: list[tuple[str, Path]] = []
    refused: list[tuple[str, OutputCause]] = []

    def unreadable(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # A rank without outputs has no folder.
            refused.append((os.path.relpath(error.filename, root), OutputCause.UNREADABLE))

    for parent, folders, names in os.walk(root, onerror=unreadable, followlinks=False):
        folders.sort()
        for name in sorted([*names, *(name for name in folders if os.path.islink(os.path.join(parent, name)))]):
            path = Path(parent) / name
            relative = path.relative_to(root).as_posix()
            target = Path(os.path.realpath(path))  # Unlike `Path.resolve`, it accepts a loop of links.
            if not target.is_relative_to(root):
                refused.append((relative, OutputCause.OUTSIDE))
            elif not os.path.isfile(target):
                refused.append((relative, OutputCause.NOT_A_FILE))
            elif not _is_text(relative):
                refused.append((relative, OutputCause.NAME))
            else:
                files.append((relative, target))
    return files, refused


def _open_output(root: Path, path: Path, uid: int) -> int:
    """Open a file inside a rank's output folder. Refuse files outside it and files of another user.

    Args:
        root: the folder, without links in its path.
        path: a result of `_collect`.
        uid: the required owner. A hard link to another user's file is refused.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: the file cannot be opened or is refused.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(file)
    if not (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == uid
        and Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(root)
    ):
        os.close(file)
        raise PermissionError(errno.EACCES, "this is not a file of the rank in its output folder")
    return file


def _shown(name: str) -> str:
    """Return the name of an output file without unprintable characters, for a message."""
    return name if _is_text(name) else ascii(name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
