"""Checks that a user's source archive is a gzipped tar of plain files with nothing that could hurt whoever unpacks it.

    server process                                   python -m control_plane.api.archive ARCHIVE_BYTES LIMITS
    inspect_apart(file)   the archive ──▶ stdin      inspect: one pass over the stream, every bound enforced while reading
                          JSON        ◀── stdout     within CPU_SECONDS and MEMORY_BYTES, which the kernel enforces

Nothing is unpacked here. `tarfile` reads a header into memory whole, however long it claims to be, so headers have
bounds of their own.

Invariant: an archive that passes holds only directories and regular files with clean relative paths, within the limits.
No archive takes more memory than its paths and one header, or more time than is linear in its length and its paths.
This module imports nothing but the standard library and the rule for one member.
"""

from __future__ import annotations

import gzip
import json
import logging
import resource
import subprocess
import sys
import tarfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, BinaryIO

from everstep.protocol.source_members import RefusedMember, clean_path

log = logging.getLogger(__name__)

SMALL_BYTES = 1024 * 1024
"""Below this an archive may be compressed as well as it likes."""
HEADER_BYTES = 64 * 1024
"""Of one file or directory: what pax and GNU put before it is a few hundred bytes, and some KiB with extended attributes."""
MEAN_HEADER_BYTES = 4 * tarfile.BLOCKSIZE
"""The same on average; more than a header and a pax header with its block take."""
GLOBAL_HEADERS = 100
"""pax headers of all that follows; git writes one."""
ALL_PATHS_BYTES = 2 * 1024 * 1024
"""All paths of one archive: the database keeps them."""
CPU_SECONDS = 30
MEMORY_BYTES = 512 * 1024 * 1024
_WAIT_SECONDS = 120.0
_AT_ONCE = threading.BoundedSemaphore(2)
"""Archives that are inspected at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """What a source archive may be."""

    archive_bytes: int = 256 * 1024 * 1024
    unpacked_bytes: int = 2 * 1024 * 1024 * 1024
    file_count: int = 20_000
    ratio: int = 200
    """Unpacked ÷ packed; above it (and above 1 MiB) an archive is a bomb, not code."""


class RefusedArchive(Exception):
    """The archive cannot be taken; the message says what is wrong with which member."""


class ArchiveTooLarge(RefusedArchive):
    """The archive has too many files or bytes; the user can leave some out."""


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """What is in an archive."""

    files: tuple[str, ...]
    """Relative paths, sorted."""
    unpacked_bytes: int


def inspect_apart(file: IO[bytes], archive_bytes: int, limits: SourceLimits) -> ArchiveContents:
    """Inspect an archive in a process of its own, so that it costs other callers neither memory nor the interpreter.

    Blocks.

    Args:
        file: the archive, at its beginning; a file on disk, or one that `fileno` puts there. Its position changes.
        archive_bytes: its length.
        limits: what it may be.

    Returns:
        Its files.

    Raises:
        RefusedArchive: as `inspect`, or the archive takes more time or memory than an archive may.
    """
    given = json.dumps(asdict(limits))
    command = [sys.executable, "-P", "-m", "control_plane.api.archive", str(archive_bytes), given]
    with _AT_ONCE:
        try:
            ended = subprocess.run(
                command, stdin=file.fileno(), capture_output=True, timeout=_WAIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RefusedArchive(f"it takes more than {_WAIT_SECONDS:.0f} s to read") from error
    if ended.returncode:
        log.warning("the inspection of an archive ended with %d: %s", ended.returncode, ended.stderr[-500:])
        raise RefusedArchive(f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES} bytes of memory to read")
    found = json.loads(ended.stdout)
    if "refused" in found:
        raise (ArchiveTooLarge if found["is_too_large"] else RefusedArchive)(found["refused"])
    return ArchiveContents(tuple(found["files"]), found["unpacked_bytes"])


def main(arguments: list[str]) -> None:
    """Inspect the archive at standard input. Called in a process of its own, by `inspect_apart`.

    Args:
        arguments: the archive's length, and the limits as JSON.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        contents = inspect(sys.stdin.buffer, int(arguments[0]), SourceLimits(**json.loads(arguments[1])))
        found: dict[str, object] = {"files": contents.files, "unpacked_bytes": contents.unpacked_bytes}
    except RefusedArchive as error:
        found = {"refused": str(error), "is_too_large": isinstance(error, ArchiveTooLarge)}
    sys.stdout.write(json.dumps(found))


