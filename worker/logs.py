"""What ranks print and put out, on its way to the object store.

    <log key>gen=<g>/rank=<r>.stdout | .stderr       sent again while the rank runs, and once more when it has ended
    <output key>gen=<g>/rank=<r>/<path>              sent when the ranks have ended

A stream that grows is sent whole each time: at once while it is short, and then each time it has grown by a quarter, so that all sendings
together stay within a few times its length.

Invariant: nothing outside of a rank's output folder is ever sent, whatever links the folder holds; and no failure in here stops a job: what is
not in the store is told in a sentence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan, ObjectReference, PlanNode
from worker.errors import StorageError
from worker.rank_files import RankFiles, logs_of, outputs_of

log = logging.getLogger(__name__)

LIVE_SECONDS = 3.0
"""Between two looks at streams of running ranks."""
SHORT_BYTES = 1024 * 1024
"""A stream of up to this length is sent again whenever it has changed."""
GROWTH = 1.25
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0


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


class RankLogs:
    """One per agent."""

    def __init__(self, state: Path, objects: FileStore) -> None:
        self._state = state.absolute()
        self._objects = objects
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
                size = _size(path)
                if size is None or not is_due(size, self._sent.get(path)):
                    continue
                try:
                    await asyncio.to_thread(self._objects.put_file, reference, path, size)
                except StorageError as error:
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
            A sentence for each thing that is not in the store; empty when all is.
        """
        missing = []
        for path, reference in self._streams(plan, here):
            size = _size(path)
            if size is None:
                continue  # never started
            missing += await self._send(path, reference, size)
            self._sent.pop(path, None)
        for rank in here.ranks:
            folder = RankFiles(self._state, plan.run, plan.generation, rank).output_dir
            files, refused = await asyncio.to_thread(_collect, folder)
            missing += refused
            for relative, path in files:
                key = f"{plan.script.output.key}gen={plan.generation}/rank={rank}/{relative}"
                missing += await self._send(path, ObjectReference(bucket=plan.script.output.bucket, key=key), None)
        for sentence in missing:
            log.warning("%s", sentence)
        return tuple(missing)

    def forget(self, run: RunId) -> None:
        """Remove all streams and outputs of a run from this node. From any thread; nothing of the run is being sent any more."""
        for folder in (logs_of(self._state, run), outputs_of(self._state, run)):
            shutil.rmtree(folder, ignore_errors=True)

    def _streams(self, plan: GenerationPlan, here: PlanNode) -> Iterator[tuple[Path, ObjectReference]]:
        place = plan.script.logs
        for rank in here.ranks:
            files = RankFiles(self._state, plan.run, plan.generation, rank)
            for path in (files.stdout, files.stderr):
                yield path, ObjectReference(bucket=place.bucket, key=f"{place.key}gen={plan.generation}/{path.name}")

    async def _send(self, path: Path, reference: ObjectReference, size: int | None) -> list[str]:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await asyncio.to_thread(self._objects.put_file, reference, path, size)
                return []
            except OSError as error:
                return [f"{reference.key} is not in S3: {error}"]
            except StorageError as error:
                if not error.retryable or attempt == MAX_ATTEMPTS:
                    return [f"{reference.key} is not in S3: {error}"]
            await asyncio.sleep(RETRY_SECONDS * attempt)
        raise AssertionError


def is_due(size: int, sent: int | None) -> bool:
    """Say whether a stream that is now `size` bytes long, and was `sent` bytes long when it was sent last, is to be sent again. Pure."""
    if sent is None or size <= sent:
        return sent is None
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
                refused.append(f"output {relative} is not in S3: it is a link that leads out of the output folder")
            elif not target.is_file():
                refused.append(f"output {relative} is not in S3: it is not a file")
            elif not _is_text(relative):
                refused.append(f"output {relative!a} is not in S3: its name is not UTF-8")
            else:
                files.append((relative, target))
    return files, refused


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
