"""Interface of an object store that stores and reads whole objects, in one piece or as a stream.

All methods block, so callers run them in threads. Errors are subtypes of `StorageError`.

Invariant: `put_*` returns only when the object is complete and visible under its key. A failed put leaves the previous
object unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everstep.bulk import Helpers, StoredPart
from everstep.protocol.plan import ObjectReference
from worker.errors import StoreUnavailable

Read = Callable[[int, int], Iterable["Piece"]]
"""Type of a function that returns the content of an object between two positions (begin, end) in bytes, in pieces."""
Piece = bytes | bytearray | memoryview
Span = tuple[int, int]
"""A range of bytes: (begin, end). The byte at `end` is not part of the range."""
OnStored = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The store's description of one object."""

    reference: ObjectReference
    bytes: int
    etag: str
    """ETag without quotes. Callers only compare ETags for equality."""
    sha256: str = field(default="", compare=False)
    """Hex SHA-256 of the concatenated SHA-256 digests of the parts. Set by puts; empty otherwise."""
    part_bytes: int = field(default=0, compare=False)
    """Size of the parts that `sha256` covers; the last part may be smaller. Set by puts; 0 otherwise."""
    crc: int | None = field(default=None, compare=False)
    """CRC64NVME of the object, as the store recorded it at the upload. Set by `head`; None if the store has none."""


class UploadShare(Helpers, Protocol):
    """Divides the parts of one upload between this node and the helper nodes, which hold the shard too."""

    def begin(self, upload_id: str, part_bytes: int, part_count: int) -> None:
        """Announce the upload to the helper nodes, so that they can send parts. Called once, before the first `claim`.

        Args:
            upload_id: the store's id of the upload.
            part_bytes: size of all parts but the last.
            part_count: number of parts; parts are numbered from 1.
        """

    def end(self) -> None:
        """End the work of all helper nodes. Blocks until the caller's connections to these nodes are closed.

        Called once after `begin`, also after an error, before the upload is completed or aborted.
        """


class ObjectReader(Protocol):
    """Reads the bytes of one object once, in order."""

    bytes: int
    """Length of the whole object."""
    md5: str
    """MD5 of the whole object in hex; empty if the store does not provide it."""

    @property
    def ready_bytes(self) -> int:
        """Number of bytes that the next reads return without another request to the store.

        These bytes are the unread rest of the first response.
        """

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        """Fill `target` with the next bytes of the object.

        After an error, the content of `target` is undefined and the reader is unusable.

        Args:
            target: writable bytes.
            spans: ranges of `target` to fill, one after another; None for the whole `target`.

        Raises:
            CorruptCheckpoint: the object ends before the ranges are full.
            ObjectChanged: the object was replaced during the read. The reader never mixes bytes of two objects.
            ObjectMissing: the object was deleted.
            StoreUnavailable: the connection broke.
        """


