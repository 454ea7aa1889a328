"""An object store as the agent needs it: whole objects, streamed in and out, typed errors. Synchronous; callers use threads.

Invariant: `put_*` returns only when the object is complete and visible under its key; a put that fails leaves what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everstep.protocol.plan import ObjectReference

Piece = bytes | bytearray | memoryview


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

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes.

        Args:
            target: uint8, as long as is wanted.

        Raises:
            CorruptCheckpoint: the object ends before `target` is full.
            StoreUnavailable: the line broke.
        """


class ObjectStore(Protocol):
    """One suite of tests holds every implementation to this: `tests/contract/test_object_store.py`. Safe for use from many threads."""

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
        """Store what `pieces` yield, holding a part of it in memory at a time. What `pieces` raises ends the put and is passed on.

        Args:
            reference: where.
            pieces: each is used up before the next is asked for.
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
