"""An object store as the agent needs it: whole objects, streamed in and out, typed errors.

Synchronous; callers use threads.

Invariant: `put_*` returns only when the object is complete and visible under its key; a put that fails leaves what was
there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everstep.protocol.plan import ObjectReference

Piece = bytes | bytearray | memoryview
Span = tuple[int, int]
"""Begin and end."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What the store says of one object."""

    reference: ObjectReference
    bytes: int
    etag: str
    """Without quotes; opaque."""


class ObjectReader(Protocol):
    """One object, read once from its beginning."""

    bytes: int
    """Length of the whole object."""
    md5: str
    """Of the whole object, in hex, where the store tells it; else empty."""

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        """Fill `target` with the next bytes; after an error what it holds is undefined, and nothing more can be read.

        Args:
            target: uint8.
            spans: of `target` that are filled, one after the other; None: all of it.

        Raises:
            CorruptCheckpoint: the object ends before they are full.
            ObjectChanged: another object has taken its place: never are parts of two mixed.
            ObjectMissing: it has been deleted.
            StoreUnavailable: the line broke.
        """


class ObjectStore(Protocol):
    """One suite of tests holds every implementation to this: `tests/contract/test_object_store.py`.

    Safe for use from many threads.
    """

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """Store a small object.

        Args:
            reference: where.
            data: all of it.

        Returns:
            What is stored.

        Raises:
            StorageError: of the type that says what can be done about it.
        """

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """Store a file, which may grow meanwhile.

        Args:
            reference: where.
            path: an ordinary file.
            size: how many of its first bytes; None: all that it has now.

        Returns:
            What is stored.

        Raises:
            StorageError: of the type that says what can be done about it; StoreRefused if the file is shorter.
        """

    def put_stream(self, reference: ObjectReference, pieces: Iterable[Piece], size: int) -> StoredObject:
        """Store what `pieces` yield, from where it lies: nothing of it is copied.

        What fails first, `pieces` or a part, ends the put and is raised.

        Args:
            reference: where.
            pieces: asked from the calling thread, none after a part has failed; each stays as it is until the call
                returns.
            size: their bytes together.

        Returns:
            What is stored.

        Raises:
            StorageError: of the type that says what can be done about it; StoreRefused if they are not `size` bytes.
        """

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """Read a small object.

        Args:
            reference: which.

        Returns:
            All of it.

        Raises:
            ObjectMissing: there is none.
            StorageError: of the type that says what can be done about it.
        """

    def open(self, reference: ObjectReference, *, etag: str = "") -> AbstractContextManager[ObjectReader]:
        """Read an object of any size as a stream.

        Args:
            reference: which.
            etag: that it must have; empty: any.

        Returns:
            The stream; it is closed by leaving the context.

        Raises:
            ObjectMissing: there is none.
            ObjectChanged: it has another ETag.
            StorageError: of the type that says what can be done about it.
        """

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """Ask for an object without reading it.

        Args:
            reference: which.

        Returns:
            What is known of it, or None when there is none.

        Raises:
            StorageError: of the type that says what can be done about it.
        """

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with the prefix.

        Args:
            prefix: bucket and beginning of the keys.

        Returns:
            What is known of each, by key.

        Raises:
            StorageError: of the type that says what can be done about it.
        """


def cut(spans: Iterable[Span], limit: int, first: int = 0) -> Iterator[list[Span]]:
    """Cut spans into lists of `limit` bytes together; the last takes the rest. Pure.

    Args:
        spans: in bytes.
        limit: in bytes.
        first: what the first list has instead; 0: as the others.

    Yields:
        The lists, in order; none is empty.
    """
    taken: list[Span] = []
    room = first or limit
    for begin, end in spans:
        while begin < end:
            stop = min(end, begin + room)
            taken.append((begin, stop))
            room -= stop - begin
            begin = stop
            if not room:
                yield taken
                taken, room = [], limit
    if taken:
        yield taken
