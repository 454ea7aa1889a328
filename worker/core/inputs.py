"""What of a prefix lies where below a channel's directory, and what a node's cache lets go to make room. Pure.

Invariant: no file of a channel lies outside of its directory, no two lie at one place, and nothing that a run uses is
let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_NAME_BYTES = 255
"""Of one part of a path, on Linux."""


class Misplaced(Exception):
    """An object's key is no place for a file; the text says why."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One file of the cache."""

    name: str
    bytes: int
    used_at: float
    """Unix seconds; the least go first."""
    is_linked: bool
    """A run's directory has it."""


@dataclass(frozen=True, slots=True)
class Room:
    """How the wanted files get their place."""

    dropped: tuple[str, ...]
    """Names of held files, those that were not used for longest first."""
    lacking_bytes: int
    """What is still too much when all of these are gone; 0: it fits."""


def place_of(key: str, prefix: str) -> PurePosixPath | None:
    """Return where an object lies below its channel's directory.

    Args:
        key: of the object; begins with `prefix`.
        prefix: ends with a slash, or is empty.

    Returns:
        Its path; None for the empty object that consoles make for a folder.

    Raises:
        Misplaced: the key leads out of the directory, or is no name of a file.
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
    """Refuse a set of files of which one would have to be a file and a folder.

    Args:
        places: of all files of a channel.

    Raises:
        Misplaced: names the file.
    """
    files = set(places)
    for place in places:
        for parent in place.parents:
            if parent in files:
                raise Misplaced(f"{str(parent)!r} would be a file, and the folder of {str(place)!r}")


def make_room(held: Sequence[HeldFile], wanted: Mapping[str, int], limit_bytes: int) -> Room:
    """Return what is to be let go so that all wanted files fit.

    Args:
        held: all files of the cache.
        wanted: bytes by name, held or not.
        limit_bytes: what the cache may have in all.

    Returns:
        What goes; nothing of it is wanted or linked.
    """
    there = {file.name for file in held}
    total = sum(file.bytes for file in held) + sum(size for name, size in wanted.items() if name not in there)
    dropped = []
    for file in sorted(held, key=lambda file: (file.used_at, file.name)):
        if total <= limit_bytes:
            break
        if file.is_linked or file.name in wanted:
            continue
        dropped.append(file.name)
        total -= file.bytes
    return Room(tuple(dropped), max(0, total - limit_bytes))