class ObjectStore(Protocol):
    """Interface of an object store. Thread-safe.

    `tests/contract/test_object_store.py` tests every implementation.
    """

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """Store a small object.

        Args:
            reference: bucket and key; an existing object is replaced.
            data: the whole content, held in memory.

        Returns:
            Description of the stored object.

        Raises:
            StorageError: the subtype shows whether to retry.
        """

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """Store a file, which may grow during the call.

        Args:
            reference: bucket and key; an existing object is replaced.
            path: a regular file.
            size: number of bytes to store, from the file's beginning; None for the file's size at the call.

        Returns:
            Description of the stored object.

        Raises:
            StorageError: the subtype shows whether to retry; StoreRefused if the file is shorter than `size`.
        """

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        """Store the bytes of `pieces` without copying them.

        The call stops at the first error of `pieces` or of a part's upload, and raises this error.

        Args:
            reference: bucket and key; an existing object is replaced.
            pieces: iterated in the calling thread until the first error; a piece must not change until the call
                returns.
            size: total bytes of the pieces.
            on_stored: called in any thread with the size in bytes of each part that S3 has stored.

        Returns:
            Description of the stored object.

        Raises:
            StorageError: the subtype shows whether to retry; StoreRefused if the pieces do not have `size` bytes.
        """

    def put_shared(
        self,
        reference: ObjectReference,
        pieces: Iterable[Piece],
        size: int,
        *,
        read: Read,
        share: UploadShare,
        on_stored: OnStored = lambda _: None,
    ) -> StoredObject:
        """Store an object together with helpers: other nodes, which send some of its parts with `put_part`.

        An object of one part is stored without helpers; `share` is then not called.

        Args:
            reference: bucket and key; an existing object is replaced.
            pieces: content of the object, in order; a piece must not change until the call returns.
            size: total bytes of the pieces.
            read: returns the pieces of a part that no helper has stored.
            share: assigns the parts to the caller and to its helpers.
            on_stored: called with the bytes of each part that the caller has stored, in any thread.

        Returns:
            Description of the stored object.

        Raises:
            StorageError: as in `put_stream`.
        """

    def put_part(
        self,
        reference: ObjectReference,
        upload_id: str,
        number: int,
        pieces: Iterable[Piece],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredPart:
        """Store one part of an upload that another process began. A node that helps another node's upload calls this.

        Args:
            reference: bucket and key of the upload.
            upload_id: the store's id of the upload.
            number: number of the part, from 1.
            pieces: content of the part; a piece must not change until the call returns.
            is_cancelled: returns True when the pieces must no longer be read; the call then fails soon.

        Returns:
            The stored part.

        Raises:
            StorageError: the subtype shows whether to retry. The upload does not exist, or the request failed.
        """

    def abort_uploads(self, prefix: ObjectReference, is_abandoned: Callable[[str], bool]) -> int:
        """Abort unfinished uploads and remove their parts. Idempotent.

        Args:
            prefix: bucket and beginning of the keys.
            is_abandoned: returns True for the key of an upload that no process continues.

        Returns:
            Number of aborted uploads.

        Raises:
            StorageError: the subtype shows whether to retry.
        """

    def answers(self, reference: ObjectReference) -> bool:
        """Return whether the store can be read now. One attempt of a few seconds.

        Args:
            reference: an object from which the method reads one byte. A missing object is an answer.

        Returns:
            False if the store is out of reach.
        """

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """Return the content of a small object.

        Raises ObjectMissing if the object does not exist, and another StorageError if the request fails. The subtype
        shows whether to retry.
        """

    def open(self, reference: ObjectReference, *, etag: str = "") -> AbstractContextManager[ObjectReader]:
        """Open an object of any size for reading.

        Args:
            reference: bucket and key of an existing object.
            etag: required ETag; empty for any ETag.

        Returns:
            A context manager with the reader. Leaving the context closes the reader.

        Raises:
            ObjectMissing: the object does not exist.
            ObjectChanged: the object has another ETag.
            StorageError: the subtype shows whether to retry.
        """

    def read_range(
        self,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read consecutive bytes of an object with one request.

        The object may be replaced between two calls, so the caller must verify the bytes.

        Args:
            reference: bucket and key of an existing object.
            begin: position of the first byte in the object.
            target: writable bytes. After an error or a cancellation, its content is undefined.
            spans: ranges of `target` to fill, one after another; at least one byte.
            is_cancelled: returns True when the read must end early.

        Raises:
            CorruptCheckpoint: the object ends before the ranges are full.
            ObjectMissing: the object does not exist.
            StorageError: the subtype shows whether to retry.
        """

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """Return the description of an object without reading it.

        The result is None if the object does not exist. Raises StorageError if the request fails. The subtype shows
        whether to retry.
        """

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with the prefix.

        Args:
            prefix: bucket and beginning of the keys.

        Returns:
            Descriptions in order of keys.

        Raises:
            StorageError: the subtype shows whether to retry.
        """


def require_missing(store: ObjectStore, where: ObjectReference) -> None:
    """Check that an object of a run is missing, after a read of it raised `ObjectMissing`. Blocks.

    A status 404 alone does not prove this: the answer may come from another store. The store must also list another
    object of the run, and not the missing one.

    Args:
        store: the store that answered the read.
        where: the missing object, below a folder `run=…`.

    Raises:
        StoreUnavailable: the lists do not prove it.
    """
    folder = ObjectReference(bucket=where.bucket, key=where.key[: where.key.rfind("/run=") + 1])
    is_listed = any(each.reference.key == where.key for each in store.list(where))
    if is_listed or next(iter(store.list(folder)), None) is None:
        raise StoreUnavailable(f"s3://{where.bucket}/{where.key}: the store answers that it is missing without proof")


def cut(spans: Iterable[Span], limit: int, first: int = 0) -> Iterator[list[Span]]:
    """Split ranges into lists that contain `limit` bytes each; the last list may contain fewer. No I/O.

    Args:
        spans: ranges of bytes; empty ranges are skipped.
        limit: bytes per list.
        first: bytes in the first list; 0 for `limit` bytes.

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
