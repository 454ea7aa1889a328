"""Rules for input channels: the path of each file, and the choice of cached files to evict. No I/O.

An input channel is a named set of S3 objects that ranks read as files in one directory.

Invariant: no file of a channel is placed outside the channel's directory, no two files share a path, and no file that a
run uses is evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_NAME_BYTES = 255
"""Maximum length of one path component on Linux."""


class Misplaced(Exception):
    """Raised for an S3 key that cannot be the path of an input file. The text contains the reason."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One cached S3 object in the node's cache of input files."""

    name: str
    bytes: int
    used_at: float
    """Unix time of the last use. The least recently used file is evicted first."""
    is_linked: bool
    """True if the directory of a run contains a link to the file. Such a file is never evicted."""


@dataclass(frozen=True, slots=True)
class Room:
    """Result of `make_room`: the files to evict, and the bytes that are still missing afterwards."""

    dropped: tuple[str, ...]
    """Names of the files to evict, the least recently used file first."""
    lacking_bytes: int
    """Bytes by which the cache of input files exceeds its limit after the evictions; 0 if all wanted files fit."""


def place_of(key: str, prefix: str) -> PurePosixPath | None:
    """Return the path of an object relative to its channel's directory.

    Args:
        key: key of the object; begins with `prefix`.
        prefix: prefix of the channel; ends with a slash, or is empty.

    Returns:
        The relative path; None for the empty object that the S3 console creates for a folder.

    Raises:
        Misplaced: the path would be outside the directory, or a component of the key is no valid file name.
    """
    below = key[len(prefix) :]
    if not below or below.endswith("/"):
        return None
    for part in below.split("/"):
        if part in ("", ".", "..") or "\x00" in part:
            raise Misplaced(f"the key {key!r} is no path of a file")
        if len(part.encode()) > MAX_NAME_BYTES:
            raise Misplaced(f"the key {key!r} has a part of more than {MAX_NAME_BYTES} bytes")
    return PurePosixPath(below)


def check_places(places: Sequence[PurePosixPath]) -> None:
    """Check that no path of an input channel is both a file and a folder.

    Args:
        places: the paths of all files of a channel.

    Raises:
        Misplaced: a path is also the folder of another path; the error text names both.
    """
    files = set(places)
    for place in places:
        for parent in place.parents:
            if parent in files:
                raise Misplaced(f"{str(parent)!r} would be a file, and the folder of {str(place)!r}")


def make_room(held: Sequence[HeldFile], wanted: Mapping[str, int], limit_bytes: int) -> Room:
    """Choose the cached files to evict so that all wanted files fit.

    Args:
        held: all files of the cache.
        wanted: size in bytes of every wanted file by name, including files that are already cached.
        limit_bytes: maximum size of the cache.

    Returns:
        The files to evict, and the bytes that are still missing afterwards. Wanted files, and files to which the
        directory of a run links, are never evicted.
    """
    there = {file.name for file in held}
    total = sum(file.bytes for file in held) + sum(size for name, size in wanted.items() if name not in there)
    dropped: list[str] = []
    for file in sorted(held, key=lambda file: (file.used_at, file.name)):
        if total <= limit_bytes:
            break
        if file.is_linked or file.name in wanted:
            continue
        dropped.append(file.name)
        total -= file.bytes
    return Room(tuple(dropped), max(0, total - limit_bytes))
