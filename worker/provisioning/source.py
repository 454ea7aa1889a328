"""Fetches, verifies and unpacks the source tree of a job on this node.

    <state>/sources/archives/<sha256>.tar.gz   as fetched; on a spare node, for all jobs that may use the node
    <state>/sources/<run>/…                    the tree in which the run's ranks work
    <state>/sources/<run>.*.new/…              an attempt to unpack; each attempt has its own folder

The tree belongs to the user of the run's ranks. Each generation gets a new tree.

Invariant:
- An archive that differs from the plan, or that would write outside its folder, is never unpacked.
- While ranks of a job may run on this node, no other job's archive is on this node.
- A cancelled attempt never puts a tree in place.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Collection
from pathlib import Path

from everstep.protocol.plan import ScriptPlan, SourceArchive
from everstep.protocol.source_members import RefusedMember, clean_path
from worker.errors import SourceRefused, StoreUnavailable
from worker.node.file_trees import folders_of, remove_tree
from worker.node.full_disks import full_disk_of
from worker.node.rank_user import RankUser, give
from worker.storage.object_store import ObjectStore

MAX_UNPACKED_BYTES = 4 * 1024**3
_placing = threading.Lock()
"""Held while a thread checks for cancellation and moves a tree, so that a cancelled attempt replaces no later tree."""


class SourceArchives:
    """The source archives of this node by digest, owned by the agent. Methods may be called from any thread."""

    def __init__(self, folder: Path, objects: ObjectStore) -> None:
        self._folder = folder
        self._objects = objects
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for scratch in folder.glob("*.new"):
            scratch.unlink()
        self._held = {path.name.removesuffix(".tar.gz") for path in folder.glob("*.tar.gz")}
        self._wanted = frozenset(self._held)
        self._files: tuple[str, dict[str, tuple[int, int]]] = "", {}
        """The digest of an archive and its list of files, as read last."""

    @property
    def held(self) -> tuple[str, ...]:
        """Sorted digests of the source archives on this node. `get` verifies each archive before its use."""
        with self._lock:
            return tuple(sorted(self._held))

    def keep(self, digests: Collection[str]) -> None:
        """Delete all archives except those in `digests` (SHA-256). Running fetches of other archives fail."""
        with self._lock:
            self._wanted = frozenset(digests)
            self._held &= self._wanted
            for path in self._folder.iterdir():
                if path.name.partition(".")[0] not in self._wanted:
                    path.unlink()

    def get(self, source: SourceArchive) -> Path:
        """Return the path of a verified archive; fetch it if it is not on this node. Blocks.

        Raises SourceRefused if the stored object has another digest, or if `keep` excluded the archive during the
        fetch. Raises StorageError, or StoreUnavailable if two reads disagree.
        """
        path = self._folder / f"{source.sha256}.tar.gz"
        # Verify a stored archive again, because an earlier job may have changed it.
        if path.exists() and _digest(path) == source.sha256:
            return path
        found = self._objects.get_bytes(source.object)
        if (digest := hashlib.sha256(found).hexdigest()) != source.sha256:
            found, first = self._objects.get_bytes(source.object), digest  # One wrong read does not condemn the object.
            if (digest := hashlib.sha256(found).hexdigest()) not in (first, source.sha256):
                raise StoreUnavailable(f"two reads of the source archive disagree: {first}; {digest}")
        if digest != source.sha256:
            raise SourceRefused(f"the source archive hashes to {digest}, but the plan requires {source.sha256}")
        scratch = self._folder / f"{source.sha256}.{threading.get_ident()}.new"
        with self._lock:
            if source.sha256 not in self._wanted:
                raise SourceRefused("the source archive is no longer needed on this node")
            scratch.write_bytes(found)
            scratch.replace(path)
            self._held.add(source.sha256)
        return path

    def files(self, source: SourceArchive) -> dict[str, tuple[int, int]]:
        """Return size and modification time (Unix seconds) by path of the files in an archive, which is read only once.

        Raises OSError if the archive is not on this node, and tarfile.TarError if it is damaged.
        """
        digest, files = self._files
        if digest != source.sha256:
            with tarfile.open(self._folder / f"{source.sha256}.tar.gz", "r:gz") as tar:
                files = {clean_path(member): (member.size, int(member.mtime)) for member in tar if member.isfile()}
            self._files = source.sha256, files
        return files


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def fetch_source(
    archives: SourceArchives, script: ScriptPlan, folder: Path, user: RankUser | None = None
) -> Path:
    """Fetch and unpack a job's source tree, and return the path of the entry point. Deletes archives of other jobs.

    A cancelled call returns immediately. Its thread may still wait for the store, and ends later without effect. Raises
    SourceRefused if the archive differs from the plan or is damaged, and StorageError if the store cannot be reached.
    """
    cancelled = threading.Event()

    def work() -> Path:
        _check_wanted(cancelled)
        # A rank could read all archives, so delete the archives of other jobs before the ranks start.
        archives.keep({script.source.sha256})
        entry = unpack(archives.get(script.source), script, folder, cancelled, user)
        archives.files(script.source)  # Read the list now, because its later use cannot be cancelled.
        return entry

    try:
        return await asyncio.to_thread(work)
    finally:
        cancelled.set()


def unpack(
    archive: Path, script: ScriptPlan, folder: Path, cancelled: threading.Event, user: RankUser | None = None
) -> Path:
    """Unpack a fetched source archive in place of an existing tree, and return the path of the entry point. Idempotent.

    `cancelled` is set when the caller has stopped waiting. An existing tree then stays unchanged. Raises SourceRefused
    for a wrong digest, an unsafe member, a missing entry point, too many bytes or a cancellation, and OSError if the
    disk is full.
    """
    found = _digest(archive)
    if found != script.source.sha256:
        raise SourceRefused(f"the source archive hashes to {found}, but the plan requires {script.source.sha256}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".new", dir=folder.parent))
    try:
        _extract(archive, scratch, cancelled)
        if user is not None:
            give(scratch, user)
        with _placing:
            _check_wanted(cancelled)
            remove_tree(folder, ignore_errors=True)
            scratch.replace(folder)
    except RefusedMember as error:
        raise SourceRefused(f"the source archive: {error}") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, LookupError, ArithmeticError) as error:
        if full_disk_of(error) is not None:
            raise
        # `tarfile` raises ValueError, LookupError or ArithmeticError for some invalid headers.
        raise SourceRefused(f"the source archive is damaged: {error}") from error
    finally:
        remove_tree(scratch, ignore_errors=True)
    entry = (folder / script.entry_point).resolve()
    if not entry.is_relative_to(folder.resolve()) or not entry.is_file():
        raise SourceRefused(f"EntryPoint {script.entry_point!r} is not a file of the source tree")
    return entry


def _extract(archive: Path, scratch: Path, cancelled: threading.Event) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        size = 0
        for member in tar:
            _check_wanted(cancelled)
            path = scratch / clean_path(member)
            size += member.size
            if size > MAX_UNPACKED_BYTES:
                raise SourceRefused(f"the source archive unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
            _place(tar, member, path)
    for at, _, _ in folders_of(scratch):
        os.fchmod(at, 0o755)


def _check_wanted(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise SourceRefused("the source tree is no longer needed on this node")


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Create a directory or a file of an archive whose path `clean_path` has accepted, with mode 0755 or 0644."""
    # tarfile's own filter does not exist before Python 3.11.4, and Debian 12 has 3.11.2.
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, "clean_path accepts regular files only"
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(path, (member.mtime, member.mtime))
