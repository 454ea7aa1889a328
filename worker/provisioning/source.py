"""The user's source tree on this node: fetched, checked, unpacked.

    <state>/sources/archives/<sha256>.tar.gz   as fetched; of a spare, of all jobs that it may be given to
    <state>/sources/<run>/…                    the tree that the run's ranks work in
    <state>/sources/<run>.*.new/…              what is being unpacked, each attempt by itself

What is unpacked is this process's, and readable by all who can come so far: ranks can run it, and where their user is
another, not change it.

Invariant: nothing of an archive that is not exactly what the plan names, or that would write outside its folder, ever
reaches the disk unpacked; while ranks of one job may run here, no archive of another one is here; an attempt that
nobody waits for any more puts no tree in place.
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
from worker.errors import SourceRefused
from worker.node.full_disks import full_disk_of
from worker.storage.object_store import ObjectStore

MAX_UNPACKED_BYTES = 4 * 1024**3
_placing = threading.Lock()
"""Held from the look whether a tree is still wanted until it is in its place: a later attempt's tree always replaces an earlier one's."""


class SourceArchives:
    """The archives of this node, each by its digest. One per agent; its methods may be called from any thread.

    Args:
        folder: of theirs alone; made if need be.
        objects: where they come from.
    """

    def __init__(self, folder: Path, objects: ObjectStore) -> None:
        self._folder = folder
        self._objects = objects
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for scratch in folder.glob("*.new"):
            scratch.unlink()
        self._held = {path.name.removesuffix(".tar.gz") for path in folder.glob("*.tar.gz")}
        self._wanted = frozenset(self._held)

    @property
    def held(self) -> tuple[str, ...]:
        """What is here, by digest, sorted.

        What an earlier agent has left counts: `get` verifies it before anybody has it.
        """
        with self._lock:
            return tuple(sorted(self._held))

    def keep(self, digests: Collection[str]) -> None:
        """Drop all other archives, those that are being fetched included; returns when none of them is on the disk.

        Args:
            digests: SHA-256 of what may be here from now on.
        """
        with self._lock:
            self._wanted = frozenset(digests)
            self._held &= self._wanted
            for path in self._folder.iterdir():
                if path.name.partition(".")[0] not in self._wanted:
                    path.unlink()

    def get(self, source: SourceArchive) -> Path:
        """Return an archive that is what its digest says, fetching it unless it is here. Blocks.

        Args:
            source: whose.

        Returns:
            The gzipped tar.

        Raises:
            SourceRefused: what the store has under its name is another one, or `keep` has dropped it meanwhile.
            StorageError: it is out of reach.
        """
        path = self._folder / f"{source.sha256}.tar.gz"
        if path.exists() and _digest(path) == source.sha256:  # whoever worked here before could write to it
            return path
        found = self._objects.get_bytes(source.object)
        if (digest := hashlib.sha256(found).hexdigest()) != source.sha256:
            raise SourceRefused(f"the source archive hashes to {digest}; the plan says {source.sha256}")
        scratch = self._folder / f"{source.sha256}.{threading.get_ident()}.new"
        with self._lock:
            if source.sha256 not in self._wanted:
                raise SourceRefused("the source archive is not wanted any more")
            scratch.write_bytes(found)
            scratch.replace(path)
            self._held.add(source.sha256)
        return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def fetch_source(archives: SourceArchives, script: ScriptPlan, folder: Path) -> Path:
    """Put a job's source tree in its place.

    Cancelled, it returns at once; the thread, which may hang in the store, ends later and changes nothing.

    Args:
        archives: of this node; all but this one are dropped.
        script: what the plan says.
        folder: where the tree goes; replaced when it is there.

    Returns:
        The entry point within `folder`.

    Raises:
        SourceRefused: it is not what the plan says, or not sound.
        StorageError: the archive is out of reach.
    """
    cancelled = threading.Event()

    def work() -> Path:
        _check_wanted(cancelled)
        archives.keep({script.source.sha256})  # before any rank is started: it could read all of them
        return unpack(archives.get(script.source), script, folder, cancelled)

    try:
        return await asyncio.to_thread(work)
    finally:
        cancelled.set()


def unpack(archive: Path, script: ScriptPlan, folder: Path, cancelled: threading.Event) -> Path:
    """Unpack a fetched source archive; doing it again gives the same tree.

    Args:
        archive: the gzipped tar as fetched.
        script: what the plan says of it.
        folder: where the tree goes; replaced when it is there.
        cancelled: set when nobody waits for it any more: what is in place then stays.

    Returns:
        The entry point within `folder`.

    Raises:
        SourceRefused: another digest, an unsafe member, too large, no such entry point, or cancelled.
        OSError: the disk is full.
    """
    found = _digest(archive)
    if found != script.source.sha256:
        raise SourceRefused(f"the source archive hashes to {found}; the plan says {script.source.sha256}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".new", dir=folder.parent))
    try:
        _extract(archive, scratch, cancelled)
        with _placing:
            _check_wanted(cancelled)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.replace(folder)
    except RefusedMember as error:
        raise SourceRefused(f"the source archive: {error}") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, LookupError, ArithmeticError) as error:
        if full_disk_of(error) is not None:
            raise
        # `tarfile` raises the last three for numbers and maps in pax headers that are none.
        raise SourceRefused(f"the source archive is not sound: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    entry = (folder / script.entry_point).resolve()
    if not entry.is_relative_to(folder.resolve()) or not entry.is_file():
        raise SourceRefused(f"EntryPoint {script.entry_point!r} is not a file of the source tree")
    return entry


def _extract(archive: Path, scratch: Path, cancelled: threading.Event) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        size = 0
        for member in tar:
            _check_wanted(cancelled)
            clean_path(member)
            size += member.size
            if size > MAX_UNPACKED_BYTES:
                raise SourceRefused(f"the source archive unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
            tar.extract(member, scratch, filter=_readable)
    for parent, _, _ in os.walk(scratch):
        os.chmod(parent, 0o755)


def _check_wanted(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise SourceRefused("the source tree is not wanted any more")


def _readable(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return what is unpacked for a member: what Python's own filter lets pass, with two modes for whoever packed it and whatever the umask."""
    passed = tarfile.data_filter(member, folder)
    return passed if passed.isdir() else passed.replace(mode=0o755 if (member.mode or 0) & 0o100 else 0o644, deep=False)
