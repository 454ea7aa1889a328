"""Rules for input channels: the path of each file, and the choice of cached files to evict.

Invariant: no file is placed outside its channel's directory, no two files share a path, and no file that a run uses is
evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_NAME_BYTES = 255


class Misplaced(Exception):
    """Raised for an S3 key that cannot be the path of an input file."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One cached S3 object in the node's cache of input files."""

    name: str
    bytes: int
    used_at: float
    """Unix time of the last use."""
    is_linked: bool
    """True if the directory of a run contains a link to the file. Such a file is never evicted."""


@dataclass(frozen=True, slots=True)
class Room:
    """Result of `make_room`."""

    dropped: tuple[str, ...]
    """Names of the files to evict, the least recently used file first."""
    lacking_bytes: int
    """Bytes by which the cache still exceeds its limit after the evictions; 0 if all wanted files fit."""


def place_of(key: str, prefix: str) -> PurePosixPath | None:
    """Return the path of an object relative to its channel's directory; None for a folder of the S3 console.

    `key` begins with `prefix`, which ends with a slash or is empty. Raises Misplaced if the path would be outside the
    directory, or a component is not a valid file name.
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
    """Check the paths of all files of a channel. Raises Misplaced if a path is also the folder of another path."""
    files = set(places)
    for place in places:
        for parent in place.parents:
            if parent in files:
                raise Misplaced(f"{str(parent)!r} would be a file, and the folder of {str(place)!r}")


def make_room(held: Sequence[HeldFile], wanted: Mapping[str, int], limit_bytes: int) -> Room:
    """Choose the cached files to evict so that all wanted files (name and bytes) fit into `limit_bytes`."""
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
