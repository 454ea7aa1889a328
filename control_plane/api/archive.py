"""Checks that a source archive is a gzipped tar of plain files that is safe to unpack.

    server process                                   python -m control_plane.api.archive ARCHIVE_BYTES LIMITS
    inspect_apart(file)   the archive ──▶ stdin      inspect: one pass over the stream, limits enforced while reading
                          JSON        ◀── stdout     within CPU_SECONDS and MEMORY_BYTES, enforced by the kernel

Invariant: an accepted archive contains only directories and regular files with clean relative paths, within the limits.
The check needs memory for the paths and one header, whose length is limited because `tarfile` reads it whole. Standard
library and `everstep.protocol.source_members` only.
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
"""Unpacked size below which the compression ratio is ignored."""
HEADER_BYTES = 64 * 1024
"""Limit of one member. pax and GNU headers have a few hundred bytes, or some KiB with extended attributes."""
MEAN_HEADER_BYTES = 4 * tarfile.BLOCKSIZE
"""Limit of the mean: an ordinary header and a pax header with one block of data each."""
GLOBAL_HEADERS = 100
"""Global pax headers per archive. git writes one."""
ALL_PATHS_BYTES = 2 * 1024 * 1024
"""Limit of an archive's paths together, because the database stores them."""
CPU_SECONDS = 30
MEMORY_BYTES = 512 * 1024 * 1024
_WAIT_SECONDS = 120.0
_AT_ONCE = threading.BoundedSemaphore(2)
_turns: dict[str, threading.Lock] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """Size limits of a source archive."""

    archive_bytes: int = 256 * 1024 * 1024
    unpacked_bytes: int = 2 * 1024 * 1024 * 1024
    file_count: int = 20_000
    ratio: int = 200
    """Highest unpacked size ÷ packed size above `SMALL_BYTES`, against decompression bombs."""


class RefusedArchive(Exception):
    """The archive is rejected. The message names the member and the problem."""


class ArchiveTooLarge(RefusedArchive):
    """The archive has too many files or bytes. Users can exclude files and upload it again."""


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """The paths of the files in an archive, and their total size."""

    files: tuple[str, ...]
    """Relative to the archive's root, sorted."""
    unpacked_bytes: int


def turn_of(project: str) -> threading.Lock:
    """Return the lock of a project's inspections. One at a time leaves a place to other projects."""
    # A refused archive can take all its CPU seconds, and no quota counts it.
    return _turns.setdefault(project, threading.Lock())


def inspect_apart(file: IO[bytes], archive_bytes: int, limits: SourceLimits) -> ArchiveContents:
    """Inspect an archive in a separate process, apart from the server's memory and interpreter. Blocks.

    `file` is at its beginning, and has a file descriptor or creates one in `fileno()`. Reading moves its position.
    Raises RefusedArchive if `inspect` rejected the archive, or the inspection exceeded its limits of time or memory.
    """
    given = json.dumps(asdict(limits))
    command = [sys.executable, "-P", "-m", "control_plane.api.archive", str(archive_bytes), given]
    with _AT_ONCE:
        try:
            ended = subprocess.run(
                command, stdin=file.fileno(), capture_output=True, timeout=_WAIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RefusedArchive(f"reading it takes more than {_WAIT_SECONDS:.0f} s") from error
    if ended.returncode:
        log.warning("the inspection of an archive ended with %d: %s", ended.returncode, ended.stderr[-500:])
        raise RefusedArchive(
            f"reading it takes more than {CPU_SECONDS} s of CPU time or {MEMORY_BYTES} bytes of memory"
        )
    found = json.loads(ended.stdout)
    if "refused" in found:
        raise (ArchiveTooLarge if found["is_too_large"] else RefusedArchive)(found["refused"])
    return ArchiveContents(tuple(found["files"]), found["unpacked_bytes"])


def main(arguments: list[str]) -> None:
    """Inspect the archive at standard input. `arguments` are its size and the limits as JSON."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        contents = inspect(sys.stdin.buffer, int(arguments[0]), SourceLimits(**json.loads(arguments[1])))
        found: dict[str, object] = {"files": contents.files, "unpacked_bytes": contents.unpacked_bytes}
    except RefusedArchive as error:
        found = {"refused": str(error), "is_too_large": isinstance(error, ArchiveTooLarge)}
    sys.stdout.write(json.dumps(found))


def inspect(file: BinaryIO, archive_bytes: int, limits: SourceLimits) -> ArchiveContents:
    """Read an archive from its current position, and check all its members.

    Raises RefusedArchive for a link, a device, an absolute path, a `..`, a duplicate path, or too many files or bytes,
    and if the archive is not a gzipped tar.
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
                    raise ArchiveTooLarge(f"its paths have more than {ALL_PATHS_BYTES} bytes in total")
                if member.isdir():
                    directory_count += 1
                    directories.add(path)
                    if directory_count > limits.file_count:
                        raise ArchiveTooLarge(f"it contains more than {limits.file_count} directories")
                    stream.expect(0)
                    continue
                if path in files:
                    raise RefusedArchive(f"{path!r} occurs twice in the archive")
                files.add(path)
                unpacked_bytes += member.size
                if len(files) > limits.file_count:
                    raise ArchiveTooLarge(f"it contains more than {limits.file_count} files")
                if unpacked_bytes > unpacked_limit:
                    raise ArchiveTooLarge(
                        f"it has more than {unpacked_limit / 2**20:.4g} MiB ({unpacked_limit} bytes) when unpacked"
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
        # `tarfile` raises ValueError, LookupError or ArithmeticError if a pax header contains an invalid number or an
        # invalid map of a sparse file.
        raise RefusedArchive(f"it is not a complete gzipped tar: {error}") from error
    if not files:
        raise RefusedArchive("it contains no files")
    for path in sorted(_parents(files | directories) & files):
        raise RefusedArchive(f"{path!r} is both a file and a directory")
    return ArchiveContents(tuple(sorted(files)), unpacked_bytes)


def _parents(paths: set[str]) -> set[str]:
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
            archive.members.clear()  # Free the memory of earlier members, which tarfile collects in this list.
            if len(archive.pax_headers) > GLOBAL_HEADERS:
                raise RefusedArchive(f"it contains more than {GLOBAL_HEADERS} global pax headers")
            yield member


class _Bounded:
    """A stream that raises RefusedArchive once headers and padding exceed `besides_bytes`."""

    def __init__(self, stream: gzip.GzipFile, besides_bytes: int) -> None:
        self._stream = stream
        self._besides_bytes = besides_bytes
        self._left = besides_bytes
        self._left_before_next = HEADER_BYTES + tarfile.RECORDSIZE

    def expect(self, content_bytes: int) -> None:
        """Permit the next `content_bytes` bytes of the stream in addition, after the header of a file."""
        padded = -(-content_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        self._left += padded
        self._left_before_next = padded + HEADER_BYTES + tarfile.RECORDSIZE

    def read(self, size: int) -> bytes:
        data = self._taken(size)
        self._left_before_next -= len(data)
        if self._left_before_next < 0:
            raise RefusedArchive(f"it contains a header of more than {HEADER_BYTES} bytes")
        return data

    def drain(self) -> None:
        """Read the rest of the stream, because the gzip reader verifies the checksum at the end."""
        while self._taken(SMALL_BYTES):
            pass

    def _taken(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise RefusedArchive(f"it contains more than {self._besides_bytes} bytes besides the content of its files")
        return data


if __name__ == "__main__":
    main(sys.argv[1:])