def inspect(file: BinaryIO, archive_bytes: int, limits: SourceLimits) -> ArchiveContents:
    """Read an archive and check everything about it.

    Args:
        file: the archive, from its current position on.
        archive_bytes: its length.
        limits: what it may be.

    Returns:
        Its files.

    Raises:
        RefusedArchive: a link, a device, an absolute path, a `..`, a doubled path, too many files or bytes, or not a
            gzipped tar.
    """
    unpacked_limit = min(limits.unpacked_bytes, max(SMALL_BYTES, archive_bytes * limits.ratio))
    files: set[str] = set()
    directories: set[str] = set()
    directory_count = unpacked_bytes = path_bytes = 0
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
            stream = _Bounded(unzipped, 2 * limits.file_count * MEAN_HEADER_BYTES)
            for member in _members(stream):
                path = clean_path(member)
                path_bytes += len(path)
                if path_bytes > ALL_PATHS_BYTES:
                    raise ArchiveTooLarge(f"paths of more than {ALL_PATHS_BYTES} bytes in all")
                if member.isdir():
                    directory_count += 1
                    directories.add(path)
                    if directory_count > limits.file_count:
                        raise ArchiveTooLarge(f"more than {limits.file_count} directories")
                    stream.expect(0)
                    continue
                if path in files:
                    raise RefusedArchive(f"{path!r} is in the archive twice")
                files.add(path)
                unpacked_bytes += member.size
                if len(files) > limits.file_count:
                    raise ArchiveTooLarge(f"more than {limits.file_count} files")
                if unpacked_bytes > unpacked_limit:
                    raise ArchiveTooLarge(
                        f"more than {unpacked_limit / 2**20:.4g} MiB ({unpacked_limit} bytes) when unpacked"
                    )
                stream.expect(member.size)
            stream.drain()
    except RefusedMember as error:
        raise RefusedArchive(str(error)) from error
    except (
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        ValueError,
        LookupError,
        ArithmeticError,
    ) as error:
        # `tarfile` raises the last three for numbers and maps in pax headers that are none.
        raise RefusedArchive(f"not a whole gzipped tar: {error}") from error
    if not files:
        raise RefusedArchive("no files in it")
    for path in sorted(_parents(files | directories) & files):
        raise RefusedArchive(f"{path!r} is both a file and a directory")
    return ArchiveContents(tuple(sorted(files)), unpacked_bytes)


def _parents(paths: set[str]) -> set[str]:
    """Return every directory that the paths lie in. Each is visited once, however many paths lie in it."""
    found: set[str] = set()
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent and parent not in found:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return found


def _members(stream: _Bounded) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            archive.members.clear()  # it would keep every one
            if len(archive.pax_headers) > GLOBAL_HEADERS:
                raise RefusedArchive(f"more than {GLOBAL_HEADERS} pax headers of the whole archive")
            yield member


class _Bounded:
    """A stream that ends in an error instead of going on for ever.

    Args:
        stream: the archive, unpacked.
        besides_bytes: what may come besides the content of files, in all.
    """

    def __init__(self, stream: gzip.GzipFile, besides_bytes: int) -> None:
        self._stream = stream
        self._besides_bytes = besides_bytes
        self._left = besides_bytes
        self._left_before_next = HEADER_BYTES + tarfile.RECORDSIZE

    def expect(self, content_bytes: int) -> None:
        """Let a file's content pass, and one header more; called before what follows a header is read.

        `tarfile` reads ahead, by a record at most.
        """
        padded = -(-content_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        self._left += padded
        self._left_before_next = padded + HEADER_BYTES + tarfile.RECORDSIZE

    def read(self, size: int) -> bytes:
        data = self._taken(size)
        self._left_before_next -= len(data)
        if self._left_before_next < 0:
            raise RefusedArchive(f"a header of more than {HEADER_BYTES} bytes")
        return data

    def drain(self) -> None:
        """Read to the end, so that a cut or forged tail is found."""
        while self._taken(SMALL_BYTES):
            pass

    def _taken(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise RefusedArchive(f"more than {self._besides_bytes} bytes besides the content of its files")
        return data


if __name__ == "__main__":
    main(sys.argv[1:])
