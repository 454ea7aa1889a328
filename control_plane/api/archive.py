"""Whether a user's source archive is what it should be: a gzipped tar of plain files, and nothing that could hurt who unpacks it.

Nothing is unpacked here: the archive is read once, as a stream, and every bound is enforced while reading. `tarfile` takes a header into memory
whole, however long it says it is: so what is not content of a file has bounds of its own.

Invariant: an archive that passes holds only directories and regular files with clean relative paths, within the limits; no archive takes more memory
than its paths and one header.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from control_plane.api.deps import SourceLimits

SMALL_BYTES = 1024 * 1024
"""Below this an archive may be compressed as well as it likes."""
HEADER_BYTES = 64 * 1024
"""Of one file or directory: what pax and GNU put before it is a few hundred bytes, and some KiB with extended attributes."""
MEAN_HEADER_BYTES = 4 * tarfile.BLOCKSIZE
"""The same on average; more than a header and a pax header with its block take."""
GLOBAL_HEADERS = 100
"""pax headers of all that follows; git writes one."""


class RefusedArchive(Exception):
    """The archive cannot be taken; the message says what is wrong with which member."""


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """What is in an archive."""

    files: tuple[str, ...]
    """Relative paths, sorted."""
    unpacked_bytes: int


def inspect(file: BinaryIO, archive_bytes: int, limits: SourceLimits) -> ArchiveContents:
    """Read an archive and check everything about it.

    Args:
        file: the archive, from its current position on.
        archive_bytes: its length.
        limits: what it may be.

    Returns:
        Its files.

    Raises:
        RefusedArchive: a link, a device, an absolute path, a `..`, a doubled path, too many files or bytes, or not a gzipped tar.
    """
    unpacked_limit = min(limits.unpacked_bytes, max(SMALL_BYTES, archive_bytes * limits.ratio))
    files: set[str] = set()
    directories: set[str] = set()
    directory_count = unpacked_bytes = 0
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
            stream = _Bounded(unzipped, 2 * limits.file_count * MEAN_HEADER_BYTES)
            for member in _members(stream):
                path = _clean_path(member)
                if member.isdir():
                    directory_count += 1
                    directories.add(path)
                    if directory_count > limits.file_count:
                        raise RefusedArchive(f"more than {limits.file_count} directories")
                    stream.expect(0)
                    continue
                if path in files:
                    raise RefusedArchive(f"{path!r} is in the archive twice")
                files.add(path)
                unpacked_bytes += member.size
                if len(files) > limits.file_count:
                    raise RefusedArchive(f"more than {limits.file_count} files")
                if unpacked_bytes > unpacked_limit:
                    raise RefusedArchive(f"more than {unpacked_limit} bytes when unpacked")
                stream.expect(member.size)
            stream.drain()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise RefusedArchive(f"not a whole gzipped tar: {error}") from error
    if not files:
        raise RefusedArchive("no files in it")
    for path in files | directories:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]) in files:
                raise RefusedArchive(f"{'/'.join(parents[:depth])!r} is both a file and a directory")
    return ArchiveContents(tuple(sorted(files)), unpacked_bytes)


def _members(stream: _Bounded) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            archive.members.clear()  # it would keep every one
            if len(archive.pax_headers) > GLOBAL_HEADERS:
                raise RefusedArchive(f"more than {GLOBAL_HEADERS} pax headers of the whole archive")
            yield member


def _clean_path(member: tarfile.TarInfo) -> str:
    name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.issparse():
        raise RefusedArchive(f"{name!r} is {_kind(member)}; only files and directories are taken")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or any(ord(letter) < 32 for letter in name):
        raise RefusedArchive(f"{name!r} is not a clean relative path")
    path = "/".join(part for part in parts if part not in ("", "."))
    if len(path.encode(errors="surrogatepass")) > 1024:
        raise RefusedArchive(f"the path {path[:80]!r}… is longer than 1024 bytes")
    if not path and not member.isdir():
        raise RefusedArchive("a file without a name")
    return path


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"a symbolic link to {member.linkname!r}"
    if member.islnk():
        return f"a hard link to {member.linkname!r}"
    if member.isdev():
        return "a device or a pipe"
    return "of a special kind"


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
        """Let a file's content pass, and one header more; called before what follows a header is read. `tarfile` reads ahead, by a record at most."""
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
